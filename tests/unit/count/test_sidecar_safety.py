"""Counts are right or absent: replaced files, other folders, other machines, interruptions, mangled files."""

import errno
import gzip
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image

from count_samples import (
    Stopped,
    StopsAfter,
    chat,
    sidecars,
    stale_files,
    write_chats,
    write_meta,
    write_rows,
)
from packhorse.count import counting
from packhorse.count.count_report import write_counted_jsonl
from packhorse.count.counting import count_meta, save_part
from packhorse.count.parts import PartCounter
from packhorse.count.sidecar import Sidecar, counts_of, open_sidecar, sidecar_locations
from packhorse.datasets import open_meta_dataset
from packhorse.errors import SystemFault
from raising import raises_config


class Engine:
    """Calls a function between two tasks."""

    def __init__(self, between: Callable[[int], None]) -> None:
        self.between = between

    def run(self, work: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        for number, task in enumerate(tasks):
            yield number, work(task)
            self.between(number)


def replaced_in_the_middle(path: Path, row: int) -> None:
    """Another file under the same name, of the same size and with the same edges."""
    lines = path.read_text().splitlines(keepends=True)
    lines[row] = "x" * (len(lines[row]) - 1) + "\n"
    other = path.with_name("other")
    other.write_text("".join(lines))
    os.utime(other, ns=(0, path.stat().st_mtime_ns + 10_000_000))
    os.replace(other, path)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_replaced_file_is_reread_in_the_same_process(fresh: bool, tmp_path: Path, qwen: Any) -> None:
    rows = [chat(n) | {"id": "x" * 200} for n in range(1000)]  # well above two edges of 64 KiB
    meta = write_meta(tmp_path, {"a": {"file_name": "a.jsonl"}})
    write_rows(tmp_path / "a.jsonl", rows)
    assert count_meta(meta, qwen, part_rows=250).datasets[0].bad == {}
    replaced_in_the_middle(tmp_path / "a.jsonl", 500)
    report = count_meta(meta, qwen, part_rows=250, fresh=fresh)
    assert report.datasets[0].bad == {"malformed_row": 1}


def test_a_worker_that_lives_on_rereads_a_replaced_file(
    tmp_path: Path, qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "a.jsonl", [chat(n) | {"id": "x" * 200} for n in range(1000)])
    meta = write_meta(tmp_path, {"a": {"file_name": "a.jsonl"}})
    worker = PartCounter(qwen)  # made once, as in a process of a cluster
    monkeypatch.setattr(counting, "PartCounter", lambda *_: worker)
    assert count_meta(meta, qwen).datasets[0].bad == {}
    replaced_in_the_middle(tmp_path / "a.jsonl", 500)
    assert count_meta(meta, qwen, fresh=True).datasets[0].bad == {"malformed_row": 1}


@pytest.fixture
def images(tmp_path: Path) -> dict[str, Any]:
    """A dataset without a media folder, and two folders with images of the same name."""
    for name, size in (("one", (100, 100)), ("two", (400, 300))):
        (tmp_path / name).mkdir()
        Image.new("RGB", size).save(tmp_path / name / "i.png")
    turns = [{"role": "user", "content": "<image>what"}, {"role": "assistant", "content": "ok"}]
    write_rows(tmp_path / "m.jsonl", [{"messages": turns, "images": ["i.png"]}])
    return {"m": {"file_name": str(tmp_path / "m.jsonl")}}


def test_where_the_working_directory_holds_the_media_counts_hold_for_it_alone(
    tmp_path: Path, qwen: Any, images: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / "one")
    small = count_meta(images, qwen).datasets[0].tokens["image"]
    monkeypatch.chdir(tmp_path / "two")
    assert counts_of(open_meta_dataset(images), qwen) is None
    report = count_meta(images, qwen, verify=1)
    assert report.datasets[0].tokens["image"] > small
    assert report.verified is not None
    assert report.verified.failed == ()
    monkeypatch.chdir(tmp_path / "one")
    counts = counts_of(open_meta_dataset(images), qwen)
    assert counts is not None
    assert counts.image.tolist() == [small]


def test_counts_of_rows_without_media_hold_in_every_directory(
    tmp_path: Path, qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = write_chats(tmp_path, 5)
    with open(tmp_path / "chats.jsonl", "a") as file:
        file.write("no row\n")
    count_meta(meta, qwen)
    (path,) = sidecars(tmp_path)
    found = path.read_bytes()
    monkeypatch.chdir("/")
    assert counts_of(open_meta_dataset(meta), qwen) is not None
    assert count_meta(meta, qwen).counted_rows == 0
    count_meta(meta, qwen, fresh=True)
    assert path.read_bytes() == found
    assert sidecars(tmp_path) == [path]


def test_a_fresh_count_in_the_cache_has_priority_over_an_old_one_next_to_the_data(
    tmp_path: Path, qwen: Any, images: dict[str, Any], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images["m"]["media_dir"] = str(tmp_path / "one")
    old = count_meta(images, qwen).datasets[0].tokens["image"]
    (next_to_data,) = sidecars(tmp_path)
    kept = next_to_data.read_bytes()
    Image.new("RGB", (400, 300)).save(tmp_path / "one" / "i.png")
    may_write = counting.may_write
    monkeypatch.setattr(counting, "may_write", lambda folder: folder.parent != tmp_path and may_write(folder))
    new = count_meta(images, qwen, fresh=True, part_rows=7).datasets[0].tokens["image"]
    assert new > old
    next_to_data.write_bytes(kept)  # in a read-only folder it could not be removed
    os.utime(next_to_data, ns=(0, 10**18))
    counts = counts_of(open_meta_dataset(images), qwen)
    assert counts is not None
    assert counts.image.tolist() == [new]
    (location,) = sidecar_locations(open_meta_dataset(images), qwen)
    recorded = location.recorded_parts()
    assert recorded is not None
    assert recorded[0] == 7


def test_the_counts_of_a_file_whose_name_goes_on_are_left_alone(tmp_path: Path, qwen: Any) -> None:
    write_rows(tmp_path / "t.jsonl", [chat(n) for n in range(3)])
    with gzip.open(tmp_path / "t.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(chat(n)) + "\n" for n in range(4)))
    packed = {"b": {"file_name": str(tmp_path / "t.jsonl.gz")}}
    count_meta(packed, qwen)
    count_meta({"a": {"file_name": str(tmp_path / "t.jsonl")}}, qwen)
    assert counts_of(open_meta_dataset(packed), qwen) is not None


def test_the_slower_of_two_machines_takes_the_count_file_of_the_faster(
    tmp_path: Path, qwen: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = write_chats(tmp_path / "data", 12)

    def other_machine(number: int) -> None:
        if number == 1:
            with monkeypatch.context() as there:
                there.setenv("PACKHORSE_CACHE", str(tmp_path / "other cache"))  # and so no common lock
                count_meta(meta, qwen, part_rows=3)

    report = count_meta(meta, qwen, part_rows=3, engine=Engine(other_machine))
    assert report.datasets[0].rows == 12
    assert len(sidecars(tmp_path / "data")) == 1
    assert stale_files(tmp_path / "data") == []


def remove_parts(folder: Path) -> None:
    for path in folder.glob("*.parts/*.arrow"):
        path.unlink()


def test_parts_that_another_process_removes_are_recounted(tmp_path: Path, qwen: Any) -> None:
    meta = write_chats(tmp_path, 12)
    rounds: list[int] = []

    def remove_once(number: int) -> None:
        if number == 1 and not rounds:
            rounds.append(number)
            remove_parts(tmp_path)

    report = count_meta(meta, qwen, part_rows=3, engine=Engine(remove_once))
    assert (report.counted_rows, report.datasets[0].reused) == (12, 0)
    counted = sidecars(tmp_path)[0].read_bytes()
    count_meta(meta, qwen, part_rows=3, fresh=True)
    assert sidecars(tmp_path)[0].read_bytes() == counted


def test_parts_that_another_process_removes_repeatedly_raise_one_error(tmp_path: Path, qwen: Any) -> None:
    meta = write_chats(tmp_path, 12)
    # In every round two parts are missing, and the last one is counted after the others are removed.
    with pytest.raises(SystemFault, match="parts were removed while the count was running") as caught:
        count_meta(meta, qwen, part_rows=3, engine=RemovesFirst(tmp_path))
    assert "free disk space" not in str(caught.value)


class RemovesFirst:
    """An engine during which another process clears the folder before the last part is counted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, work: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        for number, task in enumerate(tasks):
            if number == len(tasks) - 1:
                remove_parts(self.folder)
            yield number, work(task)


def test_only_a_full_disk_asks_for_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(code: int) -> Callable[..., None]:
        def fail(*_: Any) -> None:
            raise OSError(code, os.strerror(code))

        return fail

    for code, asks in ((errno.ENOENT, False), (errno.EIO, False), (errno.ENOSPC, True)):
        monkeypatch.setattr("packhorse.count.counting.write_atomic", failing(code))
        with pytest.raises(SystemFault) as caught:
            save_part(tmp_path / "part", b"")
        assert ("free disk space" in str(caught.value)) is asks


def test_a_fresh_count_that_was_interrupted_goes_on(
    tmp_path: Path, qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = write_chats(tmp_path, 12)
    count_meta(meta, qwen, part_rows=3)
    with pytest.raises(Stopped):
        count_meta(meta, qwen, part_rows=3, fresh=True, engine=StopsAfter(2))
    assert counts_of(open_meta_dataset(meta), qwen) is None
    assert count_meta(meta, qwen).counted_rows == 6  # the rest of it, and none of the old ones
    assert stale_files(tmp_path) == []


def with_about(path: Path, about: Any) -> None:
    """The same count file, saying something else about itself."""
    with pa.memory_map(str(path)) as source:
        table = pa.ipc.open_file(source).read_all()
    text = about if isinstance(about, str) else json.dumps(about)
    schema = table.schema.with_metadata({"packhorse": text})
    made = path.with_name("made")
    with pa.ipc.new_file(str(made), schema) as writer:
        for batch in table.to_batches():
            writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))
    os.replace(made, path)


def test_a_file_that_does_not_say_what_it_holds_is_passed_over(tmp_path: Path, qwen: Any) -> None:
    meta = write_chats(tmp_path, 6)
    count_meta(meta, qwen)
    (path,) = sidecars(tmp_path)
    about = Sidecar(path).about
    needed = ("format", "parts", "rows", "part_rows", "settings_key", "settings")
    lacking = [{key: about[key] for key in about if key != name} for name in needed]
    for mangled in (*lacking, about | {"parts": 1}, [], "{", "null"):
        with_about(path, mangled)
        with raises_config(path=path, match=r"is not a count file|of another format, or damaged"):
            Sidecar(path)
        assert open_sidecar(path) is None
        assert counts_of(open_meta_dataset(meta), qwen) is None
        assert count_meta(meta, qwen).counted_rows == 6


def test_a_row_that_only_mentions_a_field_of_the_counts_is_copied_as_it_is(tmp_path: Path, qwen: Any) -> None:
    row = json.dumps(chat(3)).replace("Question", "caf\\u00e9  _text_tokens and mm_inputs_meta:")
    row = row.replace(": ", ":   ", 1)
    write_rows(tmp_path / "a.jsonl", [row])
    report = count_meta(write_meta(tmp_path, {"a": {"file_name": "a.jsonl"}}), qwen)
    (path,) = write_counted_jsonl(report.files, tmp_path / "copies")
    assert path.read_text().startswith(row[:-1] + ",")
    assert "_text_tokens" in json.loads(path.read_text())
