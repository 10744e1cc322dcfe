"""A store that is slow and fails: the local disk after a bad line, ``failing:///path`` (an fsspec driver).

What happens to a call is drawn from the seed, the name of the file and how often it was asked for, so that
every run meets the same faults. What has happened is appended to a file, for processes to add up.
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
"""An answer that takes its time; no answer; a connection that breaks; a refusal; fewer bytes than there are;
an error in the middle of reading; an error of the machine."""

RETRIED = ("timeout", "reset")
"""Those after which opening a file is tried again."""


class FailingStore(fsspec.AbstractFileSystem):
    """See above; :func:`bad_line` says what fails."""

    protocol = PROTOCOL
    cachable = False
    seed = 0
    shares: ClassVar[Mapping[str, float]] = {}
    delay = 0.0
    log: ClassVar[Path | None] = None
    asked: ClassVar[Counter[str]] = Counter()

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
        data, fault = Path(path).read_bytes(), self._drawn(path)
        if fault == "slow":
            time.sleep(self.delay)
        elif fault == "timeout":
            time.sleep(self.delay)
            raise TimeoutError(f"no answer for {os.path.basename(path)}")
        elif fault == "reset":
            raise ConnectionResetError(errno.ECONNRESET, "connection reset by peer")
        elif fault == "denied":
            raise PermissionError(errno.EACCES, "the store says no", path)
        elif fault == "disk":
            raise OSError(errno.EIO, "input/output error")
        elif fault == "short":
            return io.BytesIO(data[: len(data) // 2])
        elif fault == "late_timeout":
            return _Breaking(data)
        return io.BytesIO(data)

    def _drawn(self, path: str) -> str | None:
        self.asked[path] += 1
        draw = random.Random(f"{self.seed} {os.path.basename(path)} {self.asked[path]}")
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
    """Half of it can be read."""

    def read(self, size: int | None = -1) -> bytes:
        half = len(self.getbuffer()) // 2
        if self.tell() >= half or size is None or size < 0 or self.tell() + size > half:
            raise TimeoutError("the line went dead")
        return super().read(size)


def bad_line(log: Path, shares: Mapping[str, float], *, seed: int = 0, delay: float = 0.0) -> None:
    """From now on so large a share of all openings of files fails in these ways."""
    fsspec.register_implementation(PROTOCOL, FailingStore, clobber=True)
    FailingStore.seed, FailingStore.shares, FailingStore.delay, FailingStore.log = seed, shares, delay, log
    FailingStore.asked = Counter()


def happened(log: Path) -> Counter[str]:
    """How often which fault has happened since ``log`` began, in all processes."""
    if not log.exists():
        return Counter()
    return Counter(json.loads(line)[0] for line in log.read_text().splitlines())
