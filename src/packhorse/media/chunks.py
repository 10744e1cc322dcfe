"""Whether a WAV or AIFF file is all there: libsndfile takes a cut one for a shorter one and says nothing."""

from __future__ import annotations

from struct import unpack
from typing import BinaryIO

# (start of the file, its kind) -> (byte order, name of the chunk that holds the sound)
_KINDS = {
    (b"RIFF", b"WAVE"): ("<", b"data"),
    (b"FORM", b"AIFF"): (">", b"SSND"),
    (b"FORM", b"AIFC"): (">", b"SSND"),
}
# Programs that write to a pipe cannot come back to fill in the length.
_STREAMED = 0x7FFF_0000


def missing_bytes(file: BinaryIO) -> int:
    """How many bytes of sound the header promises beyond the end of the file; 0 for any other format.

    Reads eight bytes of each chunk, and leaves the file at its start.
    """
    end = file.seek(0, 2)
    file.seek(0)
    head = file.read(12)
    order, wanted = _KINDS.get((head[:4], head[8:]), ("", b""))
    missing, at = 0, 12
    while wanted and at + 8 <= end:
        file.seek(at)
        name, size = unpack(f"{order}4sI", file.read(8))
        if name == wanted:
            missing = max(0, at + 8 + size - end) if size < _STREAMED else 0
            break
        at += 8 + size + size % 2
    file.seek(0)
    return missing
