"""What the system says about itself is never blamed on a sample."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import soundfile
from media_samples import write_database
from PIL import Image

from packhorse.errors import BadSample, PackhorseError, SystemFault, is_data_error
from packhorse.media import (
    audio_info,
    confine,
    image_size,
    load_audio,
    load_image,
    load_video,
    probe_video,
    read_bytes,
)


class FailingFile(io.BytesIO):
    """Everything after the first bytes fails to read."""

    def __init__(self, data: bytes, good: int, code: int) -> None:
        super().__init__(data)
        self.good, self.code = good, code

    def read(self, size: int | None = -1) -> bytes:
        wanted = len(self.getbuffer()) if size is None or size < 0 else size
        if self.tell() + wanted > self.good:
            raise OSError(self.code, os.strerror(self.code))
        return super().read(size)

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class FailingSystem(fsspec.AbstractFileSystem):
    protocol = "failing"
    cachable = False
    data, good, code = b"", 0, 0

    def _open(self, path: str, mode: str = "rb", **options: Any) -> FailingFile:
        if self.good < 0:
            raise OSError(self.code, os.strerror(self.code))
        return FailingFile(self.data, self.good, self.code)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """An address whose file fails with an error code after its first bytes, or (-1) when it is opened."""
    fsspec.register_implementation("failing", FailingSystem, clobber=True)

    def put(data: bytes, good: int, code: int) -> str:
        monkeypatch.setattr(FailingSystem, "data", data)
        monkeypatch.setattr(FailingSystem, "good", good)
        monkeypatch.setattr(FailingSystem, "code", code)
        return "failing://folder/file"

    return put


def encoded_image(form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (200, 200, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, form, **options)
    return file.getvalue()


def encoded_audio(form: str) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(0).normal(0, 0.2, 200_000)
    soundfile.write(file, noise.astype(np.float32), 8000, format=form)
    return file.getvalue()


def error_of(call: Callable[[str], object], source: str) -> PackhorseError:
    with pytest.raises(PackhorseError) as caught:
        call(source)
    return caught.value


def load_upright(source: str) -> Image.Image:
    return load_image(source, exif=True)


@pytest.mark.parametrize(
    "code", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.ENOTCONN]
)
@pytest.mark.parametrize("good", [-1, 0, 2000])
def test_a_fault_of_the_machine_stops_the_run_whatever_is_read(
    failing: Callable[..., str], video: Path, code: int, good: int
) -> None:
    png, clip = encoded_image("PNG"), video.read_bytes()
    calls: list[tuple[Callable[[str], object], bytes]] = [
        (read_bytes, png),
        (load_image, png),
        (load_image, encoded_image("TIFF")),
        (load_upright, encoded_image("JPEG")),
        (probe_video, clip),
        (load_video, clip),
        *((load_audio, encoded_audio(form)) for form in ("WAV", "FLAC", "OGG", "MP3")),
    ]
    for call, data in calls:
        error = error_of(call, failing(data, good, code))
        assert isinstance(error, SystemFault), (call, error)
        assert not is_data_error(error)
        assert os.strerror(code) in str(error)
        assert "failing://folder/file" in str(error)
        assert "the machine is at fault, not the sample" in str(error)
    for call, data in ((image_size, png), (audio_info, encoded_audio("WAV"))):
        if good <= 0:
            assert isinstance(error_of(call, failing(data, good, code)), SystemFault)


@pytest.mark.parametrize(
    ("code", "when_opening", "when_reading"),
    [
        (errno.EACCES, "unreachable_media", "unreachable_media"),
        (errno.ECONNRESET, "unreachable_media", "unreachable_media"),
        (errno.ENAMETOOLONG, "missing_media", "broken_media"),
    ],
)
def test_other_failures_of_reading_concern_one_sample(
    failing: Callable[..., str], code: int, when_opening: str, when_reading: str
) -> None:
    for call, data in ((load_image, encoded_image("PNG")), (load_audio, encoded_audio("WAV"))):
        opening = error_of(call, failing(data, -1, code))
        assert isinstance(opening, BadSample)
        assert opening.reason == when_opening
        reading = error_of(call, failing(data, 2000, code))
        assert isinstance(reading, BadSample)
        assert reading.reason == when_reading
        assert is_data_error(reading)


def _message(call: Callable[[], object]) -> str:
    try:
        call()
    except (PackhorseError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _messages_in_a_child(
    prepare: Callable[[], None], calls: dict[str, Callable[[], object]]
) -> dict[str, str]:
    """What each call raises in a child process whose resources ``prepare`` has taken away."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BadSample):
            read_bytes("none.lmdb::key")  # closes the databases of the parent, which would free handles later
        prepare()
        os.write(writer, json.dumps({name: _message(call) for name, call in calls.items()}).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with open(reader, "rb") as file:
        result: dict[str, str] = json.loads(file.read())
    return result


def _no_file_handles() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with contextlib.suppress(OSError):
        while True:
            os.open(os.devnull, os.O_RDONLY)


def _no_address_space() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), resource.RLIM_INFINITY))


def test_too_many_open_files_are_not_missing_media(tmp_path: Path, video: Path) -> None:
    (tmp_path / "frames").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "frames" / "1.png")
    path = tmp_path / "frames" / "1.png"
    entry = f"{write_database(tmp_path / 'db.lmdb')}::key"
    calls: dict[str, Callable[[], object]] = {
        "image": lambda: load_image(path),
        "size": lambda: image_size(path),
        "video": lambda: load_video(video),
        "folder of frames": lambda: load_video(tmp_path / "frames"),
        "audio": lambda: load_audio(path),
        "entry": lambda: read_bytes(entry),
        "folder of media": lambda: confine(str(tmp_path / "frames"), tmp_path),
    }
    for name, message in _messages_in_a_child(_no_file_handles, calls).items():
        assert message.startswith("SystemFault: "), name
        assert "Too many open files" in message
        assert "ulimit -n" in message


def test_a_database_that_cannot_be_mapped_is_not_broken_media(tmp_path: Path) -> None:
    entry = f"{write_database(tmp_path / 'db.lmdb')}::key"
    (message,) = _messages_in_a_child(_no_address_space, {"entry": lambda: read_bytes(entry)}).values()
    assert message.startswith("SystemFault: ")
    assert "the machine is at fault, not the sample; free memory" in message
