"""Estimate the lengths of many rows: the same formulas row by row in plain Python, and over columns.

    python benchmarks/estimate.py [--quick] [--rows 1000000] [--repeat 3]

Generates rows as a counted dataset has them (text tokens known; two in three with images of known size, one
in twenty with a video), as dicts in memory and as columns, as a sidecar holds them: neither reading nor
building them is measured. Prints the best time of ``--repeat`` runs of each, checks that both give the same
number for every row, and prints the ratio that is promised. Exit code 1 if it is missed.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from packhorse.formats.estimate import LengthColumns, columns_of, estimate_lengths, outline
from packhorse.media.images import resize_image, resize_video
from packhorse.media.sampling import VideoInfo, VideoSampling, count_sampled_frames
from promises import fact, make_parser, parse, promise, record_outcome

T = TypeVar("T")

IMAGES = {
    "patch_size": 14,
    "merge_size": 2,
    "factor": 28,
    "min_pixels": 56 * 56,
    "max_pixels": 14 * 14 * 4 * 1280,
}
FRAMES = {"fps": 2.0, "min_frames": 4, "max_frames": 768, "temporal_patch_size": 2}
VIDEOS = {
    "patch_size": 16,
    "merge_size": 2,
    "factor": 32,
    "min_pixels": 128 * 128,
    "max_pixels": 16 * 16 * 2 * 2 * 2 * 6144,
    **FRAMES,
}
SAMPLING = VideoSampling(**FRAMES)
TO_REACH = 50


@record_outcome()
def main() -> None:
    """Generate rows, measure and print the promises."""
    options = parse(make_parser(__doc__, rows=1_000_000, repeat=3), rows=100_000, repeat=2)
    examples = rows(options.rows)
    columns = columns_of(examples)
    gc.freeze()  # so that the collector does not scan millions of dicts
    report(examples, columns, options.repeat)


def rows(count: int) -> list[dict[str, Any]]:
    """Return examples in the documented format."""
    rng = random.Random(0)
    return [_row(rng) for _ in range(count)]


def _row(rng: random.Random) -> dict[str, Any]:
    images = rng.choice((0, 1, 1, 1, 2, 0))
    videos = int(rng.random() < 0.05)
    sizes = [[rng.randint(64, 2400), rng.randint(64, 2400)] for _ in range(images)]
    clips = [
        [rng.randint(10, 9000), rng.choice((240, 480, 720, 1080)), 1280, rng.choice((24.0, 29.97, 30.0)), 0.0]
        for _ in range(videos)
    ]
    media = [{"type": "image", "image": "a.jpg"}] * images + [{"type": "video", "video": "a.mp4"}] * videos
    return {
        "conversation": [
            {"role": "user", "content": [*media, {"type": "text", "text": "What is it?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "A bar chart."}]},
        ],
        "_text_tokens": rng.randint(20, 2000),
        "mm_inputs_meta": {"images_meta": sizes, "videos_meta": clips},
    }


def row_tokens(row: dict[str, Any]) -> int:
    """Return the documented estimate of one row in plain Python; 500 tokens for unknown media."""
    seen, meta = outline(row), row.get("mm_inputs_meta") or {}
    images, videos = meta.get("images_meta") or (), meta.get("videos_meta") or ()
    text = row.get("_text_tokens")
    tokens: int = seen.characters // 3 if text is None else text
    tokens += 500 * (max(0, seen.images - len(images)) + max(0, seen.videos - len(videos)) + seen.audios)
    factor, bounds = IMAGES["factor"], (IMAGES["min_pixels"], IMAGES["max_pixels"])
    for height, width in images:
        height, width = resize_image(height, width, factor, *bounds)
        tokens += (height // factor) * (width // factor)
    factor, bounds = VIDEOS["factor"], (VIDEOS["min_pixels"], VIDEOS["max_pixels"])
    for total, height, width, fps, duration in videos:
        frames = count_sampled_frames(VideoInfo(total, height, width, fps, duration), SAMPLING)
        height, width = resize_video(frames, height, width, 2, factor, *bounds)
        tokens += (frames // 2) * (height // factor) * (width // factor)
    return tokens


def best(work: Callable[[], T], repeat: int) -> tuple[float, T]:
    """Return the shortest time in seconds, and the result."""
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - start)
    return min(seconds), result


def report(examples: list[dict[str, Any]], columns: LengthColumns, repeat: int) -> None:
    """Print times and the promises."""
    count = len(examples)
    media = sum(len(part.height) for part in (columns.images, columns.videos) if part is not None)
    print(f"{count:,} rows with {media:,} media, {os.cpu_count()} cores, one used\n")
    loop, plain = best(lambda: [row_tokens(example) for example in examples], repeat)
    line("row by row", loop, count)
    at_once, found = best(lambda: estimate_lengths(columns, IMAGES, VIDEOS), repeat)
    line("over columns", at_once, count)
    print()
    by_row = "the same estimate in Python on each row"
    differ = int((found.total != np.array(plain)).sum())
    claim = "rows with another estimate over columns"
    promise(claim, differ, 0, baseline=by_row, unit="", at_least=False, kind="exact")
    promise("estimates over columns, speed", loop / at_once, TO_REACH, baseline=by_row)
    fact("estimates over columns", count / at_once / 1e6, "M rows/s")


def line(what: str, seconds: float, count: int) -> None:
    """Print one row of the table."""
    print(f"{what:<16}{seconds * 1000:>10,.0f} ms{count / seconds / 1e6:>10.2f} M rows/s", flush=True)


if __name__ == "__main__":
    main()
