"""Proof of the counts: random rows go through the real processor, and what it makes of them is compared.

Compared are the length, text and media tokens, the tokens of each kind of media (where the ids tell kinds
apart) and the supervised ones; of an inexact count only the length, within what it may be off. Patches and
the sizes of single media are not.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from packhorse.chat import IGNORE_INDEX, CannotAlign, tokenizer_of
from packhorse.conversation import parse_conversation
from packhorse.datasets.count_columns import OK
from packhorse.datasets.count_report import CountedFile, Verified
from packhorse.datasets.select import row_key
from packhorse.datasets.sharegpt import convert_row
from packhorse.errors import BadSample
from packhorse.families import Family, family_of
from packhorse.ledger import Ledger
from packhorse.types import MEDIA_KINDS, Conversation, MediaKind

# What only decoding can tell: a header is in order, what follows it is not.
_NOT_IN_HEADERS = ("broken_media", "missing_media", "media_too_large")


def verify_counts(files: Sequence[CountedFile], processor: Any, rows: int, seed: int) -> Verified:
    """Encode ``rows`` random rows and compare their counts; costs what encoding them costs.

    Compared are the numbers that the head of this module lists. A row that was counted but that
    the processor refuses, or the other way round, is a difference too.
    """
    family = family_of(processor)
    ends = list(accumulate(len(counted.sidecar) for counted in files))
    total = ends[-1] if ends else 0
    failed, not_encoded = [], []
    drawn = sorted(random.Random(seed).sample(range(total), min(rows, total)))
    for place in drawn:
        which = bisect.bisect_right(ends, place)
        counted, row = files[which], place - (ends[which - 1] if which else 0)
        key = row_key(counted.config.name, row)
        predicted = counted.sidecar.row(row)
        real = _real_counts(counted, row, family, processor)
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


def _real_counts(
    counted: CountedFile, row: int, family: Family, processor: Any
) -> dict[str, int] | BadSample:
    config, key = counted.config, row_key(counted.config.name, row)
    try:
        example = convert_row(
            counted.file[row], config.rules, key=key, dataset=config.name, record=Ledger().record
        )
        conversation = parse_conversation(example, key)
        encoded = family.encode(conversation, processor)
        labels = family.labels(processor, encoded)
    except BadSample as error:
        return error
    except CannotAlign as error:
        return BadSample(str(error), key=key, stage="encode")
    ids = encoded.tokens["input_ids"].tolist()
    content = family.media_token_ids(processor)
    media = sum(token in content for token in ids)
    real = {"total": len(ids), "text": len(ids) - media, "media": media}
    real |= _by_kind(family, processor, conversation, ids, media)
    return real | {"supervised": int((labels != IGNORE_INDEX).sum())}


def _by_kind(
    family: Family, processor: Any, conversation: Conversation, ids: Sequence[int], media: int
) -> dict[str, int]:
    """Media tokens of each kind, as far as the ids alone tell kinds apart."""
    kinds = {ref.kind for ref in conversation.media}
    if len(kinds) < 2:
        return {kind: media if kind in kinds else 0 for kind in MEDIA_KINDS}
    content, tokens = family.media_token_ids(processor), _kind_tokens(family, processor)
    # A kind without a token of its own is written with that of another.
    apart = kinds <= set(tokens) and set(tokens.values()) == content and len(tokens) == len(content)
    return {kind: ids.count(token) for kind, token in tokens.items()} if apart else {}


def _kind_tokens(family: Family, processor: Any) -> dict[MediaKind, int]:
    """The token of each kind that has one under its own name."""
    tokenizer = tokenizer_of(processor)
    owners = (processor, tokenizer)
    names = {kind: [getattr(owner, f"{kind}_token", None) for owner in owners] for kind in family.kinds}
    texts = {kind: next((name for name in found if name is not None), None) for kind, found in names.items()}
    ids = {kind: tokenizer.convert_tokens_to_ids(text) for kind, text in texts.items() if text is not None}
    return {kind: number for kind, number in ids.items() if isinstance(number, int)}
