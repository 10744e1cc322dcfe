"""``packhorse bench``: run the scripts of ``benchmarks/``, judge them, and make the page on them."""

from packhorse.cli.bench.command import EXAMPLES, BenchCommand, bench

__all__ = ["EXAMPLES", "BenchCommand", "bench"]
