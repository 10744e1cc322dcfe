"""The functions of flash-linear-attention that layers call, token by token in PyTorch.

They have the arguments of the kernels, and keep documents apart by ``cu_seqlens`` as those do.
"""

from __future__ import annotations

from itertools import pairwise

import torch

keeps_apart = True
"""A control sets it to False; then ``cu_seqlens`` is ignored."""


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule for [B, T, H, K] and [B, T, H, V]; documents begin at ``cu_seqlens``."""
    if use_qk_l2norm_in_kernel:
        q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
    if cu_seqlens is not None and q.shape[0] != 1:
        raise ValueError(f"cu_seqlens needs one row, got {q.shape[0]}")
    if not keeps_apart:
        cu_seqlens = None
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    outputs = []
    for start, stop in pairwise(bounds):
        state = q.new_zeros(q.shape[0], q.shape[2], k.shape[-1], v.shape[-1])
        if initial_state is not None:
            assert cu_seqlens is None, "generation has no packs"
            state = initial_state
        for t in range(start, stop):
            state = state * g[:, t, :, None, None].exp()
            known = (state * k[:, t, :, :, None]).sum(-2)
            change = (v[:, t] - known) * beta[:, t, :, None]
            state = state + k[:, t, :, :, None] * change[:, :, None]
            outputs.append((state * q[:, t, :, :, None]).sum(-2))
    return torch.stack(outputs, 1), state if output_final_state else None


fused_recurrent_gated_delta_rule = chunk_gated_delta_rule
