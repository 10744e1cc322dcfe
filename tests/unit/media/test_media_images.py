from __future__ import annotations

import copy
import io
import pickle
import struct
import zlib
from pathlib import Path

import lmdb
import numpy as np
import pytest
from media_samples import noise
from PIL import Image, ImageOps

from packhorse.errors import BadSample
from packhorse.media import DEFAULT_MAX_PIXELS, image_size, load_image


def encoded(image: Image.Image, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def refused(source: object, call=load_image, **options: object) -> BadSample:
    with pytest.raises(BadSample) as caught:
        call(source, **options)
    assert caught.value.stage == "media"
    return caught.value


def plain() -> Image.Image:
    return Image.fromarray(noise(40, 30))


def assert_same(image: Image.Image, expected: Image.Image) -> None:
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), np.asarray(expected))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_every_png_mode_becomes_what_pil_makes_of_it(mode: str) -> None:
    data = encoded(plain().convert(mode), "PNG")
    with Image.open(io.BytesIO(data)) as image:
        assert_same(load_image(data), image.convert("RGB"))


def test_cmyk_16_bit_transparent_palette_and_one_pixel_images_become_rgb() -> None:
    palette = plain().convert("P")
    palette.info["transparency"] = 3
    samples = [
        encoded(plain().convert("CMYK"), "JPEG"),
        encoded(Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40) * 50), "PNG"),
        encoded(palette, "GIF", transparency=3),
        encoded(palette, "PNG", transparency=3),
        encoded(Image.new("RGBA", (1, 1), (9, 8, 7, 100)), "PNG"),
        encoded(Image.new("L", (1, 1), 77), "JPEG"),
        encoded(plain().convert("F"), "TIFF"),
        encoded(plain().convert("LAB"), "TIFF"),
    ]
    for data in samples:
        with Image.open(io.BytesIO(data)) as image:
            assert_same(load_image(data), image.convert("RGB"))
            assert image_size(data) == (image.height, image.width)


def test_all_sources_give_the_same_picture(tmp_path: Path, memory) -> None:
    data = encoded(plain(), "PNG")
    (tmp_path / "a.png").write_bytes(data)
    environment = lmdb.open(str(tmp_path / "db.lmdb"))
    with environment.begin(write=True) as transaction:
        transaction.put(b"k", data)
    environment.close()
    for source in (
        tmp_path / "a.png",
        f"file://{tmp_path}/a.png",
        memory("a.png", data),
        f"{tmp_path}/db.lmdb::k",
        data,
        {"bytes": data, "path": None},
        plain(),
        noise(40, 30),
    ):
        assert_same(load_image(source), plain())
        assert image_size(source) == (30, 40)


def test_an_rgb_image_comes_back_itself_and_another_is_not_changed() -> None:
    rgb = plain()
    assert load_image(rgb) is rgb
    rgba = plain().convert("RGBA")
    before = rgba.copy()
    assert load_image(rgba).mode == "RGB"
    assert rgba.mode == "RGBA"
    assert rgba == before


def test_a_loaded_image_outlives_its_file_and_travels_between_processes(png: Path) -> None:
    image = load_image(png)
    png.unlink()
    assert type(image) is Image.Image
    assert pickle.loads(pickle.dumps(image)) == image == image.copy()


def test_an_array_is_not_shared_with_the_image() -> None:
    array = noise(8, 8)
    before = array.copy()
    image = load_image(array)
    image.putpixel((0, 0), (1, 2, 3))
    assert np.array_equal(array, before)


@pytest.mark.parametrize(
    "array", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8)]
)
def test_an_array_that_is_no_picture_is_refused(array: np.ndarray) -> None:
    for call in (load_image, image_size):
        error = refused(array, call)
        assert error.reason == "broken_media"
        assert "expected height x width x 3 of uint8" in str(error)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_a_truncated_file_is_broken_and_still_has_its_size(tmp_path: Path, form: str) -> None:
    data = encoded(Image.fromarray(noise(120, 90)), form)
    path = tmp_path / "cut"
    path.write_bytes(data[: len(data) * 6 // 10])
    error = refused(path)
    assert error.reason == "broken_media"
    assert "cut" in str(error)
    if form == "WEBP":  # PIL opens no WebP that is cut off
        assert refused(path, image_size).reason == "broken_media"
    elif form != "TIFF":  # PIL writes the directory of a TIFF in front or behind, as it likes
        assert image_size(path) == (90, 120)


def test_a_damaged_lazily_opened_image_is_found_too() -> None:
    data = encoded(plain(), "PNG")
    assert refused(Image.open(io.BytesIO(data[:-800]))).reason == "broken_media"


def test_a_file_that_is_no_image_shows_how_it_starts(tmp_path: Path) -> None:
    path = tmp_path / "page.jpg"
    path.write_bytes(b"<!DOCTYPE html><html>404</html>")
    for call in (load_image, image_size):
        error = refused(path, call)
        assert error.reason == "broken_media"
        assert "page.jpg is not an image that PIL can read (it starts with b'<!DOCTYP')" in str(error)


def test_missing_and_empty_files_keep_their_reasons(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    for call in (load_image, image_size):
        assert refused(tmp_path / "no.png", call).reason == "missing_media"
        assert refused(tmp_path / "empty.png", call).reason == "broken_media"


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims to be huge, with no pixels at all."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def test_a_decompression_bomb_is_refused_before_decoding() -> None:
    assert DEFAULT_MAX_PIXELS == 178_956_970
    for call in (load_image, image_size):
        error = refused(bomb(60_000, 60_000), call)
        assert error.reason == "media_too_large"
        assert "3600000000" in str(error).replace(",", "")
    # PIL's own limit holds even where ours is lifted.
    assert refused(bomb(60_000, 60_000), max_pixels=None).reason == "media_too_large"
    assert image_size(bomb(60_000, 60_000), max_pixels=None) == (60_000, 60_000)


def test_a_lower_limit_applies_to_every_kind_of_source(png: Path) -> None:
    for source in (png, plain(), noise(40, 30)):
        for call in (load_image, image_size):
            assert call(source, max_pixels=1200) is not None
            error = refused(source, call, max_pixels=1199)
            assert error.reason == "media_too_large"
            assert "40 x 30 = 1,200 pixels, more than max_pixels=1,199" in str(error)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_on_request(form: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(plain(), form, exif=exif)
    with Image.open(io.BytesIO(data)) as image:
        stored = image.size
        upright = ImageOps.exif_transpose(image).convert("RGB")
    assert_same(load_image(data, exif=True), upright)
    assert image_size(data, exif=True) == (upright.height, upright.width)
    assert image_size(data) == (stored[1], stored[0])
    with Image.open(io.BytesIO(data)) as image:
        assert image_size(image, exif=True) == (upright.height, upright.width)
        assert_same(load_image(image, exif=True), upright)


def test_exif_behind_the_pixels_of_a_png_counts_and_a_cut_png_has_none() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(plain(), "PNG")
    body = exif.tobytes().removeprefix(b"Exif\0\0")
    chunk = struct.pack(">I", len(body)) + b"eXIf" + body + struct.pack(">I", zlib.crc32(b"eXIf" + body))
    late = data[:-12] + chunk + data[-12:]
    assert image_size(late, exif=True) == (40, 30)
    assert load_image(late, exif=True).size == (30, 40)
    assert image_size(data[:-500], exif=True) == (30, 40)


def test_exif_that_cannot_be_read_turns_nothing() -> None:
    data = encoded(plain(), "JPEG", exif=b"Exif\0\0garbage that is no TIFF")
    assert load_image(data, exif=True).size == (40, 30)
    assert image_size(data, exif=True) == (30, 40)


def test_nothing_of_the_callers_is_changed(png: Path) -> None:
    sources = [{"bytes": png.read_bytes(), "path": str(png)}, {"path": str(png)}, bytearray(png.read_bytes())]
    before = copy.deepcopy(sources)
    for source in sources:
        load_image(source)
        image_size(source)
    assert sources == before
