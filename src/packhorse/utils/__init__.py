"""Helpers that know nothing of the data: atomic files and locks, progress, a process pool."""
