"""Runs the parts of ``gpu_train.py`` one after the other, each with the memory of the GPU to itself."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

_started = time.perf_counter()


def log(what: str) -> None:
    """A line of progress, with the seconds since the start."""
    print(f"[{time.perf_counter() - _started:6.1f} s] {what}", flush=True)


class Stages:
    """Runs the parts of this benchmark: what fails is printed, and the rest goes on."""

    def __init__(self, budget: float) -> None:
        self.budget, self.failed = budget, list[str]()

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        """The result; None where it failed, or where the time is up."""
        if time.perf_counter() - _started > self.budget:
            log(f"{name}: not measured, {self.budget:.0f} s are over (--budget)")
            self.failed.append(name)
            return None
        log(name)
        try:
            return work()
        except Exception:  # noqa: BLE001 — told, and the exit code is 1
            traceback.print_exc(file=sys.stdout)
            self.failed.append(name)
            return None
        finally:
            free_memory()


def free_memory() -> None:
    """Give back what nobody holds any more, and begin a new peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
