"""``packhorse bench``: run the scripts of ``benchmarks/``, judge them, and make the page on them."""

from packhorse.cli.bench.command import EXAMPLES, bench

__all__ = ["EXAMPLES", "bench"]
