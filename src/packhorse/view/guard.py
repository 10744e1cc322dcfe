"""What stands before every page: who may ask, and what a page may load.

A page of another site can make a browser ask this server under that site's name (DNS rebinding). So requests
are answered only if they name this machine: the host it listens on, or ``localhost``. And no page here can
load or send anything from or to elsewhere, whatever a row of the data holds.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY = (
    "default-src 'none'; img-src 'self'; media-src 'self'; style-src 'self'; script-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
)
_METHODS = ("GET", "HEAD")


class Guard:
    """Answers what may be answered, and says on every page what it may load.

    Args:
        app: what answers.
        host: the address that is listened on.
    """

    def __init__(self, app: App, host: str) -> None:
        self.app = app
        self.names = {"localhost", "127.0.0.1", "::1", host.lower()}
        # On all addresses: any that is a number is this machine's; a name has to be its own.
        self.any_number = host in ("0.0.0.0", "::")
        if self.any_number:
            self.names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or not self.allows(hosts[0].decode("latin-1")):
            await _refuse(send, 421, "This page is for this machine: ask for it as localhost or 127.0.0.1.")
            return
        if scope["method"] not in _METHODS:
            await _refuse(send, 405, "There is nothing to change here: GET and HEAD only.")
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        await self.app(scope, receive, send_guarded)

    def allows(self, host: str) -> bool:
        """Whether a ``Host`` header names this machine; the port does not matter (it may be forwarded)."""
        name = host.strip().lower()
        if name.startswith("["):
            name, _, rest = name[1:].partition("]")
            if rest and not rest.startswith(":"):
                return False
        elif name.count(":") == 1:
            name = name.partition(":")[0]
        if name in self.names:
            return True
        if not self.any_number:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


async def _refuse(send: Send, status: int, text: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), *_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode() + b"\n"})
