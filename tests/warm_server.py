"""Fork a process for each Python program that a test starts: ``python warm_server.py SOCKET``.

The server imports the large libraries once, and its forks begin with them. It does not import Packhorse: each
program imports that itself, as it would in a new interpreter. A request is a line of JSON with the three
standard streams as file descriptors; the replies are the process id and the exit code.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

STREAMS = 3
LONGEST = 1 << 20  # bytes of a request


def preload() -> None:
    """Import what the programs of the tests import, except Packhorse."""
    sys.path.append(str(Path(__file__).parents[1] / "scripts"))
    from torchvision_help import help_torchvision

    help_torchvision()
    import av  # noqa: F401
    import orjson  # noqa: F401
    import PIL.Image
    import pyarrow.parquet  # noqa: F401
    import scipy.optimize  # noqa: F401
    import torch.utils.data  # noqa: F401
    import transformers.models.auto.modeling_auto
    import transformers.models.auto.processing_auto
    import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl  # noqa: F401
    import typer  # noqa: F401
    from transformers import Trainer  # noqa: F401

    PIL.Image.init()


def other_threads() -> list[str]:
    """Return the names of other threads, without that of Arrow's allocator, which handles forks."""
    names = [path.joinpath("comm").read_text().strip() for path in Path("/proc/self/task").iterdir()]
    names.remove(Path("/proc/self/comm").read_text().strip())
    return [name for name in names if name != "jemalloc_bg_thd"]


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next request and its streams, or None if the tests have ended."""
    data, streams, _, _ = socket.recv_fds(connection, LONGEST, STREAMS)
    while data and not data.endswith(b"\n"):
        data += connection.recv(LONGEST)
    return (json.loads(data), streams) if data else None


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; return the request in its fork, and None in the server at the end."""
    while (received := receive(connection)) is not None:
        request, streams = received
        assert other_threads() == [], "a fork would have only one of the threads"
        pid = os.fork()
        if not pid:
            connection.close()
            for target, stream in enumerate(streams):
                os.dup2(stream, target)
                os.close(stream)
            return request
        for stream in streams:
            os.close(stream)
        connection.sendall(b"%d\n" % pid)
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return None


def run_program(request: dict[str, Any], standard_path: list[str]) -> None:
    """Run ``-c CODE``, ``-m MODULE`` or a script like a new interpreter with these arguments would."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    first, *arguments = request["arguments"]
    added = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    beginning = {"-c": "", "-m": os.getcwd()}.get(first, os.path.dirname(os.path.abspath(first)))
    sys.path[:] = [beginning, *added, *standard_path]
    if first == "-c":
        sys.argv[:] = ["-c", *arguments[1:]]
        main = ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(arguments[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        sys.argv[:] = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = request["arguments"]
        runpy.run_path(first, run_name="__main__")


def leave() -> None:
    """End this process after everything else that runs at exit.

    The interpreter would take all modules apart for seconds. With coverage it must: data are saved there.
    """
    if "coverage" not in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def main() -> None:
    """Serve; in a fork run its program, and keep the exit code."""
    global exit_code
    # Without the folder of this file, and without PYTHONPATH, which each program has itself.
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    standard_path = sys.path[1 + len(given) :]
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    preload()
    assert "packhorse" not in sys.modules
    gc.freeze()
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is None:
        return
    exit_code = 1
    try:
        run_program(request, standard_path)
    except SystemExit as leaving:
        exit_code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        raise
    exit_code = 0


exit_code = 0

if __name__ == "__main__":
    atexit.register(leave)
    main()
