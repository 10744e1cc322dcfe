"""``make docs`` builds the documentation: strictly, with every public name, and without other hosts."""

import importlib
import json
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
API_MODULES = (
    *("", ".datasets", ".mock", ".collate_fns", ".samplers", ".neat_packing_vlm", ".pp_media", ".media"),
    *(".tools.check", ".integrations.transformers", ".integrations.pipelining"),
)
# Elements that make a browser load something when the page is opened; <a href> does not.
_LOADED = re.compile(r"<(?:link|script|img|iframe|source|video|audio|object|embed|use)\b[^>]*>")
_ADDRESS = re.compile(r"""\b(?:href|src|srcset|data|poster)=["']?((?:https?:)?//[^"'\s>]+)""")


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    # Without --quiet: it hides warnings from --strict too.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def loaded_from_other_hosts(html: str) -> list[str]:
    """Return the addresses on other hosts that a browser loads with a page."""
    found = [address for element in _LOADED.findall(html) for address in _ADDRESS.findall(element)]
    styles = re.findall(r"<style[^>]*>(.*?)</style>", html, re.DOTALL)
    return found + [address for style in styles for address in addresses_in_css(style)]


def addresses_in_css(css: str) -> list[str]:
    """Return the addresses on other hosts in ``url(…)`` and ``@import`` of a style sheet."""
    return re.findall(r"""(?:url\(|@import\s)["']?((?:https?:)?//[^"')\s]+)""", css)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("docs") / "site"
    done = build(ROOT, out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_every_page_is_in_the_navigation_under_one_of_the_four_kinds(site: Path) -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert [name for entry in nav for name in entry] == [
        *("Home", "Tutorial", "How-to", "Reference", "Explanation"),
    ]
    for page in (ROOT / "docs").rglob("*.md"):
        relative = page.relative_to(ROOT / "docs")
        built = relative.with_name("index.html") if page.stem == "index" else relative.with_suffix("")
        assert (site / built).exists(), f"{relative} is not built"


def test_no_page_loads_a_style_sheet_script_font_or_image_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        assert loaded_from_other_hosts(page.read_text("utf-8")) == [], page.relative_to(site)
    for sheet in site.rglob("*.css"):
        assert addresses_in_css(sheet.read_text("utf-8")) == [], sheet.relative_to(site)


def test_a_page_that_loads_from_another_host_would_be_found() -> None:
    for element in (
        '<link rel="stylesheet" href="https://fonts.example/css">',
        "<script src=//cdn.example/a.js></script>",
        '<img alt="" src="http://example.org/a.png">',
        "<style>@import 'https://example.org/a.css';</style>",
        "<style>a { background: url(https://example.org/a.png) }</style>",
    ):
        assert len(loaded_from_other_hosts(element)) == 1, element
    assert loaded_from_other_hosts('<a href="https://example.org">there</a><img src="../a.png">') == []


def test_the_search_finds_the_settings_of_the_loader(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    assert any("gradient_accumulation_steps" in entry["text"] for entry in index["docs"])
    assert list(site.glob("assets/javascripts/workers/search.*.js"))


def test_the_api_pages_have_every_public_name(site: Path) -> None:
    lines = (site / "objects.inv").read_bytes().split(b"\n", 4)  # four lines, then compressed entries
    documented = {line.split()[0] for line in zlib.decompress(lines[4]).decode().splitlines()}
    for module in (f"packhorse{name}" for name in API_MODULES):
        names = {f"{module}.{name}" for name in importlib.import_module(module).__all__}
        hidden = {name for name in names if "._" in name or name.endswith(".logger")}
        assert names - hidden <= documented, sorted(names - hidden - documented)


def test_each_broken_link_anchor_and_reference_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "src").symlink_to(ROOT / "src")
    config = (ROOT / "mkdocs.yml").read_text()
    start, _, rest = config.partition("\nnav:\n")  # the pages here are other ones
    (tmp_path / "mkdocs.yml").write_text(start + "\nvalidation:\n" + rest.partition("\nvalidation:\n")[2])
    home = tmp_path / "docs" / "index.md"
    (tmp_path / "docs" / "tutorial.md").write_text("# Tutorial\n\n::: packhorse.types.World\n")
    right = ["[there](tutorial.md)", "[there](tutorial.md#tutorial)", "[there][packhorse.types.World]"]
    home.write_text("# Home\n\n" + "\n\n".join(right))
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 0, done.stderr

    wrong = ["[gone](gone.md)", "[gone](tutorial.md#gone)", "[gone][packhorse.gone]", "[gone](/gone.md)"]
    home.write_text("# Home\n\n" + "\n\n".join([*right, *wrong]))
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    assert f"Aborted with {len(wrong)} warnings in strict mode" in done.stdout + done.stderr
