"""``packhorse plan``: plan the packs of an epoch, and report how good the plan is."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from packhorse.cli import terminal
from packhorse.errors import ConfigError
from packhorse.types import MEDIA_KINDS

_WIDTH = 100  # if stdout is not a terminal

COMPARED = (
    "(Padding: share of the computed tokens. Straggler: slowest rank of a step over the mean. Time: of an "
    "epoch, relative to these packs, by the cost model. All methods train the same rows.)"
)
TRL_REJECTS_MEDIA = "(TRL packs text only: SFTTrainer raises an error if packing is on and rows have images.)"
NOT_DECODED = (
    "(Media were not decoded: a damaged media item fails in training and is then in the ledger; "
    "`packhorse check` finds it now.)"
)

EXAMPLES = terminal.examples(
    "plan",
    "Exit code 0: planned (dropped rows are listed), 2: the data could not be planned.",
    {
        "meta.json --processor ./model": "packs of 8,192 tokens; count rows if needed; write meta.phplan",
        "meta.json --processor ./model --max-patches 40000": "also limit the vision patches of a pack",
        "meta.json --processor ./model --pack-size 2048,4096,8192": "compare pack sizes; write no plan",
        "meta.json --processor ./model --sweep max_pixels=200704,401408": "compare budgets of pixels",
        "meta.json --processor ./model --ranks 24,48": "also show the straggler ratio on 24 and 48 GPUs",
        "meta.json --processor ./model --json > plan.json": "the same numbers as JSON",
    },
)


Placeholder = Enum("Placeholder", {"auto": "auto", "never": "never"}, type=str)
OnOverlong = Enum("OnOverlong", {"drop": "drop", "truncate": "truncate", "raise": "raise"}, type=str)


def plan(
    meta: terminal.META,
    processor: terminal.PROCESSOR,
    pack_size: Annotated[
        str, terminal.text("N[,N]…", "Tokens of a pack; several sizes are compared, without writing a plan.")
    ] = "8192",
    out: Annotated[
        Path | None, terminal.text("FILE", "Where to write the plan; default: META with the suffix .phplan.")
    ] = None,
    max_patches: Annotated[int | None, terminal.number("Largest number of vision patches of a pack.")] = None,
    max_media: Annotated[int | None, terminal.number("Largest number of media items of a pack.")] = None,
    max_documents: Annotated[int | None, terminal.number("Largest number of samples of a pack.")] = None,
    alignment: Annotated[int, terminal.number("Pad each sample to a multiple of this number of tokens.")] = 1,
    on_overlong: Annotated[
        OnOverlong, terminal.text("HOW", "Samples longer than a pack: drop, truncate or raise.")
    ] = OnOverlong.drop,
    placeholder: Annotated[
        Placeholder, terminal.text("HOW", "Reserve tokens for a placeholder media item: auto or never.")
    ] = Placeholder.auto,
    max_bad_share: Annotated[
        float, terminal.number("Warn if the loader would stop at this share of bad rows.", 0, 1)
    ] = 0.01,
    seed: Annotated[int, terminal.number("Seed for the order of samples and packs.", None)] = 0,
    epoch: Annotated[int, terminal.number("The epoch to plan.", 0)] = 0,
    cost_weights: Annotated[
        Path | None,
        terminal.text("FILE", "Weights of packhorse calibrate; default: the model's operations."),
    ] = None,
    model: Annotated[
        str | None,
        terminal.text("DIR", "Folder (or Hub name) of the model's config; default: the processor's."),
    ] = None,
    ranks: Annotated[
        list[str] | None,
        terminal.text("N[,N]…", "Also show the straggler ratio for these numbers of ranks.", "--ranks"),
    ] = None,
    sweep: Annotated[
        str | None,
        terminal.text("NAME=N[,N]…", "Compare values of a media setting such as max_pixels; write no plan."),
    ] = None,
    datasets: terminal.DATASETS = None,
    task: terminal.TASK = None,
    num_workers: terminal.WORKERS = None,
    trust_remote_code: terminal.TRUST = False,
    verbose: terminal.VERBOSE = False,
    as_json: terminal.AS_JSON = False,
) -> None:
    """Plan the packs of an epoch, exactly as the loader will train them, and save the plan.

    Shows how full the packs are, how evenly ranks are loaded, which rows are dropped and why, and how long
    padded batches or TRL's packing would take. Media are not decoded; packhorse check finds damaged ones.
    """
    with terminal.one_line_errors("plan", "no plan was written (finished counts are kept)", verbose):
        from packhorse.formats.meta import task_of_meta
        from packhorse.loader.config import LoaderConfig
        from packhorse.media.source import is_address
        from packhorse.tools.sweep import parse_sweep, sweep_report
        from packhorse.tools.view.plan_report import plan_report, sizes_report
        from packhorse.tools.view.saved_plan import PlanRequest, make_plan, save_plan

        sizes = numbers_in("pack_size", [pack_size])
        swept = None if sweep is None else parse_sweep(sweep)
        if swept is not None and (out or ranks or len(sizes) > 1):
            given = "omit --out" if out else "omit --ranks" if ranks else "give one pack size"
            raise ConfigError(f"--sweep compares values without a plan: {given}", setting="sweep")
        if len(sizes) > 1 and (out or ranks):
            given = "--out" if out else "--ranks"
            raise ConfigError(
                f"{given} needs a single pack_size: several are compared without a plan",
                setting="pack_size",
                value=sizes,
            )
        target = out
        if out is None and len(sizes) == 1 and swept is None:
            if is_address(meta):
                problem = "is not a local file: give a path for the plan with --out"
                raise ConfigError(f"{meta} {problem}", path=meta)
            target = Path(meta).with_suffix(".phplan")
        if target is not None:
            check_target(target)  # before the long work
        world_sizes = numbers_in("ranks", ranks or ())
        config = LoaderConfig(
            data=meta,
            dataset_names=datasets or None,
            task=terminal.task_of(task) or task_of_meta(meta, datasets or None),
            pack_size=sizes[0],
            max_patches=max_patches,
            max_media=max_media,
            max_documents=max_documents,
            alignment=alignment,
            on_overlong=on_overlong.value,
            placeholder=placeholder.value,
            max_bad_share=max_bad_share,
            seed=seed,
            cost_weights=cost_weights,
            count_workers=num_workers,
        )
        request = PlanRequest(config, processor, model, epoch, trust_remote_code)
        if swept is not None:
            report = sweep_report(request, *swept)
        elif target is None:
            report = sizes_report(request, sizes)
        else:
            planned = make_plan(request)
            report = plan_report(planned, ranks=world_sizes)
            save_plan(planned, report, target)
            report["plan"] = str(target)
    if as_json:
        typer.echo(terminal.to_json(report))
    elif swept is not None:
        _print_sweep(report)
    elif target is None:
        _print_sizes(report)
    else:
        _print(report, target, world_sizes)


def check_target(target: Path) -> None:
    """Raise if a plan cannot be written there."""
    if target.is_dir():
        raise ConfigError(f"{target} is a folder: name a file with --out", path=target)
    parent = target.absolute().parent
    if not parent.exists():
        problem = f"there is no folder {parent}; make it, or name another"
        raise ConfigError(f"{target} cannot be written: {problem}", path=target)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        problem = f"no permission to write to {parent}; change --out"
        raise ConfigError(f"{target} cannot be written: {problem}", path=target)


def numbers_in(setting: str, given: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of ``--ranks 24 --ranks 48,96``, sorted and without duplicates."""
    words = [word.strip() for value in given for word in value.split(",")]
    if wrong := [word for word in words if not word.isascii() or not word.isdigit() or int(word) < 1]:
        raise ConfigError.of(setting, wrong[0], f"expected integers above 0, e.g. {setting}=24,48")
    return tuple(sorted(set(map(int, words))))


def _print(report: Mapping[str, Any], target: Path, world_sizes: Sequence[int]) -> None:
    out = terminal.Output(_WIDTH)
    out.lines(f"{name:<10} {text}" for name, text in summary_lines(report))
    out.line()
    _print_stragglers(report, world_sizes, out)
    print_comparison(report, out)
    print_dropped(report, out)
    out.line(f"wrote {target}; show it: {terminal.command_name()} view {target}")


def _print_sizes(report: Mapping[str, Any]) -> None:
    """Print a table of pack sizes, and what padding costs."""
    out = terminal.Output(_WIDTH)
    rows = [
        (
            f"{size['pack_size']:,}",
            size["packs"],
            f"{size['fill']:.2%}",
            f"{size['padded_wasted']:.1%}",
            f"{size['documents_per_pack']['mean']:.1f}",
            size["dropped"],
            size["too_long"],
            f"{size['straggler_8']:.4f}",
        )
        for size in report["sizes"]
    ]
    columns = ("pack size", "packs", "fill", "padded*", "per pack", "dropped", "too long", "8 ranks")
    out.table("Pack sizes compared; no plan is written", columns, rows)
    comparison = report["comparison"]
    out.line(
        "* wasted if every pack is padded to its size (pad_to_size=True). 8 ranks: the straggler ratio.\n"
        f"Without packs, batches of {comparison['batch_size']} rows padded to the longest waste "
        f"{comparison['length_grouped']['wasted']:.1%} if grouped by length, "
        f"{comparison['random']['wasted']:.1%} if not."
    )


_SWEEP_COLUMNS = {
    "tokens": "of all rows, text and media",
    "media": "tokens of the content of images, videos and audio",
    "longest": "tokens of the longest row",
    "too long": "rows that do not fit into a pack, and are dropped",
    "packs": "of an epoch",
    "fill": "share of the packs that is no padding",
    "cost": "of an epoch by the cost model, relative to the settings as they are; of the rows that fit",
}


def _print_sweep(report: Mapping[str, Any]) -> None:
    """Print a table of the values of a setting, and a line about each column."""
    out = terminal.Output(_WIDTH)
    rows = [
        (
            "as it is" if entry["value"] is None else f"{entry['value']:,}",
            entry["tokens"],
            sum(entry[kind] for kind in MEDIA_KINDS),
            entry["longest"],
            entry["too_long"],
            entry["packs"],
            f"{entry['fill']:.2%}",
            f"{entry['cost']:.2f}",
        )
        for entry in report["values"]
    ]
    title = f"Packs of {report['pack_size']:,} tokens by {report['setting']}; no plan is written"
    out.table(title, (report["setting"], *_SWEEP_COLUMNS), rows)
    out.lines(f"{name}: {meaning}" for name, meaning in _SWEEP_COLUMNS.items())
    if own := report["items_with_own"]:
        items = terminal.number_of(report["items"], report["kind"])
        out.line(f"{own:,} of {items} {'has' if own == 1 else 'have'} an own value, which stays")


def summary_lines(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a description of the plan in a few lines: (name, text)."""
    documents = report["documents_per_pack"]
    quartiles = ", ".join(f"{documents[name]:,}" for name in ("min", "p25", "p50", "p75", "max"))
    reserved = f" ({report['reserve']:,} are reserved for a placeholder)" if report["reserve"] else ""
    packed, rows = report["packed"], report["rows"]
    share = f"{packed / rows:.2%}" if rows else "-"
    return [
        ("rows", f"{packed:,} of {rows:,} packed ({share}), {report['dropped']:,} dropped"),
        (
            "packs",
            f"{report['packs']:,} of {report['pack_size']:,} tokens (lower bound: "
            f"{report['fewest_packs']:,})",
        ),
        (
            "fill",
            f"{report['fill']:.3%} of {report['capacity']:,} tokens{reserved}: {report['tokens']:,} tokens "
            "after the label shift (one less per row)",
        ),
        ("per pack", f"{documents['mean']:.2f} samples (least, quartiles, most: {quartiles})"),
    ]


def _print_stragglers(report: Mapping[str, Any], world_sizes: Sequence[int], out: terminal.Output) -> None:
    from packhorse.tools.view.plan_report import WORLD_SIZES

    rows = [
        (f"{entry['ranks']:,}", entry["steps"], f"{entry['ratio']:.4f}", f"{entry['random']:.4f}")
        for entry in report["straggler"]
        if entry["ranks"] in (*WORLD_SIZES, *world_sizes)
    ]
    title = "Straggler ratio: cost of the slowest rank over the mean of all ranks, averaged over the steps"
    out.table(title, ("ranks", "steps", "planned", "random"), rows)
    out.line(f"(Predicted from {report['cost_basis']}.)")


def print_comparison(report: Mapping[str, Any], out: terminal.Output) -> None:
    """Print the cost of the same rows in batches of other libraries."""
    from packhorse.tools.view.plan_report import compared_methods

    rows = [
        (
            text,
            method["steps"],
            f"{method['wasted']:.1%}",
            "-" if method["fill"] is None else f"{method['fill']:.1%}",
            f"{method['straggler']:.3f}",
            f"{method['time']:.2f}",
        )
        for text, method in compared_methods(report)
    ]
    title = f"The same rows in batches of other libraries, on {report['comparison']['ranks']} ranks"
    out.table(title, ("method", "steps", "padding", "fill", "straggler", "time"), rows)
    out.line(COMPARED, wrap=True)
    if any(dataset[kind] for dataset in report["datasets"] for kind in MEDIA_KINDS):
        out.line(TRL_REJECTS_MEDIA, wrap=True)


def print_dropped(report: Mapping[str, Any], out: terminal.Output) -> None:
    """Print which rows are in no pack and why, and remarks on other rows."""
    from packhorse.tools.view.plan_report import bad_rows_warning

    out.line()
    out.lines(f"before planning: {count:,} {reason}" for reason, count in report["not_drawn"].items())
    if not report["reasons"]:
        out.line("every row is in a pack")
    for group in report["reasons"]:
        detail = " ".join(group["detail"].split())
        out.line(f"dropped: {group['rows']:,} {group['reason']} ({_some_keys(group)}): {detail}")
    unsupervised = report["nothing_supervised"]
    if unsupervised["rows"]:
        rows = terminal.number_of(unsupervised["rows"], "packed row has", "packed rows have")
        out.line(f"warning: {rows} no supervised token ({_some_keys(unsupervised)})")
    if any(dataset[kind] for dataset in report["datasets"] for kind in MEDIA_KINDS):
        out.line(NOT_DECODED)
    if warning := bad_rows_warning(report):
        out.line(f"WARNING: {warning}", style="bold red")


def _some_keys(group: Mapping[str, Any]) -> str:
    return ", ".join([*group["keys"], *(["…"] if group["rows"] > len(group["keys"]) else [])])
