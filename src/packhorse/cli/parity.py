"""``packhorse parity``: is packed training of this model what unpacked training is?"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from packhorse.parity import ParityReport

_BACKENDS = ("sdpa", "eager", "varlen")
_MOST_BAD = 100  # rows in a row: then not they but the set-up is broken
_NAMED_BAD = 10


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

    Exit code 1 if they differ; the likely cause is named. Rows that cannot be encoded are named and left
    out. A backend that is not possible here fails only if it was asked for.
    """
    from packhorse.errors import ConfigError, PackhorseError

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        from packhorse.datasets.count_part import open_processor
        from packhorse.integrations.attention import check_attention
        from packhorse.parity import check_parity

        for backend in attention or ():
            check_attention(backend)  # before the weights are loaded
        opened = open_processor(processor or model, trust_remote_code)
        chosen = _samples(meta, datasets, samples, opened)
        if chosen.left_out:
            typer.echo(chosen.said(), err=as_json)
        loaded = _load(model, dtype, device, random_weights, trust_remote_code)
        reports = []
        impossible: list[tuple[str, ConfigError]] = []
        for backend in attention or _BACKENDS:
            try:
                packs = min(rows, len(chosen.samples) // 2)
                reports.append(
                    check_parity(loaded, opened, chosen.samples, backend, rows=packs, keys=chosen.keys)
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


@dataclass
class _Chosen:
    """Encoded samples with their keys, and what was left out: key, reason and detail of each row."""

    samples: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def said(self) -> str:
        """What was left out, in words."""
        some, more = self.left_out[:_NAMED_BAD], len(self.left_out) - _NAMED_BAD
        rows = "1 row" if len(self.left_out) == 1 else f"{len(self.left_out):,} rows"
        return "\n  ".join([f"{rows} left out:", *some, *([f"… and {more:,} more"] if more > 0 else [])])


def _samples(meta: str, names: Sequence[str] | None, number: int, processor: Any) -> _Chosen:
    """Rows that can be encoded, spread evenly over the data; a bad one is passed over and named."""
    from packhorse.datasets import PreTokenizedDatasetWrapper, open_meta_dataset
    from packhorse.errors import DATA_ERRORS, BadSample, ConfigError, is_data_error
    from packhorse.ledger import Ledger

    dataset = open_meta_dataset(meta, names or None, ledger=Ledger())
    encoded = PreTokenizedDatasetWrapper(dataset, processor, on_bad="raise", ledger=Ledger())
    chosen, in_a_row = _Chosen(), 0
    step = max(1, len(dataset) // number)
    for place in dict.fromkeys([*range(0, len(dataset), step), *range(len(dataset))]):
        if len(chosen.samples) == number or in_a_row == _MOST_BAD:
            break
        try:
            chosen.samples.append(encoded.load(place))
            chosen.keys.append(encoded.key(place))
            in_a_row = 0
        except DATA_ERRORS as error:
            if not is_data_error(error):
                raise
            bad = error if isinstance(error, BadSample) else None
            why = f"{bad.reason}, {bad.detail}" if bad else f"{type(error).__name__}: {error}"
            chosen.left_out.append(f"{encoded.key(place)}: {why}")
            in_a_row += 1
    if len(chosen.samples) < 2:
        bad_rows = f". {chosen.said()}" if chosen.left_out else ""
        raise ConfigError(
            f"{meta}: {len(chosen.samples)} rows that can be encoded, expected at least 2{bad_rows}"
        )
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
                f"  pack {one.row}, document {one.document}, {one.key}: {one.tokens:,} tokens, "
                f"{one.learned:,} learned, loss {one.unpacked:.4f} alone, {one.packed:.4f} packed, {mark}"
            )
