"""Generate the demo's data (charts, short videos, text chats, a few broken rows) and its tiny model."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from packhorse.errors import require

_COLOURS = {"red": (208, 64, 56), "green": (66, 148, 92), "blue": (58, 104, 188), "ochre": (204, 152, 48)}


def write_demo_mix(folder: Path, seed: int = 0) -> Path:
    """Fill ``folder`` with four datasets that are enough to train on, and return their meta file.

    100 chart questions, 100 questions about drawings (one to three per row), 10 clip questions, 140 text
    chats of very different lengths. Seven rows have errors: a line that is not JSON, a truncated image, a
    question with one ``<image>`` too many, a missing drawing, a truncated video, a chat that is too long for
    any pack, and a duplicate.
    """
    rng = random.Random(seed)
    media = folder / "media"
    media.mkdir(parents=True, exist_ok=True)
    _write_charts(folder / "charts.jsonl", media, rng, 100)
    _write_drawings(folder / "drawings.jsonl", media, rng, 100)
    _write_clips(folder / "clips.jsonl", media, rng, range(12, 72, 6))
    clip = media / "clip5.mp4"
    clip.write_bytes(clip.read_bytes()[:600])
    _write_long_chats(folder / "chats.jsonl", rng, 140)
    meta: dict[str, Any] = {
        name: {"file_name": f"{name}.jsonl", "media_dir": "media"} for name in ("charts", "drawings", "clips")
    }
    return _write_meta(folder, meta | {"chats": {"file_name": "chats.jsonl"}})


def _write_meta(folder: Path, meta: dict[str, Any]) -> Path:
    path = folder / "meta.json"
    path.write_text(json.dumps(meta, indent=2) + "\n")
    return path


def _write_charts(path: Path, media: Path, rng: random.Random, rows: int = 24) -> None:
    lines = []
    for number in range(rows):
        name = f"chart{number:02}.png"
        values = {colour: rng.randint(5, 95) for colour in _COLOURS}
        _draw_chart(values, rng.choice([160, 224, 320])).save(media / name)
        highest = max(values, key=values.__getitem__)
        lines.append(_row("<image>Which bar is the highest?", f"The {highest} one.", images=[name]))
    lines[7] = lines[7][: len(lines[7]) // 2]  # no longer JSON
    chart = media / "chart13.png"
    chart.write_bytes(chart.read_bytes()[:200])
    lines[19] = lines[19].replace("<image>", "<image><image>")  # one image, two placeholders
    path.write_text("\n".join(lines) + "\n")


def _draw_chart(values: dict[str, int], size: int) -> Image.Image:
    image = Image.new("RGB", (size, size * 3 // 4), (250, 248, 242))
    draw = ImageDraw.Draw(image)
    width = size // (2 * len(values))
    for number, (colour, value) in enumerate(values.items()):
        left = width // 2 + number * 2 * width
        top = image.height - value * (image.height - 10) // 100
        draw.rectangle((left, top, left + width, image.height - 1), fill=_COLOURS[colour])
    return image


def _write_drawings(path: Path, media: Path, rng: random.Random, rows: int) -> None:
    lines = []
    for number in range(rows):
        names, shapes = [], []
        for index in range(rng.choice([1, 1, 1, 2, 3])):
            colour, shape = rng.choice(list(_COLOURS)), rng.choice(["circle", "square", "triangle"])
            names.append(f"drawing{number:02}-{index}.jpg")
            size = rng.choice([(120, 120), (160, 240), (320, 200), (400, 100)])
            drawing = _draw_shape(_COLOURS[colour], shape, size, (rng.random(), rng.random()))
            drawing.save(media / names[-1], quality=90)
            shapes.append(f"a {colour} {shape}")
        answer = f"I see {' and then '.join(shapes)}."
        lines.append(_row("<image>" * len(names) + "What is drawn here?", answer, images=names))
    (media / "drawing31-0.jpg").unlink()
    path.write_text("\n".join(lines) + "\n")


def _draw_shape(
    colour: tuple[int, int, int], shape: str, size: tuple[int, int], position: tuple[float, float]
) -> Image.Image:
    """Draw a shape at a position, which is a share of the free width and height."""
    image = Image.new("RGB", size, (246, 244, 238))
    side = min(size) // 2
    left, top = int((size[0] - side) * position[0]), int((size[1] - side) * position[1])
    box = (left, top, left + side, top + side)
    draw = ImageDraw.Draw(image)
    if shape == "circle":
        draw.ellipse(box, fill=colour)
    elif shape == "square":
        draw.rectangle(box, fill=colour)
    else:
        draw.polygon([(left, box[3]), (box[2], box[3]), (left + side // 2, top)], fill=colour)
    return image


def _write_clips(path: Path, media: Path, rng: random.Random, tops: Sequence[int] = (36,) * 4) -> None:
    """Write a clip for each of ``tops``, the vertical position of its ball."""
    lines = []
    for number, top in enumerate(tops):
        name = f"clip{number}.mp4"
        colour, to_right = rng.choice(list(_COLOURS)), rng.random() < 0.5
        _draw_clip(media / name, _COLOURS[colour], to_right, top)
        answer = f"A {colour} ball rolls to the {'right' if to_right else 'left'}."
        lines.append(_row("<video>What happens?", answer, videos=[name]))
    path.write_text("\n".join(lines) + "\n")


def _draw_clip(path: Path, colour: tuple[int, int, int], to_right: bool, top: int, frames: int = 24) -> None:
    av = require("av", "video")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=12)
        stream.width, stream.height, stream.pix_fmt = 160, 96, "yuv420p"
        for number in range(frames):
            image = Image.new("RGB", (160, 96), (240, 240, 236))
            x = 10 + number * 5
            x = x if to_right else 140 - x
            ImageDraw.Draw(image).ellipse((x, top, x + 24, top + 24), fill=colour)
            for packet in stream.encode(av.VideoFrame.from_ndarray(np.asarray(image), format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def _write_long_chats(path: Path, rng: random.Random, rows: int) -> None:
    """Write chats of one to five questions; most are short and a few are long, as in real datasets."""
    things = ("boat", "market", "garden", "bale of wool", "bridge", "toll gate", "inn", "ford", "lantern")
    lines = []
    for number in range(rows):
        turns = [{"role": "system", "content": "You are a patient guide."}] if rng.random() < 0.5 else []
        for _ in range(rng.choice([1, 1, 1, 2, 3, 5])):
            thing = rng.choice(things)
            sentences = rng.randint(1, 4)
            answer = " ".join(f"The {rng.choice(things)} comes before the {thing}." for _ in range(sentences))
            turns += [
                {"role": "user", "content": f"What does a visitor do with a {thing} at mile {number}?"},
                {"role": "assistant", "content": answer},
            ]
        lines.append(json.dumps({"messages": turns}))
    lines[23] = _row("Give me all of it.", "The road goes on and on. " * 200)  # longer than any pack
    lines[41] = lines[40]
    path.write_text("\n".join(lines) + "\n")


def _row(question: str, answer: str, **media: Any) -> str:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns, **media})


_TOKENS = ("im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")
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


def tiny_processor(texts: Iterable[str] = (), words: int = 0) -> Any:
    """Return a Qwen2-VL processor with a tokenizer of 256 bytes and ``words`` tokens trained on ``texts``."""
    tokenizers: Any = require("tokenizers", "train")
    transformers: Any = require("transformers", "train")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    byte_ids = {letter: index for index, letter in enumerate(alphabet)}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(byte_ids, merges=[]))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    if words:
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=len(alphabet) + words, initial_alphabet=alphabet, show_progress=False
        )
        model.train_from_iterator(texts, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[f"<|{token}|>" for token in _TOKENS],
    )
    image_size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16}
    video_size = {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 8}
    return transformers.Qwen2VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(size=image_size),
        video_processor=transformers.Qwen2VLVideoProcessor(size=video_size),
        tokenizer=tokenizer,
        chat_template=_CHAT_TEMPLATE,
    )


def tiny_model(processor: Any, seed: int = 0, layers: int = 2) -> Any:
    """Return a Qwen2-VL with few layers of width 64; a step takes a fraction of a second on a CPU."""
    import torch

    transformers: Any = require("transformers", "train")
    tokenizer = processor.tokenizer
    tokens = {"image": "image_pad", "video": "video_pad"}
    tokens |= {"vision_start": "vision_start", "vision_end": "vision_end"}
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in tokens.items()
    }
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **ids)
        return transformers.Qwen2VLForConditionalGeneration(config)
