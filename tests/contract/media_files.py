"""Real media files for the contract tests, one of each kind that a processor may meet."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import soundfile
from PIL import Image

from contract.samples import SAMPLING_RATE, clip, make_image, tone


def write_media(folder: Path) -> dict[str, Path]:
    """Write every file into ``folder``; their paths by name."""
    images = {
        "wide.png": make_image(100, 60),
        "large.png": make_image(300, 200),
        "rgba.png": _see_through(make_image(90, 70)),
        "palette.png": make_image(80, 50).convert("P", palette=Image.Palette.ADAPTIVE),
        "cmyk.tif": make_image(70, 90, "CMYK"),
        "pixel.png": make_image(1, 1),
        "tall.png": make_image(6, 900),
    }
    for name, image in images.items():
        image.save(folder / name)
    write_video(folder / "video.mp4", frames=10, fps=10)
    write_video(folder / "slow.mp4", frames=5, fps=1)
    soundfile.write(folder / "second.wav", tone(SAMPLING_RATE), SAMPLING_RATE)
    # Neither at the models' rate nor a whole number of hops.
    soundfile.write(folder / "studio.wav", tone(44_100 + 77), 44_100)
    return {path.name: path for path in folder.iterdir()}


def _see_through(image: Image.Image) -> Image.Image:
    image.putalpha(make_image(*image.size, "L"))
    return image


def write_video(path: Path, frames: int, fps: int | Fraction, width: int = 66, height: int = 50) -> None:
    """A video of ``frames`` different frames."""
    images, _ = clip(frames, width, height)
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for pixels in images:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode(None))
