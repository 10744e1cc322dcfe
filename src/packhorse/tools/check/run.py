"""The check of the datasets of a meta file, and its report.

Files are cut into parts that are checked in this process or on an engine. In memory are a part's findings and
the digests of rows and images; findings are kept in a temporary file.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from typing import IO, Any

import orjson

from packhorse.count.counting import Runner
from packhorse.count.parts import PartTask, check_media_dir, opened_counter, opened_rows, with_absolute_paths
from packhorse.count.sidecar import data_source
from packhorse.errors import ConfigError, MissingDependency, plain_error
from packhorse.formats.meta import DatasetConfig, Meta, read_meta
from packhorse.rows.row_files import RowFile, open_rows
from packhorse.rows.selection import row_key
from packhorse.tools.check.check_part import (
    CheckSettings,
    CheckTask,
    PartChecker,
    PartFindings,
    RawFinding,
    Repair,
)
from packhorse.tools.check.duplicates import DigestStore, Duplicates
from packhorse.tools.check.media_rules import TINY
from packhorse.tools.check.rules import RULES, SEVERITIES, Finding, Severity, on_one_line
from packhorse.types import mask_secrets
from packhorse.utils.files import Fingerprint
from packhorse.utils.progress import OnProgress, Progress

_LEAST_PART, _MOST_PART = 16, 512  # rows: with an image each, up to a few seconds of decoding
_PARTS = 64  # at least, where there are rows enough: so that all workers have work
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
    """One dataset and what was found in it.

    Attributes:
        config: of the dataset, as the meta file has it.
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
        """Of the dataset."""
        return self.config.name


@dataclass(frozen=True, slots=True)
class CheckReport:
    """A whole check.

    Attributes:
        files: one for each dataset, in the order of their names.
        settings: what was checked.
        processor: the name of it; empty for none.
        seconds: how long it took.
        part_rows: rows in a part.
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
        """All findings, dataset by dataset and row by row; memory is one part and the duplicates."""
        for number, file in enumerate(self.files):
            for rule, what in file.notes:
                where = mask_secrets(file.config.file_name)
                yield _finding(file, None, rule, RULES[rule].severity, what, where)
            for raw in self.of_rows(number):
                yield _finding(file, raw.row, raw.rule, raw.severity, raw.found, raw.location)

    def of_rows(self, number: int) -> Iterator[RawFinding]:
        """The findings about rows of one dataset, in order."""
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
    engine: Runner | None = None,
    trust_remote_code: bool = False,
    part_rows: int | None = None,
    index_dir: str | None = None,
    progress: OnProgress | None = None,
) -> CheckReport:
    """Look for everything that is wrong with the rows of the datasets of a meta file; changes nothing.

    Args:
        meta: the meta file, or a dict with its content. All rows of a file are checked, whatever share of
            them a dataset takes.
        processor: a processor, or the path of one; rules that need one are not asked without it.
        dataset_names: only these datasets.
        max_length: rows with more tokens are too long; needs a processor.
        decode: decode all media; False reads their headers alone.
        tiny: images with a side below so many pixels are told.
        ignore: names of rules that are not asked.
        repair: also try to repair rows, for :func:`~packhorse.tools.check.fix.write_fixed`.
        engine: where to check (see :mod:`packhorse.count.engines`); None checks in this process.
        trust_remote_code: run code that comes with the processor.
        part_rows: rows that are checked together; None for a number that suits the data.
        index_dir: as for :func:`~packhorse.datasets.open_meta_dataset`.
        progress: called with the number of checked rows; None logs it every few seconds.

    Raises:
        ConfigError: the meta file, the processor or a media folder is not in order, or a rule is unknown.
    """
    started = time.monotonic()
    if unknown := sorted(set(ignore) - set(RULES)):
        raise ConfigError(f"no rule {', '.join(unknown)}; there are {', '.join(RULES)}")
    if max_length is not None and (processor is None or max_length < 1):
        raise ConfigError(f"max_length={max_length}: expected at least 1, and a processor to count with")
    if part_rows is not None and part_rows < 1:
        raise ConfigError(f"part_rows={part_rows}: expected at least 1")
    settings = CheckSettings(decode, max_length, tiny, frozenset(ignore), repair)
    configs = read_meta(meta, dataset_names)
    if not configs:
        raise ConfigError(f"{meta}: it names no dataset")
    for config in configs:
        check_media_dir(config)
    opened_rows.cache_clear()  # what an earlier pass has opened may be another file by now
    opened_counter.cache_clear()
    path_or_processor = os.fspath(processor) if isinstance(processor, os.PathLike) else processor
    work = PartChecker(settings, path_or_processor, trust_remote_code)
    work.checker()  # a processor that cannot be opened stops here
    files = [_opened(config, index_dir) for config in configs]
    _tell_same_files(files, settings)
    if part_rows is None:
        rows = sum(checked.rows for checked in files)
        part_rows = min(max(rows // _PARTS, _LEAST_PART), _MOST_PART)
    check = _Check(files, settings, part_rows, index_dir)
    check.run(work, engine, progress or Progress("checking"))
    name = path_or_processor if isinstance(path_or_processor, str) else type(processor).__name__
    return CheckReport(
        tuple(files),
        settings,
        "" if processor is None else name,
        time.monotonic() - started,
        part_rows,
        check.duplicates(),
        check.spool,
    )


def _opened(config: DatasetConfig, index_dir: str | None) -> CheckedFile:
    try:
        file = open_rows(with_absolute_paths(config).file_name, index_dir)
    except (ConfigError, MissingDependency, OSError) as error:
        checked = CheckedFile(config, None, problem=on_one_line(plain_error(error)))
        checked.notes.append(("unreadable_file", checked.problem))
        return checked
    return CheckedFile(config, file, Fingerprint.of(data_source(file)), rows=len(file))


def _tell_same_files(files: Sequence[CheckedFile], settings: CheckSettings) -> None:
    first: dict[str, str] = {}
    for checked in files:
        if checked.file is not None:
            other = first.setdefault(os.path.realpath(checked.file.path), checked.name)
            if other != checked.name:
                checked.notes.append(("same_file", f"it is also the file of dataset '{other}'"))
        checked.notes[:] = [note for note in checked.notes if note[0] not in settings.ignored]
        for rule, _ in checked.notes:
            checked.counts[rule, RULES[rule].severity] += 1


class _Check:
    """A check under way: what its parts have come to."""

    def __init__(
        self, files: Sequence[CheckedFile], settings: CheckSettings, part_rows: int, index_dir: str | None
    ) -> None:
        self.files, self.settings, self.spool = files, settings, Spool()
        self.tasks: list[CheckTask] = []
        self.owners: list[tuple[int, int]] = []  # which part of which dataset a task is
        self.digests = DigestStore([one.name for one in files], [one.rows for one in files])
        for number, checked in enumerate(files):
            if checked.file is None or checked.state is None:
                continue
            config, media_dir = with_absolute_paths(checked.config), checked.config.rules.media_dir
            inside = None if media_dir is None else config.rules.media_dir
            for first in range(0, checked.rows, part_rows):
                stop = min(first + part_rows, checked.rows)
                part = PartTask(config, first, stop, checked.state.size, checked.state.edges, index_dir)
                self.tasks.append(CheckTask(part, inside))
                self.owners.append((number, checked.parts))
                checked.parts += 1

    def run(self, work: PartChecker, engine: Runner | None, progress: OnProgress) -> None:
        total, done = sum(checked.rows for checked in self.files), 0
        if not self.tasks:
            return
        own = ((position, work(task)) for position, task in enumerate(self.tasks))
        results = own if engine is None else engine.run(work, self.tasks)
        with contextlib.closing(results):  # type: ignore[type-var]  # an engine's results are a generator
            for position, result in results:
                part = self.tasks[position].part
                self._take(*self.owners[position], part.first, result)
                done += part.stop - part.first
                progress(done, total)

    def _take(self, number: int, part: int, first: int, result: PartFindings) -> None:
        checked = self.files[number]
        self.spool.put(number, part, result.findings, result.repairs)
        self.digests.put(number, first, result.conversations, result.images)
        checked.counts.update((one.rule, one.severity) for one in result.findings)
        checked.rows_with_errors += len({one.row for one in result.findings if one.severity == "error"})
        checked.media += result.media
        checked.media_failed += result.media_failed
        checked.relative |= result.relative

    def duplicates(self) -> dict[str, Duplicates]:
        """By dataset; counts them too."""
        found = self.digests.duplicates()
        for checked in self.files:
            twins = found[checked.name]
            counts = {"duplicate_conversation": len(twins.rows), "duplicate_image": len(twins.images)}
            for rule, times in counts.items():
                if times and rule not in self.settings.ignored:
                    checked.counts[rule, RULES[rule].severity] += times
        return found
