"""The size of an image without decoding it: PIL's lazy open against packhorse.media.image_size.

    python benchmarks/headers.py [--quick] [--images 400] [--folder DIR] [--repeat 15]

Writes its images to a temporary folder, then asks both for the size of every file, from its path, in the
same process and in turns. Prints the best time of ``--repeat`` a file, the ratio for each format and over a
mixture as datasets have it, and whether every size is the same. Exit code 1 if the promise is missed.
Formats that PIL reads for us (TIFF) are shown and not part of the promise.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from packhorse.media import image_size
from promises import fact, make_parser, parse, promise, record_outcome

# Name: (PIL format, mode, save options, share of the mixture in percent).
KINDS: dict[str, tuple[str, str, dict[str, object], int]] = {
    "JPEG": ("JPEG", "RGB", {}, 50),
    "JPEG, progressive": ("JPEG", "RGB", {"progressive": True}, 10),
    "JPEG, EXIF and ICC": ("JPEG", "RGB", {"exif": "camera", "icc_profile": b"p" * 3144}, 10),
    "PNG": ("PNG", "RGB", {}, 12),
    "PNG, palette": ("PNG", "P", {}, 3),
    "WebP, lossy": ("WEBP", "RGB", {}, 6),
    "WebP, lossless": ("WEBP", "RGBA", {"lossless": True}, 2),
    "WebP, animated": ("WEBP", "RGB", {"frames": 3}, 1),
    "GIF": ("GIF", "P", {}, 2),
    "GIF, animated": ("GIF", "P", {"frames": 3}, 1),
    "BMP": ("BMP", "RGB", {}, 3),
    "TIFF (PIL reads it)": ("TIFF", "RGB", {}, 0),
}
TARGET = 5
SLICE = 20


@record_outcome()
def main() -> None:
    """Write the images, measure and print the promises."""
    parser = make_parser(__doc__)
    parser.add_argument("--images", type=int, default=400, help="files of each kind")
    parser.add_argument("--folder", type=Path, default=None, help="where to write (a temporary folder)")
    parser.add_argument("--repeat", type=int, default=15)
    options = parse(parser, images=60, repeat=3)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        files = {name: write_images(Path(folder), name, options.images) for name in KINDS}
        report(files, options.repeat)


def write_images(folder: Path, name: str, count: int) -> list[str]:
    """Write ``count`` images of a kind with different sizes; return their paths."""
    form, mode, options, _ = KINDS[name]
    rng = random.Random(name)
    paths = []
    for number in range(count):
        size = rng.randint(64, 320), rng.randint(64, 320)
        saved = dict(options)
        image = make_image(size, mode, rng)
        if saved.get("exif") == "camera":
            saved["exif"] = camera_exif()
        if frames := saved.pop("frames", 0):
            saved |= {
                "save_all": True,
                "append_images": [make_image(size, mode, rng) for _ in range(int(frames))],
            }
        path = folder / f"{name.replace(' ', '-')}-{number:05}.{form.lower()}"
        image.save(path, form, **saved)
        paths.append(str(path))
    return paths


def make_image(size: tuple[int, int], mode: str, rng: random.Random) -> Image.Image:
    """Return a smooth random image, which gives small files."""
    seed = Image.frombytes("RGB", (4, 4), rng.randbytes(48))
    return seed.resize(size, Image.Resampling.BICUBIC).convert(mode)


def camera_exif() -> bytes:
    """Return EXIF data of a rotated photograph, as large as with a thumbnail."""
    exif = Image.Exif()
    exif[0x0112], exif[0x010F], exif[0x010E] = 6, "Camera", "x" * 6000
    return exif.tobytes()


def pil_size(path: str) -> tuple[int, int]:
    """Return (height, width) by PIL's lazy open, rotated by the EXIF orientation."""
    with Image.open(path) as image:
        sideways = "exif" in image.info and image.getexif().get(0x0112) in (5, 6, 7, 8)
        return (image.width, image.height) if sideways else (image.height, image.width)


def report(files: dict[str, list[str]], repeat: int) -> None:
    """Print the table and the promises."""
    different = 0
    print(f"{'':<22}{'PIL µs':>10}{'ours µs':>10}{'ratio':>8}")
    for name, paths in files.items():
        different += sum(pil_size(path) != image_size(path) for path in paths)
        table_line(name, *both(paths, repeat))
    mixture = interleave(files)
    theirs, ours = both(mixture, repeat)
    table_line("mixture", theirs, ours)
    total = sum(map(len, files.values()))
    print(f"\n{os.cpu_count()} cores; {total:,} files, {len(mixture):,} of them in the mixture\n")
    fact("size of an image, PIL", theirs, "µs")
    fact("size of an image, ours", ours, "µs")
    lazy = "PIL's lazy open"
    promise("size of an image without decoding it, speed", theirs / ours, TARGET, baseline=lazy)
    promise("image sizes that differ", different, 0, baseline=lazy, unit="", at_least=False, kind="exact")


def interleave(files: dict[str, list[str]]) -> list[str]:
    """Return files of all kinds by their share, shuffled, so that branches are not predictable."""
    rng = random.Random(0)
    weight = min(len(paths) for paths in files.values()) / max(share for *_, share in KINDS.values())
    chosen = [path for name, paths in files.items() for path in paths[: round(KINDS[name][3] * weight)]]
    rng.shuffle(chosen)
    return chosen


def both(paths: list[str], repeat: int) -> tuple[float, float]:
    """Return the best microseconds per file of PIL and of Packhorse, measured alternately.

    The best of each slice of the files is taken: on a busy machine a whole round is hardly ever undisturbed.
    """
    slices = [paths[at : at + SLICE] for at in range(0, len(paths), SLICE)]
    total = [0.0, 0.0]
    for some in slices:
        rounds = [(seconds(pil_size, some), seconds(image_size, some)) for _ in range(repeat)]
        for which, column in enumerate(zip(*rounds, strict=True)):
            total[which] += min(column)
    return total[0] * 1e6 / len(paths), total[1] * 1e6 / len(paths)


def seconds(size: Callable[[str], tuple[int, int]], paths: list[str]) -> float:
    """Return how long ``size`` takes for all paths."""
    start = time.perf_counter()
    for path in paths:
        size(path)
    return time.perf_counter() - start


def table_line(name: str, theirs: float, ours: float) -> None:
    """Print one row of the table."""
    print(f"{name:<22}{theirs:>10.1f}{ours:>10.1f}{theirs / ours:>7.1f}x", flush=True)


if __name__ == "__main__":
    main()
