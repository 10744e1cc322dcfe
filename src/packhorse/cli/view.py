"""``packhorse view``: the packs of a plan, and what the model sees of each row, in a browser."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from packhorse.cli.count import _plain

EXAMPLES = """
[bold]Examples[/bold]

packhorse view meta.phplan
[dim]# a plan of packhorse plan: nothing else is needed[/dim]

packhorse view meta.json --processor ./model --pack-size 4096
[dim]# plans first, in memory[/dim]

packhorse view meta.phplan --ledger run/ledgers
[dim]# with what a run has left out, cut or replaced[/dim]

ssh -L 8123:127.0.0.1:8123 cluster packhorse view meta.phplan
[dim]# data on another machine: the page stays on 127.0.0.1 of both[/dim]
"""


def view(
    source: Annotated[
        str, typer.Argument(help="A plan of `packhorse plan`, or a meta file.", metavar="PLAN|META")
    ],
    processor: Annotated[
        str | None,
        typer.Option(help="Folder (or hub name) of the processor; a plan knows where it was."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 takes a free one.")] = 8123,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    ledger: Annotated[
        Path | None, typer.Option(metavar="FILE|DIR", help="Ledgers of a run, to be shown with the rows.")
    ] = None,
    pack_size: Annotated[int, typer.Option(min=1, help="For a meta file: the most tokens of a pack.")] = 8192,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", metavar="", help="Run code that comes with the processor.")
    ] = False,
) -> None:
    """Show packs, rows, labels and losses as pages on this machine.

    Only this machine can reach them, unless --host says otherwise; nothing is loaded from elsewhere.
    """
    from rich.console import Console

    from packhorse.errors import PackhorseError

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        from packhorse.view.book import Book
        from packhorse.view.serve import listen, serve

        socket = listen(host, port)  # before the long work
        book = Book.open(
            source, processor, ledger=ledger, pack_size=pack_size, trust_remote_code=trust_remote_code
        )
        number = socket.getsockname()[1]
        name = f"[{host}]" if ":" in host else host
        typer.echo(f"looking at {source}: http://{name}:{number}/ (Ctrl-C ends it)")
        serve(book, socket, host)
    except (PackhorseError, OSError) as error:
        errors.print(f"packhorse view: {_plain(error)}", markup=False)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        pass
