"""One fuzzing run in its own process: libFuzzer (through atheris) changes inputs and sees what they reach.

    python tests/fuzz/fuzz_child.py TARGET FOLDER SECONDS SEED

``FOLDER/corpus`` has the seeds; how many inputs were read and rejected is kept in ``FOLDER/counts`` as it
goes, so that it is known however the process ends. An exception that is not one of Packhorse ends it, and so
does an input that takes ten seconds, or two gigabytes more than the process has.
"""

import mmap
import random
import resource
import struct
import sys
from pathlib import Path

import atheris
from fuzz_targets import BROKEN, FILES, TARGETS

COUNTS = struct.Struct("<qqq")
SECONDS_AN_INPUT = 10
MORE_BYTES = 2 << 30


def limit_memory() -> None:
    """So much more than now; an input that wants more gets a MemoryError, which is a finding."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> None:
    name, folder, seconds, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    target, path = (TARGETS | BROKEN)[name], folder / FILES.get(name, "input")
    with open(folder / "counts", "r+b") as file:
        counts = mmap.mmap(file.fileno(), COUNTS.size)
    with atheris.instrument_imports(include=list(target.modules)):
        from packhorse.errors import PackhorseError

        for first in sorted((folder / "corpus").iterdir())[:1]:
            target.read(first.read_bytes(), path)  # imports what it needs
    tried = read = rejected = 0

    def one_input(data: bytes) -> None:
        nonlocal tried, read, rejected
        tried += 1
        COUNTS.pack_into(counts, 0, tried, read, rejected)
        try:
            target.read(data, path)
        except PackhorseError:
            rejected += 1
        else:
            read += 1
        COUNTS.pack_into(counts, 0, tried, read, rejected)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        changed = target.mutate(data, rng) if target.mutate is not None and rng.random() < 0.6 else None
        if changed is None or len(changed) > max_size:
            changed = atheris.Mutate(data, max_size)
        return changed

    options = [
        f"-max_total_time={seconds}",
        f"-timeout={SECONDS_AN_INPUT}",
        f"-seed={seed}",
        f"-max_len={target.longest}",
        f"-artifact_prefix={folder}/found-",
        "-len_control=0",
        "-rss_limit_mb=0",
        str(folder / "corpus"),
    ]
    atheris.Setup([sys.argv[0], *options], one_input, custom_mutator=mutate)
    limit_memory()
    atheris.Fuzz()


if __name__ == "__main__":
    main()
