"""Exceptions, and :func:`data_errors`, which decides what an error of the data does.

::

    Exception
    └── PackhorseError                 everything that Packhorse raises on purpose
        ├── ConfigError (ValueError)   a setting, argument or file is wrong: setting, value, path
        ├── MissingDependency (ImportError)  an optional package is not installed
        ├── SystemFault                the machine failed: no memory, disk, file handles; a dead rank
        ├── BadSample (ValueError)     one sample cannot be used: key, reason, stage, detail
        │   └── EmptyPack              no sample of a pack can be used: failures
        ├── ReplacementsFailed (RuntimeError)  a dataset wrapper gives up: failures, last
        ├── TooManyBad                 the bad-sample budget of a loader is exceeded: setting, bad, reasons
        ├── CannotAlign                answers cannot be found in the rendered text
        └── EngineError                a process pool failed
            ├── WorkerDied             a worker process died repeatedly: position, deaths, exit_reason
            └── ResultTimeout          a worker process does not answer: position
    BaseException
    └── SampleTimeout                  stops one sample; becomes a BadSample

Messages hold no secrets of addresses.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import islice
from types import ModuleType
from typing import Any, NoReturn

from packhorse.types import Action, Drop, Reason, Stage, mask_secrets


class PackhorseError(Exception):
    """Base class of every error that Packhorse raises on purpose."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(mask_secrets(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(PackhorseError, ValueError):
    """A setting, an argument or a file is wrong; no sample is at fault.

    Attributes:
        setting: the setting, argument, column or meta key that is wrong; empty if none is.
        value: what it was.
        path: the file or folder that is wrong, as it was given; empty if none is.
    """

    def __init__(
        self, message: str, *, setting: str = "", value: Any = None, path: str | os.PathLike[str] = ""
    ) -> None:
        super().__init__(message)
        self.setting, self.value, self.path = setting, value, mask_secrets(os.fspath(path))

    @classmethod
    def of(cls, setting: str, value: Any, expected: str) -> ConfigError:
        """Return the error for a value that a setting cannot have.

        >>> ConfigError.of("num_workers", -1, "expected at least 0")
        ConfigError('num_workers=-1: expected at least 0')
        """
        return cls(f"{setting}={value!r}: {expected}", setting=setting, value=value)


class MissingDependency(PackhorseError, ImportError):
    """An optional package is not installed; the message has the command that installs it."""


class SystemFault(PackhorseError):
    """The machine failed, not a sample: no file handles, memory or disk left, an I/O error. Stops the run."""


class BadSample(PackhorseError, ValueError):
    """One sample cannot be used. The caller's policy drops it, replaces it or raises.

    Args:
        detail: what was found and what was expected.
        reason: the word under which the ledger counts it.
        key: the row's key (``coco/812``); empty if unknown.
        stage: the stage that noticed.

    Attributes:
        original: the error of a dataset or processor that this one was made from, or itself.
    """

    def __init__(
        self, detail: str, *, reason: Reason = "sample_failed", key: str = "", stage: Stage = "read"
    ) -> None:
        detail = mask_secrets(detail)
        super().__init__(f"{key}: {detail}" if key else detail)
        self.detail, self.reason, self.key, self.stage = detail, reason, key, stage
        self._original: BaseException | None = None

    @classmethod
    def of(
        cls, error: BaseException, *, reason: Reason = "sample_failed", key: str = "", stage: Stage = "read"
    ) -> BadSample:
        """Return ``error`` as a bad sample: itself if it is one, else with these fields."""
        if isinstance(error, BadSample):
            return error
        bad = cls(f"{type(error).__name__}: {error}", reason=reason, key=key, stage=stage)
        bad._original = bad.__cause__ = error
        return bad

    @property
    def original(self) -> BaseException:
        """The error that :meth:`of` was given, or itself."""
        return self if self._original is None else self._original

    def with_key(self, key: str) -> BadSample:
        """Return the same error about the sample with this key."""
        bad = BadSample(self.detail, reason=self.reason, key=key, stage=self.stage)
        bad.__cause__ = self
        return bad

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_bad_sample, (self.detail, self.reason, self.key, self.stage)

    def as_drop(self, *, key: str = "", dataset: str = "", action: Action = "dropped") -> Drop:
        """Return the ledger entry for this error."""
        return Drop(self.key or key, self.stage, self.reason, self.detail, action, dataset)


class ReplacementsFailed(PackhorseError, RuntimeError):
    """Raised by dataset wrappers when no replacement can be used, or too many consecutive ones are skipped.

    Attributes:
        failures: samples or batches that failed.
        last: the last error.
    """

    def __init__(self, message: str, failures: int = 0, last: BadSample | None = None) -> None:
        super().__init__(message)
        self.failures, self.last = failures, last
        self.__cause__ = None if last is None else last.original


def _rebuild_bad_sample(detail: str, reason: Reason, key: str, stage: Stage) -> BadSample:
    return BadSample(detail, reason=reason, key=key, stage=stage)


FULL_DISK = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "the file size limit is reached",
}
"""Messages for the error numbers of a full disk."""


def write_fault(error: OSError, path: str | os.PathLike[str], remedy: str) -> SystemFault:
    """Return the error for a file that cannot be written: its path, why, and what to do."""
    reason = FULL_DISK.get(error.errno or 0, error.strerror or str(error))
    return SystemFault(f"{path} cannot be written: {reason}. {remedy}")


# Errors of the machine, not of one file: every other sample would fail too, so dropping samples would lose
# good data. Network errors are not in the list: a dead link is a property of its row.
_MACHINE_FAULTS = {
    errno.EMFILE: "close files, use fewer workers, or raise the limit (ulimit -n)",
    errno.ENFILE: "close files on this machine, or raise its limit (fs.file-max)",
    errno.ENOMEM: "free memory, or use fewer workers",
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "free disk space, or raise the quota",
    errno.EIO: "check the disk or the mount",
    errno.ESTALE: "remount the file system",
    errno.ENOTCONN: "remount the file system",
}


def machine_fault(error: BaseException, detail: str) -> SystemFault | None:
    """Return the error to raise if ``error`` is a fault of the machine (no file handles, a failing disk).

    Not for FFmpeg's errors: its "I/O error" and "out of memory" mostly mean damaged data.
    """
    advice = _MACHINE_FAULTS.get(error.errno or 0) if isinstance(error, OSError) else None
    if advice is None or type(error).__module__ == "av.error":
        return None
    return SystemFault(f"{detail}: the machine is at fault, not the sample; {advice}")


def plain_error(error: BaseException) -> str:
    """Return the message of an error, for system errors without the number: ``data.jsonl: no such file``."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}"
    return str(error)


def suggest(name: object, choices: Iterable[str], other_names: Mapping[str, str] | None = None) -> str:
    """Return `` (did you mean 'x'?)``, or an empty string if nothing is similar.

    >>> suggest("flash", ["sdpa", "flash_attention_2"])
    " (did you mean 'flash_attention_2'?)"

    Args:
        name: what was given.
        choices: what is known.
        other_names: other names of some choices.
    """
    text, others = str(name).lower(), other_names or {}
    known = {choice.lower(): choice for choice in (*others, *choices)}
    longer = [choice for choice in known if len(text) > 2 and choice.startswith(text)]
    close = get_close_matches(text, known, 1) or longer[:1]
    if not close:
        return ""
    choice = known[close[0]]
    return f" (did you mean {others.get(choice, choice)!r}?)"


def list_some(values: Iterable[object], most: int, separator: str = ", ") -> str:
    """Return the first values for a message, with ``…`` if there are more than ``most``.

    >>> list_some([3, 5, 8], 2)
    '3, 5, …'
    """
    texts = [str(value) for value in islice(values, most + 1)]
    return separator.join([*texts[:most], "…"] if len(texts) > most else texts)


# What a broken sample makes a dataset, a decoder or a processor raise. Everything else (NameError, TypeError,
# AttributeError, ImportError, …) is a mistake in a program: no other sample would do better.
DATA_ERRORS = (OSError, ValueError, LookupError, EOFError, RuntimeError)
_NOT_DATA_ERRORS = (NotImplementedError, RecursionError, ConfigError)


def is_data_error(error: BaseException) -> bool:
    """Return whether ``error`` can be the fault of one sample, so that another sample may be tried."""
    return isinstance(error, DATA_ERRORS) and not isinstance(error, _NOT_DATA_ERRORS)


@dataclass(slots=True)
class data_errors:  # named like contextlib.suppress
    """Context manager that ends its block at an error of the data; every other error is raised.

    A fault of the machine (no file handles, a failing disk) is raised as :class:`SystemFault`.

    >>> with data_errors("drop", lambda bad: print(bad.reason)) as outcome:
    ...     raise OSError("no such file")
    sample_failed
    >>> outcome.error
    BadSample('OSError: no such file')

    Attributes:
        policy: ``"raise"`` raises errors of the data too; after any other value (``"drop"``, ``"replace"``)
            the caller looks at ``error``.
        record: called with the error, for example to write a ledger entry.
        reason: of an error that is no :class:`BadSample`, like ``key`` and ``stage``.
        error: why the block failed; None if it did not.
    """

    policy: str = "drop"
    record: Callable[[BadSample], object] | None = None
    reason: Reason = field(default="sample_failed", kw_only=True)
    key: str = field(default="", kw_only=True)
    stage: Stage = field(default="read", kw_only=True)
    error: BadSample | None = field(default=None, init=False)

    def __enter__(self) -> data_errors:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is None or self.policy == "raise" or not is_data_error(error):
            return False
        name = f"{self.key}: " if self.key else ""
        if (fault := machine_fault(error, f"{name}{plain_error(error)}")) is not None:
            raise fault from error
        self.error = BadSample.of(error, reason=self.reason, key=self.key, stage=self.stage)
        if self.record is not None:
            self.record(self.error)
        return True


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Put the name of a row or dataset in front of the messages of configuration errors in the block."""
    try:
        yield
    except (ConfigError, MissingDependency) as error:
        raise_with_name(error, name)


def raise_with_name(error: ConfigError | MissingDependency, name: str) -> NoReturn:
    """Raise ``error`` with ``name: `` in front of its message, unless the message starts with it."""
    if not name or str(error).startswith(f"{name}: "):
        raise error
    named = type(error)(f"{name}: {error}")
    named.__dict__.update(error.__dict__)
    raise named from error


def limit_of(name: str, usual: int) -> int:
    """Return the environment variable ``name`` as a positive integer, or ``usual`` if it is not set."""
    text = os.environ.get(name)
    if text is None:
        return usual
    if not text.isdecimal() or len(text) > 18 or int(text) < 1:
        raise ConfigError.of(name, text, "expected an integer above 0")
    return int(text)


def require(module: str, extra: str) -> ModuleType:
    """Import an optional package.

    Raises:
        MissingDependency: it is not installed; the message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        name = (error.name or module).partition(".")[0]
        raise MissingDependency(f"this needs the package '{name}': {install_line(extra)}") from error


def install_line(extra: str) -> str:
    """Return the command that installs an extra; Packhorse is installed from a clone, it is on no index."""
    return f"pip install -e '.[{extra}]' (in the clone of Packhorse)"
