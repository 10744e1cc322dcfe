"""Process pool: tasks go to worker processes through pipes, results come back the same way.

Counting, checking and loading use it. Workers share no queue and no lock, so a killed worker cannot leave one
locked. Everything is pickled with multiprocessing's own pickler: once torch is imported, tensors travel in
shared memory.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from logging import getLogger
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, Generic, Literal, Protocol, TypeVar, get_args

from packhorse.errors import ConfigError, PackhorseError

T = TypeVar("T")
R = TypeVar("R")

MAX_RETRIES = 3
"""How often a task is retried after the process or the node that ran it died."""

PICKLE_ERRORS = (pickle.PicklingError, AttributeError, TypeError)
"""What pickling raises for something that cannot be pickled."""

_MAX_NAME_LENGTH = 200
_JOIN_TIMEOUT = 5.0  # seconds that a process gets to end before it is killed
_EXIT_GRACE = 1.0  # seconds within which a process whose connections are broken has exited
_PARENT_CHECK_INTERVAL = 0.2  # seconds
_DESCRIPTORS = (
    "Each worker and each tensor of a result needs a file descriptor: raise the limit (ulimit -n), use fewer "
    "workers or a smaller prefetch_factor"
)

logger = getLogger("packhorse.pool")


class EngineError(PackhorseError):
    """The work could not be run: it cannot be sent to other processes, or these keep dying."""


class WorkerDied(EngineError):
    """A task's worker died on every attempt.

    Attributes:
        position: of the task; None if workers died before their first one.
        deaths: number of attempts.
        exit_reason: how the last worker ended.
        note: the last value that it gave :data:`note` for this task; -1 if none.
    """

    def __init__(self, message: str, position: int | None, deaths: int, exit_reason: str, note: int) -> None:
        super().__init__(message)
        self.position, self.deaths, self.exit_reason, self.note = position, deaths, exit_reason, note


class ResultTimeout(EngineError):
    """The result at ``position`` did not arrive within the time limit."""

    def __init__(self, position: int, seconds: float) -> None:
        super().__init__(f"no result at position {position} within {seconds:g} s")
        self.position = position


class RemoteTraceback(Exception):
    """The cause of an error that was raised in another process: its traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Engine(Protocol):
    """Where a pass over many independent tasks runs."""

    def run(self, work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[int, R]]:
        """Apply ``work`` to each task; yield (position, result) as results arrive, in any order.

        ``work``, the tasks and the results are pickled. A task whose process or node dies is retried up to
        three times, so running a task twice must do no harm.

        Nothing is started before the first pair is requested, and what was started ends with the iterator.

        Raises:
            EngineError: a task's process died each time, or ``work`` cannot be sent to another process.
            Exception: whatever ``work`` raises, with its own type; the other tasks are abandoned.
        """
        ...


# Messages.


def name_task(position: int, task: Any) -> str:
    """Return a task for messages, shortened if long.

    >>> name_task(4, ("rows.jsonl", 0, 1000))
    "task 4 ('rows.jsonl', 0, 1000)"
    """
    text = repr(task)
    short = text if len(text) <= _MAX_NAME_LENGTH else f"{text[:_MAX_NAME_LENGTH]}…"
    return f"task {position} {short}" if isinstance(task, tuple) else f"task {position} ({short})"


def run_task(
    work: Callable[[Any], Any], position: int, task: Any, dumps: Callable[[Any], Any] = pickle.dumps
) -> bytes:
    """Apply ``work`` to a task; return the message with its result or its error."""
    try:
        result = work(task)
    except BaseException as error:  # noqa: BLE001 (errors of the work are raised in the caller's process)
        return error_message(error)
    try:
        return result_message(result, dumps)
    except (*PICKLE_ERRORS, OSError, RuntimeError) as error:  # or no shared memory, no file descriptors left
        problem = f"the result of {name_task(position, task)} cannot be sent back ({error})"
        if _lacks_descriptors(error):
            problem += f". {_DESCRIPTORS}"
        return error_message(EngineError(problem))


def _lacks_descriptors(error: Exception) -> bool:
    """Return whether a process has no file descriptor left, for itself or to receive one from another."""
    return any(text in str(error) for text in (os.strerror(errno.EMFILE), "items of ancdata"))


def result_message(result: Any, dumps: Callable[[Any], Any] = pickle.dumps) -> bytes:
    """Return the message that carries a result."""
    return bytes(dumps((result, None)))


def error_message(error: BaseException) -> bytes:
    """Return the message with ``error``, or with an EngineError if it cannot be pickled."""
    text = "".join(traceback.format_exception(error))
    try:
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    except BaseException:  # noqa: BLE001 (an exception class may do anything when it is rebuilt)
        copy = None
    if type(copy) is not type(error):
        error = EngineError(f"{type(error).__name__}: {error}")
    return pickle.dumps((error, text))


@dataclass(frozen=True)
class _Failure:
    error: BaseException


def _load_message(message: bytes) -> Any:
    content, remote_traceback = pickle.loads(message)  # noqa: S301 (a process of ours wrote it)
    if remote_traceback is None:
        return content
    content.__cause__ = RemoteTraceback(remote_traceback)
    return _Failure(content)


def read_message(message: bytes) -> Any:
    """Return the result in a message, or raise the error in it."""
    content = _load_message(message)
    if isinstance(content, _Failure):
        raise content.error
    return content


def unsendable(what: str, error: object) -> EngineError:
    """Return the error for work or a task that cannot be pickled."""
    return EngineError(
        f"{what} cannot be sent to another process ({error}): expected something that can be pickled, such "
        "as an object of a class at the top of an importable module. Counting with one worker and loading "
        "with none need no other process"
    )


# In a worker process.

note: Any = SimpleNamespace(value=-1)
"""``note.value = number`` says what a worker is doing, for :class:`WorkerDied`: in a worker, the number is in
memory shared with the parent."""


def in_worker() -> bool:
    """Return whether this is a worker process of a pool."""
    return not isinstance(note, SimpleNamespace)


def use_one_thread() -> None:
    """Keep the libraries of this process from starting one thread per core: the processes are enough."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["OMP_NUM_THREADS"] = "1"  # read by torch if it is not imported yet
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


class _Work:
    """The work as an argument of a process: pickled while the process starts, unless it is forked.

    Only then can it hold tensors in shared memory. The worker unpickles it itself to report errors.
    """

    def __init__(self, content: Callable[[Any], Any] | bytes) -> None:
        self.content = content

    def __reduce__(self) -> tuple[Any, ...]:
        return _Work, (bytes(ForkingPickler.dumps(self.content)),)

    def load(self) -> Callable[[Any], Any]:
        if not isinstance(self.content, bytes):
            return self.content
        try:
            return pickle.loads(self.content)  # type: ignore[no-any-return]  # noqa: S301
        except (AttributeError, ImportError, pickle.UnpicklingError) as error:
            raise unsendable("the work", error) from error


def _serve(pipe: Connection, work: _Work, shared_note: Any) -> None:
    """Run the tasks that arrive through ``pipe`` until it closes. The main function of a worker process."""
    global note
    note = shared_note
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork copies the parent's handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent decides
    use_one_thread()
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive_tasks, args=(pipe, tasks), daemon=True).start()
    try:
        function = work.load()
    except BaseException as error:  # noqa: BLE001 (errors of the work are raised in the caller's process)
        pipe.send_bytes(pickle.dumps((None, error_message(error))))
        return
    use_one_thread()  # torch may have come with the work
    pipe.send_bytes(pickle.dumps((None, result_message(None))))
    while True:
        key, task = pickle.loads(tasks.get())  # noqa: S301
        note.value = -1
        message = pickle.dumps((key, run_task(function, key[1], task, ForkingPickler.dumps)))
        with contextlib.suppress(BrokenPipeError):  # the parent closed the pipe: _receive_tasks exits
            pipe.send_bytes(message)


def _receive_tasks(pipe: Connection, tasks: queue.SimpleQueue[bytes]) -> None:
    """Receive tasks while one is running, so that the parent never blocks; exit with the parent.

    The pipe closes when the parent exits, unless a process that it forked later has a copy. So whose child
    this process is, is checked as well. With a fork server in between, the parent's pid is checked.
    """
    parent, started_by = multiprocessing.parent_process(), os.getppid()
    with contextlib.suppress(EOFError, OSError):
        while os.getppid() == started_by and parent is not None and parent.is_alive():
            if started_by != parent.pid:
                with contextlib.suppress(PermissionError):
                    os.kill(parent.pid or 0, 0)  # raises ProcessLookupError
            if pipe.poll(_PARENT_CHECK_INTERVAL):
                tasks.put(pipe.recv_bytes())
    os._exit(0)  # also in the middle of a task: its result is not needed any more


# In the parent process.


class _Worker:
    """One process, its pipe, and the keys of the tasks it was sent, oldest first."""

    def __init__(self, work: _Work, context: Any) -> None:
        self.pipe: Connection
        self.pipe, theirs = context.Pipe()
        self.note = context.RawValue("q", -1)
        # Daemonic: multiprocessing ends it if this process exits without closing the pool.
        self.process: BaseProcess = context.Process(
            target=_serve, args=(theirs, work, self.note), daemon=True
        )
        try:
            self.process.start()
        except PICKLE_ERRORS as error:
            raise unsendable("the work", error) from error
        finally:
            theirs.close()  # so that the pipe closes when the worker exits
        self.held: deque[tuple[int, int]] = deque()
        self.ready = False

    @property
    def exit_reason(self) -> str:
        """How the process ended."""
        code = self.process.exitcode
        if code is None or code >= 0:
            return f"exit code {code}"
        return f"{signal.strsignal(-code)}, signal {-code}"

    def receive(self) -> bytes | None:
        """Return the next message; None if the process has exited."""
        with contextlib.suppress(EOFError, OSError):
            if self.pipe.poll():  # otherwise a child of the process keeps the pipe open
                return self.pipe.recv_bytes()
        return None

    def end(self) -> None:
        self.pipe.close()
        self.process.terminate()
        self.process.join(_JOIN_TIMEOUT)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()


class ProcessPool(Generic[T, R]):
    """Worker processes that apply one function to tasks and live until :meth:`close`.

    They also end when the pool is garbage-collected and when this process exits or is killed. A worker that
    dies is replaced, and its tasks are retried. Each worker runs with one thread.

    Args:
        work: what to apply. Pickled, unless workers are forked.
        num_workers: number of processes.
        multiprocessing_context: ``"fork"``, ``"spawn"`` or ``"forkserver"``; None for Python's default.
        retries: how often a task is retried after its worker died.
    """

    def __init__(
        self,
        work: Callable[[T], R],
        num_workers: int,
        multiprocessing_context: str | None = None,
        retries: int = MAX_RETRIES,
    ) -> None:
        self._work, self.size = _Work(work), num_workers
        self._multiprocessing_context, self._retries = multiprocessing_context, retries
        self._workers: list[_Worker] = []
        self._retry = deque[int]()  # positions whose worker died
        self._done: dict[int, Any] = {}  # results and failures by position, until they are yielded
        self._run = 0
        self._owner = os.getpid()
        weakref.finalize(self, _end_workers, self._workers, self._owner)

    def close(self) -> None:
        """End the workers at once; a run that goes on, or another one, starts new ones."""
        self._retry.extend(position for worker in self._workers for position in self._positions_at(worker))
        _end_workers(self._workers, self._owner)

    def start(self) -> None:
        """Start the workers, unless they run; :meth:`run` does it if this was not called."""
        while len(self._workers) < self.size:
            self._workers.append(self._start_worker())

    def _start_worker(self) -> _Worker:
        # Looked up here: get_context(None) fixes the start method for the whole program.
        context = multiprocessing.get_context(self._multiprocessing_context)
        try:
            return _Worker(self._work, context)
        except OSError as error:
            if not _lacks_descriptors(error):
                raise
            raise EngineError(f"a worker process cannot be started ({error}). {_DESCRIPTORS}") from error

    def _positions_at(self, worker: _Worker) -> list[int]:
        """Return the positions of this run's tasks that a worker holds."""
        return [position for run, position in worker.held if run == self._run]

    def run(
        self,
        task: Callable[[int], T],
        positions: Sequence[int],
        *,
        ordered: bool = False,
        prefetch_factor: int = 2,
        timeout: float | None = None,
        receive: Callable[[R], Any] | None = None,
    ) -> Iterator[tuple[int, Any]]:
        """Run the tasks at ``positions``; yield (position, result), in order only if ``ordered``.

        At most ``prefetch_factor * workers`` results are under way. A new run ends the previous one.
        ``timeout`` is seconds to wait for a result; ``receive`` is applied to each as soon as it is seen,
        before its turn.

        Raises:
            WorkerDied: a task's worker died on every attempt; raised in its turn, as errors of the work are.
            ResultTimeout: the next result did not arrive in time.
            EngineError: the work or a task cannot be sent, or workers die while they start.
        """
        self._run += 1
        self._task, self._ordered, self._prefetch, self._receive = task, ordered, prefetch_factor, receive
        self._unsent, self._retry = iter(positions), deque[int]()
        self._left = len(positions)  # not yet yielded
        self._done = {}
        self._deaths = Counter[int | None]()
        for expected in positions:
            asked = time.monotonic()
            while not (expected in self._done if ordered else self._done):
                self._send_tasks()
                left = None if timeout is None else max(0.0, asked + timeout - time.monotonic())
                if not self._collect(left) and timeout is not None:
                    raise ResultTimeout(expected, timeout)
            position = expected if ordered else next(iter(self._done))
            result = self._done.pop(position)
            if isinstance(result, _Failure):
                raise result.error
            self._left -= 1
            self._send_tasks()
            while receive is not None and self._collect(0):
                pass
            yield position, result

    def _send_tasks(self) -> None:
        """Send tasks to the workers that hold the fewest; start workers first if there are none."""
        self.start()
        sent = sum(len(self._positions_at(worker)) for worker in self._workers) + len(self._done)
        # The last tasks are not queued after another one: whichever worker is free first takes them.
        last = not self._ordered and self._left - sent <= self._prefetch * self.size
        limit = 1 if last else self._prefetch
        for _ in range(self.size * self._prefetch - sent):
            worker = min(self._workers, key=lambda worker: len(worker.held))
            if len(worker.held) >= limit:
                return
            position = self._retry.popleft() if self._retry else next(self._unsent, None)
            if position is None:
                return
            self._send(worker, position)

    def _send(self, worker: _Worker, position: int) -> None:
        key, task = (self._run, position), self._task(position)
        try:
            message = ForkingPickler.dumps((key, task))
        except PICKLE_ERRORS as error:
            raise unsendable(name_task(position, task), error) from error
        worker.held.append(key)
        with contextlib.suppress(OSError):  # it died: _collect takes the task back
            worker.pipe.send_bytes(message)

    def _collect(self, timeout: float | None) -> bool:
        """Receive at most one message per ready worker; restart workers that exited. False if none was."""
        sources: dict[Any, _Worker] = {worker.pipe: worker for worker in self._workers}
        sources |= {worker.process.sentinel: worker for worker in self._workers}
        ready = dict.fromkeys(sources[source] for source in wait(list(sources), timeout))
        for worker in ready:
            message = worker.receive()
            if message is None:
                self._replace(worker)
            else:
                self._take(worker, message)
        return bool(ready)

    def _take(self, worker: _Worker, message: bytes) -> None:
        key, content = pickle.loads(message)  # noqa: S301 (our own worker wrote it)
        if key is None:
            read_message(content)  # raises what unpickling the work raised
            worker.ready, self._deaths[None] = True, 0
            return
        worker.held.remove(key)
        run, position = key
        try:
            result = _load_message(content)  # also of earlier runs: this frees their shared memory
        except (EOFError, OSError, RuntimeError) as error:  # torch: RuntimeError if it shares by file_system
            worker.process.join(_EXIT_GRACE)
            if worker.process.exitcode is None:
                if isinstance(error, RuntimeError) and not _lacks_descriptors(error):
                    raise
                problem = f"a result cannot be received ({type(error).__name__}: {error})"
                raise EngineError(f"{problem}. {_DESCRIPTORS}") from error
            if run == self._run:  # tensors are lost with the worker that sent them
                self._retry.append(position)
            return
        if run == self._run:
            if self._receive is not None and not isinstance(result, _Failure):
                result = self._receive(result)
            self._done[position] = result

    def _replace(self, worker: _Worker) -> None:
        """Start another worker in the place of one that died; its tasks wait for their next attempt."""
        worker.end()
        lost = self._positions_at(worker)
        if not worker.ready and (error := self._count_death(worker, None)) is not None:
            raise error
        was_running = worker.ready and lost and worker.held[0] == (self._run, lost[0])
        if was_running and (error := self._count_death(worker, lost[0])) is not None:
            self._done[lost.pop(0)] = _Failure(error)
        logger.warning("a worker died (process %s: %s)", worker.process.pid, worker.exit_reason)
        self._retry.extend(lost)
        self._workers[self._workers.index(worker)] = self._start_worker()

    def _count_death(self, worker: _Worker, position: int | None) -> WorkerDied | None:
        """Return the error to raise if workers died too often over a task, or before one (None)."""
        self._deaths[position] += 1
        deaths, reason = self._deaths[position], worker.exit_reason
        if deaths <= self._retries:
            return None
        message = (
            f"the worker processes die while they start, at last with {reason}: see their output above. A "
            'script that starts them needs `if __name__ == "__main__":` around its own work; counting with '
            "one worker and loading with none need no other process"
        )
        if position is not None:
            message = (
                f"{name_task(position, self._task(position))} was given up: the process that ran it died "
                f"{deaths} times, at last with {reason}. If memory was short, use fewer workers (now "
                f"{self.size}) or smaller tasks"
            )
        return WorkerDied(message, position, deaths, reason, worker.note.value)


def _end_workers(workers: list[_Worker], owner: int) -> None:
    if os.getpid() != owner:  # a fork that has a copy of the pool
        return
    for worker in workers:
        worker.pipe.close()
        worker.process.terminate()
    for worker in workers:
        worker.end()
    workers.clear()


StartMethod = Literal["fork", "spawn", "forkserver"]


class LocalEngine:
    """Runs tasks on processes of this machine.

    With one worker, or one task, everything runs in this process: nothing is pickled and nothing is started.

    Args:
        num_workers: number of processes; None for one per core this process may use.
        multiprocessing_context: ``"spawn"`` needs an importable main script (``if __name__ == "__main__":``).
            ``"fork"`` starts at once with all loaded modules; use it only in a process that has not used a
            GPU and runs no other threads, such as a command.
    """

    def __init__(
        self, num_workers: int | None = None, multiprocessing_context: StartMethod = "spawn"
    ) -> None:
        self.num_workers = _cores() if num_workers is None else num_workers
        if self.num_workers < 1:
            raise ConfigError.of("num_workers", num_workers, "expected at least 1")
        if multiprocessing_context not in get_args(StartMethod):
            expected = f"expected one of {', '.join(get_args(StartMethod))}"
            raise ConfigError.of("multiprocessing_context", multiprocessing_context, expected)
        self.multiprocessing_context: StartMethod = multiprocessing_context

    def run(self, work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[int, R]]:
        """See :meth:`packhorse.utils.pool.Engine.run`. Closing the iterator early ends the processes."""
        num_workers = min(self.num_workers, len(tasks))
        if num_workers <= 1:
            for position, task in enumerate(tasks):
                yield position, work(task)
            return
        pool = ProcessPool(work, num_workers, self.multiprocessing_context)
        try:
            yield from pool.run(tasks.__getitem__, range(len(tasks)))
        finally:
            pool.close()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
