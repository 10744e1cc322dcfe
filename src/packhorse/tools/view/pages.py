"""The pages: each takes what an address asks for and returns what its template shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any
from urllib.parse import urlencode

import numpy as np

from packhorse.errors import data_errors
from packhorse.tools.view import plots
from packhorse.tools.view.book import Book, find_key, find_text
from packhorse.tools.view.media_shelf import MediaShelf, why_not
from packhorse.tools.view.pack_list import PAGE, PackList, PackQuery, number_in, page_in
from packhorse.tools.view.plan_report import too_many_bad
from packhorse.tools.view.row_encoder import Medium, RowEncoder, Shown
from packhorse.types import Drop, MediaMask

Values = dict[str, Any]

_MOST_TOKENS = 4096  # that are listed one by one
_LONGEST_RAW = 20_000


class NotThere(LookupError):
    """There is no such page."""


class Pages:
    """What the pages of a book show.

    Args:
        book: the plan and its rows.
    """

    def __init__(self, book: Book) -> None:
        self.book = book
        self.packs = PackList(book)
        self._show = lru_cache(maxsize=64)(self._shown)

    @cached_property
    def shelf(self) -> MediaShelf:
        """The media of the rows."""
        return MediaShelf(self.book.encoder)

    @property
    def encoder(self) -> RowEncoder:
        """See :attr:`Book.encoder`."""
        return self.book.encoder

    # One method for each page.

    def overview(self) -> Values:
        """Numbers and plots of the whole plan."""
        report = self.book.report
        return {
            "report": report,
            "linked": True,
            "too_many_bad": too_many_bad(report),
            "wrong_ledger": self.book.wrong_ledger(),
            "reasons": self.book.reasons(),
            **plan_plots(report),
        }

    def pack_list(self, wanted: Mapping[str, str]) -> Values:
        """A page of the list of packs."""
        query = PackQuery.of(wanted)
        lines, total = self.packs.find(query)
        return {
            "query": query,
            "lines": [(one, plots.meter(one.fill, f"{one.fill:.1%} full")) for one in lines],
            "total": total,
            "datasets": self.book.names,
            "reasons": [reason for reason, _, marked in self.book.reasons() if marked],
            **self._paging(query.page, total, lambda page: "/packs?" + query.address(page=page)),
        }

    def pack(self, number: int) -> Values:
        """One pack, document by document."""
        if not 0 <= number < len(self.book.plan):
            raise NotThere(f"There is no pack {number}: there are {len(self.book.plan):,}, from 0.")
        line = self.packs.line(number)
        rows = self.book.plan[number].tolist()
        documents = [self._document(index, place) for place, index in enumerate(rows, 1)]
        size = self.book.report["pack_size"]
        rooms = [one["shown"].room for one in documents]
        both, at = [], 0
        for one in documents:
            one["start"] = at
            both += [(at + first, at + end) for first, end in one["shown"].bidirectional]
            at += one["shown"].room
        strips = [
            (one["shown"].room, one["key"], self.book.dataset_of(one["shown"].index)) for one in documents
        ]
        return {
            "line": line,
            "packs": len(self.book.plan),
            "documents": documents,
            "tokens": sum(one["shown"].length for one in documents),
            "planned": line.tokens,
            "supervised": sum(one["shown"].supervised for one in documents),
            "media": sum(len(one["shown"].media) for one in documents),
            "size": size,
            "strip_colours": [(self.book.names.index(name), name) for name in line.datasets],
            "placeholders": self._placeholders(number, at, len(rows)),
            "strip": plots.strip(strips, size, f"{len(rows)} documents in {size:,} tokens"),
            "mask": plots.mask(rooms, both, size, "Attention mask: each document sees itself alone"),
            "encoder": self.encoder,
        }

    def row(self, index: int) -> Values:
        """One row: as its file has it, as the model sees it, and what is wrong with it."""
        self._check_row(index)
        document = self._document(index, 1)
        raw = self.book.raw(index)
        return {
            "document": document,
            "index": index,
            "pack": int(self.book.pack_of[index]),
            "rows": len(self.book),
            "location": self.book.dataset.location(index),
            "raw": raw[:_LONGEST_RAW],
            "raw_cut": len(raw) - _LONGEST_RAW,
            "tokens": document["shown"].tokens[:_MOST_TOKENS],
            "encoder": self.encoder,
        }

    def problems(self, wanted: Mapping[str, str]) -> Values:
        """Rows that are dropped or that a ledger has a remark on, with their places."""
        reason, dataset = wanted.get("reason", ""), wanted.get("dataset", "")
        place = self.book.names.index(dataset) if dataset in self.book.names else -1
        rows = self.book.problems(reason, place)
        page = page_in(wanted)
        shown = rows[(page - 1) * PAGE : page * PAGE]
        lines = [
            {
                "index": index,
                "key": self.book.key(index),
                "pack": int(self.book.pack_of[index]),
                "remarks": [d for d in self.book.remarks(index) if not reason or d.reason == reason],
                "location": self.book.dataset.location(index),
            }
            for index in shown
        ]
        asked = {name: value for name, value in (("reason", reason), ("dataset", dataset)) if value}
        return {
            "lines": lines,
            "total": len(rows),
            "reason": reason,
            "dataset": dataset,
            "datasets": self.book.names,
            "reasons": self.book.reasons(),
            "elsewhere": self.book.elsewhere[:PAGE],
            **self._paging(page, len(rows), lambda n: "/problems?" + urlencode({**asked, "page": n})),
        }

    def search(self, wanted: Mapping[str, str]) -> Values:
        """Rows by key, else by text."""
        query = wanted.get("q", "").strip()
        first = max(0, int(number_in(wanted.get("from"), 0)))
        keys = [(index, self.book.key(index)) for index in find_key(self.book, query)] if query else []
        text = find_text(self.book, query, min(first, len(self.book))) if query else None
        return {"q": query, "keys": keys, "text": text, "first": first, "pack_of": self.book.pack_of}

    # Parts of pages.

    def _placeholders(self, pack: int, start: int, documents: int) -> list[Values]:
        """The blank media that a pack may get: of each kind that it lacks and another pack has."""
        plan = self.book.plan
        if not self.book.report["reserve"] or plan.media_masks is None:
            return []
        lacking = MediaMask(int(np.bitwise_or.reduce(plan.media_masks)) & ~int(plan.media_masks[pack]))
        made = self.encoder.placeholders(lacking)
        return [
            {"number": number, "kind": kind, "shown": shown, "start": start, "media_item_of_run": {}}
            for number, (kind, shown) in enumerate(made, documents + 1)
        ]

    def _document(self, index: int, number: int) -> Values:
        shown = self._show(index)
        drops: Sequence[Drop] = self.book.remarks(index)
        repeated_media_tokens = [place for place, run in enumerate(shown.runs) if run.media_item]
        linked = len(repeated_media_tokens) == len(shown.media)
        return {
            "number": number,
            "key": self.book.key(index),
            "shown": shown,
            "remarks": drops,
            "start": 0,
            "media": [self._media_item(shown, media_item) for media_item in shown.media],
            "media_item_of_run": dict(zip(repeated_media_tokens, shown.media, strict=True)) if linked else {},
        }

    def _shown(self, index: int) -> Shown:
        shown = self.encoder.show(index)
        dataset = self.book.names[self.book.dataset_of(index)]
        found = list(shown.found)
        if shown.error is not None and self.book.dropped(index) is None:
            found.append(shown.error.as_drop(key=self.book.key(index), dataset=dataset))
        self.book.mark(index, found)
        return shown

    def _media_item(self, shown: Shown, media_item: Medium) -> Values:
        """A media item as the page shows it; a broken one by what is wrong with it."""
        made: Values = {"media_item": media_item, "frames": (), "error": ""}
        with data_errors() as outcome:
            if media_item.kind == "video":
                made["frames"] = self.shelf.frames(shown.index, media_item.number)
            elif shown.error is not None:  # perhaps because of this one: others were decoded already
                self.shelf.get(shown.index, media_item.number)
        if outcome.error is not None:
            made["error"] = why_not(outcome.error.original)
        return made

    def _check_row(self, index: int) -> None:
        if not 0 <= index < len(self.book):
            raise NotThere(f"There is no row {index}: there are {len(self.book):,}, from 0.")

    def _paging(self, page: int, total: int, address: Any) -> Values:
        last = max(1, -(-total // PAGE))
        return {
            "page": page,
            "pages": last,
            "previous_page": address(page - 1) if page > 1 else None,
            "next_page": address(page + 1) if page < last else None,
        }


def plan_plots(report: Mapping[str, Any]) -> Values:
    """Return the plots of a plan that ``plan_cards.html`` shows."""
    fill, length = report["histograms"]["fill"], report["histograms"]["length"]
    first = next((place for place, count in enumerate(length["counts"]) if count), 0)
    edges = length["edges"][first:]
    # Beyond one pack for every rank, ranks wait, however packs are assigned.
    stragglers = [one for one in report["straggler"] if one["ranks"] <= max(1, report["packs"])]
    return {
        "fill_plot": plots.bars(
            fill["counts"],
            [f"{100 * edge:.0f}%" for edge in fill["edges"]],
            f"Histogram of how full the {report['packs']:,} packs are",
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
        "kinds": [kind for kind in plots.KINDS if any(one[kind] for one in report["datasets"])],
    }
