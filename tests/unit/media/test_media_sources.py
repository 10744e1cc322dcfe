from __future__ import annotations

import base64
import multiprocessing
import os
from pathlib import Path

import pytest

from packhorse.errors import BadSample, MissingDependency
from packhorse.media import describe, local_path, open_source, read_bytes
from packhorse.media.source import Address, LmdbEntry, LocalFile, locate


def bad_sample(source: object) -> BadSample:
    with pytest.raises(BadSample) as caught:
        read_bytes(source)
    assert caught.value.stage == "media"
    return caught.value


def test_every_kind_of_source_gives_the_same_bytes(tmp_path: Path, memory) -> None:
    path = tmp_path / "a file.bin"
    path.write_bytes(b"payload")
    sources = [
        str(path),
        path,
        f"file://{path}",
        f"file://{str(path).replace(' ', '%20')}",
        f"file://localhost{path}",
        memory("folder/file.bin", b"payload"),
        b"payload",
        bytearray(b"payload"),
        memoryview(b"payload"),
        {"bytes": b"payload", "path": None},
        {"bytes": None, "path": str(path)},
        {"path": str(path)},
        {"bytes": b"payload", "path": "/not/there"},
    ]
    assert [read_bytes(source) for source in sources] == [b"payload"] * len(sources)


def test_a_file_url_with_a_literal_percent_sign_is_that_file(tmp_path: Path) -> None:
    path = tmp_path / "100%25.bin"
    path.write_bytes(b"x")
    assert read_bytes(f"file://{path}") == b"x"


def test_an_open_source_can_seek(tmp_path: Path, memory) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"0123456789")
    for source in (path, memory("f", b"0123456789"), b"0123456789"):
        with open_source(source) as file:
            file.seek(4)
            assert file.read(2) == b"45"


def test_a_missing_file_is_named(tmp_path: Path, memory) -> None:
    memory("exists", b"x")
    for source in (tmp_path / "no.png", f"file://{tmp_path}/no.png", "memory://no.png", {"path": "no.png"}):
        error = bad_sample(source)
        assert error.reason == "missing_media"
        assert "no.png" in str(error)
        assert "no file" in str(error)


def test_a_directory_is_not_a_file(tmp_path: Path) -> None:
    error = bad_sample(tmp_path)
    assert error.reason == "missing_media"
    assert "is a directory, expected a file" in str(error)


def test_a_pipe_is_rejected_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    error = bad_sample(tmp_path / "pipe")
    assert error.reason == "missing_media"
    assert "not a regular file" in str(error)


def test_names_that_cannot_be_opened_say_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, why in [
        ("file/inner.png", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("loop", "symbolic links"),
    ]:
        error = bad_sample(tmp_path / name)
        assert error.reason == "missing_media"
        assert why in str(error)
    error = bad_sample(f"{tmp_path}/nul\0byte")
    assert error.reason == "missing_media"
    assert "not a file name" in str(error)


@pytest.mark.parametrize("place", ["{}", "{folder}/{}", "data:image/png;base64,{}"])
@pytest.mark.parametrize("size", [150, 200, 60_000])
def test_base64_in_place_of_a_path_is_named_as_such(place: str, size: int, tmp_path: Path) -> None:
    png = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * (size // 256 + 1)).decode()
    jpeg = base64.b64encode(b"\xff\xd8\xff\xe0" + bytes(range(256)) * (size // 256 + 1)).decode()
    for data in (png, jpeg):
        error = bad_sample(place.format(data, folder=tmp_path))
        assert error.reason == "missing_media"
        start = place.format(data, folder="").lstrip("/")[:20] if data is png else ""
        assert f"base64 data in place of a path ({start}" in str(error)
        assert ", save it as a file" in str(error)
        assert len(str(error)) < 250


def test_a_long_path_to_nothing_is_not_taken_for_base64(tmp_path: Path) -> None:
    for name in ("folder/" * 40 + "image", "a1" * 50 + ".png", "Train2024/" * 30 + "image_1.png"):
        assert "base64" not in str(bad_sample(tmp_path / name))


def _read_without_permission(path: str, queue: multiprocessing.Queue) -> None:
    if os.geteuid() == 0:
        os.seteuid(65534)
    try:
        read_bytes(path)
    except BadSample as error:
        queue.put((error.reason, str(error)))


def test_a_file_without_permission_says_so(tmp_path: Path) -> None:
    path = tmp_path / "secret.png"
    path.write_bytes(b"x")
    path.chmod(0)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_read_without_permission, args=(str(path), queue))
    process.start()
    reason, message = queue.get(timeout=30)
    process.join()
    assert reason == "unreachable_media"
    assert "Permission denied" in message


def test_an_empty_source_is_broken(tmp_path: Path, memory) -> None:
    (tmp_path / "empty").touch()
    for source in (tmp_path / "empty", memory("empty", b""), b"", {"bytes": b"", "path": "x"}):
        error = bad_sample(source)
        assert error.reason == "broken_media"
        assert "empty file (0 bytes)" in str(error)


def test_a_dict_with_neither_bytes_nor_path_is_missing() -> None:
    error = bad_sample({"bytes": None, "path": None})
    assert error.reason == "missing_media"
    assert "found neither" in str(error)


def test_an_unknown_protocol_and_an_unknown_type_are_named() -> None:
    assert "nonsense" in str(bad_sample("nonsense://bucket/x"))
    error = bad_sample(42)
    assert error.reason == "wrong_format"
    assert "<int>" in str(error)


def test_a_protocol_whose_package_is_missing_names_the_package() -> None:
    with pytest.raises(MissingDependency, match="gcsfs"):
        read_bytes("gs://bucket/x")


def test_an_lmdb_entry_is_split_at_the_last_sign_that_has_a_database_before_it(tmp_path: Path) -> None:
    assert locate("a.lmdb::key") == LmdbEntry("a.lmdb", "key")
    assert locate("a.lmdb::x::y") == LmdbEntry("a.lmdb", "x::y")
    assert locate("a.lmdb::http://host/x") == LmdbEntry("a.lmdb", "http://host/x")
    assert locate("file:///d/a.lmdb::key") == LmdbEntry("/d/a.lmdb", "key")
    (tmp_path / "base").mkdir()
    assert locate(f"{tmp_path}/base::key") == LmdbEntry(f"{tmp_path}/base", "key")
    assert locate(f"{tmp_path}/nowhere::key") == LocalFile(f"{tmp_path}/nowhere::key")
    (tmp_path / "base::key").touch()
    assert locate(f"{tmp_path}/base::key") == LocalFile(f"{tmp_path}/base::key")
    assert locate("simplecache::s3://b/x") == Address("simplecache::s3://b/x")
    assert "local disk" in str(bad_sample("s3://bucket/a.lmdb::key"))


def test_local_path_is_none_except_for_local_files(tmp_path: Path) -> None:
    assert local_path(tmp_path / "x") == str(tmp_path / "x")
    assert local_path("file:///a/b") == "/a/b"
    assert local_path({"path": "a"}) == "a"
    assert [local_path(s) for s in ("s3://b/x", b"x", {"bytes": b"x", "path": "a"}, 3)] == [None] * 4


def test_a_description_is_short_and_never_the_contents() -> None:
    assert describe(b"secret") == "<6 bytes>"
    assert describe({"bytes": b"secret", "path": None}) == "<6 bytes>"
    assert describe({"bytes": b"secret", "path": "a.png"}) == "a.png"
    assert describe(["a.png", "b.png"]) == "<2 items, first a.png>"
    assert len(describe("x" * 100_000)) < 250
    assert describe(object()) == "<object>"
