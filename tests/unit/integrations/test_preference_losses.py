"""Log-probabilities of documents, reference values, and the losses against their formulas."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import packhorse
from contract.processors import processor
from contract.tiny_models import tiny_model
from loader_samples import chat
from noise_floor import largest_difference, noise_floor, relative_difference
from packhorse.chat import IGNORE_INDEX
from packhorse.collate_fns import model_inputs
from packhorse.errors import ConfigError
from packhorse.families import logits as logits_module
from packhorse.integrations import preference as preference_module
from packhorse.integrations.loss import token_log_probs
from packhorse.integrations.preference import (
    LogProbCache,
    count_preferences,
    document_log_probs,
    document_rewards,
    dpo_loss,
    kl_term,
    kto_loss,
    mismatched_batch,
    reference_log_probs,
    reward_loss,
)
from packhorse.types import Batch, to_device
from raising import raises_config

PAIRS = [
    {"prompt": f"Number {n}?", "chosen": "so " * (n % 3 + 1), "rejected": "no " * (n % 4 + 2)}
    for n in range(4)
]
LABELLED = [
    {"prompt": f"Number {n}?", "completion": "so " * (n % 3 + 1), "label": n % 2 == 0} for n in range(4)
]


def load(rows: list[dict[str, Any]], **settings: Any) -> list[Batch]:
    settings = {"task": "preference", "pack_size": 700, "num_workers": 0, **settings}
    model = tiny_model("qwen2_vl")
    return list(packhorse.load(rows, processor("qwen2_vl"), model=model, effort=0, **settings))


def roles(batch: Batch) -> list[str]:
    return [role for row in batch.info.document_roles for role in row]


def random_logits(batch: Batch, seed: int = 0, width: int = 300) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*batch.info.labels.shape, width, generator=generator, requires_grad=True)


def loop_over_documents(logits: torch.Tensor, batch: Batch, order: int = 1) -> torch.Tensor:
    """Log-probabilities of documents, one after the other, from lengths alone."""
    found = []
    for row, lengths in enumerate(batch.info.document_lengths):
        start = 0
        for length in lengths:
            labels = batch.info.labels[row, start : start + length]
            kept = torch.nonzero(labels != IGNORE_INDEX).flatten().tolist()[::order]
            scores = logits[row, start : start + length].log_softmax(-1)
            found.append(sum((scores[n, labels[n]] for n in kept), torch.zeros(())))
            start += length
    return torch.stack(found)


@pytest.mark.parametrize(
    "settings",
    [{}, {"batch_size": 2, "max_documents": 4}, {"mode": "pad", "batch_size": 2}],
    ids=["a pack", "two packs", "padded"],
)
def test_log_probabilities_are_sums_over_the_supervised_tokens_of_each_document(
    settings: dict[str, Any], parity: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logits_module, "CHUNK_TOKENS", 5)  # several pieces, the last one short
    for batch in load(PAIRS, **settings):
        logits = random_logits(batch)
        found = document_log_probs(logits, batch)
        expected, other = (loop_over_documents(logits, batch, order) for order in (1, -1))
        factors = torch.arange(1.0, len(found) + 1)
        gradients = [
            torch.autograd.grad((values * factors).sum(), logits, retain_graph=True)[0]
            for values in (found, expected, other, expected.roll(1))
        ]
        parity.check(
            "log-probabilities",
            largest_difference(found, expected),
            noise_floor(expected, other),
            largest_difference(found, expected.roll(1)),
        )
        parity.check(
            "gradient",
            relative_difference(gradients[0], gradients[1]),
            noise_floor(gradients[1], gradients[2], measure=relative_difference),
            relative_difference(gradients[3], gradients[1]),
        )


def test_bfloat16_logits_are_summed_in_float32_and_get_a_bfloat16_gradient() -> None:
    (batch,) = load(PAIRS)
    logits = random_logits(batch).detach().bfloat16().requires_grad_()
    found = document_log_probs(logits, batch)
    assert found.dtype == torch.float32
    assert torch.equal(found, document_log_probs(logits.float(), batch))
    found.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_token_log_probabilities_of_labels_of_another_shape_are_rejected() -> None:
    with raises_config("labels", (1, 3)):
        token_log_probs(torch.zeros(1, 4, 5), torch.zeros(1, 3, dtype=torch.int64))


def test_a_batch_without_pairs_contributes_zero_and_zero_gradients() -> None:
    """A rank that has only placeholders in a step still runs its backward pass."""
    rows = PAIRS[:1]
    options = {"world": packhorse.World(1, 2)}
    (batch,) = load(rows, **options)
    assert batch.info.is_padding
    logits = random_logits(batch)
    log_probs = document_log_probs(logits, batch)
    for loss, metrics in (
        dpo_loss(log_probs, log_probs, batch, pairs=3),
        kto_loss(log_probs, log_probs, batch, examples=3),
        reward_loss(document_rewards(logits[..., 0], batch), batch, pairs=3),
    ):
        assert float(loss.detach()) == 0
        assert set(metrics) <= {"kl"}
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        assert not gradient.any()


def values_of(batch: Batch, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    number = len(roles(batch))
    return torch.randn(number, generator=generator) * 9 - 40, torch.randn(number, generator=generator) - 40


def test_dpo_is_its_formula(parity: Any) -> None:
    (batch,) = load(PAIRS)
    log_probs, reference = values_of(batch)
    chosen = [n for n, role in enumerate(roles(batch)) if role == "chosen"]
    ratios = log_probs - reference
    delta = torch.stack([ratios[n] - ratios[n + 1] for n in chosen])
    formulas = {
        ("sigmoid", 0.0): -F.logsigmoid(0.2 * delta),
        ("sigmoid", 0.1): -0.9 * F.logsigmoid(0.2 * delta) - 0.1 * F.logsigmoid(-0.2 * delta),
        ("robust", 0.1): (-0.9 * F.logsigmoid(0.2 * delta) + 0.1 * F.logsigmoid(-0.2 * delta)) / 0.8,
        ("hinge", 0.0): (1 - 0.2 * delta).clamp(min=0),
    }
    for (loss_type, smoothing), losses in formulas.items():
        options: Any = {"beta": 0.2, "loss_type": loss_type, "label_smoothing": smoothing}
        found, metrics = dpo_loss(log_probs, reference, batch, **options)
        floor = noise_floor(losses.mean(), losses.flip(0).mean())
        swapped = dpo_loss(reference, log_probs, batch, **options).loss
        parity.check(loss_type, abs(float(found - losses.mean())), floor, abs(float(swapped - losses.mean())))
        assert float(metrics["rewards/accuracies"]) == float((delta > 0).float().mean())
        share = dpo_loss(log_probs, reference, batch, pairs=8, replicas=2, **options).loss
        assert torch.equal(share, found * 4 * (2 / 8))


def test_no_call_for_plain_answers_trains_on_preference_data(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    class PackedTrainer(packhorse.TrainFromLoader, Trainer):
        pass

    model = copy.deepcopy(tiny_model("qwen2_vl"))
    loader = packhorse.load(PAIRS, processor("qwen2_vl"), model=model, task="preference", pack_size=700)
    (batch,) = loader
    with torch.no_grad():
        assert model(**batch).loss is None
    with raises_config("task", "preference", match="dpo_loss"):
        packhorse.evaluate(model, loader)
    with raises_config("task", "preference", match="dpo_loss"):
        PackedTrainer(model, TrainingArguments(str(tmp_path), report_to=[]), loader=loader)
    with raises_config("pipeline_microbatches", 2):
        load(PAIRS, pipeline_microbatches=2)


def test_steps_of_accelerate_are_divided_by_pairs(tmp_path: Path) -> None:
    from accelerate import Accelerator

    from packhorse.integrations.accelerate import attach, steps

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = tiny_model("qwen2_vl")
    options: dict[str, Any] = {"task": "preference", "pack_size": 150, "gradient_accumulation_steps": 2}
    loader = packhorse.load(PAIRS, processor("qwen2_vl"), model=model, **options)
    attach(accelerator, loader)
    counted = [(len(batches), number) for batches, number in steps(accelerator, loader)]
    assert [number for _, number in counted] == [2, 2]


def test_wrong_settings_and_wrong_batches_are_rejected() -> None:
    (pairs,), (labelled,) = load(PAIRS), load(LABELLED)
    (plain,) = load([chat("why", "so")], task="sft")
    log_probs, reference = values_of(pairs)
    with raises_config("label_smoothing", 0.5):
        dpo_loss(log_probs, reference, pairs, label_smoothing=0.5)
    with raises_config("label_smoothing", 0.1):
        dpo_loss(log_probs, reference, pairs, label_smoothing=0.1, loss_type="ipo")
    with raises_config("loss_type", "sigmod", match="sigmoid"):
        dpo_loss(log_probs, reference, pairs, loss_type="sigmod")  # type: ignore[arg-type]
    with raises_config("reference"):
        dpo_loss(log_probs, reference[:-1], pairs)
    with raises_config("batch", "bad, good"):
        dpo_loss(*values_of(labelled), labelled)
    with raises_config("batch", "chosen, rejected"):
        kto_loss(log_probs, reference, pairs)
    with raises_config("batch", "chosen, rejected"):
        mismatched_batch(pairs)
    with raises_config("batch", "plain answers", match='task="preference"'):
        reward_loss(values_of(plain)[0], plain)
    with raises_config("batch", match="expected a batch of a loader"):
        document_log_probs(random_logits(pairs), dict(pairs))  # type: ignore[arg-type]
    with raises_config("values"):
        document_rewards(torch.zeros(1, 3), pairs)


@pytest.mark.parametrize("settings", [{}, {"mode": "pad", "batch_size": 4}, {"alignment": 8}])
def test_a_reward_is_the_value_at_the_last_token_of_a_document(settings: dict[str, Any]) -> None:
    (batch,) = load(PAIRS, **settings)
    last = []
    for row, lengths in enumerate(batch.info.document_lengths):
        start = 0
        for length in lengths:
            last.append((row, start + length - 1))
            start += length + -length % settings.get("alignment", 1)
    values = torch.randn(batch.info.labels.shape, requires_grad=True)
    rewards = document_rewards(values[..., None], batch)
    assert rewards.tolist() == [float(values[place]) for place in last]
    loss, metrics = reward_loss(rewards, batch, center_rewards_coefficient=0.5)
    chosen, rejected = rewards[::2], rewards[1::2]
    expected = (-F.logsigmoid(chosen - rejected) + 0.5 * (chosen + rejected) ** 2).mean()
    assert torch.allclose(loss, expected)
    assert torch.allclose(metrics["rewards/margins"], (chosen - rejected).mean())
    (gradient,) = torch.autograd.grad(loss, values)
    assert sorted(map(tuple, gradient.nonzero().tolist())) == sorted(last)


# The reference.


def test_reference_values_are_cached_by_row_and_survive_in_a_file(tmp_path: Path) -> None:
    model, path = copy.deepcopy(tiny_model("qwen2_vl")), tmp_path / "reference.jsonl"
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    cache: dict[str, list[float]] = {}
    first = [reference_log_probs(model.train(), batch, cache) for batch in load(PAIRS, pack_size=150)]
    assert model.training
    assert all(not values.requires_grad for values in first)
    ran = len(calls)
    assert ran > 1
    assert {key: len(values) for key, values in cache.items()} == {str(n): 2 for n in range(4)}
    stored = LogProbCache(path)
    for key, values in cache.items():
        stored[key] = values
    with open(path, "a") as file:
        file.write('{"9": [-1.0')  # a run was killed while it wrote
    reopened = LogProbCache(path)
    assert dict(reopened) == cache
    reopened["10"] = cache["10"] = [-2.0]
    assert dict(LogProbCache(path)) == dict(reopened) == cache
    for batches in (load(PAIRS, pack_size=150), load(PAIRS, mode="pad", batch_size=2)):
        for batch in batches:
            values = reference_log_probs(model, batch, reopened)
            assert values.tolist() == [value for key in batch.info.keys for value in cache[key]]
    assert len(calls) == ran
    with pytest.raises(TypeError):
        del reopened["0"]


def test_ranks_that_share_a_file_read_what_the_others_have_written(tmp_path: Path) -> None:
    first, second = (LogProbCache(tmp_path / "reference.jsonl") for _ in range(2))
    first["a"], second["b"] = [-1.0, -2.0], [-3.0]
    assert first["b"] == [-3.0]
    assert "a" in second
    assert "c" not in second
    first["c"] = [-4.0]
    assert "c" in second
    assert dict(first) == dict(second) == dict(LogProbCache(tmp_path / "reference.jsonl"))


def test_a_cache_does_not_take_mismatched_documents_for_their_rows() -> None:
    model = tiny_model("qwen2_vl")
    (batch,) = load(LABELLED)
    mismatched, cache = mismatched_batch(batch), dict[str, list[float]]()
    expected = reference_log_probs(model, mismatched)
    own = reference_log_probs(model, batch, cache)
    for _ in range(2):  # the second time from the cache
        assert torch.equal(reference_log_probs(model, mismatched, cache), expected)
        assert torch.equal(reference_log_probs(model, batch, cache), own)
    assert not torch.equal(own, expected)
    assert len(cache) == 2 * len(LABELLED)


def test_a_reference_for_another_attention_is_rejected() -> None:
    from packhorse.integrations.attention import use_attention

    model = copy.deepcopy(tiny_model("qwen2_vl"))
    (batch,) = load(PAIRS)
    use_attention(model, "eager")
    with pytest.raises(ConfigError, match="eager"):
        reference_log_probs(model, batch)


def test_an_adapter_that_is_switched_off_is_the_reference() -> None:
    from peft import LoraConfig, get_peft_model

    base = copy.deepcopy(tiny_model("qwen2_vl"))
    (batch,) = load(PAIRS)
    expected = reference_log_probs(base, batch)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    assert not torch.equal(reference_log_probs(model, batch), expected)
    with model.disable_adapter():
        assert torch.equal(reference_log_probs(model, batch), expected)


# KTO.


@pytest.mark.parametrize(
    "settings",
    [{}, {"batch_size": 2, "max_documents": 2}, {"mode": "pad", "batch_size": 4}, {"pad_to_size": True}],
    ids=["a pack", "two packs", "padded", "padded to the pack size"],
)
def test_each_prompt_of_a_mismatched_batch_has_the_answer_of_the_document_before(
    settings: dict[str, Any],
) -> None:
    (batch,) = load(LABELLED, **settings)
    mismatched = mismatched_batch(batch)
    tokenizer = processor("qwen2_vl").tokenizer

    def texts(batch: Batch) -> list[tuple[str, str]]:
        found = []
        for row, lengths in enumerate(batch.info.document_lengths):
            start = 0
            for length in lengths:
                ids = batch["input_ids"][row, start : start + length]
                labels = batch.info.labels[row, start : start + length]
                first = int((labels != IGNORE_INDEX).nonzero()[0])
                assert torch.equal(ids[first + 1 :], labels[first:-1])
                if "position_ids" in batch:
                    positions = batch["position_ids"][..., row, start : start + length]
                    assert torch.equal(positions, torch.arange(length).expand_as(positions))
                answer = labels[labels != IGNORE_INDEX]
                found.append((tokenizer.decode(ids[: first + 1]), tokenizer.decode(answer)))
                start += length
        return found

    prompts, answers = zip(*texts(batch), strict=True)
    assert texts(mismatched) == list(zip(prompts, [*answers[-1:], *answers[:-1]], strict=True))
    assert mismatched.keys() == batch.keys()
    assert roles(mismatched) == roles(batch)
    if settings.get("pad_to_size"):
        assert mismatched["input_ids"].shape == batch.info.labels.shape
    keys = [key for row in batch.info.document_keys for key in row if key]
    pairs = zip(keys, [*keys[-1:], *keys[:-1]], strict=True)
    found = [key for row in to_device(mismatched, "cpu").info.document_keys for key in row if key]
    assert found == [f"{key} with the answer of {other}" for key, other in pairs]


def test_a_single_document_does_not_count_for_the_kl_term() -> None:
    (batch,) = load(LABELLED[:1])
    mismatched = mismatched_batch(batch)
    assert [len(row) for row in mismatched.info.document_roles] == [1]
    assert roles(mismatched) == [""]
    assert float(kl_term(torch.tensor([5.0]), torch.tensor([1.0]), mismatched)) == 0


def test_batches_of_one_answer_are_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    preference_module._warn_about_single_answer.cache_clear()
    (several,) = load(LABELLED)
    mismatched_batch(several)
    assert caplog.messages == []
    for batch in load(LABELLED, max_documents=1):
        mismatched_batch(batch)
    (message,) = caplog.messages
    assert "a batch has a single labelled answer" in message
    assert "Use at least 2 rows in a batch" in message


def test_aligned_documents_cannot_be_mismatched() -> None:
    (batch,) = load(LABELLED, alignment=64)
    with pytest.raises(ConfigError, match="alignment"):
        mismatched_batch(batch)


def test_kto_is_its_formula(parity: Any) -> None:
    (batch,) = load(LABELLED)
    log_probs, reference = values_of(batch)
    good = torch.tensor([role == "good" for role in roles(batch)])
    ratios = log_probs - reference
    losses = torch.where(
        good, 2 * (1 - torch.sigmoid(0.2 * (ratios - 1.5))), 3 * (1 - torch.sigmoid(0.2 * (1.5 - ratios)))
    )
    options: Any = {"beta": 0.2, "desirable_weight": 2.0, "undesirable_weight": 3.0}
    found, metrics = kto_loss(log_probs, reference, batch, 1.5, **options)
    floor = noise_floor(losses.mean(), losses.flip(0).mean())
    without = kto_loss(log_probs, reference, batch, **options).loss
    parity.check("kto", abs(float(found - losses.mean())), floor, abs(float(without - losses.mean())))
    assert float(metrics["kl"]) == 1.5
    apo = kto_loss(log_probs, reference, batch, 1.5, loss_type="apo_zero_unpaired", **options).loss
    assert torch.equal(apo, without)
    share = kto_loss(log_probs, reference, batch, 1.5, examples=8, replicas=2, **options).loss
    assert torch.equal(share, found * 4 * (2 / 8))


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A real group of this one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_numbers_of_a_step_are_summed_over_ranks() -> None:
    batches = load(PAIRS, pack_size=150)
    assert count_preferences(batches) == 4
    (batch,) = load(LABELLED)
    mismatched = mismatched_batch(batch)
    log_probs, reference = values_of(batch)
    expected = (log_probs - reference).mean().clamp(min=0)
    assert torch.allclose(kl_term(log_probs, reference, mismatched), expected)


def test_packed_and_padded_batches_have_the_same_log_probabilities(parity: Any) -> None:
    model = tiny_model("qwen2_vl")
    found: list[dict[str, torch.Tensor]] = []
    for settings in ({}, {"mode": "pad", "batch_size": 4}, {"mode": "pad", "batch_size": 1}):
        values: dict[str, torch.Tensor] = {}
        for batch in load(PAIRS, **settings):
            with torch.no_grad():
                log_probs = document_log_probs(model(**model_inputs(batch)).logits, batch)
            keys = [key for row in batch.info.document_keys for key in row]
            values |= {
                f"{key}/{role}": value for key, role, value in zip(keys, roles(batch), log_probs, strict=True)
            }
        found.append({key: values[key] for key in sorted(values)})
    packed, padded, alone = found
    wrong = dict(zip(alone, [*list(alone.values())[1:], alone["0/chosen"]], strict=True))
    parity.check(
        "log-probabilities",
        largest_difference(packed, alone),
        noise_floor(alone, padded),
        largest_difference(wrong, alone),
    )
