"""Which version of transformers is installed, and which one a family needs."""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from packhorse.errors import ConfigError


def is_at_least(least: str) -> bool:
    """Whether the installed transformers is of this version or a newer one; True if it is not installed."""
    installed = installed_transformers()
    return installed is None or _numbers(installed) >= _numbers(least)


def check_transformers(what: str, least: str) -> None:
    """Raise if the installed transformers is older than something needs.

    Args:
        what: needs it, for the message: ``"kimi_k25"``.
        least: the oldest version that it works with.

    Raises:
        ConfigError: naming both versions and the line that installs the newer one.
    """
    if not is_at_least(least):
        raise ConfigError(
            f"{what} needs transformers {least} or newer, and {installed_transformers()} is installed: "
            f"pip install 'transformers>={least}'"
        )


def installed_transformers() -> str | None:
    """The version of transformers; None if there is none."""
    imported = sys.modules.get("transformers")
    return getattr(imported, "__version__", None) or _installed()


@cache
def _installed() -> str | None:
    try:
        return version("transformers")
    except PackageNotFoundError:
        return None


@cache
def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
