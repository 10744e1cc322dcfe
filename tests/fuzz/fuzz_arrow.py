"""Arrow files as fuzzers give them: count files, their parts, plans."""

import io
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fuzz_json import mutate_json


def count_file_seeds(folder: Path) -> list[bytes]:
    """Count files of a small dataset with an image and a broken row, in one part and in several."""
    return [_count(folder, part_rows)[0] for part_rows in (4, 100)]


def part_seeds(folder: Path) -> list[bytes]:
    """The files in which parts wait for the others."""
    return _count(folder, 4)[1]


def _count(folder: Path, part_rows: int) -> tuple[bytes, list[bytes]]:
    """A count file, and the parts that it was made of, which are gone when it is finished."""
    from PIL import Image

    from contract.processors import processor
    from count_samples import chat, write_meta, write_rows
    from packhorse.count.counting import count_meta

    home = folder / f"counted-{part_rows}"
    home.mkdir()
    Image.new("RGB", (60, 40)).save(home / "i.png")
    turns = [{"role": "user", "content": "<image>what"}, {"role": "assistant", "content": "ok"}]
    with_image = {"messages": turns, "images": ["i.png"]}
    write_rows(home / "a.jsonl", [*(chat(n) for n in range(7)), with_image, "no row"])
    meta = write_meta(home, {"a": {"file_name": "a.jsonl", "media_dir": "."}})
    parts: list[bytes] = []
    count_meta(meta, processor("qwen2_vl"), part_rows=part_rows, engine=_Copying(parts))
    (path,) = home.glob("*.phcount")
    return path.read_bytes(), parts


class _Copying:
    """An engine that also delivers what it has counted."""

    def __init__(self, parts: list[bytes]) -> None:
        self.parts = parts

    def run(self, work: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        for number, task in enumerate(tasks):
            result = work(task)
            self.parts.append(result.data)
            yield number, result


def read_count_file(data: bytes, path: Path) -> None:
    from packhorse.count.sidecar import Sidecar

    path.unlink(missing_ok=True)
    path.write_bytes(data)
    sidecar = Sidecar(path)
    columns, media = sidecar.columns(), sidecar.media()
    assert len(columns) == len(sidecar) == len(media.offsets) - 1
    for number in range(len(sidecar)):
        sidecar.row(number)


def read_part(data: bytes, path: Path) -> None:
    from packhorse.count.columns import CountColumns, MediaColumns
    from packhorse.count.counting import Part, has_bad, needs_no_media

    path.unlink(missing_ok=True)
    path.write_bytes(data)
    batch = Part("", path).batch()
    CountColumns.of(batch), MediaColumns.of([batch]), has_bad([batch]), needs_no_media(batch)


def copy_seeds(folder: Path) -> list[bytes]:
    """The Arrow copy of a Parquet file with texts, numbers, lists and images."""
    return [_copy_path(folder).read_bytes()]


def _copy_path(folder: Path) -> Path:
    """Where the copy of a Parquet file lies; both are made once."""
    import pyarrow as pa
    import pyarrow.parquet

    from packhorse.rows.parquet import ParquetRows

    file = folder / "rows.parquet"
    if not file.exists():
        turns = [{"role": "user", "content": "what"}, {"role": "assistant", "content": None}]
        rows = [
            {
                "messages": turns[: n % 3],
                "image": {"bytes": b"abc" * n, "path": None},
                "size": n,
                "good": n > 2,
            }
            for n in range(7)
        ]
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), file)
    return ParquetRows(str(file), str(file))._copy


def read_copy(data: bytes, path: Path) -> None:
    """Read all rows of a Parquet file whose copy was damaged; a rebuilt copy counts as rejected."""
    from packhorse.errors import BadSample, ConfigError
    from packhorse.rows.parquet import ParquetRows

    copy, file = _copy_path(path.parent), str(path.parent / "rows.parquet")
    copy.unlink()
    copy.write_bytes(data)
    written = copy.stat().st_ino
    rows = ParquetRows(file, file)
    assert sum(isinstance(row, dict | BadSample) for row in rows.read(range(len(rows)))) == 7
    if rows._inode != written:
        raise ConfigError("it was rebuilt")


def plan_seeds(folder: Path) -> list[bytes]:
    import numpy as np

    from packhorse.neat_packing_vlm import plan_key, plan_packs

    lengths = [5, 3, 4, 20, 0, 7, 2] * 3
    plain = plan_packs(lengths, 8, seed=1)
    plans = [plain, plain.with_costs(np.ones(len(plain)), np.ones(len(plain))), plan_packs([], 8)]
    for number, plan in enumerate(plans):
        plan.save(folder / f"{number}.phplan", plan_key(lengths, 8, seed=1))
    return [(folder / f"{number}.phplan").read_bytes() for number in range(len(plans))]


def read_plan(data: bytes, path: Path) -> None:
    from packhorse.neat_packing_vlm import PackPlan
    from packhorse.plan.pack_plan import load_key

    path.unlink(missing_ok=True)
    path.write_bytes(data)
    plan = PackPlan.load(path)
    load_key(path)
    plan.describe()
    every = sorted([*plan.indices.tolist(), *plan.dropped.tolist()])
    assert every == list(range(len(every)))


def mutate_arrow(data: bytes, rng: random.Random) -> bytes | None:
    """A number of four or eight bytes at a multiple of four: lengths, offsets and positions of Arrow."""
    if len(data) < 16:
        return None
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        size = rng.choice((4, 8))
        at = rng.randrange((len(data) - 8) // 4) * 4
        old = int.from_bytes(changed[at : at + size], "little")
        top = 1 << (8 * size)
        new = rng.choice(
            (0, 1, old + 1, old - 1, old * 2, old + 8, top // 2 - 1, top // 2, top - 1, rng.randrange(top))
        )
        changed[at : at + size] = (new % top).to_bytes(size, "little")
    return bytes(changed)


def mutate_plan(data: bytes, rng: random.Random) -> bytes | None:
    """A plan that says something wrong, under a digest that is right."""
    if rng.random() < 0.4:
        return mutate_arrow(data, rng)
    import numpy as np
    import pyarrow as pa

    from packhorse.plan import pack_plan

    try:
        about, arrays = _opened_plan(data)
    except (pa.ArrowException, ValueError, LookupError, TypeError, AttributeError, OSError):
        return None
    changed = mutate_json(json.dumps(about).encode(), rng) if rng.random() < 0.4 else None
    about = json.loads(changed) if changed else about
    if arrays and rng.random() < 0.8:
        name = rng.choice(sorted(arrays))
        array = arrays[name].copy()
        match rng.randrange(4):
            case 0 if len(array):
                array[rng.randrange(len(array))] = rng.choice((0, 1, 7, 100))
            case 1:
                array = array[: rng.randrange(len(array) + 1)]
            case 2:
                array = array.astype(rng.choice((np.int8, np.int64, np.float32, np.uint64)))
            case _:
                del arrays[name]
        if name in arrays:
            arrays[name] = array
    try:
        digest = pack_plan._digest(about, arrays) if isinstance(about, dict) else ""
    except ValueError:  # of times and dates there is none
        return None
    return _plan_bytes(about, arrays, digest)


def _opened_plan(data: bytes) -> tuple[Any, dict[str, Any]]:
    import pyarrow as pa

    reader = pa.ipc.open_file(pa.py_buffer(data))
    about = json.loads(reader.schema.metadata[b"packhorse"])
    batch = reader.get_batch(0)
    batch.validate(full=True)
    about.pop("digest", None)
    return about, {name: batch.column(name)[0].values.to_numpy() for name in batch.schema.names}


def _plan_bytes(about: Any, arrays: dict[str, Any], digest: str) -> bytes:
    import numpy as np
    import pyarrow as pa

    if isinstance(about, dict):
        about = about | {"digest": digest}
    columns = [
        pa.LargeListArray.from_arrays(np.array([0, len(array)], np.int64), pa.array(array))
        for array in arrays.values()
    ]
    fields = [(name, column.type) for name, column in zip(arrays, columns, strict=True)]
    schema = pa.schema(fields, metadata={"packhorse": json.dumps(about)})
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    return sink.getvalue()
