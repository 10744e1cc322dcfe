"""Convert datasets to Packhorse's own JSONL: one row on each line, media as files, a ledger of the rest.

A row is ``{"messages": [{"role": …, "content": …}], "images": […], "tools": […], "weight": …}``. Each line is
read again before it counts as converted: it gives exactly the example that the source row gives. Memory is
one block of rows, and nothing appears under its name before all of it is written.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path, PurePath
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import IO, Any

import orjson

from packhorse.errors import BadSample, ConfigError, write_fault
from packhorse.formats.conversation import EXAMPLE_SETTINGS, PASSED_ON, ROW_SETTINGS
from packhorse.formats.convert import convert_row, ignore_drop, is_on_the_web
from packhorse.formats.found_format import FoundFormat, find_format
from packhorse.formats.meta import Meta, Source, open_meta_dataset, record_unused_fields
from packhorse.formats.row_format import PLACEHOLDER, SOURCE_FIELDS, RowFormat
from packhorse.ledger import Ledger, entry_line
from packhorse.media.source import LmdbEntry, is_address, locate
from packhorse.rows.row_files import Row
from packhorse.types import MEDIA_KINDS, Drop, Task
from packhorse.utils.files import write_atomic
from packhorse.utils.progress import OnProgress, Progress

_SUFFIX = ".jsonl"
_MEDIA = "media"
_BLOCK = 256  # rows between two calls of progress
_MARKED_ROLES = ("user", "tool")
_OF_ROW = (*ROW_SETTINGS, "label", *PASSED_ON)
_OF_ENTRY = frozenset({"type", *SOURCE_FIELDS, *MEDIA_KINDS})

# Bytes of media files, where they are, and the suffix of such a file.
_SUFFIXES = (
    (b"\x89PNG", 0, ".png"),
    (b"\xff\xd8\xff", 0, ".jpg"),
    (b"GIF8", 0, ".gif"),
    (b"WEBP", 8, ".webp"),
    (b"BM", 0, ".bmp"),
    (b"II*\0", 0, ".tiff"),
    (b"MM\0*", 0, ".tiff"),
    (b"ftypavif", 4, ".avif"),
    (b"ftypM4A", 4, ".m4a"),
    (b"ftyp", 4, ".mp4"),
    (b"\x1a\x45\xdf\xa3", 0, ".mkv"),
    (b"AVI ", 8, ".avi"),
    (b"WAVE", 8, ".wav"),
    (b"fLaC", 0, ".flac"),
    (b"OggS", 0, ".ogg"),
    (b"ID3", 0, ".mp3"),
)


@dataclass(slots=True)
class ConvertedDataset:
    """The numbers of a dataset: rows = written + dropped."""

    name: str
    rows: int = 0
    written: int = 0
    dropped: int = 0
    reasons: Counter[str] = field(default_factory=Counter)  # of ledger entries about its rows
    found: FoundFormat = field(default_factory=FoundFormat)

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        numbers = {name: getattr(self, name) for name in ("name", "rows", "written", "dropped")}
        return {**numbers, "reasons": dict(self.reasons), **self.found.as_dict()}


@dataclass(frozen=True, slots=True)
class Converted:
    """What was converted.

    Attributes:
        out: the JSONL file.
        ledger: entries of rows that were dropped or changed, and of fields that are not used.
        datasets: the numbers of each dataset.
        media_files: files that were written for media inside of rows.
        options: settings that reading the file needs, for ``dataset_options`` or an entry of a meta file.
    """

    out: str
    ledger: str
    datasets: tuple[ConvertedDataset, ...]
    media_files: int
    options: Mapping[str, Any]

    def totals(self) -> dict[str, int]:
        """Return sums over the datasets."""
        names = ("rows", "written", "dropped")
        return {name: sum(getattr(dataset, name) for dataset in self.datasets) for name in names}

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {
            **{name: getattr(self, name) for name in ("out", "ledger", "media_files", "options")},
            **self.totals(),
            "datasets": [dataset.as_dict() for dataset in self.datasets],
        }


def write_jsonl(
    source: Meta,
    out: str | os.PathLike[str],
    *,
    dataset_names: Sequence[str] | None = None,
    task: Task | None = None,
    media_dir: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: OnProgress | None = None,
) -> Converted:
    """Convert datasets to one JSONL file, with a ledger of what was not converted next to it.

    Args:
        source: a data file, a meta file or LLaMA-Factory's ``dataset_info.json``.
        out: ``train.jsonl``, for example. The ledger is then ``train.ledger.jsonl``, and media that are bytes
            in the rows become files of the folder ``media`` next to it.
        dataset_names: only these datasets.
        task: what the rows are for, ``"sft"`` or ``"preference"``; None for what each dataset says.
        media_dir: paths inside this folder are written relative to it, others as absolute ones. None for the
            folder of ``out``, where the paths of a data file start.
        overwrite: replace existing files.
        progress: called with the number of finished rows; None logs it every few seconds.

    Raises:
        ConfigError: the source cannot be read, ``out`` or its ledger cannot be written or exists, or the
            datasets need different settings.
        SystemFault: a file cannot be written.
    """
    target, ledger_file = _check_targets(out, overwrite)
    own_folder = Path(os.path.abspath(target.parent))
    folder = own_folder if media_dir is None else Path(os.path.abspath(media_dir))
    opening = Ledger()
    dataset = open_meta_dataset(source, dataset_names, task=task, ledger=opening)
    if not dataset.sources:
        raise ConfigError(f"{source}: it lists no dataset", setting="source", value=str(source))
    for each in dataset.sources:
        if os.path.realpath(each.file.path) in map(os.path.realpath, (target, ledger_file)):
            raise ConfigError(
                f"{out} is a data file of {source}; name another file", setting="out", value=str(out)
            )
    options = _common_options(dataset.sources)
    try:
        with _MediaFiles(own_folder / _MEDIA, folder) as media:
            if not ledger_file.exists():
                media.remove_on_error(ledger_file)
            writer = _Writer(media, progress or Progress("converting"), len(dataset))

            def write(file: IO[bytes]) -> None:
                write_atomic(ledger_file, lambda ledger: writer.write(dataset.sources, opening, file, ledger))

            write_atomic(target, write)
    except OSError as error:
        if error.filename in {each.file.name for each in dataset.sources}:
            raise
        remedy = "Free disk space or choose another folder"
        raise write_fault(error, error.filename or target, remedy) from error
    options |= {"allow_http": True} if writer.on_the_web else {}
    options |= {"media_dir": str(folder)} if folder != own_folder else {}
    return Converted(str(target), str(ledger_file), tuple(writer.datasets), media.written, options)


def _check_targets(out: str | os.PathLike[str], overwrite: bool) -> tuple[Path, Path]:
    """Return the file to write and its ledger; raise if one of them cannot be written or exists."""
    target = Path(out)
    if is_address(os.fspath(out)) or target.suffix != _SUFFIX:
        raise _wrong_target(out, f"expected a local file whose name ends in {_SUFFIX}", out)
    if not target.parent.is_dir():
        raise _wrong_target(out, "its folder does not exist", out)
    ledger_file = target.with_suffix(f".ledger{_SUFFIX}")
    for path, what in ((target, ""), (ledger_file, f", and the ledger of {out} would replace it")):
        if path.is_dir():
            raise _wrong_target(path, "is a folder", out)
        if path.exists() and not overwrite:
            raise _wrong_target(path, f"it exists{what}; name another file, or set overwrite=True", out)
    return target, ledger_file


def _wrong_target(path: str | os.PathLike[str], problem: str, out: str | os.PathLike[str]) -> ConfigError:
    return ConfigError(f"{path}: {problem}", setting="out", value=str(out))


def _common_options(sources: Sequence[Source]) -> dict[str, Any]:
    """Return the settings of the datasets that are no fields of rows; raise if they differ."""
    different = [
        {
            **({"task": rules.task} if rules.task != "sft" else {}),
            **({"reasoning": rules.reasoning} if rules.reasoning == "mask" else {}),
        }
        for rules in (source.config.rules for source in sources)
    ]
    for source, options in zip(sources, different, strict=True):
        if options != different[0]:
            first = sources[0].config.name
            raise ConfigError.of(
                "dataset_names",
                [first, source.config.name],
                f"their settings differ ({different[0]} and {options}), and rows do not have these settings; "
                "convert the datasets one by one",
            )
    return different[0]


class _Writer:
    """Writes the rows of all datasets, and their ledger."""

    def __init__(self, media: _MediaFiles, progress: OnProgress, total: int) -> None:
        self.media, self.progress, self.total = media, progress, total
        self.datasets: list[ConvertedDataset] = []
        self.on_the_web = False

    def write(self, sources: Sequence[Source], opening: Ledger, out: IO[bytes], ledger: IO[bytes]) -> None:
        """Write rows to ``out`` and entries to ``ledger``; media files appear at the end."""
        ledger.writelines(opening.lines())
        done = 0
        for source in sources:
            numbers = ConvertedDataset(source.config.name)
            self.datasets.append(numbers)
            for line in self._lines(source, numbers, ledger):
                out.write(line)
                done += 1
                if done % _BLOCK == 0:
                    self.progress(done, self.total)
            later = Ledger()
            record_unused_fields(numbers.name, numbers.found.unused - source.found.unused, later)
            ledger.writelines(later.lines())
        self.progress(done, self.total)
        self.media.publish()

    def _lines(self, source: Source, numbers: ConvertedDataset, ledger: IO[bytes]) -> Iterator[bytes]:
        """Yield a line for each row; an empty one for a row that cannot be converted."""

        def record(drop: Drop) -> None:
            numbers.reasons[drop.reason] += 1
            ledger.write(entry_line(asdict(drop)))

        rules = source.config.rules
        for position, row in enumerate(source.file.read(map(source.selection.row, range(len(source))))):
            key = source.key(position)
            numbers.rows += 1
            try:
                if isinstance(row, BadSample):
                    raise row.with_key(key)
                numbers.found |= find_format([row], rules)
                example = convert_row(row, rules, key=key, dataset=numbers.name, record=record)
                line = self._line(example, rules.task, key)
            except BadSample as error:
                numbers.dropped += 1
                record(error.as_drop(dataset=numbers.name))
                yield b""
                continue
            numbers.written += 1
            yield line

    def _line(self, example: Mapping[str, Any], task: Task, key: str) -> bytes:
        """Return the line of an example; raise if reading it would give another one."""
        stored = {name: value for name, value in example.items() if name not in EXAMPLE_SETTINGS}
        for name in ("conversation", "rejected"):
            if name in stored:
                stored[name] = [self._with_files(turn) for turn in stored[name]]
        line = _dump(row_of(stored), key)
        own_format = RowFormat(allow_http=True, task=task)
        again = convert_row(json.loads(line), own_format, key=key, dataset="", record=ignore_drop)
        if again != stored:
            detail = "a row of Packhorse's own format cannot hold it without a change"
            raise BadSample(detail, reason="wrong_format", key=key, stage="convert")
        return line

    def _with_files(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        """Return a turn in which media are paths of files, or addresses."""
        parts = []
        for part in turn["content"]:
            if (kind := part["type"]) in MEDIA_KINDS:
                part = {**part, kind: self.media.path_of(part[kind])}
                self.on_the_web |= is_on_the_web(part[kind])
            parts.append(part)
        return {**turn, "content": parts}


def row_of(example: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of an example whose media are paths.

    A turn is a text with markers, or a list of typed parts where these would be ambiguous. A pair has
    ``prompt``, ``chosen`` and ``rejected``, with typed parts.

    >>> row_of({"conversation": [{"role": "user", "content": [
    ...     {"type": "image", "image": "1.png"}, {"type": "text", "text": "What is it?"}]}]})
    {'messages': [{'role': 'user', 'content': '<image>What is it?'}], 'images': ['1.png']}
    """
    others = {name: example[name] for name in _OF_ROW if name in example}
    if "rejected" in example:
        return {**_pair_of(example["conversation"], example["rejected"]), **others}
    columns: dict[str, list[Any]] = {kind: [] for kind in MEDIA_KINDS}
    turns = []
    for turn in example["conversation"]:
        content, entries = _content_of(turn["role"], turn["content"])
        for kind, entry in entries:
            columns[kind].append(entry)
        turns.append({**turn, "content": content})
    return {
        "messages": turns,
        **{f"{kind}s": entries for kind, entries in columns.items() if entries},
        **others,
    }


def _pair_of(chosen: Sequence[Any], rejected: Sequence[Any]) -> dict[str, Any]:
    """Return the turns of a pair: those in common up to the first answer that is not, and both answers."""
    answers = [
        number for number, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other
    ]
    first = answers[0] if answers else min(len(chosen), len(rejected)) - 1
    while first > 0 and chosen[first - 1]["role"] == "assistant":
        first -= 1
    return {"prompt": chosen[:first], "chosen": chosen[first:], "rejected": rejected[first:]}


def _content_of(role: str, parts: Sequence[Mapping[str, Any]]) -> tuple[Any, list[tuple[str, Any]]]:
    """Return the content of a turn as a row has it, and the entries of media columns for its markers."""
    if len(parts) == 1 and set(parts[0]) == {"type", "text"}:
        text = parts[0]["text"]
        if role not in _MARKED_ROLES or not PLACEHOLDER.search(text):
            return text, []
    if role not in _MARKED_ROLES or not parts:
        return parts, []
    text, entries, after_text = "", list[tuple[str, Any]](), False
    for part in parts:
        if part["type"] == "text":
            written = part["text"]
            is_plain = set(part) == {"type", "text"} and written == written.strip() != ""
            if not is_plain or after_text or PLACEHOLDER.search(written):
                return parts, []
            text, after_text = text + written, True
            continue
        kind = part["type"]
        source, options = part[kind], {name: part[name] for name in part if name not in ("type", kind)}
        if not source or _OF_ENTRY & set(options):
            return parts, []
        entries.append((kind, {"path": source, **options} if options else source))
        text, after_text = f"{text}<{kind}>", False
    return text, entries


def _dump(row: Row, key: str) -> bytes:
    """Return a row as a line of JSON."""
    try:
        return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError as error:  # such as an integer of more than 64 bits
        first = error
    try:
        return (json.dumps(row, ensure_ascii=False) + "\n").encode()
    except (TypeError, ValueError):
        detail = f"the row has a value that JSON cannot represent: {first}"
        raise BadSample(detail, reason="wrong_format", key=key, stage="convert") from first


class _MediaFiles(ExitStack):
    """Media of rows as files: paths relative to ``base`` where possible; bytes become files of ``folder``.

    The files are written to a temporary folder, and appear in ``folder`` with :meth:`publish`.
    """

    def __init__(self, folder: Path, base: Path) -> None:
        super().__init__()
        self.folder, self.base = folder, base
        self.home: Path | None = None
        self.written = 0

    def path_of(self, source: Any) -> Any:
        """Return a source as a row has it; bytes are saved."""
        if isinstance(source, list | tuple):
            return [self.path_of(frame) for frame in source]
        if isinstance(source, Mapping):
            data = source.get("bytes")
            return {**source, "path": self.path_of(source.get("path"))} if data is None else self._save(data)
        if isinstance(source, bytes | bytearray | memoryview):
            return self._save(bytes(source))
        if not isinstance(source, str) or not source or is_address(source):
            return source
        if "::" in source and isinstance(entry := locate(source), LmdbEntry):
            return f"{self._relative(entry.database)}::{entry.key}"
        return self._relative(source)

    def _relative(self, path: str) -> str:
        """Return a path relative to the base, or an absolute one; ``..`` stays, for links."""
        whole = PurePath(os.getcwd(), path)
        if whole.is_relative_to(self.base) and ".." not in (rest := whole.relative_to(self.base)).parts:
            return str(rest)
        return str(whole)

    def _save(self, data: bytes) -> str:
        """Save bytes under their digest, unless a file has them; return its path."""
        name = blake2b(data, digest_size=16).hexdigest() + _suffix_of(data)
        if self.home is None:
            prefix = f".{self.folder.name}."
            temporary = TemporaryDirectory(dir=self.folder.parent, prefix=prefix, ignore_cleanup_errors=True)
            self.home = Path(self.enter_context(temporary))
        file = self.folder / name
        if not (self.home / name).exists() and not (file.exists() and file.stat().st_size == len(data)):
            (self.home / name).write_bytes(data)
            self.written += 1
        return self._relative(str(file))

    def publish(self) -> None:
        """Move the files to their folder; a folder that is new is removed if an error follows."""
        if self.home is None:
            return
        if not self.folder.exists():
            self.remove_on_error(self.folder)
            os.chmod(self.home, 0o755)  # it was private
            os.rename(self.home, self.folder)
            return
        with os.scandir(self.home) as entries:
            for entry in entries:
                os.replace(entry.path, self.folder / entry.name)

    def remove_on_error(self, path: Path) -> None:
        """Remove a file or folder that is new if the block ends with an error."""

        def remove(error: type[BaseException] | None, *_: object) -> None:
            if error is not None and path.is_dir():
                rmtree(path, ignore_errors=True)
            elif error is not None:
                path.unlink(missing_ok=True)

        self.push(remove)


def _suffix_of(data: bytes) -> str:
    found = (suffix for start, at, suffix in _SUFFIXES if data[at : at + len(start)] == start)
    return next(found, ".bin")
