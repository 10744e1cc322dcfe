"""TRL's SFTTrainer with a loader: what it trains, evaluates, saves, resumes and rejects."""

import copy
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import packhorse
from contract.processors import processor
from contract.tiny_models import tiny_model
from contract.torchvision_ops import make_torchvision_importable
from loader_samples import texts
from noise_floor import largest_difference, noise_floor
from packhorse.collate_fns import model_inputs
from packhorse.errors import MissingDependency
from packhorse.integrations.loss import count_supervised, token_loss
from packhorse.integrations.transformers import LOADER_STATE
from packhorse.types import World
from raising import raises_config

make_torchvision_importable()
pytestmark = pytest.mark.needs_trl

NAME = "qwen2_5_vl"
RATE = 0.05


def rows(count: int = 12) -> list[dict[str, Any]]:
    examples = []
    for n in range(count):
        question: list[dict[str, Any]] = [{"type": "text", "text": f"What is number {n}?"}]
        if n % 2:
            question.insert(0, {"type": "image", "image": Image.new("RGB", (60 + 8 * n, 60), "tan")})
        turns = [("user", question), ("assistant", [{"type": "text", "text": "A chart. " * (1 + n % 4)}])]
        examples.append({"conversation": [{"role": role, "content": parts} for role, parts in turns]})
    return examples


def make_model(attention: str = "sdpa") -> Any:
    model = copy.deepcopy(tiny_model(NAME))
    packhorse.prepare(model, attention)
    return model


def make_loader(model: Any, count: int = 12, **settings: Any) -> packhorse.Loader:
    plain: dict[str, Any] = {"pack_size": 192, "gradient_accumulation_steps": 2, "world": World()}
    return packhorse.load(rows(count), processor(NAME), model=model, **{**plain, **settings})


def make_trainer(folder: Path, model: Any = None, *, lora: bool = False, **arguments: Any) -> Any:
    """A trainer with plain SGD in float32, so that a loop of a few lines does the same."""
    from peft import LoraConfig
    from trl import SFTConfig

    from packhorse.integrations.trl import SFTTrainer

    trained = make_model() if model is None or isinstance(model, str) else model
    given = ("train_dataset", "formatting_func", "data_collator", "compute_metrics", "eval_dataset")
    options = {name: arguments.pop(name) for name in given if name in arguments}
    if lora:
        options["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    plain: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
        "optim": "sgd",
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0,
        "logging_steps": 1,
        "save_steps": 1,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    config = SFTConfig(str(folder), **{**plain, **arguments})
    return SFTTrainer(model or trained, config, loader=make_loader(trained), **options)


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def plain_loop(attention: str = "sdpa", mean_of_means: bool = False) -> list[float]:
    model = make_model(attention)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    found = []
    for group in packhorse.grouped(make_loader(model), 2):
        tokens, total = packhorse.count_supervised(group), 0.0
        for batch in group:
            share = 2 * packhorse.count_supervised([batch]) if mean_of_means else tokens
            loss = packhorse.token_loss(model(**model_inputs(batch)).logits, batch["labels"], share)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found


def test_the_losses_are_those_of_a_plain_loop_over_packs_with_images(tmp_path: Path, parity: Any) -> None:
    trainer = make_trainer(tmp_path, save_strategy="no")
    assert any("pixel_values" in batch for batch in make_loader(trainer.model))
    assert any(len(row) > 1 for batch in make_loader(trainer.model) for row in batch.info.document_keys)
    trainer.train()
    expected = plain_loop()
    assert len(expected) > 2
    parity.check(
        "loss",
        largest_difference(losses(trainer), expected),
        noise_floor(expected, plain_loop("eager")),
        largest_difference(plain_loop(mean_of_means=True), expected),
    )
    assert trainer.loader.epoch_stats.delivered == 12


@pytest.mark.parametrize("lora", [False, True])
def test_a_resumed_run_has_the_losses_of_the_whole_one(tmp_path: Path, lora: bool) -> None:
    whole = make_trainer(tmp_path, lora=lora, save_total_limit=None)
    whole.train()
    checkpoint = tmp_path / "checkpoint-1"
    assert json.loads((checkpoint / LOADER_STATE).read_text())["segments"] == [[1, 1, 2, 2]]
    assert (checkpoint / ("adapter_model.safetensors" if lora else "model.safetensors")).exists()
    resumed = make_trainer(tmp_path, lora=lora)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert losses(resumed) == losses(whole)
    assert resumed.loader.epoch_stats.delivered == 12


def test_an_adapter_trains_nothing_else(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, lora=True, save_strategy="no")
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    changed = {
        name for name, weight in trainer.model.named_parameters() if not torch.equal(weight, before[name])
    }
    assert changed
    assert all("lora_" in name for name in changed)


def test_validation_rows_are_evaluated_while_training(tmp_path: Path) -> None:
    model = make_model()
    validation = make_loader(model, 5, gradient_accumulation_steps=1)
    trainer = make_trainer(
        tmp_path,
        model,
        eval_dataset={"charts": validation},
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="no",
        max_steps=2,
    )
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "eval_charts_loss" in entry]
    assert [entry["step"] for entry in entries] == [1, 2]
    assert entries[-1]["eval_charts_loss"] == packhorse.evaluate(model, validation).loss
    assert entries[0]["eval_charts_loss"] > entries[-1]["eval_charts_loss"]
    assert trainer.processing_class is trainer.loader.processor


def test_trls_default_settings_train(tmp_path: Path) -> None:
    """Mixed precision, gradient checkpointing and a learning rate schedule."""
    from trl import SFTConfig

    from packhorse.integrations.trl import SFTTrainer

    model = make_model()
    config = SFTConfig(
        str(tmp_path), gradient_accumulation_steps=2, max_steps=2, use_cpu=True, report_to=[], logging_steps=1
    )
    trainer = SFTTrainer(model, config, loader=make_loader(model))
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(plain_loop()[0], rel=0.02)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("packing", True),
        ("padding_free", True),
        ("assistant_only_loss", True),
        ("completion_only_loss", False),
        ("chat_template_path", "other.jinja"),
        ("max_length", 4096),
        ("loss_type", "dft"),
        ("gradient_accumulation_steps", 3),
        ("model", "Qwen/Qwen2.5-VL-3B-Instruct"),
    ],
)
def test_what_contradicts_the_loader_is_rejected(tmp_path: Path, setting: str, value: Any) -> None:
    with raises_config(setting, value):
        make_trainer(tmp_path, **{setting: value})


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("train_dataset", [{"messages": []}], "would have no effect"),
        ("data_collator", list, "would have no effect"),
        ("compute_metrics", dict, "would have no effect"),
        ("eval_dataset", [{"messages": []}], "is a list: expected a loader"),
    ],
)
def test_what_the_loader_replaces_is_rejected(tmp_path: Path, name: str, value: Any, match: str) -> None:
    with raises_config(name, match=match):
        make_trainer(tmp_path, **{name: value})


@pytest.mark.parametrize(
    "arguments", [{"max_length": None}, {"max_length": 192}, {"completion_only_loss": True}]
)
def test_settings_that_agree_with_the_loader_are_accepted(tmp_path: Path, arguments: Any) -> None:
    assert make_trainer(tmp_path, **arguments).train_dataset is not None


def test_a_mixture_of_experts_has_the_auxiliary_loss_that_the_loader_knows(
    tmp_path: Path, parity: Any
) -> None:
    from trl import SFTConfig

    from packhorse.integrations.trl import SFTTrainer

    model = copy.deepcopy(tiny_model("qwen3_vl_moe"))
    packhorse.prepare(model)
    loader = packhorse.load(texts(4), processor("qwen3_vl"), model=model, pack_size=512, world=World())
    plain: dict[str, Any] = {"use_cpu": True, "report_to": [], "max_steps": 1, "save_strategy": "no"}
    with raises_config("router_aux_loss_coef", match=r"or SFTConfig\(router_aux_loss_coef=0\.0\)"):
        SFTTrainer(model, SFTConfig(str(tmp_path), **plain), loader=loader)
    config = SFTConfig(str(tmp_path), router_aux_loss_coef=0.0, **plain)
    SFTTrainer(model, config, loader=loader).train()
    model.config.get_text_config().output_router_logits = True
    model.config.get_text_config().router_aux_loss_coef = 0.01
    loader = packhorse.load(texts(4), processor("qwen3_vl"), model=model, pack_size=512, world=World())
    with raises_config("router_aux_loss_coef", 0.5, match="the model has 0.01: remove it"):
        SFTTrainer(model, SFTConfig(str(tmp_path), router_aux_loss_coef=0.5, **plain), loader=loader)
    trainer = SFTTrainer(model, SFTConfig(str(tmp_path), **plain), loader=loader)
    (batch,) = loader
    model.train()
    with torch.no_grad():
        found, own = trainer.compute_loss(model, batch, return_outputs=True)
        without = token_loss(own.logits, batch["labels"], count_supervised([batch]))
    expected, floor = without + 0.01 * own.aux_loss, noise_floor(found)
    away = largest_difference(without, expected)
    parity.check("loss", largest_difference(found, expected), floor, away)
    trainer.train()


def test_without_trl_the_message_has_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "packhorse.integrations.trl", raising=False)
    with pytest.raises(MissingDependency, match=r"package 'trl': pip install .*\[trl\]"):
        import_module("packhorse.integrations.trl")
