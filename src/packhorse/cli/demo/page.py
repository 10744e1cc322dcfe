"""The demo's report: one page with its plots inside, which needs nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packhorse.cli.plan import WHY_PACK
from packhorse.cli.terminal import own_command
from packhorse.ledger import Ledger
from packhorse.tools.view import plots

if TYPE_CHECKING:
    from packhorse.cli.demo.train import Step


@dataclass
class Story:
    """Filled in step by step.

    Attributes:
        out: the demo's folder.
        rows: of all files.
        findings: of the check: severity, rule, row, what was found.
        plan: see :func:`packhorse.tools.view.plan_report.plan_report`.
        saved_at: the step of the checkpoint that the killed run left.
        kill_at: the step in whose middle it was killed.
        whole: the steps of the uninterrupted run.
        killed: of the one that was killed.
        resumed: of the one that went on.
        ledger: of the killed run and the one that went on.
        delivered: rows that were trained.
        promises: what was promised, and whether it was kept.
        seconds: all of it took.
    """

    out: Path
    rows: int = 0
    findings: list[tuple[str, str, str, str]] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    saved_at: int = 0
    kill_at: int = 0
    whole: list[Step] = field(default_factory=list)
    killed: list[Step] = field(default_factory=list)
    resumed: list[Step] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    delivered: int = 0
    promises: list[tuple[str, bool]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def meta(self) -> Path:
        """The meta file."""
        return self.out / "data" / "meta.json"

    @property
    def model(self) -> Path:
        """Processor, config and, at the end, weights."""
        return self.out / "model"

    @property
    def plan_file(self) -> Path:
        """The plan that is trained."""
        return self.out / "plan.phplan"

    def command(self, name: str, *options: object) -> str:
        """A command as it can be typed here, on the demo's data."""
        return " ".join([own_command(), name, str(self.meta), *map(str, options)])

    def next_commands(self) -> list[tuple[str, str]]:
        """What to type next, and what it shows."""
        view = f"{own_command()} view {self.plan_file} --ledger {self.out / 'ledger.jsonl'}"
        return [
            (view, "packs, rows and losses in a browser"),
            (self.command("check", "--fix", self.out / "clean"), "a copy without the broken rows"),
            (self.command("stats", "--processor", self.model), "lengths and media of each data set"),
        ]

    @property
    def failed(self) -> int:
        """Rows of the plan that were not trained: they failed when they were decoded."""
        return self.ledger.lost() - int(self.plan["left_out"])


_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 760, 260, 44, 30, 14
_STYLE = """
:root { --paper: #fbfaf7; --card: #fff; --ink: #23261f; --soft: #6b6f63; --line: #e4e1d8; --bar: #5b8f7f;
  --empty: #eeebe2; --bad: #a13d2d; --good: #2f7d46; --resumed: #c98a1b; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181a; --card: #1e2124; --ink: #e6e4dc;
  --soft: #9a9c94; --line: #33373a; --bar: #6fa896; --empty: #2a2e31; --bad: #f0937f; --good: #6cc583;
  --resumed: #e0b35c; } }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 3rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { font-size: 1.05rem; margin: 0 0 .5rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1rem 1.1rem;
  margin: 1rem 0; overflow-x: auto; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 0 1rem; }
dl { display: flex; flex-wrap: wrap; gap: .6rem 2rem; } dt { color: var(--soft); font-size: .8rem; }
dd { margin: 0; font-size: 1.4rem; font-variant-numeric: tabular-nums; }
p { margin: .4rem 0; color: var(--soft); } ul { margin: 0; padding-left: 1.2rem; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
td, th { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
td:last-child { overflow-wrap: anywhere; } .number { text-align: right; font-variant-numeric: tabular-nums; }
code { font: .85em ui-monospace, Menlo, "DejaVu Sans Mono", monospace; }
.held { color: var(--good); } .missed { color: var(--bad); font-weight: 600; }
svg { width: 100%; height: auto; display: block; } svg text { font-size: 11px; fill: var(--soft); }
svg.meter { width: 12rem; } .rule { stroke: var(--line); } .bar { fill: var(--bar); }
.empty { fill: var(--empty); } .lost { fill: var(--bad); } .changed { fill: var(--resumed); }
.loss { fill: none; stroke: var(--bar); stroke-width: 2; } .again { fill: var(--resumed); }
.before { fill: none; stroke: var(--bad); } .kill { stroke: var(--bad); stroke-dasharray: 4 3; }
"""


def write_report(story: Story, path: Path) -> None:
    """Write the page; costs milliseconds."""
    body = "\n".join(
        (
            _head(story),
            _card("The loss, and a kill -9 in the middle", loss_plot(story), _loss_note(story)),
            '<div class="two">',
            _card("How full the packs are", _histogram(story, "fill"), "Packs by the share that is filled."),
            _card("How long the rows are", _histogram(story, "length"), "Rows by their tokens."),
            "</div>",
            _card("What the same rows cost otherwise", _costs(story), _guess_note(story)),
            _card("Where the rows went", _rows_plot(story) + _ledger_table(story), ""),
            _card("What the check found beforehand", _findings_table(story), ""),
            _card("What to type next", _commands(story), ""),
        )
    )
    half = path.with_name(f".{path.name}")  # an earlier report stays until this one is whole
    half.write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Packhorse demo</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n",
        encoding="utf-8",
    )
    os.replace(half, path)


def _card(title: str, content: str, note: str) -> str:
    below = f"<p>{escape(note)}</p>" if note else ""
    return f"<section><h2>{escape(title)}</h2>\n{content}{below}</section>"


def _head(story: Story) -> str:
    plan = story.plan
    numbers = (
        ("rows", f"{story.rows:,}"),
        ("trained", f"{story.delivered:,}"),
        ("left out, by name", f"{story.ledger.lost():,}"),
        ("packs", f"{plan['packs']:,} of {plan['pack_size']:,} tokens"),
        ("fill", f"{plan['fill']:.1%} of {plan['capacity']:,}"),
        ("loss", f"{story.whole[0].loss:.2f} → {story.whole[-1].loss:.2f}"),
    )
    told = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in numbers)
    promises = "".join(
        f'<li class="{"held" if held else "missed"}">{"ok" if held else "MISS"}: {escape(text)}</li>'
        for text, held in story.promises
    )
    seconds = f"<p>All of it took {story.seconds:.0f} s on this machine.</p>"
    return f"<h1>Packhorse demo</h1>{seconds}<dl>{told}</dl><section><ul>{promises}</ul></section>"


def loss_plot(story: Story) -> str:
    """The uninterrupted run as a line, the killed one and the one that went on as dots on it."""
    losses = [one.loss for one in story.whole]
    top, width, height = max(losses) * 1.05, _WIDTH - _LEFT - 12, _HEIGHT - _TOP - _BOTTOM

    def place(step: float, loss: float) -> tuple[float, float]:
        return _LEFT + width * (step - 1) / max(1, len(losses) - 1), _TOP + height * (1 - loss / top)

    parts = []
    for share in (0.0, 0.5, 1.0):
        _, y = place(1, top * share)
        parts.append(f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - 12}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{top * share:.1f}</text>')
    for step in range(8, len(losses) + 1, 8):
        x, _ = place(step, 0)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{step}</text>')
    x, _ = place(story.kill_at, 0)
    parts.append(f'<line class="kill" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_TOP + height}"/>')
    parts.append(f'<text x="{x + 6:.1f}" y="{_TOP + 10}">killed in step {story.kill_at}</text>')
    points = " ".join("{:.1f},{:.1f}".format(*place(one.step, one.loss)) for one in story.whole)
    parts.append(f'<polyline class="loss" points="{points}"/>')
    for name, radius, steps in (("before", 5.5, story.killed), ("again", 3, story.resumed)):
        for one in steps:
            x, y = place(one.step, one.loss)
            parts.append(
                f'<circle class="{name}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">'
                f"<title>step {one.step}: {one.loss:.4f}</title></circle>"
            )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Loss by step">{"".join(parts)}</svg>'
    )


def _loss_note(story: Story) -> str:
    return (
        "The line is a run that nothing happened to. Circles: the run that was killed in step "
        f"{story.kill_at}. Dots: a new process that went on from the checkpoint of step {story.saved_at}, "
        "with the same rows in each step; what had been trained after the checkpoint was "
        "trained again, to the same loss."
    )


def _histogram(story: Story, name: str) -> str:
    found = story.plan["histograms"][name]
    edges = [f"{edge:.0%}" if name == "fill" else plots.short(edge) for edge in found["edges"]]
    return str(plots.bars(found["counts"], edges, f"Histogram: {name}", every=4 if name == "fill" else 1))


def _costs(story: Story) -> str:
    found = story.plan["padding"]
    ways = (
        ("packed, as they are trained here", found["packed_unpadded"]),
        (f"packed, padded to {story.plan['pack_size']:,}", found["packed"]),
        (f"padded, {found['batch_size']} of similar length", found["by_length"]),
        (f"padded, {found['batch_size']} at random", found["random"]),
    )
    rows = [
        (escape(name), f"{way['slots']:,}", f"{way['wasted']:.1%}", str(plots.meter(way["wasted"], "wasted")))
        for name, way in ways
    ]
    return _table(("way", "tokens computed", "wasted", ""), rows)


def _guess_note(story: Story) -> str:
    guessed = story.plan["estimated"]
    return (
        f"{WHY_PACK[1:-1]} Packed by estimated lengths, {guessed['lost']:,} of {guessed['rows']:,} rows "
        f"({guessed['lost_share']:.0%}) would not have been trained; an estimate is off by "
        f"{guessed['error_mean']:.0f} tokens on average. (A tiny tokenizer and small pictures make guessing "
        "harder than it is for a large model; `packhorse plan` tells it for yours.)"
    )


def _rows_plot(story: Story) -> str:
    lost = story.ledger.lost()
    width = 1000 * story.delivered / max(1, story.rows)
    return (
        '<svg viewBox="0 0 1000 26" role="img" aria-label="Rows trained and left out">'
        f'<rect class="bar" width="{width:.1f}" height="18"><title>{story.delivered} trained</title></rect>'
        f'<rect class="lost" x="{width:.1f}" width="{1000 - width:.1f}" height="18">'
        f"<title>{lost} left out</title></rect></svg>"
        f"<p>{story.rows:,} rows = {story.delivered:,} trained + {lost:,} left out. Of these "
        f"{story.plan['left_out']:,} are in no pack, and {story.failed:,} failed when decoded: counting "
        f"reads headers only. By reason: {_told(story.ledger.samples_by_reason(gone=True))}.</p>"
        f"<p>Trained, but not as the file has them: {_told(story.ledger.samples_by_reason(gone=False))}.</p>"
    )


def _told(counts: Mapping[str, int]) -> str:
    return escape(", ".join(f"{number} {name}" for name, number in counts.items()) or "none")


def _ledger_table(story: Story) -> str:
    rows = [tuple(map(escape, (one.key, one.action, one.reason, one.detail))) for one in story.ledger]
    return _table(("row", "what became of it", "reason", "detail"), rows)


def _findings_table(story: Story) -> str:
    rows = [tuple(map(escape, (key, severity, rule, found))) for severity, rule, key, found in story.findings]
    return _table(("row", "severity", "rule", "found"), rows)


def _commands(story: Story) -> str:
    rows = [(f"<code>{escape(command)}</code>", escape(about)) for command, about in story.next_commands()]
    return _table(("command", "shows"), rows)


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are markup."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>\n"
