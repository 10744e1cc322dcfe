"""The check: the data sets of a meta file go in, a report of everything wrong with their rows comes out.

Files are cut into parts that are checked in this process or on an engine. In memory are a part's findings and
the digests of rows and images; findings are kept in a temporary file.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any

from packhorse.count.counting import Runner
from packhorse.count.parts import PartTask, check_media_dir, opened_counter, opened_rows, with_absolute_paths
from packhorse.count.sidecar import data_source
from packhorse.errors import ConfigError, MissingDependency, plain_error
from packhorse.formats.meta_file import DatasetConfig, Meta, read_meta
from packhorse.rows.row_files import open_rows
from packhorse.tools.check.check_part import CheckSettings, CheckTask, PartChecker, PartFindings
from packhorse.tools.check.check_report import CheckedFile, CheckReport, Spool
from packhorse.tools.check.duplicates import DigestStore, Duplicates
from packhorse.tools.check.media_rules import TINY
from packhorse.tools.check.rules import RULES, on_one_line
from packhorse.utils.files import Fingerprint
from packhorse.utils.progress import OnProgress, Progress

_LEAST_PART, _MOST_PART = 16, 512  # rows: with a picture each, up to a few seconds of decoding
_PARTS = 64  # at least, where there are rows enough: so that all workers have work


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
    """Look for everything that is wrong with the rows of the data sets of a meta file; changes nothing.

    Args:
        meta: the meta file, or a dict with its content. All rows of a file are checked, whatever share of
            them a data set takes.
        processor: a processor, or the path of one; rules that need one are not asked without it.
        dataset_names: only these data sets.
        max_length: rows with more tokens are too long; needs a processor.
        decode: decode all media; False reads their headers alone.
        tiny: pictures with a side below so many pixels are told.
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
        raise ConfigError(f"{meta}: it names no data set")
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
                checked.notes.append(("same_file", f"it is also the file of data set '{other}'"))
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
        self.owners: list[tuple[int, int]] = []  # which part of which data set a task is
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
        """By data set; counts them too."""
        found = self.digests.duplicates()
        for checked in self.files:
            twins = found[checked.name]
            counts = {"duplicate_conversation": len(twins.rows), "duplicate_image": len(twins.images)}
            for rule, times in counts.items():
                if times and rule not in self.settings.ignored:
                    checked.counts[rule, RULES[rule].severity] += times
        return found
