"""Write ``docs/reference/packable_models.md``: which models of transformers can be trained on packs.

    python scripts/packing_table.py [--check] [--jobs N]

Run it from a clone: ``tests/contract/sweep.py`` builds a tiny model of every causal and image-text class of
the installed transformers, and measures it. That takes a few minutes, no network and no GPU. With ``--check``
nothing is written: the script fails if a class is in another group than on the page.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from math import floor, isinf, log10
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "packable_models.md"
sys.path.insert(0, str(ROOT / "tests"))

if TYPE_CHECKING:
    from contract.sweep import Measured, Result

_LONGEST_REASON = 160
_ROW = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \|", re.MULTILINE)
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
    "rejected": (
        "Rejected",
        '`packhorse.load` and `prepare` raise `ConfigError`. Train these models with `mode="pad"`.',
    ),
    "fails": ("Wrong", "These are accepted, and packed rows are wrong. There should be none."),
    "not built": (
        "Not measured",
        "No tiny model can be built from the default config of the type. `packhorse.load` measures the "
        "config of your model.",
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
Each accepted class went through `prepare`, `load` and `model_inputs` with a pack of three documents, with
every attention that `prepare` accepts. Its row says:

- **accepted by**: *test*, the class is in Packhorse's table, which its tests check; *measurement*, a tiny
  copy is measured when `load` or `prepare` first sees it;
- **rows**: whether the documents had images;
- **difference**: of the logits of the last document, if the documents before it are replaced / from the
  document alone. *0* is equal to the bit, *rounding* at most four times the difference between correct
  computations of the document alone;
- **control**: the same without mask and boundaries, or without `prepare` for layers that carry state, rounded
  down to a power of ten; *raises*: the model does not run then;
- **attention**: those with which this holds. `sdpa`, `eager` and `flex_attention` take a mask; `varlen` takes
  boundaries of documents, as flash attention does, which was not run here. *window*: also `varlen` with a
  sliding window that is shorter than the documents. Dropout of attention is 0.
"""
_HEADS = {
    "packs": ("accepted by", "rows", "difference", "control", "attention"),
    "layers": ("layers", "in one call with", "accepted by", "rows", "difference", "control", "attention"),
}


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
    groups = {name: [one for one in ordered if one.group == name] for name in _GROUPS}
    return "\n".join(
        [*_introduction(groups), *(line for name in _GROUPS for line in _table(name, groups[name]))]
    )


def _introduction(groups: Mapping[str, Sequence[Result]]) -> Iterator[str]:
    from packhorse.families.packing import PACKABLE

    tested = ", ".join(f"`{name}`" for name in sorted(PACKABLE))
    yield _INTRODUCTION.format(version=version("transformers"), tested=tested)
    yield "| group | classes |\n|---|---|"
    for name, (title, _) in _GROUPS.items():
        if groups[name]:
            yield f"| [{title}](#{_slug(title)}) | {len(groups[name])} |"
    yield _COLUMNS


def _table(group: str, results: Sequence[Result]) -> Iterator[str]:
    if not results:
        return
    title, what = _GROUPS[group]
    yield f"## {title}\n\n{what}\n"
    if group == "layers":
        yield _about_kernels(results)
    heads = ("model type", "class", *_HEADS.get(group, ("reason",)))
    yield f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}"
    for result in results:
        cells = (f"`{result.model_type}`", f"`{result.class_name}`", *_cells(result))
        yield f"| {' | '.join(cells)} |"
    yield ""


def _about_kernels(results: Sequence[Result]) -> str:
    packages = sorted({name for result in results for name in _kernels(result)})
    return (
        f"Packages: {', '.join(f'`{name}`' for name in packages)}. `fla` is flash-linear-attention. "
        "`causal_conv1d` and `mamba_ssm`: not run with the real kernel, but with functions that take the "
        "same arguments (`tests/contract/test_boundary_kernels.py`).\n"
    )


def _kernels(result: Result) -> dict[str, None]:
    from packhorse.families.stateful import KERNELS

    return {name: None for layer in result.layers for name in KERNELS.get(layer, ())}


def _cells(result: Result) -> Iterator[str]:
    if not result.measured:
        yield reason_of(result)
        return
    if result.group == "layers":
        yield ", ".join(f"`{layer}`" for layer in result.layers)
        yield ", ".join(f"`{name}`" for name in _kernels(result)) or "none"
    yield "test" if result.tested else "measurement"
    yield "images" if result.media else "text"
    measured = list(result.measured.values())
    yield " / ".join(_worst(measured, name) for name in ("leak", "difference"))
    yield _control(min(one.control for one in measured))
    yield ", ".join(_attentions(result))


def _worst(measured: Sequence[Measured], name: str) -> str:
    if not all(one.right for one in measured):
        return "wrong"
    return "rounding" if any(getattr(one, name) for one in measured) else "0"


def _control(value: float) -> str:
    return "raises" if isinf(value) else f"1e{floor(log10(value)):+03d}" if value else "0"


def _attentions(result: Result) -> Iterator[str]:
    for name, one in result.measured.items():
        if one.right:
            yield "window" if "window" in name else f"`{one.attention}`"


def reason_of(result: Result) -> str:
    """Return why a class is rejected, in one short cell of a table, without numbers that differ by CPU."""
    reason = re.sub(r"; packhorse parity --model .*?load\(…, model=model\)", "", result.reason)
    reason = re.sub(r",? by [\d.]+e[-+]\d+", "", reason).replace(f"{result.class_name}: ", "")
    reason = re.sub(r"[|<>`*_\\]", lambda found: f"\\{found[0]}", reason)
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON].rstrip(chr(92))}…"


def _slug(title: str) -> str:
    return re.sub(r"[^a-z]+", "-", title.lower()).strip("-")


def groups_on(page: str) -> dict[tuple[str, str], str]:
    """Return the group of each model type and class on a page."""
    found: dict[tuple[str, str], str] = {}
    titles = {title: group for group, (title, _) in _GROUPS.items()}
    for section in page.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        for model_type, class_name in _ROW.findall(body):
            found[model_type, class_name] = titles[title]
    return found


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare groups with the page, write nothing")
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")
    options = parser.parse_args()
    page = page_of(examine_all(options.jobs))
    if not options.check:
        PAGE.write_text(page.rstrip() + "\n")
        return 0
    before, now = groups_on(PAGE.read_text()), groups_on(page)
    changed = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
    for key in changed:
        print(f"{' '.join(key)}: {before.get(key, 'not there')} on the page, {now.get(key, 'not there')} now")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
