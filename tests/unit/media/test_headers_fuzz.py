"""Thousands of damaged images: our header parser agrees with PIL, or leaves the image to it."""

from __future__ import annotations

import io
import os
import random
import struct
import zlib
from pathlib import Path

import pytest
from media_samples import noise
from PIL import Image
from test_media_headers import OTHERS, OWN, encode

from packhorse.errors import BadSample
from packhorse.media import image_size
from packhorse.media.image_headers import header_size, path_header_size

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning"),
]
MUTANTS = 6000
PIL_ERRORS = (OSError, SyntaxError, ValueError, EOFError, LookupError, struct.error, zlib.error)


def corpus() -> list[tuple[str, bytes]]:
    """Images of every kind: plain, progressive, interlaced, turned, animated, with metadata."""
    exif = Image.Exif()
    exif[0x0112], exif[0x010F], exif[0x011A], exif[0x0128] = 6, "Acme", 72.0, 2
    turned = {"exif": exif.tobytes()}
    kinds = [*OWN, *OTHERS, ("JPEG", "RGB", turned), ("WEBP", "RGB", turned), ("PNG", "RGB", turned)]
    kinds += [("JPEG", "RGB", {"icc_profile": b"i" * 300, "comment": b"a city"})]
    kinds += [("PNG", "P", {"transparency": 0}), ("PNG", "RGB", {"dpi": (72, 72)})]
    kinds += [("PNG", "L", {"icc_profile": b"i" * 300}), ("WEBP", "RGBA", {"xmp": b"x" * 1500, **turned})]
    described = Image.Exif()
    described[0x010F], described[0x0110], described[0x0112] = "A maker of cameras", "A model of theirs", 8
    kinds += [(form, "RGB", {"exif": described.tobytes()}) for form in ("JPEG", "WEBP", "PNG")]
    kinds += [(form, "RGB", {"xmp": b'tiff:Orientation="6"'}) for form in ("JPEG", "WEBP")]
    found = [(f"{form} {mode}", encode(form, mode, 33, 21, **options)) for form, mode, options in kinds]
    jpeg = encode("JPEG", "RGB", 33, 21, **turned)
    found += [("JPEG of a camera", jpeg[:2] + jpeg[20:]), ("JPEG of Photoshop", with_photoshop(jpeg))]
    found.append(("interlaced PNG", interlaced_png()))
    frames = [Image.fromarray(noise(33, 21)), Image.new("RGB", (33, 21), "red")]
    for form in ("GIF", "WEBP", "PNG", "TIFF"):
        file = io.BytesIO()
        frames[0].save(file, form, save_all=True, append_images=frames[1:], duration=50, loop=0)
        found.append((f"animated {form}", file.getvalue()))
    return found


def with_photoshop(jpeg: bytes) -> bytes:
    resources = b"".join(
        b"8BIM" + struct.pack(">HHI", code, 0, len(data)) + data
        for code, data in ((0x3ED, bytes(16)), (0x404, b"ab"))
    )
    segment = b"Photoshop 3.0\0" + resources
    return jpeg[:20] + b"\xff\xed" + struct.pack(">H", len(segment) + 2) + segment + jpeg[20:]


def interlaced_png() -> bytes:
    """A PNG in seven passes; PIL writes none, but reads the header all the same."""
    data = bytearray(encode("PNG", "RGB", 33, 21))
    data[28] = 1
    return with_checksums(data)


def with_checksums(png: bytearray) -> bytes:
    """The chunks of a PNG with their checksums made right, as far as they can be found."""
    at = 8
    while at + 12 <= len(png):
        end = at + 8 + int.from_bytes(png[at : at + 4], "big")
        if end + 4 > len(png):
            break
        png[end : end + 4] = zlib.crc32(png[at + 4 : end]).to_bytes(4, "big")
        at = end + 4
    return bytes(png)


def damage(data: bytes, rng: random.Random) -> bytes:
    """Cut off, bytes changed, taken out or put in; mostly in the header."""
    mutant = bytearray(data)
    if rng.random() < 0.3:
        del mutant[rng.randrange(1, len(mutant)) :]
    if rng.random() < 0.8:
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            at = rng.randrange(min(len(mutant), rng.choice((40, 200, 700, 5000))))
            mutant[at] = rng.choice((rng.randrange(256), 0, 255, mutant[at] ^ 1 << rng.randrange(8)))
    at = rng.randrange(min(len(mutant), 700))
    if rng.random() < 0.05:
        del mutant[at : at + rng.randrange(1, 9)]
    if rng.random() < 0.05:
        mutant[at:at] = rng.randbytes(rng.randrange(1, 5))
    return with_checksums(mutant) if data[1:4] == b"PNG" and rng.random() < 0.5 else bytes(mutant)


def pil_size(data: bytes) -> tuple[int, int] | str | None:
    """The size after turning the image upright, as far as PIL can read the orientation."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            size = image.size
            try:
                sideways = image.format != "TIFF" and image.getexif().get(0x0112) in (5, 6, 7, 8)
            except PIL_ERRORS:
                sideways = False
            return size[::-1] if sideways else size
    except Image.DecompressionBombError:
        return "too large"
    except PIL_ERRORS:
        return None


def test_damaged_images_have_pils_size_or_none() -> None:
    rng, images = random.Random(4), corpus()
    sized = rejected = 0
    for _ in range(MUTANTS):
        name, data = rng.choice(images)
        mutant = damage(data, rng)
        own = header_size(io.BytesIO(mutant))
        theirs = pil_size(mutant)
        assert own is None or theirs in (own, "too large"), (
            f"{name}: {own}, PIL {theirs}: {mutant[:64].hex()}"
        )
        sized += own is not None
        rejected += theirs is None
    # The fuzzing reaches both sides: images that still open, and images that do not.
    assert sized > MUTANTS // 4
    assert rejected > MUTANTS // 10


def test_the_size_that_is_given_out_is_pils_for_damaged_images_too() -> None:
    rng, images = random.Random(5), corpus()
    for _ in range(MUTANTS // 4):
        name, data = rng.choice(images)
        mutant = damage(data, rng)
        theirs = pil_size(mutant)
        if isinstance(theirs, tuple):
            assert image_size(mutant) == (theirs[1], theirs[0]), name
        else:
            with pytest.raises(BadSample):
                image_size(mutant)


def test_a_path_gives_what_an_open_file_gives(tmp_path: Path) -> None:
    for number, (name, data) in enumerate(corpus()):
        path = tmp_path / str(number)
        path.write_bytes(data)
        assert path_header_size(str(path)) == header_size(io.BytesIO(data)), name


def test_a_path_that_cannot_be_read_has_no_size(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "empty", tmp_path / "nothing", "a\0b"):
        assert path_header_size(str(path)) is None
