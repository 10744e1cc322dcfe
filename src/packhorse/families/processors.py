"""Open processors, and check which transformers is installed."""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from importlib import metadata
from typing import Any

from packhorse.chat import is_tokenizer, tokenizer_of
from packhorse.errors import ConfigError, require
from packhorse.families.models import check_name


def as_processor(processor: Any) -> Any:
    """The processor itself, opened if its path or hub name was given.

    Raises:
        ConfigError: there is none, or it cannot be opened.
    """
    is_path = isinstance(processor, str | os.PathLike)
    return open_processor(os.fspath(processor)) if is_path else processor


def as_whole_processor(processor: Any) -> Any:
    """As :func:`as_processor`, for what encodes samples.

    Raises:
        ConfigError: also if it is something else than a processor or tokenizer: a part of one, a class, None.
    """
    processor = as_processor(processor)
    speaks = any(hasattr(processor, name) for name in ("tokenizer", "apply_chat_template"))
    if isinstance(processor, type) or not callable(processor) or not (speaks or is_tokenizer(processor)):
        given = type(processor).__name__
        if processor is None or isinstance(processor, type):
            given = "None" if processor is None else f"the class {processor.__name__}, not an object of it"
        raise ConfigError(
            f"processor is {given}: expected the model's whole processor (with a tokenizer), or the folder "
            "or hub name of one. Write processor=AutoProcessor.from_pretrained(name)"
        )
    return processor


def open_processor(path: str, trust_remote_code: bool = False) -> Any:
    """Open a processor by its path or hub name.

    Raises:
        ConfigError: there is none, or it cannot be opened.
    """
    transformers: Any = require("transformers", "train")
    here = os.path.exists(path)
    check_name("processor", path)
    try:
        opened = transformers.AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        why = " ".join(str(error.__cause__ or error).split())[:300]
        broken = "torchvision" in f"{error} {why}"
        if isinstance(error, RuntimeError) and not broken:
            raise
        what = "cannot be opened" if here or broken else "no such folder, and not to be had from the hub"
        hint = f"; {_torchvision_hint()}" if broken else ""
        if "trust_remote_code" in str(error):
            hint = "; read its code, then allow it with trust_remote_code=True or --trust-remote-code"
        raise ConfigError(f"processor {path}: {what} ({why}){hint}") from error
    if getattr(opened, "chat_template", "") is None:
        # Some classes (Phi-4) leave it with the tokenizer, and then do not find it.
        opened.chat_template = getattr(tokenizer_of(opened), "chat_template", None)
    return opened


def _torchvision_hint() -> str:
    """What to do where torchvision cannot be imported: mostly it was built for another torch."""
    try:
        torch, torchvision = map(metadata.version, ("torch", "torchvision"))
    except metadata.PackageNotFoundError as error:
        return f"{error.name} is not installed: pip install {error.name}"
    return (
        f"torchvision {torchvision} may not match torch {torch}: install the torchvision that was built for "
        "this torch, from the same index"
    )


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
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return None


@cache
def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
