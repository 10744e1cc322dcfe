"""Advice on media that are all missing where they are looked for, but lie beside the meta or the data file.

Without a ``media_dir`` relative paths of media start at the working directory; ``file_name`` starts at the
meta file. Costs a look at the first rows of a dataset, and only where all its media are missing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator

from packhorse.errors import BadSample
from packhorse.formats.meta import DatasetConfig
from packhorse.media.source import LmdbEntry, LocalFile, is_address, locate
from packhorse.rows.row_files import RowFile
from packhorse.rows.selection import row_key
from packhorse.tools.check.row_rules import check_row

_MOST_ROWS = 2048  # looked at for media
_MEDIA = 20  # enough to tell a folder by


def media_dir_advice(meta: str, datasets: Iterable[tuple[DatasetConfig, RowFile]]) -> list[str]:
    """Return a line for each dataset that lacks a ``media_dir`` and would find its media with one.

    Args:
        meta: the meta file.
        datasets: those whose media are all missing, as the meta file has them, and their rows.
    """
    lines = [_advice(meta, config, rows) for config, rows in datasets]
    return [line for line in lines if line is not None]


def _advice(meta: str, config: DatasetConfig, rows: RowFile) -> str | None:
    if config.rules.media_dir is not None or is_address(meta):
        return None
    beside = os.path.dirname(meta)
    places = {beside: "the meta file"}
    if not is_address(config.file_name):
        places.setdefault(os.path.dirname(config.file_name), "the data file")
    named = [path for path, _ in zip(_relative_paths(config, rows), range(_MEDIA), strict=False)]
    for folder, what in places.items():
        if named and all(os.path.exists(os.path.join(folder, path)) for path in named):
            entry = json.dumps(os.path.relpath(folder or ".", beside or "."), ensure_ascii=False)
            return (
                f"{config.name}: its media are missing where they are looked for, in {os.getcwd()}. They "
                f'exist beside {what}: add "media_dir": {entry} to this dataset in {meta}'
            )
    return None


def _relative_paths(config: DatasetConfig, rows: RowFile) -> Iterator[str]:
    """Relative local paths of media that the first rows name."""
    numbers = range(min(len(rows), _MOST_ROWS))
    for number, row in zip(numbers, rows.read(numbers), strict=True):
        if isinstance(row, BadSample):
            continue
        _, conversation = check_row(row, config, row_key(config.name, number))
        for ref in conversation.media if conversation is not None else ():
            path = _local_path(ref.source)
            if path is not None and not os.path.isabs(path):
                yield path


def _local_path(source: object) -> str | None:
    """The file of a media item; of frames in a list the first; None where it is no local file."""
    if isinstance(source, list | tuple):
        return _local_path(source[0]) if source else None
    try:
        place = locate(source)
    except BadSample:
        return None
    if isinstance(place, LocalFile):
        return place.path
    return place.database if isinstance(place, LmdbEntry) else None
