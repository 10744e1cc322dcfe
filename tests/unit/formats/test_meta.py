"""Mixtures: the meta file is checked, rows are assigned to ranks and converted, losses are named."""

import copy
import json
import logging
import multiprocessing
import os
import pickle
from pathlib import Path
from typing import Any

import fsspec
import pytest
from torch.utils.data import DataLoader

from packhorse.datasets import _ExamplesWithStats, make_meta_dataset, open_meta_dataset
from packhorse.ledger import Ledger
from raising import raises_bad_sample, raises_config
from row_files import WRITERS


def chat(number: int, **extra: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": f"a{number}"}]
    return {"messages": turns, **extra}


def write_meta(folder: Path, meta: dict[str, Any], **files: list[dict[str, Any]]) -> Path:
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder / "meta.json"


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    meta = {"b": {"file_name": "b.jsonl"}, "a": {"file_name": "a.jsonl", "media_dir": "/media"}}
    a = [chat(i, _text_tokens=3) for i in range(3)]
    with_image = {
        "messages": [{"role": "user", "content": "<image>x"}, {"role": "assistant", "content": "y"}]
    }
    return write_meta(tmp_path, meta, a=a, b=[with_image | {"images": ["i.jpg"]}, chat(9)])


def test_datasets_are_in_the_order_of_their_names(mixture: Path) -> None:
    examples = make_meta_dataset(str(mixture))
    assert isinstance(examples, _ExamplesWithStats)
    assert isinstance(examples, list)
    answers = [example["conversation"][-1]["content"][0]["text"] for example in examples]
    assert answers == ["a0", "a1", "a2", "y", "a9"]
    assert make_meta_dataset(str(mixture), ["b"]) == examples[3:]


def test_a_field_that_only_a_later_row_of_a_file_has_is_reported_once(tmp_path: Path) -> None:
    turns = chat(9)["messages"]
    scored = {"messages": [{**turns[0], "score": 3}, turns[1]], "grade": 1}
    meta = write_meta(tmp_path, {"a": {"file_name": "a.jsonl"}}, a=[chat(i) for i in range(8)] + [scored] * 2)
    ledger = Ledger()
    examples = open_meta_dataset(str(meta), ledger=ledger)
    assert not len(ledger)
    assert len(list(examples)) == len(examples[:]) == 10
    assert [(drop.reason, drop.action, drop.detail, drop.dataset) for drop in ledger] == [
        ("unused_field", "kept", "not used: grade", "a"),
        ("unused_field", "kept", "not used: messages[].score", "a"),
    ]


def test_statistics_come_with_the_list(mixture: Path) -> None:
    assert make_meta_dataset(str(mixture)).stats == {
        "n_images": 1,
        "n_videos": 0,
        "n_text_only": 4,
        "n_text_tokens": 9 + 0 + 1,
        "n_media_tokens": 500,
        "n_missing_text_tokens": 2,
        "n_missing_mm_inputs_meta": 1,
    }


def test_missing_precomputed_fields_are_warned_of_once_per_dataset(
    mixture: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_meta_dataset(str(mixture))
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == ["b: of 2 rows some lack _text_tokens (2), mm_inputs_meta (1): estimating"]


def test_lazy_and_eager_are_the_same_examples(mixture: Path) -> None:
    lazy, eager = open_meta_dataset(mixture), make_meta_dataset(mixture)
    assert list(lazy) == eager
    assert lazy[-1] == eager[-1]
    assert lazy[1:4] == eager[1:4]
    assert len(lazy) == 5
    assert [lazy.key(i) for i in range(5)] == ["a/0", "a/1", "a/2", "b/0", "b/1"]
    assert lazy.lengths() == {"a": 3, "b": 2}
    assert lazy.stats() == eager.stats
    assert lazy.row(3)["images"] == ["i.jpg"]
    assert lazy.location(4).endswith(
        "b.jsonl:2 (byte " + str((mixture.parent / "b.jsonl").read_text().index("\n") + 1) + ")"
    )
    with pytest.raises(IndexError, match="example 5 of 5"):
        lazy[5]


def test_many_rows_are_located_without_reading_their_files(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = mixture.parent / "b.jsonl"
    path.write_text("\n" + path.read_text())
    lazy = open_meta_dataset(mixture)
    exact = [lazy.location(n) for n in range(5)]
    monkeypatch.delattr(os, "pread")
    found = lazy.locations([4, 0, 2, 3])
    assert [place.partition(" (byte")[0] for place in found] == [
        *(f"{path}, row 1", f"{mixture.parent / 'a.jsonl'}:1"),
        *(f"{mixture.parent / 'a.jsonl'}:3", f"{path}, row 0"),
    ]
    assert exact[4].startswith(f"{path}:3 (byte")


def test_an_example_changed_by_its_user_is_whole_the_next_time(mixture: Path) -> None:
    lazy = open_meta_dataset(mixture)
    first = lazy[0]
    before = copy.deepcopy(first)
    first["conversation"].clear()
    assert lazy[0] == before


def test_a_lazy_mixture_works_in_forked_and_spawned_workers(mixture: Path) -> None:
    lazy = open_meta_dataset(mixture)
    expected = list(lazy)
    assert list(pickle.loads(pickle.dumps(lazy))) == expected
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        loader = DataLoader(lazy, batch_size=None, num_workers=2, multiprocessing_context=context)
        assert list(loader) == expected


@pytest.mark.parametrize("kind", WRITERS)
def test_a_mixture_of_every_file_type(tmp_path: Path, kind: str) -> None:
    rows = [chat(i) for i in range(5)]
    meta = write_meta(tmp_path, {"a": {"file_name": WRITERS[kind](tmp_path, rows)}})
    assert [e["conversation"][0]["content"][0]["text"] for e in make_meta_dataset(meta)] == [
        f"q{i}" for i in range(5)
    ]


@pytest.mark.parametrize("kind", WRITERS)
def test_a_data_file_is_a_mixture_of_one_with_its_media_next_to_it(tmp_path: Path, kind: str) -> None:
    turns = [{"role": "user", "content": "<image>x"}, {"role": "assistant", "content": "y"}]
    path = WRITERS[kind](tmp_path, [{"messages": turns, "images": ["images/i.jpg"]}])
    (example,) = make_meta_dataset(path)
    assert example["conversation"][0]["content"][0]["image"] == f"{os.path.dirname(path)}/images/i.jpg"
    assert open_meta_dataset(path).key(0) == "rows/0"


def test_the_meta_file_itself_may_be_an_address(tmp_path: Path) -> None:
    for name, data in (("meta.json", json.dumps({"a": {"file_name": "a.jsonl", "media_dir": "m"}})),
                       ("a.jsonl", json.dumps(chat(0)))):  # fmt: skip
        for folder in ("memory://mixture/", "memory://"):
            with fsspec.open(f"{folder}{name}", "w") as file:
                file.write(data)
    assert len(open_meta_dataset("memory://mixture/meta.json")) == 1
    assert len(open_meta_dataset("memory://meta.json")) == 1


def test_sharding_takes_every_nth_row_and_names_what_is_left(tmp_path: Path) -> None:
    meta = write_meta(tmp_path, {"a": {"file_name": "a.jsonl"}}, a=[chat(i) for i in range(7)])
    shards = [make_meta_dataset(meta, shard_data=True, rank=r, world_size=3) for r in range(3)]
    texts = [[e["conversation"][0]["content"][0]["text"] for e in shard] for shard in shards]
    assert texts == [["q0", "q3"], ["q1", "q4"], ["q2", "q5"]]
    assert [[d.key for d in shard.ledger] for shard in shards] == [["a/6"], [], []]
    assert [len(make_meta_dataset(meta, None, "train", True, r, 3, remainder="keep")) for r in range(3)] == [
        3,
        2,
        2,
    ]
    assert len(make_meta_dataset(meta, rank=1, world_size=3)) == 7, "without shard_data there is no sharding"


def test_a_rank_beyond_the_rows_gets_nothing_and_everything_is_named(tmp_path: Path) -> None:
    meta = write_meta(tmp_path, {"a": {"file_name": "a.jsonl"}}, a=[chat(0)])
    ledger = Ledger()
    for rank in range(4):
        shard = open_meta_dataset(meta, shard_data=True, rank=rank, world_size=4, ledger=ledger)
        assert list(shard) == []
    assert [d.key for d in ledger] == ["a/0"]


def test_the_world_is_found_out_when_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meta = write_meta(tmp_path, {"a": {"file_name": "a.jsonl"}}, a=[chat(i) for i in range(4)])
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert [open_meta_dataset(meta, shard_data=True).key(i) for i in range(2)] == ["a/1", "a/3"]
    with raises_config("rank", 1, match="give both or neither"):
        open_meta_dataset(meta, shard_data=True, rank=1)


def test_iterating_does_not_take_an_index_error_for_the_end(mixture: Path) -> None:
    lazy = open_meta_dataset(mixture)
    lazy._sources[1].file.read = lambda rows: (_ for _ in ()).throw(IndexError("inside"))  # type: ignore[method-assign]
    with pytest.raises(IndexError, match="inside"):
        list(lazy)


def test_opening_twice_with_one_ledger_counts_once(tmp_path: Path) -> None:
    rows = [chat(i) for i in range(10)]
    meta = write_meta(tmp_path, {"a": {"file_name": "a.jsonl", "sample_ratio": 0.5}}, a=rows)
    ledger = Ledger()
    for _ in range(2):
        open_meta_dataset(meta, ledger=ledger)
    assert ledger.lost() == 5


def test_copies_have_names_of_their_own(tmp_path: Path) -> None:
    meta = write_meta(tmp_path, {"a": {"file_name": "a.jsonl", "sample_ratio": 2.5}}, a=[chat(0), chat(1)])
    lazy = open_meta_dataset(meta)
    assert [lazy.key(i) for i in range(4)] == ["a/0", "a/1", "a/0#1", "a/1#1"]
    assert lazy.key(4) in ("a/0#2", "a/1#2")


def test_a_bad_row_stops_the_load_or_is_dropped_by_name(tmp_path: Path) -> None:
    meta = write_meta(tmp_path, {"a": {"file_name": "a.jsonl"}}, a=[chat(i) for i in range(4)])
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    lines[2] = lines[2][:10]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with raises_bad_sample("malformed_row", key="a/2", match=r"a\.jsonl:3 \(byte \d+\): not valid JSON"):
        make_meta_dataset(meta)
    examples = make_meta_dataset(meta, on_bad="skip")
    assert len(examples) == 3
    (drop,) = examples.ledger
    assert (drop.dataset, drop.key, drop.stage, drop.reason) == ("a", "a/2", "read", "malformed_row")
    assert examples.ledger.lost() == 1
    lazy = open_meta_dataset(meta)
    assert (lazy[1], lazy[3]) == (examples[1], examples[2])
    with raises_bad_sample("malformed_row", key="a/2"):
        lazy[2]
    with raises_config("on_bad", "drop"):
        make_meta_dataset(meta, on_bad="drop")  # type: ignore[arg-type]


def test_a_list_with_rows_dropped_still_names_its_examples_rightly(tmp_path: Path) -> None:
    meta = {"a": {"file_name": "a.jsonl"}, "b": {"file_name": "b.jsonl"}}
    path = write_meta(tmp_path, meta, a=[chat(0), {}, {}, chat(3)], b=[{}, chat(11), chat(12)])
    examples = make_meta_dataset(path, on_bad="skip")
    assert [examples.key(i) for i in range(4)] == ["a/0", "a/3", "b/1", "b/2"]
    assert examples.key(-1) == "b/2"
    with pytest.raises(IndexError):
        examples.key(4)
    assert pickle.loads(pickle.dumps(examples)).key(1) == "a/3"


def test_a_dict_will_do_for_a_meta_file(tmp_path: Path) -> None:
    write_meta(tmp_path, {}, a=[chat(0)])
    meta = {"a": {"file_name": str(tmp_path / "a.jsonl")}}
    assert len(open_meta_dataset(meta)) == len(make_meta_dataset(meta)) == 1
    with raises_config("file_name", None, match="meta: dataset 'a' has no file_name"):
        open_meta_dataset({"a": {}})


def test_rows_whose_roles_have_other_names_are_rejected_with_the_remedy(tmp_path: Path) -> None:
    turns = [{"role": "asker", "content": "q"}, {"role": "helper", "content": "a"}]
    meta = write_meta(tmp_path, {"a": {"file_name": "a.jsonl"}}, a=[{"messages": turns}] * 3)
    with raises_config("tags", match=r"a/0: turn 0 has role 'asker'.*Set tags="):
        open_meta_dataset(meta)
    one_odd = write_meta(tmp_path, {"a": {"file_name": "a.jsonl"}}, a=[{"messages": turns}, chat(1)])
    assert len(make_meta_dataset(one_odd)) == 2


def test_a_world_that_has_no_effect_and_a_missing_folder_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    meta = {"a": {"file_name": "a.jsonl", "media_dir": "/no/such/folder"}}
    open_meta_dataset(write_meta(tmp_path, meta, a=[chat(0)]), rank=0, world_size=2)
    assert "no effect without shard_data" in caplog.text
    assert "/no/such/folder is not a folder" in caplog.text


@pytest.mark.parametrize(
    ("images", "warned"),
    [
        (["a.png"], True),
        ([["a.png", "b.png"]], True),
        (["/elsewhere/a.png"], False),
        (["data:image/png;base64,aGk="], False),
        (["data:image/png;base64,aGk=", "a.png"], True),
    ],
    ids=["a path", "frames", "an absolute path", "embedded", "embedded and a path"],
)
def test_a_missing_folder_is_warned_of_only_if_media_are_looked_up_in_it(
    images: list[Any], warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind, column = ("video", "videos") if isinstance(images[0], list) else ("image", "images")
    marks = f"<{kind}>" * len(images)
    turns = [{"role": "user", "content": marks}, {"role": "assistant", "content": "y"}]
    meta = {"a": {"file_name": "a.jsonl", "media_dir": "/no/such/folder"}}
    open_meta_dataset(write_meta(tmp_path, meta, a=[{"messages": turns, column: images}]))
    assert ("is not a folder" in caplog.text) == warned


def test_what_conversion_finds_is_in_the_ledger_with_dataset_and_row(tmp_path: Path) -> None:
    meta = write_meta(tmp_path, {"a": {"file_name": "a.jsonl"}}, a=[chat(0), chat(1, images=["x.jpg"])])
    examples = make_meta_dataset(meta)
    assert [(d.dataset, d.key, d.reason, d.action) for d in examples.ledger] == [
        ("a", "a/1", "surplus_media", "cut")
    ]
    assert len(examples) == 2
    assert examples.ledger.lost() == 0
    lazy = open_meta_dataset(meta)
    for _ in range(3):
        list(lazy)
    assert len(lazy.ledger) == 1, "reading again finds the same, once"


def test_strict_and_confine_are_set_in_the_meta_file(tmp_path: Path) -> None:
    (tmp_path / "media").mkdir()
    entry = {"file_name": "a.jsonl", "media_dir": "media"}
    turns = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "y"}]
    rows = [chat(0, images=["x.jpg"]), {"messages": turns, "images": ["../x.jpg"]}, chat(2)]
    meta = write_meta(tmp_path, {"a": entry | {"strict": True, "confine": True}}, a=rows)
    examples = make_meta_dataset(meta, on_bad="skip")
    assert len(examples) == 1
    assert {d.key: d.reason for d in examples.ledger} == {"a/0": "surplus_media", "a/1": "outside_media_dir"}
    assert len(make_meta_dataset(write_meta(tmp_path, {"a": entry}, a=rows))) == 3


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("both", "data/both/x.jpg"),
        ("next_to_meta", "data/next_to_meta/x.jpg"),
        ("neither", "data/neither/x.jpg"),
    ],
)
def test_a_relative_media_dir_is_next_to_the_meta_file(
    name: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for folder in ("both", "data/both", "data/next_to_meta"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert _image_with_media_dir(tmp_path / "data", name) == str(tmp_path / expected)
    assert "using the one in the working directory" not in caplog.text


def test_a_media_dir_that_only_the_working_directory_has_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in ("data", "images"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    assert _image_with_media_dir(tmp_path / "data", "images") == "images/x.jpg"
    expected = "media_dir images is not next to the meta file; using the one in the working directory"
    assert expected in caplog.text


def _image_with_media_dir(folder: Path, media_dir: str) -> str:
    row = {"messages": [{"role": "user", "content": "<image>"}], "images": ["x.jpg"]}
    meta = write_meta(folder, {"a": {"file_name": "a.jsonl", "media_dir": media_dir}}, a=[row])
    image: str = open_meta_dataset(meta)[0]["conversation"][0]["content"][0]["image"]
    return image


def test_a_dot_for_the_folder_of_the_meta_file_is_in_no_path_and_dots_for_the_one_above_stay(
    tmp_path: Path,
) -> None:
    for given, path in (
        (".", "data/cat.png"),
        ("./pics/", "data/pics/cat.png"),
        ("..", "data/../cat.png"),
    ):
        (tmp_path / "data" / "pics").mkdir(parents=True, exist_ok=True)
        entry = {"file_name": "./a.jsonl", "media_dir": given}
        row = chat(0, images=["cat.png"])
        row["messages"][0]["content"] = "<image>"
        meta = write_meta(tmp_path / "data", {"a": entry}, a=[row])
        (part,) = open_meta_dataset(meta)[0]["conversation"][0]["content"]
        assert part["image"] == f"{tmp_path}/{path}"


def test_two_datasets_of_the_same_file_are_both_delivered_and_remarked(tmp_path: Path) -> None:
    meta = {"a": {"file_name": "a.jsonl"}, "b": {"file_name": "../" + tmp_path.name + "/a.jsonl"}}
    lazy = open_meta_dataset(write_meta(tmp_path, meta, a=[chat(0), chat(1)]))
    assert [lazy.key(i) for i in range(4)] == ["a/0", "a/1", "b/0", "b/1"]
    (drop,) = lazy.ledger
    assert (drop.key, drop.reason, drop.action) == ("b", "same_file", "kept")
    assert lazy.ledger.lost() == 0


@pytest.mark.parametrize(
    ("entry", "setting", "value"),
    [
        ({}, "file_name", None),
        ({"file_name": "a.jsonl", "ratio": 1}, "ratio", 1),
        ({"file_name": "a.jsonl", "sample_ratio": "half"}, "sample_ratio", "half"),
        ({"file_name": 3}, "file_name", 3),
        ({"file_name": "a.jsonl", "columns": {"x": "y"}}, "columns", ["x"]),
        ("a.jsonl", "a", "a.jsonl"),
    ],
)
def test_an_entry_of_a_meta_file_that_is_not_in_order_says_where(
    tmp_path: Path, entry: Any, setting: str, value: Any
) -> None:
    path = write_meta(tmp_path, {"a": entry}, a=[chat(0)])
    with raises_config(setting, value, match="dataset 'a'"):
        make_meta_dataset(path)


def test_a_negative_ratio_is_rejected(tmp_path: Path) -> None:
    meta = {"a": {"file_name": "a.jsonl", "sample_ratio": -1}}
    with raises_config("sample_ratio", -1):
        make_meta_dataset(write_meta(tmp_path, meta, a=[chat(0)]))


def test_a_name_that_is_unknown_has_a_suggestion(tmp_path: Path) -> None:
    meta = write_meta(tmp_path, {"coco": {"file_name": "a.jsonl"}}, a=[chat(0)])
    with raises_config("dataset_names", ["x"], match=r"meta\.json: .*no dataset x; it has coco"):
        make_meta_dataset(meta, ["x"])
    with raises_config("dataset_names", ["cocoa"], match=r"cocoa \(did you mean 'coco'\?\)"):
        make_meta_dataset(meta, ["cocoa"])
    with raises_config("dataset_names", ["coco"], match="named twice"):
        make_meta_dataset(meta, ["coco", "coco"])
    mistyped = {"a": {"filename": "a.jsonl", "mediadir": "b"}}
    words = r"filename \(did you mean 'file_name'\?\), mediadir \(did you mean 'media_dir'\?\); known are"
    with raises_config("filename", "a.jsonl", match=words):
        make_meta_dataset(mistyped)


def test_a_meta_file_of_something_else_is_named(tmp_path: Path) -> None:
    with raises_config(path=tmp_path / "meta.json", match="expected an object of datasets"):
        make_meta_dataset(write_meta(tmp_path, "a.jsonl", a=[chat(0)]))


def test_a_name_that_stands_twice_in_the_meta_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text('{"a": {"file_name": "x"}, "a": {"file_name": "y"}}')
    with raises_config(path=tmp_path / "meta.json", match="duplicate name 'a'"):
        make_meta_dataset(tmp_path / "meta.json")


def test_a_missing_data_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"a\.jsonl"):
        make_meta_dataset(write_meta(tmp_path, {"a": {"file_name": "a.jsonl"}}))


def test_arguments_that_are_ignored_are_named(mixture: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_meta_dataset(str(mixture), fps=2, max_frames=8)
    assert "ignores the argument(s) fps, max_frames" in caplog.text


def test_an_empty_mixture_is_an_empty_list(tmp_path: Path) -> None:
    path = write_meta(tmp_path, {})
    assert make_meta_dataset(path) == []
    assert len(open_meta_dataset(path)) == 0
    assert make_meta_dataset(path).stats["n_images"] == 0
