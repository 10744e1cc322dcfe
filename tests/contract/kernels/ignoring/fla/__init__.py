"""The functions of flash-linear-attention, which take the boundaries of documents here and ignore them."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import torch

_rule = runpy.run_path(str(Path(__file__).parents[2] / "recurrence" / "fla" / "__init__.py"))[
    "chunk_gated_delta_rule"
]


def chunk_gated_delta_rule(
    *arguments: Any,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> Any:
    """The gated delta rule over the whole row."""
    return _rule(*arguments, g=g, beta=beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)


fused_recurrent_gated_delta_rule = chunk_gated_delta_rule
