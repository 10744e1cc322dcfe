"""Whether models of transformers give a packed document what they give it alone, for every class.

``examine("LlamaForCausalLM")`` builds a tiny model from the config of its type, and does what a user does:
``packhorse.prepare``, ``packhorse.load``, ``model_inputs``, and the forward pass. A pack of three documents
is computed twice, the second time with other documents before the last one. The last one must not change, and
it must get what it gets alone. The control is the same pack without what keeps its documents apart. Classes
with problems must be rejected by ``load`` and ``prepare``, and accepted afterwards if they only lack a proof.

The test of the sweep and ``scripts/packing_table.py``, which writes the page of all classes, share this.
"""

from __future__ import annotations

import copy
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
from packhorse.families.models import attention_of, make_honour_shift_labels, media_parts
from packhorse.families.packing import Packing, inspect_packing
from packhorse.families.tiny import tiny_settings
from packhorse.integrations.attention import inspect_attention, unsupported_features, use_attention
from packhorse.types import World

PACKS, LAYERS, NOT_PROVEN, REJECTED = "packs", "layers", "not proven", "rejected"
ENCODER_DECODER, FAILS, NOT_BUILT = "encoder-decoder", "fails", "not built"
BACKENDS = ("auto", "sdpa", "eager", "varlen", "flex_attention")
_LETTERS = "bdfgjkmpquvwxyz"  # no tokenizer of the tests joins two of them
_ANSWERS = (23, 9, 31)  # letters of the answer of each document
_VOCABULARY = 512  # more than any tokenizer of the tests has
_VOCABULARIES = frozenset({"vocab_size", "vocab_size_per_layer_input", "n_vocab", "text_vocab_size"})
_DROPOUT = re.compile(r"(attention|attn)_(probs_)?(dropout|pdrop)(_prob)?")
_PACK = 4096
_LONGEST = 1024  # more tokens than a document has
_WIDE, _NARROW = 4096, 8  # windows that hold a document, and that do not
_WINDOWS = frozenset({"sliding_window", "attention_chunk_size", "window_size", "attention_window_size"})


@dataclass(frozen=True)
class Measurement:
    """Largest differences of the logits of the last document of a pack.

    Attributes:
        attention: the attention of the decoder.
        leak: change when the documents before it are replaced.
        difference: from the logits of the document alone.
        floor: between correct computations of the document alone.
        control: as ``leak``, without what keeps documents apart.
        problem: why there are no numbers; empty if there are.
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
        worst = max(self.leak, self.difference)
        return not self.problem and worst <= allowed and self.control >= CONTROL * allowed


@dataclass(frozen=True)
class Result:
    """The group of a class of models, and the measurements or the reason for it.

    Attributes:
        model_type: of the config of the class.
        group: :data:`PACKS`, :data:`LAYERS`, …
        reason: why it is rejected, not proven, wrong or not built.
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
    measured: Mapping[str, Measurement] = field(default_factory=dict)


@cache
def classes() -> dict[str, str]:
    """Return the model type of the config of every causal and image-text class of transformers, by name."""
    import transformers
    from transformers.models.auto import modeling_auto

    names: set[str] = set()
    for mapping in ("IMAGE_TEXT_TO_TEXT", "CAUSAL_LM"):
        names.update(getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").values())
    return {name: getattr(transformers, name).config_class.model_type for name in sorted(names)}


def _mrope(*section: int) -> dict[str, Any]:
    return {**_ROPE, "mrope_section": list(section)}


_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_ROPE_BY_LAYER = {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}}
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
# What the default config of a type lacks, or has of a kind of layer that checkpoints do not have.
SETTINGS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 3, "IMGIMGAZ": 4, "IMGIMGBZ": 5}},
    "cohere_compass": {"text_config": _ROPE_BY_LAYER},
    "cohere_compass_text": _ROPE_BY_LAYER,
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0}, "ffn_config": {"hidden_size": 64}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "emu3": {
        "vocabulary_map": {
            "<image>": 3,
            "<|extra_200|>": 4,
            "<|visual token 000000|>": 5,
            "<|visual token 000001|>": 6,
        }
    },
    "ernie4_5_vl_moe": {
        "text_config": {
            "rope_parameters": _mrope(3, 3, 2),
            "mlp_layer_types": ["dense", "sparse"],
            "moe_intermediate_size": [32, 32],
        }
    },
    "granite4_vision": {"deepstack_layer_map": [[0, 0], [1, 1]], "downsample_rate": "4/8"},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    **{
        name: {"text_config": {"rope_parameters": _mrope(2, 3, 3)}}
        for name in ("glm46v", "glm4v", "glm_ocr", "paddleocr_vl")
    },
    "glm4v_moe": {"text_config": {"rope_parameters": _mrope(2, 1, 1)}},
    "glm5_next": {"text_config": {"index_kpool": 4}},
    "hunyuan_vl": {"text_config": {"rope_parameters": _mrope(2, 2, 2, 2)}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [0, 1]}},
    "qwen2_5_omni_thinker": {
        "text_config": {"rope_parameters": _mrope(2, 3, 3)},
        "vision_start_token_id": 5,
    },
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xlnet": {"d_head": 16},
}
# Arguments of configs that cannot be made without them.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 30,  # all layers
        }
    }
}
# Classes that cannot be built here, with a part of the reason.
CANNOT_BUILD = {
    "FastVlmForConditionalGeneration": "requires the timm library",
    "Gemma3nForConditionalGeneration": "requires the timm library",
    "PerceptionLMForConditionalGeneration": "requires the timm library",
}


def tiny_config(model_type: str) -> Any:
    """Return the config of a tiny model whose vocabulary holds the ids of the tokenizers."""
    config = default_config(model_type)
    settings = tiny_settings(config.to_dict())
    for name, value in SETTINGS.get(model_type, {}).items():
        settings[name] = settings[name] | value if name.endswith("_config") else value
    return type(config).from_dict(_with_ids(settings))


def default_config(model_type: str) -> Any:
    """Return the config that transformers makes for a model type without further settings."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type](**_ARGUMENTS.get(model_type, {}))


def _with_ids(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the vocabulary of the tokenizers, and without dropout of attention."""
    changed: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            changed[key] = value if key == "vocabulary_map" else _with_ids(value)
        elif key in _VOCABULARIES and value:
            changed[key] = _VOCABULARY
        elif isinstance(value, float) and _DROPOUT.fullmatch(str(key)):
            changed[key] = 0.0  # varlen attention has none
        else:
            changed[key] = value
    return changed


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
def text_tokenizer() -> Any:
    """Return a tokenizer with a chat template, for models without media."""
    words = copy.deepcopy(tokenizer("qwen3_vl"))
    words.chat_template = chatml()
    return words


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


def measure(subject: Subject, backend: str) -> Measurement:
    """Measure a model with an attention backend; raise ConfigError if it is rejected."""
    plain = subject.build()
    model = copy.deepcopy(plain)
    # prepare rejects flex attention on a CPU, because it has no backward pass there.
    prepared = "auto" if backend == "flex_attention" else backend
    packhorse.prepare(model, prepared, device="cpu", longest=_LONGEST, logits="all")
    if backend == "flex_attention":
        use_attention(model, backend)
    attention = attention_of(model)
    rows, others = documents(0, subject.images), documents(1, subject.images)
    batch, replaced = _load_pair(subject, model, rows, others)
    last = batch.info.samples[-1]
    packed = _last_of_pack(batch, model, model_inputs(batch, model))
    alone, *recomputed = _alone(subject, plain, rows[last], others[last], packed.shape[0])
    if attention != attention_of(plain):  # another kernel rounds in another way
        other = copy.deepcopy(plain)
        use_attention(other, attention)
        recomputed += _alone(subject, other, rows[last], others[last], packed.shape[0])
    if inspect_packing(plain).layers:
        control = _unprepared_change(subject, plain)
    else:
        control = _change(model, (batch, replaced), lambda batch: _leaking(model_inputs(batch)))
    return Measurement(
        attention,
        _change(model, (batch, replaced), lambda batch: model_inputs(batch, model)),
        largest_difference(packed, alone),
        noise_floor(alone, *recomputed),
        control,
    )


def _load_pair(subject: Subject, model: Any, rows: Sequence[Any], others: Sequence[Any]) -> tuple[Any, Any]:
    """Return a pack of rows, and one with the same last document after other documents."""
    (batch,) = subject.load(rows, model)
    last = batch.info.samples[-1]
    (replaced,) = subject.load([*others[:last], rows[last], *others[last + 1 :]], model)
    assert replaced.info.samples == batch.info.samples
    return batch, replaced


def _change(model: Any, batches: tuple[Any, Any], inputs_of: Callable[[Any], Mapping[str, Any]]) -> float:
    """Return the largest difference of the logits of the last documents of two packs."""
    before, after = (_last_of_pack(batch, model, inputs_of(batch)) for batch in batches)
    return largest_difference(after, before)


def _last_of_pack(batch: Any, model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return the logits of the last document."""
    with torch.no_grad():
        logits = model(**inputs).logits
    ids = batch.info.document_ids[0]
    last: torch.Tensor = logits[0][ids == ids.max()]
    if not bool(last.isfinite().all()):
        raise FloatingPointError("its logits are not finite")
    return last


def _alone(subject: Subject, model: Any, row: Any, another: Any, length: int) -> Iterator[torch.Tensor]:
    """Yield logits of a document alone, next to another one, and padded."""
    longer = copy.deepcopy(row)
    longer["conversation"][1]["content"][0]["text"] += "bdfg"
    for rows in ([row], [row, another], [row, longer]):
        (batch,) = subject.load(rows, model, mode="pad", batch_size=len(rows))
        with torch.no_grad():
            logits = model(**model_inputs(batch), use_cache=False).logits
        index = batch.info.samples.index(0)
        yield logits[index][batch["attention_mask"][index].bool()][:length]


# Types without attention, whose layers reject the mask of a pack.
_WITHOUT_ATTENTION = frozenset({"falcon_mamba", "mamba"})


def _unprepared_change(subject: Subject, plain: Any) -> float:
    """Return how much the last document changes if layers that carry state are not prepared.

    Attention keeps documents apart by a mask: layers that are not prepared may reject boundaries.
    """
    prepared = copy.deepcopy(plain)
    packhorse.prepare(prepared, device="cpu", longest=_LONGEST, logits="all")
    rows, others = documents(0, subject.images), documents(1, subject.images)
    batches = _load_pair(subject, prepared, rows, others)
    use_attention(plain, attention_of(prepared))

    def inputs_of(batch: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = model_inputs(batch, prepared) | {"use_cache": False}
        if plain.config.model_type in _WITHOUT_ATTENTION:
            del inputs["attention_mask"]
        return inputs

    return _change(plain, batches, inputs_of)


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


# Families of the contract tests that have a tiny model, by the model type of the class.
_FAMILIES = {name: name for name in MODELS} | {
    "kimi_k25": "kimi_k25",
    "nemotron_h_omni": "nemotron_omni",
    "phi4_multimodal": "phi4_mm",
    "qwen3_omni_moe_thinker": "qwen3_omni",
}


@cache
def family_model(family: str) -> Any:
    """Return the tiny model of a family, which takes what the family's processor returns."""
    if family in MODELS:
        return copy.deepcopy(tiny_model(family, by_document=False))
    config = copy.deepcopy(text_model(family).config)
    media = processor(family)
    ids = media.tokenizer.convert_tokens_to_ids
    if family == "kimi_k25":
        config.image_token_id, config.video_token_id = media.image_token_id, media.video_token_id
        config.projection_hidden_size = config.vision_config.hidden_size
    elif family == "phi4_mm":
        config.vision_config.image_token_id = media.image_token_id
        config.audio_config.audio_token_id = media.audio_token_id
    else:
        config.image_token_id, config.video_token_id = ids("<|image_pad|>"), ids("<|video_pad|>")
        config.vision_start_token_id = ids("<|vision_start|>")
        config.audio_token_id, config.audio_start_token_id = ids("<|audio_pad|>"), ids("<|audio_start|>")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return with_random_weights(type(text_model(family))(config))


def subject_of(name: str, window: int = _WIDE) -> Subject:
    """Return the tiny model of a class, with its own processor and images if the tests have these."""
    model_type = classes()[name]
    family = _FAMILIES.get(model_type)
    if family and type(model := family_model(family)).__name__ == name:
        return Subject(partial(copy.deepcopy, model), processor(family), images=True)
    model = _build(name, _with_windows(tiny_config(model_type), window))
    return Subject(partial(copy.deepcopy, model), text_tokenizer())


def examine(name: str) -> Result:
    """Build the model of a class, pack documents for it, and measure whether they are kept apart."""
    model_type = classes()[name]
    result = partial(Result, model_type, name)
    subject, problem = _try(lambda: subject_of(name))
    if problem:
        _assert_load_rejects(default_config(model_type))
        return result(NOT_BUILT, problem)
    model = subject.build()
    packing = inspect_packing(model)
    if packing.problems:
        return result(*_examine_rejected(subject, model, packing))
    measured = dict(_measure_all(name, subject))
    group = LAYERS if packing.layers else PACKS
    wrong = [
        f"{name}: {measurement.problem or 'documents mix, or the control does not'}"
        for name, measurement in measured.items()
        if not measurement.right
    ]
    if wrong:
        group = FAILS
    return result(group, "; ".join(wrong), packing.layers, packing.tested, subject.images, measured)


_REJECTION = r"cannot be trained on packed rows|is an encoder-decoder"
_OTHER_POSITIONS = "get_rope_index returned positions of shape"  # HunYuan-VL has four rows of them


def _examine_rejected(subject: Subject, model: Any, packing: Packing) -> tuple[str, str]:
    """Return the group of a class with problems, and the reason.

    Asserts that ``load`` and ``prepare`` reject it, and that what the page of all classes advises works.
    """
    if media_parts(model.config):  # loaders reject a tokenizer for it
        subject = replace(subject, processor=processor("internvl"))
    load_packed = partial(subject.load, documents(0))
    load_padded = partial(subject.load, documents(0), mode="pad", batch_size=1)
    for step in (packhorse.prepare, load_packed):
        with pytest.raises(ConfigError, match=_REJECTION):
            step(model)
    _assert_load_rejects(model.config)
    reason = "; ".join(packing.problems)
    if getattr(model.config, "is_encoder_decoder", False):
        with pytest.raises(ConfigError, match="is an encoder-decoder"):
            load_padded(model)
        return ENCODER_DECODER, reason
    if not packing.known:
        prepared = packhorse.prepare(model, device="cpu", longest=_LONGEST, logits="all", allow_unproven=True)
        assert "not proven" in str(prepared)
        try:
            load_packed(model)
        except ConfigError as error:
            if _OTHER_POSITIONS not in (reason := str(error)):
                raise
        else:
            return NOT_PROVEN, reason
    with pytest.raises(ConfigError, match=_REJECTION):
        packhorse.prepare(subject.build(), allow_unproven=packing.known)
    make_honour_shift_labels(model)
    load_padded(model)
    return REJECTED, reason


def _assert_load_rejects(config: Any) -> None:
    """Assert that a loader cannot be made for a model of which only the config is known."""
    with pytest.raises(ConfigError, match=_REJECTION):
        Subject(lambda: None, text_tokenizer()).load(documents(0), config)


def _measure_all(name: str, subject: Subject) -> Iterator[tuple[str, Measurement]]:
    """Yield the measurement for each attention that is right for a model, by its name.

    ``"auto"`` is the choice of ``prepare``; ``"varlen, short window"`` is a window shorter than a document.
    """
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


def _try_measure(subject: Subject, backend: str) -> Measurement:
    measurement, problem = _try(lambda: measure(subject, backend))
    return Measurement(problem=problem) if problem else measurement


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
