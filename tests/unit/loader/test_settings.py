"""The settings: what the docs say of them, and what is said of names that do not exist."""

import dataclasses
import re
from pathlib import Path

import pytest

import packhorse
from packhorse import LoaderConfig
from packhorse.errors import ConfigError
from packhorse.loader.config import _CALLED_ELSEWHERE

PAGE = Path(__file__).parents[3] / "docs" / "loader.md"


def test_the_table_of_the_docs_has_every_setting_with_its_default():
    (table,) = re.findall(r"^\| name \| default \|.*?\n\n", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    documented = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", table, re.MULTILINE))
    defaults = {one.name: one.default for one in dataclasses.fields(LoaderConfig)}
    wanted = {
        name: "required"
        if value is dataclasses.MISSING
        else f'`"{value}"`'
        if isinstance(value, str)
        else f"`{value}`"
        for name, value in defaults.items()
    }
    assert documented == wanted


def test_a_setting_under_the_name_that_others_give_it_is_rejected_with_ours():
    with pytest.raises(ConfigError, match=r"unknown setting\(s\) workers; workers is called num_workers"):
        packhorse.load([], None, workers=2)


def test_the_names_that_hints_give_are_settings():
    assert set(_CALLED_ELSEWHERE.values()) <= {one.name for one in dataclasses.fields(LoaderConfig)}
    assert not set(_CALLED_ELSEWHERE) & {one.name for one in dataclasses.fields(LoaderConfig)}


def test_a_seed_may_be_any_whole_number_and_workers_none_below_0():
    assert LoaderConfig(data=[], seed=-1).seed == -1
    with pytest.raises(ConfigError, match=r"^seed=1.5: expected a whole number$"):
        LoaderConfig(data=[], seed=1.5)
    with pytest.raises(ConfigError, match=r"^num_workers=-1: expected a whole number of 0 or more$"):
        LoaderConfig(data=[], num_workers=-1)
