"""One entry of an LMDB database: path and key go in, bytes come out.

A database is opened once per process (read-only, without lock file and read-ahead) and stays open; an entry
then costs one tree walk and one copy. After a fork the child opens its own, so DataLoader workers of either
kind (forked, spawned) read safely. Needs ``pip install 'packhorse[lmdb]'``.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from packhorse.errors import ConfigError, PackhorseError, SystemFault, require
from packhorse.media.failure import bad, unreadable


class _OpenDatabases:
    """The databases that one process has open, by real path."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.environments: dict[str, Any] = {}


_open = _OpenDatabases()


def read_lmdb(database: str, key: str) -> bytes:
    """The value stored under ``key`` (UTF-8) in the LMDB database at ``database``, a folder or a single file.

    Raises:
        BadSample: ``missing_media`` where there is no such database or key, ``broken_media`` where the file
            is not (or not all of) an LMDB database.
    """
    lmdb = require("lmdb", "lmdb")
    environment = _environment(database, lmdb)
    try:
        with environment.begin(buffers=False) as transaction:
            value = transaction.get(key.encode("utf-8", "surrogateescape"))
    except lmdb.BadValsizeError:
        # LMDB has no empty and no very long keys.
        value = None
    except lmdb.Error as error:
        raise _failed(lmdb, error, f"{database}: reading key {key!r} failed ({error})") from error
    if value is None:
        raise bad(f"{database} holds no key {key!r}", "missing_media")
    return bytes(value)


def _environment(database: str, lmdb: Any) -> Any:
    global _open
    if _open.pid != os.getpid():
        # A fork: LMDB forbids the child to use what the parent opened, and the binding refuses to open it
        # again until the child's copy is closed (which leaves the parent's alone: there is no lock file).
        inherited, _open = _open, _OpenDatabases()
        for environment in inherited.environments.values():
            environment.close()
    path = os.path.realpath(database)
    environment = _open.environments.get(path)
    if environment is None:
        with _open.lock:
            environment = _open.environments.get(path)
            if environment is None:
                environment = _open.environments[path] = _opened(database, path, lmdb)
    return environment


def _opened(database: str, path: str, lmdb: Any) -> Any:
    folder = os.path.isdir(path)
    data_file = os.path.join(path, "data.mdb") if folder else path
    try:
        size = os.stat(data_file).st_size
        with open(data_file, "rb"):
            pass
    except FileNotFoundError as error:
        found = "a folder without data.mdb" if folder else "nothing there"
        raise bad(f"no LMDB database {database} ({found})", "missing_media") from error
    except OSError as error:
        raise unreadable(error, f"{database} cannot be opened ({error.strerror})", "missing_media") from error
    if size == 0:
        raise bad(f"{database}: empty file (0 bytes)", "broken_media")
    try:
        environment = lmdb.open(path, subdir=folder, create=False, readonly=True, lock=False, readahead=False)
    except lmdb.Error as error:
        if "already open" in str(error):
            raise ConfigError(
                f"{database} is already open in this process: LMDB allows one handle a process, so close "
                "yours before Packhorse reads the database"
            ) from error
        raise _failed(lmdb, error, f"{database} is not an LMDB database ({error})") from error
    # Reading a page after the end of the file would kill the process (SIGBUS) instead of raising.
    needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if size < needed:
        environment.close()
        raise bad(
            f"{database} is cut short: its header names {needed:,} bytes of pages, the file has {size:,}",
            "broken_media",
        )
    return environment


def _failed(lmdb: Any, error: Exception, detail: str) -> PackhorseError:
    # These two stand for ENOMEM (no room to map the file) and ENOSPC.
    if isinstance(error, lmdb.MemoryError | lmdb.DiskError):
        return SystemFault(f"{detail}: the machine is at fault, not the sample; free memory or disk space")
    return bad(detail, "broken_media")
