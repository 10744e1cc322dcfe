from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import lmdb
import pytest
from media_samples import write_database

from packhorse.errors import BadSample
from packhorse.media import read_bytes
from raising import raises_config


def bad_sample(source: str) -> BadSample:
    with pytest.raises(BadSample) as caught:
        read_bytes(source)
    assert caught.value.stage == "media"
    return caught.value


@pytest.mark.parametrize("folder", [True, False])
def test_entries_are_read_from_both_layouts(tmp_path: Path, folder: bool) -> None:
    database = write_database(tmp_path / "db.lmdb", folder=folder)
    assert read_bytes(f"{database}::key") == b"value"
    assert read_bytes(f"{database}::other") == b"second"
    assert read_bytes(f"file://{database}::other") == b"second"


def test_a_database_with_any_name_and_keys_with_colons_work(tmp_path: Path) -> None:
    database = write_database(tmp_path / "frames", entries={"clip::7": b"x", "s3://a/b": b"y", "ä": b"z"})
    assert read_bytes(f"{database}::s3://a/b") == b"y"
    assert read_bytes(f"{database}::ä") == b"z"
    named = write_database(tmp_path / "db.lmdb", entries={"clip::7": b"x"})
    assert read_bytes(f"{named}::clip::7") == b"x"


def test_a_missing_key_names_database_and_key(tmp_path: Path) -> None:
    database = write_database(tmp_path / "db.lmdb")
    for key in ("nope", "", "x" * 5000):
        error = bad_sample(f"{database}::{key}")
        assert error.reason == "missing_media"
        assert "db.lmdb has no key" in str(error)
    assert "'nope'" in str(bad_sample(f"{database}::nope"))


def test_a_missing_database_is_missing(tmp_path: Path) -> None:
    assert bad_sample(f"{tmp_path}/no.lmdb::k").reason == "missing_media"
    (tmp_path / "hollow.lmdb").mkdir()
    error = bad_sample(f"{tmp_path}/hollow.lmdb::k")
    assert error.reason == "missing_media"
    assert "without data.mdb" in str(error)


def test_what_is_not_a_database_is_broken(tmp_path: Path) -> None:
    (tmp_path / "text.lmdb").write_bytes(b"hello" * 5000)
    (tmp_path / "empty.lmdb").touch()
    assert "is not an LMDB database" in str(bad_sample(f"{tmp_path}/text.lmdb::k"))
    assert "0 bytes" in str(bad_sample(f"{tmp_path}/empty.lmdb::k"))
    for name in ("text", "empty"):
        assert bad_sample(f"{tmp_path}/{name}.lmdb::k").reason == "broken_media"


def test_a_database_that_is_cut_short_is_rejected_instead_of_crashing(tmp_path: Path) -> None:
    database = write_database(tmp_path / "db.lmdb", folder=False, entries={"k": os.urandom(500_000)})
    data = database.read_bytes()
    database.write_bytes(data[: len(data) // 2])
    error = bad_sample(f"{database}::k")
    assert error.reason == "broken_media"
    assert "truncated" in str(error)


def test_an_empty_value_is_broken(tmp_path: Path) -> None:
    database = write_database(tmp_path / "db.lmdb", entries={"k": b""})
    error = bad_sample(f"{database}::k")
    assert error.reason == "broken_media"
    assert "0 bytes" in str(error)


def test_a_database_that_the_caller_holds_open_is_the_callers_mistake(tmp_path: Path) -> None:
    database = write_database(tmp_path / "db.lmdb")
    mine = lmdb.open(str(database), readonly=True)
    with raises_config(path=database, match="already open in this process"):
        read_bytes(f"{database}::key")
    mine.close()
    assert read_bytes(f"{database}::key") == b"value"


def _read_many(database: str, count: int) -> list[bytes]:
    return [read_bytes(f"{database}::{number}") for number in range(count)]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_read_while_the_parent_holds_the_database_open(tmp_path: Path, method: str) -> None:
    entries = {str(number): os.urandom(5000) for number in range(50)}
    database = write_database(tmp_path / "db.lmdb", entries=entries)
    expected = list(entries.values())
    assert _read_many(str(database), 50) == expected
    with multiprocessing.get_context(method).Pool(2) as pool:
        results = pool.starmap(_read_many, [(str(database), 50)] * 4)
    assert results == [expected] * 4
    assert _read_many(str(database), 50) == expected


def test_a_child_of_a_child_reads_too(tmp_path: Path) -> None:
    database = write_database(tmp_path / "db.lmdb")
    read_bytes(f"{database}::key")
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        ok = read_bytes(f"{database}::key") == b"value"
        if (grandchild := os.fork()) == 0:
            os.write(writer, b"y" if ok and read_bytes(f"{database}::key") == b"value" else b"n")
            os._exit(0)
        os.waitpid(grandchild, 0)
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"y"
