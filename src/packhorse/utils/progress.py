"""Progress of long work in the log: a line every few seconds, nothing for work that is done before."""

from __future__ import annotations

import os
import sys
import time
from logging import getLogger

logger = getLogger("packhorse.datasets")


def bars_are_wanted() -> bool:
    """Whether somebody looks: stderr is a terminal, and this is no CI run (the variable ``CI`` says so)."""
    return sys.stderr.isatty() and os.environ.get("CI", "").lower() in ("", "0", "false")


class Progress:
    """Call it with how much is done; it speaks up every ``every`` seconds.

    Args:
        what: the work, as a sentence's beginning: ``"indexing train.jsonl"``.
        total: how much there is to do.
    """

    def __init__(self, what: str, total: int, every: float = 5.0) -> None:
        self.what, self.total, self.every = what, total, every
        self.started = time.monotonic()
        self.next = self.started + every

    def __call__(self, done: int) -> None:
        """Say how far the work is, if it is time to."""
        now = time.monotonic()
        if now < self.next or not done:
            return
        self.next = now + self.every
        left = (now - self.started) * (self.total - done) / done
        logger.info("%s: %.0f %%, about %.0f s left", self.what, 100 * done / self.total, left)
