"""The two ways this stage fails: a sample is rejected, or the machine is at fault and stops the run."""

from __future__ import annotations

import errno

from packhorse.errors import BadSample, PackhorseError, SystemFault
from packhorse.types import Reason

# What the system says about itself and not about the file that was asked for: any other sample would meet the
# same, so leaving this one out would lose good data without end. Network errors are not among them: a dead
# link is a property of its row.
_MACHINE_FAULTS = {
    errno.EMFILE: "close files, use fewer workers, or raise the limit (ulimit -n)",
    errno.ENFILE: "close files on this machine, or raise its limit (fs.file-max)",
    errno.ENOMEM: "free memory, or use fewer workers",
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "free disk space, or raise the quota",
    errno.EIO: "look at the disk or the mount",
    errno.ESTALE: "mount the file system again",
    errno.ENOTCONN: "mount the file system again",
}


class RemoteError(OSError):
    """An address cannot be reached.

    Attributes:
        missing: the store says that nothing is there, or the address makes no sense.
        may_pass: another try may succeed.
    """

    def __init__(self, detail: str, *, missing: bool = False, may_pass: bool = False) -> None:
        super().__init__(detail)
        self.missing, self.may_pass = missing, may_pass


def bad(detail: str, reason: Reason) -> BadSample:
    """The error for a media item that cannot be used, ready to raise; ``detail`` names the source."""
    return BadSample(detail, reason=reason, stage="media")


def machine_fault(error: BaseException, detail: str) -> SystemFault | None:
    """The error to raise where ``error`` is the machine's fault (no handles left, a failing disk), or None.

    Do not ask about FFmpeg's errors: its "I/O error" and "out of memory" mostly mean damaged data.
    """
    advice = _MACHINE_FAULTS.get(error.errno or 0) if isinstance(error, OSError) else None
    if advice is None:
        return None
    return SystemFault(f"{detail}: the machine is at fault, not the sample; {advice}")


def outside_fault(error: BaseException, detail: str) -> PackhorseError | None:
    """The error to raise where ``error`` says nothing about the media item, or None.

    That is a fault of the machine, a refusal (no permission), or an address that does not answer.
    """
    if isinstance(error, PermissionError) or (isinstance(error, RemoteError) and not error.missing):
        return bad(detail, "unreachable_media")
    return machine_fault(error, detail)


def unreadable(error: BaseException, detail: str, reason: Reason) -> PackhorseError:
    """The error for a media item that could not be read, ready to raise: of others, or of its own."""
    return outside_fault(error, detail) or bad(detail, reason)


DEFAULT_MAX_BYTES = 8 << 30
"""8 GiB: 1,380 frames of 1920 x 1080 as bytes, or 37 hours of sound at 16 kHz as floats."""


def check_bytes(needed: int, max_bytes: int | None, what: str, advice: str) -> None:
    """Raise ``media_too_large`` where ``needed`` is above the limit; None is no limit.

    Args:
        needed: bytes of the decoded media item.
        max_bytes: the limit.
        what: the media item and what there is of it, for the message.
        advice: how to make it smaller.
    """
    if max_bytes is not None and needed > max_bytes:
        raise bad(
            f"{what} would take {needed / (1 << 30):,.1f} GiB of memory, more than max_bytes={max_bytes:,}: "
            f"{advice}, or raise max_bytes",
            "media_too_large",
        )
