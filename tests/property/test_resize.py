"""Our resize formulas are transformers' to the last pixel."""

from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.media.images import resize_image, resize_video

SIDE = st.integers(1, 5000)


@settings(max_examples=600, deadline=None)
@given(
    height=SIDE,
    width=SIDE,
    factor=st.sampled_from([28, 32, 56]),
    low=st.integers(1, 10**6),
    span=st.integers(0, 10**7),
)
def test_images_come_out_as_in_transformers(
    height: int, width: int, factor: int, low: int, span: int
) -> None:
    from contract.torchvision_ops import make_torchvision_importable

    make_torchvision_importable()
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    arguments = (height, width, factor, low, low + span)
    assert outcome(resize_image, arguments) == outcome(smart_resize, arguments)


@settings(max_examples=600, deadline=None)
@given(frames=st.integers(1, 800), height=SIDE, width=SIDE, temporal=st.sampled_from([1, 2, 4]),
       factor=st.sampled_from([28, 32]), low=st.integers(1, 10**6), span=st.integers(0, 10**8))  # fmt: skip
def test_videos_come_out_as_in_transformers(
    frames: int, height: int, width: int, temporal: int, factor: int, low: int, span: int
) -> None:
    from contract.torchvision_ops import make_torchvision_importable

    make_torchvision_importable()
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    arguments = (frames, height, width, temporal, factor, low, low + span)
    assert outcome(resize_video, arguments) == outcome(smart_resize, arguments)


def outcome(function, arguments: tuple[int, ...]) -> object:
    try:
        return function(*arguments)
    except ValueError:
        return "rejected"
