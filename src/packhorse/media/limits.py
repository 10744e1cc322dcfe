"""How much memory one decoded medium may take; more is refused before it is allocated."""

from __future__ import annotations

from packhorse.media.failure import bad

DEFAULT_MAX_BYTES = 8 << 30
"""8 GiB: 1,380 frames of 1920 x 1080 as bytes, or 37 hours of sound at 16 kHz as floats."""


def check_bytes(needed: int, max_bytes: int | None, what: str, advice: str) -> None:
    """Raise ``media_too_large`` where ``needed`` is above the limit; None is no limit.

    Args:
        needed: bytes of the decoded medium.
        max_bytes: the limit.
        what: the medium and what there is of it, for the message.
        advice: how to make it smaller.
    """
    if max_bytes is not None and needed > max_bytes:
        raise bad(
            f"{what} would take {needed / (1 << 30):,.1f} GiB of memory, more than max_bytes={max_bytes:,}: "
            f"{advice}, or raise max_bytes",
            "media_too_large",
        )
