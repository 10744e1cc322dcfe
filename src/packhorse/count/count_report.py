"""What a counting pass has found, ready to print: one pass over the sidecars, a part at a time."""

from __future__ import annotations

import bisect
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from packhorse.chat import IGNORE_INDEX, CannotAlign
from packhorse.count.columns import COUNTS, OK, CountColumns
from packhorse.count.sidecar import Sidecar
from packhorse.errors import BadSample
from packhorse.families import Encoder
from packhorse.formats.conversation import parse_conversation
from packhorse.formats.meta import DatasetConfig
from packhorse.formats.sharegpt import convert_row
from packhorse.ledger import Ledger
from packhorse.rows.row_files import RowFile
from packhorse.rows.selection import row_key
from packhorse.types import MEDIA_KINDS, Conversation, MediaKind, mask_secrets

_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class CountedFile:
    """A dataset, its open file, the counts of it, and how many of them an earlier run has made."""

    config: DatasetConfig
    file: RowFile
    sidecar: Sidecar
    reused: int = 0


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that could not be counted, and where it stands now: ``train.jsonl:812 (byte 40213)``."""

    key: str
    reason: str
    detail: str
    location: str


@dataclass(frozen=True, slots=True)
class DatasetReport:
    """One dataset: sums over all rows of its file.

    Attributes:
        tokens: by kind: ``text``, ``image``, ``video``, ``audio``.
        media: by kind: ``images``, ``videos``, ``audios``.
        longest: the most tokens of a row, ``longest_row`` its key (empty if there is none).
        bad: rows that could not be counted, by reason; some of them in ``examples``.
        unsupervised: rows without a token that is supervised; the keys of some in ``unsupervised_rows``.
        reused: rows that an earlier run has counted.
        off_by: 0 where all counts are exact; else by how many tokens the worst may be off, -1 if nobody can
            tell.
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
    """Random rows through the real processor.

    Attributes:
        checked: rows that were compared.
        failed: what differs, a line for each row.
        not_encoded: rows whose media could not be decoded, which a header does not tell.
    """

    checked: int = 0
    failed: tuple[str, ...] = ()
    not_encoded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CountReport:
    """A whole pass.

    Attributes:
        datasets: in the order of their names.
        seconds: for all of it, opening the processor included.
        counting_seconds: from the first row that had to be counted to the last.
        counted_rows: how many rows were counted now; the others were reused.
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
        """For all but the counting: opening processor and files, looking what there is, summing up."""
        return max(0.0, self.seconds - self.counting_seconds)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "seconds": round(self.seconds, 3),
            "counting_seconds": round(self.counting_seconds, 3),
            "counted_rows": self.counted_rows,
            "datasets": [asdict(dataset) | {"total": dataset.total} for dataset in self.datasets],
            "all": self.totals(),
            "verified": None if self.verified is None else asdict(self.verified),
        }

    def totals(self) -> dict[str, Any]:
        """Sums over the datasets, under the names they have there."""
        every = self.datasets
        longest = max(every, key=lambda one: one.longest, default=None)
        sums = {
            name: sum(getattr(one, name) for one in every)
            for name in ("rows", "total", "supervised", "unsupervised", "patches", "reused")
        }
        by_kind = {
            name: _added_up([getattr(one, name) for one in every]) for name in ("tokens", "media", "bad")
        }
        return (
            sums
            | by_kind
            | {
                "longest": 0 if longest is None else longest.longest,
                "longest_row": "" if longest is None else longest.longest_row,
                "off_by": -1
                if any(one.off_by < 0 for one in every)
                else max((one.off_by for one in every), default=0),
            }
        )


def _added_up(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    """Sums by name; a name whose sum is 0 is there too."""
    sums: Counter[str] = Counter()
    for one in counts:
        sums.update(one)
    return dict(sums)


def dataset_report(counted: CountedFile, bad_rows: int = _EXAMPLES) -> DatasetReport:
    """Sum up one sidecar; memory does not grow with its rows.

    Args:
        counted: the dataset.
        bad_rows: so many bad rows of each reason are named.
    """
    name, sidecar = counted.config.name, counted.sidecar
    sums: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    examples: list[BadRow] = []
    silent: list[str] = []
    longest, longest_row, off_by = 0, "", 0
    for number, batch in enumerate(sidecar.batches()):
        first, columns = number * sidecar.part_rows, CountColumns.of(batch)
        sums.update({column: int(getattr(columns, column).sum()) for column in COUNTS})
        unknown = off_by < 0 or bool((columns.off_by < 0).any())
        off_by = -1 if unknown else max(off_by, int(columns.off_by.max(initial=0)))
        total = columns.total
        if total.max(initial=0) > longest:
            place = int(total.argmax())
            longest, longest_row = int(total[place]), row_key(name, first + place)
        nothing_supervised = np.flatnonzero(columns.ok & (columns.supervised == 0))
        sums["unsupervised"] += len(nothing_supervised)
        silent += [
            row_key(name, first + place) for place in nothing_supervised[: _EXAMPLES - len(silent)].tolist()
        ]
        for place in np.flatnonzero(~columns.ok).tolist():
            reason = columns.status[place]
            bad[reason] += 1
            if bad[reason] <= bad_rows:
                where = counted.file.location(first + place)
                examples.append(BadRow(row_key(name, first + place), reason, columns.detail[place], where))
    return DatasetReport(
        name,
        mask_secrets(counted.config.file_name),
        str(sidecar.path),
        len(sidecar),
        {kind: sums[kind] for kind in ("text", "image", "video", "audio")},
        sums["supervised"],
        {kind: sums[kind] for kind in ("images", "videos", "audios")},
        sums["patches"],
        longest,
        longest_row,
        dict(bad.most_common()),
        tuple(examples),
        sums["unsupervised"],
        tuple(silent),
        counted.reused,
        off_by,
    )


# What only decoding can tell: a header is in order, what follows it is not.
_NOT_IN_HEADERS = ("broken_media", "missing_media", "media_too_large")


def verify_counts(files: Sequence[CountedFile], encoder: Encoder, rows: int, seed: int) -> Verified:
    """Encode ``rows`` random rows and compare their counts; costs what encoding them costs.

    Compared are the numbers that the head of this module lists. A row that was counted but that
    the processor refuses, or the other way round, is a difference too.
    """
    ends = list(accumulate(len(counted.sidecar) for counted in files))
    total = ends[-1] if ends else 0
    failed, not_encoded = [], []
    drawn = sorted(random.Random(seed).sample(range(total), min(rows, total)))
    for place in drawn:
        which = bisect.bisect_right(ends, place)
        counted, row = files[which], place - (ends[which - 1] if which else 0)
        key = row_key(counted.config.name, row)
        predicted = counted.sidecar.row(row)
        real = _real_counts(counted, row, encoder)
        if isinstance(real, BadSample) and real.reason in _NOT_IN_HEADERS and predicted["status"] == OK:
            not_encoded.append(f"{key}: {real.detail}")
        elif differences := "; ".join(_differences(predicted, real)):
            failed.append(f"{key}: {differences}")
    return Verified(len(drawn), tuple(failed), tuple(not_encoded))


def _differences(predicted: dict[str, Any], real: dict[str, int] | BadSample) -> Iterator[str]:
    if isinstance(real, BadSample):
        if predicted["status"] == OK:
            yield f"counted, but the processor refuses it ({real.reason}: {real.detail})"
        return
    if predicted["status"] != OK:
        yield f"{predicted['status']} ({predicted['detail']}), but the processor makes {real['total']} tokens"
        return
    predicted["total"] = sum(predicted[kind] for kind in ("text", *MEDIA_KINDS))
    predicted["media"] = sum(predicted[kind] for kind in MEDIA_KINDS)
    for name, found in real.items():
        # An inexact count tells how far off its length may be, and promises nothing else.
        wrong = (
            predicted[name] != found
            if predicted["exact"]
            else name == "total" and 0 <= predicted["off_by"] < abs(predicted[name] - found)
        )
        if wrong:
            yield f"{name} predicted {predicted[name]}, real {found}"


def _real_counts(counted: CountedFile, row: int, encoder: Encoder) -> dict[str, int] | BadSample:
    config, key = counted.config, row_key(counted.config.name, row)
    try:
        example = convert_row(
            counted.file[row], config.rules, key=key, dataset=config.name, record=Ledger().record
        )
        conversation = parse_conversation(example, key)
        encoded = encoder.encode(conversation)
        labels = encoder.labels(encoded)
    except BadSample as error:
        return error
    except CannotAlign as error:
        return BadSample(str(error), key=key, stage="encode")
    ids = encoded.tokens["input_ids"].tolist()
    media = sum(token in encoder.media_token_ids for token in ids)
    real = {"total": len(ids), "text": len(ids) - media, "media": media}
    real |= _by_kind(encoder, conversation, ids, media)
    return real | {"supervised": int((labels != IGNORE_INDEX).sum())}


def _by_kind(encoder: Encoder, conversation: Conversation, ids: Sequence[int], media: int) -> dict[str, int]:
    """Media tokens of each kind, as far as the ids alone tell kinds apart."""
    kinds = {ref.kind for ref in conversation.media}
    if len(kinds) < 2:
        return {kind: media if kind in kinds else 0 for kind in MEDIA_KINDS}
    content, tokens = encoder.media_token_ids, _kind_tokens(encoder)
    # A kind without a token of its own is written with that of another.
    apart = kinds <= set(tokens) and set(tokens.values()) == content and len(tokens) == len(content)
    return {kind: ids.count(token) for kind, token in tokens.items()} if apart else {}


def _kind_tokens(encoder: Encoder) -> dict[MediaKind, int]:
    """The token of each kind that has one under its own name."""
    texts = {kind: encoder.find_token(f"{kind}_token") for kind in encoder.family.kinds}
    convert = encoder.tokenizer.convert_tokens_to_ids
    ids = {kind: convert(text) for kind, text in texts.items() if text is not None}
    return {kind: number for kind, number in ids.items() if isinstance(number, int)}
