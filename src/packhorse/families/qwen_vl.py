"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL (its MoE and the Qwen3.5 models use the same processor).

Also the positions [3, S] (time, height, width) of models with mRoPE, which the model's own ``get_rope_index``
computes: a few hundred microseconds for a sample.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from packhorse.errors import ConfigError
from packhorse.families.encoder import Encoder, Family
from packhorse.families.media_sizes import Pieces, frame_pieces, frame_times
from packhorse.families.models import ModelConfig, resolve_model, weightless_model
from packhorse.media import MediaSize, VideoFrames, VideoInfo
from packhorse.media.images import fit_image, image_tokens, resize_image, resize_video
from packhorse.types import MediaKind, MediaLayout, TensorLayout

if TYPE_CHECKING:
    import torch

RopeIndex = Callable[..., Any]

_ROWS = 3
# What get_rope_index calls its arguments, and what the processor calls the same thing.
_GRIDS = {
    "image_grid_thw": ("image_grid_thw",),
    "video_grid_thw": ("video_grid_thw",),
    "second_per_grid_ts": ("second_per_grid_ts",),
    "second_per_grids": ("video_second_per_grid", "second_per_grid_ts"),
}
# In mm_token_type_ids, with the names under which a model's config has their ids.
_TYPES = {1: ("image_token_id", "image_token_index"), 2: ("video_token_id", "video_token_index")}


class PatchProcessor(Protocol):
    """The settings of an image or video processor that cuts pixels into patches."""

    patch_size: int
    merge_size: int
    size: Mapping[str, int]
    temporal_patch_size: int  # of videos, like the next
    max_video_tokens: int


# Limits of qwen_vl_utils in tokens: of what has resized_height and resized_width, of a frame, of a video.
_RESIZED_TOKENS = (4, 16_384)
_FRAME_TOKENS, _VIDEO_TOKENS = 768, 128_000 * 0.9
_ANY_SIZE = {"shortest_edge": 1, "longest_edge": 1 << 60}
"""A budget of pixels in which every size stays as it is."""
_PIXELS = ("min_pixels", "max_pixels", "resized_height", "resized_width")

VISION: MediaLayout = {
    "pixel_values": TensorLayout(("image",), "rows", "image_grid_thw"),
    "image_grid_thw": TensorLayout(("image",), "item"),
    "pixel_values_videos": TensorLayout(("video",), "rows", "video_grid_thw"),
    "video_grid_thw": TensorLayout(("video",), "item"),
}
"""Images and videos are flat patches; the grid of each says how many are its own."""


class Qwen2VL(Family):
    """Qwen2-VL and Qwen2.5-VL: one token per 28 x 28 pixels, and per pair of frames."""

    name = "qwen2_vl"
    processor_classes: ClassVar[tuple[str, ...]] = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor")
    kinds: ClassVar[tuple[MediaKind, ...]] = ("image", "video")
    layout: ClassVar[MediaLayout] = {**VISION, "second_per_grid_ts": TensorLayout(("video",), "item")}
    size_settings: ClassVar[Mapping[MediaKind, tuple[str, ...]]] = {
        "image": _PIXELS,
        "video": (*_PIXELS, "total_pixels"),
    }
    mrope: ClassVar[bool] = True
    makes_token_tensors: ClassVar[bool] = False

    def media_tokens(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """Pixels after resizing, over the pixels of a token."""
        if kind == "image":
            owner = encoder.processor.image_processor
            return image_tokens(size, owner.patch_size * owner.merge_size, *pixel_budget(owner))
        return video_tokens(encoder.processor.video_processor, size)

    def media_patches(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> int:
        """The grid multiplied out: a token is a square of ``merge_size`` patches a side."""
        return int(self.media_tokens(encoder, kind, size) * encoder.vision(kind).merge_size ** 2)

    def configure(
        self, encoder: Encoder, kind: MediaKind, size: Any, settings: Mapping[str, int]
    ) -> tuple[MediaSize, dict[str, Any]]:
        """An image with limits gets them as the processor's; everything else is resized before, and kept.

        The size is that of ``qwen_vl_utils``, whose limits are those of one frame.
        """
        owner = encoder.vision(kind)
        factor = owner.patch_size * owner.merge_size
        if kind == "image" and "resized_height" not in settings:
            least, most = merge_limits(settings, *pixel_budget(owner))
            return size, {"size": {"shortest_edge": least, "longest_edge": most}}
        if "resized_height" in settings:
            low, high = (tokens * factor**2 for tokens in _RESIZED_TOKENS)
            sides = fit_image(settings["resized_height"], settings["resized_width"], factor, low, high)
        else:
            sides = fit_image(size.height, size.width, factor, *self._frame_limits(encoder, size, settings))
        options: dict[str, Any] = {"size": _ANY_SIZE}
        if kind == "image":
            return sides, options
        if hasattr(owner, "cap_pixels_per_frame"):
            options["cap_pixels_per_frame"] = False
        return replace(size, height=sides[0], width=sides[1]), options

    def _frame_limits(
        self, encoder: Encoder, info: VideoInfo, settings: Mapping[str, int]
    ) -> tuple[float, float]:
        """Least and most pixels of a frame of a video with these settings."""
        owner = encoder.processor.video_processor
        factor, patch = owner.patch_size * owner.merge_size, owner.temporal_patch_size
        low, high = merge_limits(settings, *self.frame_budget(encoder, info))
        total = settings.get("total_pixels", _VIDEO_TOKENS * factor**2)
        frames = math.ceil(info.total_frames / patch) * patch
        most = max(min(_FRAME_TOKENS * factor**2, total / frames * patch), int(low * 1.05))
        return low, min(high, most)

    def frame_budget(self, encoder: Encoder, info: VideoInfo) -> tuple[float, float]:
        """Least and most pixels of a frame by the processor's own setting."""
        return pixel_budget(encoder.processor.video_processor)

    def resize(self, encoder: Encoder, item: Any, size: Any) -> Any:
        """An image by PIL, as ``qwen_vl_utils`` does; frames by the video processor's own operation."""
        if not isinstance(item, VideoFrames):
            height, width = size
            return item.resize((width, height))
        import torch
        from transformers.image_utils import SizeDict
        from transformers.video_processing_utils import BaseVideoProcessor

        owner = encoder.processor.video_processor
        frames = torch.from_numpy(item.frames).permute(0, 3, 1, 2)
        sides = SizeDict(height=size.height, width=size.width)
        # The class's own resize takes a size; those of Qwen's processors compute it from a budget.
        resized = BaseVideoProcessor.resize(owner, frames, sides, resample=owner.resample)
        return VideoFrames(resized.permute(0, 2, 3, 1).contiguous().numpy(), item.metadata)


class Qwen3VL(Qwen2VL):
    """Qwen3-VL: one token per 32 x 32 pixels; a video's frames share one budget and carry timestamps."""

    name = "qwen3_vl"
    processor_classes: ClassVar[tuple[str, ...]] = ("Qwen3VLProcessor",)
    layout: ClassVar[MediaLayout] = VISION

    def frame_budget(self, encoder: Encoder, info: VideoInfo) -> tuple[float, float]:
        """An even share of the budget of all frames."""
        low, high = super().frame_budget(encoder, info)
        return low / info.total_frames, high / info.total_frames

    def pieces(self, encoder: Encoder, kind: MediaKind, size: Any, images_in_sample: int = 1) -> Pieces:
        """Each temporal patch of a video has its time and brackets of its own, inside the template's."""
        processor = encoder.processor
        if kind != "video":
            return super().pieces(encoder, kind, size, images_in_sample)
        pad = encoder.token("video_token")
        start, end = processor.vision_start_token, processor.vision_end_token
        times = middle_times(size, processor.video_processor.temporal_patch_size)
        tokens = self.media_tokens(encoder, kind, size) // len(times)
        return frame_pieces((f"<{seconds:.1f} seconds>{start}" for seconds in times), (pad, tokens), end)


def video_tokens(
    video_processor: PatchProcessor, info: VideoInfo, budget: tuple[int, int] | None = None
) -> int:
    """Content tokens of a video, by the class of the video processor.

    ``Qwen3VLVideoProcessor`` gives all frames together one budget of pixels; ``Qwen2VLVideoProcessor``, which
    AutoProcessor also builds for Qwen3-Omni, gives it to each frame. ``budget`` replaces the least and most
    pixels of the video processor.
    """
    low, high = budget or pixel_budget(video_processor)
    factor = video_processor.patch_size * video_processor.merge_size
    patch = video_processor.temporal_patch_size
    frames, capped = info.total_frames, getattr(video_processor, "cap_pixels_per_frame", None)
    if any(base.__name__ == "Qwen3VLVideoProcessor" for base in type(video_processor).__mro__):
        if capped:
            per_frame = min(video_processor.max_video_tokens * factor**2, high // frames)
            high = max(per_frame, int(low * 1.05)) * frames
        height, width = resize_video(frames, info.height, info.width, patch, factor, low, high)
    else:
        if capped:
            share = int(video_processor.max_video_tokens * factor * factor * 0.9) * patch // frames
            high = max(min(high, share), int(low * 1.05))
        height, width = resize_image(info.height, info.width, factor, low, high)
    return int(math.ceil(frames / patch) * height * width // factor**2)


def middle_times(info: VideoInfo, patch: int) -> list[float]:
    """The time of each temporal patch, half-way between its first frame and its last."""
    times = frame_times(info)
    times += times[-1:] * (-len(times) % patch)
    return [(times[first] + times[first + patch - 1]) / 2 for first in range(0, len(times), patch)]


def merge_limits(settings: Mapping[str, int], low: float, high: float) -> tuple[float, float]:
    """Return the limits of an item; one that is set moves the processor's other one if that contradicts it.

    >>> merge_limits({"max_pixels": 50176}, 65536, 16777216)
    (50176, 50176)
    """
    least, most = settings.get("min_pixels", low), settings.get("max_pixels", high)
    if "max_pixels" in settings and "min_pixels" not in settings:
        least = min(least, most)
    elif "max_pixels" not in settings:
        most = max(least, most)
    return least, most


def pixel_budget(owner: PatchProcessor) -> tuple[int, int]:
    """Least and most pixels of an image or video processor."""
    return int(owner.size["shortest_edge"]), int(owner.size["longest_edge"])


# --- mRoPE positions ------------------------------------------------------------------------------------


def mrope_position_ids(sample: Mapping[str, Any], get_rope_index: RopeIndex) -> torch.Tensor | None:
    """Positions [3, S] of one sample, as the model itself would compute them.

    Args:
        sample: not shifted: ``input_ids`` [S], usually ``attention_mask`` (hidden tokens get no position of
            their own) and ``mm_token_type_ids``, and the grids of its media.
        get_rope_index: ``model.model.get_rope_index``, or :func:`rope_index` of the model.

    Returns:
        None if the callable takes neither ``input_ids`` nor any keyword.

    Raises:
        ConfigError: it needs ``mm_token_type_ids``, which neither the sample nor a model config has, or
            it returns something else than [3, 1, S].
    """
    import torch

    takes, takes_any = _parameters(get_rope_index)
    if "input_ids" not in takes and not takes_any:
        return None
    ids = _row(sample["input_ids"])
    arguments: dict[str, Any] = {"input_ids": ids}
    if sample.get("attention_mask") is not None:
        arguments["attention_mask"] = _row(sample["attention_mask"])
    for name, keys in _GRIDS.items():
        grids = next((sample[key] for key in keys if sample.get(key) is not None), None)
        if grids is not None:
            arguments[name] = torch.stack(list(grids)) if isinstance(grids, list | tuple) else grids
    if sample.get("feature_attention_mask") is not None:
        arguments["audio_seqlens"] = sample["feature_attention_mask"].sum(-1)
    if takes_any or "mm_token_type_ids" in takes:
        types = _token_types(sample, ids, get_rope_index, needed="mm_token_type_ids" in takes)
        if types is not None:
            arguments["mm_token_type_ids"] = types
    if not takes_any:
        arguments = {name: value for name, value in arguments.items() if name in takes}
    made = get_rope_index(**arguments)
    positions = made[0] if isinstance(made, tuple | list) else made
    shape, expected = tuple(positions.shape), (_ROWS, 1, ids.shape[1])
    if shape != expected:
        what = f"get_rope_index returned positions of shape {shape}, expected {expected}"
        raise ConfigError(what, setting="get_rope_index", value=shape)
    return torch.as_tensor(positions)[:, 0]


def rope_index(model: object) -> RopeIndex | None:
    """The ``get_rope_index`` of a model without its weights, so that it can be sent to DataLoader workers.

    Args:
        model: of transformers, wrapped or not; its config; or the folder or hub name of one. The method is
            looked for in the model and in its ``model``.

    Returns:
        None where the model has none: its positions are one row of numbers.

    Raises:
        ConfigError: it is no model.
    """
    inner, config = resolve_model(model)
    if inner is None:
        inner = weightless_model(config)
    owner: Any
    for owner in (getattr(inner, "model", None), inner):
        if callable(getattr(type(owner), "get_rope_index", None)):
            # Settings (``spatial_merge_size``), no state of torch's and no weights.
            public = {name: value for name, value in vars(owner).items() if name[0] != "_"}
            public.pop("training", None)
            plain = {name: value for name, value in public.items() if isinstance(value, int | float | str)}
            return WeightlessRopeIndex(type(owner), owner.config, plain)
    return None


class WeightlessRopeIndex:
    """A model class's ``get_rope_index``, called on an object with the model's config and settings alone.

    Settings are numbers and words that the model keeps as attributes and the method reads.
    """

    def __init__(
        self, model_class: type, config: ModelConfig, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.model_class, self.config, self.settings = model_class, config, dict(settings or {})
        parameters = dict(inspect.signature(model_class.get_rope_index).parameters)  # type: ignore[attr-defined]
        parameters.pop("self")
        self.__signature__ = inspect.Signature(list(parameters.values()))

    def __call__(self, **arguments: Any) -> Any:
        """What the method returns."""
        shell: Any = object.__new__(self.model_class)
        shell.__dict__.update(self.settings, config=self.config)
        return self.model_class.get_rope_index(shell, **arguments)  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.model_class, self.config, self.settings)


def _parameters(function: RopeIndex) -> tuple[set[str], bool]:
    """The names it takes, and whether it takes any others."""
    parameters = inspect.signature(function).parameters
    names = {name for name, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    return names, any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _row(tokens: object) -> torch.Tensor:
    """Values per token as [1, S]."""
    import torch

    return torch.as_tensor(tokens).reshape(1, -1)


def _token_types(
    sample: Mapping[str, Any], ids: torch.Tensor, get_rope_index: RopeIndex, *, needed: bool
) -> torch.Tensor | None:
    """0 for text, 1 for image tokens, 2 for video tokens: the sample's own, or by the ids in the config."""
    if sample.get("mm_token_type_ids") is not None:
        return _row(sample["mm_token_type_ids"])
    if not needed:
        return None
    types = ids.new_zeros(ids.shape)
    if all(sample.get(key) is None for key in ("image_grid_thw", "video_grid_thw")):
        return types
    config = getattr(get_rope_index, "config", None)
    if config is None:
        config = getattr(getattr(get_rope_index, "__self__", None), "config", None)
    known = {
        kind: next((getattr(config, name) for name in names if hasattr(config, name)), None)
        for kind, names in _TYPES.items()
    }
    if all(token is None for token in known.values()):
        raise ConfigError(
            "get_rope_index needs 'mm_token_type_ids' (0 text, 1 image, 2 video), which the sample has not: "
            "pass the model's own method, model.model.get_rope_index, whose config has the ids",
            setting="mm_token_type_ids",
        )
    for kind, token in known.items():
        if token is not None:
            types[ids == token] = kind
    return types
