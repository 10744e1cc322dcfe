"""Media at addresses: a server that fails, denies access or is missing; an invalid address."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from media_samples import noise
from PIL import Image

import packhorse
from count_samples import python_path, save_processor, write_meta, write_rows
from packhorse import LoaderConfig, World
from packhorse.count.counting import count_meta
from packhorse.count.sidecar import Sidecar, counts_of
from packhorse.datasets import open_meta_dataset, open_rows
from packhorse.errors import BadSample, ConfigError, MissingDependency, SystemFault
from packhorse.families import Encoder
from packhorse.formats.conversation import parse_conversation
from packhorse.media import image_size, load_audio, load_image, load_video, read_bytes, remote
from packhorse.tools.check import check_meta
from packhorse.tools.view.plan_report import plan_report
from packhorse.tools.view.plan_viewer import PlanViewer
from packhorse.tools.view.saved_plan import PlanRequest, make_plan, save_plan
from packhorse.tools.view.server import make_app
from raising import raises_config
from view_samples import ask


def png(width: int = 60, height: int = 40) -> bytes:
    file = io.BytesIO()
    Image.fromarray(noise(width, height)).save(file, "PNG")
    return file.getvalue()


class Server(ThreadingHTTPServer):
    """Answers ``/403/…`` with 403, ``/cut/…`` with half of an image, ``/good/…`` with all of it, and so on.

    ``/twice-503/…`` fails twice and then answers. ``/stream/…`` does not say how long it is.
    ``asked`` counts requests by path.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: Counter[str] = Counter()
        self.image, self.open = png(), False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version: ClassVar[str] = "HTTP/1.0"

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        server: Any = self.server
        kind = self.path.split("/")[1]
        server.asked[self.path] += 1
        if kind.startswith("twice-") and server.asked[self.path] <= 4:  # a HEAD and a GET for each try
            kind = kind.removeprefix("twice-")
        if kind == "slow":
            time.sleep(3)
        if kind.isdigit() and not server.open:
            self.send_error(int(kind))
            return
        self.send_response(200)
        if kind != "stream":
            self.send_header("Content-Length", str(len(server.image)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(server.image[: len(server.image) // 2] if kind == "cut" else server.image)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_WAITS", (0.0, 0.0))
    remote._failures.clear()


def bad_sample(source: str, call: Any = load_image) -> BadSample:
    with pytest.raises(BadSample) as caught:
        call(source)
    assert caught.value.stage == "media"
    return caught.value


# --- one media item --------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [load_image, image_size, read_bytes, load_video, load_audio])
@pytest.mark.parametrize(
    ("path", "reason", "words"),
    [
        ("404", "missing_media", "no file "),
        ("410", "missing_media", "no file "),
        ("401", "unreachable_media", "the server answers 401"),
        ("403", "unreachable_media", "the server answers 403"),
        ("500", "unreachable_media", "the server answers 500"),
    ],
)
def test_what_a_server_answers_is_distinguished(
    server: Server, call: Any, path: str, reason: str, words: str
) -> None:
    url = f"{server.url}/{path}/a.png"
    error = bad_sample(url, call)
    assert error.reason == reason
    assert words in error.detail
    assert url in error.detail


def test_a_body_that_is_always_cut_off_is_unreachable_after_retries(server: Server) -> None:
    url = f"{server.url}/cut/a.png"
    for call in (load_image, read_bytes, load_video, load_audio):
        error = bad_sample(url, call)
        assert error.reason == "unreachable_media"
        assert "ClientPayloadError" in error.detail
        assert url in error.detail
    assert server.asked["/cut/a.png"] >= 3


def test_a_failure_that_passes_costs_no_sample(server: Server) -> None:
    assert load_image(f"{server.url}/twice-503/a.png").size == (60, 40)
    assert image_size(f"{server.url}/twice-429/a.png") == (40, 60)


def test_a_denied_request_is_not_retried(server: Server) -> None:
    bad_sample(f"{server.url}/403/a.png")
    assert server.asked["/403/a.png"] <= 2  # a HEAD and a GET


def test_a_host_that_fails_for_many_items_is_asked_once_for_each_until_it_answers(server: Server) -> None:
    for number in range(5):
        bad_sample(f"{server.url}/500/{number}.png")
    assert server.asked["/500/0.png"] == 6
    assert server.asked["/500/4.png"] == 2
    load_image(f"{server.url}/good/a.png")
    bad_sample(f"{server.url}/500/5.png")
    assert server.asked["/500/5.png"] == 6


def test_a_host_that_is_not_there_is_unreachable() -> None:
    for url in ("http://127.0.0.1:9/a.png", "http://no-such-host.invalid/a.png"):
        error = bad_sample(url)
        assert error.reason == "unreachable_media"
        assert url in error.detail


@pytest.mark.parametrize(
    "url",
    [
        "reference://x",
        "dir://x",
        "generic://x",
        "github://x",
        "data://x",
        "nonsense://x",
        "cached://x",
        "://",
        "http://[abc/x.png",
        "http://ex\u2100mple.com/x.png",
    ],
)
def test_an_address_that_makes_no_sense_is_missing_media(url: str) -> None:
    for call in (load_image, image_size):
        error = bad_sample(url, call)
        assert error.reason == "missing_media"
        assert url in error.detail


def test_a_hub_address_without_a_network_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    url = "hf://datasets/someone/photos/a.png"
    error = bad_sample(url)
    assert error.reason == "unreachable_media"
    assert url in error.detail


class NoCredentialsError(Exception):
    """As botocore raises it: no OSError, and none of the standard library's."""


class _Driver(fsspec.AbstractFileSystem):
    """A store whose driver raises what a test wants."""

    protocol = "raising"
    cachable = False
    error: ClassVar[Exception] = Exception()

    def _open(self, path: str, *_: Any, **__: Any) -> Any:
        raise self.error

    def info(self, path: str, **_: Any) -> Any:
        raise self.error


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> Any:
    fsspec.register_implementation("raising", _Driver, clobber=True)

    def put(error: Exception) -> str:
        monkeypatch.setattr(_Driver, "error", error)
        return "raising://bucket/a.png"

    return put


def test_missing_credentials_are_an_error_with_the_setting_in_its_line(raising: Any) -> None:
    url = raising(NoCredentialsError("Unable to locate credentials"))
    with raises_config(path=url) as caught:
        load_image(url)
    assert str(caught.value) == (
        f"{url} cannot be opened: NoCredentialsError: Unable to locate credentials. "
        "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    )


def test_an_error_of_the_machine_stays_one(raising: Any) -> None:
    with pytest.raises(SystemFault, match="the machine is at fault"):
        load_image(raising(OSError(24, "Too many open files")))


def test_an_error_that_no_library_shares_is_unreachable(raising: Any) -> None:
    class TransportError(Exception): ...

    assert bad_sample(raising(TransportError("no route"))).reason == "unreachable_media"


@pytest.mark.parametrize("kind", [TypeError, AttributeError, KeyError, NotImplementedError])
def test_an_answer_that_a_driver_does_not_understand_is_unreachable(raising: Any, kind: Any) -> None:
    assert bad_sample(raising(kind("content-length"))).reason == "unreachable_media"
    assert bad_sample(raising(json.JSONDecodeError("no JSON", "<html>", 0))).reason == "unreachable_media"


def test_a_file_that_is_sent_as_a_stream_is_read(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{server.url}/stream/a.png"
    assert load_image(url).size == (60, 40)
    assert image_size(url) == (40, 60)
    assert read_bytes(url) == server.image
    monkeypatch.setattr(remote, "_MAX_IN_MEMORY", len(server.image) - 1)
    monkeypatch.setattr(remote, "_CHUNK_BYTES", 100)
    assert bad_sample(url).reason == "media_too_large"
    monkeypatch.setattr(remote, "_MAX_IN_MEMORY", len(server.image))
    assert read_bytes(url) == server.image


def test_rows_that_are_sent_as_a_stream_are_read(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACKHORSE_CACHE", str(tmp_path))
    server.image = json.dumps(row("a.png")).encode()
    assert len(open_rows(f"{server.url}/stream/rows.jsonl")) == 1


# --- rows ------------------------------------------------------------------------------------------------


def row(image: str) -> dict[str, Any]:
    turns = [{"role": "user", "content": "<image>what"}, {"role": "assistant", "content": "ok"}]
    return {"messages": turns, "images": [image]}


def write_data(folder: Path, images: list[str], **entry: Any) -> Path:
    (folder / "good.png").write_bytes(png())
    write_rows(folder / "photos.jsonl", [row(image) for image in images])
    return write_meta(
        folder, {"photos": {"file_name": "photos.jsonl", "media_dir": ".", "allow_http": True, **entry}}
    )


def load(meta: Path, qwen: Any) -> packhorse.Loader:
    return packhorse.load(
        str(meta), qwen, model="unchecked", world=World(), pack_size=256, max_bad_share=None
    )


def test_odd_addresses_are_in_the_ledger_with_their_rows_and_the_others_are_delivered(
    tmp_path: Path, qwen: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    hub, gone = "hf://datasets/someone/photos/a.png", f"{server.url}/404/a.png"
    images = ["reference://x", hub, f"{server.url}/403/a.png", gone, "good.png", f"{server.url}/good/a.png"]
    loader = load(write_data(tmp_path, images), qwen)
    delivered = [index for batch in loader for index in batch.info.samples]
    assert sorted(delivered) == [4, 5]
    found = {drop.key: (drop.reason, drop.detail) for drop in loader.ledger}
    assert {key: reason for key, (reason, _) in found.items()} == {
        "photos/0": "missing_media",
        "photos/1": "unreachable_media",
        "photos/2": "unreachable_media",
        "photos/3": "missing_media",
    }
    assert all(images[int(key[7:])] in detail for key, (_, detail) in found.items())


@pytest.mark.parametrize("url", ["gs://bucket/a.png", "sftp://host/a.png"])
def test_a_missing_driver_stops_before_training_and_names_the_row(
    tmp_path: Path, qwen: Any, url: str
) -> None:
    meta = write_data(tmp_path, ["good.png", url, url])
    for call in (lambda: load(meta, qwen), lambda: count_meta(meta, qwen), lambda: check_meta(meta)):
        with pytest.raises(MissingDependency) as caught:
            call()
        assert f"photos/1: {url} cannot be opened" in str(caught.value)
        assert "\n" not in str(caught.value)


class Keyed(list[Any]):
    """Examples that have keys."""

    def key(self, index: int) -> str:
        return f"coco/{index}"


def test_a_missing_driver_names_the_example_of_a_list_and_the_sample_that_is_encoded(qwen: Any) -> None:
    parts = [{"type": "image", "image": "gs://bucket/a.png"}, {"type": "text", "text": "what"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "ok"}]
    examples = [{"conversation": [turns[1]]}, {"conversation": turns}]
    with pytest.raises(MissingDependency, match=r"^1: gs://bucket/a.png cannot be opened"):
        packhorse.load(examples, qwen, model="unchecked", world=World(), pack_size=256)
    with pytest.raises(MissingDependency, match=r"^coco/1: gs://bucket/a.png cannot be opened"):
        packhorse.load(Keyed(examples), qwen, model="unchecked", world=World(), pack_size=256)
    with pytest.raises(MissingDependency, match=r"^coco/1: gs://bucket/a.png cannot be opened"):
        Encoder(qwen).encode(parse_conversation(examples[1], "coco/1"))


def test_a_missing_driver_of_a_media_folder_is_found_though_the_rows_were_counted_before(
    tmp_path: Path, qwen: Any
) -> None:
    meta = write_data(tmp_path, ["a.png"], media_dir="gs://bucket/photos")
    with pytest.raises(MissingDependency, match=r"^dataset 'photos': gs://bucket/photos cannot be opened"):
        open_meta_dataset(meta)


def test_missing_credentials_name_the_row_or_the_dataset(tmp_path: Path, qwen: Any, raising: Any) -> None:
    url = raising(NoCredentialsError("Unable to locate credentials"))
    with raises_config(path=url, match=r"^photos/1: .*AWS_PROFILE$"):
        load(write_data(tmp_path, ["good.png", url]), qwen)
    meta = write_data(tmp_path, ["good.png"], file_name="raising://bucket/photos.jsonl")
    for call in (lambda: load(meta, qwen), lambda: count_meta(meta, qwen)):
        with raises_config(path="raising://bucket/photos.jsonl", match=r"^dataset 'photos': .*AWS_PROFI"):
            call()


@pytest.mark.parametrize("status", [403, 503])
def test_what_could_not_be_reached_is_retried_by_the_next_run(
    tmp_path: Path, qwen: Any, server: Server, status: int
) -> None:
    meta = write_data(tmp_path, ["good.png", f"{server.url}/{status}/a.png", f"{server.url}/404/a.png"])
    loader = load(meta, qwen)
    assert {drop.key: drop.reason for drop in loader.ledger} == {
        "photos/1": "unreachable_media",
        "photos/2": "missing_media",
    }
    assert "the next run retries it" in next(d.detail for d in loader.ledger if d.key == "photos/1")
    server.open = True  # what was missing is a fact, which is kept until --retry-bad
    asked = server.asked["/404/a.png"]
    loader = load(meta, qwen)
    assert {drop.key: drop.reason for drop in loader.ledger} == {}
    assert server.asked["/404/a.png"] > asked  # the part of the file was counted again
    before = server.asked.copy()
    load(meta, qwen)
    assert server.asked == before  # all is known now


def test_parts_without_unreachable_media_are_not_counted_again(
    tmp_path: Path, qwen: Any, server: Server
) -> None:
    meta = write_data(
        tmp_path, [f"{server.url}/good/a.png", "good.png", f"{server.url}/403/a.png", "good.png"]
    )
    first = count_meta(meta, qwen, part_rows=2)
    assert first.datasets[0].bad == {"unreachable_media": 1}
    asked = server.asked["/good/a.png"]
    again = count_meta(meta, qwen)
    assert again.counted_rows == 2
    assert server.asked["/good/a.png"] == asked
    server.open = True
    assert count_meta(meta, qwen).datasets[0].bad == {}
    assert count_meta(meta, qwen).counted_rows == 0


def test_counts_with_unreachable_media_serve_the_run_that_made_them(
    tmp_path: Path, qwen: Any, server: Server
) -> None:
    meta = write_data(tmp_path, ["good.png", f"{server.url}/403/a.png"])
    report = count_meta(meta, qwen)
    dataset = open_meta_dataset(meta)
    counts = counts_of(dataset, qwen)
    assert counts is not None
    assert counts.status.tolist() == ["ok", "unreachable_media"]
    assert counts_of(dataset, qwen, retry_unreachable=True) is None
    assert Sidecar(report.datasets[0].sidecar).columns().status.tolist() == counts.status.tolist()


def test_a_run_goes_on_with_its_own_counts_though_media_answer_now(
    tmp_path: Path, qwen: Any, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = write_data(tmp_path, ["good.png"] * 4 + [f"{server.url}/403/a.png"])
    state = load(meta, qwen).state_dict()
    server.open = True
    with monkeypatch.context() as kept:
        kept.setenv("PACKHORSE_KEEP_COUNTS", "1")
        load(meta, qwen).load_state_dict(state)
    with pytest.raises(ConfigError, match="differ"):  # asked again, and counted
        load(meta, qwen).load_state_dict(state)
    (before,) = tmp_path.glob("*.phcount.before")
    before.replace(before.with_suffix(""))
    monkeypatch.setenv("PACKHORSE_KEEP_COUNTS", "1")
    load(meta, qwen).load_state_dict(state)


def test_further_starts_keep_the_counts_of_the_first_run(tmp_path: Path, qwen: Any, server: Server) -> None:
    late = tmp_path / "late.png"
    meta = write_data(tmp_path, ["good.png", f"{server.url}/403/a.png", f"{server.url}/503/b.png", late.name])
    first = count_meta(meta, qwen).datasets[0].sidecar
    kept = Path(first).read_bytes()
    for _ in range(3):
        count_meta(meta, qwen)
    assert [path.read_bytes() for path in tmp_path.glob("*.phcount.before*")] == [kept], "nothing changed"
    shutil.copy(tmp_path / "good.png", late)
    count_meta(meta, qwen, retry_bad=True)
    second = Path(first).read_bytes()
    assert second != kept
    count_meta(meta, qwen)
    assert [path.read_bytes() for path in sorted(tmp_path.glob("*.phcount.before*"))] == [kept, second]


def test_a_cleaned_copy_keeps_rows_whose_media_could_not_be_reached(
    tmp_path: Path, qwen: Any, server: Server
) -> None:
    from packhorse.tools.check import write_fixed

    meta = write_data(tmp_path, ["good.png", f"{server.url}/403/a.png", f"{server.url}/404/a.png"])
    report = check_meta(meta, repair=True)
    assert report.files[0].counts["unreachable_media", "error"] == 1
    assert not report.passed()
    write_fixed(report, tmp_path / "fixed")
    (kept,) = [path for path in (tmp_path / "fixed").rglob("*.jsonl") if "ledger" not in path.name]
    images = [json.loads(line)["images"][0] for line in kept.read_text().splitlines()]
    assert [image.rpartition("/")[0] for image in images[1:]] == [f"{server.url}/403"]
    assert len(images) == 2


def test_rows_at_an_address_that_makes_no_sense_or_has_no_driver_are_one_line(tmp_path: Path) -> None:
    for url, kind in (("reference://x.jsonl", ConfigError), ("gs://b/x.jsonl", MissingDependency)):
        with pytest.raises(kind, match=url):
            open_rows(url)
    with pytest.raises(FileNotFoundError):
        open_rows("memory://no/such.jsonl")


# --- secrets ---------------------------------------------------------------------------------------------

SECRETS = ("hunter2", "5f3a9c", "tok-77", "AKIA99")


def with_secrets(server: Server, path: str) -> str:
    query = "X-Amz-Credential=AKIA99%2F2026&width=9&X-Amz-Signature=5f3a9c&token=tok-77"
    return f"{server.url.replace('://', '://ann:hunter2@')}/{path}?{query}"


def test_secrets_of_addresses_reach_no_ledger_log_report_or_page(
    tmp_path: Path, qwen: Any, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="packhorse")
    paths = ["403/a.png", "404/a.png", "cut/a.png", "500/" + "x" * 300 + ".png"]
    meta = write_data(tmp_path, ["good.png", *(with_secrets(server, path) for path in paths)])
    rows = tmp_path / "photos.jsonl"  # as writers of JSON in other languages escape it
    rows.write_text(rows.read_text().replace("/", r"\/").replace("&", r"\u0026"))
    loader = load(meta, qwen)
    texts = [drop.detail for drop in loader.ledger]
    assert len(texts) >= 3
    texts += [str(bad_sample(with_secrets(server, path))) for path in paths]
    report = check_meta(meta)
    texts += [finding.found for finding in report.findings()]
    texts += [record.getMessage() for record in caplog.records]
    texts.append(" ".join(str(path.read_bytes()) for path in tmp_path.glob("*.phcount")))
    planned = make_plan(
        PlanRequest(LoaderConfig(data=str(meta), pack_size=256), save_processor(tmp_path / "p"))
    )
    save_plan(planned, plan_report(planned), tmp_path / "made.phplan")
    app = make_app(PlanViewer.open(str(tmp_path / "made.phplan")))
    pages = [
        "/",
        "/rows",
        "/rows.csv",
        "/rows.jsonl",
        *(f"/row/{n}" for n in range(5)),
        *(f"/media/{n}/0" for n in range(5)),
    ]
    texts += [str(ask(app, page).body) for page in pages]
    for secret in SECRETS:
        assert not any(secret in text for text in texts), secret
    assert any("width=9" in text and "X-Amz-Signature=***" in text for text in texts)


def test_a_traceback_holds_no_secrets(server: Server, tmp_path: Path) -> None:
    script = "import sys\nfrom packhorse.media import load_image\nload_image(sys.argv[1])\n"
    for path in ("403/a.png", "404/a.png", "cut/a.png"):
        run = subprocess.run(
            [sys.executable, "-c", script, with_secrets(server, path)],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), python_path(tmp_path)]),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 1
        assert "BadSample" in run.stderr
        assert not [secret for secret in SECRETS if secret in run.stderr], run.stderr
