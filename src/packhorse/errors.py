"""What can go wrong. An error says what was found, what was expected and what to do."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from packhorse.types import Action, Drop, Reason, Stage, mask_secrets


class PackhorseError(Exception):
    """Every error that Packhorse raises on purpose. Its message holds no secrets of addresses."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(mask_secrets(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(PackhorseError, ValueError):
    """The caller asked for something that cannot be done; no sample is at fault."""


class MissingDependency(PackhorseError, ImportError):
    """An optional package is not installed; the message holds the line that installs it."""


class SystemFault(PackhorseError):
    """The machine failed, not a sample: no file handles, memory or disk left, an I/O error. Stops the run."""


class BadSample(PackhorseError, ValueError):
    """One sample cannot be used. A policy above decides whether it is dropped, replaced, or fatal.

    Args:
        detail: what was found and what was expected.
        reason: the word under which the ledger counts it.
        key: the row's key (``coco/812``), empty where the raiser does not know it.
        stage: the stage that noticed.
    """

    def __init__(
        self, detail: str, *, reason: Reason = "sample_failed", key: str = "", stage: Stage = "read"
    ) -> None:
        detail = mask_secrets(detail)
        super().__init__(f"{key}: {detail}" if key else detail)
        self.detail, self.reason, self.key, self.stage = detail, reason, key, stage

    def __reduce__(self) -> tuple[Any, ...]:
        # Keyword arguments need telling. (A DataLoader passes on no more than the text of an error.)
        return _rebuild_bad_sample, (self.detail, self.reason, self.key, self.stage)

    def as_drop(self, *, key: str = "", dataset: str = "", action: Action = "dropped") -> Drop:
        """The ledger entry for this error."""
        return Drop(self.key or key, self.stage, self.reason, self.detail, action, dataset)


def _rebuild_bad_sample(detail: str, reason: Reason, key: str, stage: Stage) -> BadSample:
    return BadSample(detail, reason=reason, key=key, stage=stage)


FULL_DISK = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "a file may not grow so large",
}
"""What the system's numbers for want of room mean."""


def plain_error(error: Exception) -> str:
    """An error for people: one of the system without its number, as ``data.jsonl: no such file``."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}"
    return str(error)


# What a broken sample makes a dataset, a decoder or a processor raise. Everything else (NameError, TypeError,
# AttributeError, ImportError, …) is a mistake in a program: no other sample would do better.
DATA_ERRORS = (OSError, ValueError, LookupError, EOFError, RuntimeError)
_NOT_DATA_ERRORS = (NotImplementedError, RecursionError, ConfigError)


def is_data_error(error: BaseException) -> bool:
    """Whether ``error`` can be the fault of one sample, so that another sample may be tried instead."""
    return isinstance(error, DATA_ERRORS) and not isinstance(error, _NOT_DATA_ERRORS)


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Put the name of a row or dataset in front of errors that are not its fault but show with it.

    A driver that is missing, or its credentials, stop the run: the name says what needs them.
    """
    try:
        yield
    except (ConfigError, MissingDependency) as error:
        if not what or str(error).startswith(f"{what}: "):
            raise
        raise type(error)(f"{what}: {error}") from error


def limit_of(name: str, usual: int) -> int:
    """A limit that the environment variable ``name`` may change.

    Raises:
        ConfigError: the variable holds no whole number above 0.
    """
    text = os.environ.get(name)
    if text is None:
        return usual
    if not text.isdecimal() or len(text) > 18 or int(text) < 1:
        raise ConfigError(f"{name}={text!r}: expected a whole number above 0")
    return int(text)


def require(module: str, extra: str) -> ModuleType:
    """Import an optional package, or say which line installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"this needs the package '{(error.name or module).partition('.')[0]}': pip install "
            f"'packhorse[{extra}]'"
        ) from error
