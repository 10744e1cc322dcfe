"""The role of each token, for every family that has a chat template."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from contract.processors import FAMILIES, build, processor
from packhorse.chat import IGNORE_INDEX
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.formats.conversation import parse_conversation
from packhorse.tools.view.row_encoder import find_roles, make_runs

CHATS = [name for name, family in FAMILIES.items() if family.chats]
ROW = {
    "conversation": [
        {"role": "user", "content": "Does the user say assistant?"},
        {"role": "assistant", "content": "Only the assistant does."},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "No more."},
    ]
}


def encode(name: str, row: dict[str, Any]) -> tuple[Any, Any, list[str]]:
    samples = PreTokenizedDatasetWrapper([row], processor(name), inject_fake_images=False, on_bad="raise")
    sample = samples[0]
    ids = sample["input_ids"].tolist()
    return samples, sample, find_roles(samples.encoder, parse_conversation(row), ids)


@pytest.mark.parametrize("name", CHATS)
def test_each_text_has_the_role_of_its_speaker(name: str) -> None:
    samples, sample, roles = encode(name, ROW)
    runs = make_runs(samples.encoder, sample, roles)
    texts = {role: "".join(run.text for run in runs if run.role == role) for role in ("user", "assistant")}
    assert "Does the user say assistant?" in texts["user"]
    assert "And now?" in texts["user"]
    assert "Only the assistant does." not in texts["user"]
    # SmolVLM's generation prompt has no blank at its end; an answer begins with it.
    assert texts["assistant"].lstrip().startswith("Only the assistant does.")
    assert "No more." in texts["assistant"]
    assert "And now?" not in texts["assistant"]


@pytest.mark.parametrize("name", CHATS)
def test_runs_cover_every_token_once_and_mark_supervised_tokens(name: str) -> None:
    samples, sample, roles = encode(name, ROW)
    runs = make_runs(samples.encoder, sample, roles)
    labels = sample["labels"].tolist()
    assert [run.start for run in runs] == [sum(r.count for r in runs[:n]) for n in range(len(runs))]
    assert sum(run.count for run in runs) == len(labels)
    for run in runs:
        inside = labels[run.start : run.start + run.count]
        assert {label != IGNORE_INDEX for label in inside} == {run.supervised}
    assert [run.label_only for run in runs] == [False] * (len(runs) - 1) + [True]


def test_texts_after_an_answer_that_the_template_rewrites_have_their_roles() -> None:
    made = build("qwen2_vl")
    written = "{{ part['text'] if message['role'] == 'user' else part['text'] | upper }}"
    made.chat_template = made.chat_template.replace("{{ part['text'] }}", written)
    samples = PreTokenizedDatasetWrapper([ROW], made, inject_fake_images=False, on_bad="raise")
    ids = samples[0]["input_ids"].tolist()
    roles = find_roles(samples.encoder, parse_conversation(ROW), ids)
    of_user = [token for token, role in zip(ids, roles, strict=True) if role == "user"]
    said = samples.encoder.tokenizer.decode(of_user)
    assert "Does the user say assistant?" in said
    assert "And now?" in said
    assert "ONLY THE ASSISTANT DOES." in samples.encoder.tokenizer.decode(ids)


def test_a_media_item_is_one_run(tmp_path: Path) -> None:
    Image.new("RGB", (100, 60), "tan").save(tmp_path / "wide.png")
    image = {"type": "image", "image": str(tmp_path / "wide.png")}
    row = {
        "conversation": [
            {"role": "user", "content": [image, {"type": "text", "text": "What?"}]},
            {"role": "assistant", "content": "An image."},
        ]
    }
    samples, sample, roles = encode("qwen2_vl", row)
    (image_run,) = [run for run in make_runs(samples.encoder, sample, roles) if run.media_item]
    assert image_run.media_item == "<|image_pad|>"
    assert image_run.count == int(sample["image_grid_thw"].prod()) // 4
    assert not image_run.supervised
