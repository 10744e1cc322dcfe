"""The viewer's pages: each method takes the query of an address and returns the values of its template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any
from urllib.parse import urlencode

import numpy as np

from packhorse.errors import data_errors
from packhorse.tools.view import plots
from packhorse.tools.view.media_preview import MediaPreviews, describe_error
from packhorse.tools.view.plan_report import bad_rows_warning
from packhorse.tools.view.plan_viewer import PlanViewer, find_key, find_text
from packhorse.tools.view.row_encoder import MediaItem, RowEncoder, RowView
from packhorse.types import MEDIA_KINDS, Flags, Integers, MediaMask

Values = dict[str, Any]

SORTS = ("number", "fill", "documents", "cost")
PAGE_SIZE = 50
_MAX_TOKENS = 4096  # in the token table
_MAX_RAW = 20_000  # characters
_MAX_NUMBER = 1e15


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
    error: str = ""  # reason of a marked row, or "any"
    page: int = 1

    @classmethod
    def parse(cls, params: Mapping[str, str]) -> PackQuery:
        """Parse query parameters; invalid values are ignored."""
        sort = params["sort"] if params.get("sort") in SORTS else "number"
        texts = {name: params.get(name, "") for name in ("dataset", "media", "error")}
        least, most = parse_number(params.get("least"), 0.0), parse_number(params.get("most"), 100.0)
        return cls(sort, params.get("down") == "1", least=least, most=most, page=parse_page(params), **texts)

    def address(self, **changes: Any) -> str:
        """Return the query string with some values changed, without default values."""
        default = asdict(PackQuery())
        values = {name: value for name, value in (asdict(self) | changes).items() if value != default[name]}
        whole = {name: int(v) for name, v in values.items() if not isinstance(v, str) and v == int(v)}
        return urlencode(values | whole)


class PackList:
    """The packs of a plan, sorted and filtered; takes a tenth of a second for a million packs."""

    def __init__(self, viewer: PlanViewer) -> None:
        self.viewer, self.plan = viewer, viewer.plan
        costs = np.ones(len(self.plan)) if self.plan.costs is None else self.plan.costs
        self.costs = costs / (float(costs.mean()) if len(costs) else 1.0)
        self._with_dataset = lru_cache(maxsize=16)(self._filter_dataset)
        self._order = lru_cache(maxsize=8)(self._sort)

    def find(self, query: PackQuery) -> tuple[list[Values], int]:
        """Return the lines of a page, and the number of packs on all pages."""
        numbers = self._order(query.sort, query.down)
        keep = self._filter(query)
        if keep is not None:
            numbers = numbers[keep[numbers]]
        first = (query.page - 1) * PAGE_SIZE
        return [self.line(int(number)) for number in numbers[first : first + PAGE_SIZE]], len(numbers)

    def line(self, number: int) -> Values:
        """Return the line of a pack."""
        rows, tokens = self.plan[number], int(self.plan.tokens[number])
        mask = 0 if self.plan.media_masks is None else int(self.plan.media_masks[number])
        marks = self.viewer.marks
        errors = {drop.reason for row in rows.tolist() if row in marks for drop in marks[row]}
        return {
            "number": number,
            "tokens": tokens,
            "fill": tokens / self.plan.capacity,
            "documents": len(rows),
            "cost": float(self.costs[number]),
            "kinds": MediaMask(mask).kinds,
            "datasets": [self.viewer.names[n] for n in np.unique(self.viewer.dataset_ids(rows)).tolist()],
            "errors": sorted(errors),
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
            fill = self.plan.tokens * (100 / self.plan.capacity)
            tests.append((fill >= query.least) & (fill <= query.most))
        if query.dataset:
            tests.append(self._with_dataset(query.dataset))
        masks = self.plan.media_masks
        if query.media and masks is not None:
            mask = int(MediaMask.of(kind for kind in MEDIA_KINDS if kind == query.media))
            tests.append(masks & mask > 0 if mask else masks == 0)
        if query.error:
            tests.append(self._filter_error(query.error))
        return np.logical_and.reduce(tests) if tests else None

    def _filter_dataset(self, name: str) -> Flags:
        if name not in self.viewer.names or not len(self.plan):
            return np.zeros(len(self.plan), bool)
        inside = self.viewer.dataset_ids(self.plan.indices) == self.viewer.names.index(name)
        return np.asarray(np.logical_or.reduceat(inside, self.plan.offsets[:-1]), bool)

    def _filter_error(self, reason: str) -> Flags:
        matches = np.zeros(len(self.plan), bool)
        for row, drops in list(self.viewer.marks.items()):
            pack = int(self.viewer.pack_of[row])
            if pack >= 0 and (reason == "any" or any(drop.reason == reason for drop in drops)):
                matches[pack] = True
        return matches


class Pages:
    """The values of each page."""

    def __init__(self, viewer: PlanViewer) -> None:
        self.viewer = viewer
        self.packs = PackList(viewer)
        self._view = lru_cache(maxsize=64)(self._view_row)

    @cached_property
    def previews(self) -> MediaPreviews:
        """The media of the rows."""
        return MediaPreviews(self.encoder)

    @property
    def encoder(self) -> RowEncoder:
        """See :attr:`PlanViewer.encoder`."""
        return self.viewer.encoder

    # One method for each page.

    def overview(self) -> Values:
        """Numbers and plots of the whole plan."""
        report = self.viewer.report
        return {
            "report": report,
            "linked": True,
            "bad_rows": bad_rows_warning(report),
            "unmatched": self.viewer.unmatched_warning(),
            "reasons": self.viewer.reasons(),
            **plan_plots(report),
        }

    def pack_list(self, params: Mapping[str, str]) -> Values:
        """A page of the list of packs."""
        query = PackQuery.parse(params)
        lines, total = self.packs.find(query)
        return {
            "query": query,
            "lines": [(line, plots.meter(line["fill"], f"{line['fill']:.1%} full")) for line in lines],
            "total": total,
            "datasets": self.viewer.names,
            "reasons": [reason for reason, _, marked in self.viewer.reasons() if marked],
            **_paging(query.page, total, lambda page: "/packs?" + query.address(page=page)),
        }

    def pack(self, number: int) -> Values:
        """One pack, document by document."""
        if not 0 <= number < len(self.viewer.plan):
            raise PageNotFound(f"There is no pack {number}: there are {len(self.viewer.plan):,}, from 0.")
        line = self.packs.line(number)
        rows = self.viewer.plan[number].tolist()
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
            (length, document["key"], int(self.viewer.dataset_ids(row)))
            for length, document, row in zip(lengths, documents, rows, strict=True)
        ]
        return {
            "line": line,
            "packs": len(self.viewer.plan),
            "documents": documents,
            "tokens": sum(view.length for view in views),
            "planned": line["tokens"],
            "supervised": sum(view.supervised for view in views),
            "media": sum(len(view.media) for view in views),
            "size": size,
            "strip_colours": [(self.viewer.names.index(name), name) for name in line["datasets"]],
            "placeholders": self._placeholders(number, starts[-1], len(rows)),
            "strip": plots.strip(strip, size, f"{len(rows)} documents in {size:,} tokens"),
            "mask": plots.mask(lengths, bidirectional, size, "Attention mask: a document sees only itself"),
            "encoder": self.encoder,
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
            "encoder": self.encoder,
        }

    def problems(self, params: Mapping[str, str]) -> Values:
        """Rows that are dropped or marked, with their locations."""
        viewer, page = self.viewer, parse_page(params)
        reason, dataset = params.get("reason", ""), params.get("dataset", "")
        rows = viewer.problems(reason, dataset)
        lines = [
            {
                "index": index,
                "key": viewer.key(index),
                "pack": int(viewer.pack_of[index]),
                "drops": [drop for drop in viewer.drops(index) if not reason or drop.reason == reason],
                "location": viewer.dataset.location(index),
            }
            for index in rows[(page - 1) * PAGE_SIZE : page * PAGE_SIZE]
        ]
        query = {name: value for name, value in (("reason", reason), ("dataset", dataset)) if value}
        return {
            "lines": lines,
            "total": len(rows),
            "reason": reason,
            "dataset": dataset,
            "datasets": viewer.names,
            "reasons": viewer.reasons(),
            "unmatched": viewer.unmatched[:PAGE_SIZE],
            **_paging(page, len(rows), lambda n: "/problems?" + urlencode({**query, "page": n})),
        }

    def search(self, params: Mapping[str, str]) -> Values:
        """Rows by key and by text."""
        viewer, query = self.viewer, params.get("q", "").strip()
        first = max(0, int(parse_number(params.get("from"), 0)))
        keys = [(index, viewer.key(index)) for index in find_key(viewer, query)] if query else []
        text = find_text(viewer, query, min(first, len(viewer))) if query else None
        return {"q": query, "keys": keys, "text": text, "first": first, "pack_of": viewer.pack_of}

    # Parts of pages.

    def _placeholders(self, pack: int, start: int, documents: int) -> list[Values]:
        """Return the placeholders that a pack may get: one of each media kind that only other packs have."""
        plan = self.viewer.plan
        if not self.viewer.report["reserve"] or plan.media_masks is None:
            return []
        missing = MediaMask(int(np.bitwise_or.reduce(plan.media_masks)) & ~int(plan.media_masks[pack]))
        return [
            {"number": number, "kind": kind, "row": row, "start": start, "media_item_of_run": {}}
            for number, (kind, row) in enumerate(self.encoder.placeholders(missing), documents + 1)
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
            "start": 0,
            "media": [self._media_item(row, media_item) for media_item in row.media],
            "media_item_of_run": dict(zip(media_runs, row.media, strict=True)) if linked else {},
        }

    def _view_row(self, index: int) -> RowView:
        row = self.encoder.view(index)
        drops = list(row.drops)
        if row.error is not None and self.viewer.plan_drop(index) is None:
            key, dataset = self.viewer.key(index), self.viewer.dataset_name(index)
            drops.append(row.error.as_drop(key=key, dataset=dataset))
        self.viewer.mark(index, drops)
        return row

    def _media_item(self, row: RowView, media_item: MediaItem) -> Values:
        """Return a media item for display; a broken one with its error."""
        values: Values = {"media_item": media_item, "frames": (), "error": ""}
        with data_errors() as outcome:
            if media_item.kind == "video":
                values["frames"] = self.previews.frames(row.index, media_item.number)
            elif row.error is not None:  # perhaps caused by this item; otherwise it was decoded before
                self.previews.get(row.index, media_item.number)
        if outcome.error is not None:
            values["error"] = describe_error(outcome.error.original)
        return values


def _paging(page: int, total: int, address: Callable[[int], str]) -> Values:
    last = max(1, -(-total // PAGE_SIZE))
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
        "straggler_plot": plots.line(stragglers, "Straggler ratio by number of ranks"),
        "kinds": [kind for kind in plots.KINDS if any(dataset[kind] for dataset in report["datasets"])],
    }
