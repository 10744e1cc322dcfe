"""How much room a sample of an encoding dataset will take in a pack, counted before it is encoded.

The counter of :mod:`packhorse.tokens.count` gives the exact length from the text and the headers of media:
some 30 microseconds a sample, and once in a process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from packhorse.conversation import parse_conversation
from packhorse.datasets.prepare import with_sound_in_place
from packhorse.datasets.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import DATA_ERRORS, BadSample, is_data_error
from packhorse.media import inject_fake_image
from packhorse.tokens.count import TokenCounter
from packhorse.types import Conversation

_UNKNOWN = -1


class Claims:
    """Lengths of samples, before the shift, as far as they can be had without encoding.

    Args:
        dataset: the encoding dataset.
        encode: where lengths cannot be counted, encode samples to learn them (dear: each is encoded again
            for every pack that has to know).
    """

    def __init__(self, dataset: Any, *, encode: bool = False) -> None:
        self.dataset, self.encode = dataset, encode
        self.countable = _countable(dataset)
        self._known: np.ndarray[Any, Any] | None = None
        self._counter: TokenCounter | None = None

    @property
    def can_tell(self) -> bool:
        """Whether lengths can be had at all."""
        return self.countable or self.encode

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """The tokens of each sample; 0 for one that cannot be used."""
        if self._known is None:
            self._known = np.full(len(self.dataset), _UNKNOWN, np.int32)
        for index in indices:
            if self._known[index] == _UNKNOWN:
                self._known[index] = self._counted(index) if self.countable else self._encoded(index)
        return [int(self._known[index]) for index in indices]

    def total(self, index: int) -> int:
        """The tokens of a sample before anything is cut or refused; 0 if it cannot be encoded.

        Only where samples are ``countable``.
        """
        if self._counter is None:
            self._counter = TokenCounter(self.dataset.family, self.dataset.processor)
        try:
            return self._counter.count(self._conversation(index)).count.total
        except DATA_ERRORS as error:
            if not is_data_error(error):
                raise
            return 0  # encoding it fails too, and says why

    def _counted(self, index: int) -> int:
        total, limit = self.total(index), self.dataset.max_length
        if limit is None or total <= limit:
            return total
        return int(limit) if self.dataset.truncate else 0

    def _conversation(self, index: int) -> Conversation:
        """What is encoded for a sample, its fake image included."""
        dataset, key = self.dataset, self.dataset.key(index)
        example = with_sound_in_place(dataset.dataset[index], dataset.family, dataset.processor, key)
        if dataset.inject_fake_images and "image" in dataset.family.kinds:
            example = inject_fake_image(example)
        return parse_conversation(example, key)

    def _encoded(self, index: int) -> int:
        try:
            sample = load(self.dataset, index)
        except DATA_ERRORS as error:
            if not is_data_error(error):
                raise
            return 0
        return len(sample["input_ids"].reshape(-1))

    def __getstate__(self) -> dict[str, Any]:
        # What was counted is counted again where it is needed: cheaper than sending it to every worker.
        return {**self.__dict__, "_known": None, "_counter": None}


def load(dataset: Any, index: int) -> Any:
    """One sample, without the replacement that a dataset of ours would choose for one that fails.

    Raises:
        BadSample: the dataset gives None for it.
    """
    own = getattr(dataset, "load", None)
    sample = own(index) if callable(own) else dataset[index]
    if sample is None:
        raise BadSample("the dataset gives no sample", reason="sample_failed", stage="encode")
    return sample


def _countable(dataset: Any) -> bool:
    if not isinstance(dataset, PreTokenizedDatasetWrapper):
        return False
    return bool(dataset.family.exact) and dataset.post_tokenize_hook is None
