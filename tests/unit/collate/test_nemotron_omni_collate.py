"""Nemotron-Omni: few frames of one video, and audio next to the conversation as an array or with its rate."""

import functools

import numpy as np
import pytest
import torch

from contract.processors import build, processor
from contract.samples import SAMPLING_RATE, clip, make_image, tone, turns
from packhorse.chat import IGNORE_INDEX
from packhorse.collate_fns import COLLATE_FNS, default_collate_fn, nemotron_omni_collate_fn
from packhorse.datasets import RobustDatasetWrapper
from packhorse.ledger import Ledger
from raising import raises_bad_sample

pytestmark = pytest.mark.needs_family("nemotron_omni")


def video(frames: int, **options: object) -> dict[str, object]:
    conversation = turns("video")
    conversation[0]["content"][0] |= {"video": list(clip(frames)[0]), **options}
    return {"conversation": conversation}


def frames_of(example: dict[str, object], **options: object) -> int:
    return len(
        nemotron_omni_collate_fn([example], processor("nemotron_omni"), **options)["pixel_values_videos"]
    )


@pytest.mark.parametrize("rate", [None, SAMPLING_RATE, 2 * SAMPLING_RATE])
def test_audio_is_an_array_at_the_processors_rate_or_has_its_own(rate):
    audio = np.repeat(tone(8_000), 2) if rate == 2 * SAMPLING_RATE else tone(8_000)
    example = {"conversation": turns(), "audio": audio if rate is None else (audio, rate)}
    batch = nemotron_omni_collate_fn([example], processor("nemotron_omni"))
    placed = turns("audio")
    placed[0]["content"][0]["audio"] = (tone(8_000), SAMPLING_RATE)
    expected = default_collate_fn([{"conversation": placed}], processor("nemotron_omni"))
    assert torch.equal(batch["input_ids"], expected["input_ids"])
    assert batch["input_features"].shape == expected["input_features"].shape
    if rate != 2 * SAMPLING_RATE:
        assert torch.equal(batch["input_features"], expected["input_features"])
    assert batch["n_audios_per_sample"].tolist() == [1]


def test_a_video_has_at_most_eight_frames_unless_more_are_requested():
    assert frames_of(video(12)) == 8
    assert frames_of(video(6)) == 6
    assert frames_of(video(12), max_video_frames=4) == 4
    assert frames_of(video(12), max_video_frames=None) == 12
    assert frames_of(video(12, num_frames=2)) == 2
    assert frames_of(video(12, num_frames=10)) == 8


def test_images_a_video_and_audio_go_into_one_batch_and_two_videos_do_not():
    seen = turns("image", answer="A ramp.")
    seen[0]["content"][0]["image"] = make_image(64, 48)
    examples = [{"conversation": seen}, video(4), {"conversation": turns(), "audio": tone(4_000)}]
    batch = nemotron_omni_collate_fn(examples, processor("nemotron_omni"))
    assert batch["n_images_per_sample"].tolist() == [1, 0, 0]
    assert batch["n_videos_per_sample"].tolist() == [0, 1, 0]
    assert batch["n_audios_per_sample"].tolist() == [0, 0, 1]
    assert (batch["labels"] != IGNORE_INDEX).any(dim=1).all()
    double = turns("video", "video")
    for part in double[0]["content"][:2]:
        part["video"] = list(clip(2)[0])
    with raises_bad_sample("media_mismatch"):
        nemotron_omni_collate_fn([{"conversation": double}], processor("nemotron_omni"))


def test_a_subclass_under_the_references_name_is_served_by_the_same_function_and_its_rows_are_named():
    real = build("nemotron_omni")
    name = "NemotronH_Nano_Omni_Reasoning_V3Processor"
    real.__class__ = type(name, (type(real),), {})
    dataset = RobustDatasetWrapper([video(12, num_frames=4)], ledger=Ledger())
    collate = functools.partial(COLLATE_FNS[type(real).__name__], processor=real, max_length=70)
    batch = dataset.robust_collate(collate)(dataset.__getitems__([0]))
    assert batch["input_ids"].shape == (1, 69)
    assert [(drop.key, drop.reason) for drop in dataset.ledger] == [
        ("0", "truncated"),
        ("0", "nothing_supervised"),
    ]
