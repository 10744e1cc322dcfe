"""Read the size of an image, (width, height), from its first bytes.

PNG, JPEG, GIF, WebP and BMP take 5 to 10 microseconds; PIL's lazy open takes 25 to 150. The promise of
``benchmarks/headers.py`` needs this: counting a dataset reads one header per image.
The size is the one after ``ImageOps.exif_transpose``. The headers are followed as far as PIL follows them, up
to the pixels, so a file that PIL cannot open has no size here either. Any other format, a truncated file and
unusual contents give None; the caller then uses PIL. Limits on the size are the caller's.
"""

from __future__ import annotations

import os
import re
import zlib
from struct import Struct, unpack_from
from struct import error as StructError
from typing import BinaryIO

Size = tuple[int, int]
File = int | BinaryIO
"""A file descriptor, or a seekable file."""

_WINDOW = 1024
# Without O_NONBLOCK, opening a FIFO could block forever.
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_GIF_EXTENSION, _GIF_IMAGE, _GIF_CONTROL, _GIF_APPLICATION = 0x21, 0x2C, 0xF9, 0xFF
_JPEG_DQT, _JPEG_SOS, _JPEG_FILL = 0xFFDB, 0xFFDA, 0xFFFF
_JPEG_FRAMES = frozenset(range(0xFFC0, 0xFFD0)) - {0xFFC4, 0xFFC8, 0xFFCC}
# Segments with contents that PIL reads: EXIF, colour profile or several images, Photoshop's resources.
_JPEG_EXIF, _JPEG_PROFILE, _JPEG_PHOTOSHOP = _JPEG_METADATA = (0xFFE1, 0xFFE2, 0xFFED)
# Segments to skip and the least length that PIL accepts: tables, restart interval, comment, and the other
# application segments.
_JPEG_SKIPPED = {0xFFC4: 2, 0xFFCC: 2, 0xFFDD: 2, 0xFFFE: 2}
_JPEG_SKIPPED |= {mark: 2 for mark in range(0xFFE0, 0xFFF0) if mark not in _JPEG_METADATA}
_JPEG_SKIPPED |= {0xFFE0: 16, 0xFFEE: 14}
# What most encoders write, up to the pixels, in one match: JFIF, tables of 8 bits, the frame, Huffman tables.
_PLAIN_JPEG = re.compile(
    rb"\xff\xd8\xff\xe0\x00\x10.{14}(?:\xff\xdb\x00\x43[\x00-\x0f].{64})+\xff\xc0\x00\x11\x08(....)\x03.{9}"
    rb"(?:\xff\xc4\x00(?:\x1f.{29}|\xb5.{179}))*\xff\xda\x00\x0c.{10}",
    re.DOTALL,
)
_jpeg_size = Struct(">HH").unpack
_jpeg_segment, _jpeg_frame = Struct(">HH").unpack_from, Struct(">BHHB").unpack_from
_jpeg_skipped = _JPEG_SKIPPED.get
_png_header, _png_chunk = Struct(">I4sIIBBBBBI").unpack_from, Struct(">I4s").unpack_from
# EXIF data by byte order: the position of the tags, how many there are, and a tag with its value.
_EXIF_STRUCTS = {
    mark: (order, Struct(f"{order}I").unpack_from, Struct(f"{order}H").unpack_from, Struct(f"{order}HHII"))
    for mark, order in ((b"MM\0*", ">"), (b"II*\0", "<"))
}
# EXIF tags with the type and the number of values of the standard.
_EXIF_ORIENTATION, _EXIF_SHORT = 0x0112, (3, 1)
_EXIF_RESOLUTION, _EXIF_FRACTION = 0x011A, (5, 1)
_EXIF_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
_UPRIGHT, _FIRST_SIDEWAYS, _LAST_SIDEWAYS = 1, 5, 8  # orientations
_XMP = b"http://ns.adobe."  # the part of the name that is always in the window
_PNG_KINDS = frozenset(
    (bits, colour)
    for colour, depths in {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}.items()
    for bits in depths
)
_PNG_METADATA = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0")  # texts that may hold an orientation
_PNG_SKIPPED = {  # chunks to skip and their least length
    **{b"PLTE": 0, b"tRNS": 6, b"gAMA": 4, b"cHRM": 32, b"sRGB": 1, b"pHYs": 9, b"tEXt": 0},
    **{b"bKGD": 0, b"sBIT": 0, b"tIME": 0, b"hIST": 0, b"eXIf": 0},
}
_WEBP_STILL = 0x3C  # flags of colour profile, transparency, EXIF and XMP
_WEBP_EXIF, _WEBP_XMP = 0x08, 0x04
_WEBP_EXTRA_CHUNKS = (b"ICCP", b"ALPH", b"EXIF", b"XMP ")
_BMP_INFO_HEADERS = (40, 52, 56, 64, 108, 124)


def header_size(file: BinaryIO) -> Size | None:
    """Return (width, height) from the header of a seekable file, or None if PIL has to read it.

    Reads 1 KiB from the start, and another after large metadata, which are skipped.
    """
    return _size(_read(file, 0, _WINDOW), file)


def path_header_size(path: str) -> Size | None:
    """Return the same for a local file, in half the time of ``open``; None also if it cannot be read."""
    try:
        descriptor = os.open(path, _OPEN_FLAGS)
    except (OSError, ValueError):
        return None
    try:
        # pread fails for a FIFO, a terminal and a directory.
        return _size(os.pread(descriptor, _WINDOW, 0), descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _read(file: File, position: int, size: int) -> bytes:
    if isinstance(file, int):
        return os.pread(file, size, position)
    file.seek(position)
    return file.read(size)


def _file_size(file: File) -> int:
    return os.fstat(file).st_size if isinstance(file, int) else file.seek(0, os.SEEK_END)


def _size(head: bytes, file: File) -> Size | None:
    try:
        if head.startswith(b"\xff\xd8\xff"):
            size = _jpeg(head, file)
        elif head.startswith(b"\x89PNG\r\n\x1a\n"):
            size = _png(head, file)
        elif head.startswith(b"RIFF"):
            size = _webp(head, file)
        elif head.startswith((b"GIF87a", b"GIF89a")):
            size = _gif(head, file)
        elif head.startswith(b"BM"):
            size = _bmp(head)
        else:
            return None
    except (StructError, IndexError):
        # The header is longer than the window, or the file is shorter than the header.
        return None
    return size if size and size[0] > 0 and size[1] > 0 else None


def _upright(size: Size, orientation: int) -> Size:
    return size[::-1] if _FIRST_SIDEWAYS <= orientation <= _LAST_SIDEWAYS else size


def _png(head: bytes, file: File) -> Size | None:
    length, name, width, height, bits, colour, _, filters, _, checksum = _png_header(head, 8)
    if name != b"IHDR" or length != 13 or filters != 0 or (bits, colour) not in _PNG_KINDS:
        return None
    # PIL rejects a chunk with a wrong checksum before the pixels.
    if zlib.crc32(head[12:29]) != checksum:
        return None
    start, at, orientation = 0, 33, 0  # 0: there is no EXIF chunk
    while True:
        length, name = _png_chunk(head, at)
        if name == b"IDAT":
            # Metadata after the pixels may hold an orientation too.
            plain = _png_ends_with_pixels(start + at, length, file)
            return _upright((width, height), orientation) if plain else None
        if length < _PNG_SKIPPED.get(name, 1 << 32) and not (name == b"tRNS" and colour == 3):
            return None
        if at + length + 20 > len(head):
            if length > 4 * _WINDOW:
                return None
            start, head, at = start + at, _read(file, start + at, length + _WINDOW), 0
        (checksum,) = unpack_from(">I", head, at + 8 + length)
        if zlib.crc32(head[at + 4 : at + 8 + length]) != checksum:
            return None
        if name == b"eXIf":
            value = None if orientation else _exif_orientation(head[at + 8 : at + 8 + length], length)
            if not value:
                return None  # a second chunk, or one without a plain orientation
            orientation = value
        elif name == b"tEXt" and head.startswith(_PNG_METADATA, at + 8):
            return None
        at += 12 + length


def _png_ends_with_pixels(at: int, length: int, file: File) -> bool:
    """Return whether no chunk follows the pixels, which start at ``at`` with a chunk of ``length`` bytes.

    Encoders write pixels in chunks of one length and a shorter last one, whose position follows from that;
    False if it is not there.
    """
    end, stride = _file_size(file) - 12, 12 + length  # the last chunk is empty
    last = at + max(end - at - 1, 0) // stride * stride
    if last == at:
        return at + stride == end
    chunk = _read(file, last, 8)
    return chunk[4:] == b"IDAT" and int.from_bytes(chunk[:4], "big") == end - last - 12


def _jpeg(head: bytes, file: File) -> Size | None:
    if matched := _PLAIN_JPEG.match(head):
        height, width = _jpeg_size(matched[1])
        return width, height
    # ``start`` is the position of ``head`` in the file, ``at`` that of the next marker in ``head``.
    start, at, size = 0, 2, None
    orientation, has_exif, has_xmp = 0, False, False
    last = len(head) - 20  # the last position at which ``head`` has the begin of a segment
    while True:
        if at > last:
            start, at, head = start + at, 0, _read(file, start + at, _WINDOW)
            last = len(head) - 20
        mark, length = _jpeg_segment(head, at)
        if (least := _jpeg_skipped(mark)) is not None:
            if length < least:
                return None
        elif mark == _JPEG_DQT:
            plain = length == 67 and head[at + 4] < 16
            if not plain and not _whole_tables(head, at + 4, at + 2 + length):
                return None
        elif mark in _JPEG_FRAMES:
            bits, height, width, layers = _jpeg_frame(head, at + 4)
            if size or bits != 8 or layers not in (1, 3, 4) or length != 8 + 3 * layers:
                return None
            size = width, height
        elif mark == _JPEG_SOS:
            end = at + 2 + length
            if size is None or length < 2 or (end > len(head) and start + end > _file_size(file)):
                return None
            # Without an orientation in EXIF data, XMP data may have one; PIL reads them.
            return None if has_xmp and not orientation else _upright(size, orientation)
        elif mark == _JPEG_EXIF and head.startswith(b"Exif\0\0", at + 4):
            value = None if has_exif else _exif_orientation(head[at + 10 : at + 2 + length], length - 8)
            if value is None:
                return None
            orientation, has_exif = value, True
        elif mark == _JPEG_EXIF:
            if length < 2:
                return None
            has_xmp = has_xmp or head.startswith(_XMP, at + 4)
        elif mark in _JPEG_METADATA:
            if not _plain_metadata(mark, length, head[at + 4 : at + 2 + length], file, start + at + 4):
                return None
        elif mark == _JPEG_FILL:
            at += 1
            continue
        else:
            return None
        at += 2 + length


def _plain_metadata(mark: int, length: int, begin: bytes, file: File, at: int) -> bool:
    """Return whether PIL can parse a segment; ``begin`` is the part of it that is in the window."""
    if mark == _JPEG_PROFILE:
        return length >= 16 and not begin.startswith(b"MPF\0")
    return length >= 2 and _resources_end_well(_read(file, at, length - 2))


def _whole_tables(head: bytes, at: int, end: int) -> bool:
    """Return whether quantization tables fill their segment."""
    while at < end:
        at += 129 if head[at] >= 16 else 65
    return at == end


def _exif_orientation(exif: bytes, total: int) -> int | None:
    """Return the orientation in EXIF data, 0 if they have none, None if PIL has to read them.

    ``exif`` is the part of the data that is in the window, of ``total`` bytes.
    """
    if (structs := _EXIF_STRUCTS.get(exif[:4])) is None:
        return None
    order, position_at, number_at, tag_and_value = structs
    (at,) = position_at(exif, 4)
    (entries,) = number_at(exif, at)
    table = exif[at + 2 : at + 2 + 12 * entries]
    if len(table) < 12 * entries:
        return None
    orientation = 0
    for tag, kind, count, value in tag_and_value.iter_unpack(table):
        if tag == _EXIF_ORIENTATION and not orientation:
            if (kind, count) != _EXIF_SHORT:
                return None
            # The value is in the first two of the field's four bytes.
            orientation = (value >> 16 if order == ">" else value & 0xFFFF) or _UPRIGHT
        elif tag == _EXIF_RESOLUTION and (kind, count) != _EXIF_FRACTION:
            return None  # PIL fails on an empty one
        elif (size := count * _EXIF_BYTES.get(kind, 0)) > 4 and value + size > total:
            return None  # PIL stops at a truncated value
    return orientation


def _resources_end_well(segment: bytes) -> bool:
    """Return whether PIL can parse Photoshop's resources: it fails on a list that ends before a name."""
    at = 14
    while segment.startswith(b"8BIM", at):
        if at + 12 > len(segment):
            return False
        at += 7 + segment[at + 6]
        at += at & 1
        (length,) = unpack_from(">I", segment, at)
        at += 4 + length
        at += at & 1
    return True


def _gif(head: bytes, file: File) -> Size | None:
    width, height, flags = unpack_from("<HHB", head, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    while head[at] == _GIF_EXTENSION:
        kind, first = head[at + 1], head[at + 2]
        # PIL ignores the length of a control block, and reads beyond the end of an empty extension.
        if first == 0 or (kind == _GIF_CONTROL and first != 4):
            return None
        at += 3 + first
        if kind == _GIF_APPLICATION and head[at] == 0:
            return None
        while head[at]:
            at += 1 + head[at]
        at += 1
    if head[at] != _GIF_IMAGE:
        return None
    # A first frame that exceeds the declared screen enlarges it.
    left, top, frame_width, frame_height, flags = unpack_from("<HHHHB", head, at + 1)
    at += 10 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    if at >= len(head) and not _read(file, at, 1):
        return None
    return max(width, left + frame_width), max(height, top + frame_height)


def _webp(head: bytes, file: File) -> Size | None:
    # libwebp opens no truncated file.
    riff, form, kind, length = unpack_from("<I4s4sI", head, 4)
    if form != b"WEBP" or riff + 8 > _file_size(file):
        return None
    if kind == b"VP8X":
        return _webp_extended(head, file, riff + 8) if length == 10 else None
    size = _webp_frame(kind, head, 20, length)
    return size if 12 + length + (length & 1) == riff else None


def _webp_extended(head: bytes, file: File, end: int) -> Size | None:
    flags, low_width, high_width, low_height, high_height = unpack_from("<IHBHB", head, 20)
    if flags & ~_WEBP_STILL:
        return None  # an animation, or unknown flags
    size = (high_width << 16 | low_width) + 1, (high_height << 16 | low_height) + 1
    at, before = 30, b""
    frame, orientation, has_exif = None, 0, False
    while at < end:
        chunk = head[at : at + 18] if at + 18 <= len(head) else _read(file, at, 18)
        kind, length = unpack_from("<4sI", chunk)
        if kind in (b"VP8 ", b"VP8L"):
            if frame or (kind == b"VP8L" and before == b"ALPH"):
                return None
            frame = _webp_frame(kind, chunk, 8, length)
            if frame != size:
                return None
        elif (
            kind not in _WEBP_EXTRA_CHUNKS or before == b"ALPH" or (kind == b"ALPH" and (frame or not length))
        ):
            return None
        elif kind == b"EXIF" and flags & _WEBP_EXIF:
            exif = _read(file, at + 8, min(length, _WINDOW))
            prefix = 6 if exif.startswith(b"Exif\0\0") else 0  # some encoders write that of a JPEG
            value = None if has_exif else _exif_orientation(exif[prefix:], length - prefix)
            if value is None:
                return None
            orientation, has_exif = value, True
        before = kind
        at += 8 + length + (length & 1)
    if frame is None or at != end or (flags & _WEBP_XMP and not orientation):
        return None
    return _upright(frame, orientation)


def _webp_frame(kind: bytes, head: bytes, at: int, length: int) -> Size | None:
    if kind == b"VP8 ":
        low, high, mark, width, height = unpack_from("<HB3sHH", head, at)
        frame = high << 16 | low
        # A key frame that is shown, of a known profile, its first partition inside the chunk.
        valid = mark == b"\x9d\x01\x2a" and frame & 0x11 == 0x10 and frame >> 1 & 7 <= 3
        # The upper two bits of width and height hold a scale.
        return (width & 0x3FFF, height & 0x3FFF) if valid and frame >> 5 < length >= 10 else None
    if kind == b"VP8L":
        start, bits = unpack_from("<BI", head, at)
        valid = start == 0x2F and not bits >> 29 and length >= 5
        return ((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1) if valid else None
    return None


def _bmp(head: bytes) -> Size | None:
    (header,) = unpack_from("<I", head, 14)
    if header == 12:
        width, height, _, bits = unpack_from("<HHHH", head, 18)
        compression = colours = 0
    elif header in _BMP_INFO_HEADERS:
        width, height, _, bits, compression, _, _, _, colours = unpack_from("<iiHHIIIII", head, 18)
        if width < 0 or height < -(1 << 24):
            return None
        height = abs(height)  # negative: the rows are stored from the top
    else:
        return None
    # Bit fields and the rarer compressions are left to PIL.
    if bits not in (1, 4, 8, 16, 24, 32) or compression not in (0, 1, 2) or (bits <= 8 and colours > 65536):
        return None
    return (width, height) if len(head) >= 14 + header else None
