"""Every Python block of the user pages runs unchanged in an empty folder.

Only ``from_pretrained`` is replaced: it returns the small Qwen2.5-VL of the contract tests.
"""

import importlib
import re
from pathlib import Path
from typing import get_args

import pytest

from packhorse.types import Reason
from page_code import SMALL_MODELS, python_blocks
from warm_python import run_warm

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p.parent.name != "api")]
ELSEWHERE = ("benchmarks.md", "README.md")  # no code; test_readme.py
PUBLIC = (
    *("", ".datasets", ".collate_fns", ".samplers", ".neat_packing_vlm", ".pp_media", ".media", ".loader"),
    *(".integrations.pipelining", ".integrations.transformers"),
)


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in ELSEWHERE], ids=lambda page: page.name)
def test_the_code_of_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    blocks = python_blocks(page)
    assert blocks, f"{page.name} has no code"
    code = "\n".join(blocks)
    if "from_pretrained(" in code:
        code = SMALL_MODELS + code
    run = run_warm("-c", code, cwd=tmp_path)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_other_pages_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_ledger_page_documents_every_reason_and_no_other() -> None:
    page = ROOT / "docs" / "explanation" / "reliability.md"
    table = page.read_text().partition("| reason |")[2].partition("\n\n")[0]
    documented = [name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert sorted(documented) == sorted(get_args(Reason))


@pytest.mark.parametrize("module", [f"packhorse{name}" for name in PUBLIC])
def test_every_public_name_is_on_a_page(module: str) -> None:
    words = {word for page in PAGES for word in re.findall(r"\w+", page.read_text())}
    names = {name for name in importlib.import_module(module).__all__ if not name.startswith("__")}
    assert names <= words, f"{', '.join(sorted(names - words))} of {module} are on no page"
