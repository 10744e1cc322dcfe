"""Vision-language models of transformers as stages of ``torch.distributed.pipelining``.

:func:`split_vlm` splits a Qwen-VL model into stage modules. :class:`VlmPipeline` runs batches of
:func:`packhorse.pp_media.wrap_vlm_collate_for_pp` through them: stage 0 takes the media of each microbatch,
and every stage its rows of positions and masks. Loss and gradients equal those of the whole model on the
whole batch.

``torch.distributed.pipelining`` splits each tensor along one axis with ``torch.tensor_split``, rejects a
batch with fewer rows than microbatches, and receives every microbatch into a buffer of the first one's shape.
So unsupervised rows are appended to shorter microbatches, which keeps the rows of each microbatch and their
media together. This copies the tokens if the rows are uneven.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn.utils.rnn import pad_sequence

from packhorse.chat import IGNORE_INDEX
from packhorse.errors import ConfigError
from packhorse.families.qwen_vl import RopeIndex, rope_index
from packhorse.families.varlen import VARLEN_ARGUMENTS
from packhorse.integrations.loss import (
    count_batch_supervised,
    evaluation_mode,
    loss_weights_of,
    token_loss,
)
from packhorse.pp_media import VLM_PP_MEDIA_KEY, stage_vlm_media_for_pp
from packhorse.pp_media.stage import innermost

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["SPLITTABLE", "PipelineInputs", "VlmPipeline", "VlmStage", "pipeline_inputs", "split_vlm"]

Loss = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]

_USED = frozenset({"input_ids", "labels", "attention_mask", "position_ids", "mm_token_type_ids"})
# The loss of a pipeline takes the labels, which equal shift_labels.
_UNUSED = frozenset({"shift_labels", "use_cache"})
# The boundaries all follow from cu_seq_lens_q.
_KNOWN = _USED | _UNUSED | frozenset(VARLEN_ARGUMENTS)


@dataclass(frozen=True, slots=True)
class PipelineInputs:
    """The inputs of a schedule; the number of rows is a multiple of the microbatches.

    Attributes:
        ids: [B, S].
        labels: [B, S].
        kwargs: of every stage: masks, positions, document starts.
        axes: the axis of the rows of each.
        tokens: number of supervised tokens.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    kwargs: dict[str, Any]
    axes: dict[str, int]
    tokens: int

    def to(self, device: torch.device) -> PipelineInputs:
        """Move the tensors to a device."""
        moved = {name: value.to(device) for name, value in self.kwargs.items()}
        return replace(self, ids=self.ids.to(device), labels=self.labels.to(device), kwargs=moved)


def pipeline_inputs(
    batch: Mapping[str, Any], n_microbatches: int, rope: RopeIndex | None, config: PretrainedConfig
) -> PipelineInputs:
    """Return the inputs of a schedule from a prepared batch of any collate function.

    Args:
        batch: its media, if any, under :data:`~packhorse.pp_media.VLM_PP_MEDIA_KEY`.
        n_microbatches: of the schedule.
        rope: the model's ``get_rope_index``, to compute the positions of batches with media and without
            ``position_ids``: stages after the first have neither ids nor grids.
        config: of the model, for the ids of media tokens.

    Raises:
        ConfigError: the batch cannot be split, has loss weights or keys that stages do not take, or
            ``n_microbatches`` is below 1.
    """
    if isinstance(n_microbatches, bool) or n_microbatches < 1:
        raise ConfigError.of("n_microbatches", n_microbatches, "expected at least 1")
    _check_keys(batch)
    if loss_weights_of(batch) is not None:
        raise ConfigError(
            "the batch has loss_weights, which a pipeline cannot apply: a schedule passes the loss function "
            "logits and labels only. Remove the weights of the rows and of their dataset",
            setting="loss_weights",
        )
    # Contiguous, because microbatches are identified by their memory.
    ids, labels = batch["input_ids"].contiguous(), batch["labels"]
    if ids.dim() != 2 or labels.shape != ids.shape:
        shape = tuple(labels.shape)
        raise ConfigError.of("labels", shape, f"expected the shape [B, S] of input_ids, {tuple(ids.shape)}")
    kwargs: dict[str, Any] = {}
    if "cu_seq_lens_q" in batch:
        kwargs["segment_starts"] = segment_starts(batch["cu_seq_lens_q"], *ids.shape)
    elif batch.get("attention_mask") is not None:
        kwargs["attention_mask"] = batch["attention_mask"]
    positions = batch.get("position_ids")
    if positions is None:
        positions = _positions(batch, rope)
    if positions is not None:
        kwargs["position_ids"] = positions
    axes = {name: _axis(name, value, len(ids)) for name, value in kwargs.items()}
    inputs = PipelineInputs(ids, labels, kwargs, axes, int(count_batch_supervised(batch)))
    rows = even_rows(len(ids), n_microbatches)
    return _add_rows(inputs, rows, config) if bool((rows < 0).any()) else inputs


def even_rows(batch_size: int, n_microbatches: int) -> torch.Tensor:
    """Return the row at each position so that all microbatches are equal; -1 for an added row.

    7 rows for 3 microbatches: 0 1 2, 3 4 -1, 5 6 -1.
    """
    split = torch.tensor_split(torch.arange(batch_size), n_microbatches)
    return pad_sequence(list(split), batch_first=True, padding_value=-1).flatten()


def segment_starts(cumulative: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """Return where documents begin, bool [B, S]: ``cu_seq_lens_q`` in a form that can be split by rows."""
    end = rows * length
    starts = torch.isin(torch.arange(end, device=cumulative.device), cumulative).view(rows, length)
    if (int(cumulative.min()), int(cumulative.max())) != (0, end) or not bool(starts[:, 0].all()):
        detail = f"each of {rows} rows of {length} tokens must begin a document, the last must end at {end}"
        raise ConfigError.of("cu_seq_lens_q", cumulative.tolist(), detail)
    return starts


def varlen_arguments(starts: torch.Tensor) -> dict[str, Any]:
    """Return ``cu_seq_lens_q`` etc. of one microbatch from its document starts."""
    positions = torch.nonzero(starts.flatten()).flatten().to(torch.int32)
    cumulative = torch.cat([positions, positions.new_tensor([starts.numel()])])
    longest = int(cumulative.diff().max())
    return {f"cu_seq_lens_{side}": cumulative for side in "qk"} | {
        f"max_length_{side}": longest for side in "qk"
    }


def _check_keys(batch: Mapping[str, Any]) -> None:
    if missing := [key for key in ("input_ids", "labels") if batch.get(key) is None]:
        raise ConfigError(f"the batch has no '{missing[0]}', only {', '.join(batch)}", setting=missing[0])
    if unknown := [key for key in batch if key not in _KNOWN and not key.startswith("_")]:
        raise ConfigError(
            f"the batch holds '{unknown[0]}', which stages do not take: prepare media with "
            "packhorse.pp_media.wrap_vlm_collate_for_pp, and remove keys that the model does not need",
            setting=unknown[0],
        )


def _axis(name: str, value: Any, rows: int) -> int:
    """Return the axis of the rows."""
    shape = tuple(getattr(value, "shape", ()))
    axis = 1 if name == "position_ids" and len(shape) == 3 else 0
    if len(shape) <= axis or shape[axis] != rows:
        detail = f"a {type(value).__name__} of this shape has no {rows} rows along axis {axis}"
        raise ConfigError.of(name, shape, f"{detail}, so it cannot be split into microbatches")
    return axis


def _positions(batch: Mapping[str, Any], rope: RopeIndex | None) -> torch.Tensor | None:
    """Return positions [3, B, S] as the model computes them; None if it counts from 0."""
    chunks = batch.get(VLM_PP_MEDIA_KEY) or {}
    if rope is None or not any("grid" in key for key in chunks):
        return None
    mask = batch.get("attention_mask")
    if "cu_seq_lens_q" in batch or (mask is not None and (not hasattr(mask, "dim") or mask.dim() != 2)):
        detail = "a packed batch needs them: pass get_rope_index to the packed dataset"
        raise ConfigError.of("position_ids", None, detail)
    if batch.get("mm_token_type_ids") is None:
        detail = "the positions of media are computed from them: keep all tensors of the processor"
        raise ConfigError.of("mm_token_type_ids", None, detail)
    media = {key: torch.cat(list(parts)) for key, parts in chunks.items() if "pixel_values" not in key}
    known = {key: batch[key] for key in ("input_ids", "mm_token_type_ids")}
    arguments = {**media, **known, "attention_mask": mask}
    takes = inspect.signature(rope).parameters
    positions = rope(**{name: value for name, value in arguments.items() if name in takes})
    return torch.as_tensor(positions[0] if isinstance(positions, tuple) else positions)


def _add_rows(inputs: PipelineInputs, rows: torch.Tensor, config: PretrainedConfig) -> PipelineInputs:
    """Return the inputs with added rows: masks and positions of row 0, no supervised token."""
    added, source = rows < 0, rows.clamp(min=0)
    media = {getattr(config, name, None) for name in ("image_token_id", "video_token_id")}
    text_token = next(token for token in range(len(media) + 1) if token not in media)
    ids, labels = (
        value.index_select(0, source.to(value.device)).masked_fill(added[:, None].to(value.device), fill)
        for value, fill in ((inputs.ids, text_token), (inputs.labels, IGNORE_INDEX))
    )
    kwargs = {}
    for name, value in inputs.kwargs.items():
        if not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"'{name}' is a {type(value).__name__}, to which no row can be added: use a batch size that "
                "is a multiple of the microbatches, or varlen or sdpa attention",
                setting=name,
            )
        kwargs[name] = value.index_select(inputs.axes[name], source.to(value.device))
    return replace(inputs, ids=ids, labels=labels, kwargs=kwargs)


# Stages.

SPLITTABLE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Model types that :func:`split_vlm` splits."""

_MEDIA = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
_PLACEHOLDERS = {"pixel_values": "image_token_id", "pixel_values_videos": "video_token_id"}


class VlmStage(torch.nn.Module):
    """Some decoder layers of a model; the first stage has the embedding and vision tower, the last the head.

    Parameters have the names of the whole model, so its checkpoint loads with
    ``load_state_dict(…, strict=False)``, and the state dicts of all stages together are one.

    Attributes:
        index: of the stage, of ``n_stages``.
        is_first: whether it takes ids and media, not hidden states.
        is_last: whether it returns logits, not hidden states.
        config: of the model.
        rope_index: the model's ``get_rope_index``, without its weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        index: int,
        n_stages: int,
        layers: range,
        *,
        head: torch.nn.Module | None = None,
        config: PretrainedConfig | None = None,
    ) -> None:
        super().__init__()
        self.index, self.n_stages = index, n_stages
        self.is_first, self.is_last = index == 0, index == n_stages - 1
        self.config = model.config if config is None else config
        self.rope_index = rope_index(model)
        # packhorse.pp_media.stage_vlm_media_for_pp sets them during a schedule call.
        self._vlm_media_chunks: Mapping[str, Sequence[torch.Tensor]] | None = None
        self._vlm_chunk_idx: int | None = None
        whole = model.model.language_model
        kept = torch.nn.ModuleList()
        # Keys are layer numbers of the whole model; ModuleList has no public way to set them.
        kept._modules = {str(number): whole.layers[number] for number in layers}
        parts: dict[str, Any] = {"layers": kept}
        if not self.is_first:
            parts["embed_tokens"] = None
        if not self.is_last:
            parts["norm"] = torch.nn.Identity()
        decoder = _with_children(whole, parts)
        decoder.config = copy.copy(whole.config)
        decoder.config.num_hidden_layers = len(layers)
        if getattr(whole.config, "layer_types", None) is not None:
            decoder.config.layer_types = [whole.config.layer_types[number] for number in layers]
        self.model = _with_children(
            model.model, {"language_model": decoder, **({} if self.is_first else {"visual": None})}
        )
        if self.is_last:
            self.lm_head = model.lm_head if head is None else head

    def forward(
        self,
        given: torch.Tensor,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        segment_starts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run one microbatch; return hidden states [b, S, H], or the logits [b, S, V] of the last stage.

        The first stage takes ``input_ids`` [b, S], the others hidden states. ``segment_starts`` (bool [b, S],
        where documents begin) is for varlen and flash attention.
        """
        more = {} if segment_starts is None else varlen_arguments(segment_starts)
        more |= {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": False}
        if self.is_first:
            output = self.model(input_ids=given, **more, **self._next_media(given))
        else:
            output = self.model.language_model(inputs_embeds=given, **more)
        hidden: torch.Tensor = output.last_hidden_state
        return self.lm_head(hidden) if self.is_last else hidden

    def _next_media(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the non-empty media of the next microbatch."""
        chunks = self._vlm_media_chunks or {}
        index = self._vlm_chunk_idx or 0
        if chunks:
            count = len(next(iter(chunks.values())))
            if index >= count:
                raise RuntimeError(f"microbatch {index + 1} of a batch whose media were split for {count}")
            self._vlm_chunk_idx = index + 1
        media = {key: chunks[key][index] for key in _MEDIA if key in chunks and len(chunks[key][index])}
        self._check_staged(ids, media, index)
        return {key: value.to(ids.device, non_blocking=True) for key, value in media.items()}

    def _check_staged(self, ids: torch.Tensor, media: Mapping[str, torch.Tensor], index: int) -> None:
        """Raise if there are media tokens without pixels, which the model would embed like text."""
        for key, name in _PLACEHOLDERS.items():
            token = getattr(self.config, name, None)
            if key not in media and token is not None and not ids.is_meta and bool((ids == token).any()):
                raise RuntimeError(
                    f"microbatch {index + 1} holds {name} {token} and stage 0 has no '{key}' for it: prepare "
                    "the batch (packhorse.pp_media.wrap_vlm_collate_for_pp) and run the schedule within "
                    "stage_vlm_media_for_pp, or with VlmPipeline"
                )


def _with_children(module: Any, replaced: Mapping[str, Any]) -> Any:
    """Return the module with other children (None: removed), sharing its weights."""
    # A shallow copy of a module shares these dicts; there is no public way to copy them.
    shell = copy.copy(module)
    for name in ("_parameters", "_buffers"):
        setattr(shell, name, dict(getattr(module, name)))
    children = {**module._modules, **replaced}
    shell._modules = {name: child for name, child in children.items() if child is not None}
    return shell


def split_vlm(
    model: PreTrainedModel, n_stages: int, layers: Sequence[int] | None = None, *, untie: bool = False
) -> list[VlmStage]:
    """Split a model into stages that share its weights.

    Args:
        model: a Qwen2-VL, Qwen2.5-VL or Qwen3-VL model for conditional generation.
        n_stages: number of stages; a rank takes its own (``stages[rank::size]`` for interleaved schedules).
        layers: decoder layers of each stage; None distributes them evenly.
        untie: if the head is tied to the embedding, give the last stage a copy, which is trained separately;
            ``config.tie_word_embeddings`` of the stages is then False. The model does not change.

    Returns:
        All stages. Delete the stages of other ranks and the model to free their weights.

    Raises:
        ConfigError: the model type is not supported, embeddings are tied, there are too few layers, or layers
            of Qwen3-VL that take features of the vision tower would not be on stage 0.
    """
    kind = model.config.model_type
    if kind not in SPLITTABLE:
        raise ConfigError.of(
            "model_type",
            kind,
            f"expected one of {', '.join(SPLITTABLE)}: write the stages of another model yourself and pass "
            "them their media with packhorse.pp_media.stage_vlm_media_for_pp",
        )
    decoder = model.model.language_model
    total = len(decoder.layers)
    tied = n_stages > 1 and model.lm_head.weight is decoder.embed_tokens.weight
    if tied and not untie:
        raise ConfigError.of(
            "untie",
            untie,
            "the model ties its head to its embedding, which would be on different stages: with "
            "split_vlm(…, untie=True) the head gets a copy of the weights and is trained separately",
        )
    # Features of the vision tower's inner layers are added after the first decoder layers.
    deep = len(getattr(model.config.vision_config, "deepstack_visual_indexes", None) or ())
    numbers = _layers_per_stage(total, n_stages, deep) if layers is None else list(layers)
    if len(numbers) != n_stages or sum(numbers) != total or min(numbers, default=0) < 1:
        detail = f"{total} layers in all: expected {n_stages} positive numbers with the sum {total}"
        raise ConfigError.of("layers", numbers, detail)
    if numbers[0] < deep:
        raise ConfigError.of(
            "layers",
            numbers,
            f"features of the vision tower go into the first {deep} decoder layers "
            f"('deepstack_visual_indexes'): give stage 0 at least {deep}",
        )
    edges = pairwise([0, *accumulate(numbers)])
    options = _untie(model) if tied else {}
    return [VlmStage(model, index, n_stages, range(*edge), **options) for index, edge in enumerate(edges)]


def _untie(model: PreTrainedModel) -> dict[str, Any]:
    """Return a head with a copy of the embedding's weights, and an untied configuration."""
    head = _with_children(model.lm_head, {})
    weight = model.lm_head.weight
    head.weight = torch.nn.Parameter(weight.detach().clone(), weight.requires_grad)
    config = copy.deepcopy(model.config)
    for each in (config, config.get_text_config()):
        each.tie_word_embeddings = False
    return {"head": head, "config": config}


def _layers_per_stage(total: int, n_stages: int, least: int) -> list[int]:
    """Return the layers of each stage, as even as possible with at least ``least`` on stage 0."""
    if n_stages < 1:
        raise ConfigError.of("n_stages", n_stages, "expected at least 1")
    even = [len(part) for part in torch.tensor_split(torch.arange(total), n_stages)]
    if n_stages == 1 or even[0] >= least:
        return even
    return [least, *(len(part) for part in torch.tensor_split(torch.arange(total - least), n_stages - 1))]


# Running batches.


class PipelineInfo(NamedTuple):
    """What :func:`packhorse.pp_media.stage_vlm_media_for_pp` needs."""

    has_first_stage: bool
    has_last_stage: bool


class VlmPipeline:
    """Runs batches through the stages of this and the other ranks.

    Every rank builds the same batches (the same data-parallel rank and seed) and calls the same methods. Any
    batch size works: rows without a supervised token make all microbatches equal. Shapes may change from step
    to step; the receive buffers are then rebuilt.

    Args:
        parts: this rank's stages in order, wrapped (DDP, ``checkpoint_wrapper``) or not.
        n_microbatches: as in the collate function's wrapper.
        schedule: a schedule class of ``torch.distributed.pipelining``.
        device: of this rank's stages; token tensors and media are moved there.
        group: the pipeline's ranks; None for all ranks.
        loss_fn: takes logits [b, S, V], labels [b, S] and the supervised tokens of the whole step; its values
            are summed over microbatches. If data-parallel copies of the pipeline average their gradients:
            ``partial(token_loss, replicas=copies)``.
        hidden_dtype: of the hidden states between stages; None for that of the weights.
    """

    def __init__(
        self,
        parts: Sequence[torch.nn.Module],
        n_microbatches: int,
        schedule: type = Schedule1F1B,
        *,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
        loss_fn: Loss = token_loss,
        hidden_dtype: torch.dtype | None = None,
    ) -> None:
        if not parts:
            raise ConfigError("parts is empty: expected at least one stage", setting="parts")
        if isinstance(n_microbatches, bool) or n_microbatches < 1:
            raise ConfigError.of("n_microbatches", n_microbatches, "expected at least 1")
        if "kwargs_chunk_spec" not in inspect.signature(schedule).parameters:
            raise ConfigError.of(
                "schedule",
                schedule.__name__,
                "it takes no kwargs_chunk_spec, the axis along which positions are split: use "
                "ScheduleInterleaved1F1B, Schedule1F1B or ScheduleGPipe",
            )
        self.single = issubclass(schedule, PipelineScheduleSingle)
        if self.single and len(parts) > 1:
            raise ConfigError.of(
                "schedule",
                schedule.__name__,
                f"it runs one stage per rank, not {len(parts)}: use an interleaved schedule, or split the "
                "model into as many stages as there are ranks",
            )
        self.parts, self.n_microbatches, self.schedule = list(parts), n_microbatches, schedule
        self.device, self.group, self.hidden_dtype = torch.device(device), group, hidden_dtype
        self.inner: list[VlmStage] = [innermost(part) for part in parts]
        self.info = PipelineInfo(self.inner[0].is_first, any(part.is_last for part in self.inner))
        self._loss_fn, self._tokens = loss_fn, 1
        self._schedules: dict[bool, tuple[Any, Any]] = {}

    def step(self, batch: dict[str, Any], tokens: int | None = None) -> torch.Tensor | None:
        """Run forward and backward of one batch; gradients accumulate.

        Args:
            batch: of a wrapped collate function; labels are already shifted.
            tokens: supervised tokens of the step over all data-parallel ranks and accumulated batches
                (:func:`packhorse.integrations.loss.count_supervised`); None for those of the batch.

        Returns:
            The loss on the rank of the last stage, None elsewhere.

        Raises:
            ConfigError: the batch was prepared for another number of microbatches, or has keys that stages do
                not take.
        """
        return self._run(batch, tokens, train=True)

    def eval(self, batch: dict[str, Any], tokens: int | None = None) -> torch.Tensor | None:
        """Return the loss of one batch in evaluation mode without gradients, see :meth:`step`."""
        with evaluation_mode(*self.parts):
            return self._run(batch, tokens, train=False)

    def _run(self, batch: dict[str, Any], tokens: int | None, *, train: bool) -> torch.Tensor | None:
        chunks = batch.get(VLM_PP_MEDIA_KEY) or {}
        counts = {len(parts) for parts in chunks.values()}
        if counts - {self.n_microbatches}:
            raise ConfigError(
                f"the media of the batch were split for {sorted(counts)} microbatches, the schedule has "
                f"n_microbatches={self.n_microbatches}: pass the same number to wrap_vlm_collate_for_pp",
                setting="n_microbatches",
                value=self.n_microbatches,
            )
        first = self.inner[0]
        inputs = pipeline_inputs(batch, self.n_microbatches, first.rope_index, first.config)
        self._tokens = inputs.tokens if tokens is None else tokens
        losses: list[torch.Tensor] = []
        sent = inputs.to(self.device)
        arguments = (sent.ids,) if self.info.has_first_stage else ()
        options: dict[str, Any] = (
            {"target": sent.labels, "losses": losses} if self.info.has_last_stage else {}
        )
        schedule = self._schedule(inputs, train)
        run = schedule.step if train else schedule.eval
        if "return_outputs" in inspect.signature(schedule.step).parameters:
            options["return_outputs"] = False  # the logits of a whole batch are not needed
        try:
            with stage_vlm_media_for_pp(self, [*self.parts], batch):
                run(*arguments, **options, **sent.kwargs)
        except BaseException:
            self._schedules.clear()  # frees the activations
            raise
        return torch.stack(losses).sum().detach() if self.info.has_last_stage else None

    def _schedule(self, inputs: PipelineInputs, train: bool) -> Any:
        """Return the schedule for these shapes, the last one if possible."""
        rows, length = len(inputs.ids) // self.n_microbatches, inputs.ids.shape[1]
        key = (rows, length, tuple(sorted(inputs.axes.items())))
        if self._schedules.get(train, (None,))[0] == key:
            return self._schedules[train][1]
        pairs = zip(self.parts, self.inner, strict=True)
        stages = [self._stage(part, inner, rows, length) for part, inner in pairs]
        schedule = self.schedule(
            stages[0] if self.single else stages,
            n_microbatches=self.n_microbatches,
            loss_fn=self._step_loss,
            kwargs_chunk_spec=TensorChunkSpec.from_dict(inputs.axes),
            scale_grads=False,  # the loss is divided by the tokens of the whole batch
        )
        self._schedules[train] = (key, schedule)
        return schedule

    def _stage(self, part: torch.nn.Module, inner: VlmStage, rows: int, length: int) -> PipelineStage:
        text = inner.config.get_text_config()
        dtype = self.hidden_dtype or next(inner.model.language_model.parameters()).dtype
        ids = torch.empty(rows, length, dtype=torch.int64, device="meta")
        hidden = torch.empty(rows, length, text.hidden_size, dtype=dtype, device="meta", requires_grad=True)
        logits = torch.empty(rows, length, text.vocab_size, dtype=dtype, device="meta", requires_grad=True)
        return PipelineStage(
            part,
            inner.index,
            inner.n_stages,
            self.device,
            input_args=ids if inner.is_first else hidden,
            output_args=logits if inner.is_last else hidden,
            group=self.group,
        )

    def _step_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return a part of the loss with the tokens of the whole step: the sum of all parts is their mean."""
        return self._loss_fn(logits, labels, self._tokens)
