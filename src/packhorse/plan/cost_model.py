"""Cost of training on samples and packs, in floating-point operations.

Per token and pair of tokens of a document for the language model, per patch and pair of patches of a media
item for the vision encoder. Packs of equal length differ by up to a factor of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from packhorse.errors import ConfigError
from packhorse.types import MEDIA_KINDS, Floats, Integers, MediaMask

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from packhorse.plan.pack_plan import PackPlan

Config: TypeAlias = "PretrainedConfig | Mapping[str, Any]"


@dataclass(frozen=True, slots=True)
class CostWeights:
    """Floating-point operations of a forward pass (or any other unit of cost).

    The defaults are for a language model of 7 B parameters with a vision encoder of 0.6 B.

    Attributes:
        token: of the language model, without attention.
        token_pair: attention, for each of the ``n * n`` pairs of a document of ``n`` tokens.
        patch: of the vision encoder, without attention.
        patch_pair: attention, for each of the ``m * m`` pairs of a media item (a video: of a frame) of ``m``
            patches.
    """

    token: float = 1.41e10
    token_pair: float = 2.01e5
    patch: float = 1.26e9
    patch_pair: float = 1.64e5

    def __post_init__(self) -> None:
        for name, weight in asdict(self).items():
            if weight < 0 or (name == "token" and weight == 0):
                raise ConfigError.of(name, weight, "expected 0 or more, and more than 0 for token")

    @classmethod
    def of_model(cls, config: Config) -> CostWeights:
        """Return the weights of a model, from its transformers config or a mapping with the same names.

        A matrix of ``a`` by ``b`` costs ``2ab`` for each token. With hidden size ``h``, ``H`` heads and ``K``
        key heads of size ``d``, intermediate size ``i``, vocabulary ``v`` and ``L`` layers the language
        model's:

        - token: ``L * (2h * (H + 2K) * d + 2h * H * d + 6hi) + 2hv``; of experts those that a token visits
        - token pair: ``L * 2Hd`` (scores and values are ``4Hd``, and causal attention needs half of them)

        the vision encoder's, whose attention is not causal and whose MLP has two matrices, or three if gated:

        - patch: ``l * (8h² + 4hi)``, and with window attention the pairs inside the window
        - patch pair: ``4h`` for each layer that attends over the whole media item
        """
        text = _part(config, ("text_config", "llm_config", "language_config")) or config
        vision = _part(config, ("vision_config", "vision_tower_config"))
        token, token_pair = _language(text)
        patch, patch_pair = (0.0, 0.0) if vision is None else _vision(vision)
        return cls(token, token_pair, patch, patch_pair)


def _language(config: Config) -> tuple[float, float]:
    head = 2 * _size(config, "hidden_size") * _size(config, "vocab_size")
    each = _get(config, "per_layer_config")  # newer transformers: layers may differ from each other
    number = _size(config, "num_hidden_layers")
    layers = [_layer(config if each is None else each[layer]) for layer in range(number)]
    return float(sum(token for token, _ in layers) + head), float(sum(pair for _, pair in layers))


def _layer(config: Config) -> tuple[int, int]:
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    key_heads = _size(config, "num_key_value_heads", default=heads)
    width = _size(config, "head_dim", default=hidden // heads)
    experts = _size(config, "num_experts_per_tok", "num_experts_per_token", default=0)
    inner = _size(config, "intermediate_size", default=0)
    if experts:
        inner = experts * _size(config, "moe_intermediate_size", "intermediate_size")
        inner += _size(config, "shared_expert_intermediate_size", default=0)
    attention = 2 * hidden * width * (2 * heads + 2 * key_heads)
    return attention + 6 * hidden * inner, 2 * heads * width


def _vision(config: Config) -> tuple[float, float]:
    # Qwen2-VL calls the width embed_dim, and hidden_size what comes out at the end.
    hidden = _size(config, "embed_dim", "hidden_size")
    layers = _size(config, "depth", "num_hidden_layers")
    ratio = _get(config, "mlp_ratio")
    inner = round(hidden * ratio) if ratio else _size(config, "intermediate_size", default=4 * hidden)
    gated = _get(config, "hidden_act") in ("silu", "swiglu")
    patch = layers * (8 * hidden**2 + (6 if gated else 4) * hidden * inner)
    whole = _get(config, "fullatt_block_indexes")
    if whole is None:
        return float(patch), float(layers * 4 * hidden)
    window = (_size(config, "window_size") // _size(config, "patch_size")) ** 2
    return float(patch + (layers - len(whole)) * 4 * hidden * window), float(len(whole) * 4 * hidden)


def _part(config: Config, names: tuple[str, ...]) -> Config | None:
    return next((part for name in names if (part := _get(config, name)) is not None), None)


def _get(config: Config, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _size(config: Config, *names: str, default: int | None = None) -> int:
    for name in names:
        value = _get(config, name)
        if isinstance(value, (list, tuple)):  # one entry for each layer
            value = max(value, default=None)
        if value is not None:
            return int(value)
    if default is None:
        problem = f"the model config has none of {', '.join(names)}: pass CostWeights(...) instead"
        raise ConfigError(problem, setting=names[0])
    return default


def sample_costs(
    lengths: npt.ArrayLike,
    weights: CostWeights,
    *,
    patches: npt.ArrayLike | None = None,
    patch_pairs: npt.ArrayLike | None = None,
) -> Floats:
    """Return the cost of each sample, which is the same in any pack.

    Args:
        lengths: tokens of each sample.
        weights: of the model.
        patches: vision patches of each sample; none if not given.
        patch_pairs: the sum of ``m * m`` over the media (or frames, if the encoder attends within a frame) of
            ``m`` patches of each sample; None assumes one media item per sample.
    """
    tokens = np.asarray(lengths, np.float64)
    costs: Floats = weights.token * tokens + weights.token_pair * tokens**2
    if patches is not None:
        vision = np.asarray(patches, np.float64)
        pairs = vision**2 if patch_pairs is None else np.asarray(patch_pairs, np.float64)
        costs += weights.patch * vision + weights.patch_pair * pairs
    return costs


def patch_pairs_of(media_patches: npt.ArrayLike, offsets: npt.ArrayLike, frames: npt.ArrayLike = 1) -> Floats:
    """Return ``patch_pairs`` for :func:`sample_costs` from the flat media of all samples.

    Args:
        media_patches: patches of each media item.
        offsets: the media of sample ``i`` are ``offsets[i]`` to ``offsets[i + 1]``.
        frames: of each media item, if they do not attend to each other.
    """
    patches = np.asarray(media_patches, np.float64)
    ends = np.concatenate([[0.0], np.cumsum(patches**2 / np.maximum(1, np.asarray(frames)))])
    bounds = np.asarray(offsets, np.int64)
    pairs: Floats = ends[bounds[1:]] - ends[bounds[:-1]]
    return pairs


def pack_costs(plan: PackPlan, costs: npt.ArrayLike) -> Floats:
    """Return the cost of each pack, from :func:`sample_costs`."""
    totals: Floats = plan.sums(np.asarray(costs, np.float64))
    return totals


def media_masks(**counts: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """Return the :class:`~packhorse.types.MediaMask` of samples with this many media items of each kind."""
    if unknown := sorted(set(counts) - set(MEDIA_KINDS)):
        problem = f"unknown kind of media {', '.join(unknown)}: expected {', '.join(MEDIA_KINDS)}"
        raise ConfigError(problem, setting=unknown[0])
    columns = {MediaMask.of([kind]): np.asarray(counts[kind]) for kind in MEDIA_KINDS if kind in counts}
    masks = np.zeros(len(next(iter(columns.values()), ())), np.uint8)
    for mask, column in columns.items():
        masks |= np.where(column > 0, np.uint8(mask), np.uint8(0))
    return masks


def pack_media_masks(plan: PackPlan, **counts: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """Return the media mask of each pack; ``image=…, video=…, audio=…`` are the counts of each sample."""
    sums = {kind: plan.sums(np.asarray(values, np.int64)) for kind, values in counts.items()}
    return media_masks(**sums) if sums else np.zeros(len(plan), np.uint8)


def straggler_ratio(costs: npt.ArrayLike, steps: Integers) -> float:
    """Return max / mean of the costs over ranks, averaged over steps; 1.0 is perfectly even.

    ``costs`` are those of each pack; ``steps`` is [steps, ranks], the pack of each rank.
    """
    table = np.asarray(costs, np.float64)[steps]
    return float((table.max(axis=1) / table.mean(axis=1)).mean()) if table.size else 1.0
