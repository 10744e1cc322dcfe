"""Settings: names, types, defaults, and what is reported about wrong ones."""

import copy
import dataclasses
import inspect
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

import packhorse
from loader_samples import load, texts
from packhorse import LoaderConfig
from packhorse.collate.batch_formats import NAMES
from packhorse.encode.robust import RobustDatasetWrapper
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.loader.config import _OTHER_NAMES, AttnImplementation
from raising import raises_config

ROOT = Path(__file__).parents[3]
FIELDS = {field.name: field for field in dataclasses.fields(LoaderConfig)}


def test_the_table_of_the_docs_has_every_setting_with_its_default() -> None:
    page = (ROOT / "docs" / "reference" / "loader.md").read_text("utf-8")
    (table,) = re.findall(r"^\| name \| default \|.*?\n\n", page, re.MULTILINE | re.DOTALL)
    documented = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", table, re.MULTILINE))
    expected = {
        name: "required"
        if field.default is dataclasses.MISSING
        else f'`"{field.default}"`'
        if isinstance(field.default, str)
        else f"`{field.default}`"
        for name, field in FIELDS.items()
    }
    assert documented == expected


def test_load_takes_every_setting_with_the_type_and_default_of_the_config() -> None:
    parameters = dict(inspect.signature(packhorse.load).parameters)
    unknown = parameters.pop("unknown")
    assert unknown.kind is inspect.Parameter.VAR_KEYWORD
    for name in ("processor", "model", "world", "group", "counts"):
        del parameters[name]
    assert list(parameters) == list(FIELDS)
    for name, parameter in parameters.items():
        field = FIELDS[name]
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        assert (parameter.default, parameter.annotation) == (default, field.type), name


def test_a_type_checker_rejects_a_wrong_type_and_a_wrong_name(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import packhorse\n"
        'packhorse.load("meta.json", "processor", pack_size=8192, num_workers=None)\n'
        'packhorse.load("meta.json", "processor", pack_size="8192")\n'
        'packhorse.load("meta.json", "processor", pack_sise=8192)\n'
        'packhorse.load("meta.json", "processor", mode="stack")\n'
        'packhorse.load("meta.json", "processor").num_steps\n'
    )
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(script)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = re.findall(r"script\.py:(\d+): error: (.*)", run.stdout)
    assert [int(line) for line, _ in lines] == [3, 4, 5, 6], run.stdout + run.stderr
    assert '"pack_size"' in lines[0][1]
    assert '"pack_sise"' in lines[1][1]


@pytest.mark.parametrize(
    ("name", "meant"),
    [("pack_sise", "pack_size"), ("workers", "num_workers"), ("max_length", "pack_size"), ("wrold", "world")],
)
def test_a_mistyped_name_gets_did_you_mean_from_load(name: str, meant: str) -> None:
    with raises_config(name, match=rf"did you mean '{meant}'\?"):
        packhorse.load([], None, **{name: 2})  # type: ignore[arg-type]


def test_a_mistyped_name_gets_did_you_mean_from_a_dict_and_a_file(tmp_path: Path) -> None:
    expected = r"did you mean 'num_workers'\?"
    with raises_config("num_worker", match=expected):
        LoaderConfig.from_dict({"data": [], "num_worker": 2})
    with raises_config("num_worker", match=expected):
        LoaderConfig(data=[]).with_changes(num_worker=2)
    (tmp_path / "run.yaml").write_text("data: meta.json\nnum_worker: 2\n")
    with raises_config("num_worker", match=expected):
        LoaderConfig.from_yaml(tmp_path / "run.yaml")
    with raises_config("xyzzy", match=r"Settings are: .*pack_size"):
        LoaderConfig.from_dict({"data": [], "xyzzy": 2})


def test_names_of_other_libraries_lead_to_settings() -> None:
    assert set(_OTHER_NAMES) <= set(FIELDS)
    assert not {name for names in _OTHER_NAMES.values() for name in names} & set(FIELDS)


def test_the_attention_names_are_those_of_the_collate_functions() -> None:
    assert get_args(get_args(AttnImplementation)[0]) == NAMES


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("mode", "pakc", r"one of 'pack', 'pad' \(did you mean 'pack'\?\)"),
        ("attn_implementation", "flash", r"one of None, sdpa, .*\(did you mean 'flash_att"),
        ("multiprocessing_context", "threads", "one of 'fork'"),
        ("pixel_dtype", "bf16", "the name of a torch dtype"),
        ("pixel_dtype", 16, "str or dtype, or None"),
        ("dataset_names", "coco", "a list of names"),
        ("dataset_names", [1], "a list of names"),
        ("pack_size", "8192", "a whole number of at least 1$"),
        ("pack_size", 0, "a whole number of at least 1$"),
        ("batch_size", True, "a whole number of at least 1$"),
        ("seed", 1.5, "a whole number$"),
        ("num_workers", -1, "a whole number of at least 0, or None$"),
        ("timeout", 0, "a number above 0, or None$"),
        ("sample_timeout", -2.0, "a number above 0, or None$"),
        ("max_bad_share", math.nan, "a number of at least 0, or None$"),
        ("pin_memory", "yes", "bool$"),
        ("ledger_dir", 3, "str or PathLike, or None$"),
    ],
)
def test_wrong_values_raise_when_the_config_is_made(setting: str, value: Any, expected: str) -> None:
    with raises_config(setting, match=f"^{setting}={re.escape(repr(value))}: expected {expected}") as caught:
        LoaderConfig(data=[], **{setting: value})
    assert caught.value.value is value


def test_a_seed_may_be_negative_and_a_dtype_may_be_torchs_own() -> None:
    import torch

    config = LoaderConfig(data=[], seed=-1, pixel_dtype=torch.bfloat16)
    assert (config.seed, config.pixel_dtype) == (-1, torch.bfloat16)


def test_a_model_with_another_attention_raises_when_the_loader_is_built() -> None:
    from contract.tiny_models import tiny_model

    model = copy.deepcopy(tiny_model("qwen2_vl"))
    model.config.get_text_config()._attn_implementation = "paged|sdpa"
    with raises_config("attn_implementation", "paged|sdpa", match=r"generation; packs .* one of sdpa"):
        load(texts(4), model=model)


def test_pinned_memory_without_a_gpu_warns_when_the_loader_is_built(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    load(texts(4), pin_memory=True)
    assert "pin_memory=True has no effect: no GPU is available" in caplog.text


def test_bad_samples_are_skipped_by_default_and_the_documented_wrappers_replace_them() -> None:
    assert LoaderConfig(data=[]).on_bad == "skip"
    for wrapper in (RobustDatasetWrapper, PreTokenizedDatasetWrapper):
        assert inspect.signature(wrapper).parameters["on_bad"].default == "replace"


def test_the_repr_says_what_is_loaded_and_how_far_it_is() -> None:
    loader = load(texts(30), batch_size=2)
    assert repr(loader) == (
        "Loader(data=list, rows=30, mode='pack', pack_size=256, batch_size=2, rank=0 of 1, num_workers=0, "
        f"attn_implementation='sdpa', model=unchecked, packs={len(loader.plan)}, epoch=0, "
        f"step=0 of {len(loader)})"
    )
    padded = load(texts(30), mode="pad", model=None)
    next(iter(padded))
    assert "mode='pad'" in repr(padded)
    assert "attn_implementation=None, model=None, packs=30, epoch=0, step=1 of 30" in repr(padded)


@pytest.mark.parametrize("name", ["media_position", "reasoning", "max_pixels"])
def test_a_setting_of_a_dataset_says_where_it_is_written(name: str) -> None:
    with raises_config(name, match=rf"dataset_options=\{{'{name}': …\}}"):
        packhorse.load([], None, **{name: "first"})
