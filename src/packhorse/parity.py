"""Is packed training what unpacked training is? For *this* model, processor and attention backend.

A few samples go through the model one by one and packed; the loss of every learned token and the gradients
are compared. Where they differ, the usual mistakes are looked for and named: positions of the wrong kind,
attention that leaks from document to document, labels shifted once too often. Costs a few forward and
backward passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F

from packhorse.chat import IGNORE_INDEX
from packhorse.collate_fns import model_inputs, neat_packed_vlm_collater, pad_collate_fn
from packhorse.collate_fns.contract import pad_token_id
from packhorse.datasets.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import ConfigError
from packhorse.integrations.attention import attention_of, check_attention, use_attention
from packhorse.ledger import Ledger
from packhorse.neat_packing_vlm import PackedDatasetWrapper
from packhorse.parity_causes import Packed, likely_causes
from packhorse.positions import RopeIndex, rope_index

Collate = Callable[[list[dict[str, Any]]], dict[str, Any]]

# Largest difference of a token's loss, and of gradients relative to their size: rounding, with room.
_TOLERANCES = {torch.float32: (1e-4, 1e-3), torch.float16: (0.05, 0.05), torch.bfloat16: (0.3, 0.1)}
_REFERENCE = "sdpa"


@dataclass(frozen=True, slots=True)
class DocumentParity:
    """One sample, alone and as a document of a packed row.

    Attributes:
        row: of the packed batch: its pack, from 0.
        document: its number there, from 1.
        tokens: that can be seen.
        learned: tokens with a label.
        unpacked: mean loss alone.
        packed: mean loss in the pack.
        largest: largest difference of a token's loss.
        key: names the sample, as ``coco/812``; its number where it has no name.
    """

    row: int
    document: int
    tokens: int
    learned: int
    unpacked: float
    packed: float
    largest: float
    key: str = ""


@dataclass(frozen=True, slots=True)
class ParityReport:
    """What :func:`check_parity` found.

    Attributes:
        attention: the backend of the packed batch.
        documents: every sample.
        gradients: how far gradients of the mean loss are apart, relative to their size; None if not compared.
        tolerance: what is allowed for a token's loss, and
        gradient_tolerance: for gradients.
        causes: the likely causes of a difference.
        why_no_gradients: why they were not compared; empty where they were.
    """

    attention: str
    documents: tuple[DocumentParity, ...]
    gradients: float | None
    tolerance: float
    gradient_tolerance: float
    causes: tuple[str, ...] = ()
    why_no_gradients: str = ""

    @property
    def largest(self) -> float:
        """Largest difference of a token's loss; NaN if one is NaN."""
        found = [document.largest for document in self.documents]
        return next((value for value in found if math.isnan(value)), max(found))

    @property
    def ok(self) -> bool:
        """Whether packed training is unpacked training, up to rounding."""
        close = self.gradients is None or self.gradients <= self.gradient_tolerance
        return all(document.largest <= self.tolerance for document in self.documents) and close

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {**asdict(self), "ok": self.ok, "largest": self.largest}

    def describe(self) -> str:
        """The verdict in words."""
        gradients = f"not compared ({self.why_no_gradients or 'not asked for'})"
        if self.gradients is not None:
            gradients = f"{self.gradients:.1e} apart (allowed {self.gradient_tolerance:.0e})"
        verdict = "packed equals unpacked" if self.ok else "PACKED DOES NOT EQUAL UNPACKED"
        lines = [
            f"{self.attention}: {verdict}. {len(self.documents)} documents, a token's loss differs by at "
            f"most {self.largest:.1e} (allowed {self.tolerance:.0e}), gradients {gradients}"
        ]
        return "\n".join([*lines, *(f"likely cause: {cause}" for cause in self.causes)])


def check_parity(
    model: Any,
    processor: Any,
    samples: Sequence[Mapping[str, Any]],
    attn_implementation: str = "sdpa",
    *,
    rows: int = 2,
    get_rope_index: RopeIndex | Literal["model"] | None = "model",
    collate: Collate | None = None,
    gradients: bool = True,
    tolerance: float | None = None,
    gradient_tolerance: float | None = None,
    keys: Sequence[str] | None = None,
) -> ParityReport:
    """Compare packed with unpacked training on a few samples.

    Args:
        model: of transformers, with a language model head; it comes back as it was.
        processor: its processor.
        samples: examples in the documented format, or encoded samples; some with media, some without.
        attn_implementation: the backend of the packed batch; samples alone go through sdpa.
        rows: so many packs are made of the samples.
        get_rope_index: as for :class:`packhorse.neat_packing_vlm.PackedDatasetWrapper`; ``"model"`` takes the
            model's own, if it has one.
        collate: makes the packed batch of packs; Packhorse's own without it.
        gradients: compare them too (not for flex attention on a CPU, which has no backward pass).
        tolerance: allowed difference of a token's loss; by the model's type without it.
        gradient_tolerance: allowed relative difference of gradients, likewise.
        keys: names the samples in the report; their numbers without it.

    Raises:
        ConfigError: there are too few samples, none of their tokens is learned, or the backend is not
            possible here.
        BadSample: one cannot be encoded.
    """
    if not 1 <= rows < len(samples):
        raise ConfigError(f"{len(samples)} samples for {rows} packs: expected more, to have some together")
    names = [str(number) for number in range(len(samples))] if keys is None else list(keys)
    if len(names) != len(samples):
        raise ConfigError(f"{len(names)} keys for {len(samples)} samples: expected one for each")
    why = "" if gradients else "not asked for"
    if gradients and attn_implementation == "flex_attention" and model.device.type == "cpu":
        gradients, why = False, "flex_attention has no backward pass on a CPU: check on a GPU"
    check_attention(attn_implementation)
    encoded = _encoded(samples, processor)
    pad = pad_token_id(processor)
    bins = [list(range(len(encoded)))[row::rows] for row in range(rows)]
    found = rope_index(model) if get_rope_index == "model" else get_rope_index
    batch = (collate or _collater(model, pad, attn_implementation))(_packs(encoded, bins, pad, found))
    allowed = _TOLERANCES.get(model.dtype, _TOLERANCES[torch.float32])
    with _training_as_before(model):
        use_attention(model, _REFERENCE)
        alone, expected = _unpacked(model, processor, encoded, gradients)
        use_attention(model, attn_implementation)
        packed = Packed(model, to_device(batch, model.device), bins, names)
        documents, apart = _compared(packed, alone, expected)
        report = ParityReport(
            attn_implementation,
            documents,
            apart if gradients else None,
            allowed[0] if tolerance is None else tolerance,
            allowed[1] if gradient_tolerance is None else gradient_tolerance,
            why_no_gradients=why,
        )
        if report.ok:
            return report
        causes = likely_causes(
            packed, [one.labels for one in alone], encoded, rope_index(model), report.tolerance
        )
    return replace(report, causes=causes)


@dataclass(frozen=True, slots=True)
class _Alone:
    """A sample alone: losses of its visible tokens, and their labels."""

    losses: torch.Tensor
    labels: torch.Tensor


def _encoded(samples: Sequence[Mapping[str, Any]], processor: Any) -> Any:
    if all("input_ids" in sample for sample in samples):
        return EncodedSamples(samples, processor)
    return PreTokenizedDatasetWrapper(samples, processor, on_bad="raise", ledger=Ledger())


class EncodedSamples:
    """Samples that are encoded already, with the family that they are of."""

    def __init__(self, samples: Sequence[Mapping[str, Any]], processor: Any) -> None:
        from packhorse.families import family_of

        self.samples, self.family = samples, family_of(processor)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.samples[index]


def _packs(
    encoded: Any, bins: list[list[int]], pad: int, get_rope_index: RopeIndex | None
) -> list[dict[str, Any]]:
    tokens = sum(len(sample["input_ids"]) for sample in encoded)
    packs = PackedDatasetWrapper(
        encoded, bins, tokens, pad, get_rope_index, exact=True, on_bad="raise", ledger=Ledger()
    )
    return [packs[row] for row in range(len(bins))]


def _collater(model: Any, pad: int, attention: str) -> Collate:
    def collate(packs: list[dict[str, Any]]) -> dict[str, Any]:
        return neat_packed_vlm_collater(
            packs,
            pad,
            None,
            attention,
            pixel_dtype=model.dtype,
            mask_dtype=model.dtype,
            config=model.config,
        )

    return collate


def to_device(value: Any, device: Any) -> Any:
    """Everything in a batch that can be moved, moved."""
    if isinstance(value, Mapping):
        return {key: to_device(inner, device) for key, inner in value.items()}
    return value.to(device) if hasattr(value, "to") else value


@contextmanager
def _training_as_before(model: Any) -> Iterator[None]:
    """The model in evaluation mode (no dropout); its mode, attention and gradients come back."""
    before, attention = model.training, attention_of(model)
    gradients = [parameter.grad for parameter in model.parameters()]
    model.eval()
    model.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        use_attention(model, attention)
        model.train(before)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient


def _unpacked(
    model: Any, processor: Any, encoded: Any, gradients: bool
) -> tuple[list[_Alone], dict[str, torch.Tensor]]:
    """Every sample alone, and the gradients of the mean loss over all of them."""
    batches = []
    for index in range(len(encoded)):
        batch = pad_collate_fn([encoded[index]], processor, pixel_dtype=model.dtype)
        batches.append(to_device(batch, model.device))
    learned = sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in batches)
    if not learned:
        raise ConfigError("no token of the samples is learned: there is no loss to compare")
    alone = []
    with torch.set_grad_enabled(gradients):
        for batch in batches:
            logits = model(**model_inputs(batch)).logits[0]
            losses = token_losses(logits, batch["labels"][0])
            if gradients:
                _backward(losses.sum() / learned)
            visible = batch["attention_mask"][0].bool()
            alone.append(_Alone(losses.detach()[visible], batch["labels"][0][visible]))
    return alone, _taken_gradients(model)


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of each token; 0 where nothing is learned. Labels are shifted already."""
    flat = F.cross_entropy(
        logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return flat.view(labels.shape)


def _backward(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def _taken_gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def _compared(
    packed: Packed, alone: Sequence[_Alone], expected: Mapping[str, torch.Tensor]
) -> tuple[tuple[DocumentParity, ...], float]:
    model, batch = packed.model, packed.batch
    with torch.set_grad_enabled(bool(expected)):
        losses = token_losses(packed.logits(), batch["labels"])
        if expected:
            _backward(losses.sum() / max(1, int((batch["labels"] != IGNORE_INDEX).sum())))
    found = _taken_gradients(model)
    documents = []
    for row, document, sample in packed.places():
        mine = losses.detach()[packed.visible(row, document)]
        other = alone[sample]
        if mine.shape != other.losses.shape:
            raise ConfigError(
                f"{packed.name(row, document)} has {len(mine)} visible tokens, alone it has "
                f"{len(other.losses)}: the batch does not hold the samples as they are"
            )
        learned = int((other.labels != IGNORE_INDEX).sum())
        means = [float(each.sum()) / max(1, learned) for each in (other.losses, mine)]
        largest = float((mine - other.losses).abs().max())
        key = packed.keys[sample]
        documents.append(DocumentParity(row, document, len(mine), learned, means[0], means[1], largest, key))
    size = sum(float(gradient.float().square().sum()) for gradient in expected.values()) ** 0.5
    apart = 0.0
    for name, gradient in expected.items():
        difference = gradient.float() - (found[name].float() if name in found else 0.0)
        apart += float(difference.square().sum())
    return tuple(documents), apart**0.5 / size if size else 0.0
