"""Cost of training on samples and packs: counted in operations, or measured in seconds.

Per token and pair of tokens of a document for the language model (layers with a window or chunks compute
fewer pairs, layers with a state none); per patch, pair of patches and media item for the vision encoder; and
per pack. Packs of equal length differ by up to a factor of two. :mod:`packhorse.plan.cost_fit` fits the
weights to measured times.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from packhorse.errors import ConfigError
from packhorse.plan.layer_costs import Config, decoder_layer_costs, get_setting, get_size
from packhorse.types import MEDIA_KINDS, Floats, Integers, MediaMask

if TYPE_CHECKING:
    from packhorse.plan.pack_plan import PackPlan

# What small kernels of the vision encoder cost beyond their operations, in patches: each image, and each call
# of the encoder. See docs/explanation/planning.md.
_ITEM_PATCHES, _ENCODER_PATCHES = 32, 8192

PairWeights: TypeAlias = tuple[tuple[int, float], ...]
Unit: TypeAlias = Literal["operations", "seconds"]

_SINGLE = ("token", "token_pair", "patch", "patch_pair", "item", "encoder", "supervised", "pack")


@dataclass(frozen=True, slots=True)
class CostWeights:
    """Weights of what a sample or pack consists of; its cost is their sum.

    The defaults are for a language model of 7 B parameters with a vision encoder of 0.6 B.

    Attributes:
        token: of the language model, without attention.
        token_pair: full attention, for each of the ``n * n`` pairs of a document of ``n`` tokens.
        patch: of the vision encoder, without attention.
        patch_pair: attention, for each of the ``m * m`` pairs of a media item (a video: of a frame) of ``m``
            patches.
        window_pairs: attention with a sliding window: for each window its tokens, and the weight of each
            of its pairs (see :func:`token_pairs`).
        chunk_pairs: the same for attention inside chunks.
        item: for each image and video, in addition to its patches: operations that take longer than their
            number suggests, because they are small.
        encoder: for each pack with images or videos: the vision encoder is called.
        supervised: for each supervised token: its logits may be the only ones that are computed. 0 in weights
            that count operations, which contain the logits of all tokens.
        pack: for each pack, whatever is in it.
        unit: ``"operations"``, floating-point operations of a forward pass, if the weights were computed from
            a model's sizes; ``"seconds"`` of a training step if they were measured.
    """

    token: float = 1.41e10
    token_pair: float = 2.01e5
    patch: float = 1.26e9
    patch_pair: float = 1.64e5
    window_pairs: PairWeights = ()
    chunk_pairs: PairWeights = ()
    item: float = 0.0
    encoder: float = 0.0
    supervised: float = 0.0
    pack: float = 0.0
    unit: Unit = "operations"

    def __post_init__(self) -> None:
        for name in _SINGLE:
            weight = getattr(self, name)
            if not 0 <= weight < float("inf") or (name == "token" and weight == 0):
                raise ConfigError.of(name, weight, "expected 0 or more, and more than 0 for token")
        for name in ("window_pairs", "chunk_pairs"):
            if not all(tokens >= 1 and 0 <= weight < float("inf") for tokens, weight in getattr(self, name)):
                expected = "expected tokens of at least 1 and weights of 0 or more"
                raise ConfigError.of(name, getattr(self, name), expected)

    @property
    def basis(self) -> str:
        """What a balance by these weights is predicted from."""
        return "operations" if self.unit == "operations" else "measured times"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the weights, in the order of :meth:`values` and :func:`cost_features`."""
        local = {"window": self.window_pairs, "chunk": self.chunk_pairs}
        return (*_SINGLE, *(f"{kind}_pair {tokens}" for kind, pairs in local.items() for tokens, _ in pairs))

    def values(self) -> Floats:
        """Return all weights as an array."""
        local = (weight for pairs in (self.window_pairs, self.chunk_pairs) for _, weight in pairs)
        return np.array([*(getattr(self, name) for name in _SINGLE), *local], np.float64)

    def with_values(self, values: npt.ArrayLike, unit: Unit) -> CostWeights:
        """Return weights of the same windows and chunks with other values, ordered as in :meth:`values`."""
        numbers = [float(value) for value in np.asarray(values, np.float64)]
        single, local = dict(zip(_SINGLE, numbers, strict=False)), iter(numbers[len(_SINGLE) :])
        window_pairs, chunk_pairs = (
            tuple((tokens, next(local)) for tokens, _ in pairs)
            for pairs in (self.window_pairs, self.chunk_pairs)
        )
        return replace(self, **single, window_pairs=window_pairs, chunk_pairs=chunk_pairs, unit=unit)

    def to_dict(self) -> dict[str, Any]:
        """Return the weights as plain values, for JSON."""
        return {name: _as_lists(value) for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CostWeights:
        """Return the weights of :meth:`to_dict`; other names raise, but for ``measured``, a remark.

        Weights that are not named are 0, not those of the default model, which may be in another unit.
        """
        known = [setting.name for setting in fields(cls)]
        given = {str(name): value for name, value in values.items() if name != "measured"}
        if unknown := sorted(given.keys() - set(known)):
            expected = f"expected {', '.join(known)}"
            raise ConfigError.of("cost_weights", unknown[0], expected)
        if given.get("unit", "operations") not in get_args(Unit):
            raise ConfigError.of("unit", given["unit"], f"expected one of {', '.join(get_args(Unit))}")
        try:
            for name in ("window_pairs", "chunk_pairs"):
                given[name] = tuple((int(tokens), float(weight)) for tokens, weight in given.get(name, ()))
            given |= {name: float(given[name]) for name in _SINGLE if name in given}
        except (TypeError, ValueError) as error:
            raise ConfigError(f"cost_weights are not numbers: {error}", setting="cost_weights") from error
        return cls(**{**dict.fromkeys(_SINGLE, 0.0), **given})

    @classmethod
    def of(cls, given: CostWeights | Mapping[str, Any] | str | os.PathLike[str]) -> CostWeights:
        """Return weights as they are, from plain values, or from a JSON file of ``packhorse calibrate``.

        Raises:
            ConfigError: the file cannot be read, or has something else in it.
        """
        if isinstance(given, CostWeights):
            return given
        if isinstance(given, Mapping):
            return cls.from_dict(given)
        path = os.fspath(given)
        try:
            with open(path, "rb") as file:
                values = json.load(file)
        except (OSError, ValueError) as error:
            message = f"cost_weights {path} cannot be read ({error}): `packhorse calibrate` writes a file"
            raise ConfigError(message, setting="cost_weights", path=path) from error
        if not isinstance(values, Mapping):
            raise ConfigError.of("cost_weights", path, "expected a JSON object with a number for each weight")
        return cls.from_dict(values)

    @classmethod
    def of_model(cls, config: Config) -> CostWeights:
        """Return the weights of a model, from its transformers config or a mapping with the same names.

        A matrix of ``a`` by ``b`` costs ``2ab`` for each token. With hidden size ``h``, ``H`` heads and ``K``
        key heads of size ``d``, intermediate size ``i``, vocabulary ``v`` and ``L`` layers the language
        model's, if all layers have full attention and an MLP:

        - token: ``L * (2h * (H + 2K) * d + 2h * H * d + 6hi) + 2hv``; of experts those that a token visits
        - token pair: ``L * 2Hd`` (scores and values are ``4Hd``, and causal attention needs half of them)

        the vision encoder's, whose attention is not causal and whose MLP has two matrices, or three if gated:

        - patch: ``l * (8h² + 4hi)``, and with window attention the pairs inside the window
        - patch pair: ``4h`` for each layer that attends over the whole media item

        In addition, each image costs as much as 32 patches more, and each call of the vision encoder as much
        as 8,192: its many small kernels take longer than their operations suggest.

        The config names the kind of each layer, and which have experts. Layers with a sliding window or
        chunks have pairs inside these alone, as with kernels that skip masked pairs; gated delta nets, state
        spaces and short convolutions have none, but cost more for each token. A kind that is unknown counts
        as full attention.
        """
        text = _part(config, ("text_config", "llm_config", "language_config")) or config
        vision = _part(config, ("vision_config", "vision_tower_config"))
        head = 2 * get_size(text, "hidden_size") * get_size(text, "vocab_size")
        layers = decoder_layer_costs(text)
        full, windows, chunks = 0, Counter[int](), Counter[int]()
        for layer in layers:
            if layer.window is not None:
                windows[layer.window] += layer.pair
            elif layer.chunk is not None:
                chunks[layer.chunk] += layer.pair
            else:
                full += layer.pair
        token = head + sum(layer.token for layer in layers)
        patch, patch_pair = (0.0, 0.0) if vision is None else _vision(vision)
        weights = cls(float(token), float(full), patch, patch_pair, _weights(windows), _weights(chunks))
        return weights.with_overhead()

    def with_overhead(self) -> CostWeights:
        """Return weights in which each image, and each call of the vision encoder, cost some patches more."""
        return replace(self, item=_ITEM_PATCHES * self.patch, encoder=_ENCODER_PATCHES * self.patch)


def _as_lists(value: Any) -> Any:
    """Return tuples as lists, as JSON has them."""
    return [_as_lists(part) for part in value] if isinstance(value, tuple) else value


def _weights(pairs: Counter[int]) -> PairWeights:
    return tuple((tokens, float(weight)) for tokens, weight in sorted(pairs.items()))


def _vision(config: Config) -> tuple[float, float]:
    # Qwen2-VL calls the width embed_dim, and hidden_size what comes out at the end.
    hidden = get_size(config, "embed_dim", "hidden_size")
    layers = get_size(config, "depth", "num_hidden_layers")
    ratio = get_setting(config, "mlp_ratio")
    inner = round(hidden * ratio) if ratio else get_size(config, "intermediate_size", default=4 * hidden)
    gated = get_setting(config, "hidden_act") in ("silu", "swiglu")
    patch = layers * (8 * hidden**2 + (6 if gated else 4) * hidden * inner)
    whole = get_setting(config, "fullatt_block_indexes")
    if whole is None:
        return float(patch), float(layers * 4 * hidden)
    window = (get_size(config, "window_size") // get_size(config, "patch_size")) ** 2
    return float(patch + (layers - len(whole)) * 4 * hidden * window), float(len(whole) * 4 * hidden)


def _part(config: Config, names: tuple[str, ...]) -> Config | None:
    return next((part for name in names if (part := get_setting(config, name)) is not None), None)


def sample_costs(
    lengths: npt.ArrayLike,
    weights: CostWeights,
    *,
    patches: npt.ArrayLike | None = None,
    patch_pairs: npt.ArrayLike | None = None,
    items: npt.ArrayLike | None = None,
    supervised: npt.ArrayLike | None = None,
) -> Floats:
    """Return the cost of each sample, which is the same in any pack.

    Args:
        lengths: tokens of each sample.
        weights: of the model.
        patches: vision patches of each sample; none if not given.
        patch_pairs: the sum of ``m * m`` over the media (or frames, if the encoder attends within a frame) of
            ``m`` patches of each sample; None assumes one media item per sample.
        items: images and videos of each sample; None assumes one for each sample with patches.
        supervised: supervised tokens of each sample; none if not given.
    """
    costs = np.zeros(len(np.asarray(lengths)), np.float64)
    for weight, feature in zip(
        weights.values(), _features(lengths, weights, patches, patch_pairs, items, supervised), strict=True
    ):
        if weight:
            costs += weight * feature
    return costs


def cost_features(
    lengths: npt.ArrayLike,
    weights: CostWeights,
    *,
    patches: npt.ArrayLike | None = None,
    patch_pairs: npt.ArrayLike | None = None,
    items: npt.ArrayLike | None = None,
    supervised: npt.ArrayLike | None = None,
) -> Floats:
    """Return what the weights of each sample are multiplied with: [samples, ``len(weights.names)``].

    Takes the arguments of :func:`sample_costs`. The columns of ``encoder`` and ``pack`` are 0: a sample is no
    pack. The features of a pack are the sums of those of its samples, with 1 in these columns.
    """
    return np.stack(list(_features(lengths, weights, patches, patch_pairs, items, supervised)), axis=1)


def _features(
    lengths: npt.ArrayLike,
    weights: CostWeights,
    patches: npt.ArrayLike | None,
    patch_pairs: npt.ArrayLike | None,
    items: npt.ArrayLike | None,
    supervised: npt.ArrayLike | None,
) -> Iterator[Floats]:
    """Yield the feature of each weight, one by one: together they are large for millions of samples."""
    tokens = np.asarray(lengths, np.float64)
    vision = np.zeros_like(tokens) if patches is None else np.asarray(patches, np.float64)
    yield tokens
    yield tokens**2
    yield vision
    yield vision**2 if patch_pairs is None else np.asarray(patch_pairs, np.float64)
    yield (vision > 0).astype(np.float64) if items is None else np.asarray(items, np.float64)
    nothing = np.zeros_like(tokens)
    yield nothing  # packs have an encoder
    yield nothing if supervised is None else np.asarray(supervised, np.float64)
    yield nothing  # and are packs
    for window, _ in weights.window_pairs:
        yield token_pairs(tokens, window=window)
    for chunk, _ in weights.chunk_pairs:
        yield token_pairs(tokens, chunk=chunk)


def token_pairs(lengths: npt.ArrayLike, *, window: int | None = None, chunk: int | None = None) -> Floats:
    """Return the pairs of tokens of each document that attention may compute: ``n * n`` of ``n`` tokens.

    With a ``window`` those less than ``window`` tokens apart, with a ``chunk`` those in the same chunk.
    Causal attention computes half of them (with a token's pair with itself: ``(pairs + n) / 2``).

    >>> token_pairs([3, 10]).tolist(), token_pairs([3, 10], window=4).tolist()
    ([9.0, 100.0], [9.0, 58.0])
    >>> token_pairs([3, 10], chunk=4).tolist()
    [9.0, 36.0]
    """
    tokens = np.asarray(lengths, np.float64)
    pairs: Floats = tokens**2
    if window is not None:
        outside = np.maximum(tokens - window, 0)
        pairs -= outside * (outside + 1)
    if chunk is not None:
        pairs = tokens // chunk * float(chunk) ** 2 + (tokens % chunk) ** 2
    return pairs


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


def pack_costs(
    plan: PackPlan,
    costs: npt.ArrayLike,
    weights: CostWeights | None = None,
    *,
    patches: npt.ArrayLike | None = None,
) -> Floats:
    """Return the cost of each pack, from :func:`sample_costs`; ``weights`` adds what a pack itself costs.

    ``patches`` of each sample say which packs have images.
    """
    totals: Floats = plan.sums(np.asarray(costs, np.float64))
    if weights is not None:
        totals = totals + weights.pack
    if weights is not None and patches is not None:
        totals = totals + weights.encoder * (plan.sums(np.asarray(patches, np.int64)) > 0)
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
