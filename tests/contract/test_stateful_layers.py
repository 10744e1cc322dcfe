"""Layers that carry state in a model that was prepared: right in packs, and as before everywhere else."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import packhorse
from contract.calls import render
from contract.processors import processor
from contract.test_packable_types import decoder, with_random_weights
from contract.tiny_models import tiny_model
from noise_floor import largest_difference, noise_floor, relative_difference
from packhorse.families.packing import check_packable, inspect_packing
from packhorse.families.stateful import STATEFUL_LAYERS, Documents, has_document_bounds, install, layers_of
from raising import raises_config

NAMES = ("qwen3_next", "lfm2", "bamba", "jamba", "falcon_mamba")
LENGTHS = (11, 3, 14)
UNPREPARED = r"Lfm2ShortConv.*packhorse\.prepare\(model\)"
OTHER_LENGTHS = ((9, 8), (4, 30, 2, 5))


def token_ids(length: int) -> torch.Tensor:
    return torch.randint(5, 90, (2, length), generator=torch.Generator().manual_seed(3))


IDS = token_ids(sum(LENGTHS))


def plain(name: str) -> Any:
    torch.manual_seed(0)
    return with_random_weights(decoder(name))


def prepare_model(name: str) -> Any:
    model = plain(name)
    packhorse.prepare(model, "sdpa", device="cpu")
    return model


def batch(
    hidden: Sequence[int] = (), lengths: Sequence[int] = LENGTHS, *, masked: bool = True
) -> dict[str, torch.Tensor]:
    """Two rows with documents of these lengths; with hidden tokens."""
    numbers = (torch.arange(len(lengths)) + 1).repeat_interleave(torch.tensor(lengths))
    numbers[list(hidden)] = 0
    mask = (numbers[:, None] == numbers) & torch.ones(len(numbers), len(numbers)).tril().bool()
    mask &= (numbers > 0)[:, None]
    positions = torch.cat([torch.arange(length) for length in lengths])
    inputs = {"attention_mask": mask[None, None].expand(2, -1, -1, -1)} if masked else {}
    return {"input_ids": token_ids(len(numbers)), "position_ids": positions.expand(2, -1), **inputs}


def run(model: Any, inputs: dict[str, Any] | None = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return gradients_of(model, model(**(batch() if inputs is None else inputs)).logits)


def gradients_of(model: Any, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return logits, and the gradients of the mean of their squares."""
    logits.float().square().mean().backward()
    weights = {
        name.removeprefix("_orig_mod.").replace("_checkpoint_wrapped_module.", ""): weight
        for name, weight in model.named_parameters()
    }
    gradients = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    return logits.detach(), gradients


def run_unprepared(
    name: str, lengths: Sequence[int] = LENGTHS
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Run a pack in a model that was not prepared; falcon_mamba has no attention, and rejects its mask."""
    return run(plain(name).train(), batch(lengths=lengths, masked=name != "falcon_mamba"))


def run_alone(model: Any, lengths: Sequence[int] = LENGTHS) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Run each document of a pack in a row of its own."""
    parts = token_ids(sum(lengths)).split(lengths, 1)
    return gradients_of(model, torch.cat([model(input_ids=ids, use_cache=False).logits for ids in parts], 1))


def alone(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(input_ids=ids, use_cache=False).logits for ids in IDS.split(LENGTHS, 1)], 1)


# Packs.


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(name: str, reentrant: bool, parity: Any) -> None:
    model = prepare_model(name).train()
    logits, expected = run(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    checkpointed, gradients = run(model)
    assert torch.equal(checkpointed, logits)
    _, control = run_unprepared(name)
    floor = noise_floor(expected, measure=relative_difference)
    difference = relative_difference(gradients, expected)
    parity.check("gradients", difference, floor, relative_difference(control, expected))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("first", ["prepare", "wrap"])
def test_layers_in_checkpoint_wrappers_of_torch_give_the_same_gradients(
    first: str, reentrant: bool, parity: Any
) -> None:
    """As FSDP users do: the wrapper computes a layer once more in the backward pass."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

    _, expected = run(prepare_model("lfm2").train())
    for part in ("block", "layer"):
        model = (prepare_model("lfm2") if first == "prepare" else plain("lfm2")).train()
        calls = list[int]()
        kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        for index, block in enumerate(model.model.layers):
            if hasattr(block, "conv"):
                block.conv.in_proj.register_forward_hook(lambda *_, calls=calls: calls.append(1))
            if part == "block":
                model.model.layers[index] = checkpoint_wrapper(block, kind)
            elif hasattr(block, "conv"):
                block.conv = checkpoint_wrapper(block.conv, kind)
        if first == "wrap":
            packhorse.prepare(model, "sdpa", device="cpu")
        model.enable_input_require_grads()
        padded, packed = model(input_ids=IDS).logits, model(**batch()).logits
        before = len(calls)
        _, gradients = gradients_of(model, packed)
        assert len(calls) > before, "the layer is computed once more"
        floor = noise_floor(expected, measure=relative_difference)
        _, control = run_unprepared("lfm2")
        difference = relative_difference(gradients, expected)
        parity.check("gradients", difference, floor, relative_difference(control, expected))
        _, of_padded = gradients_of(model, padded)
        _, expected_of_padded = run(plain("lfm2").train(), {"input_ids": IDS})
        assert all(torch.equal(of_padded[name], expected_of_padded[name]) for name in expected_of_padded)


def check_compiled(name: str, backend: str, parity: Any) -> None:
    """Run packs of several lengths, a batch that is not packed, and a pack once more in a compiled model."""
    model, other = prepare_model(name).train(), plain(name).train()
    compiled, compiled_other = (torch.compile(given, backend=backend) for given in (model, other))
    # Inductor rounds in another way: so it computes documents alone, too.
    alone_models = [compiled_other] if backend == "inductor" else []
    try:
        for lengths in (LENGTHS, *OTHER_LENGTHS, None, LENGTHS):
            if lengths is None:
                inputs = {"input_ids": token_ids(4)}  # few, because loops over tokens are unrolled
                expected, control = run(other, inputs), run_alone(other, (2, 2))
                recomputed = [run(given, inputs) for given in (model, *alone_models)]
            else:
                inputs = batch(lengths=lengths)
                expected, control = run_alone(other, lengths), run_unprepared(name, lengths)
                recomputed = [run(model, inputs), *(run_alone(given, lengths) for given in alone_models)]
            found = run(compiled, inputs)
            floor = noise_floor(expected[0], *(logits for logits, _ in recomputed))
            difference, away = (largest_difference(logits, expected[0]) for logits in (found[0], control[0]))
            parity.check(f"logits of {lengths}", difference, floor, away)
            others = (gradients for _, gradients in recomputed)
            floor = noise_floor(expected[1], *others, measure=relative_difference)
            difference, away = (relative_difference(values, expected[1]) for values in (found[1], control[1]))
            parity.check(f"gradients of {lengths}", difference, floor, away)
    finally:
        torch.compiler.reset()


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_next",
        "lfm2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("bamba", "falcon_mamba", "jamba")),
    ],
)
def test_a_compiled_model_trains_on_packs_of_any_lengths_and_on_other_batches(name: str, parity: Any) -> None:
    check_compiled(name, "eager", parity)


@pytest.mark.slow
def test_a_model_compiled_by_inductor_trains_on_packs_and_on_other_batches(parity: Any) -> None:
    """Without a loop over tokens, which would take Inductor minutes."""
    check_compiled("lfm2", "inductor", parity)


def test_a_model_that_is_compiled_before_it_is_prepared_keeps_documents_apart(parity: Any) -> None:
    expected = alone(plain("lfm2"))
    compiled = torch.compile(plain("lfm2"), backend="eager")
    with raises_config("model", match=UNPREPARED):
        check_packable(compiled)
    try:
        control = largest_difference(leak_logits(compiled), expected)
        packhorse.prepare(compiled, "sdpa", device="cpu")
        difference = largest_difference(leak_logits(compiled), expected)
        parity.check("logits", difference, noise_floor(expected), control)
    finally:
        torch.compiler.reset()


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_padding_alone_has_zero_loss_and_zero_gradients(name: str) -> None:
    model = prepare_model(name).train()
    output = model(**batch(range(sum(LENGTHS))))
    assert bool(output.logits.isfinite().all())
    labels = torch.full_like(IDS, -100)
    loss = packhorse.batch_loss(model, output, {"labels": labels}, tokens=7)
    assert float(loss.detach()) == 0.0
    loss.backward()
    gradients = {key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None}
    assert all(not bool(gradient.any()) for gradient in gradients.values())
    model.zero_grad(set_to_none=True)
    assert gradients.keys() == run(model)[1].keys(), "the same weights take part, as DDP requires"
    labels[0, 0] = 5
    control = packhorse.batch_loss(model, model(**batch()), {"labels": labels}, tokens=7)
    assert float(control.detach()) > 0


def test_hidden_tokens_do_not_reach_the_tokens_after_them(parity: Any) -> None:
    """Two tokens at the start of document 3 are hidden: what is left is the document without them."""
    model = prepare_model("lfm2")
    start = sum(LENGTHS[:2])
    inputs = batch((start, start + 1))
    with torch.no_grad():
        packed = model(**inputs).logits[:, start + 2 :]
        positions = torch.arange(2, LENGTHS[2]).expand(2, -1)
        rest = {"input_ids": IDS[:, start + 2 :], "position_ids": positions, "use_cache": False}
        expected = plain("lfm2")(**rest).logits
        zeroed = plain("lfm2")(**inputs).logits[:, start + 2 :]
    floor = noise_floor(expected)
    control = largest_difference(zeroed, expected)
    parity.check("logits", largest_difference(packed, expected), floor, control)


def test_many_short_documents_take_few_calls() -> None:
    model = prepare_model("lfm2")
    (layer,) = layers_of(model, STATEFUL_LAYERS["lfm2"]).values()
    calls = []
    layer.in_proj.register_forward_hook(lambda *_: calls.append(1))
    lengths = [1 + number * 7 % 60 for number in range(120)]
    ids = torch.randint(5, 90, (1, sum(lengths)))
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packhorse.prepare(model, "varlen", device="cpu")
    with torch.no_grad():
        model(
            input_ids=ids,
            position_ids=positions,
            cu_seq_lens_q=ends,
            cu_seq_lens_k=ends,
            max_length_q=60,
            max_length_k=60,
        )
    assert len(calls) == 1, "documents of up to 64 tokens are of similar length"


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(st.integers(0, 4), min_size=7, max_size=7), min_size=1, max_size=3), st.data())
def test_documents_are_taken_apart_and_joined_to_what_they_were(rows: list[list[int]], data: Any) -> None:
    numbers = torch.tensor([sorted(row) for row in rows])
    hidden = data.draw(st.lists(st.booleans(), min_size=numbers.numel(), max_size=numbers.numel()))
    numbers[torch.tensor(hidden).view(numbers.shape)] = 0
    documents = Documents(numbers)
    value = torch.rand(*numbers.shape, 2) + 1
    for calls in (
        documents.in_groups(),
        documents.in_groups(2),
        documents.in_one_row(0),
        documents.in_one_row(3),
    ):
        parts = [documents.take(value, calls, group) for group in calls.groups]
        joined = documents.join(parts, calls)
        shown = numbers > 0 if bool(numbers.any()) else torch.ones_like(numbers).bool()
        assert torch.equal(joined[shown], value[shown])
        assert not bool(joined[~shown].any())


def test_rows_of_zeros_separate_the_documents_of_one_call() -> None:
    documents = Documents(torch.tensor([[1, 1, 2, 0], [1, 1, 1, 2]]))
    calls = documents.in_one_row(2)
    (group,) = calls.groups
    taken = documents.take(torch.arange(1.0, 9).view(2, 4, 1), calls, group)[0, :, 0]
    assert taken.tolist() == [1, 2, 0, 0, 3, 0, 0, 5, 6, 7, 0, 0, 8, 0, 0]
    assert calls.boundaries["cu_seq_lens_q"].tolist() == [0, 4, 7, 12, 15]
    assert calls.boundaries["seq_idx"].dtype == torch.int32


# Everything else is as before.


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_packed_runs_as_in_a_model_that_is_not_prepared(name: str) -> None:
    model, other = prepare_model(name), plain(name)
    mask = torch.ones_like(IDS)
    mask[1, -5:] = 0
    model.train(), other.train()
    for inputs in ({"input_ids": IDS}, {"input_ids": IDS, "attention_mask": mask}):
        (found, gradients), (expected, gradients_then) = run(model, inputs), run(other, inputs)
        assert torch.equal(found, expected)
        assert all(torch.equal(gradients[key], gradients_then[key]) for key in gradients_then)


@pytest.mark.parametrize("name", NAMES)
def test_generation_is_as_before(name: str) -> None:
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    mask = torch.ones_like(IDS)
    mask[1, :4] = 0
    for inputs in ({"input_ids": IDS}, {"input_ids": IDS, "attention_mask": mask}):
        found, expected = (
            model.generate(**inputs, **options) for model in (prepare_model(name), plain(name))
        )
        assert torch.equal(found.sequences, expected.sequences)
        assert all(map(torch.equal, found.logits, expected.logits))


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2_vl"])
def test_generation_with_an_image_is_as_before(name: str) -> None:
    model = copy.deepcopy(tiny_model(name, by_document=False))
    turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "why"}]}
    text = render(name, [turn], add_generation_prompt=True)
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "use_cache": True}

    def generate(color: str) -> torch.Tensor:
        inputs = processor(name)(
            text=[text], images=[[Image.new("RGB", (64, 48), color)]], return_tensors="pt"
        )
        output = model.generate(**inputs, **options, return_dict_in_generate=True, output_logits=True)
        return torch.stack(output.logits)

    expected, other = generate("red"), generate("blue")
    assert not torch.equal(other, expected), "the model takes the image"
    report = packhorse.prepare(model, "sdpa", device="cpu")
    assert report.stateful_layers
    assert torch.equal(generate("red"), expected)


def test_a_prepared_model_is_saved_copied_and_pickled(tmp_path: Path, parity: Any) -> None:
    model, other = prepare_model("lfm2"), plain("lfm2")
    assert model.state_dict().keys() == other.state_dict().keys()
    expected = run(model)[0]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False))
    for made in copies:
        assert torch.equal(run(made)[0], expected)
        with torch.no_grad():
            for weight in made.parameters():
                weight.zero_()
        assert torch.equal(run(model)[0], expected), "a copy has weights of its own"
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert not has_document_bounds(loaded, STATEFUL_LAYERS["lfm2"])
    with raises_config("model", match=UNPREPARED):
        check_packable(loaded)


def test_a_forward_pass_that_is_replaced_after_preparing_runs_document_by_document(parity: Any) -> None:
    model, expected = prepare_model("lfm2"), alone(plain("lfm2"))
    (layer,) = layers_of(model, STATEFUL_LAYERS["lfm2"]).values()
    layer.forward = type(layer).forward.__get__(layer)
    control = largest_difference(leak_logits(plain("lfm2")), expected)
    parity.check("logits", largest_difference(leak_logits(model), expected), noise_floor(expected), control)


def test_copies_of_a_layer_run_document_by_document_too(parity: Any) -> None:
    """As in depth up-scaling: a model gets copies of its own layers."""
    deeper, model = plain("lfm2"), prepare_model("lfm2")
    for made in (deeper, model):
        index = next(i for i, layer in enumerate(made.model.layers) if hasattr(layer, "conv"))
        made.model.layers.append(copy.deepcopy(made.model.layers[index]))
        made.config.num_hidden_layers = len(made.model.layers)
        made.config.layer_types = [*made.config.layer_types, made.config.layer_types[index]]
    expected = alone(deeper)
    control = largest_difference(leak_logits(deeper), expected)
    parity.check("logits", largest_difference(leak_logits(model), expected), noise_floor(expected), control)


def test_layers_that_are_computed_again_without_their_documents_raise() -> None:
    """A loop that checkpoints a layer itself computes it again when no batch is known."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(torch.nn.Module):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, hidden_states: torch.Tensor, **options: Any) -> Any:
            return checkpoint(lambda x: self.layer(x, **options), hidden_states, use_reentrant=self.training)

    model = prepare_model("lfm2")
    block = next(layer for layer in model.model.layers if hasattr(layer, "conv"))
    block.conv = Checkpointed(block.conv)
    run(model, {"input_ids": IDS})  # no batch was packed yet
    for mode in (True, False):
        for between in (lambda: None, lambda: model(input_ids=IDS)):
            logits = model.train(mode)(**batch()).logits
            with torch.no_grad():
                between()
            with raises_config("gradient_checkpointing", match="gradient_checkpointing_enable"):
                logits.sum().backward()
    states = torch.rand(1, 5, model.config.hidden_size)
    assert block.conv.layer(hidden_states=states).isfinite().all(), "a layer may be called alone"


@pytest.mark.parametrize("reentrant", [True, False])
def test_padded_and_packed_batches_are_computed_again_as_they_were(reentrant: bool, parity: Any) -> None:
    def gradients(checkpointing: bool) -> dict[str, torch.Tensor]:
        model = prepare_model("lfm2").train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        padded, packed = model(input_ids=IDS).logits, model(**batch()).logits
        with torch.no_grad():
            model(input_ids=IDS)
        (padded.square().mean() + packed.square().mean()).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected, found = gradients(False), gradients(True)
    _, control = run(prepare_model("lfm2").train())
    floor = noise_floor(expected, measure=relative_difference)
    difference = relative_difference(found, expected)
    parity.check("gradients", difference, floor, relative_difference(control, expected))


def test_documents_are_forgotten_after_a_forward_pass_that_is_interrupted() -> None:
    model, other = (made.train() for made in (prepare_model("lfm2"), plain("lfm2")))
    model.gradient_checkpointing_enable({"use_reentrant": False})

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for first in (False, True):
        handle = model.model.layers[-1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(**batch())
        handle.remove()
        if first:
            model(**batch())
        with torch.no_grad():  # checkpoints layers too
            assert torch.equal(model(input_ids=IDS).logits, other(input_ids=IDS).logits)


def test_only_the_layers_that_were_prepared_are_reported_as_such() -> None:
    model = prepare_model("lfm2")
    assert has_document_bounds(model, STATEFUL_LAYERS["lfm2"])
    assert has_document_bounds(model, ("NoSuchLayer",)) is False
    unprepared = plain("lfm2")
    unprepared.model.layers[0] = copy.deepcopy(model.model.layers[0])  # a layer alone finds no documents
    assert not has_document_bounds(unprepared, STATEFUL_LAYERS["lfm2"])
    assert has_document_bounds(unprepared, ("NoSuchLayer",))


def test_a_block_mask_of_another_library_is_rejected() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    inputs = batch() | {
        "attention_mask": create_block_mask(lambda b, h, q, k: q >= k, 2, 1, 28, 28, device="cpu")
    }
    with raises_config("attention_mask", match="Packhorse did not build it"):
        prepare_model("lfm2")(**inputs)


# Inside wrappers.


@pytest.mark.parametrize("first", ["prepare", "wrap"])
def test_lora_around_a_hybrid_model_is_packed_right(first: str, parity: Any) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = plain("lfm2")
    if first == "prepare":
        packhorse.prepare(model, "sdpa", device="cpu")
    lora = LoraConfig(target_modules=["in_proj", "q_proj"], init_lora_weights=False)
    wrapped = get_peft_model(model, lora)
    if first == "wrap":
        with raises_config("model", match=UNPREPARED):
            check_packable(wrapped)
        report = packhorse.prepare(wrapped, "sdpa", device="cpu")
        assert report.stateful_layers == {"Lfm2ShortConv": 1}
    check_packable(wrapped)
    with torch.no_grad():
        found, expected = wrapped(**batch()).logits, alone(wrapped)
    control = largest_difference(leak_logits(without_documents(wrapped)), expected)
    parity.check("logits", largest_difference(found, expected), noise_floor(expected), control)


@pytest.mark.parametrize("first", ["prepare", "wrap"])
def test_layers_that_lora_trains_whole_are_packed_right(first: str, parity: Any) -> None:
    """PEFT keeps the original of a layer in ``modules_to_save`` next to the copy that it trains."""
    from peft import LoraConfig, get_peft_model

    model = prepare_model("lfm2") if first == "prepare" else plain("lfm2")
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["conv"]))
    if first == "wrap":
        packhorse.prepare(wrapped, "sdpa", device="cpu")
    expected = alone(wrapped)
    control = largest_difference(leak_logits(without_documents(wrapped)), expected)
    parity.check("logits", largest_difference(leak_logits(wrapped), expected), noise_floor(expected), control)
    assert any("modules_to_save" in name for name in run(wrapped)[1])


def without_documents(model: Any) -> Any:
    """A copy of a prepared model that does not look for documents."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        module._forward_pre_hooks.clear()
    return copied


def leak_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch()).logits


@pytest.mark.parametrize("first", ["prepare", "wrap"])
def test_data_parallel_wrappers_of_a_hybrid_model_are_packed_right(
    first: str, tmp_path: Path, parity: Any
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def shard(model: Any) -> Any:
        if first == "prepare":
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def wrap_in_fsdp(model: Any) -> Any:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)

    expected = alone(plain("lfm2"))
    leaks = largest_difference(leak_logits(plain("lfm2")), expected)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for wrap in (DistributedDataParallel, shard, wrap_in_fsdp):
            wrapped = wrap(prepare_model("lfm2") if first == "prepare" else plain("lfm2"))
            if first == "wrap":
                with raises_config("model", match=UNPREPARED):
                    check_packable(wrapped)
                packhorse.prepare(wrapped, "sdpa", device="cpu")
            check_packable(wrapped)
            logits, _ = run(wrapped)
            parity.check("logits", largest_difference(logits, expected), noise_floor(expected), leaks)
    finally:
        torch.distributed.destroy_process_group()


# Classes without a test of their own.


def test_a_class_of_the_users_is_measured_and_handled_or_rejected_with_its_layer(parity: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    class Smooth(torch.nn.Module):
        """Each token gets the mean of all tokens before it: a state that no mask limits."""

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            steps = torch.arange(1, hidden_states.shape[1] + 1)[None, :, None]
            return hidden_states.cumsum(1) / steps

    class SmoothLayer(torch.nn.Module):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.layer, self.smooth = layer, Smooth()

        def forward(self, hidden_states: torch.Tensor, **options: Any) -> Any:
            return self.layer(hidden_states + self.smooth(hidden_states), **options)

    class SmoothLlama(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model.layers = torch.nn.ModuleList(map(SmoothLayer, self.model.layers))

    class MixedLlama(LlamaForCausalLM):
        """Mixes documents outside of any module."""

        def forward(self, *arguments: Any, **options: Any) -> Any:
            made = super().forward(*arguments, **options)
            made.logits = made.logits + made.logits.cumsum(1)
            return made

    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    torch.manual_seed(0)
    smooth = with_random_weights(SmoothLlama(copy.deepcopy(config)))
    packing = inspect_packing(smooth)
    assert packing.layers == ("Smooth",)
    assert not packing.tested
    expected, leaks = alone(smooth), leak_logits(smooth)
    report = packhorse.prepare(smooth, "sdpa", device="cpu")
    assert report.stateful_layers == {"Smooth": 2}
    found = leak_logits(smooth)
    control = largest_difference(leaks, expected)
    parity.check("logits", largest_difference(found, expected), noise_floor(expected), control)
    mixed = MixedLlama(copy.deepcopy(config))
    with raises_config("model", match="MixedLlama: document 2 of a pack changes by"):
        packhorse.prepare(mixed, device="cpu")


def test_a_class_that_has_no_tiny_copy_is_rejected_with_the_reason() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    class FixedLlama(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            if config.hidden_size != 96:
                raise ValueError("only 96")
            super().__init__(config)

    config = LlamaConfig(vocab_size=128, hidden_size=96, intermediate_size=32, num_hidden_layers=1)
    with raises_config("model", match=r"FixedLlama: a tiny copy of it cannot be built .*only 96"):
        check_packable(FixedLlama(config))


def test_installing_twice_changes_nothing() -> None:
    model = prepare_model("lfm2")
    hooks = [len(module._forward_hooks) for module in model.modules()]
    install(model, STATEFUL_LAYERS["lfm2"])
    assert [len(module._forward_hooks) for module in model.modules()] == hooks


def test_attention_inside_of_a_layer_with_state_runs_without_a_mask_or_not_at_all(parity: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    class StateLayer(LlamaDecoderLayer):
        """Adds the sum of all tokens before, in the layer that contains attention."""

        def forward(self, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            return super().forward(hidden_states + hidden_states.cumsum(1).tanh(), *arguments, **options)

    class StateLlama(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model.layers = torch.nn.ModuleList([StateLayer(config, 0), StateLayer(config, 1)])

    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    torch.manual_seed(0)
    model = with_random_weights(StateLlama(config))
    assert inspect_packing(model).layers == ("StateLayer",)
    expected, leaks = alone(model), leak_logits(model)
    packhorse.prepare(model, "sdpa", device="cpu")
    control = largest_difference(leaks, expected)
    parity.check("logits", largest_difference(leak_logits(model), expected), noise_floor(expected), control)
    packhorse.prepare(model, "eager", device="cpu")
    with raises_config("attn_implementation", match="StateLayer carries state and contains LlamaAttention"):
        model(**batch())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_inside_of_checkpointed_layers_give_the_same_gradients(
    reentrant: bool, parity: Any
) -> None:
    model = prepare_model("zamba2").train()
    _, expected = run(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    _, gradients = run(model)
    _, control = run_unprepared("zamba2")
    floor = noise_floor(expected, measure=relative_difference)
    difference = relative_difference(gradients, expected)
    parity.check("gradients", difference, floor, relative_difference(control, expected))
