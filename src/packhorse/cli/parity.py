"""``packhorse parity``: is packed training of this model what unpacked training is?"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from packhorse.parity import ParityReport

_BACKENDS = ("sdpa", "eager", "varlen")


def parity(
    meta: Annotated[str, typer.Argument(help="The meta file: samples are taken from it.", metavar="META")],
    model: Annotated[str, typer.Option(help="Folder (or hub name) of the model.")],
    processor: Annotated[str | None, typer.Option(help="Of the processor, if not the model's.")] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(
            "--attention", help="A backend to check; may be given again. sdpa, eager, varlen without."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=2, help="How many samples, spread over the data.")] = 8,
    rows: Annotated[int, typer.Option(min=1, help="How many packs are made of them.")] = 2,
    datasets: Annotated[
        list[str] | None, typer.Option("--dataset", help="Only this data set; may be given again.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, …")] = "cpu",
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Take the model's config alone, not its weights.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the reports as JSON.")] = False,
) -> None:
    """Run a few samples packed and unpacked, and compare the loss of every token and the gradients.

    Exit code 1 if they differ; the likely cause is named. A backend that is not possible here fails
    only if it was asked for.
    """
    from packhorse.errors import ConfigError, PackhorseError

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        from packhorse.datasets.count_part import open_processor
        from packhorse.parity import check_parity

        opened = open_processor(processor or model, trust_remote_code)
        chosen = _samples(meta, datasets, samples)
        loaded = _load(model, dtype, device, random_weights, trust_remote_code)
        reports = []
        impossible: list[tuple[str, ConfigError]] = []
        for backend in attention or _BACKENDS:
            try:
                reports.append(
                    check_parity(loaded, opened, chosen, backend, rows=min(rows, len(chosen) // 2))
                )
            except ConfigError as error:  # noqa: PERF203 - few
                if attention:
                    raise
                impossible.append((backend, error))
        if not reports:
            raise impossible[0][1]
    except (PackhorseError, OSError) as error:
        typer.echo(f"packhorse parity: {error}", err=True)
        raise typer.Exit(1) from error
    _print(reports, as_json)
    for backend, why in impossible:
        typer.echo(f"{backend}: not possible: {why}", err=as_json)
    if not all(report.ok for report in reports):
        raise typer.Exit(1)


def _samples(meta: str, names: Sequence[str] | None, number: int) -> list[dict[str, Any]]:
    """Readable rows, spread evenly over the data."""
    from packhorse.datasets import open_meta_dataset
    from packhorse.errors import BadSample, ConfigError

    dataset = open_meta_dataset(meta, names or None)
    chosen: list[dict[str, Any]] = []
    step = max(1, len(dataset) // number)
    for place in dict.fromkeys([*range(0, len(dataset), step), *range(len(dataset))]):
        if len(chosen) == number:
            break
        try:
            chosen.append(dataset[place])
        except BadSample:
            continue
    if len(chosen) < 2:
        raise ConfigError(f"{meta}: {len(chosen)} readable rows, expected at least 2")
    return chosen


def _load(model: str, dtype: str, device: str, random_weights: bool, trust_remote_code: bool) -> Any:
    import torch

    from packhorse.errors import ConfigError, require

    transformers: Any = require("transformers", "train")
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ConfigError(f"--dtype {dtype}: expected float32, bfloat16 or float16")
    auto = transformers.AutoModelForImageTextToText
    try:
        if not random_weights:
            loaded = auto.from_pretrained(model, dtype=kind, trust_remote_code=trust_remote_code)
        else:
            config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
            torch.manual_seed(0)
            loaded = auto.from_config(config, trust_remote_code=trust_remote_code).to(kind)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model {model}: cannot be opened ({' '.join(str(error).split())[:300]})"
        ) from error
    return loaded.to(device)


def _print(reports: Sequence[ParityReport], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([report.as_dict() for report in reports], indent=2))
        return
    for report in reports:
        typer.echo(report.describe())
        for one in report.documents:
            mark = "ok" if one.largest <= report.tolerance else "DIFFERS"
            typer.echo(
                f"  row {one.row} document {one.document}: {one.tokens:,} tokens, {one.learned:,} learned, "
                f"loss {one.unpacked:.4f} alone, {one.packed:.4f} packed, {mark}"
            )
