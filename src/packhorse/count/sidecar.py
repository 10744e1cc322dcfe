"""Count files: how long each row of a data file is, counted once and memory-mapped ever after.

A sidecar is an Arrow IPC file, not compressed: one row for each row of its data file, one record batch for
each part of it. It lies beside the data file (``train.jsonl.<key>.phcount``) or, where that folder cannot be
written, in the cache. Its name says what it holds for: the key is made of the state of the data file, the
tokenizer, the chat template, the settings of the processor, the rules of the dataset and the version of the
counter. So a file under the right name is right, and one of another state is simply not found. Its bytes
depend on the content of the data and on these settings alone, not on when, where or by how many processes it
was made.

Opening one looks through all of it once, as a damaged one must never be believed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from glob import escape
from logging import INFO, WARNING, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from packhorse.count.columns import CountColumns, MediaColumns, count_schema
from packhorse.errors import ConfigError
from packhorse.formats.meta import DatasetConfig
from packhorse.media.source import is_address, local_path
from packhorse.rows.row_files import RowFile
from packhorse.types import MEDIA_KINDS, mask_secrets
from packhorse.utils.files import Fingerprint, cache_folder, digest, is_machine_error

if TYPE_CHECKING:
    from packhorse.formats.meta import MetaDataset


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
    if is_machine_error(error):
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
    """All texts of a column as they lie one after the other."""
    _, offsets, characters = array.buffers()
    if not len(array) or characters is None:
        return b""
    ends = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1]
    return memoryview(characters)[int(ends[0]) : int(ends[-1])]


logger = getLogger("packhorse.datasets")

SUFFIX = ".phcount"

_NAME_DIGITS = 12


class Sidecar:
    """An open count file.

    Args:
        path: where it is.

    Raises:
        ConfigError: (a ``ValueError``) it is no count file, or a damaged one.
        OSError: it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        import pyarrow as pa

        self.path = Path(path)
        self.mtime_ns = os.stat(path).st_mtime_ns
        self._reader = open_batches(str(path))
        self.about = _read_about(self._reader, path)
        try:
            self._check()
        except (pa.ArrowException, ValueError, OSError, RecursionError) as error:
            raise as_damage(error, str(path)) from error

    def _check(self) -> None:
        """Look through all of it: what is not as it was written may crash Arrow, or be a wrong count.

        Raises:
            ValueError: that is so; or Arrow's own errors.
        """
        if not is_in_order(self.about):
            raise ValueError("it does not say what it holds")
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

    @property
    def settings_key(self) -> str:
        """What it was counted with."""
        return str(self.about["settings_key"])

    @property
    def parts(self) -> list[str]:
        """The digest of each part's bytes in the data file."""
        found: list[str] = self.about["parts"]
        return found

    @property
    def part_rows(self) -> int:
        """How many rows a part has (the last one may have fewer)."""
        return int(self.about["part_rows"])

    def part(self, number: int) -> Any:
        """One part, as an Arrow record batch."""
        return self._reader.get_batch(number)

    def batches(self) -> Iterator[Any]:
        """All parts in order."""
        return map(self.part, range(len(self.parts)))

    @cached_property
    def table(self) -> Any:
        """Everything, as an Arrow table; memory-mapped, so nothing is read yet."""
        return self._reader.read_all()

    def columns(self) -> CountColumns:
        """The counts of all rows: about 110 bytes a row."""
        return CountColumns.of(self.table)

    def media(self) -> MediaColumns:
        """The sizes and tokens of all media, as flat arrays."""
        return MediaColumns.of(list(self.batches()))

    def row(self, number: int) -> dict[str, Any]:
        """One row as a dict of plain values."""
        part, place = divmod(number, self.part_rows)
        values: dict[str, Any] = self.part(part).slice(place, 1).to_pylist()[0]
        return values


def _read_about(reader: Any, path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a count file says about itself."""
    try:
        about: dict[str, Any] = json.loads(reader.schema.metadata[b"packhorse"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no count file of packhorse") from error
    return about


# --- what a sidecar holds for, and where it lies ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything but the data that decides the counts of a dataset's rows.

    Attributes:
        values: what JSON can hold.
        key: a digest of it.
        anywhere: where the working directory is the media folder: the settings of a file whose rows have no
            media, which hold in every directory.
    """

    values: dict[str, Any]
    key: str
    anywhere: Settings | None = None

    @classmethod
    def _with_rules(cls, counter: Mapping[str, Any], rules: dict[str, Any]) -> Settings:
        values = {"counter": dict(counter), "rules": rules}
        return cls(values, digest(FORMAT, json.dumps(values, sort_keys=True)))

    @classmethod
    def of(cls, counter: Any, config: DatasetConfig) -> Settings:
        """For one dataset.

        Args:
            counter: a :class:`packhorse.count.token_counter.TokenCounter`.
            config: the dataset; its rules count, its name and share do not.
        """
        return cls.with_counter(counter_settings(counter), config)

    @classmethod
    def with_counter(cls, counter: Mapping[str, Any], config: DatasetConfig) -> Settings:
        """As :meth:`of`, with :func:`counter_settings` made once for many datasets."""
        rules = asdict(config.rules)
        found = cls._with_rules(counter, rules | {"media_dir": _portable(config)})
        if config.rules.media_dir is not None:
            return found
        return replace(found, anywhere=cls._with_rules(counter, rules | {"media_dir": "(no media)"}))


def counter_settings(counter: Any) -> dict[str, Any]:
    """What a counter counts with: its version, and all of the processor and tokenizer that matters."""
    from packhorse.count.token_counter import COUNTER_VERSION

    return {"version": COUNTER_VERSION, "settings": counter.settings()}


def _portable(config: DatasetConfig) -> str:
    """The media folder as seen from the data file, so that both may move together, and be named anyhow.

    Without one, media are looked for in the working directory.
    """
    media_dir, origin = config.rules.media_dir, _origin(config.file_name)
    if media_dir is None:
        media_dir = os.getcwd()
    elif is_address(media_dir):
        return mask_secrets(media_dir)  # it is kept in the count file
    folder = os.path.realpath(media_dir)
    return folder if origin is None else os.path.relpath(folder, os.path.dirname(os.path.realpath(origin)))


def _origin(address: str) -> str | None:
    """The local file that an address is, or None for one that has to be fetched."""
    return local_path(address) if is_address(address) else os.path.abspath(address)


def data_source(file: RowFile) -> Path:
    """The file whose state counts: the one that was named (packed, perhaps), or the copy of a fetched one."""
    return Path(os.path.realpath(_origin(file.name) or file.path))


def names_of(source: Path) -> tuple[Path, ...]:
    """Beginnings of the names of a data file's count files: beside it, then in the cache."""
    in_cache = cache_folder() / "counts" / f"{source.name}.{digest(str(source))[:_NAME_DIGITS]}"
    return source, in_cache


def neighbours(names: Sequence[Path]) -> Iterator[Path]:
    """All count files whose names begin so."""
    for name in names:
        # Not those of t.jsonl.gz for t.jsonl.
        ours = re.compile(rf"{re.escape(name.name)}\.[0-9a-f]{{{_NAME_DIGITS}}}{re.escape(SUFFIX)}")
        found = name.parent.glob(f"{escape(name.name)}.*{SUFFIX}")
        yield from sorted(path for path in found if ours.fullmatch(path.name))


@dataclass(frozen=True, slots=True)
class Place:
    """Where the sidecar of one data file lies, for these settings and the state the file is in now.

    Attributes:
        names: beginnings of file names, the preferred one first: folder and name of the data file, then those
            of the cache.
        state: of the data file.
        settings: what it is counted with.
        key: state and settings together.
        anywhere: the place of ``settings.anywhere``.
    """

    names: tuple[Path, ...]
    state: Fingerprint
    settings: Settings
    key: str
    anywhere: Place | None = None

    @classmethod
    def of(cls, file: RowFile, settings: Settings) -> Place:
        """Looks at the data file, under a millisecond."""
        source = data_source(file)
        state = Fingerprint.of(source)
        # The time of a fetched copy is the time of fetching; it lies in a folder named after its state.
        time = "" if _origin(file.name) is None else str(state.mtime_ns)
        key = digest(settings.key, str(state.size), time, state.edges)
        anywhere = None if settings.anywhere is None else cls.of(file, settings.anywhere)
        return cls(names_of(source), state, settings, key, anywhere)

    def targets(self) -> list[Path]:
        """Where it may be, the preferred place first."""
        return [_with(name, f".{self.key[:_NAME_DIGITS]}{SUFFIX}") for name in self.names]

    def parts_folders(self) -> list[Path]:
        """Where parts are kept until the whole is finished: the same for every state of the data file."""
        ending = f".{self.settings.key[:_NAME_DIGITS]}{SUFFIX}.parts"
        return [_with(name, ending) for name in self.names]

    def find(self) -> Sidecar | None:
        """The sidecar, if it is there and whole; the newest, if there are several."""
        opened = map(open_sidecar, self._newest_first())
        return next((one for one in opened if one is not None and self.holds(one)), None)

    def _newest_first(self) -> list[Path]:
        """Count files that are there: the data's folder may have become read-only before a fresh count."""
        times: dict[Path, int] = {}
        for target in self.all_targets():
            with contextlib.suppress(OSError):
                times[target] = target.stat().st_mtime_ns
        return sorted(times, key=times.__getitem__, reverse=True)

    def holds(self, sidecar: Sidecar) -> bool:
        """Whether a sidecar was counted with these settings."""
        return self._is_of_settings(sidecar.settings_key)

    def _is_of_settings(self, key: str) -> bool:
        return key == self.settings.key or (self.anywhere is not None and self.anywhere._is_of_settings(key))

    def recorded_parts(self) -> tuple[int, list[str]] | None:
        """Rows of a part, and the digest of each part's rows, from the count file that :meth:`find` takes.

        Reads what the count file says about itself, not its counts. None where there is no such file.
        """
        for target in self._newest_first():
            try:
                about = _read_about(open_batches(str(target)), target)
            except FileNotFoundError:
                continue
            except (OSError, ConfigError) as error:
                logger.warning("%s cannot be used (%s)", target, error)
                continue
            if is_in_order(about) and self._is_of_settings(about["settings_key"]):
                return about["part_rows"], about["parts"]
        return None

    def all_targets(self) -> list[Path]:
        """Where a sidecar that holds may be, counts without media included."""
        return self.targets() + ([] if self.anywhere is None else self.anywhere.targets())

    def neighbours(self) -> Iterator[Path]:
        """All count files of the same data file, for any state and any settings, but for the one itself."""
        own = self.all_targets()
        return (path for path in neighbours(self.names) if path not in own)

    def others(self) -> Iterator[Sidecar]:
        """Sidecars of other states of the same file, counted with the same settings."""
        for path in self.neighbours():
            other = open_sidecar(path)
            if other is not None and self.holds(other):
                yield other


def open_sidecar(path: Path) -> Sidecar | None:
    """The sidecar at ``path``, or None if there is none, or no whole one."""
    try:
        return Sidecar(path)
    except FileNotFoundError:
        return None
    except (OSError, ConfigError) as error:
        logger.warning("%s cannot be used (%s): counting anew", path, error)
        return None


def _with(name: Path, ending: str) -> Path:
    return name.with_name(name.name + ending)


# --- for a dataset --------------------------------------------------------------------------------------


def places_of(dataset: MetaDataset, processor: Any) -> list[Place]:
    """Where the sidecars of a mixture's files lie, one for each source.

    Raises:
        ConfigError: there is no processor under that path.
    """
    from packhorse.count.token_counter import TokenCounter
    from packhorse.families import Encoder
    from packhorse.families.models import as_processor

    counter = counter_settings(TokenCounter(Encoder(as_processor(processor))))
    return [
        Place.of(source.file, Settings.with_counter(counter, source.config)) for source in dataset.sources
    ]


def counts_of(
    dataset: MetaDataset, processor: Any, *, tell: bool = True, retry_unreachable: bool = False
) -> CountColumns | None:
    """The counts of a dataset's examples, from the sidecars that ``packhorse count`` has written.

    Position ``i`` is ``dataset[i]``: a share, copies and this rank's rows are taken into account.

    Args:
        dataset: as :func:`~packhorse.datasets.open_meta_dataset` gives it.
        processor: what the rows were counted with: a processor, or the path or hub name of one.
        tell: say in the log why there are none (one rank of many is enough).
        retry_unreachable: counts with media items that could not be reached do not hold: count again.

    Returns:
        None if the sidecar of any of the files is missing, or was made with another processor, other rules or
        from another state of the file; the log says which, with a warning if anything was counted at all.

    Raises:
        ConfigError: there is no processor under that path.
    """
    places = places_of(dataset, processor)
    sidecars = [place.find() for place in places]
    usable: list[CountColumns] = []
    missing: list[str] = []
    for source, place, sidecar in zip(dataset.sources, places, sidecars, strict=True):
        if sidecar is None or len(sidecar) != len(source.file):
            missing.append(f"{source.config.name}: {_why_missing(place)}")
            continue
        columns = sidecar.columns()
        if retry_unreachable and (unreachable := int((columns.status == "unreachable_media").sum())):
            missing.append(f"{source.config.name}: media of {unreachable:,} rows could not be reached")
        elif not missing:
            usable.append(columns.take(source.selection.rows()))
    if not missing:
        return CountColumns.joined(usable)
    if tell:
        counted_once = any(one is not None for one in sidecars) or is_counted(dataset)
        logger.log(
            WARNING if counted_once else INFO,
            "no count files are used (%s): a loader counts the rows now; `packhorse count` does it ahead",
            "; ".join(missing),
        )
    return None


def is_counted(dataset: MetaDataset) -> bool:
    """Whether any file of a dataset has a count file, whatever it was counted with."""
    return any(
        any(True for _ in neighbours(names_of(data_source(source.file)))) for source in dataset.sources
    )


def _why_missing(place: Place) -> str:
    """Why there are no counts for a file, in a few words."""
    others = [other for path in place.neighbours() if (other := open_sidecar(path)) is not None]
    if not others:
        return f"{place.names[0]} was never counted"
    if any(map(place.holds, others)):
        return f"{place.names[0]} has changed since it was counted"
    wanted = [one.settings.values for one in (place, place.anywhere) if one is not None]
    found = (_differing(other.about["settings"], values) for other in others for values in wanted)
    differ = min(found, key=len)
    return f"{place.names[0]} was counted with another {', '.join(differ) or 'format'}"


def _differing(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What two settings differ in, as a person calls it."""
    old, new = then.get("counter", {}), now["counter"]
    found = ["set of rules (columns, tags, media folder)"] if then.get("rules") != now["rules"] else []
    if old.get("version") != new["version"]:
        found.append("version of packhorse")
    before, after = old.get("settings", {}), new["settings"]
    words = {"family": "model family", "tokenizer": "tokenizer", "template": "chat template"}
    found += [word for name, word in words.items() if before.get(name) != after.get(name)]
    if before.get("processor") != after.get("processor"):
        found.append("setting of the processor")
    return found
