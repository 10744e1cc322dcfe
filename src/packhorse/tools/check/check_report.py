"""What a check has found: counts in memory, the findings themselves in a temporary file."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import merge
from typing import IO, Any

import orjson

from packhorse.formats.meta_file import DatasetConfig
from packhorse.rows.row_files import RowFile
from packhorse.rows.selection import row_key
from packhorse.tools.check.check_part import CheckSettings, RawFinding, Repair
from packhorse.tools.check.duplicates import Duplicates
from packhorse.tools.check.rules import RULES, SEVERITIES, Finding, Severity
from packhorse.types import mask_secrets
from packhorse.utils.files import Fingerprint

_SUMS = ("rows", "media", "media_failed", "rows_with_errors")


class Spool:
    """Findings and repairs of parts, written as they come and read in order: memory is one part."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the report)
        self._places: dict[tuple[int, int], tuple[int, int]] = {}

    def put(self, dataset: int, part: int, findings: list[RawFinding], repairs: list[Repair]) -> None:
        """Keep what a part has come to."""
        if not findings:
            return
        kept = [[repair.row, repair.data.decode(), repair.done] for repair in repairs]
        data = orjson.dumps([[list(one) for one in findings], kept])
        self._places[dataset, part] = self._file.seek(0, 2), len(data)
        self._file.write(data)

    def get(self, dataset: int, part: int) -> tuple[list[RawFinding], list[Repair]]:
        """What :meth:`put` was given."""
        if (dataset, part) not in self._places:
            return [], []
        start, length = self._places[dataset, part]
        self._file.seek(start)
        findings, repairs = orjson.loads(self._file.read(length))
        return [RawFinding(*one) for one in findings], [
            Repair(row, data.encode(), done) for row, data, done in repairs
        ]


@dataclass(slots=True)
class CheckedFile:
    """One data set and what was found in it.

    Attributes:
        config: of the data set, as the meta file has it.
        file: its rows; None where they cannot be read.
        state: of the data file when it was checked.
        problem: why they cannot be read.
        parts: how many parts there are.
        rows: how many rows.
        media: how many media they have; ``media_failed`` of them could not be opened or decoded.
        counts: findings by (rule, severity).
        rows_with_errors: how many rows have an error.
        relative: whether paths of media depend on the working directory.
        notes: findings about the file as a whole: (rule, what was found).
    """

    config: DatasetConfig
    file: RowFile | None
    state: Fingerprint | None = None
    problem: str = ""
    parts: int = 0
    rows: int = 0
    media: int = 0
    media_failed: int = 0
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    rows_with_errors: int = 0
    relative: bool = False
    notes: list[tuple[str, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Of the data set."""
        return self.config.name


@dataclass(frozen=True, slots=True)
class CheckReport:
    """A whole check.

    Attributes:
        files: one for each data set, in the order of their names.
        settings: what was checked.
        processor: the name of it; empty for none.
        seconds: how long it took.
        part_rows: rows in a part.
        duplicates: by data set.
    """

    files: tuple[CheckedFile, ...]
    settings: CheckSettings
    processor: str
    seconds: float
    part_rows: int
    duplicates: dict[str, Duplicates] = field(repr=False)
    spool: Spool = field(repr=False)

    def counts(self) -> dict[Severity, int]:
        """Return the number of findings by severity."""
        return _by_severity(sum((file.counts for file in self.files), Counter()))

    def by_rule(self) -> list[tuple[str, str, str, int]]:
        """Return (severity, rule, dataset, findings), ordered by severity, rule and dataset."""
        order = list(RULES)
        found = [
            (severity, rule, file.name, number)
            for file in self.files
            for (rule, severity), number in file.counts.items()
        ]
        return sorted(found, key=lambda one: (SEVERITIES.index(one[0]), order.index(one[1]), one[2]))

    def totals(self) -> dict[str, int]:
        """Return sums over the datasets, under their names in JSON."""
        return {name: sum(getattr(file, name) for file in self.files) for name in _SUMS}

    def passed(self, strict: bool = False) -> bool:
        """Whether there is no error (``strict``: and no warning)."""
        counts = self.counts()
        return not counts["error"] and not (strict and counts["warning"])

    def not_asked(self) -> dict[str, str]:
        """Rules that were not asked, and why."""
        needs = {
            "content": "" if self.settings.decode else "needs the content of media, not their headers alone",
            "processor": "" if self.processor else "needs a processor",
            "max_length": ""
            if self.settings.max_length is not None
            else "needs a processor and a max_length",
            "": "",
        }
        found = {name: needs[rule.needs] for name, rule in RULES.items() if needs[rule.needs]}
        return found | dict.fromkeys(sorted(self.settings.ignored), "ignored")

    def findings(self) -> Iterator[Finding]:
        """All findings, data set by data set and row by row; memory is one part and the duplicates."""
        for number, file in enumerate(self.files):
            for rule, what in file.notes:
                where = mask_secrets(file.config.file_name)
                yield _finding(file, None, rule, RULES[rule].severity, what, where)
            for raw in self.of_rows(number):
                yield _finding(file, raw.row, raw.rule, raw.severity, raw.found, raw.location)

    def of_rows(self, number: int) -> Iterator[RawFinding]:
        """The findings about rows of one data set, in order."""
        file = self.files[number]
        own = (one for part in range(file.parts) for one in self.spool.get(number, part)[0])
        twins = self.duplicates[file.name].findings() if file.name in self.duplicates else iter(())
        asked = (one for one in twins if one[1] not in self.settings.ignored)
        others = (
            RawFinding(row, rule, RULES[rule].severity, what, file.file.location(row))
            for row, rule, what in asked
            if file.file is not None
        )
        return merge(own, others, key=lambda one: one.row)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: everything but the findings, which may be many (see :meth:`findings`)."""
        return {
            "version": 1,
            "passed": self.passed(),
            "processor": self.processor or None,
            "max_length": self.settings.max_length,
            "decoded": self.settings.decode,
            "seconds": round(self.seconds, 3),
            **self.totals(),
            "counts": self.counts(),
            "datasets": [_dataset_dict(file) for file in self.files],
            "not_asked": self.not_asked(),
        }


def _by_severity(counts: Counter[tuple[str, str]]) -> dict[Severity, int]:
    return {
        severity: sum(number for (_, found), number in counts.items() if found == severity)
        for severity in SEVERITIES
    }


def _dataset_dict(file: CheckedFile) -> dict[str, Any]:
    rules = {name: sum(file.counts[name, severity] for severity in SEVERITIES) for name in RULES}
    return {
        "name": file.name,
        "file": mask_secrets(file.config.file_name),
        **{name: getattr(file, name) for name in _SUMS},
        "counts": _by_severity(file.counts),
        "rules": {name: number for name, number in rules.items() if number},
    }


def _finding(
    file: CheckedFile, row: int | None, rule: str, severity: Any, what: str, location: str
) -> Finding:
    name, path = file.name, mask_secrets(file.config.file_name)
    head = location.removeprefix(f"{file.file.name}:").partition(" ")[0] if file.file is not None else ""
    line = int(head) if row is not None and head.isdecimal() else None
    key = name if row is None else row_key(name, row)
    return Finding(rule, severity, name, row, key, path, line, location, what, RULES[rule].advice)
