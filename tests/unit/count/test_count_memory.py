"""What the counter remembers stays small, and forgetting it changes no count."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from contract.processors import processor
from packhorse.count import token_counter as count
from packhorse.count.token_counter import TokenCounter
from packhorse.families import Encoder
from packhorse.formats.conversation import parse_conversation
from packhorse.types import Conversation


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> list[Conversation]:
    """Rows of one to five images; nearly every row has sizes that no row before it had."""
    folder: Path = tmp_path_factory.mktemp("images")
    files = []
    for number in range(12):
        files.append(folder / f"{number}.png")
        Image.new("RGB", (60 + 20 * number, 200 - 10 * number)).save(files[-1])
    rows = []
    for number in range(40):
        chosen = [files[(number * step + step) % len(files)] for step in range(1, 2 + number % 5)]
        images: list[dict[str, Any]] = [{"type": "image", "image": str(file)} for file in chosen]
        question = {"role": "user", "content": [*images, {"type": "text", "text": "What is it?"}]}
        answer = {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}
        rows.append(parse_conversation({"conversation": [question, answer]}, f"row/{number}"))
    return rows


@pytest.mark.parametrize("most", [1, 6, 10_000])
def test_media_are_forgotten_by_their_number_and_every_count_stays_the_same(
    most: int, asked: list[Conversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = processor("qwen2_vl")
    expected = [TokenCounter(Encoder(made)).count(one) for one in asked]
    monkeypatch.setattr(count, "_MAX_MEDIA", most)
    counter = TokenCounter(Encoder(made))
    for one, wanted in zip([*asked, *asked], [*expected, *expected], strict=True):
        assert counter.count(one) == wanted
        held = sum(map(len, counter._media_of_sizes))
        assert held == counter._media_held
        assert held <= max(most, len(one.media))  # a row of more is held alone
