"""Settings for the size of media: tokens and pixels are those of qwen_vl_utils and of the processors."""

from __future__ import annotations

import importlib
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import packhorse
from contract.exact import conversations
from contract.media_files import write_video
from contract.processors import FAMILIES, build, processor
from contract.tiny_models import tiny_model
from count_samples import write_rows
from noise_floor import largest_difference, noise_floor
from packhorse.collate_fns import default_collate_fn, qwen2_5_collate_fn, qwen3_omni_collate_fn
from packhorse.count.counting import count_meta
from packhorse.count.sidecar import Sidecar
from packhorse.count.token_counter import TokenCounter
from packhorse.errors import BadSample, ConfigError
from packhorse.families import Encoder
from packhorse.formats.conversation import parse_conversation
from packhorse.formats.meta import open_meta_dataset
from packhorse.media import load_video
from packhorse.types import Conversation, MediaRef, Message, TextPart

QWEN = tuple(name for name in FAMILIES if name.startswith("qwen"))
BUDGETED = (*QWEN, "kimi_k25", "gemma4")
SETTINGS: dict[str, list[dict[str, Any]]] = {
    **{
        name: [
            {"max_pixels": 20_000},
            {"min_pixels": 200_000},
            {"min_pixels": 784 * 20, "max_pixels": 784 * 30},
            {"resized_height": 300, "resized_width": 100},
        ]
        for name in QWEN
    },
    "kimi_k25": [{"max_pixels": 20_000}, {"max_pixels": 196}],
    "gemma4": [{"max_soft_tokens": 140}, {"max_soft_tokens": 280}],
}
SIZES = ((300, 400), (37, 900), (14, 15), (1000, 800))


def noise(height: int, width: int) -> Image.Image:
    draw = np.random.default_rng(height * width)
    return Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))


def ask(*refs: MediaRef) -> Conversation:
    question = Message("user", (*refs, TextPart("What is it?")))
    return Conversation((question, Message("assistant", (TextPart("A cat."),))), "row/0")


def utils() -> Any:
    """The module that qwen_vl_utils and qwen_omni_utils have in common."""
    return importlib.import_module("qwen_omni_utils.v2_5.vision_process")


def tokens_of(encoder: Encoder, ref: MediaRef) -> int:
    return encoder.media_tokens(ref.kind, encoder.size_of(ref))


def grid_of(encoder: Encoder, ref: MediaRef) -> list[int]:
    grid = encoder.encode(ask(ref)).media[f"{ref.kind}_grid_thw"]
    assert tokens_of(encoder, ref) * encoder.vision(ref.kind).merge_size ** 2 == int(grid.prod())
    return grid[0].tolist()


@pytest.mark.parametrize("name", QWEN)
@pytest.mark.parametrize("size", [(300, 400), (1000, 60), (90, 1000), (2000, 1500)])
def test_images_have_the_size_that_qwen_vl_utils_gives_them(name, size):
    encoder = Encoder(processor(name))
    owner = encoder.processor.image_processor
    token = (owner.patch_size * owner.merge_size) ** 2
    for settings in (
        {"min_pixels": 4 * token, "max_pixels": 64 * token},
        {"min_pixels": 500 * token, "max_pixels": 900 * token},
        {"resized_height": 290, "resized_width": 500},
        {"resized_height": 290, "resized_width": 500, "max_pixels": token},
        {"max_pixels": 50 * token},  # smaller than these images
    ):
        image = noise(*size)
        resized = utils().fetch_image({"image": image, **settings}, image_patch_size=owner.patch_size)
        theirs = owner(images=[resized], do_resize=False, return_tensors="pt")
        assert grid_of(encoder, MediaRef("image", image, settings)) == theirs["image_grid_thw"][0].tolist()
        if "resized_height" in settings:
            ours = encoder.encode(ask(MediaRef("image", image, settings))).media["pixel_values"]
            assert torch.equal(ours, theirs["pixel_values"])


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    write_video(path, frames=40, fps=10, width=200, height=120)
    return path


@pytest.mark.parametrize("name", QWEN)
def test_videos_have_the_size_that_qwen_vl_utils_gives_them(name, clip, monkeypatch):
    monkeypatch.setattr(utils(), "get_video_reader_backend", lambda: "decord")
    encoder = Encoder(processor(name))
    owner = encoder.processor.video_processor
    token = (owner.patch_size * owner.merge_size) ** 2
    for settings in (
        {"min_pixels": 4 * token, "max_pixels": 8 * token},
        {"min_pixels": 60 * token, "max_pixels": 200 * token},
        {"min_pixels": 4 * token, "max_pixels": 64 * token, "total_pixels": 70 * token},
        {"min_pixels": 4 * token, "total_pixels": 33 * token},
        {"min_pixels": 1000 * token, "max_pixels": 2000 * token},  # above the 768 tokens of a frame
        {"resized_height": 90, "resized_width": 300},
    ):
        ele = {"video": str(clip), "fps": 1.5, **settings}
        resized, metadata = utils().fetch_video(
            ele, image_patch_size=owner.patch_size, return_video_metadata=True
        )
        call = {"do_resize": False, "do_sample_frames": False, "return_tensors": "pt"}
        theirs = owner(videos=[resized.to(torch.uint8)], **call)
        options = {**settings, "frame_indices": list(metadata["frames_indices"])}
        assert grid_of(encoder, MediaRef("video", str(clip), options)) == theirs["video_grid_thw"][0].tolist()


def test_a_side_below_half_a_token_follows_the_processor_and_not_the_package():
    """The package gives such a side one token, and lets the other side be; the processor scales both."""
    encoder, image, limits = Encoder(processor("qwen2_vl")), noise(10, 2000), {}
    limits = {"min_pixels": 4 * 784, "max_pixels": 1280 * 784}
    own = encoder.processor.image_processor
    theirs = own(images=[image], size={"shortest_edge": 4 * 784, "longest_edge": 1280 * 784})
    assert grid_of(encoder, MediaRef("image", image, limits)) == theirs["image_grid_thw"][0].tolist()
    assert utils().fetch_image({"image": image, **limits}).size == (71 * 28, 28)


def call_size(settings: dict[str, int], owner: Any) -> dict[str, int]:
    """The argument ``size`` of Qwen's image processors for an item's limits."""
    least = settings.get("min_pixels", owner.size["shortest_edge"])
    most = settings.get("max_pixels", owner.size["longest_edge"])
    return {"shortest_edge": min(least, most), "longest_edge": max(least, most)}


def own_call(encoder: Encoder, image: Image.Image, settings: dict[str, int]) -> Any:
    """What the image processor itself makes of an image with this setting in its call."""
    owner, options = encoder.processor.image_processor, dict[str, Any](settings)
    if encoder.family.name == "kimi_k25":
        options = {"max_patches": settings["max_pixels"] // 196} if settings else {}
    elif encoder.family.name != "gemma4":
        options = {"size": call_size(settings, owner)}
    return owner(images=[image], return_tensors="pt", **options)


@pytest.mark.parametrize("name", BUDGETED)
def test_pixels_of_images_are_those_of_the_processor_called_with_the_setting(name):
    encoder = Encoder(processor(name))
    limits = [settings for settings in SETTINGS[name] if "resized_height" not in settings]
    images = [(noise(*size), settings) for size in SIZES for settings in ({}, *limits)]
    encoded = encoder.encode(ask(*(MediaRef("image", image, settings) for image, settings in images)))
    expected = [own_call(encoder, image, settings)["pixel_values"] for image, settings in images]
    rows = encoder.rows(encoded, "pixel_values")
    for ours, theirs in zip(encoded.media["pixel_values"].split(rows), expected, strict=True):
        kept = ours[:, : theirs.shape[1]]  # patches of Gemma 4 are padded to the largest budget
        assert torch.equal(kept, theirs)
        assert not ours[:, theirs.shape[1] :].any()


@pytest.mark.parametrize("name", QWEN)
def test_pixels_of_videos_are_those_of_the_processor_called_with_the_setting(name, clip):
    encoder = Encoder(processor(name))
    owner = encoder.processor.video_processor
    chosen = {"frame_indices": [0, 9, 20, 31]}
    frames = load_video(str(clip), frame_indices=chosen["frame_indices"]).frames
    token = (owner.patch_size * owner.merge_size) ** 2
    settings = [{"min_pixels": 4 * token, "max_pixels": n * token} for n in (8, 20)]
    refs = [MediaRef("video", str(clip), {**chosen, **one}) for one in settings]
    encoded = encoder.encode(ask(*refs))
    rows = encoder.rows(encoded, "pixel_values_videos")
    per_frame = 1 if "Qwen3" not in type(owner).__name__ else len(frames)  # Qwen3-VL has one budget for all
    for ours, one in zip(encoded.media["pixel_values_videos"].split(rows), settings, strict=True):
        size = {"shortest_edge": one["min_pixels"] * per_frame, "longest_edge": one["max_pixels"] * per_frame}
        call = {"do_sample_frames": False, "return_tensors": "pt", "input_data_format": "channels_last"}
        theirs = owner(videos=[frames], size=size, cap_pixels_per_frame=False, **call)
        assert torch.equal(ours, theirs["pixel_values_videos"])


@pytest.mark.parametrize("name", BUDGETED)
def test_counts_of_conversations_with_settings_are_exact(name, files):
    encoder, draw = Encoder(processor(name)), random.Random(name)
    videos = [
        {k: v for k, v in one.items() if k != "min_pixels"} or {"max_pixels": 9_000} for one in SETTINGS[name]
    ]
    if name in QWEN:
        videos.append({"total_pixels": 60_000, "min_pixels": 3_000})

    def with_settings(part: Any) -> Any:
        if not isinstance(part, MediaRef) or part.kind == "audio" or draw.random() < 0.3:
            return part
        chosen = draw.choice(SETTINGS[name] if part.kind == "image" else videos)
        return replace(part, options={**part.options, **chosen})

    def change(message: Message) -> Message:
        return replace(message, parts=tuple(map(with_settings, message.parts)))

    made = [
        replace(conversation, messages=tuple(map(change, conversation.messages)))
        for conversation in conversations(name, 60, files)
    ]
    compared = 0
    for conversation, counted in zip(made, TokenCounter(encoder).count_many(made), strict=True):
        if isinstance(counted, BadSample):
            with pytest.raises(BadSample) as raised:
                encoder.encode(conversation)
            assert raised.value.reason == counted.reason
            continue
        encoded = encoder.encode(conversation)
        assert counted.count.total == len(encoded.tokens["input_ids"])
        assert counted.count.supervised == int((encoder.labels(encoded) != -100).sum())
        pairs = zip(counted.media, encoded.sizes, strict=True)
        assert all(item.size == size for item, (kind, size) in pairs if kind != "audio")
        compared += bool(conversation.media)
    assert compared > 20


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in BUDGETED])
def test_families_without_a_budget_reject_settings_by_name(name, tmp_path):
    encoder = Encoder(processor(name))
    row = ask(MediaRef("image", noise(20, 20), {"max_pixels": 1000}))
    for use in (encoder.encode, TokenCounter(encoder).count):
        with pytest.raises(
            BadSample, match=f"max_pixels has no effect on images of {encoder.family.name}"
        ) as raised:
            use(row)
        assert (raised.value.reason, raised.value.key) == ("wrong_format", "row/0")
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "Q", "completion": "A"}])
    meta = {"pics": {"file_name": str(tmp_path / "rows.jsonl"), "max_pixels": 1000}}
    with pytest.raises(ConfigError, match=r"dataset 'pics': max_pixels has no effect") as error:
        count_meta(meta, encoder)
    assert error.value.setting == "max_pixels"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_pixels": -1}, "max_pixels is -1"),
        ({"max_pixels": 0}, "max_pixels is 0"),
        ({"max_pixels": "many"}, "max_pixels is 'many'"),
        ({"max_pixels": True}, "max_pixels is True"),
        ({"max_pixels": 1000.5}, "max_pixels is 1000.5"),
        ({"min_pixels": 2000, "max_pixels": 1000}, "min_pixels=2,000 is above max_pixels=1,000"),
        ({"min_pixels": 1 << 40}, "more than the"),
        ({"resized_height": 100}, "resized_height without resized_width"),
        ({"total_pixels": 1000}, "total_pixels has no effect on images"),
        ({"video_max_pixels": 1000}, "video_max_pixels has no effect on images"),
        ({"max_soft_tokens": 70}, "max_soft_tokens has no effect on images"),
    ],
)
def test_invalid_settings_of_an_item_are_rejected_with_its_key(options, words):
    encoder = Encoder(processor("qwen2_vl"))
    for use in (encoder.encode, TokenCounter(encoder).count):
        with pytest.raises(BadSample, match=words) as raised:
            use(ask(MediaRef("image", noise(20, 20), options)))
        assert (raised.value.reason, raised.value.key) == ("wrong_format", "row/0")


@pytest.mark.parametrize(
    ("options", "reason", "words"),
    [
        ({"min_frames": 9, "max_frames": 3}, "wrong_format", "min_frames=9 is above max_frames=3"),
        ({"max_pixels": 1, "video_max_pixels": 2}, "wrong_format", "max_pixels and video_max_pixels differ"),
        ({"min_pixels": 178_000_000}, "media_too_large", "frames resized to"),
    ],
)
def test_invalid_settings_of_a_video_are_rejected_with_its_key(options, reason, words, clip):
    encoder = Encoder(processor("qwen2_vl"))
    for use in (encoder.encode, TokenCounter(encoder).count):
        with pytest.raises(BadSample, match=words) as raised:
            use(ask(MediaRef("video", str(clip), {"num_frames": 20, **options})))
        assert (raised.value.reason, raised.value.key) == (reason, "row/0")


def test_a_limit_below_the_processors_other_limit_moves_it():
    encoder = Encoder(processor("qwen3_vl"))
    low, high = 4096, 262_144  # of the processor
    assert tokens_of(encoder, MediaRef("image", noise(400, 400), {"max_pixels": low // 2})) == 1
    large = MediaRef("image", noise(400, 400), {"min_pixels": 2 * high})
    assert tokens_of(encoder, large) * 1024 >= 2 * high


def test_gemma4_takes_the_budgets_of_its_class():
    encoder = Encoder(processor("gemma4"))
    with pytest.raises(BadSample, match="max_soft_tokens") as raised:
        encoder.encode(ask(MediaRef("image", noise(20, 20), {"max_soft_tokens": 100})))
    assert raised.value.reason == "wrong_format"
    with pytest.raises(ConfigError, match="max_soft_tokens"):
        encoder.check_dataset_settings("pics", {"max_soft_tokens": 100})


def test_images_of_gemma4_with_different_budgets_have_the_same_features_alone_and_together(parity):
    """Patches are padded to the largest budget of a batch: the model must not see the padding."""
    encoder, model = Encoder(processor("gemma4")), tiny_model("gemma4")
    refs = [MediaRef("image", noise(300, 200), {"max_soft_tokens": n}) for n in (70, 280, 140)]
    alone, together = [encoder.encode(ask(ref)).media for ref in refs], encoder.encode(ask(*refs)).media
    assert together["image_position_ids"].min() == -1

    def features(pixels: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            return list(model.model.get_image_features(pixels, positions).pooler_output)

    def of(media: Any, copies: int = 1) -> list[torch.Tensor]:
        pair = (media["pixel_values"], media["image_position_ids"])
        return features(*(value.repeat(copies, *[1] * (value.dim() - 1)) for value in pair))[: len(pair[0])]

    expected, twice = torch.cat([of(one)[0] for one in alone]), torch.cat([of(one, 2)[0] for one in alone])
    difference = largest_difference(torch.cat(of(together)), expected)
    whole = of(together)
    changed = together["image_position_ids"].clone()
    changed[1] = changed[1].flip(0)
    mistake = torch.cat([whole[0], features(together["pixel_values"], changed)[1], whole[2]])
    control = largest_difference(mistake, expected)
    parity.check("features", difference, noise_floor(expected, twice), control)


CHART = {"messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "A cat."}]}


@pytest.fixture(scope="module")
def charts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("charts")
    for at, size in enumerate(SIZES):
        noise(*size).save(folder / f"{at}.png")
    rows = [{**CHART, "images": [f"{at}.png"]} for at in range(len(SIZES))]
    rows.append({**CHART, "images": [{"path": "0.png", "max_pixels": 9_000}]})
    return write_rows(folder / "rows.jsonl", rows)


def totals(report: Any) -> list[int]:
    return [int(n) for each in report.datasets for n in Sidecar(each.sidecar).columns().total]


def meta_of(rows: Path, **settings: Any) -> dict[str, Any]:
    return {"pics": {"file_name": str(rows), "media_dir": str(rows.parent), **settings}}


def test_a_setting_of_a_dataset_counts_as_the_processors_and_an_items_own_wins(charts):
    plain, changed = build("qwen2_vl"), build("qwen2_vl")
    changed.image_processor.size = {"shortest_edge": 3136, "longest_edge": 50_000}
    by_dataset = totals(count_meta(meta_of(charts, max_pixels=50_000), plain))
    assert by_dataset == totals(count_meta(meta_of(charts), changed))
    without = totals(count_meta(meta_of(charts), plain))
    assert by_dataset[0] < without[0]
    assert by_dataset[-1] == without[-1]
    encoder = Encoder(plain)
    dataset = open_meta_dataset(meta_of(charts, max_pixels=50_000))
    encoded = [encoder.encode(parse_conversation(example)).tokens["input_ids"] for example in dataset]
    assert list(map(len, encoded)) == by_dataset


def test_saved_counts_have_the_settings_in_their_key_and_with_each_item(charts):
    plain = Encoder(build("qwen2_vl"))
    reports = [
        count_meta(meta_of(charts, **one), plain) for one in ({}, {"max_pixels": 50_000}) for _ in "ab"
    ]
    assert [report.counted_rows for report in reports] in ([5, 0, 5, 0], [0, 0, 0, 0])
    first, _, other, _ = (report.datasets[0].sidecar for report in reports)
    assert first != other
    own = '{"max_pixels": 9000}'
    assert Sidecar(first).media().settings.tolist() == [*[""] * len(SIZES), own]
    assert Sidecar(other).media().settings.tolist() == ['{"max_pixels": 50000}'] * len(SIZES) + [own]
    sizes = Sidecar(other).media()
    assert list(zip(sizes.height.tolist(), sizes.width.tolist(), strict=True)) == [*SIZES, SIZES[0]]


def test_settings_of_a_dataset_are_checked_when_it_is_opened(charts):
    for settings, words in (
        ({"max_pixels": -1}, "max_pixels"),
        ({"max_pixels": True}, "max_pixels"),
        ({"max_pixels": "1000"}, "max_pixels"),
        ({"min_pixels": 2000, "max_pixels": 1000}, "min_pixels=2,000 is above"),
        ({"resized_width": 2000}, "resized_width without"),
        ({"fps": 0}, "fps"),
        ({"min_frames": 5, "max_frames": 2}, "min_frames=5 is above"),
        ({"max_pixel": 1000}, "did you mean 'max_pixels'"),
    ):
        with pytest.raises(ConfigError, match=words):
            open_meta_dataset(meta_of(charts, **settings))


def test_frames_of_a_dataset_and_of_its_items(clip):
    video = {"messages": CHART["messages"]}
    video = json.loads(json.dumps(video).replace("<image>", "<video>"))
    entries = ["clip.mp4", {"path": "clip.mp4", "num_frames": 6}, {"path": "clip.mp4", "fps": 2}]
    rows = write_rows(clip.parent / "rows.jsonl", [{**video, "videos": [entry]} for entry in entries])
    encoder = Encoder(processor("qwen3_vl"))
    dataset = open_meta_dataset(meta_of(rows, num_frames=4, video_max_pixels=9_000))
    sizes = [encoder.size_of(parse_conversation(example).media[0]) for example in dataset]
    assert [size.size.total_frames for size in sizes] == [4, 6, 8]
    assert all(dict(size.settings) == {"max_pixels": 9_000} for size in sizes)


# --- collating and loading --------------------------------------------------------------------------------


def examples_of(name: str) -> list[dict[str, Any]]:
    """Examples whose images have different settings."""
    return [
        {
            "conversation": [
                {"role": "user", "content": [{"type": "image", "image": noise(*size), **settings}]},
                {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
            ]
        }
        for size, settings in zip(SIZES, ({}, *SETTINGS[name]), strict=False)
    ]


@pytest.mark.parametrize("name", BUDGETED)
def test_samples_of_different_settings_are_collated(name):
    encoder, examples = Encoder(processor(name)), examples_of(name)
    batch = default_collate_fn(examples, encoder.processor, pixel_dtype=None)
    alone = [encoder.encode(parse_conversation(example)) for example in examples]
    rows = [encoder.rows(one, "pixel_values") for one in alone]
    parts = batch["pixel_values"].split([sum(of_sample) for of_sample in rows])
    for part, one in zip(parts, alone, strict=True):
        kept = one.media["pixel_values"]
        assert torch.equal(part[:, : kept.shape[1]], kept)
        assert not part[:, kept.shape[1] :].any()
    if name == "gemma4":
        assert int((batch["image_position_ids"] == -1).all(-1).sum()) > 0


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma4"])
def test_a_loader_delivers_the_rows_as_they_were_counted(name):
    settings = SETTINGS[name][0]
    loader = packhorse.load(
        [{**CHART, "images": [noise(*size)]} for size in SIZES],
        processor(name),
        model="unchecked",
        pack_size=2048,
        dataset_options=settings,
    )
    encoder = Encoder(processor(name))
    expected = [
        len(encoder.encode(ask_as(CHART, MediaRef("image", noise(*size), settings))).tokens["input_ids"]) - 1
        for size in SIZES
    ]
    lengths = [length for batch in loader for row in batch.info.document_lengths for length in row]
    assert sorted(lengths) == sorted(expected)


def ask_as(row: dict[str, Any], ref: MediaRef) -> Conversation:
    question = Message("user", (ref, TextPart(row["messages"][0]["content"].removeprefix("<image>"))))
    return Conversation((question, Message("assistant", (TextPart(row["messages"][1]["content"]),))))


def test_a_loader_rejects_settings_of_a_dataset_that_the_family_does_not_take():
    rows = [{**CHART, "images": [noise(20, 20)]}]
    with pytest.raises(ConfigError, match="max_pixels has no effect on images of smolvlm"):
        packhorse.load(rows, processor("smolvlm"), model="unchecked", dataset_options={"max_pixels": 1000})


class Wrapper:
    """A processor around another one, as some training scripts have it."""

    def __init__(self, inner: Any) -> None:
        self.processor, self.tokenizer = inner, inner.tokenizer
        self.image_processor, self.video_processor = inner.image_processor, inner.video_processor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["processor"], name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.processor(*arguments, **options)


def test_a_wrapped_processor_rejects_settings_that_would_not_reach_it():
    encoder = Encoder(Wrapper(processor("qwen2_vl")))
    encoder.encode(ask(MediaRef("image", noise(60, 60))))
    for use in (encoder.encode, TokenCounter(encoder).count):
        with pytest.raises(ConfigError, match="need a processor of transformers itself"):
            use(ask(MediaRef("image", noise(60, 60), {"max_pixels": 1000})))


def test_a_batched_call_rejects_settings_of_an_item():
    """A processor of no listed family, and a stub, get all media in one call."""

    class Stub:
        def apply_chat_template(self, *_: Any, **__: Any) -> str:
            return "text"

        def __call__(self, **_: Any) -> Any:
            raise AssertionError("not called")

    Stub.__name__ = "Qwen2_5_VLProcessor"
    example = examples_of("qwen2_vl")[1]
    with pytest.raises(BadSample, match="one call of Qwen2_5_VLProcessor has one setting") as raised:
        qwen2_5_collate_fn([example], Stub())
    assert raised.value.reason == "wrong_format"


def test_the_package_of_qwen3_omni_gets_the_settings(clip, monkeypatch):
    """qwen3_omni_collate_fn leaves resizing to the package, which knows the names next to an item."""
    package = importlib.import_module("qwen_omni_utils")
    given: list[dict[str, Any]] = []

    def record(turns: Any, *arguments: Any, **options: Any) -> Any:
        given.extend({k: v for k, v in part.items() if "pixels" in k} for part in turns[0]["content"])
        return original(turns, *arguments, **options)

    original = package.process_mm_info
    monkeypatch.setattr(package, "process_mm_info", record)
    content = [
        {"type": "image", "image": noise(300, 400), "max_pixels": 30 * 1024},
        {"type": "video", "video": str(clip), "frame_indices": [0, 8], "video_max_pixels": 200 * 1024},
        {"type": "video", "video": [noise(64, 64)] * 4, "total_pixels": 10_000 * 1024},
    ]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "A cat."}]
    batch = qwen3_omni_collate_fn([{"conversation": turns}], processor("qwen3_omni"))
    assert given == [{"max_pixels": 30 * 1024}, {"max_pixels": 200 * 1024}, {"total_pixels": 10_000 * 1024}]
    assert int(batch["image_grid_thw"].prod()) // 4 <= 30
