"""Expected errors, compared by their fields instead of their text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from packhorse.errors import BadSample, ConfigError

_ANY = object()


@contextmanager
def raises_config(
    setting: str = "",
    value: Any = _ANY,
    *,
    path: str | os.PathLike[str] | None = None,
    match: str | None = None,
) -> Iterator[pytest.ExceptionInfo[ConfigError]]:
    """Expect a ConfigError about this setting or this file, whose message names it.

    ``match`` is for what no field has, such as the remedy.
    """
    with pytest.raises(ConfigError, match=match) as caught:
        yield caught
    error = caught.value
    assert error.setting == setting
    assert setting in str(error)
    if value is not _ANY:
        assert error.value == value
    if path is not None:
        assert error.path == os.fspath(path)
        assert os.path.basename(error.path) in str(error)


@contextmanager
def raises_bad_sample(
    reason: str, *, key: str | None = None, stage: str | None = None, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[BadSample]]:
    """Expect a BadSample with this reason, and this key and stage if they are given."""
    with pytest.raises(BadSample, match=match) as caught:
        yield caught
    error = caught.value
    assert error.reason == reason
    assert key is None or error.key == key
    assert stage is None or error.stage == stage
