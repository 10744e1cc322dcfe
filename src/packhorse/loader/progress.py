"""How far a run has come: small enough for every checkpoint, and the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from packhorse.errors import ConfigError
from packhorse.loader.deal import Segment, Shape

VERSION = 1
# What a plan is made from, in words.
_TOLD = {
    "counts": "the tokens of the samples (other data, processor or template; or counts made anew, as with "
    "`packhorse count --retry-bad`: rows that were bad are good now. Then put the count files of that run "
    "back, or take the media that have arrived away and `packhorse count --fresh`)",
    "samples": "the number of samples",
    "capacity": "the tokens that a pack has room for",
    "rows": "the rows of the data set",
    "media": "the media of the samples",
    "weights": "what tokens and patches cost (the model's sizes)",
    "planner": "the version of the planner",
    "order": "the version of the dealing",
    "spread": "spread_datasets",
}
_SHOWN = (int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands.

    Attributes:
        epoch: which one.
        segments: the shapes under which packs of this epoch were dealt, and how many micro steps of each were
            used. A run that keeps its shape has one.
    """

    epoch: int = 0
    segments: tuple[Segment, ...] = field(default=())

    @property
    def cursor(self) -> int:
        """Micro steps used under the present shape."""
        return self.segments[-1].steps if self.segments else 0

    def under(self, shape: Shape) -> Progress:
        """The same progress, to go on under a shape; a shape that was not used leaves no trace."""
        kept = self.segments
        while kept and kept[-1].shape != shape and not kept[-1].steps:
            kept = kept[:-1]
        if not kept or kept[-1].shape != shape:
            kept = (*kept, Segment(*shape, 0))
        return replace(self, segments=kept)

    def at(self, steps: int) -> Progress:
        """With so many micro steps used under the present shape."""
        last = self.segments[-1]._replace(steps=steps)
        return replace(self, segments=(*self.segments[:-1], last))

    def to_dict(self, plan: str, made_from: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """As it is saved, with the name of the plan that it belongs to, and what that was made from."""
        return {
            "version": VERSION,
            "plan": plan,
            **({} if made_from is None else {"made_from": dict(made_from)}),
            "epoch": self.epoch,
            "segments": [list(segment) for segment in self.segments],
        }

    @classmethod
    def from_dict(
        cls, state: Mapping[str, Any], plan: str, made_from: Mapping[str, Any] | None = None
    ) -> Progress:
        """What :meth:`to_dict` made.

        Raises:
            ConfigError: it belongs to another plan, or is no such state.
        """
        try:
            version, found = state["version"], state["plan"]
            epoch = int(state["epoch"])
            segments = tuple(Segment(*(int(number) for number in segment)) for segment in state["segments"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not the state of a loader ({type(error).__name__}: {error})") from error
        if version != VERSION:
            raise ConfigError(f"a loader state of version {version}: expected {VERSION}")
        if found != plan:
            raise ConfigError(
                f"the state belongs to plan {found}, this loader has plan {plan}"
                f"{_differences(state.get('made_from'), made_from)}: data, counts, processor, "
                "pack_size, seed, model sizes and the other planning settings have to be those of the run "
                "that saved it (world size, batch size, accumulation and workers may differ)"
            )
        if epoch < 0 or any(min(segment) < 0 for segment in segments):
            raise ConfigError(f"a loader state with negative numbers: epoch {epoch}, {segments}")
        return cls(epoch, segments)


def _differences(saved: Any, own: Mapping[str, Any] | None) -> str:
    """In words, what two plans were not made from alike; nothing where nobody knows."""
    if not isinstance(saved, Mapping) or own is None:
        return ""
    flat = []
    for one in (saved, own):
        source = one.get("source")
        more = source if isinstance(source, Mapping) else {}
        flat.append({str(name): value for name, value in {**one, **more, "source": None}.items()})
    told = []
    for name in sorted(flat[0].keys() | flat[1].keys()):
        old, new = (one.get(name) for one in flat)
        if old != new:
            digests = name in ("counts", "rows", "media")
            values = "" if digests or not isinstance(old, _SHOWN) else f" ({old} there, {new} here)"
            told.append(_TOLD.get(name, name) + values)
    return f". They differ in {', '.join(told)}" if told else ""
