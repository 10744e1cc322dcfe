"""Whether counts in an Arrow file are those that were written.

Arrow believes what a file says of itself: an offset that was damaged leads it outside of the file and ends
the process, a number that was damaged is a wrong count. So every batch is looked through before it is used,
and has a digest of its content beside it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from packhorse.datasets.cache import is_of_the_system
from packhorse.datasets.count_columns import count_schema
from packhorse.errors import ConfigError
from packhorse.types import MEDIA_KINDS

if TYPE_CHECKING:
    from packhorse.datasets.cache import Fingerprint
    from packhorse.datasets.sidecar import Settings

FORMAT = "packhorse-count-2"
CHECK = b"check"
"""Under this name the file of a single part has the digest of its counts."""

_ABOUT = {
    "rows": int,
    "part_rows": int,
    "parts": list,
    "checks": list,
    "settings": dict,
    "settings_key": str,
}


def batch_digest(batch: Any) -> str:
    """A digest of the counts in a record batch: of their values, however Arrow lays them out.

    Raises:
        ValueError: these are not the columns of a count file, or one of them contradicts itself.
    """
    if not batch.schema.equals(count_schema()):
        raise ValueError("its columns are not those of a count file")
    batch.validate(full=True)
    hashed = hashlib.blake2b(digest_size=16)
    for column in batch.columns:
        _add(hashed, column)
    return hashed.hexdigest()


def open_batches(path: str) -> Any:
    """An Arrow file as a reader of its batches, memory-mapped; nothing in it is checked yet.

    Raises:
        OSError: it cannot be read.
        ConfigError: it is no Arrow file, or a damaged one.
    """
    import pyarrow as pa

    try:
        return pa.ipc.open_file(pa.memory_map(path))
    except (pa.ArrowException, ValueError, OSError) as error:
        raise as_damage(error, path) from error


def as_damage(error: Exception, path: str) -> Exception:
    """What Arrow raised over a file, as what it means: the system's own errors stay, the rest is damage."""
    if is_of_the_system(error):
        return error
    why = " ".join(str(error).split())[:200]
    return ConfigError(f"{path} is a count file of another format, or damaged ({why})")


def is_in_order(about: Any) -> bool:
    """Whether a file says about itself what a count file of this format says."""
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        return False
    return about.get("digest") == _about_digest(about) and all(
        isinstance(about.get(name), kind) for name, kind in _ABOUT.items()
    )


def sidecar_metadata(
    settings: Settings,
    state: Fingerprint,
    rows: int,
    part_rows: int,
    parts: Sequence[str],
    checks: Sequence[str],
) -> dict[str, str]:
    """What a sidecar says about itself. No time and no path: the same data give the same bytes.

    Args:
        settings: what was counted with.
        state: of the data file.
        rows: of it.
        part_rows: of each part but the last.
        parts: the digest of each part's bytes in the data file.
        checks: the digest of each part's counts.
    """
    about = {
        "format": FORMAT,
        "rows": rows,
        "part_rows": part_rows,
        "parts": list(parts),
        "checks": list(checks),
        "size": state.size,
        "edges": state.edges,
        "kinds": MEDIA_KINDS,
        "settings_key": settings.key,
        "settings": settings.values,
    }
    return {"packhorse": json.dumps(about | {"digest": _about_digest(about)}, sort_keys=True)}


def _about_digest(about: Mapping[str, Any]) -> str:
    """A digest of what a count file says about itself, but for the digest."""
    rest = {name: value for name, value in about.items() if name != "digest"}
    return hashlib.blake2b(json.dumps(rest, sort_keys=True).encode(), digest_size=16).hexdigest()


def _add(hashed: Any, array: Any) -> None:
    import pyarrow as pa
    import pyarrow.compute as pc

    if array.null_count:
        raise ValueError("a count is missing")
    hashed.update(len(array).to_bytes(8, "little"))
    if pa.types.is_list(array.type):
        _add(hashed, array.value_lengths())
        _add(hashed, array.flatten())
    elif pa.types.is_struct(array.type):
        for child in array.flatten():
            _add(hashed, child)
    elif pa.types.is_string(array.type):
        _add(hashed, pc.binary_length(array))
        hashed.update(_characters(array))
    else:
        values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
        hashed.update(np.ascontiguousarray(values).data)


def _characters(array: Any) -> Any:
    """All texts of a column as they lie one behind the other."""
    _, offsets, characters = array.buffers()
    if not len(array) or characters is None:
        return b""
    ends = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1]
    return memoryview(characters)[int(ends[0]) : int(ends[-1])]
