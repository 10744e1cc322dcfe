"""Check the datasets of a meta file, and report.

Files are checked in parts, in this process or on an engine. Memory is the findings of one part and the
digests of rows and images; findings are kept in a temporary file.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from heapq import merge
from typing import IO, Any

import orjson

from packhorse.count.parts import check_media_dir, map_parts, split_parts, with_absolute_paths
from packhorse.count.sidecar import data_source
from packhorse.errors import ConfigError, MissingDependency, plain_error, suggest
from packhorse.formats.found_format import FoundFormat
from packhorse.formats.meta import DatasetConfig, Meta, read_meta
from packhorse.rows.row_files import RowFile, open_rows
from packhorse.rows.selection import row_key
from packhorse.tools.check.check_part import CheckSettings, PartChecker, PartFindings, RawFinding, Repair
from packhorse.tools.check.duplicates import DigestStore, Duplicates
from packhorse.tools.check.media_rules import TINY
from packhorse.tools.check.rules import RULES, SEVERITIES, Finding, Severity, on_one_line
from packhorse.types import Task, mask_secrets
from packhorse.utils.files import Fingerprint
from packhorse.utils.pool import Engine
from packhorse.utils.progress import OnProgress, Progress

_MIN_PART, _MAX_PART = 16, 512  # rows: with an image each, up to a few seconds of decoding
_PARTS = 64  # at least, if there are rows enough, so that all workers have work
_SUMS = ("rows", "media", "media_failed", "rows_with_errors")


class Spool:
    """Findings and repairs of parts in a temporary file: memory is one part."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the report)
        self._spans: dict[tuple[int, int], tuple[int, int]] = {}

    def put(self, dataset: int, part: int, findings: list[RawFinding], repairs: list[Repair]) -> None:
        """Save the findings and repairs of a part."""
        if findings:
            kept = [[repair.row, repair.data.decode(), repair.done] for repair in repairs]
            data = orjson.dumps([[list(finding) for finding in findings], kept])
            self._spans[dataset, part] = self._file.seek(0, 2), len(data)
            self._file.write(data)

    def get(self, dataset: int, part: int) -> tuple[list[RawFinding], list[Repair]]:
        """Return what :meth:`put` saved."""
        if (dataset, part) not in self._spans:
            return [], []
        start, length = self._spans[dataset, part]
        self._file.seek(start)
        findings, repairs = orjson.loads(self._file.read(length))
        return [RawFinding(*finding) for finding in findings], [
            Repair(row, data.encode(), done) for row, data, done in repairs
        ]


@dataclass(slots=True)
class CheckedFile:
    """One dataset and its findings."""

    config: DatasetConfig  # as the meta file has it
    file: RowFile | None  # its rows; None if they cannot be read
    state: Fingerprint | None = None  # of the data file when it was checked
    problem: str = ""  # why the rows cannot be read
    parts: int = 0  # number of parts
    rows: int = 0
    media: int = 0
    media_failed: int = 0  # media that could not be opened or decoded
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # findings by (rule, severity)
    rows_with_errors: int = 0
    relative: bool = False  # whether paths of media depend on the working directory
    notes: list[tuple[str, str]] = field(default_factory=list)  # findings about the whole file: (rule, found)
    found: FoundFormat = field(default_factory=FoundFormat)  # how the rows are written

    @property
    def name(self) -> str:
        """Name of the dataset."""
        return self.config.name

    def add(self, part: PartFindings) -> None:
        """Add the numbers of a part."""
        self.counts.update((finding.rule, finding.severity) for finding in part.findings)
        self.rows_with_errors += len({one.row for one in part.findings if one.severity == "error"})
        self.media += part.media
        self.media_failed += part.media_failed
        self.relative |= part.relative
        self.found |= part.found

    def finding(
        self, row: int | None, rule: str, severity: Any, found: str, advice: str, location: str
    ) -> Finding:
        """Return a finding about a row, or about the file (None)."""
        file_name = mask_secrets(self.config.file_name)
        head = location.removeprefix(f"{self.file.name}:").partition(" ")[0] if self.file is not None else ""
        line = int(head) if row is not None and head.isdecimal() else None
        key = self.name if row is None else row_key(self.name, row)
        advice = advice or RULES[rule].advice
        return Finding(rule, severity, self.name, row, key, file_name, line, location, found, advice)

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        rules = {name: sum(self.counts[name, severity] for severity in SEVERITIES) for name in RULES}
        return {
            "name": self.name,
            "file": mask_secrets(self.config.file_name),
            **self.found.as_dict(),
            **{name: getattr(self, name) for name in _SUMS},
            "counts": _by_severity(self.counts),
            "rules": {name: number for name, number in rules.items() if number},
        }


@dataclass(frozen=True, slots=True)
class CheckReport:
    """A check of all datasets.

    Attributes:
        files: one for each dataset, in the order of their names.
        settings: what was checked.
        processor: its name; empty for none.
        seconds: duration.
        part_rows: rows of a part.
        duplicates: by dataset.
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
        return [
            (severity, rule, file.name, file.counts[rule, severity])
            for severity in SEVERITIES
            for rule in RULES
            for file in self.files
            if (rule, severity) in file.counts
        ]

    def totals(self) -> dict[str, int]:
        """Return sums over the datasets, under their names in JSON."""
        return {name: sum(getattr(file, name) for file in self.files) for name in _SUMS}

    def passed(self, strict: bool = False) -> bool:
        """Return whether there is no error (``strict``: and no warning)."""
        counts = self.counts()
        return not counts["error"] and not (strict and counts["warning"])

    def skipped_rules(self) -> dict[str, str]:
        """Return the rules that were not applied, and why."""
        missing = {
            "content": "" if self.settings.decode else "needs the content of media, not their headers alone",
            "processor": "" if self.processor else "needs a processor",
            "max_length": "needs a processor and a max_length" if self.settings.max_length is None else "",
            "": "",
        }
        reasons = {name: missing[rule.needs] for name, rule in RULES.items() if missing[rule.needs]}
        return reasons | dict.fromkeys(sorted(self.settings.ignored), "ignored")

    def findings(self) -> Iterator[Finding]:
        """Yield all findings by dataset and row; memory is one part and the duplicates."""
        for index, file in enumerate(self.files):
            for rule, found in file.notes:
                location = mask_secrets(file.config.file_name)
                yield file.finding(None, rule, RULES[rule].severity, found, "", location)
            own = (finding for part in range(file.parts) for finding in self.spool.get(index, part)[0])
            twins = (twin for twin in self.duplicates_in(file) if twin.rule not in self.settings.ignored)
            for raw in merge(own, twins, key=lambda finding: finding.row):
                yield file.finding(*raw)

    def duplicates_in(self, file: CheckedFile) -> Iterator[RawFinding]:
        """Yield the findings about duplicates in one dataset, in the order of rows."""
        if file.file is not None:
            for row, rule, found in self.duplicates[file.name].findings():
                yield RawFinding(row, rule, RULES[rule].severity, found, "", file.file.location(row))

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON but the findings, which may be many (see :meth:`findings`)."""
        return {
            "version": 1,
            "passed": self.passed(),
            "processor": self.processor or None,
            "max_length": self.settings.max_length,
            "decoded": self.settings.decode,
            "seconds": round(self.seconds, 3),
            **self.totals(),
            "counts": self.counts(),
            "datasets": [file.as_dict() for file in self.files],
            "skipped_rules": self.skipped_rules(),
        }


def _by_severity(counts: Counter[tuple[str, str]]) -> dict[Severity, int]:
    return {
        severity: sum(number for (_, other), number in counts.items() if other == severity)
        for severity in SEVERITIES
    }


def check_meta(
    meta: Meta,
    processor: Any = None,
    *,
    dataset_names: Sequence[str] | None = None,
    max_length: int | None = None,
    decode: bool = True,
    tiny: int = TINY,
    ignore: Sequence[str] = (),
    repair: bool = False,
    engine: Engine | None = None,
    trust_remote_code: bool = False,
    part_rows: int | None = None,
    index_dir: str | None = None,
    task: Task | None = None,
    progress: OnProgress | None = None,
) -> CheckReport:
    """Find everything that is wrong with the rows of the datasets of a meta file; changes nothing.

    Args:
        meta: the meta file, or a dict with its content. All rows of a file are checked, whatever share of
            them a dataset takes.
        processor: a processor, or the path of one; rules that need one are not applied without it.
        dataset_names: only these datasets.
        max_length: rows with more tokens are too long; needs a processor.
        decode: decode all media; False reads their headers only.
        tiny: report images with a side below this number of pixels.
        ignore: names of rules that are not applied.
        repair: also try to repair rows, for :func:`~packhorse.tools.check.fix.write_fixed`.
        engine: where to check (see :mod:`packhorse.count.engines`); None checks in this process.
        trust_remote_code: run code that comes with the processor.
        part_rows: rows that are checked together; None for a number that suits the data.
        index_dir: as for :func:`~packhorse.datasets.open_meta_dataset`.
        task: what the rows are for; None for what each dataset says.
        progress: called with the number of checked rows; None logs it every few seconds.

    Raises:
        ConfigError: the meta file, the processor or a media folder is invalid, or a rule is unknown.
    """
    started = time.monotonic()
    if unknown := sorted(set(ignore) - set(RULES)):
        hints = ", ".join(f"{name}{suggest(name, RULES)}" for name in unknown)
        detail = f"no rule {hints}; there are {', '.join(RULES)}"
        raise ConfigError(f"ignore: {detail}", setting="ignore", value=unknown)
    if max_length is not None and (processor is None or max_length < 1):
        raise ConfigError.of("max_length", max_length, "expected at least 1, and a processor to count with")
    if part_rows is not None and part_rows < 1:
        raise ConfigError.of("part_rows", part_rows, "expected at least 1")
    settings = CheckSettings(decode, max_length, tiny, frozenset(ignore), repair)
    configs = read_meta(meta, dataset_names, task)
    if not configs:
        raise ConfigError(f"{meta}: it lists no dataset", path="" if isinstance(meta, Mapping) else meta)
    for config in configs:
        check_media_dir(config)
    processor = os.fspath(processor) if isinstance(processor, os.PathLike) else processor
    no_media_dir = frozenset(config.name for config in configs if config.rules.media_dir is None)
    work = PartChecker(settings, processor, trust_remote_code, no_media_dir)
    if work.encoding is not None:
        for config in configs:
            encoder = work.encoding.counter.encoder
            encoder.check_dataset_settings(config.name, config.rules.media_settings)
    files = [_open_file(config, index_dir) for config in configs]
    if part_rows is None:
        part_rows = min(max(sum(file.rows for file in files) // _PARTS, _MIN_PART), _MAX_PART)
    spool, digests = Spool(), DigestStore([file.name for file in files], [file.rows for file in files])
    parts = [
        [] if file.state is None else split_parts(file.config, file.rows, part_rows, file.state, index_dir)
        for file in files
    ]
    with closing(map_parts(parts, work, engine, progress or Progress("checking"))) as results:
        for index, part, result in results:
            files[index].add(result)
            spool.put(index, part.first // part_rows, result.findings, result.repairs)
            digests.put(index, part.first, result.conversations, result.images)
    _add_notes(files, settings)
    duplicates = digests.duplicates()
    for file, file_parts in zip(files, parts, strict=True):
        file.parts = len(file_parts)
        for rule, number in duplicates[file.name].counts().items():
            if number and rule not in settings.ignored:
                file.counts[rule, RULES[rule].severity] += number
    name = processor if isinstance(processor, str) else "" if processor is None else type(processor).__name__
    return CheckReport(tuple(files), settings, name, time.monotonic() - started, part_rows, duplicates, spool)


def _open_file(config: DatasetConfig, index_dir: str | None) -> CheckedFile:
    try:
        file = open_rows(with_absolute_paths(config).file_name, index_dir)
    except (ConfigError, MissingDependency, OSError) as error:
        problem = on_one_line(plain_error(error))
        return CheckedFile(config, None, problem=problem, notes=[("unreadable_file", problem)])
    found = FoundFormat(unused=config.unused)
    return CheckedFile(config, file, Fingerprint.of(data_source(file)), rows=len(file), found=found)


def _add_notes(files: Sequence[CheckedFile], settings: CheckSettings) -> None:
    """Note datasets that read the same file, and fields that nothing reads; count the notes."""
    first: dict[str, str] = {}
    for checked in files:
        if checked.file is not None:
            other = first.setdefault(os.path.realpath(checked.file.path), checked.name)
            if other != checked.name:
                checked.notes.append(("same_file", f"it is also the file of dataset '{other}'"))
        if checked.found.unused:
            checked.notes.append(("unused_field", f"not used: {', '.join(sorted(checked.found.unused))}"))
        checked.notes[:] = [note for note in checked.notes if note[0] not in settings.ignored]
        for rule, _ in checked.notes:
            checked.counts[rule, RULES[rule].severity] += 1
