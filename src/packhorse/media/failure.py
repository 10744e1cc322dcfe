"""Errors of media: a bad media item rejects its sample, a fault of the machine stops the run."""

from __future__ import annotations

from packhorse.errors import BadSample, PackhorseError, machine_fault
from packhorse.types import Reason

DEFAULT_MAX_BYTES = 8 << 30
"""8 GiB: 1,380 frames of 1920 x 1080 as bytes, or 37 hours of audio at 16 kHz as floats."""


class RemoteError(OSError):
    """Raised when an address cannot be reached.

    Attributes:
        missing: the store reports that nothing is there, or the address is invalid.
        may_pass: a retry may succeed.
    """

    def __init__(self, detail: str, *, missing: bool = False, may_pass: bool = False) -> None:
        super().__init__(detail)
        self.missing, self.may_pass = missing, may_pass


def bad_media(detail: str, reason: Reason = "broken_media") -> BadSample:
    """Return the error for a media item that cannot be used; ``detail`` names the source."""
    return BadSample(detail, reason=reason, stage="media")


def access_error(error: BaseException, detail: str) -> PackhorseError | None:
    """Return the error to raise if ``error`` is about the access to a media item and not about its content.

    That is a fault of the machine, a missing permission, or an address that does not answer.
    """
    if isinstance(error, PermissionError) or (isinstance(error, RemoteError) and not error.missing):
        return bad_media(detail, "unreachable_media")
    return machine_fault(error, detail)


def read_error(error: BaseException, detail: str, reason: Reason = "broken_media") -> PackhorseError:
    """Return the error to raise for a media item that could not be read because of ``error``."""
    return access_error(error, detail) or bad_media(detail, reason)


def check_bytes(needed: int, max_bytes: int | None, what: str, advice: str) -> None:
    """Raise ``media_too_large`` if a decoded media item needs more than ``max_bytes`` (None: no limit).

    The message has ``what``, the media item and its size, and ``advice``, how to make it smaller.
    """
    if max_bytes is not None and needed > max_bytes:
        raise bad_media(
            f"{what} would take {needed / (1 << 30):,.1f} GiB of memory, more than max_bytes={max_bytes:,}: "
            f"{advice}, or raise max_bytes",
            "media_too_large",
        )
