"""Packhorse carries every sample of a vision-language fine-tuning set to the model.

Importing this package imports none of torch, transformers, pyarrow or datasets: names load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from packhorse.datasets import (
        PreTokenizedDatasetWrapper,
        RobustDatasetWrapper,
        make_meta_dataset,
        open_meta_dataset,
    )
    from packhorse.datasets.counting import count_meta
    from packhorse.datasets.sidecar import counts_of
    from packhorse.errors import BadSample, ConfigError, PackhorseError
    from packhorse.ledger import Ledger, default_ledger
    from packhorse.loader import Loader, LoaderConfig, load
    from packhorse.types import Batch, BatchInfo, Drop, World

__all__ = [
    "BadSample",
    "Batch",
    "BatchInfo",
    "ConfigError",
    "Drop",
    "Ledger",
    "Loader",
    "LoaderConfig",
    "PackhorseError",
    "PreTokenizedDatasetWrapper",
    "RobustDatasetWrapper",
    "World",
    "__version__",
    "count_meta",
    "counts_of",
    "default_ledger",
    "load",
    "make_meta_dataset",
    "open_meta_dataset",
]

_HOME = {
    "BadSample": "errors",
    "Batch": "types",
    "BatchInfo": "types",
    "ConfigError": "errors",
    "Drop": "types",
    "Ledger": "ledger",
    "Loader": "loader",
    "LoaderConfig": "loader",
    "PackhorseError": "errors",
    "PreTokenizedDatasetWrapper": "datasets",
    "RobustDatasetWrapper": "datasets",
    "World": "types",
    "count_meta": "datasets.counting",
    "counts_of": "datasets.sidecar",
    "default_ledger": "ledger",
    "load": "loader",
    "make_meta_dataset": "datasets",
    "open_meta_dataset": "datasets",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'packhorse' has no attribute {name!r}")
    return getattr(import_module(f"packhorse.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
