"""Parse an example dict (the documented format) into a :class:`~packhorse.types.Conversation`.

This is the only place that looks inside ``content``. Examples are never changed. A structure that is not the
documented one raises :class:`~packhorse.errors.BadSample`, naming the turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from packhorse.errors import BadSample, limit_of
from packhorse.types import (
    MEDIA_KINDS,
    Conversation,
    DocumentRole,
    MediaRef,
    Message,
    Part,
    TextPart,
    is_weight,
)

MAX_TEXT_CHARS = 8 << 20
"""The most characters of text in a conversation, about two million tokens of English. A tokenizer takes about
a second for each million, and minutes for a row that was joined from a whole file by mistake."""

TURN_WEIGHTS = ("weight", "loss", "train")
"""Fields of an answer that say how much, or whether, it is trained: numbers of 0 or more, or booleans."""

_READ = ("role", "content", *TURN_WEIGHTS)

OWN_TEMPLATE_KWARGS = frozenset(
    {"tools", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict", "return_tensors"}
    | {"chat_template", "padding", "truncation", "max_length", "return_assistant_tokens_mask"}
)
"""Options of ``apply_chat_template`` that are no options of a template."""

ROW_SETTINGS = ("tools", "weight", "chat_template_kwargs")
"""Fields of an example that hold for the whole conversation, and that its row may have too."""
EXAMPLE_SETTINGS = ("reasoning",)
"""Fields of an example that hold for the whole conversation, and come from the settings of its dataset."""
PASSED_ON = ("mm_inputs_meta", "_text_tokens", "_injected_fake")
"""Fields of a row that its example has too, unchanged."""

# What datasets type in place of audio: Phi-4's own token, and what users write for it.
_AUDIO_PLACEHOLDERS = ("<|endoftext11|>", "<|audio|>", "<|audio_1|>")


def parse_conversation(example: Mapping[str, Any], key: str = "") -> Conversation:
    """Read ``example["conversation"]`` into types.

    >>> parse_conversation({"conversation": [{"role": "user", "content": "Hi"}]}).messages[0].text
    'Hi'

    Raises:
        BadSample: it is not in the documented format, or preference data: see :func:`split_documents`.
    """
    if has_preference(example):
        raise preference_data(["rejected" if example.get("rejected") is not None else "label"], key)
    turns = example.get("conversation")
    if not isinstance(turns, list | tuple):
        raise _wrong(f"'conversation' is {_kind(turns)}, expected a list of turns", key)
    messages = tuple(_message(turn, number, key) for number, turn in enumerate(turns))
    check_text(sum(len(p.text) for m in messages for p in m.parts if isinstance(p, TextPart)), key)
    names = (*ROW_SETTINGS, *EXAMPLE_SETTINGS)
    settings: dict[str, Any] = {name: example[name] for name in names if example.get(name) is not None}
    if not settings:
        return Conversation(messages, key)
    if not isinstance(tools := settings.get("tools", ()), list | tuple):
        raise _wrong(f"'tools' is {_kind(tools)}, expected a list of functions", key)
    if "weight" in settings:
        settings["weight"] = _weight("weight", settings["weight"], "", key)
    if not isinstance(options := settings.get("chat_template_kwargs", {}), Mapping):
        raise _wrong(f"'chat_template_kwargs' is {_kind(options)}, expected a dict of options", key)
    if (reasoning := settings.get("reasoning", "keep")) not in ("keep", "mask"):
        raise _wrong(f"reasoning is {reasoning!r:.40}, expected keep or mask", key)
    if own := sorted(OWN_TEMPLATE_KWARGS.intersection(options)):
        raise _wrong(f"chat_template_kwargs has {', '.join(own)}, which Packhorse sets itself", key)
    return Conversation(messages, key, **{**settings, "tools": tuple(tools)})


def has_preference(example: Mapping[str, Any]) -> bool:
    """Return whether an example has a rejected answer too, or says whether its answer is good."""
    return example.get("rejected") is not None or isinstance(example.get("label"), bool)


def preference_data(fields: Iterable[str], key: str) -> BadSample:
    """Return the error for preference data in a run on plain answers."""
    return BadSample(
        f"preference data ({', '.join(fields)}) cannot be trained as plain answers. For DPO, KTO or a reward "
        'model write packhorse.load(…, task="preference"), or --task preference; to train on good answers '
        "alone, remove these columns and keep the answers as 'messages' or 'response'",
        reason="preference_data",
        key=key,
        stage="convert",
    )


def split_documents(example: Mapping[str, Any]) -> dict[DocumentRole, Mapping[str, Any]]:
    """Return the plain examples of an example by their role: two for a pair, else one.

    >>> list(split_documents({"conversation": [], "rejected": []}))
    ['chosen', 'rejected']
    """
    rejected, label = example.get("rejected"), example.get("label")
    if not has_preference(example):
        return {"": example}
    plain = {name: value for name, value in example.items() if name not in ("rejected", "label")}
    if rejected is not None:
        return {"chosen": plain, "rejected": {**plain, "conversation": rejected}}
    return {"good" if label else "bad": plain}


def parse_documents(example: Mapping[str, Any], key: str = "") -> tuple[Conversation, ...]:
    """Read the conversations of an example: those of both answers of a pair, else one."""
    return tuple(parse_conversation(plain, key) for plain in split_documents(example).values())


def check_text(chars: int, key: str = "") -> None:
    """Raise ``row_too_large`` if a conversation has more than ``PACKHORSE_MAX_TEXT_CHARS``."""
    most = limit_of("PACKHORSE_MAX_TEXT_CHARS", MAX_TEXT_CHARS)
    if chars > most:
        raise BadSample(
            f"the row has {chars:,} characters of text, more than the limit of {most:,}; split it, or raise "
            "PACKHORSE_MAX_TEXT_CHARS",
            reason="row_too_large",
            key=key,
            stage="convert",
        )


def replace_media(
    example: Mapping[str, Any], load: Callable[[MediaRef], Mapping[str, Any]]
) -> dict[str, Any]:
    """A copy of ``example`` in which each media item's part is updated with what ``load(ref)`` returns.

    The whole example is parsed before the first media item is loaded. Only dicts and lists on the way to a
    media item are copied; the caller's example stays as it was.
    """
    turns = []
    messages = parse_conversation(example).messages
    for turn, message in zip(example["conversation"], messages, strict=True):
        content = turn["content"]
        if not isinstance(content, str):
            content = [
                {**part, **load(parsed)} if isinstance(parsed, MediaRef) else part
                for part, parsed in zip(content, message.parts, strict=True)
            ]
        turns.append({**turn, "content": content})
    return {**example, "conversation": turns}


def prepend_part(example: Mapping[str, Any], turn: int, part: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``example`` with ``part`` at the front of turn number ``turn``.

    Where the turn's content is a text, that becomes a part after it. The caller's example stays as it was.

    >>> example = {"conversation": [{"role": "user", "content": "Hi"}]}
    >>> prepend_part(example, 0, {"type": "text", "text": "1."})["conversation"][0]["content"]
    [{'type': 'text', 'text': '1.'}, {'type': 'text', 'text': 'Hi'}]
    """
    parse_conversation(example)
    turns = list(example["conversation"])
    content = turns[turn]["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    turns[turn] = {**turns[turn], "content": [part, *parts]}
    return {**example, "conversation": turns}


def place_audio(
    example: Mapping[str, Any], placeholders: Iterable[str] = (), key: str = ""
) -> Mapping[str, Any]:
    """Return a copy of ``example`` in which its field ``audio`` is a part of the conversation.

    :func:`packhorse.datasets.make_cv17_dataset` makes such examples: ``audio`` is a field next to
    ``conversation``, and the user's text has a placeholder for it. The part replaces the placeholder; without
    one it comes first in the first user turn.

    >>> turns = [{"role": "user", "content": "<|audio_1|>Write it down."}]
    >>> place_audio({"conversation": turns, "audio": "a.wav"})["conversation"][0]["content"]
    [{'type': 'audio', 'audio': 'a.wav'}, {'type': 'text', 'text': 'Write it down.'}]

    Args:
        example: in the documented format. One without ``audio`` comes back itself.
        placeholders: what the text may type, in addition to the common ones.
        key: of the sample, for the error.

    Raises:
        BadSample: the conversation has audio parts too, or placeholders and clips differ in number.
    """
    clips = extra_audio(example)
    if not clips:
        return example
    conversation = parse_conversation(example, key)
    if any(ref.kind == "audio" for ref in conversation.media):
        raise _mismatch("audio in the field 'audio' and in the conversation: expected one of the two", key)
    parts = [{"type": "audio", "audio": clip} for clip in clips]
    pattern = re.compile("|".join(map(re.escape, dict.fromkeys((*_AUDIO_PLACEHOLDERS, *placeholders)))))
    users = [message for message in conversation.messages if message.role == "user"]
    typed = sum(
        len(pattern.findall(part.text)) for m in users for part in m.parts if isinstance(part, TextPart)
    )
    rest = {name: value for name, value in example.items() if name != "audio"}
    if not typed and users:
        first = next(n for n, message in enumerate(conversation.messages) if message.role == "user")
        for part in reversed(parts):
            rest = prepend_part(rest, first, part)
        return rest
    if typed != len(parts):
        raise _mismatch(f"{len(parts)} audio clips for {typed} placeholders in the text", key)
    turns = [
        {**turn, "content": _place_clips(turn["content"], pattern, parts)} if turn["role"] == "user" else turn
        for turn in example["conversation"]
    ]
    return {**rest, "conversation": turns}


def extra_audio(example: Mapping[str, Any]) -> list[Any]:
    """Return the clips of the field ``audio``: one, or a list of them; an (array, rate) pair is one."""
    audio = example.get("audio")
    if audio is None:
        return []
    pair = isinstance(audio, list) and len(audio) == 2 and isinstance(audio[1], int | float)
    return audio if isinstance(audio, list) and not pair else [audio]


def _place_clips(content: Any, pattern: re.Pattern[str], clips: list[dict[str, Any]]) -> Any:
    """The content of a turn with the next of ``clips`` (which are removed) in place of each placeholder."""
    before, parts = len(clips), list[Any]()
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        texts = pattern.split(part["text"]) if part["type"] == "text" else []
        if len(texts) < 2:
            parts.append(part)
            continue
        for index, text in enumerate(texts):
            parts += [clips.pop(0)] if index else []
            parts += [{**part, "text": text}] if text else []
    return content if len(clips) == before else parts


def _message(turn: object, number: int, key: str) -> Message:
    if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
        raise _wrong(f"turn {number} is {_kind(turn)} without a 'role', expected role and content", key)
    content = turn.get("content")
    # A table of turns has every field in every turn, empty where the turn has none.
    extras = {name: value for name, value in turn.items() if name not in _READ and value is not None}
    weight = 1.0
    if turn["role"] == "assistant":
        for name in TURN_WEIGHTS:
            if turn.get(name) is not None:
                weight *= _weight(name, turn[name], f" of turn {number}", key)
    if isinstance(content, str):
        return Message(turn["role"], (TextPart(content),), extras, weight)
    if not isinstance(content, list | tuple):
        raise _wrong(
            f"the content of turn {number} is {_kind(content)}, expected text (empty where nothing is said) "
            "or a list of parts",
            key,
        )
    return Message(turn["role"], tuple(_part(part, number, key) for part in content), extras, weight)


def _part(part: Any, turn: int, key: str) -> Part:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise _wrong(f"a text part of turn {turn} holds {_kind(part.get('text'))}", key)
        return TextPart(part["text"])
    if kind in MEDIA_KINDS:
        if part.get(kind) is None:
            raise _wrong(f"an {kind} part of turn {turn} has no '{kind}' field", key)
        options = {name: value for name, value in part.items() if name not in ("type", kind)}
        return MediaRef(kind, part[kind], options)
    raise _wrong(f"turn {turn} has a part of type {kind!r}, expected text, image, video or audio", key)


def _weight(name: str, value: object, where: str, key: str) -> float:
    if not is_weight(value):
        raise _wrong(f"{name}{where} is {value!r:.40}, expected a number of 0 or more, or a boolean", key)
    return float(value)  # type: ignore[arg-type]


def _wrong(detail: str, key: str) -> BadSample:
    return BadSample(detail, reason="wrong_format", key=key, stage="convert")


def _mismatch(detail: str, key: str) -> BadSample:
    return BadSample(detail, reason="media_mismatch", key=key, stage="convert")


def _kind(value: object) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"
