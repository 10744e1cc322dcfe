"""LLaMA-Factory's dataset_info.json: its entries are read as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packhorse.errors import ConfigError
from packhorse.formats.meta import make_meta_dataset, open_meta_dataset, read_meta
from raising import raises_config

QUESTION, ANSWER = "Who?", "Me."
SHAREGPT = {"conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]}
OPENAI = {"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]}


def write(folder: Path, info: dict[str, Any], **files: list[dict[str, Any]]) -> Path:
    for name, rows in files.items():
        (folder / f"{name}.json").write_text(json.dumps(rows))
    path = folder / "dataset_info.json"
    path.write_text(json.dumps(info))
    return path


def texts(example: dict[str, Any]) -> list[tuple[str, str]]:
    return [(turn["role"], turn["content"][-1]["text"]) for turn in example["conversation"]]


@pytest.mark.parametrize(
    ("entry", "row"),
    [
        ({}, {"instruction": QUESTION, "input": "", "output": ANSWER}),
        ({"formatting": "alpaca"}, {"instruction": QUESTION, "output": ANSWER}),
        ({"columns": {"prompt": "q", "response": "a"}}, {"q": QUESTION, "a": ANSWER}),
        ({"formatting": "sharegpt"}, SHAREGPT),
        ({"formatting": "openai"}, OPENAI),
        (
            {
                "formatting": "sharegpt",
                "columns": {"messages": "messages"},
                "tags": {
                    "role_tag": "role",
                    "content_tag": "content",
                    "user_tag": "user",
                    "assistant_tag": "assistant",
                },
            },
            OPENAI,
        ),
    ],
    ids=["default", "alpaca", "named columns", "sharegpt", "openai", "sharegpt with tags"],
)
def test_every_formatting_is_read(tmp_path: Path, entry: dict[str, Any], row: dict[str, Any]) -> None:
    info = write(tmp_path, {"mine": {"file_name": "rows.json", **entry}}, rows=[row])
    (example,) = make_meta_dataset(info)
    assert texts(example) == [("user", QUESTION), ("assistant", ANSWER)]


def test_only_the_datasets_that_are_named_have_to_exist(tmp_path: Path) -> None:
    info = {
        "there": {"file_name": "rows.json"},
        "hub": {"hf_hub_url": "no/such"},
        "gone": {"file_name": "x.json"},
    }
    path = write(tmp_path, info, rows=[{"instruction": QUESTION, "output": ANSWER}])
    assert len(open_meta_dataset(path, ["there"])) == 1


def test_images_are_next_to_the_file(tmp_path: Path) -> None:
    row = {**SHAREGPT, "images": ["pics/a.png"]}
    row["conversations"] = [{"from": "human", "value": "<image>Who?"}, SHAREGPT["conversations"][1]]
    entry = {"file_name": "rows.json", "formatting": "sharegpt", "columns": {"images": "images"}}
    (example,) = make_meta_dataset(write(tmp_path, {"mine": entry}, rows=[row]))
    assert example["conversation"][0]["content"][0]["image"] == str(tmp_path / "pics" / "a.png")


@pytest.mark.parametrize("wanted", [1, 3, 7, 10, 23])
def test_num_samples_takes_that_many_rows(tmp_path: Path, wanted: int) -> None:
    rows = [{"instruction": f"{number}?", "output": "Yes."} for number in range(10)]
    info = write(tmp_path, {"mine": {"file_name": "rows.json", "num_samples": wanted}}, rows=rows)
    assert len(open_meta_dataset(info)) == wanted


def test_a_dataset_of_a_hub_is_loaded_once_and_kept_as_a_file(tmp_path: Path, cache: Path) -> None:
    import datasets

    folder = tmp_path / "hub"
    folder.mkdir()
    columns = {"instruction": [QUESTION] * 3, "output": [ANSWER] * 3}
    datasets.Dataset.from_dict(columns).to_parquet(folder / "train.parquet")
    info = write(tmp_path, {"mine": {"hf_hub_url": str(folder), "split": "train"}})
    first = open_meta_dataset(info)
    assert [texts(example) for example in first] == [[("user", QUESTION), ("assistant", ANSWER)]] * 3
    (config,) = read_meta(info)
    assert config.file_name.startswith(str(cache))
    assert len(list(cache.glob("hub/*.parquet"))) == 1


def test_a_hub_that_is_not_reached_is_one_error_with_the_remedy(tmp_path: Path) -> None:
    info = write(tmp_path, {"mine": {"hf_hub_url": "not/there"}})
    with raises_config("hf_hub_url", "not/there", match="dataset 'mine'.*cannot be loaded.*file_name"):
        open_meta_dataset(info)


@pytest.mark.parametrize(
    ("entry", "setting"),
    [
        ({"file_name": "rows.json", "formatting": "chatml"}, "formatting"),
        ({"file_name": "rows.json", "colums": {}}, "colums"),
        ({"script_url": "x.py"}, "script_url"),
        ({"formatting": "alpaca"}, "file_name"),
        ({"file_name": "rows.json", "num_samples": 0}, "num_samples"),
    ],
)
def test_a_wrong_entry_names_its_key(tmp_path: Path, entry: dict[str, Any], setting: str) -> None:
    with raises_config(setting):
        read_meta(write(tmp_path, {"mine": entry}, rows=[]))


def test_preference_data_is_rejected_when_it_is_opened(tmp_path: Path) -> None:
    entry = {"file_name": "rows.json", "ranking": True, "columns": {"chosen": "good", "rejected": "bad"}}
    rows = [{"instruction": QUESTION, "good": ANSWER, "bad": "You."}]
    with pytest.raises(ConfigError, match="preference data"):
        open_meta_dataset(write(tmp_path, {"mine": entry}, rows=rows))


def test_an_entry_of_a_meta_file_may_limit_its_samples_without_being_one_of_llama_factory(
    tmp_path: Path,
) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([OPENAI] * 5))
    meta = {"mine": {"file_name": str(tmp_path / "rows.json"), "num_samples": 2, "strict": True}}
    assert len(open_meta_dataset(meta)) == 2
