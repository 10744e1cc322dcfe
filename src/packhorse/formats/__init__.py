"""Rows to conversations: chat formats, meta files, recipes for datasets of the Hub."""
