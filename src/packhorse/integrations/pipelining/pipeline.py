"""Running batches through the stages of this and the other ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from packhorse.errors import ConfigError
from packhorse.integrations.loss import token_loss
from packhorse.integrations.pipelining.microbatches import PipelineInputs, pipeline_inputs
from packhorse.integrations.pipelining.stages import VlmStage
from packhorse.pp_media import VLM_PP_MEDIA_KEY, stage_vlm_media_for_pp
from packhorse.pp_media.stage import innermost

Loss = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


class PipelineInfo(NamedTuple):
    """What :func:`packhorse.pp_media.stage_vlm_media_for_pp` asks for."""

    has_first_stage: bool
    has_last_stage: bool


class VlmPipeline:
    """Runs batches through the stages of this and the other ranks.

    Every rank makes the same batches (the same data-parallel rank and seed) and calls the same methods. The
    schedules of torch want all microbatches of one shape: rows without a supervised token are added after the
    rows of shorter ones, so that any batch will do. Shapes may change from step to step; the receiving
    buffers are then made anew, without a probe.

    Args:
        parts: this rank's stages, in their order; wrapped (DDP, ``checkpoint_wrapper``) or not.
        n_microbatches: as in the collate function's wrapper.
        schedule: a schedule class of ``torch.distributed.pipelining``.
        device: where this rank's stages are; token tensors and media are moved there.
        group: of the pipeline's ranks; all ranks without it.
        loss_fn: takes logits [b, S, V], labels [b, S] and the supervised tokens of the whole step; what it
            returns for all microbatches is added up. Without it
            :func:`packhorse.integrations.loss.token_loss`. Where data-parallel copies of the pipeline
            average their gradients: ``partial(token_loss, replicas=copies)``.
        hidden_dtype: of what stages send each other; the weights' without it.
    """

    def __init__(
        self,
        parts: Sequence[torch.nn.Module],
        n_microbatches: int,
        schedule: type = Schedule1F1B,
        *,
        device: torch.device | str = "cpu",
        group: Any = None,
        loss_fn: Loss = token_loss,
        hidden_dtype: torch.dtype | None = None,
    ) -> None:
        if not parts or isinstance(n_microbatches, bool) or n_microbatches < 1:
            raise ConfigError(f"{len(parts)} stages, {n_microbatches=}: expected at least one of each")
        if "kwargs_chunk_spec" not in inspect.signature(schedule).parameters:
            raise ConfigError(
                f"{schedule.__name__} cannot be told along which axis positions are split (it takes no "
                "kwargs_chunk_spec): use ScheduleInterleaved1F1B, Schedule1F1B or ScheduleGPipe"
            )
        self.single = issubclass(schedule, PipelineScheduleSingle)
        if self.single and len(parts) > 1:
            raise ConfigError(
                f"{schedule.__name__} runs one stage a rank, and here are {len(parts)}: use an interleaved "
                "schedule, or split the model into as many stages as there are ranks"
            )
        self.parts, self.n_microbatches, self.schedule = list(parts), n_microbatches, schedule
        self.device, self.group, self.hidden_dtype = torch.device(device), group, hidden_dtype
        self.inner: list[VlmStage] = [innermost(part) for part in parts]
        self.info = PipelineInfo(self.inner[0].is_first, any(part.is_last for part in self.inner))
        self._loss = _StepLoss(loss_fn)
        self._built: dict[bool, tuple[Any, Any]] = {}

    def step(self, batch: dict[str, Any], tokens: int | None = None) -> torch.Tensor | None:
        """Forward and backward of one batch; gradients are added to those that are there.

        Args:
            batch: of a wrapped collate function; labels are already shifted.
            tokens: supervised tokens of the step, where other data-parallel ranks or accumulated batches
                have a part in it (:func:`packhorse.integrations.loss.count_supervised`); those of the batch
                without it. With data-parallel copies of the pipeline whose gradients are averaged (DDP,
                FSDP), build it with ``loss_fn=partial(token_loss, replicas=copies)``: their average is then
                the sum.

        Returns:
            The loss where the last stage is, otherwise None.

        Raises:
            ConfigError: the batch was prepared for another number of microbatches, or holds what stages
                cannot be given.
        """
        return self._run(batch, tokens, train=True)

    def eval(self, batch: dict[str, Any], tokens: int | None = None) -> torch.Tensor | None:
        """The loss of one batch, without gradients and in evaluation mode; see :meth:`step`.

        Every module is afterwards in the mode that it was in.
        """
        modules = [module for part in self.parts for module in part.modules()]
        training = [module.training for module in modules]
        try:
            for part in self.parts:
                part.eval()
            with torch.no_grad():
                return self._run(batch, tokens, train=False)
        finally:
            for module, mode in zip(modules, training, strict=True):
                module.training = mode

    def _run(self, batch: dict[str, Any], tokens: int | None, *, train: bool) -> torch.Tensor | None:
        chunks = batch.get(VLM_PP_MEDIA_KEY) or {}
        found = {len(parts) for parts in chunks.values()}
        if found - {self.n_microbatches}:
            raise ConfigError(
                f"the media of the batch were split for {sorted(found)} microbatches, the schedule has "
                f"{self.n_microbatches}: give wrap_vlm_collate_for_pp the same number"
            )
        first = self.inner[0]
        inputs = pipeline_inputs(batch, self.n_microbatches, first.rope_index, first.config)
        self._loss.tokens = inputs.tokens if tokens is None else tokens
        losses: list[torch.Tensor] = []
        sent = inputs.to(self.device)
        arguments = (sent.ids,) if self.info.has_first_stage else ()
        options: dict[str, Any] = (
            {"target": sent.labels, "losses": losses} if self.info.has_last_stage else {}
        )
        schedule = self._schedule(inputs, train)
        run = schedule.step if train else schedule.eval
        if "return_outputs" in inspect.signature(schedule.step).parameters:
            options["return_outputs"] = False  # nobody asks for the logits of a whole batch
        try:
            with stage_vlm_media_for_pp(self, [*self.parts], batch):
                run(*arguments, **options, **sent.kwargs)
        except BaseException:
            self._built.clear()  # with the activations that it holds
            raise
        return torch.stack(losses).sum().detach() if self.info.has_last_stage else None

    def _schedule(self, inputs: PipelineInputs, train: bool) -> Any:
        """The schedule for these shapes: the last one of its kind, or a new one."""
        rows, length = len(inputs.ids) // self.n_microbatches, inputs.ids.shape[1]
        key = (rows, length, tuple(sorted(inputs.axes.items())))
        if self._built.get(train, (None,))[0] == key:
            return self._built[train][1]
        pairs = zip(self.parts, self.inner, strict=True)
        stages = [self._stage(part, inner, rows, length) for part, inner in pairs]
        made = self.schedule(
            stages[0] if self.single else stages,
            n_microbatches=self.n_microbatches,
            loss_fn=self._loss,
            kwargs_chunk_spec=TensorChunkSpec.from_dict(inputs.axes),
            scale_grads=False,  # the loss is divided by the tokens of the whole batch
        )
        self._built[train] = (key, made)
        return made

    def _stage(self, part: torch.nn.Module, inner: VlmStage, rows: int, length: int) -> PipelineStage:
        text = inner.config.get_text_config()
        dtype = inner.dtype if self.hidden_dtype is None else self.hidden_dtype
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


class _StepLoss:
    """A loss that knows the number of tokens in the whole step, so that microbatches add up to their mean."""

    def __init__(self, of_tokens: Loss) -> None:
        self.of_tokens, self.tokens = of_tokens, 1

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.of_tokens(logits, labels, self.tokens)
