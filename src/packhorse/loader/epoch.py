"""The epoch that a loader hands out: its packs, who gets them when, and how much of it is done."""

from __future__ import annotations

from dataclasses import dataclass, field

from packhorse.loader.account import Guard
from packhorse.loader.build import Ticket
from packhorse.loader.deal import Dealt, Packs
from packhorse.loader.progress import Tally


@dataclass
class Epoch:
    """The epoch that is being handed out.

    Attributes:
        packs: of its plan.
        dealt: who gets them when.
        guard: stops it when too much fails.
        first: the micro-step at which this process began with it.
        before: what was delivered and lost before ``first``, over all ranks; None if unknown.
        tallies: what this rank was given since ``first``, up to each micro-step.
        over: whether all of it was handed out.
    """

    packs: Packs
    dealt: Dealt
    guard: Guard
    first: int
    before: Tally | None
    tallies: list[Tally] = field(default_factory=lambda: [Tally()])
    over: bool = False


def ticket_of(dealt: Dealt, epoch: int, rank: int, kinds: int | None, step: int) -> Ticket:
    """What a rank is to build in a step; ``kinds`` of None are those that any rank has in it."""
    packs = tuple(map(tuple, dealt.samples(step, rank)))
    return Ticket(epoch, step, packs, dealt.kinds(step) if kinds is None else kinds)
