"""Packhorse carries every sample of a vision-language fine-tuning set to the model.

Importing this package imports none of torch, transformers, pyarrow or datasets: names load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packhorse.count.counting import count_meta
    from packhorse.count.sidecar import counts_of
    from packhorse.encode.robust import RobustDatasetWrapper
    from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
    from packhorse.errors import BadSample, ConfigError, PackhorseError
    from packhorse.formats.meta import make_meta_dataset, open_meta_dataset
    from packhorse.ledger import Ledger, default_ledger
    from packhorse.loader import Loader, LoaderConfig, load
    from packhorse.types import Batch, BatchInfo, Drop, World


__version__ = "0.1.0"

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
    "Loader": "loader.loader",
    "LoaderConfig": "loader.config",
    "PackhorseError": "errors",
    "PreTokenizedDatasetWrapper": "encode.tokenized",
    "RobustDatasetWrapper": "encode.robust",
    "World": "types",
    "count_meta": "count.counting",
    "counts_of": "count.sidecar",
    "default_ledger": "ledger",
    "load": "loader.config",
    "make_meta_dataset": "formats.meta",
    "open_meta_dataset": "formats.meta",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'packhorse' has no attribute {name!r}")
    return getattr(import_module(f"packhorse.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
