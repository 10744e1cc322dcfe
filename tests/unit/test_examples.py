"""Each example is one file that can be copied. The tests in tests/distributed run them."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path for path in (ROOT / "examples").iterdir() if path.name != "__pycache__")
OTHERS = {"accelerate", "lightning", "torch", "transformers"}


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield str(node.module)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_imports_only_what_a_user_has_installed(path: Path) -> None:
    assert path.suffix == ".py"
    allowed = {*sys.stdlib_module_names, *OTHERS}
    for name in imports_of(path):
        package = name.partition(".")[0]
        assert package in allowed or name == "packhorse" or name.startswith("packhorse.integrations."), name


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_takes_any_checkpoint_and_any_data(path: Path) -> None:
    code = path.read_text()
    for option in ('"--model", default="demo/model"', '"--data", default="demo/data/meta.json"'):
        assert f"parser.add_argument({option}" in code
    assert code.count("from_pretrained(options.model)") == 2, "processor and model"
