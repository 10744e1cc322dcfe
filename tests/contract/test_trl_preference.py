"""DPO, KTO and reward losses on packed pairs equal TRL's trainers on a batch of TRL's own collator.

For rows with images; the reward model also for rows of text, which its own collator and tokenization take.

TRL counts everything that the template writes after the prompt as the answer, also the line break after its
end; Packhorse supervises up to the end of the turn. So the templates here write nothing after the last
answer. What TRL's own computation differs by with the rows in another order, alone, or with another kernel,
is the noise floor. The control compares pairs with the reference of other pairs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import packhorse
from contract.processors import FAMILIES
from contract.separate import gradients_of
from contract.tiny_models import tiny_model
from noise_floor import ParityRecorder, noise_floor, relative_difference
from packhorse.chat import IGNORE_INDEX
from packhorse.collate_fns import model_inputs
from packhorse.integrations.attention import use_attention
from packhorse.integrations.preference import (
    document_log_probs,
    document_rewards,
    dpo_loss,
    kl_term,
    kto_loss,
    mismatched_batch,
    reference_log_probs,
    reward_loss,
)
from packhorse.types import Batch

pytestmark = pytest.mark.needs_trl

NAMES = ("qwen2_5_vl", "gemma3", "smolvlm")
# Images of Gemma attend in both directions, which a causal kernel cannot do.
KTO = [
    (name, backend)
    for name in NAMES
    for backend in ("sdpa", "eager", "varlen", "pad")
    if (name, backend) != ("gemma3", "varlen")
]
SETTINGS: dict[str, Any] = {
    **{"use_cpu": True, "report_to": "none", "bf16": False, "gradient_checkpointing": False},
    "per_device_train_batch_size": 3,
}
CENTER = 0.1  # factor of the centering term of a reward model
LOSSES = {"sigmoid": 0.0, "ipo": 0.0, "hinge": 0.0, "robust": 0.1}
Result = tuple[float, dict[str, torch.Tensor]]


def processor_of(name: str) -> Any:
    """The processor of a family whose template writes nothing after the last answer."""
    made = FAMILIES[name].build()
    answered = "messages[-1]['role'] == 'assistant' and text[-1:] == '\\n'"
    written = "{{ text[:-1] if " + answered + " else text }}"
    made.chat_template = "{% set text %}" + made.chat_template + "{% endset %}" + written
    return made


def say(role: str, text: str, images: int = 0) -> dict[str, Any]:
    return {"role": role, "content": [*[{"type": "image"}] * images, {"type": "text", "text": text}]}


def prompts() -> list[dict[str, Any]]:
    """One image, two images, and two turns of which the first answer is part of the prompt."""
    draw = np.random.default_rng(7)

    def images(number: int) -> list[Image.Image]:
        sizes = draw.integers(60, 130, (number, 2)).tolist()
        return [Image.fromarray(draw.integers(0, 256, (*size, 3), np.uint8)) for size in sizes]

    return [
        {"images": images(1), "prompt": [say("user", "What is it?", 1)]},
        {"images": images(2), "prompt": [say("user", "Which of them is the cat?", 2)]},
        {
            "images": images(1),
            "prompt": [say("user", "Look at the cat.", 1), say("assistant", "Yes."), say("user", "And?")],
        },
    ]


def pair_rows() -> list[dict[str, Any]]:
    answers = [("A cat in the hat.", "the dog"), ("the one at", "not here, in there"), ("so on", "a b c d e")]
    return [
        {**row, "chosen": [say("assistant", good)], "rejected": [say("assistant", bad)]}
        for row, (good, bad) in zip(prompts(), answers, strict=True)
    ]


def labelled_rows() -> list[dict[str, Any]]:
    answers = [("A cat in the hat.", True), ("not here, in there", False), ("so on", True)]
    return [
        {**row, "completion": [say("assistant", answer)], "label": label}
        for row, (answer, label) in zip(prompts(), answers, strict=True)
    ]


def load(rows: list[dict[str, Any]], name: str, model: Any, **settings: Any) -> Batch:
    """One batch of all rows, in their order."""
    settings = {"pack_size": 4096, "effort": 0, "num_workers": 0, **settings}
    (batch,) = packhorse.load(rows, processor_of(name), model=model, task="preference", **settings)
    return batch


class Trl:
    """A trainer of TRL, and its loss for rows.

    Args:
        trainer: of TRL.
        collate: from rows to a batch as the trainer's collator makes it.
    """

    def __init__(self, trainer: Any, collate: Callable[[list[dict[str, Any]]], Any]) -> None:
        self.trainer, self.collate = trainer, collate

    @classmethod
    def preferences(cls, name: str, kind: str, folder: Path, seeds: tuple[int, int] = (0, 1)) -> Trl:
        """With a model and a reference, for DPO or KTO."""
        from datasets import Dataset
        from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

        trainer, config = (DPOTrainer, DPOConfig) if kind == "dpo" else (KTOTrainer, KTOConfig)
        rows = pair_rows() if kind == "dpo" else labelled_rows()
        made = trainer(
            copy.deepcopy(tiny_model(name, seeds[0])),
            copy.deepcopy(tiny_model(name, seeds[1])),
            args=config(str(folder), max_length=None, **SETTINGS),
            # Only the names of its columns are read.
            train_dataset=Dataset.from_list([{**rows[0], "images": rows[0]["images"][:1]}]),
            processing_class=processor_of(name),
        )
        return cls(made, made.data_collator)

    @classmethod
    def rewards(cls, name: str, model: Any, folder: Path) -> Trl:
        """With a reward model; rows with images are collated as for DPO, which its own collator cannot do."""
        from datasets import Dataset
        from trl import RewardConfig, RewardTrainer
        from trl.trainer.dpo_trainer import DataCollatorForVisionPreference

        processor = processor_of(name)
        tokenizer = getattr(processor, "tokenizer", processor)
        tokenizer.chat_template = processor.chat_template
        args = RewardConfig(str(folder), max_length=None, center_rewards_coefficient=CENTER, **SETTINGS)
        unused = Dataset.from_list([{"chosen_ids": [1], "rejected_ids": [1]}])
        trainer = RewardTrainer(model, args, train_dataset=unused, processing_class=tokenizer)

        def collate(rows: list[dict[str, Any]]) -> Any:
            if "images" in rows[0]:
                batch = DataCollatorForVisionPreference(processor)(rows)
                del batch["completion_mask"]
                return batch
            prepared = trainer._prepare_dataset(Dataset.from_list(rows), tokenizer, args, "train")
            return trainer.data_collator(list(prepared))

        return cls(trainer, collate)

    def run(self, rows: list[dict[str, Any]], attention: str = "sdpa") -> Result:
        """Return loss and gradients of TRL's own batch of these rows."""
        model = self.trainer.model
        for one in filter(None, (model, getattr(self.trainer, "ref_model", None))):
            use_attention(one, attention)
        batch = self.collate(copy.deepcopy(rows))
        loss = self.trainer.compute_loss(model, batch)
        loss.backward()
        return float(loss), gradients_of(model)

    def run_otherwise(self, rows: list[dict[str, Any]]) -> list[Result]:
        """Return what other correct computations of the mean over the same rows give."""
        alone = [self.run([row]) for row in rows]
        mean = {name: sum(gradients[name] for _, gradients in alone) / len(rows) for name in alone[0][1]}
        return [
            (sum(loss for loss, _ in alone) / len(rows), mean),
            *(self.run([*rows[n:], *rows[:n]]) for n in range(1, len(rows))),
            self.run(rows[::-1]),
            self.run(rows, "eager"),
        ]


def check(
    parity: ParityRecorder,
    what: str,
    found: Result,
    expected: Result,
    others: Sequence[Result],
    control: Result,
) -> None:
    """Compare a loss and its gradients with those of TRL."""
    floor = noise_floor(expected[0], *(loss for loss, _ in others))
    parity.check(f"{what} loss", abs(found[0] - expected[0]), floor, abs(control[0] - expected[0]))
    floor = noise_floor(expected[1], *(gradients for _, gradients in others), measure=relative_difference)
    parity.check(
        f"{what} gradients",
        relative_difference(found[1], expected[1]),
        floor,
        relative_difference(control[1], expected[1]),
    )


def backward(model: Any, loss: torch.Tensor) -> Result:
    loss.backward()
    return float(loss), gradients_of(model)


@pytest.fixture(scope="module")
def dpo(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trl]:
    return cache(lambda name: Trl.preferences(name, "dpo", tmp_path_factory.mktemp("trl")))


@pytest.fixture(scope="module")
def expected(dpo: Callable[[str], Trl]) -> Callable[[str, str], tuple[Result, list[Result]]]:
    """TRL's loss and gradients for a family and a loss type, and its other computations of the same."""

    @cache
    def expect(name: str, loss_type: str) -> tuple[Result, list[Result]]:
        trl = dpo(name)
        trl.trainer.loss_types, trl.trainer.label_smoothing = [loss_type], LOSSES[loss_type]
        return trl.run(pair_rows()), trl.run_otherwise(pair_rows())

    return expect


@pytest.mark.parametrize("mode", ["pack", "pad"])
@pytest.mark.parametrize("name", NAMES)
def test_dpo_on_pairs_of_a_batch_equals_the_trainer_of_trl(
    name: str,
    mode: str,
    expected: Callable[[str, str], tuple[Result, list[Result]]],
    parity: ParityRecorder,
) -> None:
    model, frozen = (copy.deepcopy(tiny_model(name, seed)) for seed in (0, 1))
    batch = load(pair_rows(), name, model, mode=mode, batch_size=1 if mode == "pack" else 3)
    assert [role for row in batch.info.document_roles for role in row] == ["chosen", "rejected"] * 3
    reference = reference_log_probs(frozen, batch)

    def run(against: torch.Tensor, loss_type: Any) -> Result:
        log_probs = document_log_probs(model(**model_inputs(batch, model)).logits, batch)
        smoothing = LOSSES[loss_type]
        found = dpo_loss(log_probs, against, batch, loss_type=loss_type, label_smoothing=smoothing)
        return backward(model, found.loss)

    for loss_type in LOSSES:
        right, others = expected(name, loss_type)
        check(parity, loss_type, run(reference, loss_type), right, others, run(reference.roll(2), loss_type))


def test_metrics_are_those_of_trl(dpo: Callable[[str], Trl], parity: ParityRecorder) -> None:
    trl, rows, name = dpo("qwen2_5_vl"), pair_rows(), "qwen2_5_vl"
    trl.trainer.loss_types, trl.trainer.label_smoothing = ["sigmoid"], 0.0
    batch = load(rows, name, tiny_model(name))
    measured = []
    for attention in ("sdpa", "eager"):
        for order in (rows, rows[::-1], [*rows[1:], rows[0]], [*rows[2:], *rows[:2]]):
            trl.trainer._metrics["eval"].clear()
            trl.run(order, attention)
            measured.append({key: value[0] for key, value in trl.trainer._metrics["eval"].items()})
    with torch.no_grad():
        log_probs = document_log_probs(tiny_model(name)(**model_inputs(batch)).logits, batch)
    reference = reference_log_probs(tiny_model(name, 1), batch)
    metrics = dpo_loss(log_probs, reference, batch).metrics
    swapped = dpo_loss(reference, log_probs, batch).metrics
    accuracy = metrics.pop("rewards/accuracies")
    assert torch.equal(accuracy, torch.tensor(measured[0]["rewards/accuracies"]))
    for key, value in metrics.items():
        right, *others = (found[key] for found in measured)
        parity.check(
            key, abs(float(value) - right), noise_floor(right, *others), abs(float(swapped[key]) - right)
        )


@pytest.mark.parametrize("name", NAMES)
def test_the_templates_of_models_end_in_a_line_break_that_only_trl_supervises(name: str) -> None:
    from trl.trainer.dpo_trainer import DataCollatorForVisionPreference

    made, rows = FAMILIES[name].build(), pair_rows()
    theirs = DataCollatorForVisionPreference(made)(copy.deepcopy(rows))
    pairs = zip(theirs["input_ids"], theirs["completion_mask"], strict=True)
    answers = [made.tokenizer.decode(ids[mask.bool()]) for ids, mask in pairs]
    (batch,) = packhorse.load(rows, made, model=tiny_model(name), task="preference", num_workers=0)
    assert batch.info.document_ids is not None
    assert batch.info.labels is not None
    order = [int(key) + len(rows) * second for key in batch.info.keys for second in (0, 1)]
    for number, place in enumerate(order, 1):
        labels = batch.info.labels[batch.info.document_ids == number]
        assert made.tokenizer.decode(labels[labels != IGNORE_INDEX]) + "\n" == answers[place]


@pytest.mark.parametrize(("name", "backend"), KTO)
def test_kto_on_a_batch_equals_the_trainer_of_trl(
    name: str, backend: str, tmp_path: Path, parity: ParityRecorder
) -> None:
    """With its KL term, for which each prompt gets the answer of the row before it."""
    rows, seeds = labelled_rows(), (0, 1)
    mode = "pad" if backend == "pad" else "pack"
    keys = load(rows, name, tiny_model(name), mode=mode, batch_size=3).info.keys
    rows = [rows[int(key)] for key in keys]  # the KL term depends on the order
    trl = Trl.preferences(name, "kto", tmp_path, seeds)
    right = trl.run(rows)
    if not trl.trainer._metrics["eval"]["kl"][0]:  # negative, so 0: it is positive the other way round
        seeds = (1, 0)
        trl = Trl.preferences(name, "kto", tmp_path, seeds)
        right = trl.run(rows)
    assert trl.trainer._metrics["eval"]["kl"][0] > 0
    others = [trl.run([*rows[n:], *rows[:n]], attention) for attention in ("sdpa", "eager") for n in range(3)]
    model, frozen = (copy.deepcopy(tiny_model(name, seed)) for seed in seeds)
    for one in (model, frozen):
        use_attention(one, "sdpa" if backend == "pad" else backend)
    batch = load(labelled_rows(), name, model, mode=mode, batch_size=3 if backend == "pad" else 1)
    assert batch.info.keys == keys
    mismatched = mismatched_batch(batch)
    with torch.no_grad():
        log_probs = document_log_probs(model(**model_inputs(mismatched, model)).logits, mismatched)
    kl = kl_term(log_probs, reference_log_probs(frozen, mismatched), mismatched)

    def run(point: torch.Tensor) -> Result:
        found = document_log_probs(model(**model_inputs(batch, model)).logits, batch)
        return backward(model, kto_loss(found, reference_log_probs(frozen, batch), batch, point).loss)

    check(parity, "kto", run(kl), right, others, run(kl * 0))


def text_rows() -> list[dict[str, Any]]:
    """The same pairs as texts, with strings as templates of text models take them."""
    turns = ("prompt", "chosen", "rejected")
    return [
        {part: [{**turn, "content": turn["content"][-1]["text"]} for turn in row[part]] for part in turns}
        for row in pair_rows()
    ]


def reward_model(name: str) -> Any:
    """A released reward model around the weights of a tiny model (Gemma 3), or of text alone (Qwen 2)."""
    from transformers import Gemma3ForSequenceClassification, Qwen2Config, Qwen2ForSequenceClassification

    tiny = tiny_model(name)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        if name == "gemma3":
            model = Gemma3ForSequenceClassification(copy.deepcopy(tiny.config))
            model.model.load_state_dict(tiny.model.state_dict())
        else:
            text = tiny.config.get_text_config()
            sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
            heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
            model = Qwen2ForSequenceClassification(
                Qwen2Config(**{size: getattr(text, size) for size in sizes}, **heads, initializer_range=0.2)
            )
        model.score = torch.nn.Linear(model.score.in_features, 1, bias=False)
    model.config.num_labels = 1
    return model.eval()


@pytest.mark.parametrize("mode", ["pack", "pad"])
@pytest.mark.parametrize(
    ("name", "media"), [("gemma3", "images"), ("gemma3", "text"), ("qwen2_5_vl", "text")]
)
def test_rewards_on_pairs_of_a_batch_equal_the_trainer_of_trl(
    name: str, media: str, mode: str, tmp_path: Path, parity: ParityRecorder
) -> None:
    """The label shift removes the line break that these templates write after the last answer."""
    model, rows = reward_model(name), pair_rows() if media == "images" else text_rows()
    trl = Trl.rewards(name, copy.deepcopy(model), tmp_path)
    right, others = trl.run(rows), trl.run_otherwise(rows)
    made = FAMILIES[name].build()
    if media == "text" and name != "gemma3":
        made.tokenizer.chat_template = made.chat_template
        made = made.tokenizer
    settings: dict[str, Any] = {"mode": mode, "batch_size": 1 if mode == "pack" else 3, "effort": 0}
    (batch,) = packhorse.load(rows, made, model=model, task="preference", num_workers=0, **settings)

    def run(offset: int) -> Result:
        hidden = model.model(**model_inputs(batch, model)).last_hidden_state
        rewards = document_rewards(model.score(hidden).roll(offset, dims=1), batch)
        return backward(model, reward_loss(rewards, batch, center_rewards_coefficient=CENTER).loss)

    check(parity, "reward", run(0), right, others, run(1))
