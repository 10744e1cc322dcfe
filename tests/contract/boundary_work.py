"""Compare packed with unpacked documents in layers that pass boundaries on to kernels; print JSON.

Runs in an interpreter of its own: transformers looks for kernels when it is imported. With ``--unsound`` the
kernels do not keep documents apart: how layers fall back, and the error for a user who requested boundaries.
With ``--dropout`` an adapter draws random numbers.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from contract.test_packable_types import decoder, with_random_weights
from noise_floor import largest_difference, noise_floor, relative_difference
from packhorse.errors import ConfigError
from packhorse.families.packing import STATEFUL_LAYERS
from packhorse.families.stateful import BOUNDARIES, PER_DOCUMENT, boundary_arguments, install, layers_of

_LENGTHS = (9, 2, 13)


def run(
    model: Any, ids: torch.Tensor, lengths: tuple[int, ...], packed: bool = True
) -> tuple[torch.Tensor, Any]:
    """Return the logits of documents in one row, and the gradients of a sum over them."""
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    seen = (numbers[:, None] == numbers) & torch.ones(len(numbers), len(numbers)).tril().bool()
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    inputs = {"attention_mask": seen[None, None]} if packed else {}
    logits = model(input_ids=ids, position_ids=positions, use_cache=False, **inputs).logits
    logits.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return logits.detach(), gradients


def plain_model(name: str) -> Any:
    torch.manual_seed(0)
    return with_random_weights(decoder(name)).train()


def compare(name: str) -> dict[str, Any]:
    plain = plain_model(name)
    models = {mode: copy.deepcopy(plain) for mode in ("auto", PER_DOCUMENT)}
    used = {mode: install(model, STATEFUL_LAYERS[name], mode, "cuda") for mode, model in models.items()}
    ids = torch.randint(5, 90, (1, sum(_LENGTHS)))
    parts = [run(plain, part, (part.shape[1],), packed=False) for part in ids.split(_LENGTHS, 1)]
    alone = torch.cat([logits for logits, _ in parts], 1)
    summed = {key: sum(gradients[key] for _, gradients in parts) for key in parts[0][1]}
    (packed, gradients), (grouped, of_groups) = (run(model, ids, _LENGTHS) for model in models.values())
    # Control: the same layers with one boundary too few.
    leaking, wrong = run(models["auto"], ids, (_LENGTHS[0] + _LENGTHS[1], _LENGTHS[2]))
    layer = next(iter(layers_of(plain, STATEFUL_LAYERS[name]).values()))
    return {
        "mode": {mode: next(iter(found.values()))[1] for mode, found in used.items()},
        "arguments": boundary_arguments(layer),
        "error": error_of(lambda: install(copy.deepcopy(plain), STATEFUL_LAYERS[name], BOUNDARIES)),
        "difference": largest_difference(packed, alone),
        "floor": noise_floor(alone, grouped),
        "control": largest_difference(leaking, alone),
        "gradients": relative_difference(gradients, summed),
        "gradient_control": relative_difference(wrong, summed),
        "gradient_floor": noise_floor(summed, of_groups, measure=relative_difference),
    }


def error_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except ConfigError as error:
        return f"{error.setting}: {error}"
    return ""


def fall_back(name: str) -> dict[str, Any]:
    plain = plain_model(name)
    model, classes = copy.deepcopy(plain), STATEFUL_LAYERS[name]
    install(model, classes, "auto", "cuda")
    ids = torch.randint(5, 90, (1, sum(_LENGTHS)))
    parts = ids.split(_LENGTHS, 1)
    alone = torch.cat([run(plain, part, (part.shape[1],), packed=False)[0] for part in parts], 1)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign,assignment]
    logging.getLogger("packhorse").addHandler(handler)
    single = torch.cat([run(model, part, (part.shape[1],))[0] for part in parts], 1)
    warned_before = bool(records)
    packed, again = (run(model, ids, _LENGTHS)[0] for _ in range(2))
    install(model, classes, BOUNDARIES)
    return {
        "differences": [largest_difference(logits, alone) for logits in (single, packed, again)],
        "floor": noise_floor(alone),
        "control": largest_difference(run(plain, ids, (sum(_LENGTHS),), packed=False)[0], alone),
        "warned_before": warned_before,
        "warnings": [record.getMessage() for record in records],
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
