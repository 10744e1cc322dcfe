"""How many entries of a media tensor along axis 0 belong to each row of a batch.

The numbers come from declared layouts and counts, never from a coincidence of shapes: their sum must be the
length of the tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import index
from typing import Any

import torch

from packhorse.types import MEDIA_KINDS, MediaKind, MediaLayout, TensorLayout

MEDIA_LAYOUT_KEY = "_media_layout"
"""The key of the layout that the batch's family declares: key of a tensor -> TensorLayout."""

MEDIA_ROWS_KEY = "_media_rows"
"""The key of the entries of each media tensor by row of the batch: key of a tensor -> [B]. Needed if no
layout has them: tiles that no grid counts, entries per sample in rows of several samples."""

COUNT_KEYS: Mapping[MediaKind, str] = {kind: f"n_{kind}s_per_sample" for kind in MEDIA_KINDS}
"""``n_images_per_sample``, ``n_videos_per_sample``, ``n_audios_per_sample``: [B], media of each row."""


_PACKED_KEYS = ("_packed_seq_ids", "cu_seq_lens_q", "seq_lens", "qkv_format")
_HOW_TO_ADD_ROWS = (
    "Use a collate function that returns them: pad_collate_fn(…, media_layout=True), "
    "neat_packed_vlm_collater(…, media_layout=True) or packhorse.load(…, pipeline_microbatches=…); or add "
    f"'{MEDIA_ROWS_KEY}' to the batch"
)


@dataclass(slots=True)
class MediaRows:
    """Entries of each media tensor by row of the batch.

    ``one_each``: in a batch without counts, assume one image per row if there are as many images as rows.
    Otherwise, and for all other media, missing counts are an error.
    """

    batch: Mapping[str, Any]
    batch_size: int
    layout: MediaLayout
    one_each: bool = False
    _cache: dict[str, torch.Tensor] = field(default_factory=dict)

    def of(self, key: str) -> torch.Tensor:
        """Return how many entries of ``batch[key]`` each row has: int64 [B]; raise if they are unknown."""
        if key not in self._cache:
            self._cache[key] = self._rows(key, self.layout[key])
        return self._cache[key]

    def tensor(self, key: str) -> torch.Tensor:
        """Return a media tensor of the batch."""
        return tensor_of(key, self.batch[key])

    def _rows(self, key: str, layout: TensorLayout) -> torch.Tensor:
        tensor = self.tensor(key)
        given = (self.batch.get(MEDIA_ROWS_KEY) or {}).get(key)
        if given is not None:
            name = f"{MEDIA_ROWS_KEY}['{key}']"
            rows = self._counts(name, given)
            self._check_given(key, layout, rows)
            source = name
        elif layout.owner == "sample":
            rows, source = self._samples(key, layout, len(tensor))
        elif layout.owner == "rows" and layout.rows_from is not None:
            rows, source = self._from_grid(key, layout.rows_from), f"'{layout.rows_from}' multiplied out"
        else:
            rows, source = self._items(key, layout, len(tensor))
        self._check(key, layout, tensor, rows, source)
        return rows

    def _check_given(self, key: str, layout: TensorLayout, rows: torch.Tensor) -> None:
        """Raise if the given rows contradict the grids and counts of the batch."""
        if layout.owner == "rows" and layout.rows_from is not None:
            other, source = self._from_grid(key, layout.rows_from), f"'{layout.rows_from}' multiplied out"
        else:
            counts = None if layout.owner == "sample" else self._item_counts(layout)
            if counts is None:
                return
            other, source = counts
            if layout.owner == "rows":  # each media item has at least one
                other, source = torch.where(other > 0, rows.maximum(other), 0), f"{source} (at least)"
        if not torch.equal(rows, other):
            raise ValueError(
                f"by '{MEDIA_ROWS_KEY}' the rows have {rows.tolist()} entries of '{key}', by {source} "
                f"{other.tolist()}: expected the same"
            )

    def _samples(self, key: str, layout: TensorLayout, entries: int) -> tuple[torch.Tensor, str]:
        """Return one entry per row; raises if rows hold several samples."""
        if self._is_packed():
            raise ValueError(
                f"'{key}' of shape {tuple(self.tensor(key).shape)} has one entry per sample, and the rows of "
                f"this batch are packs of several: how many each row has is unknown. {_HOW_TO_ADD_ROWS}"
            )
        counts = self._item_counts(layout)
        if counts is not None and entries < self.batch_size:  # processors omit samples without media
            return (counts[0] > 0).to(torch.int64), f"one per row with media by {counts[1]}"
        return torch.ones(self.batch_size, dtype=torch.int64), "one per row of the batch"

    def _is_packed(self) -> bool:
        """Return whether rows may hold several samples, which a mask or lengths separate."""
        mask = self.batch.get("attention_mask")
        separates = mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() <= 2)
        return separates or any(self.batch.get(key) is not None for key in _PACKED_KEYS)

    def _from_grid(self, key: str, grid_key: str) -> torch.Tensor:
        """Return the entries of each row by the grid of its media items."""
        name = f"'{key}' of shape {tuple(self.tensor(key).shape)}"
        if self.batch.get(grid_key) is None:
            raise ValueError(
                f"{name} without '{grid_key}', which has the entries of each media item: keep '{grid_key}' "
                "in the batch"
            )
        if grid_key not in self.layout:
            raise ValueError(
                f"{name} has its rows from '{grid_key}', which no layout declares: declare '{grid_key}' too"
            )
        items = self.of(grid_key)
        sizes = entries_by_grid(grid_key, self.tensor(grid_key))
        before = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        last = items.cumsum(0)
        return before[last] - before[last - items]

    def _item_counts(self, layout: TensorLayout) -> tuple[torch.Tensor, str] | None:
        """Return the media of the tensor's kinds in each row, and the source; None if no kind is counted."""
        given = {COUNT_KEYS[kind]: self.batch.get(COUNT_KEYS[kind]) for kind in layout.kinds}
        known = {name: self._counts(name, value) for name, value in given.items() if value is not None}
        if not known:
            return None
        return torch.stack(list(known.values())).sum(0), " + ".join(known)

    def _items(self, key: str, layout: TensorLayout, entries: int) -> tuple[torch.Tensor, str]:
        """Return the media of the tensor's kinds in each row; right for tiles if each item has one."""
        counts = self._item_counts(layout)
        if counts is not None:
            return counts
        if entries == 0:
            return torch.zeros(self.batch_size, dtype=torch.int64), "no entries"
        legacy = self.one_each and layout.kinds == ("image",) and not self._is_packed()
        legacy = legacy and all(self.batch.get(name) is None for name in COUNT_KEYS.values())
        names = " and ".join(f"'{COUNT_KEYS[kind]}'" for kind in layout.kinds)
        if not legacy or entries != self.batch_size:
            raise ValueError(
                f"'{key}' of shape {tuple(self.tensor(key).shape)} in a batch of {self.batch_size} rows "
                f"without {names}: how many each row has is unknown. Add {names} [{self.batch_size}] "
                "(Packhorse's collate functions do)"
            )
        return torch.ones(self.batch_size, dtype=torch.int64), "one per row of the batch"

    def _counts(self, name: str, value: Any) -> torch.Tensor:
        counts = torch.as_tensor(value).cpu()
        whole = not counts.is_floating_point() and not counts.is_complex() and counts.dtype != torch.bool
        if not whole or tuple(counts.shape) != (self.batch_size,):
            raise ValueError(
                f"'{name}' is {counts.dtype} of shape {tuple(counts.shape)}, expected whole numbers of shape "
                f"({self.batch_size},): one for each row of the batch"
            )
        if bool((counts < 0).any()):
            raise ValueError(f"'{name}' is {counts.tolist()}: expected no number below 0")
        return counts.to(torch.int64)

    def _check(
        self, key: str, layout: TensorLayout, tensor: torch.Tensor, rows: torch.Tensor, source: str
    ) -> None:
        expected = int(rows.sum())
        if len(tensor) == expected:
            return
        raise ValueError(
            f"'{key}' has shape {tuple(tensor.shape)}, which contradicts its layout (axis 0 belongs to the "
            f"{layout.owner}): {rows.tolist()} by row ({source}) make {expected} entries, not {len(tensor)}"
            + (f". {_HOW_TO_ADD_ROWS}" if layout.rows_from is None and MEDIA_ROWS_KEY not in source else "")
        )


def tensor_of(key: str, value: Any) -> torch.Tensor:
    """Return the value if it is a tensor with an axis 0; raise if it is something else."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        name = "a number" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise ValueError(f"'{key}' is {name}: expected a tensor with one entry per media item, patch or row")
    return value


def entries_by_grid(key: str, grid: torch.Tensor) -> torch.Tensor:
    """Return the entries of each media item by its grid [N], [N, 2] or [N, 3]: int64 [N], on the CPU.

    A grid whose key has the prefix ``num_`` holds numbers, which may be 0; others hold the sides of grids,
    which are multiplied.
    """
    counts, shape = key.startswith("num_"), tuple(grid.shape)
    fits = len(shape) == 1 or (len(shape) == 2 and (not counts or shape[1] == 1))
    if grid.is_floating_point() or grid.is_complex() or grid.dtype == torch.bool or not fits:
        expected = "[N]" if counts else "[N], [N, 2] or [N, 3]"
        raise ValueError(f"'{key}' is {grid.dtype} of shape {shape}: expected whole numbers {expected}")
    sides = grid.to(torch.int64).cpu()
    least = 0 if counts else 1
    if bool((sides < least).any()):
        wrong = int(sides.min())
        raise ValueError(f"'{key}' of shape {shape} holds {wrong}: expected no number below {least}")
    return sides if sides.dim() == 1 else sides.prod(1)


def check_sizes(batch: Mapping[str, Any], batch_size: int, n_microbatches: int) -> tuple[int, int]:
    """Return both numbers as ``int`` if they are positive and fit the batch; raise if not."""
    rows, number = _whole("batch_size", batch_size), _whole("n_microbatches", n_microbatches)
    ids = batch.get("input_ids")
    if isinstance(ids, torch.Tensor) and (ids.dim() == 0 or len(ids) != rows):
        raise ValueError(
            f"batch_size={rows}, but 'input_ids' has shape {tuple(ids.shape)}: expected as many rows"
        )
    return rows, number


def _whole(name: str, value: Any) -> int:
    wrong = ValueError(f"{name}={value!r}: expected a whole number of at least 1")
    if isinstance(value, bool | torch.Tensor):
        raise wrong
    try:
        number = index(value)  # accepts integers of numpy
    except TypeError:
        raise wrong from None
    if number < 1:
        raise wrong
    return number


def check_keys(rows: Any, known: Collection[str]) -> None:
    """Raise if the table of rows is not a mapping or has an unknown key."""
    if rows is None:
        return
    if not isinstance(rows, Mapping):
        raise ValueError(f"'{MEDIA_ROWS_KEY}' is a {type(rows).__name__}: expected a mapping: key -> [B]")
    if unknown := sorted(set(rows) - set(known)):
        raise ValueError(
            f"'{MEDIA_ROWS_KEY}' has the key '{unknown[0]}', which is no media tensor of the batch or of its "
            f"layout ({', '.join(sorted(known))})"
        )


def split_rows(tensor: torch.Tensor, rows: torch.Tensor, n_microbatches: int) -> list[torch.Tensor]:
    """Return views of a media tensor, one for each microbatch.

    Rows of the batch are split by ``torch.tensor_split``, as ``torch.distributed.pipelining`` splits the
    text: the first microbatches have one row more if the division has a remainder. There are always
    ``n_microbatches`` views; those of microbatches without media are empty.
    """
    totals = [int(part.sum()) for part in torch.tensor_split(rows, n_microbatches)]
    edges = [0, *accumulate(totals)]
    return [tensor[first:after] for first, after in pairwise(edges)]
