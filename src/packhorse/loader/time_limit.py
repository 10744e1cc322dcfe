"""Giving up on a sample that takes too long: a read that hangs, a decoder that never ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from logging import getLogger
from typing import Any

logger = getLogger("packhorse.loader")


class SampleTimeout(BaseException):
    """Raised in the middle of loading a sample; no ordinary handler may take it for something else."""


@cache
def _warn_of_no_limit(why: str) -> None:
    logger.warning("sample_timeout has no effect: %s", why)


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise :class:`SampleTimeout` in this thread if the block takes longer.

    Goes by an alarm of the operating system, which only a main thread can have (a worker of a DataLoader does
    its work there); elsewhere, and where somebody else uses the alarm, nothing is limited.
    """
    if seconds is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        _warn_of_no_limit("samples are built outside the main thread")
        yield
        return
    previous = signal.getsignal(signal.SIGALRM)
    if previous not in (signal.SIG_DFL, signal.SIG_IGN):
        _warn_of_no_limit("the program has a handler of its own for SIGALRM")
        yield
        return

    def stop(*_: Any) -> None:
        raise SampleTimeout(f"not ready after {seconds:g} s (sample_timeout)")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:  # even where the alarm goes off this very moment
            signal.signal(signal.SIGALRM, previous)
