"""A plan file that says what it was made from, so that a viewer needs nothing else.

Beside the plan's own key it holds, as JSON: the meta file, the processor and the settings (``made_from``),
the report (``report``), and why rows that could not be counted are in no pack (``bad``, some 150 bytes a
row). It stays a plan file like any other: ``PackPlan.load`` opens it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packhorse.errors import ConfigError
from packhorse.loader.config import LoaderConfig
from packhorse.loader.planner import PlanSettings, over_limit_detail, too_long_detail
from packhorse.media.source import is_address
from packhorse.plan.pack_plan import PackPlan
from packhorse.plan.plan_file import load_key
from packhorse.tools.view.plan_request import Planned, Request

_LONGEST_DETAIL = 500
# What a plan and its packs depend on; where batches are built and how ledgers are kept is the run's affair.
_SETTINGS = (
    "dataset_names",
    "pack_size",
    "seed",
    "alignment",
    "on_overlong",
    "max_patches",
    "max_media",
    "max_documents",
    "placeholder",
    "spread_datasets",
    "effort",
)


@dataclass(frozen=True)
class PlanBook:
    """What a plan file holds.

    Attributes:
        plan: the plan, with costs and kinds of media.
        request: what it was made from.
        report: see :func:`packhorse.tools.view.plan_report.plan_report`.
        bad: of rows that could not be counted, by their position: the reason and what was found.
        details: of the plan's own reasons: the words of the ledger.
        too_long: of rows that are longer than a pack, by their position: their tokens after the shift.
    """

    plan: PackPlan
    request: Request
    report: Mapping[str, Any]
    bad: Mapping[int, tuple[str, str]]
    details: Mapping[str, str]
    too_long: Mapping[int, int] = field(default_factory=dict)

    def detail(self, index: int, reason: str) -> str:
        """What the ledger says of a row that the plan leaves out for this reason."""
        length = self.too_long.get(index)
        if length is None:
            return self.details.get(reason, "")
        report, alignment = self.report, self.request.config.alignment
        settings = PlanSettings(size=report["pack_size"], reserve=report["reserve"], alignment=alignment)
        return too_long_detail(length, settings)


def book_of(planned: Planned, report: Mapping[str, Any]) -> PlanBook:
    """The same without a file."""
    counts, packs = planned.counts, planned.packs
    bad = {
        index: (str(counts.status[index]), str(counts.detail[index])[:_LONGEST_DETAIL])
        for index in (~counts.ok).nonzero()[0].tolist()
    }
    details = {"over_limit": over_limit_detail(planned.planner)}
    plan = packs.plan.with_costs(packs.costs, packs.kinds)
    longer = packs.plan.dropped_by_reason().get("too_long", ())
    too_long = {int(index): int(planned.planner.lengths[index]) for index in longer}
    return PlanBook(plan, planned.opened.request, report, bad, details, too_long)


def save_book(planned: Planned, report: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a plan with all that a viewer needs; the file appears when it is whole."""
    made, request = book_of(planned, report), planned.opened.request
    home = Path(path).absolute().parent
    settings = {name: getattr(request.config, name) for name in _SETTINGS}
    made_from = {
        "meta": _place(str(request.config.data), home),
        "processor": _place(request.processor_name, home),
        "model": None if request.model is None else _place(request.model, home),
        "epoch": request.epoch,
        "settings": settings | {"dataset_names": _plain(settings["dataset_names"])},
    }
    key = {
        **planned.planner.key,
        "epoch": request.epoch,
        "made_from": made_from,
        "report": report,
        "bad": [[index, reason, detail] for index, (reason, detail) in made.bad.items()],
        "details": made.details,
        "too_long": list(made.too_long.items()),
    }
    made.plan.save(path, key)


def open_book(
    path: str | os.PathLike[str], processor: str | None = None, trust_remote_code: bool = False
) -> PlanBook:
    """Open a plan file.

    Args:
        path: as :func:`save_book` wrote it.
        processor: where the processor is now, if it is not where it was.
        trust_remote_code: run code that comes with it.

    Raises:
        ConfigError: it is no plan, or one that does not say what it was made from.
    """
    plan, key = PackPlan.load(path), load_key(path)
    source = key.get("made_from")
    if source is None or key.get("report") is None:
        raise ConfigError(
            f"{os.fspath(path)} is a plan that does not say which data it is of: make one with "
            "`packhorse plan`"
        )
    home = Path(path).absolute().parent
    config = LoaderConfig(data=_found(source["meta"], home), **source["settings"])
    request = Request(
        config,
        processor or _found(source["processor"], home),
        None if source["model"] is None else _found(source["model"], home),
        source["epoch"],
        trust_remote_code,
    )
    bad = {int(index): (reason, detail) for index, reason, detail in key["bad"]}
    too_long = {int(index): int(length) for index, length in key.get("too_long", ())}
    return PlanBook(plan, request, key["report"], bad, key["details"], too_long)


def _plain(names: Any) -> list[str] | None:
    return None if names is None else [str(name) for name in names]


def _place(path: str, home: Path) -> dict[str, str]:
    """Where something is: as it was named, and from the plan's own folder, if both are moved together."""
    if is_address(path) or not os.path.exists(path):
        return {"name": path}
    whole = os.path.abspath(path)
    return {"name": whole, "beside": os.path.relpath(whole, home)}


def _found(place: Mapping[str, str], home: Path) -> str:
    if os.path.exists(place["name"]) or "beside" not in place:
        return place["name"]
    beside = os.path.normpath(home / place["beside"])
    return beside if os.path.exists(beside) else place["name"]
