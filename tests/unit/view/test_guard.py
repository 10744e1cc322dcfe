"""Which requests the viewer accepts, and what its pages may load."""

from pathlib import Path
from typing import Any

import pytest

import packhorse.tools.view
from packhorse.tools.view.server import HostGuard
from view_samples import ask


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8123", "localhost:9", "LOCALHOST", "[::1]:8123"])
def test_this_machine_is_accepted_on_any_port(app: Any, host: str) -> None:
    assert ask(app, "/report.json", host=host).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:8123", "localhost.evil", "10.0.0.1", "", None]
)
def test_a_request_for_another_host_is_rejected(app: Any, host: str | None) -> None:
    answer = ask(app, "/", host=host)
    assert answer.status == 421
    assert b"charts" not in answer.body


def test_a_server_on_all_addresses_accepts_any_ip_but_no_foreign_name() -> None:
    async def app(*_: Any) -> None: ...

    guard = HostGuard(app, "0.0.0.0")
    assert guard.allows("10.1.2.3:8123")
    assert guard.allows("[fe80::1]:8123")
    assert not guard.allows("evil.example")
    assert not HostGuard(app, "127.0.0.1").allows("10.1.2.3:8123")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_the_server_is_read_only(app: Any, method: str) -> None:
    assert ask(app, "/", method=method).status == 405


@pytest.mark.parametrize(
    "target", ["/", "/packs", "/media/0/0", "/static/style.css", "/nothing", "/report.json"]
)
def test_every_response_forbids_other_origins(app: Any, target: str) -> None:
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
def test_only_media_of_rows_are_served_and_no_file_by_its_path(app: Any, target: str) -> None:
    answer = ask(app, target)
    assert answer.status == 404
    assert b"root:" not in answer.body
    assert b"import" not in answer.body


def test_no_page_names_another_origin(app: Any) -> None:
    folder = Path(packhorse.tools.view.__path__[0])
    paths = [*folder.glob("templates/*"), *folder.glob("static/*.css"), *folder.glob("static/*.js")]
    assert len(paths) > 10
    for path in paths:
        assert "http:" not in path.read_text(), path
        assert "//" not in path.read_text().replace("// ", ""), path
        assert "style=" not in path.read_text(), f"{path}: the policy forbids inline styles"
