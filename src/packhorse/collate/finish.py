"""Steps that all collate functions share: count media, cast pixels, shift labels, record losses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from logging import getLogger
from typing import Any

import torch

from packhorse.chat import IGNORE_INDEX, shift_tokens
from packhorse.collate.packer import media_keys
from packhorse.encode.robust import SampleBatch
from packhorse.errors import BadSample, ConfigError
from packhorse.families import Family
from packhorse.ledger import Ledger, default_ledger
from packhorse.types import MEDIA_KINDS, Action, Drop, MediaKind, Reason

logger = getLogger("packhorse.collate_fns")


def row_order(fakes: Sequence[bool], images: Sequence[int], family: Family) -> list[int]:
    """Return the order in which samples become rows: unchanged, or samples with a fake image last.

    Models with mRoPE assign image grids to attended image tokens, row by row. They skip the hidden tokens of
    a fake image but not its grid, so the image of the next row would get that grid and wrong positions. After
    the last real image the grid of a fake image does no harm. Other families keep the order.
    """
    order = list(range(len(fakes)))
    first = next((index for index in order if fakes[index]), len(order))
    image_follows = any(images[index] and not fakes[index] for index in order[first:])
    return sorted(order, key=lambda index: fakes[index]) if image_follows and family.mrope else order


def add_counts(batch: Mapping[str, Any], items: Sequence[Mapping[MediaKind, int]]) -> dict[str, Any]:
    """Add ``n_images_per_sample`` [B], ``n_videos_per_sample`` and ``n_audios_per_sample``, if not all 0."""
    result = dict(batch)
    for kind in MEDIA_KINDS:
        numbers = [row.get(kind, 0) for row in items]
        if any(numbers):
            result[f"n_{kind}s_per_sample"] = torch.tensor(numbers)
    return result


def shift_batch(batch: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Shift labels and every tensor per token by one.

    The results are contiguous: losses of transformers view ``shift_labels`` as one row.
    """
    result = shift_tokens(batch, media_keys(family))
    return finish_labels(
        {key: value if value is batch[key] else value.contiguous() for key, value in result.items()}
    )


def finish_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Add the labels, which are shifted already, as ``shift_labels``; remove loss weights that are all 1.

    A model of transformers computes a loss if it gets ``labels`` and does not shift them if it gets
    ``shift_labels``. Both are the same tensor, so changing one in place changes the other.
    """
    result = {**batch, "shift_labels": batch["labels"]}
    weights = result.get("loss_weights")
    if weights is not None and bool((weights == 1).all()):
        del result["loss_weights"]
    return result


@dataclass(frozen=True, slots=True)
class Records:
    """The ledger that a batch's losses are written to; None is the ledger of the process."""

    ledger: Ledger | None = None
    epoch: int | None = None

    def record(self, key: str, reason: Reason, detail: str, action: Action = "dropped") -> None:
        """Log and record what happened to a sample; an empty key counts it without naming it."""
        logger.warning("%s %s: %s", key or "a sample", action, detail)
        ledger = default_ledger() if self.ledger is None else self.ledger
        ledger.record(Drop.from_key(key, "collate", reason, detail, action, epoch=self.epoch))

    def record_unsupervised(self, labels: Sequence[torch.Tensor], keys: Sequence[str]) -> None:
        """Record each sample without a supervised token."""
        for row, key in zip(labels, keys, strict=True):
            if bool((row == IGNORE_INDEX).all()):
                self.record(key, "nothing_supervised", "no token of it is supervised", "kept")


def check_present(examples: Sequence[Any]) -> None:
    """Raise :class:`ConfigError` if a sample of the batch is None."""
    missing = [index for index, example in enumerate(examples) if example is None]
    if missing:
        what = f"sample {missing[0]} of the batch is None, as on_bad='skip' returns it: write "
        raise ConfigError(f"{what}collate_fn=dataset.robust_collate(collate_fn)", setting="collate_fn")


def records_of(examples: Sequence[Any]) -> Records:
    """Return where the losses of these examples are recorded."""
    return Records(examples.ledger, examples.epoch) if isinstance(examples, SampleBatch) else Records()


def keys_of(examples: Sequence[Any]) -> Sequence[str]:
    """Return the keys of the examples, empty if unknown."""
    return examples.keys if isinstance(examples, SampleBatch) else [""] * len(examples)


@contextmanager
def sample_key(key: str) -> Iterator[None]:
    """Add the sample's key to a :class:`BadSample` that has none."""
    try:
        yield
    except BadSample as error:
        if error.key or not key:
            raise
        raise error.with_key(key) from error
