"""Media files that several tests read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from PIL import Image

from unit.media.media_samples import CLOSED, noise, write_video


@pytest.fixture
def video(tmp_path: Path) -> Path:
    """60 frames with B-frames, 30 a second, 64 x 48, a keyframe at least every 12."""
    return write_video(tmp_path / "clip.mp4", options=CLOSED)


@pytest.fixture
def faststart(tmp_path: Path) -> Path:
    """The same, with its header in front."""
    return write_video(tmp_path / "faststart.mp4", options=CLOSED, mux={"movflags": "faststart"})


@pytest.fixture
def png(tmp_path: Path) -> Path:
    path = tmp_path / "image.png"
    Image.fromarray(noise(40, 30)).save(path)
    return path


@pytest.fixture
def memory() -> Iterator[Callable[[str, bytes], str]]:
    """Put bytes at a ``memory://`` address; all is forgotten afterwards."""
    system: Any = fsspec.filesystem("memory")

    def put(name: str, data: bytes) -> str:
        url = f"memory://{name}"
        with system.open(url, "wb") as file:
            file.write(data)
        return url

    yield put
    system.store.clear()
    system.pseudo_dirs[:] = [""]
