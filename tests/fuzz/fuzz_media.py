"""Fuzzed media: the headers of images, audio and videos."""

import io
from pathlib import Path


def image_seeds(folder: Path) -> list[bytes]:
    from PIL import Image

    image = Image.radial_gradient("L").resize((33, 21)).convert("RGB")
    found = []
    for form in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"):
        file = io.BytesIO()
        image.save(file, form)
        found.append(file.getvalue())
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    image.save(file, "JPEG", exif=exif)
    return [*found, file.getvalue()]


def read_image(data: bytes, path: Path) -> None:
    from packhorse.media import image_size, load_image

    height, width = image_size(data, max_pixels=1 << 20)
    image_size(data, exif=True, max_pixels=1 << 20)
    assert load_image(data, max_pixels=1 << 20).size == (width, height)


def audio_seeds(folder: Path) -> list[bytes]:
    import numpy as np
    import soundfile

    found = []
    for form in ("WAV", "FLAC", "OGG", "MP3"):
        file = io.BytesIO()
        soundfile.write(file, np.sin(np.arange(2000) / 9).astype(np.float32), 8000, format=form)
        found.append(file.getvalue())
    return found


def read_audio(data: bytes, path: Path) -> None:
    from packhorse.media import audio_info

    audio_info(data)


def video_seeds(folder: Path) -> list[bytes]:
    import av
    import numpy as np

    found = []
    for suffix in ("mp4", "mkv"):
        path = folder / f"video.{suffix}"
        with av.open(str(path), "w") as container:
            stream = container.add_stream("mpeg4", rate=10)
            stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
            for n in range(5):
                frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 40 * n, np.uint8), format="rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        found.append(path.read_bytes())
    return found


def read_video(data: bytes, path: Path) -> None:
    from packhorse.media import probe_video

    probe_video(data)
