"""A model whose packed rows nothing proves right is trained once the user allows it, prepared like others."""

import copy
import json
import os
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import packhorse
from contract.processors import processor
from contract.tiny_models import tiny_model
from contract.torchvision_ops import make_torchvision_importable
from count_samples import write_chats
from loader_samples import texts
from packhorse import model_inputs, prepare
from packhorse.cli.app import app
from packhorse.families.packing import PACKABLE, check_packable, inspect_packing
from packhorse.types import World
from raising import raises_config

make_torchvision_importable()

FAMILY = "llava_onevision"
STEPS = r"packhorse parity --model.*packhorse\.prepare\(model, allow_unproven=True\).*load\(…, model=model\)"


@cache
def hybrid_llava() -> Any:
    """A model that takes images, of a class without a test, whose decoder has a short convolution."""
    from transformers import CLIPVisionConfig, Lfm2Config, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    decoder = {"num_key_value_heads": 1, "layer_types": ["conv", "full_attention"], "initializer_range": 0.3}
    ids = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    words = len(processor(FAMILY).tokenizer)
    config = LlavaConfig(
        text_config=Lfm2Config(**sizes, **decoder, **ids, vocab_size=words, num_hidden_layers=2),
        vision_config=CLIPVisionConfig(**sizes, num_hidden_layers=1, image_size=28, patch_size=14),
        image_token_index=processor(FAMILY).image_token_id,
    )
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(config).eval()


def unproven() -> Any:
    return copy.deepcopy(hybrid_llava())


def prepared_model() -> Any:
    model = unproven()
    prepare(model, device="cpu", allow_unproven=True)
    return model


def load(model: Any, **settings: Any) -> packhorse.Loader:
    return packhorse.load(
        texts(8), processor(FAMILY), model=model, world=World(), pack_size=256, num_workers=0, **settings
    )


def change_of_document_2(model: Any) -> float:
    """How much document 2 of a row changes when document 1 is replaced."""
    ids = torch.randint(5, 200, (1, 20), generator=torch.Generator().manual_seed(1))
    other = torch.cat([ids[:, :10].flip(1), ids[:, 10:]], 1)
    numbers = torch.arange(2).repeat_interleave(10)
    inputs = {
        "attention_mask": (numbers[:, None] == numbers).tril()[None, None],
        "position_ids": torch.arange(10).repeat(2)[None],
        "use_cache": False,
    }
    with torch.no_grad():
        before, after = (model(input_ids=row, **inputs).logits[:, 10:] for row in (ids, other))
    return float((before - after).abs().max())


def test_a_model_without_a_proof_is_rejected_with_the_steps_to_train_it() -> None:
    model = unproven()
    for call in (lambda: prepare(model, device="cpu"), lambda: load(model), lambda: load(model.config)):
        with raises_config("model", match=STEPS):
            call()
    assert change_of_document_2(model) > 0.1, "nothing was prepared"


def test_an_unproven_model_keeps_documents_apart_once_the_user_allows_it() -> None:
    model = unproven()
    report = prepare(model, device="cpu", allow_unproven=True)
    assert not report.proven
    assert "no test shows that its media are; packhorse parity measures it)" in str(report)
    assert "model=LlavaForConditionalGeneration (not proven)" in repr(load(model))
    assert report.stateful_layers == {"Lfm2ShortConv": 1}
    assert "not proven" in str(report)
    assert change_of_document_2(model) == 0.0
    assert prepare(model, device="cpu").stateful_layers == report.stateful_layers, "it stays allowed"


def test_every_entry_point_accepts_the_very_model_that_was_prepared(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    from packhorse.integrations.accelerate import attach
    from packhorse.integrations.transformers import TrainFromLoader

    class PackedTrainer(TrainFromLoader, Trainer):
        pass

    model, other = prepared_model(), unproven()
    loader = load(model)
    batch = next(iter(loader))
    assert "input_ids" in model_inputs(batch, model)
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(target_modules=["q_proj"]))
    assert "input_ids" in model_inputs(batch, adapted)
    args = TrainingArguments(str(tmp_path), report_to=[], disable_tqdm=True, use_cpu=True)
    PackedTrainer(model, args, loader=loader)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    attach(accelerator, loader)
    accelerator.free_memory()
    for rejected in (lambda: model_inputs(batch, other), lambda: PackedTrainer(other, args, loader=loader)):
        with raises_config("model", match=STEPS):
            rejected()
    accelerator.prepare(other)
    with raises_config("model", match=STEPS):
        attach(accelerator, loader)
    accelerator.free_memory()


def test_lightning_accepts_an_unproven_model_that_was_prepared(tmp_path: Path) -> None:
    import lightning.pytorch as lightning

    from lightning_module import PackedModule
    from packhorse.integrations.lightning import LoaderDataModule

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options = {"max_epochs": 1, "accelerator": "cpu", "default_root_dir": tmp_path, **quiet}
    model = prepared_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning.Trainer(**options).fit(PackedModule(model), LoaderDataModule(load(model)))
        with raises_config("model", match=STEPS):
            lightning.Trainer(**options).fit(PackedModule(unproven()), LoaderDataModule(load(model)))


def test_an_allowed_model_that_gets_another_decoder_is_rejected() -> None:
    model = prepared_model()
    model.model.language_model = unproven().model.language_model
    with raises_config("model", match=r"Lfm2ShortConv.*packhorse\.prepare\(model\)"):
        check_packable(model)


def test_a_model_with_a_known_problem_is_not_prepared_even_if_unproven_ones_are_allowed() -> None:
    from transformers import DogeConfig, DogeForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = DogeForCausalLM(DogeConfig(vocab_size=64, num_hidden_layers=1, **sizes))
    assert inspect_packing(model).known
    with raises_config("model", match="DogeForCausalLM: document 2 of a pack differs"):
        prepare(model, device="cpu", allow_unproven=True)


def test_a_model_that_could_not_be_prepared_is_not_allowed_either() -> None:
    model = unproven()
    with raises_config("attn_implementation", "flex_attention", match="no backward pass"):
        prepare(model, "flex_attention", device="cpu", allow_unproven=True)
    with raises_config("model", match=STEPS):
        check_packable(model)


@pytest.mark.parametrize("wrapper", ["peft", "compile"])
def test_an_unproven_model_inside_a_wrapper_is_prepared(wrapper: str) -> None:
    from peft import LoraConfig, get_peft_model

    model = unproven()
    wrapped = (
        torch.compile(model)
        if wrapper == "compile"
        else get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    )
    prepare(wrapped, device="cpu", allow_unproven=True)
    check_packable(wrapped)


def test_packs_for_an_unproven_model_are_planned_without_training_it(tmp_path: Path) -> None:
    hybrid_llava().config.save_pretrained(tmp_path / "model")
    processor(FAMILY).save_pretrained(tmp_path / "processor")
    options = ("--model", str(tmp_path / "model"), "--processor", str(tmp_path / "processor"))
    result = CliRunner().invoke(app, ["plan", str(write_chats(tmp_path, 4)), *options])
    assert result.exit_code == 0, result.output


# Code of the Hub.

REMOTE_CODE = """
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class RemoteConfig(PreTrainedConfig):
    model_type = "remote"

    def __init__(self, vocab_size=128, hidden_size=32, num_hidden_layers=2, recurrence="", **options):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.recurrence = recurrence  # "layer", "model" or none
        super().__init__(**options)


def decay(states):
    steps = torch.arange(states.shape[1])
    weights = (0.9 ** (steps[:, None] - steps)).tril()
    return weights @ states


class RemoteAttention(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(size, 3 * size), torch.nn.Linear(size, size)

    def forward(self, states, mask):
        query, key, value = self.qkv(states)[:, None].chunk(3, -1)
        causal = mask is None and states.shape[1] > 1
        return self.out(scaled_dot_product_attention(query, key, value, mask, is_causal=causal)[:, 0])


class RemoteRecurrence(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.input = torch.nn.Linear(size, size)

    def forward(self, states):
        return decay(self.input(states))


class RemoteModel(PreTrainedModel, GenerationMixin):
    config_class = RemoteConfig
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        size, count = config.hidden_size, config.num_hidden_layers
        self.embedding = torch.nn.Embedding(config.vocab_size, size)
        self.positions = torch.nn.Embedding(1024, size)
        self.attention = torch.nn.ModuleList(RemoteAttention(size) for _ in range(count))
        recurrent = count if config.recurrence == "layer" else 0
        self.recurrence = torch.nn.ModuleList(RemoteRecurrence(size) for _ in range(recurrent))
        self.head = torch.nn.Linear(size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=False):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = (attention_mask[:, None, None] != 0).expand(-1, 1, input_ids.shape[1], -1).tril()
        states = self.embedding(input_ids) + self.positions(position_ids)
        if self.config.recurrence == "model":
            states = decay(states)
        for layer in self.attention:
            states = states + layer(states, attention_mask)
        for layer in self.recurrence:
            states = states + layer(states)
        return CausalLMOutput(logits=self.head(states))
"""


def remote_model(tmp_path: Path, recurrence: str) -> Any:
    """A model that is loaded from a folder with code of its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path / "remote"
    folder.mkdir()
    (folder / "modeling_remote.py").write_text(REMOTE_CODE)
    names = {"AutoConfig": "RemoteConfig", "AutoModelForCausalLM": "RemoteModel"}
    settings = {
        "model_type": "remote",
        "auto_map": {kind: f"modeling_remote.{name}" for kind, name in names.items()},
        "architectures": ["RemoteModel"],
        "vocab_size": len(processor(FAMILY).tokenizer),
        "recurrence": recurrence,
        "initializer_range": 0.3,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    AutoModelForCausalLM.from_config(config, trust_remote_code=True).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules.")
    return model.eval()


def test_remote_code_with_a_recurrence_is_measured_and_called_document_by_document(tmp_path: Path) -> None:
    model = remote_model(tmp_path, "layer")
    packing = inspect_packing(model)
    assert (packing.problems, packing.layers, packing.tested) == ((), ("RemoteRecurrence",), False)
    with raises_config("model", match=r"RemoteRecurrence of RemoteModel.*packhorse\.prepare\(model\)"):
        load(model)
    assert change_of_document_2(model) > 0.1
    report = prepare(model, device="cpu")
    assert report.stateful_layers == {"RemoteRecurrence": 2}
    assert change_of_document_2(model) == 0.0
    assert "input_ids" in model_inputs(next(iter(load(model))), model)


def test_remote_code_that_mixes_documents_outside_of_its_layers_is_rejected(tmp_path: Path) -> None:
    model = remote_model(tmp_path, "model")
    assert change_of_document_2(model) > 0.1
    for call in (lambda: prepare(model, device="cpu"), lambda: load(model)):
        with raises_config(
            "model", match="RemoteModel: document 2 of a pack changes by .* when document 1 is"
        ):
            call()


def test_remote_code_with_attention_alone_is_measured_and_accepted(tmp_path: Path) -> None:
    model = remote_model(tmp_path, "")
    packing = inspect_packing(model)
    assert (packing.problems, packing.layers, packing.tested) == ((), (), False)
    assert packing.no_boundaries, "its code takes no boundaries of documents"
    with raises_config("attn_implementation", "varlen"):
        prepare(model, "varlen", device="cpu")
    assert prepare(model, device="cpu").attn_implementation == "sdpa"
    assert change_of_document_2(model) == 0.0
    assert "attention_mask" in model_inputs(next(iter(load(model))), model)


# The command, which is the first of the steps.


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hybrid model that takes images, as if no test covered it, with its processor."""
    monkeypatch.setattr("packhorse.families.packing.PACKABLE", PACKABLE - {"qwen3_5"})
    tiny_model("qwen3_5").save_pretrained(tmp_path / "model")
    processor("qwen3_5").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def parity(tmp_path: Path, model: Path, *options: str) -> Any:
    arguments = ["parity", str(write_chats(tmp_path, 4)), "--model", str(model), "--samples", "4", *options]
    return CliRunner().invoke(app, arguments)


def test_parity_says_what_it_prepared_and_what_to_call_for_training(tmp_path: Path, saved: Path) -> None:
    result = parity(tmp_path, saved)
    assert result.exit_code == 0, result.output
    assert "sdpa: packed equals unpacked. 4 documents" in result.stdout
    assert "prepared: 1 Qwen3_5GatedDeltaNet called document by document (--stateful auto)" in result.stdout
    steps = "call packhorse.prepare(model, allow_unproven=True), then packhorse.load(…, model=model)"
    assert f"no test of packhorse covers this model: for training, {steps}" in result.stdout
    result = parity(tmp_path, saved, "--json", "--attn-implementation", "sdpa", "--stateful", "per_document")
    report = json.loads(result.stdout)
    assert report["stateful_layers"] == {"Qwen3_5GatedDeltaNet": "per_document"}
    assert report["proven"] is False


def test_parity_names_the_one_attention_that_was_compared(tmp_path: Path, saved: Path) -> None:
    result = parity(tmp_path, saved, "--attn-implementation", "eager", "--stateful", "per_document")
    call = "packhorse.prepare(model, 'eager', allow_unproven=True, stateful='per_document')"
    assert call in result.stdout, result.output


def test_parity_of_a_tested_hybrid_model_says_that_training_prepares_it(tmp_path: Path) -> None:
    from transformers import Lfm2ForCausalLM

    Lfm2ForCausalLM(hybrid_llava().config.text_config).save_pretrained(tmp_path / "model")
    processor(FAMILY).save_pretrained(tmp_path / "processor")
    options = ("--processor", str(tmp_path / "processor"), "--attn-implementation", "sdpa")
    result = parity(tmp_path, tmp_path / "model", *options)
    assert result.exit_code == 0, result.output
    assert "for training, call packhorse.prepare(model) before packhorse.load" in result.stdout


def test_parity_measures_the_kernels_that_training_would_use(tmp_path: Path) -> None:
    from transformers import Lfm2ForCausalLM

    Lfm2ForCausalLM(hybrid_llava().config.text_config).save_pretrained(tmp_path / "model")
    processor(FAMILY).save_pretrained(tmp_path / "processor")
    kernels = (
        Path(__file__).parents[1] / "contract" / "kernels" / "convolution"
    )  # what causal-conv1d has, in PyTorch
    path = os.pathsep.join([str(kernels), os.environ.get("PYTHONPATH", "")])
    arguments = ["--model", tmp_path / "model", "--processor", tmp_path / "processor", "--samples", "4"]
    arguments += ["--stateful", "boundaries"]
    command = [sys.executable, "-m", "packhorse", "parity", write_chats(tmp_path, 4), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert run.returncode == 0, run.stderr + run.stdout
    called = "1 Lfm2ShortConv called with the boundaries of documents"
    assert f"prepared: {called} (--stateful boundaries)" in run.stdout
    assert "call packhorse.prepare(model, stateful='boundaries') before packhorse.load" in run.stdout


def test_parity_rejects_another_way_to_call_layers_before_anything_is_loaded(tmp_path: Path) -> None:
    result = parity(tmp_path, tmp_path / "none", "--stateful", "kernels")
    assert result.exit_code == 2
    expected = "--stateful kernels: expected one of auto, per_document, boundaries"
    assert result.stderr == f"packhorse parity: {expected}\n"


def test_parity_does_not_compare_an_attention_that_prepare_rejects_unless_requested(tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    words = processor(FAMILY)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "vocab_size": len(words.tokenizer)}
    torch.manual_seed(0)
    MambaForCausalLM(MambaConfig(**sizes, pad_token_id=0)).save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "processor")
    options = ("--processor", str(tmp_path / "processor"), "--json")
    report = json.loads(parity(tmp_path, tmp_path / "model", *options).stdout)
    assert report["passed"]
    assert [one["attention"] for one in report["reports"]] == ["sdpa", "eager"]
    assert "does not pass them on" in report["not_possible"]["varlen"]
    options += ("--attn-implementation", "varlen")
    result = parity(tmp_path, tmp_path / "model", *options)
    assert result.exit_code == 1, result.output
    assert not json.loads(result.stdout)["passed"]


def test_parity_of_a_model_that_cannot_be_run_is_one_line(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    words = processor(FAMILY)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": len(words.tokenizer)}
    model = GPT2LMHeadModel(GPT2Config(**sizes, n_positions=4))  # fewer than a row has tokens
    model.save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "processor")
    result = parity(tmp_path, tmp_path / "model", "--processor", str(tmp_path / "processor"))
    assert result.exit_code == 2
    assert result.stderr.startswith("packhorse parity: GPT2LMHeadModel cannot be run with sdpa: IndexError: ")
    assert len(result.stderr.splitlines()) == 1


def test_parity_fails_if_the_model_raises_with_one_of_several_backends(tmp_path: Path) -> None:
    """As a folder with its own code, whose attention mask must not be bool."""
    words = processor(FAMILY)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "modeling_additive.py").write_text(ADDITIVE)
    config = {
        **sizes,
        "model_type": "llama",
        "vocab_size": len(words.tokenizer),
        "architectures": ["AdditiveLlama"],
        "auto_map": {"AutoModelForCausalLM": "modeling_additive.AdditiveLlama"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    words.save_pretrained(tmp_path / "processor")
    options = (
        "--processor",
        str(tmp_path / "processor"),
        "--random-weights",
        "--trust-remote-code",
        "--json",
    )
    result = parity(tmp_path, folder, *options)
    assert result.exit_code == 1, result.output
    report = json.loads(result.stdout)
    assert not report["passed"]
    assert "AdditiveLlama cannot be run with sdpa: ValueError: a mask of bool" in report["failed"]["sdpa"]
    assert [one["ok"] for one in report["reports"] if one["attention"] == "eager"] == [True]


ADDITIVE = """
from transformers import LlamaForCausalLM

class AdditiveLlama(LlamaForCausalLM):
    def forward(self, *arguments, attention_mask=None, **options):
        if attention_mask is not None and attention_mask.dtype.itemsize == 1:
            raise ValueError("a mask of bool")
        return super().forward(*arguments, attention_mask=attention_mask, **options)
"""
