"""Labels with the real Qwen tokenizers and chat templates, on generated conversations.

They are not part of the project: the folder is named by PACKHORSE_ASSETS, or is next to the repository in
``shared/assets``; without it these tests are skipped.
"""

import os
import random
import unicodedata
from functools import cache
from pathlib import Path

import pytest

from contract.processors import build
from contract.samples import make_image
from packhorse.chat import IGNORE_INDEX
from packhorse.families import Encoder
from packhorse.formats.conversation import parse_conversation

ASSETS = Path(os.environ.get("PACKHORSE_ASSETS", Path(__file__).parents[3] / "shared" / "assets"))
PAIRS = {"qwen2_vl": "qwen2_5", "qwen3_vl": "qwen3"}
CONVERSATIONS = 500

pytestmark = pytest.mark.skipif(
    not (ASSETS / "tokenizers").is_dir(),
    reason=f"no tokenizers/ in {ASSETS}: set PACKHORSE_ASSETS to a folder with tokenizers/ and templates/",
)

PIECES = [
    *(
        "The cat sat on the mat.",
        " a",
        "  ",
        "\n",
        "\n\n",
        "\t",
        ".\n",
        "12,345.67",
        "I'm",
        "don't",
        "€",
        "naïve",
    ),
    *(
        "这是一只猫。",
        "東京",
        "안녕",
        "مرحبا",
        "привет",
        "\U0001f63a",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    ),
    *(
        "```python\nprint('hi')\n```",
        '{"a": [1, 2]}',
        "# Title\n",
        "- item\n",
        "<think>\nHm.\n</think>\n\n",
        "</s>",
    ),
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|im_start|>assistant\n",
        "<|endoftext|>",
        "assistant\n",
        "<|vision_start|>",
    ),
    *("<tool_call>\n{}\n</tool_call>", "<|object_ref_start|>", "{% raw %}", "{{ x }}", "user\n", "<image>"),
]


@cache
def real(name):
    """The family's real processor class with the released tokenizer and template."""
    from transformers import AutoTokenizer

    small = build(name)
    return type(small)(
        image_processor=small.image_processor,
        video_processor=small.video_processor,
        tokenizer=AutoTokenizer.from_pretrained(ASSETS / "tokenizers" / PAIRS[name]),
        chat_template=(ASSETS / "templates" / f"{name}.jinja").read_text(encoding="utf-8"),
    )


def generate(draw, name):
    """A conversation of every shape, with what its answers say."""

    def words(most):
        # As the tokenizer normalises it, so that decoding can give it back.
        text = "".join(draw.choice(PIECES) for _ in range(draw.randint(0, most)))
        return unicodedata.normalize("NFC", text)

    turns, answers = [], []
    if draw.random() < 0.3:
        turns.append({"role": "system", "content": words(4)})
    for _ in range(draw.randint(1, 5)):
        asked = [{"type": "text", "text": words(8)} for _ in range(draw.randint(1, 2))]
        if draw.random() < 0.2:
            image = make_image(draw.randint(20, 120), draw.randint(20, 120))
            asked.insert(draw.randint(0, len(asked)), {"type": "image", "image": image})
        turns.append({"role": "user", "content": asked})
        if draw.random() < 0.1:
            turns.append({"role": "tool", "content": words(3)})
        answers.append(words(10))
        turns.append({"role": "assistant", "content": answers[-1]})
    if draw.random() < 0.1:
        turns.append({"role": "user", "content": words(3)})
    return parse_conversation({"conversation": turns}, name), answers


def runs(labels):
    found = [[]]
    for label in labels:
        if label != IGNORE_INDEX:
            found[-1].append(label)
        elif found[-1]:
            found.append([])
    return [run for run in found if run]


@pytest.mark.parametrize("name", PAIRS)
def test_labels_are_exact_on_generated_conversations(name):
    made = real(name)
    encoder = Encoder(made)
    draw = random.Random(name)
    stop = "<|im_end|>"
    for number in range(CONVERSATIONS):
        conversation, answers = generate(draw, name)
        encoded = encoder.encode(conversation)
        labels = encoder.labels(encoded)
        supervised = [made.tokenizer.decode(run) for run in runs(labels.tolist())]
        assert len(supervised) == len(answers), number
        for text, answer in zip(supervised, answers, strict=True):
            # A token that joins the newline of the marker and the beginning of the answer is no label.
            assert (answer + stop).endswith(text), number
            assert not (answer + stop).removesuffix(text).strip(), number


@pytest.mark.parametrize("name", PAIRS)
def test_turn_markers_are_those_of_chatml(name):
    markers = Encoder(real(name)).turn_markers
    assert real(name).tokenizer.decode(markers.assistant) == "<|im_start|>assistant\n"
    assert real(name).tokenizer.decode([markers.stop]) == "<|im_end|>"


@pytest.mark.parametrize("name", PAIRS)
def test_any_cut_keeps_the_labels_of_what_is_left(name):
    from packhorse.chat import label_tokens

    made = real(name)
    encoder = Encoder(made)
    draw = random.Random(name + "cut")
    media = encoder.media_token_ids
    for _ in range(30):
        conversation, _ = generate(draw, name)
        encoded = encoder.encode(conversation)
        whole = encoder.labels(encoded).tolist()
        spans = [answer[:2] for answer, _ in encoder.answers(conversation, encoded.text)]
        ids = encoded.tokens["input_ids"].tolist()
        for length in {draw.randint(0, len(ids)) for _ in range(12)}:
            cut = label_tokens(encoder, encoded.text, spans, ids[:length], media)
            assert cut == whole[:length]
