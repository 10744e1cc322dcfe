"""Join encoded samples into packs: one sequence of several documents.

Copies the tokens once; pixels are not copied before the batch is built.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import get_worker_info

from packhorse.chat import IGNORE_INDEX, shift_tokens, token_keys
from packhorse.errors import BadSample, ConfigError
from packhorse.families import FAMILIES, Family, Generic
from packhorse.families.qwen_vl import RopeIndex, mrope_position_ids
from packhorse.types import MEDIA_KINDS, MediaKind, MediaLayout, PackedSample, Sample, TensorLayout
from packhorse.utils.pool import in_worker

# All families join a tensor of the same key alike, except that only some declare it ragged.
_DECLARED: MediaLayout = {
    key: layout for family in reversed(FAMILIES) for key, layout in family.layout.items()
}
_RAGGED = frozenset(key for family in FAMILIES for key, layout in family.layout.items() if layout.ragged)
_FILL: Mapping[str, float] = {key: value for family in FAMILIES for key, value in family.fill.items()}

MEDIA_KEYS: tuple[str, ...] = tuple(dict.fromkeys(key for family in FAMILIES for key in family.layout))
"""Every media tensor of every family, from their layouts."""

_LARGE = 1 << 22  # bytes from which on the allocator matters
_COUNTS: Mapping[str, MediaKind] = {f"n_{kind}s": kind for kind in MEDIA_KINDS}
_DEFAULTS: Mapping[str, int] = {"loss_weights": 1}  # of tensors per token that a sample lacks, if not 0


def layout_of(key: str, family: Family | None, values: Iterable[Any] = ()) -> TensorLayout:
    """Return the declared layout of a media tensor; for the generic family, by its name.

    Without a family the declaration of any family counts. ``values`` are what samples hold under the key, if
    that need not be tensors. Raises :class:`ConfigError` if it is not declared, or not a tensor.
    """
    table = _DECLARED if family is None else family.layout
    if key in table:
        return table[key]
    wrong = [value for value in values if value is not None and not hasattr(value, "shape")]
    if isinstance(family, Generic) and not wrong:
        return _named_layout(key)
    value = type(wrong[0]).__name__ if wrong else "tensor"
    who = "no family declares"
    if family is not None:
        who = f"family '{family.name}' does not declare ({', '.join(table)})"
    what = f"the samples hold '{key}' (a {value}), which {who}: remove it from the samples"
    raise ConfigError(what, setting=key, value=value)


def _named_layout(key: str) -> TensorLayout:
    """Return a layout with one entry per media item, except for pixels that come with a grid."""
    kind: MediaKind = "video" if "video" in key else "audio" if "audio" in key else "image"
    grid = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}.get(key)
    ragged = key in _DECLARED and _DECLARED[key].ragged
    return TensorLayout((kind,), "rows" if grid else "item", grid, ragged)


def media_keys(family: Family | None) -> set[str]:
    """Return the keys that are media whatever their shape: those of every family, and of this one."""
    return {*MEDIA_KEYS, *(family.layout if family is not None else ())}


def all_media_keys(samples: Sequence[Sample | PackedSample]) -> list[str]:
    """Return the keys of the media tensors that any of the samples has."""
    return list(dict.fromkeys(key for sample in samples for key in sample.media))


def to_sample(
    values: Mapping[str, Any], family: Family | None, key: str = "", *, strict: bool = False
) -> Sample:
    """Parse an encoded sample; :meth:`packhorse.types.Sample.to_dict` is the inverse.

    Takes tensors, arrays or lists per token; media as the layout declares them, or as a list with one tensor
    or array for each media item (its rows if each item has several, else the item itself, without the axis of
    items); ``n_images``, ``n_videos`` and ``n_audios``. Keys with a leading underscore are ignored, and so
    are entries that are not media unless ``strict``. Without a family, all families that declare the sample's
    media have to declare a list alike. Raises :class:`ConfigError` for other media.
    """
    per_token, others = _split(values, family)
    media = {
        name: _media_tensor(name, value, values, family)
        for name, value in others.items()
        if strict or _holds_media(name, value)
    }
    num_items = {kind: _count_items(kind, values.get(name), media, family) for name, kind in _COUNTS.items()}
    return Sample(tokens={}, media=media, num_items=num_items, key=key).with_per_token(per_token)


def _split(
    values: Mapping[str, Any], family: Family | None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors per token of a sample or pack, and everything else except counts."""
    given = {key: value for key, value in values.items() if value is not None and not key.startswith("_")}
    per_token = {key: torch.as_tensor(given.pop(key)) for key in token_keys(given, media_keys(family))}
    for key, value in per_token.items():
        per_token[key] = value[0] if value.dim() == 2 and len(value) == 1 else value
    return per_token, {key: value for key, value in given.items() if key not in _COUNTS}


def _holds_media(key: str, value: Any) -> bool:
    """Return whether a value of an encoded sample is media, not metadata about them (a name, a source)."""
    items = value if isinstance(value, list | tuple) else [value]
    return key in MEDIA_KEYS or any(hasattr(item, "shape") for item in items)


def _media_tensor(key: str, value: Any, sample: Mapping[str, Any], family: Family | None) -> torch.Tensor:
    """Return the media of a sample under this key as one tensor; see :func:`to_sample`."""
    layout = layout_of(key, family, [value])
    if not isinstance(value, list | tuple) or not any(hasattr(item, "shape") for item in value):
        return _as_tensor(key, value)
    if family is None:
        layout = _only_layout(key, sample)
    items = [_as_tensor(key, item) for item in value]
    counts = [sample.get(f"n_{kind}s") for kind in layout.kinds]
    known = sum(int(count) for count in counts if count is not None)
    expected = 1 if layout.owner == "sample" else known if None not in counts else len(items)
    if len(items) != expected:
        each = "sample" if layout.owner == "sample" else " or ".join(layout.kinds)
        what = (
            f"'{key}' of a sample is a list of {len(items)} tensors, expected {expected}: one per {each}."
            " Join them along axis 0 if they are something else"
        )
        raise ConfigError(what, setting=key, value=len(items))
    return join(key, items if layout.owner == "rows" else [item.unsqueeze(0) for item in items], family)


def _only_layout(key: str, sample: Mapping[str, Any]) -> TensorLayout:
    """Return the layout on which all families agree that declare all media of the sample."""
    given = {name for name in MEDIA_KEYS if sample.get(name) is not None}
    layouts = {family.layout[key] for family in FAMILIES if given <= family.layout.keys()}
    if len({layout.owner for layout in layouts}) != 1:
        raise ConfigError(
            f"'{key}' of a sample is a list of tensors, which families join in different ways: join it along "
            "axis 0, or use a dataset with a family (PreTokenizedDatasetWrapper)",
            setting=key,
        )
    return layouts.pop()


def _as_tensor(key: str, value: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError.of(key, type(value).__name__, f"cannot become a tensor: {error}") from error


def join(
    key: str, parts: Sequence[torch.Tensor], family: Family | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Concatenate tensors along axis 0, with one copy of each; raise if they do not fit together.

    The family declares whether other axes may differ. ``dtype`` of None is the widest of the parts.
    """
    dtype = reduce(torch.promote_types, (part.dtype for part in parts)) if dtype is None else dtype
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) > 1:
        _check_ragged(key, parts, family)
    if len(parts) == 1 and parts[0].dtype == dtype:
        return parts[0]
    sides = [max(sizes) for sizes in zip(*shapes, strict=True)]
    joined = _empty((sum(map(len, parts)), *sides), dtype)
    if len(shapes) > 1:
        joined.fill_((_FILL if family is None else family.fill).get(key, 0.0))
    first = 0
    for part in parts:
        region = (slice(first, first + len(part)), *(slice(0, side) for side in part.shape[1:]))
        joined[region].copy_(part)
        first += len(part)
    return joined


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate a tensor; a large one where writing and sending it costs the least."""
    numbers = math.prod(shape)
    if numbers * dtype.itemsize < _LARGE:
        return torch.empty(shape, dtype=dtype)
    if in_worker() or get_worker_info() is not None:
        empty = torch.empty(0, dtype=dtype)
        # In shared memory, as in torch's default_collate, or sending it would copy it once more. torch has no
        # public call that allocates shared memory.
        storage = empty._typed_storage()._new_shared(numbers, device=empty.device)  # type: ignore[no-untyped-call]
        return empty.new(storage).resize_(shape)
    # numpy asks for huge pages and torch does not: benchmarks/materialise.py promises 4x the plain way and
    # measures 10.6x with this line, 4.2x with torch.empty.
    return torch.from_numpy(np.empty(numbers * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def are_pixels(key: str, dtype: torch.dtype) -> bool:
    """Return whether a media tensor holds pixels, which may be converted to the model's dtype."""
    return "pixel_values" in key and dtype.is_floating_point


def cast_pixels(batch: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """Cast pixels to ``dtype``; masks, grids and audio stay, and with None everything."""
    result = dict(batch)
    for key, value in batch.items():
        if dtype is not None and isinstance(value, torch.Tensor) and are_pixels(key, value.dtype):
            result[key] = value.to(dtype)
    return result


def _check_ragged(key: str, parts: Sequence[torch.Tensor], family: Family | None) -> None:
    axes = {part.dim() for part in parts}
    if len(axes) == 1 and (key in _RAGGED if family is None else layout_of(key, family).ragged):
        return
    shapes = [tuple(part.shape) for part in parts]
    why = "all but the first axis must be the same (the family does not declare it ragged)"
    if len(axes) > 1:
        why = "they differ in their number of axes"
    raise ConfigError(f"'{key}' has shapes {shapes} in one batch: {why}", setting=key, value=shapes)


def _count_items(
    kind: MediaKind, given: Any, media: Mapping[str, torch.Tensor], family: Family | None
) -> int:
    """Return the number of media items of a kind: as given, else by the tensors of the sample.

    That is the length of the first tensor with one entry per item, else of the kind's own tensor.
    """
    if given is not None:
        return int(given)
    layouts = {key: layout_of(key, family) for key in media}
    for owner in ("item", "rows", "sample"):
        for key, layout in layouts.items():
            fits = layout.kinds[0] == kind and layout.owner == owner
            if fits and (owner != "rows" or layout.rows_from not in media):
                return len(media[key])
    return 0


def check_tokens(sample: Sample, where: str) -> None:
    """Raise a ConfigError if a tensor of a sample has not one entry per token."""
    for key, value in sample.per_token.items():
        if value.shape[-1] != len(sample) or value.dim() > (2 if key == "position_ids" else 1):
            expected = f"expected one entry for each of the {len(sample)} tokens of {where}"
            raise ConfigError.of(key, tuple(value.shape), expected)


class Packer:
    """Shift samples, compute their positions and join them into packs.

    Args:
        pack_size: the maximum number of tokens of a pack, after the shift.
        padding_idx: pads documents to ``sequence_alignment``; the end of a pack is not padded.
        get_rope_index: for models with mRoPE: :func:`packhorse.families.qwen_vl.rope_index` of the model.
        sequence_alignment: each document is padded to a multiple of this many tokens.
        family: its layout says how media are joined; None joins every known media tensor along axis 0.
    """

    def __init__(
        self,
        pack_size: int,
        padding_idx: int = 0,
        get_rope_index: RopeIndex | None = None,
        sequence_alignment: int = 1,
        family: Family | None = None,
    ) -> None:
        self.pack_size, self.padding_idx, self.get_rope_index = pack_size, padding_idx, get_rope_index
        self.sequence_alignment, self.family = sequence_alignment, family

    def prepare(self, sample: Sample) -> Sample:
        """Shift an encoded sample of at least two tokens by one, and compute its positions."""
        length = sample.tokens["input_ids"].shape[-1]
        if length < 2:
            detail = f"sample has {length} token; at least 2 are needed for the label shift"
            raise BadSample(detail, reason="empty_sample", stage="encode")
        per_token = {key: value for key, value in sample.per_token.items() if key != "position_ids"}
        if self.get_rope_index is not None:
            positions = mrope_position_ids({**sample.tokens, **sample.media}, self.get_rope_index)
            if positions is not None:
                per_token["position_ids"] = positions
        return sample.with_per_token(shift_tokens(per_token))

    def padded_length(self, length: int) -> int:
        """Return the tokens of a document of this length, padding to the alignment included."""
        return max(length, 0) + -max(length, 0) % self.sequence_alignment

    def join(self, samples: Sequence[Sample]) -> PackedSample:
        """Join prepared samples to a pack.

        Positions are those of the samples; if none has any, they restart at 0 with each document.
        The mask holds document numbers 1, 2, …, and 0 for hidden tokens (of a fake image) and padding.
        Samples without loss weights have weight 1 next to others that have them.

        Raises:
            ConfigError: there are no samples, they do not fit into ``pack_size``, tensors do not match, or
                only some samples have positions.
        """
        if not samples:
            raise ConfigError("a pack has no samples: expected at least one", setting="samples", value=0)
        _check_positions(samples)
        rows = [_document(sample, number) for number, sample in enumerate(samples, 1)]
        lengths = [len(sample) for sample in samples]
        padded = [self.padded_length(length) for length in lengths]
        if sum(padded) > self.pack_size:
            expected = f"expected at least {sum(padded)}, for documents of {padded} tokens"
            raise ConfigError.of("pack_size", self.pack_size, expected)
        joined = {}
        for key in dict.fromkeys(key for row in rows for key in row):
            columns = (_column(row, key) for row in rows)
            fill = fill_value(key, self.padding_idx)
            joined[key] = torch.cat(
                [
                    F.pad(column, (0, width - column.shape[-1]), value=fill)
                    for column, width in zip(columns, padded, strict=True)
                ],
                dim=-1,
            )
        items = [{kind: sample.num_items.get(kind, 0) for kind in MEDIA_KINDS} for sample in samples]
        media = {
            key: tuple(sample.media[key] for sample in samples if key in sample.media)
            for key in all_media_keys(samples)
        }
        return PackedSample(
            labels=joined.pop("labels"),
            position_ids=joined.pop("position_ids"),
            loss_weights=joined.pop("loss_weights", None),
            tokens=joined,
            media=media,
            num_items={kind: sum(numbers[kind] for numbers in items) for kind in MEDIA_KINDS},
            seq_lens=lengths,
            seq_lens_padded=padded,
            items_per_document=[numbers["image"] + numbers["video"] for numbers in items],
            alignment=self.sequence_alignment,
        )


def _check_positions(samples: Sequence[Sample]) -> None:
    """Raise if only some samples of a pack have positions; name the first without."""
    missing = [sample for sample in samples if sample.position_ids is None]
    if 0 < len(missing) < len(samples):
        name = missing[0].key or f"sample {samples.index(missing[0])}"
        raise ConfigError(
            f"{name} has no 'position_ids', but others of its pack have: expected all or none",
            setting="position_ids",
        )


def _column(row: Mapping[str, torch.Tensor], key: str) -> torch.Tensor:
    """Return a tensor of a document; the default of one that it lacks, but others of its pack have."""
    return row[key] if key in row else torch.full_like(row["input_ids"], _DEFAULTS.get(key, 0))


def _document(sample: Sample, number: int) -> dict[str, torch.Tensor]:
    """Return the tensors per token of one document, its number in place of the mask."""
    where = f"sample {number - 1} of the pack"
    if sample.labels is None:
        raise ConfigError(f"{where} has no labels, only {', '.join(sample.per_token)}", setting="labels")
    check_tokens(sample, where)
    row = sample.per_token
    ids, mask = row["input_ids"], row.get("attention_mask")
    # 0 stays 0, so that hidden tokens stay hidden.
    row["attention_mask"] = (
        torch.full_like(ids, number) if mask is None else (mask != 0).to(ids.dtype) * number
    )
    if sample.position_ids is None:
        row["position_ids"] = torch.arange(len(ids))
    return row


def fill_value(key: str, padding_idx: int) -> int:
    """Return the padding value of a tensor per token."""
    return {"input_ids": padding_idx, "labels": IGNORE_INDEX, **_DEFAULTS}.get(key, 0)


def stack_tokens(
    rows: Sequence[Mapping[str, torch.Tensor]], width: int, padding_idx: int, side: str = "right"
) -> dict[str, Any]:
    """Stack and pad the tensors per token of several rows to [B, width] (of [3, S]: [3, B, width])."""
    stacked = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        given = [row.get(key) for row in rows]
        axes = {tuple(value.shape[:-1]) for value in given if value is not None}
        if len(axes) > 1:
            raise ConfigError.of(key, sorted(axes), "expected the same leading axes in all samples")
        if key == "position_ids" and any(value is None for value in given):
            what = f"only some samples of the batch have '{key}': expected all or none"
            raise ConfigError(what, setting=key)
        (lead,) = axes
        dtype = reduce(torch.promote_types, (value.dtype for value in given if value is not None))
        whole = torch.full((*lead, len(rows), width), fill_value(key, padding_idx), dtype=dtype)
        for row, value in enumerate(given):
            if value is not None:
                first = width - value.shape[-1] if side == "left" else 0
                whole[..., row, first : first + value.shape[-1]] = value
        stacked[key] = whole
    return stacked


def pack_to_dict(pack: PackedSample, family: Family | None) -> dict[str, Any]:
    """Return the documented dict of a pack; see :func:`_build_packed_vlm_sample`."""
    return {
        **pack.per_token,
        **{key: join(key, parts, family) for key, parts in pack.media.items()},
        "seq_lens": pack.seq_lens,
        "seq_lens_padded": pack.seq_lens_padded,
        **{name: pack.num_items[kind] for name, kind in _COUNTS.items()},
        "_family": family,
        "_alignment": pack.alignment,
        "_media_per_document": pack.items_per_document,
    }


def to_pack(values: Mapping[str, Any], family: Family | None) -> PackedSample:
    """Parse the documented dict of a pack."""
    per_token, media = _split(values, family)
    seq_lens, padded = media.pop("seq_lens", ()), media.pop("seq_lens_padded", ())
    return PackedSample(
        labels=per_token.pop("labels", None),
        position_ids=per_token.pop("position_ids", None),
        loss_weights=per_token.pop("loss_weights", None),
        tokens=per_token,
        media={key: value if isinstance(value, list) else (value,) for key, value in media.items()},
        num_items={kind: int(values.get(name, 0)) for name, kind in _COUNTS.items()},
        seq_lens=seq_lens,
        seq_lens_padded=padded,
        items_per_document=values.get("_media_per_document"),
        alignment=int(values.get("_alignment", 1)),
    )


def _shift_sample(sample: Mapping[str, Any], has_mrope: bool = False) -> dict[str, Any]:
    """Shift one sample by one token: each position gets the label of the next token.

    Returns views one token shorter; media tensors are the same objects. Only with ``has_mrope`` are
    ``position_ids`` [3, S] cut like the ids; otherwise positions stay.
    """
    names = [key for key in token_keys(sample, MEDIA_KEYS) if has_mrope or key != "position_ids"]
    return {**sample, **shift_tokens({key: torch.as_tensor(sample[key]) for key in names})}


def _build_packed_vlm_sample(
    samples: Sequence[Mapping[str, Any]],
    pack_size: int,
    padding_idx: int,
    has_mrope: bool = False,
    sequence_alignment: int = 1,
    *,
    family: Family | None = None,
) -> dict[str, Any]:
    """Join samples that are already shifted into one pack.

    Args:
        samples: dicts of :func:`_shift_sample`; with mRoPE each has ``position_ids`` [3, S].
        pack_size: see :class:`Packer`, like ``padding_idx``, ``sequence_alignment`` and ``family``.
        padding_idx: see there.
        has_mrope: positions are those of the samples; otherwise they restart at 0 with each document.
        sequence_alignment: see there.
        family: see there.

    Returns:
        ``input_ids`` and ``labels`` [S]; ``attention_mask`` [S]: the document's number 1, 2, …, and 0 for
        hidden tokens (of a fake image) and padding; ``position_ids`` [S] or [3, S]; further tensors per
        token; media tensors; ``seq_lens`` (tokens of each document, without padding) and
        ``seq_lens_padded``; ``n_images``, ``n_videos`` and ``n_audios``. In addition, for the collater:
        ``_family``, ``_alignment`` and ``_media_per_document`` (images and videos of each document).

    Raises:
        ConfigError: as :meth:`Packer.join`, or a sample has no positions with mRoPE.
    """
    packer = Packer(pack_size, padding_idx, None, sequence_alignment, family)
    typed = [to_sample(sample, family) for sample in samples]
    for index, sample in enumerate(typed):
        if has_mrope and sample.position_ids is None:
            what = f"sample {index} of the pack has no position_ids; with mRoPE each needs them"
            raise ConfigError(what, setting="position_ids")
    if not has_mrope:
        typed = [replace(sample, position_ids=None) for sample in typed]
    return pack_to_dict(packer.join(typed), family)
