"""Decode images with PIL, and read their sizes.

Loading gives what ``transformers.image_utils.load_image`` gives: RGB, turned upright by the EXIF orientation,
and decoded to the last pixel, so that a truncated file raises here and not inside a processor. A size costs
about 10 microseconds for a common local file and decodes no pixel. The source is never changed.
Only the raster formats listed here are opened: PIL passes others (EPS) to an external program.
"""

from __future__ import annotations

import math
import struct
import zlib
from functools import lru_cache
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, PngImagePlugin, UnidentifiedImageError

from packhorse.media.failure import access_error, bad_media, read_error
from packhorse.media.image_headers import header_size, path_header_size
from packhorse.media.source import describe, open_source, reading

DEFAULT_MAX_PIXELS = 2 * 89_478_485
"""PIL's own limit against decompression bombs (twice its ``MAX_IMAGE_PIXELS``): it opens nothing larger."""

# What PIL's plugins raise on damaged files. Everything else is a bug.
_DECODE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    LookupError,
    ArithmeticError,
    RuntimeError,  # of the AVIF decoder
    TypeError,  # of the TIFF decoder, for tags of a wrong type
    struct.error,
    zlib.error,
)

# Formats that PIL decodes in this process, from this file alone; the most common ones first.
_FORMATS = (
    *("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF"),
    *("JPEG2000", "MPO", "ICO", "TGA", "DIB"),
)

# What other files are, by their first bytes in lower case. Messages never contain the bytes themselves: a row
# may name any file.
_NOT_IMAGES = (
    (b"<!doctype html", "an HTML page"),
    (b"<html", "an HTML page"),
    (b"version https://git-lfs", "a Git LFS pointer: run git lfs pull"),
    (b"%!ps", "PostScript"),
    (b"\xc5\xd0\xd3\xc6", "PostScript"),
    (b"%pdf", "a PDF document"),
    (b"<svg", "an SVG drawing"),
    (b"<?xml", "XML"),
    (b"{", "JSON"),
    (b"pk\3\4", "a ZIP archive"),
    (b"\x1f\x8b", "gzip data"),
    (bytes(8), "zero bytes"),
)

_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)
# The keys of ``image.info`` in which PIL looks for an orientation.
_EXIF_INFO = ("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp")


def load_image(
    source: object, *, exif: bool = True, max_pixels: int | None = DEFAULT_MAX_PIXELS
) -> Image.Image:
    """Decode one image into RGB.

    Args:
        source: anything :func:`~packhorse.media.open_source` opens, a PIL image (an RGB one is returned
            itself), or an array of height x width x 3 bytes.
        exif: turn the image upright by its EXIF (or XMP) orientation. Damaged EXIF data are ignored. (PIL
            turns a TIFF in any case.)
        max_pixels: raise for a larger image before a pixel is decoded; None leaves only PIL's own limit.

    Raises:
        BadSample: ``missing_media``, ``broken_media`` or ``media_too_large``.
    """
    if isinstance(source, np.ndarray):
        image = Image.fromarray(_check_array(source))
        _check_pixels(image.size, max_pixels, source)
        return image
    if isinstance(source, Image.Image):
        return _decode(source, exif, max_pixels, source)
    with open_source(source) as file, _pil_open(file, source) as image:
        return _decode(image, exif, max_pixels, source)


def image_size(
    source: object, *, exif: bool = True, max_pixels: int | None = DEFAULT_MAX_PIXELS
) -> tuple[int, int]:
    """Return (height, width) of an image as :func:`load_image` gives it, from its header alone.

    The limits are those of :func:`load_image`, which raises for the same headers. A file with damaged pixels
    still has a size.
    """
    # The common case, a local path, needs no file object.
    plain = exif and type(source) is str and (":" not in source or not ("::" in source or "://" in source))
    size = path_header_size(source) if plain else None  # type: ignore[arg-type]  # a str if plain
    if size is not None:
        pass
    elif isinstance(source, np.ndarray):
        size = _check_array(source).shape[1::-1]
    elif isinstance(source, Image.Image):
        size = _size_of(source, exif, source)
    else:
        with open_source(source, buffering=0, block_size=1 << 16) as file:
            if exif and not plain:
                with reading(source):
                    size = header_size(file)
            if size is None:
                file.seek(0)
                with _pil_open(file, source) as image:
                    size = _size_of(image, exif, source, file)
    _check_pixels(size, max_pixels, source)
    return size[1], size[0]


def _pil_open(file: BinaryIO, source: object) -> Image.Image:
    try:
        return Image.open(file, formats=_formats())
    except Image.DecompressionBombError as error:
        raise bad_media(f"{describe(source)}: {error}", "media_too_large") from error
    except UnidentifiedImageError as error:
        detail = f"{describe(source)} is not an image in a supported format ({_describe_content(file)})"
        raise bad_media(detail) from error
    except _DECODE_ERRORS as error:
        raise read_error(error, f"{describe(source)}: the image header cannot be read ({error})") from error


@lru_cache(maxsize=1)
def _formats() -> tuple[str, ...]:
    """Return the formats that this PIL can open; it raises KeyError for one that it was built without."""
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _describe_content(file: BinaryIO) -> str:
    file.seek(0)
    head = file.read(32).lower()
    kind = next((kind for start, kind in _NOT_IMAGES if head.startswith(start)), None)
    return f"it looks like {kind}" if kind else f"expected one of {', '.join(_formats())}"


def _check_format(image: Image.Image, source: object) -> None:
    """Raise if an image that the caller opened and did not decode has a format that may start a program."""
    if image.format is not None and image.format not in _FORMATS and getattr(image, "tile", None):
        raise bad_media(
            f"{describe(source)} is an image in the format {image.format}, which is not supported: convert "
            "it to PNG or JPEG"
        )


def _decode(image: Image.Image, exif: bool, max_pixels: int | None, source: object) -> Image.Image:
    _check_pixels(image.size, max_pixels, source)
    _check_format(image, source)
    try:
        image.load()
        if exif and (turn := _UPRIGHT.get(_orientation(image))) is not None:
            image = image.transpose(turn)
            for name in _EXIF_INFO:  # otherwise a processor could turn the image once more
                image.info.pop(name, None)
        if image.mode != "RGB":
            return image.convert("RGB")
        # PIL's copy() without a copy of the pixels: a plain image without its file. Image.Image has no
        # public constructor for existing pixels.
        return image if image is source else image._new(image.im)
    except Image.DecompressionBombError as error:
        raise bad_media(f"{describe(source)}: {error}", "media_too_large") from error
    except _DECODE_ERRORS as error:
        size = _format_size(image.size)
        detail = f"{describe(source)}: cannot be decoded ({error}); the size in its header is {size}"
        raise read_error(error, detail) from error


def _size_of(image: Image.Image, exif: bool, source: object, file: BinaryIO | None = None) -> tuple[int, int]:
    _check_format(image, source)
    width, height = image.size
    # PIL turns a TIFF with an orientation tag when it loads it, and gives the size after that.
    if not exif or _ORIENTATION in getattr(image, "tag_v2", ()):
        return width, height
    if isinstance(image, PngImagePlugin.PngImageFile) and not _may_have_exif(image, file, source):
        return width, height
    return (height, width) if _orientation(image) in _SIDEWAYS else (width, height)


def _orientation(image: Image.Image) -> Any:
    """Return the EXIF orientation as PIL reads it: a number, or any other content of the tag."""
    try:
        return image.getexif().get(_ORIENTATION, 1)
    except _DECODE_ERRORS as error:
        if (failure := access_error(error, f"reading the EXIF data failed ({error})")) is not None:
            raise failure from error
        return 1


def _may_have_exif(image: PngImagePlugin.PngImageFile, file: BinaryIO | None, source: object) -> bool:
    """Return whether a PNG has metadata that may hold an orientation, before or after its pixels.

    PIL decodes the whole image to look for metadata after the pixels; the chunk names take a few reads.
    """
    if any(name in image.info for name in _EXIF_INFO):
        return True
    file = image.fp if file is None else file  # type: ignore[assignment]  # PIL's IO[bytes] is one
    if file is None:
        return False  # it is decoded already
    before = file.tell()
    position, seen_pixels = 8, False
    try:
        with reading(source):
            while True:
                file.seek(position)
                chunk = file.read(8)
                if len(chunk) < 8 or chunk[4:] == b"IEND":
                    return False
                if chunk[4:] == b"IDAT":
                    seen_pixels = True
                elif seen_pixels and chunk[4:] in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
                    return True
                position += 12 + int.from_bytes(chunk[:4], "big")
    finally:
        file.seek(before)  # PIL may continue to read the file


def _check_array(array: np.ndarray) -> np.ndarray:
    if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8 or array.size == 0:
        raise bad_media(f"{describe(array)} is not an image: expected height x width x 3 of uint8")
    return array


def _check_pixels(size: tuple[int, int], max_pixels: int | None, source: object) -> None:
    pixels = size[0] * size[1]
    if max_pixels is not None and pixels > max_pixels:
        detail = f"{_format_size(size)} = {pixels:,} pixels, more than max_pixels={max_pixels:,}"
        raise bad_media(f"{describe(source)} is {detail}", "media_too_large")


def _format_size(size: tuple[int, int]) -> str:
    return f"{size[0]:,} x {size[1]:,}"


# --- resizing, with the rounding of transformers' Qwen2-VL image and Qwen3-VL video processors ----------

MAX_ASPECT_RATIO = 200


def resize_image(
    height: int, width: int, factor: int = 28, min_pixels: int = 56 * 56, max_pixels: int = 14 * 14 * 4 * 1280
) -> tuple[int, int]:
    """Return (height, width) of an image after resizing.

    >>> resize_image(480, 640)
    (476, 644)

    Raises:
        ValueError: one side is more than 200 times the other, as in the processors.
    """
    _check_aspect_ratio(height, width)
    rows, columns = round(height / factor), round(width / factor)
    area = rows * columns * factor * factor
    return _within(height, width, factor, (rows, columns), area, 1, min_pixels, max_pixels)


def fit_image(height: int, width: int, factor: int, min_pixels: float, max_pixels: float) -> tuple[int, int]:
    """Return (height, width) after resizing by the rule of ``qwen_vl_utils``.

    As :func:`resize_image`, but a side of at most half of ``factor`` counts as one ``factor``, not as none.
    """
    _check_aspect_ratio(height, width)
    return fit_any_image(height, width, factor, min_pixels, max_pixels)


def fit_any_image(
    height: int, width: int, factor: int, min_pixels: float, max_pixels: float
) -> tuple[int, int]:
    """As :func:`fit_image`, of any aspect ratio; a very long image has more than ``max_pixels``."""
    rows, columns = (max(1, round(side / factor)) for side in (height, width))
    area = rows * columns * factor * factor
    return _within(height, width, factor, (rows, columns), area, 1, min_pixels, max_pixels)


def image_tokens(size: tuple[int, int], factor: int, min_pixels: int, max_pixels: int) -> int:
    """Return the tokens of an image after `resize_image`: one for each square of ``factor`` pixels a side."""
    height, width = resize_image(*size, factor, min_pixels, max_pixels)
    return height * width // factor**2


def resize_video(
    num_frames: int,
    height: int,
    width: int,
    temporal_factor: int = 2,
    factor: int = 32,
    min_pixels: int = 128 * 128,
    max_pixels: int = 16 * 16 * 2 * 2 * 2 * 6144,
) -> tuple[int, int]:
    """Return (height, width) of the frames of a video after resizing; the budget is for all frames together.

    Raises:
        ValueError: fewer frames than ``temporal_factor``, or one side more than 200 times the other.
    """
    if num_frames < temporal_factor:
        raise ValueError(f"{num_frames} frames: expected at least temporal_factor={temporal_factor}")
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_aspect_ratio(height, width)
    rows, columns = round(height / factor), round(width / factor)
    area = round(num_frames / temporal_factor) * temporal_factor * rows * columns * factor * factor
    return _within(height, width, factor, (rows, columns), area, num_frames, min_pixels, max_pixels)


def _within(
    height: int,
    width: int,
    factor: int,
    cells: tuple[int, int],
    area: int,
    frames: int,
    min_pixels: float,
    max_pixels: float,
) -> tuple[int, int]:
    """Return the rounded size, scaled down or up if its area is outside the budget."""
    rows, columns = cells
    if area > max_pixels:
        scale = math.sqrt(frames * height * width / max_pixels)
        rows, columns = (max(1, math.floor(side / scale / factor)) for side in (height, width))
    elif area < min_pixels:
        scale = math.sqrt(min_pixels / (frames * height * width))
        rows, columns = (math.ceil(side * scale / factor) for side in (height, width))
    return rows * factor, columns * factor


def _check_aspect_ratio(height: int, width: int) -> None:
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise ValueError(f"{height} x {width}: aspect ratio {ratio:.0f}, expected at most {MAX_ASPECT_RATIO}")
