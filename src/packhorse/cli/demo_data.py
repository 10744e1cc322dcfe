"""Writes the demo's data: drawn charts, short videos and text chats, with a few broken rows on purpose."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from packhorse.errors import require

_COLOURS = {"red": (208, 64, 56), "green": (66, 148, 92), "blue": (58, 104, 188), "ochre": (204, 152, 48)}


def write_demo_data(folder: Path, seed: int = 0) -> Path:
    """Fill ``folder`` with three small datasets and return the meta file that names them.

    24 chart questions (JSONL and PNG), 4 clip questions (JSONL and MP4), 12 text chats (a JSON array). Three
    rows are broken: a line that is not JSON, a picture that is cut off, a question with one ``<image>`` too
    many.
    """
    rng = random.Random(seed)
    media = folder / "media"
    media.mkdir(parents=True, exist_ok=True)
    _write_charts(folder / "charts.jsonl", media, rng)
    _write_clips(folder / "clips.jsonl", media, rng)
    _write_chats(folder / "chats.json")
    from_value = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}
    meta = {
        "charts": {"file_name": "charts.jsonl", "media_dir": "media"},
        "clips": {"file_name": "clips.jsonl", "media_dir": "media"},
        "chats": {"file_name": "chats.json", "columns": {"messages": "conversations"}, "tags": from_value},
    }
    path = folder / "meta.json"
    path.write_text(json.dumps(meta, indent=2) + "\n")
    return path


def _write_charts(path: Path, media: Path, rng: random.Random) -> None:
    lines = []
    for number in range(24):
        name = f"chart{number:02}.png"
        values = {colour: rng.randint(5, 95) for colour in _COLOURS}
        _draw_chart(values, rng.choice([160, 224, 320])).save(media / name)
        highest = max(values, key=values.__getitem__)
        lines.append(_row("<image>Which bar is the highest?", f"The {highest} one.", images=[name]))
    lines[7] = lines[7][: len(lines[7]) // 2]  # not JSON any more
    picture = media / "chart13.png"
    picture.write_bytes(picture.read_bytes()[:200])  # cut off in the middle
    lines[19] = lines[19].replace("<image>", "<image><image>")  # one picture, two placeholders
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


def _write_clips(path: Path, media: Path, rng: random.Random) -> None:
    lines = []
    for number in range(4):
        name = f"clip{number}.mp4"
        colour, to_right = rng.choice(list(_COLOURS)), rng.random() < 0.5
        _draw_clip(media / name, _COLOURS[colour], to_right)
        answer = f"A {colour} ball rolls to the {'right' if to_right else 'left'}."
        lines.append(_row("<video>What happens?", answer, videos=[name]))
    path.write_text("\n".join(lines) + "\n")


def _draw_clip(path: Path, colour: tuple[int, int, int], to_right: bool, frames: int = 24) -> None:
    av = require("av", "video")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=12)
        stream.width, stream.height, stream.pix_fmt = 160, 96, "yuv420p"
        for number in range(frames):
            image = Image.new("RGB", (160, 96), (240, 240, 236))
            x = 10 + number * 5
            x = x if to_right else 140 - x
            ImageDraw.Draw(image).ellipse((x, 36, x + 24, 60), fill=colour)
            for packet in stream.encode(av.VideoFrame.from_ndarray(np.asarray(image), format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def _write_chats(path: Path) -> None:
    topics = ["a mule", "a saddle", "a mountain pass", "a bale of wool", "a bridge", "a toll gate"]
    rows = []
    for topic in topics:
        for question in (f"Describe {topic} in one sentence.", f"Why would a carrier care about {topic}?"):
            turns = [
                {"from": "system", "value": "You are a patient guide."},
                {"from": "human", "value": question},
                {"from": "gpt", "value": f"That depends on the road; {topic} matters more on a steep one."},
            ]
            rows.append({"conversations": turns})
    path.write_text(json.dumps(rows, indent=1))


def _row(question: str, answer: str, **media: Any) -> str:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns, **media})
