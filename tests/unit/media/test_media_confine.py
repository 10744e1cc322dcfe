from __future__ import annotations

from pathlib import Path

import pytest

from packhorse.media import confine, resolve
from raising import raises_bad_sample


@pytest.fixture
def media(tmp_path: Path) -> Path:
    """A media folder with a file, a folder of frames and links; next to it a secret and a similar name."""
    media = tmp_path / "media"
    (media / "frames").mkdir(parents=True)
    (media / "inside.png").write_bytes(b"x")
    (media / "frames" / "1.png").write_bytes(b"x")
    (tmp_path / "secret.png").write_bytes(b"x")
    (tmp_path / "media-evil").mkdir()
    (tmp_path / "media-evil" / "x.png").write_bytes(b"x")
    (media / "link.png").symlink_to(tmp_path / "secret.png")
    (media / "good-link.png").symlink_to(media / "inside.png")
    (media / "folder-link").symlink_to(tmp_path)
    return media


def assert_outside(path: object, media_dir: object) -> None:
    with raises_bad_sample("outside_media_dir", stage="convert"):
        resolve(path, media_dir, confined=True)


def test_relative_paths_get_the_media_folder_and_others_do_not(media: Path) -> None:
    assert resolve("a/b.png", media) == f"{media}/a/b.png"
    assert resolve(Path("a/b.png"), str(media)) == f"{media}/a/b.png"
    assert resolve("/abs/b.png", media) == "/abs/b.png"
    assert resolve("s3://b/x.png", media) == "s3://b/x.png"
    assert resolve("file:///x.png", media) == "file:///x.png"
    assert resolve("a.lmdb::k", media) == f"{media}/a.lmdb::k"
    assert resolve("a.lmdb::http://h/k", media) == f"{media}/a.lmdb::http://h/k"
    assert resolve(["1.png", "/2.png"], media) == [f"{media}/1.png", "/2.png"]
    assert resolve({"path": "1.png", "fps": 2}, media) == {"path": f"{media}/1.png", "fps": 2}
    assert resolve("a.png", None) == "a.png"
    assert resolve("a.png", "s3://bucket/media/") == "s3://bucket/media/a.png"
    assert resolve("/a.png", "s3://bucket/media") == "/a.png"


def test_what_is_not_a_path_comes_back_itself(media: Path) -> None:
    for thing in (b"bytes", 5, object()):
        assert resolve(thing, media, confined=True) is thing
    assert resolve({"bytes": b"x", "path": None}, media, confined=True) == {"bytes": b"x", "path": None}


def test_what_lies_inside_passes(media: Path) -> None:
    for path in ("inside.png", "frames/../inside.png", "good-link.png", "frames", "not-there-yet.png"):
        assert resolve(path, media, confined=True) == f"{media}/{path}"
    inside = [str(media / "inside.png"), f"file://{media}/inside.png", [str(media / "inside.png")]]
    for path in inside:
        assert confine(path, media) == path


def test_paths_that_leave_the_folder_are_rejected(media: Path) -> None:
    parent = media.parent
    for path in (
        "../secret.png",
        "frames/../../secret.png",
        "link.png",
        "folder-link/secret.png",
        "/etc/passwd",
        str(parent / "media-evil" / "x.png"),
        "../media-evil/x.png",
        f"file://{parent}/secret.png",
        f"local://{parent}/secret.png",
        f"FILE://{parent}/secret.png",
        "s3://bucket/x.png",
        "http://host/x.png",
        "memory://x",
        "s3://bucket/db.lmdb::key",
        "simplecache::s3://bucket/x",
        "nul\0byte",
        ["inside.png", "../secret.png"],
        [["inside.png"], [{"path": "../secret.png"}]],
        {"path": "../secret.png"},
        {"bytes": None, "path": "/etc/passwd"},
    ):
        assert_outside(path, media)


def test_a_percent_encoded_file_url_is_checked_as_it_is_opened(media: Path) -> None:
    assert_outside(f"file://{media}/%2e%2e/secret.png", media)


def test_an_lmdb_database_must_lie_inside(media: Path) -> None:
    assert resolve("db.lmdb::../../key", media, confined=True) == f"{media}/db.lmdb::../../key"
    (media / "linked.lmdb").symlink_to(media.parent / "media-evil")
    (media / "hollow.lmdb").mkdir()
    (media / "hollow.lmdb" / "data.mdb").symlink_to(media.parent / "secret.png")
    for path in ("../x.lmdb::k", "linked.lmdb::k", "hollow.lmdb::k", "/x.lmdb::k", "file:///x.lmdb::k"):
        assert_outside(path, media)


def test_a_frame_folder_with_a_link_to_the_outside_is_rejected(media: Path) -> None:
    assert confine(media / "frames", media) == media / "frames"
    (media / "frames" / "2.png").symlink_to(media.parent / "secret.png")
    assert_outside("frames", media)


def test_a_media_folder_that_is_itself_a_link_works(media: Path) -> None:
    link = media.parent / "alias"
    link.symlink_to(media)
    assert resolve("inside.png", link, confined=True) == f"{link}/inside.png"
    assert_outside("../secret.png", link)
    assert confine(str(media / "inside.png"), f"file://{link}") == str(media / "inside.png")


def test_an_address_is_inside_only_below_the_same_address() -> None:
    root = "s3://bucket/media"
    for path in ("s3://bucket/media/a/b.png", "a/b.png", "s3://bucket/media", "a..b/c..png"):
        resolve(path, root, confined=True)
        resolve(path, root + "/", confined=True)
    for path in (
        "s3://bucket/media-evil/x.png",
        "s3://bucket/other.png",
        "s3://bucket/media/../secret.png",
        "../secret.png",
        "a/%2e%2e/%2E./secret.png",
        "a\\..\\secret.png",
        "x::file:///etc/passwd",
        "s3://bucket/media/x::s3://other/y",
        "gs://bucket/media/x.png",
        "/etc/passwd",
        "file:///etc/passwd",
    ):
        assert_outside(path, root)
