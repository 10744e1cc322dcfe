"""Logits of supervised tokens alone, and log-probabilities in chunks, give the loss of all logits.

The expected loss and gradients are those of cross entropy of PyTorch on all logits. The noise floor is what
these differ by with another attention kernel. The control asks for the logits of the tokens next to the
supervised ones, so that its labels belong to other tokens.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import packhorse
from contract.cases import conversation
from contract.processors import processor
from contract.text_models import text_model
from contract.tiny_models import MODELS, tiny_model
from noise_floor import ParityRecorder, noise_floor, relative_difference
from packhorse.chat import IGNORE_INDEX
from packhorse.collate import packed as packed_module
from packhorse.collate_fns import model_inputs
from packhorse.families import logits as logits_module
from packhorse.families.logits import CHUNK_LABELS
from packhorse.integrations import loss as loss_module
from packhorse.integrations.loss import batch_loss, token_log_probs
from packhorse.integrations.preference import document_log_probs, reference_log_probs
from packhorse.types import Batch, to_device
from raising import raises_config

MODES = ("supervised", "chunked")
CASES = ("text", "one image", "many turns")
PACK = {"pack_size": 4096, "pad_to_size": False}
PADDED = {"mode": "pad", "batch_size": len(CASES)}


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits_module, "CHUNK_TOKENS", 7)


def make_model(name: str = "qwen2_vl", attention: str = "sdpa", logits: str = "all") -> Any:
    model = copy.deepcopy(tiny_model(name))
    packhorse.prepare(model, attention, logits=logits)
    return model


def load(name: str, files: dict[str, Path], model: Any, **settings: Any) -> list[Batch]:
    rows = [{"conversation": conversation(name, case, files)} for case in CASES]
    settings = {**PACK, "effort": 0, "placeholder": "never", **settings}
    return list(packhorse.load(rows, processor(name), model=model, **settings))


def result_of(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """The loss and all gradients; the model then has none."""
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {"loss": loss.detach(), **gradients}


def train(model: Any, batch: Batch, wrapper: Any = None, tokens: int = 40) -> dict[str, torch.Tensor]:
    wrapper = model if wrapper is None else wrapper
    output = wrapper(**model_inputs(batch, wrapper))
    return result_of(model, batch_loss(wrapper, output, batch, tokens))


def train_all(
    model: Any, batch: Batch, tokens: int = 40, weights: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    logits = model(**model_inputs(batch)).logits.flatten(0, 1)
    losses = F.cross_entropy(logits, batch["labels"].flatten(), reduction="none")
    losses = losses if weights is None else losses * weights.flatten()
    return result_of(model, losses.sum() / tokens)


class Reading(Exception):
    """A value was read from a device, which waits for it."""


class NoReading(TorchDispatchMode):
    """Raises where a GPU would have to be waited for: the result's shape, or Python, depends on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        # Indices that are a mask are turned into positions first, whose number is read.
        masks = [index for index in args[1] if index is not None] if name in ("index", "index_put_") else []
        if name in ("nonzero", "_local_scalar_dense", "masked_select", "equal", "unique") or any(
            index.dtype == torch.bool for index in masks
        ):
            raise Reading(name)
        return func(*args, **(kwargs or {}))


def train_wrong(model: Any, batch: Batch, tokens: int = 40) -> dict[str, torch.Tensor]:
    """As a model trains that cuts its logits one token away from their labels."""
    inputs = model_inputs(batch, model)
    keep = inputs["logits_to_keep"]
    moved = keep.roll(1, -1) if keep.dtype == torch.bool else (keep - 1).clamp(min=0)
    output = model(**{**inputs, "logits_to_keep": moved})
    return result_of(model, batch_loss(model, output, batch, tokens))


def check(
    parity: ParityRecorder,
    what: str,
    found: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    other: Mapping[str, torch.Tensor],
    wrong: Mapping[str, torch.Tensor],
) -> None:
    assert found.keys() == expected.keys()
    for kind in ("loss", "gradients"):
        chosen = (lambda name: name == "loss") if kind == "loss" else (lambda name: name != "loss")
        a, b, c, d = (
            {name: value for name, value in each.items() if chosen(name)}
            for each in (found, expected, other, wrong)
        )
        floor = noise_floor(b, c, measure=relative_difference)
        parity.check(f"{what}: {kind}", relative_difference(a, b), floor, relative_difference(d, b))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("settings", [PACK, PADDED], ids=["a pack", "rows"])
def test_loss_and_gradients_are_those_of_all_logits(
    name: str, settings: dict[str, Any], files: dict[str, Path], parity: ParityRecorder
) -> None:
    model = make_model(name, "eager")
    other = train_all(model, load(name, files, model, **settings)[0])
    packhorse.prepare(model, "sdpa", logits="all")
    batch = load(name, files, model, **settings)[0]
    assert len(batch["labels"]) == (len(CASES) if settings is PADDED else 1)
    assert "pixel_values" in " ".join(batch)
    expected = train_all(model, batch)
    for mode in MODES:
        assert packhorse.prepare(model, "sdpa", logits=mode).logits == mode
        if mode == "supervised":
            wrong = train_wrong(model, batch)
        with torch.no_grad():
            shape = model(**model_inputs(batch, model)).logits.shape
        leading = (batch.info.supervised,) if settings is PADDED else (1, batch.info.supervised)
        assert shape[:-1] == leading if mode == "supervised" else shape == (batch.info.supervised,)
        check(parity, mode, train(model, batch), expected, other, wrong)


def test_a_compiled_model_computes_chunks(parity: ParityRecorder) -> None:
    model, batch = text_decoder("llama")
    packhorse.prepare(model, "eager", logits="all")
    other = train_all(model, batch)
    compiled = torch.compile(model, backend="eager")
    packhorse.prepare(compiled, "sdpa", logits="chunked")
    expected, wrong = train_all(model, batch), train_wrong(model, batch)
    for _ in range(2):
        check(parity, "chunked", train(model, batch, compiled), expected, other, wrong)
    torch.compiler.reset()


@pytest.mark.parametrize("mode", MODES)
def test_varlen_packs_have_the_same_loss(mode: str, files: dict[str, Path], parity: ParityRecorder) -> None:
    model = make_model(attention="sdpa")
    other = train_all(model, load("qwen2_vl", files, model)[0])
    packhorse.prepare(model, "varlen", logits="supervised")
    (batch,) = load("qwen2_vl", files, model)
    expected, wrong = train_all(model, batch), train_wrong(model, batch)
    packhorse.prepare(model, "varlen", logits=mode)
    check(parity, "varlen", train(model, batch), expected, other, wrong)


@pytest.mark.parametrize("mode", MODES)
def test_adapters_of_the_head_and_the_decoder_get_the_same_gradients(
    mode: str, files: dict[str, Path], parity: ParityRecorder
) -> None:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "lm_head"]
    base = make_model(attention="sdpa", logits=mode)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    (batch,) = load("qwen2_vl", files, base)
    expected = train_all(model, batch)
    assert any("lm_head" in name for name in expected)
    packhorse.prepare(model, "eager", logits="all")
    other = train_all(model, load("qwen2_vl", files, model)[0])
    packhorse.prepare(model, "sdpa", logits="supervised")
    wrong = train_wrong(model, batch)
    packhorse.prepare(model, "sdpa", logits=mode)
    check(parity, mode, train(model, batch), expected, other, wrong)


@pytest.mark.parametrize("mode", MODES)
def test_virtual_tokens_of_prompt_tuning_need_all_logits(mode: str) -> None:
    from peft import PromptTuningConfig, get_peft_model

    base = make_model(attention="sdpa", logits=mode)
    batch = {"input_ids": torch.arange(5, 25)[None], "attention_mask": torch.ones(1, 20, dtype=torch.int64)}
    batch["labels"] = batch["input_ids"].roll(-1, 1).index_fill(1, torch.arange(9), IGNORE_INDEX)
    assert "logits_to_keep" in model_inputs(batch, base)
    model = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    assert "logits_to_keep" not in model_inputs(batch, model)
    assert "logits_to_keep" not in model_inputs(batch, torch.nn.parallel.DataParallel(model))


@pytest.mark.parametrize("settings", [PACK, PADDED], ids=["a pack", "rows"])
@pytest.mark.parametrize("mode", MODES)
def test_loss_weights_are_cut_as_labels_are(
    mode: str, settings: dict[str, Any], files: dict[str, Path], parity: ParityRecorder
) -> None:
    model = make_model(logits="supervised")
    batch = load("qwen2_vl", files, model, **settings)[0]
    weights = torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(0)).mul(2)
    weights[:, ::3] = 0
    object.__setattr__(batch.info, "loss_weights", weights)
    expected, wrong = train_all(model, batch, weights=weights), train_all(model, batch)
    packhorse.prepare(model, "eager", logits="all")
    other = train_all(model, load("qwen2_vl", files, model, **settings)[0], weights=weights)
    packhorse.prepare(model, "sdpa", logits=mode)
    check(parity, mode, train(model, batch), expected, other, wrong)


@pytest.mark.parametrize("settings", [PACK, PADDED], ids=["a pack", "rows"])
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_without_a_label_gives_zero_and_zero_gradients_for_every_weight(
    mode: str, settings: dict[str, Any], files: dict[str, Path]
) -> None:
    model = make_model(logits=mode)
    batch = load("qwen2_vl", files, model, **settings)[0]
    trained = train(model, batch).keys()
    batch["labels"].fill_(IGNORE_INDEX)
    found = train(model, batch)
    assert found.keys() == trained
    assert not any(bool(value.any()) for value in found.values())


def test_the_head_of_qwen3_omni_computes_all_logits_which_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = copy.deepcopy(text_model("qwen3_omni"))
    with caplog.at_level(logging.INFO):
        prepared = packhorse.prepare(model, "sdpa")
    assert prepared.logits == "all"
    name = "Qwen3OmniMoeThinkerForConditionalGeneration"
    assert f"all logits, because {name} computes no others" in str(prepared)
    assert str(prepared) in caplog.messages
    labels = torch.arange(8)[None]
    batch = Batch({"input_ids": labels, "labels": labels}, None)
    assert model_inputs(batch, model, check=False).keys() == {"input_ids"}
    for mode in MODES:
        with raises_config("logits", mode, match="instead of"):
            packhorse.prepare(model, "sdpa", logits=mode)
    with raises_config("logits", "some", match="auto, all, supervised, chunked"):
        packhorse.prepare(model, "sdpa", logits="some")


ADJUSTED = {
    "gemma2": {"final_logit_softcapping": 3.0},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3},
}


def text_decoder(kind: str, **settings: Any) -> tuple[Any, Batch]:
    """A tiny decoder with random weights, and a batch of one document."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes, **heads, **ids, **settings))
    labels = torch.randint(3, 64, (1, 40)).masked_fill(torch.arange(40) % 3 == 0, IGNORE_INDEX)
    inputs = {"input_ids": torch.randint(3, 64, (1, 40)), "position_ids": torch.arange(40)[None]}
    return model, Batch({**inputs, "labels": labels})


@pytest.mark.parametrize("kind", ADJUSTED)
def test_logits_that_a_model_caps_or_scales_are_capped_or_scaled_in_chunks(
    kind: str, parity: ParityRecorder
) -> None:
    model, batch = text_decoder(kind, **ADJUSTED[kind])
    packhorse.prepare(model, "eager", longest=64, logits="chunked")
    expected, wrong = train_all(model, batch), train_wrong(model, batch)
    found = train(model, batch)
    model = model.double()
    other = {name: value.float() for name, value in train_all(model, batch).items()}
    check(parity, kind, found, expected, other, wrong)
    with raises_config("return_dict", False):
        model(**model_inputs(batch, model), return_dict=False)


def test_chunks_are_rejected_for_a_model_that_changes_logits_in_its_own_way() -> None:
    from transformers import LlamaForCausalLM

    class Shifted(LlamaForCausalLM):
        def forward(self, *arguments: Any, **options: Any) -> Any:
            output = super().forward(*arguments, **options)
            output.logits = output.logits * 2
            return output

    model = Shifted(text_decoder("llama")[0].config)
    assert packhorse.prepare(model, "sdpa").logits == "supervised"
    with raises_config("logits", "chunked", match="differs by"):
        packhorse.prepare(model, "sdpa", logits="chunked")


def test_a_model_that_takes_no_mask_computes_all_logits_of_several_rows() -> None:
    """As models of older versions of transformers."""
    from transformers import LlamaForCausalLM

    class OneRow(LlamaForCausalLM):
        def forward(self, *arguments: Any, logits_to_keep: Any = 0, **options: Any) -> Any:
            if isinstance(logits_to_keep, torch.Tensor) and logits_to_keep.dim() > 1:
                raise IndexError("too many indices")
            return super().forward(*arguments, logits_to_keep=logits_to_keep, **options)

    decoder, batch = text_decoder("llama")
    model = OneRow(decoder.config)
    rows = Batch({key: value.expand(2, -1) for key, value in batch.items()})
    for mode in MODES:
        prepared = packhorse.prepare(model, "sdpa", logits=mode)
        assert prepared.logits == mode
        assert "; all logits of batches of several rows (IndexError: too many indices)" in str(prepared)
        assert "logits_to_keep" in model_inputs(batch, model)
        assert model_inputs(rows, model).keys() == {"input_ids", "position_ids"}


def test_a_batch_itself_and_a_call_without_the_model_are_unchanged(files: dict[str, Path]) -> None:
    model = make_model(logits="chunked")
    (batch,) = load("qwen2_vl", files, model)
    assert "logits_to_keep" not in batch
    inputs = model_inputs(batch, model)
    assert inputs.keys() - model_inputs(batch).keys() == {"logits_to_keep", CHUNK_LABELS}
    with torch.no_grad():
        whole = model(**batch)
    assert whole.logits.shape[:-1] == batch["labels"].shape
    assert bool(whole.loss.isfinite())
    with pytest.raises(TypeError), torch.no_grad():
        model(**inputs, unknown=1, cache_position="x", position_embeddings=3)
    assert "forward" not in vars(model.lm_head)


def on_another_device(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> Batch:
    """The batch as on a GPU, whose labels cannot be counted without waiting."""
    monkeypatch.setattr(packed_module, "known_supervised", lambda batch, labels: batch.info.supervised)
    monkeypatch.setattr(loss_module, "known_supervised", lambda batch, labels: batch.info.supervised)
    return batch


@pytest.mark.parametrize("mode", MODES)
def test_no_value_is_read_from_the_device_in_a_step(
    mode: str, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(logits=mode)
    text = [{"conversation": conversation("qwen2_vl", case, files)} for case in ("text", "many turns")]
    (batch,) = packhorse.load(text, processor("qwen2_vl"), model=model, effort=0, **PACK)
    batch = on_another_device(batch, monkeypatch)
    weights = torch.rand(batch["labels"].shape)
    for chosen in (None, weights):
        object.__setattr__(batch.info, "loss_weights", chosen)
        with NoReading():
            inputs = model_inputs(batch, model, check=False)
        output = model(**inputs)  # transformers may look at the mask
        with NoReading():
            loss = batch_loss(model, output, batch, 40)
            loss.backward()
    with NoReading(), pytest.raises(Reading):
        batch_loss(model, model(**model_inputs(batch)), batch, 40)


def test_logits_of_other_tokens_are_rejected(files: dict[str, Path]) -> None:
    model = make_model(logits="supervised")
    (batch,) = load("qwen2_vl", files, model)
    labels, count = batch["labels"], batch.info.supervised
    for shape in ((1, count - 1, 9), (count + 1, 9), (count + 1,), (2, count, 9), (1, labels.numel() - 1, 9)):
        with raises_config("labels", tuple(labels.shape), match=f"{count:,} of their tokens are supervised"):
            token_log_probs(torch.zeros(shape), labels)
    for shape in ((1, count, 300), (count, 300), (count,), (*labels.shape, 300)):
        assert token_log_probs(torch.zeros(shape), labels).shape == (count,)


def test_labels_that_are_changed_before_a_batch_moves_are_counted(files: dict[str, Path]) -> None:
    (batch,) = load("qwen2_vl", files, make_model())
    count = batch.info.supervised
    batch["labels"][:, -1] = 3
    batch["labels"][:, 0] = 3
    moved = to_device(batch, "meta")
    assert moved.info.supervised == int((batch["labels"] != IGNORE_INDEX).sum()) > count
    assert moved.info.document_keys == batch.info.document_keys
    assert to_device(moved, "meta").info is moved.info


def make_losses(model: Any, files: dict[str, Path], folder: Path) -> dict[str, torch.Tensor]:
    """What everything of ours that reads logits makes of one model."""
    from transformers import Trainer, TrainingArguments

    class PackedTrainer(packhorse.TrainFromLoader, Trainer):
        pass

    rows = [{"conversation": conversation("qwen2_vl", case, files)} for case in CASES]
    loader = packhorse.load(rows, processor("qwen2_vl"), model=model, pack_size=256)
    padded = packhorse.load(rows, processor("qwen2_vl"), model=model, **PADDED)
    arguments = TrainingArguments(
        str(folder),
        max_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        learning_rate=1e-2,
        save_steps=9,
    )
    trained = copy.deepcopy(model)
    trainer = PackedTrainer(trained, arguments, loader=loader, eval_dataset=padded)
    trainer.train()
    pairs = [{"prompt": f"Number {n}?", "chosen": "so " * (n + 1), "rejected": "no"} for n in range(3)]
    options: dict[str, Any] = {"task": "preference", "mode": "pad", "batch_size": 3}
    (preference,) = packhorse.load(pairs, processor("qwen2_vl"), model=model, **options)
    with torch.no_grad():
        log_probs = document_log_probs(model(**model_inputs(preference, model)).logits, preference)
    return {
        "evaluate": torch.tensor(packhorse.evaluate(model, padded).loss),
        "preference": log_probs,
        "reference": reference_log_probs(model, preference),
        "trainer": torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry]),
        "trainer's evaluation": torch.tensor(trainer.evaluate()["eval_loss"]),
        "weights": torch.cat([p.detach().flatten() for p in trained.parameters()]),
    }


def test_trainers_evaluation_and_preference_losses_take_fewer_logits(
    files: dict[str, Path], tmp_path: Path, parity: ParityRecorder
) -> None:
    found = {mode: make_losses(make_model(logits=mode), files, tmp_path / mode) for mode in ("all", *MODES)}
    other = make_losses(make_model(attention="eager"), files, tmp_path / "eager")
    wrong = make_losses(other_model(), files, tmp_path / "wrong")
    for mode in MODES:
        for what, value in found[mode].items():
            floor = noise_floor(found["all"][what], other[what], measure=relative_difference)
            difference = relative_difference(value, found["all"][what])
            parity.check(
                f"{mode}: {what}", difference, floor, relative_difference(wrong[what], found["all"][what])
            )


def other_model() -> Any:
    """A model with other weights: its losses are wrong."""
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    return model


@pytest.mark.parametrize("mode", MODES)
def test_a_model_under_autocast_trains_alike(
    mode: str, files: dict[str, Path], parity: ParityRecorder
) -> None:
    model = make_model(logits="supervised")
    (batch,) = load("qwen2_vl", files, model)
    exact = train_all(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        expected, wrong = train_all(model, batch), train_wrong(model, batch)
        packhorse.prepare(model, "sdpa", logits=mode)
        output = model(**model_inputs(batch, model))
        found = result_of(model, batch_loss(model, output, batch, 40))
    assert output.logits.dtype == (torch.float32 if mode == "chunked" else torch.bfloat16)
    for name in ("loss", "lm_head.weight"):
        values = [{name: each[name].float()} for each in (found, expected, exact, wrong)]
        floor = noise_floor(values[1], values[2], measure=relative_difference)
        difference, control = (relative_difference(each, values[1]) for each in (values[0], values[3]))
        parity.check(name, difference, floor, control, exact=False)


class MostLogits(TorchDispatchMode):
    """The most rows of logits that one operation computed, forwards and backwards."""

    def __init__(self, weight: torch.Size) -> None:
        super().__init__()
        self.weight, self.rows = weight, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        shape = result.shape if isinstance(result, torch.Tensor) else ()
        if shape[-1:] == self.weight[:1] and shape != self.weight[::-1]:  # not the gradient of the weight
            self.rows = max(self.rows, result.numel() // shape[-1])
        return result


def test_logits_of_unsupervised_tokens_and_of_several_chunks_never_exist(files: dict[str, Path]) -> None:
    model = make_model()
    (batch,) = load("qwen2_vl", files, model)
    counts = (batch["labels"].numel(), batch.info.supervised, logits_module.CHUNK_TOKENS)
    assert sorted(set(counts), reverse=True) == list(counts)
    for mode, rows in zip(("all", *MODES), counts, strict=True):
        packhorse.prepare(model, "sdpa", logits=mode)
        with MostLogits(model.lm_head.weight.shape) as most:
            train(model, batch)
        assert most.rows == rows, mode
