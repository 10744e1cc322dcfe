"""The plan of the same rows under other budgets of pixels, from saved counts: no row or header is read.

A count file has the size of each media item, so its tokens under another budget are arithmetic.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from packhorse.count.columns import CountColumns
from packhorse.count.sidecar import Sidecar, sidecar_locations
from packhorse.errors import BadSample, ConfigError, suggest
from packhorse.families import Encoder
from packhorse.formats.meta import OTHER_NAMES, MetaDataset, Source
from packhorse.media import VideoInfo
from packhorse.media.settings import DATASET_SETTINGS, size_settings, with_dataset_settings
from packhorse.tools.view.plan_report import VERSION, epoch_cost
from packhorse.tools.view.saved_plan import PlanRequest, PlanResult, make_plan, open_request
from packhorse.types import MEDIA_KINDS, Integers, MediaKind

SWEPT = (
    *("max_pixels", "min_pixels", "video_max_pixels", "video_min_pixels", "total_pixels"),
    *("max_soft_tokens", "video_max_soft_tokens"),
)
"""The settings whose effect follows from sizes alone. Other frames (``fps``, …) would have other times."""

_ITEM = ("kind", "height", "width", "frames")


def parse_sweep(text: str) -> tuple[str, tuple[int, ...]]:
    """Return the setting and the values of ``max_pixels=200704,401408``, ascending and without duplicates.

    >>> parse_sweep("max_pixels=401408,200704")
    ('max_pixels', (200704, 401408))
    """
    name, _, listed = text.partition("=")
    if name not in SWEPT:
        hint = f"expected NAME=N[,N]… with one of {', '.join(SWEPT)}{suggest(name, SWEPT, OTHER_NAMES)}"
        raise ConfigError.of("sweep", text, hint)
    words = [word.strip() for word in listed.split(",")]
    if any(not word.isascii() or not word.isdigit() or int(word) < 1 for word in words):
        raise ConfigError.of("sweep", text, f"expected whole numbers above 0, e.g. {name}=200704,401408")
    return name, tuple(sorted(set(map(int, words))))


def sweep_report(request: PlanRequest, name: str, values: Sequence[int]) -> dict[str, Any]:
    """Return tokens, packs and cost of an epoch for each value of a setting; nothing is saved.

    The first entry, with the value None, is the plan with the settings as they are; ``cost`` is relative to
    it. A value replaces that of every dataset, and a setting of a dataset that contradicts it is dropped;
    media items with a value of their own keep it.
    """
    opened = open_request(request)
    dataset, encoder = opened.dataset, opened.encoder
    if not isinstance(dataset, MetaDataset):
        raise ConfigError.of("sweep", name, "it needs the count files of a meta file or a data file")
    for value in values:
        encoder.check_dataset_settings("", {name: value})
    now = make_plan(request, opened)
    cost = epoch_cost(now)
    reports = [_report(None, now, cost)]
    datasets = [_DatasetCounts(source, sidecar) for source, sidecar in _sidecars(dataset, encoder)]
    for value in values:
        counts = CountColumns.concat([_recount(part, encoder, name, value) for part in datasets])
        reports.append(_report(value, make_plan(request, opened, counts), cost))
    kind, setting = DATASET_SETTINGS[name]
    return {
        "version": VERSION,
        "meta": str(request.config.data),
        "processor": request.processor_name,
        "pack_size": request.config.pack_size,
        "setting": name,
        "kind": kind,
        "items": int(getattr(now.counts, f"{kind}s").sum()),
        "items_with_own": sum(part.items_with(kind, setting) for part in datasets),
        "values": reports,
    }


def _report(value: int | None, planned: PlanResult, cost: float) -> dict[str, Any]:
    plan, counts = planned.packs.plan, planned.counts
    valid = counts.total[counts.ok]
    return {
        "value": value,
        "tokens": int(valid.sum()),
        **{kind: int(getattr(counts, kind).sum()) for kind in MEDIA_KINDS},
        "patches": int(counts.patches.sum()),
        "longest": int(valid.max(initial=0)),
        "packs": len(plan),
        "fill": plan.fill,
        "packed": len(plan.indices),
        "too_long": len(plan.dropped_by_reason().get("too_long", ())),
        "cost": epoch_cost(planned) / cost if cost else 1.0,
    }


def _sidecars(dataset: MetaDataset, encoder: Encoder) -> Iterator[tuple[Source, Sidecar]]:
    for source, location in zip(dataset.sources, sidecar_locations(dataset, encoder), strict=True):
        sidecar = location.find()
        if sidecar is None:
            raise ConfigError(
                f"dataset '{source.config.name}' was counted, but its count file is not found: "
                "`packhorse count` says why"
            )
        yield source, sidecar


class _DatasetCounts:
    """The counts of one dataset, and its media by kind, size and settings, each combination once."""

    def __init__(self, source: Source, sidecar: Sidecar) -> None:
        self.rules, self.rows = source.config.rules.media_settings, source.selection.rows()
        self.columns, self.media = sidecar.columns(), sidecar.media()
        numbers: dict[str, int] = {}  # of different settings, of which there are few
        codes = [numbers.setdefault(text, len(numbers)) for text in self.media.settings]
        columns = [*(getattr(self.media, field) for field in _ITEM), np.array(codes, np.int64)]
        table = np.stack(columns, axis=1).astype(np.int64)
        self.items, item_of = np.unique(table, axis=0, return_inverse=True)
        self.item_of = item_of.reshape(-1)
        self.settings = [self._own_settings(json.loads(text)) if text else {} for text in numbers]

    def _own_settings(self, settings: dict[str, int]) -> dict[str, dict[str, int]]:
        """Return by kind the settings that are not those of the dataset."""
        shared = {DATASET_SETTINGS[name]: value for name, value in self.rules.items()}
        return {
            kind: {name: value for name, value in settings.items() if shared.get((kind, name)) != value}
            for kind in ("image", "video")
        }

    def own(self, item: Integers) -> dict[str, int]:
        """Return the settings of an item that are not those of the dataset."""
        return self.settings[int(item[-1])].get(MEDIA_KINDS[int(item[0])], {})

    def items_with(self, kind: MediaKind, setting: str) -> int:
        """Return how many media items have a value of their own for a setting."""
        own = [MEDIA_KINDS[int(item[0])] == kind and setting in self.own(item) for item in self.items]
        of_media = np.array(own, np.int64)[self.item_of]
        return int(_row_sums(self.media.offsets, of_media)[self.rows].sum())


def _recount(dataset: _DatasetCounts, encoder: Encoder, name: str, value: int) -> CountColumns:
    """Return the counts of a dataset's rows with another value of a setting."""
    kind, _ = DATASET_SETTINGS[name]
    columns, media, items, item_of = dataset.columns, dataset.media, dataset.items, dataset.item_of
    others = {key: setting for key, setting in dataset.rules.items() if key != name}
    new = np.zeros((len(items), 2), np.int64)  # tokens and patches of each
    for index in np.flatnonzero(items[:, 0] == MEDIA_KINDS.index(kind)).tolist():
        options = with_dataset_settings(kind, dataset.own(items[index]), {name: value})
        options = with_dataset_settings(kind, options, others)
        new[index] = _item_counts(kind, items[index], options, encoder)
    is_swept = media.kind == MEDIA_KINDS.index(kind)
    tokens = np.where(is_swept, new[item_of, 0], media.tokens)
    patches = np.where(is_swept, new[item_of, 1], media.patches)
    changed = {
        kind: getattr(columns, kind) + _row_sums(media.offsets, tokens - media.tokens),
        "patches": columns.patches + _row_sums(media.offsets, patches - media.patches),
    }
    return replace(columns, **changed).take(dataset.rows)


def _item_counts(
    kind: MediaKind,
    item: Integers,
    options: Mapping[str, Any],
    encoder: Encoder,
) -> tuple[int, int]:
    """Return the tokens and patches of a media item with these settings."""
    _, height, width, frames, _ = item.tolist()
    size: Any = (height, width) if kind == "image" else VideoInfo(frames, height, width, None, None)
    try:
        if settings := size_settings(kind, options):
            size = encoder.configure(kind, size, settings)
    except BadSample as error:
        raise ConfigError.of("sweep", dict(options), error.detail) from error
    return encoder.media_tokens(kind, size), encoder.media_patches(kind, size)


def _row_sums(offsets: Integers, values: Integers) -> Integers:
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])
    by_row: Integers = sums[offsets[1:]] - sums[offsets[:-1]]
    return by_row
