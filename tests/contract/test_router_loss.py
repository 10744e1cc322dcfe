"""The auxiliary loss of a mixture of experts: that of packs is that of a padded batch of the same documents.

It is a function of all tokens of a forward pass together. So the expected values come from one padded batch
with the documents of all rows, and the model as transformers has it. The control counts every token of the
packs, as transformers would without a mask.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import pickle
import random
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import packhorse
from contract.processors import processor
from contract.test_packable_types import _DECODERS, decoder, with_random_weights
from contract.tiny_models import tiny_model
from loader_samples import chat, image, texts
from noise_floor import largest_difference, noise_floor, relative_difference
from packhorse import batch_loss, count_supervised, model_inputs, prepare
from packhorse.collate.packed import collate_packs, loss_inputs
from packhorse.collate.packer import Packer
from packhorse.families.models import router_loss_coefficient
from packhorse.families.router_loss import has_router_loss, takes_router_mask
from packhorse.integrations.attention import use_attention
from packhorse.integrations.transformers import TrainFromLoader
from packhorse.tools.parity import check_parity
from packhorse.types import Sample
from raising import raises_config

pytestmark = pytest.mark.usefixtures("attention_as_before")

ROWS = ((9, 13, 4), (7, 6))  # tokens of the documents of each row
LENGTH = 48  # with a lot of padding
PLACEHOLDER = (0, 3)  # row and number of the document that stands for a placeholder
BACKENDS = ("sdpa", "eager", "varlen", "flex_attention")


def adds_router_loss(model: Any) -> bool:
    return hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func")


@cache
def routing_model(name: str) -> Any:
    """A tiny decoder whose experts get very different numbers of tokens, with a large auxiliary loss."""
    torch.manual_seed(0)
    model = with_random_weights(decoder(name))
    model.config.output_router_logits = True
    if not adds_router_loss(model):
        return model
    model.router_aux_loss_coef = 0.5
    route_unevenly(model)
    return model


def route_unevenly(model: Any) -> None:
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if ("gate.weight" in key or "router" in key) and weight.shape[0] == 4:
                weight.normal_(0, 2.0, generator=torch.Generator().manual_seed(3))


@cache
def image_experts(name: str) -> Any:
    """A tiny mixture of experts that takes images, as transformers has it, with a large auxiliary loss."""
    model = copy.deepcopy(tiny_model(name, by_document=False))
    text = model.config.get_text_config()
    text.output_router_logits, text.router_aux_loss_coef = True, 0.5
    route_unevenly(model)
    return model


ROUTED = [name for name in _DECODERS if adds_router_loss(routing_model(name))]


def documents() -> list[list[Sample]]:
    """The documents of each row, with labels that are shifted already."""
    draw = torch.Generator().manual_seed(1)
    rows = []
    for row in ROWS:
        ids = [torch.randint(5, 90, (length,), generator=draw) for length in row]
        labels = [torch.randint(5, 90, (length,), generator=draw) for length in row]
        rows.append([Sample(tokens={"input_ids": i}, labels=n) for i, n in zip(ids, labels, strict=True)])
    row, number = PLACEHOLDER
    labels = rows[row][number - 1].labels
    assert labels is not None
    labels.fill_(-100)
    return rows


def packed_batch(model: Any, backend: str) -> dict[str, Any]:
    """All documents in two rows; one of them is a placeholder, others are padded to a multiple of 4."""
    packs = [Packer(LENGTH, sequence_alignment=4).join(row) for row in documents()]
    batch = collate_packs(packs, None, 0, LENGTH, backend, config=model.config)
    row, number = PLACEHOLDER
    batch["router_mask"][row] &= batch["_packed_seq_ids"][row] != number
    return loss_inputs(batch)


def padded_batch(order: int = 1, width: int = 13) -> dict[str, Any]:
    """All documents but the placeholder, one in each row."""
    rows = documents()
    del rows[PLACEHOLDER[0]][PLACEHOLDER[1] - 1]
    samples = [sample for row in rows for sample in row][::order]
    made = {"input_ids": torch.zeros(len(samples), width, dtype=torch.int64)}
    made |= {"attention_mask": made["input_ids"].clone(), "labels": torch.full_like(made["input_ids"], -100)}
    for row, sample in enumerate(samples):
        length = len(sample)
        made["input_ids"][row, :length] = sample.tokens["input_ids"]
        made["attention_mask"][row, :length] = 1
        made["labels"][row, :length] = sample.labels
    return {**made, "shift_labels": made["labels"], "use_cache": False}


def losses_of(model: Any, batch: dict[str, Any], learns: bool = True) -> dict[str, Any]:
    """Auxiliary loss, loss and gradients."""
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(learns):
        output = model(**batch)
    found = {"auxiliary loss": output.aux_loss.detach(), "loss": output.loss.detach()}
    if learns:
        output.loss.backward()
        found["gradients"] = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return found


def check_same(found: Any, expected: Any, others: list[Any], control: Any, parity: Any) -> None:
    for what, value in found.items():
        measure = relative_difference if what == "gradients" else largest_difference
        floor = noise_floor(expected[what], *(other[what] for other in others), measure=measure)
        away = measure(control[what], expected[what])
        parity.check(what, measure(value, expected[what]), floor, away)


def all_count(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "router_mask": torch.ones_like(batch["router_mask"])}


def check_packed_equals_padded(name: str, backend: str, parity: Any) -> None:
    plain = copy.deepcopy(routing_model(name))
    model = copy.deepcopy(plain)
    learns = backend != "flex_attention"  # it has no backward pass on a CPU
    prepare(model, backend if learns else "sdpa", device="cpu", longest=13)
    use_attention(model, backend)
    expected, *others = (losses_of(plain, padded_batch(*how), learns) for how in ((1, 13), (-1, 13), (1, 20)))
    batch = packed_batch(model, backend)
    control = losses_of(model, all_count(batch), learns)
    check_same(losses_of(model, batch, learns), expected, others, control, parity)
    unpacked = losses_of(model, padded_batch(), learns)
    use_attention(model, plain.config._attn_implementation)
    again = losses_of(model, padded_batch(), learns)
    assert torch.equal(again["loss"], expected["loss"]), "a padded batch has the loss that it had before"
    assert unpacked["auxiliary loss"].isfinite()


@pytest.mark.parametrize("name", ROUTED)
def test_packs_have_the_losses_and_gradients_of_a_padded_batch(name: str, parity: Any) -> None:
    check_packed_equals_padded(name, routing_model(name).config._attn_implementation, parity)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("uncompiled_flex")
def test_packs_of_every_attention_have_the_losses_of_a_padded_batch(backend: str, parity: Any) -> None:
    check_packed_equals_padded("qwen3_moe", backend, parity)


def test_the_decoders_with_a_router_loss_are_found() -> None:
    assert {"mixtral", "olmoe", "qwen2_moe", "gpt_oss", "granitemoe", "ernie4_5_moe", "jamba"} <= set(ROUTED)


@pytest.fixture
def mixtral() -> Any:
    """A prepared model, and a batch for it."""
    model = copy.deepcopy(routing_model("mixtral"))
    prepare(model, "sdpa", device="cpu")
    return model


def gradients_of(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_a_batch_of_placeholders_alone_adds_nothing_to_the_router(mixtral: Any) -> None:
    batch = packed_batch(mixtral, "sdpa")
    batch["router_mask"] = torch.zeros_like(batch["router_mask"])
    batch["labels"].fill_(-100)
    output = mixtral(**batch, num_items_in_batch=10)
    output.loss.backward()
    assert (float(output.loss), float(output.aux_loss)) == (0, 0)
    assert not gradients_of(mixtral).any()
    assert len(mixtral(**batch, return_dict=False)) == len(output.to_tuple())


def test_the_output_is_a_tuple_where_the_caller_wants_one(mixtral: Any) -> None:
    batch = packed_batch(mixtral, "sdpa")
    with torch.no_grad():
        whole, as_tuple = mixtral(**batch, return_dict=True), mixtral(**batch, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[0], whole.loss)
    assert torch.equal(as_tuple[1], whole.aux_loss)


def wrappers(model: Any) -> Iterator[tuple[str, Any]]:
    from peft import LoraConfig, get_peft_model

    yield "copy", copy.deepcopy(model)
    yield "compiled", torch.compile(copy.deepcopy(model), backend="eager")
    yield "peft", get_peft_model(copy.deepcopy(model), LoraConfig(r=2, target_modules=["q_proj"]))
    adapted = get_peft_model(
        copy.deepcopy(routing_model("mixtral")), LoraConfig(r=2, target_modules=["q_proj"])
    )
    prepare(adapted, "sdpa", device="cpu")
    yield "peft, prepared after", adapted


def test_the_loss_is_the_same_in_wrappers(mixtral: Any, parity: Any) -> None:
    batch = packed_batch(mixtral, "sdpa")
    with torch.no_grad():
        right, control = mixtral(**batch), mixtral(**all_count(batch))
        for name, model in wrappers(mixtral):
            output = model.eval()(**batch)
            difference = largest_difference(output.loss, right.loss)
            away = largest_difference(control.loss, right.loss)
            parity.check(f"loss, {name}", difference, noise_floor(right.loss), away)
            logits = model(**model_inputs(batch, model))
            found = batch_loss(model, logits, batch, count_supervised([batch]))
            parity.check(
                f"batch_loss, {name}", largest_difference(found, right.loss), noise_floor(right.loss), away
            )


def test_gradient_checkpointing_has_the_same_gradients_and_must_not_be_reentrant(
    mixtral: Any, parity: Any
) -> None:
    batch = packed_batch(mixtral, "sdpa")
    expected, control = losses_of(mixtral, batch), losses_of(mixtral, all_count(batch))
    mixtral.train()
    other = losses_of(mixtral, batch)
    mixtral.gradient_checkpointing_enable({"use_reentrant": False})
    check_same(losses_of(mixtral, batch), expected, [other], control, parity)
    mixtral.gradient_checkpointing_enable({"use_reentrant": True})
    mixtral.enable_input_require_grads()
    with raises_config("gradient_checkpointing_kwargs", match="use_reentrant"):
        mixtral(**batch)


def test_generation_and_other_batches_run_as_before(mixtral: Any) -> None:
    plain, ids = routing_model("mixtral"), padded_batch()["input_ids"][:1, :9]
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "use_cache": True}
    for more in ({}, {"cache_implementation": "static", "disable_compile": True}):
        expected = plain.generate(ids, **options, **more)
        assert torch.equal(mixtral.generate(ids, **options, **more), expected)
    batch = packed_batch(mixtral, "sdpa")
    mixtral.config.output_router_logits = False
    assert "router_mask" not in loss_inputs(collate_packs([Packer(9).join(documents()[0][:1])], None))
    with torch.no_grad():
        assert mixtral(**batch).aux_loss is None


def test_a_decoder_that_gets_no_mask_is_an_error(mixtral: Any) -> None:
    batch = packed_batch(mixtral, "sdpa")
    decode = mixtral.model.forward

    class Deaf(type(mixtral)):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, attention_mask: Any = None, **options: Any) -> Any:
            return super().forward(input_ids, **options)

    mixtral.__class__ = Deaf
    with raises_config("output_router_logits", match="does not pass attention_mask on"):
        mixtral(**batch)
    assert mixtral.model.forward == decode


def test_a_forward_pass_that_is_replaced_after_prepare_is_an_error(mixtral: Any) -> None:
    for attention in ("sdpa", "varlen"):
        use_attention(mixtral, attention)
        batch = packed_batch(mixtral, attention)
        mixtral.forward = MethodType(type(mixtral).forward, mixtral)
        with raises_config("model", match="call prepare last"):
            mixtral(**batch)


def test_preparing_again_restores_the_forward_pass_of_a_model_that_was_pickled() -> None:
    mixtral = routing_model.__wrapped__("mixtral")  # transformers cannot pickle one that has been called
    prepare(mixtral, "sdpa", device="cpu")
    batch = packed_batch(mixtral, "sdpa")
    copied = pickle.loads(pickle.dumps(mixtral))
    with raises_config("model", match="or the model was pickled.*call prepare again"):
        copied(**batch)
    prepare(copied, "sdpa", device="cpu")
    with torch.no_grad():
        assert torch.equal(copied(**batch).loss, mixtral(**batch).loss)


def test_preparing_again_restores_a_forward_pass_that_was_replaced(mixtral: Any) -> None:
    batch = packed_batch(mixtral, "sdpa")
    with torch.no_grad():
        expected = mixtral(**batch).loss
        for lost in ("replaced", "removed"):
            del mixtral.forward
            if lost == "replaced":
                mixtral.forward = MethodType(inspect.unwrap(type(mixtral).forward), mixtral)
            with raises_config("model", match="call prepare again"):
                mixtral(**batch)
            prepare(mixtral, "sdpa", device="cpu")
            assert torch.equal(mixtral(**batch).loss, expected)
        restored = mixtral.forward
        prepare(mixtral, "sdpa", device="cpu")
        assert mixtral.forward == restored, "what is in place is not wrapped twice"
        assert torch.equal(copy.deepcopy(mixtral)(**batch).loss, expected)


def test_a_forward_pass_that_others_wrap_is_not_wrapped_twice(mixtral: Any) -> None:
    batch, prepared = packed_batch(mixtral, "sdpa"), mixtral.forward
    with torch.no_grad():
        expected = mixtral(**batch).loss
        for wrapper in (functools.wraps(prepared)(lambda **options: prepared(**options)), partial(prepared)):
            mixtral.forward = wrapper
            prepare(mixtral, "sdpa", device="cpu")
            assert mixtral.forward is wrapper
            assert torch.equal(mixtral(**batch).loss, expected)


@pytest.fixture
def autocasting() -> Iterator[Any]:
    """An Accelerator with mixed precision, which wraps the forward passes of models."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    yield accelerator
    accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("first", ["prepare", "accelerate"])
def test_a_model_that_accelerate_unwraps_counts_the_same_tokens(
    first: str, autocasting: Any, parity: Any
) -> None:
    model = copy.deepcopy(routing_model("mixtral"))
    expected = copy.deepcopy(model)
    prepare(expected, "sdpa", device="cpu")
    batch = packed_batch(expected, "sdpa")
    if first == "prepare":
        prepare(model, "sdpa", device="cpu")
    wrapped = autocasting.prepare(model)
    if first == "accelerate":
        prepare(wrapped, "sdpa", device="cpu")
    ids = padded_batch()["input_ids"][:1, :9]
    with torch.no_grad():
        exact = expected(**batch).aux_loss
        with torch.autocast("cpu", torch.bfloat16):
            rounded, control = (expected(**inputs).aux_loss for inputs in (batch, all_count(batch)))
        assert not torch.equal(rounded, exact)
        floor, away = noise_floor(rounded), largest_difference(control, rounded)
        difference = largest_difference(wrapped(**batch).aux_loss, rounded)
        parity.check("auxiliary loss with autocast", difference, floor, away)
        plain = autocasting.unwrap_model(wrapped, keep_fp32_wrapper=False)
        unwrapped = plain(**batch).aux_loss
        # What is prepared last contains Accelerate's autocast, which stays.
        difference = largest_difference(unwrapped, exact if first == "prepare" else rounded)
        parity.check("auxiliary loss, unwrapped", difference, floor, away)
        assert plain.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (1, 11)


def test_the_forward_pass_of_a_prepared_head_shows_the_signature_of_its_class(mixtral: Any) -> None:
    expected = inspect.signature(type(mixtral).forward).parameters
    found = inspect.signature(mixtral.forward).parameters
    assert list(found.values()) == list(expected.values())[1:]
    assert mixtral.forward.__name__ == "forward"
    assert mixtral.forward.__doc__ == type(mixtral).forward.__doc__


# Loaders and trainers.


@pytest.fixture
def experts() -> Any:
    return copy.deepcopy(image_experts("qwen3_vl_moe"))


def load(model: Any, **settings: Any) -> packhorse.Loader:
    settings = {"pack_size": 512, "num_workers": 0, **settings}
    return packhorse.load(texts(12), processor("qwen3_vl"), model=model, **settings)


def test_a_model_that_is_not_prepared_is_rejected_by_name(experts: Any, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    class PackedTrainer(TrainFromLoader, Trainer):
        pass

    for attention in ("sdpa", "varlen"):
        with raises_config("output_router_logits", True, match=r"packhorse\.prepare\(model\) first"):
            load(experts, attn_implementation=attention)
    with raises_config("output_router_logits", True, match="pass the model itself"):
        load(experts.config)
    unprepared = copy.deepcopy(experts)
    prepared = prepare(experts, "sdpa")
    assert prepared.router_loss
    assert "only tokens of documents in the router's auxiliary loss" in str(prepared)
    for loader in (load(experts), load(experts, mode="pad", batch_size=2)):
        batch = next(iter(loader))
        for model in (unprepared, torch.nn.DataParallel(torch.nn.DataParallel(unprepared))):
            with raises_config("output_router_logits", True):
                model_inputs(batch, model)
        args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
        with raises_config("output_router_logits", True):
            PackedTrainer(unprepared, args, loader=loader)
    with torch.no_grad():
        output = unprepared(**next(iter(load(experts, mode="pad", batch_size=2))))
    with raises_config("output_router_logits", True):
        batch_loss(unprepared, output, batch, 1)


def test_a_class_without_a_test_is_measured_without_it() -> None:
    model = decoder("phimoe")
    model.config.output_router_logits = True
    prepared = prepare(model, device="cpu")
    assert prepared.router_loss
    assert not prepared.tested


def test_the_parity_check_compares_logits_without_it(experts: Any) -> None:
    for _ in range(2):
        assert check_parity(experts, processor("qwen3_vl"), texts(3)).ok
        assert experts.config.get_text_config().output_router_logits
        prepare(experts, "sdpa", device="cpu")


def test_losses_that_do_not_contain_it_are_rejected(experts: Any) -> None:
    prepare(experts, "sdpa")
    turn = {"role": "assistant", "content": "Yes."}
    pair = {"prompt": [{"role": "user", "content": "Is it?"}], "chosen": [turn], "rejected": [turn]}
    cases: list[tuple[Any, dict[str, Any]]] = [
        ([pair], {"task": "preference"}),
        (texts(2), {"pipeline_microbatches": 1}),
    ]
    for rows, settings in cases:
        with raises_config("output_router_logits", True, match="not contain the auxiliary loss"):
            packhorse.load(rows, processor("qwen3_vl"), model=experts, pack_size=512, **settings)


def test_a_packed_batch_that_does_not_say_what_counts_is_an_error(experts: Any) -> None:
    experts.config.get_text_config().output_router_logits = False
    for attention in ("sdpa", "varlen"):
        prepare(experts, attention)
        batch = next(iter(load(experts)))
        assert "router_mask" not in batch
        assert experts(**batch).loss.isfinite()
        with raises_config("output_router_logits", True, match="no 'router_mask'"):
            experts(**batch, output_router_logits=True)


def test_a_router_loss_that_only_the_whole_config_asks_for_is_rejected() -> None:
    model = copy.deepcopy(tiny_model("qwen3_vl_moe"))
    model.config.output_router_logits = True
    for reject in (lambda: prepare(model, "sdpa", device="cpu"), lambda: load(model)):
        with raises_config(
            "output_router_logits", True, match="not in the part of it that the decoder reads"
        ):
            reject()
    model.config.get_text_config().output_router_logits = True
    prepare(model, "sdpa", device="cpu")
    batch = next(iter(load(model)))
    assert model(**batch).aux_loss > 0


def test_a_z_loss_over_all_tokens_is_rejected() -> None:
    model = decoder("bamba", z_loss_coefficient=0.1)
    with raises_config("z_loss_coefficient", 0.1, match="padding"):
        prepare(model, "sdpa")
    batch = {"input_ids": torch.ones(1, 4, dtype=torch.int64)}
    with raises_config("z_loss_coefficient", 0.1):
        model_inputs(batch, model)
    model.config.z_loss_coefficient = 0.0
    with raises_config("z_loss_coefficient", 0.1):  # the model has its own value
        prepare(model, "sdpa")
    model.z_loss_coefficient = 0.0
    assert model_inputs(batch, model)


def image_rows() -> list[dict[str, Any]]:
    draw = random.Random(0)
    return [
        chat("why " * draw.randint(1, 9), "so it is", *([image(draw)] if number < 3 else []))
        for number in range(8)
    ]


def padded_image_batch(model: Any, name: str, rows: list[dict[str, Any]], wide: bool = False) -> Any:
    """A padded batch of rows, without the tokens that the shift of labels removes."""
    settings: dict[str, Any] = {"mode": "pad", "pack_size": 256, "pad_to_size": wide}
    settings |= {"batch_size": len(rows), "num_workers": 0}
    (batch,) = packhorse.load(rows, processor(name), model=model, **settings)
    for row, (length,) in enumerate(batch.info.document_lengths):
        batch["attention_mask"][row, length:] = 0
    return batch


def as_one_document(batch: dict[str, Any]) -> dict[str, Any]:
    """A packed batch that does not say where its documents begin."""
    length = batch["input_ids"].shape[1]
    if "cu_seq_lens_q" not in batch:
        rows = len(batch["input_ids"])
        return {**batch, "attention_mask": torch.ones(rows, 1, length, length, dtype=torch.bool).tril()}
    bounds = torch.tensor([0, length], dtype=torch.int32)
    sizes = {"max_length_q": length, "max_length_k": length}
    return {**batch, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, **sizes}


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_packs_with_images_have_the_losses_and_gradients_of_a_padded_batch(
    name: str, attention: str, parity: Any
) -> None:
    rows, plain = image_rows(), image_experts(name)
    model = copy.deepcopy(plain)
    prepare(model, attention, device="cpu")
    settings: dict[str, Any] = {"pack_size": 512, "pad_to_size": True, "num_workers": 0}
    (batch,) = packhorse.load(rows, processor(name), model=model, **settings)
    assert sorted(batch.info.samples) == list(range(len(rows)))
    assert "pixel_values" in batch
    assert not batch["router_mask"].all(), "there is padding, which the control counts"
    expected, *others = (
        losses_of(plain, padded_image_batch(plain, name, *how))
        for how in ((rows,), (rows[::-1],), (rows, True))
    )
    found = losses_of(model, batch)
    for control in (all_count(batch), as_one_document(batch)):
        check_same(found, expected, others, losses_of(model, control), parity)


def batches_with_placeholders(model: Any, **settings: Any) -> Iterator[packhorse.Batch]:
    """Those of two ranks that have both samples and a placeholder image."""
    settings = {"model": model, "pack_size": 256, "num_workers": 0, **settings}
    for rank in range(2):
        world = packhorse.World(rank, 2)
        for batch in packhorse.load(image_rows(), processor("qwen3_vl"), world=world, **settings):
            if batch.info.placeholder and not batch.info.is_padding:
                yield batch


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
def test_placeholders_of_a_loader_do_not_count(experts: Any, attention: str, parity: Any) -> None:
    plain = copy.deepcopy(experts)
    prepare(experts, attention, device="cpu")
    batches = list(batches_with_placeholders(experts, max_documents=2))
    assert batches
    for batch in batches:
        assert int(batch["router_mask"].sum()) == batch.info.tokens
        rows = [image_rows()[index] for index in batch.info.samples]
        expected, wide = (
            losses_of(plain, padded_image_batch(plain, "qwen3_vl", rows, to_size))
            for to_size in (False, True)
        )
        found, control = (losses_of(experts, inputs) for inputs in (batch, all_count(batch)))
        check_same(found, expected, [wide], control, parity)


def test_placeholders_of_padded_batches_do_not_count_in_a_prepared_model(experts: Any) -> None:
    prepare(experts, "sdpa", device="cpu")
    batches = list(batches_with_placeholders(experts, mode="pad", batch_size=1))
    assert batches
    for batch in batches:
        of_samples = torch.tensor([[key != ""] for (key,) in batch.info.document_keys])
        assert torch.equal(batch["router_mask"], (batch["attention_mask"] > 0) & of_samples)
        assert experts(**batch).loss.isfinite()


def test_a_batch_of_a_rank_without_samples_has_no_loss(experts: Any) -> None:
    prepare(experts, "varlen", device="cpu")
    settings: dict[str, Any] = {"model": experts, "pack_size": 512, "world": packhorse.World(1, 2)}
    (empty,) = packhorse.load(texts(1), processor("qwen3_vl"), **settings)
    assert empty.info.is_padding
    assert not empty["router_mask"].any()
    output = experts(**model_inputs(empty, experts))
    assert float(batch_loss(experts, output, empty, 10)) == float(output.aux_loss) == 0


def test_a_step_of_several_batches_is_their_mean_weighted_by_supervised_tokens(
    experts: Any, parity: Any
) -> None:
    prepare(experts, "sdpa")
    batches = list(load(experts, max_documents=3))
    tokens = count_supervised(batches)
    counts = [count_supervised([batch]) for batch in batches]
    assert len(set(counts)) > 1
    with torch.no_grad():
        own = torch.stack([experts(**batch).loss for batch in batches])
        outputs = [experts(**model_inputs(batch, experts)) for batch in batches]
        found = sum(
            batch_loss(experts, output, batch, torch.tensor(tokens))
            for output, batch in zip(outputs, batches, strict=True)
        )
        half = batch_loss(experts, outputs[0], batches[0], tokens, replicas=2) / 2
        first = batch_loss(experts, outputs[0], batches[0], tokens)
    expected = (own * torch.tensor(counts)).sum() / tokens
    floor, away = noise_floor(expected), largest_difference(own.sum(), expected)
    parity.check("loss of a step", largest_difference(found, expected), floor, away)
    parity.check("loss of a rank", largest_difference(half, first), floor, away)


def test_evaluation_adds_it_and_perplexity_does_not(experts: Any, parity: Any) -> None:
    prepare(experts, "sdpa")
    result = packhorse.evaluate(experts, load(experts, max_documents=3))
    experts.config.get_text_config().output_router_logits = False
    without = packhorse.evaluate(experts, load(experts, max_documents=3))
    assert without.router_loss == 0
    floor = noise_floor(without.loss)
    difference = abs(result.loss - result.router_loss - without.loss)
    parity.check("cross entropy", difference, floor, abs(result.loss - without.loss))
    expected = without.perplexity
    away = abs(math.exp(result.loss) - expected)
    parity.check("perplexity", abs(result.perplexity - expected), noise_floor(expected), away)


def test_the_trainer_trains_with_it(experts: Any, tmp_path: Path, parity: Any) -> None:
    from transformers import Trainer, TrainingArguments

    class PackedTrainer(TrainFromLoader, Trainer):
        pass

    prepare(experts, "sdpa")
    args = TrainingArguments(
        str(tmp_path),
        gradient_accumulation_steps=2,
        max_steps=1,
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        optim="sgd",
        save_strategy="no",
        use_cpu=True,
        report_to=[],
    )

    def loader() -> packhorse.Loader:
        return load(experts, max_documents=6, gradient_accumulation_steps=2)

    def step(with_router: bool, order: int = 1) -> torch.Tensor:
        model = copy.deepcopy(experts).train()
        batches = list(loader())[:2][::order]
        for batch in batches:
            output = model(**model_inputs(batch, model))
            if not with_router:
                output = SimpleNamespace(logits=output.logits)
            batch_loss(model, output, batch, count_supervised(batches)).backward()
        return torch.cat([(p - p.grad).detach().flatten() for p in model.parameters() if p.grad is not None])

    expected, other, control = step(True), step(True, -1), step(False)
    model = copy.deepcopy(experts)
    trained = [name for name, p in model.named_parameters() if "visual" not in name]
    PackedTrainer(model, args, loader=loader()).train()
    found = torch.cat([p.detach().flatten() for name, p in model.named_parameters() if name in trained])
    assert found.shape == expected.shape
    floor = noise_floor(expected, other)
    away = largest_difference(control, expected)
    parity.check("weights after a step", largest_difference(found, expected), floor, away)


def test_padding_is_not_in_the_router_loss_of_a_padded_batch(experts: Any, parity: Any) -> None:
    (plain,) = load(experts, mode="pad", batch_size=12)
    (wide,) = load(experts, mode="pad", batch_size=12, pad_to_size=True)
    assert "router_mask" not in plain, "the model is not prepared"
    width = plain["labels"].shape[1]
    wide["attention_mask"][:, width:] = 0  # the shift takes the last token of the longest row where it can
    assert wide["labels"].shape[1] > width
    with torch.no_grad():
        short, long = (experts(**batch) for batch in (plain, wide))
    entropy = F.cross_entropy(short.logits.flatten(0, 1), plain["labels"].flatten())
    assert torch.equal(short.loss, entropy + router_loss_coefficient(experts) * short.aux_loss)
    expected = short.aux_loss
    with torch.no_grad():
        reversed_rows = experts(**{key: value.flip(0) for key, value in plain.items()}).aux_loss
        unmasked = experts(**{key: value for key, value in wide.items() if key != "attention_mask"}).aux_loss
    floor, away = noise_floor(expected, reversed_rows), largest_difference(unmasked, expected)
    parity.check("auxiliary loss", largest_difference(long.aux_loss, expected), floor, away)


@pytest.mark.parametrize("mode", ["pack", "pad"])
def test_a_class_that_drops_shift_labels_has_the_router_loss(experts: Any, mode: str, parity: Any) -> None:
    from transformers import Qwen3VLMoeForConditionalGeneration

    class Dropping(Qwen3VLMoeForConditionalGeneration):
        """Its loss gets no shift_labels, as that of older versions of transformers."""

        __module__ = "transformers.models.dropping"

        def forward(
            self, labels: Any = None, shift_labels: Any = None, position_ids: Any = None, **options: Any
        ) -> Any:
            made = super().forward(position_ids=position_ids, **options)
            if labels is not None:
                size = made.logits.shape[-1]
                made.loss = self.loss_function(logits=made.logits, labels=labels, vocab_size=size)
            return made

    dropping = Dropping(copy.deepcopy(experts.config)).eval()
    dropping.load_state_dict(experts.state_dict())
    with raises_config("model", "Dropping", match=r"drops shift_labels.*packhorse\.prepare\(model\)"):
        load(dropping, mode="pad")
    for model in (experts, dropping):
        prepare(model, "sdpa")
        assert takes_router_mask(model)
        assert has_router_loss(model.config)
    (batch,) = load(dropping, mode=mode, **({"batch_size": 12} if mode == "pad" else {"pack_size": 2048}))
    with torch.no_grad():
        right, found = experts(**batch), dropping(**batch).loss
        as_tuple = dropping(**batch, return_dict=False)[0]
    entropy = F.cross_entropy(right.logits.flatten(0, 1), batch["labels"].flatten())
    floor = noise_floor(right.loss)
    for loss in (found, as_tuple):
        control = largest_difference(entropy, right.loss)
        parity.check("loss with a router's", largest_difference(loss, right.loss), floor, control)
