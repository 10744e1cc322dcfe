"""A program that runs in a fork of the warm process behaves as it does in a new interpreter."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from warm_python import run_warm


def run_cold(
    *arguments: object, cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


SHOW = """
import os, sys
print(sys.argv[1:], os.getcwd(), os.environ.get("COLOUR"), __name__, sys.path, sys.stdin.read())
print("to standard error", file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize("how", ["code", "script", "module"])
def test_arguments_folder_environment_path_and_streams_are_those_of_a_new_interpreter(
    how: str, tmp_path: Path
) -> None:
    (tmp_path / "library").mkdir()
    script = tmp_path / "library" / "shown.py"
    script.write_text(SHOW)
    program: list[object] = {"code": ["-c", SHOW], "script": [script], "module": ["-m", "shown"]}[how]
    env = {**os.environ, "COLOUR": "red", "PYTHONPATH": str(tmp_path / "library")}
    warm = run_warm(*program, "one", "two words", cwd=tmp_path, env=env)
    cold = run_cold(*program, "one", "two words", cwd=tmp_path, env=env)
    assert (warm.returncode, warm.stdout, warm.stderr) == (7, cold.stdout, "to standard error\n")
    assert "['one', 'two words']" in warm.stdout


def test_one_program_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    first = run_warm("-c", "import os, torch; torch.left = os.environ['LEFT'] = '1'; left = 1", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    seen = "import os, sys, torch; print(hasattr(torch, 'left'), 'LEFT' in os.environ, 'left' in globals())"
    assert run_warm("-c", seen, cwd=tmp_path).stdout == "False False False\n"


def test_the_libraries_are_imported_already_and_packhorse_is_not() -> None:
    shown = run_warm("-c", "import sys; print({'torch', 'transformers', 'packhorse'} - set(sys.modules))")
    assert shown.stdout == "{'packhorse'}\n"


def test_errors_signals_and_what_runs_at_exit_are_those_of_a_new_interpreter() -> None:
    raised = run_warm("-c", "import atexit; atexit.register(print, 'at exit'); undefined")
    assert (raised.returncode, raised.stdout) == (1, "at exit\n")
    assert raised.stderr.endswith("NameError: name 'undefined' is not defined\n")
    killed = run_warm("-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.returncode == -signal.SIGKILL
    assert run_warm("-c", "raise SystemExit('no data')").stderr == "no data\n"


SPAWN = """
import multiprocessing

def double(number):
    return 2 * number

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [1, 2]))
"""


def test_a_script_can_start_processes_that_import_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPAWN)
    run = run_warm(tmp_path / "train.py")
    assert (run.returncode, run.stdout, run.stderr) == (0, "[2, 4]\n", "")
