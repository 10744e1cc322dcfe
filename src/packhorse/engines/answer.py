"""How one task is answered, in whatever process it runs: a message goes back with the result or the error."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any

from packhorse.engines.base import EngineError, named_task

READY, RESULT, FAILED, UNSENDABLE_WORK = range(4)
"""What a message, a pickled (kind, position of the task, content, traceback), is about."""

PICKLE_ERRORS = (pickle.PicklingError, AttributeError, TypeError)
"""What pickling raises for something that cannot be pickled."""


class RemoteTraceback(Exception):
    """The cause of an error that was raised in another process: where it was raised there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def use_one_thread() -> None:
    """Keep the libraries of this process from starting a thread per core each: the processes are enough."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["OMP_NUM_THREADS"] = "1"  # read by torch where it is not imported yet
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def answer(work: Callable[[Any], Any], position: int, task: Any) -> bytes:
    """Do one task; the message with its result, or with what went wrong."""
    try:
        result = work(task)
    except BaseException as error:  # noqa: BLE001 (what the work raises belongs to the caller)
        return failure(position, error)
    try:
        return message(RESULT, position, result)
    except PICKLE_ERRORS as error:
        problem = f"the result of {named_task(position, task)} cannot be sent back ({error})"
        return failure(position, EngineError(problem))


def failure(position: int, error: BaseException) -> bytes:
    """The message that ``error`` was raised; as an EngineError with its text where it cannot be pickled."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return message(FAILED, position, _sendable(error), text)


def message(kind: int, position: int, content: Any, text: str = "") -> bytes:
    """One message, pickled."""
    return pickle.dumps((kind, position, content, text), pickle.HIGHEST_PROTOCOL)


def understood(received: bytes) -> tuple[int, int, Any]:
    """(kind, position, content) of a message; raises the error that one of the kind FAILED carries."""
    kind, position, content, text = pickle.loads(received)  # noqa: S301 (a process of ours wrote it)
    if kind == FAILED:
        raise content from RemoteTraceback(text)
    if kind == UNSENDABLE_WORK:
        raise unsendable(content) from RemoteTraceback(text)
    return kind, position, content


def unsendable(error: object) -> EngineError:
    """The error that the work does not reach another process."""
    return EngineError(
        f"the work cannot be sent to another process ({error}): expected something that can be pickled, a "
        "function or an object of a class at the top of an importable module. The local engine with one "
        "worker needs no other process"
    )


def unsendable_task(position: int, task: object, error: object) -> EngineError:
    """The error that a task does not reach another process."""
    return EngineError(
        f"{named_task(position, task)} cannot be sent to another process ({error}): expected something that "
        "can be pickled"
    )


def _sendable(error: BaseException) -> BaseException:
    try:
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    except BaseException:  # noqa: BLE001 (an exception class may do anything when it is rebuilt)
        copy = None
    return error if type(copy) is type(error) else EngineError(f"{type(error).__name__}: {error}")
