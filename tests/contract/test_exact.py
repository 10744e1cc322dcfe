"""Counting is exact: the text predicted from sizes alone gives the very ids of the processor's own call."""

from fractions import Fraction

import numpy as np
import pytest
from PIL import Image

from contract.exact import conversations, image_sizes, predict_ids, really, render, video
from contract.media_files import write_video
from contract.processors import FAMILIES, QWEN3_VL, build, processor
from packhorse.errors import BadSample
from packhorse.families import FAMILIES as KNOWN
from packhorse.families import Encoder, Generic, LoadedMedia
from packhorse.families.media_sizes import fill_placeholders, shorten, write_out
from packhorse.media import VideoInfo, placeholder_media
from packhorse.types import Conversation, MediaRef, Message, TextPart
from raising import raises_bad_sample

EVERY = tuple(FAMILIES)
SEEING = tuple(name for name in EVERY if "video" in FAMILIES[name].modalities)
RATES = (None, 0.5, 1.0, 7.3, 24.0, 29.97, 60.0)
slow = pytest.mark.slow


def check_images(encoder, sizes):
    """Compare them all; how many there were, and how many of them were rejected."""
    text, rejected = render(encoder, "image"), 0
    for height, width in sizes:
        image = Image.new("RGB", (width, height))
        real = really(encoder, text, LoadedMedia([image], [], []))
        assert predict_ids(encoder, text, [("image", (height, width))]) == real, (height, width)
        rejected += real == "rejected"
    print(f"{encoder.family.name}: {len(sizes)} image sizes, all equal, {rejected} of them rejected by both")
    return rejected


@pytest.mark.parametrize("name", EVERY)
def test_images_of_every_shape(name):
    rejected = check_images(Encoder(processor(name)), image_sizes(every=47))
    assert rejected < 20


@slow
@pytest.mark.parametrize("name", EVERY)
def test_images_on_a_fine_grid_of_sizes(name):
    sizes = image_sizes(every=6)
    assert len(sizes) >= 400
    assert check_images(Encoder(processor(name)), sizes) < 0.25 * len(sizes)


def as_released(name):
    """The processor with the budgets that its class has by default, which released models come near."""
    made = build(name)
    made.image_processor = type(made.image_processor)()
    if name == "gemma3":  # writes its text when it is made
        options = {"chat_template": made.chat_template, "image_seq_length": 256}
        return type(made)(made.image_processor, made.tokenizer, **options)
    tokens = {"internvl": ("image_seq_length", 256), "llava_onevision": ("num_image_tokens", 729)}
    if name in tokens:
        setattr(made, *tokens[name])
    return made


@slow
@pytest.mark.parametrize("name", [name for name in EVERY if FAMILIES[name].bundled])
def test_images_of_every_shape_with_the_budgets_of_released_models(name):
    made = as_released(name)
    assert check_images(Encoder(made), image_sizes(every=60)) < 20


@pytest.mark.parametrize(
    "settings",
    [{"use_thumbnail": False}, {"do_image_splitting": False}, {"min_tiles": 3, "max_tiles": 7}],
    ids=str,
)
def test_images_of_lfm2_vl_by_the_settings_of_its_image_processor(settings):
    made = build("lfm2_vl")
    for name, value in settings.items():
        setattr(made.image_processor, name, value)
    check_images(Encoder(made), image_sizes(every=101))


def test_images_that_lfm2_vl_does_not_take_are_rejected():
    """The processor makes more patches of them than it has places for, or other tokens than patches."""
    encoder = Encoder(processor("lfm2_vl"))
    with pytest.raises(ValueError, match="1 x 8000: too long, it would be scaled to 32 x"):
        encoder.media_tokens("image", (1, 8000))
    with raises_bad_sample("sample_failed", match="too long"):
        encoder.encode(user_asks(MediaRef("image", Image.new("RGB", (8000, 1)))))
    made = build("lfm2_vl")
    made.image_processor.min_tiles = 1
    with pytest.raises(ValueError, match=r"180 x 180: it would be one tile.*min_tiles.*to 2, not 1"):
        Encoder(made).media_tokens("image", (180, 180))


@pytest.mark.parametrize("name", [name for name in EVERY if name != "nemotron_parse"])
def test_several_images_in_one_sample(name):
    encoder = Encoder(processor(name))
    text = render(encoder, "image", "image", "image")
    sizes = image_sizes(every=211)
    for three in zip(sizes[::3], sizes[1::3], sizes[2::3], strict=False):
        media = LoadedMedia([Image.new("RGB", (width, height)) for height, width in three], [], [])
        real = really(encoder, text, media)
        assert predict_ids(encoder, text, [("image", size) for size in three]) == real, three


def check_videos(name, numbers, rates):
    encoder = Encoder(processor(name))
    text, rejected = render(encoder, "video"), 0
    cases = [(frames, fps) for frames in numbers for fps in rates]
    for at, (frames, fps) in enumerate(cases):
        step = (1, 2, 13, 400)[at % 4]
        media = LoadedMedia([], [video(frames, fps, step, 20 + at % 40, 30 + at % 7)], [])
        real = really(encoder, text, media)
        assert predict_ids(encoder, text, media.sizes()) == real, (frames, fps, step)
        rejected += real == "rejected"
    print(f"{name}: {len(cases)} videos, all equal, {rejected} of them rejected by both")
    return rejected


@pytest.mark.parametrize("name", SEEING)
def test_videos_with_their_times(name):
    rejected = check_videos(name, (1, 2, 5, 19), RATES[::2])
    assert rejected == (4 if name in QWEN3_VL else 0)  # it needs two frames


@slow
@pytest.mark.parametrize("name", SEEING)
def test_videos_of_up_to_300_frames(name):
    numbers = (*range(1, 34), 47, 64, 99, 100, 128, 150, 199, 200, 255, 256, 299, 300)
    # Each pair of frames of Qwen3-Omni has at least 128 tokens, and no time.
    check_videos(name, numbers, RATES[:1] if name == "qwen3_omni" else RATES)


def user_asks(*parts):
    return Conversation((Message("user", parts), Message("assistant", (TextPart("A cat."),))))


def compare(encoder, conversation):
    """Ids or the reason of a rejection: as predicted from headers, and as encoded."""
    try:
        encoder.family.check(conversation)
        text = encoder.render(encoder.family.turns(conversation))
        encoder.check_placeholders(text, conversation)
        sizes = [(ref.kind, encoder.size_of(ref)) for ref in conversation.media]
        ours = encoder.tokenize(encoder.expand(text, sizes), rendered=text)
        images = sum(kind == "image" for kind, _ in sizes)
        content = sum(encoder.media_tokens(kind, size, images) for kind, size in sizes)
        assert content == sum(token in encoder.media_token_ids for token in ours)
        outline, omitted = encoder.outline(text, sizes)
        assert len(encoder.tokenize(outline, rendered=text)) + omitted == len(ours)
    except BadSample as error:
        ours = error.reason
    try:
        theirs = encoder.encode(conversation).tokens["input_ids"].tolist()
    except BadSample as error:
        theirs = error.reason
    return ours, theirs


@pytest.fixture(scope="session")
def videos(tmp_path_factory):
    """Video files, short and long, slow and fast."""
    folder = tmp_path_factory.mktemp("videos")
    shapes = [(1, 1), (2, 24), (7, 10), (30, Fraction(30000, 1001)), (75, 25), (120, 60), (99, 1)]
    paths = []
    for frames, fps in shapes:
        paths.append(folder / f"{frames}-{float(fps):.2f}.mp4")
        write_video(paths[-1], frames=frames, fps=fps, width=48, height=32)
    return paths


@pytest.mark.parametrize("name", SEEING)
def test_video_files_by_their_headers(name, videos):
    encoder = Encoder(processor(name))
    settings = ({}, {"fps": 0.7}, {"fps": 4}, {"num_frames": 5}, {"frame_indices": [0]}, {"max_frames": 9})
    for at, path in enumerate(videos):
        for options in (settings[0], settings[1 + at % 5], {"frame_indices": [0, 10_000]}):
            ours, theirs = compare(encoder, user_asks(MediaRef("video", str(path), options)))
            assert ours == theirs, (path.name, options)
    assert ours == "broken_media"  # there is no frame 10,000


def check_conversations(name, number, files):
    encoder = Encoder(processor(name))
    rejected = 0
    for conversation in conversations(name, number, files):
        ours, theirs = compare(encoder, conversation)
        assert ours == theirs, conversation
        rejected += isinstance(ours, str)
    print(f"{name}: {number} conversations, all equal, {rejected} of them rejected by both")
    assert rejected < 0.6 * number


@pytest.mark.parametrize("name", EVERY)
def test_conversations_of_all_shapes(name, files):
    check_conversations(name, 12, files)


@slow
@pytest.mark.parametrize("name", EVERY)
def test_a_thousand_conversations_over_the_families(name, files):
    check_conversations(name, -(-1000 // len(EVERY)), files)


@pytest.mark.parametrize("name", EVERY)
def test_patches_are_the_positions_of_the_vision_encoder(name):
    encoder = Encoder(processor(name))
    for height, width in ((60, 100), (300, 200), (90, 500)):
        media = LoadedMedia([Image.new("RGB", (width, height))], [], [])
        output = encoder.family.call(encoder, render(encoder, "image"), media)
        counted = encoder.media_patches("image", (height, width))
        assert counted == positions(name, output, "image") > 0


@pytest.mark.parametrize("name", SEEING)
def test_patches_of_a_video(name):
    encoder = Encoder(processor(name))
    for frames, height, width in ((4, 60, 100), (6, 100, 40)):
        media = LoadedMedia([], [video(frames, 24.0, 2, height, width)], [])
        output = encoder.family.call(encoder, render(encoder, "video"), media)
        ((_, size),) = media.sizes()
        assert encoder.media_patches("video", size) == positions(name, output, "video") > 0


def positions(name, output, kind):
    """How many patches the tensors hold."""
    if name == "gemma4":
        return int((output[f"{kind}_position_ids"][..., 0] >= 0).sum())
    names = ("image_pixel_values", "pixel_values_videos" if kind == "video" else "", "pixel_values")
    pixels = next(output[key] for key in names if key in output)
    if pixels.ndim == 2 or pixels.shape[-1] == 14:
        return pixels.shape[0]  # they are patches
    side = 16 if name.startswith(("nemotron", "lfm2")) else 14
    together = 2 if name == "nemotron_omni" else 1  # frames that are embedded as one
    return pixels.numel() // 3 // side**2 // together


def test_audio_has_no_patches():
    for name in EVERY:
        if "audio" in FAMILIES[name].modalities:
            assert Encoder(processor(name)).media_patches("audio", 16_000) == 0


def test_every_family_says_how_far_its_counts_can_be_off():
    for family in (*KNOWN, Generic()):
        assert family.off_by == 0 if family.exact else family.off_by is None


def expand_item(encoder, kind, size):
    """The text that the processor tokenises for one media item."""
    return write_out(encoder.family.pieces(encoder, kind, size))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "kimi_k25", "gemma4", "phi4_mm"])
def test_an_unlisted_processor_is_counted_on_placeholder_media(name):
    generic, encoder = Encoder(processor(name), Generic()), Encoder(processor(name))
    size = (90, 130)
    assert expand_item(generic, "image", size) == expand_item(encoder, "image", size)
    assert generic.media_tokens("image", size) == encoder.media_tokens("image", size)
    if name in ("qwen2_vl", "qwen3_vl"):  # of the others it does not know whose the frames are
        video_size = VideoInfo(4, 40, 60, 10.0, 9.0, (0, 30, 61, 90))
        assert expand_item(generic, "video", video_size) == expand_item(encoder, "video", video_size)
    if name not in ("gemma4", "phi4_mm"):
        assert generic.media_patches("image", size) == encoder.media_patches("image", size)


def test_a_conversation_with_placeholder_media_is_as_long_as_the_real_one(files):
    encoder = Encoder(processor("qwen3_vl"), Generic())
    for kind, names in (("image", ("wide.png", "large.png")), ("video", ("video.mp4", "slow.mp4"))):
        refs = [MediaRef(kind, str(files[name])) for name in names]
        placeholders = [placeholder_media(ref.kind, encoder.size_of(ref)) for ref in refs]
        real, same_size = (
            encoder.encode(user_asks(first, TextPart("And then?"), second)).tokens["input_ids"]
            for first, second in (refs, placeholders)
        )
        assert same_size.tolist() == real.tolist()


def test_preloaded_frames_count_as_they_are():
    encoder = Encoder(processor("qwen3_vl"))
    frames = np.zeros((3, 40, 60, 3), np.uint8)
    metadata = {
        "total_num_frames": 90,
        "fps": 30.0,
        "height": 480,
        "width": 640,
        "frames_indices": [0, 44, 89],
    }
    ours, theirs = compare(encoder, user_asks(MediaRef("video", frames, {"video_metadata": metadata})))
    assert ours == theirs


def test_a_typed_content_token_is_counted_as_encoding_counts_it():
    """Gemma 3's soft token is no placeholder: it stays one token, and encoding then rejects the sample."""
    made = processor("gemma3")
    encoder = Encoder(made)
    conversation = user_asks(TextPart(f"What is {made.tokenizer.image_token}?"))
    text = encoder.render(encoder.family.turns(conversation))
    ids = encoder.tokenize(encoder.expand(text, []), rendered=text)
    assert sum(token in encoder.media_token_ids for token in ids) == 1
    with raises_bad_sample("media_mismatch", match="1 media tokens where its media need 0"):
        encoder.encode(conversation)


def test_each_kind_is_written_in_its_own_order_wherever_the_template_puts_it():
    marks = {"image": "<i>", "video": "<v>"}
    text = fill_placeholders("<v> a <i> b <i>", marks, ("image", "image", "video"), ("1", "2", "<i>"))
    assert text == "<i> a 1 b 2"
    assert fill_placeholders("a <i>", {}, ("image",), ("1",)) == "a <i>"


def test_only_tokens_that_nothing_can_split_are_shorten():
    pieces = [("<img>", 1), ("<pad>", 3), ("word ", 2), ("<pad>", 0)]
    assert write_out(pieces) == "<img><pad><pad><pad>word word "
    assert shorten(pieces, {"<img>", "<pad>"}) == ("<img><pad>word word ", 2)
