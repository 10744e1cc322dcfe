"""The real server in a process of its own, and a browser that notes what goes wrong."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

from count_samples import python_path, save_processor
from view_samples import write_samples

CHROMIUM = "/usr/bin/chromium"
_ARGUMENTS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run"),
]
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"


@dataclass(frozen=True)
class Server:
    """A viewer that is running: its address, and what ``packhorse plan --json`` printed."""

    address: str
    report: dict[str, Any]


@dataclass
class Watch:
    """What a page did behind one's back."""

    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("browser")
    meta, saved = write_samples(home / "data"), save_processor(home / "processor")
    environment = {**os.environ, "PYTHONPATH": python_path(home / "path")}
    packhorse = [sys.executable, "-m", "packhorse"]
    plan = home / "mixed.phplan"
    options = ["--processor", saved, "--pack-size", "512", "--workers", "1", "--out", str(plan), "--json"]
    made = subprocess.run(
        [*packhorse, "plan", str(meta), *options], env=environment, capture_output=True, text=True, check=True
    )
    with subprocess.Popen(
        [*packhorse, "view", str(plan), "--port", "0"], env=environment, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        line = running.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert found is not None, line
        yield Server(found.group().rstrip("/"), json.loads(made.stdout))
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=20) == 0, "Ctrl-C ends the server without an error"


@pytest.fixture(scope="module")  # not longer: while it is open no other event loop can run here
def browser() -> Iterator[Browser]:
    assert os.path.exists(CHROMIUM), "install Debian's chromium (make system)"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def page(browser: Browser, server: Server, watch: Watch) -> Iterator[Page]:
    """A page at the overview; at the end nothing was complained about, and nobody else was asked."""
    context = browser.new_context(viewport={"width": 1280, "height": 860}, base_url=server.address)
    opened = context.new_page()

    def note(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            watch.errors.append(message.text)

    opened.on("console", note)
    opened.on("pageerror", lambda error: watch.errors.append(str(error)))
    opened.on("request", lambda request: watch.requests.append(request.url))
    opened.goto("/")
    yield opened
    context.close()
    assert watch.errors == []
    assert watch.requests
    assert [url for url in watch.requests if not url.startswith(server.address + "/")] == []


@pytest.fixture(scope="module")
def keep() -> Any:
    """Keeps a screenshot under a name, as an artefact of the test run."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)

    def shoot(page: Page, name: str, **options: Any) -> None:
        page.screenshot(path=SCREENSHOTS / f"{name}.png", **options)

    return shoot
