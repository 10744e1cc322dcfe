"""Run the stages of ``gpu_train.py`` one after the other, each with all memory of the GPU."""

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
    """Print a line with the seconds since the start."""
    print(f"[{time.perf_counter() - _started:6.1f} s] {what}", flush=True)


class Stages:
    """Run the stages of this benchmark; print errors and continue with the next."""

    def __init__(self, budget: float) -> None:
        self.budget, self.failed = budget, list[str]()

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        """Return the result; None if it failed or the time is over."""
        if time.perf_counter() - _started > self.budget:
            log(f"{name}: not measured, {self.budget:.0f} s are over (--budget)")
            self.failed.append(name)
            return None
        log(name)
        try:
            return work()
        except Exception:  # noqa: BLE001 — printed, and the exit code is 1
            traceback.print_exc(file=sys.stdout)
            self.failed.append(name)
            return None
        finally:
            free_memory()


def free_memory() -> None:
    """Free unused memory and reset the peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
