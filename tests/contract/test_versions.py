"""A family that the installed transformers is too old for is rejected, with the version to install."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from packhorse.errors import ConfigError
from packhorse.families import FAMILIES, Family, family_of, models
from packhorse.families.models import check_transformers, is_at_least
from packhorse.types import Conversation, MediaRef, Message, TextPart


def of_class(name: str) -> Any:
    return type(name, (), {})()


def pretend_installed(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(models, "installed_transformers", lambda: version)


@pytest.fixture
def oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, "5.12.1")


@pytest.mark.parametrize(
    ("processor", "least"), [("Kimi_K25Processor", "5.13"), ("NemotronH_Omni_Reasoning_V3Processor", "5.18")]
)
def test_a_family_that_needs_a_newer_version_is_rejected(
    processor: str, least: str, oldest: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=f"needs transformers {least} or newer, and 5.12.1 is") as rejected:
        family_of(of_class(processor))
    assert f"pip install 'transformers>={least}'" in str(rejected.value)
    pretend_installed(monkeypatch, f"{least}.0")
    assert processor in family_of(of_class(processor)).processor_classes


def test_a_media_item_that_needs_a_newer_version_is_rejected_and_others_are_taken(oldest: None) -> None:
    family = family_of(of_class("Gemma4Processor"))
    for kind in ("image", "audio"):
        family.check(conversation(kind))
    with pytest.raises(ConfigError, match=r"video of gemma4 needs transformers 5\.19 or newer, and 5\.12\.1"):
        family.check(conversation("video"))


def conversation(kind: Any) -> Conversation:
    parts = (TextPart("What is it?"), MediaRef(kind, "x"))
    return Conversation((Message("user", parts), Message("assistant", (TextPart("A cat."),))), "a/0")


def test_versions_are_compared_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, "5.100.0.dev0")
    assert is_at_least("5.18")
    assert not is_at_least("6.0")
    with pytest.raises(ConfigError):
        check_transformers("x", "5.101")


def test_the_package_asks_for_what_the_families_need() -> None:
    declared = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"transformers>={Family.min_transformers}"' in declared
    for family in FAMILIES:
        for least in (family.min_transformers, *family.min_transformers_for.values()):
            assert tuple(map(int, least.split("."))) >= tuple(map(int, Family.min_transformers.split(".")))
