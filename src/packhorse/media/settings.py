"""Settings for the size of images and frames: next to a media item in its row, or of a whole dataset.

A setting of an item takes precedence over that of its dataset, which takes precedence over the processor's.
Converting a row gives each media item the settings of its dataset as options
(:func:`with_dataset_settings`), so counting and encoding read both in one place (:func:`size_settings`).
The names are those of ``qwen_vl_utils``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packhorse.errors import BadSample, ConfigError
from packhorse.media.failure import bad_media
from packhorse.media.images import DEFAULT_MAX_PIXELS
from packhorse.media.sampling import VideoSampling
from packhorse.types import MediaKind

_BOTH = ("min_pixels", "max_pixels", "resized_height", "resized_width", "max_soft_tokens")
_VIDEO = (*_BOTH, "total_pixels")
_FRAMES = ("fps", "num_frames", "min_frames", "max_frames")

# The names next to an item of each kind, with the setting that each is; a video takes both spellings.
_ITEM_NAMES: Mapping[str, Mapping[str, str]] = {
    "image": {name: name for name in _BOTH},
    "video": {**{name: name for name in _VIDEO}, **{f"video_{name}": name for name in _BOTH}},
}
_VIDEO_ONLY = ("total_pixels", *(f"video_{name}" for name in _BOTH))

DATASET_SETTINGS: Mapping[str, tuple[MediaKind, str]] = {
    **{name: ("image", name) for name in _BOTH},
    **{f"video_{name}": ("video", name) for name in _BOTH},
    **{name: ("video", name) for name in ("total_pixels", *_FRAMES)},
}
"""The settings of a dataset: the kind of media that each is for, and its name next to an item."""

ITEM_OPTIONS = frozenset(
    {*_VIDEO, *_VIDEO_ONLY, *_FRAMES, "frame_indices", "video_metadata", "sampling_rate"}
)
"""Every option that may be next to a media item."""

_LARGEST = 1 << 53  # every whole number up to it is a float
_SIZE = frozenset({"resized_height", "resized_width"})
_LIMITS = (("min_pixels", "max_pixels"), ("min_frames", "max_frames"))
# Settings of an item that replace a setting of its dataset with another name.
_REPLACED_BY: Mapping[str, frozenset[str]] = {
    "fps": frozenset({"frame_indices"}),
    "num_frames": frozenset({"fps", "frame_indices"}),
    **dict.fromkeys(("min_frames", "max_frames"), frozenset({"num_frames", "frame_indices"})),
    **dict.fromkeys(_SIZE, frozenset(_VIDEO)),
    **dict.fromkeys(("min_pixels", "max_pixels", "total_pixels"), _SIZE),
}


def size_names(kind: MediaKind, options: Mapping[str, Any]) -> list[str]:
    """Return the names of an item's options that set its size, or that of another kind of media."""
    known = _ITEM_NAMES.get(kind, {})
    return [
        name
        for name, value in options.items()
        if value is not None and (name in known or name in _BOTH or name in _VIDEO_ONLY)
    ]


def canonical_name(kind: MediaKind, name: str) -> str | None:
    """Return the setting that an option of an item is; None if that kind of media has no such setting."""
    return _ITEM_NAMES.get(kind, {}).get(name)


def size_settings(kind: MediaKind, options: Mapping[str, Any]) -> dict[str, int]:
    """Return the settings for the size of a media item from its options.

    >>> size_settings("video", {"video_max_pixels": 50176, "fps": 2})
    {'max_pixels': 50176}

    Raises:
        BadSample: ``wrong_format`` for a value that is no whole number above 0, settings that contradict each
            other, or one that this kind of media does not have.
    """
    settings: dict[str, int] = {}
    for name in size_names(kind, options):
        setting, value = canonical_name(kind, name), options[name]
        if setting is None:
            raise _wrong(f"{name} is no setting of an {kind}")
        if not _is_positive_integer(value):
            raise _wrong(f"{name} is {value!r:.40}, expected a whole number above 0")
        if setting == "min_pixels" and value > DEFAULT_MAX_PIXELS:
            raise _wrong(f"{name} is {value:,}, more than the {DEFAULT_MAX_PIXELS:,} pixels of any image")
        if settings.setdefault(setting, int(value)) != value:
            raise _wrong(f"{setting} and video_{setting} differ: {settings[setting]:,} and {value:,}")
    if problem := _contradiction(settings):
        raise _wrong(problem)
    return settings


def check_dataset_settings(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting of a dataset that is invalid, or that contradicts another one."""
    for kind in ("image", "video"):
        named = {
            name: (setting, settings[name])
            for name, (owner, setting) in DATASET_SETTINGS.items()
            if owner == kind and name in settings
        }
        for name, (setting, value) in named.items():
            if setting not in _FRAMES and not _is_positive_integer(value):
                raise ConfigError.of(name, value, "expected a whole number above 0")
        values = dict(named.values())
        VideoSampling(**{name: values[name] for name in _FRAMES if name in values})
        if problem := _contradiction(values):
            raise ConfigError(f"{kind}s: {problem}", setting=next(iter(named)), value=settings)


def with_dataset_settings(
    kind: MediaKind, options: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of a media item, with the settings of its dataset that it does not replace.

    >>> with_dataset_settings("image", {"max_pixels": 50176}, {"max_pixels": 200704, "min_pixels": 784})
    {'max_pixels': 50176, 'min_pixels': 784}

    A limit of the dataset that contradicts one of the item (a larger ``min_pixels``) is dropped.
    """
    known = _ITEM_NAMES.get(kind, {})
    own = {known.get(name, name): value for name, value in options.items() if value is not None}
    added = {}
    for key, value in settings.items():
        owner, name = DATASET_SETTINGS[key]
        replaced = name in own or not _REPLACED_BY.get(name, frozenset()).isdisjoint(own)
        if owner == kind and not replaced and not _contradicts(name, value, own):
            added[name] = value
    return {**options, **added}


def _contradicts(name: str, value: float, own: Mapping[str, Any]) -> bool:
    """Return whether a limit contradicts the opposite one of an item."""
    for low, high in _LIMITS:
        if name == low and _is_number(own.get(high)):
            return bool(value > own[high])
        if name == high and _is_number(own.get(low)):
            return bool(value < own[low])
    return False


def _contradiction(settings: Mapping[str, Any]) -> str:
    """Describe settings that cannot hold together; empty if they can."""
    for low, high in _LIMITS:
        if low in settings and high in settings and settings[low] > settings[high]:
            return f"{low}={settings[low]:,} is above {high}={settings[high]:,}"
    if (given := _SIZE & settings.keys()) and given != _SIZE:
        return f"{min(given)} without {min(_SIZE - given)}: give both"
    return ""


def check_frame_limits(options: Mapping[str, Any]) -> None:
    """Raise ConfigError if ``min_frames`` is above ``max_frames``; both are valid."""
    values = {name: options[name] for name in _FRAMES if options.get(name) is not None}
    if problem := _contradiction(values):
        raise ConfigError(problem, setting="min_frames", value=values["min_frames"])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_positive_integer(value: Any) -> bool:
    return _is_number(value) and 1 <= value <= _LARGEST and value == int(value)


def _wrong(detail: str) -> BadSample:
    return bad_media(detail, "wrong_format")
