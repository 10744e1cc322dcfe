"""A cleaned copy of datasets: rows with errors dropped or repaired, each of them named in a ledger.

``DIR/<dataset>.jsonl`` for each dataset (``.parquet`` for one of a Parquet file), ``DIR/meta.json`` and
``DIR/ledger.jsonl``. Rows that are kept have the bytes they had (a row of a JSON array is put on one line),
or the values and types of their Parquet file. Media stay where they are. The folder appears when it is whole;
memory is one part of a file.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from packhorse.count.count_jsonl import row_bytes
from packhorse.count.parts import with_absolute_paths
from packhorse.count.sidecar import data_source
from packhorse.errors import ConfigError, SystemFault
from packhorse.ledger import entry_line
from packhorse.rows.parquet import ParquetRows
from packhorse.rows.row_files import RowFile
from packhorse.rows.selection import row_key
from packhorse.tools.check.check_part import RawFinding, Repair
from packhorse.tools.check.rules import RULES
from packhorse.tools.check.run import CheckedFile, CheckReport
from packhorse.types import Drop
from packhorse.utils.files import Fingerprint
from packhorse.utils.progress import OnProgress, Progress

LEDGER = "ledger.jsonl"
META = "meta.json"
_BLOCK = 256  # rows of a Parquet file that are written together


@dataclass(slots=True)
class FixedDataset:
    """What became of a dataset: rows = kept + dropped; repaired ones are among those kept."""

    name: str
    file: str
    rows: int = 0
    kept: int = 0
    repaired: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Fixed:
    """A cleaned copy."""

    folder: str
    meta: str
    ledger: str
    datasets: tuple[FixedDataset, ...]


def check_target(folder: str | os.PathLike[str]) -> Path:
    """The folder for a cleaned copy, if it is new or empty.

    Raises:
        ConfigError: it is neither.
    """
    target = Path(os.path.abspath(folder))
    try:
        with os.scandir(target) as entries:
            used = next(entries, None)
    except FileNotFoundError:
        return target
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written to ({error.strerror}): name a new folder") from error
    if used is not None:
        raise ConfigError(f"{folder} is not empty (it has {used.name}): name a new or an empty folder")
    return target


def write_fixed(
    report: CheckReport,
    folder: str | os.PathLike[str],
    *,
    drop_duplicates: bool = False,
    progress: OnProgress | None = None,
) -> Fixed:
    """Write a cleaned copy of what was checked.

    Args:
        report: of :func:`~packhorse.tools.check.run.check_meta` with ``repair=True``.
        folder: new or empty.
        drop_duplicates: leave out conversations that an earlier row has too.
        progress: called with the number of written rows; None logs it every few seconds.

    Raises:
        ConfigError: the folder is not empty, or a data file has changed since.
        SystemFault: the files cannot be written.
    """
    if not report.settings.repair:
        raise ConfigError("a cleaned copy needs a check with repair=True")
    target = check_target(folder)
    for checked in report.files:
        if checked.file is not None and Fingerprint.of(data_source(checked.file)) != checked.state:
            raise ConfigError(f"{checked.config.file_name} has changed since it was checked: check it again")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        home = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
        try:
            made = _write_all(report, home, target, drop_duplicates, progress or Progress("writing"))
            os.chmod(home, 0o755)  # mkdtemp makes it private
            _put_in_place(home, target)
        except BaseException:
            shutil.rmtree(home, ignore_errors=True)
            raise
    except OSError as error:
        raise SystemFault(f"{error.filename or target} cannot be written ({error.strerror})") from error
    return made


def _put_in_place(home: Path, target: Path) -> None:
    try:
        os.rename(home, target)  # onto an empty folder, too
    except OSError:
        check_target(target)  # says so, where another process was quicker
        raise


def _write_all(
    report: CheckReport,
    home: Path,
    target: Path,
    drop_duplicates: bool,
    progress: OnProgress,
) -> Fixed:
    names = _file_names(report.files)
    total = sum(checked.rows for checked in report.files)
    done: list[FixedDataset] = []
    with open(home / LEDGER, "wb") as ledger:
        for number, checked in enumerate(report.files):
            fixed = FixedDataset(checked.name, names[number])
            before = sum(one.rows for one in done)
            with _copy_of(checked, home / names[number]) as copy:
                writer = _Writer(report, number, fixed, copy, ledger)
                for rows in writer.write(drop_duplicates):
                    progress(before + rows, total)
            done.append(fixed)
    meta = {one.name: _meta_entry(checked, one.file) for one, checked in zip(done, report.files, strict=True)}
    (home / META).write_text(json.dumps(meta, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return Fixed(str(target), str(target / META), str(target / LEDGER), tuple(done))


class _Copy(Protocol):
    """A data file being written."""

    def keep(self, row: int, repair: Repair | None) -> None:
        """Add a row as it was, or repaired."""

    def __enter__(self) -> _Copy: ...

    def __exit__(self, *error: object) -> None: ...


def _copy_of(checked: CheckedFile, target: Path) -> _Copy:
    if isinstance(checked.file, ParquetRows):
        return _ParquetCopy(checked.file, target)
    return _JsonlCopy(checked.file, target)


class _JsonlCopy:
    def __init__(self, rows: RowFile | None, target: Path) -> None:
        self.rows, self.file = rows, open(target, "wb")  # noqa: SIM115 (closed on exit)

    def keep(self, row: int, repair: Repair | None) -> None:
        assert self.rows is not None  # a file that cannot be read has no rows to keep
        self.file.write((row_bytes(self.rows, row) if repair is None else repair.data) + b"\n")

    def __enter__(self) -> _JsonlCopy:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()


class _ParquetCopy:
    """Rows are gathered, and written in row groups of ``_BLOCK``."""

    def __init__(self, rows: ParquetRows, target: Path) -> None:
        import pyarrow.parquet

        self.rows, self.schema = rows, pyarrow.parquet.read_schema(rows.path)
        self.writer = pyarrow.parquet.ParquetWriter(target, self.schema)
        self.kept: list[int] = []
        self.repairs: dict[int, Repair] = {}  # by their place among those kept

    def keep(self, row: int, repair: Repair | None) -> None:
        if repair is not None:
            self.repairs[len(self.kept)] = repair
        self.kept.append(row)
        if len(self.kept) == _BLOCK:
            self._flush()

    def _flush(self) -> None:
        """Write what was gathered."""
        import pyarrow

        if not self.kept:
            return
        table = self.rows.table(self.kept)
        pieces, done = [], 0
        for place, repair in self.repairs.items():
            row = self.rows[self.kept[place]] | json.loads(repair.data)
            pieces += [table.slice(done, place - done), pyarrow.Table.from_pylist([row], self.schema)]
            done = place + 1
        self.writer.write_table(pyarrow.concat_tables([*pieces, table.slice(done)]))
        self.kept.clear()
        self.repairs.clear()

    def __enter__(self) -> _ParquetCopy:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._flush()
        self.writer.close()


class _Writer:
    """Writes one dataset."""

    def __init__(
        self, report: CheckReport, number: int, fixed: FixedDataset, copy: _Copy, ledger: IO[bytes]
    ) -> None:
        self.report, self.number, self.fixed = report, number, fixed
        self.copy, self.ledger = copy, ledger

    def write(self, drop_duplicates: bool) -> Iterator[int]:
        """Write all rows, a part at a time; yields how many are done."""
        checked = self.report.files[self.number]
        if checked.file is None:
            # Nobody knows how many rows it has: the dataset is named as a whole.
            rule = RULES["unreadable_file"]
            self._record(Drop(checked.name, rule.stage, rule.reason, checked.problem, dataset=checked.name))
            return
        twins = self._twins(checked.file) if drop_duplicates else iter(())
        twin = next(twins, None)
        for part in range(checked.parts):
            errors, repairs = self._of_part(part)
            first = part * self.report.part_rows
            for row in range(first, min(first + self.report.part_rows, checked.rows)):
                self.fixed.rows += 1
                told = errors.get(row, [])
                if twin is not None and twin[0] == row:
                    told, twin = [twin[1], *told], next(twins, None)
                    repairs.pop(row, None)
                if told and row not in repairs:
                    self._leave_out(row, told)
                else:
                    self._keep(row, told, repairs.get(row))
            yield self.fixed.rows

    def _of_part(self, part: int) -> tuple[dict[int, list[RawFinding]], dict[int, Repair]]:
        findings, repairs = self.report.spool.get(self.number, part)
        errors: dict[int, list[RawFinding]] = {}
        for one in findings:
            # A media item that does not answer today is no reason to delete its row.
            if one.severity == "error" and one.rule != "unreachable_media":
                errors.setdefault(one.row, []).append(one)
        return errors, {repair.row: repair for repair in repairs}

    def _twins(self, file: RowFile) -> Iterator[tuple[int, RawFinding]]:
        """(row, finding) of duplicate conversations, in order."""
        duplicates = self.report.duplicates[self.fixed.name]
        for row, rule, what in duplicates.findings():
            if rule == "duplicate_conversation":
                yield row, RawFinding(row, rule, RULES[rule].severity, what, file.location(row))

    def _keep(self, row: int, told: Sequence[RawFinding], repair: Repair | None) -> None:
        self.copy.keep(row, repair)
        self.fixed.kept += 1
        if repair is not None:
            self.fixed.repaired += 1
            self._tell(row, told, "repaired", f" ({repair.done})")

    def _leave_out(self, row: int, told: Sequence[RawFinding]) -> None:
        self.fixed.dropped += 1
        self._tell(row, told, "dropped")

    def _tell(self, row: int, told: Sequence[RawFinding], action: Any, after: str = "") -> None:
        """One entry for a row, under the reason of the first thing that is wrong with it."""
        rule, name = RULES[told[0].rule], self.fixed.name
        first, *more = told
        # The reason is a field of its own, and a row that is no JSON says itself where it is.
        found = [first.found, *(f"{one.rule}: {one.found}" for one in more)]
        places = [] if first.location in first.found else [first.location]
        detail = "; ".join([*found, *places]) + after
        self._record(Drop(row_key(name, row), rule.stage, rule.reason, detail, action, name))

    def _record(self, drop: Drop) -> None:
        # Not through a Ledger, which would keep every entry in memory.
        self.ledger.write(entry_line(asdict(drop)))


def _file_names(files: Sequence[CheckedFile]) -> list[str]:
    """A file for each dataset; no two the same, and none that is taken."""
    taken = {LEDGER}
    made = []
    for checked in files:
        stem = checked.name.replace(os.sep, "_")
        ending = "parquet" if isinstance(checked.file, ParquetRows) else "jsonl"
        while f"{stem}.{ending}" in taken:
            stem += "_"
        taken.add(f"{stem}.{ending}")
        made.append(f"{stem}.{ending}")
    return made


def _meta_entry(checked: CheckedFile, file: str) -> dict[str, Any]:
    """The dataset's entry of a meta file in another folder: its media folder is an absolute path."""
    config = checked.config
    absolute = config.rules.media_dir is not None or checked.relative
    return (with_absolute_paths(config) if absolute else config).entry(file)
