"""An fsspec driver for a slow and failing store: ``failing:///path`` reads the local disk with faults.

The fault of a call depends on the seed, the file name and how often the file was requested, so that every
run has the same faults. Faults are appended to a file, so that those of all processes can be counted.
"""

from __future__ import annotations

import errno
import io
import json
import os
import random
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import fsspec

PROTOCOL = "failing"
FAULTS = ("slow", "timeout", "reset", "denied", "short", "late_timeout", "disk")
"""A slow answer; no answer; a broken connection; access denied; too few bytes; an error in the middle of
reading; an error of the machine."""

RETRIED = ("timeout", "reset")
"""Faults after which opening a file is retried."""


class FailingStore(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """The failing store; :func:`set_faults` configures it."""

    protocol = PROTOCOL
    cachable = False
    seed = 0
    shares: ClassVar[Mapping[str, float]] = {}
    delay = 0.0
    log: ClassVar[Path | None] = None
    requests: ClassVar[Counter[str]] = Counter()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return str(path).removeprefix(f"{PROTOCOL}://")

    def info(self, path: str, **more: Any) -> dict[str, Any]:
        status = os.stat(path)
        return {"name": path, "size": status.st_size, "mtime": status.st_mtime, "type": "file"}

    def ls(self, path: str, detail: bool = True, **more: Any) -> list[Any]:
        names = [os.path.join(path, name) for name in sorted(os.listdir(path))]
        return [self.info(name) for name in names] if detail else names

    def _open(self, path: str, mode: str = "rb", **more: Any) -> io.BytesIO:
        data, fault = Path(path).read_bytes(), self._draw_fault(path)
        if fault == "slow":
            time.sleep(self.delay)
        elif fault == "timeout":
            time.sleep(self.delay)
            raise TimeoutError(f"no answer for {os.path.basename(path)}")
        elif fault == "reset":
            raise ConnectionResetError(errno.ECONNRESET, "connection reset by peer")
        elif fault == "denied":
            raise PermissionError(errno.EACCES, "access denied", path)
        elif fault == "disk":
            raise OSError(errno.EIO, "input/output error")
        elif fault == "short":
            return io.BytesIO(data[: len(data) // 2])
        elif fault == "late_timeout":
            return _Breaking(data)
        return io.BytesIO(data)

    def _draw_fault(self, path: str) -> str | None:
        self.requests[path] += 1
        draw = random.Random(f"{self.seed} {os.path.basename(path)} {self.requests[path]}")
        chance = draw.random()
        for fault, share in self.shares.items():
            if chance < share:
                if self.log is not None:
                    with self.log.open("a") as file:
                        file.write(json.dumps([fault, os.path.basename(path)]) + "\n")
                return fault
            chance -= share
        return None


class _Breaking(io.BytesIO):
    """A file of which only the first half can be read."""

    def read(self, size: int | None = -1) -> bytes:
        half = len(self.getbuffer()) // 2
        if self.tell() >= half or size is None or size < 0 or self.tell() + size > half:
            raise TimeoutError("the connection was lost")
        return super().read(size)


def set_faults(log: Path, shares: Mapping[str, float], *, seed: int = 0, delay: float = 0.0) -> None:
    """Let this share of calls fail with each fault from now on."""
    fsspec.register_implementation(PROTOCOL, FailingStore, clobber=True)
    FailingStore.seed, FailingStore.shares, FailingStore.delay, FailingStore.log = seed, shares, delay, log
    FailingStore.requests = Counter()


def count_faults(log: Path) -> Counter[str]:
    """Return how often each fault has occurred, in all processes."""
    if not log.exists():
        return Counter()
    return Counter(json.loads(line)[0] for line in log.read_text().splitlines())
