"""Print the files that real runs pass through, and numbers of the source tree.

    python scripts/walk.py [--list] [--json]

Run it from a clone: it measures the clone's own ``src/packhorse`` and takes a processor and a tiny model from
``tests/contract``. It needs no network and about ten seconds.

**Walks.** The script writes a small dataset (image conversations), opens it with :func:`packhorse.load` and
traces the calls with :func:`sys.setprofile`. Everything that happens once per process (imports, caches) is
done before, on another copy of the data. Only this process is traced, with its threads.

- ``open_uncounted``, ``open_counted``: :func:`packhorse.load`, without and with saved counts and plan.
- ``sample``: the part of building a batch that is done for each sample: from reading the row to the encoded
  sample. It is found by its structure: the loader builds a batch of two samples, and the innermost call that
  opens the images of both makes one call for each of them. Collating the batch is not part of it.
- ``bad_sample``: the same for a sample whose image is cut off, including its ledger entry.
- ``resume``: ``loader.load_state_dict``.

A *file* is one in which at least one function is called. A *switch* is a call in another file than the call
before it, in the same thread. A return counts only if another call follows: a function that calls ``b``
twice makes one switch to ``b``; if it calls its own file in between, it makes three. Calls are those of
functions with a name, and the resumption of generators; lambdas, comprehensions, module and class bodies do
not count (in newer versions of Python comprehensions are not calls).

**Source.** By parsing the files: how many files and lines; modules that exactly one other module imports (in
any way, also inside functions and under ``TYPE_CHECKING``; imports by a computed name are not seen); and
parameters annotated ``Any``, or with ``Any`` inside another type.

**Private names of other libraries.** Names with a leading underscore that are imported from another library,
read from one of its modules, read with ``getattr`` from anything but ``self``, or that no class of the
package defines, with the comment at that line. It is an approximation: it misses a name that a class of the
package defines too, and lists one of the package's own that is read with ``getattr``.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import logging
import re
import sys
import tempfile
import threading
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "packhorse"
sys.path[:0] = [str(SOURCE.parent), str(ROOT / "tests")]

_FAMILY = "qwen2_5_vl"
_BATCH = 2  # samples of a batch
_PACK_SIZE = 128  # tokens: one row of `write_dataset` fits, two do not
_UNNAMED = ("<lambda>", "<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
# Documented names with an underscore: of named tuples, os and sys.
_PUBLIC = {"_asdict", "_fields", "_field_defaults", "_make", "_replace", "_exit", "_getframe"}
_FOR_TOOLS = re.compile(r"#\s*(type:\s*ignore(\[[^]]*\])?|noqa(:[\w\s,]*)?|pragma:[^#]*)")


# Walks.


@dataclass(frozen=True)
class Call:
    """One traced call of a function of the package.

    Attributes:
        file: its file, relative to the package.
        depth: how many traced calls of its thread are open around it.
        named: whether it is a function with a name.
    """

    thread: int
    file: str
    depth: int
    named: bool


@dataclass
class Trace:
    """The calls of a run in order, and for each opened image the calls around it (indices of `calls`)."""

    calls: list[Call] = field(default_factory=list)
    opened: list[tuple[int, ...]] = field(default_factory=list)

    def of_samples(self) -> list[list[Call]]:
        """Return the calls for each sample of a batch, see the docstring of the script."""
        common = 0
        while len({around[common : common + 1] for around in self.opened}) == 1 and self.opened[0][common:]:
            common += 1
        starts = sorted({around[common] for around in self.opened if around[common:]})
        if len(starts) != _BATCH:
            raise SystemExit(
                f"the trace of a batch shows {len(starts)} samples, expected {_BATCH}: samples are "
                "recognised by their calls of PIL.Image.open; adapt trace() if images are opened otherwise"
            )
        return [[self.calls[start], *self._inside(start)] for start in starts]

    def _inside(self, start: int) -> Iterator[Call]:
        outer = self.calls[start]
        for call in self.calls[start + 1 :]:
            if call.thread == outer.thread:
                if call.depth <= outer.depth:
                    return
                yield call


def trace(run: Callable[[], Any]) -> tuple[Any, Trace]:
    """Run a function and record the calls in the package."""
    from PIL import Image

    result, stacks = Trace(), defaultdict[int, list[int]](list)
    prefix = f"{SOURCE}/"
    image_open = Image.open.__code__

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code, thread = frame.f_code, threading.get_ident()
        if code is image_open and event == "call":
            result.opened.append(tuple(stacks[thread]))
        if not code.co_filename.startswith(prefix):
            return
        if event == "call":
            file = code.co_filename.removeprefix(prefix)
            call = Call(thread, file, len(stacks[thread]), _is_named_function(code))
            stacks[thread].append(len(result.calls))
            result.calls.append(call)
        elif event == "return":
            stacks[thread].pop()

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        value = run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return value, result


def _is_named_function(code: CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_OPTIMIZED) and code.co_name not in _UNNAMED


def summarize(calls: list[Call]) -> dict[str, Any]:
    """Count the files of some calls and the switches between them."""
    last: dict[int, str] = {}
    switches = 0
    files = dict.fromkeys(call.file for call in calls if call.named)
    for call in calls:
        if call.named:
            switches += last.get(call.thread, call.file) != call.file
            last[call.thread] = call.file
    return {"files": len(files), "switches": switches, "entered": list(files)}


def write_dataset(folder: Path, *, broken: bool = False) -> Path:
    """Write image conversations and their meta file; ``broken`` images are truncated."""
    import numpy as np
    from PIL import Image

    (folder / "images").mkdir(parents=True)
    lines = []
    for row in range(2 * _BATCH):
        pixels = np.random.default_rng(row).integers(0, 255, (64, 96, 3), dtype=np.uint8)
        image = folder / "images" / f"{row}.png"
        Image.fromarray(pixels).save(image)
        if broken:
            image.write_bytes(image.read_bytes()[: image.stat().st_size // 2])
        messages = [
            {"role": "user", "content": "<image>What is this?"},
            {"role": "assistant", "content": "Noise."},
        ]
        lines.append(json.dumps({"messages": messages, "images": [image.name]}) + "\n")
    (folder / "train.jsonl").write_text("".join(lines))
    meta = folder / "meta.json"
    meta.write_text(json.dumps({"coco": {"file_name": "train.jsonl", "media_dir": "images"}}))
    return meta


def open_loader(meta: Path) -> Any:
    """Open a loader that builds batches in this process."""
    import packhorse
    from contract.processors import processor
    from contract.tiny_models import tiny_model

    return packhorse.load(
        str(meta),
        processor(_FAMILY),
        model=tiny_model(_FAMILY),
        pack_size=_PACK_SIZE,
        batch_size=_BATCH,
        effort=0,
        max_bad_share=None,
        cache_dir=meta.parent / "cache",
        num_workers=0,
        count_workers=1,
    )


def run_walks(folder: Path) -> dict[str, dict[str, Any]]:
    """Open, load a batch of good and one of bad samples, and resume; see the docstring of the script."""
    meta = write_dataset(folder / "good")
    _, uncounted = trace(lambda: open_loader(meta))
    loader, counted = trace(lambda: open_loader(meta))
    batches = iter(loader)
    _, batch = trace(lambda: next(batches))
    resumed = open_loader(meta)
    _, resume = trace(lambda: resumed.load_state_dict(loader.state_dict()))
    broken = iter(open_loader(write_dataset(folder / "broken", broken=True)))
    bad, bad_batch = trace(lambda: next(broken))
    if len(bad.info.lost) != _BATCH:
        raise SystemExit(f"{len(bad.info.lost)} of {_BATCH} samples with a broken image were dropped")
    walks = {
        "open_uncounted": uncounted.calls,
        "open_counted": counted.calls,
        "sample": batch.of_samples()[-1],
        "bad_sample": bad_batch.of_samples()[-1],
        "resume": resume.calls,
    }
    return {name: summarize(calls) for name, calls in walks.items()}


# Source.


@dataclass(frozen=True)
class Module:
    """A parsed module of the package.

    Attributes:
        name: dotted, from ``packhorse`` on.
        path: relative to the clone.
    """

    name: str
    path: str
    text: str
    tree: ast.Module
    is_package: bool

    @property
    def package(self) -> str:
        """The package that relative imports start from."""
        return self.name if self.is_package else self.name.rpartition(".")[0]


def read_modules() -> dict[str, Module]:
    """Parse all modules of the package, by name."""
    modules = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        text = path.read_text(encoding="utf-8")
        modules[name] = Module(name, str(path.relative_to(ROOT)), text, ast.parse(text), is_package)
    return modules


def imported_names(module: Module, node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the dotted names that a statement imports: modules, or names in modules."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        package = module.package.split(".")
        base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
    return [f"{base}.{alias.name}" for alias in node.names]


def find_importers(modules: dict[str, Module]) -> dict[str, set[str]]:
    """Return the modules that import each module."""
    importers: dict[str, set[str]] = {name: set() for name in modules}
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for name in imported_names(module, node):
                    target = name if name in modules else name.rpartition(".")[0]
                    if target in modules and target != module.name:
                        importers[target].add(module.name)
    return importers


def count_any(modules: dict[str, Module]) -> dict[str, int]:
    """Count the parameters that are annotated ``Any``, and those with ``Any`` inside another type."""
    counts = {"any": 0, "any_processor": 0, "any_inside": 0}
    for module in modules.values():
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.arg) or node.annotation is None:
                continue
            annotation = node.annotation
            if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
                annotation = ast.parse(annotation.value, mode="eval").body
            if _is_any(annotation):
                counts["any"] += 1
                counts["any_processor"] += node.arg == "processor"
            elif any(_is_any(part) for part in ast.walk(annotation)):
                counts["any_inside"] += 1
    return counts


def _is_any(node: ast.AST) -> bool:
    return (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)) == "Any"


# Private names of other libraries.


def is_private(name: str) -> bool:
    """Return whether a name has a leading underscore and is not documented."""
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in _PUBLIC


def member_names(modules: dict[str, Module]) -> set[str]:
    """Return the names that classes of the package define: methods, class variables, attributes, slots."""
    names: set[str] = set()
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                names |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
                targets = (target for part in node.body for target in _targets(part))
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                names.add(node.attr)
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "__setattr__":
                names |= {str(part.value) for part in node.args if isinstance(part, ast.Constant)}
            for slots in _targets(node):
                if isinstance(slots, ast.Name) and slots.id == "__slots__":
                    names |= {str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant)}
    return names


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _list_imports(module: Module) -> dict[str, bool]:
    """Return the imported names of a module, and whether they come from another library."""
    names = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias, full in zip(node.names, imported_names(module, node), strict=True):
                bound = alias.name.split(".")[0] if isinstance(node, ast.Import) else alias.name
                names[alias.asname or bound] = full.split(".")[0] != SOURCE.name
    return names


def private_uses(modules: dict[str, Module]) -> list[dict[str, Any]]:
    """Find private names of other libraries, with file, line and the comment there (None without one).

    The comment at the first use of a name in a file counts for its later ones.
    """
    members, uses = member_names(modules), []
    for module in modules.values():
        found = list(_find_private(module, members))
        comments = _comments(module) if found else {}
        explained: dict[str, str] = {}
        for statement, line, name in found:
            last = name.rpartition(".")[2]
            comment = _comment_at(comments, statement, line) or explained.get(last)
            if comment is not None:
                explained.setdefault(last, comment)
            uses.append({"name": name, "file": module.path, "line": line, "comment": comment})
    return uses


def _find_private(module: Module, members: set[str]) -> Iterator[tuple[ast.stmt, int, str]]:
    """Yield statement, line and name of each private name of another library in a module."""
    imported = _list_imports(module)
    inner: set[ast.AST] = set()  # `a._b` in `a._b._c`
    for statement, node in _with_statements(module.tree):
        for name in () if node in inner else _private_names(node, module, members, imported):
            inner.add(getattr(node, "value", node))
            yield statement, node.lineno, name


def _with_statements(tree: ast.Module) -> Iterator[tuple[ast.stmt, Any]]:
    """Yield every node with its innermost statement."""

    def visit(node: ast.AST, statement: ast.stmt | None) -> Iterator[tuple[ast.stmt, Any]]:
        for child in ast.iter_child_nodes(node):
            inside = child if isinstance(child, ast.stmt) else statement
            if inside is not None:
                yield inside, child
            yield from visit(child, inside)

    return visit(tree, None)


def _private_names(
    node: ast.AST, module: Module, members: set[str], imported: dict[str, bool]
) -> Iterator[str]:
    """Yield the private names of other libraries that a node uses."""
    if isinstance(node, ast.Attribute) and is_private(node.attr):
        root: ast.AST = node.value
        while isinstance(root, ast.Attribute):
            root = root.value
        # None: not an imported name
        foreign = imported.get(root.id) if isinstance(root, ast.Name) else None
        if foreign or (foreign is None and node.attr not in members):
            yield ast.unparse(node)
    elif isinstance(node, ast.Import | ast.ImportFrom):
        for name in imported_names(module, node):
            if name.split(".")[0] != SOURCE.name and any(is_private(part) for part in name.split(".")):
                yield name
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
        constant = node.args[1] if len(node.args) > 1 else None
        name = str(constant.value) if isinstance(constant, ast.Constant) else ""
        if is_private(name) and not _is_self(node.args[0]):
            yield f"{ast.unparse(node.args[0])}.{name}"


def _comments(module: Module) -> dict[int, tuple[str, bool]]:
    """Return the comments by line, and whether the line has no code; without notes to tools."""
    comments = {}
    lines = iter(module.text.splitlines(keepends=True))
    for token in tokenize.generate_tokens(lambda: next(lines, "")):
        if token.type == tokenize.COMMENT and (text := _FOR_TOOLS.sub("", token.string).strip("# ")):
            comments[token.start[0]] = (text, not token.line[: token.start[1]].strip())
    return comments


def _comment_at(comments: dict[int, tuple[str, bool]], statement: ast.stmt, line: int) -> str | None:
    """Return the comment in a statement up to a line, or directly above it; in a block only of the line."""
    first = line if hasattr(statement, "body") else statement.lineno
    while first - 1 in comments and comments[first - 1][1]:
        first -= 1
    return " ".join(comments[at][0] for at in range(first, line + 1) if at in comments) or None


# Output.


def measure_source() -> dict[str, Any]:
    """Return the numbers of the source tree."""
    modules = read_modules()
    importers = find_importers(modules)
    single = {name: next(iter(by)) for name, by in importers.items() if len(by) == 1}
    return {
        "files": len(modules),
        "lines": sum(len(module.text.splitlines()) for module in modules.values()),
        "one_importer": single,
        "parameters": count_any(modules),
        "private": private_uses(modules),
    }


def print_report(walks: dict[str, dict[str, Any]], source: dict[str, Any], *, list_files: bool) -> None:
    """Print the report."""
    print(f"{'walk':<16}{'files':>7}{'switches':>10}")
    for name, walk in walks.items():
        print(f"{name:<16}{walk['files']:>7,}{walk['switches']:>10,}")
        if list_files:
            print(*(f"    {file}" for file in walk["entered"]), sep="\n")
    single, parameters, private = source["one_importer"], source["parameters"], source["private"]
    print(f"\nsource: {source['files']:,} files, {source['lines']:,} lines")
    print(f"modules with exactly one importer: {len(single):,}")
    if list_files:
        print(*(f"    {name} (by {importer})" for name, importer in single.items()), sep="\n")
    print(
        f"parameters annotated Any: {parameters['any']:,} ({parameters['any_processor']:,} named processor); "
        f"Any inside another type: {parameters['any_inside']:,}"
    )
    names = {use["name"].rpartition(".")[2] for use in private}
    unexplained = sum(use["comment"] is None for use in private)
    print(
        f"\nprivate names of other libraries: {len(names):,}, used in {len(private):,} places, "
        f"{unexplained:,} of them without a comment"
    )
    for use in private:
        print(f"    {use['file']}:{use['line']}  {use['name']}  # {use['comment'] or 'NO COMMENT'}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--list", action="store_true", help="print the files in order of first entry")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # the broken images are intended
    with tempfile.TemporaryDirectory() as folder:
        next(iter(open_loader(write_dataset(Path(folder) / "imported"))))  # without tracing the imports
        run_walks(Path(folder) / "first")  # fills the caches of the process
        walks = run_walks(Path(folder) / "second")
    source = measure_source()
    if options.json:
        print(json.dumps({"walks": walks, "source": source}, indent=2))
    else:
        print_report(walks, source, list_files=options.list)


if __name__ == "__main__":
    main()
