"""Accelerate with a loader: a checkpoint holds whole optimizer steps, or is rejected."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

import packhorse
from contract.processors import processor
from contract.tiny_models import tiny_model
from contract.torchvision_ops import make_torchvision_importable
from loader_samples import texts
from packhorse.collate_fns import model_inputs
from packhorse.errors import ConfigError
from packhorse.integrations.accelerate import attach, replicas, steps
from packhorse.integrations.loss import token_loss
from packhorse.integrations.transformers import prepare
from packhorse.types import World

make_torchvision_importable()

ROWS = 8


class Run:
    """A model, its optimizer and a loader of eight packs, two of them to an optimizer step."""

    def __init__(self, project: ProjectConfiguration | None = None) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_config=project)
        self.accelerator.step = 0
        model = copy.deepcopy(tiny_model("qwen2_vl"))
        prepare(model)
        settings: dict[str, Any] = {"pack_size": 256, "max_documents": 1, "gradient_accumulation_steps": 2}
        self.loader = packhorse.load(
            texts(ROWS), processor("qwen2_vl"), model=model, world=World(), **settings
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        attach(self.accelerator, self.loader)
        self.trained: list[tuple[int, ...]] = []

    def train(self, batch: Any, tokens: int) -> None:
        with self.accelerator.accumulate(self.model):
            logits = self.model(**model_inputs(batch)).logits
            loss = token_loss(logits, batch["labels"], tokens, replicas=replicas(self.accelerator))
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def test_saving_within_an_optimizer_step_is_rejected_before_anything_is_written(tmp_path: Path) -> None:
    run = Run()
    rejected = 0
    for number, (group, tokens) in enumerate(steps(run.accelerator, run.loader)):
        for place, batch in enumerate(group):
            run.train(batch, tokens)
            if place == 0:
                with pytest.raises(ConfigError, match="an optimizer step of 2 micro-batches"):
                    run.accelerator.save_state(str(tmp_path / f"within-{number}"))
                assert not (tmp_path / f"within-{number}").exists()
                rejected += 1
        run.accelerator.save_state(str(tmp_path / f"after-{number}"))
    assert rejected == ROWS // 2


def test_a_save_that_is_rejected_leaves_the_last_checkpoint_where_it_is(tmp_path: Path) -> None:
    run = Run(ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=1))
    run.accelerator.save_state()
    saved = sorted((tmp_path / "checkpoints" / "checkpoint_0").iterdir())
    (first, second), tokens = next(iter(steps(run.accelerator, run.loader)))
    run.train(first, tokens)
    with pytest.raises(ConfigError, match="in the middle of an optimizer step"):
        run.accelerator.save_state()
    assert sorted((tmp_path / "checkpoints" / "checkpoint_0").iterdir()) == saved
    run.train(second, tokens)
    run.accelerator.save_state()
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_1"]


def test_saving_with_a_fetched_but_untrained_batch_is_rejected(tmp_path: Path) -> None:
    run = Run()
    next(iter(run.loader))
    with pytest.raises(ConfigError, match="in the middle of an optimizer step"):
        run.accelerator.save_state(str(tmp_path / "state"))


def test_a_run_saved_after_a_step_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    whole = Run()
    for number, (group, tokens) in enumerate(steps(whole.accelerator, whole.loader)):
        for batch in group:
            whole.train(batch, tokens)
        if number == 1:
            whole.accelerator.save_state(str(tmp_path / "state"))
    resumed = Run()
    resumed.accelerator.load_state(str(tmp_path / "state"))
    assert resumed.loader.cursor == 4
    for group, tokens in steps(resumed.accelerator, resumed.loader):
        for batch in group:
            resumed.train(batch, tokens)
    assert resumed.loader.epoch_stats is not None
    assert resumed.loader.epoch_stats.delivered == ROWS
    for ours, theirs in zip(resumed.weights(), whole.weights(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("wrap", [False, True])
def test_a_model_that_runs_another_attention_than_the_batches_are_for_is_rejected(wrap: bool) -> None:
    run = Run()
    model = run.accelerator.unwrap_model(run.model)
    if wrap:
        from peft import LoraConfig, get_peft_model

        adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
        run.accelerator.free_memory()
        run.accelerator.prepare(adapted)
    assert next(steps(run.accelerator, run.loader))
    prepare(model, "varlen")  # after the loader was built
    message = "runs 'varlen' attention, but the loader builds batches for attn_implementation='sdpa'"
    with pytest.raises(ConfigError, match=message):
        next(steps(run.accelerator, run.loader))
    with pytest.raises(ConfigError, match=message):
        attach(run.accelerator, run.loader)
