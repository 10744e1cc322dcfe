"""Open and read files at an address with fsspec, with retries.

A driver raises the errors of its HTTP library (aiohttp, httpx and botocore have no common base class), and
TypeError for an incomplete address. So this module, and no other, treats every exception of a driver as a
failure to reach the address.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar, cast

from packhorse.errors import ConfigError, MissingDependency, machine_fault
from packhorse.media.failure import RemoteError, bad_media
from packhorse.types import mask_secrets

T = TypeVar("T")

_WAITS = (0.1, 0.4)  # seconds before the second and the third try
_MAY_PASS = frozenset({408, 425, 429, 500, 502, 503, 504})
_MISSING = frozenset({404, 410})
# What drivers raise for an invalid address, when they are created and when they open a file. Later these
# errors mean a response that the driver cannot parse.
_INVALID_STORE = (ValueError, TypeError, AttributeError, LookupError, NotImplementedError)
INVALID_PATH = (ValueError,)
_INVALID_RESPONSE = (json.JSONDecodeError, UnicodeDecodeError)
# With a message about the driver's code.
_INCOMPLETE_ADDRESS = (TypeError, AttributeError, NotImplementedError)
_NO_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)

# System errors of the connection to a store; all others are about the file.
_NETWORK = frozenset(
    {
        *(errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.ETIMEDOUT, errno.EPIPE),
        *(errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.EHOSTUNREACH, errno.EHOSTDOWN),
        errno.EAGAIN,
    }
)

_AWS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
# Errors of botocore and google.auth for missing settings, and the settings.
_CREDENTIALS = {
    "NoCredentialsError": _AWS,
    "PartialCredentialsError": _AWS,
    "CredentialRetrievalError": _AWS,
    "ProfileNotFound": "AWS_PROFILE",
    "NoRegionError": "AWS_DEFAULT_REGION",
    "DefaultCredentialsError": "GOOGLE_APPLICATION_CREDENTIALS",
}

# A host that has failed for this number of consecutive items is not retried until it answers: with thousands
# of rows the waits would take hours.
_MAX_FAILURES = 3
_failures: Counter[str] = Counter()

_CHUNK_BYTES = 1 << 20
_MAX_IN_MEMORY = 1 << 30


def call_store(
    url: str,
    call: Callable[[], T],
    invalid_address: tuple[type[Exception], ...] = (),
    *,
    reaches_host: bool = True,
) -> T:
    """Call a driver for ``url``; retry if the failure may pass.

    ``invalid_address`` are errors which mean that the address is invalid; ``reaches_host`` states whether a
    success shows that the host answers.

    Raises:
        RemoteError: (an ``OSError``) the address cannot be reached, or nothing is there.
        OSError: the machine is at fault (no file handles, no memory).
        MissingDependency: the driver is not installed.
        ConfigError: the driver has no credentials.
    """
    host = _host(url)
    waits = () if _failures[host] >= _MAX_FAILURES else _WAITS
    for wait in (*waits, None):
        try:
            result = call()
        except (MemoryError, RecursionError):  # noqa: PERF203 - each try may fail
            raise
        except Exception as error:  # noqa: BLE001  # drivers have no common base class
            failure = _convert_error(url, error, invalid_address)
            if wait is None or not isinstance(failure, RemoteError) or not failure.may_pass:
                _failures[host] += isinstance(failure, RemoteError) and failure.may_pass
                # Without the cause: the driver's message may contain the secrets of the address.
                raise failure from None
            time.sleep(wait)
        else:
            if reaches_host:
                _failures.pop(host, None)
            return result
    raise AssertionError  # the last try returns or raises


def open_address(url: str, block_size: int | None = None) -> tuple[BinaryIO, int]:
    """Return a file to read, and its size; raises like :func:`call_store`.

    A file that the server sends as a stream (no length, no ranges) is read into memory, up to a limit.
    ``block_size`` is how much fsspec fetches at once, if the default (megabytes) is too much.
    """
    system, path = find_store(url)
    options = {} if block_size is None else {"block_size": block_size}

    def open_file() -> tuple[Any, int]:
        file = system.open(path, "rb", **options)
        try:
            size = file.seek(0, os.SEEK_END)
        except ValueError:  # io.UnsupportedOperation is one too
            data = io.BytesIO()
            with file:
                while data.tell() <= _MAX_IN_MEMORY and (chunk := file.read(_CHUNK_BYTES)):
                    data.write(chunk)
            file, size = data, data.tell()
        file.seek(0)
        return file, size

    file, size = call_store(url, open_file, INVALID_PATH)
    if size > _MAX_IN_MEMORY and isinstance(file, io.BytesIO):
        raise bad_media(
            f"{url}: its server sends a stream, which is read into memory, of more than {_MAX_IN_MEMORY:,} "
            "bytes: copy the file to a disk",
            "media_too_large",
        )
    return cast(BinaryIO, RemoteFile(url, file)), size


def find_store(url: str) -> tuple[Any, str]:
    """Return the driver of an address and the path for the driver; raises like :func:`call_store`."""
    import fsspec

    system, path = call_store(url, lambda: fsspec.core.url_to_fs(url), _INVALID_STORE, reaches_host=False)
    return system, path


def require_driver(url: str) -> None:
    """Raise :class:`MissingDependency` if a driver of the address is not installed; contacts no store."""
    import fsspec

    for part in url.split("::"):
        try:
            fsspec.get_filesystem_class(part.partition("://")[0])
        except ImportError as error:  # noqa: PERF203 - a chain has two parts
            raise _convert_error(url, error, ()) from None
        except ValueError:
            pass  # not a protocol of fsspec, or the file of a chain: opening a file reports it


class RemoteFile(io.RawIOBase):
    """A driver's file that raises the errors of :func:`call_store`."""

    def __init__(self, url: str, file: Any) -> None:
        self._url, self._file = url, file

    def read(self, size: int | None = -1) -> bytes:
        """Read; a failed read is retried from the same position."""
        position = self._file.tell()

        def read() -> bytes:
            if self._file.tell() != position:
                self._file.seek(position)
            data: bytes = self._file.read(-1 if size is None else size)
            return data

        return call_store(self._url, read)

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Change the position."""
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        """Return the position."""
        return int(self._file.tell())

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True: :func:`open_address` has sought its end."""
        return True

    def close(self) -> None:
        """Close the driver's file too."""
        if not self.closed:
            self._file.close()
        super().close()


def _convert_error(url: str, error: Exception, invalid_address: tuple[type[Exception], ...]) -> Exception:
    """Return the error to raise for a driver's error; ``invalid_address`` as for :func:`call_store`."""
    if isinstance(error, ImportError):
        return MissingDependency(f"{url} cannot be opened: {error}")
    if machine_fault(error, "") is not None:
        return error
    chain: list[BaseException] = [error]
    while (next_cause := chain[-1].__cause__) is not None:
        chain.append(next_cause)
    for link in chain:
        if setting := _CREDENTIALS.get(type(link).__name__):
            return ConfigError(f"{url} cannot be opened: {_first_line(link)}. Set {setting}", path=url)
    cause = next((link for link in chain if not isinstance(link, FileNotFoundError)), error)
    status = _http_status(cause)
    if isinstance(cause, _NO_FILE) or status in _MISSING:
        return RemoteError("", missing=True)
    detail = _first_line(cause) if status is None else f"the server answers {status}"
    if isinstance(cause, PermissionError):
        return RemoteError(detail)
    if status is None and _is_address_error(cause, invalid_address):
        if isinstance(cause, _INCOMPLETE_ADDRESS):
            detail = f"{url.partition('://')[0]}:// needs more than an address"
        return RemoteError(detail, missing=True)
    return RemoteError(detail, may_pass=status is None or status in _MAY_PASS)


def _is_address_error(error: BaseException, invalid_address: tuple[type[Exception], ...]) -> bool:
    if isinstance(error, OSError):
        # Name resolution has negative numbers.
        return error.errno is not None and error.errno >= 0 and error.errno not in _NETWORK
    return isinstance(error, invalid_address) and not isinstance(error, _INVALID_RESPONSE)


def _http_status(error: BaseException) -> int | None:
    """Return the HTTP status of an error of any of the libraries."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        names = ("status", "status_code")
        values = (getattr(owner, name, None) for owner in (error, response) for name in names)
        status = next((value for value in values if value is not None), None)
    return status if isinstance(status, int) else None


def _first_line(error: BaseException) -> str:
    line = next(iter(str(error).splitlines()), "")[:200]
    return mask_secrets(f"{type(error).__name__}: {line}" if line else type(error).__name__)


def _host(url: str) -> str:
    scheme, _, rest = url.rpartition("::")[2].partition("://")
    return f"{scheme}://{re.split('[/?#]', rest, maxsplit=1)[0]}"  # urlsplit raises for some texts
