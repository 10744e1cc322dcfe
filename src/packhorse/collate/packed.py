"""Collate packs: pad them to one length and add the mask or the lengths that separate their documents.

Labels were shifted when the packs were built. Copies every tensor once (pixels are converted while they are
copied); only ``sdpa`` and ``eager`` need a dense mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from packhorse.chat import IGNORE_INDEX
from packhorse.collate.batch_formats import CONTIGUOUS, batch_format_of, find_batch_format
from packhorse.collate.finish import add_counts, check_present, finish_labels, logger
from packhorse.collate.masks import (
    Segments,
    additive,
    block_causal_mask,
    document_block_mask,
    find_segments,
    positions_separate,
)
from packhorse.collate.packer import all_media_keys, are_pixels, join, layout_of, stack_tokens, to_pack
from packhorse.errors import ConfigError
from packhorse.families import Family
from packhorse.families.logits import logits_inputs, logits_of
from packhorse.families.models import attention_of, is_at_least
from packhorse.families.packing import boundaries_error, check_packable
from packhorse.families.router_loss import ROUTER_MASK, check_model_router_loss, has_router_loss
from packhorse.families.varlen import VARLEN_ARGUMENTS
from packhorse.pp_media import COUNT_KEYS, MEDIA_LAYOUT_KEY, MEDIA_ROWS_KEY
from packhorse.types import Batch, PackedSample, TensorLayout, expand_pixels, to_device

Pack = Mapping[str, Any]

_INFORMATION = frozenset(
    {"_packed_seq_ids", "loss_weights", *COUNT_KEYS.values(), MEDIA_LAYOUT_KEY, MEDIA_ROWS_KEY}
)
_LABELS = frozenset({"labels", "shift_labels"})
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
        padding_idx: the id that pads short packs.
        max_length: the length of every batch; None pads to the longest pack. Nothing is ever cut.
        attn_implementation: what the model's decoder runs with: ``"sdpa"``, ``"eager"``,
            ``"flash_attention_2"`` (or 3, 4), ``"flex_attention"``, ``"varlen"``
            (:func:`packhorse.integrations.attention.use_attention`), a flash kernel of the Hub, or a name
            whose format is declared (:func:`packhorse.integrations.attention.declare_batch_format`). None is
            ``"sdpa"``.
        materialize_4d_mask: False leaves the document numbers [B, S] as ``attention_mask`` with ``"sdpa"``
            and ``"eager"`` too, for a model that builds its mask from them. Models of transformers would take
            each row for one document, so :func:`model_inputs` and :func:`loss_inputs` reject such a batch.
        pixel_dtype: what pixels are converted to while they are copied; None leaves them.
        mask_dtype: of the mask for ``"eager"``: the model's.
        config: the model's; only needed for Gemma 3 and 4 with fake images, and with
            ``output_router_logits=True``.
        media_layout: also return the layout of each media tensor and its entries for each pack, for a
            pipeline (:mod:`packhorse.pp_media`).

    Returns:
        ``input_ids``, ``labels`` [B, S] (already shifted), ``shift_labels`` (the same tensor, so that the
        model does not shift them again) and other tensors per token; ``position_ids`` [B, S], or
        [3, B, S] with mRoPE; media tensors joined along axis 0; ``n_images_per_sample``,
        ``n_videos_per_sample`` and ``n_audios_per_sample`` [B] if there are any; ``_packed_seq_ids``
        [B, S], the document numbers, if a row has more than one; ``router_mask``, bool [B, S], True for
        tokens of documents, if ``config`` has ``output_router_logits=True``. And by backend:

        - ``sdpa``: ``attention_mask``, bool [B, 1, S, S], True if a token is attended to; ``eager``: the
          same as numbers to add.
        - all flash attentions: ``attention_mask`` = the document numbers [B, S], and ``cu_seq_lens_q``,
          ``cu_seq_lens_k``, ``max_length_q``, ``max_length_k``, by which the flash attention of
          transformers separates documents if it gets no mask: pass it :func:`model_inputs`.
        - ``varlen``: these four alone.
        - ``flex_attention``: ``attention_mask``, a BlockMask.
        - Gemma 3 and 4, with bidirectional attention in images: no mask, but ``use_cache=False``:
          transformers builds the mask from the positions, which restart with each document.

        An empty batch gives ``{}``.

    Raises:
        ConfigError: a pack is None or longer than ``max_length``, the backend is unknown, or the family needs
            another one.
    """
    return collate_packs(
        *read_packs(batch),
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
    """Parse the packs of a batch; return them and their family, if they carry it."""
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
    """Collate typed packs as :func:`neat_packed_vlm_collater` does; ``family`` is that of their samples."""
    backend = "sdpa" if attn_implementation is None else batch_format_of(attn_implementation, ("None",))
    if not packs:
        return {}
    rows = PackedRows(packs, family, padding_idx, max_length)
    document_numbers = not materialize_4d_mask and backend in ("sdpa", "eager")
    made = rows.tokens()
    documents = made["attention_mask"]
    if not document_numbers:
        made, documents = _add_attention(made, rows, backend, mask_dtype, config)
    if int(documents.max()) > 1:
        made["_packed_seq_ids"] = documents
    if has_router_loss(config):
        made[ROUTER_MASK] = documents > 0
    made |= rows.media(pixel_dtype, media_layout)
    return add_counts(finish_labels(made), [pack.num_items for pack in packs])


def _add_attention(
    made: dict[str, Any], rows: PackedRows, backend: str, mask_dtype: torch.dtype, config: Any
) -> tuple[dict[str, Any], torch.Tensor]:
    """Add what the backend needs to separate documents; return the document numbers too."""
    documents = made["attention_mask"]
    bidirectional = rows.bidirectional(made)
    if backend in CONTIGUOUS:
        made, segments = rows.contiguous(made, bidirectional is not None, backend)
        numbers = (segments.cumulative, segments.cumulative, segments.longest, segments.longest)
        made |= dict(zip(VARLEN_ARGUMENTS, numbers, strict=True))
        documents = made["attention_mask"]
        if backend == "varlen":
            del made["attention_mask"]
        elif bool((documents == 0).any()):
            _warn_of_padding()
    elif bidirectional is not None:
        _add_bidirectional_mask(made, bidirectional, backend, mask_dtype, config, rows.family)
    elif backend == "flex_attention":
        made["attention_mask"] = document_block_mask(documents)
    else:
        mask = block_causal_mask(documents)
        made["attention_mask"] = mask if backend == "sdpa" else additive(mask, mask_dtype)
    return made, documents


def loss_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything in a batch that a model of transformers takes: ``model(**loss_inputs(batch)).loss``.

    Counts, document numbers and loss weights are omitted, with ``cu_seq_lens_q`` also the mask: flash
    attention of transformers would use it and take each row for one document.

    Raises:
        ConfigError: the mask holds document numbers (``materialize_4d_mask=False``).
    """
    mask = batch.get("attention_mask")
    numbers = isinstance(mask, torch.Tensor) and mask.dim() != _DENSE and "_packed_seq_ids" in batch
    if numbers and "cu_seq_lens_q" not in batch:
        why = "models of transformers take each row for one document, collate with materialize_4d_mask=True"
        raise ConfigError.of("materialize_4d_mask", False, why)
    omitted = {*_INFORMATION, "attention_mask"} if "cu_seq_lens_q" in batch else _INFORMATION
    return {key: value for key, value in batch.items() if key not in omitted}


def model_inputs(batch: Mapping[str, Any], model: Any = None, *, check: bool = True) -> dict[str, Any]:
    """Return the inputs with which a model of transformers computes logits.

    Labels are omitted, so that the model computes no loss in addition to
    :func:`~packhorse.integrations.loss.batch_loss`, and so is everything that is not an input of a model (see
    :func:`loss_inputs`).

    A model that ``packhorse.prepare`` has set up so gets ``logits_to_keep``, and computes the logits of
    supervised tokens alone, which all losses of Packhorse take. ``prepare`` says which logits a model
    computes; without ``model`` it computes all of them.

    Args:
        batch: from a loader or one of the collate functions. If the labels of a collate function's batch are
            on a GPU already, counting them waits for it.
        model: the model that is called, to compute no logits that the loss does not read, and to check that
            its decoder runs the attention that the batch is for. With another one, documents would silently
            attend to each other.
        check: False skips that check, for batches after the first of a loader.

    Raises:
        ConfigError: the batch is for another attention, the model cannot be trained on packed rows, or it has
            an auxiliary loss and is not prepared (see
            :func:`~packhorse.families.router_loss.check_router_loss`).
    """
    inputs = loss_inputs(expand_pixels(batch) if isinstance(batch, Batch) else batch)
    if model is not None and check:
        _check_attention(batch, model)
        check_model_router_loss(model)
    inputs = {key: value for key, value in inputs.items() if key not in _LABELS}
    return inputs if model is None else inputs | _logits_inputs(batch, model)


def _logits_inputs(batch: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Return the inputs with which a prepared model computes no logits that the loss does not read."""
    choice, labels = logits_of(model), batch.get("labels")
    if labels is None:
        labels = getattr(getattr(batch, "info", None), "labels", None)  # of preference data
    if choice.mode == "all" or labels is None:
        return {}
    supervised = known_supervised(batch, labels)
    if supervised is None:
        supervised = int((labels != IGNORE_INDEX).sum())
    made = logits_inputs(choice, labels, supervised)
    return {key: to_device(value, batch["input_ids"].device) for key, value in made.items()}


def known_supervised(batch: Mapping[str, Any], labels: torch.Tensor) -> int | None:
    """Return the number of labels that are not -100, without waiting for a GPU; None if that is unknown."""
    if labels.device.type == "cpu":
        return int((labels != IGNORE_INDEX).sum())
    info = getattr(batch, "info", None)  # only a batch of a loader has it
    return None if info is None else int(info.supervised)


def takes_batches_of(attention: str, backend: str) -> bool:
    """Return whether a decoder with this attention keeps the documents of a batch for ``backend`` apart.

    Flash attention takes the arguments of varlen kernels; sdpa takes the additive mask of eager attention,
    but eager adds the bool mask of sdpa as 0 and 1.
    """
    takes, made_for = find_batch_format(attention), batch_format_of(backend)
    if made_for in CONTIGUOUS:
        return takes in CONTIGUOUS
    return takes == made_for or (takes, made_for) == ("sdpa", "eager")


def check_takes_batches_of(name: str, attention: str, backend: str) -> None:
    """Raise unless the model ``name``, which runs ``attention``, can train on batches for ``backend``."""
    if not takes_batches_of(attention, backend):
        what = (
            f"{name} runs {attention!r} attention, but the loader builds batches for attn_implementation="
            f"{backend!r}: documents of a pack may attend to each other. Call packhorse.prepare(model, "
            f"{backend!r}) before packhorse.load, or remove attn_implementation to use the model's"
        )
        raise ConfigError(what, setting="attn_implementation", value=backend)


def _check_attention(batch: Mapping[str, Any], model: Any) -> None:
    attention = attention_of(model)
    supported = backends_of(batch)
    if supported:
        packing = check_packable(model)
        if packing.no_boundaries and "cu_seq_lens_q" in batch:
            raise boundaries_error(packing.no_boundaries)
    if supported and not any(takes_batches_of(attention, backend) for backend in supported):
        what = (
            f"the batch is for {' or '.join(supported)}, the model's decoder runs {attention}: documents "
            "would attend to each other. Call packhorse.integrations.attention.use_attention(model, "
            f"{supported[0]!r}), or collate with attn_implementation={attention!r}"
        )
        raise ConfigError(what, setting="attn_implementation", value=attention)


def backends_of(batch: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the attention backends that a packed batch is for; nothing if it is not packed."""
    if "cu_seq_lens_q" in batch:
        return CONTIGUOUS[::-1]
    mask = batch.get("attention_mask")
    if mask is None:  # transformers builds it from the positions
        return ("sdpa", "eager", "flex_attention") if "use_cache" in batch else ()
    if isinstance(mask, Mapping):  # one for each kind of layer
        mask = next(iter(mask.values()))
    if not isinstance(mask, torch.Tensor):
        return ("flex_attention",)
    if mask.dim() != _DENSE:
        return ()
    return ("sdpa",) if mask.dtype == torch.bool else ("eager", "sdpa")


class PackedRows:
    """The packs of a batch, to be joined to batch tensors."""

    def __init__(
        self, packs: Sequence[PackedSample], family: Family | None, padding_idx: int, max_length: int | None
    ) -> None:
        self.packs, self.family, self.padding_idx = packs, family, padding_idx
        longest = max(map(len, packs))
        if max_length is not None and longest > max_length:
            expected = f"a pack has {longest:,} tokens, set at least the pack_size of the dataset"
            raise ConfigError.of("max_length", max_length, expected)
        self.length = longest if max_length is None else max_length
        self.alignments = [pack.alignment for pack in packs]

    def tokens(self) -> dict[str, Any]:
        """Return the tensors per token, padded on the right."""
        rows = [pack.per_token for pack in self.packs]
        return stack_tokens(rows, self.length, self.padding_idx)

    def bidirectional(self, made: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return the tokens with bidirectional attention, bool [B, S]; None if the family has none."""
        if self.family is not None:
            key = self.family.bidirectional
            if key is None:
                return None
            marked = made.get(key, torch.zeros_like(made["input_ids"]))
            return (marked == 1) | (marked == 2)  # images and videos; audio is 3, with causal attention
        types = made.get("token_type_ids")
        return types == 1 if types is not None and bool((types == 1).any()) else None

    def contiguous(
        self, made: Mapping[str, torch.Tensor], bidirectional: bool, backend: str
    ) -> tuple[dict[str, Any], Segments]:
        """Move hidden tokens after their document, so that documents are contiguous; return segments too."""
        if bidirectional:
            raise _not_supported("images of this family have bidirectional attention", backend)
        alignment = math.lcm(*self.alignments)
        if self.length % alignment:
            expected = f"documents are aligned to {alignment}, set a multiple of it (in a loader: pack_size)"
            raise ConfigError.of("max_length", self.length, expected)
        segments = find_segments(made["attention_mask"], self.alignments)
        if not segments.moved:
            return dict(made), segments
        self._check_hidden(made["attention_mask"], backend)
        index = segments.order
        return {key: value.gather(-1, index.expand_as(value)) for key, value in made.items()}, segments

    def _check_hidden(self, documents: torch.Tensor, backend: str) -> None:
        """Raise if hidden tokens would move past media: media tensors are in the order of their tokens."""
        owner = documents.cummax(-1).values
        none = torch.iinfo(documents.dtype).max
        following = torch.where(documents > 0, documents, none).flip(-1).cummin(-1).values.flip(-1)
        for row, pack in enumerate(self.packs):
            media = pack.items_per_document or ()
            hiding = set(owner[row][(documents[row] == 0) & (owner[row] == following[row])].tolist())
            for number in sorted(hiding) if media else ():
                if media[number - 1] > 1:
                    what = f"document {number} of row {row} has hidden tokens and {media[number - 1]} media"
                    raise _not_supported(what, backend)

    def media(self, pixel_dtype: torch.dtype | None, with_layout: bool) -> dict[str, Any]:
        """Return the media tensors of all packs, joined in one copy, with their layout if requested."""
        joined: dict[str, Any] = {}
        keys = all_media_keys(self.packs)
        for key in keys:
            parts = [part for pack in self.packs for part in pack.media.get(key, ())]
            dtype = pixel_dtype if are_pixels(key, parts[0].dtype) else None
            joined[key] = join(key, parts, self.family, dtype)
        if keys and with_layout:
            rows = {key: [sum(map(len, pack.media.get(key, ()))) for pack in self.packs] for key in keys}
            joined[MEDIA_LAYOUT_KEY] = {key: self._layout(key) for key in keys}
            joined[MEDIA_ROWS_KEY] = {key: torch.tensor(numbers) for key, numbers in rows.items()}
        return joined

    def _layout(self, key: str) -> TensorLayout:
        layout = layout_of(key, self.family)
        # Families differ in the owner of a key; without a family the rows of each pack are enough.
        return layout if self.family is not None else TensorLayout(layout.kinds, "sample")


def _not_supported(what: str, backend: str) -> ConfigError:
    why = f"{what}, which it does not support: use sdpa, eager or flex_attention"
    return ConfigError.of("attn_implementation", backend, why)


def _add_bidirectional_mask(
    made: dict[str, Any],
    bidirectional: torch.Tensor,
    backend: str,
    mask_dtype: torch.dtype,
    config: Any,
    family: Family | None,
) -> None:
    """Add the masks of Gemma 3 and 4, which differ by the type of layer."""
    documents = made["attention_mask"]
    made["use_cache"] = False
    if positions_separate(documents, made["position_ids"]):
        del made["attention_mask"]
        return
    if config is None or backend == "flex_attention":
        raise ConfigError.of(
            "inject_fake_images",
            True,
            "a pack of this family has a fake image, which only a mask for each type of layer can hide: pass "
            "config=model.config and use sdpa or eager, or set inject_fake_images=False for the dataset",
        )
    text = config.get_text_config()
    full = sliding = bidirectional & (documents > 0)
    if family is not None and family.name == "gemma4":
        causal = torch.zeros_like(sliding)
        sliding = sliding if text.use_bidirectional_attention == "vision" else causal
        # Gemma 4 has bidirectional attention in its sliding layers only; in all before transformers 5.13.
        full = causal if is_at_least("5.13") else sliding
    masks = {
        "full_attention": block_causal_mask(documents, full),
        "sliding_attention": block_causal_mask(documents, sliding, text.sliding_window),
    }
    if backend == "eager":
        masks = {name: additive(mask, mask_dtype) for name, mask in masks.items()}
    made["attention_mask"] = masks


@cache
def _warn_of_padding() -> None:
    """Warn once: with a padded mask, flash attention of transformers takes each row for one document."""
    logger.warning(
        "flash_attention_2: call the model with packhorse.collate_fns.model_inputs(batch): given the "
        "attention_mask itself, transformers would take each row for one document"
    )
