"""A photo that is stored sideways is counted, loaded and shown upright, as transformers loads it."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_utils import load_image as transformers_load_image

import packhorse
from contract.processors import FAMILIES, processor
from contract.tiny_models import tiny_model
from count_samples import save_processor, write_meta, write_rows
from packhorse import LoaderConfig, World
from packhorse.count.counting import count_meta
from packhorse.count.sidecar import Sidecar
from packhorse.tools.check import check_meta
from packhorse.tools.view.book import Book
from packhorse.tools.view.plan_book import Request, make_plan, save_book
from packhorse.tools.view.plan_report import plan_report
from packhorse.tools.view.server import make_app
from view_samples import ask

FORMS = ("JPEG", "PNG", "WEBP", "TIFF")
ORIENTATIONS = range(1, 9)


def write_photos(folder: Path) -> list[Path]:
    """One photo, 128 wide and 64 high where it is stored, in every format and orientation."""
    pixels = np.random.default_rng(0).integers(0, 255, (8, 16, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    paths = []
    for form in FORMS:
        for orientation in ORIENTATIONS:
            exif = Image.Exif()
            exif[0x0112] = orientation
            paths.append(folder / f"{form}-{orientation}")
            Image.fromarray(pixels).save(paths[-1], form, exif=exif)
    return paths


def write_data(folder: Path, paths: list[Path]) -> Path:
    turns = [{"role": "user", "content": "<image>what"}, {"role": "assistant", "content": "ok"}]
    write_rows(folder / "a.jsonl", [{"messages": turns, "images": [path.name]} for path in paths])
    return write_meta(folder, {"a": {"file_name": "a.jsonl", "media_dir": "."}})


def test_a_batch_has_the_pixels_and_the_grid_of_the_upright_photo(tmp_path: Path) -> None:
    paths, made = write_photos(tmp_path), processor("qwen2_vl")
    loader = packhorse.load(
        str(write_data(tmp_path, paths)), made, model=tiny_model("qwen2_vl"), world=World(), pack_size=256
    )
    seen = 0
    for batch in loader:
        expected = [
            made.image_processor([upright(paths[n])], return_tensors="pt") for n in batch.info.samples
        ]
        grids = torch.cat([one["image_grid_thw"] for one in expected])
        assert torch.equal(batch["image_grid_thw"], grids)
        assert torch.equal(batch["pixel_values"], torch.cat([one["pixel_values"] for one in expected]))
        seen += len(grids)
    assert seen == len(paths)
    assert not list(loader.ledger)


def upright(path: Path) -> Image.Image:
    return transformers_load_image(str(path))


@pytest.mark.parametrize("name", [name for name in FAMILIES if "image" in FAMILIES[name].modalities])
def test_counts_are_those_of_the_upright_photo(name: str, tmp_path: Path) -> None:
    paths = write_photos(tmp_path)
    report = count_meta(write_data(tmp_path, paths), processor(name), verify=len(paths))
    assert report.verified is not None
    assert (report.verified.checked, report.verified.failed) == (len(paths), ())
    media = Sidecar(report.datasets[0].sidecar).media()
    assert list(zip(media.width.tolist(), media.height.tolist(), strict=True)) == [
        upright(path).size for path in paths
    ]


def test_the_check_and_the_viewer_show_the_upright_photo(tmp_path: Path) -> None:
    paths = write_photos(tmp_path)
    meta = write_data(tmp_path, paths)
    assert check_meta(meta).passed()
    planned = make_plan(Request(LoaderConfig(data=str(meta), pack_size=512), save_processor(tmp_path / "p")))
    save_book(planned, plan_report(planned), tmp_path / "made.phplan")
    app = make_app(Book.open(str(tmp_path / "made.phplan")))
    for row, path in enumerate(paths):
        shown = Image.open(io.BytesIO(ask(app, f"/media/{row}/0").body))
        assert np.array_equal(np.asarray(shown), np.asarray(upright(path)))
