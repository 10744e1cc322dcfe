"""``packhorse count`` on machines that fail: killed processes and full disks, both real."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from contract.processors import processor
from count_samples import (
    no_file_larger_than,
    python_path,
    save_processor,
    sidecars,
    stale_files,
    write_chats,
)
from packhorse.cli.app import app
from packhorse.count.counting import count_meta

PART = 50


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_processor(tmp_path_factory.mktemp("processor"))


def arguments(meta: Path, saved: str, num_workers: int) -> list[str]:
    options = ["--processor", saved, "--json", "--part-rows", str(PART), "--num-workers", str(num_workers)]
    return ["count", str(meta), *options]


def count(meta: Path, saved: str) -> Result:
    return CliRunner().invoke(app, arguments(meta, saved, num_workers=1))


def parts(folder: Path) -> list[Path]:
    return list(folder.glob("*.parts/*.arrow"))


@pytest.mark.system
def test_a_killed_count_goes_on_where_it_stopped_and_ends_with_the_same_bytes(
    tmp_path: Path, saved: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 4000
    meta = write_chats(tmp_path / "data", rows)
    home = meta.parent
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path / "path"))
    command = [sys.executable, "-m", "packhorse", *arguments(meta, saved, num_workers=2)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as run:
        while len(parts(home)) < 5 and run.poll() is None:
            time.sleep(0.002)
        os.kill(run.pid, signal.SIGKILL)
    assert run.returncode == -signal.SIGKILL, "it was done before it could be killed"
    assert sidecars(home) == []
    kept = len(parts(home))
    assert 5 <= kept < rows // PART
    again = count(meta, saved)
    assert json.loads(again.stdout)["counted_rows"] == rows - kept * PART
    (sidecar,) = sidecars(home)
    interrupted = sidecar.read_bytes()
    assert parts(home) == []
    sidecar.unlink()
    assert count_meta(meta, processor("qwen2_vl"), part_rows=PART).counted_rows == rows
    assert sidecar.read_bytes() == interrupted


def the_error(result: Result) -> str:
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("packhorse count: ")
    return line


def test_a_sidecar_that_may_not_grow_is_a_clear_error_and_none_is_left(
    tmp_path: Path, saved: str, cache: Path
) -> None:
    meta = write_chats(tmp_path / "data", 1000)
    with no_file_larger_than(32_000):  # enough for each part, not for all of them together
        error = the_error(count(meta, saved))
    assert "the file size limit is reached" in error
    assert sidecars(meta.parent) == []
    assert len(parts(meta.parent)) == 1000 // PART
    assert json.loads(count(meta, saved).stdout)["counted_rows"] == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    mounting = [str(mount), "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if mount is None or subprocess.run(mounting, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize(("free", "finished"), [(4096, 0), (64 * 1024, 4)])
def test_a_full_disk_is_a_clear_error_and_no_partial_sidecar_is_left(
    free: int, finished: int, small_disk: Path, saved: str, cache: Path
) -> None:
    meta = write_chats(small_disk, 1000 if finished else 60)
    disk = os.statvfs(small_disk)
    (small_disk / "ballast").write_bytes(bytes(disk.f_bavail * disk.f_bsize - free))
    assert "the disk is full" in the_error(count(meta, saved))
    assert sidecars(small_disk) == []
    assert [name for name in stale_files(small_disk) if name.startswith(".")] == []
    assert len(parts(small_disk)) >= finished
    (small_disk / "ballast").unlink()
    if not finished:
        assert stale_files(small_disk) == []  # no empty folder either
        assert count(meta, saved).exit_code == 0
