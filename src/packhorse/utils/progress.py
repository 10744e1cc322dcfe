"""Progress of long work: a bar on a terminal, otherwise a log line every few seconds."""

from __future__ import annotations

import os
import sys
import time
from logging import getLogger
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

logger = getLogger("packhorse.datasets")


class OnProgress(Protocol):
    """Callback of long work, as :class:`Progress` is one."""

    def __call__(self, done: int, total: int) -> None:
        """Take note that ``done`` of ``total`` rows are finished."""
        ...


def bars_are_wanted() -> bool:
    """Return whether stderr is a terminal and this is no CI run (variable ``CI``)."""
    return sys.stderr.isatty() and os.environ.get("CI", "").lower() in ("", "0", "false")


class Progress:
    """Report how far long work is.

    As a context manager it draws a bar if stderr is a terminal. Otherwise it logs a line every ``interval``
    seconds, and nothing for work that ends before.

    Args:
        what: the work, as the beginning of a sentence: ``"indexing train.jsonl"``.
        total: how much there is to do; may also be given with each call.
        unit: what is counted.
        interval: seconds between two log lines.
    """

    def __init__(
        self, what: str, total: int | None = None, *, unit: str = "rows", interval: float = 5.0
    ) -> None:
        self.what, self.total, self.unit, self.interval = what, total, unit, interval
        self._bar: Bar | None = None
        self._started = time.monotonic()
        self._next_line = self._started + interval

    def __enter__(self) -> Progress:
        """Start the bar if there is a terminal to draw it on."""
        if bars_are_wanted():
            self._bar = _make_bar(self.what, self.unit)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the bar."""
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int | None = None) -> None:
        """Draw or log that ``done`` of ``total`` is finished."""
        total = self.total if total is None else total
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total, visible=True)
        elif not done:  # the work begins now: opening a processor, for example, took the time before
            self._started, self._next_line = now, now + self.interval
        elif now >= self._next_line and total:
            self._next_line = now + self.interval
            left = (now - self._started) * (total - done) / done
            logger.info("%s: %.0f %%, about %.0f s left", self.what, 100 * done / total, left)


def _make_bar(what: str, unit: str) -> Bar:
    """Return a bar on stderr that shows the rate and the remaining time."""
    from rich import progress
    from rich.console import Console
    from rich.text import Text

    class Rate(progress.ProgressColumn):
        def render(self, task: progress.Task) -> Text:
            rate = task.finished_speed or task.speed
            return Text("" if rate is None else f"{rate:,.0f} {unit}/s")

    columns = (
        progress.TextColumn(what),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn(unit),
        Rate(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
    )
    bar = progress.Progress(*columns, console=Console(stderr=True), speed_estimate_period=60)
    bar.add_task(what, total=None, visible=False)
    return bar
