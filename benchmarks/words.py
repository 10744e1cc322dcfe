"""Generated text and a tokenizer trained on it, as large as real ones, without a download.

Word frequencies follow those of natural text (few frequent words, many rare ones). A byte-level BPE of 30,000
entries, trained on such text in seconds, needs about 1.3 tokens per word, as released tokenizers do for
English. It splits text into words by the pattern of Qwen2 to Qwen3: counting is fast with patterns of that
kind (also Llama 3's) and encodes every text with others.
"""

from __future__ import annotations

import random
import sys
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

ENTRIES = 30_000
SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_ENDS = (".", ",", "?", ".\n", ".\n\n-", " (", ")", ': "', " 42")


class Text:
    """An endless source of text; the same seed gives the same text."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.pool = self.rng.choices(*_dictionary(), k=500_000)

    def words(self, count: int) -> str:
        """Return a text of ``count`` words with punctuation."""
        start = self.rng.randrange(len(self.pool) - count)
        words = self.pool[start : start + count]
        for index in range(7, count, 9):
            words[index] += self.rng.choice(_ENDS)
        return " ".join(words).replace("\n ", "\n").capitalize() + "."


@cache
def _dictionary() -> tuple[list[str], list[float]]:
    """Return words and their frequencies."""
    rng = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(rng.choices(letters, range(26, 0, -1), k=rng.randint(2, 10))) for _ in range(40_000)]
    return words, [1 / (rank + 3) for rank in range(len(words))]


@cache
def trained_tokenizer() -> Any:
    """Train a tokenizer of 30,000 entries (some seconds); the same object at every call."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from contract.tiny_tokenizers import use_bytes_of_words
    from packhorse.count.token_counter import QWEN2_PATTERN

    model = Tokenizer(models.BPE())
    model.normalizer = normalizers.NFC()
    use_bytes_of_words(model, QWEN2_PATTERN)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=ENTRIES, initial_alphabet=alphabet, show_progress=False)
    text = Text(seed=1)  # not the text that is counted later
    model.train_from_iterator((text.words(120) for _ in range(8_000)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL),
    )


def qwen2_vl(tokenizer: Any | None = None) -> Any:
    """Return transformers' Qwen2-VL processor with the pixel budget of the released models."""
    from contract.chat_templates import TEMPLATES
    from contract.torchvision_ops import make_torchvision_importable

    make_torchvision_importable()
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(
            size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}, patch_size=14
        ),
        video_processor=Qwen2VLVideoProcessor(
            size={"shortest_edge": 4 * 28 * 28, "longest_edge": 28 * 28 * 64}
        ),
        tokenizer=trained_tokenizer() if tokenizer is None else tokenizer,
        chat_template=TEMPLATES["qwen2_vl"],
    )
