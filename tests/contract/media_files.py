"""Real media files for the contract tests, one of each kind that a processor may meet."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import soundfile
from PIL import Image

from contract.samples import SAMPLING_RATE, clip, picture, tone


def write_media(folder: Path) -> dict[str, Path]:
    """Write every file into ``folder``; their paths by name."""
    images = {
        "wide.png": picture(100, 60),
        "large.png": picture(300, 200),
        "rgba.png": _see_through(picture(90, 70)),
        "palette.png": picture(80, 50).convert("P", palette=Image.Palette.ADAPTIVE),
        "cmyk.tif": picture(70, 90, "CMYK"),
        "pixel.png": picture(1, 1),
        "tall.png": picture(6, 900),
    }
    for name, image in images.items():
        image.save(folder / name)
    write_film(folder / "film.mp4", frames=10, fps=10)
    write_film(folder / "slow.mp4", frames=5, fps=1)
    soundfile.write(folder / "second.wav", tone(SAMPLING_RATE), SAMPLING_RATE)
    # Neither at the models' rate nor a whole number of hops.
    soundfile.write(folder / "studio.wav", tone(44_100 + 77), 44_100)
    return {path.name: path for path in folder.iterdir()}


def _see_through(image: Image.Image) -> Image.Image:
    image.putalpha(picture(*image.size, "L"))
    return image


def write_film(path: Path, frames: int, fps: int | Fraction, width: int = 66, height: int = 50) -> None:
    """A film of ``frames`` different frames."""
    pictures, _ = clip(frames, width, height)
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for pixels in pictures:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode(None))
