from __future__ import annotations

import copy
import io
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from media_samples import noise, write_database
from PIL import Image
from transformers.image_utils import load_image as transformers_load_image

from packhorse.errors import BadSample
from packhorse.media import DEFAULT_MAX_PIXELS, image_size, load_image
from packhorse.media.image_headers import header_size


def encode(image: Image.Image, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def bad_sample(source: object, call=load_image, **options: object) -> BadSample:
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
    data = encode(plain().convert(mode), "PNG")
    with Image.open(io.BytesIO(data)) as image:
        assert_same(load_image(data), image.convert("RGB"))


def test_cmyk_16_bit_transparent_palette_and_one_pixel_images_become_rgb() -> None:
    palette = plain().convert("P")
    palette.info["transparency"] = 3
    samples = [
        encode(plain().convert("CMYK"), "JPEG"),
        encode(Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40) * 50), "PNG"),
        encode(palette, "GIF", transparency=3),
        encode(palette, "PNG", transparency=3),
        encode(Image.new("RGBA", (1, 1), (9, 8, 7, 100)), "PNG"),
        encode(Image.new("L", (1, 1), 77), "JPEG"),
        encode(plain().convert("F"), "TIFF"),
        encode(plain().convert("LAB"), "TIFF"),
    ]
    for data in samples:
        with Image.open(io.BytesIO(data)) as image:
            assert_same(load_image(data), image.convert("RGB"))
            assert image_size(data) == (image.height, image.width)


def test_all_sources_give_the_same_image(tmp_path: Path, memory) -> None:
    data = encode(plain(), "PNG")
    (tmp_path / "a.png").write_bytes(data)
    write_database(tmp_path / "db.lmdb", entries={"k": data})
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
def test_an_array_that_is_no_image_is_rejected(array: np.ndarray) -> None:
    for call in (load_image, image_size):
        error = bad_sample(array, call)
        assert error.reason == "broken_media"
        assert "expected height x width x 3 of uint8" in str(error)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_a_truncated_file_is_broken_and_still_has_its_size(tmp_path: Path, form: str) -> None:
    data = encode(Image.fromarray(noise(120, 90)), form)
    path = tmp_path / "cut"
    path.write_bytes(data[: len(data) * 6 // 10])
    error = bad_sample(path)
    assert error.reason == "broken_media"
    assert "cut" in str(error)
    if form == "WEBP":  # PIL opens no WebP that is cut off
        assert bad_sample(path, image_size).reason == "broken_media"
    elif form != "TIFF":  # PIL writes the directory of a TIFF in front or after, as it likes
        assert image_size(path) == (90, 120)


@pytest.mark.parametrize(
    ("box", "message"), [(b"iloc", "the image header cannot be read"), (b"mdat", "cannot be decoded")]
)
def test_a_damaged_avif_file_is_broken(tmp_path: Path, box: bytes, message: str) -> None:
    data = encode(plain(), "AVIF")
    start = data.index(box) + 4
    size = 20 if box == b"iloc" else len(data) - start
    path = tmp_path / "damaged.avif"
    path.write_bytes(data[:start] + bytes(size) + data[start + size :])
    error = bad_sample(path)
    assert error.reason == "broken_media"
    assert f"damaged.avif: {message} (Failed to decode" in str(error)


def test_a_damaged_lazily_opened_image_is_found_too() -> None:
    data = encode(plain(), "PNG")
    assert bad_sample(Image.open(io.BytesIO(data[:-800]))).reason == "broken_media"


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"<!DOCTYPE html><html>404</html>", "it looks like an HTML page"),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "it looks like a Git LFS pointer: run git lfs pull",
        ),
        (bytes(100), "it looks like zero bytes"),
        (b"root:x:0:0:secret", "expected one of JPEG, PNG, WEBP"),
    ],
)
def test_a_file_that_is_no_image_is_named_by_its_kind_and_never_quoted(
    tmp_path: Path, content: bytes, kind: str
) -> None:
    path = tmp_path / "page.jpg"
    path.write_bytes(content)
    for call in (load_image, image_size):
        error = bad_sample(path, call)
        assert error.reason == "broken_media"
        assert f"page.jpg is not an image in a supported format ({kind}" in str(error)
        assert "root" not in error.detail.removeprefix(str(path))


def test_missing_and_empty_files_keep_their_reasons(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    for call in (load_image, image_size):
        assert bad_sample(tmp_path / "no.png", call).reason == "missing_media"
        assert bad_sample(tmp_path / "empty.png", call).reason == "broken_media"


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims to be huge, with no pixels at all."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def test_a_decompression_bomb_is_rejected_before_decoding() -> None:
    assert DEFAULT_MAX_PIXELS == 178_956_970
    for call in (load_image, image_size):
        error = bad_sample(bomb(60_000, 60_000), call)
        assert error.reason == "media_too_large"
        assert "3600000000" in str(error).replace(",", "")
    # PIL's own limit holds even where ours is lifted.
    assert bad_sample(bomb(60_000, 60_000), max_pixels=None).reason == "media_too_large"
    assert image_size(bomb(60_000, 60_000), max_pixels=None) == (60_000, 60_000)


def test_a_lower_limit_applies_to_every_kind_of_source(png: Path) -> None:
    for source in (png, plain(), noise(40, 30)):
        for call in (load_image, image_size):
            assert call(source, max_pixels=1200) is not None
            error = bad_sample(source, call, max_pixels=1199)
            assert error.reason == "media_too_large"
            assert "40 x 30 = 1,200 pixels, more than max_pixels=1,199" in str(error)


def oracle(source: str | Image.Image) -> Image.Image:
    return transformers_load_image(source)


def exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    # A photo has tags in front of the orientation, and their texts after the table.
    exif[0x010F], exif[0x0110], exif[0x0112] = "A maker of cameras", "A model of theirs", orientation
    return exif


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF", "MPO"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright_as_transformers_turns_them(
    form: str, orientation: int, tmp_path: Path
) -> None:
    more = {"save_all": True, "append_images": [plain()]} if form == "MPO" else {}
    data = encode(plain(), form, exif=exif_of(orientation), **more)
    path = tmp_path / "photo"
    path.write_bytes(data)
    upright = oracle(str(path))
    assert upright.size == ((30, 40) if orientation > 4 else (40, 30))
    with Image.open(path) as lazy, Image.open(path) as decoded:
        decoded.load()
        for source in (str(path), path, data, {"bytes": data}, lazy, decoded):
            assert image_size(source) == (upright.height, upright.width)
            assert_same(load_image(source), upright)
        assert_same(oracle(decoded), upright)  # the caller's image still has its orientation
    if form != "TIFF":  # which PIL turns in any case
        with Image.open(path) as stored:
            assert_same(load_image(path, exif=False), stored.convert("RGB"))
            assert image_size(path, exif=False) == (stored.height, stored.width)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_orientation_is_read_without_pil(form: str, orientation: int) -> None:
    data = encode(plain(), form, exif=exif_of(orientation))
    assert header_size(io.BytesIO(data)) == ((30, 40) if orientation > 4 else (40, 30))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_an_upright_image_is_not_turned_once_more(form: str) -> None:
    upright = load_image(encode(plain(), form, exif=exif_of(6)))
    assert load_image(upright) is upright
    assert_same(oracle(upright), upright)
    assert image_size(upright) == (40, 30)


@pytest.mark.parametrize("form", ["JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("in_exif", [None, 1])
def test_the_orientation_of_xmp_counts_where_exif_has_none(
    form: str, in_exif: int | None, tmp_path: Path
) -> None:
    exif = Image.Exif()
    if in_exif is not None:
        exif[0x0112] = in_exif
    xmp = b'<x tiff:Orientation="6"/>'
    options: dict[str, object] = {"xmp": xmp} if form != "TIFF" else {"tiffinfo": {700: xmp, **dict(exif)}}
    path = tmp_path / "photo"
    path.write_bytes(encode(plain(), form, exif=exif, **options))
    upright = oracle(str(path))
    assert upright.size == ((30, 40) if in_exif is None else (40, 30))
    assert image_size(path) == (upright.height, upright.width)
    assert_same(load_image(path), upright)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["XML:com.adobe.xmp", "Raw profile type exif"])
def test_a_png_with_its_orientation_in_a_text_is_turned(name: str, late: bool, tmp_path: Path) -> None:
    exif = exif_of(6).tobytes()
    text = "<x tiff:Orientation='6'/>" if name.startswith("XML") else f"\nexif\n{len(exif):8}\n{exif.hex()}\n"
    chunk = png_chunk(b"tEXt", f"{name}\0{text}".replace("'", '"').encode())
    data = encode(plain(), "PNG")
    at = len(data) - 12 if late else 33
    path = tmp_path / "photo.png"
    path.write_bytes(data[:at] + chunk + data[at:])
    upright = oracle(str(path))
    assert upright.size == (30, 40)
    assert image_size(str(path)) == image_size(path.read_bytes()) == (40, 30)
    assert_same(load_image(path), upright)


def png_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


@pytest.mark.parametrize("size", [(40, 30), (400, 300)])
def test_exif_after_the_pixels_of_a_png_counts_and_a_cut_png_has_none(size: tuple[int, int]) -> None:
    data = encode(Image.fromarray(noise(*size)), "PNG")
    assert header_size(io.BytesIO(data)) == size
    late = data[:-12] + png_chunk(b"eXIf", exif_of(6).tobytes().removeprefix(b"Exif\0\0")) + data[-12:]
    assert image_size(late) == size
    assert image_size(Image.open(io.BytesIO(late))) == size
    assert load_image(late).size == size[::-1]
    assert image_size(data[:-500]) == size[::-1]


def test_the_size_of_a_png_that_the_caller_opened_needs_no_decoding() -> None:
    with Image.open(io.BytesIO(encode(plain(), "PNG"))) as image:
        assert image_size(image) == (30, 40)
        assert image.tile  # type: ignore[attr-defined]  # still to be decoded
        assert_same(load_image(image), plain())


def test_exif_that_cannot_be_read_turns_nothing() -> None:
    data = encode(plain(), "JPEG", exif=b"Exif\0\0garbage that is no TIFF")
    assert load_image(data).size == (40, 30)
    assert image_size(data) == (30, 40)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PIL, about the EXIF data
def test_an_orientation_after_a_value_that_is_cut_off_turns_nothing_as_in_pil(tmp_path: Path) -> None:
    exif = bytearray(exif_of(6).tobytes())
    at = exif.index(b"\x0f\x01", 14) if exif[6:8] == b"II" else exif.index(b"\x01\x0f", 14)
    exif[at + 8 : at + 12] = b"\xff\xff\0\0" if exif[6:8] == b"II" else b"\0\0\xff\xff"  # where the maker is
    path = tmp_path / "photo.jpg"
    path.write_bytes(encode(plain(), "JPEG", exif=bytes(exif)))
    upright = oracle(str(path))
    assert image_size(path) == (upright.height, upright.width)
    assert_same(load_image(path), upright)


def test_nothing_of_the_callers_is_changed(png: Path) -> None:
    sources = [{"bytes": png.read_bytes(), "path": str(png)}, {"path": str(png)}, bytearray(png.read_bytes())]
    before = copy.deepcopy(sources)
    for source in sources:
        load_image(source)
        image_size(source)
    assert sources == before


class Indivisible(Image.Image):
    """An image whose decoder divides by a value of its damaged header."""

    def load(self) -> Any:
        raise ZeroDivisionError("no rows")


def test_a_decoder_that_divides_by_zero_is_found_too() -> None:
    assert bad_sample(Indivisible()).reason == "broken_media"
