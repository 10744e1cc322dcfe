"""Compare packed with unpacked training for a model, a processor and an attention backend.

A few samples go through the model one by one and packed; the loss of every supervised token and the gradients
are compared. If they differ, the report names the common causes that apply: layers that carry state from one
document to the next, labels shifted twice, wrong positions, attention across documents. Costs a few forward
and backward passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

from packhorse.chat import IGNORE_INDEX, pad_token_id
from packhorse.collate.packed import model_inputs, neat_packed_vlm_collater
from packhorse.collate.packed_dataset import PackedDatasetWrapper
from packhorse.collate.padded import pad_collate_fn
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.errors import ConfigError
from packhorse.families import family_of
from packhorse.families.models import attention_of
from packhorse.families.packing import check_packable, known_problems, unprepared_layers
from packhorse.families.qwen_vl import RopeIndex, mrope_position_ids, rope_index
from packhorse.families.router_loss import without_router_loss
from packhorse.integrations.attention import check_attention, use_attention
from packhorse.ledger import Ledger
from packhorse.types import to_device

Collate = Callable[[list[dict[str, Any]]], dict[str, Any]]

_REFERENCE, _OTHER_KERNEL = "sdpa", "eager"
_NOISE_FACTOR = 4  # the tolerance in units of the noise floor


class Packed:
    """A packed batch, its model, and the sample of each document: ``bins`` has the samples of each row."""

    def __init__(
        self, model: Any, batch: Mapping[str, Any], bins: Sequence[Sequence[int]], keys: Sequence[str]
    ) -> None:
        self.model, self.batch, self.bins, self.keys = model, dict(batch), bins, keys
        if "_packed_seq_ids" not in batch:
            detail = "the batch has no '_packed_seq_ids' [B, S], the document of each token"
            raise ConfigError(detail, setting="_packed_seq_ids")
        self.document_ids: torch.Tensor = batch["_packed_seq_ids"]

    def documents(self) -> Iterator[tuple[int, int, int]]:
        """Yield row, document and sample of every document."""
        for row, samples in enumerate(self.bins):
            for document, sample in enumerate(samples, 1):
                yield row, document, sample

    def name(self, row: int, document: int) -> str:
        """Return the name of a document: ``pack 0, document 1 (coco/812)``."""
        return f"pack {row}, document {document} ({self.keys[self.bins[row][document - 1]]})"

    def visible(self, row: int, document: int) -> tuple[int, torch.Tensor]:
        """Return an index of a document's visible tokens."""
        return row, self.document_ids[row] == document

    def logits(self, **changed: torch.Tensor) -> torch.Tensor:
        """Return the model's logits for the batch, with some tensors changed."""
        logits: torch.Tensor = self.model(**model_inputs({**self.batch, **changed})).logits
        return logits


def likely_causes(
    packed: Packed, labels: Sequence[torch.Tensor], samples: Any, own_rope: RopeIndex | None, tolerance: float
) -> tuple[str, ...]:
    """Return the causes of a difference that can be shown in a batch, layers that carry state first.

    ``labels`` are those of the visible tokens of each sample alone; ``samples`` are encoded and not shifted.
    """
    unprepared = unprepared_layers(packed.model)
    causes = [
        *([f"{unprepared}: call packhorse.prepare(model) first"] if unprepared else ()),
        *_label_problems(packed, labels),
        *_position_problems(packed, samples, own_rope),
        *(() if unprepared else _attention_problems(packed, tolerance)),  # documents mix by the state already
        *known_problems(packed.model),
    ]
    unknown = (
        "unknown (labels and positions are right, documents do not attend to each other): compare with "
        "attn_implementation='eager', and check how the model uses its keyword arguments"
    )
    return tuple(causes) or (unknown,)


def _label_problems(packed: Packed, labels: Sequence[torch.Tensor]) -> Iterator[str]:
    for row, document, sample in packed.documents():
        actual, expected = packed.batch["labels"][packed.visible(row, document)], labels[sample]
        if torch.equal(actual, expected):
            continue
        problem = "are not those of the sample alone"
        if torch.equal(actual[:-1], expected[1:]):
            problem = "are shifted twice: each token has to predict the one after the next"
        elif torch.equal(actual[1:], expected[:-1]):
            problem = "are not shifted: each token has to predict itself"
        yield f"labels of {packed.name(row, document)} {problem}"
        return


def _position_problems(packed: Packed, samples: EncodedSamples, own_rope: RopeIndex | None) -> Iterator[str]:
    positions = packed.batch.get("position_ids")
    if positions is None:
        yield "the batch has no position_ids, so positions continue from document to document"
        return
    if own_rope is not None and positions.dim() == 2:
        yield (
            f"position_ids have the shape {tuple(positions.shape)}, but {type(packed.model).__name__} has "
            "mRoPE, positions of the shape [3, B, S]: pass "
            "get_rope_index=packhorse.families.qwen_vl.rope_index(model)"
        )
        return
    for row, document, sample in packed.documents():
        tokens = samples[sample]
        mask = torch.as_tensor(tokens["attention_mask"]).bool()[:-1]
        expected = torch.arange(len(mask)) if own_rope is None else mrope_position_ids(tokens, own_rope)
        assert expected is not None
        actual = positions[..., row, :][..., packed.visible(row, document)[1]].cpu()
        if not torch.equal(actual, expected[..., : len(mask)][..., mask]):
            yield (
                f"positions of {packed.name(row, document)} are not those of the sample alone (they start "
                f"with {actual.flatten()[:4].tolist()}): they must restart with each document"
            )
            return


def _attention_problems(packed: Packed, tolerance: float) -> Iterator[str]:
    """Change the answers of one document, and look for changes in the logits of others."""
    config = packed.model.config
    names = [name for name in vars(config) if "token" in name and name.endswith(("_id", "_index"))]
    media_ids = [value for name in names if isinstance(value := getattr(config, name), int)] or [-1]
    media = torch.tensor(media_ids, device=packed.batch["input_ids"].device)
    known = packed.batch["input_ids"][packed.batch["labels"] != IGNORE_INDEX].unique()
    known = known[~torch.isin(known, media)]
    with torch.no_grad():
        before = packed.logits()
        for row, document, _ in packed.documents():
            visible = packed.visible(row, document)[1]
            # Only supervised text tokens change, so media still match their placeholders.
            ids = packed.batch["input_ids"].clone()
            answers = visible & (packed.batch["labels"][row] != IGNORE_INDEX) & ~torch.isin(ids[row], media)
            if not bool(answers.any()):
                continue
            # Each by another token of the batch: a model may see the sum of all tokens, whatever their order.
            place = torch.searchsorted(known, ids[row, answers])
            ids[row, answers] = known.roll(1)[place] if len(known) > 1 else 1
            others = packed.document_ids > 0
            others[row] &= ~visible
            difference = (packed.logits(input_ids=ids) - before).abs().amax(-1)
            leaks = torch.nonzero((difference > 10 * tolerance) & others)
            if len(leaks):
                other_row, token = leaks[0].tolist()
                other = packed.name(other_row, int(packed.document_ids[other_row, token]))
                yield (
                    f"attention leaks: {other} changes with the tokens of {packed.name(row, document)}. The "
                    "attention mask is not the one this backend needs (eager takes numbers, sdpa bools; "
                    "flash attention with cu_seq_lens takes no mask), the batch is for another backend, or "
                    "another layer of the model mixes the tokens of a row"
                )
                return


@dataclass(frozen=True, slots=True)
class DocumentParity:
    """One sample, alone and as a document of a packed row.

    Attributes:
        row: its pack in the packed batch, from 0.
        document: its number there, from 1.
        tokens: number of visible tokens.
        supervised: tokens with a label.
        unpacked: mean loss alone.
        packed: mean loss in the pack.
        largest: largest difference of a token's loss.
        key: of the sample, e.g. ``coco/812``; its index if it has no key.
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
    """The result of :func:`check_parity`.

    Attributes:
        attention: the backend of the packed batch.
        documents: every sample.
        gradients: relative difference of the gradients of the mean loss; None if not compared.
        tolerance: the allowed difference of a token's loss.
        gradient_tolerance: the allowed relative difference of gradients.
        causes: the likely causes of a difference.
        why_no_gradients: why gradients were not compared; empty if they were.
        floor: difference of a token's loss in two correct computations of the samples alone; None if both
            tolerances were given.
        gradient_floor: the same for gradients.
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
        values = [document.largest for document in self.documents]
        return next((value for value in values if math.isnan(value)), max(values))

    @property
    def ok(self) -> bool:
        """Whether packed training equals unpacked training, up to rounding."""
        close = self.gradients is None or self.gradients <= self.gradient_tolerance
        return all(document.largest <= self.tolerance for document in self.documents) and close

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, for JSON."""
        return {**asdict(self), "ok": self.ok, "largest": self.largest}

    def describe(self) -> str:
        """Return the result as text."""
        gradients = f"not compared ({self.why_no_gradients or 'not requested'})"
        if self.gradients is not None:
            limit = _describe_allowed(self.gradient_tolerance, self.gradient_floor)
            gradients = f"{self.gradients:.1e} apart ({limit})"
        verdict = "packed equals unpacked" if self.ok else "PACKED DOES NOT EQUAL UNPACKED"
        allowed = _describe_allowed(self.tolerance, self.floor)
        line = (
            f"{self.attention}: {verdict}. {len(self.documents)} documents, a token's loss differs by at "
            f"most {self.largest:.1e} ({allowed}), gradients {gradients}"
        )
        return "\n".join([line, *(f"likely cause: {cause}" for cause in self.causes)])


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
        model: of transformers, with a language model head; its state is restored.
        processor: its processor.
        samples: examples in the documented format, or encoded samples; some with media, some without.
        attn_implementation: the backend of the packed batch; samples alone use sdpa.
        rows: the number of packs.
        get_rope_index: as for :class:`packhorse.neat_packing_vlm.PackedDatasetWrapper`; ``"model"`` takes the
            model's own, if it has one.
        collate: makes the batch from packs; default: Packhorse's own.
        gradients: also compare gradients (not for flex attention on a CPU, which has no backward pass).
        tolerance: allowed difference of a token's loss. None allows four times the noise floor, which is the
            difference of the same samples alone with another kernel (eager) and with padding, on this
            machine; but at most half the digits of the model's type.
        gradient_tolerance: allowed relative difference of gradients; None as for ``tolerance``.
        keys: of the samples, for the report; default: their indices.
        unchecked: also compare a model that has :func:`packhorse.families.packing.known_problems`.

    Raises:
        ConfigError: the model cannot be trained on packed rows, there are too few samples, none of their
            tokens is supervised, or the backend is not available.
        BadSample: a sample cannot be encoded.
    """
    if not unchecked:
        check_packable(model, measured=True)
    if not 1 <= rows < len(samples):
        detail = f"{len(samples)} samples for {rows} packs: expected more samples than packs ({rows=})"
        raise ConfigError(detail, setting="rows", value=rows)
    names = [str(index) for index in range(len(samples))] if keys is None else list(keys)
    if len(names) != len(samples):
        detail = f"{len(names)} keys for {len(samples)} samples: expected one for each"
        raise ConfigError(detail, setting="keys", value=names)
    why_no_gradients = "" if gradients else "not requested"
    if gradients and attn_implementation == "flex_attention" and model.device.type == "cpu":
        gradients, why_no_gradients = False, "flex_attention has no backward pass on a CPU: check on a GPU"
    check_attention(attn_implementation)
    encoded = EncodedSamples(samples, processor)
    bins = [list(range(len(encoded)))[row::rows] for row in range(rows)]
    rope = rope_index(model) if get_rope_index == "model" else get_rope_index
    with without_router_loss(model.config), _evaluation_mode(model):
        pad = pad_token_id(processor)
        batch = _pack_batch(model, encoded, bins, pad, rope, attn_implementation, collate)
        use_attention(model, _REFERENCE)
        alone, expected = _run_unpacked(model, processor, encoded, gradients)
        _check_finite(alone, names)
        noise = None
        if tolerance is None or gradient_tolerance is None:
            noise = _measure_noise(model, processor, encoded, alone, expected)
            tolerance = noise.allowed if tolerance is None else tolerance
            gradient_tolerance = noise.gradient_allowed if gradient_tolerance is None else gradient_tolerance
        use_attention(model, attn_implementation)
        packed = Packed(model, to_device(batch, model.device), bins, names)
        documents, difference = _compare(packed, alone, expected)
        report = ParityReport(
            attn_implementation,
            documents,
            difference if gradients else None,
            tolerance,
            gradient_tolerance,
            why_no_gradients=why_no_gradients,
            floor=None if noise is None else noise.floor,
            gradient_floor=None if noise is None else noise.gradient_floor,
        )
        if report.ok:
            return report
        labels = [sample.labels for sample in alone]
        causes = likely_causes(packed, labels, encoded, rope_index(model), report.tolerance)
    return replace(report, causes=causes)


def _check_finite(alone: Sequence[_Alone], names: Sequence[str]) -> None:
    """Raise if the loss of a sample alone is no number, so that nothing can be compared."""
    for sample, name in zip(alone, names, strict=True):
        if not bool(sample.losses.isfinite().all()):
            what = f"the loss of sample {name} alone is nan or infinite, so nothing can be compared"
            raise ConfigError(f"{what}: are all weights of the model loaded?", setting="model")


class _Alone(NamedTuple):
    """A sample alone: losses of its visible tokens, and their labels."""

    losses: torch.Tensor
    labels: torch.Tensor


class EncodedSamples(list[Mapping[str, Any]]):
    """Encoded samples and their family."""

    def __init__(self, samples: Sequence[Mapping[str, Any]], processor: Any) -> None:
        if not all("input_ids" in sample for sample in samples):
            encoded = PreTokenizedDatasetWrapper(samples, processor, on_bad="raise", ledger=Ledger())
            samples = [encoded[index] for index in range(len(samples))]  # once: they are run several times
        super().__init__(samples)
        self.family = family_of(processor)


def _pack_batch(
    model: Any,
    encoded: EncodedSamples,
    bins: list[list[int]],
    pad: int,
    rope: RopeIndex | None,
    attention: str,
    collate: Collate | None,
) -> dict[str, Any]:
    tokens = sum(len(sample["input_ids"]) for sample in encoded)
    wrapper = PackedDatasetWrapper(
        encoded, bins, tokens, pad, rope, exact=True, on_bad="raise", ledger=Ledger()
    )
    packs = [wrapper[row] for row in range(len(bins))]
    if collate is not None:
        return collate(packs)
    options = {"pixel_dtype": model.dtype, "mask_dtype": model.dtype, "config": model.config}
    return neat_packed_vlm_collater(packs, pad, None, attention, **options)


@contextmanager
def _evaluation_mode(model: Any) -> Iterator[None]:
    """Put the model in evaluation mode (no dropout); restore its mode, attention and gradients."""
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


class _Noise(NamedTuple):
    """Differences of correct computations, and the tolerances that follow from them."""

    floor: float
    gradient_floor: float
    allowed: float
    gradient_allowed: float


def _measure_noise(
    model: Any,
    processor: Any,
    encoded: EncodedSamples,
    alone: Sequence[_Alone],
    expected: Mapping[str, torch.Tensor],
) -> _Noise:
    """Compute the samples alone in two other correct ways: with another kernel, and padded to one length.

    The floor is at least one unit of rounding, because results that are equal here differ on other samples. A
    difference of more than half the digits is not rounding, so the tolerance is limited to that.
    """
    unit = torch.finfo(model.dtype).eps
    scale = max(float(sample.losses.abs().max()) for sample in alone)
    floor, gradient_floor = unit * scale, unit
    longest = max(len(sample["input_ids"]) for sample in encoded)
    for attention, length in ((_OTHER_KERNEL, None), (_REFERENCE, longest)):
        use_attention(model, attention)
        others, gradients = _run_unpacked(model, processor, encoded, bool(expected), length)
        for sample, other in zip(alone, others, strict=True):
            losses = other.losses[: len(sample.losses)]  # padding keeps a last token, which has no label
            floor = max(floor, float((losses - sample.losses).abs().max()))
        gradient_floor = max(gradient_floor, _relative_difference(gradients, expected))
    limit = unit**0.5
    allowed = min(_NOISE_FACTOR * floor, limit * max(1.0, scale))
    return _Noise(floor, gradient_floor, allowed, min(_NOISE_FACTOR * gradient_floor, limit))


def _run_unpacked(
    model: Any, processor: Any, encoded: EncodedSamples, gradients: bool, length: int | None = None
) -> tuple[list[_Alone], dict[str, torch.Tensor]]:
    """Run every sample alone, padded to ``length``; also return the gradients of the mean loss."""
    batches = [
        to_device(pad_collate_fn([sample], processor, length, pixel_dtype=model.dtype), model.device)
        for sample in encoded
    ]
    supervised = sum(int((batch["labels"] != IGNORE_INDEX).sum()) for batch in batches)
    if not supervised:
        raise ConfigError("no token of the samples is supervised: there is no loss to compare")
    alone = []
    with torch.set_grad_enabled(gradients):
        for batch in batches:
            logits = model(**model_inputs(batch)).logits[0]
            losses = token_losses(logits, batch["labels"][0])
            if gradients:
                (losses.sum() / supervised).backward()  # type: ignore[no-untyped-call]
            visible = batch["attention_mask"][0].bool()
            alone.append(_Alone(losses.detach()[visible], batch["labels"][0][visible]))
    return alone, _pop_gradients(model)


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of each token, 0 for unsupervised tokens; labels are already shifted."""
    flat = F.cross_entropy(
        logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return flat.view(labels.shape)


def _pop_gradients(model: Any) -> dict[str, torch.Tensor]:
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients


def _compare(
    packed: Packed, alone: Sequence[_Alone], expected: Mapping[str, torch.Tensor]
) -> tuple[tuple[DocumentParity, ...], float]:
    labels = packed.batch["labels"]
    with torch.set_grad_enabled(bool(expected)):
        losses = token_losses(packed.logits(), labels)
        if expected:
            mean = losses.sum() / max(1, int((labels != IGNORE_INDEX).sum()))
            mean.backward()  # type: ignore[no-untyped-call]
    gradients = _pop_gradients(packed.model)
    documents = []
    for row, document, sample in packed.documents():
        actual, other = losses.detach()[packed.visible(row, document)], alone[sample]
        if actual.shape != other.losses.shape:
            raise ConfigError(
                f"{packed.name(row, document)} has {len(actual)} visible tokens, alone it has "
                f"{len(other.losses)}: the batch does not contain the samples unchanged"
            )
        supervised = int((other.labels != IGNORE_INDEX).sum())
        unpacked_mean, packed_mean = (
            float(part.sum()) / max(1, supervised) for part in (other.losses, actual)
        )
        largest, key = float((actual - other.losses).abs().max()), packed.keys[sample]
        documents.append(
            DocumentParity(row, document, len(actual), supervised, unpacked_mean, packed_mean, largest, key)
        )
    return tuple(documents), _relative_difference(gradients, expected)


def _relative_difference(
    gradients: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> float:
    """Return the norm of the difference over the norm of the expected gradients; 0 without gradients."""
    size = sum(float(gradient.float().square().sum()) for gradient in expected.values()) ** 0.5
    squares = 0.0
    for name, gradient in expected.items():
        difference = gradient.float() - (gradients[name].float() if name in gradients else 0.0)
        squares += float(difference.square().sum())
    return squares**0.5 / size if size else 0.0
