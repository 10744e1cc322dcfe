"""Write a cleaned copy of datasets: rows with errors are dropped or repaired, and recorded in a ledger.

``DIR/<dataset>.jsonl`` for each dataset (``.parquet`` for a Parquet file), ``DIR/meta.json`` and
``DIR/ledger.jsonl``. Kept rows have the bytes they had (a row of a JSON array on one line), or the values and
types of their Parquet file. Media are not copied. The folder appears when it is complete; memory is one part
of a file.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from packhorse.count.parts import with_absolute_paths
from packhorse.count.sidecar import data_source
from packhorse.errors import ConfigError, write_fault
from packhorse.ledger import entry_line
from packhorse.rows.parquet import ParquetRows
from packhorse.rows.row_files import RowFile
from packhorse.rows.selection import row_key
from packhorse.tools.check.check_part import RawFinding, Repair
from packhorse.tools.check.rules import RULES
from packhorse.tools.check.run import CheckedFile, CheckReport
from packhorse.types import Action, Drop
from packhorse.utils.files import Fingerprint
from packhorse.utils.progress import OnProgress, Progress

LEDGER = "ledger.jsonl"
META = "meta.json"
_BLOCK = 256  # rows of a Parquet file that are written together


@dataclass(slots=True)
class FixedDataset:
    """Numbers of a dataset: rows = kept + dropped; repaired ones are among those kept."""

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
    """Return the folder for a cleaned copy; raise ``ConfigError`` if it is neither new nor empty."""
    target = Path(os.path.abspath(folder))
    try:
        with os.scandir(target) as entries:
            entry = next(entries, None)
    except FileNotFoundError:
        return target
    except OSError as error:
        reason = f"{folder} cannot be written to ({error.strerror})"
        raise ConfigError(f"{reason}: name a new folder", path=folder) from error
    if entry is not None:
        reason = f"{folder} is not empty (it has {entry.name})"
        raise ConfigError(f"{reason}: name a new or an empty folder", path=folder)
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
        drop_duplicates: drop conversations that an earlier row has too.
        progress: called with the number of written rows; None logs it every few seconds.

    Raises:
        ConfigError: the folder is not empty, or a data file has changed since.
        SystemFault: the files cannot be written.
    """
    if not report.settings.repair:
        raise ConfigError("a cleaned copy needs a check with repair=True", setting="repair", value=False)
    target = check_target(folder)
    for checked in report.files:
        if checked.file is not None and Fingerprint.of(data_source(checked.file)) != checked.state:
            file = checked.config.file_name
            raise ConfigError(f"{file} has changed since it was checked: check it again", path=file)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=target.parent, prefix=f".{target.name}.", ignore_cleanup_errors=True
        ) as home:
            datasets = _write_datasets(report, Path(home), drop_duplicates, progress or Progress("writing"))
            os.chmod(home, 0o755)  # it was private
            try:
                os.rename(home, target)  # an empty folder is replaced
            except OSError:
                check_target(target)  # raises if another process was faster
                raise
    except OSError as error:
        remedy = "Free disk space or choose another folder"
        raise write_fault(error, error.filename or target, remedy) from error
    return Fixed(str(target), str(target / META), str(target / LEDGER), tuple(datasets))


def _write_datasets(
    report: CheckReport, home: Path, drop_duplicates: bool, progress: OnProgress
) -> list[FixedDataset]:
    total = sum(checked.rows for checked in report.files)
    datasets = [
        FixedDataset(checked.name, file)
        for checked, file in zip(report.files, _file_names(report.files), strict=True)
    ]
    with open(home / LEDGER, "wb") as ledger:
        for index, (checked, fixed) in enumerate(zip(report.files, datasets, strict=True)):
            before = sum(dataset.rows for dataset in datasets)
            with _open_copy(checked.file, home / fixed.file) as copy:
                for rows in _Writer(report, index, fixed, copy, ledger).write(drop_duplicates):
                    progress(before + rows, total)
    meta = {}
    for checked, fixed in zip(report.files, datasets, strict=True):
        in_folder = checked.config.rules.media_dir is not None or checked.relative
        config = with_absolute_paths(checked.config) if in_folder else checked.config
        meta[fixed.name] = config.entry(fixed.file)
    (home / META).write_text(json.dumps(meta, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return datasets


def _open_copy(rows: RowFile | None, target: Path) -> _JsonlCopy | _ParquetCopy:
    return _ParquetCopy(rows, target) if isinstance(rows, ParquetRows) else _JsonlCopy(rows, target)


class _JsonlCopy(AbstractContextManager["_JsonlCopy"]):
    def __init__(self, rows: RowFile | None, target: Path) -> None:
        self.rows, self.file = rows, open(target, "wb")  # noqa: SIM115 (closed on exit)

    def keep(self, row: int, repair: Repair | None) -> None:
        assert self.rows is not None  # a file that cannot be read has no rows to keep
        self.file.write((self.rows.json_line(row) if repair is None else repair.data) + b"\n")

    def __exit__(self, *error: object) -> None:
        self.file.close()


class _ParquetCopy(AbstractContextManager["_ParquetCopy"]):
    """Writes row groups of ``_BLOCK`` rows."""

    def __init__(self, rows: ParquetRows, target: Path) -> None:
        import pyarrow.parquet

        self.rows, self.schema = rows, pyarrow.parquet.read_schema(rows.path)
        self.writer = pyarrow.parquet.ParquetWriter(target, self.schema)
        self.kept: list[int] = []
        self.repairs: dict[int, Repair] = {}  # by their index in ``kept``

    def keep(self, row: int, repair: Repair | None) -> None:
        if repair is not None:
            self.repairs[len(self.kept)] = repair
        self.kept.append(row)
        if len(self.kept) == _BLOCK:
            self._flush()

    def _flush(self) -> None:
        import pyarrow

        if not self.kept:
            return
        table = self.rows.table(self.kept)
        pieces, done = [], 0
        for index, repair in self.repairs.items():
            row = self.rows[self.kept[index]] | json.loads(repair.data)
            pieces += [table.slice(done, index - done), pyarrow.Table.from_pylist([row], self.schema)]
            done = index + 1
        self.writer.write_table(pyarrow.concat_tables([*pieces, table.slice(done)]))
        self.kept.clear()
        self.repairs.clear()

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._flush()
        self.writer.close()


@dataclass
class _Writer:
    """Writes one dataset."""

    report: CheckReport
    index: int
    fixed: FixedDataset
    copy: _JsonlCopy | _ParquetCopy
    ledger: IO[bytes]

    def write(self, drop_duplicates: bool) -> Iterator[int]:
        """Write all rows, one part at a time; yield the number of finished rows."""
        checked, part_rows = self.report.files[self.index], self.report.part_rows
        if checked.file is None:
            # Its number of rows is unknown: record the dataset as a whole.
            rule = RULES["unreadable_file"]
            self._record(Drop(checked.name, rule.stage, rule.reason, checked.problem, dataset=checked.name))
            return
        twins = self.report.duplicates_in(checked) if drop_duplicates else iter(())
        duplicates = (twin for twin in twins if twin.rule == "duplicate_conversation")
        duplicate = next(duplicates, None)
        for part in range(checked.parts):
            errors, repairs = self._read_part(part)
            for row in range(part * part_rows, min((part + 1) * part_rows, checked.rows)):
                self.fixed.rows += 1
                findings = errors.get(row, [])
                if duplicate is not None and duplicate.row == row:
                    findings, duplicate = [duplicate, *findings], next(duplicates, None)
                    repairs.pop(row, None)
                repair = repairs.get(row)
                if findings and repair is None:
                    self.fixed.dropped += 1
                    self._record_row(row, findings, "dropped")
                    continue
                self.copy.keep(row, repair)
                self.fixed.kept += 1
                if repair is not None:
                    self.fixed.repaired += 1
                    self._record_row(row, findings, "repaired", f" ({repair.done})")
            yield self.fixed.rows

    def _read_part(self, part: int) -> tuple[dict[int, list[RawFinding]], dict[int, Repair]]:
        findings, repairs = self.report.spool.get(self.index, part)
        errors: dict[int, list[RawFinding]] = {}
        for finding in findings:
            # A media item that does not answer today is no reason to delete its row.
            if finding.severity == "error" and finding.rule != "unreachable_media":
                errors.setdefault(finding.row, []).append(finding)
        return errors, {repair.row: repair for repair in repairs}

    def _record_row(self, row: int, findings: Sequence[RawFinding], action: Action, suffix: str = "") -> None:
        """Write one ledger entry for a row, with the reason of its first finding."""
        first, *others = findings
        rule, name = RULES[first.rule], self.fixed.name
        # The reason is a field of its own, and the detail of a malformed row has its location.
        details = [first.found, *(f"{finding.rule}: {finding.found}" for finding in others)]
        location = [] if first.location in first.found else [first.location]
        detail = "; ".join([*details, *location]) + suffix
        self._record(Drop(row_key(name, row), rule.stage, rule.reason, detail, action, name))

    def _record(self, drop: Drop) -> None:
        # Not through a Ledger, which would keep every entry in memory.
        self.ledger.write(entry_line(asdict(drop)))


def _file_names(files: Sequence[CheckedFile]) -> list[str]:
    """Return a file name for each dataset; all are different."""
    names = [LEDGER]
    for checked in files:
        stem = checked.name.replace(os.sep, "_")
        suffix = "parquet" if isinstance(checked.file, ParquetRows) else "jsonl"
        while f"{stem}.{suffix}" in names:
            stem += "_"
        names.append(f"{stem}.{suffix}")
    return names[1:]
