"""Attach the chunks of a batch to stage 0 during one schedule call."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from packhorse.pp_media.chunks import VLM_PP_MEDIA_KEY
from packhorse.pp_media.documented import _VLM_MEDIA_KEYS, image_grid_of, without_added_grid
from packhorse.pp_media.rows import COUNT_KEYS

_ATTRIBUTES = {
    "pixel_values": "_vlm_pixel_values_chunks",
    "pixel_values_videos": "_vlm_pixel_values_videos_chunks",
    "video_grid_thw": "_vlm_video_grid_thw_chunks",
    "num_patches": "_vlm_num_patches_chunks",
    "patch_pixel_values": "_vlm_patch_pixel_values_chunks",
    "patch_newline_mask": "_vlm_patch_newline_mask_chunks",
}
_COUNTS = frozenset(COUNT_KEYS.values())  # these can be split by row
_GRID, _ALL, _CURSOR = "_vlm_image_grid_hws_chunks", "_vlm_media_chunks", "_vlm_chunk_idx"


@contextmanager
def stage_vlm_media_for_pp(
    pp: Any, model_parts: list[torch.nn.Module], batch: MutableMapping[str, Any]
) -> Iterator[None]:
    """Attach the media chunks of a batch to stage 0 during one schedule call.

    Inside the context the module of stage 0 has ``_vlm_pixel_values_chunks``, ``_vlm_image_grid_hws_chunks``
    (the grid of the images, whatever its name), ``_vlm_pixel_values_videos_chunks``,
    ``_vlm_video_grid_thw_chunks``, ``_vlm_num_patches_chunks``, ``_vlm_patch_pixel_values_chunks`` and
    ``_vlm_patch_newline_mask_chunks``, each a list of chunks or None; all tensors by their own names in
    ``_vlm_media_chunks``; and the cursor ``_vlm_chunk_idx``, 0 at first, which its forward increments.
    Afterwards all are None, also after an exception.

    Before each forward the cursor is set to the number of the microbatch, which is identified by the memory
    of its tokens. So a schedule may first run a shape probe with the first microbatch (or a tensor on the
    meta device): the cursor restarts. And if activation checkpointing recomputes the whole stage, a
    microbatch gets the same media.

    If the stage is wrapped (DDP, FSDP, ``checkpoint_wrapper``, ``torch.compile``), the innermost module has
    the attributes.

    Args:
        pp: has ``pp.info.has_first_stage``; nothing is attached if that is false.
        model_parts: the modules of this rank's stages, in their order.
        batch: prepared by :func:`~packhorse.pp_media.prepare_vlm_media_for_pp`. The chunks are removed inside
            the context, so that the rest can be passed to the schedule, and restored afterwards.

    Raises:
        ValueError: the batch has media that were not prepared: the schedule would split them by row. Or, from
            a forward: all its tensors are expanded, so that microbatches share their memory.
        RuntimeError: (from a forward) a microbatch is recomputed with a copy of its tokens, or there are more
            microbatches than chunks.
    """
    left = [key for key in _VLM_MEDIA_KEYS if batch.get(key) is not None and key not in _COUNTS]
    if left:
        raise ValueError(
            f"the batch has '{left[0]}', which the schedule would split as if its entries were rows: "
            "prepare it with prepare_vlm_media_for_pp, or wrap its collate function with "
            "wrap_vlm_collate_for_pp"
        )
    chunks = batch.pop(VLM_PP_MEDIA_KEY, None)
    try:
        with _attach(innermost(model_parts[0]), chunks or {}) if pp.info.has_first_stage else nullcontext():
            yield
    finally:
        if chunks is not None:
            batch[VLM_PP_MEDIA_KEY] = chunks


@contextmanager
def _attach(module: Any, chunks: MutableMapping[str, list[torch.Tensor]]) -> Iterator[None]:
    number = len(next(iter(chunks.values()))) if chunks else None
    hook = module.register_forward_pre_hook(_CursorHook(number), with_kwargs=True, prepend=True)
    try:
        for key, attribute in _ATTRIBUTES.items():
            setattr(module, attribute, chunks.get(key))
        setattr(module, _GRID, image_grid_of(chunks))
        setattr(module, _ALL, without_added_grid(chunks))
        setattr(module, _CURSOR, 0)
        yield
    finally:
        hook.remove()
        for attribute in (*_ATTRIBUTES.values(), _GRID, _ALL, _CURSOR):
            setattr(module, attribute, None)


class _CursorHook:
    """Set the cursor before each forward; microbatches are numbered in the order of their first forward."""

    def __init__(self, chunks: int | None) -> None:
        self.chunks, self.calls, self.probed = chunks, 0, False
        self.numbers: dict[tuple[tuple[int, ...], ...], int] = {}
        self.kept: list[list[torch.Tensor]] = []  # so that their memory is not reused

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        number = self._number([tensor for tensor in tensors if tensor.numel()])
        if self.chunks is not None and number >= self.chunks:
            raise RuntimeError(f"microbatch {number + 1} of a batch whose media were split for {self.chunks}")
        setattr(module, _CURSOR, number)

    def _number(self, given: list[torch.Tensor]) -> int:
        if any(value.is_meta for value in given):
            return 0
        if not given:  # nothing identifies a microbatch
            self.calls += 1
            return self.calls - 1
        # Wrappers may cast floating-point tensors, which changes their memory each time.
        tokens = [value for value in given if not value.is_floating_point()] or given
        # All rows of an expanded tensor, and so its microbatches, share their memory.
        if all(0 in value.stride() for value in tokens):
            raise ValueError(
                f"all inputs of stage 0 are expanded (strides {[value.stride() for value in tokens]}), "
                "so its microbatches cannot be distinguished: call .contiguous() on the ids"
            )
        key = tuple((value.data_ptr(), *value.shape) for value in tokens)
        # Private: torch has no public way to ask whether a backward pass recomputes this forward.
        in_backward = torch._C._current_graph_task_id() != -1
        if key not in self.numbers:
            if in_backward:
                raise RuntimeError(
                    "activation checkpointing recomputes stage 0 with a copy of its input, so its media are "
                    "unknown: checkpoint its layers, or pass it tokens on its device"
                )
            self.numbers[key] = len(self.numbers)
            self.kept.append(tokens)
        elif not in_backward:
            if self.probed or len(self.numbers) > 1:
                raise RuntimeError(
                    f"microbatch {self.numbers[key] + 1} runs through stage 0 a second time: expected a "
                    "separate part of the ids for each microbatch"
                )
            self.probed = True  # the first forward was a probe
        return self.numbers[key]


_WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def innermost(module: Any) -> Any:
    """Return the module inside the wrappers DDP, FSDP 1, activation checkpointing and ``torch.compile``."""
    while True:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            module = module.module
            continue
        # Not by getattr: wrappers forward unknown names, so the inner ones would be found too.
        children = dict(module.named_children())
        inner = next((children[name] for name in _WRAPPED if name in children), None)
        if inner is None:
            return module
        module = inner
