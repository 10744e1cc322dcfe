"""Whose the entries of media tensors are: how many along axis 0 belong to each row of a batch.

Declared layouts and counts go in, numbers per row come out. Nothing is taken from a coincidence of shapes:
what the layout and the counts say must add up to what the tensors hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch

from packhorse.types import MEDIA_KINDS, MediaKind, MediaLayout, TensorLayout

MEDIA_LAYOUT_KEY = "_media_layout"
"""Under this key a batch carries the layout that its family declares: key of a tensor -> TensorLayout."""

MEDIA_ROWS_KEY = "_media_rows"
"""Under this key a batch may say how many entries of a media tensor each of its rows has: key -> [B]. Needed
where no layout tells it: tiles that no grid counts, entries per sample in rows of several samples."""

COUNT_KEYS: Mapping[MediaKind, str] = {kind: f"n_{kind}s_per_sample" for kind in MEDIA_KINDS}
"""``n_images_per_sample``, ``n_videos_per_sample``, ``n_audios_per_sample``: [B], media of each row."""


@dataclass(slots=True)
class MediaRows:
    """Entries of each media tensor by row of the batch.

    Args:
        batch: the batch, or its media alone.
        batch_size: the number of its rows.
        layout: of the tensors that are asked for.
        one_each: where a kind of media is not counted and there is one entry per row, take it that each row
            has one. Otherwise that is an error.
    """

    batch: Mapping[str, Any]
    batch_size: int
    layout: MediaLayout
    one_each: bool = False
    _found: dict[str, torch.Tensor] = field(default_factory=dict)

    def of(self, key: str) -> torch.Tensor:
        """How many entries of ``batch[key]`` each row has: int64 [B].

        Raises:
            ValueError: that cannot be told, or does not add up to what the tensor holds.
        """
        if key not in self._found:
            self._found[key] = self._rows(key, self.layout[key])
        return self._found[key]

    def tensor(self, key: str) -> torch.Tensor:
        """A media tensor of the batch."""
        value = self.batch[key]
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            what = "a number" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise ValueError(f"'{key}' is {what}: expected a tensor with one entry per medium, patch or row")
        return value

    def _rows(self, key: str, layout: TensorLayout) -> torch.Tensor:
        tensor = self.tensor(key)
        given = self.batch.get(MEDIA_ROWS_KEY) or {}
        if key in given:
            rows, source = self._counts(f"{MEDIA_ROWS_KEY}['{key}']", given[key]), "its rows"
        elif layout.owner == "sample":
            rows, source = torch.ones(self.batch_size, dtype=torch.int64), "one per row of the batch"
        elif layout.owner == "rows" and layout.rows_from is not None:
            rows, source = self._from_grid(key, layout.rows_from), f"'{layout.rows_from}' multiplied out"
        else:
            rows, source = self._items(key, layout, len(tensor))
        self._check(key, layout, tensor, rows, source)
        return rows

    def _from_grid(self, key: str, grid_key: str) -> torch.Tensor:
        """What the entries of a grid come to, row by row."""
        if self.batch.get(grid_key) is None:
            raise ValueError(
                f"'{key}' of shape {tuple(self.tensor(key).shape)} without '{grid_key}', which says how many "
                f"entries each medium has: keep '{grid_key}' in the batch"
            )
        grid, items = self.tensor(grid_key), self.of(grid_key)
        sizes = grid.reshape(len(grid), -1).to(torch.int64).prod(1).cpu()
        before = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        last = items.cumsum(0)
        return before[last] - before[last - items]

    def _items(self, key: str, layout: TensorLayout, entries: int) -> tuple[torch.Tensor, str]:
        """Media of the tensor's kinds in each row; for tiles that no grid counts, right if each has one."""
        counted = {kind: self.batch.get(COUNT_KEYS[kind]) for kind in layout.kinds}
        known = {COUNT_KEYS[kind]: value for kind, value in counted.items() if value is not None}
        if known:
            rows = sum(self._counts(name, value) for name, value in known.items())
            assert isinstance(rows, torch.Tensor)
            return rows, " + ".join(known)
        names = " and ".join(f"'{COUNT_KEYS[kind]}'" for kind in layout.kinds)
        if not self.one_each or entries != self.batch_size:
            raise ValueError(
                f"'{key}' of shape {tuple(self.tensor(key).shape)} in a batch of {self.batch_size} rows "
                f"without {names}: how many each row has cannot be told. Add {names} [{self.batch_size}] "
                "(Packhorse's collate functions do)"
            )
        return torch.ones(self.batch_size, dtype=torch.int64), "one per row of the batch"

    def _counts(self, name: str, value: Any) -> torch.Tensor:
        counts = torch.as_tensor(value).cpu()
        if counts.is_floating_point() or tuple(counts.shape) != (self.batch_size,):
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
        hint = ""
        if layout.owner == "rows" and layout.rows_from is None and len(tensor) > expected:
            hint = f"; where media have several entries, '{MEDIA_ROWS_KEY}' must say how many each row has"
        raise ValueError(
            f"'{key}' has shape {tuple(tensor.shape)}, which contradicts its layout (axis 0 belongs to the "
            f"{layout.owner}): {rows.tolist()} by row ({source}) make {expected} entries, not {len(tensor)}"
            + hint
        )


def check_sizes(batch: Mapping[str, Any], batch_size: int, n_microbatches: int) -> None:
    """Refuse numbers that make no sense, or that the batch contradicts.

    Raises:
        ValueError: they are not positive, or ``input_ids`` has another number of rows.
    """
    for name, value in (("batch_size", batch_size), ("n_microbatches", n_microbatches)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: expected a whole number of at least 1")
    ids = batch.get("input_ids")
    if isinstance(ids, torch.Tensor) and len(ids) != batch_size:
        raise ValueError(
            f"batch_size={batch_size}, but 'input_ids' has shape {tuple(ids.shape)}: expected as many rows"
        )


def split_rows(tensor: torch.Tensor, rows: torch.Tensor, n_microbatches: int) -> list[torch.Tensor]:
    """Views of a media tensor, one for each microbatch.

    Rows of the batch are split by ``torch.tensor_split``, which is what ``torch.distributed.pipelining``
    splits the text with: the first microbatches have one row more where it does not come out even. Always
    ``n_microbatches`` views; those of microbatches without media have no entries.
    """
    totals = [int(part.sum()) for part in torch.tensor_split(rows, n_microbatches)]
    edges = [0, *accumulate(totals)]
    return [tensor[first:behind] for first, behind in pairwise(edges)]
