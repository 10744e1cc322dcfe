"""What every collate function does last: count media, bring pixels to the model's type, shift by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from packhorse.chat import shift_tokens, token_keys
from packhorse.collate.packer import are_pixels, media_keys
from packhorse.collate.processor_call import logger
from packhorse.encode.robust import Batch
from packhorse.errors import BadSample, ConfigError
from packhorse.families import Family
from packhorse.ledger import Ledger, default_ledger
from packhorse.types import Action, Drop, Reason


def row_order(fakes: Sequence[bool], images: Sequence[int], family: Family) -> list[int]:
    """In which order the samples become rows: as they are, or those with a fake image last.

    Models with mRoPE deliver the grids of images to attended image tokens, row by row, to find positions.
    They pass over the hidden tokens of a fake image but not over its grid: the next row's image would get
    that grid, and wrong positions (or the model stops). After the last real image it does no harm.

    Args:
        fakes: whether each sample's image is the fake one.
        images: how many images each sample has.
        family: decides whether that matters.
    """
    order = list(range(len(fakes)))
    first = next((place for place in order if fakes[place]), len(order))
    in_the_way = any(images[place] and not fakes[place] for place in order[first:])
    if not in_the_way or not family.mrope:
        return order
    return sorted(order, key=lambda place: fakes[place])


class Counts(NamedTuple):
    """How many media each row of a batch has."""

    images: Sequence[int] = ()
    videos: Sequence[int] = ()
    audios: Sequence[int] = ()


def counted(batch: Mapping[str, Any], counts: Counts) -> dict[str, Any]:
    """The batch with ``n_images_per_sample`` [B] and its like, each where there is any such media item."""
    result = dict(batch)
    for kind, numbers in counts._asdict().items():
        if any(numbers):
            result[f"n_{kind}_per_sample"] = torch.tensor(numbers)
    return result


def cast_pixels(batch: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """The batch with its pixels as ``dtype``; masks, grids and sound stay as they are, all with None."""
    result = dict(batch)
    for key, value in batch.items():
        if dtype is not None and isinstance(value, torch.Tensor) and are_pixels(key, value.dtype):
            result[key] = value.to(dtype)
    return result


def shifted(batch: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The autoregressive shift of labels and of every tensor per token; what is shifted is contiguous.

    Losses of transformers take ``shift_labels`` that can be viewed as one row.
    """
    result = shift_tokens(batch, media_keys(family))
    return with_shift_labels(
        {key: value if value is batch[key] else value.contiguous() for key, value in result.items()}
    )


def with_shift_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with its labels, which are shifted already, also as ``shift_labels``.

    A model of transformers computes a loss if ``labels`` are given, and does not shift them where it is given
    ``shift_labels``. It is the same tensor, so a change in place is a change of both.
    """
    return {**batch, "shift_labels": batch["labels"]}


def per_token(batch: Mapping[str, Any], family: Family) -> list[str]:
    """Keys of tensors with an entry for each token, those that only this processor has included."""
    return token_keys(batch, media_keys(family))


@dataclass(frozen=True, slots=True)
class Records:
    """Where the losses of a batch are written; without a ledger, into the process's own."""

    ledger: Ledger | None = None
    epoch: int | None = None

    def record(self, key: str, reason: Reason, detail: str, action: Action = "dropped") -> None:
        """Log and record what became of a sample; an empty key counts it without naming it."""
        logger.warning("%s %s: %s", key or "a sample", action.replace("_", " "), detail)
        ledger = default_ledger() if self.ledger is None else self.ledger
        dataset = key.rpartition("/")[0]
        ledger.record(Drop(key, "collate", reason, detail, action, dataset, self.epoch))


def check_present(examples: Sequence[Any]) -> None:
    """Refuse a batch in which samples are missing.

    Raises:
        ConfigError: it says what to do.
    """
    missing = [place for place, example in enumerate(examples) if example is None]
    if missing:
        raise ConfigError(
            f"sample {missing[0]} of the batch is None, as a dataset with on_bad='skip' gives it: wrap the "
            "collate function, collate_fn=dataset.robust_collate(collate_fn)"
        )


def records_of(examples: Sequence[Any]) -> Records:
    """Where the losses of these examples belong."""
    return Records(examples.ledger, examples.epoch) if isinstance(examples, Batch) else Records()


def keys_of(examples: Sequence[Any]) -> Sequence[str]:
    """The names of the examples, empty where nobody knows."""
    return examples.keys if isinstance(examples, Batch) else [""] * len(examples)


@contextmanager
def named(key: str) -> Iterator[None]:
    """Give the sample's key to a :class:`BadSample` that does not say which sample it is about."""
    try:
        yield
    except BadSample as error:
        if error.key or not key:
            raise
        raise error.with_key(key) from error
