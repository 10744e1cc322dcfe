"""A run resumes only with the rows it began with: any change of any row is rejected, and the file is
named."""

import gzip
import io
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import packhorse
from contract.processors import processor
from count_samples import write_meta
from loader_samples import chat as example
from loader_samples import delivered_rows, texts
from loader_samples import load as load_examples
from packhorse.count.contents import digest_of_examples
from packhorse.errors import ConfigError
from raising import raises_config

ROWS = 30
FORMATS = ["rows.jsonl", "rows.json", "rows.jsonl.gz", "rows.json.gz", "rows.parquet"]


def row(number: int, word: str = "horse") -> dict[str, Any]:
    """Rows of one length: they differ only in content."""
    turns = [{"role": "user", "content": f"Say {number:04}."}, {"role": "assistant", "content": f"A {word}."}]
    return {"messages": turns}


def rows(number: int = ROWS) -> list[dict[str, Any]]:
    return [row(n) for n in range(number)]


def write(path: Path, content: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(content), path)
        return path
    lines = "".join(json.dumps(one) + "\n" for one in content)
    text = lines if ".jsonl" in path.name else json.dumps(content, indent=1)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def load(file: Path | str, **options: Any) -> packhorse.Loader:
    meta = {"chats": {"file_name": os.fspath(file)}}
    return load_examples(meta, model="unchecked", mode="pad", **options)


def saved_state(file: Path | str, **options: Any) -> dict[str, Any]:
    loader = load(file, **options)
    delivered_rows(loader, 3)
    state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    return state


def swap(content: list[Any], one: int, other: int) -> list[Any]:
    changed = list(content)
    changed[one], changed[other] = changed[other], changed[one]
    return changed


@st.composite
def edits(draw: st.DrawFn) -> list[dict[str, Any]]:
    """The rows with any change: swapped, changed, removed, doubled, moved."""
    content, place = rows(), draw(st.integers(0, ROWS - 1))
    kind = draw(st.sampled_from(["swap", "word", "field", "remove", "double", "append"]))
    if kind == "swap":
        other = draw(st.integers(0, ROWS - 1).filter(lambda n: n != place))
        return swap(content, place, other)
    if kind == "word":
        content[place] = row(place, "goat")
    elif kind == "field":
        content[place]["note"] = "of no meaning"
    elif kind == "remove":
        del content[place]
    elif kind == "double":
        content.insert(place, content[place])
    else:
        content.append(row(ROWS))
    return content


@settings(max_examples=25, deadline=None, derandomize=True)
@given(changed=edits(), verify=st.sampled_from(["changed", "full"]))
def test_any_edit_of_any_row_is_rejected_and_the_file_is_named(
    changed: list[dict[str, Any]], verify: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = write(Path(folder, "rows.jsonl"), rows())
        state = saved_state(file)
        write(file, changed)
        loader = load(file, verify=verify)
        with raises_config("data", ["chats"]) as caught:
            loader.load_state_dict(state)
        assert f"{file} (dataset 'chats')" in str(caught.value)
        assert state["data"][0][1] in str(caught.value)
        assert loader.state_dict()["data"][0][1] in str(caught.value)
        write(file, rows())
        load(file, verify=verify).load_state_dict(state)  # put back, it is the same again


@pytest.mark.parametrize("name", FORMATS)
def test_swapped_rows_are_rejected_in_every_format(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name, rows())
    state = saved_state(file)
    write(file, swap(rows(), 11, 20))
    with raises_config("data", ["chats"], match=f"{name}.*digest {state['data'][0][1]} when"):
        load(file).load_state_dict(state)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("counted_again", [False, True])
def test_a_file_that_was_touched_or_copied_is_the_same(
    tmp_path: Path, name: str, counted_again: bool
) -> None:
    file = write(tmp_path / name, rows())
    state = saved_state(file)
    os.utime(file, ns=(1, 1))
    load(file).load_state_dict(state)
    (tmp_path / "elsewhere").mkdir()
    copy = Path(shutil.copy(file, tmp_path / "elsewhere"))
    if counted_again:
        packhorse.count_meta({"x": {"file_name": str(copy)}}, processor("qwen2_vl"), part_rows=7)
    again = load(copy)
    again.load_state_dict(state)
    assert again.cursor == 3


def test_a_remote_file_that_was_replaced_is_rejected() -> None:
    with fsspec.open("memory://changed-data/rows.jsonl", "wb") as file:
        file.write("".join(json.dumps(one) + "\n" for one in rows()).encode())
    state = saved_state("memory://changed-data/rows.jsonl")
    load("memory://changed-data/rows.jsonl").load_state_dict(state)
    with fsspec.open("memory://changed-data/rows.jsonl", "wb") as file:
        file.write("".join(json.dumps(one) + "\n" for one in swap(rows(), 3, 17)).encode())
    with raises_config("data", ["chats"], match=r"memory://changed-data/rows\.jsonl"):
        load("memory://changed-data/rows.jsonl").load_state_dict(state)


@pytest.fixture
def edited_in_secret(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A large file with two rows swapped in its middle, and the size and time of change it had before."""
    content = [row(n, "word " * 30) for n in range(1200)]
    file = write(tmp_path / "rows.jsonl", content)
    state = saved_state(file)
    before = file.stat()
    write(file, swap(content, 600, 601))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    return file, state


def test_a_full_check_finds_an_edit_that_kept_size_and_time(
    edited_in_secret: tuple[Path, dict[str, Any]],
) -> None:
    file, state = edited_in_secret
    load(file).load_state_dict(state)  # looks unchanged: this is what verify="full" is for
    with pytest.raises(ConfigError, match=rf"{file}: rows 0 to 1199 have changed since .* --fresh"):
        load(file, verify="full")
    packhorse.count_meta({"x": {"file_name": str(file)}}, processor("qwen2_vl"), fresh=True)
    with raises_config("data", ["chats"], match=f"{file} .*digest {state['data'][0][1]} when"):
        load(file, verify="full").load_state_dict(state)


def test_counts_that_were_passed_do_not_hide_an_edit(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", rows())
    counts = load(file).counts
    state = saved_state(file, counts=counts)
    write(file, swap(rows(), 1, 2))
    with raises_config("data", ["chats"], match=r"rows\.jsonl"):
        load(file, counts=counts).load_state_dict(state)


def test_only_the_changed_file_of_a_mixture_is_named(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write(tmp_path / f"{name}.jsonl", rows())
    meta = write_meta(tmp_path, {name: {"file_name": f"{name}.jsonl"} for name in ("first", "second")})
    state = load_examples(meta, model="unchecked").state_dict()
    write(tmp_path / "second.jsonl", swap(rows(), 0, ROWS - 1))
    with raises_config("data", ["second"]) as caught:
        load_examples(meta, model="unchecked").load_state_dict(state)
    assert "second.jsonl" in str(caught.value)
    assert "first.jsonl" not in str(caught.value)
    with raises_config("data", ["first", "second"], match="this loader has first"):
        load_examples(meta, model="unchecked", dataset_names=["first"]).load_state_dict(state)


def test_other_columns_of_the_same_file_are_another_plan(tmp_path: Path) -> None:
    both = [one | {"other": swap(one["messages"], 0, 0)} for one in rows()]
    file = write(tmp_path / "rows.jsonl", both)
    plans = [
        load_examples({"x": {"file_name": str(file), "columns": {"messages": name}}}, model="unchecked")
        for name in ("messages", "other")
    ]
    assert plans[0].plan_key != plans[1].plan_key


# Rows in memory.


@settings(max_examples=25, deadline=None, derandomize=True)
@given(changed=st.permutations(range(12)).filter(lambda order: order != list(range(12))))
def test_examples_in_another_order_are_rejected(changed: list[int]) -> None:
    content = [example(f"why {n:03}", "so") for n in range(12)]
    loader = load_examples(content, model="unchecked", mode="pad")
    again = load_examples([content[n] for n in changed], model="unchecked", mode="pad")
    with raises_config("data", ["data in memory"], match="changed since"):
        again.load_state_dict(loader.state_dict())


def image(value: int) -> Image.Image:
    drawn = Image.new("RGB", (60, 60), "tan")
    drawn.putpixel((30, 30), (value, 0, 0))
    return drawn


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (image(1), image(2)),
        (Image.new("RGB", (4, 6)), Image.new("RGB", (6, 4))),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (np.zeros(3, np.float32), np.zeros(3, np.int32)),
        (np.arange(6)[::2], np.arange(3)),
        (torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
        (b"a", b"b"),
        (Path("a.png"), Path("b.png")),
        (np.int64(1), np.int64(2)),
        ({1: "a"}, {1: "b"}),
        ("\ud800", "\ud801"),
        (2**70, 2**71),
        ((1, 2), (2, 1)),
        ({"a", "b"}, {"a", "c"}),
        (np.array(["a", None], dtype=object), np.array(["b", None], dtype=object)),
        (torch.tensor([0.0, 1.0]).to_sparse(), torch.tensor([0.0, 2.0]).to_sparse()),
        (np.longdouble(1), np.longdouble(2)),
    ],
)
def test_any_change_of_a_value_in_memory_changes_the_digest(one: Any, other: Any) -> None:
    assert digest_of_examples([{"x": one}]) == digest_of_examples([{"x": one}])
    assert digest_of_examples([{"x": one}]) != digest_of_examples([{"x": other}])


def test_equal_examples_have_one_digest_whatever_the_order_of_their_keys_and_where_they_lie() -> None:
    class Decoder:
        """Something of which nothing is known: only its kind counts."""

    first = [{"a": 1, "b": image(1), "c": Decoder()}]
    assert digest_of_examples(first) == digest_of_examples([{"c": Decoder(), "b": image(1), "a": 1}])
    assert digest_of_examples([["ab"], ["c"]]) != digest_of_examples([["a"], ["bc"]])


def broken_image() -> Image.Image:
    file = io.BytesIO()
    Image.effect_noise((64, 64), 90).save(file, "PNG")
    return Image.open(io.BytesIO(file.getvalue()[:900]))


def strings() -> Any:
    """Equal strings that lie at another address each time."""
    return np.array(["".join(["long ", "text"]), None], dtype=object)


@pytest.mark.parametrize("make", [broken_image, strings])
def test_what_is_made_twice_has_one_digest(make: Any) -> None:
    one, other = make(), make()
    assert digest_of_examples([{"x": one}]) == digest_of_examples([{"x": other}])


@pytest.mark.parametrize("odd", [2**70, "\ud800", {(1, 2): 3}, [[[2**70]]]])
def test_a_value_that_json_cannot_hold_hides_no_change_next_to_it(odd: Any) -> None:
    def row(sample: int) -> dict[str, Any]:
        audio = np.zeros(5000)
        audio[2500] = sample
        return {"id": odd, "turns": [{"audio": audio, "text": "a"}]}

    assert digest_of_examples([row(0)]) == digest_of_examples([row(0)])
    assert digest_of_examples([row(0)]) != digest_of_examples([row(1)])


def test_a_hugging_face_dataset_is_hashed_without_decoding_it() -> None:
    class NeverDecoded(datasets.Dataset):
        def __getitem__(self, key: Any) -> Any:
            raise AssertionError("a row was decoded")

    content = texts(600)
    whole = NeverDecoded.from_list(content)
    assert digest_of_examples(whole) == digest_of_examples(NeverDecoded.from_list(content))
    assert digest_of_examples(whole) != digest_of_examples(NeverDecoded.from_list(swap(content, 598, 599)))


# States of other versions.


def test_a_state_of_the_version_before_is_rejected_with_the_way_out(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", rows())
    state = saved_state(file) | {"version": 1, "ledger": {"rank": 0, "entries": 0}}
    del state["data"], state["used"]
    with raises_config("version", 1, match=r"expected 2.*loader.set_epoch\(0\)"):
        load(file).load_state_dict(state)
