"""Packs become a batch: padded to one length, with what the attention backend needs to keep documents apart.

Labels were shifted when the packs were built. Costs one copy of every tensor (pixels are converted on the
way) and, for ``sdpa`` and ``eager`` only, a dense mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from packhorse.collate.finish import add_counts, add_shift_labels, check_present
from packhorse.collate.masks import Segments, additive, block_causal_mask, positions_tell, segments
from packhorse.collate.packer import all_media_keys, are_pixels, join, layout_of, stack_tokens, to_pack
from packhorse.collate.processor_call import logger
from packhorse.errors import ConfigError
from packhorse.families import Family
from packhorse.families.models import check_packable, check_router_loss, is_at_least, unwrap
from packhorse.pp_media import COUNT_KEYS, MEDIA_LAYOUT_KEY, MEDIA_ROWS_KEY
from packhorse.types import PackedSample, TensorLayout

Pack = Mapping[str, Any]

ATTENTION = ("sdpa", "eager", "flash_attention_2", "flex_attention", "varlen")
"""The attention backends that packed batches are made for."""

_INFORMATION = frozenset({"_packed_seq_ids", *COUNT_KEYS.values(), MEDIA_LAYOUT_KEY, MEDIA_ROWS_KEY})
_LABELS = frozenset({"labels", "shift_labels"})
_VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_CONTIGUOUS = ("flash_attention_2", "varlen")
_DOCUMENT_NUMBERS = "document numbers"  # no backend: the mask is left to the model
_DENSE = 4  # axes of a mask: [B, 1, S, S]


def neat_packed_vlm_collater(
    batch: Sequence[Pack],
    padding_idx: int = 0,
    max_length: int | None = None,
    attn_implementation: str | None = "sdpa",
    *,
    materialize_4d_mask: bool = True,
    pixel_dtype: torch.dtype | None = torch.bfloat16,
    mask_dtype: torch.dtype = torch.float32,
    config: Any = None,
    media_layout: bool = False,
) -> dict[str, Any]:
    """Make a batch of packs from :class:`packhorse.neat_packing_vlm.PackedDatasetWrapper`.

    Args:
        batch: the packs.
        padding_idx: the id that fills up short packs.
        max_length: pad every batch to so many tokens; None pads to the longest pack. Nothing is ever cut.
        attn_implementation: what the model's decoder runs with: ``"sdpa"``, ``"eager"``,
            ``"flash_attention_2"``, ``"flex_attention"`` or ``"varlen"``
            (:func:`packhorse.integrations.attention.use_attention`). None is ``"sdpa"``.
        materialize_4d_mask: False leaves the document numbers [B, S] as ``attention_mask`` with ``"sdpa"``
            and ``"eager"`` too, for a model that makes its own mask of them. transformers' models do not:
            they would take each row for one document, and :func:`model_inputs` and :func:`loss_inputs`
            refuse such a batch.
        pixel_dtype: what pixels are converted to while they are copied; None leaves them.
        mask_dtype: of the mask for ``"eager"``: the model's.
        config: the model's; only needed for Gemma 3 and 4 where packs hold fake images.
        media_layout: also say whose the entries of each media tensor are, for a pipeline
            (:mod:`packhorse.pp_media`).

    Returns:
        ``input_ids``, ``labels`` [B, S] (already shifted), ``shift_labels`` (the same tensor, so that the
        model does not shift them again) and other tensors per token; ``position_ids`` [B, S], or
        [3, B, S] with mRoPE; media tensors joined along axis 0; ``n_images_per_sample``,
        ``n_videos_per_sample`` and ``n_audios_per_sample`` [B] where there are any; ``_packed_seq_ids``
        [B, S], the document numbers, where a row has more than one. And by backend:

        - ``sdpa``: ``attention_mask``, bool [B, 1, S, S], True where a token is seen; ``eager``: the same
          as numbers to add.
        - ``flash_attention_2``: ``attention_mask`` = the document numbers [B, S], and ``cu_seq_lens_q``,
          ``cu_seq_lens_k``, ``max_length_q``, ``max_length_k``, from which transformers' own flash
          attention tells documents apart if it gets no mask: pass it :func:`model_inputs`.
        - ``varlen``: these four alone.
        - ``flex_attention``: ``attention_mask``, a BlockMask.
        - Gemma 3 and 4, whose images see themselves both ways: no mask, but ``use_cache=False``: from the
          positions, which restart, transformers makes the right one.

        An empty batch gives ``{}``.

    Raises:
        ConfigError: a pack is None, an unknown backend, packs longer than ``max_length``, or a backend that
            cannot do what the family needs.
    """
    packs, family = read_packs(batch)
    return collate_packs(
        packs,
        family,
        padding_idx,
        max_length,
        attn_implementation,
        materialize_4d_mask=materialize_4d_mask,
        pixel_dtype=pixel_dtype,
        mask_dtype=mask_dtype,
        config=config,
        media_layout=media_layout,
    )


def read_packs(batch: Sequence[Pack]) -> tuple[list[PackedSample], Family | None]:
    """The packs of a batch, and their family if they say it.

    Raises:
        ConfigError: a pack is None.
    """
    check_present(batch)
    family = next((pack["_family"] for pack in batch if pack.get("_family") is not None), None)
    return [to_pack(pack, family) for pack in batch], family


def collate_packs(
    packs: Sequence[PackedSample],
    family: Family | None,
    padding_idx: int = 0,
    max_length: int | None = None,
    attn_implementation: str | None = "sdpa",
    *,
    materialize_4d_mask: bool = True,
    pixel_dtype: torch.dtype | None = torch.bfloat16,
    mask_dtype: torch.dtype = torch.float32,
    config: Any = None,
    media_layout: bool = False,
) -> dict[str, Any]:
    """:func:`neat_packed_vlm_collater` of typed packs; ``family`` is that of their samples."""
    backend = "sdpa" if attn_implementation is None else attn_implementation
    if backend not in ATTENTION:
        raise ConfigError(f"{attn_implementation=}: expected one of {', '.join(ATTENTION)}, or None")
    if not packs:
        return {}
    rows = PackedRows(packs, family, padding_idx, max_length)
    if not materialize_4d_mask and backend in ("sdpa", "eager"):
        backend = _DOCUMENT_NUMBERS
    made = _with_attention(rows, backend, mask_dtype, config)
    made |= rows.media(pixel_dtype)
    if media_layout:
        made |= rows.whose_media()
    return add_counts(add_shift_labels(made), [pack.num_items for pack in packs])


def _with_attention(rows: PackedRows, backend: str, mask_dtype: torch.dtype, config: Any) -> dict[str, Any]:
    """Tensors per token, and what the backend needs to keep documents apart."""
    made = rows.tokens()
    documents = made["attention_mask"]
    marked = rows.bidirectional(made)
    if backend in _CONTIGUOUS:
        made, found = rows.contiguous(made, marked is not None, backend)
        documents = made["attention_mask"]
        made |= _varlen_arguments(found)
        if backend == "varlen":
            del made["attention_mask"]
        elif bool((documents == 0).any()):
            _warn_of_padding()
    elif backend == _DOCUMENT_NUMBERS:
        pass  # the mask that the rows have
    elif marked is not None:
        _mask_both_ways(made, marked, backend, mask_dtype, config, rows.family)
    elif backend == "flex_attention":
        from packhorse.collate.masks import document_block_mask

        made["attention_mask"] = document_block_mask(documents)
    else:
        mask = block_causal_mask(documents)
        made["attention_mask"] = mask if backend == "sdpa" else additive(mask, mask_dtype)
    if int(documents.max()) > 1:
        made["_packed_seq_ids"] = documents
    return made


def loss_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Everything in a batch that a model of transformers takes: ``model(**loss_inputs(batch)).loss``.

    Counts and document numbers stay out. With ``cu_seq_lens_q`` the mask stays out too: where there is one,
    transformers' flash attention goes by it, and takes each row for one document.

    Raises:
        ConfigError: the mask holds document numbers (``materialize_4d_mask=False``).
    """
    mask = batch.get("attention_mask")
    numbers = isinstance(mask, torch.Tensor) and mask.dim() != _DENSE and "_packed_seq_ids" in batch
    if numbers and "cu_seq_lens_q" not in batch:
        raise ConfigError(
            "attention_mask holds document numbers (materialize_4d_mask=False), which models of transformers "
            "take for one document: make batches with materialize_4d_mask=True"
        )
    dropped = _INFORMATION | ({"attention_mask"} if "cu_seq_lens_q" in batch else set())
    return {key: value for key, value in batch.items() if key not in dropped}


def model_inputs(batch: Mapping[str, Any], model: Any = None) -> dict[str, Any]:
    """What of a batch a model of transformers is called with for its logits.

    Labels stay out, so that the model computes no loss in addition to
    :func:`~packhorse.integrations.loss.token_loss`; so does everything that is no input of a model (see
    :func:`loss_inputs`).

    Args:
        batch: from one of the collate functions.
        model: the one that is called, to see that its decoder runs the attention that the batch was made for.
            With another one, documents see each other, and nothing else says so.

    Raises:
        ConfigError: the batch was made for another attention, the model cannot be trained on packed rows, or
            it has an auxiliary loss, which only the model itself can add (see ``check_router_loss``).
    """
    inputs = loss_inputs(batch)
    if model is not None:
        _check_attention(batch, model)
        check_router_loss(unwrap(model).config)
    return {key: value for key, value in inputs.items() if key not in _LABELS}


def _check_attention(batch: Mapping[str, Any], model: Any) -> None:
    runs = str(unwrap(model).config.get_text_config()._attn_implementation)
    right = _backends_of(batch)
    if right:
        check_packable(model)
    if right and runs not in right:
        raise ConfigError(
            f"the batch was made for {' or '.join(right)}, the model's decoder runs {runs}: documents would "
            f"see each other. Call packhorse.integrations.attention.use_attention(model, {right[0]!r}), or "
            f"make batches with attn_implementation={runs!r}"
        )


def _backends_of(batch: Mapping[str, Any]) -> tuple[str, ...]:
    """The attention that a batch is right for; none named if it is not packed: then all are."""
    if "cu_seq_lens_q" in batch:
        return _CONTIGUOUS[::-1]
    mask = batch.get("attention_mask")
    if mask is None:  # transformers makes it from the positions
        return ("sdpa", "eager", "flex_attention") if "use_cache" in batch else ()
    if isinstance(mask, Mapping):  # one for each kind of layer
        mask = next(iter(mask.values()))
    if not isinstance(mask, torch.Tensor):
        return ("flex_attention",)
    if mask.dim() != _DENSE:
        return ()
    return ("sdpa",) if mask.dtype == torch.bool else ("eager", "sdpa")


class PackedRows:
    """The packs of a batch, and how their tensors are put together."""

    def __init__(
        self,
        packs: Sequence[PackedSample],
        family: Family | None,
        padding_idx: int,
        max_length: int | None,
    ) -> None:
        self.packs, self.family, self.padding_idx = packs, family, padding_idx
        longest = max(map(len, packs))
        if max_length is not None and longest > max_length:
            raise ConfigError(
                f"a pack of {longest:,} tokens in a batch of max_length={max_length:,}: make max_length at "
                "least the pack_size of the dataset"
            )
        self.length = longest if max_length is None else max_length
        self.alignments = [pack.alignment for pack in packs]

    def tokens(self) -> dict[str, Any]:
        """Tensors per token, padded on the right."""
        rows = [pack.per_token for pack in self.packs]
        return stack_tokens(rows, self.length, self.padding_idx)

    def bidirectional(self, made: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Tokens that see each other in both directions, bool [B, S]; None where the family has none."""
        if self.family is not None:
            key = self.family.bidirectional
            if key is None:
                return None
            marked = made.get(key, torch.zeros_like(made["input_ids"]))
            return (marked == 1) | (marked == 2)  # images and videos; sound is a 3, and looks back only
        types = made.get("token_type_ids")
        return types == 1 if types is not None and bool((types == 1).any()) else None

    def contiguous(
        self, made: Mapping[str, torch.Tensor], bidirectional: bool, backend: str
    ) -> tuple[dict[str, Any], Segments]:
        """Every document in one run of tokens, what it hides after it; and where documents are."""
        if bidirectional:
            raise ConfigError(
                f"images of this family see themselves both ways, which {backend} cannot do: use sdpa, eager "
                "or flex_attention"
            )
        alignment = math.lcm(*self.alignments)
        if self.length % alignment:
            raise ConfigError(
                f"documents are aligned to {alignment} tokens, which rows of {self.length:,} are not: "
                f"make max_length (pack_size of a loader) a multiple of {alignment}"
            )
        found = segments(made["attention_mask"], self.alignments)
        if not found.moved:
            return dict(made), found
        self._check_hidden(made["attention_mask"], backend)
        index = found.order
        return {key: value.gather(-1, index.expand_as(value)) for key, value in made.items()}, found

    def _check_hidden(self, documents: torch.Tensor, backend: str) -> None:
        """Media come in the order of their tokens, so hidden ones may only move past text."""
        owner = documents.cummax(-1).values
        none = torch.iinfo(documents.dtype).max
        following = torch.where(documents > 0, documents, none).flip(-1).cummin(-1).values.flip(-1)
        for row, pack in enumerate(self.packs):
            media = pack.items_per_document or ()
            hiding = set(owner[row][(documents[row] == 0) & (owner[row] == following[row])].tolist())
            for number in sorted(hiding) if media else ():
                if media[number - 1] > 1:
                    raise ConfigError(
                        f"document {number} of row {row} hides tokens beside {media[number - 1]} media, "
                        f"which {backend} cannot do: use sdpa, eager or flex_attention"
                    )

    def media(self, pixel_dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        """Media tensors of all packs, joined in one copy."""
        joined = {}
        for key in all_media_keys(self.packs):
            parts = [part for pack in self.packs for part in pack.media.get(key, ())]
            dtype = pixel_dtype if are_pixels(key, parts[0].dtype) else None
            joined[key] = join(key, parts, self.family, dtype)
        return joined

    def whose_media(self) -> dict[str, Any]:
        """The layout of each media tensor, and its entries for each pack; nothing without media."""
        keys = all_media_keys(self.packs)
        if not keys:
            return {}
        rows = {key: [sum(map(len, pack.media.get(key, ()))) for pack in self.packs] for key in keys}
        return {
            MEDIA_LAYOUT_KEY: {key: self._layout(key) for key in keys},
            MEDIA_ROWS_KEY: {key: torch.tensor(numbers) for key, numbers in rows.items()},
        }

    def _layout(self, key: str) -> TensorLayout:
        layout = layout_of(key, self.family)
        # Families differ in what they have under a name; where the family is not known, rows tell all.
        return layout if self.family is not None else TensorLayout(layout.kinds, "sample")


def _varlen_arguments(found: Segments) -> dict[str, Any]:
    return dict(zip(_VARLEN, (found.cumulative, found.cumulative, found.longest, found.longest), strict=True))


def _mask_both_ways(
    made: dict[str, Any],
    marked: torch.Tensor,
    backend: str,
    mask_dtype: torch.dtype,
    config: Any,
    family: Family | None,
) -> None:
    """Masks of Gemma 3 and 4, which differ by the kind of layer."""
    documents = made["attention_mask"]
    made["use_cache"] = False
    if positions_tell(documents, made["position_ids"]):
        del made["attention_mask"]
        return
    if config is None or backend == "flex_attention":
        raise ConfigError(
            "a pack of this family holds a fake image, which can only be hidden in a mask for each kind of "
            "layer: pass config=model.config and use sdpa or eager, or give the dataset "
            "inject_fake_images=False"
        )
    text = config.get_text_config()
    sees = marked & (documents > 0)
    full, sliding = sees, sees
    if family is not None and family.name == "gemma4":
        nowhere = torch.zeros_like(sees)
        sliding = sees if text.use_bidirectional_attention == "vision" else nowhere
        # Gemma 4 looks both ways in its sliding layers only; in all layers before transformers 5.13.
        full = nowhere if is_at_least("5.13") else sliding
    masks = {
        "full_attention": block_causal_mask(documents, full),
        "sliding_attention": block_causal_mask(documents, sliding, text.sliding_window),
    }
    if backend == "eager":
        masks = {name: additive(mask, mask_dtype) for name, mask in masks.items()}
    made["attention_mask"] = masks


_warned: list[bool] = []


def _warn_of_padding() -> None:
    """Once: a mask with padding makes transformers' flash attention take each row for one document."""
    if not _warned:
        _warned.append(True)
        logger.warning(
            "flash_attention_2: call the model with packhorse.collate_fns.model_inputs(batch): given the "
            "attention_mask itself, transformers would take each row for one document"
        )
