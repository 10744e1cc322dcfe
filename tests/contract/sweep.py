"""Whether models of transformers give a packed document what they give it alone, for every class.

``examine("LlamaForCausalLM")`` builds a tiny model from the config of its type, and does what a user does:
``packhorse.prepare``, ``packhorse.load``, ``model_inputs``, and the forward pass. A pack of three documents
is computed twice, the second time with other documents before the last one. The last one must not change, and
it must get what it gets alone. The control is the same pack without what keeps its documents apart.

The test of the sweep and ``scripts/packing_table.py``, which writes the page of all classes, share this.
"""

from __future__ import annotations

import copy
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest
import torch

import packhorse
from contract.chat_templates import chatml
from contract.processors import processor
from contract.samples import turns
from contract.text_models import text_model
from contract.tiny_models import MODELS, tiny_model
from contract.tiny_tokenizers import tokenizer
from noise_floor import CONTROL, FACTOR, largest_difference, noise_floor
from packhorse.collate.masks import document_block_mask
from packhorse.collate_fns import model_inputs
from packhorse.errors import ConfigError
from packhorse.families.models import attention_of
from packhorse.families.packing import inspect_packing
from packhorse.families.tiny import tiny_settings
from packhorse.integrations.attention import inspect_attention, unsupported_features, use_attention
from packhorse.types import World

PACKS, LAYERS, REJECTED, FAILS, NOT_BUILT = "packs", "layers", "rejected", "fails", "not built"
BACKENDS = ("auto", "sdpa", "eager", "varlen", "flex_attention")
_LETTERS = "bdfgjkmpquvwxyz"  # no tokenizer of the tests joins two of them
_ANSWERS = (23, 9, 31)  # letters of the answer of each document
_VOCABULARY = 512  # more than any tokenizer of the tests has
_VOCABULARIES = frozenset({"vocab_size", "vocab_size_per_layer_input", "n_vocab", "text_vocab_size"})
_DROPOUT = re.compile(r"(attention|attn)_(probs_)?(dropout|pdrop)(_prob)?")
_PACK = 4096
_LONGEST = 256  # more tokens than a document has
_WIDE, _NARROW = 4096, 8  # windows that hold a document, and that do not
_WINDOWS = frozenset({"sliding_window", "attention_chunk_size", "window_size", "attention_window_size"})


@dataclass(frozen=True)
class Measured:
    """Largest differences of the logits of the last document of a pack.

    Attributes:
        attention: that the decoder ran.
        leak: when the documents before it are replaced.
        difference: from the document alone.
        floor: between correct computations of the document alone.
        control: as ``leak``, without what keeps documents apart; infinite if the model then raises.
        problem: why there are no numbers.
    """

    attention: str = ""
    leak: float = 0.0
    difference: float = 0.0
    floor: float = 0.0
    control: float = 0.0
    problem: str = ""

    @property
    def right(self) -> bool:
        """Whether packed equals alone, and the control does not."""
        allowed = FACTOR * self.floor
        most = max(self.leak, self.difference)
        return not self.problem and most <= allowed and self.control >= CONTROL * allowed


@dataclass(frozen=True)
class Result:
    """What came of a class.

    Attributes:
        group: :data:`PACKS`, :data:`LAYERS`, …
        reason: why it is rejected, fails or cannot be built.
        layers: classes of layers that are called document by document.
        tested: whether it is accepted without a measurement.
        media: whether the documents had images.
        measured: by attention backend; ``"auto"`` is the choice of ``prepare``.
    """

    model_type: str
    class_name: str
    group: str
    reason: str = ""
    layers: tuple[str, ...] = ()
    tested: bool = False
    media: bool = False
    measured: Mapping[str, Measured] = field(default_factory=dict)


@cache
def classes() -> dict[str, str]:
    """Model types by the class of the model, of every causal and image-text class of transformers."""
    import transformers
    from transformers.models.auto import modeling_auto

    types: dict[str, list[str]] = {}
    for mapping in ("IMAGE_TEXT_TO_TEXT", "CAUSAL_LM"):
        for model_type, name in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items():
            types.setdefault(name, []).append(model_type)
    found = {}
    for name, several in types.items():
        own = getattr(transformers, name).config_class.model_type if len(several) > 1 else ""
        found[name] = own if own in several else several[0]
    return dict(sorted(found.items()))


def _mrope(*section: int) -> dict[str, Any]:
    return {**_ROPE, "mrope_section": list(section)}


_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
# What the default config of a type lacks, or has of a kind of layer that checkpoints do not have.
SETTINGS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    **{
        name: {"text_config": {"rope_parameters": _mrope(2, 3, 3)}}
        for name in ("glm46v", "glm4v", "glm_ocr", "paddleocr_vl", "qwen2_5_omni_thinker")
    },
    "glm4v_moe": {"text_config": {"rope_parameters": _mrope(2, 1, 1)}},
    "reformer": {"is_decoder": True},
    "xlnet": {"d_head": 16},
}


def tiny_config(model_type: str) -> Any:
    """Return the config of a tiny model whose vocabulary holds the ids of the tokenizers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    settings = tiny_settings(kind().to_dict())
    for name, value in SETTINGS.get(model_type, {}).items():
        settings[name] = settings[name] | value if name == "text_config" else value
    return kind.from_dict(_with_ids(settings))


def _with_ids(settings: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            made[key] = _with_ids(value)
        else:
            made[key] = _VOCABULARY if key in _VOCABULARIES and value else value
            if _DROPOUT.fullmatch(key) and isinstance(value, float):
                made[key] = 0.0  # varlen attention has none
    return made


def _with_windows(config: Any, length: int) -> Any:
    """Return a copy of a config whose windows have another length."""
    changed = copy.deepcopy(config)
    text = changed.get_text_config()
    for name in _WINDOWS:
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, length)
    return changed


def _build(name: str, config: Any) -> Any:
    """Return a tiny model with random weights."""
    import transformers

    kind = getattr(transformers, name)
    text = config.get_text_config()
    text._attn_implementation = "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return with_random_weights(kind(config))


def with_random_weights(model: Any) -> Any:
    """Change also the weights that begin as zeros or ones, after which a difference would hide."""
    model = model.float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(
                0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel()))
            )
    return model


@cache
def words() -> Any:
    """Return a tokenizer with a chat template, for models without media."""
    made = copy.deepcopy(tokenizer("qwen3_vl"))
    made.chat_template = chatml()
    return made


def documents(seed: int, images: bool = False) -> list[dict[str, Any]]:
    """Return rows whose contents differ by the seed, and whose lengths do not."""
    draw = random.Random(seed)
    rows = []
    for length in _ANSWERS:
        answer = "".join(draw.choices(_LETTERS, k=length))
        question = "".join(draw.choices(_LETTERS, k=7))
        conversation = turns(*["image"] * images, question=question, answer=answer)
        if images:
            conversation[0]["content"][0]["image"] = _image(draw)
        rows.append({"conversation": conversation})
    return rows


def _image(draw: random.Random) -> Any:
    from PIL import Image

    width, height = 112, 84
    return Image.frombytes("RGB", (width, height), draw.randbytes(3 * width * height))


@dataclass(frozen=True)
class Subject:
    """A model under examination, what encodes its rows, and whether these have images."""

    build: Callable[[], Any]
    processor: Any
    images: bool = False

    def load(self, rows: Sequence[Any], model: Any, **settings: Any) -> list[Any]:
        """Return the batches of a loader: by default one pack."""
        loader = packhorse.load(
            rows,
            self.processor,
            model=model,
            num_workers=0,
            world=World(),
            on_bad="raise",
            pixel_dtype="float32",
            pack_size=_PACK,
            **settings,
        )
        return list(loader)


def measure(subject: Subject, backend: str) -> Measured:
    """Measure a model with an attention backend; raise ConfigError if it is rejected."""
    plain = subject.build()
    model = copy.deepcopy(plain)
    # prepare rejects flex attention on a CPU, because it has no backward pass there.
    chosen = "auto" if backend == "flex_attention" else backend
    packhorse.prepare(model, chosen, device="cpu", longest=_LONGEST)
    if backend == "flex_attention":
        use_attention(model, backend)
    attention = attention_of(model)
    rows, others = documents(0, subject.images), documents(1, subject.images)
    (batch,) = subject.load(rows, model)
    last = batch.info.samples[-1]
    (replaced,) = subject.load([*others[:last], rows[last], *others[last + 1 :]], model)
    assert replaced.info.samples == batch.info.samples
    packed = _last_of_pack(model, batch)
    parts = rows[last], others[last], packed.shape[0]
    alone, *again = _alone(subject, plain, *parts)
    if attention != attention_of(plain):  # another kernel rounds in another way
        other = copy.deepcopy(plain)
        use_attention(other, attention)
        again += _alone(subject, other, *parts)
    return Measured(
        attention,
        largest_difference(_last_of_pack(model, replaced), packed),
        largest_difference(packed, alone),
        noise_floor(alone, *again),
        _control(plain, model, batch, replaced),
    )


def _last_of_pack(model: Any, batch: Any, inputs: Mapping[str, Any] | None = None) -> torch.Tensor:
    with torch.no_grad():
        logits = model(**(model_inputs(batch, model) if inputs is None else inputs)).logits
    numbers = batch.info.document_ids
    found: torch.Tensor = logits[0][numbers[0] == numbers.max()]
    if not bool(found.isfinite().all()):
        raise FloatingPointError("its logits are not finite")
    return found


def _alone(subject: Subject, model: Any, row: Any, another: Any, length: int) -> Iterator[torch.Tensor]:
    """Yield logits of a document alone, next to another one, and padded."""
    longer = copy.deepcopy(row)
    longer["conversation"][1]["content"][0]["text"] += "bdfg"
    for rows in ([row], [row, another], [row, longer]):
        (batch,) = subject.load(rows, model, mode="pad", batch_size=len(rows))
        with torch.no_grad():
            logits = model(**model_inputs(batch), use_cache=False).logits
        at = batch.info.samples.index(0)
        yield logits[at][batch["attention_mask"][at].bool()][:length]


def _control(plain: Any, model: Any, batch: Any, replaced: Any) -> float:
    """Return how much the last document changes without what keeps documents apart."""
    separated = bool(inspect_packing(plain).layers)
    if separated:
        use_attention(plain, attention_of(model))
    try:
        before, after = (
            _last_of_pack(plain, one, model_inputs(one))
            if separated
            else _last_of_pack(model, one, _leaking(model_inputs(one)))
            for one in (batch, replaced)
        )
    # Layers that are not prepared may reject the mask of a pack, or a kernel the arguments of another one.
    except (ValueError, RuntimeError, TypeError, AttributeError):
        return math.inf
    return largest_difference(before, after)


def _leaking(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return inputs that say that the row is one document."""
    length = inputs["input_ids"].shape[1]
    inputs = dict(inputs)
    if "cu_seq_lens_q" in inputs:
        ends = torch.tensor([0, length], dtype=inputs["cu_seq_lens_q"].dtype)
        numbers = (ends, ends, length, length)
        names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
        return inputs | dict(zip(names, numbers, strict=True))
    mask = inputs.get("attention_mask")
    seen = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    if mask is None:  # transformers finds the documents in the positions
        return inputs | {"position_ids": torch.arange(length)[None], "attention_mask": torch.ones(1, length)}
    if isinstance(mask, Mapping):
        return inputs | {"attention_mask": dict.fromkeys(mask, seen)}
    if not isinstance(mask, torch.Tensor):
        return inputs | {"attention_mask": document_block_mask(torch.ones(1, length, dtype=torch.long))}
    if mask.dtype != torch.bool:
        seen = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(mask.dtype).min)
    return inputs | {"attention_mask": seen}


# Families with tiny models for the tests of the contract, by model type: those that take what their processor
# returns, and those that are called with text alone.
_WITH_IMAGES = {name: name for name in MODELS if name != "nemotron_omni"} | {
    "nemotron_h_omni": "nemotron_omni"
}
_WITH_TEXT = {
    "kimi_k25": "kimi_k25",
    "phi4_multimodal": "phi4_mm",
    "qwen3_omni_moe_thinker": "qwen3_omni",
}


def subject_of(name: str, window: int = _WIDE) -> Subject:
    """Return the tiny model of a class, with its own processor if the tests have one."""
    model_type = classes()[name]
    for fixtures, tiny in ((_WITH_IMAGES, partial(tiny_model, by_document=False)), (_WITH_TEXT, text_model)):
        fixture = fixtures.get(model_type, "")
        if fixture and type(tiny(fixture)).__name__ == name:
            model = copy.deepcopy(tiny(fixture))
            return Subject(partial(copy.deepcopy, model), processor(fixture), fixtures is _WITH_IMAGES)
    config = _with_windows(tiny_config(model_type), window)
    return Subject(partial(copy.deepcopy, _build(name, config)), words())


def examine(name: str) -> Result:
    """Build the model of a class, pack documents for it, and measure whether they are kept apart."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = classes()[name]
    result = partial(Result, model_type, name)
    subject, problem = _try(lambda: subject_of(name))
    if problem:
        found, unknown = _try(lambda: inspect_packing(CONFIG_MAPPING[model_type]()))
        if unknown or any("cannot be built" in why for why in found.problems):
            return result(NOT_BUILT, problem)
        return result(REJECTED if found.problems else FAILS, "; ".join(found.problems) or problem)
    model = subject.build()
    packing = inspect_packing(model)
    if packing.problems:
        _assert_rejected(subject, model)
        return result(REJECTED, "; ".join(packing.problems))
    measured = dict(_measure_all(name, subject))
    group = LAYERS if packing.layers else PACKS
    wrong = [f"{key}: {one.problem or 'documents mix'}" for key, one in measured.items() if not one.right]
    if wrong:
        group = FAILS
    return result(group, "; ".join(wrong), packing.layers, packing.tested, subject.images, measured)


def _assert_rejected(subject: Subject, model: Any) -> None:
    for step in (packhorse.prepare, partial(subject.load, documents(0))):
        with pytest.raises(ConfigError, match=r"cannot be trained on packed rows|is an encoder-decoder"):
            step(model)


def _measure_all(name: str, subject: Subject) -> Iterator[tuple[str, Measured]]:
    """Yield measurements by attention; that of ``prepare`` is ``"auto"``, others that it rejects are not."""
    first = _try_measure(subject, "auto")
    yield "auto", first
    info = inspect_attention(subject.build(), "cpu")
    for backend in BACKENDS[1:]:
        rejected = unsupported_features(info, backend, _LONGEST)
        if backend == "flex_attention":
            # On a GPU it has a backward pass; attention sinks raise on a CPU.
            rejected = unsupported_features(replace(info, device="cuda"), backend, _LONGEST)
            rejected = rejected or (("sinks",) if info.sinks else ())
        if not rejected and backend != first.attention:
            yield backend, _try_measure(subject, backend)
    if info.window is not None and not unsupported_features(info, "varlen"):
        yield "varlen, short window", _try_measure(subject_of(name, _NARROW), "varlen")


def _try_measure(subject: Subject, backend: str) -> Measured:
    found, problem = _try(lambda: measure(subject, backend))
    return Measured(problem=problem) if problem else found


def _try(function: Callable[[], Any]) -> tuple[Any, str]:
    """Return what a function returns, or why it fails: code of any model raises anything at all."""
    try:
        return function(), ""
    except Exception as error:  # noqa: BLE001
        return None, " ".join(f"{type(error).__name__}: {error}".split())


def without_compiling_flex(patch: pytest.MonkeyPatch) -> None:
    """Run flex attention and its masks as plain PyTorch: compiling them takes a minute."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from transformers import masking_utils
    from transformers.integrations import flex_attention as used

    def plain(query: Any, key: Any, value: Any, training: bool = False, **options: Any) -> Any:
        return flex_attention(query, key, value, **options)

    def plain_mask(_compile: bool = False, **options: Any) -> Any:
        return create_block_mask(**options)

    patch.setattr(used, "compile_friendly_flex_attention", plain)
    patch.setattr(masking_utils, "create_block_mask", plain_mask)
