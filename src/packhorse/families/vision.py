"""Vision towers whose attention runs once for all images of a batch, instead of once for each image.

The towers in :data:`TOWERS` join the patches of all images to one sequence, with the boundaries of the
images (``cu_seqlens``). transformers passes these to attentions with "flash" in their names; for any other it
calls the attention for one image after the other, in every layer. :func:`attend_in_one_call` sets such an
attention, by default the kernel of :mod:`.varlen`. A video is one image for each of its temporal patches,
except in Kimi K2.5.

Boundaries and other indices follow from the grids of the images. Towers compute them on the device, which the
CPU waits for several times. :class:`VisionIndices` computes them on the CPU: in a worker of the loader, or in
a hook of the tower, which copies the grids from the device once.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from logging import getLogger
from typing import TYPE_CHECKING, Any

import torch

from packhorse.errors import ConfigError, require
from packhorse.families.models import class_of
from packhorse.families.varlen import VARLEN_ARGUMENTS, attend_by_segment
from packhorse.types import to_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = getLogger("packhorse.families.vision")

ONE_CALL, PER_ITEM = "one_call", "per_item"
FLASH_VARLEN = "packhorse_flash_varlen"
"""The attention of towers, as it is registered with transformers, which looks for "flash" in the name."""

_KIMI = "Kimi_K25VisionModel"
TOWERS = frozenset(
    {
        "Qwen2VisionTransformerPretrainedModel",
        "Qwen2_5_VisionTransformerPretrainedModel",
        "Qwen3VLVisionModel",
        "Qwen3VLMoeVisionModel",
        "Qwen3OmniMoeVisionEncoder",
        "Qwen3_5VisionModel",
        "Qwen3_5MoeVisionModel",
        _KIMI,
    }
)
"""Classes of transformers for towers whose attention takes the boundaries of images."""

_HAS_HOOK = "_packhorse_vision_hook"


def find_towers(model: torch.nn.Module) -> list[PreTrainedModel]:
    """Return the vision towers in a model, of a class in :data:`TOWERS`."""
    found: list[Any] = [module for module in model.modules() if class_of(module).__name__ in TOWERS]
    return [tower for tower in found if class_of(tower).__module__.startswith("transformers.")]


def attention_of_tower(tower: PreTrainedModel) -> str:
    """Return the attention that a vision tower runs."""
    # transformers has no public way to read the attention implementation.
    return str(next(attention_layers(tower)).config._attn_implementation or "sdpa")


def runs_in_one_call(tower: PreTrainedModel) -> bool:
    """Whether transformers calls the tower's attention once for all images."""
    return "flash" in attention_of_tower(tower)


def head_width(tower: PreTrainedModel) -> int:
    """Return the width of the attention heads of a tower."""
    return int(next(attention_layers(tower)).head_dim)


def attend_in_one_call(tower: PreTrainedModel, attention: str = FLASH_VARLEN) -> None:
    """Let transformers call the attention of a tower, with "flash" in its name, once for all images."""
    if attention == FLASH_VARLEN:
        require("transformers", "train").AttentionInterface.register(FLASH_VARLEN, segment_attention)
    set_tower_attention(tower, attention)
    if not getattr(tower, _HAS_HOOK, False):
        tower.register_forward_pre_hook(_supply_indices, with_kwargs=True)
        setattr(tower, _HAS_HOOK, True)


def attend_per_item(tower: PreTrainedModel) -> None:
    """Let transformers call the attention of a tower, sdpa, for one image after the other."""
    set_tower_attention(tower, "sdpa")


def set_tower_attention(tower: PreTrainedModel, attention: str) -> None:
    """Set the attention of a tower, in a config of its attention layers alone.

    A model that is built from the model's config would look for a package of that name, as transformers does
    for all names with "flash".
    """
    config = copy.copy(tower.config)
    config._attn_implementation = attention
    for layer in attention_layers(tower):
        layer.config = config


def attention_layers(tower: PreTrainedModel) -> Iterator[Any]:
    """Yield the attention layers of a tower: in transformers they have an attribute ``is_causal``."""
    # hasattr would also find wrappers, which show the attributes of what they wrap.
    yield from (module for module in tower.modules() if "is_causal" in vars(module))


def segment_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in both directions inside each image, as transformers calls it in vision towers.

    Returns [B, S, heads, width], and None for the weights.
    """
    if cu_seq_lens_q is None or max_length_q is None or attention_mask is not None or dropout:
        name = type(module).__name__
        what = f"{name} calls its attention without the boundaries of images, with a mask or with dropout"
        raise ConfigError(f'{what}: call packhorse.prepare(model, vision="per_item")', setting="vision")
    if query.is_cuda and query.dtype == torch.float32 and not torch.is_autocast_enabled("cuda"):
        _warn_of_float32()
    longest = int(max_length_q)
    result = attend_by_segment(query, key, value, cu_seq_lens_q, longest, scaling, causal=False)
    return result, None


@cache
def _warn_of_float32() -> None:
    logger.warning(
        "the vision tower computes in float32, for which there is no varlen kernel: its attention runs image "
        "by image"
    )


# Indices.


@dataclass(frozen=True, slots=True)
class VisionIndices:
    """Computes on the CPU, from the grids of images, the indices that a vision tower needs.

    Attributes:
        tower: name of the tower's class.
        merge: height and width, in patches, of what becomes a token.
        window: size of a window and of a patch, in pixels; None for towers without windows.
        table: side of the table of position embeddings, how it is interpolated (``mode``), and whether its
            corners are those of images; None for towers without one.
    """

    tower: str
    merge: tuple[int, int]
    window: tuple[int, int] | None
    table: tuple[int, str, bool] | None

    @classmethod
    def of(cls, tower: PreTrainedModel) -> VisionIndices | None:
        """Inspect a tower; None if the installed transformers does not take indices from outside."""
        module: Any = tower
        if not _takes_indices():
            return None
        name = class_of(tower).__name__
        kimi = name == _KIMI
        window = (module.window_size, module.patch_size) if hasattr(module, "window_size") else None
        owner = module.patch_embed.pos_emb if kimi else module
        table = None
        if hasattr(owner, "interpolation_mode"):
            corners = owner.interpolation_align_corners
            table = (owner.num_grid_per_side, owner.interpolation_mode, corners)
        merge = module.merge_kernel_size if kimi else 2 * (module.spatial_merge_size,)
        return cls(name, tuple(merge), window, table)

    @property
    def by_keyword(self) -> bool:
        """Whether the model takes indices for images and for videos, as ``image_…`` and ``video_…``."""
        generic = require("transformers.utils.generic", "train")
        return self.tower != _KIMI and hasattr(generic, "accepts_precomputed_kwargs")

    def compute(self, grids: torch.Tensor) -> dict[str, Any]:
        """Return the arguments of the tower for grids [N, 3] on the CPU, made by transformers itself."""
        made = require("transformers.vision_utils", "train")
        kimi = self.tower == _KIMI
        boundaries = made.get_vision_cu_seqlens(grids, merge_temporal=kimi)
        # Kimi K2.5 has patches row by row; the others have those of a token next to each other.
        block = 1 if kimi else self.merge[0]
        indices: dict[str, Any] = {
            "cu_seqlens": boundaries,
            "max_seqlen": _longest(boundaries),
            "position_ids": made.get_vision_position_ids(grids, block),
        }
        if self.window is not None:
            index, boundaries = made.get_vision_window_index(grids, block, *self.window)
            indices |= {"window_index": index, "cu_window_seqlens": boundaries}
            indices["max_window_seqlen"] = _longest(boundaries)
        if self.table is not None:
            side, mode, corners = self.table
            index, weights = made.get_vision_interpolation_indices_and_weights(
                grids, side, mode=mode, align_corners=corners, spatial_merge_size=block
            )
            indices |= {"interp_indices": index, "interp_weights": weights}
        if kimi:
            module = import_module("transformers.models.kimi_k25.modeling_kimi_k25")
            indices["frame_index"] = module.get_vision_frame_index(grids)
            indices["temporal_merge_index"] = module.get_vision_temporal_merge_index(grids, *self.merge)
        return indices

    def of_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the model for the images and for the videos of a batch."""
        return dict(self._of_kinds(batch))

    def _of_kinds(self, batch: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for kind in ("image", "video"):
            grids = batch.get(f"{kind}_grid_thw")
            if grids is not None and len(grids):
                for name, value in self.compute(grids).items():
                    yield f"{kind}_{name}", value


def indices_of_model(model: torch.nn.Module) -> VisionIndices | None:
    """Return what computes the indices that batches for a model hold; None if they hold none.

    That is for models with a tower whose attention runs in one call.
    """
    towers = [tower for tower in find_towers(model) if runs_in_one_call(tower)]
    indices = VisionIndices.of(towers[0]) if towers else None
    return indices if indices is not None and indices.by_keyword else None


@cache
def _takes_indices() -> bool:
    """Whether transformers has all functions that compute indices, or take them from their keywords."""
    require("transformers", "train")
    try:
        made = import_module("transformers.vision_utils")
    except ImportError:
        return False
    parts = ("cu_seqlens", "position_ids", "window_index", "interpolation_indices_and_weights")
    return all(hasattr(made, f"get_vision_{part}") for part in parts)


def _longest(boundaries: torch.Tensor) -> int:
    return int((boundaries[1:] - boundaries[:-1]).max())


def _supply_indices(
    tower: Any, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give a tower that runs in one call its indices, unless the batch has them.

    A hook, because the model of Kimi K2.5 has no arguments for its images and its videos apart. It passes the
    boundaries of documents on to its tower, whose attention takes boundaries under the same names and would
    fail: they are removed.
    """
    if not runs_in_one_call(tower):
        return None
    kept = {name: value for name, value in options.items() if name not in VARLEN_ARGUMENTS}
    if "cu_seqlens" not in kept:
        kept |= _compute_on_cpu(tower, (*arguments, *kept.values())[0].device, kept, arguments)
    return arguments, kept


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _compute_on_cpu(
    tower: Any, device: torch.device, options: Mapping[str, Any], arguments: tuple[Any, ...]
) -> dict[str, Any]:
    """Return the indices for a call of the tower; the CPU waits for the grids, and for nothing else."""
    indices = VisionIndices.of(tower)
    if indices is None:
        return {}
    grids = options["grid_thw"] if "grid_thw" in options else arguments[1]
    computed = indices.compute(grids.cpu())
    if device.type == "cuda":  # copies from other memory wait for the device
        computed = {
            name: value.pin_memory() if isinstance(value, torch.Tensor) else value
            for name, value in computed.items()
        }
    moved: dict[str, Any] = to_device(computed, device)
    return moved
