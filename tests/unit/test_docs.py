"""Every Python block of the README and of the user pages runs unchanged in an empty folder.

Only ``from_pretrained`` is replaced: it returns the small Qwen2.5-VL of the contract tests.
"""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from packhorse.types import Reason

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FIGURES = ("benchmarks.md",)  # no code
PUBLIC = (
    *("", ".datasets", ".collate_fns", ".samplers", ".neat_packing_vlm", ".pp_media", ".media", ".loader"),
    *(".integrations.pipelining", ".integrations.transformers"),
)


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


SMALL_MODELS = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from contract.torchvision_ops import make_torchvision_importable
make_torchvision_importable()
from contract.processors import processor
from contract.tiny_models import tiny_model
import transformers
transformers.AutoProcessor.from_pretrained = lambda name: processor("qwen2_5_vl")
transformers.AutoModelForImageTextToText.from_pretrained = lambda name: tiny_model("qwen2_5_vl")
"""


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in FIGURES], ids=lambda page: page.name)
def test_the_code_of_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    blocks = python_blocks(page)
    assert blocks, f"{page.name} has no code"
    code = "\n".join(blocks)
    if "from_pretrained(" in code:
        code = SMALL_MODELS + code
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_other_pages_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_ledger_page_documents_every_reason_and_no_other() -> None:
    table = (ROOT / "docs" / "ledger.md").read_text().partition("| reason |")[2].partition("\n\n")[0]
    documented = [name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert sorted(documented) == sorted(get_args(Reason))


@pytest.mark.parametrize("module", [f"packhorse{name}" for name in PUBLIC])
def test_every_public_name_is_on_a_page(module: str) -> None:
    words = {word for page in PAGES for word in re.findall(r"\w+", page.read_text())}
    names = {name for name in importlib.import_module(module).__all__ if not name.startswith("__")}
    assert names <= words, f"{', '.join(sorted(names - words))} of {module} are on no page"
