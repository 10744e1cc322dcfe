"""Small objects that follow the documented contract of processors, and no more than that."""

from __future__ import annotations

import re
from typing import Any

import torch

SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>", "<|media_pad|>")
_PIECES = re.compile("|".join(map(re.escape, SPECIAL)) + "|.", re.DOTALL)


class CharTokenizer:
    """An id for each character, and one for each special token. Padding is 0."""

    pad_token_id: int | None = 0
    eos_token = "<|im_end|>"
    eos_token_id = 2

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        pieces = _PIECES.findall(text)
        return {"input_ids": [self.convert_tokens_to_ids(piece) for piece in pieces]}

    def convert_tokens_to_ids(self, token: str) -> int:
        return SPECIAL.index(token) if token in SPECIAL else len(SPECIAL) + ord(token)

    def decode(self, ids: Any) -> str:
        ids = [ids] if isinstance(ids, int) else [int(number) for number in ids]
        return "".join(SPECIAL[i] if i < len(SPECIAL) else chr(i - len(SPECIAL)) for i in ids)


def chatml(conversation: list[dict[str, Any]]) -> str:
    def text(content: Any) -> str:
        if isinstance(content, str):
            return content
        return "".join(part["text"] if part["type"] == "text" else "<|media_pad|>" for part in content)

    return "".join(f"<|im_start|>{t['role']}\n{text(t['content'])}<|im_end|>\n" for t in conversation)


def pad_rows(rows: list[list[int]], width: int | None = None) -> dict[str, torch.Tensor]:
    width = width or max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])[:, None]
    return {"input_ids": ids, "attention_mask": (torch.arange(width)[None] < lengths).long()}


class StrictProcessor:
    """Only tokenises, takes no option beyond the documented ones, and has no ``__call__``."""

    def __init__(self) -> None:
        self.tokenizer = CharTokenizer()
        self.calls: list[dict[str, Any]] = []

    def apply_chat_template(
        self,
        conversations: list[Any],
        *,
        tokenize: bool,
        padding: bool | str,
        return_tensors: str,
        return_dict: bool,
        max_length: int | None = None,
    ) -> dict[str, torch.Tensor]:
        assert tokenize
        assert return_tensors == "pt"
        assert return_dict
        self.calls.append({"padding": padding, "max_length": max_length, "conversations": conversations})
        rows = [self.tokenizer(chatml(conversation))["input_ids"] for conversation in conversations]
        batch = pad_rows(rows, max_length if padding == "max_length" else None)
        images = [
            part["image"]
            for conversation in conversations
            for turn in conversation
            for part in (turn["content"] if isinstance(turn["content"], list) else [])
            if part["type"] == "image"
        ]
        if images:
            batch["pixel_values"] = torch.ones(len(images), 3, 4, 4)
        return batch


class CallProcessor:
    """Renders with ``apply_chat_template``, and tokenises when it is called with plain options."""

    def __init__(self) -> None:
        self.tokenizer = CharTokenizer()
        self.calls: list[dict[str, Any]] = []

    def apply_chat_template(self, conversation: list[Any], tokenize: bool = False, **options: Any) -> str:
        assert not tokenize
        return chatml(conversation)

    def __call__(
        self,
        *,
        text: list[str],
        return_tensors: str,
        padding: bool | str,
        images: list[Any] | None = None,
        videos: list[Any] | None = None,
        **options: Any,
    ) -> dict[str, torch.Tensor]:
        assert return_tensors == "pt"
        self.calls.append({"text": text, "padding": padding, "images": images, "videos": videos, **options})
        rows = [self.tokenizer(one)["input_ids"] for one in text]
        batch = pad_rows(rows, options.get("max_length"))
        if images:
            batch["pixel_values"] = torch.ones(len(images), 3, 4, 4)
        return batch


def make_turns(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    """Turns from (role, content) pairs."""
    return [{"role": role, "content": content} for role, content in turns]


def text(words: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": words}]


GREETING = make_turns(("user", text("Hi there!")), ("assistant", text("Hello!")))
