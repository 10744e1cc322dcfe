"""Processes on this machine: each is sent tasks through its own pipe and sends the results back.

The processes are spawned unless the caller asks for a fork: a tokenizer or torch in this process may hold
threads and locks that a fork would copy half. So the script that starts them must be importable
(``if __name__ == "__main__":``), and starting costs each the import of what the work needs, once for all
tasks of a run. Nothing is shared between them: no queue, and no lock that a killed process could take along.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal, Protocol, TypeVar

from packhorse.errors import ConfigError, PackhorseError

T = TypeVar("T")
R = TypeVar("R")

MAX_RETRIES = 3
"""How often a task is tried again after the process or the node that ran it died."""

_LONGEST_NAME = 200


class EngineError(PackhorseError):
    """The engine could not run the work: it cannot be sent to other processes, or these keep dying."""


class Engine(Protocol):
    """Where a pass over many independent tasks runs."""

    def run(self, work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[int, R]]:
        """Do ``work(task)`` for each task; give (position, result) as they get ready, in any order.

        ``work``, the tasks and the results are pickled. A task may be done more than once, so it must not
        matter if it is: one whose process or node dies is tried again, up to three times.

        Nothing is started before the first pair is asked for, and what was started ends with the iterator.

        Raises:
            EngineError: a task's process died each time, or ``work`` cannot be sent to another process.
            Exception: whatever ``work`` raises, at once and with its own type; the other tasks are given up.
        """
        ...


def named_task(position: int, task: Any) -> str:
    """A task for messages, cut where it is long.

    >>> named_task(4, ("rows.jsonl", 0, 1000))
    "task 4 ('rows.jsonl', 0, 1000)"
    """
    text = repr(task)
    short = text if len(text) <= _LONGEST_NAME else f"{text[:_LONGEST_NAME]}…"
    return f"task {position} {short}" if isinstance(task, tuple) else f"task {position} ({short})"


READY, RESULT, FAILED, UNSENDABLE_WORK = range(4)
"""What a message, a pickled (kind, position of the task, content, traceback), is about."""

PICKLE_ERRORS = (pickle.PicklingError, AttributeError, TypeError)
"""What pickling raises for something that cannot be pickled."""


class RemoteTraceback(Exception):
    """The cause of an error that was raised in another process: where it was raised there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def use_one_thread() -> None:
    """Keep the libraries of this process from starting a thread per core each: the processes are enough."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["OMP_NUM_THREADS"] = "1"  # read by torch where it is not imported yet
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def answer(work: Callable[[Any], Any], position: int, task: Any) -> bytes:
    """Do one task; the message with its result, or with what went wrong."""
    try:
        result = work(task)
    except BaseException as error:  # noqa: BLE001 (what the work raises belongs to the caller)
        return failure(position, error)
    try:
        return message(RESULT, position, result)
    except PICKLE_ERRORS as error:
        problem = f"the result of {named_task(position, task)} cannot be sent back ({error})"
        return failure(position, EngineError(problem))


def failure(position: int, error: BaseException) -> bytes:
    """The message that ``error`` was raised; as an EngineError with its text where it cannot be pickled."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return message(FAILED, position, _sendable(error), text)


def message(kind: int, position: int, content: Any, text: str = "") -> bytes:
    """One message, pickled."""
    return pickle.dumps((kind, position, content, text), pickle.HIGHEST_PROTOCOL)


def understood(received: bytes) -> tuple[int, int, Any]:
    """(kind, position, content) of a message; raises the error that one of the kind FAILED carries."""
    kind, position, content, text = pickle.loads(received)  # noqa: S301 (a process of ours wrote it)
    if kind == FAILED:
        raise content from RemoteTraceback(text)
    if kind == UNSENDABLE_WORK:
        raise unsendable(content) from RemoteTraceback(text)
    return kind, position, content


def unsendable(error: object) -> EngineError:
    """The error that the work does not reach another process."""
    return EngineError(
        f"the work cannot be sent to another process ({error}): expected something that can be pickled, a "
        "function or an object of a class at the top of an importable module. The local engine with one "
        "worker needs no other process"
    )


def unsendable_task(position: int, task: object, error: object) -> EngineError:
    """The error that a task does not reach another process."""
    return EngineError(
        f"{named_task(position, task)} cannot be sent to another process ({error}): expected something that "
        "can be pickled"
    )


def _sendable(error: BaseException) -> BaseException:
    try:
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    except BaseException:  # noqa: BLE001 (an exception class may do anything when it is rebuilt)
        copy = None
    return error if type(copy) is type(error) else EngineError(f"{type(error).__name__}: {error}")


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


Start = Literal["spawn", "fork"]

_PATIENCE = 5.0  # seconds that a process gets to end before it is killed


class LocalEngine:
    """Tasks on processes of this machine.

    With one worker, or one task, everything runs in this process: nothing is pickled and nothing is started.
    Otherwise a worker holds the task it runs and the next one, so at most ``2 * workers`` tasks are under
    way, and results that nobody has asked for yet wait in the workers, not in memory here. Each worker runs
    with one thread (tokenizers, torch): the processes are the parallelism.

    Args:
        workers: how many processes; None for one per core this process may use.
        start: ``"fork"`` starts them at once, with all that this process has loaded. Only for a process that
            has used no GPU and keeps no threads at work, such as a command of its own.
    """

    def __init__(self, workers: int | None = None, start: Start = "spawn") -> None:
        self.workers = _cores() if workers is None else workers
        if self.workers < 1:
            raise ConfigError(f"workers={workers} is too few: expected at least 1")
        if start not in multiprocessing.get_all_start_methods():
            known = ", ".join(multiprocessing.get_all_start_methods())
            raise ConfigError(f"start={start!r} is not to be had here: expected one of {known}")
        self.start: Start = start

    def run(self, work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[int, R]]:
        """See :meth:`packhorse.utils.pool.Engine.run`. Closing the iterator early ends the processes."""
        workers = min(self.workers, len(tasks))
        if workers <= 1:
            for position, task in enumerate(tasks):
                yield position, work(task)
            return
        crew = _Crew(_pickled_work(work), tasks, workers, self.start)
        try:
            yield from crew.results()
        finally:
            crew.end()


class _Worker:
    """One process, its pipe, and the positions of the tasks it was sent, oldest first."""

    def __init__(self, work: bytes, start: Start, others: Sequence[_Worker]) -> None:
        context: Any = multiprocessing.get_context(start)
        self.pipe, theirs = context.Pipe()
        # A forked process holds our ends of all pipes too. While it does, no other worker sees us go.
        not_theirs = [self.pipe, *(other.pipe for other in others)] if start == "fork" else []
        # Daemonic: ended by multiprocessing where this process exits without closing the iterator.
        arguments = (theirs, work, not_theirs)
        self.process: BaseProcess = context.Process(target=serve, args=arguments, daemon=True)
        try:
            self.process.start()
        except BaseException:
            self.pipe.close()
            raise
        finally:
            theirs.close()  # so that the pipe ends when the worker does
        self.held: deque[int] = deque()
        self.ready = False


class _Crew:
    """The workers of one run and what each task has come to."""

    def __init__(self, work: bytes, tasks: Sequence[Any], size: int, start: Start) -> None:
        self.work, self.tasks, self.size, self.start = work, tasks, size, start
        self.waiting = deque(range(len(tasks)))
        self.deaths = dict.fromkeys(self.waiting, 0)
        self.deaths_at_start = 0
        self.workers: list[_Worker] = []

    def results(self) -> Iterator[tuple[int, Any]]:
        for _ in range(self.size):
            self._add_worker()
        missing = len(self.tasks)
        while missing:
            self._hand_out()
            for position, result in self._collect():
                missing -= 1
                yield position, result
                self._hand_out()

    def _hand_out(self) -> None:
        # The last tasks are not queued behind another one: whoever is free first takes them.
        room = 2 if len(self.waiting) > 2 * self.size else 1
        for share in range(1, room + 1):
            for worker in self.workers:
                if not self.waiting:
                    return
                if len(worker.held) < share:
                    self._send(worker)

    def _send(self, worker: _Worker) -> None:
        position = self.waiting.popleft()
        task = self.tasks[position]
        try:
            message = pickle.dumps((position, task), pickle.HIGHEST_PROTOCOL)
        except PICKLE_ERRORS as error:
            raise unsendable_task(position, task, error) from error
        worker.held.append(position)
        # A worker that has died takes nothing; its pipe tells so to _collect, which takes the task back.
        with contextlib.suppress(OSError):
            worker.pipe.send_bytes(message)

    def _collect(self) -> Iterator[tuple[int, Any]]:
        """One message of each worker that has something to say, and the burial of those that died."""
        sources: list[Any] = [worker.pipe for worker in self.workers]
        sources += [worker.process.sentinel for worker in self.workers]
        said = set(wait(sources))
        for worker in list(self.workers):
            if worker.pipe in said:
                try:
                    received = worker.pipe.recv_bytes()
                except (EOFError, OSError):
                    self._replace(worker)
                    continue
                kind, position, result = understood(received)
                if kind == READY:
                    worker.ready, self.deaths_at_start = True, 0
                else:
                    worker.held.remove(position)
                    yield position, result
            elif worker.process.sentinel in said and not worker.pipe.poll():
                # Dead, and its end of the pipe is still open: a child of its own holds it.
                self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        """Take the tasks of a dead worker back, and start another in its place."""
        self.workers.remove(worker)
        _end(worker)
        code = worker.process.exitcode
        if worker.held and worker.ready:
            running = worker.held[0]
            self.deaths[running] += 1
            if self.deaths[running] > MAX_RETRIES:
                raise EngineError(
                    f"{named_task(running, self.tasks[running])} was given up: the process that ran it died "
                    f"{self.deaths[running]} times, at last with {_named_exit(code)}. If memory was short, "
                    f"use fewer workers (now {self.size}) or smaller tasks"
                )
        elif not worker.ready:
            self.deaths_at_start += 1
            if self.deaths_at_start > MAX_RETRIES:
                raise EngineError(
                    f"the worker processes die while they start, at last with {_named_exit(code)}: what they "
                    'wrote is above. A script that starts them needs `if __name__ == "__main__":` around its '
                    "own work; workers=1 needs no other process"
                )
        self.waiting.extendleft(reversed(worker.held))
        self._add_worker()

    def _add_worker(self) -> None:
        self.workers.append(_Worker(self.work, self.start, self.workers))

    def end(self) -> None:
        for worker in self.workers:
            worker.pipe.close()
            worker.process.terminate()
        for worker in self.workers:
            _end(worker)


def _end(worker: _Worker) -> None:
    worker.pipe.close()
    worker.process.terminate()
    worker.process.join(_PATIENCE)
    if worker.process.exitcode is None:
        worker.process.kill()
        worker.process.join()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pickled_work(work: Callable[[Any], Any]) -> bytes:
    try:
        return pickle.dumps(work, pickle.HIGHEST_PROTOCOL)
    except PICKLE_ERRORS as error:
        raise unsendable(error) from error


def _named_exit(code: int | None) -> str:
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
