"""The other end of a local engine's pipe: tasks come in, results go out, one thread of work.

Imports nothing heavy: what the work needs comes with it, when a worker can already be stopped cleanly.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection

from packhorse.engines.answer import READY, UNSENDABLE_WORK, answer, failure, message, use_one_thread


def serve(pipe: Connection, pickled_work: bytes, not_ours: Sequence[Connection] = ()) -> None:
    """Do the tasks that come through ``pipe`` until it closes. The life of a worker process.

    Args:
        pipe: where tasks come from and results go.
        pickled_work: what to do with a task.
        not_ours: ends of pipes that a fork has copied.
    """
    for other in not_ours:
        other.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork has copied what the parent makes of it
    # Ctrl-C goes to all processes of a terminal; the one in front decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    use_one_thread()
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, inbox), daemon=True).start()
    try:
        work = pickle.loads(pickled_work)  # noqa: S301 (our own parent wrote it)
    except (AttributeError, ImportError, pickle.UnpicklingError) as error:
        pipe.send_bytes(message(UNSENDABLE_WORK, -1, str(error), traceback.format_exc()))
        return
    except BaseException as error:  # noqa: BLE001 (what building the work raises belongs to the caller)
        pipe.send_bytes(failure(-1, error))
        return
    use_one_thread()  # torch may have come with the work
    pipe.send_bytes(message(READY, -1, None))
    while True:
        position, task = pickle.loads(inbox.get())  # noqa: S301
        pipe.send_bytes(answer(work, position, task))


def _listen(pipe: Connection, inbox: queue.SimpleQueue[bytes]) -> None:
    """Take tasks in while one is being done, so that the sender never waits; leave when it has gone."""
    try:
        while True:
            inbox.put(pipe.recv_bytes())
    except (EOFError, OSError):
        # Without a parent there is nobody to work for: end at once, in the middle of a task too.
        os._exit(0)
