"""``packhorse parity``: compare packed with unpacked training of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packhorse.cli import terminal
from packhorse.errors import ConfigError, data_errors, require
from packhorse.utils.progress import OnProgress, Progress, bars_are_wanted

if TYPE_CHECKING:
    from packhorse.families.packing import Packing
    from packhorse.tools.parity import ParityReport

_BACKENDS = ("sdpa", "eager", "varlen")
_MAX_CONSECUTIVE_BAD = 100  # after that many the setup is broken, not the rows
_SHOWN_BAD = 10

EXAMPLES = terminal.examples(
    "parity",
    "Exit code 0: packed equals unpacked, 1: they differ (with the likely cause), 2: could not be compared.",
    {
        "meta.json --model ./model": "sdpa, eager and varlen, on the CPU in float32",
        "meta.json --model ./model -v": "also the loss of each document, alone and packed",
        "meta.json --model ./model --attn-implementation varlen --dtype bfloat16 --device cuda": "on a GPU",
        "meta.json --model ./model --random-weights --samples 4 --json": "only needs the model's config",
    },
)


def parity(
    meta: terminal.META,
    model: Annotated[str, terminal.text("DIR", "Folder (or Hub name) of the model.")],
    processor: Annotated[
        str | None, terminal.text("DIR", "Folder (or Hub name) of the processor; default: that of the model.")
    ] = None,
    attn_implementation: Annotated[
        list[str] | None,
        terminal.text(
            "NAME",
            "A backend to check; can be repeated. Default: sdpa, eager, varlen.",
            "--attn-implementation",
        ),
    ] = None,
    samples: Annotated[int, terminal.number("Number of samples, spread evenly over the data.", 2)] = 8,
    rows: Annotated[int, terminal.number("Number of packs.")] = 2,
    datasets: terminal.DATASETS = None,
    dtype: Annotated[str, terminal.text("TYPE", "float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, terminal.text("NAME", "cpu, cuda, …")] = "cpu",
    stateful: Annotated[
        str,
        terminal.text(
            "HOW",
            "How layers that carry state keep documents apart (as in packhorse.prepare): auto, "
            "per_document or boundaries.",
        ),
    ] = "auto",
    random_weights: Annotated[
        bool, terminal.flag("--random-weights", "Use the model's config with random weights.")
    ] = False,
    trust_remote_code: terminal.TRUST = False,
    verbose: terminal.VERBOSE = False,
    as_json: terminal.AS_JSON = False,
) -> None:
    """Run a few samples packed and unpacked, and compare the loss of every token and the gradients.

    Rows that cannot be encoded are listed and skipped. A backend that is not available is an error only if it
    is given with --attn-implementation; one with which the model raises is an error. Layers that carry state
    are prepared as packhorse.prepare does; a model is rejected only if it is known to be wrong in packs.
    """
    with terminal.one_line_errors("parity", "nothing was written", verbose):
        from packhorse.families.models import open_processor
        from packhorse.integrations.attention import check_attention
        from packhorse.integrations.transformers import check_stateful

        check_stateful(stateful)
        for backend in attn_implementation or ():
            check_attention(backend)  # before the weights are loaded
        check_dtype(dtype, device)
        try:
            opened = open_processor(processor or model, trust_remote_code)
        except ConfigError as error:
            if processor is not None:
                raise
            message = str(error).replace("processor", "model", 1)
            raise ConfigError(message, setting="model", value=model) from error
        with Progress("encoding", unit="samples") as progress:
            chosen = choose_samples(meta, datasets, samples, opened, progress)
        if chosen.dropped and not as_json:
            typer.echo(chosen.describe_dropped())
        loaded = load_model(model, dtype, device, random_weights, trust_remote_code)
        prepared = prepare_layers(loaded, stateful)
        no_boundaries = prepared.packing.no_boundaries
        compared = _compare(loaded, opened, chosen, attn_implementation, rows, no_boundaries)
    if as_json:
        result = {
            "version": 1,
            "passed": compared.passed,
            "dropped": chosen.dropped,
            "not_possible": {backend: str(error) for backend, error in compared.unavailable},
            "failed": {backend: str(error) for backend, error in compared.failed},
            "reports": [report.as_dict() for report in compared.reports],
            "stateful_layers": {name: mode for name, (_, mode) in prepared.layers.items()},
            "proven": not prepared.packing.problems,
        }
        typer.echo(terminal.to_json(result))
    else:
        _print(compared, verbose)
        for line in prepared.describe(compared.reports):
            typer.echo(line)
    if not compared.passed:
        raise typer.Exit(1)


@dataclass
class Compared:
    """The reports of backends, those that are not available and those with which the model raises."""

    reports: list[ParityReport] = field(default_factory=list)
    unavailable: list[tuple[str, ConfigError]] = field(default_factory=list)
    failed: list[tuple[str, ConfigError]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether packed equals unpacked with every available backend."""
        return not self.failed and all(report.ok for report in self.reports)


def _compare(
    model: Any,
    processor: Any,
    chosen: Chosen,
    requested: Sequence[str] | None,
    rows: int,
    no_boundaries: str = "",
) -> Compared:
    """Compare packed with unpacked for each backend; raise if a requested one, or every one, cannot be run.

    Backends that take the boundaries of documents are compared for a model that does not (``no_boundaries``
    says why) only if they are requested: ``prepare`` rejects them.
    """
    from packhorse.collate.batch_formats import CONTIGUOUS, batch_format_of
    from packhorse.families.packing import boundaries_error
    from packhorse.tools.parity import check_parity

    compared = Compared()
    backends, packs = requested or _BACKENDS, min(rows, len(chosen.samples) // 2)
    with Progress("comparing", unit="backends") as progress:
        for done, backend in enumerate(backends, 1):
            try:
                if no_boundaries and not requested and batch_format_of(backend) in CONTIGUOUS:
                    raise boundaries_error(no_boundaries)
                report = check_parity(model, processor, chosen.samples, backend, rows=packs, keys=chosen.keys)
                compared.reports.append(report)
            except ConfigError as error:
                if requested:
                    raise
                compared.unavailable.append((backend, error))
            except (IndexError, RuntimeError, TypeError, ValueError) as error:  # of the model's own code
                what = f"{type(model).__name__} cannot be run with {backend}: {type(error).__name__}: {error}"
                if requested:
                    raise ConfigError(what, setting="model") from error
                compared.failed.append((backend, ConfigError(what, setting="model")))
            progress(done, len(backends))
    if not compared.reports:
        raise [*compared.failed, *compared.unavailable][0][1]
    return compared


@dataclass
class Chosen:
    """Encoded samples with their keys, and a line for each row that could not be encoded."""

    samples: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def describe_dropped(self) -> str:
        """Return which rows were dropped and why."""
        rest = len(self.dropped) - _SHOWN_BAD
        lines = [f"{terminal.number_of(len(self.dropped), 'row')} dropped:", *self.dropped[:_SHOWN_BAD]]
        return "\n  ".join([*lines, f"… and {rest:,} more"] if rest > 0 else lines)


def choose_samples(
    meta: str, names: Sequence[str] | None, count: int, processor: Any, progress: OnProgress | None = None
) -> Chosen:
    """Encode ``count`` rows that are spread evenly over the data; skip and list those that cannot be encoded.

    Raises ``ConfigError`` if fewer than two rows can be encoded.
    """
    from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
    from packhorse.formats.meta import open_meta_dataset
    from packhorse.ledger import Ledger

    dataset = open_meta_dataset(meta, names or None, ledger=Ledger())
    encoded = PreTokenizedDatasetWrapper(dataset, processor, on_bad="raise", ledger=Ledger())
    chosen, consecutive_bad = Chosen(), 0
    step = max(1, len(dataset) // count)
    between = (index for index in range(len(dataset)) if index % step)
    for index in chain(range(0, len(dataset), step), between):
        if len(chosen.samples) == count or consecutive_bad == _MAX_CONSECUTIVE_BAD:
            break
        with data_errors() as outcome:
            chosen.samples.append(encoded.load(index))
            chosen.keys.append(encoded.key(index))
        if outcome.error is not None:
            chosen.dropped.append(f"{encoded.key(index)}: {outcome.error.reason}, {outcome.error.detail}")
            consecutive_bad += 1
            continue
        consecutive_bad = 0
        if progress is not None:
            progress(len(chosen.samples), count)
    if len(chosen.samples) < 2:
        bad_rows = f". {chosen.describe_dropped()}" if chosen.dropped else ""
        raise ConfigError(
            f"{meta}: {len(chosen.samples)} rows that can be encoded, expected at least 2{bad_rows}",
            path=meta,
        )
    return chosen


def check_dtype(dtype: str, device: str) -> Any:
    """Return the floating-point dtype of that name; raise if it or the device is not available."""
    import torch

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ConfigError.of("dtype", dtype, "expected float32, bfloat16 or float16")
    try:
        torch.zeros(1, dtype=kind, device=device)
    except (RuntimeError, AssertionError) as error:  # what torch raises for a missing device
        detail = " ".join(str(error).split())[:200]
        raise ConfigError.of("device", device, f"not available here ({detail})") from error
    return kind


def load_model(model: str, dtype: str, device: str, random_weights: bool, trust_remote_code: bool) -> Any:
    """Load the model at a path or Hub name, or make one with random weights from its config.

    Raises ``ConfigError`` if it cannot be opened or trained on packed rows, or dtype or device is invalid.
    """
    import torch

    from packhorse.families.models import check_name, model_classes, open_config
    from packhorse.families.packing import check_packable

    transformers: Any = require("transformers", "train")
    kind = check_dtype(dtype, device)
    config = open_config(model, trust_remote_code)
    if model_classes(config):  # a model of remote code is checked when it is loaded
        check_packable(config, measured=True)
    if not bars_are_wanted():
        transformers.utils.logging.disable_progress_bar()
    with_images = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or not model_classes(
        config
    )
    auto = transformers.AutoModelForImageTextToText if with_images else transformers.AutoModelForCausalLM
    try:
        if not random_weights:
            options = {"trust_remote_code": trust_remote_code, "local_files_only": check_name("model", model)}
            loaded = auto.from_pretrained(model, dtype=kind, **options)
        else:
            torch.manual_seed(0)
            loaded = auto.from_config(config, trust_remote_code=trust_remote_code).to(kind)
    except (OSError, ValueError) as error:
        detail = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model {model}: cannot be opened ({detail})", setting="model", value=model
        ) from error
    return loaded.to(device)


@dataclass(frozen=True)
class PreparedLayers:
    """The layers of a model that carry state: number and mode by class, and how the model can be packed."""

    packing: Packing
    layers: dict[str, tuple[int, str]]
    stateful: str

    def describe(self, reports: Sequence[ParityReport]) -> list[str]:
        """Return with which layers the reports were made, and what to call for training."""
        from packhorse.integrations.transformers import describe_layers

        parts = [describe_layers(name, *layers) for name, layers in self.layers.items()]
        lines = [f"prepared: {', '.join(parts)} (--stateful {self.stateful})"] if parts else []
        passed = [report.attention for report in reports if report.ok]
        options = "" if self.stateful == "auto" else f", stateful={self.stateful!r}"
        if self.packing.problems:
            lines.append(
                f"no test of packhorse covers this model: {_describe_steps(passed, reports, options)}"
            )
        elif parts and passed:
            lines.append(f"for training, call packhorse.prepare(model{options}) before packhorse.load")
        return lines


def _describe_steps(passed: Sequence[str], reports: Sequence[ParityReport], options: str) -> str:
    """Return how a model is trained that only these reports prove right."""
    if not passed:
        return 'train it with padded batches, mode="pad"'
    backend = "" if len(passed) == len(_BACKENDS) else f", {passed[-1]!r}"
    return (
        f"for training, call packhorse.prepare(model{backend}, allow_unproven=True{options}), then "
        "packhorse.load(…, model=model)"
    )


def prepare_layers(model: Any, stateful: str) -> PreparedLayers:
    """Let layers that carry state run as they do in training: as ``packhorse.prepare`` would."""
    from packhorse.families.packing import inspect_packing
    from packhorse.families.stateful import install

    packing = inspect_packing(model)
    return PreparedLayers(packing, install(model, packing.layers, stateful, model.device), stateful)


def _print(compared: Compared, verbose: bool) -> None:
    """Print the result of each backend, with the documents that differ; all documents if ``verbose``."""
    for report in compared.reports:
        typer.echo(report.describe())
        for document in report.documents:
            verdict = "ok" if document.largest <= report.tolerance else "DIFFERS"
            if verdict == "ok" and not verbose:
                continue
            typer.echo(
                f"  pack {document.row}, document {document.document}, {document.key}: {document.tokens:,} "
                f"tokens, {document.supervised:,} supervised, loss {document.unpacked:.4f} alone, "
                f"{document.packed:.4f} packed, {verdict}"
            )
    for backend, error in compared.failed:
        typer.echo(f"{backend}: failed: {error}")
    for backend, error in compared.unavailable:
        typer.echo(f"{backend}: not available: {error}")
