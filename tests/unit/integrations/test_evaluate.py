"""The loss on validation rows: one mean over tokens, for any packs and ranks, in loops and Trainers."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import packhorse
from contract.processors import processor
from contract.tiny_models import tiny_model
from contract.torchvision_ops import make_torchvision_importable
from noise_floor import largest_difference, noise_floor
from packhorse.collate_fns import model_inputs
from packhorse.errors import ConfigError
from packhorse.types import World
from raising import raises_bad_sample, raises_config

make_torchvision_importable()

ROWS = 9


@pytest.fixture
def model() -> Any:
    made = copy.deepcopy(tiny_model("qwen2_5_vl"))
    packhorse.prepare(made)
    return made


def rows(count: int = ROWS, role: str = "assistant") -> list[dict[str, Any]]:
    examples = []
    for n in range(count):
        question: list[dict[str, Any]] = [{"type": "text", "text": f"What is number {n}?"}]
        if n % 2:
            question.insert(0, {"type": "image", "image": Image.new("RGB", (60 + 8 * n, 60), "tan")})
        turns = [("user", question), (role, [{"type": "text", "text": "A chart. " * (1 + 3 * (n % 4))}])]
        examples.append({"conversation": [{"role": who, "content": parts} for who, parts in turns]})
    return examples


def make_loader(model: Any, examples: Any = None, **settings: Any) -> packhorse.Loader:
    plain: dict[str, Any] = {"pack_size": 192, "world": World(), **settings}
    return packhorse.load(examples or rows(), processor("qwen2_5_vl"), model=model, **plain)


def alone(model: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits and labels of the supervised tokens, each row in a batch of its own."""
    logits, labels = [], []
    for batch in make_loader(model, mode="pad", pack_size=1024):
        with torch.no_grad():
            found = model(**model_inputs(batch)).logits[0]
        supervised = batch["labels"][0] != -100
        logits.append(found[supervised])
        labels.append(batch["labels"][0][supervised])
    return logits, labels


def test_the_loss_is_one_mean_over_the_tokens_of_all_rows(model: Any, parity: Any) -> None:
    logits, labels = alone(model)
    cross_entropy = torch.nn.functional.cross_entropy
    expected = cross_entropy(torch.cat(logits), torch.cat(labels))
    packed = packhorse.evaluate(model, make_loader(model))
    padded = packhorse.evaluate(model, make_loader(model, mode="pad", batch_size=3, pack_size=1024))
    mean_of_means = torch.stack([cross_entropy(*pair) for pair in zip(logits, labels, strict=True)]).mean()
    parity.check(
        "loss",
        largest_difference(packed.loss, expected),
        noise_floor(expected, padded.loss),
        largest_difference(mean_of_means, expected),
    )
    assert packed.tokens == padded.tokens == len(torch.cat(labels))
    assert packed.perplexity == pytest.approx(float(expected.exp()), rel=1e-4)


def test_the_parts_of_two_ranks_make_the_whole(model: Any) -> None:
    whole = packhorse.evaluate(model, make_loader(model))
    parts = [packhorse.evaluate(model, make_loader(model, world=World(rank, 2))) for rank in (0, 1)]
    assert sum(part.tokens for part in parts) == whole.tokens
    assert sum(part.loss * part.tokens for part in parts) / whole.tokens == pytest.approx(
        whole.loss, rel=1e-5
    )


def test_each_call_evaluates_every_row_in_the_same_batches(model: Any) -> None:
    loader = make_loader(model)
    first = packhorse.evaluate(model, loader)
    assert loader.epoch_stats is not None
    assert loader.epoch_stats.delivered == ROWS
    assert packhorse.evaluate(model, loader) == first
    next(iter(loader))
    assert loader.epoch == 1
    assert packhorse.evaluate(model, loader) == first, "after another epoch was begun"
    loader.set_epoch(0)
    next(iter(loader))
    assert packhorse.evaluate(model, loader) == first, "after an evaluation that was interrupted"


def test_modules_get_their_mode_back_and_no_gradient(model: Any) -> None:
    model.train()
    model.model.visual.eval()  # frozen by the user
    packhorse.evaluate(model, make_loader(model))
    assert model.training
    assert model.model.language_model.layers[0].training
    assert not any(module.training for module in model.model.visual.modules())
    assert all(weight.grad is None for weight in model.parameters())


def test_the_mode_comes_back_after_an_error_too(model: Any, tmp_path: Path) -> None:
    examples = rows(2)
    examples[1]["conversation"][0]["content"][0]["image"] = Image.new("RGB", (70, 60))
    loader = make_loader(model, examples, on_bad="raise")
    examples[1]["conversation"][0]["content"][0]["image"] = str(tmp_path / "gone.png")
    model.train()
    with raises_bad_sample("missing_media", match=r"gone\.png"):
        packhorse.evaluate(model, loader)
    assert model.training


def test_rows_without_answers_raise(model: Any) -> None:
    with pytest.raises(ConfigError, match="no supervised token"):
        packhorse.evaluate(model, make_loader(model, rows(2, role="user")))


def test_another_attention_than_that_of_the_batches_raises(model: Any) -> None:
    loader = make_loader(model)
    packhorse.prepare(model, "eager")
    with pytest.raises(ConfigError, match="documents would attend to each other"):
        packhorse.evaluate(model, loader)


def make_trainer(model: Any, folder: Path, eval_dataset: Any, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    class PackedTrainer(packhorse.TrainFromLoader, Trainer):
        pass

    settings = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "logging_steps": 1}
    args = TrainingArguments(
        str(folder), report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", **settings
    )
    return PackedTrainer(model, args, loader=make_loader(model), eval_dataset=eval_dataset, **options)


def test_the_trainer_logs_the_loss_over_a_loaders_tokens(model: Any, tmp_path: Path) -> None:
    validation = make_loader(model, rows(4))
    trainer = make_trainer(model, tmp_path, validation)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert [entry["step"] for entry in entries] == [1, 2]
    result = packhorse.evaluate(model, validation)
    assert entries[-1]["eval_loss"] == result.loss
    assert entries[-1]["eval_perplexity"] == result.perplexity
    assert entries[-1]["eval_tokens"] == result.tokens
    assert trainer.loader.cursor == 2, "the training loader is where it was"
    assert trainer.evaluate()["eval_loss"] == result.loss


def test_several_loaders_are_logged_by_name(model: Any, tmp_path: Path) -> None:
    validation = {"few": make_loader(model, rows(2)), "all": make_loader(model)}
    trainer = make_trainer(model, tmp_path, validation)
    metrics = trainer.evaluate()
    for name, loader in validation.items():
        assert metrics[f"eval_{name}_loss"] == packhorse.evaluate(model, loader).loss
    assert trainer.evaluate(validation["few"])["eval_loss"] == metrics["eval_few_loss"]


def test_metrics_on_predictions_raise_because_a_loader_has_none(model: Any, tmp_path: Path) -> None:
    with raises_config("compute_metrics"):
        make_trainer(model, tmp_path, make_loader(model), compute_metrics=lambda _: {})
