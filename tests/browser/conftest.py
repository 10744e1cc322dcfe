"""The real server in its own process, and a browser that records errors and requests."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect, sync_playwright

from count_samples import python_path, save_processor
from view_samples import write_samples

CHROMIUM = "/usr/bin/chromium"
_ARGUMENTS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run"),
]
_COUNT_CLICKS = """
addEventListener("click", () => sessionStorage.clicks = 1 + Number(sessionStorage.clicks || 0), true);
"""
_TIMEOUT = 120_000  # milliseconds: the first row waits for the import of transformers
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder: they start a server and a browser, and run with ``make test-system``."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.system)


@dataclass(frozen=True)
class Server:
    """A running viewer: its address, the output of ``packhorse plan --json``, and the folder of the data."""

    address: str
    report: dict[str, Any]
    data: Path


@dataclass
class Watch:
    """Errors and requests of a page."""

    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def serving(home: Path, meta: Path, processor: str, pack_size: int, *options: str) -> Iterator[Server]:
    """Run ``packhorse plan`` and ``packhorse view`` on a meta file; send Ctrl-C at the end."""
    environment = {**os.environ, "PYTHONPATH": python_path(home / "path")}
    packhorse, plan = [sys.executable, "-m", "packhorse"], str(home / "plan.phplan")
    planning = ["--processor", processor, "--pack-size", str(pack_size), "--num-workers", "1", "--out", plan]
    planned = subprocess.run(
        [*packhorse, "plan", str(meta), *planning, "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    with subprocess.Popen(
        [*packhorse, "view", plan, "--port", "0", *options],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        line = running.stdout.readline()
        address = re.search(r"http://127\.0\.0\.\d:\d+/", line)
        assert address is not None, line
        try:
            yield Server(address.group().rstrip("/"), json.loads(planned.stdout), meta.parent)
        finally:
            running.send_signal(signal.SIGINT)
            assert running.wait(timeout=60) == 0, "Ctrl-C ends the server without an error"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("browser")
    meta, saved = write_samples(home / "data"), save_processor(home / "processor")
    with serving(home, meta, saved, 512) as running:
        yield running


@pytest.fixture(scope="module")  # not session: no other event loop can run while it is open
def browser() -> Iterator[Browser]:
    assert os.path.exists(CHROMIUM), "install Debian's chromium (make system)"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS)
        expect.set_options(timeout=_TIMEOUT)
        yield opened
        opened.close()


def new_context(browser: Browser, server: Server, **options: Any) -> BrowserContext:
    """Return a new browser context at the server's address."""
    context = browser.new_context(base_url=server.address, **options)
    context.set_default_timeout(_TIMEOUT)
    return context


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def page(browser: Browser, server: Server, watch: Watch) -> Iterator[Page]:
    """A page at the overview; fails at the end if there were errors or requests to other origins."""
    context = new_context(browser, server, viewport={"width": 1280, "height": 860})
    context.add_init_script(_COUNT_CLICKS)
    opened = context.new_page()

    def record(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            watch.errors.append(message.text)

    opened.on("console", record)
    opened.on("pageerror", lambda error: watch.errors.append(str(error)))
    context.on("request", lambda request: watch.requests.append(request.url))
    opened.goto("/")
    yield opened
    context.close()
    assert watch.errors == []
    assert watch.requests
    assert [url for url in watch.requests if not url.startswith(server.address + "/")] == []


@pytest.fixture(scope="module")
def keep() -> Any:
    """Save a screenshot as an artefact of the test run."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)

    def save_screenshot(page: Page, name: str, **options: Any) -> None:
        page.screenshot(path=SCREENSHOTS / f"{name}.png", **options)

    return save_screenshot
