"""Sidecars: what is in them, what they hold for, and how they line up with a dataset."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.processors import build
from count_samples import chat, save_processor, sidecars, write_chats, write_meta, write_rows
from demo_data import write_demo_data
from packhorse.count.columns import CountColumns
from packhorse.count.counting import count_meta
from packhorse.count.sidecar import Sidecar, counts_of
from packhorse.count.token_counter import TokenCounter
from packhorse.datasets import open_meta_dataset
from packhorse.errors import BadSample, ConfigError
from packhorse.families import Encoder
from packhorse.formats.conversation import parse_conversation
from packhorse.types import MEDIA_KINDS
from row_files import WRITERS


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, qwen: Any) -> Path:
    """The demo's three datasets, counted in parts of five rows; returns the meta file."""
    meta = write_demo_data(tmp_path_factory.mktemp("demo"))
    count_meta(meta, qwen, part_rows=5)
    return meta


def one_by_one(dataset: Any, qwen: Any) -> Iterator[tuple[Any, ...]]:
    counter = TokenCounter(Encoder(qwen))
    for index in range(len(dataset)):
        try:
            counted = counter.count(parse_conversation(dataset[index], dataset.key(index)))
        except BadSample as error:
            yield (error.reason, 0, 0, 0, 0, 0, 0, 0)
            continue
        count = counted.count
        kinds = (count.text, count.image, count.video, count.audio)
        yield ("ok", count.total, *kinds, count.supervised, count.patches)


def rows_of(columns: CountColumns) -> list[tuple[Any, ...]]:
    names = ("status", "total", "text", "image", "video", "audio", "supervised", "patches")
    return list(zip(*(getattr(columns, name).tolist() for name in names), strict=True))


def test_a_sidecar_has_the_counts_of_every_row_and_the_reason_of_every_bad_one(demo: Path, qwen: Any) -> None:
    dataset = open_meta_dataset(demo)
    columns = counts_of(dataset, qwen)
    assert columns is not None
    assert len(columns) == len(dataset) == 40
    assert rows_of(columns) == list(one_by_one(dataset, qwen))
    assert [dataset.key(int(place)) for place in np.flatnonzero(~columns.ok)] == ["charts/7"]
    assert columns.status[~columns.ok].tolist() == ["malformed_row"]
    assert columns.videos.sum() == 4
    assert columns.images.sum() == 23
    assert columns.exact.all()


def test_counts_line_up_with_shares_copies_and_ranks(demo: Path, qwen: Any) -> None:
    meta = json.loads(demo.read_text())
    shares = {"charts": 0.5, "chats": 2.5, "clips": 1.0}
    for name, share in shares.items():
        meta[name]["sample_ratio"] = share
        meta[name]["file_name"] = str(demo.parent / meta[name]["file_name"])
        if "media_dir" in meta[name]:
            meta[name]["media_dir"] = str(demo.parent / meta[name]["media_dir"])
    for rank in range(3):
        dataset = open_meta_dataset(meta, shard_data=True, rank=rank, world_size=3, remainder="keep")
        columns = counts_of(dataset, qwen)
        assert columns is not None
        assert rows_of(columns) == list(one_by_one(dataset, qwen))


def test_rows_can_be_taken_in_any_order_and_more_than_once(demo: Path, qwen: Any) -> None:
    columns = counts_of(open_meta_dataset(demo), qwen)
    assert columns is not None
    assert rows_of(columns.take([3, 3, 0])) == [rows_of(columns)[place] for place in (3, 3, 0)]
    assert len(columns.take([])) == 0
    assert len(CountColumns.concat([])) == 0
    assert rows_of(CountColumns.concat([columns, columns])) == rows_of(columns) * 2


def test_a_sidecar_keeps_the_sizes_of_the_media_as_flat_columns(demo: Path) -> None:
    (path,) = demo.parent.glob("charts.jsonl.*.phcount")
    sidecar = Sidecar(path)
    media, columns = sidecar.media(), sidecar.columns()
    assert len(media.offsets) == len(sidecar) + 1 == 25
    assert np.diff(media.offsets).tolist() == columns.images.tolist()
    assert {MEDIA_KINDS[kind] for kind in media.kind} == {"image"}
    assert (media.height * 4 == media.width * 3).all()
    assert set(media.width.tolist()) <= {160, 224, 320}
    assert media.tokens.sum() == columns.image.sum()
    assert media.patches.sum() == columns.patches.sum()
    (path,) = demo.parent.glob("clips.jsonl.*.phcount")
    videos = Sidecar(path).media()
    assert videos.frames.tolist() == [24] * 4
    assert videos.fps.tolist() == [12.0] * 4
    assert videos.tokens.sum() == Sidecar(path).columns().video.sum()


def test_a_sidecar_is_not_compressed_and_lies_in_memory_maps(demo: Path) -> None:
    import pyarrow as pa

    before = pa.total_allocated_bytes()
    batches = list(Sidecar(sidecars(demo.parent)[0]).batches())
    assert sum(batch.num_rows for batch in batches) == 24
    assert pa.total_allocated_bytes() - before < 1000


@pytest.mark.parametrize("kind", WRITERS)
def test_every_type_of_file_can_be_counted(kind: str, tmp_path: Path, qwen: Any, cache: Path) -> None:
    rows = [chat(n) for n in range(11)]
    address = WRITERS[kind](tmp_path, rows)
    meta = {"a": {"file_name": address}}
    count_meta(meta, qwen, part_rows=4)
    dataset = open_meta_dataset(meta)
    columns = counts_of(dataset, qwen)
    assert columns is not None
    assert rows_of(columns) == list(one_by_one(dataset, qwen))


def test_the_details_of_bad_rows_come_with_the_counts(demo: Path, qwen: Any) -> None:
    columns = counts_of(open_meta_dataset(demo), qwen)
    assert columns is not None
    assert [bool(text) for text in columns.detail] == (~columns.ok).tolist()
    (bad,) = np.flatnonzero(~columns.ok)
    assert columns.take([0, bad]).detail.tolist() == [
        "",
        "not valid JSON: Expecting value: column 79 of the row",
    ]


def test_counts_are_found_by_the_path_of_the_processor(tmp_path: Path, cache: Path) -> None:
    saved = save_processor(tmp_path / "processor")
    meta = write_chats(tmp_path / "data", 3)
    count_meta(meta, saved)
    for path in (saved, Path(saved)):
        columns = counts_of(open_meta_dataset(meta), path)
        assert columns is not None
        assert len(columns) == 3
    with pytest.raises(ConfigError, match="no such folder"):
        counts_of(open_meta_dataset(meta), str(tmp_path / "nothing"))


def test_without_a_sidecar_there_are_no_counts(tmp_path: Path, qwen: Any, cache: Path, caplog: Any) -> None:
    assert counts_of(open_meta_dataset(write_chats(tmp_path, 3)), qwen) is None
    assert caplog.text == ""  # nothing was ever counted: no warning


def test_the_log_says_why_count_files_are_not_used(
    tmp_path: Path, qwen: Any, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    meta = write_chats(tmp_path, 3)
    count_meta(meta, qwen)

    def logged_reason(meta: Any, processor: Any) -> str:
        caplog.clear()
        assert counts_of(open_meta_dataset(meta), processor) is None
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        return record.getMessage()

    other = build("qwen2_vl")
    other.chat_template = "{% for m in messages %}{{ m.role }}{{ m.content[0].text }}{% endfor %}"
    assert f"{tmp_path}/chats.jsonl was counted with another chat template" in logged_reason(meta, other)
    strict = {"chats": {"file_name": str(tmp_path / "chats.jsonl"), "strict": True}}
    assert "with another set of rules (columns, tags, media folder)" in logged_reason(strict, qwen)
    write_rows(tmp_path / "more.jsonl", [json.dumps(chat(1))])
    more = {name: {"file_name": str(tmp_path / f"{name}.jsonl")} for name in ("chats", "more")}
    assert f"(more: {tmp_path}/more.jsonl was never counted)" in logged_reason(more, qwen)
    with open(tmp_path / "chats.jsonl", "a") as file:
        file.write(json.dumps(chat(7)) + "\n")
    assert f"chats: {tmp_path}/chats.jsonl has changed since it was counted" in logged_reason(meta, qwen)


def test_counts_hold_for_one_state_of_the_file_one_template_and_one_set_of_rules(
    tmp_path: Path, qwen: Any
) -> None:
    meta = write_chats(tmp_path, 6)
    count_meta(meta, qwen)
    assert counts_of(open_meta_dataset(meta), qwen) is not None
    other = build("qwen2_vl")
    other.chat_template = "{% for m in messages %}{{ m.role }}{{ m.content[0].text }}{% endfor %}"
    assert counts_of(open_meta_dataset(meta), other) is None
    larger = build("qwen2_vl")
    larger.image_processor.size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 512}
    assert counts_of(open_meta_dataset(meta), larger) is None
    stricter = write_meta(tmp_path, {"chats": {"file_name": "chats.jsonl", "strict": True}})
    assert counts_of(open_meta_dataset(stricter), qwen) is None
    meta = write_meta(tmp_path, {"other name": {"file_name": "chats.jsonl", "sample_ratio": 2}})
    assert counts_of(open_meta_dataset(meta), qwen) is not None
    with open(tmp_path / "chats.jsonl", "a") as file:
        file.write(json.dumps(chat(7)) + "\n")
    assert counts_of(open_meta_dataset(meta), qwen) is None


def test_how_a_path_is_spelled_does_not_matter_and_a_folder_may_move(
    tmp_path: Path, qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    write_demo_data(home)
    monkeypatch.chdir(tmp_path)
    count_meta("home/meta.json", qwen)
    first = {path.name: path.read_bytes() for path in sidecars(home)}
    assert len(first) == 3
    monkeypatch.chdir(home)
    assert count_meta("meta.json", qwen).counted_rows == 0
    assert counts_of(open_meta_dataset(home / "meta.json"), qwen) is not None
    monkeypatch.chdir("/")
    shutil.copytree(home, tmp_path / "moved")  # with the times of the files
    assert count_meta(tmp_path / "moved" / "meta.json", qwen).counted_rows == 0
    for path in sidecars(tmp_path / "moved"):
        path.unlink()
    count_meta(tmp_path / "moved" / "meta.json", qwen)
    assert {path.name: path.read_bytes() for path in sidecars(tmp_path / "moved")} == first


def test_a_damaged_sidecar_is_ignored_and_recounted(tmp_path: Path, qwen: Any) -> None:
    meta = write_chats(tmp_path, 6)
    count_meta(meta, qwen)
    (path,) = sidecars(tmp_path)
    whole = path.read_bytes()
    for damage in (b"", whole[:100], whole[:-20], b"x" * len(whole)):
        path.write_bytes(damage)
        assert counts_of(open_meta_dataset(meta), qwen) is None
        assert count_meta(meta, qwen).counted_rows == 6
        assert path.read_bytes() == whole


def test_where_the_folder_cannot_be_written_counts_go_to_the_cache(
    tmp_path: Path, cache: Path, qwen: Any
) -> None:
    meta = write_chats(tmp_path / "data", 6)
    cache.mkdir()
    cache.chmod(0o777)
    (tmp_path / "data").chmod(0o555)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)  # root may write everywhere
    try:
        report = count_meta(meta, qwen)
        assert counts_of(open_meta_dataset(meta), qwen) is not None
        assert count_meta(meta, qwen).counted_rows == 0
    finally:
        if was_root:
            os.seteuid(0)
        (tmp_path / "data").chmod(0o755)
    assert Path(report.datasets[0].sidecar).parent == cache / "counts"
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["chats.jsonl", "meta.json"]


def test_an_empty_file_has_an_empty_sidecar(tmp_path: Path, qwen: Any) -> None:
    write_rows(tmp_path / "none.jsonl", [])
    meta = write_meta(tmp_path, {"none": {"file_name": "none.jsonl"}})
    report = count_meta(meta, qwen)
    assert report.datasets[0].rows == report.datasets[0].longest == 0
    columns = counts_of(open_meta_dataset(meta), qwen)
    assert columns is not None
    assert len(columns) == 0
    assert len(Sidecar(report.datasets[0].sidecar).media().offsets) == 1
