"""Files of Packhorse are data: reading one executes nothing, and a damaged one is rejected.

Objects are pickled only between processes of one run (counting, loading), never into a file.
"""

import ast
import json
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from count_samples import chat, sidecars, write_chats, write_meta, write_rows
from packhorse.count.counting import count_meta
from packhorse.count.sidecar import Sidecar, counts_of
from packhorse.datasets import open_meta_dataset
from packhorse.errors import ConfigError
from packhorse.neat_packing_vlm import PackPlan, plan_key, plan_packs

SOURCES = sorted((Path(__file__).parents[2] / "src").rglob("*.py"))
BETWEEN_PROCESSES = ("utils/pool.py",)
MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def imported_modules(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def has_keyword(call: ast.Call, name: str, value: bool) -> bool:
    """Return whether a call has this keyword with this value."""
    argument = {keyword.arg: keyword.value for keyword in call.keywords}.get(name)
    return isinstance(argument, ast.Constant) and argument.value is value


def find_unsafe(path: Path) -> list[str]:
    """Return the imports and calls of a source file that could execute data."""
    tree = ast.parse(path.read_text())
    imports = [f"import {name}" for name in sorted(imported_modules(tree) & MODULES)]
    return imports + [name for name, call in calls(tree) if is_unsafe(name, call)]


def is_unsafe(name: str, call: ast.Call) -> bool:
    package, _, last = name.rpartition(".")
    if package == "torch" and last == "load":
        return not has_keyword(call, "weights_only", True)
    if package in ("np", "numpy") and last == "load":
        return has_keyword(call, "allow_pickle", True)
    if package == "yaml":
        return last in ("load", "load_all", "full_load", "unsafe_load")
    return name in ("eval", "exec", "compile", "__import__") or last in ("read_pickle", "to_pickle")


def test_no_source_file_can_execute_data() -> None:
    assert len(SOURCES) > 100
    found = {path.as_posix(): find_unsafe(path) for path in SOURCES}
    allowed = {path for path, names in found.items() if names == ["import pickle"]}
    assert {path for path, names in found.items() if names} == allowed
    assert all(path.endswith(BETWEEN_PROCESSES) for path in allowed)


def test_the_search_finds_unsafe_calls(tmp_path: Path) -> None:
    lines = [
        "import pickle, marshal",
        "from shelve import open",
        "torch.load(p)",
        "torch.load(p, weights_only=True)",
        "np.load(p, allow_pickle=True)",
        "yaml.load(f)",
        "yaml.safe_load(f)",
        "eval('1')",
        "exec('1')",
    ]
    (tmp_path / "a.py").write_text("\n".join(lines))
    found = [
        "import marshal",
        "import pickle",
        "import shelve",
        "torch.load",
        "np.load",
        "yaml.load",
        "eval",
        "exec",
    ]
    assert find_unsafe(tmp_path / "a.py") == found


def test_pickles_are_sent_through_pipes_and_never_written_to_files() -> None:
    for path in (path for path in SOURCES if path.as_posix().endswith(BETWEEN_PROCESSES)):
        used = {name for name, _ in calls(ast.parse(path.read_text()))}
        assert not used & {"open", "pickle.load", "pickle.dump", "pickle.Unpickler"}, path


# --- damaged files ---------------------------------------------------------------------------------------


def damage(data: bytes, pieces: int) -> Iterator[bytes]:
    """Yield copies of a file: in each of ``pieces`` pieces a changed byte, the piece erased, the file cut."""
    rng = np.random.default_rng(0)
    edges = np.linspace(0, len(data), pieces + 1, dtype=int).tolist()
    for begin, end in pairwise(edges):
        offset = int(rng.integers(begin, end))
        yield data[:offset] + bytes([data[offset] ^ 1 << int(rng.integers(8))]) + data[offset + 1 :]
        yield data[:begin] + bytes(end - begin) + data[end:]
        yield data[:begin] + b"\xff" * (end - begin) + data[end:]
        yield data[:begin]


def write(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)  # never change a file that is mapped
    path.write_bytes(data)


def test_a_damaged_plan_is_rejected_or_unchanged(tmp_path: Path) -> None:
    path, lengths = tmp_path / "a.phplan", [5, 3, 4, 20, 0, 7, 2] * 20
    plan_packs(lengths, 8, seed=1).save(path, plan_key(lengths, 8, seed=1))
    good, data = PackPlan.load(path), path.read_bytes()
    rejected = 0
    for other in damage(data, 150):
        write(path, other)
        try:
            found = PackPlan.load(path)
        except ConfigError:
            rejected += 1
            continue
        # Arrow ignores padding bytes.
        assert found.indices.tolist() == good.indices.tolist()
        assert found.offsets.tolist() == good.offsets.tolist()
        assert (found.capacity, found.bound) == (good.capacity, good.bound)
    assert rejected > 400


def test_a_damaged_count_file_is_rejected_or_unchanged(tmp_path: Path, qwen: Any) -> None:
    write_rows(tmp_path / "a.jsonl", [*(chat(n) for n in range(30)), "no row"])
    meta = write_meta(tmp_path, {"a": {"file_name": "a.jsonl", "media_dir": "."}})
    count_meta(meta, qwen, part_rows=8)
    (path,) = sidecars(tmp_path)
    good, data = Sidecar(path), path.read_bytes()
    totals, status = good.columns().total.tolist(), good.columns().status.tolist()
    rejected = 0
    for other in damage(data, 200):
        write(path, other)
        try:
            found = Sidecar(path)
        except ConfigError:
            rejected += 1
            continue
        assert found.about == good.about
        assert (found.columns().total.tolist(), found.columns().status.tolist()) == (totals, status)
    assert rejected > 400


def test_a_changed_count_is_recounted(tmp_path: Path, qwen: Any) -> None:
    meta = write_chats(tmp_path, 6)
    count_meta(meta, qwen)
    (path,) = sidecars(tmp_path)
    data, texts = path.read_bytes(), Sidecar(path).columns().text
    column = np.asarray(texts, "<i4").tobytes()
    assert data.count(column) == 1
    write(path, data.replace(column, np.asarray(texts + 1, "<i4").tobytes()))
    assert counts_of(open_meta_dataset(meta), qwen) is None
    assert count_meta(meta, qwen).counted_rows == 6
    assert Sidecar(path).columns().text.tolist() == texts.tolist()


def test_a_damaged_part_of_an_interrupted_count_is_recounted(tmp_path: Path, qwen: Any) -> None:
    meta = write_chats(tmp_path, 12)
    parts: list[Path] = []

    class InterruptedEngine:
        def run(self, work: Any, tasks: Any) -> Iterator[tuple[int, Any]]:
            for number in range(2):
                yield number, work(tasks[number])
            parts.extend(tmp_path.glob("*.parts/*.arrow"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        count_meta(meta, qwen, part_rows=3, engine=InterruptedEngine())
    data = bytearray(parts[0].read_bytes())
    data[len(data) // 3] ^= 0xFF
    write(parts[0], bytes(data))
    assert len(parts) == 2
    assert count_meta(meta, qwen, part_rows=3).counted_rows == 9


@pytest.mark.parametrize("about", [{}, [], None, "x", {"format": "packhorse-plan-1"}])
def test_an_arrow_file_that_is_no_plan_is_rejected(about: Any, tmp_path: Path) -> None:
    import pyarrow as pa

    schema = pa.schema([("a", pa.int64())], metadata={"packhorse": json.dumps(about)})
    with pa.ipc.new_file(str(tmp_path / "x"), schema) as writer:
        writer.write_batch(pa.record_batch([pa.array([1], pa.int64())], schema=schema))
    with pytest.raises(ConfigError):
        PackPlan.load(tmp_path / "x")
    with pytest.raises(ConfigError):
        Sidecar(tmp_path / "x")


def test_deeply_nested_json_is_rejected(tmp_path: Path) -> None:
    import pyarrow as pa

    for about in ("[" * 100_000, '{"format":' * 50_000):
        schema = pa.schema([("a", pa.int64())], metadata={"packhorse": about})
        with pa.ipc.new_file(str(tmp_path / "x"), schema) as writer:
            writer.write_batch(pa.record_batch([pa.array([1], pa.int64())], schema=schema))
        for read in (PackPlan.load, Sidecar):
            with pytest.raises(ConfigError):
                read(tmp_path / "x")
        os.unlink(tmp_path / "x")
