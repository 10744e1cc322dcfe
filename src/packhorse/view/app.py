"""The application: addresses to pages, media and plain files; every answer passes the guard."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from packhorse.errors import DATA_ERRORS, ConfigError, MissingDependency, is_data_error, require
from packhorse.view.book import Book
from packhorse.view.guard import App, Guard
from packhorse.view.media import Encoded, why_not
from packhorse.view.pages import NotThere, Pages

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_STATIC = {"style.css": "text/css", "keys.js": "text/javascript", "icon.svg": "image/svg+xml"}


def make_app(book: Book, host: str = "127.0.0.1") -> App:
    """The application for a book, to be served on ``host``."""
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
    pages, render = Pages(book), renderer()
    static = {name: files("packhorse.view").joinpath("static", name).read_bytes() for name in _STATIC}
    page, medium = partial(_page, render), partial(_medium, len(book))

    def plain(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in static:
            return Response("no such file", 404, media_type="text/plain")
        return Response(static[name], media_type=_STATIC[name], headers={"cache-control": "no-cache"})

    def report(request: Request) -> Response:
        return JSONResponse(book.report)

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
        Route("/media/{row:number}/{number:number}", medium(lambda **at: pages.shelf.get(**at))),
        Route(
            "/media/{row:number}/{number:number}/{place:number}", medium(lambda **at: pages.shelf.frame(**at))
        ),
        Route("/report.json", report),
        Route("/static/{name}", plain),
    ]
    return Guard(Starlette(routes=routes, exception_handlers={404: nothing}), host)


def _page(
    render: Callable[..., str], template: str, make: Callable[[Request], dict[str, Any]]
) -> Callable[[Request], Response]:
    """What answers with a template; what is not there, or cannot be shown, is a page too."""
    from starlette.responses import Response

    def answer(request: Request) -> Response:
        try:
            html, status = render(template, **make(request)), 200
        except NotThere as error:
            html, status = render("message.html", title="Not found", text=str(error)), 404
        except (ConfigError, MissingDependency, OSError) as error:
            html, status = render("message.html", title="This cannot be shown", text=str(error)), 503
        return Response(html, status, media_type="text/html", headers={"cache-control": "no-store"})

    return answer


def _medium(rows: int, get: Callable[..., Encoded]) -> Callable[[Request], Response]:
    """What answers with a medium of one of the ``rows``, or says why it cannot."""
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
            return Response(why_not(error), 404, media_type="text/plain")
        # Not kept by the browser: the next plan on this port has other pictures under the same numbers.
        return Response(made.data, media_type=made.kind, headers={"cache-control": "no-store"})

    return answer


def renderer() -> Callable[..., str]:
    """A function that fills in a template; whatever comes from data is escaped."""
    jinja2 = require("jinja2", "view")
    env = jinja2.Environment(
        loader=jinja2.PackageLoader("packhorse.view"),
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
