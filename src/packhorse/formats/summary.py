"""The loaded list with its statistics, and the table that says what was loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from logging import getLogger
from typing import Any

from packhorse.formats.conversation import parse_documents
from packhorse.formats.estimate import CHARS_PER_TOKEN, ColumnsBuilder, Outline, estimate_lengths
from packhorse.ledger import Ledger

STAT_KEYS = (
    "n_images",
    "n_videos",
    "n_text_only",
    "n_text_tokens",
    "n_media_tokens",
    "n_missing_text_tokens",
    "n_missing_mm_inputs_meta",
)


def collect_sample_stats(examples: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Count media and estimate tokens over ``examples``: one pass, no file is opened.

    Text tokens are an example's ``_text_tokens``, else characters // 3. A media item's tokens are the
    ``n_tokens`` of its entry in ``mm_inputs_meta``; an entry that is null counts 0; anything else 500.

    Returns:
        ``n_images``, ``n_videos``, ``n_text_only``, ``n_text_tokens``, ``n_media_tokens``,
        ``n_missing_text_tokens`` and ``n_missing_mm_inputs_meta`` (examples that lack the field; the latter
        only among those with media).
    """
    stats, columns = dict.fromkeys(STAT_KEYS, 0), ColumnsBuilder()
    for example in examples:
        # Parsed, not merely outlined: an invalid example raises when it is loaded.
        documents = parse_documents(example)
        kinds = [ref.kind for document in documents for ref in document.media]
        characters = sum(len(message.text) for document in documents for message in document.messages)
        seen = Outline(characters, kinds.count("image"), kinds.count("video"), kinds.count("audio"))
        stats["n_images"] += seen.images
        stats["n_videos"] += seen.videos
        stats["n_text_only"] += not kinds
        tokens = example.get("_text_tokens")
        if tokens is None:
            stats["n_missing_text_tokens"] += 1
            tokens = characters // CHARS_PER_TOKEN
        stats["n_text_tokens"] += tokens
        if kinds:
            meta = example.get("mm_inputs_meta")
            stats["n_missing_mm_inputs_meta"] += meta is None
            columns.add({"mm_inputs_meta": meta}, seen)
    stats["n_media_tokens"] = int(estimate_lengths(columns.columns()).media.sum())
    return stats


def add_stats(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of several statistics, key by key; all zero for none."""
    total = dict.fromkeys(STAT_KEYS, 0)
    for part in parts:
        for name in STAT_KEYS:
            total[name] += part[name]
    return total


logger = getLogger("packhorse.datasets")


class _ExamplesWithStats(list[dict[str, Any]]):
    """A list of examples with its statistics, so that they are computed once."""

    __slots__ = ("stats",)

    stats: dict[str, int]


class MetaExamples(_ExamplesWithStats):
    """What :func:`make_meta_dataset` returns: the examples, their ``stats``, and the ``ledger`` of losses."""

    __slots__ = ("key", "ledger")

    ledger: Ledger
    key: Callable[[int], str]
    """The row an example comes from (``coco/812``), by its place in the list as it was loaded."""


def log_dataset_loading_summary(
    timings: Iterable[Mapping[str, Any]], wall_time: float, total_samples: int, rank: int | None = None
) -> None:
    """Log a table of what was loaded: a line per dataset, the slowest first, and the sums.

    Args:
        timings: one dict per dataset with ``name``, ``io_s``, ``convert_s``, ``samples`` and the keys of
            :func:`collect_sample_stats` (what is missing counts as zero); or a dict from name to these.
        wall_time: seconds from start to end.
        total_samples: examples that came out.
        rank: put in front where several ranks log to one place.
    """
    if isinstance(timings, Mapping):
        timings = [{"name": name, **timing} for name, timing in timings.items()]
    logger.info("%s", loading_summary(list(timings), wall_time, total_samples, rank))


def loading_summary(
    timings: list[Mapping[str, Any]], wall_time: float, total_samples: int, rank: int | None = None
) -> str:
    """The table of :func:`log_dataset_loading_summary` as text."""
    slowest_first = sorted(timings, key=lambda timing: (-_seconds(timing), timing["name"]))
    rows = [_cells(timing["name"], timing) for timing in slowest_first]
    total = {name: sum(timing.get(name, 0) for timing in timings) for name in _SUMMED}
    rows.append(_cells("all", total | {"samples": total_samples}))
    work = _seconds(total)
    parallel = work / wall_time if wall_time > 0 else 0.0
    where = "" if rank is None else f"rank {rank}: "
    tokens = total["n_text_tokens"] + total["n_media_tokens"]
    return "\n".join(
        [
            f"{where}{len(timings)} dataset(s), {total_samples:,} samples, about {tokens:,} tokens",
            *_table(rows),
            f"{wall_time:.2f} s wall time, {work:.2f} s of work: {parallel:.1f} at a time",
        ]
    )


_HEAD = ("dataset", "samples", "images", "videos", "text only", "tokens", "I/O s", "convert s", "total s")
_SUMMED = ("io_s", "convert_s", "n_images", "n_videos", "n_text_only", "n_text_tokens", "n_media_tokens")


def _seconds(timing: Mapping[str, Any]) -> float:
    return float(timing.get("io_s", 0) + timing.get("convert_s", 0))


def _cells(name: str, timing: Mapping[str, Any]) -> tuple[str, ...]:
    counts = [timing.get(key, 0) for key in ("samples", "n_images", "n_videos", "n_text_only")]
    tokens = timing.get("n_text_tokens", 0) + timing.get("n_media_tokens", 0)
    seconds = (timing.get("io_s", 0), timing.get("convert_s", 0), _seconds(timing))
    return (name, *(f"{n:,}" for n in (*counts, tokens)), *(f"{s:.2f}" for s in seconds))


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(_HEAD, *rows, strict=True)]

    def line(cells: tuple[str, ...]) -> str:
        numbers = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        return "  ".join(["  " + cells[0].ljust(widths[0]), *numbers])

    rule = "  " + "─" * (sum(widths) + 2 * len(widths) - 2)
    return [line(_HEAD), rule, *map(line, rows[:-1]), rule, line(rows[-1])]
