"""Row files by index: JSONL, JSON and Parquet; local, compressed or remote."""
