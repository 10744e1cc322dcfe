"""The functions of causal-conv1d in PyTorch, with their arguments; ``seq_idx`` keeps documents apart."""

from __future__ import annotations

import torch
import torch.nn.functional as F

keeps_apart = True
"""A control sets it to False; then ``seq_idx`` is ignored."""


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """A causal convolution of each channel of x [B, C, T]; ``seq_idx`` [B, T] int32 numbers the documents."""
    assert initial_states is None
    assert not return_final_states
    if seq_idx is not None and (seq_idx.dtype != torch.int32 or x.stride(1) != 1):
        raise ValueError("seq_idx needs int32 and x in the layout [B, T, C]")
    if not keeps_apart:
        seq_idx = None
    length, width = x.shape[-1], weight.shape[-1]
    output = torch.zeros_like(x)
    for back in range(width):
        moved = F.pad(x, (back, 0))[..., :length]
        if seq_idx is not None:
            before = F.pad(seq_idx, (back, 0), value=-1)[:, :length]
            moved = moved * (before == seq_idx)[:, None]
        output = output + moved * weight[:, width - 1 - back, None]
    if bias is not None:
        output = output + bias[:, None]
    return F.silu(output) if activation in ("silu", "swish") else output


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """The convolution of new tokens x [B, C, T]; ``conv_state``, the tokens before, changes in place."""
    assert cache_seqlens is None
    assert conv_state_indices is None
    tokens = torch.cat([conv_state, x], -1)
    conv_state.copy_(tokens[..., -conv_state.shape[-1] :])
    return causal_conv1d_fn(tokens, weight, bias, activation=activation)[..., -x.shape[-1] :]
