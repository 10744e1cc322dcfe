"""The viewer's pages: each method takes the query of an address and returns the values of its template.

``export_*`` yield the lines of a list, of all its pages, for a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any
from urllib.parse import urlencode

import numpy as np
import numpy.typing as npt

from packhorse.errors import ConfigError, data_errors
from packhorse.plan.pack_plan import PackPlan
from packhorse.plan.schedule import BatchLayout
from packhorse.tools.view import plots
from packhorse.tools.view.media_preview import EncodedMedia, MediaPreviews, join_tiles
from packhorse.tools.view.plan_report import bad_rows_warning, compared_methods
from packhorse.tools.view.plan_viewer import OUTCOMES, EpochSchedule, PlanViewer, find_key, find_text
from packhorse.tools.view.row_encoder import MediaItem, RowView
from packhorse.types import MEDIA_KINDS, Flags, Integers, MediaMask

Values = dict[str, Any]

SORTS = ("number", "fill", "documents", "cost")
PAGE_SIZE = 50
STEP_LINES = 48  # on a page of the list of steps, if a step has fewer ranks
_MAX_LAYOUT = 100_000  # world size x batch size x accumulation steps
_MAX_THUMBNAIL_ROWS = 12  # that are searched for images
_VISUAL = MediaMask.of(("image", "video"))
_EXPORT_BLOCK = 500  # rows located at a time
_MAX_TOKENS = 4096  # in the token table
_MAX_RAW = 20_000  # characters
_MAX_NUMBER = 1e15

ROW_COLUMNS = ("key", "dataset", "outcome", "reason", "detail", "location", "pack")
PACK_COLUMNS = ("pack", "tokens", "fill", "documents", "cost", "media", "datasets", "reasons", "keys")
STEP_COLUMNS = (
    *("epoch", "step", "straggler_ratio", "rank", "rank_cost", "pack", "is_part", "tokens", "documents"),
    *("media", "keys"),
)


class PageNotFound(LookupError):
    """There is no such page."""


@dataclass(frozen=True, slots=True)
class PackQuery:
    """Filters and order of the list of packs."""

    sort: str = "number"  # one of SORTS
    down: bool = False
    dataset: str = ""
    media: str = ""  # a media kind, or "none" for packs with text only
    least: float = 0.0  # fill in percent
    most: float = 100.0
    reason: str = ""  # of a row that is changed or not trained, or "any"
    page: int = 1

    @classmethod
    def parse(cls, params: Mapping[str, str]) -> PackQuery:
        """Parse query parameters; invalid values are ignored."""
        sort = params["sort"] if params.get("sort") in SORTS else "number"
        texts = {name: params.get(name, "") for name in ("dataset", "media", "reason")}
        least, most = parse_number(params.get("least"), 0.0), parse_number(params.get("most"), 100.0)
        return cls(sort, params.get("down") == "1", least=least, most=most, page=parse_page(params), **texts)

    def address(self, **changes: Any) -> str:
        """Return the query string with some values changed, without default values."""
        default = asdict(PackQuery())
        values = {name: value for name, value in (asdict(self) | changes).items() if value != default[name]}
        whole = {name: int(v) for name, v in values.items() if not isinstance(v, str) and v == int(v)}
        return urlencode(values | whole)


@dataclass(frozen=True, slots=True)
class StepQuery:
    """The layout and epoch of a schedule, and which of its steps are listed."""

    world_size: int
    batch_size: int
    gradient_accumulation_steps: int
    epoch: int
    rank: int | None = None  # only this rank
    page: int = 1

    @classmethod
    def parse(cls, params: Mapping[str, str], viewer: PlanViewer) -> StepQuery:
        """Parse query parameters; invalid values are ignored.

        Raises:
            ConfigError: the layout is too large to be scheduled here.
        """

        def number(name: str, default: int, least: int = 1) -> int:
            return max(least, int(parse_number(params.get(name), default)))

        layout = BatchLayout(
            number("world_size", min(8, max(1, len(viewer.plan)))),
            number("batch_size", 1),
            number("gradient_accumulation_steps", 1),
        )
        if np.prod(layout, dtype=float) > _MAX_LAYOUT:
            raise ConfigError(
                f"{layout.world_size:,} ranks x {layout.batch_size:,} packs x "
                f"{layout.gradient_accumulation_steps:,} accumulation steps: expected at most "
                f"{_MAX_LAYOUT:,} packs in an optimizer step"
            )
        rank = int(parse_number(params.get("rank"), -1))
        only = rank if 0 <= rank < layout.world_size else None
        return cls(*layout, number("epoch", viewer.report["epoch"], 0), only, parse_page(params))

    @property
    def layout(self) -> BatchLayout:
        """The batch layout of the loader."""
        return BatchLayout(self.world_size, self.batch_size, self.gradient_accumulation_steps)

    @property
    def ranks(self) -> range:
        """The ranks that are listed."""
        return range(self.world_size) if self.rank is None else range(self.rank, self.rank + 1)

    def address(self, **changes: Any) -> str:
        """Return the query string with some values changed."""
        values = asdict(self) | {"page": 1} | changes
        return urlencode({name: value for name, value in values.items() if value is not None})


class PackList:
    """The packs of a plan, sorted and filtered; takes a tenth of a second for a million packs."""

    def __init__(self, viewer: PlanViewer, plan: PackPlan) -> None:
        self.viewer, self.plan = viewer, plan
        costs = np.ones(len(self.plan)) if self.plan.costs is None else self.plan.costs
        self.costs = costs / (float(costs.mean()) if len(costs) else 1.0)
        self._with_dataset = lru_cache(maxsize=16)(self._filter_dataset)
        self._order = lru_cache(maxsize=8)(self._sort)

    def find(self, query: PackQuery) -> Integers:
        """Return the numbers of the packs that match a query, of all pages."""
        numbers = self._order(query.sort, query.down)
        keep = self._filter(query)
        return numbers if keep is None else numbers[keep[numbers]]

    def line(self, number: int) -> Values:
        """Return the line of a pack."""
        rows, tokens = self.plan[number], int(self.plan.tokens[number])
        mask = 0 if self.plan.media_masks is None else int(self.plan.media_masks[number])
        listed = rows[self.viewer.outcomes[rows] > 0].tolist()
        kinds = MediaMask(mask).kinds
        return {
            "number": number,
            "tokens": tokens,
            "fill": tokens / self.plan.capacity,
            "documents": len(rows),
            "cost": float(self.costs[number]),
            "kinds": kinds,
            "thumbnails": _thumbnail_address(rows) if {"image", "video"} & set(kinds) else "",
            "datasets": [self.viewer.names[n] for n in np.unique(self.viewer.dataset_ids(rows)).tolist()],
            "reasons": sorted({self.viewer.reason(row) for row in listed}),
        }

    def _sort(self, sort: str, down: bool) -> Integers:
        plan = self.plan
        columns = {"fill": plan.tokens, "documents": np.diff(plan.offsets), "cost": self.costs}
        values = np.asarray(columns.get(sort, np.arange(len(plan))))
        return np.argsort(-values if down else values, kind="stable")

    def _filter(self, query: PackQuery) -> Flags | None:
        """Return which packs match a query; None for all."""
        tests: list[Flags] = []
        if query.least > 0 or query.most < 100:
            fill = 100 * self.plan.tokens / self.plan.capacity
            tests.append((fill >= query.least) & (fill <= query.most))
        if query.dataset:
            tests.append(self._with_dataset(query.dataset))
        masks = self.plan.media_masks
        if query.media and masks is not None:
            mask = int(MediaMask.of(kind for kind in MEDIA_KINDS if kind == query.media))
            tests.append(masks & mask > 0 if mask else masks == 0)
        if query.reason:
            tests.append(self._filter_reason(query.reason))
        return np.logical_and.reduce(tests) if tests else None

    def _filter_dataset(self, name: str) -> Flags:
        if name not in self.viewer.names or not len(self.plan):
            return np.zeros(len(self.plan), bool)
        inside = self.viewer.dataset_ids(self.plan.indices) == self.viewer.names.index(name)
        return np.asarray(np.logical_or.reduceat(inside, self.plan.offsets[:-1]), bool)

    def _filter_reason(self, reason: str) -> Flags:
        """Return which packs have a row that is changed or not trained, for this reason or for any."""
        viewer, matches = self.viewer, np.zeros(len(self.plan), bool)
        rows = viewer.rows(reason=reason) if reason != "any" else np.flatnonzero(viewer.outcomes)
        packs = viewer.pack_of[rows[viewer.outcomes[rows] > 0]]
        matches[packs[packs >= 0]] = True
        return matches


def _thumbnail_address(rows: npt.NDArray[np.integer[Any]]) -> str:
    numbers = ",".join(map(str, rows[:_MAX_THUMBNAIL_ROWS].tolist()))
    return f"/thumbnails?rows={numbers}" if numbers else ""


class Pages:
    """The values of each page."""

    def __init__(self, viewer: PlanViewer) -> None:
        self.viewer = viewer
        self.packs = PackList(viewer, viewer.plan)
        self._view = lru_cache(maxsize=64)(self._view_row)
        self._packs_of_epoch = lru_cache(maxsize=2)(self._list_packs_of_epoch)

    @cached_property
    def previews(self) -> MediaPreviews:
        """The media of the rows."""
        return MediaPreviews(self.viewer.encoder)

    # One method for each page.

    def overview(self) -> Values:
        """Numbers and plots of the whole plan."""
        report, reasons = self.viewer.report, self.viewer.reasons()
        used = [position for position in (2, 1, 0) if any(counts[position] for counts in reasons.values())]
        return {
            "report": report,
            "linked": True,
            "bad_rows": bad_rows_warning(report),
            "unmatched": self.viewer.unmatched_warning(),
            "reasons": reasons,
            "reason_outcomes": used,
            "outcomes": OUTCOMES,
            "totals_by_dataset": self.viewer.totals_by_dataset(),
            **plan_plots(report),
        }

    def pack_list(self, params: Mapping[str, str]) -> Values:
        """A page of the list of packs."""
        query = PackQuery.parse(params)
        numbers = self.packs.find(query)
        lines = [self.packs.line(int(number)) for number in _cut_page(numbers, query.page)]
        return {
            "query": query,
            "lines": [(line, plots.meter(line["fill"], f"{line['fill']:.1%} full")) for line in lines],
            "total": len(numbers),
            "datasets": self.viewer.names,
            "reasons": list(self.viewer.reasons()),
            **_paging(query.page, len(numbers), lambda page: "/packs?" + query.address(page=page)),
        }

    def export_packs(self, params: Mapping[str, str]) -> Iterator[Values]:
        """Yield the packs of a filtered list, of all pages."""
        packs = self.packs
        for number in packs.find(PackQuery.parse(params)).tolist():
            line, keys = packs.line(number), [self.viewer.key(row) for row in packs.plan[number].tolist()]
            yield {**line, "pack": number, "media": list(line["kinds"]), "keys": keys}

    def _list_packs_of_epoch(self, epoch: int) -> PackList:
        if epoch == self.viewer.report["epoch"]:
            return self.packs
        packs = self.viewer.packs(epoch)
        return PackList(self.viewer, packs.plan.with_costs(packs.costs, packs.media_masks))

    def pack(self, params: Mapping[str, str], number: int) -> Values:
        """One pack of an epoch, document by document."""
        planned = self.viewer.report["epoch"]
        epoch = max(0, int(parse_number(params.get("epoch"), planned)))
        packs = self._packs_of_epoch(epoch)
        if not 0 <= number < len(packs.plan):
            raise PageNotFound(f"There is no pack {number}: there are {len(packs.plan):,}, from 0.")
        line = packs.line(number)
        rows = packs.plan[number].tolist()
        documents = [self._document(index, place) for place, index in enumerate(rows, 1)]
        views: list[RowView] = [document["row"] for document in documents]
        size = self.viewer.report["pack_size"]
        lengths = [view.padded_length for view in views]
        starts = np.cumsum([0, *lengths]).tolist()
        bidirectional = []
        for document, view, start in zip(documents, views, starts, strict=False):
            document["start"] = start
            bidirectional += [(start + first, start + end) for first, end in view.bidirectional]
        strip = [
            (length, document["key"], int(self.viewer.dataset_ids(row)), f"#d{document['number']}")
            for length, document, row in zip(lengths, documents, rows, strict=True)
        ]
        return {
            "line": line,
            "epoch": epoch,
            "other_epoch": f"?epoch={epoch}" if epoch != planned else "",
            "packs": len(packs.plan),
            "documents": documents,
            "tokens": sum(view.length for view in views),
            "planned": line["tokens"],
            "supervised": sum(view.supervised for view in views),
            "media": sum(len(view.media) for view in views),
            "size": size,
            "strip_colours": [(self.viewer.names.index(name), name) for name in line["datasets"]],
            "placeholders": self._placeholders(packs.plan, number, starts[-1], len(rows)),
            "strip": plots.strip(strip, size, f"{len(rows)} documents in {size:,} tokens"),
            "mask": plots.mask(lengths, bidirectional, size, "Attention mask: a document sees only itself"),
            "encoder": self.viewer.encoder,
        }

    def row(self, index: int) -> Values:
        """One row: as in its file, as the model sees it, and its drops."""
        if not 0 <= index < len(self.viewer):
            raise PageNotFound(f"There is no row {index}: there are {len(self.viewer):,}, from 0.")
        document = self._document(index, 1)
        raw = self.viewer.raw(index)
        return {
            "document": document,
            "index": index,
            "pack": int(self.viewer.pack_of[index]),
            "rows": len(self.viewer),
            "location": self.viewer.dataset.location(index),
            "raw": raw[:_MAX_RAW],
            "raw_cut": len(raw) - _MAX_RAW,
            "tokens": document["row"].tokens[:_MAX_TOKENS],
            "encoder": self.viewer.encoder,
        }

    def row_list(self, params: Mapping[str, str]) -> Values:
        """A page of the list of rows, with their outcomes and reasons."""
        viewer, page = self.viewer, parse_page(params)
        query = _row_filters(params)
        rows = viewer.rows(**query)
        shown = _cut_page(rows, page).tolist()
        address = urlencode({name: value for name, value in query.items() if value})
        return {
            "lines": [self._row_line(row, viewer.dataset.location(row)) for row in shown],
            "total": len(rows),
            **query,
            "query": address,
            "outcomes": OUTCOMES,
            "datasets": viewer.names,
            "reasons": {reason: sum(counts) for reason, counts in viewer.reasons().items()},
            "unmatched": viewer.unmatched[:PAGE_SIZE],
            "unmatched_more": max(0, len(viewer.unmatched) - PAGE_SIZE),
            **_paging(page, len(rows), lambda n: "/rows?" + urlencode({**query, "page": n})),
        }

    def export_rows(self, params: Mapping[str, str]) -> Iterator[Values]:
        """Yield the rows of a filtered list, of all pages."""
        rows = self.viewer.rows(**_row_filters(params))
        for first in range(0, len(rows), _EXPORT_BLOCK):
            indices = rows[first : first + _EXPORT_BLOCK].tolist()
            for index, location in zip(indices, self.viewer.dataset.locations(indices), strict=True):
                line = self._row_line(index, location)
                detail = line["drops"][0].detail if line["drops"] else ""
                yield {**line, "detail": detail, "pack": line["pack"] if line["pack"] >= 0 else None}

    def _row_line(self, index: int, location: str) -> Values:
        viewer, drops = self.viewer, self.viewer.drops(index)
        return {
            "index": index,
            "key": viewer.key(index),
            "dataset": viewer.dataset_name(index),
            "outcome": viewer.outcome(index),
            "reason": drops[0].reason if drops else "",
            "drops": drops,
            "location": location,
            "pack": int(viewer.pack_of[index]),
        }

    def step_list(self, params: Mapping[str, str]) -> Values:
        """A page of the steps of an epoch: which packs each rank trains, in training order."""
        viewer, query = self.viewer, StepQuery.parse(params, self.viewer)
        schedule = viewer.schedule(query.layout, query.epoch)
        steps, ranks = schedule.steps, query.ranks
        # Lines of a page: whole steps, if they are not too long.
        size = max(1, STEP_LINES // len(ranks)) * min(len(ranks), STEP_LINES)
        total = len(steps) * len(ranks)
        page = query.page
        if (step := int(parse_number(params.get("step"), -1))) >= 0:
            page = min(step, max(0, len(steps) - 1)) * len(ranks) // size + 1
        first = (page - 1) * size
        lines = [divmod(position, len(ranks)) for position in range(first, min(total, first + size))]
        return {
            "query": query,
            "accumulation": query.gradient_accumulation_steps,
            "schedule": schedule,
            "packs": len(steps.units.plan),
            "pack_size": viewer.report["pack_size"],
            "steps": [
                self._step(schedule, query, step, [ranks[position] for _, position in group])
                for step, group in groupby(lines, key=lambda line: line[0])
            ],
            "datasets": list(enumerate(viewer.names)),
            **_paging(page, total, lambda n: "/steps?" + query.address(page=n), size),
        }

    def _step(self, schedule: EpochSchedule, query: StepQuery, step: int, ranks: list[int]) -> Values:
        costs = schedule.steps.costs(step) / schedule.mean_cost
        top, mean = float(costs.max()), float(costs.mean())
        planned = self.viewer.report["epoch"]
        return {
            "number": step,
            "straggler_ratio": top / mean if mean else 1.0,
            "cost": top,
            "kinds": schedule.steps.media_mask(step).kinds,
            "ranks": [
                {
                    "rank": rank,
                    "cost": float(costs[rank]),
                    "meter": plots.meter(costs[rank] / top if top else 0.0, f"{costs[rank]:.2f}"),
                    "packs": [
                        self._unit(schedule, unit, f"?epoch={query.epoch}" if query.epoch != planned else "")
                        for unit in schedule.steps.table[step, rank].tolist()
                        if unit >= 0
                    ],
                }
                for rank in ranks
            ],
        }

    def _unit(self, schedule: EpochSchedule, unit: int, epoch: str = "") -> Values:
        """Return a pack of a step, or the part of one that was split to fill the last step."""
        viewer, units = self.viewer, schedule.steps.units
        rows, number = units.samples(unit), units.pack(unit)
        lengths, size = viewer.planner.lengths[rows].tolist(), viewer.report["pack_size"]
        keys = [viewer.key(row) for row in rows.tolist()]
        documents = [
            (length, key, int(viewer.dataset_ids(row)), f"/row/{row}")
            for length, key, row in zip(lengths, keys, rows.tolist(), strict=True)
        ]
        visual = rows[viewer.planner.sample_info.media_masks[rows] & int(_VISUAL) > 0]
        return {
            "number": number,
            "address": f"/pack/{number}{epoch}",
            "is_part": unit != number,
            "tokens": sum(lengths),
            "keys": keys,
            "kinds": MediaMask(int(units.media_masks[unit])).kinds,
            "strip": plots.strip(documents, size, f"{len(keys)} documents in {size:,} tokens"),
            "thumbnails": _thumbnail_address(visual),
        }

    def export_steps(self, params: Mapping[str, str]) -> Iterator[Values]:
        """Yield the packs of all steps, in training order."""
        query = StepQuery.parse(params, self.viewer)
        schedule = self.viewer.schedule(query.layout, query.epoch)
        for number in range(len(schedule.steps)):
            step = self._step(schedule, query, number, list(query.ranks))
            for line in step["ranks"]:
                for pack in line["packs"]:
                    yield {
                        "epoch": query.epoch,
                        "step": number,
                        "straggler_ratio": step["straggler_ratio"],
                        "rank": line["rank"],
                        "rank_cost": line["cost"],
                        **pack,
                        "pack": pack["number"],
                        "documents": len(pack["keys"]),
                        "media": list(pack["kinds"]),
                    }

    def thumbnails(self, params: Mapping[str, str]) -> EncodedMedia:
        """Return the first images of some rows as one small image; an empty one if they cannot be read."""
        numbers = params.get("rows", "").split(",")[:_MAX_THUMBNAIL_ROWS]
        rows = tuple(int(number) for number in numbers if number.isdecimal() and len(number) <= 18)
        try:
            return self.previews.thumbnails(tuple(row for row in rows if row < len(self.viewer)))
        except (ConfigError, OSError):  # the processor is missing, which the page of a pack says
            return join_tiles(())

    def search(self, params: Mapping[str, str]) -> Values:
        """Rows by key and by text."""
        viewer, query = self.viewer, params.get("q", "").strip()
        first = max(0, int(parse_number(params.get("from"), 0)))
        found = find_key(viewer, query) if query else []
        keys = [(index, viewer.key(index), viewer.outcome(index)) for index in found]
        text = find_text(viewer, query, min(first, len(viewer))) if query else None
        return {"q": query, "keys": keys, "text": text, "first": first, "pack_of": viewer.pack_of}

    # Parts of pages.

    def _placeholders(self, plan: PackPlan, pack: int, start: int, documents: int) -> list[Values]:
        """Return the placeholders that a pack may get: one of each media kind that only other packs have."""
        reserved = plan.capacity < self.viewer.report["pack_size"] and self.viewer.report["reserve"]
        if not reserved or plan.media_masks is None:
            return []
        missing = MediaMask(int(np.bitwise_or.reduce(plan.media_masks)) & ~int(plan.media_masks[pack]))
        return [
            {"number": number, "kind": kind, "row": row, "start": start, "media_item_of_run": {}}
            for number, (kind, row) in enumerate(self.viewer.encoder.placeholders(missing), documents + 1)
        ]

    def _document(self, index: int, number: int) -> Values:
        row = self._view(index)
        media_runs = [place for place, run in enumerate(row.runs) if run.media_item]
        linked = len(media_runs) == len(row.media)
        return {
            "number": number,
            "key": self.viewer.key(index),
            "row": row,
            "drops": self.viewer.drops(index),
            "outcome": self.viewer.outcome(index),
            "start": 0,
            "media": [self._media_item(row, media_item) for media_item in row.media],
            "media_item_of_run": dict(zip(media_runs, row.media, strict=True)) if linked else {},
        }

    def _view_row(self, index: int) -> RowView:
        row = self.viewer.encoder.view(index)
        drops = list(row.drops)
        if row.error is not None and self.viewer.outcome(index) != "not trained":
            key, dataset = self.viewer.key(index), self.viewer.dataset_name(index)
            drops.append(row.error.as_drop(key=key, dataset=dataset))
        self.viewer.mark(index, drops)
        return row

    def _media_item(self, row: RowView, media_item: MediaItem) -> Values:
        """Return a media item for display; the error of a broken one is shown with the row."""
        values: Values = {"media_item": media_item, "frames": (), "is_broken": False}
        with data_errors() as outcome:
            if media_item.kind == "video":
                values["frames"] = self.previews.frames(row.index, media_item.number)
            elif row.error is not None:  # perhaps caused by this item; otherwise it was decoded before
                self.previews.get(row.index, media_item.number)
        return values | {"is_broken": outcome.error is not None}


def _cut_page(numbers: Integers, page: int) -> Integers:
    return numbers[(page - 1) * PAGE_SIZE : page * PAGE_SIZE]


def _row_filters(params: Mapping[str, str]) -> dict[str, str]:
    return {name: params.get(name, "") for name in ("outcome", "reason", "dataset")}


def _paging(page: int, total: int, address: Callable[[int], str], size: int = PAGE_SIZE) -> Values:
    last = max(1, -(-total // size))
    return {
        "page": page,
        "pages": last,
        "previous_page": address(page - 1) if page > 1 else None,
        "next_page": address(page + 1) if page < last else None,
    }


def parse_number(text: str | None, default: float) -> float:
    """Return a number of an address, or the default if it is none or too large."""
    try:
        value = float(text) if text else default
    except ValueError:
        return default
    return value if abs(value) < _MAX_NUMBER else default


def parse_page(params: Mapping[str, str]) -> int:
    """Return the page number of an address, from 1."""
    return max(1, int(parse_number(params.get("page"), 1)))


def plan_plots(report: Mapping[str, Any]) -> Values:
    """Return the plots of a plan that ``plan_cards.html`` shows."""
    fill, length = report["histograms"]["fill"], report["histograms"]["length"]
    first = next((place for place, count in enumerate(length["counts"]) if count), 0)
    edges = length["edges"][first:]
    # With more ranks than packs some ranks wait, however packs are scheduled.
    basis = f", predicted from {report['cost_basis']}" if "cost_basis" in report else ""  # of older plans
    stragglers = [point for point in report["straggler"] if point["ranks"] <= max(1, report["packs"])]
    return {
        "fill_plot": plots.bars(
            fill["counts"],
            [f"{100 * edge:.0f}%" for edge in fill["edges"]],
            f"Histogram of the fill of {report['packs']:,} packs",
            every=5,
        ),
        "length_plot": plots.bars(
            length["counts"][first:],
            [plots.short(edge) for edge in edges],
            "Histogram of the tokens of a row",
            every=max(1, len(edges) // 7),
        ),
        "mix_plot": plots.mix(report["datasets"], "Tokens of each dataset by kind"),
        "straggler_plot": plots.line(stragglers, f"Straggler ratio by number of ranks{basis}"),
        "methods": compared_methods(report),
        "kinds": [kind for kind in plots.KINDS if any(dataset[kind] for dataset in report["datasets"])],
    }
