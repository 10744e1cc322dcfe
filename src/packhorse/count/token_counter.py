"""The counter: the exact number of tokens of a conversation, without decoding media.

It counts what the processor would produce: the rendered chat template, with every media item written out from
the size in its header. If the tokenizer splits texts by a known pattern, the rendered text is cut at special
tokens and words, and the lengths of known words are looked up (0.3 ms for 240 words); otherwise it is
tokenized as a whole (over 1 ms). Both give the numbers of the processor.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, compress
from typing import Any, cast

from packhorse.chat import IGNORE_INDEX, Answer, CannotAlign, Span, compile_tokens, label_tokens
from packhorse.count.columns import COUNTS
from packhorse.errors import BadSample, naming
from packhorse.families import Encoder
from packhorse.families.encoder import processor_errors, spans_by_weight
from packhorse.families.media_sizes import AnySize, Pieces
from packhorse.types import Conversation, MediaKind, MediaRef, TokenCount

COUNTER_VERSION = 4
"""Part of every key under which counts are saved: increased when a count changes."""

_MAX_MEDIA = 1 << 14  # remembered by their sizes, about a kilobyte each

_NUMBERS = (r"\p{N}", r"\p{N}{1,3}")
_LETTERS = (r"\p{L}", r"[\p{L}\p{M}]")


def _pattern(letter: str, number: str) -> str:
    """Contractions, words with one character before them, digits, signs, line breaks, white space."""
    inside = letter.strip("[]")
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{letter}+|{number}"
        rf"| ?[^\s{inside}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


QWEN2_PATTERN = _pattern(r"\p{L}", r"\p{N}")
# Qwen2 to Qwen3, Llama 3, Qwen3.5, …
_KNOWN_PATTERNS = frozenset(_pattern(letter, number) for letter in _LETTERS for number in _NUMBERS)

_TWO_SPACES = re.compile(r"\s ")
_WORD_STARTS = re.compile(r"(?<=\S)(?= )")
_MAX_WORDS = 500_000  # under 100 MB
_MAX_WORD_LENGTH = 32


class TokenLengths:
    """Lengths of texts under one fast tokenizer, without the special tokens that it adds to a text.

    The lengths of words are remembered: the counting promise (1.5 times the speed of encoding each row) needs
    it, benchmarks/count.py measures 0.4 without. ``backend`` is the tokenizer's Rust implementation.

    Attributes:
        by_word: whether words are remembered. If so, texts must not contain special or added tokens.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.by_word = _splits_by_known_pattern(backend)
        # Words after a space (without it), and words at the beginning of a text or line.
        self._after_space: dict[str, int] = {}
        self._at_start: dict[str, int] = {}

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text, in order."""
        if not self.by_word:
            return self._encode_lengths(texts)
        if len(self._after_space) + len(self._at_start) > _MAX_WORDS:
            self._after_space.clear()
            self._at_start.clear()
        at_start, after = self._at_start, self._after_space.__getitem__
        lengths = [0] * len(texts)
        unknown: list[tuple[int, str, list[str]]] = []
        for number, text in enumerate(texts):
            if text in at_start:  # mostly what a template writes around the texts
                lengths[number] = at_start[text]
                continue
            for line in _split_lines(text):
                first, words = _split_words(line)
                try:
                    lengths[number] += at_start[first] + sum(map(after, words))
                except KeyError:
                    unknown.append((number, first, words))
        if unknown:
            others: set[str] = set().union(*(words for _, _, words in unknown))
            long_starts = self._learn({first for _, first, _ in unknown}, at_start, "")
            long_others = self._learn(others, self._after_space, " ")
            for number, first, words in unknown:
                lengths[number] += at_start[first] + sum(map(after, words))
            # A long word (a line of Chinese, an address) hardly occurs again, and would fill the memory.
            for word in long_starts:
                del at_start[word]
            for word in long_others:
                del self._after_space[word]
        return lengths

    @staticmethod
    def cut_between(left: str, right: str) -> bool:
        """Return whether a text of ``left`` and ``right`` is certainly as long as both together."""
        if not left or not right:
            return True
        if right[0] == " ":
            return not left[-1].isspace()
        return left[-1] in "\r\n" and not right[0].isspace()

    def _learn(self, words: set[str], known: dict[str, int], before: str) -> list[str]:
        """Add the lengths of words after the text ``before``; return the long words."""
        new = list(words.difference(known))
        known.update(zip(new, self._encode_lengths([before + word for word in new]), strict=True))
        return [word for word in new if len(word) > _MAX_WORD_LENGTH]

    def _encode_lengths(self, texts: Sequence[str]) -> list[int]:
        backend = self._backend
        # Set with each call of the tokenizer.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [len(encoding) for encoding in encodings]


def _split_lines(text: str) -> list[str]:
    """Split a text after line breaks that are not followed by white space."""
    cut = text.split("\n")
    lines = [cut[0]]
    for line in cut[1:]:
        if not line or line[0].isspace():
            lines[-1] += "\n" + line
        else:
            lines[-1] += "\n"
            lines.append(line)
    return lines


def _split_words(line: str) -> tuple[str, list[str]]:
    """Return the first word, and the words after a space, without that space."""
    # In printable text, the only white space is " ": faster than the pattern.
    if "  " in line or (not line.rstrip("\n").isprintable() and _TWO_SPACES.search(line)):
        first, *words = _WORD_STARTS.split(line)
        return first, [word[1:] for word in words]
    first, *words = line.split(" ")
    return first, words


def _splits_by_known_pattern(backend: Any) -> bool:
    """Return whether the tokenizer splits texts by a known pattern, and nothing in it joins across splits."""
    settings = json.loads(backend.to_str())
    first, *others = (settings.get("pre_tokenizer") or {}).get("pretokenizers") or [{}]
    return (
        (settings.get("normalizer") or {"type": "NFC"})["type"] == "NFC"
        and first.get("type") == "Split"
        and first.get("pattern", {}).get("Regex") in _KNOWN_PATTERNS
        and first.get("behavior") == "Isolated"
        and not first.get("invert")
        and [(step.get("type"), step.get("use_regex"), step.get("add_prefix_space")) for step in others]
        == [("ByteLevel", False, False)]
        and settings["model"].get("type") == "BPE"
        and not settings["model"].get("dropout")
        and not any(
            token["lstrip"] or token["rstrip"] or token["single_word"] or token["normalized"]
            for token in settings["added_tokens"]
        )
    )


@dataclass(frozen=True, slots=True)
class MediaItemCount:
    """One media item: its kind, size, content tokens and patches."""

    kind: MediaKind
    size: AnySize
    tokens: int
    patches: int


@dataclass(frozen=True, slots=True)
class Counted:
    """A conversation's count and its media, in the order of the text.

    ``weight`` is the sum of the loss weights of its supervised tokens; None if all are 1.
    """

    count: TokenCount
    media: tuple[MediaItemCount, ...] = ()
    weight: float | None = None


@dataclass(slots=True)
class _SplitText:
    """A rendered text as pieces that can be counted separately, and the number of tokens between them."""

    pieces: list[str] = field(default_factory=list)
    supervised: list[bool] = field(default_factory=list)
    fixed: int = 0
    fixed_supervised: int = 0
    media: tuple[MediaItemCount, ...] = ()
    factor: float = 1.0  # loss weight of the supervised tokens
    _piece: str = ""
    _is_supervised: bool = False

    def add_tokens(self, number: int, supervised: bool) -> None:
        """Add tokens that the tokenizer never joins with a neighbour."""
        self.fixed += number
        self.fixed_supervised += number if supervised else 0
        self.end_piece()

    def add_text(self, text: str, supervised: bool) -> bool:
        """Add text; return False if supervision changes where it cannot be split."""
        if self._piece and supervised != self._is_supervised:
            if not TokenLengths.cut_between(self._piece, text):
                return False
            self.end_piece()
        self._piece, self._is_supervised = self._piece + text, supervised
        return True

    def end_piece(self) -> None:
        """Begin a new piece."""
        if self._piece:
            self.pieces.append(self._piece)
            self.supervised.append(self._is_supervised)
            self._piece = ""


Written = list[str | int]
"""Texts, and numbers of special tokens between them."""


class TokenCounter:
    """Counts conversations for the processor that will encode them."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder, self.family = encoder, encoder.family
        self._media_of_sizes: dict[Any, tuple[tuple[MediaItemCount, ...], list[Written]]] = {}
        self._media_held = 0

    # Created when the first conversation is counted: opening counted data needs only the settings.

    @cached_property
    def _lengths(self) -> TokenLengths | None:
        """Word lengths; None if texts have to be tokenized as a whole."""
        tokenizer = self.encoder.tokenizer
        if not getattr(tokenizer, "is_fast", False) or not hasattr(tokenizer, "backend_tokenizer"):
            return None
        lengths = TokenLengths(tokenizer.backend_tokenizer)
        return lengths if lengths.by_word else None

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return compile_tokens(self.encoder.special_tokens)

    @cached_property
    def _special_or_placeholder(self) -> re.Pattern[str]:
        return compile_tokens({*self.encoder.special_tokens, *self.encoder.placeholders.values()})

    @cached_property
    def _added_tokens(self) -> int:
        return int(self.encoder.tokenizer.num_special_tokens_to_add(pair=False))

    def count(self, conversation: Conversation) -> Counted:
        """Count one conversation.

        Raises:
            BadSample: it cannot be encoded: a media item is missing or broken, text and media do not match,
                the template or the processor rejects it.
        """
        (result,) = self.count_many([conversation])
        if isinstance(result, BadSample):
            raise result
        return result

    def count_many(self, conversations: Sequence[Conversation]) -> list[Counted | BadSample]:
        """Count conversations; return the error of one that cannot be counted in its place.

        Much faster than one by one: pass some hundreds at a time.
        """
        results: list[Counted | BadSample | None] = [None] * len(conversations)
        split: list[tuple[int, _SplitText]] = []
        for index, conversation in enumerate(conversations):
            try:
                prepared = self._prepare(conversation)
            except BadSample as error:
                results[index] = error if error.key else error.with_key(conversation.key)
                continue
            if isinstance(prepared, _SplitText):
                split.append((index, prepared))
            else:
                results[index] = prepared
        if split:
            assert self._lengths is not None
            lengths = self._lengths.lengths([piece for _, text in split for piece in text.pieces])
            ends = accumulate(len(text.pieces) for _, text in split)
            for (index, text), end in zip(split, ends, strict=True):
                own = lengths[end - len(text.pieces) : end]
                supervised = text.fixed_supervised + sum(compress(own, text.supervised))
                weight = supervised * text.factor
                results[index] = self._result(sum(own) + text.fixed, supervised, weight, text.media)
        return cast("list[Counted | BadSample]", results)

    def count_documents(self, rows: Sequence[Sequence[Conversation]]) -> list[Counted | BadSample]:
        """Count rows of one document, or of the two of a pair, of which the second is the rejected one."""
        counts = iter(self.count_many([conversation for row in rows for conversation in row]))
        return [_add_documents([next(counts) for _ in row]) for row in rows]

    def settings(self) -> dict[str, Any]:
        """Return everything but the conversation that determines a count, for the key of saved counts."""
        return {"counter": COUNTER_VERSION, **self.encoder.settings}

    def _prepare(self, conversation: Conversation) -> _SplitText | Counted:
        """Render a conversation; split the text if possible, else count its tokens."""
        encoder, family = self.encoder, self.family
        family.check(conversation)
        text = encoder.render_conversation(conversation)
        encoder.check_placeholders(text, conversation)
        media, written = self._media(conversation.media, conversation.key)
        try:
            answers = encoder.answers(conversation, text)
            factors, split = {weight for _, weight in answers}, None
            if len(factors) < 2:
                spans = [(answer.start, answer.end) for answer, _ in answers]
                split = self._split(conversation, text, spans, written)
            if split is None:
                return self._tokenize(conversation, text, answers, media)
        except CannotAlign as error:
            raise BadSample(str(error), key=conversation.key, stage="encode") from error
        split.media, split.factor = media, max(factors, default=1.0)
        return split

    def _split(
        self, conversation: Conversation, text: str, spans: Sequence[Span], written: Sequence[Written]
    ) -> _SplitText | None:
        """Split a rendered text at special tokens, media and the edges of supervised spans.

        None if that is uncertain: a message or a field next to its content may contain a special token, or
        supervision changes within a word.
        """
        encoder, pattern = self.encoder, self._special_or_placeholder
        if self._lengths is None or any(m.extras or pattern.search(m.text) for m in conversation.messages):
            return None
        if conversation.tools:
            return None
        placeholders = encoder.placeholders
        waiting: dict[str, list[Written]] = {}  # by placeholder: the first one is the first item of its kind
        for ref, parts in zip(conversation.media, written, strict=True):
            if ref.kind not in placeholders:
                return None
            waiting.setdefault(placeholders[ref.kind], []).append(parts)
        edges = [edge for span in spans for edge in span]
        if edges != sorted(edges):
            return None
        edges.append(len(text) + 1)
        result, position, passed = _SplitText(), 0, 0  # edges passed: inside a span if it is odd
        for match in (*pattern.finditer(text), None):
            start, stop = match.span() if match else (len(text), len(text))
            while edges[passed] <= position:
                passed += 1
            while position < start:
                end = min(start, edges[passed])
                if not result.add_text(text[position:end], passed % 2 == 1):
                    return None
                position = end
                while edges[passed] <= position:
                    passed += 1
            if match is None:
                break
            if edges[passed] < stop:  # supervision changes within a token
                return None
            supervised = passed % 2 == 1
            if match[0] not in waiting:
                result.add_tokens(1, supervised)
            elif supervised or not waiting[match[0]]:
                return None
            else:
                for part in waiting[match[0]].pop(0):
                    if isinstance(part, int):
                        result.add_tokens(part, False)
                    elif not result.add_text(part, False):
                        return None
            position = stop
        if any(waiting.values()):
            return None
        result.end_piece()
        if encoder.text_options(text).get("add_special_tokens", True):
            result.fixed += self._added_tokens
        return result

    def _tokenize(
        self,
        conversation: Conversation,
        text: str,
        answers: Sequence[tuple[Answer, float]],
        media: tuple[MediaItemCount, ...],
    ) -> Counted:
        """Tokenize and label a rendered text as encoding does, without repeated media tokens."""
        encoder, content = self.encoder, self.encoder.media_token_ids
        outline, omitted = encoder.outline(text, [(item.kind, item.size) for item in media], conversation.key)
        ids = encoder.tokenize(outline, rendered=text)
        supervised, total = 0, 0.0
        for factor, spans in spans_by_weight(answers):
            labels = label_tokens(encoder, text, spans, ids, content)
            number = sum(label != IGNORE_INDEX for label in labels)
            supervised, total = supervised + number, total + factor * number
        number = sum(token in content for token in ids) + omitted
        expected = sum(item.tokens for item in media)
        if self.family.exact and number != expected:
            raise self.family.bad(f"{number} media tokens, but its media need {expected}", conversation)
        return self._result(len(ids) + omitted, supervised, total, media)

    def _media(self, refs: Sequence[MediaRef], key: str) -> tuple[tuple[MediaItemCount, ...], list[Written]]:
        """Return the counts of a sample's media and what is written for each, from the sizes in headers."""
        if not refs:
            return (), []
        encoder = self.encoder
        with naming(key):
            sizes = tuple((ref.kind, encoder.size_of(ref)) for ref in refs)
        if (known := self._media_of_sizes.get(sizes)) is None:
            images = sum(kind == "image" for kind, _ in sizes)
            with processor_errors(key):
                counts = tuple(
                    MediaItemCount(
                        kind,
                        size,
                        encoder.media_tokens(kind, size, images),
                        encoder.media_patches(kind, size, images),
                    )
                    for kind, size in sizes
                )
            known = counts, [self._split_pieces(pieces) for pieces in encoder.pieces_of(sizes, key)]
            # Not by the number of entries: one may hold hundreds of media, and such rows are all different.
            self._media_held += len(sizes)
            if self._media_held > _MAX_MEDIA:
                self._media_of_sizes.clear()
                self._media_held = len(sizes)
            self._media_of_sizes[sizes] = known
        return known

    def _split_pieces(self, pieces: Pieces) -> Written:
        """Split what is written for a media item at special tokens, without repeating repeated ones."""
        written: Written = []
        for text, times in pieces:
            if self._special.fullmatch(text):
                written.append(times)
                continue
            parts: Written = []
            position = 0
            for match in self._special.finditer(text):
                parts += [text[position : match.start()], 1]
                position = match.end()
            written += [*parts, text[position:]] * times
        return [part for part in written if part]

    def _result(
        self, total: int, supervised: int, weight: float, media: tuple[MediaItemCount, ...]
    ) -> Counted:
        known = None if weight == supervised else weight
        if not media:
            return Counted(TokenCount(total, supervised=supervised), weight=known)
        sums: defaultdict[str, Any] = defaultdict(int, text=total)  # by field of TokenCount
        for item in media:
            sums["text"] -= item.tokens
            sums[item.kind] += item.tokens
            sums[f"{item.kind}s"] += 1
            sums["patches"] += item.patches
        count = TokenCount(supervised=supervised, **sums)
        if not self.family.exact:
            off_by = self.family.off_by
            count = replace(count, exact=False, off_by=-1 if off_by is None else off_by)
        return Counted(count, media, known)


def _add_documents(documents: Sequence[Counted | BadSample]) -> Counted | BadSample:
    """Return the count of a row from those of its documents; the first error if one has none."""
    counted = [document for document in documents if isinstance(document, Counted)]
    if len(counted) < len(documents):
        return next(document for document in documents if isinstance(document, BadSample))
    first, *others = counted
    if not others:
        return first
    counts = [document.count for document in counted]
    sums: dict[str, Any] = {
        name: sum(getattr(count, name) for count in counts) for name in (*COUNTS, "off_by")
    }
    if any(count.off_by < 0 for count in counts):
        sums["off_by"] = -1
    exact = all(count.exact for count in counts)
    media = tuple(item for document in counted for item in document.media)
    return Counted(TokenCount(**sums, exact=exact, rejected=counts[1].total), media)
