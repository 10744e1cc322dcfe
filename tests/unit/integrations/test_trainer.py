"""The Trainer of transformers with a loader: what it trains, saves, resumes and rejects."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import packhorse
from contract.processors import processor
from contract.tiny_models import tiny_model
from contract.torchvision_ops import make_torchvision_importable
from noise_floor import largest_difference, noise_floor
from packhorse.errors import ConfigError
from packhorse.integrations.transformers import LOADER_STATE, TrainFromLoader, prepare
from packhorse.types import World
from raising import raises_config

make_torchvision_importable()

STEPS = 4  # of an epoch: eight packs of one sample, two micro-batches a step


def trainer(
    folder: Path, loader: Any = None, callbacks: Any = None, eval_dataset: Any = None, **settings: Any
) -> Any:
    from transformers import Trainer, TrainingArguments

    class PackedTrainer(TrainFromLoader, Trainer):
        pass

    model = copy.deepcopy(tiny_model("qwen2_vl"))
    prepare(model)
    plain = {
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "save_steps": 1,
        "num_train_epochs": 2,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    args = TrainingArguments(str(folder), **{**plain, **settings})
    return PackedTrainer(
        model, args, loader=loader or make_loader(model), callbacks=callbacks, eval_dataset=eval_dataset
    )


def make_loader(model: Any, **settings: Any) -> Any:
    examples = [
        {
            "conversation": [
                {"role": "user", "content": f"Question {n}?"},
                {"role": "assistant", "content": "Answer. " * (1 + n % 4)},
            ]
        }
        for n in range(8)
    ]
    plain = {"pack_size": 128, "max_documents": 1, "gradient_accumulation_steps": 2}
    return packhorse.load(
        examples, processor("qwen2_vl"), model=model, world=World(), **{**plain, **settings}
    )


def losses(made: Any) -> list[float]:
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def test_epochs_steps_and_metrics_are_logged(tmp_path: Path) -> None:
    made = trainer(tmp_path, save_strategy="no")
    made.train()
    entries = [entry for entry in made.state.log_history if "loss" in entry]
    assert [entry["epoch"] for entry in entries] == pytest.approx([(n + 1) / STEPS for n in range(2 * STEPS)])
    assert all(0 < entry["data/fill"] <= 1 for entry in entries)
    assert made.loader.epoch == 1
    assert not made.loader.remaining


def test_the_logged_loss_is_the_mean_over_the_tokens_of_the_step(tmp_path: Path, parity: Any) -> None:
    from packhorse.collate_fns import model_inputs

    made = trainer(tmp_path, save_strategy="no", max_steps=1)
    model = copy.deepcopy(made.model)
    made.train()
    batches = iter(make_loader(model))
    rows = [next(batches), next(batches)]
    with torch.no_grad():
        logits = [model(**model_inputs(batch)).logits[0] for batch in rows]
    labels = [batch["labels"][0] for batch in rows]
    cross_entropy = torch.nn.functional.cross_entropy
    expected = cross_entropy(torch.cat(logits), torch.cat(labels))
    other_order = cross_entropy(torch.cat(logits[::-1]), torch.cat(labels[::-1]))
    mean_of_means = torch.stack([cross_entropy(*pair) for pair in zip(logits, labels, strict=True)]).mean()
    (logged,) = losses(made)
    parity.check(
        "loss",
        largest_difference(logged, expected),
        noise_floor(expected, other_order),
        largest_difference(mean_of_means, expected),
    )


@pytest.mark.parametrize("epochs", [0.5, 1.5, 2])
def test_a_resumed_run_ends_where_the_whole_one_does(tmp_path: Path, epochs: float) -> None:
    whole = trainer(tmp_path / "whole", num_train_epochs=epochs)
    whole.train()
    assert whole.state.global_step == epochs * STEPS
    resumed = trainer(tmp_path / "whole", num_train_epochs=epochs)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    assert resumed.state.global_step == whole.state.global_step
    assert losses(resumed) == losses(whole)
    epochs_logged = [entry["epoch"] for entry in resumed.state.log_history if "loss" in entry]
    assert epochs_logged == pytest.approx([(n + 1) / STEPS for n in range(int(epochs * STEPS))])


def test_a_checkpoint_that_was_not_written_to_its_end_is_skipped(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", save_strategy="no")
    whole.train()
    trainer(tmp_path / "run", max_steps=2).train()
    (tmp_path / "run" / "checkpoint-2" / "trainer_state.json").unlink()  # killed before
    with raises_config(path=tmp_path / "run" / "checkpoint-2", match="incomplete"):
        trainer(tmp_path / "run").train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    resumed = trainer(tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(whole)


@pytest.mark.parametrize("gradient_accumulation_steps", [2, 3])
def test_a_finished_run_trains_nothing_more(tmp_path: Path, gradient_accumulation_steps: int) -> None:
    """In other steps too, of which the steps so far are no whole number of epochs."""
    first = trainer(tmp_path)
    first.train()
    loader = make_loader(first.model, gradient_accumulation_steps=gradient_accumulation_steps)
    resumed = trainer(tmp_path, loader, gradient_accumulation_steps=gradient_accumulation_steps)
    before = [p.detach().clone() for p in resumed.model.parameters()]
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2 * STEPS
    assert not resumed.loader.metrics.steps
    assert any(not torch.equal(a, b) for a, b in zip(before, resumed.model.parameters(), strict=True))


def test_a_resumed_run_may_be_given_more_epochs_or_steps(tmp_path: Path) -> None:
    trainer(tmp_path, num_train_epochs=1).train()
    longer = trainer(tmp_path, num_train_epochs=3)
    longer.train(resume_from_checkpoint=True)
    assert longer.state.global_step == 3 * STEPS
    assert longer.loader.epoch == 2
    counted = trainer(tmp_path, max_steps=2 * STEPS + 1)
    counted.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert counted.state.global_step == 2 * STEPS + 1
    assert losses(counted) == losses(longer)[: 2 * STEPS + 1]


def test_training_again_goes_on_with_the_loader(tmp_path: Path) -> None:
    made = trainer(tmp_path, max_steps=1, save_strategy="no")
    made.train()
    made.train()
    assert made.loader.cursor == 4
    assert made.loader.epoch == 0


@pytest.mark.parametrize("hook", ["on_substep_end", "on_pre_optimizer_step"])
def test_a_checkpoint_within_a_step_counts_whole_steps_only(tmp_path: Path, hook: str) -> None:
    """As the Trainer's own checkpoint on SIGTERM does it, before the optimizer has made its step."""
    from transformers import TrainerCallback

    whole = trainer(tmp_path / "whole", save_strategy="no")
    whole.train()
    made: list[Any] = []

    def save(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2 and not control.should_training_stop:
            control.should_training_stop = True
            made[0]._save_checkpoint(made[0].model, trial=None)

    callback = type("SaveWithin", (TrainerCallback,), {hook: save})()
    made.append(trainer(tmp_path / "stopped", callbacks=[callback], save_strategy="no"))
    made[0].train()
    checkpoint = tmp_path / "stopped" / "checkpoint-2"
    state = json.loads((checkpoint / LOADER_STATE).read_text())
    assert state["segments"][-1][-1] == 2 * 2
    resumed = trainer(tmp_path / "stopped")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert losses(resumed)[-6:] == losses(whole)[-6:]
    assert resumed.loader.epoch_stats.delivered == 8


def test_a_trainer_stopped_within_a_step_loses_none_of_its_batches(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class StopWithin(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 1

    made = trainer(tmp_path, callbacks=[StopWithin()], save_strategy="no")
    made.train()
    assert made.loader.cursor == 4, "two were trained, and one of the two fetched after them"
    made.pop_callback(StopWithin)
    made.train()
    assert made.loader.epoch == 1
    assert made.loader.metrics.samples == 16 + 2, "the step that was not made comes again, whole"


def test_checkpoints_hold_the_loaders_state(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=2).train()
    state = json.loads((tmp_path / "checkpoint-1" / LOADER_STATE).read_text())
    assert state["segments"] == [[1, 1, 2, 2]]
    assert not [path.name for path in (tmp_path / "checkpoint-1").iterdir() if path.name.startswith(".")]


def test_a_checkpoint_without_the_loaders_state_is_rejected(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=1).train()
    (tmp_path / "checkpoint-1" / LOADER_STATE).unlink()
    with raises_config(path=tmp_path / "checkpoint-1" / LOADER_STATE):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    with raises_config("resume_from_checkpoint", True, path=tmp_path / "empty"):
        trainer(tmp_path / "empty").train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("gradient_accumulation_steps", 3), ("auto_find_batch_size", True), ("label_smoothing_factor", 0.1)],
)
def test_what_would_undo_the_loaders_work_is_rejected(tmp_path: Path, setting: str, value: Any) -> None:
    with raises_config(setting, value):
        trainer(tmp_path, **{setting: value})


def test_evaluation_is_the_trainers_own(tmp_path: Path, parity: Any) -> None:
    ids = torch.tensor([1, 5, 9, 7, 3])
    row = {"input_ids": ids, "labels": ids}
    made = trainer(tmp_path, eval_dataset=[row, row], save_strategy="no", max_steps=1)
    with torch.no_grad():
        expected = made.model(input_ids=ids[None], labels=ids[None]).loss
        twice = made.model(input_ids=ids.expand(2, -1), labels=ids.expand(2, -1)).loss
        unshifted = made.model(input_ids=ids[None], labels=ids[None], shift_labels=ids[None]).loss
    parity.check(
        "loss",
        largest_difference(made.evaluate()["eval_loss"], expected),
        noise_floor(expected, twice),
        largest_difference(unshifted, expected),
    )


def test_a_batch_keeps_its_info_on_its_way_through_the_trainer(tmp_path: Path) -> None:
    made = trainer(tmp_path, save_strategy="no", max_steps=1)
    seen: list[Any] = []
    inner = made.compute_loss

    def compute_loss(model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        seen.append(inputs)
        return inner(model, inputs, *arguments, **options)

    made.compute_loss = compute_loss
    made.train()
    assert [type(inputs) for inputs in seen] == [packhorse.Batch] * 2
    assert all(inputs.info.keys and inputs.info.epoch == 0 for inputs in seen)


def test_evaluation_with_a_collate_function_has_the_mean_over_its_labels(tmp_path: Path) -> None:
    """The model gets the labels, which are shifted already, and does not shift them again."""
    from functools import partial

    from packhorse.collate_fns import pad_collate_fn
    from packhorse.datasets import PreTokenizedDatasetWrapper

    model = tiny_model("qwen2_vl")
    examples = make_loader(model).dataset
    samples = PreTokenizedDatasetWrapper(examples, processor("qwen2_vl"), inject_fake_images=False)
    encoded = [dict(samples[index]) for index in range(len(examples))]
    made = trainer(tmp_path, eval_dataset=encoded, per_device_eval_batch_size=8, remove_unused_columns=False)
    made.data_collator = partial(pad_collate_fn, processor=processor("qwen2_vl"))
    batch = made.data_collator(encoded)
    with torch.no_grad():
        out = made.model(**batch)
    expected = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), batch["labels"].flatten())
    assert made.evaluate()["eval_loss"] == pytest.approx(float(expected))


@pytest.mark.needs_trl
@pytest.mark.parametrize("name", ["DPOTrainer", "KTOTrainer", "RewardTrainer", "GRPOTrainer"])
def test_a_trainer_with_a_loss_of_its_own_is_rejected(name: str, tmp_path: Path) -> None:
    import trl

    model = tiny_model("qwen2_vl")
    mixed: Any = type("Mixed", (TrainFromLoader, getattr(trl, name)), {})
    with pytest.raises(ConfigError, match=f'{name} computes its own loss.*task="preference"'):
        mixed(model, loader=make_loader(model))


def test_a_loss_function_that_would_be_ignored_is_rejected(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    class PackedTrainer(TrainFromLoader, Trainer):
        pass

    model = copy.deepcopy(tiny_model("qwen2_vl"))
    args = TrainingArguments(str(tmp_path), gradient_accumulation_steps=2, use_cpu=True, report_to=[])
    with raises_config("compute_loss_func"):
        PackedTrainer(model, args, loader=make_loader(model), compute_loss_func=lambda *_: None)


@pytest.mark.parametrize("when", ["before it is built", "before it trains"])
def test_a_model_that_runs_another_attention_than_the_batches_are_for_is_rejected(
    tmp_path: Path, when: str
) -> None:
    model = copy.deepcopy(tiny_model("qwen2_vl"))
    prepare(model, "varlen")
    loader = make_loader(model)
    message = "runs 'sdpa' attention, but the loader builds batches for attn_implementation='varlen'"
    if when == "before it is built":
        with pytest.raises(ConfigError, match=message):
            trainer(tmp_path, loader)
        return
    made = trainer(tmp_path)
    prepare(made.model, "varlen")
    with pytest.raises(ConfigError, match=r"runs 'varlen' attention, .*'sdpa'"):
        made.train()
    assert not made.loader.cursor
