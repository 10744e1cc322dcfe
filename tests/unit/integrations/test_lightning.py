"""Lightning with a loader: a checkpoint holds whole optimizer steps, or is rejected."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch

import packhorse
from contract.processors import processor
from contract.tiny_models import tiny_model
from contract.torchvision_ops import make_torchvision_importable
from lightning_module import PackedModule
from loader_samples import texts
from packhorse.errors import ConfigError
from packhorse.integrations.lightning import LoaderDataModule
from packhorse.integrations.loss import batch_loss
from packhorse.integrations.transformers import prepare
from packhorse.types import World
from raising import raises_config

make_torchvision_importable()


class LogitsModule(PackedModule):
    def run_model(self, batch: Any) -> Any:
        return super().run_model(batch).logits


class ComparedModule(PackedModule):
    """Its step has the loss of ``batch_loss``, and an auxiliary loss."""

    def run_model(self, batch: Any) -> Any:
        self.output = super().run_model(batch)
        return self.output

    def training_step(self, item: Any, index: int) -> torch.Tensor:
        loss = super().training_step(item, index)
        assert torch.equal(loss, batch_loss(self.model, self.output, *item, replicas=2))
        assert self.output.aux_loss > 0
        return loss


def test_the_loss_of_a_step_needs_the_output_of_a_model_with_a_router_loss() -> None:
    model = copy.deepcopy(tiny_model("qwen3_vl_moe"))
    model.config.get_text_config().output_router_logits = True
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    options |= {"accumulate_grad_batches": 2, "enable_progress_bar": False, "max_epochs": 1}

    def loader() -> packhorse.Loader:
        settings: dict[str, Any] = {"pack_size": 512, "gradient_accumulation_steps": 2}
        return packhorse.load(texts(8), processor("qwen3_vl"), model=model, world=World(), **settings)

    prepare(model, device="cpu")
    lightning.Trainer(**options).fit(ComparedModule(model), LoaderDataModule(loader()))
    with raises_config("output", match="pass the output of the model"):
        lightning.Trainer(**options).fit(LogitsModule(model), LoaderDataModule(loader()))


class SaveAfter(lightning.Callback):
    def __init__(self, batch: int, path: Path) -> None:
        self.batch, self.path = batch, path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, item: Any, number: int) -> None:
        if number == self.batch:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("batch", [2, 3])
def test_a_checkpoint_within_an_optimizer_step_is_rejected(tmp_path: Path, batch: int) -> None:
    model = copy.deepcopy(tiny_model("qwen2_vl"))
    prepare(model)
    settings: dict[str, Any] = {"pack_size": 256, "max_documents": 1, "gradient_accumulation_steps": 2}
    loader = packhorse.load(texts(8), processor("qwen2_vl"), model=model, world=World(), **settings)
    file = tmp_path / "saved.ckpt"
    trainer = lightning.Trainer(
        max_epochs=1,
        accumulate_grad_batches=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[SaveAfter(batch, file)],
    )
    if batch % 2 == 0:
        with pytest.raises(ConfigError, match="checkpoint after 1 micro-batches of an optimizer step of 2"):
            trainer.fit(PackedModule(model), LoaderDataModule(loader))
        assert not file.exists()
    else:
        trainer.fit(PackedModule(model), LoaderDataModule(loader))
        state = torch.load(file, weights_only=False)["LoaderDataModule"]
        assert (state["batches"], state["loader"]["segments"][-1][-1]) == (4, 4)


def test_a_model_that_runs_another_attention_than_the_batches_are_for_is_rejected() -> None:
    model = copy.deepcopy(tiny_model("qwen2_vl"))
    prepare(model, "sdpa")
    loader = packhorse.load(texts(8), processor("qwen2_vl"), model=model, world=World(), pack_size=256)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    prepare(model, "varlen")
    with pytest.raises(
        ConfigError, match=r"runs 'varlen' attention, but the loader builds batches for .*'sdpa'"
    ):
        trainer.fit(PackedModule(model), LoaderDataModule(loader))
    assert not loader.cursor
