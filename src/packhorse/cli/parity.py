"""``packhorse parity``: is packed training of this model what unpacked training is?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packhorse.cli.terminal import AS_JSON, DATASETS, TRUST, number_of, one_line_errors, to_json
from packhorse.utils.progress import OnProgress, Progress

if TYPE_CHECKING:
    from packhorse.errors import ConfigError
    from packhorse.tools.parity import ParityReport


_BACKENDS = ("sdpa", "eager", "varlen")
_MOST_BAD = 100  # rows in a row: then not they but the set-up is broken
_NAMED_BAD = 10

EXAMPLES = """
Exit code 0: packed equals unpacked, 1: they differ (the likely cause is named), 2: could not be compared.

[bold]Examples[/bold]

packhorse parity meta.json --model Qwen/Qwen2.5-VL-3B-Instruct
[dim]# sdpa, eager and varlen, on the CPU in float32[/dim]

packhorse parity meta.json --model ./model --attention varlen --dtype bfloat16 --device cuda
[dim]# what is going to be trained with[/dim]

packhorse parity meta.json --model ./model --random-weights --samples 4 --json
[dim]# needs the model's config alone; for machines[/dim]
"""


def parity(
    meta: Annotated[str, typer.Argument(help="The meta file: samples are taken from it.", metavar="META")],
    model: Annotated[str, typer.Option(metavar="DIR", help="Folder (or hub name) of the model.")],
    processor: Annotated[
        str | None, typer.Option(metavar="DIR", help="Of the processor, if not the model's.")
    ] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(
            "--attention",
            metavar="NAME",
            help="A backend to check; may be given again. sdpa, eager, varlen without.",
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=2, metavar="N", help="How many samples, spread over the data.")
    ] = 8,
    rows: Annotated[int, typer.Option(min=1, metavar="N", help="How many packs are made of them.")] = 2,
    datasets: DATASETS = None,
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda, …")] = "cpu",
    random_weights: Annotated[
        bool,
        typer.Option("--random-weights", help="Take the model's config alone, not its weights."),
    ] = False,
    trust_remote_code: TRUST = False,
    as_json: AS_JSON = False,
) -> None:
    """Run a few samples packed and unpacked, and compare the loss of every token and the gradients.

    Rows that cannot be encoded are named and dropped. A backend that is not possible here fails only if it
    was asked for.
    """
    with one_line_errors("parity", "nothing was written"):
        from packhorse.errors import ConfigError
        from packhorse.families.models import open_processor
        from packhorse.integrations.attention import check_attention

        for backend in attention or ():
            check_attention(backend)  # before the weights are loaded
        check_dtype(dtype, device)
        try:
            opened = open_processor(processor or model, trust_remote_code)
        except ConfigError as error:
            if processor is not None:
                raise
            # No processor was given, so the model's own was looked for.
            raise ConfigError(str(error).replace("processor", "model", 1)) from error
        with Progress("encoding", unit="samples") as progress:
            chosen = choose_samples(meta, datasets, samples, opened, progress)
        if chosen.dropped and not as_json:
            typer.echo(chosen.describe_dropped())
        loaded = load_model(model, dtype, device, random_weights, trust_remote_code)
        reports, impossible = _compare(loaded, opened, chosen, attention, rows)
    if as_json:
        whole = {
            "version": 1,
            "passed": all(report.ok for report in reports),
            "dropped": chosen.dropped,
            "not_possible": {backend: str(why) for backend, why in impossible},
            "reports": [report.as_dict() for report in reports],
        }
        typer.echo(to_json(whole))
    else:
        _print(reports, impossible)
    if not all(report.ok for report in reports):
        raise typer.Exit(1)


def _compare(
    model: Any, processor: Any, chosen: Chosen, asked: Sequence[str] | None, rows: int
) -> tuple[list[ParityReport], list[tuple[str, ConfigError]]]:
    """Return the reports, and the backends that are not possible here.

    Raises:
        ConfigError: one that was asked for is not possible, or none is.
    """
    from packhorse.errors import ConfigError
    from packhorse.tools.parity import check_parity

    reports: list[ParityReport] = []
    impossible: list[tuple[str, ConfigError]] = []
    backends, packs = asked or _BACKENDS, min(rows, len(chosen.samples) // 2)
    with Progress("comparing", unit="backends") as progress:
        for done, backend in enumerate(backends, 1):
            try:
                report = check_parity(model, processor, chosen.samples, backend, rows=packs, keys=chosen.keys)
                reports.append(report)
            except ConfigError as error:
                if asked:
                    raise
                impossible.append((backend, error))
            progress(done, len(backends))
    if not reports:
        raise impossible[0][1]
    return reports, impossible


@dataclass
class Chosen:
    """Encoded samples with their keys, and what was dropped: key, reason and detail of each row."""

    samples: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def describe_dropped(self) -> str:
        """Return which rows were dropped and why."""
        some, more = self.dropped[:_NAMED_BAD], len(self.dropped) - _NAMED_BAD
        rows = number_of(len(self.dropped), "row")
        return "\n  ".join([f"{rows} dropped:", *some, *([f"… and {more:,} more"] if more > 0 else [])])


def choose_samples(
    meta: str,
    names: Sequence[str] | None,
    number: int,
    processor: Any,
    progress: OnProgress | None = None,
) -> Chosen:
    """Encode rows that are spread evenly over the data; skip and name those that cannot be encoded.

    Args:
        meta: the meta file.
        names: only these datasets.
        number: how many samples.
        processor: encodes them.
        progress: told how many there are.

    Raises:
        ConfigError: fewer than two rows can be encoded.
    """
    from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
    from packhorse.errors import ConfigError, data_errors
    from packhorse.formats.meta import open_meta_dataset
    from packhorse.ledger import Ledger

    dataset = open_meta_dataset(meta, names or None, ledger=Ledger())
    encoded = PreTokenizedDatasetWrapper(dataset, processor, on_bad="raise", ledger=Ledger())
    chosen, consecutive_bad = Chosen(), 0
    step = max(1, len(dataset) // number)
    between = (place for place in range(len(dataset)) if place % step)
    for place in chain(range(0, len(dataset), step), between):
        if len(chosen.samples) == number or consecutive_bad == _MOST_BAD:
            break
        with data_errors() as outcome:
            chosen.samples.append(encoded.load(place))
            chosen.keys.append(encoded.key(place))
        if outcome.error is not None:
            chosen.dropped.append(f"{encoded.key(place)}: {outcome.error.reason}, {outcome.error.detail}")
            consecutive_bad += 1
            continue
        consecutive_bad = 0
        if progress is not None:
            progress(len(chosen.samples), number)
    if len(chosen.samples) < 2:
        bad_rows = f". {chosen.describe_dropped()}" if chosen.dropped else ""
        raise ConfigError(
            f"{meta}: {len(chosen.samples)} rows that can be encoded, expected at least 2{bad_rows}"
        )
    return chosen


def check_dtype(dtype: str, device: str) -> Any:
    """Return the dtype of that name, if the device can hold weights of it.

    Raises:
        ConfigError: there is no such type of floating-point numbers, or no such device here.
    """
    import torch

    from packhorse.errors import ConfigError

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ConfigError(f"--dtype {dtype}: expected float32, bfloat16 or float16")
    try:
        torch.zeros(1, dtype=kind, device=device)
    except (RuntimeError, AssertionError) as error:  # what torch raises for a device that is not there
        why = " ".join(str(error).split())[:200]
        raise ConfigError(f"--device {device}: not available here ({why})") from error
    return kind


def load_model(model: str, dtype: str, device: str, random_weights: bool, trust_remote_code: bool) -> Any:
    """Load the model at a path or hub name, or make one of its config with random weights.

    Raises:
        ConfigError: there is none, it cannot be trained on packed rows, or the dtype or the device is not
            available.
    """
    import torch

    from packhorse.errors import ConfigError, require
    from packhorse.families.models import check_packable, model_classes, open_config
    from packhorse.utils.progress import bars_are_wanted

    transformers: Any = require("transformers", "train")
    kind = check_dtype(dtype, device)
    config = open_config(model, trust_remote_code)
    if model_classes(config):  # one of remote code is checked when it is loaded
        check_packable(config, measured=True)
    if not bars_are_wanted():
        transformers.utils.logging.disable_progress_bar()
    auto = transformers.AutoModelForImageTextToText
    try:
        if not random_weights:
            loaded = auto.from_pretrained(model, dtype=kind, trust_remote_code=trust_remote_code)
        else:
            torch.manual_seed(0)
            loaded = auto.from_config(config, trust_remote_code=trust_remote_code).to(kind)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model {model}: cannot be opened ({' '.join(str(error).split())[:300]})"
        ) from error
    return loaded.to(device)


def _print(reports: Sequence[ParityReport], impossible: Sequence[tuple[str, ConfigError]]) -> None:
    for report in reports:
        typer.echo(report.describe())
        for one in report.documents:
            mark = "ok" if one.largest <= report.tolerance else "DIFFERS"
            typer.echo(
                f"  pack {one.row}, document {one.document}, {one.key}: {one.tokens:,} tokens, "
                f"{one.supervised:,} supervised, loss {one.unpacked:.4f} alone, "
                f"{one.packed:.4f} packed, {mark}"
            )
    for backend, why in impossible:
        typer.echo(f"{backend}: not possible: {why}")
