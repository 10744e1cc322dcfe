"""``packhorse plan``: from counts to a saved plan, and what it is worth."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packhorse.cli.check import progress_bar
from packhorse.cli.count import _plain

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH = 100  # of what goes to a file

EXAMPLES = """
[bold]Examples[/bold]

packhorse plan meta.json --processor Qwen/Qwen3-VL-8B-Instruct
[dim]# counts what is not counted yet, plans packs of 8,192 tokens, writes meta.phplan[/dim]

packhorse plan meta.json --processor ./model --pack-size 16384 --max-patches 40000 --out big.phplan
[dim]# a further limit, as a guard of memory[/dim]

packhorse plan meta.json --processor ./model --json > plan.json
[dim]# the same numbers for machines[/dim]

packhorse view meta.phplan
[dim]# look at the packs in a browser[/dim]
"""


class OnOverlong(str, Enum):
    """What becomes of samples that are longer than a pack."""

    drop = "drop"
    truncate = "truncate"
    raise_ = "raise"


def plan(
    meta: Annotated[str, typer.Argument(help="The meta file: which data sets there are.", metavar="META")],
    processor: Annotated[str, typer.Option(help="Folder (or hub name) of the model's processor.")],
    pack_size: Annotated[int, typer.Option(min=1, help="The most tokens of a pack.")] = 8192,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write the plan; META with .phplan without it."),
    ] = None,
    max_patches: Annotated[int | None, typer.Option(min=1, help="The most vision patches of a pack.")] = None,
    max_media: Annotated[int | None, typer.Option(min=1, help="The most media of a pack.")] = None,
    max_documents: Annotated[int | None, typer.Option(min=1, help="The most samples of a pack.")] = None,
    alignment: Annotated[
        int, typer.Option(min=1, help="Each sample takes up a multiple of so many tokens.")
    ] = 1,
    on_overlong: Annotated[
        OnOverlong, typer.Option(help="What becomes of samples longer than a pack.")
    ] = OnOverlong.drop,
    seed: Annotated[int, typer.Option(help="Deals samples of one length at random.")] = 0,
    epoch: Annotated[int, typer.Option(min=0, help="Which epoch to plan.")] = 0,
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder (or hub name) with the model's config, for costs; the processor's if it has one."
        ),
    ] = None,
    datasets: Annotated[
        list[str] | None, typer.Option("--dataset", help="Only this data set; may be given again.")
    ] = None,
    estimates: Annotated[
        bool, typer.Option(help="Compare with estimated lengths, for which rows are read.")
    ] = True,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes to count with; one per core without it.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", metavar="", help="Run code that comes with the processor.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print the numbers as JSON.")] = False,
) -> None:
    """Plan the packs of an epoch, exactly as the loader will train them, and save the plan.

    Says how full the packs are, how even the steps, which rows are left out and why, and what padding or
    estimated lengths would have cost.
    """
    from rich.console import Console

    from packhorse.errors import PackhorseError

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        from packhorse.loader.config import LoaderConfig
        from packhorse.view.plan_book import save_book
        from packhorse.view.planning import Request, make_plan
        from packhorse.view.report import plan_report

        target = out if out is not None else beside(meta)
        config = LoaderConfig(
            data=meta,
            dataset_names=datasets or None,
            pack_size=pack_size,
            max_patches=max_patches,
            max_media=max_media,
            max_documents=max_documents,
            alignment=alignment,
            on_overlong=on_overlong.value,
            seed=seed,
            count_workers=workers,
        )
        planned = make_plan(Request(config, processor, model, epoch, trust_remote_code))
        with progress_bar(errors, "estimating") as progress:
            report = plan_report(planned, estimates=estimates, progress=progress)
        target.parent.mkdir(parents=True, exist_ok=True)
        save_book(planned, report, target)
    except (PackhorseError, OSError) as error:
        errors.print(f"packhorse plan: {_plain(error)}", markup=False)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        errors.print("stopped; no plan was written (what was counted is kept)")
        raise typer.Exit(130) from error
    if as_json:
        typer.echo(json.dumps({**report, "plan": str(target)}, indent=2))
    else:
        _print(report, target)


def beside(meta: str) -> Path:
    """Where a plan goes if nothing else was said: beside the meta file.

    Raises:
        ConfigError: that is no local file.
    """
    from packhorse.errors import ConfigError
    from packhorse.media.source import is_address

    if is_address(meta):
        raise ConfigError(f"{meta} is not on this machine: say with --out where to write the plan")
    return Path(meta).with_suffix(".phplan")


def _print(report: Mapping[str, Any], target: Path) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=_WIDTH, highlight=False)
    for name, text in summary_lines(report):
        console.print(f"{name:<10} {text}", markup=False, soft_wrap=True)
    console.print()
    _print_stragglers(report, console)
    _print_costs(report, console)
    _print_left_out(report, console)
    console.print(f"plan in {target}; look at it: packhorse view {target}", markup=False, soft_wrap=True)


def summary_lines(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The plan in a few lines: a name and what there is to say."""
    documents = report["documents_per_pack"]
    quartiles = ", ".join(f"{documents[name]:,}" for name in ("min", "p25", "p50", "p75", "max"))
    kept = f" ({report['reserve']:,} are kept free for a placeholder)" if report["reserve"] else ""
    packed, rows = report["packed"], report["rows"]
    share = f"{packed / rows:.2%}" if rows else "-"
    return [
        ("rows", f"{packed:,} of {rows:,} packed ({share}), {report['left_out']:,} left out"),
        (
            "packs",
            f"{report['packs']:,} of {report['pack_size']:,} tokens (no plan has fewer than "
            f"{report['fewest_packs']:,})",
        ),
        ("fill", f"{report['fill']:.3%} of {report['capacity']:,} tokens{kept}: {report['tokens']:,} tokens"),
        ("per pack", f"{documents['mean']:.2f} samples (least, quartiles, most: {quartiles})"),
    ]


def _print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], console: Console) -> None:
    """A table under its title, the first column to the left and all others to the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(title, soft_wrap=True)
    console.print(table)


def _print_stragglers(report: Mapping[str, Any], console: Console) -> None:
    from packhorse.view.report import WORLD_SIZES

    rows = [
        (
            f"{one['ranks']:,}",
            f"{one['steps']:,}",
            f"{one['ratio']:.4f}",
            "-" if one["random"] is None else f"{one['random']:.4f}",
        )
        for one in report["straggler"]
        if one["ranks"] in WORLD_SIZES
    ]
    title = "Straggler ratio: what the slowest rank of a step takes, over the mean of all"
    _print_table(title, ("ranks", "steps", "planned", "at random"), rows, console)


def _print_costs(report: Mapping[str, Any], console: Console) -> None:
    padding, guessed = report["padding"], report["estimated"]
    batch = padding["batch_size"]
    ways = (
        ("these packs", padding["packed"]),
        (f"padded, {batch} of similar length", padding["by_length"]),
        (f"padded, {batch} at random", padding["random"]),
    )
    rows = [(name, f"{way['slots']:,}", f"{way['wasted']:.1%}") for name, way in ways]
    title = "What the same rows cost: slots are tokens that the model computes"
    _print_table(title, ("way", "slots", "wasted"), rows, console)
    if guessed is not None:
        console.print(
            f"Packed by estimated lengths, {guessed['lost']:,} of {guessed['rows']:,} rows "
            f"({guessed['lost_share']:.1%}) would have been lost: {guessed['lost_overflow']:,} overflow, "
            f"{guessed['lost_too_long']:,} taken for too long; the packs would have been "
            f"{1 - guessed['fill']:.1%} empty. An estimate is off by {guessed['error_mean']:,.0f} tokens "
            "on average.",
            soft_wrap=True,
        )


def _print_left_out(report: Mapping[str, Any], console: Console) -> None:
    console.print()
    for reason, number in report["not_drawn"].items():
        console.print(f"before planning: {number:,} {reason}", markup=False, soft_wrap=True)
    if not report["reasons"]:
        console.print("every row is in a pack")
    for one in report["reasons"]:
        more = ", …" if one["rows"] > len(one["keys"]) else ""
        console.print(
            f"left out: {one['rows']:,} {one['reason']} ({', '.join(one['keys'])}{more}): "
            f"{' '.join(one['detail'].split())}",
            markup=False,
            soft_wrap=True,
        )
