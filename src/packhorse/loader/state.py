"""How far a run has come: small enough for every checkpoint, and the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from packhorse.count.contents import Content
from packhorse.errors import ConfigError
from packhorse.plan.schedule import BatchLayout, ResumeSegment

VERSION = 2
# What a plan is made from, in words.
_TOLD = {
    "counts": "the tokens of the samples (other data, processor or template; or rows that were bad when that "
    "run began were recounted and are good now. Then put the count files of that run back (those named "
    "*.phcount.before*, if there are any) and resume with PACKHORSE_KEEP_COUNTS=1 in the environment)",
    "samples": "the number of samples",
    "capacity": "the tokens that a pack has room for",
    "rows": "the rows of the dataset",
    "media": "the media of the samples",
    "weights": "what tokens and patches cost (the model's sizes)",
    "planner": "the version of the planner",
    "order": "the version of the schedule",
    "spread": "spread_datasets",
}
_SHOWN = (int, float, str, type(None))


class Tally(NamedTuple):
    """Samples that were delivered, and samples that failed on the way; both are counted batch by batch."""

    delivered: int = 0
    lost: int = 0

    def plus(self, other: Tally) -> Tally:
        """Both together."""
        return Tally(self.delivered + other.delivered, self.lost + other.lost)


def _read_tally(delivered: Any, lost: Any) -> Tally:
    return Tally(int(delivered), int(lost))


@dataclass(frozen=True, slots=True)
class LoaderState:
    """Where a run stands.

    Attributes:
        epoch: which one.
        segments: the layouts under which packs of this epoch were scheduled, and how many micro-steps
            of each were used. A run that keeps its layout has one.
        used: samples delivered and lost in these steps, over all ranks; None if unknown.
    """

    epoch: int = 0
    segments: tuple[ResumeSegment, ...] = field(default=())
    used: Tally | None = field(default_factory=Tally)

    @property
    def cursor(self) -> int:
        """Micro-steps used under the present layout."""
        return self.segments[-1].steps if self.segments else 0

    def under(self, layout: BatchLayout) -> LoaderState:
        """The same progress, to go on under a layout; a layout that was not used leaves no trace."""
        kept = self.segments
        while kept and kept[-1].layout != layout and not kept[-1].steps:
            kept = kept[:-1]
        if not kept or kept[-1].layout != layout:
            kept = (*kept, ResumeSegment(*layout, 0))
        return replace(self, segments=kept)

    def at(self, steps: int) -> LoaderState:
        """With so many micro-steps used under the present layout."""
        last = self.segments[-1]._replace(steps=steps)
        return replace(self, segments=(*self.segments[:-1], last))

    def branch(self, segment: int) -> str:
        """Names the steps of a segment: the same only after the same steps under the same layouts."""
        # Step files hold this digest: the text that is hashed belongs to their format.
        before = [
            f"Segment(world={one[0]}, batch={one[1]}, accumulation={one[2]}, steps={one[3]})"
            for one in self.segments[:segment]
        ]
        world_size, batch_size, accumulation = self.segments[segment].layout
        layout = f"Shape(world={world_size}, batch={batch_size}, accumulation={accumulation})"
        text = f"({', '.join([str(self.epoch), *before, layout])})"
        return blake2b(text.encode(), digest_size=6).hexdigest()

    def to_dict(self, plan: str, made_from: Mapping[str, Any], contents: Sequence[Content]) -> dict[str, Any]:
        """As it is saved, with the name and key of its plan, and the content of the data."""
        return {
            "version": VERSION,
            "plan": plan,
            "made_from": dict(made_from),
            "data": [[one.name, one.digest] for one in contents],
            "epoch": self.epoch,
            "segments": [list(segment) for segment in self.segments],
            "used": None if self.used is None else list(self.used),
        }

    @classmethod
    def from_dict(
        cls, state: Mapping[str, Any], plan: str, made_from: Mapping[str, Any], contents: Sequence[Content]
    ) -> LoaderState:
        """What :meth:`to_dict` made.

        Raises:
            ConfigError: it belongs to other data or to another plan, or is no such state.
        """
        if not isinstance(state, Mapping) or "version" not in state:
            found = (
                f"a dict with {sorted(map(str, state))}" if isinstance(state, Mapping) else repr(state)[:80]
            )
            raise ConfigError(
                f"not the state of a loader: found {found}. Pass what loader.state_dict() returned, say "
                'checkpoint["loader"]'
            )
        try:
            version, found = state["version"], state["plan"]
            epoch = int(state["epoch"])
            segments = tuple(
                ResumeSegment(*(int(number) for number in segment)) for segment in state["segments"]
            )
            if version == VERSION:
                data = [(str(name), str(digest)) for name, digest in state["data"]]
                used = None if state["used"] is None else _read_tally(*state["used"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not the state of a loader ({type(error).__name__}: {error})") from error
        if version != VERSION:
            raise ConfigError(
                f"loader state of version {version}, expected {VERSION}: "
                "it does not name the content of the data, so a change of the data would not be noticed. "
                "Finish that epoch with the version of packhorse that saved the state, or begin the epoch "
                f"again with loader.set_epoch({epoch})"
            )
        _check_data(data, contents)
        if found != plan:
            raise ConfigError(
                f"the state belongs to plan {found}, this loader has plan {plan}"
                f"{_differences(state.get('made_from'), made_from)}: data, counts, processor, "
                "pack_size, seed, model sizes and the other planning settings have to be those of the run "
                "that saved it (world size, batch size, accumulation and workers may differ)"
            )
        if not segments:
            raise ConfigError("not the state of a loader (no segments)")
        numbers = (epoch, *(number for segment in segments for number in segment), *(used or ()))
        if min(numbers) < 0:
            raise ConfigError(f"a loader state with negative numbers: epoch {epoch}, {segments}, {used}")
        return cls(epoch, segments, used)


def _check_data(saved: Sequence[tuple[str, str]], contents: Sequence[Content]) -> None:
    """Raise if the rows are not those of the run that saved a state; names every dataset that changed."""
    names, present = [name for name, _ in saved], [one.name for one in contents]
    if len(saved) != len(contents):
        raise ConfigError(
            f"the state is of the datasets {', '.join(names)}, this loader has {', '.join(present)}. "
            "Resume with the datasets of the run that saved the state"
        )
    changed = [
        f"{one}: digest {digest} when the state was saved, {one.digest} now"
        for (_, digest), one in zip(saved, contents, strict=True)
        if digest != one.digest
    ]
    if changed:
        more = f"; and {len(changed) - 5} more" if len(changed) > 5 else ""
        raise ConfigError(
            f"the data have changed since the state was saved. {'; '.join(changed[:5])}{more}. Restore them, "
            "or begin a new run: after a change some rows would be delivered twice and others never"
        )


def describe_state(state: Any, *, own_rows: bool) -> str:
    """A state in a few words that differ between states.

    Args:
        state: anything that is to be loaded.
        own_rows: ranks have rows of their own, so that only the position has to be the same.
    """
    if not isinstance(state, Mapping):
        return f"a {type(state).__name__}"
    epoch, segments = state.get("epoch"), state.get("segments")
    is_buffering = [epoch, segments] if own_rows else state
    text = orjson.dumps(is_buffering, default=repr, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    try:
        steps = list(segments)[-1][-1]  # type: ignore[arg-type]  # or no state at all
    except (TypeError, LookupError):
        steps = "?"
    return f"epoch {epoch}, micro-step {steps} (digest {blake2b(text, digest_size=6).hexdigest()})"


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
