"""Read entries of LMDB databases.

A database is opened once per process (read-only, without lock file and read-ahead) and stays open; an entry
then costs one tree walk and one copy. After a fork the child opens its own, so forked and spawned DataLoader
workers read safely. Needs ``pip install -e '.[lmdb]'``.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from packhorse.errors import ConfigError, PackhorseError, SystemFault, require
from packhorse.media.failure import bad_media, read_error


class _OpenDatabases:
    """The databases that one process has open, by real path."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.environments: dict[str, Any] = {}


_open = _OpenDatabases()


def read_lmdb(database: str, key: str) -> bytes:
    """Return the value of ``key`` (UTF-8) in the LMDB database at ``database``, a folder or a single file.

    Raises:
        BadSample: ``missing_media`` if there is no such database or key, ``broken_media`` if the file is not
            an LMDB database or truncated.
    """
    lmdb = require("lmdb", "lmdb")
    environment = _environment(database, lmdb)
    try:
        with environment.begin(buffers=False) as transaction:
            value = transaction.get(key.encode("utf-8", "surrogateescape"))
    except lmdb.BadValsizeError:
        # LMDB allows no empty and no very long keys.
        value = None
    except lmdb.Error as error:
        raise _convert_error(lmdb, error, f"{database}: reading key {key!r} failed ({error})") from error
    if value is None:
        raise bad_media(f"{database} has no key {key!r}", "missing_media")
    return bytes(value)


def _environment(database: str, lmdb: Any) -> Any:
    global _open
    if _open.pid != os.getpid():
        # After a fork: LMDB forbids the child to use what the parent opened, and the binding reopens it only
        # after the child's copy is closed (which does not touch the parent's: there is no lock file).
        inherited, _open = _open, _OpenDatabases()
        for environment in inherited.environments.values():
            environment.close()
    path = os.path.realpath(database)
    with _open.lock:
        if path not in _open.environments:
            _open.environments[path] = _open_environment(database, path, lmdb)
        return _open.environments[path]


def _open_environment(database: str, path: str, lmdb: Any) -> Any:
    folder = os.path.isdir(path)
    data_file = os.path.join(path, "data.mdb") if folder else path
    try:
        size = os.stat(data_file).st_size
        with open(data_file, "rb"):
            pass
    except FileNotFoundError as error:
        found = "a folder without data.mdb" if folder else "no such file"
        raise bad_media(f"no LMDB database {database} ({found})", "missing_media") from error
    except OSError as error:
        raise read_error(error, f"{database} cannot be opened ({error.strerror})", "missing_media") from error
    if size == 0:
        raise bad_media(f"{database}: empty file (0 bytes)")
    try:
        environment = lmdb.open(path, subdir=folder, create=False, readonly=True, lock=False, readahead=False)
    except lmdb.Error as error:
        if "already open" in str(error):
            raise ConfigError(
                f"{database} is already open in this process: LMDB allows one handle a process, so close "
                "yours before Packhorse reads the database",
                path=database,
            ) from error
        raise _convert_error(lmdb, error, f"{database} is not an LMDB database ({error})") from error
    # Reading a page beyond the end of the file would kill the process (SIGBUS) instead of raising.
    needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if size < needed:
        environment.close()
        raise bad_media(f"{database} is truncated: its header names {needed:,} bytes, the file has {size:,}")
    return environment


def _convert_error(lmdb: Any, error: Exception, detail: str) -> PackhorseError:
    # ENOMEM (the file cannot be mapped) and ENOSPC.
    if isinstance(error, lmdb.MemoryError | lmdb.DiskError):
        return SystemFault(f"{detail}: the machine is at fault, not the sample; free memory or disk space")
    return bad_media(detail)
