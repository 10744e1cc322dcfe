"""Media tokens are predicted exactly: the families' arithmetic against their real processors."""

import random

import pytest
from PIL import Image

from contract.calls import Raw, own_batch
from contract.processors import FAMILIES, build, processor
from contract.samples import clip, tone, turns
from packhorse.families import Encoder
from packhorse.media import VideoInfo

EVERY = tuple(FAMILIES)
SEEING = tuple(name for name in EVERY if "video" in FAMILIES[name].modalities)
HEARING = tuple(name for name in EVERY if "audio" in FAMILIES[name].modalities)


def content_tokens(name, batch):
    made = processor(name)
    encoder = Encoder(made)
    content = encoder.media_token_ids
    return sum(token in content for token in batch["input_ids"][0].tolist())


def image_sizes(number, seed):
    """Sizes of every kind: ordinary, small, and very long ones."""
    draw = random.Random(seed)
    for _ in range(number):
        long, short = draw.randint(100, 2000), draw.randint(1, 20)
        yield draw.choice(
            [
                (draw.randint(1, 1600), draw.randint(1, 1600)),
                (448 * draw.randint(1, 4), 448 * draw.randint(1, 4)),
                (draw.randint(1, 60), draw.randint(1, 60)),
                (long, short),
                (short, long),
            ]
        )


@pytest.mark.parametrize("name", EVERY)
def test_images_of_any_size(name):
    made = processor(name)
    encoder = Encoder(made)
    rejected = 0
    for height, width in image_sizes(40, name):
        image = Image.new("RGB", (width, height), "olive")
        try:
            batch = own_batch(name, [Raw(turns("image"), images=(image,))])
        except ValueError:
            rejected += 1  # a shape that the processor does not take
            continue
        predicted = encoder.media_tokens("image", (height, width))
        assert predicted == content_tokens(name, batch), (height, width)
    assert rejected < 10


@pytest.mark.parametrize("name", [name for name in EVERY if name != "nemotron_parse"])
def test_three_images_of_any_size_in_one_sample(name):
    made = processor(name)
    encoder = Encoder(made)
    for seed in range(4):
        sizes = [(60 + h % 500, 60 + w % 500) for h, w in image_sizes(3, f"{name}{seed}")]
        images = tuple(Image.new("RGB", (width, height)) for height, width in sizes)
        batch = own_batch(name, [Raw(turns(*["image"] * 3), images=images)])
        predicted = sum(encoder.media_tokens("image", size, 3) for size in sizes)
        assert predicted == content_tokens(name, batch), sizes


@pytest.mark.parametrize("name", SEEING)
def test_videos_of_any_size(name):
    made = processor(name)
    encoder = Encoder(made)
    draw = random.Random(name)
    for _ in range(12):
        frames, height, width = draw.randint(2, 9), draw.randint(20, 400), draw.randint(20, 400)
        sample = Raw(turns("video"), clips=(clip(frames, width, height, step=draw.randint(1, 50)),))
        info = VideoInfo(frames, height, width, 24.0, None)
        assert encoder.media_tokens("video", info) == content_tokens(name, own_batch(name, [sample]))


@pytest.mark.parametrize("name", HEARING)
def test_audio_of_any_length(name):
    made = processor(name)
    encoder = Encoder(made)
    draw = random.Random(name)
    lengths = (400, 401, 1599, 1600, 1601, 15_999, 16_000, 16_001, 480_000, 480_001)
    for samples in (*lengths, *(draw.randint(400, 90_000) for _ in range(12))):
        batch = own_batch(name, [Raw(turns("audio"), audios=(tone(samples),))])
        assert encoder.media_tokens("audio", samples) == content_tokens(name, batch), samples


def test_a_budget_per_frame_is_kept():
    from transformers import Qwen2VLVideoProcessor, Qwen3VLVideoProcessor

    draw = random.Random(0)
    two, three = build("qwen2_vl"), build("qwen3_vl")
    two.video_processor = Qwen2VLVideoProcessor(
        size={"shortest_edge": 3136, "longest_edge": 28 * 28 * 64},
        cap_pixels_per_frame=True,
        max_video_tokens=64,
    )
    three.video_processor = Qwen3VLVideoProcessor(
        size={"shortest_edge": 4096, "longest_edge": 32 * 32 * 256},
        cap_pixels_per_frame=True,
        max_video_tokens=16,
    )
    for _ in range(15):
        frames, height, width = draw.randint(2, 9), draw.randint(30, 600), draw.randint(30, 600)
        video, metadata = clip(frames, width, height)
        for made in (two, three):
            output = made.video_processor(
                [video], video_metadata=[metadata], do_sample_frames=False, return_tensors="pt"
            )
            tokens = output["video_grid_thw"][0].prod().item() // made.video_processor.merge_size**2
            info = VideoInfo(frames, height, width, 24.0, None)
            assert Encoder(made).media_tokens("video", info) == tokens
