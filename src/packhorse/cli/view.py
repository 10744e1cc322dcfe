"""``packhorse view``: show packs, and rows as the model gets them, in a browser."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from packhorse.cli import terminal

EXAMPLES = terminal.examples(
    "view",
    "Exit code 0: ended with Ctrl-C, 2: the data cannot be shown.",
    {
        "meta.phplan": "a plan of packhorse plan",
        "meta.json --processor ./model --pack-size 4096": "make a plan in memory first",
        "meta.phplan --ledger run/ledgers": "with the dropped rows of a run",
        "meta.phplan --port 0 --json": 'one line of JSON: {"version": 1, "source": …, "url": …}',
    },
)


def view(
    source: Annotated[
        str,
        typer.Argument(help="A plan of `packhorse plan`, a data file or a meta file.", metavar="PLAN|META"),
    ],
    processor: Annotated[str | None, terminal.processor("; default: that of the plan")] = None,
    port: Annotated[int, terminal.number("Port to listen on; 0 for a free one.", 0, 65535)] = 8123,
    host: Annotated[str, terminal.text("ADDRESS", "Address to listen on.")] = "127.0.0.1",
    ledger: Annotated[
        Path | None, terminal.text("FILE|DIR", "Ledgers of a run, shown with the rows.")
    ] = None,
    pack_size: Annotated[
        int, terminal.number("For a data or meta file: the largest number of tokens of a pack.")
    ] = 8192,
    task: terminal.TASK = None,
    trust_remote_code: terminal.TRUST = False,
    verbose: terminal.VERBOSE = False,
    as_json: terminal.AS_JSON = False,
) -> None:
    """Show packs, rows, labels and dropped rows in a browser.

    The pages are reachable from this machine only, unless --host is given; they load nothing from the
    network.
    """
    with terminal.one_line_errors("view", "nothing was shown", verbose):
        from packhorse.tools.view.plan_viewer import PlanViewer
        from packhorse.tools.view.server import listen, serve

        socket = listen(host, port)  # before the long work
        viewer = PlanViewer.open(
            source,
            processor,
            ledger=ledger,
            pack_size=pack_size,
            task=terminal.task_of(task),
            trust_remote_code=trust_remote_code,
        )
        if processor is not None:
            _ = viewer.encoder  # a mistyped path raises here, not at the first page
        if warning := viewer.unmatched_warning():
            typer.echo(f"packhorse view: warning: {warning}", err=True)
        name = f"[{host}]" if ":" in host else host
        url = f"http://{name}:{socket.getsockname()[1]}/"
        if as_json:
            typer.echo(terminal.to_json({"version": 1, "source": source, "url": url}, indent=None))
        else:
            typer.echo(f"showing {source}: {url} (stop with Ctrl-C)")
        with contextlib.suppress(KeyboardInterrupt):
            serve(viewer, socket, host)
