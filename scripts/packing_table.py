"""Write ``docs/reference/packable_models.md``: which models of transformers can be trained on packs.

    python scripts/packing_table.py [--check] [--jobs N]

Run it from a clone: ``tests/contract/sweep.py`` builds a tiny model of every causal and image-text class of
the installed transformers, and measures it. That takes a few minutes, no network and no GPU. With ``--check``
nothing is written: the script fails if a row of the page has changed, apart from numbers that depend on the
machine.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from math import floor, log10
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "packable_models.md"
sys.path.insert(0, str(ROOT / "tests"))

if TYPE_CHECKING:
    from contract.sweep import Measurement, Result

_LONGEST_REASON = 180
_ROW = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \|.*$", re.MULTILINE)
_NUMBER = re.compile(r"\b\d[\d.]*e[-+]\d+\b")
_NUMBER_CELL = re.compile(r"(?<=\| )(0|1e[-+]\d\d)(?= \|)")
_GROUPS = {
    "packs": (
        "Packs",
        "The mask, or the boundaries of documents, keep documents apart in every layer.",
    ),
    "layers": (
        "Packs, with layers called document by document",
        "These models have layers that carry state along the row: linear attention, state spaces, short "
        "convolutions. `packhorse.prepare(model)` lets them compute each document alone. Layers with kernels "
        "can do that in one call (`stateful=`) if the packages are installed.",
    ),
    "not proven": (
        "Not proven",
        "No problem is known, but nothing proves that packed equals unpacked: media were not measured, a "
        "kind of layer cannot be measured with short documents, or the tiny copy that `load` makes cannot be "
        "built or run. `packhorse.load` and `prepare` raise `ConfigError` until you measure your model and "
        "allow it, in [three steps](batch.md#a-model-that-is-not-proven). For every class here "
        "`prepare(model, allow_unproven=True)`, and then `load`, accepted the tiny model; its packs were not "
        "compared with documents alone.",
    ),
    "rejected": (
        "Rejected",
        "`packhorse.load` and `prepare` raise `ConfigError`, and nothing allows packs. Use padded rows: "
        '`packhorse.load(…, mode="pad")`. If that raises because the class drops `shift_labels`, call '
        "`packhorse.families.models.make_honour_shift_labels(model)` first.",
    ),
    "encoder-decoder": (
        "Encoder-decoders",
        '`packhorse.load` and `prepare` raise `ConfigError`, with `mode="pad"` too: a row of a batch has the '
        "prompt and the answer, so the encoder would see the answer.",
    ),
    "fails": ("Wrong", "These are accepted, and packed rows are wrong. There should be none."),
    "not built": (
        "Not measured",
        "No tiny model can be built here. `packhorse.load` measures the config of your model, or raises "
        "`ConfigError` if it cannot.",
    ),
}
_INTRODUCTION = """# Models that can be packed

Every causal and image-text class of transformers {version}, built from a tiny config of its type with random
weights. `python scripts/packing_table.py` makes this page; `--check` compares it with the installed
transformers. [Which models](batch.md#which-models) says how Packhorse decides. Ask for your own model, its
config or its folder:

```python
from transformers import MambaConfig

from packhorse.families.packing import inspect_packing

packing = inspect_packing(MambaConfig())
assert not packing.problems  # why it is rejected
assert packing.layers == ("MambaMixer",)  # called document by document
```

Types that tests cover, of models and of their decoders: {tested}.
"""
_COLUMNS = """
Each class of the first two groups went through `prepare`, `load` and `model_inputs` with a pack of three
documents. Its row says:

- **accepted by**: *test*, the class is in Packhorse's table, which its tests check; *measurement*, a tiny
  copy is measured when `load` or `prepare` first sees it;
- **rows**: whether the documents had images. Videos and audio are not measured here;
- **leak**: how much logits of the last document change if the documents before it are replaced;
- **difference**: of these logits from those of the document alone;
- **noise floor**: the largest difference between correct computations of the document alone. Leak and
  difference are at most four times the noise floor;
- **control**: the leak without mask and boundaries; for layers that carry state, without `prepare`. At least
  80 times the noise floor;
- **attention**: the attention of the decoder with which this holds; the numbers are the worst of them.

Numbers are rounded down to a power of ten; *0* is equal to the bit. They depend on the CPU.

`prepare` set `sdpa`, `eager` and `varlen`, wherever it accepts them, and they ran on a CPU, where `varlen`
computes each document with sdpa. *window*: also `varlen` with a sliding window that is shorter than the
documents. `prepare` rejects `flex_attention` on a CPU, which has no backward pass for it. So for these
measurements `use_attention` set it, and its forward pass ran as plain PyTorch, not compiled. Flash attention
was not run: it takes the same boundaries as `varlen`. Dropout of attention is 0.
"""
_MEASURED_HEADS = ("accepted by", "rows", "leak", "difference", "noise floor", "control", "attention")
_HEADS = {"packs": _MEASURED_HEADS, "layers": ("layers", "in one call with", *_MEASURED_HEADS)}


def examine(name: str) -> Result:
    """Examine a class in a process of its own."""
    from contract.torchvision_ops import make_torchvision_importable

    make_torchvision_importable()
    import pytest
    import torch
    import transformers

    from contract.sweep import examine, without_compiling_flex

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with pytest.MonkeyPatch.context() as patch:
        without_compiling_flex(patch)
        return examine(name)


def examine_all(jobs: int) -> list[Result]:
    """Examine every class, and print the progress."""
    from contract.sweep import classes

    results = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for number, result in enumerate(pool.map(examine, names := list(classes())), 1):
            results.append(result)
            print(
                f"{number}/{len(names)} {result.class_name}: {result.group} {result.reason}"[:200], flush=True
            )
    return results


def page_of(results: Iterable[Result]) -> str:
    """Return the page."""
    ordered = sorted(results, key=lambda result: (result.model_type, result.class_name))
    groups = {group: [result for result in ordered if result.group == group] for group in _GROUPS}
    tables = (line for group in _GROUPS for line in _table(group, groups[group]))
    return "\n".join([*_introduction(groups), *tables])


def _introduction(groups: Mapping[str, Sequence[Result]]) -> Iterator[str]:
    from packhorse.families.packing import PACKABLE

    tested = ", ".join(f"`{name}`" for name in sorted(PACKABLE))
    yield _INTRODUCTION.format(version=version("transformers"), tested=tested)
    yield "| group | classes |\n|---|---|"
    for group, (title, _) in _GROUPS.items():
        if groups[group]:
            yield f"| [{title}](#{_slug(title)}) | {len(groups[group])} |"
    yield _COLUMNS


def _table(group: str, results: Sequence[Result]) -> Iterator[str]:
    if not results:
        return
    title, description = _GROUPS[group]
    yield f"## {title}\n\n{description}\n"
    if group == "layers":
        yield _about_kernels(results)
    heads = ("model type", "class", *_HEADS.get(group, ("reason",)))
    yield f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}"
    yield from map(row_of, results)
    yield ""


def _about_kernels(results: Sequence[Result]) -> str:
    packages = sorted({name for result in results for name in _kernels(result)})
    return (
        f"Packages: {', '.join(f'`{name}`' for name in packages)}. `fla` (flash-linear-attention) runs in "
        "`benchmarks/gpu_hybrid.py` on a GPU ([results](benchmarks.md)). `causal_conv1d` and `mamba_ssm`: "
        "not run with the real kernel. The tests run functions of PyTorch with the arguments of all three "
        "(`tests/contract/test_boundary_kernels.py`).\n"
    )


def _kernels(result: Result) -> dict[str, None]:
    from packhorse.families.stateful import KERNELS

    return {name: None for layer in result.layers for name in KERNELS.get(layer, ())}


def row_of(result: Result) -> str:
    """Return the row of a class in the table of its group."""
    return f"| {' | '.join((f'`{result.model_type}`', f'`{result.class_name}`', *_cells(result)))} |"


def _cells(result: Result) -> Iterator[str]:
    if result.group not in _HEADS:
        yield reason_of(result)
        return
    if result.group == "layers":
        yield ", ".join(f"`{layer}`" for layer in result.layers)
        yield ", ".join(f"`{name}`" for name in _kernels(result)) or "none"
    yield "test" if result.tested else "measurement"
    yield "images" if result.media else "text"
    measurements = list(result.measured.values())
    yield magnitude(max(measurement.leak for measurement in measurements))
    yield magnitude(max(measurement.difference for measurement in measurements))
    yield magnitude(max(measurement.floor for measurement in measurements))
    yield magnitude(min(measurement.control for measurement in measurements))
    yield ", ".join(_attentions(result.measured))


def magnitude(value: float) -> str:
    """Return a number, rounded down to a power of ten."""
    return f"1e{floor(log10(value)):+03d}" if value else "0"


def _attentions(measured: Mapping[str, Measurement]) -> Iterator[str]:
    for name, measurement in measured.items():
        yield "window" if "window" in name else f"`{measurement.attention}`"


def reason_of(result: Result) -> str:
    """Return why a class is not accepted, in one short cell of a table, with magnitudes for numbers."""
    # A class without positions computes documents otherwise in any layer: the first one explains nothing.
    reason = re.sub(r", first in [\w, ]+(?=; \w+ takes no position_ids)", "", result.reason)
    reason = _NUMBER.sub(lambda match: magnitude(float(match[0])), reason)
    reason = reason.replace(f"{result.class_name}: ", "")
    if len(reason) > _LONGEST_REASON:
        reason = f"{reason[:_LONGEST_REASON]}…"
    return re.sub(r"[|<>`*_\\]", lambda match: f"\\{match[0]}", reason)


def _slug(title: str) -> str:
    return re.sub(r"[^a-z]+", "-", title.lower()).strip("-")


def rows_on(page: str) -> dict[tuple[str, str], tuple[str, str]]:
    """Return the group and the row of each model type and class on a page.

    Numbers in rows, which depend on the machine, are replaced by ``#``.
    """
    rows: dict[tuple[str, str], tuple[str, str]] = {}
    titles = {title: group for group, (title, _) in _GROUPS.items()}
    for section in page.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        for match in _ROW.finditer(body):
            rows[match[1], match[2]] = titles[title], _NUMBER.sub("#", _NUMBER_CELL.sub("#", match[0]))
    return rows


def differences(page: str, current: str) -> list[str]:
    """Return a line for each row of a page that is not the current one, apart from its numbers."""
    before, now = rows_on(page), rows_on(current)
    lines = []
    for key in sorted({*before, *now}):
        old, new = (" ".join(rows.get(key, ("no row",))) for rows in (before, now))
        if old != new:
            lines.append(f"{' '.join(key)}: {old} on the page, {new} now")
    return lines


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare rows with the page, write nothing")
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")
    options = parser.parse_args()
    page = page_of(examine_all(options.jobs))
    if not options.check:
        PAGE.write_text(page.rstrip() + "\n")
        return 0
    changed = differences(PAGE.read_text(), page)
    for line in changed:
        print(line)
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
