"""``packhorse view`` as a user types it; what its pages show is tested in ``tests/browser``."""

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from count_samples import python_path, save_processor, write_chats
from packhorse.cli.app import app
from packhorse.neat_packing_vlm import plan_packs


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("nowhere.json", "nowhere.json"),
        ("nowhere.phplan", "nowhere.phplan: no such file"),
        ("{meta}", "is a meta file: pass --processor"),
        ("{rows}", "is a data file: pass --processor"),
        ("{plan} --processor /nowhere", "processor /nowhere: no such folder"),
        ("{bare}", "write it with `packhorse plan`"),
        ("{torn}", "is not a complete plan"),
    ],
)
def test_what_cannot_be_shown_is_one_line_and_exit_code_two(source: str, says: str, tmp_path: Path) -> None:
    meta, bare, torn = write_chats(tmp_path, 3), tmp_path / "bare.phplan", tmp_path / "torn.phplan"
    plan_packs([3, 4], 8).save(bare)
    torn.write_bytes(bare.read_bytes()[:300])
    plan = str(tmp_path / "made.phplan")
    if "{plan}" in source:
        saved = save_processor(tmp_path / "processor")
        made = CliRunner().invoke(app, ["plan", str(meta), "--processor", saved, "--out", plan])
        assert made.exit_code == 0, made.output
    rows = tmp_path / "chats.jsonl"
    place = source.format(meta=meta, bare=bare, torn=torn, rows=rows, plan=plan)
    result = CliRunner().invoke(app, ["view", *place.split(), "--port", "0"])
    assert result.exit_code == 2
    assert says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_port_that_is_taken_is_said_before_the_long_work(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["view", str(tmp_path / "any.phplan"), "--port", str(port)])
    assert result.exit_code == 2
    assert f"cannot listen on 127.0.0.1, port {port}" in result.stderr


def test_a_meta_file_is_counted_planned_and_shown_until_ctrl_c(tmp_path: Path) -> None:
    meta, saved = write_chats(tmp_path / "data", 12), save_processor(tmp_path / "processor")
    command = [sys.executable, "-m", "packhorse", "view", str(meta), "--processor", saved, "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": python_path(tmp_path / "path")}
    with subprocess.Popen(
        [*command, "--pack-size", "256"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        line = running.stdout.readline()
        (address,) = re.findall(r"http://127\.0\.0\.1:\d+/", line)
        with urllib.request.urlopen(address + "pack/0") as answer:
            assert b"Question" in answer.read()
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=30)
    assert running.returncode == 0, errors
    assert "Traceback" not in errors
    assert list(meta.parent.glob("*.phplan")) == []
