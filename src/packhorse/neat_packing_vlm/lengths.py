"""How long the samples of a dataset are, as the planner is told: counted where that was done, else estimated.

Nothing is encoded and no medium is opened: some 6 microseconds a row, or none where ``packhorse count`` has
counted the files.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packhorse.conversation import parse_conversation
from packhorse.datasets.count_columns import CountColumns
from packhorse.datasets.count_part import as_processor
from packhorse.datasets.lengths import Ints, examples_at, recorded_counts
from packhorse.datasets.robust import ReplacingDataset
from packhorse.datasets.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import BadSample, ConfigError
from packhorse.media import inject_fake_image
from packhorse.tokens.count import TokenCounter
from packhorse.tokens.estimate import estimate, image_config, outline, video_config

_PLAIN = [
    {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "So."}]},
]


class Lengths(NamedTuple):
    """What the planner is told.

    Attributes:
        tokens: of each sample, before the shift; 0 where the row cannot be read.
        visual: those of its media.
        exact: whether all are what the processor makes.
        counts: what they were taken from; None where they are estimated.
    """

    tokens: Ints
    visual: Ints
    exact: bool
    counts: CountColumns | None = None


def lengths_of(
    dataset: Any, ds_raw: Any = None, processor: Any = None, counts: CountColumns | None = None
) -> Lengths:
    """The lengths of a dataset's samples.

    Args:
        dataset: encodes them.
        ds_raw: their rows; without it what one of Packhorse's own wrappers wraps, or the dataset itself (any
            other wrapper is asked for all of its samples, which may encode them).
        processor: for the geometry of media and to find counts; without it the dataset's.
        counts: exact counts of the rows.

    Raises:
        ConfigError: rows or counts are not as many as samples.
    """
    # Only these are known to have the samples of what they wrap, in its order: a Subset has others.
    wrapped = dataset.dataset if isinstance(dataset, ReplacingDataset) else dataset
    raw = wrapped if ds_raw is None else ds_raw
    processor = getattr(dataset, "processor", None) if processor is None else processor
    processor = as_processor(processor)
    counts = recorded_counts(raw, processor) if counts is None else counts
    for what, found in (("ds_raw", raw), ("counts", counts)):
        if found is not None and len(found) != len(dataset):
            raise ConfigError(f"{what} has {len(found):,} rows for a dataset of {len(dataset):,} samples")
    if counts is None:
        tokens, visual, plain = _estimated(raw, processor)
        exact = False
    else:
        tokens, visual = counts.total, counts.image + counts.video + counts.audio
        plain = (counts.images + counts.videos == 0) & counts.ok
        exact = bool(counts.exact[counts.ok].all())
    fake = _fake_image(dataset) if plain.any() else 0
    if fake:
        # Where its newlines melt with the text's the fake image takes a token more or less.
        tokens, exact = tokens + fake * plain, False
    if isinstance(dataset, PreTokenizedDatasetWrapper):
        exact = exact and dataset.post_tokenize_hook is None
        limit = dataset.max_length
        if dataset.truncate and limit is not None and (tokens > limit).any():
            # Whole turns are cut, so these have at most so many.
            tokens, visual, exact = np.minimum(tokens, limit), np.minimum(visual, limit), False
    return Lengths(tokens, visual, exact, counts)


def _estimated(raw: Any, processor: Any) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
    image_cfg, video_cfg = image_config(processor), video_config(processor)
    tokens, visual = np.zeros(len(raw), np.int64), np.zeros(len(raw), np.int64)
    plain = np.zeros(len(raw), bool)
    for place, row in examples_at(raw, np.arange(len(raw), dtype=np.int64)):
        if row is None:
            continue  # it cannot be read
        if row.get("input_ids") is not None:
            tokens[place] = np.asarray(row["input_ids"]).size
            continue
        found, seen = estimate(row, image_cfg, video_cfg), outline(row)
        tokens[place], visual[place] = found.text + found.media, found.media
        plain[place] = seen.images + seen.videos == 0
    return tokens, visual, plain


def _fake_image(dataset: Any) -> int:
    """How many tokens the fake image adds to a sample without pictures; 0 where none is added."""
    if not isinstance(dataset, PreTokenizedDatasetWrapper) or not dataset.inject_fake_images:
        return 0
    family = dataset.family
    if "image" not in family.kinds:
        return 0
    counter = TokenCounter(family, dataset.processor)
    example: dict[str, Any] = {"conversation": _PLAIN}
    with suppress(BadSample):  # a template that wants other turns: the packs find room for what it adds
        with_it, without = (
            counter.count(parse_conversation(shown, "")).count.total
            for shown in (inject_fake_image(example), example)
        )
        return with_it - without
    return 0
