"""Exact token counts without decoding media: the counting pass, its sidecar files and its engines."""
