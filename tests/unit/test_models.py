"""Whether a model's packed rows are its samples: decided from a model, its config or its name alike."""

import copy
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import packhorse
from contract.processors import processor
from contract.tiny_models import MODELS, tiny_model
from contract.tiny_tokenizers import tokenizer
from contract.torchvision_ops import make_torchvision_importable
from count_samples import write_chats
from loader_samples import mixed_rows, texts
from packhorse.collate_fns import model_inputs
from packhorse.datasets import PreTokenizedDatasetWrapper
from packhorse.families import models, packing, probe
from packhorse.families.models import unwrap
from packhorse.families.packing import check_packable, inspect_packing, packing_problems
from packhorse.families.qwen_vl import mrope_position_ids, rope_index
from packhorse.loader.startup import inspect_model
from packhorse.types import World
from raising import raises_config

make_torchvision_importable()

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
}
MROPE = tuple(name for name in MODELS if name.startswith("qwen"))


def hybrid() -> Any:
    """A language model with a short convolution before its attention, of the size of the test tokenizers."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    words = tokenizer("qwen2_vl")
    sizes = {**SMALL, "vocab_size": len(words), "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    return Lfm2ForCausalLM(Lfm2Config(**sizes, layer_types=["conv", "full_attention"])).eval()


def decoder() -> Any:
    """A language model of attention alone."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    words = tokenizer("qwen2_vl")
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**{**SMALL, "vocab_size": len(words)})).eval()


def load(rows: Any, model: Any, **settings: Any) -> packhorse.Loader:
    return packhorse.load(
        rows,
        settings.pop("processor", None) or tokenizer_with_template(),
        model=model,
        world=World(),
        **settings,
    )


def tokenizer_with_template() -> Any:
    words = copy.deepcopy(tokenizer("qwen2_vl"))
    words.chat_template = processor("qwen2_vl").chat_template
    return words


# What is decided, and from what.


def test_a_model_without_position_ids_is_measured() -> None:
    from transformers import BloomConfig, BloomForCausalLM, MptConfig, MptForCausalLM

    bloom = BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    for given in (bloom, BloomForCausalLM(bloom)):
        assert any("BloomForCausalLM" in why for why in packing_problems(given))
    mpt = MptForCausalLM(MptConfig(vocab_size=64, d_model=32, n_layers=1, n_heads=2))
    assert packing_problems(mpt) == (), "its attention counts tokens from each other, not from the row"


def test_a_config_of_code_that_transformers_has_not_is_rejected_with_what_to_pass() -> None:
    from transformers import PretrainedConfig

    class OwnConfig(PretrainedConfig):
        model_type = "own"

    with raises_config("model", match=r"OwnConfig is not a config of transformers.*pass the model"):
        check_packable(OwnConfig())


@pytest.mark.parametrize("name", MODELS)
def test_every_tested_family_is_accepted_as_model_and_as_config(name: str) -> None:
    model = tiny_model(name)
    assert packing_problems(model) == ()
    assert packing_problems(model.config) == ()


class Recurrence(torch.nn.Module):
    """Takes the place of the attention of a layer."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> Any:
        return self.layer(hidden_states)[0], None


class Decay(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.A_log = torch.nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize(
    "layer", [torch.nn.GRU(32, 32), torch.nn.LSTMCell(32, 32), torch.nn.Conv1d(32, 32, 3), Decay()]
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_recurrence_in_a_model_of_a_tested_type_is_rejected_with_its_name(
    layer: Any, wrapped: bool
) -> None:
    from peft import LoraConfig, get_peft_model

    for model in (decoder(), hybrid()):
        model.model.layers[1].self_attn = Recurrence(layer)
        given = get_peft_model(model, LoraConfig(target_modules=["w1", "up_proj"])) if wrapped else model
        (why,) = packing_problems(given)
        name = rf"{type(model).__name__}: model\.layers\.1\.self_attn\.layer \({type(layer).__name__}\)"
        assert re.match(f"{name} carries state along the row", why)
        for rejects in (
            lambda given=given: packhorse.prepare(given, device="cpu"),
            lambda given=given: check_packable(given),
        ):
            with raises_config("model", match=f"{name}.*packhorse parity --model"):
                rejects()


def test_a_convolution_of_single_tokens_is_no_recurrence() -> None:
    model = decoder()
    model.model.layers[1].mlp = torch.nn.Conv1d(32, 32, 1)
    assert packing_problems(model) == ()


@pytest.fixture
def renamed_layer(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of LFM2's convolution in another version of transformers."""
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

    monkeypatch.setattr(probe, "_RESULTS", {})
    Lfm2ShortConv.__name__ = "Lfm2Convolution"
    yield "Lfm2Convolution"
    Lfm2ShortConv.__name__ = "Lfm2ShortConv"


def test_layers_that_are_renamed_in_another_version_are_found_by_measuring(renamed_layer: str) -> None:
    model = hybrid()
    for given in (model, model.config):
        packing = inspect_packing(given)
        assert packing.layers == (renamed_layer,)
        assert not packing.tested
    with raises_config("model", match=renamed_layer):
        check_packable(model)
    packhorse.prepare(model, device="cpu")
    check_packable(model)


def test_a_model_of_a_hybrid_type_without_its_layers_is_measured() -> None:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    model = Lfm2ForCausalLM(Lfm2Config(**SMALL, layer_types=["full_attention"] * 2))
    packing = inspect_packing(model)
    assert (packing.problems, packing.layers, packing.tested) == ((), (), False)


# Hybrid models leak until they are prepared, and every entry point notices.

UNPREPARED = r"Lfm2ShortConv.*state.*packhorse\.prepare\(model\)"


def test_a_hybrid_model_leaks_from_document_to_document_until_it_is_prepared() -> None:
    plain, model, prepared = decoder(), hybrid(), hybrid()
    report = packhorse.prepare(prepared, device="cpu")
    assert report.stateful_layers == {"Lfm2ShortConv": 1}
    assert "1 Lfm2ShortConv called document by document" in str(report)
    ids = torch.randint(4, 200, (1, 24), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[:, :12] = ids[:, :12].flip(1)
    seen = torch.zeros(1, 1, 24, 24, dtype=torch.bool)
    for start in (0, 12):
        seen[..., start : start + 12, start : start + 12] = torch.ones(12, 12).tril().bool()
    positions = torch.arange(12).repeat(2)[None]
    moved = []
    for one in (plain, model, prepared):
        with torch.no_grad():
            before, after = (
                one(row, attention_mask=seen, position_ids=positions, use_cache=False).logits[:, 12:]
                for row in (ids, other)
            )
        moved.append(float((before - after).abs().max()))
    assert moved[0] == 0.0, "the mask keeps documents apart"
    assert moved[1] > 0.1, "the convolution carries document 1 into document 2"
    assert moved[2] == 0.0, "the convolution sees one document at a time"


def test_the_loader_rejects_a_hybrid_model_that_is_not_prepared() -> None:
    model = hybrid()
    with raises_config("model", match=UNPREPARED):
        load(texts(8), model, pack_size=256)
    assert len(list(load(texts(8), model, mode="pad"))) > 0, "padded batches are right"
    packhorse.prepare(model, device="cpu")
    batch = next(iter(load(texts(8), model, pack_size=256)))
    assert model_inputs(batch, model)


def test_packs_for_a_hybrid_model_need_the_prepared_model_itself(tmp_path: Path) -> None:
    model = hybrid()
    model.config.save_pretrained(tmp_path)
    for given in (tmp_path, model.config):
        with raises_config("model", match=r"prepare\(model\) first, and pass that model: packhorse.load"):
            load(texts(8), given, pack_size=256)
    assert list(load(texts(8), model.config, mode="pad"))
    packhorse.prepare(model, device="cpu")
    assert list(load(texts(8), model, pack_size=256))


@pytest.mark.parametrize("mode", ["pack", "pad"])
def test_an_encoder_decoder_is_rejected_also_in_padded_batches(mode: str) -> None:
    from transformers import T5Config

    with raises_config("model", match=r"encoder-decoder \(t5\), whose encoder would see the answers"):
        load(texts(8), T5Config(), mode=mode)


def count_calls(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[tuple[Any, ...]]:
    """Let a function of a module record the arguments of its calls."""
    function, calls = getattr(module, name), list[tuple[Any, ...]]()

    def record(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return function(*arguments, **options)

    monkeypatch.setattr(module, name, record)
    return calls


def test_a_model_that_is_given_by_its_folder_is_opened_and_inspected_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaConfig

    LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    opened = count_calls(monkeypatch, models, "open_config")
    inspected = count_calls(monkeypatch, packing, "inspect_packing")
    info = inspect_model(str(tmp_path), packed=True)
    assert (len(opened), len(inspected)) == (1, 1)
    assert (info.name, info.no_boundaries) == ("LlamaConfig", "")


@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
def test_checking_a_batch_inspects_the_model_once(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid()
    packhorse.prepare(model, backend, device="cpu")
    batch = next(iter(load(texts(8), model, pack_size=256)))
    assert ("cu_seq_lens_q" in batch) == (backend == "varlen")
    inspected = count_calls(monkeypatch, packing, "inspect_packing")
    model_inputs(batch, model)
    assert len(inspected) == 1


def test_a_hybrid_model_that_is_not_prepared_is_rejected_in_any_wrapper(tmp_path: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    batch = next(iter(load(texts(8), "unchecked", pack_size=256)))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for wrap in (
            torch.compile,
            DistributedDataParallel,
            lambda model: fully_shard(model, mesh=mesh),
            lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
            lambda model: torch.compile(DistributedDataParallel(model)),
        ):
            wrapped = wrap(hybrid())
            for reject in (
                lambda wrapped=wrapped: load(texts(8), wrapped, pack_size=256),
                lambda wrapped=wrapped: model_inputs(batch, wrapped),
            ):
                with raises_config("model", match=UNPREPARED):
                    reject()
            packhorse.prepare(wrapped, device="cpu")
            assert "input_ids" in model_inputs(batch, wrapped)
    finally:
        torch.distributed.destroy_process_group()


def test_model_inputs_reject_packs_for_a_hybrid_model_that_is_not_prepared() -> None:
    model = hybrid()
    batch = next(iter(load(texts(8), "unchecked", pack_size=256)))
    with raises_config("model", match=UNPREPARED):
        model_inputs(batch, model)
    assert "input_ids" in model_inputs(next(iter(load(texts(8), None, mode="pad"))), model)
    packhorse.prepare(model, device="cpu")
    assert "input_ids" in model_inputs(batch, model)


def test_parity_names_the_layers_of_a_hybrid_model_first_until_it_is_prepared() -> None:
    from packhorse.tools.parity import check_parity

    model = hybrid()
    report = check_parity(model, tokenizer_with_template(), texts(4))
    assert not report.ok
    (cause,) = report.causes
    assert "Lfm2ShortConv" in cause
    assert "packhorse.prepare(model)" in cause
    packhorse.prepare(model, device="cpu")
    report = check_parity(model, tokenizer_with_template(), texts(4))
    assert report.ok, report.describe()
    assert report.gradients is not None


def test_parity_finds_documents_that_mix_by_the_sum_of_their_tokens() -> None:
    from packhorse.tools.parity import check_parity

    model = decoder()
    model.model.layers[0].register_forward_pre_hook(
        lambda module, arguments: (arguments[0] + arguments[0].cumsum(1), *arguments[1:])
    )
    report = check_parity(model, tokenizer_with_template(), texts(4))
    (cause,) = report.causes
    assert cause.startswith("attention leaks: pack 0, document 2 ")
    assert "another layer of the model mixes the tokens of a row" in cause


def test_a_model_type_without_a_test_is_measured_on_a_tiny_copy() -> None:
    from transformers import DogeConfig, DogeForCausalLM, FalconConfig, FalconForCausalLM

    words = tokenizer_with_template()
    doge = DogeForCausalLM(DogeConfig(**{**SMALL, "vocab_size": len(words)}))
    with raises_config("model", match="DogeForCausalLM: document 2 of a pack differs"):
        load(texts(8), doge, pack_size=256)
    falcon = FalconForCausalLM(FalconConfig(**{**SMALL, "vocab_size": len(words)}))
    assert list(load(texts(8), falcon, pack_size=256))
    measured = inspect_packing(falcon)
    assert not measured.tested
    assert measured.layers == ()
    assert "measured on a tiny copy" in str(packhorse.prepare(falcon, device="cpu"))


def test_the_trainer_rejects_a_hybrid_model_that_is_not_prepared(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from packhorse.integrations.transformers import TrainFromLoader

    class PackedTrainer(TrainFromLoader, Trainer):
        pass

    args = TrainingArguments(str(tmp_path), report_to=[], disable_tqdm=True, use_cpu=True)
    checked, unchecked = (load(texts(8), model, pack_size=256) for model in (decoder(), "unchecked"))
    with raises_config("model", match=UNPREPARED):
        PackedTrainer(hybrid(), args, loader=checked)
    PackedTrainer(hybrid(), args, loader=unchecked)
    prepared = hybrid()
    packhorse.prepare(prepared, device="cpu")
    PackedTrainer(prepared, args, loader=checked)


def test_accelerate_rejects_a_hybrid_model_that_is_not_prepared() -> None:
    from accelerate import Accelerator

    from packhorse.integrations.accelerate import attach, steps

    accelerator = Accelerator(cpu=True)
    loader = load(texts(8), decoder(), pack_size=256)
    attach(accelerator, loader)
    accelerator.prepare(hybrid())
    for rejected in (lambda: attach(accelerator, loader), lambda: next(steps(accelerator, loader))):
        with raises_config("model", match=UNPREPARED):
            rejected()
    accelerator.free_memory()


def test_lightning_rejects_a_hybrid_model_that_is_not_prepared(tmp_path: Path) -> None:
    import lightning.pytorch as lightning

    from packhorse.integrations.lightning import LoaderDataModule

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = hybrid()

        def training_step(self, *_: Any) -> Any:
            raise AssertionError("training has begun")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, **quiet)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with raises_config("model", match=UNPREPARED):
            trainer.fit(Module(), LoaderDataModule(load(texts(8), decoder(), pack_size=256)))


@pytest.mark.parametrize("command", ["parity", "plan"])
def test_commands_reject_a_model_that_cannot_be_packed_by_its_config(command: str, tmp_path: Path) -> None:
    from transformers import DogeConfig
    from typer.testing import CliRunner

    from packhorse.cli.app import app

    meta = write_chats(tmp_path, 4)
    folder = tmp_path / "model"  # no weights
    processor("qwen2_vl").save_pretrained(folder)
    DogeConfig(**SMALL).save_pretrained(folder)
    arguments = [command, str(meta), "--model", str(folder), "--processor", str(folder)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "DogeForCausalLM" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.glob("*.phplan"))


# The model in the forms in which it can be given.


def test_wrappers_are_looked_through(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    model = copy.deepcopy(tiny_model("qwen2_vl"))
    right = next(iter(load(mixed_rows(8), model, processor=processor("qwen2_vl"), pack_size=256)))[
        "position_ids"
    ]
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        adapted = get_peft_model(copy.deepcopy(model), LoraConfig(target_modules=["q_proj"]))
        wrapped = {
            "compiled": torch.compile(model),
            "ddp": DistributedDataParallel(model),
            "peft": adapted,
            "ddp of peft": DistributedDataParallel(adapted),
            "compiled peft": torch.compile(adapted),
            "fsdp": FullyShardedDataParallel(copy.deepcopy(model), device_id=torch.device("cpu")),
        }
        for name, outer in wrapped.items():
            assert type(unwrap(outer)) is type(model), name
            assert packing_problems(outer) == (), name
            loader = load(mixed_rows(8), outer, processor=processor("qwen2_vl"), pack_size=256)
            assert torch.equal(next(iter(loader))["position_ids"], right), name
    finally:
        torch.distributed.destroy_process_group()


def test_virtual_tokens_of_prompt_learning_are_rejected() -> None:
    from peft import PrefixTuningConfig, get_peft_model

    adapted = get_peft_model(decoder(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with raises_config("model", match="PrefixTuningConfig adds its virtual tokens"):
        load(texts(8), adapted, pack_size=256)


# Packs of hybrid models need the model itself.
@pytest.mark.parametrize("name", [name for name in MROPE if not name.startswith("qwen3_5")])
def test_positions_from_a_config_or_its_folder_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    model.config.save_pretrained(tmp_path)
    batches = [
        list(load(mixed_rows(8), given, processor=processor(name), pack_size=512))
        for given in (model, model.config, tmp_path, str(tmp_path))
    ]
    for others in batches[1:]:
        for one, other in zip(batches[0], others, strict=True):
            assert one["position_ids"].shape == (3, *one["input_ids"].shape)
            assert other["position_ids"].device.type == "cpu"
            assert torch.equal(one["position_ids"], other["position_ids"])


def test_positions_of_qwen3_omni_from_its_config_are_those_of_the_model() -> None:
    from transformers import Qwen3OmniMoeThinkerConfig, Qwen3OmniMoeThinkerForConditionalGeneration

    made = processor("qwen3_omni")
    ids = made.tokenizer.convert_tokens_to_ids
    text = {**SMALL, "head_dim": 16, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    vision = {"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    audio = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
    tokens = {
        f"{kind}_token_id": ids(token)
        for kind, token in {
            "image": made.image_token,
            "video": made.video_token,
            "audio": made.audio_token,
            "vision_start": made.vision_bos_token,
            "audio_start": made.audio_bos_token,
        }.items()
    }
    config = Qwen3OmniMoeThinkerConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config={**vision, "deepstack_visual_indexes": [0]},
        audio_config=audio,
        **tokens,
    )
    model = Qwen3OmniMoeThinkerForConditionalGeneration(config)
    samples = PreTokenizedDatasetWrapper(mixed_rows(12), made)
    for index in range(12):
        sample = samples.load(index)
        right, *_ = model.get_rope_index(
            sample["input_ids"][None],
            sample.get("image_grid_thw"),
            sample.get("video_grid_thw"),
            sample["attention_mask"][None],
            second_per_grids=sample.get("video_second_per_grid"),
        )
        for given in (model, config):
            found = rope_index(given)
            assert found is not None
            assert torch.equal(mrope_position_ids(sample, found), right[:, 0])
