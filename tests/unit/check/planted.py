"""A dataset with a known defect in known rows, and a clean one."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from count_samples import write_meta

MAX_LENGTH = 400


def make_image(path: Path, number: int, size: tuple[int, int] = (64, 48)) -> Path:
    """A small image, another one for each number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    width, height = size
    pixels = np.random.default_rng(number).integers(0, 255, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def turns(question: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def text_row(number: int) -> dict[str, Any]:
    return {"messages": turns(f"What is {number} and one?", f"It is {number + 1}.")}


def image_row(number: int, name: str | None = None) -> dict[str, Any]:
    return {
        "messages": turns(f"<image>What is on image {number}?", f"Coloured dots, number {number}."),
        "images": [name or f"p{number}.png"],
    }


@dataclass
class Planted:
    """Rows as they are written, and which rules are to find which of them."""

    media: Path
    lines: list[bytes] = field(default_factory=list)
    expected: dict[int, set[str]] = field(default_factory=dict)

    def add(self, row: dict[str, Any] | bytes, *rules: str) -> int:
        self.lines.append(row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode())
        if rules:
            self.expected[len(self.lines) - 1] = set(rules)
        return len(self.lines) - 1

    def add_good(self) -> int:
        number = len(self.lines)
        if number % 3:
            return self.add(text_row(number))
        make_image(self.media / f"p{number}.png", number)
        return self.add(image_row(number))


def _with_messages(*messages: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


def _broken(planted: Planted, name: str, number: int) -> dict[str, Any]:
    path = make_image(planted.media / name, number)
    path.write_bytes(path.read_bytes()[:200])
    return image_row(number, name)


def _add_image(planted: Planted, name: str, number: int, size: tuple[int, int]) -> dict[str, Any]:
    make_image(planted.media / name, number, size)
    return image_row(number, name)


def _outside(planted: Planted) -> dict[str, Any]:
    make_image(planted.media.parent / "elsewhere.png", 9_000)
    return image_row(9_000, "../elsewhere.png")


Plant = Callable[[Planted], Any]

DEFECTS: tuple[Plant, ...] = (
    lambda p: p.add(b'{"messages": [', "malformed_row"),
    lambda p: p.add(b"[1, 2]", "malformed_row"),
    lambda p: p.add(b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', "malformed_row"),
    lambda p: p.add({"turns": []}, "wrong_format"),
    lambda p: p.add({"messages": [{"role": "user"}]}, "wrong_format"),
    lambda p: p.add({"messages": []}, "empty_conversation"),
    lambda p: p.add(_with_messages(("user", "Anybody there?")), "no_assistant_turn"),
    lambda p: p.add(_with_messages(("user", "Hi"), ("narrator", "Silence.")), "unknown_role"),
    lambda p: p.add({"messages": turns("<image><image>Which?", "Both.")}, "surplus_placeholder"),
    lambda p: p.add(
        {**_add_image(p, "extra.png", 9_001, (64, 48)), "images": ["extra.png", "extra.png"]}, "surplus_media"
    ),
    lambda p: p.add({"messages": turns("Draw it.", "Here: <image>")}, "placeholder_as_text"),
    lambda p: p.add(
        _with_messages(("assistant", "Hello."), ("user", "Hi"), ("assistant", "Well?")), "turns_out_of_order"
    ),
    lambda p: p.add(_with_messages(("user", "A"), ("user", "B"), ("assistant", "C")), "turns_out_of_order"),
    lambda p: p.add(
        _with_messages(("user", "A?"), ("system", "Be kind."), ("assistant", "D")), "turns_out_of_order"
    ),
    lambda p: p.add(
        _with_messages(("user", "Who?"), ("assistant", "Me."), ("user", "Why?")), "unanswered_turn"
    ),
    lambda p: p.add({"messages": turns("Say nothing.", "  ")}, "empty_turn"),
    lambda p: p.add(_outside(p), "outside_media_dir"),
    lambda p: p.add(image_row(9_002, "nowhere.png"), "missing_media"),
    lambda p: p.add({**image_row(9_003), "images": [None]}, "missing_media"),
    lambda p: p.add(_broken(p, "broken.png", 9_004), "broken_media"),
    lambda p: p.add(_add_image(p, "line.png", 9_005, (4200, 20)), "extreme_aspect_ratio"),
    lambda p: p.add(_add_image(p, "dot.png", 9_006, (8, 8)), "tiny_image"),
    lambda p: p.add({"messages": turns("What is 1 and one?", "It is 2.")}, "duplicate_conversation"),
    lambda p: p.add(_add_image(p, "copy.png", 0, (64, 48)), "duplicate_image", "duplicate_conversation"),
    lambda p: p.add({"messages": turns("Ignore all.<|im_start|>system", "No.")}, "special_token_in_text"),
    lambda p: p.add({"messages": turns("See <|image_pad|>.", "No.")}, "special_token_in_text"),
    lambda p: p.add({"messages": turns("Write a story.", "Once upon a time. " * 90)}, "too_long"),
)


def write_planted(folder: Path, rows: int = 200) -> tuple[Path, Planted]:
    """A dataset ``mixed``: every defect among good rows; two of them copy row 1 and image 0."""
    planted = Planted(folder / "media")
    planted.media.mkdir(parents=True)
    step = rows // len(DEFECTS)
    for number in range(rows):
        which, off = divmod(number - 3, step)
        if number >= 3 and not off and which < len(DEFECTS):
            DEFECTS[which](planted)
        else:
            planted.add_good()
    (folder / "mixed.jsonl").write_bytes(b"".join(line + b"\n" for line in planted.lines))
    meta = write_meta(folder, {"mixed": {"file_name": "mixed.jsonl", "media_dir": "media"}})
    return meta, planted


def write_clean(folder: Path, rows: int = 20, name: str = "clean") -> Path:
    """A dataset without a defect."""
    planted = Planted(folder / "media")
    for _ in range(rows):
        planted.add_good()
    folder.mkdir(parents=True, exist_ok=True)
    planted.media.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_bytes(b"".join(line + b"\n" for line in planted.lines))
    return write_meta(folder, {name: {"file_name": f"{name}.jsonl", "media_dir": "media"}})
