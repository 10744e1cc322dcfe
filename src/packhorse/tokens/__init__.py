"""What a sample costs, before a pixel is decoded."""

from packhorse.tokens.stats import add_stats, collect_sample_stats

__all__ = ["add_stats", "collect_sample_stats"]
