"""Qwen2.5-VL with plain calls, and Qwen3-Omni through the model's own package."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from collate_stubs import GREETING, CallProcessor, chatml, make_turns, text
from PIL import Image

from contract.media_files import write_video
from contract.processors import processor
from contract.samples import clip, make_image, tone
from packhorse.chat import IGNORE_INDEX
from packhorse.collate_fns import default_collate_fn, qwen2_5_collate_fn, qwen3_omni_collate_fn
from raising import raises_bad_sample, raises_config


def question(*parts, answer="A cat.") -> dict:
    return {"conversation": make_turns(("user", [*parts, *text("What?")]), ("assistant", text(answer)))}


def image(width=64, height=96) -> dict:
    return {"type": "image", "image": make_image(width, height)}


def supervised_texts(tokenizer, labels) -> list[str]:
    return [tokenizer.decode(row[row != IGNORE_INDEX].tolist()) for row in labels]


# --- Qwen2.5-VL -------------------------------------------------------------------------------------------


def test_texts_and_media_are_passed_to_the_call():
    stub = CallProcessor()
    batch = qwen2_5_collate_fn([question(image(8, 8)), {"conversation": GREETING}], stub)
    (call,) = stub.calls
    assert call["text"][1] == chatml(GREETING)
    assert call["padding"] is True
    assert [one.size for one in call["images"]] == [(8, 8)]
    assert call["videos"] is None
    assert supervised_texts(stub.tokenizer, batch["labels"]) == ["A cat.<|im_end|>", "Hello!<|im_end|>"]
    assert batch["pixel_values"].dtype == torch.float32
    assert batch["n_images_per_sample"].tolist() == [1, 0]


def test_a_call_that_must_be_given_images_gets_none():
    class Needy(CallProcessor):
        def __call__(self, *, text, images, padding, return_tensors, **options):
            assert images is None
            return super().__call__(text=text, padding=padding, return_tensors=return_tensors)

    batch = qwen2_5_collate_fn([{"conversation": GREETING}] * 2, Needy())
    assert batch["input_ids"].shape[0] == 2


def test_decoded_frames_come_with_what_is_known_about_them():
    stub = CallProcessor()
    frames, metadata = clip(4)
    qwen2_5_collate_fn([question({"type": "video", "video": frames, "video_metadata": metadata})], stub)
    (call,) = stub.calls
    assert np.array_equal(call["videos"][0], frames)
    assert call["video_metadata"][0]["frames_indices"] == metadata["frames_indices"]
    assert call["do_sample_frames"] is False


def test_a_media_item_that_the_processor_does_not_take_is_not_lost():
    class TextOnly(CallProcessor):
        def __call__(self, *, text, padding, return_tensors):
            raise AssertionError("not called")

    with raises_config("images"):
        qwen2_5_collate_fn([question(image())], TextOnly())


# --- Qwen3-Omni -------------------------------------------------------------------------------------------


@pytest.fixture
def package(monkeypatch):
    """A substitute for ``qwen_omni_utils`` that records its arguments."""
    given = []

    def process_mm_info(conversations, use_audio_in_video):
        parts = [part for turn in conversations for part in turn["content"]]
        given.append((parts, use_audio_in_video))
        found = {kind: [p[kind] for p in parts if p["type"] == kind] for kind in ("audio", "image", "video")}
        return tuple(items or None for items in found.values())

    module = ModuleType("qwen_omni_utils")
    module.process_mm_info = process_mm_info
    monkeypatch.setitem(sys.modules, "qwen_omni_utils", module)
    return given


def test_media_go_through_the_package_and_only_those_there_are_are_passed(package):
    stub = CallProcessor()
    stub.feature_extractor = None
    batch = qwen3_omni_collate_fn(
        [question(image(8, 8)), {"conversation": GREETING}], stub, use_audio_in_video=True
    )
    assert [use for _, use in package] == [True, True]
    (call,) = stub.calls
    assert [one.size for one in call["images"]] == [(8, 8)]
    assert call["padding"] is True
    assert "audio" not in call
    assert call["videos"] is None
    assert supervised_texts(stub.tokenizer, batch["labels"]) == ["A cat.<|im_end|>", "Hello!<|im_end|>"]


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwen_omni_utils", None)
    with pytest.raises(ImportError, match="pip install qwen-omni-utils"):
        qwen3_omni_collate_fn([{"conversation": GREETING}], CallProcessor())


def test_images_and_audio_are_those_of_the_processor_at_sizes_that_need_no_resizing():
    real = processor("qwen3_omni")
    examples = [
        question(image(), {"type": "audio", "audio": (tone(16_000), 16_000)}),
        {"conversation": GREETING},
        # Not a whole number of hops, next to a longer clip: 13 tokens, as alone.
        question({"type": "audio", "audio": (tone(16_001), 16_000)}),
        question({"type": "audio", "audio": (tone(24_000), 16_000)}),
    ]
    batch = qwen3_omni_collate_fn(examples, real)
    plain = default_collate_fn(examples, real, pixel_dtype=None)
    assert batch.keys() == plain.keys()
    for key, value in plain.items():
        assert torch.equal(batch[key], value), key
    assert supervised_texts(real.tokenizer, batch["labels"])[2] == "A cat.<|im_end|>"
    audio = real.tokenizer.audio_token_id
    assert (batch["input_ids"] == audio).sum(1).tolist()[::2] == [13, 13]


@pytest.mark.parametrize("source", ["file", "frames"])
def test_videos_have_their_own_rates(source, tmp_path):
    write_video(tmp_path / "fast.mp4", frames=40, fps=10)
    write_video(tmp_path / "slow.mp4", frames=8, fps=1)
    if source == "file":
        videos = [{"type": "video", "video": str(tmp_path / name)} for name in ("fast.mp4", "slow.mp4")]
        seconds = [1.0, 2.0]  # two frames a second; all of the slow one, at one a second
    else:
        frames, metadata = clip(6)
        videos = [
            {"type": "video", "video": frames, "video_metadata": {**metadata, "fps": fps}} for fps in (24, 6)
        ]
        seconds = [1.0, 4.0]
    real = processor("qwen3_omni")
    batch = qwen3_omni_collate_fn(
        [question(videos[0]), {"conversation": GREETING}, question(videos[1])], real
    )
    assert batch["video_second_per_grid"].tolist() == pytest.approx(seconds)
    assert batch["n_videos_per_sample"].tolist() == [1, 0, 1]
    tokens = batch["video_grid_thw"].prod(1) // 4
    video = real.tokenizer.video_token_id
    assert (batch["input_ids"] == video).sum(1).tolist() == [int(tokens[0]), 0, int(tokens[1])]
    assert supervised_texts(real.tokenizer, batch["labels"]) == [
        "A cat.<|im_end|>",
        "Hello!<|im_end|>",
        "A cat.<|im_end|>",
    ]


def test_two_videos_of_a_sample_have_each_its_own_rate():
    frames, metadata = clip(6)
    videos = [
        {"type": "video", "video": frames, "video_metadata": {**metadata, "fps": fps}} for fps in (24, 6)
    ]
    batch = qwen3_omni_collate_fn([question(*videos)], processor("qwen3_omni"))
    assert batch["video_second_per_grid"].tolist() == pytest.approx([1.0, 4.0])


def test_the_audio_of_a_video_is_interleaved_with_its_frames(tmp_path, package):
    """The package is a substitute that returns frames and audio; the processor is real."""
    real = processor("qwen3_omni")
    frames = torch.from_numpy(clip(4)[0]).permute(0, 3, 1, 2).float()

    def process_mm_info(conversations, use_audio_in_video, return_video_kwargs):
        assert use_audio_in_video
        return [tone(32_000)], None, [frames], {"fps": [2.0]}

    sys.modules["qwen_omni_utils"].process_mm_info = process_mm_info
    write_video(tmp_path / "video.mp4", frames=8, fps=4)
    video = {"type": "video", "video": str(tmp_path / "video.mp4")}
    batch = qwen3_omni_collate_fn([question(video)], real, use_audio_in_video=True)
    ids = batch["input_ids"][0]
    audio, video = (
        (ids == token).nonzero().flatten()
        for token in (real.tokenizer.audio_token_id, real.tokenizer.video_token_id)
    )
    assert len(audio) == 26
    assert video[0] < audio[0] < video[-1]
    assert supervised_texts(real.tokenizer, batch["labels"]) == ["A cat.<|im_end|>"]


def test_a_broken_file_is_named(tmp_path):
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"no video")
    with raises_bad_sample("broken_media", match=r"broken\.mp4"):
        qwen3_omni_collate_fn([question({"type": "video", "video": str(broken)})], processor("qwen3_omni"))
    with raises_bad_sample("missing_media", match=r"missing\.png"):
        qwen3_omni_collate_fn(
            [question({"type": "image", "image": str(tmp_path / "missing.png")})], processor("qwen3_omni")
        )


def test_an_image_is_brought_to_rgb_for_the_package(package):
    stub = CallProcessor()
    qwen3_omni_collate_fn([question({"type": "image", "image": Image.new("RGBA", (8, 8))})], stub)
    assert package[0][0][0]["image"].mode == "RGB"
