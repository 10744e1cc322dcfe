"""``packhorse stats``: how long and how heavy the rows of datasets are, as tables and histograms."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

import typer

from packhorse.cli.terminal import (
    AS_JSON,
    DATASETS,
    META,
    TRUST,
    WORKERS,
    Cell,
    Output,
    one_line_errors,
    processor_option,
    to_json,
)
from packhorse.utils.progress import Progress

if TYPE_CHECKING:
    from packhorse.count.columns import Distribution
    from packhorse.tools.stats import DatasetStats, StatsReport


_WIDTH = 80  # of what goes to a file
_MOST_BARS = 18
_BLOCKS = " ▏▎▍▌▋▊▉█"

EXAMPLES = """
Exit code 0: shown, 2: something cannot be read or counted.

[bold]Examples[/bold]

packhorse stats meta.json
[dim]# a quick look: tokens are estimated, and called so[/dim]

packhorse stats meta.json --processor Qwen/Qwen3-VL-8B-Instruct
[dim]# exact; counts what is not counted yet, as packhorse count does[/dim]

packhorse stats meta.json --dataset charts --json
[dim]# for machines: percentiles and histograms[/dim]
"""


def stats(
    meta: META,
    processor: Annotated[str | None, processor_option("; estimates without it")] = None,
    datasets: DATASETS = None,
    each: Annotated[bool, typer.Option("--each", help="Draw the histograms of each dataset, too.")] = False,
    longest: Annotated[
        int, typer.Option(min=0, metavar="N", help="Name so many rows of each dataset, the longest first.")
    ] = 5,
    num_workers: WORKERS = None,
    trust_remote_code: TRUST = False,
    as_json: AS_JSON = False,
) -> None:
    """Show how tokens, media and the supervised share are spread over the rows of each dataset.

    With --processor everything is exact, and kept beside the data for the next time.
    """
    with one_line_errors("stats", "the next run continues with what is finished"):
        from packhorse.count.engines import make_engine
        from packhorse.tools.stats import stats_of

        with Progress("estimating" if processor is None else "counting") as progress:
            report = stats_of(
                meta,
                processor,
                dataset_names=datasets or None,
                engine=make_engine("local", num_workers),
                trust_remote_code=trust_remote_code,
                longest=longest,
                progress=progress,
            )
    if as_json:
        typer.echo(to_json(report.as_dict()))
    else:
        _print(report, each)


def _print(report: StatsReport, each: bool) -> None:
    out = Output(_WIDTH)
    if report.estimated:
        out.line(
            "ESTIMATES: without --processor a token is 3 characters and a media item 500 tokens.\n"
            "Rows, media and sizes of images are exact; everything about tokens is a guess.",
            style="yellow",
        )
    elif report.off_by:
        bound = f"at most {report.off_by:,} tokens" if report.off_by > 0 else "an unknown number"
        out.line(f"Counts of this processor are not exact: a row may be off by {bound}.", style="yellow")
    every = [*report.datasets, report.all()] if len(report.datasets) > 1 else [*report.datasets]
    _print_tables(every, report.estimated, out)
    for one in every if each else every[-1:]:
        _print_histograms(one, report.estimated, out)
    about = "about " if report.estimated else ""
    for one in report.datasets:
        if one.longest:
            out.line(f"{one.name}: the longest rows", style="bold")
        out.lines(f"  {row.key}, {about}{row.tokens:,} tokens, {row.location}" for row in one.longest)
    for one in report.datasets:
        if one.bad:
            reasons = ", ".join(f"{number:,} {reason}" for reason, number in one.bad.items())
            out.line(f"{one.name}: not in these numbers: {reasons}")
    if not report.estimated:
        reused = every[-1].rows - report.counted_rows
        out.line(f"{report.counted_rows:,} rows counted, {reused:,} reused.")


def _print_tables(every: Sequence[DatasetStats], estimated: bool, out: Output) -> None:
    """Print a table of tokens, one of media and one of images, with a row for each dataset."""
    about, percentiles = "~" if estimated else "", ("p90", "p99", "max")
    rows: list[list[Cell]] = []
    for one in every:
        spread = one.spreads["tokens"]
        supervised = f"{about}{one.supervised_share:.1%}" if spread.sum else "-"
        tokens = [about + short(spread.sum), f"{spread.mean:,.0f}"]
        rows.append([one.name, one.rows, *tokens, *_marks(one, "tokens"), supervised])
    out.table(
        f"Tokens of a row{' (estimated)' if estimated else ''}",
        ("dataset", "rows", "tokens", "mean", "p50", *percentiles, "supervised"),
        rows,
    )
    out.line(
        "(Tokens are those of the encoded rows. A plan tells them after the label shift: one less a row.)",
        wrap=True,
    )
    if bad := sum(every[-1].bad.values()):
        share = f"{bad:,} of {every[-1].rows:,} rows"
        out.line(f"({share} could not be counted, and are in no number but `rows`: see below.)", wrap=True)
    out.table(
        "Media",
        ("dataset", "text only", "images", "videos", "sounds", "a row p50", *percentiles),
        [[one.name, one.text_only, *one.media.values(), *_marks(one, "media_per_row")] for one in every],
    )
    if every[-1].media["images"]:
        spreads = {"side": "image_side"} if estimated else {"side": "image_side", "tokens": "image_tokens"}
        columns = [column for name in spreads for column in (f"{name} p50", *percentiles)]
        marks = [[mark for name in spreads.values() for mark in _marks(one, name)] for one in every]
        rows = [[one.name, *cells] for one, cells in zip(every, marks, strict=True)]
        out.table("Images", ["dataset", *columns], rows)


def _marks(one: DatasetStats, name: str) -> list[Cell]:
    """Return percentiles and the largest value; dashes without values."""
    from packhorse.count.columns import PERCENTILES

    spread = one.spreads[name]
    marks = [*(spread.percentile(percent) for percent in PERCENTILES), spread.max]
    return [mark if spread.n else "-" for mark in marks]


def short(number: int) -> str:
    """Return a number in few characters: 1,234, 56.7k, 8.9M, 1.2G."""
    if number < 10_000:
        return f"{number:,}"
    for unit, name in ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")):
        if number >= unit:
            return f"{number / unit:.1f}{name}"
    return str(number)


def _print_histograms(one: DatasetStats, estimated: bool, out: Output) -> None:
    about = ", estimated" if estimated else ""
    titles = {
        "tokens": f"tokens of a row{about}",
        "visual_tokens": f"visual tokens of a row{about}",
        "supervised_percent": f"share of a row that is supervised, %{about}",
        "media_per_row": "media of a row",
        "image_side": "longer side of an image, pixels",
        "image_tokens": "tokens of an image",
    }
    for name, title in titles.items():
        spread = one.spreads[name]
        # A histogram of zeros alone, as of visual tokens in text, shows nothing.
        if not spread.n or (not spread.max and name != "supervised_percent"):
            continue
        out.line(f"{one.name}: {title}", style="bold")
        is_utf = out.console.encoding.lower().startswith("utf")
        out.lines(histogram_lines(spread, bins_for(name, spread), out.console.width, is_utf))
        out.line()


def bins_for(name: str, spread: Distribution) -> list[int]:
    """Return edges: tens for a share, each number for few media, otherwise bins that double."""
    if name == "supervised_percent":
        return [*range(0, 100, 10), 101]
    if name == "media_per_row" and spread.max < _MOST_BARS:
        return list(range(spread.max + 2))
    return spread.doubling_edges()


def histogram_lines(spread: Distribution, edges: Sequence[int], width: int, blocks: bool = True) -> list[str]:
    """Draw a histogram as lines of at most ``width`` characters: bin, bar, number, share.

    Args:
        spread: what is drawn.
        edges: of the bins, ascending; all values lie between the first and the last.
        width: of the terminal.
        blocks: draw with eighths of blocks; otherwise with ``#``.
    """
    counts = spread.histogram(edges)
    most, total = max(counts, default=0), max(1, spread.n)
    labels = [_bin(low, high) for low, high in pairwise(edges)]
    numbers = [f"{count:,}" for count in counts]
    left, right = max(map(len, labels), default=0), max(map(len, numbers), default=0)
    room = max(8, min(width, 100) - left - right - 13)
    lines = []
    for label, count, number in zip(labels, counts, numbers, strict=True):
        bar = _bar(count / most * room if most else 0.0, count > 0, blocks).ljust(room)
        lines.append(
            f"  {label:>{left}} {'│' if blocks else '|'}{bar} {number:>{right}} {count / total:>6.1%}"
        )
    return lines


def _bin(low: int, high: int) -> str:
    return f"{low:,}" if high == low + 1 else f"{low:,}-{high - 1:,}"


def _bar(length: float, some: bool, blocks: bool) -> str:
    """Draw a bar of this length; a bin with a value is never empty."""
    if not blocks:
        return "#" * max(round(length), int(some))
    eighths = max(round(length * 8), int(some))
    return "█" * (eighths // 8) + (_BLOCKS[eighths % 8] if eighths % 8 else "")
