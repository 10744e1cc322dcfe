"""Loss weights of rows and turns: one weighted mean over a step, in loops, Trainers and evaluation."""

import copy
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import packhorse
from contract.processors import processor
from contract.tiny_models import tiny_model
from contract.torchvision_ops import make_torchvision_importable
from noise_floor import largest_difference, noise_floor, relative_difference
from packhorse import Batch, count_supervised, grouped, token_loss
from packhorse.collate_fns import COLLATE_FNS, model_inputs
from packhorse.integrations.loss import loss_weights_of
from packhorse.integrations.transformers import TrainFromLoader
from packhorse.types import World
from raising import raises_config

make_torchvision_importable()

NAME = "qwen2_5_vl"
RATE = 0.05
ROWS = 12
ACCUMULATION = 2
# The weights of the answers of each row, in turn: none, of the row, of both answers, of one of them.
WEIGHTS: tuple[tuple[float, ...], ...] = ((1, 1), (0.5, 0.5), (0.25, 3), (0, 2))


def weights_of(row: int) -> tuple[float, ...]:
    return WEIGHTS[row % len(WEIGHTS)]


def row(number: int, *answers: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Two questions, the first one with an image in every third row; each answer has its settings."""
    first: list[dict[str, Any]] = [{"type": "text", "text": f"What is number {number}?"}]
    if number % 3 == 0:
        first.insert(0, {"type": "image", "image": Image.new("RGB", (60 + 8 * number, 60), "tan")})
    texts = ["A chart. " * (1 + number % 4), "Blue. " * (1 + number % 5)]
    one, two = (
        {"role": "assistant", "content": text, **own} for text, own in zip(texts, answers, strict=True)
    )
    turns = [{"role": "user", "content": first}, one, {"role": "user", "content": "Which colour?"}, two]
    return {"conversation": turns, **settings}


def weighted_rows(count: int = ROWS) -> list[dict[str, Any]]:
    kinds = (
        lambda n: row(n, {}, {}),
        lambda n: row(n, {}, {}, weight=0.5),
        lambda n: row(n, {"weight": 0.25}, {"weight": 3}),
        lambda n: row(n, {"train": False}, {"weight": 0.5}, weight=4),
    )
    return [kinds[n % len(kinds)](n) for n in range(count)]


def make_model(attention: str = "sdpa") -> Any:
    model = copy.deepcopy(tiny_model(NAME))
    packhorse.prepare(model, attention)
    return model


def make_loader(model: Any, rows: Any = None, **settings: Any) -> packhorse.Loader:
    plain: dict[str, Any] = {"pack_size": 320, "gradient_accumulation_steps": ACCUMULATION, "world": World()}
    return packhorse.load(
        weighted_rows() if rows is None else rows, processor(NAME), model=model, **{**plain, **settings}
    )


def load_padded(model: Any, rows: Any, **settings: Any) -> packhorse.Loader:
    return make_loader(model, rows, mode="pad", pack_size=1024, gradient_accumulation_steps=1, **settings)


def masks_of_answers(model: Any, answer: int) -> dict[str, torch.Tensor]:
    """Which labels of each row are those of one answer: of rows in which nothing else is trained."""
    train = [{"train": number == answer} for number in range(2)]
    loader = load_padded(model, [row(n, *train) for n in range(ROWS)])
    return {batch.info.keys[0]: batch["labels"][0] != -100 for batch in loader}


def hand_written(model: Any, order: int = 1, ignored: bool = False) -> torch.Tensor:
    """The gradient of the weighted mean, each row alone, weights by the masks of its answers."""
    masks = [masks_of_answers(model, answer) for answer in range(2)]
    total, sums = 0.0, []
    batches = list(load_padded(model, [row(n, {}, {}) for n in range(ROWS)]))
    for batch in batches[::order]:
        (key,) = batch.info.keys
        factors = weights_of(int(key.rpartition("/")[2]))
        weights = sum(mask[key] * weight for mask, weight in zip(masks, factors, strict=True))
        if ignored:
            weights = (weights > 0).float()
        logits, labels = model(**model_inputs(batch)).logits[0], batch["labels"][0]
        sums.append((F.cross_entropy(logits, labels, reduction="none") * weights).sum())
        total += float(weights.sum())
    model.zero_grad()
    (torch.stack(sums).sum() / total).backward()
    return gradients(model)


def gradients(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None])


def epoch_gradient(model: Any, loader: Iterable[Batch]) -> torch.Tensor:
    """The gradient of a whole epoch as one step."""
    batches = list(loader)
    tokens = count_supervised(batches)
    model.zero_grad()
    for batch in batches:
        logits = model(**model_inputs(batch)).logits
        token_loss(logits, batch["labels"], tokens, weights=batch.info.loss_weights).backward()
    return gradients(model)


def test_packed_padded_and_single_rows_have_the_gradient_of_the_weighted_mean(parity: Any) -> None:
    model = make_model()
    expected = hand_written(model)
    floor = noise_floor(expected, hand_written(model, -1), measure=relative_difference)
    control = relative_difference(hand_written(model, ignored=True), expected)
    loaders = {
        "packed": make_loader(model),
        "padded": load_padded(model, weighted_rows(), batch_size=4),
        "single": load_padded(model, weighted_rows()),
    }
    assert any(len(documents) > 1 for batch in make_loader(model) for documents in batch.info.document_keys)
    for name, loader in loaders.items():
        difference = relative_difference(epoch_gradient(model, loader), expected)
        parity.check(name, difference, floor, control)


def test_weights_are_in_the_info_and_not_in_the_batch() -> None:
    model = make_model()
    loader = make_loader(model, batch_size=2)
    expected = 0.0
    for batch in loader:
        assert "loss_weights" not in batch
        weights, supervised = batch.info.loss_weights, batch["labels"] != -100
        assert loss_weights_of(batch) is weights
        if weights is None:
            expected += float(supervised.sum())
            continue
        assert weights.shape == batch["labels"].shape
        assert weights.dtype == torch.float32
        assert set(weights[~supervised].tolist()) <= {1.0}
        assert set(weights[supervised].tolist()) <= {1.0, 0.5, 0.25, 2.0, 3.0}
        expected += float(weights[supervised].sum())
    stats = loader.epoch_stats
    assert stats is not None
    assert stats.supervised_weight == expected
    assert stats.supervised == sum(batch.info.supervised for batch in make_loader(model))
    assert f"loss weights sum to {expected:,.1f} over {stats.supervised:,}" in str(stats)


def test_placeholders_have_weight_1() -> None:
    """Two ranks, one row with an image: the other rank's batch of weighted text gets a placeholder."""
    model = make_model()
    rows = [row(n, {"weight": 0.5}, {"weight": 2}) for n in (3, 1)]
    settings: dict[str, Any] = {"max_documents": 1, "gradient_accumulation_steps": 1}
    seen = 0
    for rank in range(2):
        for batch in make_loader(model, rows, world=World(rank, 2), **settings):
            if not batch.info.placeholder:
                continue
            seen += 1
            first, last = batch.info.document_lengths[0]
            assert batch.info.loss_weights is not None
            assert set(batch.info.loss_weights[0, first : first + last].tolist()) == {1.0}
    assert seen


def test_rows_without_weights_have_none() -> None:
    loader = make_loader(make_model(), [row(n, {}, {"weight": 1}, weight=1) for n in range(ROWS)])
    assert all(batch.info.loss_weights is None for batch in loader)
    assert isinstance(count_supervised(list(make_loader(make_model(), [row(1, {}, {})]))), int)
    assert "loss weights" not in str(loader.epoch_stats)


def test_weights_come_from_workers_as_from_this_process() -> None:
    here, there = (
        [batch.info.loss_weights for batch in make_loader(make_model(), num_workers=number)]
        for number in (0, 1)
    )
    assert len(here) == len(there) > 1
    for ours, theirs in zip(here, there, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


def test_a_resumed_loader_delivers_the_same_weights() -> None:
    model = make_model()
    whole = [batch.info.loss_weights for batch in make_loader(model)]
    first = make_loader(model)
    next(batches := iter(first))
    next(batches)
    resumed = make_loader(model)
    resumed.load_state_dict(first.state_dict())
    rest = [batch.info.loss_weights for batch in resumed]
    assert len(rest) == len(whole) - 2
    for ours, theirs in zip(rest, whole[2:], strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)
    assert resumed.epoch_stats is not None
    assert resumed.epoch_stats.delivered == ROWS


def test_the_loader_says_once_what_a_loop_of_your_own_has_to_do(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    with caplog.at_level(logging.WARNING, "packhorse.loader"):
        list(make_loader(model))
    (message,) = [entry.getMessage() for entry in caplog.records if "loss weights" in entry.getMessage()]
    assert "token_loss(logits, batch['labels'], tokens, weights=batch.info.loss_weights)" in message
    caplog.clear()
    with caplog.at_level(logging.WARNING, "packhorse.loader"):
        list(make_loader(model, [row(n, {}, {}) for n in range(4)]))
        list(make_loader(model, world=World(1, 2)))
    assert not [entry for entry in caplog.records if "loss weights" in entry.getMessage()]


# --- training -----------------------------------------------------------------------------------------------


def plain_loop(attention: str = "sdpa", ignored: bool = False) -> tuple[list[float], torch.Tensor]:
    """Losses of each step, and the model's weights at the end, by the formula of the weighted mean."""
    model = make_model(attention).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for group in grouped(make_loader(model), ACCUMULATION):
        parts, total = [], torch.zeros(())
        for batch in group:
            labels, weights = batch["labels"].flatten(), batch.info.loss_weights
            factors = (labels != -100).float()
            if weights is not None and not ignored:
                factors *= weights.flatten()
            logits = model(**model_inputs(batch)).logits.flatten(0, 1)
            parts.append((F.cross_entropy(logits, labels, reduction="none") * factors).sum())
            total += factors.sum()
        loss = torch.stack(parts).sum() / total
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, flat_weights(model)


def flat_weights(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


SETTINGS: dict[str, Any] = {
    "gradient_accumulation_steps": ACCUMULATION,
    "num_train_epochs": 1,
    "optim": "sgd",
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0,
    "logging_steps": 1,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
}


def make_trainer(kind: str, folder: Path, **options: Any) -> Any:
    model = make_model()
    if kind == "trl":
        from trl import SFTConfig

        from packhorse.integrations.trl import SFTTrainer

        config = SFTConfig(str(folder), **SETTINGS)
        return SFTTrainer(model, config, loader=make_loader(model), **options)
    from transformers import Trainer, TrainingArguments

    class PackedTrainer(TrainFromLoader, Trainer):
        pass

    return PackedTrainer(
        model, TrainingArguments(str(folder), **SETTINGS), loader=make_loader(model), **options
    )


def with_trainer(kind: str, folder: Path) -> tuple[list[float], torch.Tensor]:
    trainer = make_trainer(kind, folder)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, flat_weights(trainer.model)


def with_accelerate(kind: str, folder: Path) -> tuple[list[float], torch.Tensor]:
    from accelerate import Accelerator

    from packhorse.integrations.accelerate import attach, replicas, steps

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
    accelerator.step = 0
    model = make_model().train()
    loader = make_loader(model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
    attach(accelerator, loader)
    losses = []
    for group, tokens in steps(accelerator, loader):
        total = 0.0
        for batch in group:
            with accelerator.accumulate(model):
                logits = model(**model_inputs(batch)).logits
                factor, weights = replicas(accelerator), batch.info.loss_weights
                loss = token_loss(logits, batch["labels"], tokens, factor, weights)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            total += float(loss.detach()) / factor
        losses.append(total)
    return losses, flat_weights(model)


def with_lightning(kind: str, folder: Path) -> tuple[list[float], torch.Tensor]:
    import lightning.pytorch as lightning

    from lightning_module import PackedModule
    from packhorse.integrations.lightning import LoaderDataModule

    losses: list[float] = []

    class RecordingModule(PackedModule):
        def training_step(self, item: Any, index: int) -> torch.Tensor:
            loss = super().training_step(item, index)
            part = float(loss.detach()) / ACCUMULATION
            losses.append(part if index % ACCUMULATION == 0 else losses.pop() + part)
            return loss

    module = RecordingModule(make_model().train(), learning_rate=RATE)
    trainer = lightning.Trainer(
        max_epochs=1,
        accumulate_grad_batches=ACCUMULATION,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, LoaderDataModule(make_loader(module.model)))
    return losses, flat_weights(module.model)


@pytest.fixture(scope="module")
def loops() -> dict[str, tuple[list[float], torch.Tensor]]:
    return {"sdpa": plain_loop(), "eager": plain_loop("eager"), "ignored": plain_loop(ignored=True)}


@pytest.mark.parametrize(
    ("kind", "train"),
    [
        ("transformers", with_trainer),
        pytest.param("trl", with_trainer, marks=pytest.mark.needs_trl),
        ("accelerate", with_accelerate),
        ("lightning", with_lightning),
    ],
)
def test_a_trainer_does_what_a_hand_written_loop_does(
    kind: str, train: Any, tmp_path: Path, parity: Any, loops: dict[str, Any]
) -> None:
    losses, weights = train(kind, tmp_path)
    expected, trained = loops["sdpa"]
    assert len(expected) > 1
    parity.check(
        "loss",
        largest_difference(losses, expected),
        noise_floor(expected, loops["eager"][0]),
        largest_difference(loops["ignored"][0], expected),
    )
    start = flat_weights(make_model())
    parity.check(
        "update",
        relative_difference(weights - start, trained - start),
        noise_floor(trained - start, loops["eager"][1] - start, measure=relative_difference),
        relative_difference(loops["ignored"][1] - start, trained - start),
    )


def test_evaluation_reports_the_weighted_mean(tmp_path: Path, parity: Any) -> None:
    trainer = make_trainer("transformers", tmp_path, eval_dataset=(loader := make_loader(make_model())))
    model = trainer.model
    result = packhorse.evaluate(model, loader)

    def mean(order: int = 1, ignored: bool = False) -> torch.Tensor:
        sums, total = [], 0.0
        for batch in list(make_loader(model))[::order]:
            weights = batch.info.loss_weights
            factors = (batch["labels"] != -100).float()
            if weights is not None and not ignored:
                factors *= weights
            with torch.no_grad():
                logits = model(**model_inputs(batch)).logits
            losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
            sums.append((losses * factors.flatten()).sum())
            total += float(factors.sum())
        return torch.stack(sums).sum() / total

    model.eval()
    parity.check(
        "loss",
        largest_difference(result.loss, mean()),
        noise_floor(mean(), mean(-1)),
        largest_difference(mean(ignored=True), mean()),
    )
    assert result.tokens == sum(batch.info.supervised for batch in make_loader(model))
    assert trainer.evaluate()["eval_loss"] == result.loss


# --- what cannot have weights -------------------------------------------------------------------------------


def test_a_function_that_labels_a_whole_batch_rejects_weighted_examples() -> None:
    from packhorse.collate.raw_batched import collate_batched, render_examples
    from packhorse.families import Encoder

    def call(read: Any, encoder: Any) -> Any:
        return encoder.processor(text=render_examples(read, encoder), padding=True, return_tensors="pt")

    encoder = Encoder(processor(NAME))
    plain = [row(1, {}, {}), row(2, {}, {})]
    assert "labels" in collate_batched(plain, encoder, call)
    for example in (row(1, {}, {}, weight=2), row(1, {"train": False}, {})):
        with raises_config("weight", match="sample 1 of the batch has loss weights"):
            collate_batched([plain[0], example], encoder, call)


def test_a_function_that_encodes_each_example_returns_weights() -> None:
    collate = COLLATE_FNS["default"]
    batch = collate([row(1, {}, {}), row(2, {"weight": 0.5}, {})], processor(NAME))
    weights = batch["loss_weights"]
    assert weights.shape == batch["labels"].shape
    assert set(weights[0].tolist()) == {1.0}
    assert set(weights[1].tolist()) == {0.5, 1.0}
    assert count_supervised([batch]) == float(weights[batch["labels"] != -100].sum())


def test_a_pipeline_rejects_weighted_batches() -> None:
    from packhorse.integrations.pipelining import pipeline_inputs

    model = make_model()
    (batch,) = make_loader(model, [row(1, {"weight": 0.5}, {})], gradient_accumulation_steps=1)
    with raises_config("loss_weights", match="a pipeline cannot apply"):
        pipeline_inputs(batch, 1, None, model.config)
