"""What the engine tests run in other processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from packhorse.utils import pool


def square(number: int) -> int:
    return number * number


def slow_first(number: int) -> int:
    time.sleep(1.5 if number == 0 else 0.05)
    return number


def sleep(number: int) -> None:
    time.sleep(60)


def big(data: bytes) -> bytes:
    return data * 2


def always_die(number: int) -> int:
    if number == 2:
        pool.note.value = 5
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@dataclass
class DieOnce:
    """Kills its own process the first time it gets one of the tasks ``on``."""

    folder: Path
    on: tuple[int, ...]

    def __call__(self, number: int) -> int:
        mark = self.folder / str(number)
        if number in self.on and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number * number


class BadlyPickled(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def raise_badly_pickled(number: int) -> None:
    raise BadlyPickled("a", "b")


def return_a_lock(number: int) -> object:
    return threading.Lock()


def environment(number: int) -> tuple[str | None, str | None, int]:
    import torch

    settings = os.environ.get("TOKENIZERS_PARALLELISM"), os.environ.get("OMP_NUM_THREADS")
    return *settings, torch.get_num_threads()


def process_id(number: int) -> tuple[int, int]:
    return number, os.getpid()


def tensor(number: int) -> object:
    import torch

    return torch.full((200, 1000), number)


def many_tensors(number: int) -> list[object]:
    return [tensor(number) for _ in range(50)]


@dataclass
class Share:
    """Writes into a tensor that all processes share."""

    tensor: object

    def __call__(self, number: int) -> int:
        self.tensor[number] = number  # type: ignore[index]
        return number
