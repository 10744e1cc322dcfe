"""Workers keep the memory that a sample needed for the next one."""

import subprocess
import sys

import pytest

from packhorse.loader.heap import keep_freed_memory

FAULTS = """
import ctypes, resource
from packhorse.loader.heap import keep_freed_memory

PIECES, SIZE = 12, 16 << 20
c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p

def one_sample():
    pieces = [ctypes.c_void_p(c.malloc(ctypes.c_size_t(SIZE))) for _ in range(PIECES)]
    for piece in pieces:
        ctypes.memset(piece, 1, SIZE)
    for piece in pieces:
        c.free(piece)

if {kept}:
    assert keep_freed_memory()
one_sample()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
one_sample()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(*, kept: bool) -> int:
    code = FAULTS.format(kept=kept)
    return int(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    )


@pytest.mark.skipif(sys.platform != "linux", reason="malloc of other systems has no such setting")
def test_what_a_sample_needed_is_there_for_the_next_one() -> None:
    assert page_faults(kept=True) < 100
    assert page_faults(kept=False) > 10_000  # as it is by itself


def test_another_c_library_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packhorse.loader.heap.ctypes.CDLL", lambda name: object())
    assert not keep_freed_memory()
