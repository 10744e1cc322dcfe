"""``packhorse calibrate``: measure what tokens, patches and images cost on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packhorse.cli import terminal
from packhorse.utils.progress import Progress

if TYPE_CHECKING:
    from packhorse.tools.calibrate import Calibration

EXAMPLES = terminal.examples(
    "calibrate",
    "Exit code 0: the weights were written, 1: the times do not determine weights, 2: could not be measured.",
    {
        "--model ./model --out weights.json": "on the GPU if there is one, with rows that are made up",
        "--model ./model --data meta.json --out weights.json": "with packs of your rows",
        "--model ./model --random-weights --out weights.json": "only needs the model's config and processor",
    },
)


def calibrate(
    model: Annotated[str, terminal.text("DIR", "Folder (or Hub name) of the model.")],
    out: Annotated[Path, terminal.text("FILE", "Where to write the weights, as JSON.")],
    processor: Annotated[
        str | None, terminal.text("DIR", "Folder (or Hub name) of the processor; default: that of the model.")
    ] = None,
    data: Annotated[
        str | None, terminal.text("META", "A data file or meta file; default: rows that are made up.")
    ] = None,
    pack_size: Annotated[int, terminal.number("Tokens of the largest packs.", 64)] = 8192,
    attn_implementation: Annotated[
        str, terminal.text("NAME", "Attention backend, as in packhorse.prepare.", "--attn-implementation")
    ] = "auto",
    seconds: Annotated[float, terminal.number("Measure for about this long.", 0)] = 60,
    dtype: Annotated[
        str | None,
        terminal.text("TYPE", "float32, bfloat16 or float16; default: bfloat16, CPU: float32."),
    ] = None,
    device: Annotated[
        str | None, terminal.text("NAME", "cpu, cuda, …; default: a GPU if there is one.")
    ] = None,
    gradient_checkpointing: Annotated[
        bool, terminal.flag("--gradient-checkpointing", "Train with gradient checkpointing.")
    ] = False,
    random_weights: Annotated[
        bool, terminal.flag("--random-weights", "Use the model's config with random weights.")
    ] = False,
    trust_remote_code: terminal.TRUST = False,
    verbose: terminal.VERBOSE = False,
    as_json: terminal.AS_JSON = False,
) -> None:
    """Measure forward and backward of packs of many shapes, and write weights for even steps.

    packhorse.load(cost_weights=FILE) and packhorse plan use them. Run it on one GPU of the kind that trains,
    with the settings of the training run.
    """
    with terminal.one_line_errors("calibrate", "nothing was written", verbose):
        import torch

        from packhorse.cli.parity import load_model
        from packhorse.cli.plan import check_target
        from packhorse.families.models import open_processor
        from packhorse.integrations.transformers import prepare
        from packhorse.tools.calibrate import calibrate as measure
        from packhorse.utils.files import write_atomic

        check_target(out)  # before the long work
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
        opened = open_processor(processor or model, trust_remote_code)
        loaded = load_model(model, dtype, device, random_weights, trust_remote_code).train()
        prepared = prepare(loaded, attn_implementation, device=device, allow_unproven=True)
        if gradient_checkpointing:
            loaded.gradient_checkpointing_enable()
        with Progress("measuring", unit="packs") as progress:
            result = measure(
                loaded, opened, data=data, pack_size=pack_size, seconds=seconds, progress=progress
            )
        fit = result.fit
        report: dict[str, Any] = {
            **fit.weights.to_dict(),
            "measured": {
                "model": model,
                "device": _device_name(device),
                "dtype": dtype,
                "torch": torch.__version__,
                "attn_implementation": prepared.attn_implementation,
                "gradient_checkpointing": gradient_checkpointing,
                "data": data,
                "pack_size": pack_size,
                "packs": fit.measured,
                "outliers": fit.outliers,
                "error": fit.residual,
                "error_of_operations": fit.prior_residual,
            },
        }
        if not fit.problem:
            text = json.dumps(report, indent=2) + "\n"
            write_atomic(out, lambda file: file.write(text.encode()))
    if as_json:
        typer.echo(terminal.to_json({"version": 1, "problem": fit.problem, **report}))
    else:
        _print(result, out)
    if fit.problem:
        raise typer.Exit(1)


def _device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def _print(result: Calibration, out: Path) -> None:
    """Print the weights relative to those of a token, as counted and as measured."""
    output, fit = terminal.Output(100), result.fit
    if not fit.problem:
        counted, measured = (weights.values() for weights in (result.before, fit.weights))
        share = (result.features * measured).sum(axis=0) / result.seconds.sum()
        rows = [
            (name, f"{before / counted[0]:.4g}", f"{after / measured[0]:.4g}", f"{part:.1%}")
            for name, before, after, part in zip(fit.weights.names, counted, measured, share, strict=True)
        ]
        title = "Cost in tokens, and share of the time of these packs"
        output.table(title, ("", "from operations", "measured", "share"), rows)
    output.line(fit.describe(), wrap=True)
    if not fit.problem:
        output.line(f"wrote {out}; use it: packhorse.load(…, cost_weights={str(out)!r})")
