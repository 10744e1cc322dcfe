"""``packhorse stats``: show the distributions of tokens and media as tables and histograms."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

import typer

from packhorse.cli import terminal
from packhorse.utils.progress import Progress

if TYPE_CHECKING:
    from packhorse.count.columns import Distribution
    from packhorse.tools.stats import DatasetStats, StatsReport

_WIDTH = 80  # if stdout is not a terminal
_MAX_BARS = 18
_PERCENTILES = ("p90", "p99", "max")
_BLOCKS = " ▏▎▍▌▋▊▉█"

EXAMPLES = terminal.examples(
    "stats",
    "Exit code 0: shown, 2: the data cannot be read or counted.",
    {
        "meta.json": "fast, with estimated token counts",
        "meta.json --processor ./model": "exact; counts rows that are not counted yet",
        "meta.json --processor ./model -v": "also media, image sizes, histograms and the longest rows",
        "meta.json --dataset charts --json": "percentiles and histograms as JSON",
    },
)


def stats(
    meta: terminal.META,
    processor: Annotated[str | None, terminal.processor("; without it tokens are estimated")] = None,
    datasets: terminal.DATASETS = None,
    task: terminal.TASK = None,
    each: Annotated[bool, terminal.flag("--each", "Draw the histograms of each dataset.")] = False,
    longest: Annotated[
        int | None,
        terminal.number("List this number of longest rows of each dataset; default with -v: 5.", 0),
    ] = None,
    num_workers: terminal.WORKERS = None,
    trust_remote_code: terminal.TRUST = False,
    verbose: terminal.VERBOSE = False,
    as_json: terminal.AS_JSON = False,
) -> None:
    """Show the distributions of tokens, media and the supervised share over the rows of each dataset.

    With --processor token counts are exact, and saved next to the data.
    """
    with terminal.one_line_errors("stats", "the next run reuses the finished parts", verbose):
        from packhorse.count.engines import make_engine
        from packhorse.tools.stats import compute_stats

        with Progress("estimating" if processor is None else "counting") as progress:
            report = compute_stats(
                meta,
                processor,
                dataset_names=datasets or None,
                task=terminal.task_of(task),
                engine=make_engine("local", num_workers),
                trust_remote_code=trust_remote_code,
                longest=5 if longest is None else longest,
                progress=progress,
            )
    if as_json:
        typer.echo(terminal.to_json(report.as_dict()))
    else:
        _print(report, each, verbose, list_longest=verbose or longest is not None)


def _print(report: StatsReport, each: bool, verbose: bool, list_longest: bool) -> None:
    out = terminal.Output(_WIDTH)
    if report.estimated:
        out.line(
            "ESTIMATES: a token is 3 characters, a media item 500 tokens. Numbers of rows and\n"
            "media and image sizes are exact. Use --processor for exact token counts.",
            style="yellow",
        )
    elif report.off_by:
        bound = f"at most {report.off_by:,} tokens" if report.off_by > 0 else "an unknown number"
        out.line(f"Counts of this processor are not exact: a row may be off by {bound}.", style="yellow")
    tables = [*report.datasets, report.all()] if len(report.datasets) > 1 else [*report.datasets]
    _print_tokens(tables, report.estimated, out)
    if verbose:
        _print_media(tables, report.estimated, out)
    else:
        out.line(_describe_media(tables[-1]))
    for dataset in tables if each else tables[-1:] if verbose else ():
        _print_histograms(dataset, report.estimated, out)
    about = "about " if report.estimated else ""
    for dataset in report.datasets if list_longest else ():
        if dataset.longest:
            out.line(f"{dataset.name}: the longest rows", style="bold")
        out.lines(f"  {row.key}, {about}{row.tokens:,} tokens, {row.location}" for row in dataset.longest)
    for dataset in report.datasets:
        if dataset.bad:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in dataset.bad.items())
            out.line(f"{dataset.name}: excluded: {reasons}")
    if not report.estimated:
        reused = tables[-1].rows - report.counted_rows
        out.line(f"{report.counted_rows:,} rows counted, {reused:,} reused.")
    if not verbose:
        out.line("(-v adds tables of media and images, histograms and the longest rows.)")


def _describe_media(stats: DatasetStats) -> str:
    """Return the media of all rows: ``media: 200 images, 10 videos; 140 of 350 rows are text only``."""
    nouns = {"images": "image", "videos": "video", "audios": "audio clip"}
    media = [terminal.number_of(count, nouns[name]) for name, count in stats.media.items() if count]
    return f"media: {', '.join(media) or 'none'}; {stats.text_only:,} of {stats.rows:,} rows are text only"


def _print_tokens(datasets: Sequence[DatasetStats], estimated: bool, out: terminal.Output) -> None:
    """Print the tokens of a row, by dataset."""
    about = "~" if estimated else ""
    rows: list[list[terminal.Cell]] = []
    for dataset in datasets:
        spread = dataset.spreads["tokens"]
        supervised = f"{about}{dataset.supervised_share:.1%}" if spread.sum else "-"
        tokens = [about + short(spread.sum), f"{spread.mean:,.0f}"]
        rows.append([dataset.name, dataset.rows, *tokens, *_percentiles(dataset, "tokens"), supervised])
    out.table(
        f"Tokens of a row{' (estimated)' if estimated else ''}",
        ("dataset", "rows", "tokens", "mean", "p50", *_PERCENTILES, "supervised"),
        rows,
    )
    out.line(
        "(Tokens of the encoded rows. A plan counts them after the label shift: one less per row.)", wrap=True
    )
    for dataset in datasets:
        weight, number = dataset.supervised_weight, dataset.spreads["supervised_tokens"].sum
        if weight is not None and weight != number:
            out.line(f"{dataset.name}: loss weights sum to {weight:,.1f} over {number:,} supervised tokens")
    if bad := sum(datasets[-1].bad.values()):
        share = f"{bad:,} of {datasets[-1].rows:,} rows"
        out.line(f"({share} could not be counted; only the column `rows` includes them.)", wrap=True)


def _print_media(datasets: Sequence[DatasetStats], estimated: bool, out: terminal.Output) -> None:
    """Print the media of a row, and the sides and tokens of an image, by dataset."""
    out.table(
        "Media",
        ("dataset", "text only", "images", "videos", "audio", "a row p50", *_PERCENTILES),
        [
            [
                dataset.name,
                dataset.text_only,
                *dataset.media.values(),
                *_percentiles(dataset, "media_per_row"),
            ]
            for dataset in datasets
        ],
    )
    if datasets[-1].media["images"]:
        spreads = {"side": "image_side"} if estimated else {"side": "image_side", "tokens": "image_tokens"}
        columns = [column for name in spreads for column in (f"{name} p50", *_PERCENTILES)]
        rows: list[list[terminal.Cell]] = [
            [dataset.name, *(cell for name in spreads.values() for cell in _percentiles(dataset, name))]
            for dataset in datasets
        ]
        out.table("Images", ["dataset", *columns], rows)


def _percentiles(dataset: DatasetStats, name: str) -> list[terminal.Cell]:
    """Return percentiles and the largest value; dashes without values."""
    from packhorse.count.columns import PERCENTILES

    spread = dataset.spreads[name]
    values = [*(spread.percentile(percent) for percent in PERCENTILES), spread.max]
    return [value if spread.n else "-" for value in values]


def short(number: int) -> str:
    """Return a number in few characters: 1,234, 56.7k, 8.9M, 1.2G."""
    if number < 10_000:
        return f"{number:,}"
    units = ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k"))
    size, name = next(unit for unit in units if number >= unit[0])
    return f"{number / size:.1f}{name}"


def _print_histograms(dataset: DatasetStats, estimated: bool, out: terminal.Output) -> None:
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
        spread = dataset.spreads[name]
        # Skip histograms of zeros, such as the visual tokens of text.
        if not spread.n or (not spread.max and name != "supervised_percent"):
            continue
        out.line(f"{dataset.name}: {title}", style="bold")
        is_utf = out.console.encoding.lower().startswith("utf")
        out.lines(histogram_lines(spread, bins_for(name, spread), out.console.width, is_utf))
        out.line()


def bins_for(name: str, spread: Distribution) -> list[int]:
    """Return the edges of the bins: tens for a share, each number for few media, else powers of two."""
    if name == "supervised_percent":
        return [*range(0, 100, 10), 101]
    if name == "media_per_row" and spread.max < _MAX_BARS:
        return list(range(spread.max + 2))
    return spread.doubling_edges()


def histogram_lines(spread: Distribution, edges: Sequence[int], width: int, blocks: bool = True) -> list[str]:
    """Draw a histogram as lines of at most ``width`` characters: bin, bar, number, share.

    All values are between the first and the last edge. Bars are eighths of blocks, or ``#``.
    """
    counts = spread.histogram(edges)
    most, total = max(counts, default=0), max(1, spread.n)
    labels = [f"{low:,}" if high == low + 1 else f"{low:,}-{high - 1:,}" for low, high in pairwise(edges)]
    numbers = [f"{count:,}" for count in counts]
    left, right = max(map(len, labels), default=0), max(map(len, numbers), default=0)
    bar_width = max(8, min(width, 100) - left - right - 13)
    lines = []
    for label, count, number in zip(labels, counts, numbers, strict=True):
        bar = _bar(count / most * bar_width if most else 0.0, count > 0, blocks).ljust(bar_width)
        lines.append(
            f"  {label:>{left}} {'│' if blocks else '|'}{bar} {number:>{right}} {count / total:>6.1%}"
        )
    return lines


def _bar(length: float, has_value: bool, blocks: bool) -> str:
    """Draw a bar of this length; that of a bin with a value is never empty."""
    if not blocks:
        return "#" * max(round(length), int(has_value))
    eighths = max(round(length * 8), int(has_value))
    return "█" * (eighths // 8) + (_BLOCKS[eighths % 8] if eighths % 8 else "")
