"""Plots as inline SVG: numbers go in, markup comes out. Colours are classes of the style sheet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from packhorse.errors import require

_WIDTH, _HEIGHT = 380, 160
_LEFT, _BOTTOM, _TOP = 40, 24, 10
_PLOT_WIDTH, _PLOT_HEIGHT = _WIDTH - _LEFT - 20, _HEIGHT - _BOTTOM - _TOP
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
    step = (_PLOT_WIDTH + 12) / max(1, len(counts))
    parts = _rules(["", short(round(top / 2, 2)) if top > 1 else "", short(top)])
    for place, count in enumerate(counts):
        height = max(_PLOT_HEIGHT * count / top, 1.5) if count else 0.0
        x, y = _LEFT + place * step, _TOP + _PLOT_HEIGHT - height
        told = _escaped(f"{edges[place]} to {edges[place + 1]}: {count:,}")
        parts.append(
            f'<rect class="bar" x="{x + 1:.1f}" y="{y:.1f}" width="{max(step - 2, 1):.1f}" '
            f'height="{height:.1f}"><title>{told}</title></rect>'
        )
    for place in range(0, len(edges), every):
        last = place == len(edges) - 1  # ends at the edge of the image
        parts.append(
            _text(_LEFT + place * step + 6 * last, _HEIGHT - 7, edges[place], "end" if last else "middle")
        )
    return _svg(parts, label)


def _rules(numbers: Sequence[str]) -> list[str]:
    """Draw lines across the plot, evenly spaced from the bottom, with their numbers."""
    parts = []
    for place, number in enumerate(numbers):
        y = _TOP + _PLOT_HEIGHT * (1 - place / (len(numbers) - 1))
        parts.append(f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}"/>')
        if number:
            parts.append(_text(_LEFT - 6, y + 4, number, "end"))
    return parts


def _dot(name: str, place: tuple[float, float], radius: float, title: str) -> str:
    x, y = place
    return (
        f'<circle class="dot {name}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}">'
        f"<title>{_escaped(title)}</title></circle>"
    )


def _polyline(name: str, points: Iterable[tuple[float, float]]) -> str:
    return f'<polyline class="line {name}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def line(points: Sequence[Mapping[str, Any]], label: str) -> Any:
    """Straggler ratios over world sizes, as planned and at random."""
    values = [one[name] for one in points for name in ("ratio", "random") if one[name] is not None]
    top = max([*values, 1.0])
    top = 1.05 if top <= 1.05 else math.ceil(top * 10) / 10
    parts = _rules([f"{value:.3g}" for value in (1.0, (1 + top) / 2, top)])
    step = _PLOT_WIDTH / max(1, len(points) - 1)
    for name, how in (("random", "at random"), ("ratio", "planned")):
        places = [
            ((_LEFT + 6 + step * n, _TOP + _PLOT_HEIGHT * (1 - (one[name] - 1) / (top - 1))), one)
            for n, one in enumerate(points)
            if one[name] is not None
        ]
        parts.append(_polyline(name, [place for place, _ in places]))
        parts += [
            _dot(name, place, 3.5, f"{one['ranks']:,} ranks, {how}: {one[name]:.4f}") for place, one in places
        ]
    parts += [_text(_LEFT + 6 + step * n, _HEIGHT - 7, str(one["ranks"])) for n, one in enumerate(points)]
    return _svg(parts, label)


def losses(runs: Mapping[str, Sequence[tuple[int, float]]], kill_at: int, label: str) -> Any:
    """Losses by step: the run ``whole`` as a line, ``killed`` as circles and ``resumed`` as dots on it."""
    whole = runs["whole"]
    top = max(loss for _, loss in whole) * 1.05

    def place(step: float, loss: float) -> tuple[float, float]:
        share = (step - 1) / max(1, len(whole) - 1)
        return _LEFT + 6 + _PLOT_WIDTH * share, _TOP + _PLOT_HEIGHT * (1 - loss / top)

    parts = _rules([f"{top * share:.1f}" for share in (0.0, 0.5, 1.0)])
    parts += [_text(place(step, 0)[0], _HEIGHT - 7, str(step)) for step in range(8, len(whole) + 1, 8)]
    x, bottom = place(kill_at, 0)
    parts.append(f'<line class="rule kill" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
    parts.append(_text(x + 6, _TOP + 10, f"killed in step {kill_at}", "start"))
    parts.append(_polyline("loss", [place(step, loss) for step, loss in whole]))
    for name, radius in (("killed", 3.5), ("resumed", 2)):
        parts += [
            _dot(name, place(step, loss), radius, f"step {step}: {loss:.4f}") for step, loss in runs[name]
        ]
    return _svg(parts, label)


def mix(datasets: Sequence[Mapping[str, Any]], label: str, most: int = 12) -> Any:
    """For each dataset a bar of its tokens by kind; of many datasets the largest."""
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
    """A pack as one bar: (length, name, dataset) of each document, and what is free."""
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
    lengths: Sequence[int],
    bidirectional: Sequence[tuple[int, int]],
    capacity: int,
    label: str,
    size: int = 160,
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
    for first, end in bidirectional:
        x, side = first * scale, (end - first) * scale
        parts.append(f'<rect class="both" x="{x:.2f}" y="{x:.2f}" width="{side:.2f}" height="{side:.2f}"/>')
    return _svg(parts, label, size, size, "mask")
