"""Imports are fast, and every documented name is in its documented module."""

import importlib
import inspect
import subprocess
import sys
import time

import pytest

HEAVY = ("torch", "transformers", "pyarrow", "datasets", "av", "lmdb", "soundfile")


def imported_with(statement: str) -> set[str]:
    script = f"import sys; {statement}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize(
    "module",
    ["packhorse", "packhorse.datasets", "packhorse.media", "packhorse.formats.estimate", "packhorse.ledger"],
)
def test_an_import_loads_no_heavy_library(module: str) -> None:
    assert not imported_with(f"import {module}") & set(HEAVY)


def test_importing_packhorse_takes_under_three_tenths_of_a_second() -> None:
    def seconds(statement: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", statement], check=True)
        return time.perf_counter() - start

    # The best of five, so that a busy machine does not fail the test.
    assert min(seconds("import packhorse") for _ in range(5)) < 0.3


@pytest.mark.parametrize(
    "name",
    [
        "RobustDatasetWrapper",
        "_ExamplesWithStats",
        "_collect_sample_stats",
        "_convert_sharegpt_to_conversation",
        "_load_json_or_jsonl",
        "_load_jsonl_for_rank",
        "_log_dataset_loading_summary",
        "logger",
        "make_cord_v2_dataset",
        "make_cv17_dataset",
        "make_medpix_dataset",
        "make_meta_dataset",
        "make_rdr_dataset",
        "make_robust_collate",
        "make_unimm_chat_dataset",
    ],
)
def test_documented_names_are_in_packhorse_datasets(name: str) -> None:
    assert hasattr(importlib.import_module("packhorse.datasets"), name)


@pytest.mark.parametrize(
    "name", ["LengthGroupedSampler", "_smart_resize_image", "_smart_resize_video", "logger"]
)
def test_documented_names_are_in_packhorse_samplers(name: str) -> None:
    assert hasattr(importlib.import_module("packhorse.samplers"), name)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("make_rdr_dataset", {"path_or_dataset": "quintend/rdr-items", "split": "train"}),
        ("make_cord_v2_dataset", {"path_or_dataset": "naver-clova-ix/cord-v2", "split": "train"}),
        ("make_medpix_dataset", {"path_or_dataset": "medpix-dataset/medpix-dataset", "split": "train"}),
        ("make_cv17_dataset", {"path_or_dataset": "ysdede/commonvoice_17_tr_fixed", "split": "train"}),
        ("make_unimm_chat_dataset", {"path_or_dataset": "Yirany/UniMM-Chat", "split": "train"}),
        (
            "_convert_sharegpt_to_conversation",
            {"example": ..., "columns": None, "tags": None, "media_dir": None},
        ),
        ("_load_json_or_jsonl", {"file_path": ...}),
        ("_load_jsonl_for_rank", {"file_path": ..., "sample_ratio": ..., "rank": ..., "world_size": ...}),
        ("_collect_sample_stats", {"examples": ...}),
        (
            "_log_dataset_loading_summary",
            {"timings": ..., "wall_time": ..., "total_samples": ..., "rank": None},
        ),
        (
            "make_meta_dataset",
            {
                "path_or_dataset": ...,
                "dataset_names": None,
                "split": "train",
                "shard_data": False,
                "rank": None,
                "world_size": None,
            },
        ),
        ("RobustDatasetWrapper", {"dataset": ..., "max_retries": 10}),
    ],
)
def test_documented_calls_have_the_documented_arguments(name: str, parameters: dict[str, object]) -> None:
    signature = inspect.signature(getattr(importlib.import_module("packhorse.datasets"), name))
    positional = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    found = {p.name: ... if p.default is p.empty else p.default for p in positional}
    assert list(found.items()) == list(parameters.items())


def test_every_public_name_of_packhorse_can_be_imported() -> None:
    import packhorse

    for name in packhorse.__all__:
        assert getattr(packhorse, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = packhorse.nothing
