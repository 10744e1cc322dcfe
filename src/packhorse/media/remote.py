"""Files at an address, through fsspec: opened and read with retries, and every failure has a name.

A driver raises what its HTTP library raises (aiohttp, httpx and botocore have no base class in common), and
TypeError for an address that lacks something. So this module, and no other, takes every exception of a driver
for a failure to reach the address.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TypeVar, cast

from packhorse.errors import ConfigError, MissingDependency
from packhorse.media.failure import RemoteError, bad, machine_fault
from packhorse.types import mask_secrets

T = TypeVar("T")

_WAITS = (0.1, 0.4)  # seconds before the second and the third try
_MAY_PASS = frozenset({408, 425, 429, 500, 502, 503, 504})
_NOT_THERE = frozenset({404, 410})
# What drivers raise for an address that makes no sense to them: when they are made, and when they
# open a file. Later, and of other kinds, these errors are about an answer that the driver cannot read.
_NO_STORE = (ValueError, TypeError, AttributeError, LookupError, NotImplementedError)
WRONG_PATH = (ValueError,)
_WRONG_ANSWER = (json.JSONDecodeError, UnicodeDecodeError)
_NO_ADDRESS = (TypeError, AttributeError, NotImplementedError)  # its text is about the driver's own code
_NO_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)

# Of the system's errors those that are about the way to a store; all others are about what lies there.
_NETWORK = frozenset(
    {
        *(errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.ETIMEDOUT, errno.EPIPE),
        *(errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.EHOSTUNREACH, errno.EHOSTDOWN),
        errno.EAGAIN,
    }
)

_AWS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
# Errors of botocore and google.auth for settings that are missing, and the settings.
_CREDENTIALS = {
    "NoCredentialsError": _AWS,
    "PartialCredentialsError": _AWS,
    "CredentialRetrievalError": _AWS,
    "ProfileNotFound": "AWS_PROFILE",
    "NoRegionError": "AWS_DEFAULT_REGION",
    "DefaultCredentialsError": "GOOGLE_APPLICATION_CREDENTIALS",
}

# A host that has failed for so many items in a row is no longer retried, until it answers: with thousands of
# rows the waits would add up to hours.
_MOST_FAILURES = 3
_failures: Counter[str] = Counter()

_PIECE = 1 << 20
_MOST_IN_MEMORY = 1 << 30


def ask(
    url: str,
    call: Callable[[], T],
    wrong_address: tuple[type[Exception], ...] = (),
    *,
    reaches_host: bool = True,
) -> T:
    """Call a driver for ``url``, again where a failure may pass.

    Args:
        url: an address of fsspec.
        call: what to do.
        wrong_address: errors which say that the address makes no sense, so that nothing is there.
        reaches_host: whether a success shows that the host answers.

    Raises:
        RemoteError: (an ``OSError``) the address cannot be reached, or nothing is there.
        OSError: the machine is at fault (no file handles, no memory).
        MissingDependency: the driver is not installed.
        ConfigError: the driver has no credentials.
    """
    host = _host(url)
    waits = () if _failures[host] >= _MOST_FAILURES else _WAITS
    for wait in (*waits, None):
        try:
            result = call()
        except (MemoryError, RecursionError):  # noqa: PERF203 - each try may fail for itself
            raise
        except Exception as error:  # noqa: BLE001  # see above: drivers have no base class in common
            failure = _translated(url, error, wrong_address)
            if wait is None or not isinstance(failure, RemoteError) or not failure.may_pass:
                _failures[host] += isinstance(failure, RemoteError) and failure.may_pass
                # Without the cause: what the driver says may hold the secrets of the address.
                raise failure from None
            time.sleep(wait)
        else:
            if reaches_host:
                _failures.pop(host, None)
            return result
    raise AssertionError  # the last try returns or raises


def open_address(url: str, block_size: int | None = None) -> tuple[BinaryIO, int]:
    """A file to read, and its size; raises as :func:`ask`.

    A file that its server only sends as a stream (no length, no ranges) is read into memory.

    Args:
        url: an address of fsspec.
        block_size: how much fsspec fetches at once, where the default (megabytes) is too much.

    Raises:
        BadSample: a stream is too long.
    """
    system, path = find_store(url)
    options = {} if block_size is None else {"block_size": block_size}

    def open_file() -> tuple[Any, int]:
        file = system.open(path, "rb", **options)
        try:
            size = file.seek(0, os.SEEK_END)
        except ValueError:  # io.UnsupportedOperation is one too
            with file:
                return _whole(file)
        file.seek(0)
        return file, size

    file, size = ask(url, open_file, WRONG_PATH)
    if size > _MOST_IN_MEMORY and isinstance(file, io.BytesIO):
        raise bad(
            f"{url}: its server sends it as a stream, which is read into memory, and it has more than "
            f"{_MOST_IN_MEMORY:,} bytes: copy it to a disk",
            "media_too_large",
        )
    return cast(BinaryIO, RemoteFile(url, file)), size


def find_store(url: str) -> tuple[Any, str]:
    """The driver of an address and the address as the driver wants it; raises as :func:`ask`."""
    import fsspec

    system, path = ask(url, lambda: fsspec.core.url_to_fs(url), _NO_STORE, reaches_host=False)
    return system, path


def _whole(stream: Any) -> tuple[io.BytesIO, int]:
    """All that a stream sends, or a little more than the limit."""
    data = io.BytesIO()
    while data.tell() <= _MOST_IN_MEMORY and (piece := stream.read(_PIECE)):
        data.write(piece)
    size = data.tell()
    data.seek(0)
    return data, size


def require_driver(url: str) -> None:
    """Raise :class:`MissingDependency` where a driver of the address is not installed; asks no store."""
    import fsspec

    for part in url.split("::"):
        try:
            fsspec.get_filesystem_class(part.partition("://")[0])
        except ImportError as error:  # noqa: PERF203 - a chain has two parts
            raise _translated(url, error, ()) from None
        except ValueError:
            pass  # no protocol of fsspec, or what a chain takes for its file: opening a file there says so


class RemoteFile(io.RawIOBase):
    """A driver's file whose failures are those of :func:`ask`."""

    def __init__(self, url: str, file: Any) -> None:
        self._url, self._file = url, file

    def read(self, size: int | None = -1) -> bytes:
        """As for any file; a failed read is repeated from the same position."""
        at = self._file.tell()

        def read() -> bytes:
            if self._file.tell() != at:
                self._file.seek(at)
            data: bytes = self._file.read(-1 if size is None else size)
            return data

        return ask(self._url, read)

    def readinto(self, buffer: Any) -> int:
        """As for any file."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As for any file."""
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        """As for any file."""
        return int(self._file.tell())

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True: :func:`open_address` has been to its end."""
        return True

    def close(self) -> None:
        """Close the driver's file too."""
        if not self.closed:
            self._file.close()
        super().close()


def _translated(url: str, error: Exception, wrong_address: tuple[type[Exception], ...]) -> Exception:
    """What a driver's error means; ``wrong_address`` as for :func:`ask`."""
    if isinstance(error, ImportError):
        return MissingDependency(f"{url} cannot be opened: {error}")
    if machine_fault(error, "") is not None:
        return error
    for one in _chain(error):
        if setting := _CREDENTIALS.get(type(one).__name__):
            return ConfigError(f"{url} cannot be opened: {_first_line(one)}. Set {setting}")
    cause = next((one for one in _chain(error) if not isinstance(one, FileNotFoundError)), error)
    status = _status(cause)
    if isinstance(cause, _NO_FILE) or status in _NOT_THERE:
        return RemoteError("", missing=True)
    why = _first_line(cause) if status is None else f"the server answers {status}"
    if isinstance(cause, PermissionError):
        return RemoteError(why)
    if status is None and _is_about_the_address(cause, wrong_address):
        if isinstance(cause, _NO_ADDRESS):
            why = f"{url.partition('://')[0]}:// needs more than an address"
        return RemoteError(why, missing=True)
    return RemoteError(why, may_pass=status is None or status in _MAY_PASS)


def _is_about_the_address(error: BaseException, wrong_address: tuple[type[Exception], ...]) -> bool:
    if isinstance(error, OSError):
        # Negative numbers are those of name resolution.
        return error.errno is not None and error.errno >= 0 and error.errno not in _NETWORK
    return isinstance(error, wrong_address) and not isinstance(error, _WRONG_ANSWER)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was raised from."""
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error names, wherever its library keeps it."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        owners = (error, response)
        names = ("status", "status_code")
        found = next((getattr(o, name) for o in owners for name in names if hasattr(o, name)), None)
    return found if isinstance(found, int) else None


def _first_line(error: BaseException) -> str:
    line = next(iter(str(error).splitlines()), "")[:200]
    return mask_secrets(f"{type(error).__name__}: {line}" if line else type(error).__name__)


def _host(url: str) -> str:
    scheme, _, rest = url.rpartition("::")[2].partition("://")
    return f"{scheme}://{re.split('[/?#]', rest, maxsplit=1)[0]}"  # urlsplit raises for some texts
