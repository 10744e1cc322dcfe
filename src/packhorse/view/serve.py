"""Starting the server."""

from __future__ import annotations

import socket
from typing import Any

from packhorse.errors import ConfigError, require
from packhorse.view.book import Book


def listen(host: str, port: int) -> socket.socket:
    """A socket on this address; port 0 takes a free one.

    Raises:
        ConfigError: the port is taken, or the address is not this machine's.
        MissingDependency: what serves pages is not installed.
    """
    for module in ("uvicorn", "starlette", "jinja2"):
        require(module, "view")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {host}, port {port} ({why.lower()}): name another with --port, or "
            "0 for a free one"
        ) from error


def serve(book: Book, listening: socket.socket, host: str) -> None:
    """Answer requests until the process is interrupted."""
    uvicorn: Any = require("uvicorn", "view")
    from packhorse.view.app import make_app

    app = make_app(book, host)
    book.warm_up()
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=3,  # a medium that never comes does not hold up Ctrl-C
    )
    uvicorn.Server(config).run(sockets=[listening])
