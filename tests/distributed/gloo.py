"""A gloo process group for ranks that ``torch.multiprocessing.spawn`` starts."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist


@contextmanager
def process_group(rank: int, size: int, folder: str) -> Iterator[None]:
    """Join a process group whose ranks meet in ``folder``, and leave it.

    Models in DDP must be local to a function that is called inside: one that outlives its process group
    deadlocks in some runs: torch 2.13 waits for a thread of gloo, which waits for the interpreter.
    """
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    try:
        yield
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # they keep local models
        raise
    finally:
        gc.collect()
        dist.destroy_process_group()
