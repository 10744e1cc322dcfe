"""Batches in which each prompt has the answer of another document: KTO's reference point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from packhorse.chat import IGNORE_INDEX, token_keys
from packhorse.collate.packed import backends_of, collate_packs, loss_inputs
from packhorse.collate.packer import Packer, media_keys
from packhorse.errors import ConfigError
from packhorse.types import Batch, PackedSample, Sample

_TYPES = ("mm_token_type_ids", "token_type_ids")  # other than 0 for media


def mismatch_answers(batch: Batch) -> Batch:
    """Return a batch in which the answers of documents with a role have moved on by one.

    The tensors of media are the same objects, and each stays with its prompt. A single document keeps its
    answer, but loses its role.
    """
    rows = [list(row) for row in _documents_of(batch)]
    labelled = [
        (row, number)
        for row, documents in enumerate(rows)
        for number, one in enumerate(documents)
        if one.role
    ]
    answers = [rows[row][number] for row, number in labelled]
    for (row, number), other in zip(labelled, [*answers[-1:], *answers[:-1]], strict=True):
        own = rows[row][number]
        role = own.role if len(labelled) > 1 else ""
        rows[row][number] = replace(
            _with_answer(own, other), role=role, key=f"{own.key} with the answer of {other.key}"
        )
    packer = Packer(sum(len(one) for row in rows for one in row))
    packs = [packer.join(row) for row in rows]
    media = {key: (value,) for key, value in batch.items() if key in media_keys(None)}
    made = _collate([replace(packs[0], media=media), *packs[1:]], batch)
    lengths = tuple(tuple(map(len, row)) for row in rows)
    labels = made.pop("labels")
    del made["shift_labels"]
    info = replace(
        batch.info,
        labels=labels,
        document_lengths=lengths,
        document_keys=tuple(tuple(one.key for one in row) for row in rows),
        document_roles=tuple(tuple(one.role for one in row) for row in rows),
        document_ids=made.pop("_packed_seq_ids", None),
        slots=labels.numel(),
    )
    return Batch(loss_inputs(made), info)


def _documents_of(batch: Batch) -> Iterator[Iterator[Sample]]:
    """Yield the documents of each row, without media."""
    info = batch.info
    assert info.labels is not None
    tensors = {"labels": info.labels}
    for key in token_keys(batch, media_keys(None)):
        if key != "attention_mask":
            tensors[key] = batch[key].cpu()

    def documents(row: int) -> Iterator[Sample]:
        start = 0
        for number, role in enumerate(info.document_roles[row], 1):
            stop = start + info.document_lengths[row][number - 1]
            if info.document_ids is not None and bool((info.document_ids[row, start:stop] != number).any()):
                raise ConfigError("documents are aligned (alignment above 1), so answers cannot be moved")
            per_token = {key: value[..., row, start:stop] for key, value in tensors.items()}
            key = info.document_keys[row][number - 1]
            yield Sample(tokens={}, role=role, key=key).with_per_token(per_token)
            start = stop

    return (documents(row) for row in range(len(info.document_roles)))


def _with_answer(document: Sample, other: Sample) -> Sample:
    """Return a document with the answer of another one."""
    own, others = document.per_token, other.per_token
    end, first = _prompt_length(document), _prompt_length(other)
    if any(bool(others[key][first:].any()) for key in _TYPES if key in others):
        raise ConfigError(
            f"the answer of {other.key or 'a document'} has media, which cannot move to another prompt"
        )
    joined = {
        key: torch.cat([value[:end], others[key][first:]])
        for key, value in own.items()
        if key not in ("labels", "position_ids")
    }
    # The last token of a prompt has the answer's first one as its label.
    joined["labels"] = torch.cat([own["labels"][: end - 1], others["labels"][first - 1 :]])
    if (positions := own.get("position_ids")) is not None:
        after = torch.arange(1, len(other) - first + 1)
        joined["position_ids"] = torch.cat([positions[..., :end], positions[..., end - 1 : end] + after], -1)
    return document.with_per_token(joined)


def _prompt_length(document: Sample) -> int:
    assert document.labels is not None
    supervised = torch.nonzero(document.labels != IGNORE_INDEX)
    if not len(supervised):
        raise ConfigError(
            f"{document.key or 'a document'} has no supervised token, so no answer can be moved"
        )
    return int(supervised[0]) + 1


def _collate(packs: list[PackedSample], batch: Mapping[str, Any]) -> dict[str, Any]:
    """Collate packs for the attention that a batch is for."""
    width, mask = batch["input_ids"].shape[-1], batch.get("attention_mask")
    options: dict[str, Any] = {"pixel_dtype": None, "max_length": width}
    if max(map(len, packs)) > width:
        options["max_length"] = None
    labels = torch.cat([pack.labels for pack in packs if pack.labels is not None])
    options["padding_idx"] = int(labels.max().clamp(min=0))  # a supervised token: no media token
    if not backends_of(batch):  # padded: each row is a document
        made = collate_packs(packs, None, materialize_4d_mask=False, **options)
    elif "cu_seq_lens_q" in batch:
        made = collate_packs(packs, None, attn_implementation="varlen", **options)
    elif mask is None:  # transformers builds it from the positions
        made = collate_packs(packs, None, **options)
        made.pop("attention_mask", None)
    elif not isinstance(mask, torch.Tensor):
        made = collate_packs(packs, None, attn_implementation="flex_attention", **options)
    elif mask.dtype == torch.bool:
        made = collate_packs(packs, None, **options)
    else:
        made = collate_packs(packs, None, attn_implementation="eager", mask_dtype=mask.dtype, **options)
    if "position_ids" not in batch:
        del made["position_ids"]
    return made | {key: batch[key] for key in ("use_cache",) if key in batch}
