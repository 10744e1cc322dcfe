"""The settings of a loader: one typed value, from Python or from a YAML file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from packhorse.errors import ConfigError, require
from packhorse.types import World

if TYPE_CHECKING:
    from packhorse.count.columns import CountColumns
    from packhorse.loader.loader import Loader


Mode = Literal["pack", "pad"]
OnBad = Literal["skip", "raise"]
OnOverlong = Literal["drop", "truncate", "raise"]
Placeholder = Literal["auto", "never"]
Verify = Literal["changed", "full"]

# Settings under the names that other libraries have for them.
_CALLED_ELSEWHERE = {
    "workers": "num_workers",
    "per_device_train_batch_size": "batch_size",
    "max_length": "pack_size",
    "max_seq_length": "pack_size",
    "packed_sequence_size": "pack_size",
    "pp_n_microbatches": "pipeline_microbatches",
}
_CHOICES: dict[str, Any] = {
    "mode": Mode,
    "on_bad": OnBad,
    "on_overlong": OnOverlong,
    "placeholder": Placeholder,
    "verify": Verify,
}
_NUMBERS_OR_NONE = (
    *("max_bad_share", "max_consecutive_bad", "max_patches", "max_media", "max_documents"),
    *("effort", "timeout", "sample_timeout", "count_workers"),
)
_PATHS = ("data", "ledger_dir", "cache_dir")
_AT_LEAST_ONE = ("pack_size", "batch_size", "gradient_accumulation_steps", "alignment", "prefetch_factor")


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """Everything a loader is told, but for the processor, the model and the world, which are not settings.

    Attributes:
        data: a meta file, a dict with its content, or examples: a list, a Hugging Face dataset, anything with
            ``len`` and ``[index]`` that gives ``{"conversation": [...]}``.
        dataset_names: only these datasets of a meta file.
        mode: ``"pack"`` fills packs; ``"pad"`` makes batches of samples of similar length.
        pack_size: the most tokens of a pack (``"pad"``: of a sample), after the shift.
        batch_size: packs (or samples) of a rank in a micro-step.
        accumulation: the epoch has a multiple of so many micro-steps.
        pad_to_size: pad every batch to ``pack_size``, for models that are compiled; else to its longest row.
        seed: of everything that is drawn.
        attention: the backend that batches are made for; None asks the model, else ``"sdpa"``.
        pixel_dtype: what pixels are converted to, as ``"bfloat16"``; None asks the model, else leaves them.
        alignment: each document takes up a multiple of so many tokens (2 x the size of context parallelism).
        on_overlong: samples longer than a pack are dropped and recorded, truncated, or an error.
        on_bad: samples that fail are dropped and recorded, or an error.
        max_bad_share: the run stops when more of an epoch's samples are bad; None never.
        max_consecutive_bad: the run stops when more than so many fail one after the other on a rank; None
            never.
        max_patches: vision patches of a pack, as a guard of memory; ``max_media`` and ``max_documents`` too.
        max_media: see there.
        max_documents: see there.
        placeholder: ``"auto"`` gives a rank a blank media item where another rank has one in the same step
            (FSDP and ZeRO hang otherwise); ``"never"`` does not.
        shard_data: each rank opens, counts and plans its own rows only. Resuming then needs the same world.
        spread_datasets: each dataset of a mixture is spread evenly over the epoch.
        effort: seconds to look for better packs, see :func:`~packhorse.neat_packing_vlm.plan_packs`.
        num_workers: processes that build batches; 0 builds them in this one.
        prefetch: batches that each worker builds ahead.
        pin_memory: copy batches to pinned memory.
        timeout: seconds after which a batch that does not come stops the run; None waits.
        sample_timeout: seconds after which a sample counts as failed, and is recorded; None waits.
        multiprocessing_context: how workers start: ``"fork"``, ``"spawn"`` or ``"forkserver"``; None for
            Python's default.
        ledger_dir: each rank appends its ledger to a file in this folder as it happens.
        cache_dir: where plans are kept; None for the machine's cache.
        count_workers: processes to count with where counts are missing; None for one per core.
        pipeline_microbatches: cut media into chunks for so many microbatches of a pipeline.
        verify: ``"changed"`` hashes row files whose size, time of change or ETag is not that of the counted
            file; ``"full"`` hashes every row file at every start.
    """

    data: Any
    dataset_names: Sequence[str] | None = None
    mode: Mode = "pack"
    pack_size: int = 8192
    batch_size: int = 1
    gradient_accumulation_steps: int = 1
    pad_to_size: bool = False
    seed: int = 0
    attn_implementation: str | None = None
    pixel_dtype: str | None = None
    alignment: int = 1
    on_overlong: OnOverlong = "drop"
    on_bad: OnBad = "skip"
    max_bad_share: float | None = 0.01
    max_consecutive_bad: int | None = 100
    max_patches: int | None = None
    max_media: int | None = None
    max_documents: int | None = None
    placeholder: Placeholder = "auto"
    shard_data: bool = False
    spread_datasets: bool = True
    effort: float | None = None
    num_workers: int = 0
    prefetch_factor: int = 2
    pin_memory: bool = False
    timeout: float | None = None
    sample_timeout: float | None = None
    multiprocessing_context: str | None = None
    ledger_dir: str | os.PathLike[str] | None = None
    cache_dir: str | os.PathLike[str] | None = None
    count_workers: int | None = None
    pipeline_microbatches: int | None = None
    verify: Verify = "changed"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in get_args(choices):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r}: expected one of {', '.join(get_args(choices))}"
                )
        for_pipeline = () if self.pipeline_microbatches is None else ("pipeline_microbatches",)
        for name in (*_AT_LEAST_ONE, *for_pipeline):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r}: expected a whole number of at least 1")
        for name, least in (("num_workers", " of 0 or more"), ("seed", "")):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or (least and value < 0):
                raise ConfigError(f"{name}={value!r}: expected a whole number{least}")
        for name in _NUMBERS_OR_NONE:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int | float) or value < 0):
                raise ConfigError(f"{name}={value!r}: expected a number of 0 or more, or None")
        if self.max_bad_share is not None and self.max_bad_share > 1:
            raise ConfigError(f"max_bad_share={self.max_bad_share}: expected a share from 0 to 1, or None")
        limits = [name for name in ("max_patches", "max_media", "max_documents") if getattr(self, name)]
        for name in [*(["alignment"] if self.alignment > 1 else []), *limits] if self.mode == "pad" else ():
            raise ConfigError(f"{name} is for packs: use mode='pack'")

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> LoaderConfig:
        """From plain values.

        Raises:
            ConfigError: a name is not known, or ``data`` is missing.
        """
        known = {one.name for one in fields(cls)}
        if unknown := sorted(set(settings) - known):
            meant = [(name, _CALLED_ELSEWHERE[name]) for name in unknown if name in _CALLED_ELSEWHERE]
            hint = "".join(f"; {theirs} is called {ours} here" for theirs, ours in meant)
            raise ConfigError(
                f"unknown setting(s) {', '.join(unknown)}{hint}: there are {', '.join(sorted(known))}"
            )
        if "data" not in settings:
            raise ConfigError("no 'data': name the meta file")
        return cls(**settings)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> LoaderConfig:
        """From a YAML file with the names above; paths are relative to the file's folder.

        Raises:
            ConfigError: it is no such file.
        """
        yaml = require("yaml", "train")
        with open(path, encoding="utf-8") as file:
            try:
                settings = yaml.safe_load(file)
            except yaml.YAMLError as error:
                raise ConfigError(f"{os.fspath(path)} is not YAML: {error}") from error
        if not isinstance(settings, dict):
            raise ConfigError(
                f"{os.fspath(path)}: expected settings by name, found {type(settings).__name__}"
            )
        here = os.path.dirname(os.path.abspath(path))
        for name in _PATHS:
            value = settings.get(name)
            if isinstance(value, str) and "://" not in value:
                settings[name] = os.path.join(here, value)
        return cls.from_dict(settings)

    def of_all_ranks(self) -> str:
        """What has to be the same on all ranks, beside what the plan depends on."""
        names = ("mode", "batch_size", "gradient_accumulation_steps", "placeholder", "shard_data")
        values = [f"{name}={getattr(self, name)}" for name in names]
        # Each rank may have a folder of its own. With and without one they read different step files.
        return ", ".join([*values, f"ledger_dir={'None' if self.ledger_dir is None else 'given'}"])

    def with_changes(self, **changes: Any) -> LoaderConfig:
        """The same settings but for these."""
        return dataclasses.replace(self, **changes)

    def build(
        self,
        processor: Any,
        *,
        model: Any = None,
        world: World | None = None,
        group: Any = None,
        counts: CountColumns | None = None,
    ) -> Loader:
        """Open, count and plan; see :class:`~packhorse.loader.Loader`.

        Args:
            processor: encodes the samples; a processor, or the path or hub name of one.
            model: the model that is trained (wrappers are looked through), its config, or the folder or hub
                name of one. Gives positions (mRoPE), attention backend, pixel type and what tokens and
                patches cost; it is not kept. Needed for ``mode="pack"``, which raises if packed rows are
                wrong for the model; ``"unchecked"`` packs without a model.
            world: this process's place among those that share the data; found out if None.
            group: their process group, where it is not the default one.
            counts: of the examples, where the caller has them; they have to be those of this processor.

        Raises:
            ConfigError: processor, model or data is not what is expected, or packed rows are wrong for the
                model.
        """
        from packhorse.loader.loader import Loader

        return Loader(self, processor, model=model, world=world, group=group, counts=counts)


def load(
    data: Any,
    processor: Any,
    *,
    model: Any = None,
    world: World | None = None,
    group: Any = None,
    counts: CountColumns | None = None,
    **settings: Any,
) -> Loader:
    """From data to batches, in one call: ``LoaderConfig(data=…, **settings).build(processor, …)``.

    For example ``packhorse.load("meta.json", processor, model=model, pack_size=8192, num_workers=8)``.

    Args:
        data: a meta file, a dict with its content, or examples.
        processor: a processor, or the path or hub name of one.
        model: the model that is trained, its config, folder or hub name; needed for packs. See
            :meth:`LoaderConfig.build`, as for the next three.
        world: this process's place among those that share the data.
        group: their process group.
        counts: of the examples, where the caller has them.
        **settings: the other attributes of :class:`LoaderConfig`, which says what each does.
    """
    config = LoaderConfig.from_dict({"data": data, **settings})
    return config.build(processor, model=model, world=world, group=group, counts=counts)
