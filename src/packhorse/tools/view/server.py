"""Starting the server."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from packhorse.errors import DATA_ERRORS, ConfigError, MissingDependency, is_data_error, require
from packhorse.tools.view.media_preview import EncodedMedia, describe_error
from packhorse.tools.view.pages import PageNotFound, Pages
from packhorse.tools.view.plan_viewer import PlanViewer

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


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


class HostGuard:
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


_STATIC = {"style.css": "text/css", "keys.js": "text/javascript", "icon.svg": "image/svg+xml"}


def make_app(viewer: PlanViewer, host: str = "127.0.0.1") -> App:
    """The application for a viewer, to be served on ``host``."""
    require("starlette", "view")
    from starlette.applications import Starlette
    from starlette.convertors import Convertor, register_url_convertor
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    class _Number(Convertor[int]):
        # Starlette's own "int" takes any number of digits, and Python refuses to convert 5,000.
        regex = "[0-9]{1,18}"

        def convert(self, value: str) -> int:
            return int(value)

        def to_string(self, value: int) -> str:
            return str(value)

    register_url_convertor("number", _Number())
    pages, render = Pages(viewer), renderer()
    static = {name: files("packhorse.tools.view").joinpath("static", name).read_bytes() for name in _STATIC}
    page, media_item = partial(_page, render), partial(_media_item, len(viewer))

    def plain(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in static:
            return Response("no such file", 404, media_type="text/plain")
        return Response(static[name], media_type=_STATIC[name], headers={"cache-control": "no-cache"})

    def report(request: Request) -> Response:
        return JSONResponse(viewer.report)

    def nothing(request: Request, error: Exception) -> Response:
        text = "There is no such page."
        return Response(render("message.html", title="Not found", text=text), 404, media_type="text/html")

    routes = [
        Route("/", page("overview.html", lambda request: pages.overview())),
        Route("/packs", page("packs.html", lambda request: pages.pack_list(request.query_params))),
        Route("/pack/{number:number}", page("pack.html", lambda r: pages.pack(r.path_params["number"]))),
        Route("/row/{index:number}", page("row.html", lambda r: pages.row(r.path_params["index"]))),
        Route("/problems", page("problems.html", lambda request: pages.problems(request.query_params))),
        Route("/search", page("search.html", lambda request: pages.search(request.query_params))),
        Route("/media/{row:number}/{number:number}", media_item(lambda **at: pages.previews.get(**at))),
        Route(
            "/media/{row:number}/{number:number}/{place:number}",
            media_item(lambda **at: pages.previews.frame(**at)),
        ),
        Route("/report.json", report),
        Route("/static/{name}", plain),
    ]
    return HostGuard(Starlette(routes=routes, exception_handlers={404: nothing}), host)


def _page(
    render: Callable[..., str], template: str, make: Callable[[Request], dict[str, Any]]
) -> Callable[[Request], Response]:
    """What answers with a template; what is not there, or cannot be shown, is a page too."""
    from starlette.responses import Response

    def answer(request: Request) -> Response:
        try:
            html, status = render(template, **make(request)), 200
        except PageNotFound as error:
            html, status = render("message.html", title="Not found", text=str(error)), 404
        except (ConfigError, MissingDependency, OSError) as error:
            html, status = render("message.html", title="This cannot be shown", text=str(error)), 503
        return Response(html, status, media_type="text/html", headers={"cache-control": "no-store"})

    return answer


def _media_item(rows: int, get: Callable[..., EncodedMedia]) -> Callable[[Request], Response]:
    """What answers with a media item of one of the ``rows``, or says why it cannot."""
    from starlette.responses import Response

    def answer(request: Request) -> Response:
        numbers = request.path_params
        try:
            if not 0 <= numbers["row"] < rows:
                raise LookupError(f"there is no row {numbers['row']}")
            made = get(**numbers)
        except (*DATA_ERRORS, MissingDependency) as error:
            named = isinstance(error, LookupError | ConfigError | MissingDependency)
            if not named and not is_data_error(error):
                raise
            return Response(describe_error(error), 404, media_type="text/plain")
        # Not kept by the browser: the next plan on this port has other images under the same numbers.
        return Response(made.data, media_type=made.kind, headers={"cache-control": "no-store"})

    return answer


def renderer() -> Callable[..., str]:
    """A function that fills in a template; whatever comes from data is escaped."""
    jinja2 = require("jinja2", "view")
    env = jinja2.Environment(
        loader=jinja2.PackageLoader("packhorse.tools.view"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters["n"] = lambda value: f"{value:,}"
    env.filters["pct"] = lambda value, digits=1: f"{100 * value:.{digits}f}\N{NO-BREAK SPACE}%"
    env.filters["words"] = lambda reason: str(reason).replace("_", " ")

    def render(template: str, **values: Any) -> str:
        return str(env.get_template(template).render(**values))

    return render


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


def serve(viewer: PlanViewer, listening: socket.socket, host: str) -> None:
    """Answer requests until the process is interrupted."""
    uvicorn: Any = require("uvicorn", "view")
    app = make_app(viewer, host)
    viewer.warm_up()
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=3,  # a media item that never comes does not hold up Ctrl-C
    )
    uvicorn.Server(config).run(sockets=[listening])
