"""Attention set for packs serves ordinary batches too: generation with each cache says what sdpa says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from contract.tiny_models import tiny_model
from noise_floor import largest_difference, noise_floor
from packhorse.families.models import attention_of
from packhorse.integrations.attention import use_attention

# Decoders with mRoPE, with plain positions, and with sliding windows.
NAMES = ("qwen2_vl", "llava_onevision", "gemma3", "gemma4")
LENGTH, NEW = 40, 12


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = tiny_model(request.param)
    before, text = attention_of(made), made.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    if window is not None:
        _set_window(made, 16)  # shorter than the prompt
    yield made
    use_attention(made, before)
    if window is not None:
        _set_window(made, window)


def _set_window(model: Any, window: int) -> None:
    text = model.config.get_text_config()
    text.sliding_window = window
    for kind, layer in zip(text.layer_types, model.model.language_model.layers, strict=True):
        if kind == "sliding_attention":
            layer.self_attn.sliding_window = window


def prompt(rows: int) -> torch.Tensor:
    return torch.randint(97, 123, (rows, LENGTH), generator=torch.Generator().manual_seed(0))


def generate(model: Any, attention: str, **options: Any) -> torch.Tensor:
    use_attention(model, attention)
    made = model.generate(
        **options,
        do_sample=False,
        min_new_tokens=NEW,
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return torch.stack(made.logits)


def check(
    parity: Any, found: torch.Tensor, expected: torch.Tensor, other: torch.Tensor, control: torch.Tensor
) -> None:
    """Compare with the noise between two kernels; the control lacks one token, and has the last places."""
    off = largest_difference(control, expected[:, -control.shape[1] :])
    parity.check("logits", largest_difference(found, expected), noise_floor(expected, other), off)


@pytest.mark.parametrize("cache", ["static", "dynamic"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_varlen_generates_what_sdpa_generates(model: Any, cache: str, padded: bool, parity: Any) -> None:
    ids = prompt(2)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :9] = 0
    options = {"input_ids": ids, "attention_mask": mask, "cache_implementation": cache}
    expected, other, found = (generate(model, name, **options) for name in ("sdpa", "eager", "varlen"))
    hidden = mask.clone()
    hidden[:, LENGTH - 3] = 0
    control = generate(model, "sdpa", **{**options, "attention_mask": hidden})
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    check(parity, found, expected, other, control)


@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
def test_a_prompt_in_parts_without_a_mask_is_the_whole_prompt(model: Any, static: bool, parity: Any) -> None:
    from transformers import DynamicCache, StaticCache

    ids = prompt(1)
    with torch.no_grad():
        hidden = torch.ones_like(ids)
        hidden[:, LENGTH - 3] = 0
        use_attention(model, "eager")
        other = model(input_ids=ids).logits
        use_attention(model, "sdpa")
        expected = model(input_ids=ids).logits
        control = model(input_ids=ids, attention_mask=hidden, position_ids=torch.arange(LENGTH)[None]).logits
        use_attention(model, "varlen")
        text = model.config.get_text_config()
        cache = StaticCache(config=text, max_cache_len=LENGTH + 24) if static else DynamicCache(config=text)
        parts = []
        for start, stop in ((0, 18), (18, 27), (27, 28), (28, LENGTH)):
            places = torch.arange(start, stop)[None]
            made = model(
                input_ids=ids[:, start:stop], position_ids=places, past_key_values=cache, use_cache=True
            )
            parts.append(made.logits)
    check(parity, torch.cat(parts, dim=1), expected, other, control[:, LENGTH - 2 :])
