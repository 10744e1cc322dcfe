"""Pixels as bytes become exactly what the processor returns, or are not used."""

from __future__ import annotations

import copy
import logging
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import packhorse
from contract.processors import FAMILIES, build, processor
from contract.samples import clip
from contract.tiny_models import tiny_model
from packhorse import World
from packhorse.collate_fns import model_inputs
from packhorse.families import Encoder
from packhorse.families.compact import Compact, find_compact
from packhorse.families.pixels import BytePixels, PixelFormat
from packhorse.types import Conversation, MediaRef, Message, TextPart, to_device

# The tensors that can hold bytes, and why others cannot.
BOTH, IMAGES, NONE = (
    frozenset({"pixel_values", "pixel_values_videos"}),
    frozenset({"pixel_values"}),
    frozenset(),
)
BYTES = {
    **{name: BOTH for name in FAMILIES if name.startswith("qwen")},
    **dict.fromkeys(("kimi_k25", "gemma4"), BOTH),
    **dict.fromkeys(("gemma3", "internvl", "smolvlm", "lfm2_vl"), IMAGES),
    "llava_onevision": BOTH - IMAGES,
    **dict.fromkeys(("phi4_mm", "nemotron_omni", "kimi_vl", "nemotron_parse"), NONE),
}
WHY_NOT = {
    "llava_onevision": "padded with 0 after normalising",
    "phi4_mm": "padded with 0 after normalising",
    "nemotron_omni": "not of whole numbers",
    "kimi_vl": "not that of transformers",
    "nemotron_parse": "not that of transformers",
}
LARGEST = 1e-6  # what the docs promise
MODES = ("RGB", "L", "RGBA", "P", "CMYK", "I;16", "1")
CHATS = [name for name in FAMILIES if FAMILIES[name].modalities & {"image", "video"}]


def photograph(number: int) -> Image.Image:
    """An image of odd size; each has another mode, and some have an EXIF orientation."""
    draw = np.random.default_rng(number)
    height, width = (int(side) for side in draw.integers(29, 300, 2))
    pixels = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
    mode = MODES[number % len(MODES)]
    if mode == "I;16":
        return Image.fromarray(draw.integers(0, 1 << 16, (height, width)).astype(np.uint16))
    image = Image.fromarray(pixels).convert(mode)
    if number % 3 == 0:
        image.getexif()[0x0112] = 1 + number % 8
    return image


def about(*refs: MediaRef) -> Conversation:
    return Conversation(
        (Message("user", (*refs, TextPart("What is it?"))), Message("assistant", (TextPart("A cat."),)))
    )


def conversations(name: str) -> list[Conversation]:
    """Conversations about one and two images of all modes, and about videos."""
    found = []
    if "image" in FAMILIES[name].modalities:
        images = [MediaRef("image", photograph(number)) for number in range(2 * len(MODES))]
        found += [about(image) for image in images[::2]] + [about(*images[1:3])]
        if name.startswith("qwen"):  # with a setting of its own
            found.append(about(replace(images[0], options={"max_pixels": 20_000}), images[7]))
    if "video" in FAMILIES[name].modalities:
        for frames, width, height in ((4, 64, 48), (6, 97, 61)):
            pixels, metadata = clip(frames, width, height)
            found.append(about(MediaRef("video", pixels, {"video_metadata": metadata})))
    return found


def expand_media(compact: Compact, media: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The media of a sample as the processor returns them."""
    return {
        key: compact.formats[key].expand(value, media.get(compact.formats[key].mask or ""))
        if key in compact.formats
        else value
        for key, value in media.items()
    }


@pytest.mark.parametrize("name", CHATS)
def test_bytes_become_what_the_processor_returns(name: str) -> None:
    encoder = Encoder(processor(name))
    compact = find_compact(encoder)
    assert set(compact.formats) == BYTES[name]
    assert WHY_NOT.get(name, "") in " ".join(compact.problems.values())
    as_bytes = pickle.loads(pickle.dumps(Encoder(encoder.processor, encoder.family, compact)))
    for conversation in conversations(name) if compact.formats else []:
        expected, actual = encoder.encode(conversation), as_bytes.encode(conversation)
        for key, value in expected.tokens.items():
            assert value.equal(actual.tokens[key]), key
        found = expand_media(compact, actual.media)
        assert found.keys() == expected.media.keys()
        for key, value in expected.media.items():
            if key in compact.formats:
                assert actual.media[key].dtype == torch.uint8
                assert found[key].shape == value.shape
                assert found[key].dtype == value.dtype
                assert float((found[key] - value).abs().max()) <= LARGEST, key
            else:
                assert torch.equal(found[key].nan_to_num(), value.nan_to_num()), key


@pytest.mark.parametrize("name", ["qwen2_vl", "kimi_k25", "lfm2_vl"])
def test_another_normalisation_is_seen(name: str) -> None:
    """The control of the test above."""
    encoder = Encoder(processor(name))
    compact = find_compact(encoder)
    found = compact.formats["pixel_values"]
    sample = Encoder(encoder.processor, encoder.family, compact).encode(conversations(name)[0])
    expected = encoder.encode(conversations(name)[0]).media["pixel_values"]
    wrong = replace(found, mean=tuple(value + 0.01 for value in found.mean))
    for one, right in ((found, True), (wrong, False)):
        actual = expand_media(replace(compact, formats={"pixel_values": one}), sample.media)["pixel_values"]
        assert (float((actual - expected).abs().max()) <= LARGEST) is right


@pytest.mark.parametrize(
    ("channels", "shape"), [("first", (5, 12)), ("last", (5, 12)), (1, (5, 3, 2, 2)), (2, (5, 4, 3, 2))]
)
def test_each_channel_has_its_own_mean_wherever_it_is(channels: Any, shape: tuple[int, ...]) -> None:
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = torch.tensor([10.0, 20.0, 30.0]), torch.tensor([2.0, 3.0, 4.0])
    number = torch.arange(pixels.numel()).view(shape)  # of each pixel
    per_row = {"first": number % 12 // 4, "last": number % 12 % 3}
    channel = per_row[channels] if isinstance(channels, str) else number // (4 if channels == 1 else 2) % 3
    made = PixelFormat(tuple(mean.tolist()), tuple(std.tolist()), channels).expand(pixels)
    assert torch.equal(made, (pixels - mean[channel]) / std[channel])


def test_padding_is_zero_where_the_mask_says_so() -> None:
    pixels, mask = torch.full((2, 3, 6), 9, dtype=torch.uint8), torch.tensor([[1, 1, 0], [1, 0, 0]])
    made = PixelFormat((1.0,) * 3, (2.0,) * 3, "first", mask="mask").expand(pixels, mask)
    assert torch.equal(made, 4.0 * mask[..., None].expand(2, 3, 6))


def write_rows(folder: Path, number: int = 6) -> str:
    for index in range(number):
        image = photograph(7 * index)  # of mode RGB
        image.save(folder / f"{index}.png")
    rows = [
        f'{{"messages": [{{"role": "user", "content": "<image>What is {index}?"}}, '
        f'{{"role": "assistant", "content": "A cat."}}], "images": ["{index}.png"]}}'
        for index in range(number)
    ]
    path = folder / "train.jsonl"
    path.write_text("\n".join(rows))
    return str(path)


def load(data: str, name: str, **settings: Any) -> packhorse.Loader:
    model = settings.pop("model", None) or tiny_model(name)
    made = settings.pop("processor", None) or processor(name)
    settings = {"pack_size": 768, "num_workers": 0, **settings}
    return packhorse.load(data, made, model=model, world=World(), **settings)


def assert_same(actual: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(actual[key], value)
    elif isinstance(expected, list):
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    else:
        assert torch.equal(actual, expected) if isinstance(expected, torch.Tensor) else actual == expected


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "smolvlm"])
@pytest.mark.parametrize("mode", ["pack", "pad"])
def test_batches_with_bytes_become_those_of_the_processor(tmp_path: Path, name: str, mode: str) -> None:
    data = write_rows(tmp_path)
    plain, auto, compact, glue = (
        load(data, name, mode=mode, pixels=p) for p in ("processor", "auto", "compact", "auto")
    )
    for expected, usual, batch, again in zip(plain, auto, compact, glue.keep_bytes(), strict=True):
        assert type(usual["pixel_values"]) is type(expected["pixel_values"]) is torch.Tensor
        assert_same(usual, expected)
        assert type(batch["pixel_values"]) is BytePixels
        assert batch["pixel_values"].data_bytes.nbytes * 4 <= expected["pixel_values"].nbytes
        for moved in (to_device(batch, "cpu"), batch.to("cpu"), to_device(again, "cpu")):
            assert type(moved["pixel_values"]) is torch.Tensor
            assert moved.info.keys == expected.info.keys
            assert_same(moved, expected)
        assert_same(batch, expected)
        assert torch.equal(model_inputs(batch)["pixel_values"], expected["pixel_values"])
    assert compact.epoch_stats is not None
    assert compact.epoch_stats.delivered == 6


def test_bytes_are_the_pixels_whatever_is_done_with_them(tmp_path: Path) -> None:
    expected = next(iter(load(write_rows(tmp_path), "gemma3", pixels="processor")))["pixel_values"]
    pixels = next(iter(load(str(tmp_path / "train.jsonl"), "gemma3", pixels="compact")))["pixel_values"]
    assert (pixels.shape, pixels.dtype, pixels.device) == (expected.shape, expected.dtype, expected.device)
    assert pixels.is_floating_point()
    assert "BytePixels" in repr(pixels)
    kept = [pickle.loads(pickle.dumps(pixels)), copy.copy(pixels), pixels.detach()]
    assert all(type(value) is BytePixels for value in kept)
    computed = {
        "bytes": (kept[0], kept[1], kept[2], copy.deepcopy(pixels), pixels.clone(), pixels.contiguous()),
        "moved": (pixels.to("cpu"), pixels.to(torch.float32), pixels.cpu(), pixels.float()),
        "operations": (pixels * 1, torch.cat([pixels[:1], pixels[1:]]), torch.stack(list(pixels))),
        "views": (pixels.view(-1).view(pixels.shape), pixels.flatten(1).reshape(pixels.shape)),
    }
    for values in computed.values():
        for value in values:
            assert torch.equal(value, expected)
    assert np.array_equal(pixels.numpy(), expected.numpy())
    assert pixels.to(memory_format=torch.channels_last).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(pixels.to(torch.float64), expected.to(torch.float64))
    assert torch.equal(pixels.half(), expected.half())
    other = pixels.to("meta", non_blocking=True)  # another device: the bytes are moved, and expanded there
    assert (type(other), other.shape, other.dtype) == (torch.Tensor, expected.shape, expected.dtype)


@pytest.mark.parametrize("name", ["gemma3", "qwen2_vl"])
def test_a_batch_that_loses_its_class_still_has_the_pixels(tmp_path: Path, name: str) -> None:
    data, model = write_rows(tmp_path), copy.deepcopy(tiny_model(name)).eval()
    packhorse.prepare(model, device="cpu")
    (expected, *_), (batch, *_) = (load(data, name, model=model, pixels=p) for p in ("processor", "compact"))
    with torch.no_grad():
        loss = model(**expected).loss
        moved = {**batch, "pixel_values": batch["pixel_values"].to("cpu")}
        for inputs in (batch, dict(batch), moved):
            assert torch.equal(model(**inputs).loss, loss)
        wrong = {**batch, "pixel_values": batch["pixel_values"] * 255}
        assert not torch.equal(model(**wrong).loss, loss), "the control: the pixels matter"


def test_processors_of_pil_leave_bytes_too(tmp_path: Path) -> None:
    data, own = write_rows(tmp_path), build("qwen2_vl")
    own.image_processor = transformers.Qwen2VLImageProcessorPil(**own.image_processor.to_dict())
    batches = (load(data, "qwen2_vl", processor=own, pixels=p) for p in ("compact", "processor"))
    for batch, expected in zip(*batches, strict=True):
        assert type(batch["pixel_values"]) is BytePixels
        assert float((batch["pixel_values"] - expected["pixel_values"]).abs().max()) <= LARGEST


@pytest.mark.parametrize("name", ["internvl", "smolvlm"])
@pytest.mark.parametrize("kind", ["image", "video"])
def test_kinds_that_share_a_tensor_are_bytes_together(name: str, kind: Any) -> None:
    found = find_compact(Encoder(processor(name)), [kind])
    for part in (found.processor.image_processor, found.processor.video_processor):
        assert not part.do_rescale
    own = build(name)
    own.video_processor.image_mean = [0.1, 0.2, 0.3]
    problems = find_compact(Encoder(own), [kind])
    assert not problems.formats
    assert "normalised differently" in problems.problems["video"]


def test_workers_send_bytes_and_the_same_batches(tmp_path: Path) -> None:
    data = write_rows(tmp_path)
    expected = list(load(data, "qwen2_vl", pixels="processor"))
    with_workers = load(data, "qwen2_vl", pixels="compact", num_workers=1)
    for batch, other in zip(with_workers, expected, strict=True):
        assert type(batch["pixel_values"]) is BytePixels
        assert_same(to_device(batch, "cpu"), other)
    with_workers.close()


def test_media_of_a_pipeline_are_those_of_the_processor(tmp_path: Path) -> None:
    data = write_rows(tmp_path)
    settings = {"mode": "pad", "batch_size": 2, "pipeline_microbatches": 2}
    batches = [list(load(data, "qwen2_vl", pixels=p, **settings)) for p in ("compact", "processor")]
    for batch, expected in zip(*batches, strict=True):
        assert_same(batch, expected)


def test_a_processor_that_does_more_is_called_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class ClippingProcessor(transformers.Qwen2VLImageProcessor):  # type: ignore[misc]
        def rescale_and_normalize(self, images: torch.Tensor, *arguments: Any) -> torch.Tensor:
            """Normalise, and do something else in addition."""
            return super().rescale_and_normalize(images, *arguments).clamp(-1, 1)

    data, own = write_rows(tmp_path), build("qwen2_vl")
    own.image_processor = ClippingProcessor(**own.image_processor.to_dict())
    with caplog.at_level(logging.WARNING, "packhorse.loader"):
        found = list(load(data, "qwen2_vl", processor=own, pixels="compact"))
    assert "'pixel_values' is not a resized image that is rescaled and normalised" in caplog.text
    expected = list(load(data, "qwen2_vl", processor=own, pixels="processor"))
    for batch, other in zip(found, expected, strict=True):
        assert_same(batch, other)
        assert float(batch["pixel_values"].abs().max()) == 1


def test_text_alone_tries_nothing_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("the processor is tried out")

    monkeypatch.setattr("packhorse.loader.startup.find_compact", fail)
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    (batch,) = load([{"messages": turns}], "qwen2_vl", pixels="compact")  # type: ignore[arg-type]
    assert "pixel_values" not in batch


@pytest.mark.parametrize("wrong", ["byte", 1])
def test_another_setting_of_pixels_raises(wrong: Any) -> None:
    with pytest.raises(packhorse.errors.ConfigError, match="pixels"):
        packhorse.LoaderConfig(data="train.jsonl", pixels=wrong)
