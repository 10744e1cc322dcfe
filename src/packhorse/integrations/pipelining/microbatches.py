"""What the stages of a pipeline are called with: rows of ids, labels, positions and masks, ready to be split.

``torch.distributed.pipelining`` splits each tensor along one axis with ``torch.tensor_split``, refuses a
batch with fewer rows than microbatches, and receives every microbatch into a buffer of the first one's shape.
So rows that nobody learns from are put after the rows of shorter microbatches: which rows share a microbatch
stays as it was, and so does whose media they get. Costs one copy of the tokens where the rows do not come out
even.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from packhorse.chat import IGNORE_INDEX
from packhorse.errors import ConfigError
from packhorse.families.qwen_vl import RopeIndex
from packhorse.integrations.loss import supervised
from packhorse.pp_media import VLM_PP_MEDIA_KEY

_USED = frozenset({"input_ids", "labels", "attention_mask", "position_ids", "mm_token_type_ids"})
# The loss of a pipeline takes the labels, which are the same.
_UNUSED = frozenset({"shift_labels", "use_cache"})
# Of these cu_seq_lens_q tells all.
_VARLEN = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"})
_KNOWN = _USED | _VARLEN | _UNUSED


@dataclass(frozen=True, slots=True)
class PipelineInputs:
    """A batch as a schedule takes it; rows are a multiple of the microbatches.

    Attributes:
        ids: [B, S].
        labels: [B, S].
        kwargs: what every stage is given: masks, positions, where documents begin.
        axes: for each of them, the axis of the rows.
        tokens: how many are supervised.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    kwargs: dict[str, Any]
    axes: dict[str, int]
    tokens: int

    def to(self, device: torch.device) -> PipelineInputs:
        """The same on a device."""
        moved = {name: value.to(device) for name, value in self.kwargs.items()}
        return replace(self, ids=self.ids.to(device), labels=self.labels.to(device), kwargs=moved)


def pipeline_inputs(
    batch: Mapping[str, Any], n_microbatches: int, rope: RopeIndex | None, config: Any
) -> PipelineInputs:
    """Make a prepared batch of any collate function ready for a schedule.

    Args:
        batch: its media under :data:`~packhorse.pp_media.VLM_PP_MEDIA_KEY`, if it has any.
        n_microbatches: as the schedule has it.
        rope: the model's ``get_rope_index``, for batches with media and without ``position_ids``: stages
            after the first see neither ids nor grids, so positions are worked out for the whole batch.
        config: the model's: tells the tokens that stand for media.

    Raises:
        ConfigError: the batch holds something that stages would not be given, or cannot be split; or there is
            not at least one microbatch.
    """
    if isinstance(n_microbatches, bool) or n_microbatches < 1:
        raise ConfigError(f"{n_microbatches=}: expected at least 1")
    _check_keys(batch)
    ids, labels = batch["input_ids"].contiguous(), batch["labels"]  # microbatches are told by their memory
    if ids.dim() != 2 or labels.shape != ids.shape:
        raise ConfigError(
            f"'input_ids' of shape {tuple(ids.shape)} and 'labels' of shape {tuple(labels.shape)}: expected "
            "[B, S] both"
        )
    kwargs: dict[str, Any] = {}
    if "cu_seq_lens_q" in batch:
        kwargs["segment_starts"] = segment_starts(batch["cu_seq_lens_q"], *ids.shape)
    elif batch.get("attention_mask") is not None:
        kwargs["attention_mask"] = batch["attention_mask"]
    positions = batch.get("position_ids")
    if positions is None:
        positions = _positions(batch, rope)
    if positions is not None:
        kwargs["position_ids"] = positions
    axes = {name: _axis(name, value, len(ids)) for name, value in kwargs.items()}
    tokens = supervised(batch)
    rows = even_rows(len(ids), n_microbatches)
    if bool((rows < 0).any()):
        ids, labels, kwargs = _filled(ids, labels, kwargs, axes, rows, config)
    return PipelineInputs(ids, labels, kwargs, axes, tokens)


def even_rows(batch_size: int, n_microbatches: int) -> torch.Tensor:
    """Which row of the batch stands where, so that all microbatches have as many; -1 where a row is added.

    7 rows for 3 microbatches: 0 1 2, 3 4 -1, 5 6 -1.
    """
    split = torch.tensor_split(torch.arange(batch_size), n_microbatches)
    most = max(len(part) for part in split)
    return torch.cat([torch.nn.functional.pad(part, (0, most - len(part)), value=-1) for part in split])


def segment_starts(cumulative: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """Where documents begin, bool [B, S]: ``cu_seq_lens_q`` in a form that can be split by rows.

    Raises:
        ConfigError: a document goes on in the next row, or does not end with the batch.
    """
    places = cumulative.to(torch.int64)
    starts = torch.zeros(rows * length + 1, dtype=torch.bool, device=cumulative.device)
    within = bool((places >= 0).all()) and bool((places <= rows * length).all())
    if within:
        starts[places] = True
    made = starts[:-1].view(rows, length)
    if not within or not bool(starts[-1]) or not bool(made[:, 0].all()):
        raise ConfigError(
            f"cu_seq_lens_q goes from {int(places[0])} to {int(places[-1])} in a batch of {rows} rows of "
            f"{length} tokens: expected each row to begin a document, and the last to end at {rows * length}"
        )
    return made


def varlen_arguments(starts: torch.Tensor) -> dict[str, Any]:
    """``cu_seq_lens_q`` and its like of one microbatch, from where its documents begin."""
    places = torch.nonzero(starts.flatten()).flatten().to(torch.int32)
    cumulative = torch.cat([places, places.new_tensor([starts.numel()])])
    longest = int(cumulative.diff().max())
    return {
        "cu_seq_lens_q": cumulative,
        "cu_seq_lens_k": cumulative,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _check_keys(batch: Mapping[str, Any]) -> None:
    missing = [key for key in ("input_ids", "labels") if batch.get(key) is None]
    if missing:
        raise ConfigError(f"the batch has no '{missing[0]}', only {', '.join(batch)}")
    unknown = [key for key in batch if key not in _KNOWN and not key.startswith("_")]
    if unknown:
        raise ConfigError(
            f"the batch holds '{unknown[0]}', which the stages would not be given: prepare media with "
            "packhorse.pp_media.wrap_vlm_collate_for_pp, and take out what the model does not need"
        )


def _axis(name: str, value: Any, rows: int) -> int:
    """The axis of the rows."""
    shape = tuple(getattr(value, "shape", ()))
    axis = 1 if name == "position_ids" and len(shape) == 3 else 0
    if len(shape) <= axis or shape[axis] != rows:
        what = f"of shape {shape}" if shape else f"({type(value).__name__})"
        raise ConfigError(
            f"'{name}' {what} cannot be split into microbatches: expected {rows} rows along axis {axis}"
        )
    return axis


def _positions(batch: Mapping[str, Any], rope: RopeIndex | None) -> torch.Tensor | None:
    """Positions [3, B, S] as the model works them out; None where it counts from 0."""
    chunks = batch.get(VLM_PP_MEDIA_KEY) or {}
    if rope is None or not any("grid" in key for key in chunks):
        return None
    mask = batch.get("attention_mask")
    if "cu_seq_lens_q" in batch or (mask is not None and (not hasattr(mask, "dim") or mask.dim() != 2)):
        raise ConfigError("a packed batch without 'position_ids': give the packed dataset get_rope_index")
    if batch.get("mm_token_type_ids") is None:
        raise ConfigError(
            "the batch has media but neither 'position_ids' nor 'mm_token_type_ids', from which they are "
            "worked out: keep what the processor returns"
        )
    media = {key: torch.cat(list(parts)) for key, parts in chunks.items() if "pixel_values" not in key}
    known = {key: batch[key] for key in ("input_ids", "mm_token_type_ids")}
    arguments = {**media, **known, "attention_mask": mask}
    takes = inspect.signature(rope).parameters
    made = rope(**{name: value for name, value in arguments.items() if name in takes})
    return torch.as_tensor(made[0] if isinstance(made, tuple) else made)


def _filled(
    ids: torch.Tensor,
    labels: torch.Tensor,
    kwargs: Mapping[str, Any],
    axes: Mapping[str, int],
    rows: torch.Tensor,
    config: Any,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The batch with rows added: masks and positions of row 0, which are sound, and no token to learn."""
    wrong = [name for name, value in kwargs.items() if not isinstance(value, torch.Tensor)]
    if wrong:
        raise ConfigError(
            f"'{wrong[0]}' is a {type(kwargs[wrong[0]]).__name__}, to which no row can be added: make "
            "batches whose rows are a multiple of the microbatches, or use varlen or sdpa attention"
        )
    added, source = rows < 0, rows.clamp(min=0)
    media = {getattr(config, name, None) for name in ("image_token_id", "video_token_id")}
    word = next(number for number in range(len(media) + 1) if number not in media)
    taken = {name: value.index_select(axes[name], source.to(value.device)) for name, value in kwargs.items()}
    ids, labels = (
        value.index_select(0, source.to(value.device)).masked_fill(added[:, None].to(value.device), fill)
        for value, fill in ((ids, word), (labels, IGNORE_INDEX))
    )
    return ids, labels, taken
