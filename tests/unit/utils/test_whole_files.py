"""Files appear whole or not at all, also where a file server is after the folder."""

import errno
import fcntl
import io
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest

from packhorse.utils import files as cache
from packhorse.utils.files import write_atomic


class RejectedWhenClosed(io.BufferedWriter):
    """A file of which a server says only in the end that it does not fit."""

    def close(self) -> None:
        if not self.closed:
            super().close()
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


@pytest.mark.parametrize("to_disk", [False, True])
def test_an_older_file_stays_if_the_new_one_is_rejected_when_it_is_closed(
    to_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "rows.jsonl"
    target.write_bytes(b"older, whole")
    monkeypatch.setattr(os, "fdopen", lambda fd, mode: RejectedWhenClosed(io.FileIO(fd, mode)))
    with pytest.raises(OSError, match="quota") as caught:
        write_atomic(target, lambda file: file.write(b"newer"), to_disk=to_disk)
    assert caught.value.filename == str(target)
    assert target.read_bytes() == b"older, whole"
    assert os.listdir(tmp_path) == ["rows.jsonl"]


def is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_file_is_locked_until_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    replace = os.replace

    def look(source: str, target: Path) -> None:
        seen.append(is_locked(Path(source)))
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    open_before = len(os.listdir("/proc/self/fd"))
    write_atomic(tmp_path / "a", lambda file: file.write(b"a"))
    assert seen == [True]
    assert not is_locked(tmp_path / "a")
    assert len(os.listdir("/proc/self/fd")) == open_before


def as_on_a_file_server(fd: Any, operation: int, real: Callable[..., None] = fcntl.flock) -> None:
    """Exclusive locks are for files that are open for writing, as over NFS."""
    number = fd if isinstance(fd, int) else fd.fileno()
    only_read = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    if operation & fcntl.LOCK_EX and only_read:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    real(fd, operation)


def fail_to_lock(fd: Any, operation: int) -> None:
    """A lock whose state is unknown."""
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def unknown(fd: Any, operation: int) -> None:
    """A file system without locks."""
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.mark.parametrize(
    ("rules", "stays"), [(as_on_a_file_server, True), (fail_to_lock, True), (unknown, False)]
)
def test_a_file_at_work_is_not_removed_though_it_looks_old(
    rules: Callable[..., None], stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, now = tmp_path / "made", time.time()
    monkeypatch.setattr(fcntl, "flock", rules)

    def slowly(file: IO[bytes]) -> None:
        file.write(b"whole")
        with monkeypatch.context() as later:
            later.setattr(time, "time", lambda: now + 86_400)
            write_atomic(target, lambda other: other.write(b"of the other"))

    if stays:
        write_atomic(target, slowly)
        assert target.read_bytes() == b"whole"
    else:  # if only its age is known, its writer gets an error
        with pytest.raises(FileNotFoundError):
            write_atomic(target, slowly)
        assert target.read_bytes() == b"of the other"
    assert os.listdir(tmp_path) == ["made"]


@pytest.mark.parametrize("removed", [False, True])
def test_a_new_file_that_another_process_opens_before_it_is_locked_is_replaced_and_locked(
    removed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, looking = tempfile.mkstemp, []

    def make_file(**where: Any) -> tuple[int, str]:
        fd, path = make(**where)
        if not looking:  # another process: its clock says that the file is old
            looking.append(open(path, "rb"))  # noqa: SIM115
            fcntl.flock(looking[0], fcntl.LOCK_SH | fcntl.LOCK_NB)
            if removed:
                os.unlink(path)
                looking[0].close()
        return fd, path

    monkeypatch.setattr(tempfile, "mkstemp", make_file)
    locked = []

    def write(file: IO[bytes]) -> None:
        (path,) = tmp_path.glob(".*")
        locked.append(is_locked(path))
        file.write(b"whole")

    write_atomic(tmp_path / "a", write)
    looking[0].close()
    assert locked == [True]
    assert (tmp_path / "a").read_bytes() == b"whole"
    assert os.listdir(tmp_path) == ["a"]


def test_a_folder_in_which_no_new_file_is_left_alone_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int, *, exclusive: bool) -> bool:
        return False

    monkeypatch.setattr(cache, "_lock", fail)
    with pytest.raises(OSError, match="check the clocks"):
        write_atomic(tmp_path / "a", lambda file: file.write(b"a"))
    assert os.listdir(tmp_path) == []


def test_the_cache_may_be_named_from_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PACKHORSE_CACHE", "~/rows")
    assert cache.cache_folder() == tmp_path / "rows"
