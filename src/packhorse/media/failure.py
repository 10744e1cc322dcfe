"""The one way in which this stage refuses a sample."""

from __future__ import annotations

from packhorse.errors import BadSample
from packhorse.types import Reason


def bad(detail: str, reason: Reason) -> BadSample:
    """The error for a medium that cannot be used, ready to raise; ``detail`` names the source."""
    return BadSample(detail, reason=reason, stage="media")
