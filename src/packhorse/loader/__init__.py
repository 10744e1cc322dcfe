"""The loader: from data to batches on every rank, exactly once, resumable at any step."""

from packhorse.loader.config import LoaderConfig, load
from packhorse.loader.epoch_stats import EpochStats, TooManyBad
from packhorse.loader.loader import Loader
from packhorse.loader.metrics import Metrics

__all__ = ["EpochStats", "Loader", "LoaderConfig", "Metrics", "TooManyBad", "load"]
