"""Changelog, CI workflows and pre-commit hooks agree with the rest of the project."""

import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

import packhorse

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# CI runs each of these that the Makefile has.
TARGETS = {"test", "test-system", "bench-quick", "docs", "test-lowest", "test-newest"}
SECTIONS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def jobs_of(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load(path.read_text())["jobs"].values())


def targets_of(path: Path) -> set[str]:
    """The make targets that a workflow runs; it runs nothing else."""
    targets: set[str] = set()
    for job in jobs_of(path):
        for step in job["steps"]:
            if "run" in step:
                assert step["run"] == "make ${{ matrix.target }}"
                targets |= set(job["strategy"]["matrix"]["target"])
    return targets


def test_ci_runs_the_make_targets_that_exist() -> None:
    run = set().union(*map(targets_of, WORKFLOWS))
    assert {"test", "bench-quick", "test-lowest", "test-newest"} <= run
    assert run == TARGETS & make_targets()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_and_may_only_read(path: Path) -> None:
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
    for job in jobs_of(path):
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+\.\d+\.\d+", step["uses"])


def test_hooks_have_the_versions_of_the_tests() -> None:
    pins = set((ROOT / "constraints.txt").read_text().splitlines())
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    needed = [line for hook in hooks for line in hook.get("additional_dependencies", ())]
    assert needed
    assert set(needed) <= pins
    assert {hook["id"] for hook in hooks} == {
        "ruff-check",
        "ruff-format",
        "lint-imports",
        "check-words",
        "mypy",
    }


def test_the_changelog_has_dated_versions_and_the_one_in_progress() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    current, *released = versions
    number = packhorse.__version__.partition(".dev")[0]
    assert current.startswith(f"[{number}] - ")
    if ".dev" in packhorse.__version__:
        assert current == f"[{number}] - unreleased"
    dates = []
    for version in released:
        match = re.fullmatch(r"\[\d+\.\d+\.\d+\] - (\d{4}-\d\d-\d\d)", version)
        assert match, version
        dates.append(date.fromisoformat(match[1]))
    assert dates
    assert dates == sorted(dates, reverse=True)
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= SECTIONS
