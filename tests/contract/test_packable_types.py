"""Every model type that is declared packable: two documents in a row give what each of them gives alone."""

from __future__ import annotations

import copy
import inspect
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import packhorse
from contract.processors import processor
from contract.sweep import SETTINGS
from contract.text_models import TEXT_MODELS, text_model
from contract.tiny_models import MODELS, tiny_model
from contract.tiny_tokenizers import tokenizer
from contract.torchvision_ops import make_torchvision_importable
from loader_samples import texts
from noise_floor import largest_difference, noise_floor
from packhorse.collate_fns import model_inputs
from packhorse.families.packing import (
    PACKABLE,
    check_packable,
    inspect_packing,
    known_problems,
    packing_problems,
)
from packhorse.families.probe import measure
from packhorse.families.stateful import STATEFUL_LAYERS, install
from packhorse.families.tiny import tiny_settings
from packhorse.integrations.attention import use_attention
from raising import raises_config

make_torchvision_importable()

from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

_OF_FAMILIES = {
    **{name: partial(tiny_model, name, by_document=False) for name in MODELS},
    **{name: partial(text_model, name) for name in TEXT_MODELS},
}
_DECODERS = [
    name
    for name in sorted(PACKABLE & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys())
    if not name.endswith("_text") and not CONFIG_MAPPING[name].sub_configs
]
_FIRST, _SECOND = 9, 13


def small(model_type: str, **settings: Any) -> Any:
    """A config of a model type with small sizes, and one layer of each kind."""
    kind = CONFIG_MAPPING[model_type]
    return kind.from_dict(tiny_settings(kind().to_dict()) | SETTINGS.get(model_type, {}) | settings)


def decoder(model_type: str, **settings: Any) -> Any:
    """A tiny language model of a type; sdpa where it has it."""
    config = small(model_type, **settings)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config._attn_implementation = "sdpa" if kind._supports_sdpa else "eager"
    return kind(config)


def with_random_weights(model: Any) -> Any:
    """Also those that begin as zeros or ones, after which a difference would hide."""
    model = copy.deepcopy(model).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(
                0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel()))
            )
    return model


def row(model: Any, parts: Any, masked: bool = True, keep_apart: bool = True) -> torch.Tensor:
    """Logits of documents in a row, or of one document without a mask."""
    lengths = [part.shape[1] for part in parts]
    inputs = {"input_ids": torch.cat(parts, 1)}
    if masked:
        numbers = torch.arange(len(parts)).repeat_interleave(torch.tensor(lengths))
        seen = torch.ones(sum(lengths), sum(lengths)).tril().bool()
        seen &= (numbers[:, None] == numbers) | (not keep_apart)
        additive = model.config.get_text_config()._attn_implementation == "eager"
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo().min) if additive else seen
        inputs["attention_mask"] = mask[None, None]
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        logits: torch.Tensor = model(**inputs, use_cache=False).logits
    return logits


def packed_and_alone(model: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of two documents: in a row, alone and not prepared, in the other order, with a leak."""
    ids = torch.randint(5, 90, (1, _FIRST + _SECOND), generator=torch.Generator().manual_seed(1))
    documents = ids.split([_FIRST, _SECOND], 1)
    alone = torch.cat([row(model, [one], masked=False) for one in documents], 1)
    prepared = copy.deepcopy(model)
    install(prepared, inspect_packing(prepared).layers)
    other = row(prepared, documents[::-1]).roll(_FIRST, 1)
    return row(prepared, documents), alone, other, row(prepared, documents, keep_apart=False)


def check(model: Any, parity: Any) -> None:
    assert packing_problems(model) == packing_problems(model.config) == ()
    assert inspect_packing(model).tested
    model = with_random_weights(model)
    packed, alone, other, leak = packed_and_alone(model)
    name = model.config.model_type
    floor = noise_floor(alone, other)
    parity.check(
        f"logits of {name}", largest_difference(packed, alone), floor, largest_difference(leak, alone)
    )
    if inspect_packing(model).layers:
        # The mask is right, but the layers with state do not know where documents begin.
        parts = torch.randint(5, 90, (3, _SECOND), generator=torch.Generator().manual_seed(2)).split(1)
        try:
            first, second = (row(model, [part, parts[2]])[:, _SECOND:] for part in parts[:2])
        except (ValueError, RuntimeError):
            assert name in ("mamba", "falcon_mamba"), "without attention, they reject the mask themselves"
            return
        prepared = copy.deepcopy(model)
        install(prepared, inspect_packing(prepared).layers)
        after, replaced = (row(prepared, [part, parts[2]])[:, _SECOND:] for part in parts[:2])
        difference, control = largest_difference(after, replaced), largest_difference(first, second)
        parity.check(f"document 2 of {name}", difference, floor, control)


@pytest.mark.parametrize("name", _DECODERS)
def test_a_declared_decoder_gives_packed_documents_what_it_gives_them_alone(name: str, parity: Any) -> None:
    torch.manual_seed(0)
    check(decoder(name), parity)


@pytest.mark.parametrize("name", _OF_FAMILIES)
def test_the_text_of_a_declared_family_gives_packed_what_it_gives_alone(name: str, parity: Any) -> None:
    check(_OF_FAMILIES[name](), parity)


def test_no_declared_type_is_without_a_test() -> None:
    configs = [build().config for build in _OF_FAMILIES.values()]
    tested = {part.model_type for config in configs for part in (config, config.get_text_config())}
    assert {name for name in PACKABLE if name in CONFIG_MAPPING} <= tested | set(_DECODERS)


def test_the_documentation_lists_every_declared_type() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "packable_models.md"
    assert {f"`{name}`" for name in PACKABLE} <= set(re.findall("`[a-z0-9_]+`", page.read_text()))


@pytest.mark.parametrize("name", _DECODERS)
def test_models_that_ignore_boundaries_of_documents_are_known(name: str) -> None:
    config = small(name)
    found = measure(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    assert not found.problem
    ignores = "differs" in found.varlen
    assert bool(inspect_packing(config).no_boundaries) == ignores, found.varlen
    if not ignores:
        return
    model = decoder(name)
    with raises_config("attn_implementation", "varlen", match="or ignores them"):
        packhorse.prepare(model, "varlen", device="cpu")
    assert packhorse.prepare(model, device="cpu").attn_implementation == "sdpa"
    use_attention(model, "varlen")
    words = copy.deepcopy(tokenizer("qwen2_vl"))
    words.chat_template = processor("qwen2_vl").chat_template
    with raises_config("attn_implementation", match="ignores them"):
        packhorse.load(texts(4), words, model=model, pack_size=256)
    batch = next(
        iter(packhorse.load(texts(4), words, model="unchecked", pack_size=256, attn_implementation="varlen"))
    )
    with raises_config("attn_implementation", match="ignores them"):
        model_inputs(batch, model)


@pytest.mark.parametrize("name", sorted(STATEFUL_LAYERS))
def test_a_measurement_finds_the_layers_of_the_table(name: str) -> None:
    config = small(name)
    found = measure(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    assert not found.problem
    assert found.layers == STATEFUL_LAYERS[name]
    assert found.leak <= 4 * found.floor


def test_a_type_that_selects_keys_over_the_row_is_measured_and_rejected() -> None:
    torch.manual_seed(0)
    model = decoder("doge")
    for given in (model, model.config):
        with raises_config("model", match='DogeForCausalLM: document 2 of a pack differs.*mode="pad"'):
            check_packable(given)
    assert known_problems(model) == packing_problems(model)


def test_a_kind_of_layer_that_no_measurement_shows_is_rejected_but_not_known_to_be_wrong() -> None:
    config = small("deepseek_v32")
    with raises_config("model", match=r"layer \d \(indexed_attention\).*packhorse parity --model"):
        check_packable(config)
    assert known_problems(config) == (), "so packhorse parity measures it"


@pytest.mark.parametrize(
    "name", ["idefics", "molmo2", "blt", "kosmos-2", "git", "diffusion_gemma", "llava", "fuyu"]
)
def test_untested_types_with_media_are_rejected_by_their_config(name: str) -> None:
    assert packing_problems(CONFIG_MAPPING[name]())


def test_a_window_shorter_than_the_documents_of_the_measurement_is_no_problem() -> None:
    config = small("cwm", sliding_window=8)
    assert packing_problems(config) == ()


def test_parts_of_positions_fit_the_narrow_heads_of_a_tiny_copy() -> None:
    config = CONFIG_MAPPING["qwen2_5_omni_thinker"]()
    (why,) = packing_problems(config)
    assert "cannot be run" in why, "its default config has no parts"
    assert known_problems(config) == (), "what cannot be run is not known to be wrong"
    config.get_text_config().rope_parameters = {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [16, 24, 24],
    }
    (why,) = packing_problems(config)
    assert "its text is right in packed rows, as measured" in why


def test_a_declared_model_with_a_decoder_of_another_type_is_rejected() -> None:
    config = CONFIG_MAPPING["llava_onevision"](text_config=small("bloom"))
    (why,) = packing_problems(config)
    assert "LlavaOnevision" in why


@pytest.mark.parametrize(
    ("layers", "kinds"), [(2, ["recurrent"] * 2), (3, None), (26, None), (2, ["attention"])]
)
def test_a_repeated_pattern_of_layers_is_measured_with_each_kind_that_the_model_has(
    layers: int, kinds: Any
) -> None:
    from transformers import RecurrentGemmaConfig

    settings = {} if kinds is None else {"block_types": kinds}
    config = RecurrentGemmaConfig(num_hidden_layers=layers, **settings)
    tiny = tiny_settings(config.to_dict())
    assert tiny["block_types"] == (["recurrent", "attention"] if kinds is None else [kinds[0]] * 2)
    packing = inspect_packing(config)
    assert not packing.problems
    assert packing.layers == (() if kinds == ["attention"] else ("RecurrentGemmaRecurrentBlock",))


class Averaged(torch.nn.Module):
    """A module that adds to each token the mean of all tokens before it."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        counts = torch.arange(1, states.shape[1] + 1)[:, None]
        mixed: torch.Tensor = self.inner(states) + states.cumsum(1) / counts
        return mixed


@pytest.mark.parametrize("name", ["llama", "persimmon"])  # tested, measured
def test_a_model_with_a_module_that_its_class_does_not_have_is_not_proven(name: str) -> None:
    model = decoder(name)
    block = model.model.layers[0]
    plain = block.mlp
    assert packing_problems(model) == ()
    block.mlp = Averaged(plain)
    with raises_config("model", match=r"model\.layers\.0\.mlp \(Averaged\) is no module of this class"):
        packhorse.prepare(model, "sdpa", device="cpu")
    assert known_problems(model) == (), "packhorse parity measures it"
    assert packhorse.prepare(model, "sdpa", device="cpu", allow_unproven=True)
    block.mlp = torch.nn.Sequential(plain, torch.nn.Conv1d(64, 64, 3, padding=2))
    (why,) = packing_problems(model)
    assert "(Conv1d) carries state along the row, as no layer of its class does" in why


def test_a_class_that_builds_the_modules_of_its_user_is_measured_with_them() -> None:
    from transformers import LlamaForCausalLM

    class AveragedLlama(LlamaForCausalLM):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model.layers[0].mlp = Averaged(self.model.layers[0].mlp)

    packing = inspect_packing(AveragedLlama(small("llama")))
    assert (packing.problems, packing.layers) == ((), ("Averaged",))


def test_a_checkpoint_with_code_of_its_own_has_to_be_passed_as_a_model(tmp_path: Path) -> None:
    config = small("llama", architectures=["OwnLlama"], auto_map={"AutoModelForCausalLM": "own.OwnLlama"})
    config.save_pretrained(tmp_path)
    for given in (config, tmp_path):
        with raises_config("model", match="code for its class OwnLlama.*pass the model itself"):
            check_packable(given)
        assert known_problems(given) == (), "packhorse plan takes it"
    native = small("llama", architectures=["LlamaForCausalLM"], auto_map=config.auto_map)
    assert packing_problems(native) == ()


def test_an_adapter_that_begins_at_a_token_of_the_row_is_rejected() -> None:
    import peft

    settings: dict[str, Any] = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}
    adapted = peft.get_peft_model(decoder("llama"), peft.LoraConfig(**settings, alora_invocation_tokens=[5]))
    with raises_config("model", match="aLoRA is active from its invocation tokens to the end of the row"):
        packhorse.prepare(adapted, "sdpa", device="cpu")
    plain = peft.get_peft_model(decoder("llama"), peft.LoraConfig(**settings))
    assert packing_problems(plain) == ()


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "qwen3_5_text", "lfm2", "bamba"])
def test_positions_that_restart_without_a_mask_separate_documents_for_every_layer(
    name: str, parity: Any
) -> None:
    torch.manual_seed(0)
    model = with_random_weights(decoder(name))
    packhorse.prepare(model, "sdpa", device="cpu")
    lengths = (20, 30)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    first, other, second = (torch.randint(5, 60, (1, length)) for length in (20, 20, 30))

    def run(before: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        ids = torch.cat([before, second], 1)
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=ids, **inputs).logits[:, before.shape[1] :]
        return logits

    alone = run(first[:, :0])
    packed = run(first, position_ids=positions)
    control = largest_difference(run(first), run(other))
    floor = noise_floor(alone, run(first[:, :0], position_ids=torch.arange(30)[None]))
    parity.check("alone", largest_difference(packed, alone), floor, control)
    parity.check("replaced", largest_difference(run(other, position_ids=positions), packed), floor, control)
