"""The functions of mamba-ssm that layers call, token by token in PyTorch.

They have the arguments of the kernels, and keep documents apart by ``seq_idx`` as those do.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from causal_conv1d import causal_conv1d_fn

keeps_apart = True
"""A control sets it to False; then the scan ignores ``seq_idx``, and the convolution does not."""


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The state-space scan of x [B, T, H, P]; the state is zero again where ``seq_idx`` [B, T] changes."""
    assert cu_seqlens is None
    assert not return_varlen_states
    if not keeps_apart:
        seq_idx = None
    if dt_bias is not None:
        dt = dt + dt_bias
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    heads = x.shape[2] // B.shape[2]
    B, C = (part.repeat_interleave(heads, 2) for part in (B, C))
    state = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], B.shape[-1])
    if initial_states is not None:
        state = initial_states
    outputs = []
    for t in range(x.shape[1]):
        if seq_idx is not None and t:
            state = state * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None]
        state = state * (dt[:, t] * A).exp()[..., None, None]
        state = state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        outputs.append((state * C[:, t, :, None]).sum(-1))
    output = torch.stack(outputs, 1)
    if D is not None:
        output = output + x * D[:, None]
    output = output if z is None else output * F.silu(z)
    return (output, state) if return_final_states else output


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: str = "silu",
    rmsnorm_weight: torch.Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: torch.Tensor | None = None,
    outproj_bias: torch.Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> torch.Tensor:
    """Convolution, scan, gated norm and projection of a Mamba-2 layer; what the layer calls in training."""
    assert initial_states is None
    assert not return_final_states
    assert headdim is not None
    assert outproj_weight is not None
    heads = A.shape[0]
    inner = heads * headdim
    states = (zxbcdt.shape[-1] - 2 * inner - heads) // (2 * ngroups)
    z, xbc, dt = zxbcdt.split([inner, inner + 2 * ngroups * states, heads], -1)
    xbc = causal_conv1d_fn(
        xbc.contiguous().transpose(1, 2),
        conv1d_weight,
        conv1d_bias,
        seq_idx=seq_idx,
        activation=activation,
    ).transpose(1, 2)
    x, B, C = xbc.split([inner, ngroups * states, ngroups * states], -1)
    shape = x.shape[:2]
    scanned = mamba_chunk_scan_combined(
        x.reshape(*shape, heads, headdim),
        dt,
        A,
        B.reshape(*shape, ngroups, states),
        C.reshape(*shape, ngroups, states),
        chunk_size,
        D=D,
        dt_bias=dt_bias,
        seq_idx=seq_idx,
        dt_softplus=True,
        dt_limit=dt_limit,
    )
    assert isinstance(scanned, torch.Tensor)
    scanned = scanned.reshape(*shape, inner)
    if rmsnorm_weight is None:
        gated = scanned * F.silu(z)
    elif norm_before_gate:
        gated = _norm(scanned, rmsnorm_weight, rmsnorm_eps, ngroups) * F.silu(z)
    else:
        gated = _norm(scanned * F.silu(z), rmsnorm_weight, rmsnorm_eps, ngroups)
    return F.linear(gated, outproj_weight, outproj_bias)


def _norm(value: torch.Tensor, weight: torch.Tensor, eps: float, groups: int) -> torch.Tensor:
    parts = value.unflatten(-1, (groups, -1))
    normed: torch.Tensor = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)
    return normed.flatten(-2) * weight


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """One step of the scan for x [B, H, P], which changes ``state`` [B, H, P, N] in place."""
    assert state_batch_indices is None
    if dt_bias is not None:
        dt = dt + dt_bias
    dt = F.softplus(dt) if dt_softplus else dt
    heads = x.shape[1] // B.shape[1]
    B, C = (part.repeat_interleave(heads, 1) for part in (B, C))
    state.copy_(state * (dt[..., None] * A).exp() + (dt * x)[..., None] * B[:, :, None])
    output = (state * C[:, :, None]).sum(-1)
    output = output if D is None else output + x * D
    return output if z is None else output * F.silu(z)
