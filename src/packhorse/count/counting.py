"""The counting pass: read the datasets of a meta file, write one sidecar for each data file.

A part is identified by the digest of its bytes. Parts that an interrupted run has finished, and parts that an
older state of the file shares with this one, are reused; only the rest is counted. A sidecar appears complete
under its name once all its parts are counted, and its bytes do not depend on what was reused or where it was
counted.
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import itertools
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from packhorse.count.columns import OK, count_schema
from packhorse.count.count_report import CountedFile, CountReport, dataset_report, verify_counts
from packhorse.count.parts import (
    PART_ROWS,
    PartCounter,
    PartResult,
    PartTask,
    check_media_dir,
    map_parts,
    part_digest,
    split_parts,
    with_absolute_paths,
)
from packhorse.count.sidecar import (
    CHECK,
    Settings,
    Sidecar,
    SidecarLocation,
    as_damage,
    batch_digest,
    data_source,
    open_batches,
    sidecar_metadata,
)
from packhorse.errors import FULL_DISK, ConfigError, SystemFault, write_fault
from packhorse.formats.meta import DatasetConfig, Meta, open_dataset_rows, read_meta
from packhorse.rows.index import file_error
from packhorse.rows.row_files import RowFile
from packhorse.types import Task
from packhorse.utils.files import Fingerprint, cache_lock, remove_if_idle, write_atomic
from packhorse.utils.pool import Engine
from packhorse.utils.progress import OnProgress, Progress

if TYPE_CHECKING:
    import pyarrow as pa

logger = getLogger("packhorse.datasets")

BEFORE = ".before"
"""Suffix of counts with unreachable media after they are replaced."""

_MAX_LOSSES = 3
_TICK = 2_000_000_000  # nanoseconds that every file system can distinguish
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)

# Reasons that do not depend on the media folder.
_ROW_REASONS = {
    OK,
    "malformed_row",
    "row_too_large",
    "wrong_format",
    "empty_conversation",
    "no_assistant_turn",
    "unknown_role",
    "surplus_placeholder",
}


def count_meta(
    meta: Meta,
    processor: Any,
    *,
    dataset_names: Sequence[str] | None = None,
    engine: Engine | None = None,
    part_rows: int | None = None,
    verify: int = 0,
    seed: int = 0,
    retry_bad: bool = False,
    fresh: bool = False,
    trust_remote_code: bool = False,
    bad_rows: int = 3,
    index_dir: str | None = None,
    task: Task | None = None,
    progress: OnProgress | None = None,
) -> CountReport:
    """Count the tokens of every row and save the counts next to the data.

    Rows that were counted before, in the same state and with the same settings, are not recounted. Media are
    inspected once: if they have changed under the same names, request a ``fresh`` count. Parts with a media
    item that could not be reached (no permission, no answer) are recounted every time.

    Args:
        meta: the meta file, or a dict with its content. All rows of a file are counted, whatever share of
            them a dataset takes.
        processor: a processor, its encoder, or the path of one.
        dataset_names: only these datasets.
        engine: where to count (see :mod:`packhorse.count.engines`); None counts in this process.
        part_rows: rows that are counted, saved and reused together. None for the size that a file's earlier
            counts with the same settings have, so that they can be reused, else 4,096.
        verify: number of random rows to encode with the real processor and compare.
        seed: selects these rows.
        retry_bad: recount parts with bad rows (after missing media have arrived).
        fresh: recount everything.
        trust_remote_code: run code that comes with the processor.
        bad_rows: number of rows per reason that the report names, with their locations in the file.
        index_dir: as for :func:`~packhorse.datasets.open_meta_dataset`.
        task: what the rows are for; None for what each dataset says.
        progress: called with the number of counted rows; None logs it every few seconds.

    Raises:
        ConfigError: the meta file, the processor, its chat template or a media folder is invalid.
        SystemFault: the disk is full. Finished parts are kept, and no sidecar is incomplete.
    """
    if part_rows is not None and part_rows < 1:
        raise ConfigError.of("part_rows", part_rows, "expected at least 1")
    if verify < 0:
        raise ConfigError.of("verify", verify, "expected at least 0")
    started = time.monotonic()
    # Settings depend on the paths as the meta file has them; workers get absolute ones.
    named = read_meta(meta, dataset_names, task)
    for config in named:
        check_media_dir(config)
    configs = [with_absolute_paths(config) for config in named]
    work = PartCounter(processor, trust_remote_code)
    for config in named:
        work.counter.encoder.check_dataset_settings(config.name, config.rules.media_settings)
    files = [open_dataset_rows(config, index_dir) for config in configs]
    stores: dict[Path, PartStore] = {}  # by sidecar: datasets may share a file
    of_dataset: list[PartStore] = []
    for name_config, config, file in zip(named, configs, files, strict=True):
        location = SidecarLocation.of(file, Settings.of(work.settings, name_config))
        store = PartStore(config, file, location, part_rows or 0, index_dir)
        of_dataset.append(stores.setdefault(location.targets()[0], store))
    counting_seconds = _count_files(stores, work, engine, progress or Progress("counting"), retry_bad, fresh)
    counted = [
        CountedFile(config, file, store.finished_sidecar(), len(file) - store.counted_rows)
        for config, file, store in zip(configs, files, of_dataset, strict=True)
    ]
    return CountReport(
        tuple(dataset_report(file, bad_rows) for file in counted),
        seconds=time.monotonic() - started,
        counting_seconds=counting_seconds,
        counted_rows=sum(store.counted_rows for store in stores.values()),
        verified=verify_counts(counted, work.counter.encoder, verify, seed) if verify else None,
        files=tuple(counted),
    )


def _count_files(
    by_target: dict[Path, PartStore],
    work: PartCounter,
    engine: Engine | None,
    progress: OnProgress,
    retry_bad: bool,
    fresh: bool,
) -> float:
    """Count the missing parts of all files; return the seconds that it took."""
    stores = list(by_target.values())
    with contextlib.ExitStack() as stack:
        for target in sorted(by_target):
            stack.enter_context(cache_lock(f"count {target}"))
        for store in stores:
            stack.callback(store.remove_empty_folders)
        for store in stores:
            store.find(retry_bad=retry_bad, fresh=fresh)
        started = time.monotonic()
        for store in stores:
            store.write_sidecar_if_complete()
        while any(store.missing for store in stores):  # more than once if another process removes parts
            tasks = [store.tasks() for store in stores]
            with contextlib.closing(map_parts(tasks, work, engine, progress)) as results:
                for index, task, result in results:
                    stores[index].keep(task, result)
                    stores[index].write_sidecar_if_complete()
        return time.monotonic() - started


class PartStore:
    """The counted parts of one data file, saved until its sidecar replaces them.

    ``part_rows`` of 0 is replaced by the size of the parts that can be reused.

    Attributes:
        missing: the numbers of the parts that are not counted.
        sidecar: the finished sidecar; None until it is written or found.
    """

    def __init__(
        self,
        config: DatasetConfig,
        file: RowFile,
        location: SidecarLocation,
        part_rows: int,
        index_dir: str | None,
    ) -> None:
        self.config, self.file, self.location = config, file, location
        self.part_rows, self.index_dir = part_rows, index_dir
        self.missing: set[int] = set()
        self.sidecar: Sidecar | None = None
        self._home = 0  # index of the folder that can be written
        self._parts: dict[int, Part] = {}
        self._counted: dict[int, int] = {}  # rows by part
        self._files: set[Path] = set()  # of parts: written by this pass, or found when it started
        self._previous: tuple[Path, int] | None = None  # the old sidecar: path, modification time
        self._keeps_previous = False
        self._losses = 0

    def find(self, *, retry_bad: bool, fresh: bool) -> None:
        """Look for the sidecar, or for parts of it; choose the folder for new parts."""
        if fresh:  # remove everything now, so that a rerun of an interrupted count continues with fresh parts
            remove_files([*(other.path for other in self.location.others()), *self.location.all_targets()])
            remove_files(self._part_files())
        sidecar = self.location.find()
        self._previous = None if sidecar is None else (sidecar.path, sidecar.mtime_ns)
        sidecar = None if fresh else sidecar
        self._keeps_previous = sidecar is not None and has_unreachable(sidecar.batches())
        recount = self._keeps_previous or (retry_bad and sidecar is not None and has_bad(sidecar.batches()))
        if sidecar is not None and len(sidecar) == len(self.file) and not recount:
            self.sidecar = sidecar
            # Of a run that was killed after it wrote the sidecar; newer ones belong to a running process.
            remove_files(older_than(sidecar.mtime_ns, self._part_files()))
            return
        self._home = self._find_writable_folder()
        others = [] if fresh else [*self.location.others()]
        sidecars = others if sidecar is None else [sidecar, *others]
        if not self.part_rows:
            self.part_rows = PART_ROWS if fresh else self._find_part_rows(sidecars)
        self.missing = set(range(len(self._split())))
        if fresh:
            return
        self._files |= self._part_files()
        if known := self._find_parts(sidecars, retry_bad):
            for number, task in enumerate(self._split()):
                digest = part_digest(self.file, task.first, task.stop)
                if digest in known:
                    self._parts[number] = known[digest]
            self.missing -= set(self._parts)

    def tasks(self) -> list[PartTask]:
        """Return the missing parts."""
        if not self.missing:  # of a file that is counted, the size of parts is unknown
            return []
        return [task for number, task in enumerate(self._split()) if number in self.missing]

    def keep(self, task: PartTask, result: PartResult) -> None:
        """Save a counted part, for a later run if this one does not finish the sidecar."""
        path = self.location.parts_folders()[self._home] / f"{result.digest}-{self.part_rows}.arrow"
        save_part(path, result.data, self.location.all_targets())
        number = task.first // self.part_rows
        self._files.add(path)
        self._parts[number] = Part(result.digest, path)
        self.missing.discard(number)
        self._counted[number] = task.stop - task.first

    def write_sidecar_if_complete(self) -> None:
        """Write the sidecar and remove the parts, if none is missing; raise if the data file has changed."""
        if self.sidecar is not None or self.missing:
            return
        if Fingerprint.of(data_source(self.file)) != self.location.state:
            problem = (
                "was changed while it was being counted; count again (parts that did not change are kept)"
            )
            raise file_error(self.file.name, problem)
        try:
            location, anywhere = self.location, self.location.anywhere
            if anywhere is not None and all(needs_no_media(part.batch()) for part in self._parts.values()):
                location = anywhere  # counts of rows without media hold in every working directory
            target = location.targets()[self._home]
            with _raise_as_system_fault(target):
                if self._keeps_previous and self._previous is not None:
                    # A run that was planned from these counts can resume with them only.
                    with contextlib.suppress(OSError):
                        _keep_aside(self._previous[0])
                write_atomic(target, lambda file: self._write(file, location.settings), to_disk=True)
                mark_newest(target, [*self.location.all_targets(), *self._files])
            self.sidecar = Sidecar(target)
        except FileNotFoundError as error:
            self._replace_removed_parts(error)
            if self.sidecar is None:
                return
        remove_files(self._files)
        remove_files([other.path for other in self.location.others()])  # of older states of the file
        self._parts.clear()

    def finished_sidecar(self) -> Sidecar:
        """Return the sidecar after the pass."""
        assert self.sidecar is not None, "every file is finished when the pass is"
        return self.sidecar

    @property
    def counted_rows(self) -> int:
        """Number of rows that this pass has counted."""
        return sum(self._counted.values())

    def remove_empty_folders(self) -> None:
        """Remove stale files and empty folders, whether or not the pass succeeded."""
        for folder in self.location.parts_folders():
            if self.sidecar is not None:
                # Of killed processes; what a process is writing now is locked.
                for path in older_than(self.sidecar.mtime_ns, folder.glob(".*.arrow.*")):
                    with contextlib.suppress(OSError):  # already removed, or not ours to remove
                        remove_if_idle(path)
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _split(self) -> list[PartTask]:
        rows = len(self.file)
        return split_parts(self.config, rows, self.part_rows, self.location.state, self.index_dir)

    def _part_files(self) -> set[Path]:
        return {path for folder in self.location.parts_folders() for path in folder.glob("*.arrow")}

    def _find_writable_folder(self) -> int:
        """Return the index of the data's folder, or of the cache if that cannot be written."""
        folders = self.location.parts_folders()
        for index, folder in enumerate(folders):
            if may_write(folder):
                return index
        names = " nor ".join(str(folder.parent) for folder in folders)
        remedy = "set PACKHORSE_CACHE to a folder for the counts"
        raise ConfigError(f"neither {names} can be written: {remedy}", setting="PACKHORSE_CACHE")

    def _find_part_rows(self, sidecars: Sequence[Sidecar]) -> int:
        """Return the size of the parts that can be reused; the default if there are none."""
        if sidecars:
            return sidecars[0].part_rows
        # The last part of a file has fewer rows, so the name has the size of the others.
        names = sorted(path.stem for path in self._part_files())
        sizes = Counter(int(size) for name in names if (size := name.partition("-")[2]).isdigit())
        return sizes.most_common(1)[0][0] if sizes else PART_ROWS

    def _find_parts(self, sidecars: Sequence[Sidecar], retry_bad: bool) -> dict[str, Part]:
        """Return the parts that were counted before with these settings, by digest."""
        known = {}
        for sidecar in reversed(sidecars):
            for number, digest in enumerate(sidecar.parts):
                known[digest] = Part(digest, (sidecar, number), sidecar.about["checks"][number])
        saved = (Part(path.stem.partition("-")[0], path) for path in self._part_files())
        known |= {part.digest: part for part in saved if part.is_whole()}
        # A timeout or a missing permission is not a property of the row: retry.
        return {
            digest: part
            for digest, part in known.items()
            if not has_unreachable([part.batch()]) and not (retry_bad and has_bad([part.batch()]))
        }

    def _replace_removed_parts(self, error: FileNotFoundError) -> None:
        """Use the sidecar of a faster process, which has removed the parts; else mark them as missing."""
        sidecar = self.location.find()
        is_new = sidecar is not None and (sidecar.path, sidecar.mtime_ns) != self._previous
        if sidecar is not None and is_new and len(sidecar) == len(self.file):
            logger.info("%s was written by another process: using it", sidecar.path)
            self.sidecar = sidecar
            return
        sources = ((number, part.source) for number, part in self._parts.items())
        lost = {number for number, path in sources if isinstance(path, Path) and not path.exists()}
        self._losses += 1
        if self._losses > _MAX_LOSSES or not lost:
            raise SystemFault(
                f"{self.file.name}: counted parts were removed while the count was running ({error}). Is "
                "another process counting or clearing this folder? Count again when it is done"
            ) from error
        logger.warning("%s: %s counted parts were removed: recounting them", self.file.name, len(lost))
        self.missing |= lost

    def _write(self, file: IO[bytes], settings: Settings) -> None:
        import pyarrow as pa

        parts = [self._parts[number] for number in range(len(self._parts))]
        digests, checks = [part.digest for part in parts], [part.counts_digest() for part in parts]
        state, rows = self.location.state, len(self.file)
        schema = count_schema(sidecar_metadata(settings, state, rows, self.part_rows, digests, checks))
        with pa.ipc.new_file(file, schema) as writer:
            for number, (part, task) in enumerate(zip(parts, self._split(), strict=True)):
                batch = part.batch()
                if batch.num_rows != task.stop - task.first:
                    raise file_error(self.file.name, f"part {number} has {batch.num_rows} rows; count fresh")
                writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))


def _keep_aside(counts: Path) -> None:
    """Rename a count file so that it stays, next to those of earlier runs, which may still need theirs."""
    for number in itertools.count(1):
        kept = Path(f"{counts}{BEFORE}{number if number > 1 else ''}")
        if not kept.exists():
            os.replace(counts, kept)
            return
        if filecmp.cmp(counts, kept, shallow=False):
            return


# Files of parts.


@dataclass
class Part:
    """A counted part in a file or in a sidecar; its content is verified once.

    Attributes:
        digest: of its bytes in the data file.
        source: its file, or the open sidecar and its number there.
    """

    digest: str
    source: Path | tuple[Sidecar, int]
    _check: str = ""

    def batch(self) -> pa.RecordBatch:
        """Return its record batch; raise an OSError, or a ConfigError if it is damaged."""
        import pyarrow as pa

        if not isinstance(self.source, Path):
            sidecar, number = self.source
            return sidecar.part(number)
        reader = open_batches(str(self.source))
        try:
            batch = reader.get_batch(0)
            if not self._check:  # only once: the sidecar that it becomes part of is verified as well
                check = (reader.schema.metadata or {}).get(CHECK, b"").decode()
                if check != batch_digest(batch):
                    raise ValueError("its counts are not those that were written")
                self._check = check
        except (pa.ArrowException, ValueError, OSError) as error:
            raise as_damage(error, str(self.source)) from error
        return batch

    def counts_digest(self) -> str:
        """Return the digest of its counts; raises as :meth:`batch`."""
        if not self._check:
            self.batch()
        return self._check

    def is_whole(self) -> bool:
        """Return whether it can be reused."""
        try:
            return self.batch() is not None
        except (OSError, ValueError):
            return False


def has_bad(batches: Iterable[pa.RecordBatch]) -> bool:
    """Return whether any row could not be counted."""
    return any(_statuses(batch) - {OK} for batch in batches)


def has_unreachable(batches: Iterable[pa.RecordBatch]) -> bool:
    """Return whether a media item of any row could not be reached: the counts hold for one run only."""
    return any("unreachable_media" in _statuses(batch) for batch in batches)


def needs_no_media(batch: pa.RecordBatch) -> bool:
    """Return whether no row of a part has media, or failed because of one."""
    import pyarrow.compute as pc

    media = sum(pc.sum(batch.column(name)).as_py() or 0 for name in ("images", "videos", "audios"))
    return not media and _statuses(batch) <= _ROW_REASONS


def _statuses(batch: pa.RecordBatch) -> set[str]:
    return set(batch.column("status").unique().to_pylist())


def may_write(folder: Path) -> bool:
    """Create a folder for parts; return False if that is not permitted."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise _count_file_fault(error, folder) from error
        logger.info("%s cannot be written (%s)", folder.parent, error.strerror)
        return False
    return os.access(folder, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def save_part(path: Path, data: bytes, newer_than: Iterable[Path] = ()) -> None:
    """Write a part, complete or not at all, and newer than these count files, even with a wrong clock."""

    def write(file: IO[bytes]) -> None:
        file.write(data)
        file.flush()
        mark_newest(file.fileno(), newer_than)  # before the file appears under its name

    try:
        with _raise_as_system_fault(path):
            # Another process may remove the folder, as it is empty, before, or while mkdir looks at it.
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                return write_atomic(path, write)
            write_atomic(path, write)
    except FileNotFoundError as error:
        raise _count_file_fault(error, path) from error


@contextlib.contextmanager
def _raise_as_system_fault(path: Path) -> Iterator[None]:
    """Raise errors of writing ``path`` as :class:`SystemFault`; a missing part stays FileNotFoundError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _count_file_fault(error, path) from error


def _count_file_fault(error: OSError, path: Path) -> SystemFault:
    remedy = "free disk space and count again" if error.errno in FULL_DISK else "count again"
    return write_fault(error, path, f"No count file is incomplete; {remedy} (finished parts are kept)")


def mark_newest(path: Path | int, others: Iterable[Path]) -> None:
    """Make a file (or an open one, by its descriptor) newer than others, even if clocks are set back.

    The newest of several count files holds; parts that are newer than it belong to a running process.
    """
    modified = os.stat(path).st_mtime_ns
    for other in others:
        with contextlib.suppress(FileNotFoundError):
            if other != path and (last := other.stat().st_mtime_ns) >= modified:
                modified = last + _TICK
                os.utime(path, ns=(modified, modified))


def older_than(mtime_ns: int, paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files that are not newer."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime_ns <= mtime_ns:
                yield path


def remove_files(paths: Iterable[Path]) -> None:
    """Remove the files that exist and may be removed."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()
