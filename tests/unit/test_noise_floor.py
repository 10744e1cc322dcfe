"""The comparison of floating-point results in the tests."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from noise_floor import CONTROL, FACTOR, ParityRecorder, largest_difference, noise_floor, relative_difference


def recorder() -> ParityRecorder:
    return ParityRecorder(lambda name, value: None)


def test_the_floor_is_the_largest_difference_of_correct_computations() -> None:
    expected = torch.tensor([1.0, 2.0])
    assert noise_floor(expected, expected + 0.25, expected - 0.5) == 0.5
    assert noise_floor([1.0, 2.0], [1.0, 2.5]) == 0.5
    assert noise_floor({"a": expected}, {"a": expected * 1.5}, measure=relative_difference) == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_floor_is_never_zero_and_grows_with_the_numbers(dtype: torch.dtype) -> None:
    same = torch.full((3,), 8.0, dtype=dtype)
    assert noise_floor(same, same) == 4 * 8 * torch.finfo(dtype).eps
    assert noise_floor(same, same, measure=relative_difference) == 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("where", [0, 1])
def test_nan_is_never_close(where: int) -> None:
    found = torch.ones(2)
    found[where] = math.nan
    for measure in (largest_difference, relative_difference):
        difference = measure([torch.ones(2), found], [torch.ones(2), torch.ones(2)])
        assert math.isnan(difference)
        with pytest.raises(AssertionError, match="apart"):
            recorder().check("loss", difference, 1.0, 1e9)


def test_more_than_the_allowed_multiple_of_the_floor_fails() -> None:
    recorder().check("loss", FACTOR * 0.1, 0.1, 100)
    with pytest.raises(AssertionError, match=r"loss: 4\.1e-01 apart, allowed 4\.0e-01"):
        recorder().check("loss", 0.41, 0.1, 100)


def test_a_control_close_to_the_noise_fails_unless_the_dtype_is_short() -> None:
    near = CONTROL * FACTOR * 0.1 - 0.1
    with pytest.raises(AssertionError, match="the control is"):
        recorder().check("loss", 0.0, 0.1, near)
    recorder().check("loss", 0.0, 0.1, near, exact=False)


def test_a_missing_gradient_is_a_large_difference() -> None:
    with pytest.raises(AssertionError):
        relative_difference({}, {"weight": torch.ones(2)})


@pytest.mark.parametrize("processes", [[], ["-n", "2"]], ids=["one process", "xdist"])
def test_every_comparison_is_printed_after_the_tests(tmp_path: Path, processes: list[str]) -> None:
    conftest = Path(__file__).parents[1] / "conftest.py"
    (tmp_path / "conftest.py").write_text(conftest.read_text())
    (tmp_path / "test_some.py").write_text(
        "import pytest\n\n"
        "@pytest.mark.parametrize('difference', [2e-6, 5e-1])\n"
        "def test_it(parity, difference):\n"
        "    parity.check('loss', difference, 1e-6, 3e-2)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o"]
    command += [f"pythonpath={conftest.parent}", *processes, str(tmp_path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1, result.stdout
    lines = [line.split() for line in result.stdout.splitlines() if line.startswith("test_it[")]
    assert (
        lines
        == [
            ["test_it[2e-06]:", "loss", "2.0e-06", "1.0e-06", "4.0e-06", "3.0e-02"],
            ["test_it[0.5]:", "loss", "5.0e-01", "1.0e-06", "4.0e-06", "3.0e-02"],
        ][::-1]
    )
