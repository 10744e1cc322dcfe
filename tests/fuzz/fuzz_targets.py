"""What is fuzzed: for each reader its seeds (real files), mutations of its own, and how it is read.

A reader is given bytes. It reads them, or rejects them with an error of Packhorse; anything else is a bug.
"""

import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuzz_arrow as arrow
import fuzz_json as text
import fuzz_media as media

# The readers are imported where they are used: the child instruments them first.

Mutate = Callable[[bytes, random.Random], bytes | None]


@dataclass(frozen=True)
class Target:
    """A reader under test.

    Attributes:
        seeds: real inputs; makes files in the given folder.
        read: reads the bytes, with a file of the given name if it needs one.
        modules: what is instrumented, so that new code paths are noticed.
        mutate: changes an input in a way that bytes alone would rarely be changed; None where it cannot.
        longest: bytes of an input; of text little says as much as a lot.
    """

    seeds: Callable[[Path], list[bytes]]
    read: Callable[[bytes, Path], Any]
    modules: tuple[str, ...]
    mutate: Mutate | None = None
    longest: int = 1 << 15


_DATASETS = (
    "packhorse.datasets",
    "packhorse.formats.conversation",
    "packhorse.media.source",
)

TARGETS: dict[str, Target] = {
    "jsonl": Target(text.jsonl_seeds, text.read_rows, _DATASETS, longest=2048),
    "json_array": Target(text.array_seeds, text.read_rows, _DATASETS, text.mutate_json, 2048),
    "index": Target(text.index_seeds, text.read_index, _DATASETS, text.mutate_index),
    "sharegpt": Target(
        lambda _: [json.dumps(row).encode() for row in text.rows()],
        text.read_sharegpt,
        _DATASETS,
        text.mutate_json,
        2048,
    ),
    "count_file": Target(arrow.count_file_seeds, arrow.read_count_file, _DATASETS, arrow.mutate_arrow),
    "count_part": Target(arrow.part_seeds, arrow.read_part, _DATASETS, arrow.mutate_arrow),
    "arrow_copy": Target(arrow.copy_seeds, arrow.read_copy, _DATASETS, arrow.mutate_arrow),
    "plan": Target(arrow.plan_seeds, arrow.read_plan, ("packhorse.neat_packing_vlm",), arrow.mutate_plan),
    "image": Target(media.image_seeds, media.read_image, ("packhorse.media", "PIL")),
    "audio": Target(media.audio_seeds, media.read_audio, ("packhorse.media",)),
    "video": Target(media.video_seeds, media.read_video, ("packhorse.media",)),
}

FILES = {
    "jsonl": "input.jsonl",
    "json_array": "input.json",
    "count_file": "input.phcount",
    "plan": "input.phplan",
}


# --- readers that fail, to see that this is noticed ------------------------------------------------------


def _raises(data: bytes, path: Path) -> None:
    if len(data) > 1:
        raise KeyError("found")


def _crashes(data: bytes, path: Path) -> None:
    if len(data) > 1:
        os.abort()


def _is_greedy(data: bytes, path: Path) -> None:
    if len(data) > 1:
        bytearray(4 << 30)


BROKEN: dict[str, Target] = {
    name: Target(lambda _: [b"x"], read, ("packhorse.errors",))
    for name, read in (("raises", _raises), ("crashes", _crashes), ("is greedy", _is_greedy))
}
