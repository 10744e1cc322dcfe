"""The counting pass: the datasets of a meta file go in, one sidecar for each data file comes out.

A file is cut into parts of a fixed number of rows. A part is known by the digest of its bytes: parts that an
interrupted run has finished, and parts that an older state of the file has in common with this one, are taken
over, and only the rest is counted, in this process or on an engine. The sidecar appears when all its parts
are there, whole and under its own name; its bytes are the same whatever was reused and whoever counted.
"""

from __future__ import annotations

import contextlib
import filecmp
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from packhorse.count.columns import count_schema
from packhorse.count.count_report import CountedFile, CountReport, dataset_report, verify_counts
from packhorse.count.part_files import (
    Part,
    has_bad,
    has_unreachable,
    is_bad,
    mark_newest,
    may_write,
    needs_no_media,
    older_than,
    remove_files,
    remove_stale_files,
    report_full_disk,
    save_part,
)
from packhorse.count.parts import (
    PartCounter,
    PartResult,
    PartTask,
    check_media_dir,
    part_digest,
    with_absolute_paths,
)
from packhorse.count.sidecar import Place, Settings, Sidecar, data_source, sidecar_metadata
from packhorse.errors import ConfigError, SystemFault
from packhorse.formats.meta import DatasetConfig, Meta, open_dataset_rows, read_meta
from packhorse.rows.row_files import RowFile
from packhorse.utils.files import Fingerprint, cache_lock, write_atomic
from packhorse.utils.progress import OnProgress, Progress

logger = getLogger("packhorse.datasets")

PART_ROWS = 4096
"""Rows of a part: a second or two of work, which is what an interruption costs a worker."""

BEFORE = ".before"
"""Added to the name of counts with unreachable media when they are replaced."""

_MOST_LOSSES = 3

T = TypeVar("T")
R = TypeVar("R")


class Runner(Protocol):
    """Where tasks run; :mod:`packhorse.count.engines` has them."""

    def run(self, work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[int, R]]:
        """(position of the task, result) as they get ready."""
        ...


def count_meta(
    meta: Meta,
    processor: Any,
    *,
    dataset_names: Sequence[str] | None = None,
    engine: Runner | None = None,
    part_rows: int | None = None,
    verify: int = 0,
    seed: int = 0,
    retry_bad: bool = False,
    fresh: bool = False,
    trust_remote_code: bool = False,
    bad_rows: int = 3,
    index_dir: str | None = None,
    progress: OnProgress | None = None,
) -> CountReport:
    """Count the tokens of every row, and keep the result beside the data.

    What has been counted before, in the same state and with the same settings, is not counted again. Media
    are looked at once: if they have changed under the same names, ask for a ``fresh`` count. Parts with a
    media item that could not be reached (no permission, no answer) are counted again every time.

    Args:
        meta: the meta file, or a dict with its content. All rows of a file are counted, whatever share of
            them a dataset takes.
        processor: a processor, or the path of one.
        dataset_names: only these datasets.
        engine: where to count (see :mod:`packhorse.count.engines`); None counts in this process.
        part_rows: how many rows are counted, kept and reused together. None for the size that a file's
            earlier counts with the same settings have, so that they can be reused, else 4,096.
        verify: run the real processor on so many random rows and compare.
        seed: which rows those are.
        retry_bad: count parts with bad rows again (after missing media have arrived).
        fresh: count everything again.
        trust_remote_code: run code that comes with the processor.
        bad_rows: so many rows of each reason are named in the report, with their places in the file.
        index_dir: as for :func:`~packhorse.datasets.open_meta_dataset`.
        progress: told how far it is; None writes to the log every few seconds.

    Raises:
        ConfigError: the meta file, the processor, its chat template or a media folder is not in order.
        SystemFault: the disk is full. What was finished is kept, and no sidecar is incomplete.
    """
    if (part_rows is not None and part_rows < 1) or verify < 0:
        raise ConfigError(f"part_rows={part_rows}, verify={verify}: expected at least 1 and 0")
    started = time.monotonic()
    # Settings come from the paths as they are named; the work gets absolute ones.
    named = read_meta(meta, dataset_names)
    for config in named:
        check_media_dir(config)
    configs = [with_absolute_paths(config) for config in named]
    work = PartCounter.of(processor, trust_remote_code)
    files = [open_dataset_rows(config, index_dir) for config in configs]
    places = [
        Place.of(file, Settings.with_counter(work.settings, config))
        for file, config in zip(files, named, strict=True)
    ]
    jobs: dict[Path, _Job] = {}  # one for each sidecar: datasets may share a file
    for config, file, place in zip(configs, files, places, strict=True):
        jobs.setdefault(place.targets()[0], _Job(config, file, place, part_rows or 0, index_dir))
    with contextlib.ExitStack() as stack:
        for target in sorted(jobs):
            stack.enter_context(cache_lock(f"count {target}"))
        for job in jobs.values():
            stack.callback(job.tidy_up)
        for job in jobs.values():
            job.prepare(retry_bad=retry_bad, fresh=fresh)
        before = time.monotonic()
        _count_all(list(jobs.values()), work, engine, progress or Progress("counting"))
        counting = time.monotonic() - before
    owners = [jobs[place.targets()[0]] for place in places]
    counted = [
        CountedFile(config, file, job.result(), len(file) - job.counted_rows)
        for config, file, job in zip(configs, files, owners, strict=True)
    ]
    return CountReport(
        tuple(dataset_report(one, bad_rows) for one in counted),
        seconds=time.monotonic() - started,
        counting_seconds=counting,
        counted_rows=sum(job.counted_rows for job in jobs.values()),
        verified=verify_counts(counted, work.counter().encoder, verify, seed) if verify else None,
        files=tuple(counted),
    )


def _count_all(jobs: list[_Job], work: PartCounter, engine: Runner | None, progress: OnProgress) -> None:
    """Count the parts that are missing; finish each file as soon as its last part is there."""
    for job in jobs:
        job.finish_if_complete()
    owners = [(job, number) for job in jobs for number in job.missing]
    tasks = [job.task(number) for job, number in owners]
    total, done = sum(task.stop - task.first for task in tasks), 0
    if not tasks:
        return
    progress(0, total)
    results = engine.run(work, tasks) if engine is not None else ((n, work(t)) for n, t in enumerate(tasks))
    with contextlib.closing(results):  # type: ignore[type-var]  # an engine's results are a generator
        for position, result in results:
            job, number = owners[position]
            job.keep(number, result)
            job.finish_if_complete()
            done += tasks[position].stop - tasks[position].first
            progress(done, total)
    if done == total and any(job.missing for job in jobs):  # somebody has removed parts
        _count_all(jobs, work, engine, progress)


@dataclass
class _Job:
    """One data file on its way to a sidecar; ``part_rows`` of 0 is chosen by what there is already."""

    config: DatasetConfig
    file: RowFile
    place: Place
    part_rows: int
    index_dir: str | None
    home: int = 0
    missing: set[int] = field(default_factory=set)
    _done: Sidecar | None = None
    _seen: tuple[Path, int] | None = None  # the sidecar that was there before
    _counted: set[int] = field(default_factory=set)
    _files: set[Path] = field(default_factory=set)  # of parts: made here, or found at the beginning
    _losses: int = 0
    _retries_unreachable: bool = False
    _parts: dict[int, Part] = field(default_factory=dict)

    def prepare(self, *, retry_bad: bool, fresh: bool) -> None:
        """Find out what there is already; choose where to keep what will be made."""
        if fresh:
            self._forget()
        found = self.place.find()
        self._seen = None if found is None else (found.path, found.mtime_ns)
        found = None if fresh else found
        self._retries_unreachable = found is not None and has_unreachable(found.batches())
        again = self._retries_unreachable or (retry_bad and found is not None and has_bad(found))
        if found is not None and len(found) == len(self.file) and not again:
            self._done = found
            # Of a run that was killed when its sidecar was there. Newer ones are somebody's at work.
            remove_files(older_than(found.mtime_ns, self._kept()))
            return
        self._choose_home()
        self.part_rows = self.part_rows or (PART_ROWS if fresh else self._usual_part_rows(found))
        self.missing = set(range(-(-len(self.file) // self.part_rows)))
        if fresh:
            return
        self._files |= self._kept()
        known = self._known_parts(found, retry_bad)
        if not known:
            return
        for number in sorted(self.missing):
            name = part_digest(self.file, *self._span(number))
            if name in known:
                self._parts[number] = known[name]
        self.missing -= set(self._parts)

    def _forget(self) -> None:
        """Remove all that was counted with these settings, so that a rerun goes on with what is fresh."""
        remove_files(sidecar.path for sidecar in [*self.place.others()])
        remove_files(self.place.all_targets())
        remove_files(self._kept())

    def _kept(self) -> set[Path]:
        return {path for folder in self.place.parts_folders() for path in folder.glob("*.arrow")}

    @property
    def counted_rows(self) -> int:
        """How many rows this run has counted."""
        return sum(stop - first for first, stop in map(self._span, self._counted))

    def task(self, number: int) -> PartTask:
        first, stop = self._span(number)
        return PartTask(
            self.config, first, stop, self.place.state.size, self.place.state.edges, self.index_dir
        )

    def keep(self, number: int, result: PartResult) -> None:
        """Take in a counted part, and keep it for a later run until the sidecar is finished."""
        path = self._folder / f"{result.digest}-{self.part_rows}.arrow"
        save_part(path, result.data, self.place.all_targets())
        self._files.add(path)
        self._parts[number] = Part(result.digest, path)
        self.missing.discard(number)
        self._counted.add(number)

    def finish_if_complete(self) -> None:
        """Write the sidecar if all its parts are there."""
        if self._done is not None or self.missing:
            return
        if Fingerprint.of(data_source(self.file)) != self.place.state:
            raise ConfigError(
                f"{self.file.name} was changed while it was being counted; count again (parts that did not "
                "change are kept)"
            )
        try:
            place = self._final_place()
            target = place.targets()[self.home]
            with report_full_disk(target):
                if self._retries_unreachable and self._seen is not None:
                    # A run that was planned from these counts can go on with them only.
                    with contextlib.suppress(OSError):
                        _keep_aside(self._seen[0])
                write_atomic(target, lambda file: self._write_sidecar(file, place.settings), to_disk=True)
                mark_newest(target, [*self.place.all_targets(), *self._files])
            self._done = Sidecar(target)
        except FileNotFoundError as error:
            self._done = self._of_another_machine()
            if self._done is None:
                self._count_lost_parts(error)
                return
        remove_files(self._files)
        # Of states that the file is no longer in.
        remove_files(other.path for other in [*self.place.others()])
        self._parts.clear()

    def _final_place(self) -> Place:
        """Where the sidecar goes: counts of rows without media hold in whatever directory we are."""
        anywhere = self.place.anywhere
        if anywhere is None or not all(needs_no_media(part.batch()) for part in self._parts.values()):
            return self.place
        return anywhere

    def _of_another_machine(self) -> Sidecar | None:
        """The sidecar of somebody who was faster with the same file (and has removed the parts)."""
        found = self.place.find()
        if found is None or len(found) != len(self.file) or (found.path, found.mtime_ns) == self._seen:
            return None
        logger.info("%s was made by another process: taking it", found.path)
        return found

    def _count_lost_parts(self, error: FileNotFoundError) -> None:
        """Have parts counted again that somebody has removed."""
        lost = {number for number, part in self._parts.items() if part.is_gone()}
        self._losses += 1
        if self._losses > _MOST_LOSSES or not lost:
            raise SystemFault(
                f"{self.file.name}: counted parts were removed while the count was running ({error}). Is "
                "somebody else counting or clearing this folder? Count again when they are done"
            ) from error
        logger.warning("%s: %s counted parts were removed: counting them again", self.file.name, len(lost))
        self.missing |= lost

    def tidy_up(self) -> None:
        """Leave no empty folder after, whatever happened."""
        for folder in self.place.parts_folders():
            if self._done is not None:
                remove_stale_files(folder, self._done.mtime_ns)
            with contextlib.suppress(OSError):
                folder.rmdir()

    def result(self) -> Sidecar:
        assert self._done is not None, "every file is finished when the pass is"
        return self._done

    @property
    def _folder(self) -> Path:
        return self.place.parts_folders()[self.home]

    def _choose_home(self) -> None:
        """The folder of the data, or the cache where that may not be written."""
        folders = self.place.parts_folders()
        writable = (number for number, folder in enumerate(folders) if may_write(folder))
        home = next(writable, None)
        if home is None:
            where = " nor ".join(str(folder.parent) for folder in folders)
            raise ConfigError(
                f"neither {where} can be written: set PACKHORSE_CACHE to a folder for the counts"
            )
        self.home = home

    def _usual_part_rows(self, found: Sidecar | None) -> int:
        """The size of the parts that can be reused; the usual one if there are none."""
        for sidecar in [*([found] if found is not None else []), *self.place.others()]:
            return sidecar.part_rows
        kept = (path.stem for folder in self.place.parts_folders() for path in folder.glob("*-*.arrow"))
        # The last part of a file has fewer rows, so the name says how many the others have.
        sizes = Counter(int(size) for name in sorted(kept) if (size := name.partition("-")[2]).isdigit())
        return sizes.most_common(1)[0][0] if sizes else PART_ROWS

    def _known_parts(self, found: Sidecar | None, retry_bad: bool) -> dict[str, Part]:
        """Parts that were counted before with these settings, by digest."""
        sidecars = [*self.place.others(), *([found] if found is not None else [])]
        parts = [Part(name, (one, number)) for one in sidecars for number, name in enumerate(one.parts)]
        paths = (path for folder in self.place.parts_folders() for path in folder.glob("*.arrow"))
        kept = (Part(path.stem.partition("-")[0], path) for path in paths)
        known = {part.name: part for part in [*parts, *(part for part in kept if part.is_whole())]}
        # A timeout or a refusal is no fact about a row: ask again.
        known = {name: part for name, part in known.items() if not has_unreachable([part.batch()])}
        if retry_bad:
            return {name: part for name, part in known.items() if not is_bad(part.batch())}
        return known

    def _span(self, number: int) -> tuple[int, int]:
        return number * self.part_rows, min(len(self.file), (number + 1) * self.part_rows)

    def _write_sidecar(self, file: IO[bytes], settings: Settings) -> None:
        import pyarrow as pa

        order = [self._parts[number] for number in range(len(self._parts))]
        names, checks = [part.name for part in order], [part.check() for part in order]
        metadata = sidecar_metadata(settings, self.place.state, len(self.file), self.part_rows, names, checks)
        schema = count_schema(metadata)
        with pa.ipc.new_file(file, schema) as writer:
            for number, part in enumerate(order):
                batch = part.batch()
                first, stop = self._span(number)
                if batch.num_rows != stop - first:
                    raise ConfigError(
                        f"part {number} of {self.file.name} has {batch.num_rows} rows; count fresh"
                    )
                writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))


def _keep_aside(counts: Path) -> None:
    """Rename a count file so that it stays; beside those of earlier runs, which may still need theirs."""
    for number in itertools.count(1):
        kept = Path(f"{counts}{BEFORE}{number if number > 1 else ''}")
        if not kept.exists():
            os.replace(counts, kept)
            return
        if filecmp.cmp(counts, kept, shallow=False):
            return
