"""Cleaned copies: nothing is lost without an entry, and what is left has no error."""

import hashlib
import json
import multiprocessing
import os
import random
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planted import DEFECTS, MAX_LENGTH, Planted, image_row, make_image, text_row, turns, write_planted

from contract.processors import processor
from count_samples import write_meta, write_rows
from packhorse.errors import ConfigError
from packhorse.ledger import Ledger
from packhorse.tools.check import Fixed, check_meta, write_fixed
from packhorse.types import Reason
from raising import raises_config


def fixed_copy(meta: Path, folder: Path, *, drop_duplicates: bool = False, **settings: Any) -> Fixed:
    report = check_meta(meta, repair=True, **settings)
    return write_fixed(report, folder, drop_duplicates=drop_duplicates)


def digests(folder: Path) -> dict[Path, str]:
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


def assert_every_row_is_kept_or_recorded(planted: list[bytes], fixed: Fixed, name: str = "mixed") -> None:
    """Rows in = rows kept + rows dropped; kept ones are as they were unless the ledger says repaired."""
    ledger = Ledger.load(fixed.ledger)
    actions = {drop.key: drop.action for drop in ledger if drop.dataset == name}
    assert len(actions) == sum(drop.dataset == name for drop in ledger)  # one entry a row
    kept = [n for n in range(len(planted)) if actions.get(f"{name}/{n}") != "dropped"]
    (dataset,) = [one for one in fixed.datasets if one.name == name]
    lines = (Path(fixed.folder) / dataset.file).read_bytes().splitlines()
    assert len(lines) == len(kept) == dataset.kept
    assert dataset.rows == len(planted) == dataset.kept + dataset.dropped
    assert dataset.dropped == list(actions.values()).count("dropped")
    assert dataset.repaired == list(actions.values()).count("repaired")
    for number, line in zip(kept, lines, strict=True):
        if f"{name}/{number}" in actions:
            assert actions[f"{name}/{number}"] == "repaired"
            json.loads(line)
        else:
            assert line == planted[number]


def test_a_cleaned_copy_has_no_error_and_its_ledger_names_every_row_that_is_gone(tmp_path: Path) -> None:
    meta, planted = write_planted(tmp_path / "data")
    before = digests(tmp_path / "data")
    wanted: dict[str, Any] = {"processor": processor("qwen2_vl"), "max_length": MAX_LENGTH}
    fixed = fixed_copy(meta, tmp_path / "clean", **wanted)
    assert_every_row_is_kept_or_recorded(planted.lines, fixed)
    again = check_meta(fixed.meta, **wanted)
    assert again.counts()["error"] == 0
    assert again.as_dict()["rows"] == fixed.datasets[0].kept
    assert digests(tmp_path / "data") == before
    assert sorted(os.listdir(tmp_path / "clean")) == ["ledger.jsonl", "meta.json", "mixed.jsonl"]


REPAIRABLE = (
    lambda p: p.add({"messages": [{"role": "Human", "content": "Hi?"}, {"role": "gpt", "content": "Yes."}]}),
    lambda p: p.add(
        {"messages": turns("What is this?", "Dots."), "images": [make_image(p.media / "r.png", 77).name]}
    ),
)


@given(seed=st.integers(0, 2**32), size=st.integers(0, 25), drop=st.booleans())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_in_are_rows_kept_and_rows_in_the_ledger(
    tmp_path_factory: pytest.TempPathFactory, seed: int, size: int, drop: bool
) -> None:
    folder = tmp_path_factory.mktemp("fix")
    rng = random.Random(seed)
    planted = Planted(folder / "media")
    planted.media.mkdir()
    kinds = [*DEFECTS, *REPAIRABLE, *[Planted.add_good] * 20]
    for _ in range(size):
        rng.choice(kinds)(planted)
    (folder / "mixed.jsonl").write_bytes(b"".join(line + b"\n" for line in planted.lines))
    meta = write_meta(folder, {"mixed": {"file_name": "mixed.jsonl", "media_dir": "media"}})
    fixed = fixed_copy(meta, folder / "clean", drop_duplicates=drop, part_rows=rng.randint(1, 8))
    assert_every_row_is_kept_or_recorded(planted.lines, fixed)
    again = check_meta(fixed.meta)
    assert again.counts()["error"] == 0
    rules = {one.rule for one in again.findings()}
    assert not drop or "duplicate_conversation" not in rules


def test_what_has_one_plausible_reading_is_repaired_and_recorded(tmp_path: Path) -> None:
    make_image(tmp_path / "media" / "a.png", 1)
    make_image(tmp_path / "media" / "b.png", 2)
    rows = [
        {"messages": [{"role": " Human", "content": "Hi?"}, {"role": "GPT", "content": "Yes."}], "id": 7},
        {"messages": turns("Compare them: ä.", "Both are dots."), "images": ["a.png", "b.png"]},
        {"messages": turns("<image>And this?", "Dots."), "images": ["a.png", "b.png"]},  # which is meant?
        {"messages": [{"role": " HUMAN", "content": "Hi?"}]},  # repaired, it still has no answer
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    meta = write_meta(tmp_path, {"rows": {"file_name": "rows.jsonl", "media_dir": "media"}})
    fixed = fixed_copy(meta, tmp_path / "clean")
    first, second = map(json.loads, (tmp_path / "clean" / "rows.jsonl").read_text().splitlines())
    assert first == {"messages": turns("Hi?", "Yes."), "id": 7}
    assert second["messages"][0]["content"] == "<image><image>\nCompare them: ä."
    ledger = {drop.key: drop for drop in Ledger.load(fixed.ledger)}
    assert {key: (drop.action, drop.reason) for key, drop in ledger.items()} == {
        "rows/0": ("repaired", "unknown_role"),
        "rows/1": ("repaired", "surplus_media"),
        "rows/2": ("dropped", "surplus_media"),
        "rows/3": ("dropped", "unknown_role"),
    }
    assert "role 'GPT' became 'assistant'" in ledger["rows/0"].detail
    assert "2 <image> put in front" in ledger["rows/1"].detail
    assert "rows.jsonl:3 (byte" in ledger["rows/2"].detail
    assert check_meta(fixed.meta).passed(strict=True)


def test_duplicates_stay_unless_they_are_to_be_dropped(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [text_row(1), text_row(2), text_row(1)])
    write_rows(tmp_path / "b.jsonl", [text_row(2), text_row(3)])
    meta = write_meta(tmp_path, {name: {"file_name": f"{name}.jsonl"} for name in "ab"})
    assert [one.kept for one in fixed_copy(meta, tmp_path / "all").datasets] == [3, 2]
    fixed = fixed_copy(meta, tmp_path / "less", drop_duplicates=True)
    assert [one.kept for one in fixed.datasets] == [2, 1]
    found = {drop.key: drop.detail for drop in Ledger.load(fixed.ledger)}
    assert list(found) == ["a/2", "b/0"]
    # The reason is the entry's own; file and line stand once.
    assert re.fullmatch(r"the same as a/1; \S+/b\.jsonl:1 \(byte 0\)", found["b/0"])


def test_the_folder_must_be_new_or_empty(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [text_row(1)])
    meta = write_meta(tmp_path, {"rows": {"file_name": "rows.jsonl"}})
    with raises_config(path=tmp_path, match="is not empty"):
        fixed_copy(meta, tmp_path)
    with raises_config(path=tmp_path / "rows.jsonl", match="cannot be written to"):
        fixed_copy(meta, tmp_path / "rows.jsonl")
    (tmp_path / "empty").mkdir()
    assert fixed_copy(meta, tmp_path / "empty").datasets[0].kept == 1
    with raises_config("repair", False):
        write_fixed(check_meta(meta), tmp_path / "other")
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_file_that_changes_after_the_check_is_not_copied_from(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [text_row(1)])
    meta = write_meta(tmp_path, {"rows": {"file_name": "rows.jsonl"}})
    report = check_meta(meta, repair=True)
    write_rows(tmp_path / "rows.jsonl", [text_row(12), text_row(2)])
    with raises_config(path=tmp_path / "rows.jsonl", match="has changed since it was checked"):
        write_fixed(report, tmp_path / "clean")
    assert not (tmp_path / "clean").exists()


def test_paths_stay_right_whatever_a_dataset_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_image(tmp_path / "p.png", 1)
    for name in ("x", "y", "z"):
        write_rows(tmp_path / f"{name}.jsonl", [image_row(1, "p.png"), {"messages": []}])
    names = {"ledger": "x", "a/b": "y", "a_b": "z"}
    write_meta(tmp_path, {name: {"file_name": f"{file}.jsonl"} for name, file in names.items()})
    fixed = fixed_copy(Path("meta.json"), Path("clean"))
    assert len({one.file for one in fixed.datasets}) == 3
    assert len(list(Ledger.load(fixed.ledger))) == 3
    monkeypatch.chdir("/")
    assert check_meta(fixed.meta).counts() == {"error": 0, "warning": 2 + 2, "note": 0}


def test_a_file_that_cannot_be_read_is_in_the_ledger_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text('[{"messages": [')
    meta = write_meta(tmp_path, {"cut": {"file_name": "cut.json"}})
    (drop,) = Ledger.load(fixed_copy(meta, tmp_path / "clean").ledger)
    assert (drop.key, drop.action, drop.stage) == ("cut", "dropped", "read")
    assert check_meta(tmp_path / "clean" / "meta.json").passed()


def test_an_array_is_written_as_lines(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([text_row(1), text_row(2)], indent=2))
    meta = write_meta(tmp_path, {"rows": {"file_name": "rows.json"}})
    fixed_copy(meta, tmp_path / "clean")
    lines = (tmp_path / "clean" / "rows.jsonl").read_text().splitlines()
    assert list(map(json.loads, lines)) == [text_row(1), text_row(2)]


@pytest.mark.parametrize("rows", [4, 700])
def test_a_parquet_file_with_the_bytes_of_images_stays_one_without_its_bad_rows(
    tmp_path: Path, rows: int
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = [make_image(tmp_path / f"{n}.png", n).read_bytes() for n in range(4)]
    made = []
    for number in range(rows):
        image_bytes = data[number % 4] if number % 4 != 1 else data[1][:150]
        row: dict[str, Any] = {
            "messages": turns(f"<image>What is {number}?", "Dots."),
            "images": [{"bytes": image_bytes, "path": None}],
            "split": "train",
        }
        if number % 4 == 2:
            row["messages"][0]["content"] = f"What is {number}?"  # an image that no turn mentions
        made.append(row)
    table = pa.Table.from_pylist(made).replace_schema_metadata({"made_by": "exporter"})
    split = table.column("split").dictionary_encode()
    table = table.set_column(table.column_names.index("split"), "split", split)
    pq.write_table(table, tmp_path / "rows.parquet")
    meta = write_meta(tmp_path, {"rows": {"file_name": "rows.parquet"}})
    fixed = fixed_copy(meta, tmp_path / "clean")
    (one,) = fixed.datasets
    bad = len(range(1, rows, 4))
    assert (one.file, one.rows, one.kept, one.dropped) == ("rows.parquet", rows, rows - bad, bad)
    assert one.repaired == len(range(2, rows, 4))
    written = pq.read_table(tmp_path / "clean" / "rows.parquet")
    assert written.schema.equals(pq.read_schema(tmp_path / "rows.parquet"), check_metadata=True)
    expected = [row for number, row in enumerate(made) if number % 4 != 1]
    for row in expected:
        if "<image>" not in row["messages"][0]["content"]:
            row["messages"][0]["content"] = "<image>\n" + row["messages"][0]["content"]
    assert written.to_pylist() == expected
    actions = {drop.key: (drop.action, drop.reason) for drop in Ledger.load(fixed.ledger)}
    assert actions["rows/1"] == ("dropped", "broken_media")
    assert actions["rows/2"] == ("repaired", "surplus_media")
    again = check_meta(fixed.meta)
    assert again.counts()["error"] == 0
    assert again.as_dict()["rows"] == one.kept


def test_a_parquet_file_of_which_no_row_is_good_becomes_an_empty_one(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"messages": turns("<image>?", "Dots."), "images": ["gone.png"]}] * 3
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    fixed = fixed_copy(write_meta(tmp_path, {"a": {"file_name": "rows.parquet"}}), tmp_path / "clean")
    assert fixed.datasets[0].dropped == 3
    assert pq.read_table(tmp_path / "clean" / "a.parquet").num_rows == 0
    assert check_meta(fixed.meta).passed(strict=True)


def test_writing_a_copy_reports_its_progress(tmp_path: Path) -> None:
    for name in "ab":
        write_rows(tmp_path / f"{name}.jsonl", [text_row(n) for n in range(5)])
    meta = write_meta(tmp_path, {name: {"file_name": f"{name}.jsonl"} for name in "ab"})
    calls: list[tuple[int, int]] = []
    report = check_meta(meta, repair=True, part_rows=2)
    write_fixed(report, tmp_path / "clean", progress=lambda *now: calls.append(now))
    assert [done for done, _ in calls] == [2, 4, 5, 7, 9, 10]
    assert {total for _, total in calls} == {10}


def test_the_ledger_of_a_copy_and_the_linter_call_a_defect_by_the_same_name(tmp_path: Path) -> None:
    meta, _ = write_planted(tmp_path / "data")
    report = check_meta(meta, processor("qwen2_vl"), max_length=MAX_LENGTH, repair=True)
    errors = {(one.key, one.rule) for one in report.findings() if one.severity == "error"}
    ledger = Ledger.load(write_fixed(report, tmp_path / "clean").ledger)
    entries = {(drop.key, drop.reason) for drop in ledger}
    assert entries
    assert entries <= errors
    assert {drop.reason for drop in ledger} <= set(get_args(Reason))


def _race(meta: str, folder: str, ready: Any, results: Any) -> None:
    report = check_meta(meta, repair=True)
    ready.wait()
    try:
        write_fixed(report, folder)
        results.put("wrote")
    except ConfigError as error:
        results.put(str(error))


def test_of_two_processes_that_write_to_one_folder_one_wins_and_one_gets_an_error(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [text_row(n) for n in range(300)])
    meta = write_meta(tmp_path, {"rows": {"file_name": "rows.jsonl"}})
    context = multiprocessing.get_context("fork")
    ready, results = context.Barrier(2), context.Queue()
    both = [
        context.Process(target=_race, args=(str(meta), str(tmp_path / "clean"), ready, results))
        for _ in range(2)
    ]
    for process in both:
        process.start()
    messages = sorted(results.get(timeout=60) for _ in both)
    for process in both:
        process.join()
    assert messages[1] == "wrote"
    assert "is not empty" in messages[0]
    assert len((tmp_path / "clean" / "rows.jsonl").read_bytes().splitlines()) == 300
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
