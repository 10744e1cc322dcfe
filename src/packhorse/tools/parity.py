"""Is packed training what unpacked training is? For *this* model, processor and attention backend.

A few samples go through the model one by one and packed; the loss of every supervised token and the gradients
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
from packhorse.collate.packed import model_inputs, neat_packed_vlm_collater
from packhorse.collate.packed_dataset import PackedDatasetWrapper
from packhorse.collate.padded import pad_collate_fn
from packhorse.collate.processor_call import pad_token_id
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import ConfigError
from packhorse.families.models import check_packable, known_problems
from packhorse.families.qwen_vl import RopeIndex, mrope_position_ids, rope_index
from packhorse.integrations.attention import attention_of, check_attention, use_attention
from packhorse.ledger import Ledger
from packhorse.types import to_device

_ONE_ROW = 2  # axes: [B, S]


class Packed:
    """A packed batch, the model it goes through, and which sample each document is.

    Args:
        model: set to the batch's attention.
        batch: on the model's device.
        bins: for each row the numbers of its samples.
        keys: the names of the samples.
    """

    def __init__(
        self, model: Any, batch: Mapping[str, Any], bins: Sequence[Sequence[int]], keys: Sequence[str]
    ) -> None:
        self.model, self.batch, self.bins, self.keys = model, dict(batch), bins, keys
        if "_packed_seq_ids" not in batch:
            raise ConfigError("the batch has no '_packed_seq_ids' [B, S], the numbers of documents")
        self.numbers: torch.Tensor = batch["_packed_seq_ids"]

    def places(self) -> Iterator[tuple[int, int, int]]:
        """Row, document and sample of every document."""
        for row, samples in enumerate(self.bins):
            for document, sample in enumerate(samples, 1):
                yield row, document, sample

    def name(self, row: int, document: int) -> str:
        """What a person calls a document: ``pack 0, document 1 (coco/812)``."""
        return f"pack {row}, document {document} ({self.keys[self.bins[row][document - 1]]})"

    def visible(self, row: int, document: int) -> tuple[int, torch.Tensor]:
        """The places of a document's tokens that can be seen."""
        return row, self.numbers[row] == document

    def logits(self, **changed: Any) -> torch.Tensor:
        """What the model says about the batch, or about it with some tensors changed."""
        logits: torch.Tensor = self.model(**model_inputs({**self.batch, **changed})).logits
        return logits


def likely_causes(
    packed: Packed,
    labels: Sequence[torch.Tensor],
    samples: Any,
    own_rope: RopeIndex | None,
    tolerance: float,
) -> tuple[str, ...]:
    """The mistakes that can be shown in a batch.

    Args:
        packed: the batch.
        labels: of the visible tokens of each sample alone.
        samples: encoded, not shifted.
        own_rope: how the model itself finds positions in three rows; None if they are one row.
        tolerance: by how much logits may differ.
    """
    found = [
        *_of_labels(packed, labels),
        *_of_positions(packed, samples, own_rope),
        *_of_attention(packed, tolerance),
        *known_problems(packed.model),
    ]
    unknown = (
        "none of the usual ones (labels and positions are right, documents do not see each other): compare "
        "with attn_implementation='eager', and look at what the model does with its keyword arguments"
    )
    return tuple(found) or (unknown,)


def _of_labels(packed: Packed, labels: Sequence[torch.Tensor]) -> Iterator[str]:
    for row, document, sample in packed.places():
        mine, right = packed.batch["labels"][packed.visible(row, document)], labels[sample]
        if torch.equal(mine, right):
            continue
        how = "are not those of the sample alone"
        if torch.equal(mine[:-1], right[1:]):
            how = "are shifted once too often: each token is to predict the one after the next"
        elif torch.equal(mine[1:], right[:-1]):
            how = "are not shifted: each token is to predict itself"
        yield f"labels of {packed.name(row, document)} {how}"
        return


def _of_positions(packed: Packed, samples: Any, own_rope: RopeIndex | None) -> Iterator[str]:
    positions = packed.batch.get("position_ids")
    if positions is None:
        yield "the batch has no position_ids, so positions run on from document to document"
        return
    if own_rope is not None and positions.dim() == _ONE_ROW:
        yield (
            f"position_ids are one row {tuple(positions.shape)}, but {type(packed.model).__name__} has "
            "mRoPE, positions in three rows [3, B, S]: pass "
            "get_rope_index=packhorse.families.qwen_vl.rope_index(model)"
        )
        return
    for row, document, sample in packed.places():
        tokens = samples[sample]
        mask = torch.as_tensor(tokens["attention_mask"]).bool()[:-1]
        right = torch.arange(len(mask)) if own_rope is None else mrope_position_ids(tokens, own_rope)
        assert right is not None
        _, places = packed.visible(row, document)
        mine = positions[..., row, :][..., places].cpu()
        if not torch.equal(mine, right[..., : len(mask)][..., mask]):
            yield (
                f"positions of {packed.name(row, document)} are not those the model gives it alone "
                f"(they begin with {mine.flatten()[:4].tolist()}): they must restart with each document"
            )
            return


def _of_attention(packed: Packed, tolerance: float) -> Iterator[str]:
    """Other answers in one document must not change what is said about another."""
    labels = packed.batch["labels"]
    with torch.no_grad():
        before = packed.logits()
        for row, samples in enumerate(packed.bins):
            for document in range(1, len(samples) + 1):
                _, places = packed.visible(row, document)
                # Supervised tokens are text, so media still fit their placeholders.
                changed = places & (labels[row] != IGNORE_INDEX)
                if not bool(changed.any()):
                    continue
                ids = packed.batch["input_ids"].clone()
                media = _media_like(packed)
                texts = torch.nonzero(changed & ~torch.isin(ids[row], media)).flatten()
                ids[row, texts] = ids[row, texts].roll(1) if len(set(ids[row, texts].tolist())) > 1 else 1
                moved = (packed.logits(input_ids=ids) - before).abs().amax(-1)
                others = (packed.numbers > 0) & ~_as_mask(packed.numbers, row, places)
                if float(moved[others].max() if bool(others.any()) else 0.0) > 10 * tolerance:
                    seen = torch.nonzero((moved > 10 * tolerance) & others)[0].tolist()
                    number = int(packed.numbers[seen[0], seen[1]])
                    yield (
                        f"attention leaks: {packed.name(seen[0], number)} changes with the tokens of "
                        f"{packed.name(row, document)}. The attention mask is not the one this backend "
                        "needs (eager takes numbers, sdpa bools; flash attention must get no mask beside "
                        "cu_seq_lens), or the model's attention is not the one the batch was made for"
                    )
                    return


def _media_like(packed: Packed) -> torch.Tensor:
    """Ids that must stay where they are: those the config names as tokens of media."""
    config = packed.model.config
    names = [name for name in vars(config) if "token" in name and name.endswith(("_id", "_index"))]
    ids = [value for name in names if isinstance(value := getattr(config, name), int)]
    return torch.tensor(ids or [-1], device=packed.batch["input_ids"].device)


def _as_mask(numbers: torch.Tensor, row: int, places: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros_like(numbers, dtype=torch.bool)
    mask[row] = places
    return mask


Collate = Callable[[list[dict[str, Any]]], dict[str, Any]]

_REFERENCE, _OTHER_KERNEL = "sdpa", "eager"
_FACTOR = 4  # times the noise floor is allowed


@dataclass(frozen=True, slots=True)
class DocumentParity:
    """One sample, alone and as a document of a packed row.

    Attributes:
        row: of the packed batch: its pack, from 0.
        document: its number there, from 1.
        tokens: that can be seen.
        supervised: tokens with a label.
        unpacked: mean loss alone.
        packed: mean loss in the pack.
        largest: largest difference of a token's loss.
        key: names the sample, as ``coco/812``; its number where it has no name.
    """

    row: int
    document: int
    tokens: int
    supervised: int
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
        floor: how far a token's loss is apart in two correct computations of the samples alone; None if both
            tolerances were given.
        gradient_floor: likewise for gradients.
    """

    attention: str
    documents: tuple[DocumentParity, ...]
    gradients: float | None
    tolerance: float
    gradient_tolerance: float
    causes: tuple[str, ...] = ()
    why_no_gradients: str = ""
    floor: float | None = None
    gradient_floor: float | None = None

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
            limit = _describe_allowed(self.gradient_tolerance, self.gradient_floor)
            gradients = f"{self.gradients:.1e} apart ({limit})"
        verdict = "packed equals unpacked" if self.ok else "PACKED DOES NOT EQUAL UNPACKED"
        allowed = _describe_allowed(self.tolerance, self.floor)
        lines = [
            f"{self.attention}: {verdict}. {len(self.documents)} documents, a token's loss differs by at "
            f"most {self.largest:.1e} ({allowed}), gradients {gradients}"
        ]
        return "\n".join([*lines, *(f"likely cause: {cause}" for cause in self.causes)])


def _describe_allowed(tolerance: float, floor: float | None) -> str:
    measured = "" if floor is None else f", noise floor {floor:.1e}"
    return f"allowed {tolerance:.1e}{measured}"


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
    unchecked: bool = False,
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
        tolerance: allowed difference of a token's loss. None allows four times the noise floor: how far the
            same samples alone are apart with another kernel (eager) and with padding, on this machine; but at
            most half the digits of the model's type.
        gradient_tolerance: allowed relative difference of gradients, likewise.
        keys: names the samples in the report; their numbers without it.
        unchecked: also compare a model that :func:`packhorse.families.models.known_problems` objects to.

    Raises:
        ConfigError: the model cannot be trained on packed rows, there are too few samples, none of their
            tokens is supervised, or the backend is not possible here.
        BadSample: one cannot be encoded.
    """
    if not unchecked:
        check_packable(model, measured=True)
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
    with _training_as_before(model):
        use_attention(model, _REFERENCE)
        alone, expected = _unpacked(model, processor, encoded, gradients)
        noise = None
        if tolerance is None or gradient_tolerance is None:
            noise = _measure_noise(model, processor, encoded, alone, expected)
            tolerance = noise.allowed if tolerance is None else tolerance
            gradient_tolerance = noise.gradient_allowed if gradient_tolerance is None else gradient_tolerance
        use_attention(model, attn_implementation)
        packed = Packed(model, to_device(batch, model.device), bins, names)
        documents, apart = _compared(packed, alone, expected)
        report = ParityReport(
            attn_implementation,
            documents,
            apart if gradients else None,
            tolerance,
            gradient_tolerance,
            why_no_gradients=why,
            floor=None if noise is None else noise.floor,
            gradient_floor=None if noise is None else noise.gradient_floor,
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


def _encoded(samples: Sequence[Mapping[str, Any]], processor: Any) -> EncodedSamples:
    if not all("input_ids" in sample for sample in samples):
        encoded = PreTokenizedDatasetWrapper(samples, processor, on_bad="raise", ledger=Ledger())
        samples = [encoded[index] for index in range(len(samples))]  # once: they are run several times
    return EncodedSamples(samples, processor)


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


@dataclass(frozen=True, slots=True)
class _Noise:
    """How far correct computations are apart, and what is allowed because of it."""

    floor: float
    gradient_floor: float
    allowed: float
    gradient_allowed: float


def _measure_noise(
    model: Any, processor: Any, encoded: Any, alone: Sequence[_Alone], expected: Mapping[str, torch.Tensor]
) -> _Noise:
    """Compute the samples alone in two other correct ways: with another kernel, and padded to one length.

    Computations that agree to the bit still differ by rounding on other samples, so the floor is at least one
    unit of rounding. More than half the digits is not rounding: a model that shows it is not to be excused.
    """
    unit = torch.finfo(model.dtype).eps
    scale = max(float(one.losses.abs().max()) for one in alone)
    floor, gradient_floor = unit * scale, unit
    longest = max(len(sample["input_ids"]) for sample in encoded)
    for attention, length in ((_OTHER_KERNEL, None), (_REFERENCE, longest)):
        use_attention(model, attention)
        others, found = _unpacked(model, processor, encoded, bool(expected), length)
        for one, other in zip(alone, others, strict=True):
            same = other.losses[: len(one.losses)]  # padding keeps a last token, which has no label
            floor = max(floor, float((same - one.losses).abs().max()))
        gradient_floor = max(gradient_floor, _relative_difference(found, expected))
    most = unit**0.5
    return _Noise(
        floor,
        gradient_floor,
        min(_FACTOR * floor, most * max(1.0, scale)),
        min(_FACTOR * gradient_floor, most),
    )


def _unpacked(
    model: Any, processor: Any, encoded: Any, gradients: bool, length: int | None = None
) -> tuple[list[_Alone], dict[str, torch.Tensor]]:
    """Every sample alone, padded to ``length``, and the gradients of the mean loss over all of them."""
    batches = []
    for index in range(len(encoded)):
        batch = pad_collate_fn([encoded[index]], processor, length, pixel_dtype=model.dtype)
        batches.append(to_device(batch, model.device))
    supervised = sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in batches)
    if not supervised:
        raise ConfigError("no token of the samples is supervised: there is no loss to compare")
    alone = []
    with torch.set_grad_enabled(gradients):
        for batch in batches:
            logits = model(**model_inputs(batch)).logits[0]
            losses = token_losses(logits, batch["labels"][0])
            if gradients:
                _backward(losses.sum() / supervised)
            visible = batch["attention_mask"][0].bool()
            alone.append(_Alone(losses.detach()[visible], batch["labels"][0][visible]))
    return alone, _taken_gradients(model)


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of each token; 0 for unsupervised tokens. Labels are shifted already."""
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
        supervised = int((other.labels != IGNORE_INDEX).sum())
        means = [float(each.sum()) / max(1, supervised) for each in (other.losses, mine)]
        largest = float((mine - other.losses).abs().max())
        key = packed.keys[sample]
        documents.append(
            DocumentParity(row, document, len(mine), supervised, means[0], means[1], largest, key)
        )
    return tuple(documents), _relative_difference(found, expected)


def _relative_difference(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Norm of the difference of gradients over the norm of those expected; 0 where there are none."""
    size = sum(float(gradient.float().square().sum()) for gradient in expected.values()) ** 0.5
    apart = 0.0
    for name, gradient in expected.items():
        difference = gradient.float() - (found[name].float() if name in found else 0.0)
        apart += float(difference.square().sum())
    return apart**0.5 / size if size else 0.0
