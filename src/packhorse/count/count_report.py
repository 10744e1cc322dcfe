"""Results of a counting pass: the report, its verification, and copies of the data with counts.

The report reads the sidecars one part at a time, so memory does not grow with the number of rows.
"""

from __future__ import annotations

import bisect
import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson

from packhorse.chat import IGNORE_INDEX, CannotAlign
from packhorse.count.columns import COUNTS, OK, CountColumns
from packhorse.count.sidecar import Sidecar
from packhorse.errors import BadSample, write_fault
from packhorse.families import Encoder
from packhorse.formats.conversation import parse_documents
from packhorse.formats.convert import convert_row
from packhorse.formats.meta import DatasetConfig
from packhorse.ledger import Ledger
from packhorse.rows.index import file_error
from packhorse.rows.row_files import RowFile
from packhorse.rows.selection import row_key
from packhorse.types import MEDIA_KINDS, Conversation, mask_secrets
from packhorse.utils.files import write_atomic
from packhorse.utils.progress import OnProgress, Progress

_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class CountedFile:
    """A dataset, its open file, its counts, and the number of rows that an earlier run has counted."""

    config: DatasetConfig
    file: RowFile
    sidecar: Sidecar
    reused: int = 0


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that could not be counted, and its current location: ``train.jsonl:812 (byte 40213)``."""

    key: str
    reason: str
    detail: str
    location: str


@dataclass(frozen=True, slots=True)
class DatasetReport:
    """Sums over all rows of one dataset's file.

    Attributes:
        tokens: by kind: ``text``, ``image``, ``video``, ``audio``.
        media: by kind: ``images``, ``videos``, ``audios``.
        longest: the most tokens of a row, ``longest_row`` its key (empty if there is none).
        bad: rows that could not be counted, by reason; some of them in ``examples``.
        unsupervised: rows without a supervised token; the keys of some in ``unsupervised_rows``.
        reused: rows that an earlier run has counted.
        off_by: 0 if all counts are exact; else the largest possible error in tokens, -1 if unknown.
    """

    name: str
    file: str
    sidecar: str
    rows: int
    tokens: dict[str, int]
    supervised: int
    media: dict[str, int]
    patches: int
    longest: int
    longest_row: str
    bad: dict[str, int]
    examples: tuple[BadRow, ...]
    unsupervised: int
    unsupervised_rows: tuple[str, ...]
    reused: int
    off_by: int

    @property
    def total(self) -> int:
        """All tokens."""
        return sum(self.tokens.values())


@dataclass(frozen=True, slots=True)
class Verified:
    """Comparison of random rows with the real processor.

    Attributes:
        checked: number of compared rows.
        failed: the differences, one line per row.
        not_encoded: rows whose media could not be decoded, which their headers do not show.
    """

    checked: int = 0
    failed: tuple[str, ...] = ()
    not_encoded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CountReport:
    """A counting pass.

    Attributes:
        datasets: in the order of their names.
        seconds: of the whole pass, opening the processor included.
        counting_seconds: from the first counted row to the last.
        counted_rows: rows that this pass has counted; the others were reused.
        verified: None if nothing was verified.
        files: the datasets with their open files and sidecars.
    """

    datasets: tuple[DatasetReport, ...]
    seconds: float
    counting_seconds: float
    counted_rows: int
    verified: Verified | None = None
    files: tuple[CountedFile, ...] = field(default=(), repr=False)

    @property
    def opening_seconds(self) -> float:
        """Seconds without the counting: opening processor and files, finding earlier counts, summing up."""
        return max(0.0, self.seconds - self.counting_seconds)

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {
            "seconds": round(self.seconds, 3),
            "counting_seconds": round(self.counting_seconds, 3),
            "counted_rows": self.counted_rows,
            "datasets": [asdict(dataset) | {"total": dataset.total} for dataset in self.datasets],
            "all": self.totals(),
            "verified": None if self.verified is None else asdict(self.verified),
        }

    def totals(self) -> dict[str, Any]:
        """Return sums over the datasets, under the names of :class:`DatasetReport`."""
        totals: dict[str, Any] = {
            name: sum(getattr(dataset, name) for dataset in self.datasets)
            for name in ("rows", "total", "supervised", "unsupervised", "patches", "reused")
        }
        for name in ("tokens", "media", "bad"):
            sums: Counter[str] = Counter()
            for dataset in self.datasets:
                sums.update(getattr(dataset, name))
            totals[name] = dict(sums)
        longest = max(self.datasets, key=lambda dataset: dataset.longest, default=None)
        errors = [dataset.off_by for dataset in self.datasets]
        return totals | {
            "longest": 0 if longest is None else longest.longest,
            "longest_row": "" if longest is None else longest.longest_row,
            "off_by": -1 if min(errors, default=0) < 0 else max(errors, default=0),
        }


def dataset_report(counted: CountedFile, bad_rows: int = _EXAMPLES) -> DatasetReport:
    """Sum up one sidecar; name at most ``bad_rows`` bad rows for each reason."""
    name, sidecar = counted.config.name, counted.sidecar
    sums: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    examples: list[BadRow] = []
    unsupervised: list[str] = []
    longest, longest_row, off_by = 0, "", 0
    for number, batch in enumerate(sidecar.batches()):
        first, columns = number * sidecar.part_rows, CountColumns.of(batch)
        sums.update({column: int(getattr(columns, column).sum()) for column in COUNTS})
        unknown = off_by < 0 or bool((columns.off_by < 0).any())
        off_by = -1 if unknown else max(off_by, int(columns.off_by.max(initial=0)))
        total = columns.total
        if total.max(initial=0) > longest:
            index = int(total.argmax())
            longest, longest_row = int(total[index]), row_key(name, first + index)
        rows = first + np.flatnonzero(columns.ok & (columns.supervised == 0))
        sums["unsupervised"] += len(rows)
        unsupervised += [row_key(name, row) for row in rows[: _EXAMPLES - len(unsupervised)].tolist()]
        for index in np.flatnonzero(~columns.ok).tolist():
            reason = columns.status[index]
            bad[reason] += 1
            if bad[reason] <= bad_rows:
                key, location = row_key(name, first + index), counted.file.location(first + index)
                examples.append(BadRow(key, reason, columns.detail[index], location))
    return DatasetReport(
        name=name,
        file=mask_secrets(counted.config.file_name),
        sidecar=str(sidecar.path),
        rows=len(sidecar),
        tokens={kind: sums[kind] for kind in ("text", "image", "video", "audio")},
        supervised=sums["supervised"],
        media={kind: sums[kind] for kind in ("images", "videos", "audios")},
        patches=sums["patches"],
        longest=longest,
        longest_row=longest_row,
        bad=dict(bad.most_common()),
        examples=tuple(examples),
        unsupervised=sums["unsupervised"],
        unsupervised_rows=tuple(unsupervised),
        reused=counted.reused,
        off_by=off_by,
    )


# Verification.

# Reasons that only decoding finds: the header is valid, what follows it is not.
_NOT_IN_HEADERS = ("broken_media", "missing_media", "media_too_large")


def verify_counts(files: Sequence[CountedFile], encoder: Encoder, rows: int, seed: int) -> Verified:
    """Encode ``rows`` random rows and compare all their counts.

    A row that was counted but that the processor rejects, or the other way round, is a difference too.
    """
    ends = list(accumulate(len(counted.sidecar) for counted in files))
    total = ends[-1] if ends else 0
    failed, not_encoded = [], []
    drawn = sorted(random.Random(seed).sample(range(total), min(rows, total)))
    for position in drawn:
        index = bisect.bisect_right(ends, position)
        counted, row = files[index], position - (ends[index - 1] if index else 0)
        key = row_key(counted.config.name, row)
        predicted = counted.sidecar.row(row)
        real = _encode_and_count(counted, row, encoder)
        if isinstance(real, BadSample) and real.reason in _NOT_IN_HEADERS and predicted["status"] == OK:
            not_encoded.append(f"{key}: {real.detail}")
        elif differences := "; ".join(_differences(predicted, real)):
            failed.append(f"{key}: {differences}")
    return Verified(len(drawn), tuple(failed), tuple(not_encoded))


def _differences(predicted: dict[str, Any], real: dict[str, int] | BadSample) -> Iterator[str]:
    if isinstance(real, BadSample):
        if predicted["status"] == OK:
            yield f"counted, but the processor rejects it ({real.reason}: {real.detail})"
        return
    if predicted["status"] != OK:
        yield f"{predicted['status']} ({predicted['detail']}), but the processor makes {real['total']} tokens"
        return
    predicted["media"] = sum(predicted[kind] for kind in MEDIA_KINDS)
    predicted["total"] = predicted["text"] + predicted["media"]
    for name, number in real.items():
        # An inexact count has an error bound for its length, and none for anything else.
        wrong = (
            predicted[name] != number
            if predicted["exact"]
            else name == "total" and 0 <= predicted["off_by"] < abs(predicted[name] - number)
        )
        if wrong:
            yield f"{name} predicted {predicted[name]}, real {number}"


def _encode_and_count(counted: CountedFile, row: int, encoder: Encoder) -> dict[str, int] | BadSample:
    config, key = counted.config, row_key(counted.config.name, row)
    try:
        example = convert_row(
            counted.file[row], config.rules, key=key, dataset=config.name, record=Ledger().record
        )
        documents = [_count_encoded(encoder, document) for document in parse_documents(example, key)]
    except BadSample as error:
        return error
    except CannotAlign as error:
        return BadSample(str(error), key=key, stage="encode")
    return {name: sum(counts[name] for counts in documents) for name in documents[0]}


def _count_encoded(encoder: Encoder, conversation: Conversation) -> dict[str, int]:
    encoded = encoder.encode(conversation)
    labels = encoder.labels(encoded)
    ids = encoded.tokens["input_ids"].tolist()
    media = sum(token in encoder.media_token_ids for token in ids)
    real = {"total": len(ids), "text": len(ids) - media, "media": media}
    real |= _count_by_kind(encoder, conversation, ids, media)
    return real | {"supervised": int((labels != IGNORE_INDEX).sum())}


def _count_by_kind(
    encoder: Encoder, conversation: Conversation, ids: Sequence[int], media: int
) -> dict[str, int]:
    """Return the media tokens of each kind; nothing if ids alone do not distinguish the kinds."""
    kinds = {ref.kind for ref in conversation.media}
    if len(kinds) < 2:
        return {kind: media if kind in kinds else 0 for kind in MEDIA_KINDS}
    names = {kind: encoder.find_token(f"{kind}_token") for kind in encoder.family.kinds}
    convert = encoder.tokenizer.convert_tokens_to_ids
    tokens = {kind: convert(name) for kind, name in names.items() if name is not None}
    tokens = {kind: token for kind, token in tokens.items() if isinstance(token, int)}
    # A kind without a token of its own is written with that of another.
    content = encoder.media_token_ids
    distinct = kinds <= set(tokens) and set(tokens.values()) == content and len(tokens) == len(content)
    return {kind: ids.count(token) for kind, token in tokens.items()} if distinct else {}


# Copies of the data files with counts (`packhorse count --write-jsonl`).

_FIELDS = ("_text_tokens", "mm_inputs_meta")
_META_FIELDS = {
    "image": ("height", "width"),
    "video": ("frames", "height", "width", "fps", "duration"),
    "audio": ("samples",),
}


def write_counted_jsonl(
    files: Sequence[CountedFile], folder: str | os.PathLike[str], progress: OnProgress | None = None
) -> list[Path]:
    """Write ``<dataset>.jsonl`` for each dataset, and a ``meta.json`` that names them.

    A row gets ``_text_tokens`` and ``mm_inputs_meta``; together they are its exact length. The rest of its
    bytes stays as it is, and so does a row that could not be counted. Each file appears when it is complete;
    memory is one part of a file.

    Raises:
        ConfigError: a row contains what JSON cannot represent (the bytes of an image in a Parquet file), or
            two datasets would get the same file.
        SystemFault: the files cannot be written.
    """
    home = Path(folder)
    targets = [home / f"{counted.config.name.replace(os.sep, '_')}.jsonl" for counted in files]
    if len(set(targets)) < len(targets):
        raise file_error(home, f"two datasets would be written to one of {', '.join(map(str, targets))}")
    meta = {}
    for counted, target in zip(files, targets, strict=True):
        if os.path.realpath(target) == os.path.realpath(counted.file.path):
            raise file_error(target, "is the data file itself: write the copies to another folder")
        meta[counted.config.name] = counted.config.entry(target.name)
    report = progress or Progress("writing")
    total, done = sum(len(counted.file) for counted in files), 0

    def write_rows(counted: CountedFile, file: IO[bytes]) -> None:
        nonlocal done
        for lines in _counted_lines(counted):
            file.writelines(lines)
            done += len(lines)
            report(done, total)

    try:
        for counted, target in zip(files, targets, strict=True):
            write_atomic(target, partial(write_rows, counted))
        text = json.dumps(meta, indent=2, ensure_ascii=False) + "\n"
        write_atomic(home / "meta.json", lambda file: file.writelines([text.encode()]))
    except OSError as error:
        remedy = "Free disk space or choose another folder"
        raise write_fault(error, error.filename or home, remedy) from error
    return targets


def _counted_lines(counted: CountedFile) -> Iterator[list[bytes]]:
    """Yield the lines of the copy, one part of the file at a time."""
    first = 0
    for batch in counted.sidecar.batches():
        counts = batch.select(["text", "status", "media"]).to_pylist()
        rows = [(counted.file.json_line(row), count) for row, count in enumerate(counts, first)]
        yield [(_add_counts(row, count) if count["status"] == OK else row) + b"\n" for row, count in rows]
        first += len(counts)


def _add_counts(row: bytes, counts: dict[str, Any]) -> bytes:
    fields = orjson.dumps({"_text_tokens": counts["text"], "mm_inputs_meta": inputs_meta(counts["media"])})
    if any(name.encode() in row for name in _FIELDS):
        values = json.loads(row)
        kept = {name: value for name, value in values.items() if name not in _FIELDS}
        if len(kept) < len(values):  # fields of an earlier count, not just text that mentions them
            row = json.dumps(kept, ensure_ascii=False).encode()
    return row[: row.rindex(b"}")].rstrip() + b"," + fields[1:]


def inputs_meta(media: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return ``mm_inputs_meta`` of a row: sizes and tokens of its media by kind, in the order of the text."""
    meta: dict[str, list[dict[str, Any]]] = {"images_meta": [], "videos_meta": []}
    for item in media:
        kind = MEDIA_KINDS[item["kind"]]
        entry = {name: item[name] for name in _META_FIELDS[kind]} | {"n_tokens": item["tokens"]}
        meta.setdefault(f"{kind}s_meta", []).append(entry)
    return meta
