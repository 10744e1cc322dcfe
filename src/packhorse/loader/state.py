"""Resume state: a handful of integers, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from packhorse.count.contents import Content
from packhorse.errors import ConfigError, list_some
from packhorse.plan.cost_model import CostWeights
from packhorse.plan.schedule import BatchLayout, ResumeSegment

VERSION = 2
# What a plan is made from.
_DESCRIPTIONS = {
    "counts": "the tokens of the samples (other data, processor or template; or rows that were bad when that "
    "run started were recounted and are good now: restore the count files of that run, those named "
    "*.phcount.before*, and resume with PACKHORSE_KEEP_COUNTS=1 in the environment)",
    "samples": "the number of samples",
    "capacity": "the capacity of a pack",
    "rows": "the rows of the dataset",
    "media": "the media of the samples",
    "weights": "the compute cost of tokens and patches (cost_weights, the model's sizes, or another "
    "version's cost model)",
    "planner": "the version of the planner",
    "order": "the version of the schedule",
    "spread": "spread_datasets",
}
_SHOWN = (int, float, str, type(None))


class Tally(NamedTuple):
    """Samples that were delivered and samples that failed, counted batch by batch."""

    delivered: int = 0
    lost: int = 0

    def plus(self, other: Tally) -> Tally:
        """Return the sum of both."""
        return Tally(self.delivered + other.delivered, self.lost + other.lost)


@dataclass(frozen=True, slots=True)
class LoaderState:
    """How far a run has come.

    Attributes:
        epoch: the epoch.
        segments: the layouts under which packs of this epoch were scheduled, and how many micro-steps of each
            were used. A run that keeps its layout has one.
        used: samples delivered and lost in these steps, over all ranks; None if unknown.
        weights: the measured cost weights by which this epoch was scheduled; None for the planner's.
        next_weights: those of the epochs after this one, if they were measured in it.
    """

    epoch: int = 0
    segments: tuple[ResumeSegment, ...] = field(default=())
    used: Tally | None = field(default_factory=Tally)
    weights: CostWeights | None = None
    next_weights: CostWeights | None = None

    def start_of(self, epoch: int) -> LoaderState:
        """Return the state at the start of another epoch, with the last weights that were measured."""
        return LoaderState(epoch, weights=self.next_weights or self.weights)

    @property
    def cursor(self) -> int:
        """Micro-steps used under the current layout."""
        return self.segments[-1].steps if self.segments else 0

    def under(self, layout: BatchLayout) -> LoaderState:
        """Return the state to continue under a layout; a layout without used steps is removed."""
        kept = self.segments
        while kept and kept[-1].layout != layout and not kept[-1].steps:
            kept = kept[:-1]
        if not kept or kept[-1].layout != layout:
            kept = (*kept, ResumeSegment(*layout, 0))
        return replace(self, segments=kept)

    def at(self, steps: int) -> LoaderState:
        """Return the state with ``steps`` used micro-steps under the current layout."""
        last = self.segments[-1]._replace(steps=steps)
        return replace(self, segments=(*self.segments[:-1], last))

    def branch(self, segment: int) -> str:
        """Return an id of the steps of a segment, equal only after equal steps under equal layouts."""
        # Step files hold this digest: the text that is hashed belongs to their format.
        before = [
            f"Segment(world={world}, batch={batch}, accumulation={accumulation}, steps={steps})"
            for world, batch, accumulation, steps in self.segments[:segment]
        ]
        world_size, batch_size, accumulation = self.segments[segment].layout
        layout = f"Shape(world={world_size}, batch={batch_size}, accumulation={accumulation})"
        text = f"({', '.join([str(self.epoch), *before, layout])})"
        return blake2b(text.encode(), digest_size=6).hexdigest()

    def to_dict(self, plan: str, made_from: Mapping[str, Any], contents: Sequence[Content]) -> dict[str, Any]:
        """Return what is saved: the state, the name and key of its plan, and the digests of the data."""
        return {
            "version": VERSION,
            "plan": plan,
            "made_from": dict(made_from),
            "data": [[content.name, content.digest] for content in contents],
            "epoch": self.epoch,
            "segments": [list(segment) for segment in self.segments],
            "used": None if self.used is None else list(self.used),
            "weights": None if self.weights is None else self.weights.to_dict(),
            "next_weights": None if self.next_weights is None else self.next_weights.to_dict(),
        }

    @classmethod
    def from_dict(
        cls, state: Mapping[str, Any], plan: str, made_from: Mapping[str, Any], contents: Sequence[Content]
    ) -> LoaderState:
        """Read what :meth:`to_dict` returned; raise if it belongs to other data or to another plan."""
        if not isinstance(state, Mapping) or "version" not in state:
            found = (
                f"a dict with {sorted(map(str, state))}" if isinstance(state, Mapping) else repr(state)[:80]
            )
            raise ConfigError(
                f"not the state of a loader: found {found}. Pass what loader.state_dict() returned, for "
                'example checkpoint["loader"]',
                setting="state",
                value=found,
            )
        try:
            version, saved_plan, epoch = state["version"], state["plan"], int(state["epoch"])
            segments = tuple(ResumeSegment(*map(int, segment)) for segment in state["segments"])
            if version == VERSION:
                data = [(str(name), str(digest)) for name, digest in state["data"]]
                used = None if state["used"] is None else Tally._make(map(int, state["used"]))
        except (KeyError, TypeError, ValueError) as error:
            message = f"not the state of a loader ({type(error).__name__}: {error})"
            raise ConfigError(message, setting="state") from error
        if version != VERSION:
            raise ConfigError.of(
                "version",
                version,
                f"expected {VERSION}. The loader state has no digests of the data, so a change of the data "
                "would not be noticed. Finish that epoch with the packhorse version that saved the state, or "
                f"restart it with loader.set_epoch({epoch})",
            )
        _check_data(data, contents)
        if saved_plan != plan:
            raise ConfigError(
                f"the state belongs to plan {saved_plan}, this loader has plan {plan}"
                f"{_describe_differences(state.get('made_from'), made_from)}: data, counts, processor, "
                "pack_size, seed, model sizes and the other planning settings have to be those of the run "
                "that saved it (world size, batch_size, gradient_accumulation_steps, num_workers may differ)",
                setting="plan",
                value=saved_plan,
            )
        numbers = (epoch, *(number for segment in segments for number in segment), *(used or ()))
        if not segments or min(numbers) < 0:
            message = f"not the state of a loader: epoch {epoch}, segments {segments}, used {used}"
            raise ConfigError(message, setting="state", value=numbers)
        weights, next_weights = (
            None if (values := state.get(name)) is None else CostWeights.from_dict(values)
            for name in ("weights", "next_weights")
        )
        return cls(epoch, segments, used, weights, next_weights)


def _check_data(saved: Sequence[tuple[str, str]], contents: Sequence[Content]) -> None:
    """Raise if the rows are not those of the run that saved a state; name every dataset that changed."""
    if len(saved) != len(contents):
        raise ConfigError(
            f"the state has the datasets {', '.join(name for name, _ in saved)}, this loader has "
            f"{', '.join(content.name for content in contents)}. Resume with the datasets of the state",
            setting="data",
            value=[name for name, _ in saved],
        )
    changed = [
        (content, f"{content}: digest {digest} when the state was saved, {content.digest} now")
        for (_, digest), content in zip(saved, contents, strict=True)
        if digest != content.digest
    ]
    if changed:
        described = list_some((text for _, text in changed), 5, "; ")
        raise ConfigError(
            f"the data have changed since the state was saved. {described}. Restore them, or start a new "
            "run: otherwise some rows would be delivered twice and others never",
            setting="data",
            value=[content.name for content, _ in changed],
        )


def describe_state(state: Any, *, own_rows: bool) -> str:
    """Describe a state in a few words that differ between states; with ``own_rows``, its position alone."""
    if not isinstance(state, Mapping):
        return f"a {type(state).__name__}"
    epoch, segments = state.get("epoch"), state.get("segments")
    compared = [epoch, segments] if own_rows else state
    text = orjson.dumps(compared, default=repr, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    try:
        steps = list(segments)[-1][-1]  # type: ignore[arg-type]  # or no state at all
    except (TypeError, LookupError):
        steps = "?"
    return f"epoch {epoch}, micro-step {steps} (digest {blake2b(text, digest_size=6).hexdigest()})"


def _describe_differences(saved: Any, own: Mapping[str, Any]) -> str:
    """Describe what two plans are made from differently; empty if unknown."""
    if not isinstance(saved, Mapping):
        return ""
    flat = []
    for key in (saved, own):
        source = key.get("source")
        nested = source if isinstance(source, Mapping) else {}
        flat.append({str(name): value for name, value in {**key, **nested, "source": None}.items()})
    differences = []
    for name in sorted(flat[0].keys() | flat[1].keys()):
        old, new = (key.get(name) for key in flat)
        if old != new:
            digests = name in ("counts", "rows", "media")
            values = "" if digests or not isinstance(old, _SHOWN) else f" ({old} there, {new} here)"
            differences.append(_DESCRIPTIONS.get(name, name) + values)
    return f". They differ in {', '.join(differences)}" if differences else ""
