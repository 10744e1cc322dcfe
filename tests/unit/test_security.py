"""Untrusted datasets and processors cannot run code, open other files or exhaust memory."""

import ast
import io
import json
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import EpsImagePlugin, Image

from count_samples import chat, python_path, save_processor, write_meta, write_rows
from packhorse import LoaderConfig, World, load
from packhorse.count.counting import count_meta
from packhorse.count.sidecar import Sidecar
from packhorse.datasets import open_meta_dataset
from packhorse.errors import ConfigError
from packhorse.families.models import open_processor
from packhorse.ledger import Ledger
from packhorse.media import image_size, load_image
from packhorse.tools.check import check_meta
from packhorse.tools.view.plan_report import plan_report
from packhorse.tools.view.plan_viewer import PlanViewer
from packhorse.tools.view.saved_plan import PlanRequest, make_plan, save_plan
from packhorse.tools.view.server import make_app
from raising import raises_bad_sample, raises_config
from view_samples import ask
from warm_python import run_warm

SOURCES = sorted((Path(__file__).parents[2] / "src").rglob("*.py"))


def with_image(source: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": "<image>what"}, {"role": "assistant", "content": "ok"}]
    return {"messages": turns, "images": [source]}


# --- media paths -----------------------------------------------------------------------------------------


def test_a_confined_dataset_opens_nothing_outside_its_folder(tmp_path: Path, qwen: Any) -> None:
    media, secret = tmp_path / "media", tmp_path / "secret.png"
    (media / "frames").mkdir(parents=True)
    Image.new("RGB", (60, 40)).save(media / "good.png")
    Image.new("RGB", (60, 40)).save(secret)
    (media / "link.png").symlink_to(secret)
    (media / "up").symlink_to(tmp_path)
    (media / "%2e%2e").symlink_to(tmp_path)
    (tmp_path / "media-of-others").mkdir()
    Image.new("RGB", (60, 40)).save(tmp_path / "media-of-others" / "x.png")
    outside: list[Any] = [
        "../secret.png",
        "frames/../../secret.png",
        "./.././secret.png",
        str(secret),
        f"file://{secret}",
        f"FILE://localhost{secret}",
        f"file://{media}/%2e%2e/secret.png",
        f"file://{media}/..%2fsecret.png",
        f"local://{secret}",
        "link.png",
        "up/secret.png",
        "%2e%2e/secret.png",
        "../media-of-others/x.png",
        "http://127.0.0.1:9/x.png",
        "memory://x.png",
        "simplecache::file:///etc/passwd",
        {"path": "../secret.png"},
        {"bytes": None, "path": str(secret)},
    ]
    rows = [with_image(source) for source in outside]
    part = {"type": "image", "image": str(secret)}
    rows.append({"messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": "ok"}]})
    rows.append(with_image("good.png"))
    write_rows(tmp_path / "a.jsonl", rows)
    entry = {"file_name": "a.jsonl", "media_dir": "media", "confine": True, "allow_http": True}
    report = count_meta(write_meta(tmp_path, {"a": entry}), qwen)
    assert report.datasets[0].bad == {"outside_media_dir": len(rows) - 1}
    status = Sidecar(report.datasets[0].sidecar).columns().status.tolist()
    assert status == ["outside_media_dir"] * (len(rows) - 1) + ["ok"]
    ledger = Ledger()
    dataset = open_meta_dataset(tmp_path / "meta.json", ledger=ledger)
    for number in range(len(rows) - 1):
        with raises_bad_sample("outside_media_dir"):
            dataset[number]
    assert dataset[len(rows) - 1]["conversation"][0]["content"][0]["image"] == str(media / "good.png")


# --- untrusted code --------------------------------------------------------------------------------------

CODE = """
from pathlib import Path
from transformers import Qwen2VLProcessor
Path({marker!r}).touch()
class TheirProcessor(Qwen2VLProcessor):
    pass
"""


def processor_with_code(folder: Path, marker: Path) -> str:
    save_processor(folder)
    (folder / "theirs.py").write_text(CODE.format(marker=str(marker)))
    for name in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        path = folder / name
        settings = json.loads(path.read_text()) if path.exists() else {}
        settings["processor_class"] = "TheirProcessor"
        settings["auto_map"] = {"AutoProcessor": "theirs.TheirProcessor"}
        path.write_text(json.dumps(settings))
    return str(folder)


def test_code_of_a_processor_runs_only_with_trust_remote_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)  # no interactive prompt
    marker = tmp_path / "ran"
    folder = processor_with_code(tmp_path / "theirs", marker)
    write_rows(tmp_path / "a.jsonl", [chat(1)])
    meta = write_meta(tmp_path, {"a": {"file_name": "a.jsonl"}})
    with pytest.raises(ConfigError, match=r"custom code .*allow it with trust_remote_code=True"):
        open_processor(folder)
    with pytest.raises(ConfigError):
        count_meta(meta, folder)
    with pytest.raises(ConfigError):
        load(str(meta), folder, model="unchecked", world=World())
    assert not marker.exists()
    open_processor(folder, trust_remote_code=True)
    assert marker.exists()


def test_no_source_file_sets_trust_remote_code() -> None:
    opened = 0
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                given = {keyword.arg: keyword.value for keyword in node.keywords}
                trust = given.get("trust_remote_code")
                assert not (isinstance(trust, ast.Constant) and trust.value), f"{path}:{node.lineno}"
                opened += trust is not None
            if isinstance(node, ast.FunctionDef):
                names = [*node.args.posonlyargs, *node.args.args]
                pairs = list(zip(names[::-1], node.args.defaults[::-1], strict=False))
                pairs += list(zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True))
                for name, default in pairs:
                    if name.arg == "trust_remote_code" and default is not None:
                        assert isinstance(default, ast.Constant), path
                        assert default.value is False, path
    assert opened > 5


def test_settings_from_yaml_construct_no_objects(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"data: !!python/object/apply:os.mkdir [{tmp_path / 'ran'}]\n")
    with raises_config(path=tmp_path / "a.yaml", match="not YAML"):
        LoaderConfig.from_yaml(tmp_path / "a.yaml")
    assert not (tmp_path / "ran").exists()


# --- external programs ----------------------------------------------------------------------------------

EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 60 40
%%EndComments
newpath 0 0 moveto 60 40 lineto stroke
showpage
%%EOF
"""


@pytest.fixture
def ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a ``gs`` first in the path that writes a file when it is started; return the file."""
    mark, folder = tmp_path / "started", tmp_path / "bin"
    folder.mkdir()
    (folder / "gs").write_text(f'#!/bin/sh\necho "$@" >> {mark}\nexit 1\n')
    (folder / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # PIL's cache
    return mark


def test_the_stub_is_what_pil_starts_for_postscript(ghostscript: Path) -> None:
    with pytest.raises((subprocess.CalledProcessError, OSError)):
        Image.open(io.BytesIO(EPS)).load()
    assert ghostscript.exists()


@pytest.mark.parametrize("confine", [False, True])
def test_postscript_under_the_name_of_a_png_is_broken_media_and_starts_no_program(
    tmp_path: Path, qwen: Any, ghostscript: Path, confine: bool
) -> None:
    media = tmp_path / "media"
    media.mkdir()
    (media / "evil.png").write_bytes(EPS)
    (media / "windows.png").write_bytes(
        b"\xc5\xd0\xd3\xc6" + struct.pack("<II", 32, len(EPS)) + bytes(20) + EPS
    )
    Image.new("RGB", (60, 40)).save(media / "good.png")
    names = ["evil.png", "windows.png", *["good.png"] * 3]
    frames = [{"type": "video", "video": ["evil.png", "evil.png"]}, {"type": "text", "text": "what"}]
    video = {"messages": [{"role": "user", "content": frames}, {"role": "assistant", "content": "ok"}]}
    write_rows(tmp_path / "a.jsonl", [*map(with_image, names), video])
    entry = {"file_name": "a.jsonl", "media_dir": "media", "confine": confine}
    meta = write_meta(tmp_path, {"a": entry})
    loader = load(str(meta), qwen, world=World(), model="unchecked", pack_size=512, max_bad_share=None)
    broken = [("a/0", "broken_media"), ("a/1", "broken_media"), ("a/5", "broken_media")]
    assert sorted((drop.key, drop.reason) for drop in loader.ledger) == broken
    assert "PostScript" in next(iter(loader.ledger)).detail
    delivered = [index for batch in loader for index in batch.info.samples]
    assert sorted(delivered) == [2, 3, 4]
    for decode in (False, True):
        counts = check_meta(meta, decode=decode).files[0].counts
        assert sum(counts[key] for key in counts if key[0] == "broken_media") == 3
    planned = make_plan(
        PlanRequest(LoaderConfig(data=str(meta), pack_size=512), save_processor(tmp_path / "p"))
    )
    save_plan(planned, plan_report(planned), tmp_path / "plan.phplan")
    app = make_app(PlanViewer.open(str(tmp_path / "plan.phplan")))
    for row in (0, 1, 5):
        assert ask(app, f"/media/{row}/0").status == 404
        assert ask(app, f"/row/{row}").status == 200
    assert not ghostscript.exists()


def test_an_image_that_the_caller_opened_starts_no_program_either(ghostscript: Path) -> None:
    for read in (load_image, image_size):
        with raises_bad_sample("broken_media", match="in the format EPS"):
            read(Image.open(io.BytesIO(EPS)))
    assert not ghostscript.exists()


def test_every_image_is_opened_with_the_list_of_formats() -> None:
    opened = 0
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Image.open", "PIL.Image.open"):
                assert "formats" in {keyword.arg for keyword in node.keywords}, f"{path}:{node.lineno}"
                opened += 1
    assert opened == 1


# --- bombs -----------------------------------------------------------------------------------------------


def bomb(width: int, height: int) -> bytes:
    """Return a PNG of a few hundred bytes whose header has this size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(100_000), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def test_an_image_that_would_exhaust_memory_is_in_the_ledger(tmp_path: Path, qwen: Any) -> None:
    (tmp_path / "bomb.png").write_bytes(bomb(100_000, 100_000))
    Image.new("RGB", (60, 40)).save(tmp_path / "good.png")
    for read in (load_image, image_size):
        with raises_bad_sample("media_too_large"):
            read(str(tmp_path / "bomb.png"))
    write_rows(tmp_path / "a.jsonl", [with_image("bomb.png"), *[with_image("good.png")] * 3])
    meta = write_meta(tmp_path, {"a": {"file_name": "a.jsonl", "media_dir": "."}})
    loader = load(str(meta), qwen, model="unchecked", world=World(), pack_size=512, max_bad_share=None)
    assert [(drop.key, drop.reason) for drop in loader.ledger] == [("a/0", "media_too_large")]
    delivered = [index for batch in loader for index in batch.info.samples]
    assert sorted(delivered) == [1, 2, 3]


def test_xml_is_no_image() -> None:
    svg = b'<?xml version="1.0"?><!DOCTYPE s [<!ENTITY x SYSTEM "file:///etc/passwd">]><svg>&x;</svg>'
    with raises_bad_sample("broken_media"):
        load_image(svg)


# --- the network -----------------------------------------------------------------------------------------

WATCHED = """
import json, sys
requests = []
def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request"):
        if not str(arguments[-1]).startswith(("/", "b'/")):
            requests.append([event, str(arguments)])
sys.addaudithook(watch)
import packhorse
from contract.processors import processor
from packhorse import World
settings = {"model": "unchecked", "world": World(), "pack_size": 512, "max_bad_share": None}
loader = packhorse.load(sys.argv[1], processor("qwen2_vl"), **settings)
steps = sum(1 for _ in loader)
print(json.dumps({"steps": steps, "requests": requests, "bad": loader.ledger.counts()}))
"""


WEB = "http://127.0.0.1:9/x.png"


@pytest.mark.parametrize(
    ("address", "allowed"),
    [("", False), (WEB, True), (WEB, False), (f"simplecache::{WEB}", False)],
    ids=["no address", "allowed", "not allowed", "in a chain"],
)
def test_nothing_is_fetched_that_no_row_names(address: str, allowed: bool, tmp_path: Path) -> None:
    Image.new("RGB", (60, 40)).save(tmp_path / "good.png")
    rows = [with_image("good.png")] * 3 + ([with_image(address)] if address else [])
    write_rows(tmp_path / "a.jsonl", rows)
    meta = write_meta(tmp_path, {"a": {"file_name": "a.jsonl", "media_dir": ".", "allow_http": allowed}})
    (tmp_path / "watched.py").write_text(WATCHED)
    environment = {"PYTHONPATH": python_path(tmp_path), "PACKHORSE_CACHE": str(tmp_path / "cache")}
    if address:
        run = run_warm(tmp_path / "watched.py", meta, env=environment)
    else:  # what libraries fetch when they are imported would be found too
        command = [sys.executable, str(tmp_path / "watched.py"), str(meta)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    assert report["steps"] > 0
    assert bool(report["requests"]) is allowed  # addresses of rows are requested, so the hook works
    reason = "unreachable_media" if allowed else "not_allowed"
    assert report["bad"] == ({reason: 1} if address else {})
