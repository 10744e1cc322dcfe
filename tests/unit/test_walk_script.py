"""``scripts/walk.py`` prints files, switches and numbers of the source tree."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from warm_python import run_warm

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "walk.py"
SOURCE = ROOT / "src" / "packhorse"

# People who change the code have to open these: more files need a reason, and another limit. The last five:
# whether a model can be packed, its layers with state, its router, batch formats, and the cost of layers.
MAX_FILES_TO_OPEN = 48
MAX_FILES_OF_SAMPLE, MAX_SWITCHES_OF_SAMPLE = 21, 57


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """The output of one run of the script."""
    run = run_warm(SCRIPT, "--json", cwd=ROOT)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def walk() -> ModuleType:
    """The script as a module."""
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("walk", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["walk"] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = path
    return module


def test_every_walk_lists_files_in_order_and_counts_switches(result: dict[str, Any]) -> None:
    walks = result["walks"]
    assert list(walks) == ["open_uncounted", "open_counted", "sample", "bad_sample", "resume"]
    for one in walks.values():
        assert one["files"] == len(one["entered"]) == len(set(one["entered"]))
        assert one["switches"] >= one["files"] - 1 > 0
        assert all((SOURCE / file).is_file() for file in one["entered"])
    assert walks["open_counted"]["files"] <= MAX_FILES_TO_OPEN
    assert walks["sample"]["files"] <= MAX_FILES_OF_SAMPLE
    assert walks["sample"]["switches"] <= MAX_SWITCHES_OF_SAMPLE


def test_the_walks_contain_the_main_files(result: dict[str, Any]) -> None:
    entered = {name: set(one["entered"]) for name, one in result["walks"].items()}
    assert {"media", "families"} <= {file.split("/")[0] for file in entered["sample"]}
    assert "ledger.py" in entered["bad_sample"]
    assert not any(file.startswith("families/qwen") for file in entered["bad_sample"]), "is not encoded"
    assert len(entered["open_counted"]) < len(entered["open_uncounted"])
    assert not any(file.startswith("media/") for file in entered["resume"]), "a resume decodes nothing"


def test_files_and_lines_are_those_of_the_source(result: dict[str, Any]) -> None:
    texts = [path.read_text() for path in SOURCE.rglob("*.py")]
    source = result["source"]
    assert source["files"] == len(texts)
    assert source["lines"] == sum(len(text.splitlines()) for text in texts)
    assert 0 < len(source["one_importer"]) < source["files"]
    for use in source["private"]:
        lines = (ROOT / use["file"]).read_text().splitlines()
        assert use["name"].rpartition(".")[2] in lines[use["line"] - 1]
        assert use["comment"], f"{use['file']}:{use['line']}: {use['name']} needs a comment with a reason"
        assert len(use["comment"].split()) > 3, f"{use['comment']!r} is no reason"


def parse(walk: ModuleType, **texts: str) -> dict[str, Any]:
    return {
        f"packhorse.{name}": walk.Module(
            f"packhorse.{name}", f"src/packhorse/{name}.py", text, ast.parse(text), False
        )
        for name, text in texts.items()
    }


def test_a_switch_is_a_call_in_another_file_than_the_call_before(walk: ModuleType) -> None:
    def summary(*files: str, threads: str = "") -> Any:
        numbers = threads or "1" * len(files)
        calls = [walk.Call(int(n), file, 0, True) for n, file in zip(numbers, files, strict=True)]
        return walk.summarize(calls)

    assert summary("a", "b", "b") == {"files": 2, "switches": 1, "entered": ["a", "b"]}
    assert summary("a", "b", "a", "b")["switches"] == 3
    assert summary("a", "b", "a", "b", threads="1212")["switches"] == 0, "each thread has its own order"
    unnamed = [walk.Call(1, "a", 0, True), walk.Call(1, "b", 1, False), walk.Call(1, "a", 1, True)]
    assert walk.summarize(unnamed) == {"files": 1, "switches": 0, "entered": ["a"]}


def test_importers_are_counted_once_however_they_import(walk: ModuleType) -> None:
    modules = parse(
        walk,
        a="from packhorse.b import x\ndef f():\n    import packhorse.c\n    from . import c",
        b="import packhorse.c as c\nimport os",
        c="",
    )
    assert walk.find_importers(modules) == {
        "packhorse.a": set(),
        "packhorse.b": {"packhorse.a"},
        "packhorse.c": {"packhorse.a", "packhorse.b"},
    }


def test_any_inside_another_type_is_counted_separately(walk: ModuleType) -> None:
    text = "def f(processor: Any, b: 'Any', c: typing.Any, d: list[Any], *e: int, f=1) -> Any: ..."
    assert walk.count_any(parse(walk, a=text)) == {"any": 3, "any_processor": 1, "any_inside": 1}


def test_private_names_of_others_come_with_their_comments(walk: ModuleType) -> None:
    text = """\
import torch
from torch._utils import helper
class A:
    _fine = 1
    def f(self, x, other):
        self._own = x._replace(a=1)
        other._own, other._fine
        # No public way.
        x._hidden()
        x._hidden()
        getattr(x, "_own")  # type: ignore[attr-defined]
        return torch._C._do(x)  # noqa: E501  # as torch does
"""
    uses = walk.private_uses(parse(walk, a=text))
    assert [(use["line"], use["name"], use["comment"]) for use in uses] == [
        (2, "torch._utils.helper", None),
        (9, "x._hidden", "No public way."),
        (10, "x._hidden", "No public way."),
        (11, "x._own", None),
        (12, "torch._C._do", "as torch does"),
    ]


def test_only_the_option_lists_files(
    walk: ModuleType, result: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    walks = {"sample": {"files": 2, "switches": 1, "entered": ["a.py", "b.py"]}}
    source = result["source"]
    walk.print_report(walks, source, list_files=False)
    short = capsys.readouterr().out
    assert short.split()[:6] == ["walk", "files", "switches", "sample", "2", "1"]
    assert f"{source['files']:,} files, {source['lines']:,} lines" in short
    assert "    a.py\n" not in short
    walk.print_report(walks, source, list_files=True)
    assert "    a.py\n    b.py\n" in capsys.readouterr().out
