"""The world is an argument, and found out only at the edge."""

import subprocess
import sys

import pytest

from packhorse.types import World


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (-1, 2), (0, 0), (3, 2)])
def test_a_rank_outside_its_world_is_rejected(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="0 <= rank < size"):
        World(rank, size)


def test_torchrun_variables_are_read_when_there_is_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert World.detect() == World(0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert World.detect() == World(3, 8)


def test_an_initialised_process_group_decides() -> None:
    script = """
import os, torch.distributed as dist, tempfile
from packhorse.types import World
os.environ.update(RANK="5", WORLD_SIZE="9")
store = tempfile.mktemp()
dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
assert World.detect() == World(0, 1), World.detect()
dist.destroy_process_group()
assert World.detect() == World(5, 9)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_mesh_without_names_and_dimensions_that_are_none_or_doubled_are_rejected() -> None:
    script = """
import tempfile, pytest, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from packhorse.types import World
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
named = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
assert World.from_mesh(named, "dp") == World(0, 1)
for dims in (None, "dp"):
    with pytest.raises(ValueError, match="has no named dimensions: create it with mesh_dim_names="):
        World.from_mesh(init_device_mesh("cpu", (1, 1)), dims)
for dims in ((), [], ("dp", "dp")):
    with pytest.raises(ValueError, match="expected different dimensions of the mesh, which has .'dp', 'tp'"):
        World.from_mesh(named, dims)
dist.destroy_process_group()
"""
    subprocess.run([sys.executable, "-c", script], check=True)
