"""Turn image, video, audio and text conversations into training batches for vision-language models.

Importing this package imports none of torch, transformers, pyarrow or datasets: names load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packhorse.collate.packed import model_inputs
    from packhorse.count.counting import count_meta
    from packhorse.count.sidecar import counts_of
    from packhorse.encode.robust import RobustDatasetWrapper
    from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
    from packhorse.errors import BadSample, ConfigError, PackhorseError, SystemFault
    from packhorse.formats.meta import make_meta_dataset, open_meta_dataset
    from packhorse.integrations.loss import (
        Evaluation,
        batch_loss,
        count_supervised,
        evaluate,
        grouped,
        token_loss,
    )
    from packhorse.integrations.transformers import TrainFromLoader, prepare
    from packhorse.ledger import Ledger, default_ledger
    from packhorse.loader import EpochStats, Loader, LoaderConfig, TooManyBad, load
    from packhorse.types import Batch, BatchInfo, Drop, World, to_device


__version__ = "0.2.0.dev0"

__all__ = [
    "BadSample",
    "Batch",
    "BatchInfo",
    "ConfigError",
    "Drop",
    "EpochStats",
    "Evaluation",
    "Ledger",
    "Loader",
    "LoaderConfig",
    "PackhorseError",
    "PreTokenizedDatasetWrapper",
    "RobustDatasetWrapper",
    "SystemFault",
    "TooManyBad",
    "TrainFromLoader",
    "World",
    "__version__",
    "batch_loss",
    "count_meta",
    "count_supervised",
    "counts_of",
    "default_ledger",
    "evaluate",
    "grouped",
    "load",
    "make_meta_dataset",
    "model_inputs",
    "open_meta_dataset",
    "prepare",
    "to_device",
    "token_loss",
]

_MODULES = {
    "collate.packed": ("model_inputs",),
    "count.counting": ("count_meta",),
    "count.sidecar": ("counts_of",),
    "encode.robust": ("RobustDatasetWrapper",),
    "encode.tokenized": ("PreTokenizedDatasetWrapper",),
    "errors": ("BadSample", "ConfigError", "PackhorseError", "SystemFault"),
    "formats.meta": ("make_meta_dataset", "open_meta_dataset"),
    "integrations.loss": (
        "Evaluation",
        "batch_loss",
        "count_supervised",
        "evaluate",
        "grouped",
        "token_loss",
    ),
    "integrations.transformers": ("TrainFromLoader", "prepare"),
    "ledger": ("Ledger", "default_ledger"),
    "loader": ("EpochStats", "Loader", "LoaderConfig", "TooManyBad", "load"),
    "types": ("Batch", "BatchInfo", "Drop", "World", "to_device"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'packhorse' has no attribute {name!r}")
    return getattr(import_module(f"packhorse.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
