"""Suggest a ``media_dir`` if all media of a dataset are missing, but exist next to the meta or data file.

Without a ``media_dir`` relative paths of media start at the working directory; ``file_name`` starts at the
meta file. Reads the first rows of a dataset.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from itertools import islice

from packhorse.errors import BadSample
from packhorse.formats.meta import DatasetConfig
from packhorse.media.source import LmdbEntry, LocalFile, is_address, locate
from packhorse.rows.row_files import RowFile
from packhorse.rows.selection import row_key
from packhorse.tools.check.row_rules import check_row

_MAX_ROWS = 2048
_MAX_MEDIA = 20


def media_dir_advice(meta: str, datasets: Iterable[tuple[DatasetConfig, RowFile]]) -> list[str]:
    """Return a line for each dataset that lacks a ``media_dir`` and would find its media with one."""
    return [line for dataset in datasets if (line := _advice(meta, *dataset)) is not None]


def _advice(meta: str, config: DatasetConfig, rows: RowFile) -> str | None:
    if config.rules.media_dir is not None or is_address(meta):
        return None
    meta_folder = os.path.dirname(meta)
    folders = {meta_folder: "the meta file"}
    if not is_address(config.file_name):
        folders.setdefault(os.path.dirname(config.file_name), "the data file")
    paths = list(islice(_relative_paths(config, rows), _MAX_MEDIA))
    for folder, name in folders.items():
        if paths and all(os.path.exists(os.path.join(folder, path)) for path in paths):
            entry = json.dumps(os.path.relpath(folder or ".", meta_folder or "."), ensure_ascii=False)
            return (
                f"{config.name}: its media are not in the working directory {os.getcwd()}. They exist next "
                f'to {name}: add "media_dir": {entry} to this dataset in {meta}'
            )
    return None


def _relative_paths(config: DatasetConfig, rows: RowFile) -> Iterator[str]:
    """Yield the relative local paths of media in the first rows."""
    indices = range(min(len(rows), _MAX_ROWS))
    for index, row in zip(indices, rows.read(indices), strict=True):
        if isinstance(row, BadSample):
            continue
        _, conversations = check_row(row, config, row_key(config.name, index))
        for ref in (ref for conversation in conversations for ref in conversation.media):
            path = _local_path(ref.source)
            if path is not None and not os.path.isabs(path):
                yield path


def _local_path(source: object) -> str | None:
    """Return the file of a media item, or of the first frame in a list; None if it is not a local file."""
    if isinstance(source, list | tuple):
        return _local_path(source[0]) if source else None
    try:
        location = locate(source)
    except BadSample:
        return None
    if isinstance(location, LocalFile):
        return location.path
    return location.database if isinstance(location, LmdbEntry) else None
