"""The counting pass: what is counted, what is reused, what is compared, and how it fails."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from contract.processors import build, processor
from count_samples import (
    Stopped,
    StopsAfter,
    chat,
    python_path,
    save_processor,
    sidecars,
    stale_files,
    write_chats,
    write_meta,
    write_rows,
)
from demo_data import write_demo_data
from packhorse.count.count_report import write_counted_jsonl
from packhorse.count.counting import count_meta
from packhorse.count.token_counter import Counted, TokenCounter
from packhorse.datasets import make_meta_dataset
from packhorse.errors import ConfigError
from packhorse.rows.row_files import open_rows
from packhorse.utils.pool import LocalEngine
from raising import raises_config


class Backwards:
    """An engine that finishes the last task first."""

    def run(self, work: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        for number in reversed(range(len(tasks))):
            yield number, work(tasks[number])


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sidecars(folder)}


def test_the_bytes_are_the_same_in_one_process_in_two_in_any_order_and_after_an_interruption(
    tmp_path: Path, qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = write_demo_data(tmp_path)
    report = count_meta(meta, qwen, part_rows=5)
    assert report.counted_rows == 40
    expected = content(tmp_path)
    assert len(expected) == 3

    def again(engine: Any, with_processor: Any = qwen) -> int:
        for path in sidecars(tmp_path):
            path.unlink()
        counted = count_meta(meta, with_processor, part_rows=5, engine=engine).counted_rows
        assert content(tmp_path) == expected
        assert stale_files(tmp_path) == []
        return counted

    assert again(Backwards()) == 40
    for path in sidecars(tmp_path):
        path.unlink()
    with pytest.raises(Stopped):
        count_meta(meta, qwen, part_rows=5, engine=StopsAfter(3))
    assert len(list(tmp_path.glob("*.parts/*.arrow"))) == 3
    assert sidecars(tmp_path) == []
    assert again(None) == 40 - 3 * 5
    # Two real worker processes, each opening the saved processor.
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path / "path"))
    saved = save_processor(tmp_path / "processor")
    assert again(LocalEngine(2), saved) == 40


def test_a_second_run_counts_nothing(tmp_path: Path, qwen: Any) -> None:
    meta = write_chats(tmp_path, 10)
    assert count_meta(meta, qwen, part_rows=3).counted_rows == 10
    before = content(tmp_path)
    assert count_meta(meta, qwen, part_rows=3).counted_rows == 0
    assert count_meta(meta, qwen).counted_rows == 0
    assert content(tmp_path) == before
    assert count_meta(meta, qwen, part_rows=3, fresh=True).counted_rows == 10
    assert content(tmp_path) == before


def test_a_changed_file_is_counted_only_where_it_changed(tmp_path: Path, qwen: Any) -> None:
    meta = write_chats(tmp_path, 20)
    count_meta(meta, qwen, part_rows=4)
    path = tmp_path / "chats.jsonl"
    rows = path.read_text().splitlines()

    def recount(new: list[str], counted: int) -> None:
        write_rows(path, new)
        assert count_meta(meta, qwen, part_rows=4).counted_rows == counted
        (sidecar,) = sidecars(tmp_path)  # that of the state before is gone
        found = sidecar.read_bytes()
        count_meta(meta, qwen, part_rows=4, fresh=True)
        assert sidecar.read_bytes() == found
        assert stale_files(tmp_path) == []

    recount([*rows, *(json.dumps(chat(n)) for n in range(100, 103))], 3)  # appended
    recount(
        [*rows, *(json.dumps(chat(n)) for n in range(100, 106))], 4 + 2
    )  # the short last part is another now
    rows[9] = json.dumps(chat(99, words=50))
    recount(rows, 4)  # one row edited (and the tail gone again)
    recount(rows[4:], 0)  # a whole part cut from the front
    os.utime(path)
    recount(rows[4:], 0)  # touched only


def test_an_interrupted_run_goes_on_after_the_file_has_grown(tmp_path: Path, qwen: Any) -> None:
    meta = write_chats(tmp_path, 20)
    with pytest.raises(Stopped):
        count_meta(meta, qwen, part_rows=4, engine=StopsAfter(4))
    with open(tmp_path / "chats.jsonl", "a") as file:
        file.write(json.dumps(chat(5)) + "\n")
    assert count_meta(meta, qwen, part_rows=4).counted_rows == 4 + 1
    # A part that was damaged meanwhile is counted again.
    with pytest.raises(Stopped):
        count_meta(meta, qwen, part_rows=4, fresh=True, engine=StopsAfter(4))
    for path in sidecars(tmp_path):
        path.unlink()
    damaged = next(tmp_path.glob("*.parts/*.arrow"))
    damaged.write_bytes(damaged.read_bytes()[:50])
    assert count_meta(meta, qwen, part_rows=4).counted_rows == 4 + 4 + 1


def test_a_change_of_the_template_counts_everything_and_keeps_the_other_counts(
    tmp_path: Path, qwen: Any
) -> None:
    meta = write_chats(tmp_path, 6)
    count_meta(meta, qwen)
    other = build("qwen2_vl")
    other.chat_template = other.chat_template.replace("a helpful assistant", "helpful")
    assert other.chat_template != qwen.chat_template
    assert count_meta(meta, other).counted_rows == 6
    assert len(sidecars(tmp_path)) == 2
    assert count_meta(meta, qwen).counted_rows == 0


def test_datasets_that_share_a_file_are_counted_once_and_reported_twice(tmp_path: Path, qwen: Any) -> None:
    write_chats(tmp_path, 6)
    entry = {"file_name": "chats.jsonl"}
    meta = write_meta(tmp_path, {"a": entry, "b": entry | {"sample_ratio": 2}, "c": entry | {"strict": True}})
    report = count_meta(meta, qwen)
    assert report.counted_rows == 12
    assert [dataset.rows for dataset in report.datasets] == [6, 6, 6]
    assert len(sidecars(tmp_path)) == 2
    assert [one.name for one in count_meta(meta, qwen, dataset_names=["b"]).datasets] == ["b"]


def test_the_numbers_of_the_report_agree(tmp_path: Path, qwen: Any) -> None:
    report = count_meta(write_demo_data(tmp_path), qwen, part_rows=5)
    charts, chats, clips = report.datasets
    assert charts.bad == {"malformed_row": 1}
    assert [row.key for row in charts.examples] == ["charts/7"]
    assert charts.examples[0].detail == "not valid JSON: Expecting value: column 79 of the row"
    assert charts.examples[0].location.startswith(f"{tmp_path}/charts.jsonl:8 (byte ")
    assert str(tmp_path) not in charts.examples[0].detail
    assert charts.media == {"images": 23, "videos": 0, "audios": 0}
    assert clips.tokens["video"] > 0 == clips.tokens["image"]
    assert chats.tokens["text"] == chats.total > chats.supervised > 0
    assert charts.longest_row.startswith("charts/")
    assert report.totals()["rows"] == 40
    assert report.totals()["tokens"]["audio"] == 0
    assert report.totals()["total"] == charts.total + chats.total + clips.total
    assert report.totals()["longest_row"] == max(report.datasets, key=lambda one: one.longest).longest_row
    assert json.loads(json.dumps(report.as_dict()))["datasets"][0]["total"] == charts.total


def test_bad_rows_are_counted_again_when_asked_to(tmp_path: Path, qwen: Any) -> None:
    meta = write_demo_data(tmp_path)
    shutil.move(tmp_path / "media" / "chart02.png", tmp_path / "away.png")
    report = count_meta(meta, qwen, part_rows=4)
    assert report.datasets[0].bad == {"missing_media": 1, "malformed_row": 1}
    assert report.datasets[0].examples[0].detail == "no file chart02.png"
    shutil.move(tmp_path / "away.png", tmp_path / "media" / "chart02.png")
    assert count_meta(meta, qwen, part_rows=4).counted_rows == 0
    report = count_meta(meta, qwen, part_rows=4, retry_bad=True)
    assert report.counted_rows == 8  # two parts
    assert report.datasets[0].bad == {"malformed_row": 1}


def test_verifying_compares_with_the_real_processor(tmp_path: Path, qwen: Any) -> None:
    report = count_meta(write_demo_data(tmp_path), qwen, verify=1000)
    assert report.verified is not None
    assert report.verified.checked == 40
    assert report.verified.failed == ()
    assert [line.split(":")[0] for line in report.verified.not_encoded] == ["charts/13"]  # cut off


def test_verifying_names_each_row_that_differs(
    tmp_path: Path, qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = TokenCounter.count_many

    def wrong(self: TokenCounter, conversations: Any) -> Any:
        import dataclasses

        return [
            Counted(dataclasses.replace(one.count, supervised=one.count.supervised + 1), one.media)
            if isinstance(one, Counted)
            else one
            for one in right(self, conversations)
        ]

    monkeypatch.setattr(TokenCounter, "count_many", wrong)
    report = count_meta(write_chats(tmp_path, 8), qwen, verify=3, seed=1)
    assert report.verified is not None
    assert report.verified.checked == len(report.verified.failed) == 3
    assert all("supervised predicted" in line and ", real " in line for line in report.verified.failed)
    assert (
        report.verified.failed == count_meta(tmp_path / "meta.json", qwen, verify=3, seed=1).verified.failed
    )  # type: ignore[union-attr]


def test_a_file_that_changes_during_the_count_is_rejected(tmp_path: Path, qwen: Any) -> None:
    meta = write_chats(tmp_path, 8)

    class Changes:
        def run(self, work: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
            yield from ((number, work(task)) for number, task in enumerate(tasks[:-1]))
            result = work(tasks[-1])
            with open(tmp_path / "chats.jsonl", "a") as file:
                file.write(json.dumps(chat(1)) + "\n")
            yield len(tasks) - 1, result

    with raises_config(path=tmp_path / "chats.jsonl", match="was changed while it was being counted"):
        count_meta(meta, qwen, part_rows=4, engine=Changes())
    assert sidecars(tmp_path) == []
    assert count_meta(meta, qwen, part_rows=4).counted_rows == 1


# --- errors -------------------------------------------------------------------------------------------------


def is_untouched(folder: Path) -> bool:
    return sidecars(folder) == [] and stale_files(folder) == []


def test_a_tokenizer_without_a_chat_template_is_one_error(tmp_path: Path) -> None:
    mute = build("qwen2_vl")
    mute.chat_template = None
    meta = write_chats(tmp_path, 3)
    with raises_config("chat_template"):
        count_meta(meta, mute)
    assert is_untouched(tmp_path)


def test_a_media_folder_that_is_not_there_is_one_error(tmp_path: Path, qwen: Any) -> None:
    meta = write_demo_data(tmp_path)
    shutil.rmtree(tmp_path / "media")
    with raises_config("media_dir", str(tmp_path / "media"), match=r"'charts': .*\(No such file"):
        count_meta(meta, qwen)
    assert is_untouched(tmp_path)


@pytest.mark.parametrize("rights", [0o000, 0o444, 0o111])
def test_a_media_folder_that_may_not_be_read_is_one_error(rights: int, tmp_path: Path, qwen: Any) -> None:
    meta = write_demo_data(tmp_path)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    (tmp_path / "media").chmod(rights)
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)  # root may read everything
    try:
        with raises_config("media_dir", str(tmp_path / "media"), match="Permission denied"):
            count_meta(meta, qwen)
    finally:
        if was_root:
            os.seteuid(0)
        (tmp_path / "media").chmod(0o755)
    assert is_untouched(tmp_path)


def test_a_processor_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    meta = write_chats(tmp_path, 3)
    with pytest.raises(ConfigError, match=f"processor {tmp_path}/nothing: no such folder"):
        count_meta(meta, tmp_path / "nothing")
    with pytest.raises(ConfigError, match=f"processor {tmp_path}/nothing: no such folder"):
        count_meta(meta, f"{tmp_path}/nothing")
    with pytest.raises(ConfigError, match=r"processor no-one/nothing: no such folder.*HF_HUB_OFFLINE is set"):
        count_meta(meta, "no-one/nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty: cannot be opened \(") as found:
        count_meta(meta, str(tmp_path / "empty"))
    assert "\n" not in str(found.value)
    assert is_untouched(tmp_path)


# --- copies of the rows -------------------------------------------------------------------------------------


def test_copies_of_the_rows_carry_the_exact_counts(tmp_path: Path, qwen: Any) -> None:
    report = count_meta(write_demo_data(tmp_path), qwen)
    written = write_counted_jsonl(report.files, tmp_path / "out")
    assert [path.name for path in written] == ["charts.jsonl", "chats.jsonl", "clips.jsonl"]
    for dataset, path in zip(report.files, written, strict=True):
        copy, original = open_rows(str(path)), dataset.file
        assert len(copy) == len(original)
        for number in range(len(copy)):
            counts = dataset.sidecar.row(number)
            if counts["status"] != "ok":
                assert copy.raw(number) == original.raw(number)  # type: ignore[attr-defined]
                continue
            row = copy[number]
            meta = row.pop("mm_inputs_meta")
            assert row.pop("_text_tokens") == counts["text"]
            assert row == original[number]
            for kind in ("image", "video"):
                assert sum(one["n_tokens"] for one in meta[f"{kind}s_meta"]) == counts[kind]
    stats = make_meta_dataset(tmp_path / "out" / "meta.json", on_bad="skip").stats
    assert stats["n_text_tokens"] + stats["n_media_tokens"] == sum(one.total for one in report.datasets)
    assert stats["n_missing_text_tokens"] == stats["n_missing_mm_inputs_meta"] == 0


def test_copies_of_copies_have_the_fields_once(tmp_path: Path, qwen: Any) -> None:
    report = count_meta(write_demo_data(tmp_path), qwen)
    first = write_counted_jsonl(report.files, tmp_path / "once")
    report = count_meta(tmp_path / "once" / "meta.json", qwen)
    second = write_counted_jsonl(report.files, tmp_path / "twice")
    for one, other in zip(first, second, strict=True):
        again = [list(open_rows(str(path)).read(range(4))) for path in (one, other)]
        assert again[0] == again[1]
        assert other.read_text().count('"_text_tokens"') == one.read_text().count('"_text_tokens"')
    with raises_config(path=tmp_path / "once" / "charts.jsonl", match="is the data file itself"):
        write_counted_jsonl(report.files, tmp_path / "once")


@pytest.mark.parametrize(
    "name",
    ["qwen3_omni", pytest.param("nemotron_omni", marks=pytest.mark.needs_family("nemotron_omni"))],
)
def test_verifying_compares_kinds_if_their_tokens_differ(name: str, tmp_path: Path) -> None:
    """Both take all kinds in one sample; the second one writes frames as it writes images."""
    from contract.media_files import write_media

    (tmp_path / "media").mkdir()
    write_media(tmp_path / "media")
    turns = [
        {"role": "user", "content": "<image><video><audio>What?"},
        {"role": "assistant", "content": "A cat."},
    ]
    row = {"messages": turns, "images": ["wide.png"], "videos": ["video.mp4"], "audios": ["studio.wav"]}
    write_rows(tmp_path / "all.jsonl", [row])
    meta = write_meta(tmp_path, {"all": {"file_name": "all.jsonl", "media_dir": "media"}})
    report = count_meta(meta, processor(name), verify=1)
    assert report.verified is not None
    assert (report.verified.checked, report.verified.failed, report.verified.not_encoded) == (1, (), ())
    assert all(report.datasets[0].tokens.values())


def test_what_a_killed_run_had_begun_to_write_is_gone_when_the_count_is_done(
    qwen: Any, tmp_path: Path
) -> None:
    meta = write_chats(tmp_path, 8)
    with pytest.raises(Stopped):
        count_meta(meta, qwen, part_rows=2, engine=StopsAfter(2))
    (folder,) = tmp_path.glob("*.parts")
    begun = folder / ".abc-2.arrow.x1"
    begun.write_bytes(b"half")
    count_meta(meta, qwen, part_rows=2)
    assert not folder.exists()
    # Also where all was counted before, but not what a process holds that is at work.
    folder.mkdir()
    begun.write_bytes(b"half")
    os.utime(begun, ns=(0, 0))
    with open(begun, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        count_meta(meta, qwen, part_rows=2)
        assert begun.exists()
    count_meta(meta, qwen, part_rows=2)
    assert not folder.exists()
