"""Run Python programs without waiting for their imports of torch and transformers.

``run_warm("-m", "packhorse", "check", path)`` returns what ``subprocess.run([sys.executable, …])`` returns,
from a fork of ``warm_server.py``. Programs that are killed, that need a terminal, or whose start itself is
tested run in a new interpreter: each command of ``packhorse`` has at least one such test.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

SERVER = Path(__file__).with_name("warm_server.py")
TIMEOUT = 300.0


class WarmPython:
    """A process that has imported the large libraries, and forks for each program."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, str(SERVER), str(theirs.fileno())]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        self._replies = self._connection.makefile("rb")

    def run(
        self, *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python ARGUMENTS``; return its exit code and what it wrote."""
        words = list(map(str, arguments))
        request = {
            "arguments": words,
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
        }
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            with open(os.devnull) as nothing:
                streams = [nothing.fileno(), out.fileno(), errors.fileno()]
                data = json.dumps(request).encode() + b"\n"
                sent = socket.send_fds(self._connection, [data], streams)
                self._connection.sendall(data[sent:])
            code = self._wait(words)
            out.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess([sys.executable, *words], code, out.read(), errors.read())

    def _wait(self, words: list[str]) -> int:
        pid = self._replies.readline()
        assert pid, "the server of warm processes has ended: see what it wrote to standard error"
        self._connection.settimeout(TIMEOUT)
        try:
            return int(self._replies.readline())
        except TimeoutError:
            os.kill(int(pid), signal.SIGKILL)
            stop_warm_python()
            raise subprocess.TimeoutExpired(words, TIMEOUT) from None
        finally:
            self._connection.settimeout(None)

    def close(self) -> None:
        """End the server."""
        self._replies.close()
        self._connection.close()
        self._process.wait()


@cache
def _server() -> WarmPython:
    atexit.register(stop_warm_python)
    return WarmPython()


def run_warm(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` in a fork of a process that has imported the large libraries.

    Args:
        arguments: ``-c`` and code, ``-m`` and a module, or the path of a script; then its own arguments.
        cwd: working directory of the program.
        env: all of its environment; without it that of this process.
    """
    return _server().run(*arguments, cwd=cwd, env=env)


def stop_warm_python() -> None:
    """End the server, if there is one; the next program starts another."""
    if _server.cache_info().currsize:
        _server().close()
        _server.cache_clear()
