"""Loader settings: one typed, validated value, from Python or from a YAML file."""

from __future__ import annotations

import dataclasses
import os
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import torch

from packhorse.collate.batch_formats import batch_format_of
from packhorse.errors import ConfigError, require, suggest
from packhorse.plan.cost_model import CostWeights
from packhorse.types import Rows, Task, World
from packhorse.utils.pool import StartMethod

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from packhorse.chat import Processor
    from packhorse.count.columns import CountColumns
    from packhorse.loader.loader import Loader


Data = str | os.PathLike[str] | Mapping[str, Any] | Rows
Mode = Literal["pack", "pad"]
_AttnName = Literal[  # for completion; other names are in collate.batch_formats
    "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention", "varlen"
]
AttnImplementation = _AttnName | str
OnBad = Literal["skip", "raise"]
OnOverlong = Literal["drop", "truncate", "raise"]
Placeholder = Literal["auto", "never"]
Verify = Literal["changed", "full"]
Pixels = Literal["auto", "compact", "processor"]

# Names of other libraries (transformers, TRL, LLaMA-Factory, NeMo, Lightning) for our settings.
_OTHER_NAMES = {
    "data": ("dataset", "train_dataset"),
    "mode": ("packing",),
    "pack_size": ("max_length", "max_seq_length", "sequence_length", "cutoff_len", "packed_sequence_size"),
    "batch_size": ("per_device_train_batch_size",),
    "gradient_accumulation_steps": ("accumulate_grad_batches", "accumulation"),
    "attn_implementation": ("attention", "flash_attn"),
    "pixel_dtype": ("dtype", "torch_dtype"),
    "num_workers": ("workers",),
    "prefetch_factor": ("prefetch",),
    "multiprocessing_context": ("mp_context", "start", "start_method"),
    "max_consecutive_bad": ("max_bad_in_a_row",),
    "pipeline_microbatches": ("pp_n_microbatches",),
}
_PATHS = ("data", "ledger_dir", "cache_dir", "cost_weights")
_AT_LEAST_ONE = (
    *("pack_size", "batch_size", "gradient_accumulation_steps"),
    *("alignment", "prefetch_factor", "pipeline_microbatches"),
)
_ABOVE_ZERO = ("timeout", "sample_timeout")
_ONLY_FOR_PACKS = ("alignment", "max_patches", "max_media", "max_documents")


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """Loader configuration. Runtime objects (processor, model, world) are passed to :meth:`build`.

    Values are checked when the object is made.

    Attributes:
        data: a data file, a meta file (or LLaMA-Factory's ``dataset_info.json``), a dict with its content, or
            rows: a list, a Hugging Face dataset, anything with ``len`` and ``[index]`` that returns rows in a
            usual format (``docs/reference/data.md#row-formats``).
        dataset_names: use only these datasets of a meta file.
        columns: names of the fields of the rows, if ``data`` is a data file or in memory: ``messages``,
            ``prompt``, ``response``, ``images``, ``tools``, … The usual names are found without it.
        tags: names of the fields and roles of turns, likewise: ``role_tag``, ``content_tag``, ``user_tag``, …
        dataset_options: any setting of a dataset in a meta file, likewise: ``format``, ``media_dir``,
            ``system``, ``reasoning``, ``chat_template_kwargs``, ``allow_http``, ``max_pixels``, ``fps``, …
        task: ``"sft"`` trains on answers; ``"preference"`` delivers pairs of a chosen and a rejected answer
            (both in one pack), or answers with a label, for :mod:`packhorse.integrations.preference`.
        mode: ``"pack"`` fills packs; ``"pad"`` batches samples of similar length.
        pack_size: maximum tokens of a pack (``"pad"``: of a sample), after the label shift.
        batch_size: packs (or samples) per rank and micro-step.
        gradient_accumulation_steps: micro-steps per optimizer step; an epoch is padded to a multiple of it.
        pad_to_size: pad every batch to ``pack_size``, for compiled models; otherwise to its longest row.
        seed: random seed of planning and order, and of the numbers that a dataset draws for a sample.
        attn_implementation: attention backend that packs are collated for, also a flash kernel of the Hub;
            None takes the model's, or ``"sdpa"`` without a model. A model that runs another one raises.
        pixel_dtype: dtype that pixels are converted to, such as ``"bfloat16"``; None takes the model's, or
            leaves pixels as they are.
        pixels: ``"compact"``: pixels are bytes until the batch is moved to a device, and become what the
            processor returns there; if that is right for the processor, which is tried out at the start.
            ``"auto"`` does so for ``TrainFromLoader``, Accelerate and Lightning; in a loop of your own,
            batches have plain tensors. ``"processor"``: plain tensors everywhere.
        alignment: pad each document to a multiple of this many tokens (2 x context-parallel size).
        on_overlong: drop and record samples that are longer than a pack, truncate them, or raise.
        on_bad: drop and record samples that fail, or raise.
        max_bad_share: stop the run if a larger share of an epoch's samples is bad, and more than three are;
            0 stops a rank at its first, None never.
        max_consecutive_bad: stop the run if more consecutive samples fail on a rank; None never stops.
        max_patches: maximum vision patches of a pack, to limit memory.
        max_media: maximum media items of a pack.
        max_documents: maximum samples of a pack.
        placeholder: ``"auto"`` adds a placeholder media item to a rank's batch if another rank has media of
            that kind in the same step (FSDP and ZeRO hang otherwise); ``"never"`` adds none.
        shard_data: each rank opens, counts and plans its own rows only. Resuming needs the same world.
        spread_datasets: spread each dataset of a mixture evenly over the epoch.
        effort: seconds to search for better packs, see :func:`~packhorse.neat_packing_vlm.plan_packs`.
        cost_weights: what tokens, patches and images cost, for steps that take all ranks equally long:
            :class:`~packhorse.neat_packing_vlm.CostWeights`, or the file that ``packhorse calibrate`` wrote;
            None counts the model's operations.
        measure_cost: measure the time of each step, fit the weights to these times at the end of an epoch,
            and use them from the next one on. They are in the resume state.
        num_workers: processes that build batches; 0 builds them in this process. None takes one per core
            that this process may use, shared between the ranks of a machine, at most 8; but 0 with a single
            core or fewer than 1,000 rows per rank, and where no process can be started.
        prefetch_factor: batches that each worker builds ahead.
        pin_memory: copy batches to pinned memory.
        timeout: seconds to wait for a batch before the run stops; None waits forever.
        sample_timeout: seconds after which a sample counts as failed; None waits forever.
        multiprocessing_context: start method of workers; None takes Python's default.
        ledger_dir: folder in which each rank appends its ledger to a file.
        cache_dir: folder of saved plans; None takes the user's cache.
        count_workers: processes that count rows without counts; None takes one per core.
        pipeline_microbatches: split media into chunks for this many micro-batches of a pipeline.
        verify: ``"changed"`` hashes row files whose size, modification time or ETag differs from the counted
            file's; ``"full"`` hashes every row file at every start.
    """

    data: Data
    dataset_names: Sequence[str] | None = None
    columns: Mapping[str, str] | None = None
    tags: Mapping[str, str] | None = None
    dataset_options: Mapping[str, Any] | None = None
    task: Task = "sft"
    mode: Mode = "pack"
    pack_size: int = 8192
    batch_size: int = 1
    gradient_accumulation_steps: int = 1
    pad_to_size: bool = False
    seed: int = 0
    attn_implementation: AttnImplementation | None = None
    pixel_dtype: str | torch.dtype | None = None
    pixels: Pixels = "auto"
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
    cost_weights: CostWeights | Mapping[str, Any] | str | os.PathLike[str] | None = None
    measure_cost: bool = False
    num_workers: int | None = None
    prefetch_factor: int = 2
    pin_memory: bool = False
    timeout: float | None = None
    sample_timeout: float | None = None
    multiprocessing_context: StartMethod | None = None
    ledger_dir: str | os.PathLike[str] | None = None
    cache_dir: str | os.PathLike[str] | None = None
    count_workers: int | None = None
    pipeline_microbatches: int | None = None
    verify: Verify = "changed"

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(LoaderConfig).items():
            if name not in ("data", "dataset_names"):
                _check_value(name, getattr(self, name), hint)
        if self.attn_implementation is not None:
            batch_format_of(self.attn_implementation, ("None",))
        as_dtype(self.pixel_dtype)
        names = self.dataset_names
        if names is not None and (isinstance(names, str) or not all(isinstance(name, str) for name in names)):
            raise ConfigError.of("dataset_names", names, "expected a list of names, such as ['coco']")
        if self.max_bad_share is not None and self.max_bad_share > 1:
            raise ConfigError.of("max_bad_share", self.max_bad_share, "expected a share from 0 to 1, or None")
        if self.task == "preference" and self.on_overlong == "truncate":
            expected = "a cut answer is another answer than the preferred one: use 'drop'"
            raise ConfigError.of("on_overlong", self.on_overlong, expected)
        if self.task == "preference" and self.pipeline_microbatches is not None:
            expected = "preference data cannot be split over stages"
            raise ConfigError.of("pipeline_microbatches", self.pipeline_microbatches, expected)
        if self.measure_cost and self.shard_data:
            expected = "with shard_data=True no rank knows what the others have in a step: remove one of them"
            raise ConfigError.of("measure_cost", True, expected)
        if self.mode == "pad":
            for name in _ONLY_FOR_PACKS:
                if (value := getattr(self, name)) != getattr(type(self), name):
                    raise ConfigError.of(name, value, "applies to packs, use mode='pack'")

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> LoaderConfig:
        """Make a configuration from plain values.

        Raises:
            ConfigError: a name or a value is wrong, or ``data`` is missing.
        """
        _check_names(settings)
        if "data" not in settings:
            raise ConfigError("no 'data': name the meta file", setting="data")
        return cls(**settings)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> LoaderConfig:
        """Read a configuration from a YAML file; paths in it are relative to its folder.

        Raises:
            ConfigError: it is no YAML mapping, or see :meth:`from_dict`.
        """
        yaml = require("yaml", "train")
        with open(path, encoding="utf-8") as file:
            try:
                settings = yaml.safe_load(file)
            except yaml.YAMLError as error:
                raise ConfigError(f"{os.fspath(path)} is not YAML: {error}", path=path) from error
        if not isinstance(settings, dict):
            found = type(settings).__name__
            raise ConfigError(f"{os.fspath(path)}: expected settings by name, found {found}", path=path)
        folder = os.path.dirname(os.path.abspath(path))
        for name in _PATHS:
            value = settings.get(name)
            if isinstance(value, str) and "://" not in value:
                settings[name] = os.path.join(folder, value)
        return cls.from_dict(settings)

    @property
    def row_options(self) -> dict[str, Any]:
        """The settings of rows: ``dataset_options`` with ``columns`` and ``tags``."""
        named = {"columns": self.columns, "tags": self.tags}
        return {**(self.dataset_options or {}), **{name: value for name, value in named.items() if value}}

    def of_all_ranks(self) -> str:
        """Return the settings that all ranks must share, in addition to those that the plan depends on."""
        names = (
            *("task", "mode", "batch_size", "gradient_accumulation_steps", "placeholder", "shard_data"),
            "measure_cost",
        )
        values = [f"{name}={getattr(self, name)}" for name in names]
        # Ranks may have different folders; with and without one they read different step files.
        return ", ".join([*values, f"ledger_dir={'None' if self.ledger_dir is None else 'given'}"])

    def with_changes(self, **changes: Any) -> LoaderConfig:
        """Return a copy with some settings changed."""
        _check_names(changes)
        return dataclasses.replace(self, **changes)

    def build(
        self,
        processor: Processor | str | os.PathLike[str],
        *,
        model: Any = None,
        world: World | None = None,
        group: ProcessGroup | None = None,
        counts: CountColumns | None = None,
    ) -> Loader:
        """Open, count and plan the data; see :class:`~packhorse.loader.Loader`.

        Args:
            processor: encodes the samples; a processor, or the path or Hub name of one.
            model: the model to train (wrappers are looked through), its config, or the folder or Hub name of
                one. Gives positions (mRoPE), attention backend, pixel dtype and compute costs; it is not
                kept. Required for ``mode="pack"``, which raises if packed rows are wrong for the model;
                ``"unchecked"`` packs without a model.
            world: rank and size of the data-parallel ranks; detected if None.
            group: their process group, if it is not the default one.
            counts: token counts of the examples by this processor, if the caller has them.

        Raises:
            ConfigError: processor, model or data are not as expected, or packed rows are wrong for the model.
        """
        from packhorse.loader.loader import Loader

        return Loader(self, processor, model=model, world=world, group=group, counts=counts)


def load(  # noqa: D417 (the settings are documented once, in LoaderConfig)
    data: Data,
    processor: Processor | str | os.PathLike[str],
    *,
    model: Any = None,
    world: World | None = None,
    group: ProcessGroup | None = None,
    counts: CountColumns | None = None,
    dataset_names: Sequence[str] | None = None,
    columns: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
    dataset_options: Mapping[str, Any] | None = None,
    task: Task = "sft",
    mode: Mode = "pack",
    pack_size: int = 8192,
    batch_size: int = 1,
    gradient_accumulation_steps: int = 1,
    pad_to_size: bool = False,
    seed: int = 0,
    attn_implementation: AttnImplementation | None = None,
    pixel_dtype: str | torch.dtype | None = None,
    pixels: Pixels = "auto",
    alignment: int = 1,
    on_overlong: OnOverlong = "drop",
    on_bad: OnBad = "skip",
    max_bad_share: float | None = 0.01,
    max_consecutive_bad: int | None = 100,
    max_patches: int | None = None,
    max_media: int | None = None,
    max_documents: int | None = None,
    placeholder: Placeholder = "auto",
    shard_data: bool = False,
    spread_datasets: bool = True,
    effort: float | None = None,
    cost_weights: CostWeights | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    measure_cost: bool = False,
    num_workers: int | None = None,
    prefetch_factor: int = 2,
    pin_memory: bool = False,
    timeout: float | None = None,
    sample_timeout: float | None = None,
    multiprocessing_context: StartMethod | None = None,
    ledger_dir: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    count_workers: int | None = None,
    pipeline_microbatches: int | None = None,
    verify: Verify = "changed",
    **unknown: NoReturn,
) -> Loader:
    """Make a loader: ``LoaderConfig(data=…, …).build(processor, …)`` in one call.

    For example ``packhorse.load("meta.json", processor, model=model, pack_size=8192, num_workers=8)``.

    Args:
        data: a data file (``train.jsonl``), a meta file, a dict with its content, or rows in memory.
        processor: a processor, or the path or Hub name of one.
        model: the model to train, its config, folder or Hub name; required for packs. See
            :meth:`LoaderConfig.build`, also for ``world``, ``group`` and ``counts``.
        **unknown: raises :class:`ConfigError` with the name that was meant; type checkers reject it.

    All other arguments are settings of :class:`LoaderConfig`, which documents them.
    """
    arguments = locals()
    _check_names(unknown, ("processor", "model", "world", "group", "counts"))
    config = LoaderConfig(**{field.name: arguments[field.name] for field in fields(LoaderConfig)})
    return config.build(processor, model=model, world=world, group=group, counts=counts)


def as_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """Return a torch dtype by its name; raise :class:`ConfigError` if torch has none."""
    if name is None or isinstance(name, torch.dtype):
        return name
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError.of("pixel_dtype", name, "expected the name of a torch dtype, such as 'bfloat16'")
    return dtype


def _check_names(names: Iterable[str], others: Sequence[str] = ()) -> None:
    """Raise for names that are no settings, with the setting that was probably meant."""
    known = [*(field.name for field in fields(LoaderConfig)), *others]
    unknown = sorted(str(name) for name in names if name not in known)
    if unknown:
        from packhorse.formats.meta import FORMAT_KEYS

        other_names = {other: ours for ours, others in _OTHER_NAMES.items() for other in others}
        for name in unknown:
            if name in FORMAT_KEYS:
                problem = f"unknown setting {name!r}: it is one of a dataset. Write dataset_options="
                remedy = f"{{{name!r}: …}} for rows in memory or one file; a meta file has it in an entry"
                raise ConfigError(problem + remedy, setting=name)
        hints = [f"{name!r}{suggest(name, known, other_names)}" for name in unknown]
        message = f"unknown setting {', '.join(hints)}. Settings are: {', '.join(sorted(known))}"
        raise ConfigError(message, setting=unknown[0])


def _check_value(name: str, value: Any, hint: object) -> None:
    """Raise if a value is not of the field's type or below its minimum."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    or_none = ", or None" if type(None) in options else ""
    if value is None and or_none:
        return
    choices = [choice for option in options if get_origin(option) is Literal for choice in get_args(option)]
    if choices and str not in options:
        if value not in choices:
            expected = ", ".join(map(repr, choices))
            raise ConfigError.of(name, value, f"expected one of {expected}{or_none}{suggest(value, choices)}")
        return
    kinds = tuple(get_origin(option) or option for option in options if get_origin(option) is not Literal)
    if int not in kinds and float not in kinds:
        if not isinstance(value, kinds):
            names = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
            raise ConfigError.of(name, value, f"expected {names}{or_none}")
        return
    whole = float not in kinds
    minimum = float("-inf") if name == "seed" else 1 if name in _AT_LEAST_ONE else 0
    is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not is_number or not value >= minimum or (name in _ABOVE_ZERO and not value):
        limit = " above 0" if name in _ABOVE_ZERO else "" if name == "seed" else f" of at least {minimum}"
        raise ConfigError.of(name, value, f"expected a {'whole ' if whole else ''}number{limit}{or_none}")
