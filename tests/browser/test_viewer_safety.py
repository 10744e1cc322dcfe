"""What the real server rejects, without a browser, which would normalize paths."""

import http.client
import socket
from collections.abc import Iterator

import pytest

from browser.conftest import Server, serving
from count_samples import save_processor
from view_samples import write_samples


def get(server: Server, path: str, host: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(server.address.removeprefix("http://"), timeout=60)
    connection.putrequest("GET", path, skip_host=True)
    connection.putheader("Host", host or server.address.removeprefix("http://"))
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


@pytest.mark.parametrize(
    "path",
    [
        "/media/../../etc/passwd",
        "/media/../../../../../../etc/passwd",
        "/media/%2e%2e/%2e%2e/etc/passwd",
        "/media/..%2f..%2f..%2f..%2fetc%2fpasswd",
        "/media/%252e%252e%252fetc%252fpasswd",
        "/media/....//....//etc/passwd",
        "/media/..%5c..%5cetc%5cpasswd",
        "/media/0/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/media/%2fetc%2fpasswd",
        "/media//etc/passwd",
        "//etc/passwd",
        "/etc/passwd",
        "/static/..%2f..%2f..%2fetc%2fpasswd",
        "/static/%2fetc%2fpasswd",
        "/media/chart0.png",
        "/data/media/chart0.png",
        "/media/0/0%00.png",
    ],
)
def test_a_path_is_rejected(server: Server, path: str) -> None:
    status, body = get(server, path)
    assert status in (400, 404)
    assert b"root:" not in body
    assert b"PNG" not in body


def test_a_media_item_is_served_by_row_and_number_only(server: Server) -> None:
    status, body = get(server, "/media/0/0")
    assert status == 200
    assert body.startswith(b"\x89PNG")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1"])
@pytest.mark.parametrize("path", ["/", "/report.json", "/media/0/0"])
def test_a_request_for_another_host_is_rejected(server: Server, host: str, path: str) -> None:
    status, body = get(server, path, host)
    assert status == 421
    assert b"charts" not in body


def test_the_server_listens_on_one_address_only(server: Server) -> None:
    port = int(server.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=10)


@pytest.fixture
def other_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("other")
    meta, saved = write_samples(home / "data"), save_processor(home / "processor")
    with serving(home, meta, saved, 512, "--host", "127.0.0.2") as running:
        yield running


def test_a_requested_address_is_served_under_its_name(other_address: Server) -> None:
    assert other_address.address.startswith("http://127.0.0.2:")
    assert get(other_address, "/report.json")[0] == 200
    assert get(other_address, "/report.json", "evil.example")[0] == 421
