"""Workers keep the memory that a sample needed for the next one."""

import ctypes
import subprocess
import sys

import pytest

from packhorse.loader.worker_pool import keep_freed_memory

FAULTS = """
import ctypes, resource
from packhorse.loader.worker_pool import keep_freed_memory

PIECES, SIZE = 12, 16 << 20
c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p

def one_sample():
    pieces = [ctypes.c_void_p(c.malloc(ctypes.c_size_t(SIZE))) for _ in range(PIECES)]
    for piece in pieces:
        ctypes.memset(piece, 1, SIZE)
    for piece in pieces:
        c.free(piece)

keep_freed_memory()
one_sample()
one_sample()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
one_sample()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

with_glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="only glibc's malloc has this setting"
)


@with_glibc
def test_what_a_sample_needed_is_there_for_the_next_one() -> None:
    run = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 100  # of the 49,152 pages of a sample


@pytest.mark.parametrize(
    "said", [("MALLOC_TRIM_THRESHOLD_", "131072"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072")]
)
def test_what_the_user_has_said_on_it_holds(said: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*said)
    assert not keep_freed_memory()


def test_another_c_library_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("packhorse.loader.worker_pool.ctypes.CDLL", lambda name: object())
    assert not keep_freed_memory()
