"""The frames of a video file are those that the released processor takes from the same file.

The reference is the video processor's own call: on the file, which transformers decodes with torchcodec, and
its ``sample_frames`` on the file's header.
"""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.video_utils import VideoMetadata

from contract.exact import own_call, render, samples_frames, with_video_settings
from contract.media_files import write_video
from contract.processors import FAMILIES, QWEN3_VL, build, processor
from packhorse.errors import ConfigError
from packhorse.families import Encoder
from packhorse.media import (
    VideoInfo,
    VideoSampling,
    count_sampled_frames,
    load_media,
    sample_frame_indices,
)
from packhorse.types import Conversation, MediaRef, Message, TextPart

SEEING = tuple(name for name in FAMILIES if "video" in FAMILIES[name].modalities)
LIMITS = ("smolvlm",)  # its num_frames is a limit on what fps gives; all others use one of the two
SETTINGS = ({}, {"fps": 2}, {"fps": 0.7}, {"num_frames": 6}, {"num_frames": 5})


@pytest.fixture(scope="session")
def video_files(tmp_path_factory):
    """Video files, short and long, slow and fast, in two containers."""
    folder = tmp_path_factory.mktemp("video_files")
    shapes = [(40, 10), (47, Fraction(30000, 1001)), (53, 12)]
    paths = []
    for frames, fps in shapes:
        for suffix in (".mp4", ".mkv"):
            paths.append(folder / f"{frames}-{float(fps):.2f}{suffix}")
            write_video(paths[-1], frames=frames, fps=fps, width=48, height=32)
    return paths


@pytest.mark.parametrize("name", SEEING)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_frames_and_tokens_of_a_file_are_those_of_the_processors_own_call(name, settings, video_files):
    encoder, default = Encoder(with_video_settings(name, settings)), Encoder(processor(name))
    text = render(encoder, "video")
    for path in video_files:
        expected, ids = own_call(encoder, path)
        # On the processor, and in the row.
        for other, options in ((encoder, {}), (default, settings)):
            ref = MediaRef("video", str(path), options)
            size = other.size_of(ref)
            assert list(size.indices) == expected, (path.name, options)
            loaded = load_media(ref, sampling=other.video_sampling)
            assert list(loaded.metadata.frames_indices) == expected
            assert other.tokenize(other.expand(text, [("video", size)]), rendered=text) == ids


@pytest.mark.parametrize("name", SEEING)
def test_encoded_ids_of_a_file_are_those_of_the_processors_own_call(name, video_files):
    encoder = Encoder(processor(name))
    for path in video_files[:3]:
        question = (MediaRef("video", str(path)), TextPart("\n5: the"))
        conversation = Conversation((Message("user", question), Message("assistant", (TextPart("A cat."),))))
        assert encoder.encode(conversation).tokens["input_ids"].tolist() == own_call(encoder, path)[1]


class SampledError(Exception):
    """Ends a call of a video processor after it has chosen its frames, before it resizes them."""


def sampled_by_processor(owner, info):
    """The frames that the processor's own call chooses; None where that raises.

    The call itself passes the arguments to ``sample_frames``. Without a frame after the last one, to which
    float32 steps lead at times and which no decoder has.
    """
    sample_frames = owner.sample_frames

    def stop_after_sampling(*args, **options):
        raise SampledError(sample_frames(*args, **options))

    owner.sample_frames = stop_after_sampling
    metadata = VideoMetadata(info.total_frames, info.fps, info.width, info.height, info.duration)
    video = np.broadcast_to(np.uint8(0), (info.total_frames, 3, info.height, info.width))
    try:
        owner(videos=[video], video_metadata=[metadata], do_sample_frames=True, return_tensors="pt")
    except SampledError as sampled:
        return [index for index in np.asarray(sampled.args[0]).tolist() if index < info.total_frames]
    except (ValueError, ZeroDivisionError):
        return None
    finally:
        del owner.sample_frames
    raise AssertionError("the call chose no frames")


RATES = st.sampled_from(
    (1.0, 7.3, 10.0, 12.5, 24000 / 1001, 24.0, 25.0, 30000 / 1001, 30.0, 50.0, 60.0, 120.0)
)


@pytest.mark.parametrize("name", SEEING)
@settings(max_examples=100, deadline=None)
@given(
    total=st.integers(1, 4000),
    rate=RATES,
    fps=st.none() | st.sampled_from((0.1, 0.5, 1, 2, 2.5, 4, 24, 30)) | st.floats(0.05, 70),
    num_frames=st.none() | st.integers(1, 900),
)
def test_the_frames_of_any_video_are_those_of_sample_frames(name, total, rate, fps, num_frames):
    settings = {"fps": fps, "num_frames": num_frames}
    if name not in LIMITS and fps is not None:
        settings["num_frames"] = num_frames = None
    settings = {key: value for key, value in settings.items() if value is not None}
    info = VideoInfo(total, 48, 64, rate, total / rate)
    configured = with_video_settings(name, settings)
    owner = configured.video_processor
    expected = sampled_by_processor(owner, info) if samples_frames(owner) else list(range(total))
    by_row = VideoSampling.from_processor(processor(name)).override(**settings)
    for sampling in (VideoSampling.from_processor(configured), by_row):
        taken = sample_frame_indices(info, sampling).tolist()
        assert count_sampled_frames(info, sampling) == len(taken)
        if expected is None:
            # The processor raises: the video is too short for it, so all its frames, or one, are taken.
            assert set(taken) <= set(range(total))
            assert taken == sorted(taken)
            continue
        if name in QWEN3_VL and len(expected) == 1:
            expected *= 2  # its processor rejects a single frame
        assert taken == expected


def test_qwen2_vl_takes_all_frames_of_a_long_video_unless_a_rate_is_set():
    info = VideoInfo(2_000, 48, 64, 30.0, 2_000 / 30)
    sampling = VideoSampling.from_processor(processor("qwen2_vl"))
    assert len(sample_frame_indices(info, sampling)) == 2_000  # max_frames is a limit on what fps gives
    assert len(sample_frame_indices(info, sampling.override(fps=30))) == 768
    assert len(sample_frame_indices(info, sampling.override(max_frames=9))) == 8  # whole temporal patches


@pytest.mark.parametrize("name", SEEING)
def test_a_row_may_limit_the_number_of_frames_for_every_family(name):
    info = VideoInfo(300, 48, 64, 30.0, 10.0)
    sampling = VideoSampling.from_processor(processor(name))
    assert 1 <= len(sample_frame_indices(info, sampling.override(max_frames=4))) <= 4
    assert len(sample_frame_indices(info, sampling.override(fps=0.5, min_frames=12))) in (8, 12)


@pytest.mark.parametrize("name", SEEING)
def test_frames_given_as_a_list_are_all_taken(name):
    frames = [np.zeros((20, 30, 3), np.uint8)] * 7
    made = processor(name)
    size = Encoder(made).size_of(MediaRef("video", frames))
    assert size.indices == tuple(range(7))


def test_a_step_past_the_last_frame_is_dropped():
    info = VideoInfo(99, 48, 64, 1.0, 99.0)
    made = with_video_settings("qwen2_vl", {"fps": 4})
    metadata = VideoMetadata(99, 1.0, 64, 48, 99.0)
    assert made.video_processor.sample_frames(metadata, fps=4).tolist()[-1] == 99
    taken = sample_frame_indices(info, VideoSampling.from_processor(made)).tolist()
    assert (len(taken), taken[-1]) == (98, 97)


def test_a_processor_that_is_to_sample_without_a_rate_is_a_configuration_error():
    made = build("qwen2_vl")
    made.video_processor.do_sample_frames = True
    with pytest.raises(ConfigError, match="neither fps nor num_frames"):
        sample_frame_indices(VideoInfo(60, 48, 64, 30.0, 2.0), VideoSampling.from_processor(made))
