"""What the examples share: a tiny Qwen2-VL with random weights, its processor, and the demo's data.

Nothing is downloaded.
In your own script these are ``AutoProcessor.from_pretrained(name)``,
``AutoModelForImageTextToText.from_pretrained(name)`` and the path of your meta file.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{%- set content = message['content'] %}
{{ '' }}
{%- if content is string %}{{ content }}
{%- else %}
{%- for part in content %}
{%- if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>
{%- else %}{{ part['text'] }}
{%- endif %}
{%- endfor %}
{%- endif %}<|im_end|>
{{ '' }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{{ '' }}
{%- endif -%}
"""


def tiny_processor() -> Any:
    """Transformers' own Qwen2-VL processor with a tokenizer of 256 bytes and the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
    )

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(_SPECIAL),
    )
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16}),
        video_processor=Qwen2VLVideoProcessor(
            size={"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 8}
        ),
        tokenizer=tokenizer,
        chat_template=_CHAT_TEMPLATE,
    )


def tiny_model(processor: Any, seed: int = 0, layers: int = 2) -> Any:
    """A Qwen2-VL of a few layers of width 64; a step takes a fraction of a second on a CPU."""
    import torch
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    words = processor.tokenizer
    ids = {
        f"{name}_token_id": words.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in {
            "image": "image_pad",
            "video": "video_pad",
            "vision_start": "vision_start",
            "vision_end": "vision_end",
        }.items()
    }
    text = {
        "vocab_size": len(words),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
        "bos_token_id": None,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
    }
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **ids))


def demo_meta(folder: Path) -> Path:
    """The meta file of the demo's data; written by the first process of the machine, the others wait."""
    from filelock import FileLock

    from packhorse.cli.demo_data import write_demo_data

    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if not (folder / "meta.json").exists():
            write_demo_data(folder)
    return folder / "meta.json"


def arguments(description: str | None) -> argparse.ArgumentParser:
    """What all training examples take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path, help="data, checkpoints and traces go here")
    parser.add_argument("--meta", type=Path, help="a meta file of your own; without it the demo's data")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--pack-size", type=int, default=512)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=2, help="steps of the optimizer")
    parser.add_argument("--stop-after", type=int, help="stop after so many steps, as if interrupted")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    return parser


def demo_loader(options: argparse.Namespace, processor: Any, model: Any) -> Traced:
    """The loader that the options ask for."""
    import packhorse

    loader = packhorse.load(
        options.meta or demo_meta(options.folder / "data"),
        processor,
        model=model,
        pack_size=options.pack_size,
        accumulation=options.accumulation,
        workers=options.workers,
        ledger_dir=options.folder / "ledger",
        max_bad_share=0.1,  # three rows of the demo's data are broken on purpose
    )
    return Traced(loader, options.folder)


class Traced:
    """A loader that writes down what was trained: each step's loss and this rank's samples."""

    def __init__(self, loader: Any, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._loader, self._path = loader, folder / f"trace-{loader.world.rank}.jsonl"
        self._keys: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._noted(iter(self._loader))

    def _noted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._keys += [self.key(index) for index in self.last.samples]
            yield batch

    def trained(self, step: int, loss: float) -> None:
        """A step of the optimizer was made with the batches handed out since the last one."""
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, "loss": loss, "samples": self._keys}) + "\n")
        self._keys = []


def write_whole(path: Path, text: str) -> None:
    """Write a file so that nobody ever sees half of it."""
    half = path.with_name(f".{path.name}")
    half.write_text(text)
    os.replace(half, path)
