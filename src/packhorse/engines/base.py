"""What an engine is: a function and tasks go in, (position, result) pairs come out as they get ready."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from packhorse.errors import PackhorseError

T = TypeVar("T")
R = TypeVar("R")

MAX_RETRIES = 3
"""How often a task is tried again after the process or the node that ran it died."""

_LONGEST_NAME = 200


class EngineError(PackhorseError):
    """The engine could not run the work: it cannot be sent to other processes, or these keep dying."""


class Engine(Protocol):
    """Where a pass over many independent tasks runs."""

    def run(self, work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[int, R]]:
        """Do ``work(task)`` for each task; give (position, result) as they get ready, in any order.

        ``work``, the tasks and the results are pickled. A task may be done more than once, so it must not
        matter if it is: one whose process or node dies is tried again, up to three times.

        Nothing is started before the first pair is asked for, and what was started ends with the iterator.

        Raises:
            EngineError: a task's process died each time, or ``work`` cannot be sent to another process.
            Exception: whatever ``work`` raises, at once and with its own type; the other tasks are given up.
        """
        ...


def named_task(position: int, task: Any) -> str:
    """A task for messages, cut where it is long.

    >>> named_task(4, ("rows.jsonl", 0, 1000))
    "task 4 ('rows.jsonl', 0, 1000)"
    """
    text = repr(task)
    short = text if len(text) <= _LONGEST_NAME else f"{text[:_LONGEST_NAME]}…"
    return f"task {position} {short}" if isinstance(task, tuple) else f"task {position} ({short})"
