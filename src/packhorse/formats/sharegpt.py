"""ShareGPT rows to the example format.

A row goes in (a dict with a list of turns and lists of media), an example comes out (``conversation`` with
typed parts). Text and paths only: no file is opened, but links are followed to confine media.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from packhorse.errors import BadSample, ConfigError, suggest
from packhorse.formats.conversation import check_text, parse_conversation
from packhorse.ledger import Ledger, default_ledger
from packhorse.media import resolve
from packhorse.types import MEDIA_KINDS, Action, Drop, MediaKind, Reason

PLACEHOLDER = re.compile(r"<(image|video|audio)>", re.IGNORECASE)
"""The placeholder of the next media item of that kind in a user's text."""

_SURPLUS = object()
_LONG_TEXT = 1 << 20  # characters; shorter texts are measured together, when the example is parsed


@dataclass(frozen=True, slots=True)
class Columns:
    """Under which names a row keeps its turns and its media."""

    messages: str = "messages"
    images: str = "images"
    videos: str = "videos"
    audios: str = "audios"


@dataclass(frozen=True, slots=True)
class Tags:
    """Under which names a turn keeps its role and text, and what the roles are called."""

    role_tag: str = "role"
    content_tag: str = "content"
    user_tag: str = "user"
    assistant_tag: str = "assistant"
    system_tag: str = "system"


@dataclass(frozen=True, slots=True)
class ShareGptFormat:
    """How one dataset writes its rows, and what to do about inconsistent rows.

    Args:
        columns: names of the row's fields.
        tags: names inside a turn.
        media_dir: prefix for relative media paths.
        strict: raise :class:`BadSample` for an inconsistent row, instead of recording it.
        confine: reject media outside ``media_dir`` (through ``..``, a symlink or an absolute path).
    """

    columns: Columns = Columns()
    tags: Tags = Tags()
    media_dir: str | None = None
    strict: bool = False
    confine: bool = False

    def __post_init__(self) -> None:
        if self.confine and self.media_dir is None:
            raise ConfigError.of("confine", True, "needs a media_dir to confine media to")

    @classmethod
    def of(
        cls,
        columns: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        media_dir: str | None = None,
        *,
        strict: bool = False,
        confine: bool = False,
    ) -> ShareGptFormat:
        """From the documented dicts; an unknown name in them is an error, not ignored."""
        return cls(
            _from_mapping(Columns, columns, "columns"),
            _from_mapping(Tags, tags, "tags"),
            media_dir,
            strict,
            confine,
        )


def convert_sharegpt_to_conversation(
    example: Mapping[str, Any],
    columns: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
    media_dir: str | None = None,
    *,
    strict: bool = False,
    confine: bool = False,
    key: str = "",
    ledger: Ledger | None = None,
) -> dict[str, Any]:
    """Turn one ShareGPT row into an example.

    >>> convert_sharegpt_to_conversation({
    ...     "messages": [{"role": "user", "content": "<image>What is it?"},
    ...                  {"role": "assistant", "content": "A cat."}],
    ...     "images": ["cat.jpg"]}, media_dir="/data")["conversation"][0]["content"]
    [{'type': 'image', 'image': '/data/cat.jpg'}, {'type': 'text', 'text': 'What is it?'}]

    Args:
        example: the row; it is not changed.
        columns: field names, keys ``messages``, ``images``, ``videos``, ``audios``.
        tags: keys ``role_tag``, ``content_tag``, ``user_tag``, ``assistant_tag``, ``system_tag``.
        media_dir: prefix for relative media paths.
        strict: raise if placeholders and media do not match, a role is unknown, the conversation is empty
            or has no assistant turn. Otherwise each such finding is recorded and the rest delivered.
        confine: reject media outside ``media_dir``.
        key: the row's name in errors and in the ledger.
        ledger: where findings are recorded; the process's own if not given.

    Raises:
        BadSample: the row is no conversation under these columns and tags; or as ``strict``/``confine`` say.
    """
    rules = ShareGptFormat.of(columns, tags, media_dir, strict=strict, confine=confine)
    findings = ledger if ledger is not None else default_ledger()
    return convert_row(example, rules, key=key, dataset="", record=findings.record)


def convert_row(
    row: Mapping[str, Any], rules: ShareGptFormat, *, key: str, dataset: str, record: Callable[[Drop], None]
) -> dict[str, Any]:
    """:func:`convert_sharegpt_to_conversation` with the format already parsed, for many rows."""
    return _Conversion(row, rules, key, dataset, record).result()


class _Conversion:
    """The conversion of one row: what is left of its media, and what was found on the way."""

    def __init__(
        self,
        row: Mapping[str, Any],
        rules: ShareGptFormat,
        key: str,
        dataset: str,
        record: Callable[[Drop], None],
    ) -> None:
        self.row, self.rules, self.key, self.dataset, self.record = row, rules, key, dataset, record
        self.has_ready_parts = False
        columns = rules.columns
        self.media: dict[str, Iterator[Any]] = {
            "image": iter(self._entries(columns.images)),
            "video": iter(self._entries(columns.videos)),
        }
        # Rows without audio keep a literal <audio> in their text, as rows for older models have it.
        if audios := self._entries(columns.audios):
            self.media["audio"] = iter(audios)

    def result(self) -> dict[str, Any]:
        turns = [self._turn(number, turn) for number, turn in enumerate(self._turns())]
        conversation = [turn for turn in turns if turn is not None]
        for kind, rest in self.media.items():
            if surplus := sum(not _is_nothing(entry) for entry in rest):
                self._report("surplus_media", f"{surplus} more {kind}(s) than user turns mention", "cut")
        if not conversation:
            self._report("empty_conversation", "the conversation has no turns", "kept")
        elif not any(turn["role"] == "assistant" for turn in conversation):
            self._report("no_assistant_turn", "no assistant turn, so no token is supervised", "kept")
        example = {"conversation": conversation}
        if self.has_ready_parts:  # ours are well formed; the row's own may not be
            parse_conversation(example, self.key)
        return example | self._passed_on()

    def _passed_on(self) -> dict[str, Any]:
        fields = {name: self.row[name] for name in ("mm_inputs_meta", "_text_tokens") if name in self.row}
        tokens, meta = fields.get("_text_tokens"), fields.get("mm_inputs_meta")
        if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int)):
            raise self._bad("wrong_format", f"_text_tokens is {tokens!r:.40}, expected a whole number")
        if meta is not None and not _is_inputs_meta(meta):
            raise self._bad(
                "wrong_format",
                f"mm_inputs_meta is {meta!r:.60}, expected images_meta and videos_meta: sizes or n_tokens",
            )
        return fields

    def _turns(self) -> list[Any]:
        name = self.rules.columns.messages
        if name not in self.row:
            raise self._bad(
                "wrong_format",
                f"no '{name}' column; the row has: {', '.join(map(str, self.row))}. "
                "Set columns={'messages': …} to the one that holds the turns",
            )
        turns = self.row[name]
        if turns is None:
            return []
        if not isinstance(turns, list):
            raise self._bad("wrong_format", f"'{name}' is a {type(turns).__name__}, expected a list of turns")
        return turns

    def _turn(self, number: int, turn: Any) -> dict[str, Any] | None:
        tags = self.rules.tags
        for tag in (tags.role_tag, tags.content_tag):
            if not isinstance(turn, Mapping) or tag not in turn:
                raise self._bad(
                    "wrong_format",
                    f"turn {number} has no '{tag}'; it is {_summary(turn)}. "
                    "Set tags={'role_tag': …, 'content_tag': …} to the names the turns use",
                )
        role, content = turn[tags.role_tag], turn[tags.content_tag]
        if isinstance(content, str) and len(content) > _LONG_TEXT:
            check_text(len(content), self.key)  # before it is searched for placeholders
        if role == tags.user_tag:
            return {"role": "user", "content": self._user_parts(number, content)}
        if role == tags.assistant_tag:
            return {"role": "assistant", "content": self._parts(number, content)}
        if role == tags.system_tag:
            return {"role": "system", "content": self._parts(number, content)}
        known = f"{tags.user_tag}, {tags.assistant_tag}, {tags.system_tag}"
        found = f"turn {number} has role {role!r}, expected {known} (tags= names the roles of a dataset)"
        self._report("unknown_role", found, "cut")
        return None

    def _user_parts(self, number: int, content: object) -> list[dict[str, Any]]:
        if not isinstance(content, str):
            return self._parts(number, content)
        parts: list[dict[str, Any]] = []
        end = 0
        surplus: Counter[str] = Counter()
        for match in PLACEHOLDER.finditer(content):
            kind = match[1].lower()
            if kind not in self.media:
                continue
            self._add_text(parts, content[end : match.start()])
            end = match.end()
            entry = next(self.media[kind], _SURPLUS)
            if entry is _SURPLUS:
                surplus[kind] += 1
            elif _is_nothing(entry):
                self._report("missing_media", f"a <{kind}> of turn {number} has an empty entry", "cut")
            else:
                parts.append(self._media_part(kind, entry))  # type: ignore[arg-type]
        self._add_text(parts, content[end:])
        for kind, times in surplus.items():
            detail = f"turn {number} has {times} more <{kind}> than the row has {kind}s"
            self._report("surplus_placeholder", detail, "cut")
        return parts or [{"type": "text", "text": ""}]

    def _parts(self, number: int, content: object) -> list[dict[str, Any]]:
        """Content that is taken as it is: text, or parts that the row has already split."""
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
            found = f"the content of turn {number} is {_summary(content)}, expected text or a list of parts"
            raise self._bad("wrong_format", found)
        self.has_ready_parts = True
        return [self._resolved_part(part) for part in content]

    def _resolved_part(self, part: Mapping[str, Any]) -> dict[str, Any]:
        kind = part.get("type")
        if kind in MEDIA_KINDS and part.get(kind) is not None:
            return {**part, kind: self._resolve(part[kind])}
        return dict(part)

    def _media_part(self, kind: MediaKind, entry: object) -> dict[str, Any]:
        if not isinstance(entry, Mapping):
            return {"type": kind, kind: self._resolve(entry)}
        # Other fields of an entry are passed on, but do not replace the part's own.
        own = ("bytes", "path", "type", *MEDIA_KINDS)
        extras = {name: value for name, value in entry.items() if name not in own}
        if entry.get("bytes") is not None:  # how Parquet files and the hub hold an image
            return {"type": kind, kind: entry["bytes"], **extras}
        if entry.get("path") is None:
            found = f"an entry for {kind} has neither 'path' nor 'bytes': it is {_summary(entry)}"
            raise self._bad("wrong_format", found)
        return {"type": kind, kind: self._resolve(entry["path"]), **extras}

    def _resolve(self, source: Any) -> Any:
        try:
            return resolve(source, self.rules.media_dir, confined=self.rules.confine)
        except BadSample as error:
            raise self._bad(error.reason, error.detail) from error

    def _entries(self, column: str) -> list[Any]:
        entries = self.row.get(column)
        if isinstance(entries, list):
            return entries
        return [] if _is_nothing(entries) else [entries]

    @staticmethod
    def _add_text(parts: list[dict[str, Any]], text: str) -> None:
        if text := text.strip():
            parts.append({"type": "text", "text": text})

    def _report(self, reason: Reason, detail: str, action: Action) -> None:
        if self.rules.strict:
            raise self._bad(reason, detail)
        self.record(Drop(self.key, "convert", reason, detail, action, self.dataset))

    def _bad(self, reason: Reason, detail: str) -> BadSample:
        return BadSample(detail, reason=reason, key=self.key, stage="convert")


def _from_mapping(cls: type[Any], given: Mapping[str, str] | None, what: str) -> Any:
    names = [field.name for field in fields(cls)]
    unknown = sorted(set(given or {}) - set(names))
    if unknown:
        hints = ", ".join(f"{name}{suggest(name, names)}" for name in unknown)
        problem = f"unknown {what}: {hints}; expected some of {', '.join(names)}"
        raise ConfigError(problem, setting=what, value=unknown)
    for name, value in (given or {}).items():
        if not isinstance(value, str):
            raise ConfigError(f"{what}[{name!r}] is {value!r}, expected a string", setting=name, value=value)
    return cls(**(given or {}))


def _is_nothing(entry: object) -> bool:
    return entry is None or (isinstance(entry, str) and not entry)


def _is_inputs_meta(meta: object) -> bool:
    if not isinstance(meta, Mapping):
        return False
    lists = [meta.get(name) or [] for name in ("images_meta", "videos_meta")]
    if not all(isinstance(one, list | tuple) for one in lists):
        return False
    entries = [entry for one in lists for entry in one]
    return all(
        entry is None
        or isinstance(entry, list | tuple)
        or (isinstance(entry, Mapping) and isinstance(entry.get("n_tokens"), int))
        for entry in entries
    )


def _summary(value: object) -> str:
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(map(str, value)) or 'no keys'}"
    return f"a {type(value).__name__}" if value is not None else "null"
