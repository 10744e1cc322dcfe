"""Who is who in a batch: the keys of its samples, and the ledger that their losses are written into.

A batch that comes from a dataset of :mod:`packhorse.datasets` brings both; of any other list nothing is
known: losses are counted in the process's own ledger, without a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from packhorse.collate_fns.contract import logger
from packhorse.datasets.robust import Batch
from packhorse.errors import BadSample, ConfigError
from packhorse.ledger import Ledger, default_ledger
from packhorse.types import Action, Drop, Reason


@dataclass(frozen=True, slots=True)
class Records:
    """Where the losses of a batch are written; without a ledger, into the process's own."""

    ledger: Ledger | None = None
    epoch: int | None = None

    def record(self, key: str, reason: Reason, detail: str, action: Action = "left_out") -> None:
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
        raise BadSample(error.detail, reason=error.reason, key=key, stage=error.stage) from error
