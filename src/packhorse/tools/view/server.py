"""The web server of the viewer: routes, templates and the check of the ``Host`` header."""

from __future__ import annotations

import csv
import io
import ipaddress
import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.resources import files
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from packhorse.errors import DATA_ERRORS, BadSample, ConfigError, MissingDependency, is_data_error, require
from packhorse.ledger import entry_line
from packhorse.tools.view.media_preview import EncodedMedia
from packhorse.tools.view.pages import PACK_COLUMNS, ROW_COLUMNS, STEP_COLUMNS, PageNotFound, Pages
from packhorse.tools.view.plan_viewer import PlanViewer

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; img-src 'self'; media-src 'self'; style-src 'self'; script-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"cache-control", b"no-store"),  # the next plan on this port has other content at the same addresses
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
)
_METHODS = ("GET", "HEAD")


class HostGuard:
    """ASGI middleware that checks host and method of a request and adds security headers to the response."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self.app = app
        self.names = {"localhost", "127.0.0.1", "::1", host.lower()}
        # If it listens on all addresses, any IP address is this machine's; a name must be its own.
        self.any_ip = host in ("0.0.0.0", "::")
        if self.any_ip:
            self.names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or not self.allows(hosts[0].decode("latin-1")):
            await _reject(send, 421, "This server accepts requests for localhost or 127.0.0.1 only.")
            return
        if scope["method"] not in _METHODS:
            await _reject(send, 405, "This server is read-only: use GET or HEAD.")
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        await self.app(scope, receive, send_with_headers)

    def allows(self, host: str) -> bool:
        """Return whether a ``Host`` header names this machine, on any port (it may be forwarded)."""
        name = host.strip().lower()
        if name.startswith("["):
            name, _, rest = name[1:].partition("]")
            if rest and not rest.startswith(":"):
                return False
        elif name.count(":") == 1:
            name = name.partition(":")[0]
        if name in self.names:
            return True
        with suppress(ValueError):
            return self.any_ip and bool(ipaddress.ip_address(name))
        return False


async def _reject(send: Send, status: int, text: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), *_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode() + b"\n"})


_STATIC = {
    "style.css": "text/css",
    "theme.js": "text/javascript",
    "keys.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
_EXPORTS = {".csv": "text/csv; charset=utf-8", ".jsonl": "application/x-ndjson"}
_EXPORT_BLOCK = 500  # lines sent at a time
_FORMULA = tuple("=+-@\t\r")  # a spreadsheet runs a cell that begins with one of these


def make_app(viewer: PlanViewer, host: str = "127.0.0.1") -> ASGIApp:
    """Return the ASGI application of a viewer that is served on ``host``."""
    require("starlette", "view")
    from starlette.applications import Starlette
    from starlette.convertors import IntegerConvertor, register_url_convertor
    from starlette.responses import Response
    from starlette.routing import Route

    class _Number(IntegerConvertor):
        # Starlette's "int" matches any number of digits; Python raises when it converts 5,000 of them.
        regex = "[0-9]{1,18}"

    register_url_convertor("number", _Number())
    pages, render_page = Pages(viewer), make_renderer()

    def render(template: str, **values: Any) -> str:
        return render_page(template, **values, totals=viewer.totals(), all_rows=len(viewer))

    static = {name: files("packhorse.tools.view").joinpath("static", name).read_bytes() for name in _STATIC}
    page, media_item = partial(_make_page, render), partial(_make_media_item, len(viewer))

    def static_file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in static:
            return Response("no such file", 404, media_type="text/plain")
        return Response(static[name], media_type=_STATIC[name])

    def thumbnails(request: Request) -> Response:
        image = pages.thumbnails(request.query_params)
        return Response(image.data, media_type=image.media_type)

    def report(request: Request) -> Response:
        # In one order, whether the plan was just made or is a saved one.
        return Response(json.dumps(viewer.report, sort_keys=True), media_type="application/json")

    def not_found(request: Request, error: Exception) -> Response:
        html = render("message.html", title="Not found", text="There is no such page.")
        return Response(html, 404, media_type="text/html")

    exports = (
        ("rows", pages.export_rows, ROW_COLUMNS),
        ("packs", pages.export_packs, PACK_COLUMNS),
        ("steps", pages.export_steps, STEP_COLUMNS),
    )
    routes = [
        Route("/", page("overview.html", lambda params: pages.overview())),
        Route("/steps", page("steps.html", pages.step_list)),
        Route("/packs", page("packs.html", pages.pack_list)),
        Route("/pack/{number:number}", page("pack.html", pages.pack)),
        Route("/rows", page("rows.html", pages.row_list)),
        Route("/row/{index:number}", page("row.html", lambda params, index: pages.row(index))),
        Route("/search", page("search.html", pages.search)),
        Route("/docs", page("docs.html", lambda params: {})),
        *(
            Route(f"/{name}{suffix}", _make_export(render, find, columns, name + suffix, media_type))
            for name, find, columns in exports
            for suffix, media_type in _EXPORTS.items()
        ),
        Route("/thumbnails", thumbnails),
        Route(
            "/media/{row:number}/{number:number}", media_item(lambda **params: pages.previews.get(**params))
        ),
        Route(
            "/media/{row:number}/{number:number}/{frame:number}",
            media_item(lambda **params: pages.previews.frame(**params)),
        ),
        Route("/report.json", report),
        Route("/static/{name}", static_file),
    ]
    return HostGuard(Starlette(routes=routes, exception_handlers={404: not_found}), host)


def _make_page(
    render: Callable[..., str], template: str, make: Callable[..., dict[str, Any]]
) -> Callable[[Request], Response]:
    """Return an endpoint that renders a template, or a page with the error.

    ``make`` takes the query, and the values of the path by name.
    """
    from starlette.responses import Response

    def answer(request: Request) -> Response:
        try:
            html, status = render(template, **make(request.query_params, **request.path_params)), 200
        except PageNotFound as error:
            html, status = render("message.html", title="Not found", text=str(error)), 404
        except (ConfigError, MissingDependency, OSError) as error:
            html, status = render("message.html", title="Cannot show this page", text=str(error)), 503
        return Response(html, status, media_type="text/html")

    return answer


def _make_export(
    render: Callable[..., str],
    find: Callable[[Mapping[str, str]], Iterator[dict[str, Any]]],
    columns: Sequence[str],
    file_name: str,
    media_type: str,
) -> Callable[[Request], Response]:
    """Return an endpoint that streams a list as a file, or a page with the error."""
    from starlette.responses import Response, StreamingResponse

    def answer(request: Request) -> Response:
        blocks = _export(find(request.query_params), columns, file_name.endswith(".jsonl"))
        try:
            first = next(blocks)  # an error is found here, before the response begins
        except (ConfigError, MissingDependency, OSError) as error:
            html = render("message.html", title="Cannot export this list", text=str(error))
            return Response(html, 503, media_type="text/html")
        headers = {"content-disposition": f'attachment; filename="{file_name}"'}
        return StreamingResponse(chain([first], blocks), media_type=media_type, headers=headers)

    return answer


def _export(found: Iterator[dict[str, Any]], columns: Sequence[str], as_jsonl: bool) -> Iterator[bytes]:
    """Yield blocks of a CSV or JSONL file with these columns; the first has at most the first line."""
    lines = ([line[column] for column in columns] for line in found)
    blocks = chain([tuple(islice(lines, 1))], iter(lambda: tuple(islice(lines, _EXPORT_BLOCK)), ()))
    if as_jsonl:
        for block in blocks:
            yield b"".join(entry_line(dict(zip(columns, line, strict=True))) for line in block)
        return
    header: tuple[Sequence[Any], ...] = (columns,)
    for block in blocks:
        out = io.StringIO()
        csv.writer(out).writerows([_csv_cell(v) for v in line] for line in header + block)
        header = ()
        yield out.getvalue().encode("utf-8", "backslashreplace")


def _csv_cell(value: Any) -> Any:
    """Return a value for a CSV file; a text that a spreadsheet takes for a formula gets an apostrophe."""
    if isinstance(value, list | tuple):
        value = " ".join(value)
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _make_media_item(rows: int, get: Callable[..., EncodedMedia]) -> Callable[[Request], Response]:
    """Return an endpoint that sends a media item of one of the ``rows``, or 404 with the error."""
    from starlette.responses import Response

    def answer(request: Request) -> Response:
        params = request.path_params
        try:
            if params["row"] >= rows:
                raise LookupError(f"there is no row {params['row']}")
            media_item = get(**params)
        except (*DATA_ERRORS, MissingDependency) as error:
            expected = isinstance(error, LookupError | ConfigError | MissingDependency)
            if not expected and not is_data_error(error):
                raise
            text = error.detail if isinstance(error, BadSample) else str(error)
            return Response(text, 404, media_type="text/plain")
        return Response(media_item.data, media_type=media_item.media_type)

    return answer


def make_renderer() -> Callable[..., str]:
    """Return a function that renders a template; values are escaped."""
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
    """Return a socket on this address, if the ``view`` extra is installed; port 0 chooses a free port."""
    for module in ("uvicorn", "starlette", "jinja2"):
        require(module, "view")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(
            f"cannot listen on {host}, port {port} ({reason}): choose another --port, or 0 for a free one",
            setting="port",
            value=port,
        ) from error


def serve(viewer: PlanViewer, listening: socket.socket, host: str) -> None:
    """Serve until the process is interrupted."""
    uvicorn: Any = require("uvicorn", "view")
    app = make_app(viewer, host)
    viewer.warm_up()
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=3,  # a slow media item does not block Ctrl-C
    )
    uvicorn.Server(config).run(sockets=[listening])
