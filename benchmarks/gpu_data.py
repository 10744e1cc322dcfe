"""Model and data of ``gpu_train.py`` and ``gpu_ablation.py``: a Qwen3-VL, its processor, photographs, chats.

Everything is made from a seed, nothing is downloaded. Lengths are spread as in mixtures for fine-tuning: most
rows are short, few are long, a third has no image, and a few have many. Writing a thousand rows and their
JPEG files takes some ten seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

import packhorse
from packhorse import PreTokenizedDatasetWrapper, World, open_meta_dataset
from packhorse.collate_fns import pad_collate_fn
from packhorse.integrations.attention import use_attention
from packhorse.integrations.transformers import prepare
from words import SPECIAL

Batch = dict[str, Any]

_PATCH, _MERGE = 16, 2  # of Qwen3-VL: a token stands for 32 x 32 pixels
_PIXELS_OF_TOKEN = (_PATCH * _MERGE) ** 2
_VOWELS, _CONSONANTS = "aeio", "bdfgklmnprst"
_SYLLABLES = tuple(consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS)
_SENTENCE = 12  # words


@dataclass(frozen=True)
class DataShape:
    """Distribution of the rows.

    Attributes:
        rows: how many.
        text: mean words of a row's text; drawn log-normally with this ``spread``.
        spread: of the logarithm.
        longest: tokens of a row, at most: text is cut for it, images are not.
        smallest: edge of an image in pixels, and ``largest``.
        largest: see there.
        text_only: share of rows without an image; ``several``: with two to four small ones; ``heavy``: with
            five to eight. The others have one.
        several: see there.
        heavy: see there.
    """

    rows: int = 1280
    text: float = 300.0
    spread: float = 1.25
    longest: int = 3072
    smallest: int = 224
    largest: int = 1024
    text_only: float = 0.3
    several: float = 0.12
    heavy: float = 0.03


def tiny_shape(rows: int) -> DataShape:
    """Return a small version for a CPU."""
    return DataShape(rows=rows, text=24.0, spread=0.9, longest=160, smallest=64, largest=160, heavy=0.08)


def write_rows(folder: Path, shape: DataShape, seed: int = 0) -> Path:
    """Write the images and a JSONL with a chat per row; return the meta file."""
    rng = np.random.default_rng(seed)
    words = _lexicon(rng)
    images: list[tuple[Path, int, int]] = []
    lines = []
    for _ in range(shape.rows):
        sizes = _image_sizes(rng, shape)
        names = [f"{len(images) + number}.jpg" for number in range(len(sizes))]
        images += [(folder / name, *size) for name, size in zip(names, sizes, strict=True)]
        free = shape.longest - sum(width * height // _PIXELS_OF_TOKEN for width, height in sizes)
        drawn = shape.text * np.exp(rng.normal(-(shape.spread**2) / 2, shape.spread))
        turns = _turns(rng, words, int(min(max(drawn, 8.0), max(8.0, 0.7 * free))), len(names))
        lines.append(json.dumps({"messages": turns, "images": names}))
    with ThreadPoolExecutor() as pool:  # drawing and compressing run outside of Python's lock
        list(pool.map(_save_image, *zip(*images, strict=True)))
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    meta = folder / "meta.json"
    meta.write_text(json.dumps({"chats": {"file_name": "chats.jsonl", "media_dir": "."}}))
    return meta


def _lexicon(rng: np.random.Generator) -> list[str]:
    parts = rng.integers(0, len(_SYLLABLES), (1500, 4))
    lengths = rng.integers(1, 5, 1500)
    made = ("".join(_SYLLABLES[at] for at in row[:n]) for row, n in zip(parts, lengths, strict=True))
    return sorted(set(made))


def _image_sizes(rng: np.random.Generator, shape: DataShape) -> list[tuple[int, int]]:
    """Return image sizes: most are small, some large; rows with several images have small ones."""
    kind = rng.random()
    low, span = shape.smallest, shape.largest - shape.smallest
    if kind < shape.text_only:
        return []
    if kind < shape.text_only + shape.several:
        number, most = int(rng.integers(2, 5)), low + span // 5
    elif kind < shape.text_only + shape.several + shape.heavy:
        number, most = int(rng.integers(5, 9)), low + span // 3
        low += span // 5
    else:
        number, most = 1, low + span * int(rng.choice((2, 5, 10), p=(0.6, 0.3, 0.1))) // 10
    edges = rng.integers(low, most + 1, (number, 2))
    return [(int(width), int(height)) for width, height in edges]


def _save_image(path: Path, width: int, height: int) -> None:
    """Return soft colours with noise, which compress like a photograph."""
    rng = np.random.default_rng(int(path.stem))
    small = rng.integers(0, 256, (max(2, height // 24), max(2, width // 24), 3), dtype=np.uint8)
    soft = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    grain = rng.integers(0, 24, (height, width, 1), dtype=np.uint8)
    grained = np.clip(np.asarray(soft).astype(np.int16) + grain - 12, 0, 255).astype(np.uint8)
    Image.fromarray(grained).save(path, quality=88)


def _turns(rng: np.random.Generator, words: Sequence[str], total: int, images: int) -> list[dict[str, str]]:
    """Return a chat of ``words`` words in one to four rounds; a third of them in questions."""
    rounds = min(int(rng.integers(1, 5)), max(1, total // 24))
    turns: list[dict[str, str]] = []
    for _ in range(rounds):
        for role, share in (("user", 0.33), ("assistant", 0.67)):
            text = _sentences(rng, words, max(2, int(total * share / rounds)))
            turns.append({"role": role, "content": ("<image>" * images if not turns else "") + text})
    return turns


def _sentences(rng: np.random.Generator, words: Sequence[str], number: int) -> str:
    chosen = [words[at] for at in rng.integers(0, len(words), number)]
    parts = [" ".join(chosen[at : at + _SENTENCE]) for at in range(0, number, _SENTENCE)]
    return ". ".join(parts) + "."


# --- the processor ------------------------------------------------------------------------------------------


def make_processor(meta: Path, shape: DataShape) -> Any:
    """Return transformers' Qwen3-VL processor, with a tokenizer trained on the words of the rows.

    Without torchvision, transformers takes its image processor that works with Pillow. Its video processor
    needs torchvision; an object of its base class replaces it, with its usual numbers.
    """
    import transformers

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from contract.chat_templates import TEMPLATES

    size = {"shortest_edge": shape.smallest**2, "longest_edge": 16_777_216}
    usual = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    if importlib.util.find_spec("torchvision") is not None:
        video = transformers.Qwen3VLVideoProcessor()
    else:
        video = object.__new__(transformers.BaseVideoProcessor)
        video.__dict__ |= {"fps": 2.0, "min_frames": 4, "max_frames": 768, "temporal_patch_size": 2}
    return transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(size=size, patch_size=_PATCH, **usual),
        video_processor=video,
        tokenizer=_tokenizer(meta),
        chat_template=TEMPLATES["qwen3_vl"],
    )


def _tokenizer(meta: Path) -> Any:
    import tokenizers
    import transformers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=4096, initial_alphabet=alphabet, show_progress=False)
    rows = map(json.loads, (meta.parent / "chats.jsonl").read_text(encoding="utf-8").splitlines())
    model.train_from_iterator((turn["content"] for row in rows for turn in row["messages"]), trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL),
    )


# --- the model ----------------------------------------------------------------------------------------------


def make_model(processor: Any, quick: bool, device: str, vocabulary: int = 32_768) -> Any:
    """Return Qwen3-VL with random weights, large enough that attention changes the logits.

    Its vocabulary is smaller if ``quick``.
    """
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text: dict[str, Any] = {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "vocab_size": vocabulary,
    }
    text |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "initializer_range": 0.04}
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "depth": 24, "num_heads": 16}
    deep, sections = [5, 11, 17], [24, 20, 20]
    if quick:
        text |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 8192}
        text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.1}
        vision = {"hidden_size": 64, "intermediate_size": 128, "depth": 2, "num_heads": 4}
        deep, sections = [0], [4, 2, 2]
    rope = {"rope_type": "default", "rope_theta": 5_000_000.0, "mrope_section": sections}
    words = processor.tokenizer
    ids = {
        f"{name}_token_id": words.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in (
            *(("image", "image_pad"), ("video", "video_pad")),
            *(("vision_start", "vision_start"), ("vision_end", "vision_end")),
        )
    }
    ends = {"bos_token_id": None, "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    config = Qwen3VLConfig(
        text_config={
            **text,
            **ends,
            "rope_parameters": {**rope, "mrope_interleaved": True},
            "use_cache": False,
        },
        vision_config={**vision, "out_hidden_size": text["hidden_size"], "deepstack_visual_indexes": deep},
        tie_word_embeddings=False,
        **ids,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if quick else torch.bfloat16)  # rotary angles stay in float32
    try:
        with torch.device(device):
            return Qwen3VLForConditionalGeneration(config).train()
    finally:
        torch.set_default_dtype(before)


# --- batches ------------------------------------------------------------------------------------------------


class Fed(NamedTuple):
    """A batch, its real tokens, and the seconds that a worker took to build it (0 if unknown)."""

    batch: Batch
    tokens: int
    build: float


@dataclass(frozen=True)
class Setup:
    """Settings shared by all methods of training."""

    options: argparse.Namespace
    device: str
    meta: Path
    processor: Any
    counts: Any
    model: Any

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and pixels."""
        found: torch.dtype = self.model.dtype
        return found

    def synchronize(self) -> None:
        """Wait until the GPU has finished."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def load_batches(setup: Setup, **settings: Any) -> Iterator[Fed]:
    """Yield the batches of an epoch, from the loader."""
    loader = make_loader(setup, **settings)
    try:
        for batch in loader:
            yield Fed(batch, batch.info.tokens, batch.info.seconds)
    finally:
        loader.close()


def make_loader(setup: Setup, **settings: Any) -> packhorse.Loader:
    """Return the loader; all packs have the same size, to avoid recompilation."""
    options = setup.options
    usual: dict[str, Any] = {
        "pack_size": options.pack,
        "num_workers": options.num_workers,
        "pin_memory": setup.device == "cuda",
        "on_bad": "raise",
        "effort": 0 if importlib.util.find_spec("scipy") is None else None,
        "pad_to_size": settings.get("mode") != "pad",
    }
    return packhorse.load(
        str(setup.meta),
        setup.processor,
        model=setup.model,
        world=World(),
        counts=setup.counts,
        **(usual | settings),
    )


def padded_at_random(setup: Setup, size: int) -> Iterator[Fed]:
    """Yield batches of a shuffled DataLoader, padded to their longest sample."""
    options = setup.options
    batches = DataLoader(
        encode_samples(setup),
        batch_size=size,
        shuffle=True,
        num_workers=options.num_workers,
        prefetch_factor=2 if options.num_workers else None,
        collate_fn=partial(pad_samples, setup.processor, setup.dtype),
        pin_memory=setup.device == "cuda",
        generator=torch.Generator().manual_seed(1),
    )
    for batch in batches:
        yield Fed(batch, int(batch["attention_mask"].sum()), 0.0)


def encode_samples(setup: Setup) -> PreTokenizedDatasetWrapper:
    """Return a dataset of single samples."""
    rows = open_meta_dataset(str(setup.meta))
    return PreTokenizedDatasetWrapper(rows, setup.processor, inject_fake_images=False, on_bad="raise")


def pad_samples(processor: Any, dtype: torch.dtype, samples: list[Batch]) -> Batch:
    """Return a padded batch."""
    return pad_collate_fn(samples, processor, pixel_dtype=dtype)


def patches(batch: Batch) -> int:
    """Return the patches of all images of a batch."""
    return len(batch["pixel_values"]) if "pixel_values" in batch else 0


def set_attention(setup: Setup, backend: str) -> None:
    """Set the attention as a user does; on a CPU flex attention has no backward pass.

    The model computes all logits, as without Packhorse; ``gpu_ablation.py`` measures what fewer ones save.
    """
    if setup.device == "cpu" and backend == "flex_attention":
        use_attention(setup.model, backend)
    else:
        prepare(setup.model, backend, logits="all")
