"""Plots as inline SVG: numbers go in, markup comes out. Colours are classes of the style sheet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from packhorse.errors import require

_WIDTH, _HEIGHT = 380, 160
_LEFT, _BOTTOM, _TOP = 40, 24, 10
KINDS = ("text", "image", "video", "audio")


def _markup(text: str) -> Any:
    return require("markupsafe", "view").Markup(text)


def _escaped(text: str) -> str:
    return str(require("markupsafe", "view").escape(text))


def _svg(
    parts: Sequence[str], label: str, width: float = _WIDTH, height: float = _HEIGHT, name: str = "plot"
) -> Any:
    body = "".join(parts)
    told = _escaped(label)
    return _markup(
        f'<svg class="{name}" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{told}">{body}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_escaped(text)}</text>'


def short(value: float) -> str:
    """A number in few characters: 950, 1.2k, 34M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            shown = f"{value / size:.1f}".removesuffix(".0") if value < 10 * size else f"{value / size:.0f}"
            return shown + unit
    return f"{value:g}"


def bars(counts: Sequence[int], edges: Sequence[str], label: str, every: int = 1) -> Any:
    """A histogram: a bar for each count, the names of edges under it (one of ``every``)."""
    top = max([*counts, 1])
    top += top % 2 if top > 1 else 0  # half of it is a whole number too
    plot_width, plot_height = _WIDTH - _LEFT - 8, _HEIGHT - _BOTTOM - _TOP
    step = plot_width / max(1, len(counts))
    parts = _rules(top, plot_height)
    for place, count in enumerate(counts):
        height = plot_height * count / top
        if count:
            height = max(height, 1.5)
        x, y = _LEFT + place * step, _TOP + plot_height - height
        told = _escaped(f"{edges[place]} to {edges[place + 1]}: {count:,}")
        parts.append(
            f'<rect class="bar" x="{x + 1:.1f}" y="{y:.1f}" width="{max(step - 2, 1):.1f}" '
            f'height="{height:.1f}"><title>{told}</title></rect>'
        )
    for place in range(0, len(edges), every):
        last = place == len(edges) - 1  # ends at the edge of the picture
        parts.append(
            _text(_LEFT + place * step + 6 * last, _HEIGHT - 7, edges[place], "end" if last else "middle")
        )
    return _svg(parts, label)


def _rules(top: float, plot_height: float) -> list[str]:
    """Lines across the plot with their numbers."""
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = _TOP + plot_height * (1 - share)
        parts.append(f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}"/>')
        if share == 1.0 or (share == 0.5 and top > 1):
            parts.append(_text(_LEFT - 6, y + 4, short(round(top * share, 2)), "end"))
    return parts


def line(points: Sequence[Mapping[str, Any]], label: str) -> Any:
    """Straggler ratios over world sizes, as planned and at random."""
    values = [one[name] for one in points for name in ("ratio", "random") if one[name] is not None]
    top = max([*values, 1.0])
    top = 1.05 if top <= 1.05 else math.ceil(top * 10) / 10
    plot_width, plot_height = _WIDTH - _LEFT - 20, _HEIGHT - _BOTTOM - _TOP
    parts = []
    for value in (1.0, (1 + top) / 2, top):
        y = _TOP + plot_height * (1 - (value - 1) / (top - 1))
        parts.append(f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{value:.3g}", "end"))
    step = plot_width / max(1, len(points) - 1)
    for name, told in (("random", "at random"), ("ratio", "planned")):
        places = [
            (_LEFT + 6 + step * n, _TOP + plot_height * (1 - (one[name] - 1) / (top - 1)), one)
            for n, one in enumerate(points)
            if one[name] is not None
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        parts.append(f'<polyline class="line {name}" points="{path}"/>')
        parts += [
            f'<circle class="dot {name}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{one["ranks"]:,} ranks, '
            f"{told}: {one[name]:.4f}</title></circle>"
            for x, y, one in places
        ]
    parts += [_text(_LEFT + 6 + step * n, _HEIGHT - 7, str(one["ranks"])) for n, one in enumerate(points)]
    return _svg(parts, label)


def mix(datasets: Sequence[Mapping[str, Any]], label: str, most: int = 12) -> Any:
    """For each data set a bar of its tokens by kind; of many data sets the largest."""
    largest = sorted(datasets, key=lambda one: -one["tokens"])[:most]
    top = max([one["tokens"] for one in largest] + [1])
    line_height, left = 26, 104
    parts = []
    for place, one in enumerate(largest):
        y, x = 6 + place * line_height, float(left)
        name = one["name"] if len(one["name"]) <= 15 else one["name"][:14] + "…"
        parts.append(_text(left - 8, y + 13, name, "end"))
        for kind in KINDS:
            width = (_WIDTH - left - 46) * one[kind] / top
            if one[kind]:
                told = _escaped(f"{one['name']}: {one[kind]:,} {kind} tokens")
                parts.append(
                    f'<rect class="kind {kind}" x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" '
                    'height="18">'
                    f"<title>{told}</title></rect>"
                )
                x += width
        parts.append(_text(x + 6, y + 13, short(one["tokens"]), "start"))
    return _svg(parts, label, height=8 + line_height * max(1, len(largest)))


def meter(share: float, label: str) -> Any:
    """A small bar that is filled to a share."""
    width = 100 * min(max(share, 0.0), 1.0)
    parts = [
        '<rect class="empty" width="100" height="10" rx="2"/>',
        f'<rect class="bar" width="{width:.2f}" height="10" rx="2"/>',
    ]
    return _svg(parts, label, 100, 10, "meter")


def strip(documents: Sequence[tuple[int, str, int]], capacity: int, label: str) -> Any:
    """A pack as one bar: (length, name, data set) of each document, and what is free."""
    parts = ['<rect class="empty" width="1000" height="22" rx="3"/>']
    at = 0.0
    for number, (length, name, dataset) in enumerate(documents, 1):
        width = 1000 * length / max(1, capacity)
        told = _escaped(f"document {number}, {name}: {length:,} tokens")
        parts.append(
            f'<a href="#d{number}"><rect class="doc c{dataset % 6}" x="{at:.2f}" '
            f'width="{max(width - 1.5, 0.5):.2f}" height="22" rx="2"><title>{told}</title></rect></a>'
        )
        at += width
    return _markup(
        f'<svg class="strip" viewBox="0 0 1000 22" preserveAspectRatio="none" role="group" '
        f'aria-label="{_escaped(label)}">{"".join(parts)}</svg>'
    )


def mask(
    lengths: Sequence[int], both_ways: Sequence[tuple[int, int]], capacity: int, label: str, size: int = 160
) -> Any:
    """Who sees whom: a triangle for each document, squares where media see both ways."""
    scale = size / max(1, capacity)
    parts = [f'<rect class="empty" width="{size}" height="{size}"/>']
    at = 0
    for place, length in enumerate(lengths):
        a, b = at * scale, (at + length) * scale
        parts.append(
            f'<path class="seen c{place % 2}" d="M{a:.2f} {a:.2f}L{a:.2f} {b:.2f}L{b:.2f} {b:.2f}Z"/>'
        )
        at += length
    for first, end in both_ways:
        x, side = first * scale, (end - first) * scale
        parts.append(f'<rect class="both" x="{x:.2f}" y="{x:.2f}" width="{side:.2f}" height="{side:.2f}"/>')
    return _svg(parts, label, size, size, "mask")
