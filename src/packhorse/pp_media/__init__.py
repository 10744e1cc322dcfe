"""Media chunks for pipeline microbatches: each microbatch gets the media of its own samples.

``torch.distributed.pipelining`` splits every tensor along its batch axis. Media tensors have none: patches,
tiles and grids of all samples are concatenated. :func:`prepare_vlm_media_for_pp` removes them from the batch
and splits them as the text will be split; :func:`stage_vlm_media_for_pp` attaches them to stage 0 during one
schedule call. Chunks are views: nothing is copied. Imports torch and :mod:`packhorse.types` only.
"""

from packhorse.pp_media.chunks import (
    VLM_PP_MEDIA_KEY,
    chunk_step3_media,
    chunk_vlm_media,
    prepare_vlm_media_for_pp,
    wrap_vlm_collate_for_pp,
)
from packhorse.pp_media.documented import _VLM_MEDIA_KEYS, _select_image_grid
from packhorse.pp_media.rows import COUNT_KEYS, MEDIA_LAYOUT_KEY, MEDIA_ROWS_KEY
from packhorse.pp_media.stage import stage_vlm_media_for_pp

__all__ = [
    "COUNT_KEYS",
    "MEDIA_LAYOUT_KEY",
    "MEDIA_ROWS_KEY",
    "VLM_PP_MEDIA_KEY",
    "_VLM_MEDIA_KEYS",
    "_select_image_grid",
    "chunk_step3_media",
    "chunk_vlm_media",
    "prepare_vlm_media_for_pp",
    "stage_vlm_media_for_pp",
    "wrap_vlm_collate_for_pp",
]
