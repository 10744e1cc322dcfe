"""LLaMA-Factory's dataset_info.json: its entries are read as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import packhorse
from packhorse.errors import ConfigError
from packhorse.formats.meta import make_meta_dataset, open_meta_dataset, read_meta
from packhorse.tools.check.run import check_meta
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


def test_a_json_file_with_an_object_on_each_line_is_read(tmp_path: Path) -> None:
    rows = [{"instruction": QUESTION, "output": ANSWER}, {"instruction": QUESTION, "output": "You."}]
    (tmp_path / "lines.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    info = write(tmp_path, {"mine": {"file_name": "lines.json"}})
    expected = [[("user", QUESTION), ("assistant", answer)] for answer in (ANSWER, "You.")]
    assert [texts(example) for example in make_meta_dataset(info)] == expected
    assert [texts(example) for example in make_meta_dataset(tmp_path / "lines.json")] == expected


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


def test_a_relative_path_of_the_file_is_applied_to_its_media_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "data" / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    row = {"instruction": "<image>Who?", "output": ANSWER, "images": ["a.png"]}
    entry = {"file_name": "rows.json", "columns": {"images": "images"}}
    write(tmp_path / "data", {"mine": entry}, rows=[row])
    (example,) = make_meta_dataset("data/dataset_info.json")
    assert example["conversation"][0]["content"][0]["image"] == "data/a.png"
    assert not [record for record in caplog.records if "media_dir" in record.message]


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


def test_a_hub_that_is_not_reached_is_one_error_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("an offline run does not retry"))
    info = write(tmp_path, {"mine": {"hf_hub_url": "not/there"}})
    with raises_config(
        "hf_hub_url", "not/there", match="dataset 'mine'.*cannot be loaded.*file_name"
    ) as caught:
        open_meta_dataset(info)
    cause = caught.value.__cause__
    assert cause is not None
    assert isinstance(cause.__cause__, ConnectionError)


@pytest.mark.parametrize("key", ["ms_hub_url", "om_hub_url"])
def test_a_name_on_another_hub_is_not_looked_up_on_the_hugging_face_hub(key: str, tmp_path: Path) -> None:
    import datasets

    folder = tmp_path / "hub"
    folder.mkdir()
    rows = datasets.Dataset.from_dict({"instruction": [QUESTION], "output": [ANSWER]})
    rows.to_parquet(folder / "train.parquet")
    info = write(tmp_path, {"mine": {key: str(folder)}})
    with raises_config(key, str(folder), match="set hf_hub_url .* or download the data, and set file_name"):
        open_meta_dataset(info)
    assert (
        len(open_meta_dataset(write(tmp_path, {"mine": {key: "other/data", "hf_hub_url": str(folder)}}))) == 1
    )
    from_file = {"mine": {key: "other/data", "file_name": "rows.json"}}
    opened = open_meta_dataset(write(tmp_path, from_file, rows=[{"instruction": QUESTION, "output": ANSWER}]))
    assert [drop.detail for drop in opened.ledger] == [f"not used: {key} of its entry"]


@pytest.mark.parametrize("source", ["hf_hub_url", "file_name"])
def test_a_split_of_null_is_the_training_split(source: str, tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "train.jsonl").write_text(GOOD + "\n")
    path = tmp_path / "hub" if source == "hf_hub_url" else tmp_path / "hub" / "train.jsonl"
    assert len(open_meta_dataset(write(tmp_path, {"mine": {source: str(path), "split": None}}))) == 1


GOOD = json.dumps({"instruction": QUESTION, "output": ANSWER})


@pytest.mark.parametrize(
    ("files", "options"),
    [
        ([], {}),
        ([GOOD], {"split": "test"}),
        ([GOOD], {"subset": "en"}),
        (["{"], {}),
        ([GOOD, json.dumps({"other": 1})], {}),
    ],
    ids=["no file", "no such split", "no such subset", "a broken file", "files of other columns"],
)
def test_a_dataset_of_a_hub_that_cannot_be_read_is_one_error(
    tmp_path: Path, files: list[str], options: dict[str, str]
) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    for number, content in enumerate(files):
        (folder / f"train-{number}.jsonl").write_text(content + "\n")
    info = write(tmp_path, {"mine": {"hf_hub_url": str(folder), **options}})
    with raises_config("hf_hub_url", str(folder), match="dataset 'mine'.*cannot be loaded"):
        open_meta_dataset(info)


@pytest.mark.parametrize(
    ("entry", "setting"),
    [
        ({"file_name": "rows.json", "formatting": "chatml"}, "formatting"),
        ({"file_name": "rows.json", "colums": {}}, "colums"),
        ({"script_url": "x.py"}, "script_url"),
        ({"formatting": "alpaca"}, "file_name"),
        ({"file_name": "rows.json", "num_samples": 0}, "num_samples"),
        ({"file_name": "rows.json", "split": "test"}, "split"),
        ({"file_name": "rows.json", "split": "train[:2]"}, "split"),
        ({"file_name": "rows.json", "format": "messages"}, "format"),
        ({"file_name": "rows.json", "columns": ["messages"]}, "columns"),
        ({"file_name": "rows.json", "max_pixels": "many"}, "max_pixels"),
    ],
)
def test_a_wrong_entry_names_its_key(tmp_path: Path, entry: dict[str, Any], setting: str) -> None:
    with raises_config(setting):
        read_meta(write(tmp_path, {"mine": entry}, rows=[]))


def test_preference_data_is_rejected_when_it_is_opened(tmp_path: Path) -> None:
    entry = {"file_name": "rows.json", "ranking": True, "columns": {"chosen": "good", "rejected": "bad"}}
    rows = [{"instruction": QUESTION, "good": ANSWER, "bad": "You."}]
    with pytest.raises(ConfigError, match="preference data"):
        open_meta_dataset(write(tmp_path, {"mine": entry}, rows=rows), task="sft")


def test_an_entry_of_a_meta_file_may_limit_its_samples_without_being_one_of_llama_factory(
    tmp_path: Path,
) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([OPENAI] * 5))
    meta = {"mine": {"file_name": str(tmp_path / "rows.json"), "num_samples": 2, "strict": True}}
    assert len(open_meta_dataset(meta)) == 2


def test_keys_that_are_not_used_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hashed = {"file_name": "rows.json", "file_sha1": "ab12", "subset": None, "split": "train"}
    of_hub = {"file_name": "rows.json", "subset": "en", "folder": "data", "script_url": "x.py"}
    info = write(tmp_path, {"a": hashed, "b": of_hub}, rows=[{"instruction": QUESTION, "output": ANSWER}])
    expected = {
        "a": "not used: file_sha1 of its entry",
        "b": "not used: folder of its entry, script_url of its entry, subset of its entry",
    }
    opened = open_meta_dataset(info)
    reported = {drop.dataset: drop.detail for drop in opened.ledger if drop.reason == "unused_field"}
    assert reported == expected
    assert all(line.endswith(expected[name]) for name, line in zip("ab", opened.describe(), strict=True))
    assert "a: fields that are not used: file_sha1 of its entry" in caplog.messages
    checked = check_meta(info)
    assert {
        found.dataset: found.found for found in checked.findings() if found.rule == "unused_field"
    } == expected


def test_keys_of_a_hub_are_used_for_a_dataset_of_a_hub(tmp_path: Path, cache: Path) -> None:
    import datasets

    (tmp_path / "hub" / "data").mkdir(parents=True)
    rows = datasets.Dataset.from_dict({"instruction": [QUESTION], "output": [ANSWER]})
    rows.to_parquet(tmp_path / "hub" / "data" / "test.parquet")
    entry = {"hf_hub_url": str(tmp_path / "hub"), "folder": "data", "split": "test"}
    opened = open_meta_dataset(write(tmp_path, {"mine": entry}))
    assert len(opened) == 1
    assert not len(opened.ledger)


def test_an_entry_has_the_settings_of_a_meta_file_too(tmp_path: Path) -> None:
    """LLaMA-Factory ignores keys that it does not know, so both read the same file."""
    turns = [{"from": "human", "value": "<image>Who?"}, {"from": "gpt", "value": "<think>Hm.</think>Me."}]
    options = {"max_pixels": 50176, "fps": 2, "video_max_pixels": 3136}
    entry = {
        **{"file_name": "rows.json", "formatting": "sharegpt", "columns": {"images": "images"}},
        **{"media_dir": "pics", "allow_http": True, "weight": 2, "system": "Be brief.", **options},
        **{"reasoning": "drop", "sample_ratio": 2, "confine": True},
    }
    row = {"conversations": turns, "images": ["a.png"]}
    (tmp_path / "pics").mkdir()
    info = write(tmp_path, {"mine": entry}, rows=[row])
    (config,) = read_meta(info)
    assert config.rules.allow_http
    assert config.rules.media_settings == options
    example, same = make_meta_dataset(info)
    assert example == same
    system, user, answer = example["conversation"]
    assert system["content"] == [{"type": "text", "text": "Be brief."}]
    image = user["content"][0]
    assert (image["image"], image["max_pixels"]) == (str(tmp_path / "pics" / "a.png"), 50176)
    assert answer["content"][-1]["text"] == "Me."
    assert example["weight"] == 2


def test_settings_of_an_entry_are_applied_by_load(tmp_path: Path, qwen: Any) -> None:
    turns = [{"role": "user", "content": "<image>Who?"}, OPENAI["messages"][1]]
    Image.new("RGB", (280, 280)).save(tmp_path / "a.png")
    entry = {"file_name": "rows.json", "formatting": "openai", "columns": {"images": "images"}}
    info = {"large": entry, "small": {**entry, "max_pixels": 140 * 140}}
    path = write(tmp_path, info, rows=[{"messages": turns, "images": ["a.png"]}])
    loaders = [
        packhorse.load(path, qwen, model="unchecked", dataset_names=[name], num_workers=0)
        for name in ("large", "small")
    ]
    large, small = (int(loader.counts.total[0]) for loader in loaders)
    assert large - small == 10 * 10 - 5 * 5
    assert [next(iter(loader)).info.tokens for loader in loaders] == [large - 1, small - 1]
    with pytest.raises(ConfigError, match=r"max_pixels: .* write these settings into its entries"):
        packhorse.load(path, qwen, model="unchecked", dataset_options={"max_pixels": 140 * 140})
