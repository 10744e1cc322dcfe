"""Every test run has caches of its own; nothing is read from or written to the user's."""

import gc
import os
import signal
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# Before anything imports a library that reads these once.
_CACHE = tempfile.mkdtemp(prefix="packhorse-tests-")
os.environ["PACKHORSE_CACHE"] = os.path.join(_CACHE, "packhorse")
os.environ["HF_HOME"] = os.path.join(_CACHE, "huggingface")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # tests run in parallel, and their tensors are small
os.environ.pop("CI", None)  # no bars where it is set: the tests see the same wherever they run

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So it is where a shell has put the tests in the background; what they interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def frozen_objects() -> None:
    """Let full garbage collections skip the objects of imported libraries: each would take half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder for one test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("PACKHORSE_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def qwen() -> Any:
    """The small Qwen2-VL processor that most tests of counting use."""
    from contract.processors import processor

    return processor("qwen2_vl")


@pytest.fixture
def parity(record_property: Any) -> Any:
    """Compares numbers with the noise floor of this machine; a table after the tests shows all of them."""
    from noise_floor import ParityRecorder

    return ParityRecorder(record_property)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests of families and packages that an environment with old versions does not have."""

    def runs_here(item: pytest.Item) -> bool:
        for marker in item.iter_markers("needs_family"):
            from contract.processors import FAMILIES

            if marker.args[0] not in FAMILIES:
                return False
        packages = ("trl", "bitsandbytes")
        return all(not item.get_closest_marker(f"needs_{name}") or find_spec(name) for name in packages)

    if dropped := [item for item in items if not runs_here(item)]:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what the ``parity`` fixture recorded; test processes of xdist send it with their reports."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    rows = sorted(
        (f"{report.nodeid.partition('::')[2]}: {what}", *values)
        for report in reports
        for name, (what, *values) in report.user_properties
        if name == "parity"
    )
    if not rows:
        return
    width = max(len(row[0]) for row in rows)
    terminalreporter.section("parity")
    columns = ("difference", "floor", "allowed", "control")
    terminalreporter.write_line(f"{'test':<{width}}" + "".join(f"{column:>12}" for column in columns))
    for test, *values in rows:
        terminalreporter.write_line(f"{test:<{width}}" + "".join(f"{value:12.1e}" for value in values))


def pytest_sessionfinish() -> None:
    import shutil

    shutil.rmtree(_CACHE, ignore_errors=True)
