"""Row formats: under which names the rows of a dataset keep turns, media, tools and weights.

People's datasets spell the same conversation in many ways. :class:`RowFormat` holds what the user declares;
:func:`row_layout` finds the rest by the names in a row, so every row is read by its own names, in any order
and in any process. The spellings are one table, ``ALIASES``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any, Literal, get_args

from packhorse.errors import BadSample, ConfigError, list_some, suggest
from packhorse.formats.conversation import OWN_TEMPLATE_KWARGS, PASSED_ON, TURN_WEIGHTS
from packhorse.media.settings import ITEM_OPTIONS, check_dataset_settings
from packhorse.types import MEDIA_KINDS, MediaKind, Reasoning, Task, is_weight

FormatName = Literal["auto", "messages", "prompt_response"]
MediaPosition = Literal["marked", "first"]

ALIASES: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "conversation"),
    "prompt": ("prompt", "instruction", "query", "question"),
    "query": ("input",),
    "response": ("completion", "output", "response", "answer"),
    "history": ("history",),
    "system": ("system", "system_prompt"),
    "tools": ("tools", "functions"),
    "images": ("images", "image"),
    "videos": ("videos", "video"),
    "audios": ("audios", "audio"),
    "weight": ("weight",),
    "chat_template_kwargs": ("chat_template_kwargs",),
    "chosen": ("chosen",),
    "rejected": ("rejected", "rejected_response", "rejected_messages"),
    "label": ("kto_tag", "label"),
}
# Names that belong together: a row with both is read by them, whatever other names it has.
_PROMPT_AND_RESPONSE = (
    ("prompt", "completion"),
    ("instruction", "output"),
    ("query", "response"),
    ("question", "answer"),
)
_PROMPT_COLUMNS = ("prompt", "query", "response", "history")
TURN_COLUMNS = ("messages", "prompt", "response", "history", "chosen", "rejected")
_PREFERENCE_COLUMNS = ("chosen", "rejected", "label")

ROLES: Mapping[str, tuple[str, ...]] = {
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "model", "bot", "chatgpt"),
    "system": ("system", "developer"),
    "tool": ("tool", "observation", "function", "tool_response", "function_response", "ipython"),
    "function_call": ("function_call", "tool_call"),
}
"""Names of roles in datasets, by what they are; ``function_call`` is an answer that only calls tools."""

PART_TYPES: Mapping[str, MediaKind] = {
    **{kind: kind for kind in MEDIA_KINDS},
    **{f"{kind}_url": kind for kind in MEDIA_KINDS},
    "input_image": "image",
    "input_audio": "audio",
}
"""Types of parts and the media they are: OpenAI's names, and ``input_audio`` with base64 data."""

_TEXT_TYPES = ("text", "input_text", "output_text")
SOURCE_FIELDS = ("path", "url", "bytes", "base64", "data")
DECODED_AUDIO = ("array", "sampling_rate")
TEXT_FIELDS = ("text", "value", "content")
TURN_FIELDS = frozenset(
    {"tool_calls", "function_call", "tool_call_id", "name", "reasoning_content", *TURN_WEIGHTS}
)
"""What is read of a turn next to its role and content; the chat template gets every other field too."""
MEDIA_FIELDS = frozenset({"type", *PART_TYPES, *SOURCE_FIELDS, *DECODED_AUDIO, *ITEM_OPTIONS})
"""What is read of a media item: of its part, or of its entry in a column."""

PLACEHOLDER = re.compile(r"<(image|video|audio)>", re.IGNORECASE)
"""The placeholder of the next media item of that kind in a user's text."""

FORMATS = {
    "messages": "turns in a list (messages or conversations; role and content, or from and value)",
    "prompt_response": "a prompt and its answer (prompt and completion, instruction and output, query and "
    "response)",
}


@dataclass(frozen=True, slots=True)
class Columns:
    """Under which names a row keeps its parts; None looks for the usual names.

    ``messages`` holds turns; ``prompt`` (and ``query``, appended to it) with ``response`` and ``history`` a
    question, its answer and the turns before it.
    """

    messages: str | None = None
    images: str | None = None
    videos: str | None = None
    audios: str | None = None
    system: str | None = None
    tools: str | None = None
    weight: str | None = None
    prompt: str | None = None
    query: str | None = None
    response: str | None = None
    history: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    label: str | None = None


@dataclass(frozen=True, slots=True)
class Tags:
    """Under which names a turn keeps role and text, and what the roles are called; None: the usual names."""

    role_tag: str | None = None
    content_tag: str | None = None
    user_tag: str | None = None
    assistant_tag: str | None = None
    system_tag: str | None = None
    observation_tag: str | None = None
    function_tag: str | None = None

    @lru_cache(maxsize=64)  # noqa: B019 (of values without state)
    def roles(self) -> Mapping[str, str]:
        """Return what each role of a dataset is: a declared name replaces the usual ones of its role."""
        declared = {
            "user": self.user_tag,
            "assistant": self.assistant_tag,
            "system": self.system_tag,
            "tool": self.observation_tag,
            "function_call": self.function_tag,
        }
        roles = {name: role for role, names in ROLES.items() if declared[role] is None for name in names}
        return roles | {name: role for role, name in declared.items() if name is not None}

    @lru_cache(maxsize=256)  # noqa: B019 (of values without state)
    def find_role(self, name: str) -> str | None:
        """Return what a role is whose name may differ in case (``User``); None if unknown or ambiguous."""
        roles = self.roles()
        if name in roles:
            return roles[name]
        alike = {role for known, role in roles.items() if known.lower() == name.lower()}
        return alike.pop() if len(alike) == 1 else None


_REFERENCE_COLUMNS = Columns("messages", "images", "videos", "audios")
_REFERENCE_TAGS = Tags("role", "content", "user", "assistant", "system")


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How one dataset writes its rows, and what to do about inconsistent rows.

    Args:
        format: ``"messages"`` or ``"prompt_response"``; ``"auto"`` decides by the columns of each row.
        columns: names of the row's fields.
        tags: names inside a turn.
        detect: look for the usual names of fields and roles that are not declared.
        media_dir: prefix for relative media paths.
        strict: raise :class:`BadSample` for an inconsistent row, instead of recording it.
        confine: reject media outside ``media_dir`` (through ``..``, a symlink or an absolute path).
        media_position: ``"first"`` puts media that no text mentions before the first user text.
        system: system prompt of rows that have none.
        reasoning: ``"keep"`` trains on reasoning in answers, ``"mask"`` keeps it as context without training
            on it, ``"drop"`` removes it.
        chat_template_kwargs: options for the chat template, such as ``enable_thinking``.
        weight: factor for the loss of every row.
        allow_http: fetch media at ``http:`` and ``https:`` addresses in rows.
        media_settings: size and frames of media without settings of their own, by the names in
            :data:`~packhorse.media.settings.DATASET_SETTINGS`.
        task: ``"sft"`` reads answers to train on and rejects preference data; ``"preference"`` reads pairs of
            answers, or answers with a label, and rejects everything else.
    """

    format: FormatName = "auto"
    columns: Columns = Columns()
    tags: Tags = Tags()
    detect: bool = True
    media_dir: str | None = None
    strict: bool = False
    confine: bool = False
    media_position: MediaPosition = "marked"
    system: str | None = None
    reasoning: Reasoning = "keep"
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    weight: float = 1.0
    allow_http: bool = False
    media_settings: Mapping[str, float] = field(default_factory=dict, hash=False)
    task: Task = "sft"

    def __post_init__(self) -> None:
        if self.confine and self.media_dir is None:
            raise ConfigError(
                "confine=True needs a media_dir to confine media to", setting="confine", value=self.confine
            )
        if own := sorted(OWN_TEMPLATE_KWARGS.intersection(self.chat_template_kwargs)):
            raise ConfigError.of("chat_template_kwargs", own, "Packhorse sets these itself")
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                expected = f"expected one of {', '.join(choices)}{suggest(value, choices)}"
                raise ConfigError.of(name, value, expected)
        if not is_weight(self.weight):
            raise ConfigError.of("weight", self.weight, "expected a number of 0 or more")
        if self.media_settings:
            check_dataset_settings(self.media_settings)

    @classmethod
    def of(
        cls,
        columns: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> RowFormat:
        """From dicts as in a meta file; an unknown name in them is an error, not ignored."""
        return cls(
            columns=_from_mapping(Columns, columns, "columns"),
            tags=_from_mapping(Tags, tags, "tags"),
            **{name: value for name, value in settings.items() if value is not None},
        )

    @classmethod
    def reference(
        cls, columns: Mapping[str, str] | None, tags: Mapping[str, str] | None, **settings: Any
    ) -> RowFormat:
        """As :meth:`of`, with the documented names of ``convert_sharegpt_to_conversation`` and no others."""
        given = cls.of(columns, tags, **settings)
        return cls(
            "messages",
            Columns(**{**asdict(_REFERENCE_COLUMNS), **_without_none(asdict(given.columns))}),
            Tags(**{**asdict(_REFERENCE_TAGS), **_without_none(asdict(given.tags))}),
            detect=False,
            **settings,
        )

    def entry(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, as an entry of a meta file has them."""
        plain, default = asdict(self), asdict(RowFormat())
        changed = {name: value for name, value in plain.items() if value != default[name]}
        changed |= changed.pop("media_settings", {})
        return {
            name: _without_none(value) if name in ("columns", "tags") else value
            for name, value in changed.items()
        }


_CHOICES: dict[str, tuple[str, ...]] = {
    "format": get_args(FormatName),
    "media_position": get_args(MediaPosition),
    "reasoning": get_args(Reasoning),
    "task": get_args(Task),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the rows with certain fields keep what is read.

    Attributes:
        format: ``"messages"`` or ``"prompt_response"``.
        columns: the field of each part that the rows have.
        unused: fields that are not read.
        preference: the fields of preference data by part: two answers, or whether the answer is good.
    """

    format: FormatName
    columns: Mapping[str, str]
    unused: tuple[str, ...]
    preference: Mapping[str, str]

    def unused_in(self, task: Task) -> set[str]:
        """Return the fields that a task does not read: preference data are read by one of them."""
        return set(self.unused).difference(self.preference.values() if task == "preference" else ())


def row_layout(row: Mapping[str, Any], rules: RowFormat) -> Layout:
    """Return where a row keeps its parts.

    Raises:
        BadSample: it has no turns, and no prompt with an answer, under known names.
    """
    present = frozenset(name for name, value in row.items() if value is not None)
    empty = frozenset(name for name, value in row.items() if type(value) in (str, list) and not value)
    layout = _find_layout(present, empty, rules.columns, rules.detect, rules.format)
    if layout is None:  # an empty column may be the one that is meant
        layout = _find_layout(frozenset(row), empty, rules.columns, rules.detect, rules.format)
    if layout is None:
        raise BadSample(describe_unknown(row, rules), reason="wrong_format", stage="convert")
    return layout


@lru_cache(maxsize=4096)
def _find_layout(
    present: frozenset[str], empty: frozenset[str], declared: Columns, detect: bool, wanted: FormatName
) -> Layout | None:
    given = _without_none(asdict(declared))
    columns = dict(given)
    if detect:
        left = present.difference(given.values())
        if "prompt" not in given and "response" not in given:
            pairs = (pair for pair in _PROMPT_AND_RESPONSE if left.issuperset(pair))
            columns.update(zip(("prompt", "response"), next(pairs, ()), strict=False))
        for part, names in ALIASES.items():
            # An empty column does not hide one with another name of the same part.
            found = [name for name in names if name in left - empty] or [n for n in names if n in left]
            if part not in columns and found:
                columns[part] = found[0]
    here = {part: column for part, column in columns.items() if column in present}
    is_prompt = "prompt" in here and "response" in here
    if wanted == "auto":
        turns_declared = "messages" in given or not ("prompt" in given and is_prompt)
        has_turns = "messages" in here and not (is_prompt and here["messages"] in empty)
        kind: FormatName = "messages" if has_turns and turns_declared else "prompt_response"
    else:
        kind = wanted
    is_pair = "chosen" in here or "rejected" in here  # the prompt may be in these columns too
    if not is_pair and not ("messages" in here if kind == "messages" else is_prompt):
        return None
    other = _PROMPT_COLUMNS if kind == "messages" else ("messages",)
    preference = {part: here[part] for part in _PREFERENCE_COLUMNS if part in here}
    read = {part: column for part, column in here.items() if part not in (*other, *_PREFERENCE_COLUMNS)}
    unused = present - empty - set(read.values()) - set(PASSED_ON)
    return Layout(kind, read, tuple(sorted(unused)), preference)


def turn_names(tags: Tags, turn: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the names of the role and the content of a turn; None for one that it lacks."""
    name = tags.role_tag or "role"
    role = name if name in turn else None
    if turn.get(name) is None and tags.role_tag is None and "from" in turn:
        role = "from"  # a table has every name in every turn
    name = tags.content_tag or "content"
    content = name if name in turn else None
    if turn.get(name) is None and tags.content_tag is None and "value" in turn:
        content = "value"
    return role, content


def pair_names(tags: Tags, entry: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the names of question and answer in an entry of a history; None if it has not exactly these."""
    questions = [name for name in entry if tags.find_role(name) == "user" or name in ALIASES["prompt"]]
    answers = [name for name in entry if tags.find_role(name) == "assistant" or name in ALIASES["response"]]
    return (questions[0], answers[0]) if len(questions) == len(answers) == 1 else None


def turns_of_struct(struct: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the turns of a dict of lists, as Hugging Face's ``Sequence({…})`` has them; None if it is none.

    >>> turns_of_struct({"role": ["user"], "content": ["Hi"]})
    [{'role': 'user', 'content': 'Hi'}]
    """
    lists = list(struct.values())
    if not lists or not all(isinstance(one, list | tuple) and len(one) == len(lists[0]) for one in lists):
        return None
    return [dict(zip(struct, values, strict=True)) for values in zip(*lists, strict=True)]


def name_unused(path: str, given: Mapping[str, Any], used: Iterable[str]) -> set[str]:
    """Return the fields of a turn, part or media item that nothing reads, as ``messages[].score``."""
    return {f"{path}[].{name}" for name, value in given.items() if value is not None and name not in used}


def unused_in_part(part: Mapping[str, Any]) -> set[str]:
    """Return the fields of a typed part that nothing reads; none of what is no part."""
    path, kind = "messages[].content", part_type(part)
    if kind == "text":
        return name_unused(path, part, {"type", *TEXT_FIELDS})
    if kind not in PART_TYPES:
        return set()
    source = part.get(kind)
    inner = source if isinstance(source, Mapping) else {}
    return name_unused(path, {**inner, **part}, MEDIA_FIELDS)


def part_type(part: Mapping[str, Any]) -> Any:
    """Return the type of a part; that of ``{"image": "1.jpg"}`` is ``image``, and None is unknown."""
    if (name := part.get("type")) is None:
        return next((kind for kind in (*MEDIA_KINDS, "text") if kind in part), None)
    if name in _TEXT_TYPES:
        return "text"
    return name if isinstance(name, str) else None


def parse_turns(value: Any) -> Any:
    """Return the list that a JSON text holds; anything else as it is."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError):
            return json.loads(value)
    return value


def describe_unknown(row: Mapping[str, Any], rules: RowFormat) -> str:
    """Return the message for a row without a conversation: its fields, and the closest formats."""
    names = [name for part in ("messages", "prompt", "response") for name in ALIASES[part]]
    hints = {key: suggest(key, names) for key in map(str, row)}
    close = [f"{key}{hint}" for key, hint in hints.items() if hint and key not in names]
    declared = rules.columns.messages
    what = f"no '{declared}' column" if declared is not None else "no conversation under known names"
    return (
        f"{what}; the row has: {list_some(row, 20)}. Expected {'; or '.join(FORMATS.values())}"
        + (f". Close: {', '.join(close)}" if close else "")
        + ". Set columns={'messages': …} to the column that holds the turns, or columns={'prompt': …, "
        "'response': …}"
    )


def _from_mapping(cls: type[Any], given: Mapping[str, str] | None, what: str) -> Any:
    names = [one.name for one in fields(cls)]
    unknown = sorted(set(given or {}) - set(names))
    if unknown:
        hints = ", ".join(f"{name}{suggest(name, names)}" for name in unknown)
        raise ConfigError(
            f"unknown {what}: {hints}; expected some of {', '.join(names)}", setting=what, value=unknown
        )
    for name, value in (given or {}).items():
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{what}[{name!r}] is {value!r}, expected a string", setting=name, value=value)
    return cls(**(given or {}))


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
