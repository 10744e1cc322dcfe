"""Rows by key, truncated rows, audio, and plans without packs."""

import io
import json
import re
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from count_samples import save_processor, write_chats, write_meta, write_rows
from packhorse.datasets import open_meta_dataset
from packhorse.errors import ConfigError
from packhorse.loader import LoaderConfig
from packhorse.tools.view import plots
from packhorse.tools.view.media_preview import encode_audio, encode_image
from packhorse.tools.view.plan_report import plan_report
from packhorse.tools.view.plan_viewer import PlanViewer, RowFinder
from packhorse.tools.view.saved_plan import PlanRequest, make_plan, make_saved_plan, save_plan
from packhorse.tools.view.server import make_app
from packhorse.types import Drop
from view_samples import ask, chat


def make_viewer(meta: Path, saved: str, **settings: Any) -> PlanViewer:
    planned = make_plan(PlanRequest(LoaderConfig(data=str(meta), **settings), saved))
    return PlanViewer(make_saved_plan(planned, plan_report(planned)), planned.opened)


@pytest.mark.parametrize("ratio", [0.4, 1.0, 2.5])
def test_every_row_is_found_by_its_key_for_any_sample_ratio(tmp_path: Path, ratio: float) -> None:
    for name in ("a", "a/b"):
        write_rows(tmp_path / f"{name.replace('/', '-')}.jsonl", [chat(f"{n}?", "So.") for n in range(20)])
    entries = {
        name: {"file_name": f"{name.replace('/', '-')}.jsonl", "sample_ratio": ratio} for name in ("a", "a/b")
    }
    dataset = open_meta_dataset(str(write_meta(tmp_path, entries)))
    finder = RowFinder(dataset)
    assert [finder.find(dataset.key(index)) for index in range(len(dataset))] == list(range(len(dataset)))
    for index in range(len(dataset)):
        source, row = finder.locate(index)
        assert source.file[row] == dataset.row(index)
    for key in ("a/99", "c/1", "a", "", "a/-1", "a/1#9", "a/x"):
        assert finder.find(key) is None


def test_a_truncated_row_is_marked(tmp_path: Path, saved: str) -> None:
    meta = write_chats(tmp_path, 3)
    write_rows(tmp_path / "chats.jsonl", [chat("Why?", "So."), chat("Why?", "so " * 300)])
    viewer = make_viewer(meta, saved, pack_size=256, on_overlong="truncate")
    app = make_app(viewer)
    listed = ask(app, "/rows?outcome=trained%2C+changed&reason=truncated").text
    assert re.findall(r"data-item>([\w/]+)<", listed) == ["chats/1"], "known before the row is encoded"
    assert "tokens, more than the 256 of a pack" in listed
    page = ask(app, "/pack/0").text
    assert re.search(r'<span class="mark ">trained, changed</span>', page)
    assert page.count('<span class="mark">truncated</span>') == 1
    assert "the first answer was cut" in page
    assert "256 tokens" in page


def test_bidirectional_media_are_squares_in_the_plot_of_the_mask(tmp_path: Path) -> None:
    Image.new("RGB", (90, 60), "tan").save(tmp_path / "chart.png")
    write_rows(
        tmp_path / "charts.jsonl",
        [chat("<image>What is it?", "A chart.", images=["chart.png"]), chat("Why?", "So.")],
    )
    meta = write_meta(tmp_path, {"charts": {"file_name": "charts.jsonl", "media_dir": "."}})
    viewer = make_viewer(meta, save_processor(tmp_path / "processor", "gemma3"), pack_size=256)
    mask = re.findall(r'<svg class="mask".*?</svg>', ask(make_app(viewer), "/pack/0").text)[0]
    assert mask.count('class="seen') == 2
    assert mask.count('class="both"') == 1
    ((first, end),) = viewer.encoder.view(0).bidirectional
    assert end - first == 16, "the tokens of the image"


def test_a_dataset_without_a_valid_row_is_shown(tmp_path: Path, saved: str) -> None:
    meta = write_chats(tmp_path, 1)
    write_rows(tmp_path / "chats.jsonl", ["{", "[]", '{"messages": 3}'])
    viewer = make_viewer(meta, saved, pack_size=256)
    assert (viewer.report["packs"], viewer.report["dropped"], viewer.report["straggler"]) == (0, 3, [])
    app = make_app(viewer)
    for target in (
        "/",
        "/packs",
        "/packs?sort=cost&dataset=chats&reason=any",
        "/rows",
        "/steps",
        "/row/0",
        "/search?q=3",
    ):
        assert ask(app, target).status == 200, target
    assert json.loads(ask(app, "/report.json").body)["fill"] == 0.0
    overview = ask(app, "/").text
    assert "There is no pack: none of the 3 rows can be used" in overview
    assert '<svg class="plot"' not in overview


def test_the_name_of_a_dataset_is_escaped_on_every_page(tmp_path: Path, saved: str) -> None:
    name = """<img src="x" onerror='alert(1)'>"""
    write_rows(tmp_path / "chats.jsonl", [chat("Why?", "So."), "{"])
    meta = write_meta(tmp_path, {name: {"file_name": "chats.jsonl"}})
    app = make_app(make_viewer(meta, saved, pack_size=256))
    targets = ("/", "/packs", "/pack/0", "/row/1", "/rows", "/steps", "/search?q=why", "/search?q=0")
    echoed = (
        f"/rows?outcome={name}&reason={name}&dataset={name}",
        f"/packs?dataset={name}&reason={name}",
        f"/search?q={name}",
    )
    for target in (*targets, *echoed):
        page = ask(app, target).text
        assert '<img src="x' not in page, target
        assert "onerror='" not in page, target


def test_audio_is_sent_as_wav() -> None:
    encoded = encode_audio(np.array([0.0, 1.0, -1.0, 2.0], np.float32), 16_000)
    assert encoded.media_type == "audio/wav"
    with wave.open(io.BytesIO(encoded.data)) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (1, 16_000, 4)
        assert np.frombuffer(file.readframes(4), "<i2").tolist() == [0, 32767, -32767, 32767]


@pytest.mark.parametrize(("size", "kind"), [((30, 20), "image/png"), ((1200, 900), "image/jpeg")])
def test_images_keep_their_size(size: tuple[int, int], kind: str) -> None:
    encoded = encode_image(Image.new("RGB", size, "tan"))
    assert encoded.media_type == kind
    assert Image.open(io.BytesIO(encoded.data)).size == size


def test_offsets_of_documents_include_padding(tmp_path: Path, saved: str) -> None:
    meta = write_chats(tmp_path, 12)
    viewer = make_viewer(meta, saved, pack_size=256, alignment=16)
    page = ask(make_app(viewer), "/pack/0").text
    lengths = [viewer.encoder.view(int(row)).length for row in viewer.plan[0]]
    padded_lengths = [length + -length % 16 for length in lengths]
    assert padded_lengths != lengths
    starts = [0, *np.cumsum(padded_lengths)[:-1].tolist()]
    offsets = re.findall(r"offsets (\d+) to (\d+), (\d+) tokens", page)
    assert [tuple(map(int, values)) for values in offsets] == [
        (start, start + length - 1, length) for start, length in zip(starts, lengths, strict=True)
    ]
    assert "tokens were planned" not in page
    assert len(re.findall(r", \d+ padding", page)) == sum(map(int.__gt__, padded_lengths, lengths))


def test_a_drop_found_by_a_run_and_by_the_viewer_is_one(tmp_path: Path, saved: str) -> None:
    viewer = make_viewer(write_chats(tmp_path, 3), saved, pack_size=256)
    viewer.mark(1, [Drop("chats/1", "media", "broken_media", "cut.png is cut; chats.jsonl:2")])
    viewer.mark(1, [Drop("chats/1", "media", "broken_media", "cut.png is cut")])
    viewer.mark(1, [Drop("chats/1", "encode", "truncated", "cut.png is cut")])
    assert [drop.reason for drop in viewer.drops(1)] == ["broken_media", "truncated"]


def test_a_file_that_is_no_media_item_is_not_served(tmp_path: Path, saved: str) -> None:
    (tmp_path / "secret.txt").write_text("name: user, password: 1234")
    row = chat("<image>What is it?", "Nothing.", images=[str(tmp_path / "secret.txt")])
    write_rows(tmp_path / "rows.jsonl", [row, chat("Why?", "So.")])
    meta = write_meta(tmp_path, {"rows": {"file_name": "rows.jsonl"}})
    app = make_app(make_viewer(meta, saved, pack_size=256))
    answer = ask(app, "/media/0/0")
    assert answer.status == 404
    assert b"password" not in answer.body
    assert "password" not in ask(app, "/row/0").text


def test_images_are_not_cached_by_the_browser(app: Any) -> None:
    assert ask(app, "/media/0/0").headers["cache-control"] == "no-store"


def test_a_text_only_dataset_shows_no_media_and_no_placeholder(tmp_path: Path, saved: str) -> None:
    app = make_app(make_viewer(write_chats(tmp_path, 12), saved, pack_size=256))
    overview, pack = ask(app, "/").text, ask(app, "/pack/0").text
    assert "kind text" in overview
    assert "kind image" not in overview
    assert "text only" in pack
    assert "fake" not in pack
    assert "positions 0" in pack, "positions of text are consecutive for every model"


def test_unknown_positions_are_not_shown(app: Any) -> None:
    page = ask(app, "/row/0").text  # an image, and no config of the model
    assert "packhorse plan --model" in page
    assert "; positions" not in page


def test_the_axis_labels_of_a_histogram_are_whole_numbers() -> None:
    for top in (1, 2, 3, 41, 999):
        svg = str(plots.bars([top, 1], ["a", "b", "c"], "some"))
        assert not re.search(r">\d+\.5<", svg), top


def test_data_that_moved_is_named_in_the_error(tmp_path: Path, saved: str) -> None:
    meta = write_chats(tmp_path / "data", 3)
    planned = make_plan(PlanRequest(LoaderConfig(data=str(meta), pack_size=256), saved))
    plan = tmp_path / "plan.phplan"
    save_plan(planned, plan_report(planned), plan)
    (tmp_path / "data").rename(tmp_path / "away")
    with pytest.raises((ConfigError, OSError), match=r"meta\.json"):
        PlanViewer.open(str(plan))
