"""Inspection: check, statistics, parity, and the viewer."""
