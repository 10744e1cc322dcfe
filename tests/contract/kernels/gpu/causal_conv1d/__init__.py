"""The functions of causal-conv1d, which run on a GPU alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("_"):
        raise AttributeError(name)

    def kernel(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError(f"{name}: expected x.is_cuda() to be true, but got false")

    return kernel
