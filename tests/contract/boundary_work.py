"""Compare packed with unpacked documents in layers that pass boundaries on to kernels; print JSON.

Runs in an interpreter of its own: transformers looks for kernels when it is imported. With ``--unsound`` the
kernels do not keep documents apart: how layers fall back, and the error for a user who requested boundaries.
With ``--dropout`` an adapter draws random numbers. A comparison has the largest difference of logits, the
relative difference of gradients, the noise floors of both, and both of a control with a deliberate mistake.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from contract.test_packable_types import decoder, with_random_weights
from noise_floor import largest_difference, noise_floor, relative_difference
from packhorse.errors import ConfigError
from packhorse.families import stateful
from packhorse.families.stateful import (
    BOUNDARIES,
    PER_DOCUMENT,
    STATEFUL_LAYERS,
    boundary_arguments,
    install,
    layers_of,
)

_LENGTHS = (9, 2, 13)
_HIDDEN = (4, 11, 12, 22, 23)  # inside document 1, at the start of document 3 and at its end
_NEW_TOKENS = 4


def run(
    model: Any,
    ids: torch.Tensor,
    lengths: Sequence[int],
    masked: bool = True,
    hidden: Sequence[int] = (),
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Any]:
    """Return the logits of the visible tokens of documents in a row, and the gradients of a sum over them."""
    numbers = (torch.arange(len(lengths)) + 1).repeat_interleave(torch.tensor(lengths))
    numbers[list(hidden)] = 0
    mask = (numbers[:, None] == numbers) & torch.ones(len(numbers), len(numbers)).tril().bool()
    mask &= numbers > 0
    if positions is None:
        positions = torch.cat([torch.arange(length) for length in lengths])
    inputs = {"attention_mask": mask.expand(len(ids), 1, -1, -1)} if masked else {}
    inputs["position_ids"] = positions.expand(len(ids), -1)
    logits = model(input_ids=ids, use_cache=False, **inputs).logits[:, numbers > 0]
    logits.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return logits.detach(), gradients


def plain_model(name: str) -> Any:
    """A model in which a document reaches far into the next one if nothing separates them."""
    torch.manual_seed(0)
    model = with_random_weights(decoder(name)).train()
    for weight_name, weight in model.named_parameters():
        if weight_name.endswith("A_log"):
            weight.data.sub_(4)  # the state of a recurrence decays slowly
    return model


Run = tuple[torch.Tensor, dict[str, torch.Tensor]]


def comparison(found: Run, expected: Run, other: Run, control: Run) -> dict[str, float]:
    """Compare logits and gradients with the expected ones; ``other`` are computed in another correct way."""
    (logits, gradients), (_, summed) = found, expected
    return {
        "difference": largest_difference(logits, expected[0]),
        "floor": noise_floor(expected[0], other[0]),
        "control": largest_difference(control[0], expected[0]),
        "gradients": relative_difference(gradients, summed),
        "gradient_floor": noise_floor(summed, other[1], measure=relative_difference),
        "gradient_control": relative_difference(control[1], summed),
    }


def run_alone(
    model: Any, documents: Sequence[torch.Tensor], positions: Sequence[torch.Tensor] | None = None
) -> Run:
    """Return the logits of documents, each in a row of its own, and the sum of their gradients."""
    parts = []
    for index, ids in enumerate(documents):
        # transformers takes a gap in positions for the begin of a document, unless there is a mask.
        masked, of_document = (False, None) if positions is None else (True, positions[index])
        parts.append(run(model, ids, (ids.shape[1],), masked, positions=of_document))
    summed = {key: sum(gradients[key] for _, gradients in parts) for key in parts[0][1]}
    return torch.cat([logits for logits, _ in parts], 1), summed


def compare(name: str) -> dict[str, Any]:
    plain = plain_model(name)
    models = {mode: copy.deepcopy(plain) for mode in ("auto", PER_DOCUMENT)}
    used = {mode: install(model, STATEFUL_LAYERS[name], mode, "cuda") for mode, model in models.items()}
    ids = torch.randint(5, 90, (1, sum(_LENGTHS)))
    alone = run_alone(plain, ids.split(_LENGTHS, 1))
    packed, grouped = (run(model, ids, _LENGTHS) for model in models.values())
    # Control: the same layers with one boundary too few.
    leaking = run(models["auto"], ids, (_LENGTHS[0] + _LENGTHS[1], _LENGTHS[2]))
    layer = next(iter(layers_of(plain, STATEFUL_LAYERS[name]).values()))
    result = {
        "mode": {mode: next(iter(found.values()))[1] for mode, found in used.items()},
        "arguments": boundary_arguments(layer),
        "error": error_of(lambda: install(copy.deepcopy(plain), STATEFUL_LAYERS[name], BOUNDARIES)),
        **comparison(packed, alone, grouped, leaking),
    }
    if not result["arguments"]:
        return result
    recurrent = "ShortConv" not in type(layer).__name__
    return result | {
        "without": {
            part: without_boundaries_of(part, name, plain, ids, alone, grouped)
            for part in ("convolution", *(("recurrence",) if recurrent else ()))
        },
        "hidden": with_hidden_tokens(plain, models, ids),
        "padding": with_padding_alone(models["auto"], ids, packed),
        "checkpointing": {
            f"reentrant={reentrant}": with_checkpointing(models["auto"], ids, packed, leaking, reentrant)
            for reentrant in (True, False)
        },
        "generation": with_generation(plain, models["auto"], ids),
        "gathered": {mode: with_gathered_weights(plain, mode, ids) for mode in ("auto", BOUNDARIES)},
    }


def with_gathered_weights(plain: Any, mode: str, ids: torch.Tensor) -> str:
    """Return the error of a packed row if weights are marked as DeepSpeed marks those that ranks gather."""
    model = copy.deepcopy(plain)
    classes = next(classes for classes in STATEFUL_LAYERS.values() if layers_of(model, classes))
    install(model, classes, mode, "cuda")
    for layer in layers_of(model, classes).values():
        for weight in layer.parameters():
            weight.ds_id = 0  # type: ignore[attr-defined]
    return error_of(lambda: run(model, ids, _LENGTHS))


@contextmanager
def ignore_boundaries(part: str) -> Iterator[None]:
    """Let the convolution or the recurrence of layers compute a row as one document."""
    packages = ("causal_conv1d",) if part == "convolution" else ("fla", "mamba_ssm")
    modules = [importlib.import_module(name) for name in packages if find_spec(name)]
    zero_rows = stateful._zero_rows
    for module in modules:
        module.keeps_apart = False  # type: ignore[attr-defined]
    if part == "convolution":
        stateful._zero_rows = lambda *_: 0
    try:
        yield
    finally:
        stateful._zero_rows = zero_rows
        for module in modules:
            module.keeps_apart = True  # type: ignore[attr-defined]


@contextmanager
def trust_kernels() -> Iterator[None]:
    """Do not measure whether kernels keep documents apart."""
    keeps_apart = stateful._keeps_apart
    stateful._keeps_apart = lambda *_: True
    try:
        yield
    finally:
        stateful._keeps_apart = keeps_apart


def without_boundaries_of(
    part: str, name: str, plain: Any, ids: torch.Tensor, alone: Run, grouped: Run
) -> dict[str, Any]:
    """Compare what is computed where one part of a layer ignores boundaries; the control does not notice."""
    model = copy.deepcopy(plain)
    install(model, STATEFUL_LAYERS[name], "auto", "cuda")
    with ignore_boundaries(part):
        with trust_kernels():
            leaking = run(model, ids, _LENGTHS)
        with recorded_warnings() as warnings:
            noticed = run(model, ids, _LENGTHS)
    return {**comparison(noticed, alone, grouped, leaking), "warnings": warnings}


def with_hidden_tokens(plain: Any, models: dict[str, Any], ids: torch.Tensor) -> dict[str, float]:
    """Compare documents with hidden tokens with what is left of them; no token is hidden in the control."""
    visible = [index for index in range(sum(_LENGTHS)) if index not in _HIDDEN]
    numbers = torch.arange(len(_LENGTHS)).repeat_interleave(torch.tensor(_LENGTHS))[visible]
    lengths = numbers.bincount().tolist()
    positions = torch.cat([torch.arange(length) for length in _LENGTHS])[visible].split(lengths)
    expected = run_alone(plain, ids[:, visible].split(lengths, 1), positions)
    found, grouped = (run(model, ids, _LENGTHS, hidden=_HIDDEN) for model in models.values())
    logits, gradients = run(models["auto"], ids, _LENGTHS)
    return comparison(found, expected, grouped, (logits[:, visible], gradients))


def with_padding_alone(model: Any, ids: torch.Tensor, packed: Run) -> dict[str, Any]:
    """Run two rows of padding."""
    _, gradients = run(model, ids.expand(2, -1), _LENGTHS, hidden=range(sum(_LENGTHS)))
    return {
        "largest": max(float(gradient.abs().max()) for gradient in gradients.values()),
        "same_weights": gradients.keys() == packed[1].keys(),
    }


def with_checkpointing(
    model: Any, ids: torch.Tensor, expected: Run, leaking: Run, reentrant: bool
) -> dict[str, float]:
    model = copy.deepcopy(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return comparison(run(model, ids, _LENGTHS), expected, expected, leaking)


def with_generation(plain: Any, model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Generate with both models; compare with one forward pass, whose control gets only the last tokens."""
    plain, model = (copy.deepcopy(given).eval() for given in (plain, model))
    rows = torch.cat([ids, ids.flip(1)])
    mask = torch.ones_like(rows)
    mask[1, :5] = 0
    options = {"max_new_tokens": _NEW_TOKENS, "min_new_tokens": _NEW_TOKENS, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_logits": True, "pad_token_id": 0, "use_cache": True}
    packed = run(model, ids, _LENGTHS)[0]
    generated = [given.generate(rows, attention_mask=mask, **options) for given in (plain, model)]
    before, after = (torch.stack(output.logits, 1) for output in generated)
    with torch.no_grad():
        tokens = generated[0].sequences[:1, :-1]
        whole = plain(input_ids=tokens, use_cache=False).logits[:, -_NEW_TOKENS:]
        last = plain(input_ids=tokens[:, -_NEW_TOKENS:], use_cache=False).logits
    return {
        "same": torch.equal(before, after),
        "difference": largest_difference(after[:1], whole),
        "floor": noise_floor(whole, before[:1]),
        "control": largest_difference(last, whole),
        "packed_as_before": torch.equal(run(model, ids, _LENGTHS)[0], packed),
    }


def error_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except ConfigError as error:
        return f"{error.setting}: {error}"
    return ""


@contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Collect what packhorse logs."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("packhorse").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("packhorse").removeHandler(handler)


def fall_back(name: str) -> dict[str, Any]:
    plain = plain_model(name)
    model, classes = copy.deepcopy(plain), STATEFUL_LAYERS[name]
    install(model, classes, "auto", "cuda")
    ids = torch.randint(5, 90, (1, sum(_LENGTHS)))
    parts = ids.split(_LENGTHS, 1)
    alone = torch.cat([run(plain, part, (part.shape[1],), masked=False)[0] for part in parts], 1)
    with recorded_warnings() as warnings:
        single = torch.cat([run(model, part, (part.shape[1],))[0] for part in parts], 1)
        warned_before = bool(warnings)
        packed, again = (run(model, ids, _LENGTHS)[0] for _ in range(2))
    install(model, classes, BOUNDARIES)
    return {
        "differences": [largest_difference(logits, alone) for logits in (single, packed, again)],
        "floor": noise_floor(alone),
        "control": largest_difference(run(plain, ids, (sum(_LENGTHS),), masked=False)[0], alone),
        "warned_before": warned_before,
        "warnings": warnings,
        "error": error_of(lambda: run(model, ids, _LENGTHS)),
    }


def with_dropout(name: str) -> dict[str, Any]:
    """Run packs in an adapter with dropout, whose random numbers differ between two calls."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        target_modules=["in_proj", "in_proj_qkvz", "out_proj"], lora_dropout=0.3, init_lora_weights=False
    )
    model = get_peft_model(plain_model(name), lora).train()
    install(model, STATEFUL_LAYERS[name], BOUNDARIES)
    ids = torch.randint(5, 90, (1, sum(_LENGTHS)))
    error = error_of(lambda: run(model, ids, _LENGTHS))
    dropout = largest_difference(run(model, ids, _LENGTHS)[0], run(model, ids, _LENGTHS)[0])
    return {"error": error, "dropout": dropout}


WORK = {"--unsound": fall_back, "--dropout": with_dropout}

if __name__ == "__main__":
    arguments = [name for name in sys.argv[1:] if name not in WORK]
    work = next((WORK[name] for name in sys.argv[1:] if name in WORK), compare)
    print(json.dumps({name: work(name) for name in arguments}))
