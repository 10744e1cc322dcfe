"""Encodes a case with Packhorse, and prepares the same sample for the processor's own call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from contract.calls import Raw
from contract.cases import conversation
from contract.processors import processor
from packhorse.chat import IGNORE_INDEX
from packhorse.families import Encoded, Encoder
from packhorse.formats.conversation import parse_conversation
from packhorse.types import Conversation


@dataclass(frozen=True)
class Made:
    """A sample as Packhorse makes it, and what it was made from."""

    conversation: Conversation
    encoded: Encoded
    labels: torch.Tensor
    raw: Raw

    def supervised_text(self, name: str) -> list[str]:
        """What the labels say, one text for each run of supervised tokens."""
        tokenizer = processor(name).tokenizer
        runs: list[list[int]] = [[]]
        for label in self.labels.tolist():
            if label != IGNORE_INDEX:
                runs[-1].append(label)
            elif runs[-1]:
                runs.append([])
        return [tokenizer.decode(run, skip_special_tokens=False) for run in runs if run]


def make(name: str, case: str, files: Mapping[str, Path]) -> Made:
    """Encode a case; raises what the family raises."""
    turns = conversation(name, case, files)
    parsed = parse_conversation({"conversation": turns}, f"{name}/{case}")
    made = processor(name)
    encoder = Encoder(made)
    encoded = encoder.encode(parsed)
    loaded = encoder.load(parsed.media)
    bare = [
        {**turn, "content": [p if p["type"] == "text" else {"type": p["type"]} for p in turn["content"]]}
        for turn in turns
    ]
    raw = Raw(
        bare,
        tuple(loaded.images),
        tuple((video.frames, video.metadata.as_dict()) for video in loaded.videos),
        tuple(array for array, _ in loaded.audios),
    )
    return Made(parsed, encoded, encoder.labels(encoded), raw)
