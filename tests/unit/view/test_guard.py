"""Who may ask the viewer, and what its pages may load."""

from pathlib import Path
from typing import Any

import pytest

from packhorse.tools.view.server import HostGuard
from view_samples import ask


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8123", "localhost:9", "LOCALHOST", "[::1]:8123"])
def test_this_machine_may_ask_whatever_the_port(app: Any, host: str) -> None:
    assert ask(app, "/report.json", host=host).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:8123", "localhost.evil", "10.0.0.1", "", None]
)
def test_a_request_under_another_name_is_rejected(app: Any, host: str | None) -> None:
    answer = ask(app, "/", host=host)
    assert answer.status == 421
    assert b"charts" not in answer.body


def test_on_all_addresses_any_number_may_be_named_but_no_name() -> None:
    async def nothing(*_: Any) -> None: ...

    guard = HostGuard(nothing, "0.0.0.0")
    assert guard.allows("10.1.2.3:8123")
    assert guard.allows("[fe80::1]:8123")
    assert not guard.allows("evil.example")
    assert not HostGuard(nothing, "127.0.0.1").allows("10.1.2.3:8123")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(app: Any, method: str) -> None:
    assert ask(app, "/", method=method).status == 405


@pytest.mark.parametrize(
    "target", ["/", "/packs", "/media/0/0", "/static/style.css", "/nothing", "/report.json"]
)
def test_every_answer_forbids_other_origins(app: Any, target: str) -> None:
    headers = ask(app, target).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("img-src", "style-src", "script-src", "media-src")} == {"'self'"}
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "target",
    [
        "/media/../../etc/passwd",
        "/media/0/../../../etc/passwd",
        "/media/%2e%2e/%2e%2e/etc/passwd",
        "/media//etc/passwd",
        "/media/0/0/../../../../etc/passwd",
        "/media/-1/0",
        "/media/0/7",
        "/media/0/0/0",
        "/media/99999999999999999999/0",
        "/static/../app.py",
        "/static/%2e%2e%2fapp.py",
    ],
)
def test_only_media_of_rows_are_served_and_nothing_by_its_path(app: Any, target: str) -> None:
    answer = ask(app, target)
    assert answer.status == 404
    assert b"root:" not in answer.body
    assert b"import" not in answer.body


def test_no_page_names_another_origin(app: Any) -> None:
    folder = Path(__file__).parents[3] / "src" / "packhorse" / "view"
    for path in [*folder.glob("templates/*"), *folder.glob("static/*.css"), *folder.glob("static/*.js")]:
        assert "http:" not in path.read_text(), path
        assert "//" not in path.read_text().replace("// ", ""), path
        assert "style=" not in path.read_text(), f"{path}: the policy forbids inline styles"
