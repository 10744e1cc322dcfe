"""Joining samples into a pack: encoded samples go in, one sequence comes out that remembers its documents.

Costs one copy of the tokens. Pixels are not copied here when the caller keeps them as parts
(:class:`~packhorse.collate.packer.Parts`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F

from packhorse.chat import IGNORE_INDEX, TOKEN_KEYS, shift_tokens
from packhorse.collate.pixel_buffer import already_joined, room_for
from packhorse.errors import ConfigError
from packhorse.families import FAMILIES, Family, Generic
from packhorse.families.positions import RopeIndex, mrope_position_ids
from packhorse.types import MediaKind, MediaLayout, TensorLayout

# A key that several families declare is joined alike in all of them, but for what one of them calls ragged.
_DECLARED: MediaLayout = {
    key: layout for family in reversed(FAMILIES) for key, layout in family.layout.items()
}
_RAGGED = frozenset(key for family in FAMILIES for key, layout in family.layout.items() if layout.ragged)
_FILL: Mapping[str, float] = {key: value for family in FAMILIES for key, value in family.fill.items()}

MEDIA_KEYS: tuple[str, ...] = tuple(dict.fromkeys(key for family in FAMILIES for key in family.layout))
"""Every media tensor of every family, from their layouts."""


class Parts(list[torch.Tensor]):
    """Tensors that are to be joined along axis 0, not yet copied; ``torch.cat`` takes it as it is."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the joined tensor: axes that differ are filled up to the largest."""
        sizes = [max(sides) for sides in zip(*(part.shape[1:] for part in self), strict=True)]
        return torch.Size([sum(len(part) for part in self), *sizes])

    @property
    def dtype(self) -> torch.dtype:
        """The type of the parts."""
        return self[0].dtype


def layout_of(key: str, family: Family | None, values: Iterable[Any] = ()) -> TensorLayout:
    """The declared layout of a media tensor; for processors nobody listed, what its name says.

    Args:
        key: of the tensor.
        family: None where it is not known: then what any family declares under this key counts.
        values: what samples hold under the key, where that need not be tensors.

    Raises:
        ConfigError: no family declares it, or it is no tensor.
    """
    table = layouts_of(family)
    if key in table:
        return table[key]
    wrong = [value for value in values if value is not None and not hasattr(value, "shape")]
    if isinstance(family, Generic) and not wrong:
        return _named_layout(key)
    what = type(wrong[0]).__name__ if wrong else "tensor"
    who = "no family declares" if family is None else f"family '{family.name}' does not declare"
    known = "" if family is None else f" ({', '.join(table)})"
    raise ConfigError(
        f"the samples hold '{key}' (a {what}), which {who}{known}: take it out, or it would be lost"
    )


def layouts_of(family: Family | None) -> MediaLayout:
    """The table of a family, or of all where it is not known."""
    return _DECLARED if family is None else family.layout


def _named_layout(key: str) -> TensorLayout:
    """One entry per medium, but for pixels that come with a grid."""
    kind: MediaKind = "video" if "video" in key else "audio" if "audio" in key else "image"
    grid = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}.get(key)
    ragged = key in _DECLARED and _DECLARED[key].ragged
    return TensorLayout((kind,), "rows" if grid else "item", grid, ragged)


def holds_media(key: str, value: Any) -> bool:
    """Whether a value of an encoded sample is media, not metadata about them (a name, a source)."""
    if value is None:
        return False
    items = value if isinstance(value, list | tuple) else [value]
    return key in MEDIA_KEYS or any(hasattr(item, "shape") for item in items)


def media_parts(key: str, value: Any, sample: Mapping[str, Any], family: Family | None) -> list[torch.Tensor]:
    """What a sample holds under a media key, as tensors that :func:`join` joins along axis 0.

    Args:
        key: of the media.
        value: a tensor or an array as the layout declares it; or a list with one tensor or array for each
            media item: its rows where each item has several, else the item itself, without the axis of items.
        sample: may say how many media items there are.
        family: None where it is not known: then all families that declare the sample's media have to declare
            this key alike.

    Raises:
        ConfigError: no family declares the key, it is no tensor, the list has not one entry for each media
            item, or an unknown family leaves open what its entries are.
    """
    layout = layout_of(key, family, [value])
    if not isinstance(value, list | tuple) or not any(hasattr(item, "shape") for item in value):
        return [_as_tensor(key, value)]
    if family is None:
        layout = _only_layout(key, sample)
    items = [_as_tensor(key, item) for item in value]
    counts = [sample.get(f"n_{kind}s") for kind in layout.kinds]
    known = sum(int(count) for count in counts if count is not None)
    expected = 1 if layout.owner == "sample" else known if None not in counts else len(items)
    if len(items) != expected:
        each = "sample" if layout.owner == "sample" else " or ".join(layout.kinds)
        raise ConfigError(
            f"'{key}' of a sample is a list of {len(items)} tensors, expected {expected}: one per {each}."
            " Join them along axis 0 if they are something else"
        )
    return items if layout.owner == "rows" else [item.unsqueeze(0) for item in items]


def _only_layout(key: str, sample: Mapping[str, Any]) -> TensorLayout:
    """The layout that every family declares which has all media of a sample."""
    given = {name for name in MEDIA_KEYS if sample.get(name) is not None}
    layouts = {family.layout[key] for family in FAMILIES if given <= family.layout.keys()}
    if len({layout.owner for layout in layouts}) != 1:
        raise ConfigError(
            f"'{key}' of a sample is a list of tensors, which families join in different ways. Join it along "
            "axis 0 before, or let the dataset say its family (PreTokenizedDatasetWrapper does)"
        )
    return layouts.pop()


def _as_tensor(key: str, value: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"'{key}' of a sample is a {type(value).__name__} that cannot become a tensor: {error}"
        ) from error


def join(
    key: str, parts: Sequence[torch.Tensor], family: Family | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """One tensor of all parts, each copied once; not at all where they lie one behind the other.

    Args:
        key: for messages, and to know whether other axes may differ.
        parts: at least one.
        family: None where it is not known.
        dtype: the type to convert to on the way; None leaves it (parts of several get the widest).

    Raises:
        ConfigError: the parts do not fit together.
    """
    dtype = reduce(torch.promote_types, (part.dtype for part in parts)) if dtype is None else dtype
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) > 1:
        _check_ragged(key, parts, family)
    if len(shapes) == 1 and (whole := already_joined(parts, dtype)) is not None:
        return whole
    if len(parts) == 1 and parts[0].dtype == dtype:
        return parts[0]
    joined = room_for(Parts(parts).shape, dtype)
    if len(shapes) > 1:
        joined.fill_((_FILL if family is None else family.fill).get(key, 0.0))
    first = 0
    for part in parts:
        places = (slice(first, first + len(part)), *(slice(0, side) for side in part.shape[1:]))
        joined[places].copy_(part)
        first += len(part)
    return joined


def _check_ragged(key: str, parts: Sequence[torch.Tensor], family: Family | None) -> None:
    axes = {part.dim() for part in parts}
    if len(axes) == 1 and (key in _RAGGED if family is None else layout_of(key, family).ragged):
        return
    shapes = [tuple(part.shape) for part in parts]
    why = "all but the first axis must be the same (the family does not declare it ragged)"
    if len(axes) > 1:
        why = "they differ in their number of axes"
    raise ConfigError(f"'{key}' has shapes {shapes} in one batch: {why}")


def count_items(sample: Mapping[str, Any], kind: str, layouts: MediaLayout) -> int:
    """How many media of a kind a sample has: its own ``n_images``/``n_videos``, else by its tensors.

    These are the entries of the first tensor that has one per medium; else rows of the kind's own tensor.
    """
    own = sample.get(f"n_{kind}s")
    if own is not None:
        return int(own)
    given = {key: layout for key, layout in layouts.items() if sample.get(key) is not None}
    for owner in ("item", "rows", "sample"):
        for key, layout in given.items():
            fits = layout.kinds[0] == kind and layout.owner == owner
            if fits and (owner != "rows" or layout.rows_from not in sample):
                return len(sample[key])
    return 0


def pad_end(tensor: torch.Tensor, number: int, value: float) -> torch.Tensor:
    """``number`` more entries of ``value`` at the end of the last axis."""
    return F.pad(tensor, (0, number), value=value) if number else tensor


Sample = Mapping[str, Any]

_COUNTS = ("n_images", "n_videos")
_PER_TOKEN = frozenset({*TOKEN_KEYS, "labels", "position_ids"})
_MEDIA = frozenset(MEDIA_KEYS)


def _shift_sample(sample: Sample, has_mrope: bool = False) -> dict[str, Any]:
    """Shift one sample by one token: each position gets the label of the next token.

    Args:
        sample: ``input_ids`` and ``labels`` [S], other tensors per token ([S] or [1, S]), media tensors.
        has_mrope: it has ``position_ids`` [3, S], to be cut like the ids; otherwise positions are left alone.

    Returns:
        A new dict of views one token shorter; media tensors are the same objects.
    """
    values = {key: torch.as_tensor(sample[key]) for key in _PER_TOKEN if sample.get(key) is not None}
    ids = values["input_ids"]
    kept = {key: value for key, value in sample.items() if key not in values}
    if not has_mrope and "position_ids" in values:
        kept["position_ids"] = values.pop("position_ids")
    # What a hook has added per token is cut with the others.
    more = {key: value for key, value in kept.items() if _is_per_token(key, value, ids)}
    shifted = shift_tokens(values)
    return {**kept, **shifted, **{key: value[..., :-1] for key, value in more.items()}}


def _is_per_token(key: str, value: Any, ids: torch.Tensor) -> bool:
    named = key in _MEDIA or key in _PER_TOKEN or key in _COUNTS
    return not named and isinstance(value, torch.Tensor) and value.shape == ids.shape


def _compute_mrope_position_ids(sample: Sample, get_rope_index: RopeIndex) -> torch.Tensor | None:
    """Positions [3, S] of one sample, or None if ``get_rope_index`` does not take ``input_ids``.

    See :func:`packhorse.families.positions.mrope_position_ids`.
    """
    return mrope_position_ids(sample, get_rope_index)


def _build_packed_vlm_sample(
    samples: Sequence[Sample],
    pack_size: int,
    padding_idx: int,
    has_mrope: bool = False,
    sequence_alignment: int = 1,
    *,
    family: Family | None = None,
    keep_parts: bool = False,
) -> dict[str, Any]:
    """Join samples that are already shifted into one pack.

    Args:
        samples: dicts of :func:`_shift_sample`; with mRoPE each has ``position_ids`` [3, S].
        pack_size: the most tokens the pack may have, alignment included.
        padding_idx: fills documents up to ``sequence_alignment``; the end of the pack is not padded.
        has_mrope: positions are the samples' own; otherwise they restart at 0 with each document.
        sequence_alignment: each document is padded to a multiple of this many tokens.
        family: whose layout says how media are joined; None joins every known media tensor along axis 0.
        keep_parts: leave large media tensors as a list of the samples' own, for the collater to copy once.

    Returns:
        ``input_ids`` and ``labels`` [S]; ``attention_mask`` [S]: the document's number 1, 2, …, and 0 where
        a token is hidden (a fake image's) or fills up; ``position_ids`` [S] or [3, S]; further tensors per
        token; media tensors; ``seq_lens`` (tokens of each document, without what fills up) and
        ``seq_lens_padded``; ``n_images`` and ``n_videos``. In addition, for the collater: ``_family``,
        ``_alignment`` and ``_media_per_document`` (how many images and videos each document has).

    Raises:
        ConfigError: there are no samples, they do not fit into ``pack_size``, or tensors do not match.
    """
    if not samples:
        raise ConfigError("a pack without samples: expected at least one")
    rows = [_tokens_of(sample, place, has_mrope) for place, sample in enumerate(samples)]
    lengths = [len(row["input_ids"]) for row in rows]
    padded = [length + -length % sequence_alignment for length in lengths]
    if sum(padded) > pack_size:
        raise ConfigError(f"documents of {padded} tokens, {sum(padded)} together, in a pack of {pack_size}")
    pack: dict[str, Any] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        fill = {"input_ids": padding_idx, "labels": IGNORE_INDEX}.get(key, 0)
        columns = [row.get(key, torch.zeros_like(row["input_ids"])) for row in rows]
        missing = [after - before for before, after in zip(lengths, padded, strict=True)]
        pack[key] = torch.cat([pad_end(c, n, fill) for c, n in zip(columns, missing, strict=True)], dim=-1)
    pack |= _media_of(samples, family, keep_parts)
    layouts = layouts_of(family)
    counts = [[count_items(sample, kind, layouts) for sample in samples] for kind in ("image", "video")]
    return {
        **pack,
        "seq_lens": lengths,
        "seq_lens_padded": padded,
        "n_images": sum(counts[0]),
        "n_videos": sum(counts[1]),
        "_family": family,
        "_alignment": sequence_alignment,
        "_media_per_document": [images + videos for images, videos in zip(*counts, strict=True)],
    }


def _tokens_of(sample: Sample, place: int, has_mrope: bool) -> dict[str, torch.Tensor]:
    """The tensors per token of one document, the mask turned into its number."""
    ids = torch.as_tensor(sample["input_ids"]).reshape(-1)
    more = (key for key, value in sample.items() if _is_per_token(key, value, ids))
    names = ("input_ids", "labels", "attention_mask", *TOKEN_KEYS, *more)
    row = {key: torch.as_tensor(sample[key]) for key in names if sample.get(key) is not None}
    row = {key: value[0] if value.dim() == 2 and len(value) == 1 else value for key, value in row.items()}
    seen = row.get("attention_mask")
    # A number each, so that documents can be told apart; 0 stays 0, so that hidden tokens stay hidden.
    number = place + 1
    row["attention_mask"] = (
        torch.full_like(ids, number) if seen is None else (seen != 0).to(ids.dtype) * number
    )
    row["position_ids"] = torch.arange(len(ids))
    if has_mrope:
        if sample.get("position_ids") is None:
            raise ConfigError(f"sample {place} of the pack has no position_ids; with mRoPE each needs them")
        row["position_ids"] = torch.as_tensor(sample["position_ids"])
    wrong = {key: tuple(value.shape) for key, value in row.items() if value.shape[-1] != len(ids)}
    if wrong or "labels" not in row:
        found = wrong or f"no labels, only {', '.join(row)}"
        raise ConfigError(
            f"sample {place} of the pack: {found}, expected one entry for each of {len(ids)} ids"
        )
    return row


def _media_of(samples: Sequence[Sample], family: Family | None, keep_parts: bool) -> dict[str, Any]:
    media: dict[str, Parts] = {}
    for sample in samples:
        for key, value in sample.items():
            passed_over = key in _PER_TOKEN or key in _COUNTS or key.startswith("_")
            if passed_over or _is_per_token(key, value, sample["input_ids"]) or not holds_media(key, value):
                continue
            media.setdefault(key, Parts()).extend(media_parts(key, value, sample, family))
    # Numbers are few; what is in floating point is large.
    return {
        key: parts if keep_parts and parts.dtype.is_floating_point else join(key, parts, family)
        for key, parts in media.items()
    }
