from __future__ import annotations

import io
import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from media_samples import noise
from PIL import Image

from packhorse.media import image_size
from packhorse.media.image_headers import header_size

# (PIL format, mode, save options); TIFF and PPM are PIL's to read, the rest is read here.
OWN = [
    *[("PNG", mode, {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")],
    ("PNG", "RGB", {"compress_level": 0}),
    *[("JPEG", mode, {}) for mode in ("L", "RGB", "CMYK")],
    ("JPEG", "RGB", {"progressive": True}),
    ("JPEG", "RGB", {"subsampling": 0, "quality": 95}),
    *[("GIF", mode, {}) for mode in ("1", "L", "P", "RGB", "RGBA")],
    ("GIF", "P", {"interlace": 1, "comment": b"a comment"}),
    *[("WEBP", mode, {}) for mode in ("L", "RGB", "RGBA", "P")],
    *[("WEBP", mode, {"lossless": True}) for mode in ("RGB", "RGBA")],
    ("WEBP", "RGB", {"icc_profile": b"i" * 300}),
    *[("BMP", mode, {}) for mode in ("1", "L", "P", "RGB", "RGBA")],
]
OTHERS = [("TIFF", "RGB", {}), ("TIFF", "L", {}), ("PPM", "RGB", {}), ("ICO", "RGBA", {})]


def encode(form: str, mode: str, width: int, height: int, **options: object) -> bytes:
    file = io.BytesIO()
    if mode == "I;16":
        image = Image.new("I;16", (width, height), 40_000)
    else:
        image = Image.fromarray(noise(width, height)).convert(mode)
    image.save(file, form, **options)
    return file.getvalue()


def pil_size(data: bytes) -> tuple[int, int]:
    with Image.open(io.BytesIO(data)) as image:
        return image.size


def own_size(data: bytes) -> tuple[int, int] | None:
    return header_size(io.BytesIO(data))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(OWN + OTHERS), st.integers(1, 300), st.integers(1, 300))
def test_the_size_is_pils_for_every_format(kind: tuple, width: int, height: int) -> None:
    form, mode, options = kind
    if form == "ICO":
        width, height = min(width, 255), min(height, 255)
    data = encode(form, mode, width, height, **options)
    size = pil_size(data)
    assert image_size(data) == (size[1], size[0])
    assert own_size(data) == (None if kind in OTHERS else size)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(OWN), st.integers(1, 16_383), st.integers(1, 16_383))
def test_large_sizes_are_read_from_the_header_too(kind: tuple, width: int, height: int) -> None:
    # One side at a time, or the images themselves would be large.
    form, mode, options = kind
    for size in ((width, 1), (1, height)):
        data = encode(form, mode, *size, **options)
        assert own_size(data) == pil_size(data) == size


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@settings(max_examples=200, deadline=None)
@given(st.sampled_from(OWN), st.integers(0, 60), st.integers(0, 255), st.integers(1, 400))
def test_a_damaged_header_never_gives_a_size_that_pil_denies(
    kind: tuple, at: int, byte: int, cut: int
) -> None:
    form, mode, options = kind
    data = bytearray(encode(form, mode, 33, 21, **options))
    data[at % len(data)] = byte
    for damaged in (bytes(data), bytes(data[:cut])):
        own = own_size(damaged)
        try:
            theirs = pil_size(damaged)
        except Image.DecompressionBombError:
            continue  # a limit, which is not the header's business
        except (OSError, SyntaxError, ValueError):
            theirs = None
        assert own in (None, theirs)


def test_a_jpeg_with_large_metadata_is_read_by_skipping_it() -> None:
    class CountingFile(io.BytesIO):
        total = 0

        def read(self, size: int | None = -1) -> bytes:
            data = super().read(size)
            self.total += len(data)
            return data

    exif = Image.Exif()
    exif[0x010E] = "x" * 60_000
    data = encode("JPEG", "RGB", 123, 77, exif=exif, icc_profile=b"p" * 200_000, comment=b"c" * 50_000)
    file = CountingFile(data)
    assert header_size(file) == pil_size(data) == (123, 77)
    assert file.total < 12_000


def test_a_jpeg_with_fill_bytes_before_a_marker_is_read() -> None:
    data = encode("JPEG", "RGB", 31, 17)
    padded = data[:2] + b"\xff\xff\xff" + data[2:]
    assert own_size(padded) == pil_size(padded) == (31, 17)


def test_a_jpeg_of_12_bits_is_left_to_pil() -> None:
    data = bytearray(encode("JPEG", "RGB", 31, 17))
    data[data.index(b"\xff\xc0") + 4] = 12
    assert own_size(bytes(data)) is None


def test_a_gif_frame_that_sticks_out_makes_the_image_larger() -> None:
    data = bytearray(encode("GIF", "P", 20, 10))
    data[6:10] = struct.pack("<HH", 12, 8)
    assert own_size(bytes(data)) == pil_size(bytes(data)) == (20, 10)
    data[6:10] = struct.pack("<HH", 50, 40)
    assert own_size(bytes(data)) == pil_size(bytes(data)) == (50, 40)


def test_an_animated_gif_webp_and_png_have_the_size_of_the_whole() -> None:
    frames = [Image.new("RGB", (40, 30), (i * 40, 0, 0)) for i in range(4)]
    for form in ("GIF", "WEBP", "PNG"):
        file = io.BytesIO()
        frames[0].save(file, form, save_all=True, append_images=frames[1:], duration=50)
        assert image_size(file.getvalue()) == (30, 40)
        assert pil_size(file.getvalue()) == (40, 30)
        # PIL looks at the frames of an animated WebP or PNG before it says yes.
        assert own_size(file.getvalue()) == ((40, 30) if form == "GIF" else None)


def bitmap(width: int, height: int, *, header: int = 40, bits: int = 24, compression: int = 0) -> bytes:
    if header == 12:
        info = struct.pack("<IHHHH", 12, width, height, 1, bits)
    else:
        info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 14 + len(info)) + info + bytes(4 * abs(width * height) + 64)


def test_bitmaps_stored_from_the_top_and_of_os2_are_read() -> None:
    for data, size in [
        (bitmap(7, 5), (7, 5)),
        (bitmap(7, -5), (7, 5)),
        (bitmap(300, -70), (300, 70)),
        (bitmap(9, 4, header=12), (9, 4)),
    ]:
        assert own_size(data) == pil_size(data) == size


def test_bitmaps_that_pil_rejects_are_left_to_it() -> None:
    for data in (bitmap(7, 5, bits=48), bitmap(7, 5, compression=5), bitmap(-7, 5), bitmap(0, 5)):
        assert own_size(data) is None


def test_a_png_with_a_wrong_header_checksum_is_left_to_pil() -> None:
    data = bytearray(encode("PNG", "RGB", 31, 17))
    data[19] ^= 1
    assert own_size(bytes(data)) is None
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    assert own_size(bytes(data)) == (30, 17)


@pytest.mark.parametrize(
    "data", [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF", b"GIF89a", b"BM", b"hello", b"x"]
)
def test_a_bare_signature_has_no_size(data: bytes) -> None:
    assert own_size(data) is None
