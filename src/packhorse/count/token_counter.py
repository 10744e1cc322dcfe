"""The counter: how many tokens a conversation has, exactly, without decoding a pixel.

What is counted is what the processor would make: the rendered chat template with every media item written out
from its header's size alone. Most conversations go the short way (see :mod:`packhorse.count.programs`: no
template is run, no known word encoded); the others are rendered and tokenised whole. Both give the same
numbers, and those of the processor.

Costs: about 30 microseconds for a conversation of 200 words on the short way, a millisecond on the long one,
and the reading of each media item's header.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, cast

from packhorse.chat import IGNORE_INDEX, CannotAlign, label_tokens, special_tokens, template_errors
from packhorse.count.programs import (
    Assembled,
    SpecialTokens,
    Step,
    assemble,
    compile_program,
    find_frame,
    sentinel,
)
from packhorse.errors import BadSample, ConfigError, naming
from packhorse.families import Encoder, MediaSize
from packhorse.families.encoder import processor_errors
from packhorse.families.media_sizes import Pieces
from packhorse.types import Conversation, MediaKind, MediaRef, Message, TextPart, TokenCount

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

_BLANK_BEFORE_SPACE = re.compile(r"\s ")
_WORD_STARTS = re.compile(r"(?<=\S)(?= )")
_MOST_WORDS = 500_000  # under 100 MB
_LONGEST_WORD = 32


class TokenLengths:
    """Lengths of texts under one fast tokenizer, without what it puts around a text.

    Attributes:
        by_word: whether words are remembered. If so, texts must not hold special or added tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._encoder = tokenizer._tokenizer
        self.by_word = _cuts_as_shown(self._encoder)
        # Words after a space (without it), and words at the beginning of a text or line.
        self._after_space: dict[str, int] = {}
        self._at_start: dict[str, int] = {}

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """The number of tokens of each text, in order."""
        if not self.by_word:
            return self._encoded_lengths(texts)
        if len(self._after_space) + len(self._at_start) > _MOST_WORDS:
            self._after_space.clear()
            self._at_start.clear()
        at_start, after = self._at_start, self._after_space.__getitem__
        lengths = [0] * len(texts)
        unknown: list[tuple[int, str, list[str]]] = []
        for number, text in enumerate(texts):
            for line in _lines(text):
                first, words = _words(line)
                try:
                    lengths[number] += at_start[first] + sum(map(after, words))
                except KeyError:
                    unknown.append((number, first, words))
        if unknown:
            starts, others = self._learn(unknown)
            for number, first, words in unknown:
                lengths[number] += starts[first] + sum(map(others.__getitem__, words))
        return lengths

    @staticmethod
    def cut_between(left: str, right: str) -> bool:
        """Whether a text with ``left`` before ``right`` is as long as both together, for certain."""
        if not left or not right:
            return True
        if right[0] == " ":
            return not left[-1].isspace()
        return left[-1] in "\r\n" and not right[0].isspace()

    def _learn(self, lines: Iterable[tuple[int, str, list[str]]]) -> tuple[dict[str, int], dict[str, int]]:
        """The lengths of all words of some lines, at the start and after a space; short ones are kept."""
        starts: set[str] = set()
        others: set[str] = set()
        for _, first, words in lines:
            starts.add(first)
            others.update(words)
        return self._looked_up(starts, self._at_start, ""), self._looked_up(others, self._after_space, " ")

    def _looked_up(self, words: set[str], known: dict[str, int], before: str) -> dict[str, int]:
        new = [word for word in words if word not in known]
        lengths = dict(zip(new, self._encoded_lengths([before + word for word in new]), strict=True))
        # What is long (a line of Chinese, an address) hardly comes again, and would fill the memory.
        known.update((word, length) for word, length in lengths.items() if len(word) <= _LONGEST_WORD)
        return {word: known[word] if word in known else lengths[word] for word in words}

    def _encoded_lengths(self, texts: Sequence[str]) -> list[int]:
        return [
            len(encoding)
            for encoding in plain_encoder(self._encoder).encode_batch_fast(
                list(texts), add_special_tokens=False
            )
        ]


def plain_encoder(encoder: Any) -> Any:
    """A tokenizer's engine, set to neither cut nor pad, as it is set anew at each call of the tokenizer."""
    encoder.no_truncation()
    encoder.no_padding()
    encoder.encode_special_tokens = False
    return encoder


def _lines(text: str) -> list[str]:
    """A text cut after line breaks that something else than white space follows."""
    if "\n" not in text:
        return [text]
    cut = text.split("\n")
    lines = [cut[0]]
    for line in cut[1:]:
        if not line or line[0].isspace():
            lines[-1] += "\n" + line
        else:
            lines[-1] += "\n"
            lines.append(line)
    return lines


def _words(line: str) -> tuple[str, list[str]]:
    """The first word, and the words after a space, without that space."""
    if _BLANK_BEFORE_SPACE.search(line):
        words = _WORD_STARTS.split(line)
        first = words.pop(0)
        return first, [word[1:] for word in words]
    words = line.split(" ")
    return words.pop(0), words


def _cuts_as_shown(encoder: Any) -> bool:
    """Whether the tokenizer cuts texts by a known pattern, and nothing else in it joins across the cuts."""
    made = json.loads(encoder.to_str())
    cutting = made.get("pre_tokenizer") or {}
    first, *more = cutting.get("pretokenizers") or [{}]
    return (
        (made.get("normalizer") or {"type": "NFC"})["type"] == "NFC"
        and first.get("type") == "Split"
        and first.get("pattern", {}).get("Regex") in _KNOWN_PATTERNS
        and first.get("behavior") == "Isolated"
        and not first.get("invert")
        and [(one.get("type"), one.get("use_regex"), one.get("add_prefix_space")) for one in more]
        == [("ByteLevel", False, False)]
        and made["model"].get("type") == "BPE"
        and not made["model"].get("dropout")
        and not any(
            token["lstrip"] or token["rstrip"] or token["single_word"] or token["normalized"]
            for token in made["added_tokens"]
        )
    )


COUNTER_VERSION = 3
"""Part of every key under which counts are kept: raised when a count changes."""

_MOST_SHAPES = 4096
_MOST_MEDIA = 1 << 14  # remembered by their sizes, about a kilobyte each


@dataclass(frozen=True, slots=True)
class MediaItemCount:
    """One media item: what it is, how large, its content tokens and its patches."""

    kind: MediaKind
    size: MediaSize
    tokens: int
    patches: int


@dataclass(frozen=True, slots=True)
class Counted:
    """A conversation's count and its media, in the order of the text."""

    count: TokenCount
    media: tuple[MediaItemCount, ...] = ()


Shape = tuple[tuple[str, tuple[str, ...]], ...]
Written = list[str | int]
"""Plain pieces of text, and numbers of special tokens between them."""


class TokenCounter:
    """Counts conversations for one processor.

    Args:
        encoder: the processor that will encode them.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder, self.family = encoder, encoder.family
        self._special = SpecialTokens(encoder.special_tokens)
        written = encoder.placeholders.values()
        self._typed = SpecialTokens(encoder.special_tokens | dict.fromkeys(written, -1))
        tokenizer = encoder.tokenizer
        fast = getattr(tokenizer, "is_fast", False) and hasattr(tokenizer, "_tokenizer")
        self._lengths = TokenLengths(tokenizer) if fast else None
        self._programs: dict[Shape, tuple[list[Step], bool] | None] = {}
        self._seen: set[Shape] = set()
        self._media_of_sizes: dict[Any, tuple[tuple[MediaItemCount, ...], list[Written]]] = {}
        self._media_held = 0

    def count(self, conversation: Conversation) -> Counted:
        """Count one conversation.

        Raises:
            BadSample: it cannot be encoded: a media item is missing or broken, text and media do not agree,
                the template or the processor refuses it.
        """
        (result,) = self.count_many([conversation])
        if isinstance(result, BadSample):
            raise result
        return result

    def count_many(self, conversations: Sequence[Conversation]) -> list[Counted | BadSample]:
        """Count conversations; one that cannot be counted comes as its error, in its place.

        Much quicker than one by one: hand over some hundreds at a time.
        """
        results: list[Counted | BadSample | None] = [None] * len(conversations)
        short: list[tuple[int, Assembled, tuple[MediaItemCount, ...]]] = []
        for place, conversation in enumerate(conversations):
            made = self._prepared(conversation)
            if isinstance(made, tuple):
                short.append((place, *made))
            else:
                results[place] = made
        if short:
            assert self._lengths is not None
            lengths = self._lengths.lengths([piece for _, one, _ in short for piece in one.pieces])
            ends = list(accumulate(len(one.pieces) for _, one, _ in short))
            for (place, one, media), end in zip(short, ends, strict=True):
                mine = lengths[end - len(one.pieces) : end]
                supervised = sum(n for n, yes in zip(mine, one.supervised, strict=True) if yes)
                results[place] = self._result(sum(mine) + one.fixed, supervised + one.fixed_supervised, media)
        return cast("list[Counted | BadSample]", results)

    def _prepared(
        self, conversation: Conversation
    ) -> tuple[Assembled, tuple[MediaItemCount, ...]] | Counted | BadSample:
        """What is to be counted on the short way, or the result of the long one."""
        try:
            return self._assembled(conversation) or self._count_whole(conversation)
        except BadSample as error:
            return error if error.key else error.with_key(conversation.key)

    def settings(self) -> dict[str, Any]:
        """All that decides a count beside the conversation, for the key under which counts are kept."""
        described = _without_places(_description(self.encoder.processor))
        return {
            "counter": COUNTER_VERSION,
            "family": self.family.name,
            "processor": json.loads(json.dumps(described, sort_keys=True, default=str)),
            "tokenizer": _digest_of(self.encoder.tokenizer),
            "template": self.encoder.chat_template,
        }

    # --- the short way -----------------------------------------------------------------------------------

    def _assembled(self, conversation: Conversation) -> tuple[Assembled, tuple[MediaItemCount, ...]] | None:
        if self._lengths is None or not self._lengths.by_word:
            return None
        self.family.check(conversation)
        texts: list[str] = []
        refs: list[MediaRef] = []
        shape = []
        for message in conversation.messages:
            parts = []
            for part in message.parts:
                if isinstance(part, TextPart):
                    texts.append(part.text)
                    parts.append("text" if part.text else "")
                else:
                    refs.append(part)
                    parts.append(part.kind)
            # What stands beside the content may be written anywhere; what looks like a special token may be
            # spread over several parts.
            if message.extras or message.text in self._typed:
                return None
            shape.append((message.role, tuple(parts)))
        program = self._program(tuple(shape), conversation)
        if program is None:
            return None
        steps, adds_special = program
        media, written = self._media(refs, conversation.key) if refs else ((), ())
        made = assemble(steps, texts, written, self._lengths.cut_between)
        if made is None:
            return None
        if adds_special:
            made.fixed += self.encoder.tokenizer.num_special_tokens_to_add(pair=False)
        return made, media

    def _program(self, shape: Shape, conversation: Conversation) -> tuple[list[Step], bool] | None:
        if shape not in self._seen:
            # Working a program out costs more than the long way: it must come again to be worth it.
            if len(self._seen) >= _MOST_SHAPES:
                self._seen.clear()
                self._programs.clear()
            self._seen.add(shape)
            return None
        if shape not in self._programs:
            self._programs[shape] = self._compiled(conversation)
        return self._programs[shape]

    def _compiled(self, conversation: Conversation) -> tuple[list[Step], bool] | None:
        encoder = self.encoder
        masked, count = _with_stand_ins(conversation)
        turns = self.family.turns(masked)
        try:
            frame = find_frame(encoder, turns, count)
            if frame is None:
                return None
            encoder.check_placeholders(frame.text, masked)
            spans = self.family.answer_spans(encoder, turns, frame.text)
        except template_errors(BadSample, CannotAlign):
            return None  # the long way says what is wrong with it
        known = encoder.placeholders
        if any(ref.kind not in known for ref in conversation.media):
            return None
        placeholders = [known[ref.kind] for ref in conversation.media]
        steps = compile_program(frame, spans, placeholders, self._special)
        adds_special = encoder.text_options(frame.text).get("add_special_tokens", True)
        return None if steps is None else (steps, bool(adds_special))

    # --- the long way ------------------------------------------------------------------------------------

    def _count_whole(self, conversation: Conversation) -> Counted:
        """Render, expand placeholders, tokenize and label as encoding does, without decoding media."""
        encoder, family = self.encoder, self.family
        family.check(conversation)
        text = encoder.render_conversation(conversation)
        encoder.check_placeholders(text, conversation)
        media, _ = self._media(conversation.media, conversation.key)
        sizes = [(media_item.kind, media_item.size) for media_item in media]
        outline, omitted = encoder.outline(text, sizes, conversation.key)
        ids = encoder.tokenize(outline, rendered=text)
        content = encoder.media_token_ids
        try:
            spans = family.answer_spans(encoder, family.turns(conversation), text)
            labels = label_tokens(encoder, text, spans, ids, content)
        except CannotAlign as error:
            raise BadSample(str(error), key=conversation.key, stage="encode") from error
        supervised = sum(label != IGNORE_INDEX for label in labels)
        found = sum(token in content for token in ids) + omitted
        expected = sum(media_item.tokens for media_item in media)
        if family.exact and found != expected:
            raise family.bad(f"{found} media tokens where its media need {expected}", conversation)
        return self._result(len(ids) + omitted, supervised, media)

    # --- both --------------------------------------------------------------------------------------------

    def _media(self, refs: Sequence[MediaRef], key: str) -> tuple[tuple[MediaItemCount, ...], list[Written]]:
        """The counts of a sample's media and what is written for each, from the sizes in their headers."""
        encoder = self.encoder
        with naming(key):
            sizes = tuple((ref.kind, encoder.size_of(ref)) for ref in refs)
        known = self._media_of_sizes.get(sizes)
        if known is None:
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
            known = counts, [self._cut(one) for one in encoder.pieces_of(sizes, key)]
            # Not by the number of entries: one may hold hundreds of media, and such rows are all different.
            self._media_held += len(sizes)
            if self._media_held > _MOST_MEDIA:
                self._media_of_sizes.clear()
                self._media_held = len(sizes)
            self._media_of_sizes[sizes] = known
        return known

    def _cut(self, pieces: Pieces) -> Written:
        """What is written for a media item, cut at special tokens; repeated ones need not be written out."""
        written: list[str | int] = []
        for text, times in pieces:
            cut = self._special.cut(text)
            written += [cut[0] * times] if len(cut) == 1 and isinstance(cut[0], int) else cut * times
        return written

    def _result(self, total: int, supervised: int, media: tuple[MediaItemCount, ...]) -> Counted:
        if not media:
            return Counted(TokenCount(total, supervised=supervised))
        tokens: dict[MediaKind, int] = {"image": 0, "video": 0, "audio": 0}
        number = dict(tokens)
        for media_item in media:
            tokens[media_item.kind] += media_item.tokens
            number[media_item.kind] += 1
        count = TokenCount(
            text=total - sum(tokens.values()),
            image=tokens["image"],
            video=tokens["video"],
            audio=tokens["audio"],
            supervised=supervised,
            images=number["image"],
            videos=number["video"],
            audios=number["audio"],
            patches=sum(media_item.patches for media_item in media),
        )
        if not self.family.exact:
            count = replace(
                count, exact=False, off_by=-1 if self.family.off_by is None else self.family.off_by
            )
        return Counted(count, media)


def _with_stand_ins(conversation: Conversation) -> tuple[Conversation, int]:
    """The conversation with a stand-in for each text that is not empty; how many texts there are."""
    number = 0
    messages = []
    for message in conversation.messages:
        parts: list[Any] = []
        for part in message.parts:
            if isinstance(part, TextPart):
                parts.append(TextPart(sentinel(number) if part.text else ""))
                number += 1
            else:
                parts.append(part)
        messages.append(Message(message.role, tuple(parts)))
    return Conversation(tuple(messages), conversation.key), number


def _digest_of(tokenizer: Any) -> str:
    engine = getattr(tokenizer, "_tokenizer", None)
    if engine is not None and hasattr(engine, "to_str"):
        made = json.loads(engine.to_str())
        made["padding"] = made["truncation"] = None  # as the last call of the tokenizer left them
        content = json.dumps(made, sort_keys=True)
    else:
        content = json.dumps([tokenizer.get_vocab(), special_tokens(tokenizer)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _description(processor: Any) -> dict[str, Any]:
    """What a processor says of itself, or what its parts say of themselves.

    Raises:
        ConfigError: nothing is said.
    """
    if hasattr(processor, "to_dict"):
        described: dict[str, Any] = processor.to_dict()
        return described
    names = ("image_processor", "video_processor", "audio_processor", "feature_extractor")
    parts = {name: getattr(processor, name, None) for name in names}
    found = {
        name: part.to_dict() if hasattr(part, "to_dict") else vars(part)
        for name, part in parts.items()
        if part is not None and (hasattr(part, "to_dict") or hasattr(part, "__dict__"))
    }
    if not found and any(part is not None for part in parts.values()):
        raise ConfigError(
            f"{type(processor).__name__} does not tell its settings (no to_dict), so counts cannot be kept"
        )
    return found


def _without_places(value: Any) -> Any:
    """Settings without where they came from: the same processor in another folder counts the same."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k not in ("_name_or_path", "name_or_path", "tokenizer")}
        return {name: _without_places(inner) for name, inner in kept.items()}
    if isinstance(value, list | tuple):
        return [_without_places(inner) for inner in value]
    return value
