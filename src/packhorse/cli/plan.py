"""``packhorse plan``: from counts to a saved plan, and what it is worth."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from packhorse.cli.terminal import (
    AS_JSON,
    DATASETS,
    META,
    PROCESSOR,
    TRUST,
    WORKERS,
    Output,
    number_of,
    one_line_errors,
    own_command,
    to_json,
)
from packhorse.types import MEDIA_KINDS
from packhorse.utils.progress import Progress

_WIDTH = 100  # of what goes to a file

WHY_PACK = (
    "(The loader delivers packs as they are; pad_to_size=True pads them. Sorting by length may waste "
    "little, too, but makes batches of one length and kind of row, and no two of the same size: packs mix "
    "the data, and steps stay even.)"
)
NOT_DECODED = (
    "(No media item was decoded: one that is damaged inside fails in training, and is in the ledger then; "
    "`packhorse check` finds it now.)"
)

EXAMPLES = """
Exit code 0: planned (rows that are dropped are told), 2: could not be planned.

[bold]Examples[/bold]

packhorse plan meta.json --processor Qwen/Qwen3-VL-8B-Instruct
[dim]# counts what is not counted yet, plans packs of 8,192 tokens, writes meta.phplan[/dim]

packhorse plan meta.json --processor ./model --pack-size 16384 --max-patches 40000 --out big.phplan
[dim]# a further limit, as a guard of memory[/dim]

packhorse plan meta.json --processor ./model --pack-size 2048,4096,8192
[dim]# what does another size give? A table, no file[/dim]

packhorse plan meta.json --processor ./model --ranks 24,48
[dim]# how even are the steps on my 24 or 48 GPUs?[/dim]

packhorse plan meta.json --processor ./model --json > plan.json
[dim]# the same numbers for machines[/dim]

packhorse view meta.phplan
[dim]# look at the packs in a browser[/dim]
"""


class Placeholder(str, Enum):
    """Whether packs reserve space for a placeholder image."""

    auto = "auto"
    never = "never"


class OnOverlong(str, Enum):
    """What becomes of samples that are longer than a pack."""

    drop = "drop"
    truncate = "truncate"
    raise_ = "raise"


def plan(
    meta: META,
    processor: PROCESSOR,
    pack_size: Annotated[
        str,
        typer.Option(
            metavar="N[,N]…",
            help="The most tokens of a pack; several sizes are compared, and no plan is written.",
        ),
    ] = "8192",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where to write the plan, in a folder that is there; META with .phplan without it.",
        ),
    ] = None,
    max_patches: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="The most vision patches of a pack.")
    ] = None,
    max_media: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="The most media of a pack.")
    ] = None,
    max_documents: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="The most samples of a pack.")
    ] = None,
    alignment: Annotated[
        int, typer.Option(min=1, metavar="N", help="Each sample takes up a multiple of so many tokens.")
    ] = 1,
    on_overlong: Annotated[
        OnOverlong,
        typer.Option(metavar="HOW", help="Samples longer than a pack: drop, truncate or raise."),
    ] = OnOverlong.drop,
    placeholder: Annotated[
        Placeholder,
        typer.Option(
            metavar="HOW", help="Room for a blank media item in packs of mixed data: auto or never."
        ),
    ] = Placeholder.auto,
    max_bad_share: Annotated[
        float,
        typer.Option(min=0, max=1, metavar="X", help="Say so if the loader would stop at so many bad rows."),
    ] = 0.01,
    seed: Annotated[int, typer.Option(metavar="N", help="Deals samples of one length at random.")] = 0,
    epoch: Annotated[int, typer.Option(min=0, metavar="N", help="Which epoch to plan.")] = 0,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Folder (or hub name) with the model's config, for costs; the processor's if it has one.",
        ),
    ] = None,
    ranks: Annotated[
        list[str] | None,
        typer.Option(
            "--ranks",
            metavar="N[,N]…",
            help="Tell the straggler ratio for so many ranks, too; may be given again.",
        ),
    ] = None,
    datasets: DATASETS = None,
    no_estimates: Annotated[
        bool,
        typer.Option(
            "--no-estimates", help="Do not compare with estimated lengths, for which rows are read."
        ),
    ] = False,
    num_workers: WORKERS = None,
    trust_remote_code: TRUST = False,
    as_json: AS_JSON = False,
) -> None:
    """Plan the packs of an epoch, exactly as the loader will train them, and save the plan.

    Says how full the packs are, how even the steps, which rows are dropped and why, and what padding or
    estimated lengths would have cost.

    Media are not decoded: one that is damaged inside is found by packhorse check, or in training.
    """
    with one_line_errors("plan", "no plan was written (what was counted is kept)"):
        from packhorse.errors import ConfigError
        from packhorse.loader.config import LoaderConfig
        from packhorse.tools.view.plan_report import plan_report, sizes_report
        from packhorse.tools.view.saved_plan import PlanRequest, make_plan, save_plan

        sizes = numbers_in("--pack-size", [pack_size])
        one_only = {"--out": out, "--ranks": ranks, "--no-estimates": no_estimates}
        if len(sizes) > 1 and (given := [name for name, value in one_only.items() if value]):
            raise ConfigError(
                f"{given[0]} goes with one --pack-size: several are compared, and no plan is written"
            )
        target = out if out is not None else default_target(meta) if len(sizes) == 1 else None
        if target is not None:
            check_target(target)  # before the long work
        asked = numbers_in("--ranks", ranks or ())
        config = LoaderConfig(
            data=meta,
            dataset_names=datasets or None,
            pack_size=sizes[0],
            max_patches=max_patches,
            max_media=max_media,
            max_documents=max_documents,
            alignment=alignment,
            on_overlong=on_overlong.value,
            placeholder=placeholder.value,
            max_bad_share=max_bad_share,
            seed=seed,
            count_workers=num_workers,
        )
        request = PlanRequest(config, processor, model, epoch, trust_remote_code)
        if target is None:
            report = sizes_report(request, sizes)
        else:
            planned = make_plan(request)
            with Progress("estimating") as progress:
                report = plan_report(planned, ranks=asked, estimates=not no_estimates, progress=progress)
            save_plan(planned, report, target)
            report["plan"] = str(target)
    if as_json:
        typer.echo(to_json(report))
    elif target is None:
        _print_sizes(report)
    else:
        _print(report, target, asked)


def default_target(meta: str) -> Path:
    """Return where a plan goes without ``--out``: next to the meta file.

    Raises:
        ConfigError: that is no local file.
    """
    from packhorse.errors import ConfigError
    from packhorse.media.source import is_address

    if is_address(meta):
        raise ConfigError(f"{meta} is not on this machine: say with --out where to write the plan")
    return Path(meta).with_suffix(".phplan")


def check_target(target: Path) -> None:
    """Raise if a plan cannot be written there, as far as that is known before writing.

    Raises:
        ConfigError: it is a folder, or the folder above it is not there or may not be written to.
    """
    from packhorse.errors import ConfigError

    if target.is_dir():
        raise ConfigError(f"{target} is a folder: name a file with --out")
    above = target.absolute().parent
    if not above.exists():
        raise ConfigError(f"{target} cannot be written: there is no folder {above}; make it, or name another")
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"{target} cannot be written: no right to write to {above}; name another --out")


def numbers_in(option: str, given: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of ``--ranks 24 --ranks 48,96``, each once and in order.

    Raises:
        ConfigError: one of them is no number from 1 upwards.
    """
    from packhorse.errors import ConfigError

    words = [word.strip() for one in given for word in one.split(",")]
    if wrong := [word for word in words if not word.isascii() or not word.isdigit() or int(word) < 1]:
        raise ConfigError(f"{option} {wrong[0]}: expected numbers from 1 upwards, as {option} 24,48")
    return tuple(sorted(set(map(int, words))))


def _print(report: Mapping[str, Any], target: Path, asked: Sequence[int]) -> None:
    out = Output(_WIDTH)
    out.lines(f"{name:<10} {text}" for name, text in summary_lines(report))
    out.line()
    _print_stragglers(report, asked, out)
    print_costs(report, out)
    print_dropped(report, out)
    out.line(f"plan in {target}; look at it: {own_command()} view {target}")


def _print_sizes(report: Mapping[str, Any]) -> None:
    """Print a table of pack sizes, and what padding costs."""
    out = Output(_WIDTH)
    rows = [
        (
            f"{one['pack_size']:,}",
            one["packs"],
            f"{one['fill']:.2%}",
            f"{one['padded_wasted']:.1%}",
            f"{one['documents_per_pack']['mean']:.1f}",
            one["dropped"],
            one["too_long"],
            f"{one['straggler_8']:.4f}",
        )
        for one in report["sizes"]
    ]
    columns = ("pack size", "packs", "fill", "padded*", "per pack", "dropped", "too long", "8 ranks")
    out.table("Pack sizes compared; no plan is written", columns, rows)
    padding = report["padding"]
    out.line(
        "* wasted where every pack is padded to its size (pad_to_size=True). 8 ranks: the straggler ratio.\n"
        f"Without packs, {padding['batch_size']} rows padded to the longest: "
        f"{padding['by_length']['wasted']:.1%} wasted where they are of similar length, "
        f"{padding['random']['wasted']:.1%} at random."
    )


def summary_lines(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Describe the plan in a few lines: (name, text)."""
    documents = report["documents_per_pack"]
    quartiles = ", ".join(f"{documents[name]:,}" for name in ("min", "p25", "p50", "p75", "max"))
    kept = f" ({report['reserve']:,} are kept free for a placeholder)" if report["reserve"] else ""
    packed, rows = report["packed"], report["rows"]
    share = f"{packed / rows:.2%}" if rows else "-"
    return [
        ("rows", f"{packed:,} of {rows:,} packed ({share}), {report['dropped']:,} dropped"),
        (
            "packs",
            f"{report['packs']:,} of {report['pack_size']:,} tokens (no plan has fewer than "
            f"{report['fewest_packs']:,})",
        ),
        (
            "fill",
            f"{report['fill']:.3%} of {report['capacity']:,} tokens{kept}: {report['tokens']:,} tokens "
            "after the label shift (one less a row)",
        ),
        ("per pack", f"{documents['mean']:.2f} samples (least, quartiles, most: {quartiles})"),
    ]


def _print_stragglers(report: Mapping[str, Any], asked: Sequence[int], out: Output) -> None:
    from packhorse.tools.view.plan_report import WORLD_SIZES

    rows = [
        (f"{one['ranks']:,}", one["steps"], f"{one['ratio']:.4f}", f"{one['random']:.4f}")
        for one in report["straggler"]
        if one["ranks"] in (*WORLD_SIZES, *asked)
    ]
    title = "Straggler ratio: what the slowest rank of a step takes, over the mean of all (mean of all steps)"
    out.table(title, ("ranks", "steps", "planned", "at random"), rows)


def print_costs(report: Mapping[str, Any], out: Output) -> None:
    """Print what padding and estimated lengths would have cost."""
    padding = report["padding"]
    ways = {
        "packed_unpadded": "these packs, as they are",
        "packed": f"these packs, padded to {report['pack_size']:,}",
        "by_length": f"padded, {padding['batch_size']} of similar length",
        "random": f"padded, {padding['batch_size']} at random",
    }
    rows = [(text, padding[name]["slots"], f"{padding[name]['wasted']:.1%}") for name, text in ways.items()]
    title = "What the same rows cost: slots are tokens that the model computes"
    out.table(title, ("way", "slots", "wasted"), rows)
    out.line(WHY_PACK)
    if (guessed := report["estimated"]) is not None:
        out.line(
            f"Packed by estimated lengths, {guessed['lost']:,} of {guessed['rows']:,} rows "
            f"({guessed['lost_share']:.1%}) would have been lost: {guessed['lost_overflow']:,} overflow, "
            f"{guessed['lost_too_long']:,} taken for too long; the packs would have been "
            f"{1 - guessed['fill']:.1%} empty. An estimate is off by {guessed['error_mean']:,.0f} tokens "
            "on average."
        )


def print_dropped(report: Mapping[str, Any], out: Output) -> None:
    """Print which rows are in no pack and why, and other remarks on rows."""
    from packhorse.tools.view.plan_report import bad_rows_warning

    out.line()
    out.lines(f"before planning: {number:,} {reason}" for reason, number in report["not_drawn"].items())
    if not report["reasons"]:
        out.line("every row is in a pack")
    for one in report["reasons"]:
        detail = " ".join(one["detail"].split())
        out.line(f"dropped: {one['rows']:,} {one['reason']} ({_some_keys(one)}): {detail}")
    empty = report["nothing_supervised"]
    if empty["rows"]:
        rows = number_of(empty["rows"], "row has", "rows have")
        out.line(f"packed all the same: {rows} nothing to learn ({_some_keys(empty)})")
    if any(one[kind] for one in report["datasets"] for kind in MEDIA_KINDS):
        out.line(NOT_DECODED)
    if warning := bad_rows_warning(report):
        out.line(f"WARNING: {warning}", style="bold red")


def _some_keys(group: Mapping[str, Any]) -> str:
    return ", ".join([*group["keys"], *(["…"] if group["rows"] > len(group["keys"]) else [])])
