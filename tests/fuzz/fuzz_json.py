"""Text as fuzzers give it: JSONL files, JSON arrays, their index, ShareGPT rows."""

import json
import os
import random
import struct
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1 << 31, 1 << 70, 1.5, float("nan"), float("inf")),
    *("", "user", "assistant", "<image>", "<video><audio>", "text", "image", "a\0b", "../x", "file:///x"),
    *("s3://b/x", "a.lmdb::k", "\u2028", [], [[]], {}, {"path": None}, {"bytes": None, "path": "x"}),
    *({"type": "image", "image": 5}, {"type": "text", "text": None}, [1, 2], {"n_tokens": True}),
)


def rows() -> list[dict[str, Any]]:
    """ShareGPT rows with everything the format knows."""
    messages = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A cat."}]
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What?"}]
    return [
        {"messages": messages, "images": ["a.png"]},
        {"messages": [{"role": "system", "content": "Be kind."}, *messages], "images": [{"path": "a.png"}]},
        {"messages": [{"role": "user", "content": "<video><audio>"}], "videos": [["1.png", "2.png"]]},
        {"messages": [{"role": "user", "content": parts}, messages[1]], "audios": "a.wav"},
        {
            "messages": messages,
            "images": [{"bytes": None, "path": "a.png", "fps": 2}],
            "_text_tokens": 3,
            "mm_inputs_meta": {"images_meta": [[1, 2], {"n_tokens": 4}, None], "videos_meta": []},
        },
    ]


def mutate_json(data: bytes, rng: random.Random) -> bytes | None:
    """Another value somewhere in a JSON value; or its parts doubled, taken out or exchanged."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    nodes: list[tuple[Any, Any]] = []
    _nodes(value, nodes)
    if not nodes:
        return None
    for _ in range(rng.choice((1, 1, 2))):
        holder, place = rng.choice(nodes)
        if not _is_there(holder, place):
            continue
        match rng.randrange(5):
            case 0:
                del holder[place]
            case 1:
                other, there = rng.choice(nodes)
                if _is_there(other, there):
                    holder[place] = json.loads(json.dumps(other[there]))
            case 2 if isinstance(holder, list):
                holder.append(holder[place])
            case _:
                holder[place] = rng.choice(_VALUES)
    return json.dumps(value).encode()


def _is_there(holder: Any, place: Any) -> bool:
    return place < len(holder) if isinstance(holder, list) else place in holder


def _nodes(value: Any, found: list[tuple[Any, Any]], depth: int = 0) -> None:
    if isinstance(value, dict | list) and depth < 50:
        for place in value if isinstance(value, dict) else range(len(value)):
            found.append((value, place))
            _nodes(value[place], found, depth + 1)


def jsonl_seeds(folder: Path) -> list[bytes]:
    lines = [json.dumps(row).encode() for row in rows()]
    return [
        b"\n".join(lines) + b"\n",
        b"\xef\xbb\xbf" + b"\r\n".join(lines[:2]) + b"\r\n\r\n",
        b'{"a": NaN}\n{"a": 123456789012345678901234567890}\n{"a": "\\ud800"}\n',
        b'\n \n{"a": [1, {"b": "\\u00e9"}]}\n{"a": "\xff"}',
    ]


def array_seeds(folder: Path) -> list[bytes]:
    return [
        json.dumps(rows(), indent=1).encode(),
        b'[{"a": "[\\"]"}, {"b": "\\\\"},\n {"c": [1, [2]]}]',
        b" [ ] ",
    ]


def read_rows(data: bytes, path: Path) -> None:
    """Read all rows, one by one and together, and locate each."""
    from packhorse.errors import BadSample
    from packhorse.rows.row_files import open_rows

    path.write_bytes(data)
    file = open_rows(str(path))
    one_by_one = [file._get_or_error(number) for number in range(len(file))]
    together = list(file.read(range(len(file))))
    assert len(together) == len(file)
    for one, other in zip(one_by_one, together, strict=True):
        assert type(one) is type(other)
        assert isinstance(one, BadSample | dict)
    for number in range(min(len(file), 3)):
        file.location(number)
    rejected = [one for one in one_by_one if isinstance(one, BadSample)]
    if rejected and len(rejected) == len(one_by_one):
        raise rejected[0]


def read_sharegpt(data: bytes, path: Path) -> None:
    """A row as any parser of JSON gives it, in four ways of reading it, and what comes out as types."""
    from packhorse.errors import BadSample
    from packhorse.formats.conversation import parse_conversation
    from packhorse.formats.convert import convert_sharegpt_to_conversation
    from packhorse.ledger import Ledger

    try:
        row = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadSample(str(error)) from error
    if not isinstance(row, dict):
        raise BadSample("no row")
    rejected = []
    for strict in (False, True):
        for folder in (None, "/nowhere/media"):
            ledger = Ledger()
            try:
                example = convert_sharegpt_to_conversation(
                    row, media_dir=folder, ledger=ledger, strict=strict, confine=folder is not None
                )
                parse_conversation(example)
            except BadSample as error:
                rejected.append(error)
            ledger.summary(1)
    if len(rejected) == 4:
        raise rejected[0]


def read_index(data: bytes, path: Path) -> None:
    """A damaged index is rebuilt: the rows are those of the file. A forged one is safe."""
    from packhorse.errors import ConfigError
    from packhorse.rows import index
    from packhorse.rows.row_files import open_rows
    from packhorse.utils.files import Fingerprint

    index.KEEP_FROM_BYTES = 0  # so that a small file has one
    source = index_source(path.parent)
    home = source.with_name(source.name + ".phidx")
    home.unlink(missing_ok=True)  # never change a file that is mapped
    home.write_bytes(data)
    kept = index._load(home, "lines", Fingerprint.of(source))
    found = list(open_rows(str(source)))
    if b"made_up" not in data[:512]:
        assert found == [json.loads(line) for line in source.read_bytes().splitlines()]
    if kept is None:
        raise ConfigError("it was rebuilt")


def index_source(folder: Path) -> Path:
    source = folder / "indexed.jsonl"
    if not source.exists():
        source.write_bytes(b"".join(b'{"n": %d}\n' % n for n in range(40)))
        os.utime(source, (1_700_000_000, 1_700_000_000))
    return source


def index_seeds(folder: Path) -> list[bytes]:
    from packhorse.rows import index

    source = index_source(folder)
    with mock.patch.object(index, "KEEP_FROM_BYTES", 0):  # this is the process of the tests
        index.open_index(str(source), "lines")
    return [source.with_name(source.name + ".phidx").read_bytes()]


def mutate_index(data: bytes, rng: random.Random) -> bytes | None:
    """Offsets changed under a checksum that is right; the header says so, which no index does by itself."""
    try:
        header = json.loads(data[:512])
    except ValueError:
        return None
    if not isinstance(header, dict) or len(data) < 512 + 16:
        return None
    count = (len(data) - 512) // 8
    offsets = list(struct.unpack_from(f"<{count}q", data, 512))
    for _ in range(rng.choice((1, 2, 3))):
        place = rng.randrange(count)
        by = rng.choice((1, -1, 7, 1 << 40, rng.randrange(-(1 << 62), 1 << 62)))
        offsets[place] = (offsets[place] + by + (1 << 63)) % (1 << 64) - (1 << 63)
    if rng.random() < 0.3:
        offsets.sort()
    packed = struct.pack(f"<{count}q", *offsets)
    header |= {"offsets": count, "crc": zlib.crc32(packed), "made_up": True}
    if rng.random() < 0.2:
        header[rng.choice(sorted(header))] = rng.choice(_VALUES)
    return json.dumps(header).encode().ljust(512)[:512] + packed
