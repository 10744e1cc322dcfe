"""Count files (sidecars): the token counts of each row of a data file, memory-mapped.

A sidecar is an uncompressed Arrow IPC file with one row for each row of its data file and one record batch
for each part of it. It lies next to the data file (``train.jsonl.<key>.phcount``), or in the cache if that
folder cannot be written. Its key and its bytes depend on the data file and on all settings that determine a
count, not on when or where it was made. Opening it verifies all of it, as Arrow trusts what a file says.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from glob import escape
from logging import INFO, WARNING, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from packhorse.count.columns import CountColumns, MediaColumns, count_schema
from packhorse.errors import ConfigError
from packhorse.formats.meta import DatasetConfig
from packhorse.media.source import is_address, local_path
from packhorse.rows.row_files import RowFile
from packhorse.types import MEDIA_KINDS, mask_secrets
from packhorse.utils.files import Fingerprint, cache_folder, digest, is_machine_error

if TYPE_CHECKING:
    import pyarrow as pa

    from packhorse.chat import Processor
    from packhorse.count.token_counter import TokenCounter
    from packhorse.families import Encoder
    from packhorse.formats.meta import MetaDataset

logger = getLogger("packhorse.datasets")

FORMAT = "packhorse-count-3"
SUFFIX = ".phcount"
CHECK = b"check"
"""Metadata key of the digest of the counts in the file of a single part."""

_ABOUT = {"rows": int, "part_rows": int, "parts": list, "checks": list, "settings": dict, "settings_key": str}
_KEY_DIGITS = 12


class Sidecar:
    """An open count file.

    Attributes:
        settings_key: digest of the settings that it was counted with.
        parts: the digest of each part's bytes in the data file.
        part_rows: rows of each part but the last, which may have fewer.

    Raises:
        ConfigError: (a ``ValueError``) it is not a count file, or damaged.
        OSError: it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        import pyarrow as pa

        self.path = Path(path)
        self.mtime_ns = os.stat(path).st_mtime_ns
        self._reader = open_batches(str(path))
        self.about = _read_about(self._reader, path)
        try:
            self._verify()
        except (pa.ArrowException, ValueError, OSError, RecursionError) as error:
            raise as_damage(error, str(path)) from error

    def _verify(self) -> None:
        """Read all of it: damaged content may crash Arrow, or be a wrong count."""
        if not _is_valid(self.about):
            raise ValueError("its metadata are not those of a count file")
        self.settings_key: str = self.about["settings_key"]
        self.parts: list[str] = self.about["parts"]
        self.part_rows: int = self.about["part_rows"]
        if not len(self.parts) == len(self.about["checks"]) == self._reader.num_record_batches:
            raise ValueError("parts are missing")
        rows = 0
        for number, check in enumerate(self.about["checks"]):
            part = self.part(number)
            if batch_digest(part) != check or rows != number * self.part_rows:
                raise ValueError(f"the counts of part {number} are not those that were written")
            rows += part.num_rows
        if rows != len(self):
            raise ValueError(f"{rows:,} rows, expected {len(self):,}")

    def __len__(self) -> int:
        return int(self.about["rows"])

    def part(self, number: int) -> pa.RecordBatch:
        """Return one part."""
        return self._reader.get_batch(number)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield all parts in order."""
        return map(self.part, range(len(self.parts)))

    def columns(self) -> CountColumns:
        """Return the counts of all rows: about 120 bytes per row."""
        return CountColumns.of(self._reader.read_all())  # memory-mapped

    def media(self) -> MediaColumns:
        """Return the sizes and tokens of all media, as flat arrays."""
        return MediaColumns.of(list(self.batches()))

    def row(self, number: int) -> dict[str, Any]:
        """Return one row as a dict of plain values."""
        part, offset = divmod(number, self.part_rows)
        values: dict[str, Any] = self.part(part).slice(offset, 1).to_pylist()[0]
        return values


def open_sidecar(path: Path) -> Sidecar | None:
    """Return the sidecar at ``path``; None if it is missing or damaged."""
    try:
        return Sidecar(path)
    except FileNotFoundError:
        return None
    except (OSError, ConfigError) as error:
        logger.warning("%s cannot be used (%s): recounting", path, error)
        return None


def open_batches(path: str) -> pa.RecordBatchFileReader:
    """Open an Arrow file, memory-mapped and not verified; raises OSError, or ConfigError if it is none."""
    import pyarrow as pa

    try:
        return pa.ipc.open_file(pa.memory_map(path))
    except (pa.ArrowException, ValueError, OSError) as error:
        raise as_damage(error, path) from error


def as_damage(error: Exception, path: str) -> Exception:
    """Return a ConfigError for what Arrow raised over a file; the system's own errors stay."""
    if is_machine_error(error):
        return error
    reason = " ".join(str(error).split())[:200]
    return ConfigError(f"{path} is a count file of another format, or damaged ({reason})", path=path)


def batch_digest(batch: pa.RecordBatch) -> str:
    """Return a digest of the values in a record batch, whatever Arrow's layout; raise if one is invalid."""
    if not batch.schema.equals(count_schema()):
        raise ValueError("its columns are not those of a count file")
    batch.validate(full=True)
    state = hashlib.blake2b(digest_size=16)
    for column in batch.columns:
        _update_digest(state, column)
    return state.hexdigest()


def _update_digest(state: hashlib.blake2b, array: pa.Array) -> None:
    import pyarrow as pa
    import pyarrow.compute as pc

    if array.null_count:
        raise ValueError("a count is missing")
    state.update(len(array).to_bytes(8, "little"))
    if pa.types.is_list(array.type):
        _update_digest(state, array.value_lengths())
        _update_digest(state, array.flatten())
    elif pa.types.is_struct(array.type):
        for child in array.flatten():
            _update_digest(state, child)
    elif pa.types.is_string(array.type):
        _update_digest(state, pc.binary_length(array))
        _, offsets, characters = array.buffers()
        if len(array) and characters is not None:
            ends = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1]
            state.update(memoryview(characters)[int(ends[0]) : int(ends[-1])])
    else:
        state.update(np.ascontiguousarray(array.to_numpy(zero_copy_only=False)).data)


def sidecar_metadata(
    settings: Settings,
    state: Fingerprint,
    rows: int,
    part_rows: int,
    parts: Sequence[str],
    checks: Sequence[str],
) -> dict[str, str]:
    """Return the metadata of a sidecar. No time and no path: the same data give the same bytes.

    ``parts`` are the digests of each part's bytes in the data file, ``checks`` those of its counts.
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
    rest = {name: value for name, value in about.items() if name != "digest"}
    return hashlib.blake2b(json.dumps(rest, sort_keys=True).encode(), digest_size=16).hexdigest()


def _read_about(reader: pa.RecordBatchFileReader, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the metadata of a count file."""
    try:
        about: dict[str, Any] = json.loads(reader.schema.metadata[b"packhorse"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a count file of packhorse", path=path) from error
    return about


def _is_valid(about: Any) -> bool:
    """Return whether metadata are those of a count file of this format."""
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        return False
    return about.get("digest") == _about_digest(about) and all(
        isinstance(about.get(name), kind) for name, kind in _ABOUT.items()
    )


# Settings and locations of sidecars.


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything but the data that determines the counts of a dataset's rows.

    Attributes:
        values: JSON values.
        key: a digest of them.
        anywhere: if the working directory is the media folder: the settings of a file whose rows have no
            media, which hold in every directory.
    """

    values: dict[str, Any]
    key: str
    anywhere: Settings | None = None

    @classmethod
    def of(cls, counter: Mapping[str, Any], config: DatasetConfig) -> Settings:
        """Return the settings of a dataset (with paths as in the meta file); name and share do not matter."""
        settings = cls._with_media_dir(counter, config, _relative_media_dir(config))
        if config.rules.media_dir is not None:
            return settings
        return replace(settings, anywhere=cls._with_media_dir(counter, config, "(no media)"))

    @classmethod
    def _with_media_dir(cls, counter: Mapping[str, Any], config: DatasetConfig, media_dir: str) -> Settings:
        values = {"counter": dict(counter), "rules": asdict(config.rules) | {"media_dir": media_dir}}
        return cls(values, digest(FORMAT, json.dumps(values, sort_keys=True)))


def counter_settings(counter: TokenCounter) -> dict[str, Any]:
    """Return what a counter counts with: its version, and all of the processor that affects counts."""
    from packhorse.count.token_counter import COUNTER_VERSION

    return {"version": COUNTER_VERSION, "settings": counter.settings()}


def _relative_media_dir(config: DatasetConfig) -> str:
    """Return the media folder relative to the data file, so that both can be moved together."""
    media_dir, origin = config.rules.media_dir, _local_origin(config.file_name)
    if media_dir is None:
        media_dir = os.getcwd()
    elif is_address(media_dir):
        return mask_secrets(media_dir)  # it is saved in the count file
    folder = os.path.realpath(media_dir)
    return folder if origin is None else os.path.relpath(folder, os.path.dirname(os.path.realpath(origin)))


def _local_origin(address: str) -> str | None:
    """Return the local file that an address names; None for one that has to be fetched."""
    return local_path(address) if is_address(address) else os.path.abspath(address)


def data_source(file: RowFile) -> Path:
    """Return the file whose state matters: the named one (even compressed), or a fetched one's copy."""
    return Path(os.path.realpath(_local_origin(file.name) or file.path))


@dataclass(frozen=True, slots=True)
class SidecarLocation:
    """Where the sidecar of a data file lies, for these settings and the file's current state.

    Attributes:
        prefixes: of file names, the preferred one first: next to the data file, then in the cache.
        state: of the data file.
        settings: what it is counted with.
        key: digest of state and settings.
        anywhere: the location for ``settings.anywhere``.
    """

    prefixes: tuple[Path, ...]
    state: Fingerprint
    settings: Settings
    key: str
    anywhere: SidecarLocation | None = None

    @classmethod
    def of(cls, file: RowFile, settings: Settings) -> SidecarLocation:
        """Return the location for the state that the data file is in now; takes less than a millisecond."""
        source = data_source(file)
        state = Fingerprint.of(source)
        # The time of a fetched copy is the time of fetching; its folder is named after its state.
        time = "" if _local_origin(file.name) is None else str(state.mtime_ns)
        key = digest(settings.key, str(state.size), time, state.edges)
        anywhere = None if settings.anywhere is None else cls.of(file, settings.anywhere)
        return cls(_prefixes(source), state, settings, key, anywhere)

    def targets(self) -> list[Path]:
        """Return the paths that the sidecar may have, the preferred one first."""
        return [Path(f"{prefix}.{self.key[:_KEY_DIGITS]}{SUFFIX}") for prefix in self.prefixes]

    def all_targets(self) -> list[Path]:
        """Return the paths of sidecars that hold, those of counts without media included."""
        return self.targets() + ([] if self.anywhere is None else self.anywhere.targets())

    def parts_folders(self) -> list[Path]:
        """Return the folders of parts, which are the same for every state of the data file."""
        key = self.settings.key[:_KEY_DIGITS]
        return [Path(f"{prefix}.{key}{SUFFIX}.parts") for prefix in self.prefixes]

    def find(self) -> Sidecar | None:
        """Return the sidecar if it exists and is whole; the newest if there are several."""
        opened = map(open_sidecar, self._newest_first())
        return next((file for file in opened if file is not None and self.holds(file.settings_key)), None)

    def _newest_first(self) -> list[Path]:
        """Return existing targets: the data's folder may have become read-only before a fresh count."""
        times: dict[Path, int] = {}
        for target in self.all_targets():
            with contextlib.suppress(OSError):
                times[target] = target.stat().st_mtime_ns
        return sorted(times, key=times.__getitem__, reverse=True)

    def holds(self, settings_key: str) -> bool:
        """Return whether counts with this key were made with these settings."""
        keys = [self.settings.key, *([] if self.anywhere is None else [self.anywhere.settings.key])]
        return settings_key in keys

    def recorded_parts(self) -> tuple[int, list[str]] | None:
        """Return the rows of a part and the digest of each part's rows, from the metadata of the sidecar.

        Does not read the counts. None if there is no sidecar.
        """
        for target in self._newest_first():
            try:
                about = _read_about(open_batches(str(target)), target)
            except FileNotFoundError:
                continue
            except (OSError, ConfigError) as error:
                logger.warning("%s cannot be used (%s)", target, error)
                continue
            if _is_valid(about) and self.holds(about["settings_key"]):
                return about["part_rows"], about["parts"]
        return None

    def neighbours(self) -> Iterator[Path]:
        """Yield the other count files of the data file, for any state and any settings."""
        own = self.all_targets()
        return (path for path in _count_files(self.prefixes) if path not in own)

    def others(self) -> Iterator[Sidecar]:
        """Yield sidecars of other states of the data file, counted with the same settings."""
        for path in self.neighbours():
            other = open_sidecar(path)
            if other is not None and self.holds(other.settings_key):
                yield other


def _prefixes(source: Path) -> tuple[Path, ...]:
    in_cache = cache_folder() / "counts" / f"{source.name}.{digest(str(source))[:_KEY_DIGITS]}"
    return source, in_cache


def _count_files(prefixes: Sequence[Path]) -> Iterator[Path]:
    """Yield all count files whose names begin with one of the prefixes."""
    for prefix in prefixes:
        # Not those of t.jsonl.gz for t.jsonl.
        name = re.compile(rf"{re.escape(prefix.name)}\.[0-9a-f]{{{_KEY_DIGITS}}}{re.escape(SUFFIX)}")
        paths = prefix.parent.glob(f"{escape(prefix.name)}.*{SUFFIX}")
        yield from sorted(path for path in paths if name.fullmatch(path.name))


# Sidecars of a dataset.


def sidecar_locations(
    dataset: MetaDataset, processor: Encoder | Processor | str | os.PathLike[str]
) -> list[SidecarLocation]:
    """Return where the sidecars of a mixture's files lie, one for each source."""
    from packhorse.count.token_counter import TokenCounter
    from packhorse.families import Encoder

    counter = counter_settings(TokenCounter(Encoder.of(processor)))
    return [
        SidecarLocation.of(source.file, Settings.of(counter, source.config)) for source in dataset.sources
    ]


def counts_of(
    dataset: MetaDataset,
    processor: Encoder | Processor | str | os.PathLike[str],
    *,
    log_missing: bool = True,
    retry_unreachable: bool = False,
) -> CountColumns | None:
    """Return the counts of a dataset's examples, from the sidecars that ``packhorse count`` has written.

    Position ``i`` is ``dataset[i]``: a share, copies and this rank's rows are taken into account.

    Args:
        dataset: of :func:`~packhorse.datasets.open_meta_dataset`.
        processor: what the rows were counted with: a processor, the path or hub name of one, or its encoder.
        log_missing: log why there are no counts (one rank of many is enough).
        retry_unreachable: reject counts with media items that could not be reached.

    Returns:
        None if the sidecar of any file is missing, or was made with another processor, other rules or from
        another state of the file; the log says which, with a warning if anything was counted at all.

    Raises:
        ConfigError: there is no processor at that path.
    """
    locations = sidecar_locations(dataset, processor)
    sidecars = [location.find() for location in locations]
    usable: list[CountColumns] = []
    missing: list[str] = []
    for source, location, sidecar in zip(dataset.sources, locations, sidecars, strict=True):
        if sidecar is None or len(sidecar) != len(source.file):
            missing.append(f"{source.config.name}: {_why_missing(location)}")
            continue
        columns = sidecar.columns()
        if retry_unreachable and (unreachable := int((columns.status == "unreachable_media").sum())):
            missing.append(f"{source.config.name}: media of {unreachable:,} rows could not be reached")
        elif not missing:
            usable.append(columns.take(source.selection.rows()))
    if not missing:
        return CountColumns.concat(usable)
    if log_missing:
        counted_once = any(sidecar is not None for sidecar in sidecars) or is_counted(dataset)
        logger.log(
            WARNING if counted_once else INFO,
            "no count files are used (%s): a loader counts the rows now; `packhorse count` does it ahead",
            "; ".join(missing),
        )
    return None


def is_counted(dataset: MetaDataset) -> bool:
    """Return whether any file of a dataset has a count file, with any settings."""
    return any(any(_count_files(_prefixes(data_source(source.file)))) for source in dataset.sources)


def _why_missing(location: SidecarLocation) -> str:
    """Return why there are no counts for a file, in a few words."""
    others = [other for path in location.neighbours() if (other := open_sidecar(path)) is not None]
    file = location.prefixes[0]
    if not others:
        return f"{file} was never counted"
    if any(location.holds(other.settings_key) for other in others):
        return f"{file} has changed since it was counted"
    expected = [wanted.settings.values for wanted in (location, location.anywhere) if wanted is not None]
    fewest = min((_differences(o.about["settings"], v) for o in others for v in expected), key=len)
    return f"{file} was counted with another {', '.join(fewest) or 'format'}"


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names of what two settings differ in, for people."""
    old, new = then.get("counter", {}), now["counter"]
    names = ["set of rules (columns, tags, media folder)"] if then.get("rules") != now["rules"] else []
    if old.get("version") != new["version"]:
        names.append("version of packhorse")
    before, after = old.get("settings", {}), new["settings"]
    words = {
        "family": "model family",
        "tokenizer": "tokenizer",
        "template": "chat template",
        "processor": "setting of the processor",
    }
    return names + [word for name, word in words.items() if before.get(name) != after.get(name)]
