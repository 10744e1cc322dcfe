"""The parts of a count: how large they are, and what is said where none can be counted."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from count_samples import chat, sidecars, write_chats
from packhorse.count.counting import count_meta
from packhorse.count.sidecar import Sidecar, batch_digest
from packhorse.errors import ConfigError
from packhorse.families.models import open_processor


class Stopped(Exception):
    """A run that ends in the middle."""


class Stops:
    """An engine whose run ends after these tasks."""

    def __init__(self, tasks: Sequence[int]) -> None:
        self.tasks = tasks

    def run(self, work: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        for number in self.tasks:
            yield number, work(tasks[number])
        raise Stopped


def test_the_size_of_parts_stays_as_it_was_unless_another_is_requested(tmp_path: Path, qwen: Any) -> None:
    meta, path = write_chats(tmp_path, 10), tmp_path / "chats.jsonl"
    with pytest.raises(Stopped):
        count_meta(meta, qwen, part_rows=4, engine=Stops([0, 1]))
    assert count_meta(meta, qwen).counted_rows == 2  # of an interrupted run
    with open(path, "a") as file:
        file.write(json.dumps(chat(5)) + "\n")
    assert count_meta(meta, qwen).counted_rows == 3  # of an older state: the last, short part is another
    (sidecar,) = sidecars(tmp_path)
    assert Sidecar(sidecar).part_rows == 4
    before = sidecar.read_bytes()
    assert count_meta(meta, qwen, part_rows=4, fresh=True).counted_rows == 11
    assert sidecar.read_bytes() == before
    with open(path, "a") as file:
        file.write(json.dumps(chat(6)) + "\n")
    assert count_meta(meta, qwen, part_rows=6).counted_rows == 12
    assert count_meta(meta, qwen, fresh=True).counted_rows == 12
    assert Sidecar(sidecars(tmp_path)[0]).part_rows == 4096


def test_a_short_part_alone_does_not_set_the_size(tmp_path: Path, qwen: Any) -> None:
    meta = write_chats(tmp_path, 10)
    with pytest.raises(Stopped):
        count_meta(meta, qwen, part_rows=4, engine=Stops([2]))
    assert count_meta(meta, qwen).counted_rows == 8
    assert Sidecar(sidecars(tmp_path)[0]).part_rows == 4


def test_a_torchvision_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", fails)
    said = "operator torchvision::nms does not exist"
    with pytest.raises(
        ConfigError, match=r"torchvision \S+ may not match torch \S+: install the torchvision"
    ):
        open_processor(str(tmp_path))
    said = "something else"
    with pytest.raises(RuntimeError, match="something else"):
        open_processor(str(tmp_path))


@pytest.mark.parametrize("with_settings_of_a_folder", [False, True])
def test_a_new_part_is_verified_once_before_and_once_in_its_count_file(
    with_settings_of_a_folder: bool, tmp_path: Path, qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []

    def record_digest(batch: Any) -> str:
        looked.append(batch_digest(batch))
        return looked[-1]

    for module in ("sidecar", "counting"):
        monkeypatch.setattr(f"packhorse.count.{module}.batch_digest", record_digest, raising=False)
    meta = write_chats(tmp_path, 12)
    if with_settings_of_a_folder:
        config = json.loads(meta.read_text())
        config["chats"]["media_dir"] = str(tmp_path)
        meta.write_text(json.dumps(config))
    report = count_meta(meta, qwen, part_rows=3)
    assert report.counted_rows == 12
    assert sorted(looked) == sorted(2 * report.files[0].sidecar.about["checks"])
