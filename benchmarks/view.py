"""The time to the first page of the viewer, with a plan of a million packs.

The plan has packs of two rows each with invented counts (counting takes minutes and does not matter here).
The real server is started several times in its own process. The clock starts when the server listens and
stops when a client has the overview with its style sheet, script and icon.

    python benchmarks/view.py            # a million packs
    python benchmarks/view.py --quick    # 20,000
"""

from __future__ import annotations

import http.client
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from count_samples import save_processor
from promises import fact, make_parser, parse, promise, record_outcome
from view_samples import write_many

LISTS = ("/packs", "/packs?sort=cost&down=1", "/packs?dataset=chats&least=90", "/rows")
TIMEOUT = 120.0


def first_page(plan: Path) -> dict[str, float]:
    """Start a server, request the first page and the lists, and end it; return the seconds of each step."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = time.perf_counter()
    command = [sys.executable, "-m", "packhorse", "view", str(plan), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
            _connect(client, server, started)
            listening = time.perf_counter()
            page = _get(client, "/")
            for address in sorted(set(re.findall(r'(?:href|src)="(/static/[^"]+)"', page))):
                _get(client, address)
            done = time.perf_counter()
            seconds = {"started": done - started, "page": done - listening}
            for address in LISTS:
                before = time.perf_counter()
                _get(client, address)
                seconds[address] = time.perf_counter() - before
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(TIMEOUT)
    return seconds


def _connect(client: http.client.HTTPConnection, server: subprocess.Popen[bytes], started: float) -> None:
    while not _accepts(client):
        if server.poll() is not None:
            sys.exit(f"the server ended with exit code {server.returncode}")
        if time.perf_counter() - started > TIMEOUT:
            sys.exit(f"the server does not listen after {TIMEOUT:.0f} s")
        time.sleep(0.002)


def _accepts(client: http.client.HTTPConnection) -> bool:
    try:
        client.connect()
    except ConnectionRefusedError:
        return False
    return True


def _get(client: http.client.HTTPConnection, address: str) -> str:
    client.request("GET", address)
    answer = client.getresponse()
    body = answer.read().decode()
    if answer.status != 200:
        sys.exit(f"{address}: {answer.status} {body[:200]}")
    return body


@record_outcome()
def main() -> None:
    """Measure and print the promises."""
    parser = make_parser(__doc__)
    parser.add_argument("--packs", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=5, help="the median counts")
    options = parse(parser, packs=20_000, runs=1)
    with tempfile.TemporaryDirectory() as folder:
        plan = write_many(Path(folder), options.packs, save_processor(Path(folder, "processor")))
        fact("packs", options.packs)
        fact("plan file", plan.stat().st_size / 1e6, "MB")
        runs = [first_page(plan) for _ in range(options.runs)]
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    for address in LISTS:
        fact(f"then {address}", medians[address], "s")
    fact("first page, from the start of the process with its imports", medians["started"], "s")
    fact("first page, slowest run", max(run["page"] for run in runs), "s")
    promise(
        "from listening to the first page of the viewer",
        medians["page"],
        1.0,
        baseline="a limit, not a ratio",
        unit="s",
        at_least=False,
    )


if __name__ == "__main__":
    main()
