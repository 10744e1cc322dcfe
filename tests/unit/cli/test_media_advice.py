"""Media that are all missing, but exist next to the meta or data file: commands print what to add."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from count_samples import save_processor, write_meta, write_rows
from packhorse.cli.app import app


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_processor(tmp_path_factory.mktemp("processor"))


def rows(folder: Path, *images: str) -> Path:
    """A row for each image, and one without."""
    turns = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A car."}]
    seen = [{"role": "user", "content": "<image>What is it?"}, turns[1]]
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Any] = [
        {"messages": turns},
        "{",
        *({"messages": seen, "images": [one]} for one in images),
    ]
    return write_rows(folder / "cars.jsonl", written)


def image(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (56, 56), "tan").save(path)


def advice(command: str, meta: Path, saved: str) -> list[str]:
    """The advice of a command, which is the same on the screen and for machines."""
    more = ["--processor", saved] if command == "count" else []
    plain, machine = (
        CliRunner().invoke(app, [command, str(meta), "--num-workers", "1", *more, *options])
        for options in ([], ["--json"])
    )
    advice: list[str] = json.loads(machine.stdout)["advice"]
    assert [line for line in plain.stdout.splitlines() if '"media_dir"' in line] == advice
    return advice


@pytest.mark.parametrize("command", ["check", "count"])
def test_media_next_to_the_meta_file_are_found_after_the_advice_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: str, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    rows(tmp_path / "data", "pics/0.png", "pics/1.png")
    for number in range(2):
        image(tmp_path / "data" / "pics" / f"{number}.png")
    entry = {"file_name": "cars.jsonl"}
    write_meta(tmp_path / "data", {"cars": entry})
    meta = Path("data/meta.json")
    (line,) = advice(command, meta, saved)
    assert line == (
        f"cars: its media are not in the working directory {tmp_path}. They exist next to the meta "
        'file: add "media_dir": "." to this dataset in data/meta.json'
    )
    write_meta(tmp_path / "data", {"cars": entry | {"media_dir": "."}})
    assert advice(command, meta, saved) == []
    done = CliRunner().invoke(app, ["check", str(meta), "--num-workers", "1", "--json"])
    assert json.loads(done.stdout)["media_failed"] == 0


@pytest.mark.parametrize("command", ["check", "count"])
def test_media_next_to_the_data_file_get_a_path_from_the_meta_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: str, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    rows(tmp_path / "sets" / "far", "0.png")
    image(tmp_path / "sets" / "far" / "0.png")
    write_meta(tmp_path / "sets", {"cars": {"file_name": "far/cars.jsonl"}})
    (line,) = advice(command, Path("sets/meta.json"), saved)
    assert 'They exist next to the data file: add "media_dir": "far" to' in line


@pytest.mark.parametrize("command", ["check", "count"])
def test_nothing_is_advised_where_media_are_nowhere_or_only_some_are_missing_or_a_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: str, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, meta = tmp_path / "data", Path("data/meta.json")
    rows(folder, "0.png", "1.png")
    write_meta(folder, {"cars": {"file_name": "cars.jsonl"}})
    assert advice(command, meta, saved) == []  # nowhere
    image(folder / "0.png")
    assert advice(command, meta, saved) == []  # not all of them there either
    image(folder / "1.png")
    image(tmp_path / "0.png")
    rows(folder, "0.png", "1.png", "1.png")  # another file: what was counted is not reused
    assert advice(command, meta, saved) == []  # one is in the working directory
    (tmp_path / "empty").mkdir()
    write_meta(folder, {"cars": {"file_name": "cars.jsonl", "media_dir": "../empty"}})
    assert advice(command, meta, saved) == []
