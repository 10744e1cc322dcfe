"""``packhorse view``: the packs of a plan, and what the model sees of each row, in a browser."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from packhorse.cli.terminal import AS_JSON, TRUST, one_line_errors, processor_option, to_json

EXAMPLES = """
Exit code 0: ended with Ctrl-C, 2: cannot be shown.

[bold]Examples[/bold]

packhorse view meta.phplan
[dim]# a plan of packhorse plan: nothing else is needed[/dim]

packhorse view meta.json --processor ./model --pack-size 4096
[dim]# plans first, in memory[/dim]

packhorse view meta.phplan --ledger run/ledgers
[dim]# with what a run has dropped, cut or replaced[/dim]

packhorse view meta.phplan --port 0 --json
[dim]# one line for machines: {"version": 1, "source": …, "url": …}[/dim]

ssh -L 8123:127.0.0.1:8123 cluster packhorse view meta.phplan
[dim]# data on another machine: the page stays on 127.0.0.1 of both[/dim]
"""


def view(
    source: Annotated[
        str, typer.Argument(help="A plan of `packhorse plan`, or a meta file.", metavar="PLAN|META")
    ],
    processor: Annotated[str | None, processor_option("; a plan knows where it was")] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="Where to listen; 0 takes a free one.")
    ] = 8123,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    ledger: Annotated[
        Path | None, typer.Option(metavar="FILE|DIR", help="Ledgers of a run, to be shown with the rows.")
    ] = None,
    pack_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="For a meta file: the most tokens of a pack.")
    ] = 8192,
    trust_remote_code: TRUST = False,
    as_json: AS_JSON = False,
) -> None:
    """Show packs, rows, labels and losses as pages on this machine.

    Only this machine can reach them, unless --host says otherwise; nothing is loaded from elsewhere.
    """
    with one_line_errors("view", "nothing was shown"):
        from packhorse.tools.view.plan_viewer import PlanViewer
        from packhorse.tools.view.server import listen, serve

        socket = listen(host, port)  # before the long work
        viewer = PlanViewer.open(
            source, processor, ledger=ledger, pack_size=pack_size, trust_remote_code=trust_remote_code
        )
        if processor is not None:
            _ = viewer.encoder  # one that was named is opened at once: a mistyped path is told here
        if warning := viewer.unmatched_warning():
            typer.echo(f"packhorse view: warning: {warning}", err=True)
        number = socket.getsockname()[1]
        name = f"[{host}]" if ":" in host else host
        url = f"http://{name}:{number}/"
        if as_json:
            typer.echo(to_json({"version": 1, "source": source, "url": url}, indent=None))
        else:
            typer.echo(f"looking at {source}: {url} (Ctrl-C ends it)")
        with contextlib.suppress(KeyboardInterrupt):  # how it is meant to end
            serve(viewer, socket, host)
