"""The attention of packed training: the fastest that is right for the model, nothing that is wrong."""

import copy
from typing import Any

import pytest
import torch

from contract.tiny_models import MODELS, tiny_model
from contract.torchvision_ops import make_torchvision_importable
from packhorse.collate.batch_formats import ATTENTION
from packhorse.errors import ConfigError
from packhorse.families.models import attention_of
from packhorse.integrations.attention import (
    BEST_ELSEWHERE,
    BEST_ON_CUDA,
    AttentionInfo,
    choose_attention,
    inspect_attention,
    unsupported_features,
)
from packhorse.integrations.transformers import prepare as prepare_for_any
from raising import raises_config

make_torchvision_importable()


def prepare(model: Any, *arguments: Any, **options: Any) -> str:
    return prepare_for_any(model, *arguments, device="cpu", **options).attn_implementation


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def gpu(**info: Any) -> AttentionInfo:
    return AttentionInfo("cuda", **{"capability": (9, 0), "flash": frozenset({"flash_attention_2"}), **info})


@pytest.mark.parametrize("name", MODELS)
def test_on_a_cpu_every_tested_family_gets_sdpa_and_no_cache(name: str) -> None:
    model = tiny_model(name, seed=5)  # not the one of other tests: prepare changes it
    assert prepare(model) == "sdpa"
    assert attention_of(model) == "sdpa"
    assert model.config.use_cache is False
    assert model.config.get_text_config().use_cache is False


def test_what_is_not_a_model_is_rejected_with_what_to_pass() -> None:
    for given in (tiny_model("qwen2_vl").config, "Qwen/Qwen2-VL-2B-Instruct", None):
        with raises_config("model", match=r"prepare changes the model itself.*from_pretrained\(…\)"):
            prepare(given)
    assert prepare(copy.deepcopy(tiny_model("qwen2_vl")), None) == "sdpa"


def test_a_model_is_prepared_for_a_gpu_where_there_is_none() -> None:
    model = copy.deepcopy(tiny_model("qwen2_vl"))
    assert prepare_for_any(model, "sdpa", device="cuda").attn_implementation == "sdpa"


def test_only_the_decoder_changes() -> None:
    model = tiny_model("qwen2_5_vl", seed=5)
    before = model.config.vision_config._attn_implementation
    assert prepare(model, "varlen") == "varlen"
    assert attention_of(model) == "varlen"
    assert model.config.vision_config._attn_implementation == before


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (gpu(), "varlen"),
        (gpu(window=512), "varlen"),
        (gpu(varlen=False), "flash_attention_2"),
        (gpu(varlen_windows=False, window=512), "flash_attention_2"),
        (gpu(varlen=False, flash=frozenset()), "flex_attention"),
        (gpu(softcap=True), "flash_attention_2"),
        (gpu(softcap=True, flash=frozenset()), "flex_attention"),
        (gpu(sinks=True, flash=frozenset()), "flex_attention"),
        (gpu(dropout=0.1), "flash_attention_2"),
        (gpu(dropout=0.1, flash=frozenset()), "sdpa"),
        (gpu(bidirectional=True, window=512), "flex_attention"),
        (gpu(dtype=torch.float32), "flex_attention"),
        (gpu(capability=(7, 5), dtype=torch.float16), "flex_attention"),
        (gpu(head=512), "flex_attention"),
        (AttentionInfo("cpu"), "sdpa"),
        (AttentionInfo("cpu", varlen=False), "sdpa"),
        (AttentionInfo("cpu", window=512), "varlen"),
        (AttentionInfo("cpu", softcap=True), "eager"),
        (AttentionInfo("mps"), "sdpa"),
    ],
)
def test_auto_takes_the_fastest_backend_that_is_right(info: AttentionInfo, expected: str) -> None:
    assert choose_attention(info) == expected
    order = BEST_ON_CUDA if info.device == "cuda" else BEST_ELSEWHERE
    for faster in order[: order.index(expected)]:
        assert unsupported_features(info, faster)
        with raises_config("attn_implementation", faster, match="wrong here"):
            choose_attention(info, faster)


@pytest.mark.parametrize(
    ("info", "name", "problem"),
    [
        (gpu(), "flash_attention_3", "flash-attn-3 is not installed"),
        (gpu(), "kernels-community/flash-attn2", "kernels is not installed"),
        (gpu(kernels=True, sinks=True), "kernels-community/flash-attn2", "attention sinks"),
        (gpu(sinks=True), "flash_attention_2", "attention sinks"),
        (gpu(kernels=True, dropout=0.1), "flash_attention_3", "dropout"),
        (gpu(kernels=True, bidirectional=True), "kernels-community/flash-attn2", "both directions"),
        (gpu(kernels=True, dtype=torch.float32), "kernels-community/vllm-flash-attn3", "bfloat16"),
        (gpu(kernels=True, capability=(8, 0)), "flash_attention_4", "Hopper"),
        (AttentionInfo("cpu", kernels=True), "kernels-community/flash-attn2", "not on cpu"),
        (AttentionInfo("mps"), "flash_attention_3", "not on mps"),
    ],
)
def test_other_flash_attentions_are_rejected_where_they_are_wrong(
    info: AttentionInfo, name: str, problem: str
) -> None:
    with raises_config("attn_implementation", name, match=problem):
        choose_attention(info, name)


def test_other_flash_attentions_are_taken_where_they_run() -> None:
    assert choose_attention(gpu(kernels=True, window=512), "flash_attention_3") == "flash_attention_3"
    assert choose_attention(gpu(flash=frozenset({"flash_attention_4"})), "flash_attention_4")
    for name in ("kernels-community/vllm-flash-attn3", "kernels-community/flash-attn4@main"):
        assert choose_attention(gpu(kernels=True, sinks=True), name) == name


def test_auto_considers_every_backend_that_batches_are_made_for() -> None:
    assert set(BEST_ON_CUDA) == set(ATTENTION)
    assert set(BEST_ELSEWHERE) < set(ATTENTION)


def test_a_window_that_no_document_is_longer_than_is_none() -> None:
    info = gpu(window=4096, dropout=0.1, flash=frozenset())
    with raises_config("attn_implementation", "auto", match="window of 4,096 tokens"):
        choose_attention(info)
    with raises_config("attn_implementation", "auto", match="up to 4,097 tokens"):
        choose_attention(info, longest=4097)
    assert choose_attention(info, longest=4096) == "sdpa"


def test_only_a_compiled_model_drops_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import LoraConfig, get_peft_model

    resets = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(True))
    lora = LoraConfig(target_modules=["q_proj"])

    def model() -> Any:
        return copy.deepcopy(tiny_model("qwen3_5", by_document=False))

    parallel = torch.nn.DataParallel
    for kept in (model(), parallel(model()), get_peft_model(model(), lora)):
        prepare(kept)
        assert not resets
    for number, compiled in enumerate(
        (
            torch.compile(model(), backend="eager"),
            parallel(torch.compile(model(), backend="eager")),
            torch.compile(get_peft_model(model(), lora), backend="eager"),
        )
    ):
        prepare(compiled)
        assert len(resets) == number + 1


@pytest.mark.parametrize("backend", ["varlen", "flash_attention_2"])
def test_gemma_3_is_rejected_by_causal_kernels(backend: str) -> None:
    with raises_config("attn_implementation", backend, match="both directions"):
        prepare(tiny_model("gemma3", seed=5), backend)


def test_an_unknown_backend_is_rejected_with_the_known_ones() -> None:
    with raises_config("attn_implementation", "fast", match=r"expected one of auto, sdpa, .*varlen"):
        prepare(tiny_model("qwen2_vl", seed=5), "fast")


def test_the_type_that_counts_is_the_one_attention_computes_in() -> None:
    model = tiny_model("qwen2_vl", seed=5)
    info = inspect_attention(model, device="cpu")
    assert (info.device, info.dtype) == ("cpu", torch.float32)
    assert inspect_attention(model, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert inspect_attention(model, autocast=torch.bfloat16).dtype == torch.bfloat16
    assert inspect_attention(model, dtype=torch.float16, autocast=torch.bfloat16).dtype == torch.bfloat16
    assert inspect_attention(model, device="mps").device == "mps"


def test_attention_dropout_is_rejected_where_it_would_be_dropped() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model = Qwen2ForCausalLM(Qwen2Config(**SMALL, attention_dropout=0.1))
    assert prepare(model) == "sdpa"
    with raises_config("attn_implementation", "varlen", match="attention_dropout=0"):
        prepare(model, "varlen")
    assert attention_of(model) == "sdpa", "what is rejected changes nothing"


def test_capped_scores_are_rejected_where_they_would_not_be_capped() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    model = Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=16, sliding_window=64))
    assert inspect_attention(model).softcap
    with raises_config("attn_implementation", "sdpa", match="no cap on scores"):
        prepare(model, "sdpa")
    assert prepare(model, longest=64) == "eager"


def test_attention_sinks_are_found_in_the_weights() -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(**SMALL, head_dim=16, num_local_experts=2, num_experts_per_tok=1)
    info = inspect_attention(GptOssForCausalLM(config))
    assert info.sinks
    assert info.window is not None
    for backend in ("varlen", "sdpa"):
        assert any("sinks" in why for why in unsupported_features(info, backend))


@pytest.mark.parametrize("kind", ["CodeGen", "Falcon"])
def test_a_class_with_attention_of_its_own_keeps_the_one_that_it_was_built_with(kind: str) -> None:
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = getattr(transformers, f"{kind}Config")(**sizes, rotary_dim=8, bos_token_id=1, eos_token_id=2)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    built = {"CodeGen": "eager", "Falcon": "sdpa"}[kind]
    assert inspect_attention(model).own == built
    for other in {"eager", "sdpa", "varlen", "flash_attention_2", "flex_attention"} - {built}:
        with raises_config("attn_implementation", other, match="was built with"):
            prepare(model, other)
    assert prepare(model) == built
    model.config._attn_implementation = "flash_attention_2"
    assert inspect_attention(model).own == ""


def test_a_sliding_window_is_kept_by_varlen_and_rejected_for_one_mask() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=32))
    assert prepare(model) == "varlen"
    with raises_config("attn_implementation", "sdpa", match="window of 32 tokens"):
        prepare(model, "sdpa")


def stateful(name: str) -> Any:
    import transformers

    if name == "Qwen3Next":
        config: Any = transformers.Qwen3NextConfig(
            **SMALL,
            head_dim=16,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=1,
            linear_num_value_heads=1,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        )
        return transformers.Qwen3NextForCausalLM(config)
    if name == "Lfm2":
        config = transformers.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"])
        return transformers.Lfm2ForCausalLM(config)
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4)
    return transformers.MambaForCausalLM(config)


@pytest.mark.parametrize("name", ["Qwen3Next", "Lfm2", "Mamba"])
def test_the_report_names_the_layers_that_carry_state(name: str) -> None:
    model = stateful(name)
    report = prepare_for_any(model, device="cpu")
    (layer,) = report.stateful_layers
    assert report.tested
    assert report.attn_implementation == "sdpa"
    assert f"1 {layer} called document by document" in str(report)
    assert prepare_for_any(model, device="cpu") == report, "a second call changes nothing"


@pytest.mark.parametrize(("kind", "first"), [("Doge", "DogeAttention"), ("TrOCR", "TrOCRLearnedPositional")])
def test_a_model_that_computes_a_packed_document_otherwise_is_rejected_with_the_layer(
    kind: str, first: str
) -> None:
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2} if kind == "TrOCR" else sizes
    config = getattr(transformers, f"{kind}Config")(vocab_size=64, **sizes)
    with raises_config("model", match=f"alone by [^,]*, first in {first}"):
        prepare(getattr(transformers, f"{kind}ForCausalLM")(config))


def test_models_that_look_at_images_across_documents_are_rejected() -> None:
    from transformers import T5Config, T5ForConditionalGeneration
    from transformers.models.mllama.configuration_mllama import MllamaTextConfig
    from transformers.models.mllama.modeling_mllama import MllamaForCausalLM

    text = MllamaTextConfig(**SMALL, cross_attention_layers=[1], pad_token_id=0)
    with pytest.raises(ConfigError, match="cross attention"):
        prepare(MllamaForCausalLM(text))
    t5 = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ConfigError, match=r"in packs and in padded rows$"):  # no advice to train it padded
        prepare(T5ForConditionalGeneration(t5))
