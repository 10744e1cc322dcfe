"""Datasets with faults that occur while a loader reads them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packhorse.utils.pool import in_worker

Fault = Callable[[], None]


class Faulty(Sequence[Any]):
    """Examples with faults on access, once ``armed`` (not while they are counted).

    Args:
        rows: the examples.
        faults: the fault of an example, by its index.
        only_workers: no fault in the process that built the loader.
    """

    def __init__(
        self, rows: Sequence[Any], faults: Mapping[int, Fault], *, only_workers: bool = True
    ) -> None:
        self.rows, self.faults, self.only_workers, self.armed = rows, faults, only_workers, False

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if self.armed and index in self.faults and (in_worker() or not self.only_workers):
            self.faults[index]()
        return self.rows[index]


class Once:
    """A fault that occurs only the first few times, in any process."""

    def __init__(self, folder: Path, fault: Fault, times: int = 1) -> None:
        self.folder, self.fault, self.times = folder, fault, times

    def __call__(self) -> None:
        for number in range(self.times):
            try:
                (self.folder / f"happened{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            self.fault()
            return


def die_of(signal_number: int) -> Fault:
    return lambda: os.kill(os.getpid(), signal_number)


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(3)


def hang() -> None:
    time.sleep(600)


def raising(error: BaseException) -> Fault:
    def fault() -> None:
        raise error

    return fault


def children() -> set[int]:
    """Return the running child processes."""
    parent_pid = os.getpid()
    pids = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(parent) == parent_pid and state != "Z":
                pids.add(int(entry.name))
    return pids


@contextmanager
def small_disk(folder: Path, size: str, *options: str) -> Iterator[bool]:
    """Mount a file system of a few KiB at ``folder``; yield False if mounting is not allowed."""
    folder.mkdir(exist_ok=True)
    mount = shutil.which("mount")
    command = [str(mount), "-t", "tmpfs", "-o", ",".join((f"size={size}", *options)), "tmpfs", str(folder)]
    mounted = mount is not None and not subprocess.run(command, capture_output=True, check=False).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def may_mount() -> bool:
    """Return whether :func:`small_disk` can mount a disk here."""
    with TemporaryDirectory() as folder, small_disk(Path(folder), "64k") as mounted:
        return mounted
