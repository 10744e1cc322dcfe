"""Conversations to samples: encoding datasets, and what happens to samples that fail."""
