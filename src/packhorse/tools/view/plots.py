"""Plots as inline SVG markup. Colours are classes of the style sheet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from packhorse.errors import require
from packhorse.tools.view.saved_plan import shorten

if TYPE_CHECKING:
    from markupsafe import Markup

_WIDTH, _HEIGHT = 380, 160
_LEFT, _BOTTOM, _TOP = 40, 24, 10
_PLOT_WIDTH, _PLOT_HEIGHT = _WIDTH - _LEFT - 20, _HEIGHT - _BOTTOM - _TOP
_MASK_SIZE = 160
_MIXED = 12  # datasets shown, the largest
KINDS = ("text", "image", "video", "audio")


def _escape(text: str) -> str:
    return str(require("markupsafe", "view").escape(text))


def _svg(
    parts: Iterable[str],
    label: str,
    width: float = _WIDTH,
    height: float = _HEIGHT,
    name: str = "plot",
    attributes: str = 'role="img"',
) -> Markup:
    svg = (
        f'<svg class="{name}" viewBox="0 0 {width:g} {height:g}" {attributes} '
        f'aria-label="{_escape(label)}">{"".join(parts)}</svg>'
    )
    markup: Markup = require("markupsafe", "view").Markup(svg)
    return markup


def _text(x: float, y: float, text: str, anchor: str = "middle", whole: str = "") -> str:
    title = f"<title>{_escape(whole)}</title>" if whole and whole != text else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_escape(text)}{title}</text>'


def short(value: float) -> str:
    """Return a number in few characters: 950, 1.2k, 34M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            digits = 1 if value < 10 * size else 0
            return f"{value / size:.{digits}f}".removesuffix(".0") + unit
    return f"{value:g}"


def bars(counts: Sequence[int], edges: Sequence[str], label: str, every: int = 1) -> Markup:
    """Draw a histogram: one bar per count, with every n-th edge named below."""
    top = max([*counts, 1])
    top += top % 2 if top > 1 else 0  # so that half of it is a whole number
    step = (_PLOT_WIDTH + 12) / max(1, len(counts))
    parts = _rules(["", short(round(top / 2, 2)) if top > 1 else "", short(top)])
    for n, count in enumerate(counts):
        height = max(_PLOT_HEIGHT * count / top, 1.5) if count else 0.0
        x, y = _LEFT + n * step, _TOP + _PLOT_HEIGHT - height
        title = _escape(f"{edges[n]} to {edges[n + 1]}: {count:,}")
        parts.append(
            f'<rect class="bar" x="{x + 1:.1f}" y="{y:.1f}" width="{max(step - 2, 1):.1f}" '
            f'height="{height:.1f}"><title>{title}</title></rect>'
        )
    for n in range(0, len(edges), every):
        last = n == len(edges) - 1  # aligned with the right border
        parts.append(_text(_LEFT + n * step + 6 * last, _HEIGHT - 7, edges[n], "end" if last else "middle"))
    return _svg(parts, label)


def _rules(numbers: Sequence[str]) -> list[str]:
    """Draw lines across the plot, evenly spaced from the bottom, with their numbers."""
    parts = []
    for n, number in enumerate(numbers):
        y = _TOP + _PLOT_HEIGHT * (1 - n / (len(numbers) - 1))
        parts.append(f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}"/>')
        if number:
            parts.append(_text(_LEFT - 6, y + 4, number, "end"))
    return parts


def _dot(name: str, point: tuple[float, float], radius: float, title: str) -> str:
    x, y = point
    return (
        f'<circle class="dot {name}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}">'
        f"<title>{_escape(title)}</title></circle>"
    )


def _polyline(name: str, points: Iterable[tuple[float, float]]) -> str:
    return f'<polyline class="line {name}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def line(points: Sequence[Mapping[str, Any]], label: str) -> Markup:
    """Draw straggler ratios over world sizes, as planned and at random."""
    values = [point[name] for point in points for name in ("ratio", "random") if point[name] is not None]
    top = max([*values, 1.0])
    top = 1.05 if top <= 1.05 else math.ceil(top * 10) / 10
    parts = _rules([f"{value:.3g}" for value in (1.0, (1 + top) / 2, top)])
    step = _PLOT_WIDTH / max(1, len(points) - 1)
    for name, how in (("random", "at random"), ("ratio", "planned")):
        dots = [
            (_LEFT + 6 + step * n, _TOP + _PLOT_HEIGHT * (1 - (point[name] - 1) / (top - 1)), point)
            for n, point in enumerate(points)
            if point[name] is not None
        ]
        parts.append(_polyline(name, [(x, y) for x, y, _ in dots]))
        parts += [
            _dot(name, (x, y), 3.5, f"{point['ranks']:,} ranks, {how}: {point[name]:.4f}")
            for x, y, point in dots
        ]
    parts += [_text(_LEFT + 6 + step * n, _HEIGHT - 7, str(point["ranks"])) for n, point in enumerate(points)]
    return _svg(parts, label)


def losses(runs: Mapping[str, Sequence[tuple[int, float]]], kill_at: int, label: str) -> Markup:
    """Draw losses by step: the run ``whole`` as a line, ``killed`` as circles, ``resumed`` as dots."""
    whole = runs["whole"]
    top = max(loss for _, loss in whole) * 1.05

    def point(step: float, loss: float) -> tuple[float, float]:
        share = (step - 1) / max(1, len(whole) - 1)
        return _LEFT + 6 + _PLOT_WIDTH * share, _TOP + _PLOT_HEIGHT * (1 - loss / top)

    parts = _rules([f"{top * share:.1f}" for share in (0.0, 0.5, 1.0)])
    parts += [_text(point(step, 0)[0], _HEIGHT - 7, str(step)) for step in range(8, len(whole) + 1, 8)]
    x, bottom = point(kill_at, 0)
    parts.append(f'<line class="rule kill" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
    parts.append(_text(x + 6, _TOP + 10, f"killed in step {kill_at}", "start"))
    parts.append(_polyline("loss", [point(step, loss) for step, loss in whole]))
    for name, radius in (("killed", 3.5), ("resumed", 2)):
        parts += [
            _dot(name, point(step, loss), radius, f"step {step}: {loss:.4f}") for step, loss in runs[name]
        ]
    return _svg(parts, label)


def mix(datasets: Sequence[Mapping[str, Any]], label: str) -> Markup:
    """Draw a bar per dataset of its tokens by kind, for the largest datasets."""
    largest = sorted(datasets, key=lambda dataset: -dataset["tokens"])[:_MIXED]
    top = max([dataset["tokens"] for dataset in largest] + [1])
    line_height, left = 26, 104
    parts = []
    for number, dataset in enumerate(largest):
        name, tokens = dataset["name"], dataset["tokens"]
        y, x = 6 + number * line_height, float(left)
        parts.append(_text(left - 8, y + 13, shorten(name, 15), "end", name))
        for kind in filter(dataset.get, KINDS):
            width = (_WIDTH - left - 46) * dataset[kind] / top
            title = _escape(f"{name}: {dataset[kind]:,} {kind} tokens")
            parts.append(
                f'<rect class="kind {kind}" x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" height="18">'
                f"<title>{title}</title></rect>"
            )
            x += width
        parts.append(_text(x + 6, y + 13, short(tokens), "start"))
    return _svg(parts, label, height=8 + line_height * max(1, len(largest)))


def meter(share: float, label: str) -> Markup:
    """Draw a small bar that is filled to a share."""
    width = 100 * min(max(share, 0.0), 1.0)
    parts = [
        '<rect class="empty" width="100" height="10" rx="2"/>',
        f'<rect class="bar" width="{width:.2f}" height="10" rx="2"/>',
    ]
    return _svg(parts, label, 100, 10, "meter")


def strip(documents: Sequence[tuple[int, str, int, str]], capacity: int, label: str) -> Markup:
    """Draw a pack as one bar: (length, name, dataset id, link) of each document, and the free space."""
    parts = ['<rect class="empty" width="1000" height="22" rx="3"/>']
    x = 0.0
    for number, (length, name, dataset, link) in enumerate(documents, 1):
        width = 1000 * length / max(1, capacity)
        title = _escape(f"document {number}, {name}: {length:,} tokens")
        parts.append(
            f'<a href="{_escape(link)}"><rect class="doc c{dataset % 6}" x="{x:.2f}" '
            f'width="{max(width - 1.5, 0.5):.2f}" height="22" rx="2"><title>{title}</title></rect></a>'
        )
        x += width
    return _svg(parts, label, 1000, 22, "strip", 'preserveAspectRatio="none" role="group"')


def mask(
    lengths: Sequence[int], bidirectional: Sequence[tuple[int, int]], capacity: int, label: str
) -> Markup:
    """Draw the attention mask: a triangle per document, squares for bidirectional spans."""
    scale = _MASK_SIZE / max(1, capacity)
    parts = [f'<rect class="empty" width="{_MASK_SIZE}" height="{_MASK_SIZE}"/>']
    start = 0
    for number, length in enumerate(lengths):
        a, b = start * scale, (start + length) * scale
        parts.append(
            f'<path class="seen c{number % 2}" d="M{a:.2f} {a:.2f}L{a:.2f} {b:.2f}L{b:.2f} {b:.2f}Z"/>'
        )
        start += length
    for first, end in bidirectional:
        x, side = first * scale, (end - first) * scale
        parts.append(f'<rect class="both" x="{x:.2f}" y="{x:.2f}" width="{side:.2f}" height="{side:.2f}"/>')
    return _svg(parts, label, _MASK_SIZE, _MASK_SIZE, "mask")
