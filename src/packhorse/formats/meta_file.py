"""Meta files: which datasets a mixture has, each with its file, format and share."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from packhorse.errors import ConfigError, naming
from packhorse.formats.sharegpt import ShareGptFormat
from packhorse.media.source import is_address
from packhorse.rows.row_files import RowFile, local_file, open_rows

_META_KEYS = ("file_name", "columns", "tags", "media_dir", "sample_ratio", "strict", "confine")
_DATA_SUFFIXES = (".jsonl", ".ndjson", ".parquet", ".arrow", ".gz", ".zst")
_CONVERSATIONS = ("messages", "conversations", "conversation")


@dataclass(frozen=True, slots=True)
class DatasetConfig:
    """One entry of a meta file, checked and with its paths resolved."""

    name: str
    file_name: str
    rules: ShareGptFormat
    sample_ratio: float = 1.0

    def entry(self, file_name: str) -> dict[str, Any]:
        """The entry of a meta file for the same rows in another file."""
        return {"file_name": file_name, **asdict(self.rules), "sample_ratio": self.sample_ratio}


Meta = str | os.PathLike[str] | Mapping[str, Any]


def read_meta(source: Meta, dataset_names: Sequence[str] | None = None) -> list[DatasetConfig]:
    """The datasets of a meta file, in the order of their names.

    Args:
        source: a JSON file (or address of one) that maps names to ``file_name``, ``columns``, ``tags``,
            ``media_dir``, ``sample_ratio``, ``strict`` and ``confine``; or such a dict itself, whose
            relative paths then start at the working directory.
        dataset_names: only these.

    Raises:
        ConfigError: (a ``ValueError``) naming the file, the dataset and the key that is missing, unknown,
            twice there, or of the wrong type.
    """
    path = "meta" if isinstance(source, Mapping) else os.fspath(source)
    meta = dict(source) if isinstance(source, Mapping) else _parsed(path)
    names = sorted(meta) if dataset_names is None else sorted(dataset_names)
    unknown = [name for name in names if name not in meta]
    if unknown:
        raise ConfigError(f"{path}: no dataset {', '.join(unknown)}; it has {', '.join(sorted(meta))}")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"dataset_names has {', '.join(twice)} twice; to repeat it set its sample_ratio")
    return [_dataset_config(path, name, meta[name]) for name in names]


def open_dataset_rows(config: DatasetConfig, index_dir: str | None = None) -> RowFile:
    """The rows of a dataset; an error of :func:`open_rows` that is not the system's names the dataset."""
    with naming(f"dataset '{config.name}'"):
        return open_rows(config.file_name, index_dir)


def _parsed(path: str) -> dict[str, Any]:
    with open(local_file(path), "rb") as file:
        try:
            meta = json.load(file, object_pairs_hook=_no_duplicates)
        except ValueError as error:
            if path.endswith(_DATA_SUFFIXES) or "Extra data: line 2 column 1 " in str(error):
                raise _data_file(path) from error
            raise ConfigError(f"{path}: not a valid meta file: {error}") from error
    if not isinstance(meta, dict):
        if isinstance(meta, list) and meta:
            raise _data_file(path)
        raise ConfigError(f"{path}: expected an object of datasets, found a {type(meta).__name__}")
    if any(isinstance(meta.get(name), list) for name in _CONVERSATIONS):
        raise _data_file(path)
    return meta


def _data_file(path: str) -> ConfigError:
    """Rows where a meta file was expected: what to write instead."""
    file = os.path.basename(path)
    entry = json.dumps({file.partition(".")[0] or "train": {"file_name": file}})
    name = "meta.json" if file != "meta.json" else "mixture.json"
    return ConfigError(
        f"{path} looks like a data file; expected a meta file, which names data files. Write one beside it, "
        f"{name}: {entry} (and its media_dir, if media lie elsewhere), and pass that"
    )


def _dataset_config(path: str, name: str, entry: Any) -> DatasetConfig:
    where = f"{path}: dataset '{name}'"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is a {type(entry).__name__}, expected an object")
    if unknown := sorted(set(entry) - set(_META_KEYS)):
        raise ConfigError(f"{where} has unknown {', '.join(unknown)}; known are {', '.join(_META_KEYS)}")
    for key, kind in (("file_name", str), ("media_dir", str), ("strict", bool), ("confine", bool)):
        if entry.get(key) is not None and not isinstance(entry[key], kind):
            raise ConfigError(f"{where}: {key}={entry[key]!r}, expected a {kind.__name__}")
    if not entry.get("file_name"):
        raise ConfigError(f"{where} has no file_name")
    ratio = entry.get("sample_ratio", 1.0)
    if isinstance(ratio, bool) or not isinstance(ratio, int | float):
        raise ConfigError(f"{where}: sample_ratio={ratio!r}, expected a number")
    folder = _folder(path)
    try:
        rules = ShareGptFormat.of(
            entry.get("columns"),
            entry.get("tags"),
            _beside(folder, entry.get("media_dir")),
            strict=bool(entry.get("strict")),
            confine=bool(entry.get("confine")),
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return DatasetConfig(name, _join(folder, entry["file_name"]), rules, float(ratio))


def _folder(path: str) -> str:
    """The folder of the meta file, with a closing slash where it has to have one."""
    if not is_address(path):
        return os.path.dirname(path)
    scheme, _, rest = path.partition("://")
    return f"{scheme}://{rest.rpartition('/')[0]}"


def _join(folder: str, path: str) -> str:
    if is_address(path) or not folder:
        return path
    if is_address(folder):
        return folder + path if folder.endswith("://") else os.path.join(folder, path)
    return str(PurePath(folder, path))  # without the "." of `"media_dir": "."`; a ".." stays, for links


def _beside(folder: str, media_dir: str | None) -> str | None:
    """A relative media folder is looked for beside the meta file first, then from the working directory."""
    if media_dir is None or is_address(media_dir):
        return media_dir
    beside = _join(folder, media_dir)
    return beside if is_address(beside) or os.path.isdir(beside) else media_dir


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ValueError(f"{', '.join(map(repr, twice))} stands there twice")
    return dict(pairs)
