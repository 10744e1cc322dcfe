"""Samples or packs to batches, one module per attention format; ``raw_*`` take raw examples."""
