"""Handing the chunks of a batch to stage 0, for as long as one schedule call lasts."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch

from packhorse.pp_media.chunks import VLM_PP_MEDIA_KEY
from packhorse.pp_media.documented import _VLM_MEDIA_KEYS, image_grid_of
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

    While it lasts the module of stage 0 has ``_vlm_pixel_values_chunks``, ``_vlm_image_grid_hws_chunks``
    (the grid of the images, whatever its name), ``_vlm_pixel_values_videos_chunks``,
    ``_vlm_video_grid_thw_chunks``, ``_vlm_num_patches_chunks``, ``_vlm_patch_pixel_values_chunks`` and
    ``_vlm_patch_newline_mask_chunks``, each a list of chunks or None; all tensors by their own names in
    ``_vlm_media_chunks``; and the cursor ``_vlm_chunk_idx``, 0 at first, which its forward moves on by one.
    Afterwards all are None, also after an exception.

    A schedule's first call may begin with a probe that runs the first microbatch to learn shapes. It is known
    by its input, which comes a second time (or is on the meta device), and the cursor starts again.

    Args:
        pp: has ``pp.info.has_first_stage``; only where that is true is anything attached.
        model_parts: the modules of this rank's stages, in their order.
        batch: prepared by :func:`~packhorse.pp_media.prepare_vlm_media_for_pp`. The chunks are out of it
            while this lasts, so that the rest can go to the schedule, and back in it afterwards.

    Raises:
        ValueError: the batch holds media that were not prepared: the schedule would split them by row.
    """
    left = [key for key in _VLM_MEDIA_KEYS if batch.get(key) is not None and key not in _COUNTS]
    if left:
        raise ValueError(
            f"the batch holds '{left[0]}', which the schedule would split as if its entries were rows: "
            "prepare it with prepare_vlm_media_for_pp, or wrap its collate function with "
            "wrap_vlm_collate_for_pp"
        )
    chunks = batch.pop(VLM_PP_MEDIA_KEY, None)
    try:
        if pp.info.has_first_stage:
            with _attached(_unwrapped(model_parts[0]), chunks or {}):
                yield
        else:
            yield
    finally:
        if chunks is not None:
            batch[VLM_PP_MEDIA_KEY] = chunks


@contextmanager
def _attached(module: Any, chunks: MutableMapping[str, list[torch.Tensor]]) -> Iterator[None]:
    hook = module.register_forward_pre_hook(_ProbeHook(), with_kwargs=True, prepend=True)
    try:
        for key, attribute in _ATTRIBUTES.items():
            setattr(module, attribute, chunks.get(key))
        setattr(module, _GRID, image_grid_of(chunks))
        setattr(module, _ALL, dict(chunks))
        setattr(module, _CURSOR, 0)
        yield
    finally:
        hook.remove()
        for attribute in (*_ATTRIBUTES.values(), _GRID, _ALL, _CURSOR):
            setattr(module, attribute, None)


class _ProbeHook:
    """Sets the cursor back when the first forward turns out to have been a probe."""

    def __init__(self) -> None:
        self.calls = 0
        self.first: tuple[int, bool] | None = None

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        values = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        given = next((value for value in values if value.numel()), None)
        # Microbatches are different parts of one tensor, so the same memory is the same microbatch.
        seen = None if given is None else (0 if given.is_meta else given.data_ptr(), given.is_meta)
        if self.calls == 0:
            self.first = seen
        elif self.calls == 1 and self.first is not None and (self.first[1] or self.first == seen):
            setattr(module, _CURSOR, 0)
        self.calls += 1


def _unwrapped(module: Any) -> Any:
    wrapped = isinstance(module, torch.nn.parallel.DistributedDataParallel)
    return module.module if wrapped else module
