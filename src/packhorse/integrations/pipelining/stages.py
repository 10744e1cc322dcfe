"""Cutting a model into the modules of its stages, without copying a weight."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from packhorse.errors import ConfigError
from packhorse.families.qwen_vl import rope_index
from packhorse.integrations.pipelining.microbatches import varlen_arguments

SPLITTABLE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Model types that :func:`split_vlm` knows how to cut, and that are tested."""

_MEDIA = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
_PLACEHOLDERS = {"pixel_values": "image_token_id", "pixel_values_videos": "video_token_id"}


class VlmStage(torch.nn.Module):
    """Some decoder layers of a model; with the embedding and the vision tower in front, or the head after.

    Parameters have the names they have in the whole model, so a checkpoint of it loads with
    ``load_state_dict(…, strict=False)`` and the state dicts of all stages together are one.

    Attributes:
        index: the stage's number; ``n_stages`` of how many.
        config: the model's.
        rope_index: the model's ``get_rope_index``, without its weights.
    """

    def __init__(
        self, model: Any, index: int, n_stages: int, layers: range, *, head: Any = None, config: Any = None
    ) -> None:
        super().__init__()
        self.index, self.n_stages = index, n_stages
        self.config = model.config if config is None else config
        self.rope_index = rope_index(model)
        # packhorse.pp_media.stage_vlm_media_for_pp sets them during a schedule call.
        self._vlm_media_chunks: Mapping[str, Sequence[torch.Tensor]] | None = None
        self._vlm_chunk_idx: int | None = None
        whole = model.model.language_model
        kept = torch.nn.ModuleList()
        # The names are the numbers that the layers have in the whole model.
        kept._modules = {str(number): whole.layers[number] for number in layers}
        parts: dict[str, Any] = {"layers": kept}
        if not self.is_first:
            parts["embed_tokens"] = None
        if not self.is_last:
            parts["norm"] = torch.nn.Identity()
        decoder = _shell(whole, parts)
        decoder.config = copy.copy(whole.config)
        decoder.config.num_hidden_layers = len(layers)
        if getattr(whole.config, "layer_types", None) is not None:
            decoder.config.layer_types = [whole.config.layer_types[number] for number in layers]
        self.model = _shell(
            model.model, {"language_model": decoder, **({} if self.is_first else {"visual": None})}
        )
        if self.is_last:
            self.lm_head = model.lm_head if head is None else head

    @property
    def is_first(self) -> bool:
        """Whether ids and media go in; otherwise hidden states."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether logits come out; otherwise hidden states."""
        return self.index == self.n_stages - 1

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights, which is that of the hidden states."""
        weights: torch.Tensor = next(self.model.language_model.parameters())
        return weights.dtype

    def forward(
        self,
        given: torch.Tensor,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        segment_starts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One microbatch.

        Args:
            given: ``input_ids`` [b, S] for the first stage, hidden states [b, S, H] for the others.
            attention_mask: as the model takes it, of these rows.
            position_ids: [3, b, S].
            segment_starts: bool [b, S], where documents begin, for varlen and flash attention.

        Returns:
            Hidden states [b, S, H], or the logits [b, S, V] of the last stage.
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
        """The media of the microbatch at the cursor, which moves on; those without entries are dropped."""
        chunks = self._vlm_media_chunks or {}
        place = self._vlm_chunk_idx or 0
        if chunks:
            number = len(next(iter(chunks.values())))
            if place >= number:
                raise RuntimeError(f"microbatch {place + 1} of a batch whose media were split for {number}")
            self._vlm_chunk_idx = place + 1
        taken = {key: chunks[key][place] for key in _MEDIA if key in chunks}
        taken = {key: value for key, value in taken.items() if len(value)}
        self._check_staged(ids, taken, place)
        return {key: value.to(ids.device, non_blocking=True) for key, value in taken.items()}

    def _check_staged(self, ids: torch.Tensor, taken: Mapping[str, torch.Tensor], place: int) -> None:
        """Without its pixels a model takes the placeholder for a word, and says nothing."""
        for key, name in _PLACEHOLDERS.items():
            token = getattr(self.config, name, None)
            if key in taken or token is None or ids.is_meta:
                continue
            if bool((ids == token).any()):
                raise RuntimeError(
                    f"microbatch {place + 1} holds {name} {token} and stage 0 has no '{key}' for it: prepare "
                    "the batch (packhorse.pp_media.wrap_vlm_collate_for_pp) and run the schedule within "
                    "stage_vlm_media_for_pp, or with VlmPipeline"
                )


def _shell(module: Any, replaced: Mapping[str, Any]) -> Any:
    """The same module with other children (None: dropped). Weights are shared, not copied."""
    made = copy.copy(module)
    for name in ("_parameters", "_buffers"):
        setattr(made, name, dict(getattr(module, name)))
    children = {**module._modules, **replaced}
    made._modules = {name: child for name, child in children.items() if child is not None}
    return made


def split_vlm(
    model: Any, n_stages: int, layers: Sequence[int] | None = None, *, untie: bool = False
) -> list[VlmStage]:
    """Cut a model into stages that share its weights.

    Args:
        model: a Qwen2-VL, Qwen2.5-VL or Qwen3-VL model for conditional generation.
        n_stages: how many stages; of these a rank takes its own (``stages[rank::size]`` for the schedules of
            torch that loop over ranks).
        layers: decoder layers of each stage; without it they are dealt evenly.
        untie: where the head is tied to the embedding, give the last stage a copy of it, which is trained
            apart; ``config.tie_word_embeddings`` of the stages is then False. The model stays as it is.

    Returns:
        All stages. Nothing is copied but an untied head: drop the stages of other ranks and the model to free
        their weights.

    Raises:
        ConfigError: another kind of model, tied embeddings, too few layers, or layers of Qwen3-VL that take
            features of the vision tower would not be on stage 0.
    """
    kind = model.config.model_type
    if kind not in SPLITTABLE:
        raise ConfigError(
            f"cannot split a model of type '{kind}', only {', '.join(SPLITTABLE)}: write its stages yourself "
            "and hand them their media with packhorse.pp_media.stage_vlm_media_for_pp"
        )
    decoder = model.model.language_model
    total = len(decoder.layers)
    tied = n_stages > 1 and model.lm_head.weight is decoder.embed_tokens.weight
    if tied and not untie:
        raise ConfigError(
            "the model ties its head to its embedding, which would be on different stages: with "
            "split_vlm(…, untie=True) the head gets a copy of the weights and is trained apart"
        )
    # Features of the vision tower's inner layers are added after the first decoder layers.
    deep = len(getattr(model.config.vision_config, "deepstack_visual_indexes", None) or ())
    numbers = _dealt(total, n_stages, deep) if layers is None else list(layers)
    if len(numbers) != n_stages or sum(numbers) != total or min(numbers, default=0) < 1:
        raise ConfigError(
            f"layers={numbers} for {n_stages} stages of a decoder of {total} layers: expected {n_stages} "
            f"positive numbers that make {total}"
        )
    if numbers[0] < deep:
        raise ConfigError(
            f"stage 0 has {numbers[0]} decoder layers, but features of the vision tower go into the first "
            f"{deep} ('deepstack_visual_indexes'): give stage 0 at least {deep}"
        )
    edges = pairwise([0, *accumulate(numbers)])
    own = _untied(model) if tied else {}
    return [VlmStage(model, index, n_stages, range(*edge), **own) for index, edge in enumerate(edges)]


def _untied(model: Any) -> dict[str, Any]:
    """A head with a copy of the embedding's weights, and a configuration that says so."""
    head = _shell(model.lm_head, {})
    weight = model.lm_head.weight
    head._parameters["weight"] = torch.nn.Parameter(weight.detach().clone(), weight.requires_grad)
    config = copy.deepcopy(model.config)
    for each in (config, config.get_text_config()):
        each.tie_word_embeddings = False
    return {"head": head, "config": config}


def _dealt(total: int, n_stages: int, least: int) -> list[int]:
    """Layers of each stage, as even as it gets with at least so many on stage 0."""
    if n_stages < 1:
        raise ConfigError(f"{n_stages=}: expected at least 1")
    first = max(-(-total // n_stages), least)
    if n_stages == 1 or first == -(-total // n_stages):
        return [len(part) for part in torch.tensor_split(torch.arange(total), n_stages)]
    return [first, *(len(part) for part in torch.tensor_split(torch.arange(total - first), n_stages - 1))]
