"""Rows to the example format, from every spelling that :mod:`packhorse.formats.row_format` knows.

A row goes in (a dict with turns and media), an example comes out: ``conversation`` with typed parts, and
``tools``, ``weight``, ``chat_template_kwargs`` and ``reasoning`` if the row or its dataset has them. Text and
paths only: no file is opened, but links are followed to confine media.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from packhorse.errors import BadSample, limit_of
from packhorse.formats.conversation import (
    EXAMPLE_SETTINGS,
    PASSED_ON,
    TURN_WEIGHTS,
    check_text,
    extra_audio,
    parse_documents,
    preference_data,
)
from packhorse.formats.row_format import (
    DECODED_AUDIO,
    MEDIA_FIELDS,
    PART_TYPES,
    PLACEHOLDER,
    SOURCE_FIELDS,
    TEXT_FIELDS,
    TURN_FIELDS,
    Layout,
    RowFormat,
    Tags,
    name_unused,
    pair_names,
    parse_turns,
    part_type,
    row_layout,
    turn_names,
    turns_of_struct,
    unused_in_part,
)
from packhorse.ledger import Ledger, default_ledger
from packhorse.media import describe, resolve
from packhorse.media.settings import with_dataset_settings
from packhorse.media.source import is_address
from packhorse.rows.row_files import TableRow
from packhorse.types import MEDIA_KINDS, Action, Drop, MediaKind, Reason, is_weight

MAX_BASE64_CHARS = 64 << 20
"""The most characters of base64 data in one media item; ``PACKHORSE_MAX_BASE64_CHARS`` replaces it."""

_OF_EXAMPLES = (*EXAMPLE_SETTINGS, "audio")  # fields that rows do not have
_NESTED = (Mapping, list)
_SURPLUS = object()
_LONG_TEXT = 1 << 20  # characters; shorter texts are measured together, when the example is parsed
_MEDIA_COLUMNS: Mapping[str, MediaKind] = {"images": "image", "videos": "video", "audios": "audio"}
# Where the prompt of a model ends in <think>, its answers have only the end of the thought.
_THINKING = re.compile(r"(?:\A(?:(?!<think>).)*?|<think>.*?)</think>\s*", re.DOTALL)
_DATA_URI = re.compile(r"data:([^,;]*)((?:;[^,;]*)*),", re.IGNORECASE)
# Base64 of a JPEG, PNG, GIF or WebP file without a prefix, as rows of ms-swift have it in place of a path.
_BASE64_IMAGE = re.compile(r"(?:/9j/|iVBORw0KGg|R0lGOD|UklGR)[A-Za-z0-9+/\s]{50,}={0,2}\s*")
_HTTP = re.compile(r"(?:^|::)https?://", re.IGNORECASE)  # also inside a chain such as simplecache::https://…


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
    rules = RowFormat.reference(
        columns, tags, media_dir=media_dir, strict=strict, confine=confine, allow_http=True
    )
    findings = ledger if ledger is not None else default_ledger()
    return convert_row(example, rules, key=key, dataset="", record=findings.record)


def ignore_drop(drop: Drop) -> None:
    """Ignore what a conversion finds: it is recorded elsewhere."""


def convert_row(
    row: Mapping[str, Any],
    rules: RowFormat,
    *,
    key: str,
    dataset: str,
    record: Callable[[Drop], None],
    unused: set[str] | None = None,
) -> dict[str, Any]:
    """Turn one row of a dataset into an example; add the fields that nothing reads to ``unused``.

    For the task ``"preference"`` it has ``rejected``, the turns with the other answer, or ``label``: whether
    its answer is good. Of its answers, only those that the preference is about are supervised.

    Raises:
        BadSample: the row is no conversation in this format, or not for this task.
    """
    try:
        layout = row_layout(row, rules)
    except BadSample as error:
        raise error.with_key(key) from None
    conversion = _Conversion(row, rules, layout, key, dataset, record)
    example = conversion.result()
    if unused is not None and (layout.unused or conversion.unused):
        unused.update(layout.unused_in(rules.task), conversion.unused)
    return example


def convert_example(
    example: Mapping[str, Any],
    rules: RowFormat,
    *,
    key: str,
    dataset: str,
    record: Callable[[Drop], None],
    unused: set[str] | None = None,
) -> dict[str, Any]:
    """Apply the settings of a dataset to an example, as :func:`convert_row` does to a row.

    An example has fields that rows have not: its own ``reasoning`` and ``audio``.

    Raises:
        BadSample: as :func:`convert_row`.
    """
    own = {name: example[name] for name in _OF_EXAMPLES if example.get(name) is not None}
    row = {name: value for name, value in example.items() if name not in own}
    result = convert_row(row, rules, key=key, dataset=dataset, record=record, unused=unused)
    if "audio" in own:
        conversion = _Conversion(row, rules, row_layout(row, rules), key, dataset, record)
        own["audio"] = [conversion.source("audio", clip) for clip in extra_audio(own)]
    return {**result, **own}


class _Conversion:
    """The conversion of one row: what is left of its media, and what was found on the way."""

    def __init__(
        self,
        row: Mapping[str, Any],
        rules: RowFormat,
        layout: Layout,
        key: str,
        dataset: str,
        record: Callable[[Drop], None],
    ) -> None:
        self.row, self.rules, self.layout = row, rules, layout
        self.key, self.dataset, self.record = key, dataset, record
        self.roles = rules.tags.roles()
        self.has_usual_tags = rules.tags.role_tag is None and rules.tags.content_tag is None
        self.values = {part: row.get(column) for part, column in layout.columns.items()}
        self.has_typed_parts = False
        self.media: dict[str, Iterator[Any]] = {}
        self.unused: set[str] = set()  # fields of turns, parts and media

    def result(self) -> dict[str, Any]:
        if self.rules.task == "preference":
            example = {**self._preference(), **self._settings()}
            if "weight" in example:
                raise self._bad("wrong_format", "a weight has no effect on preference data: remove it")
        else:
            self._check_no_preference()
            example = {"conversation": self._conversation(self._turns()), **self._settings()}
        if self.has_typed_parts:  # ours are well formed; the row's own may not be
            parse_documents(example, self.key)
        return example | self._passed_on()

    def _conversation(self, raw: list[Any]) -> list[dict[str, Any]]:
        """Return raw turns as an example has them; all media of the row belong to them."""
        columns = {kind: self._entries(part) for part, kind in _MEDIA_COLUMNS.items()}
        # Rows without audio keep a literal <audio> in their text, as rows for older models have it.
        self.media = {kind: iter(entries) for kind, entries in columns.items() if entries or kind != "audio"}
        has_media = any(columns.values())
        self.marks_are_media = not has_media or not _has_bare_parts(raw, self.rules.tags)
        turns = [self._turn(number, turn) for number, turn in enumerate(raw)]
        known = [turn for turn in turns if turn is not None]
        if len(known) < len(turns):
            self._report_unknown(raw, turns, known)
        conversation = _merge_calls(known)
        self._add_system(conversation)
        if self.rules.media_position == "first":
            self._place_first(conversation)
        for kind, rest in self.media.items() if conversation else ():
            if surplus := sum(not _is_empty(entry) for entry in rest):
                self._report("surplus_media", f"{surplus} more {kind}(s) than user turns mention", "cut")
        if not conversation:
            self._report("empty_conversation", "the conversation has no turns", "kept")
        elif not any(turn["role"] == "assistant" for turn in conversation):
            self._report("no_assistant_turn", "no assistant turn, so no token is supervised", "kept")
        return conversation

    # --- preference data ---------------------------------------------------------------------------------

    def _check_no_preference(self) -> None:
        """Raise if the row has a rejected answer, or says whether its answer is good."""
        columns = self.layout.preference
        # Other datasets call a class "label".
        is_label = columns.get("label") in ("kto_tag", self.rules.columns.label)
        has_label = "label" in columns and (is_label or isinstance(self.row[columns["label"]], bool))
        has_answer = "messages" in self.layout.columns or "response" in self.layout.columns
        if has_label or "rejected" in columns or not has_answer:
            raise preference_data(columns.values(), self.key)

    def _preference(self) -> dict[str, Any]:
        """Return both conversations of a pair, or one with its label."""
        columns = self.layout.preference
        if "chosen" not in columns and "rejected" not in columns:
            return self._answer_and_label()
        chosen, rejected = (
            self.row.get(columns[part]) if part in columns else None for part in ("chosen", "rejected")
        )
        prompt = self._turns(answered=chosen is None)
        if chosen is None:  # the row's own answer is the chosen one
            prompt, chosen = self._split_answer(prompt)
        # Both are about the same media, and what is found in the prompt is found once.
        record, found = self.record, list[Drop]()
        self.record = found.append
        pair = {
            role: self._conversation(self._add_answer(prompt, answer, role))
            for role, answer in (("chosen", chosen), ("rejected", rejected))
        }
        if self.values.get("prompt") is not None and not self._begins_with(prompt, chosen):
            self._note_unused("prompt", "the answers are whole conversations that begin otherwise")
        shared = _common_turns(*pair.values())
        answered = all(turns[shared:] and turns[shared]["role"] == "assistant" for turns in pair.values())
        # A turn of an unknown role is no prompt, and an answer is none either.
        if not shared or not answered or pair["chosen"][shared - 1]["role"] == "assistant":
            raise self._bad("wrong_format", "the answers of a pair do not follow the same prompt")
        for drop in dict.fromkeys(found):
            record(drop)
        return {
            "conversation": self._train_from(pair["chosen"], shared),
            "rejected": self._train_from(pair["rejected"], shared),
        }

    def _answer_and_label(self) -> dict[str, Any]:
        """Return a conversation with the label that its answer is good, or bad."""
        column = self.layout.preference.get("label")
        if column is None:
            raise self._bad(
                "no_preference",
                "expected a chosen and a rejected answer (DPO, reward models), or a label (KTO); the row has "
                f"{', '.join(map(str, self.row))}. To train on its answer write "
                'packhorse.load(…, task="sft")',
            )
        if not isinstance(label := self.row[column], bool):
            raise self._bad("wrong_format", f"{column} is {label!r:.40}, expected true or false")
        conversation = self._conversation(self._turns())
        last = max(
            (n for n, turn in enumerate(conversation) if turn["role"] in ("user", "system")), default=-1
        )
        if not any(turn["role"] == "assistant" for turn in conversation[last + 1 :]):
            raise self._bad("wrong_format", f"{column} without an answer that it is about")
        return {"conversation": self._train_from(conversation, last + 1), "label": label}

    def _split_answer(self, turns: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return the raw turns before the last answer, and that."""
        first = len(turns)
        while first and self._role_of(turns[first - 1]) in ("assistant", "function_call"):
            first -= 1
        return turns[:first], turns[first:]

    def _add_answer(self, prompt: list[Any], answer: Any, role: str) -> list[Any]:
        """Return the turns of a conversation that ends in an answer: a text, parts, a message or messages.

        Messages that do not begin with the answer are the whole conversation, as TRL's implicit prompts.
        """
        if _is_empty(answer) or answer in ([], {}):
            raise self._bad("wrong_format", f"a pair without a {role} answer: expected both answers")
        answer = _unzip(answer)
        if isinstance(answer, list | tuple) and all(isinstance(one, str | list) for one in answer):
            if len(answer) != 1:
                found = f"{len(answer)} {role} answers, expected one: write a row for each of them"
                raise self._bad("wrong_format", found)
            (answer,) = answer
        if isinstance(answer, Mapping):
            answer = [answer]
        answer = self._parse_turns(answer)
        if not self._is_turns(answer):
            answer = [self._raw_turn("assistant", answer)]
        if self._role_of(answer[0]) in ("user", "system"):
            return list(answer)
        if not prompt or self._role_of(prompt[-1]) in ("assistant", "function_call"):
            found = "no prompt" if not prompt else "a prompt that ends in an answer"
            raise self._bad(
                "wrong_format", f"{found} before the {role} answer: expected the same prompt for both"
            )
        return [*prompt, *answer]

    def _begins_with(self, prompt: list[Any], answer: Any) -> bool:
        """Return whether an answer is no whole conversation, or one that begins with the prompt."""
        answer = self._parse_turns(_unzip(answer))
        if not self._is_turns(answer) or self._role_of(answer[0]) not in ("user", "system"):
            return True
        tags = self.rules.tags
        texts, begins = (
            [(self._role_of(turn), turn.get(turn_names(tags, turn)[1] or "")) for turn in turns]
            for turns in (prompt, answer[: len(prompt)])
        )
        return texts == begins

    def _role_of(self, turn: Any) -> str | None:
        role, _ = turn_names(self.rules.tags, turn) if isinstance(turn, Mapping) else (None, None)
        return None if role is None else self._known_role(turn[role])

    def _known_role(self, name: Any) -> str | None:
        """Return what a role is by its name; None if it is unknown."""
        if not isinstance(name, str):
            return None
        return self.rules.tags.find_role(name) if self.rules.detect else self.roles.get(name)

    def _train_from(self, turns: list[dict[str, Any]], first: int) -> list[dict[str, Any]]:
        """Return turns of which only the answers from number ``first`` on are supervised."""
        for number, turn in enumerate(turns[first:], first):
            if turn["role"] != "assistant":
                continue
            given = {name: turn[name] for name in TURN_WEIGHTS if turn.get(name) not in (None, 1)}
            if given:
                found = f"{given!s:.60} of turn {number} has no effect on preference data: remove it"
                raise self._bad("wrong_format", found)
        return [
            {**turn, "weight": 0} if turn["role"] == "assistant" and number < first else turn
            for number, turn in enumerate(turns)
        ]

    # --- fields of the row -------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        """Return what applies to the whole conversation, if it is not the default."""
        rules, settings = self.rules, dict[str, Any]()
        if tools := self._tools(self.values.get("tools")):
            settings["tools"] = tools
        weight = self.values.get("weight")
        if weight is not None and not is_weight(weight):
            raise self._bad("wrong_format", f"weight is {weight!r:.40}, expected a number of 0 or more")
        weight = rules.weight * (1.0 if weight is None else float(weight))
        if weight != 1:
            settings["weight"] = weight
        if options := {**rules.chat_template_kwargs, **self._template_options()}:
            settings["chat_template_kwargs"] = options
        if rules.reasoning == "mask":
            settings["reasoning"] = rules.reasoning
        return settings

    def _template_options(self) -> Mapping[str, Any]:
        """Return the row's own options for the chat template."""
        given = self._parse_json(self.values.get("chat_template_kwargs") or {}, "chat_template_kwargs")
        options = self._without_table_nulls(given)
        if not isinstance(options, Mapping):
            found = f"chat_template_kwargs is {_summary(options)}, expected a dict of options"
            raise self._bad("wrong_format", found)
        return options

    def _passed_on(self) -> dict[str, Any]:
        fields = {name: self.row[name] for name in PASSED_ON if name in self.row}
        tokens, meta = fields.get("_text_tokens"), fields.get("mm_inputs_meta")
        if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int)):
            raise self._bad("wrong_format", f"_text_tokens is {tokens!r:.40}, expected a whole number")
        if meta is not None and not _is_inputs_meta(meta):
            raise self._bad(
                "wrong_format",
                f"mm_inputs_meta is {meta!r:.60}, expected images_meta and videos_meta: sizes or n_tokens",
            )
        return fields

    def _tools(self, tools: Any) -> list[Any]:
        """Return the tools as the chat template takes them: functions with a name."""
        tools = self._parse_json(self._without_table_nulls(tools), "tools") if tools else []
        if not tools:
            return []
        if isinstance(tools, Mapping):
            tools = [tools]
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
            raise self._bad("wrong_format", f"tools is {_summary(tools)}, expected a list of functions")
        return [
            {"type": "function", "function": tool} if "function" not in tool and "name" in tool else tool
            for tool in tools
        ]

    def _without_table_nulls(self, value: Any) -> Any:
        """Return a value without the nulls of fields that only other rows of a table have.

        A chat template would write them. In a file of JSON a null is the row's own.
        """
        return _without_nulls(value) if isinstance(self.row, TableRow) else value

    def _parse_json(self, value: Any, what: str) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except ValueError as error:
            raise self._bad("wrong_format", f"{what} is no JSON ({error}): {value:.60}") from error

    # --- turns -------------------------------------------------------------------------------------------

    def _turns(self, *, answered: bool = True) -> list[Any]:
        """Return the raw turns; those of a prompt without its response if not ``answered``."""
        if self.layout.format == "prompt_response":
            return self._prompt_turns(answered)
        if "messages" not in self.layout.columns:
            return []  # a pair of whole conversations
        name = self.layout.columns["messages"]
        turns = self.row[name]
        if turns is None:
            return []
        if isinstance(turns, str) and turns.lstrip().startswith("["):
            turns = self._parse_json(turns, f"'{name}'")
        turns = _unzip(turns)
        if not isinstance(turns, list | tuple):
            raise self._bad("wrong_format", f"'{name}' is {_summary(turns)}, expected a list of turns")
        return list(turns)

    def _prompt_turns(self, answered: bool) -> list[Any]:
        """Return the turns of a row with a prompt and its answer; each may be a list of turns itself."""
        prompt, query, response, history = (
            self.values.get(part) for part in ("prompt", "query", "response", "history")
        )
        prompt, response = (self._parse_turns(_unzip(value)) for value in (prompt, response))
        turns = self._history_turns(_unzip(history)) if history else []
        if isinstance(query, str) and query:
            if prompt is not None and not isinstance(prompt, str):
                self._note_unused("query", "the prompt is a list of turns")
            else:
                prompt = f"{prompt}\n{query}" if prompt else query
        for role, content in (("user", prompt), ("assistant", response))[: 1 + answered]:
            if content is not None or self.rules.task == "sft":
                turns += content or () if self._is_turns(content) else [self._raw_turn(role, content)]
        return turns

    def _history_turns(self, history: Any) -> list[Any]:
        """Return the turns of a history: questions with their answers, or turns."""
        turns: list[Any] = []
        history = parse_turns(history)
        for number, entry in enumerate(history if isinstance(history, list | tuple) else [history]):
            question_and_answer = entry
            if isinstance(entry, Mapping):
                if turn_names(self.rules.tags, entry)[0] is not None:
                    turns.append(entry)
                    continue
                names = pair_names(self.rules.tags, entry)
                question_and_answer = names and [entry[name] for name in names]
                self.unused |= name_unused("history", entry, names or entry)
            if not isinstance(question_and_answer, list | tuple) or len(question_and_answer) != 2:
                raise self._bad(
                    "wrong_format",
                    f"entry {number} of history is {_summary(entry)}, expected a question and its answer, or "
                    "a turn with role and content",
                )
            turns += map(self._raw_turn, ("user", "assistant"), question_and_answer)
        return turns

    def _raw_turn(self, role: str, content: Any) -> dict[str, Any]:
        """Return a turn as this dataset writes turns."""
        tags = self.rules.tags
        name = (tags.user_tag if role == "user" else tags.assistant_tag) or role
        return {tags.role_tag or "role": name, tags.content_tag or "content": content}

    def _parse_turns(self, value: Any) -> Any:
        """Return the turns of a JSON text; anything else as it is, also a text that is other JSON."""
        turns = parse_turns(value) if isinstance(value, str) else value
        known = isinstance(turns, list) and turns and all(map(self._role_of, turns))
        return turns if known else value

    def _is_turns(self, content: Any) -> bool:
        """Return whether a value is a list of messages, not of the parts of one."""
        return isinstance(content, list | tuple) and any(
            isinstance(turn, Mapping) and turn_names(self.rules.tags, turn)[0] is not None for turn in content
        )

    def _turn(self, number: int, turn: Any) -> dict[str, Any] | None:
        role_tag, content_tag = self._tags_of(number, turn)
        name, content = turn[role_tag], turn.get(content_tag)
        if isinstance(content, str) and len(content) > _LONG_TEXT:
            check_text(len(content), self.key)  # before it is searched for placeholders
        role = self.roles.get(name) if isinstance(name, str) else None
        role = self._known_role(name) if role is None else role
        extras = {}
        if len(turn) > 2 or content_tag not in turn:
            tags = (role_tag, content_tag)
            extras = {
                field: value for field, value in turn.items() if field not in tags and value is not None
            }
            if not TURN_FIELDS.issuperset(extras):
                self.unused |= name_unused("messages", extras, TURN_FIELDS)
        if role is None:
            return None  # see _report_unknown
        if role not in ("assistant", "function_call") and any(map(extras.get, TURN_WEIGHTS)):
            # Such a turn is never trained, so 0 and false are what happens.
            self.unused |= {f"messages[].{name} (role {role})" for name in TURN_WEIGHTS if extras.get(name)}
        if "function_call" in extras and role == "assistant":  # OpenAI's field for a single call
            extras["tool_calls"] = [self._parse_json(extras.pop("function_call"), "function_call")]
        if role == "function_call" and self.rules.reasoning == "drop":
            extras.pop("reasoning_content", None)
        if role == "function_call":
            calls = self._tool_calls(number, content)
            parts = [{"type": "text", "text": ""}]
            return {**extras, "role": "assistant", "content": parts, "tool_calls": calls, "_calls": True}
        if "tool_calls" in extras:
            extras["tool_calls"] = self._tool_calls(number, extras["tool_calls"])
            content = "" if content is None else content
        if role == "tool" and not isinstance(content, str) and not _are_known_parts(content):
            content = json.dumps(self._without_table_nulls(content), ensure_ascii=False)
        if role == "assistant" and self.rules.reasoning == "drop":
            content, extras = _without_reasoning(content, extras)
        parts = (
            self._marked_parts(number, role, content)
            if role in ("user", "tool")
            else self._parts(number, content)
        )
        return {**extras, "role": role, "content": parts}

    def _report_unknown(
        self, raw: list[Any], turns: list[dict[str, Any] | None], kept: list[dict[str, Any]]
    ) -> None:
        """Report the turns of unknown roles; raise in a dialogue with tools, of which no turn can be cut."""
        uses_tools = bool(self.values.get("tools")) or any(
            turn["role"] == "tool" or "tool_calls" in turn for turn in kept
        )
        known = ", ".join(dict.fromkeys(self.roles))
        for number, turn in enumerate(turns):
            if turn is None:
                name = raw[number][turn_names(self.rules.tags, raw[number])[0]]
                found = (
                    f"turn {number} has role {name!r}, expected {known} (tags= names the roles of a dataset)"
                )
                if uses_tools:
                    raise self._bad(
                        "unknown_role", f"{found}; the row has tools, so no turn of it can be cut"
                    )
                self._report("unknown_role", found, "cut")

    def _tags_of(self, number: int, turn: Any) -> tuple[str, str]:
        """Return the names of a turn's role and content."""
        usual = self.has_usual_tags and type(turn) is dict
        if usual and turn.get("role") is not None and turn.get("content") is not None:
            return "role", "content"
        role, content = turn_names(self.rules.tags, turn) if isinstance(turn, Mapping) else (None, None)
        if content is None and role is not None and (turn.get("tool_calls") or turn.get("function_call")):
            content = "content"
        if role is None or content is None:
            tags = self.rules.tags
            missing = (tags.role_tag or "role") if role is None else (tags.content_tag or "content")
            raise self._bad(
                "wrong_format",
                f"turn {number} has no '{missing}'; it is {_summary(turn)}. "
                "Set tags={'role_tag': …, 'content_tag': …} to the names the turns use",
            )
        return role, content

    def _tool_calls(self, number: int, calls: Any) -> list[dict[str, Any]]:
        """Return calls of tools as the chat template takes them, with arguments as objects."""
        what = f"the tool call of turn {number}"
        calls = self._parse_json(self._without_table_nulls(calls), what)
        result = []
        for call in calls if isinstance(calls, list) else [calls]:
            function = call.get("function") or call if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise self._bad("wrong_format", f"{what} is {_summary(call)}, expected a name and arguments")
            function = {name: value for name, value in function.items() if value is not None}
            arguments = function.get("arguments", function.get("parameters", {}))
            if isinstance(arguments, str):
                arguments = self._parse_json(arguments or "{}", f"arguments of {what}")
            named = {key: value for key, value in function.items() if key not in ("parameters", "type", "id")}
            used = ("type", "id", "function") if "function" in call else call
            self.unused |= name_unused("messages[].tool_calls", call, used)
            if "arguments" in function and "parameters" in function:
                self.unused.add("messages[].tool_calls[].parameters")
            ids = {"id": str(call["id"])} if call.get("id") is not None else {}
            result.append({**ids, "type": "function", "function": {**named, "arguments": arguments}})
        return result

    def _add_system(self, conversation: list[dict[str, Any]]) -> None:
        """Put the row's or the dataset's system prompt in front, unless there is a system turn."""
        system = self.values.get("system")
        if system is not None and not isinstance(system, str):
            raise self._bad("wrong_format", f"the system prompt is {_summary(system)}, expected text")
        text = system or self.rules.system
        part = {"type": "text", "text": text}
        if text and conversation and conversation[0]["role"] != "system":
            conversation.insert(0, {"role": "system", "content": [part]})
        elif system and conversation and conversation[0]["content"] != [part]:
            self._note_unused("system", "the turns begin with a system turn")

    def _note_unused(self, part: str, why: str) -> None:
        detail = f"'{self.layout.columns[part]}' is not used: {why}"
        self.record(Drop(self.key, "convert", "unused_field", detail, "kept", self.dataset))

    # --- parts -------------------------------------------------------------------------------------------

    def _marked_parts(self, number: int, role: str, content: object) -> list[dict[str, Any]]:
        """Content in which ``<image>`` and the like stand for the media of the row.

        White space around them is removed; other white space may matter (the reference removes it too, from
        the texts of users).
        """
        strips = role == "user" and not self.rules.detect
        if not isinstance(content, str) or ("<" not in content and not strips):
            return self._parts(number, content)
        parts: list[dict[str, Any]] = []
        end = 0
        surplus: Counter[str] = Counter()
        for match in PLACEHOLDER.finditer(content) if self.marks_are_media else ():
            kind = match[1].lower()
            if kind not in self.media:
                continue
            before = content[end : match.start()].rstrip()
            self._add_text(parts, before.lstrip() if end or strips else before)
            end = match.end()
            entry = next(self.media[kind], _SURPLUS)
            if entry is _SURPLUS:
                surplus[kind] += 1
            elif _is_empty(entry):
                self._report("missing_media", f"a <{kind}> of turn {number} has an empty entry", "cut")
            else:
                parts.append(self._media_part(kind, entry))  # type: ignore[arg-type]
        after = content[end:].lstrip() if end or strips else content
        self._add_text(parts, after.rstrip() if strips else after)
        for kind, times in surplus.items():
            detail = f"turn {number} has {times} more <{kind}> than the row has {kind}s"
            self._report("surplus_placeholder", detail, "cut")
        return parts or [{"type": "text", "text": ""}]

    def _parts(self, number: int, content: object) -> list[dict[str, Any]]:
        """Content that is taken as it is: text, or parts that the row has already split."""
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        if not _is_parts(content):
            found = f"the content of turn {number} is {_summary(content)}, expected text or a list of parts"
            raise self._bad("wrong_format", found)
        self.has_typed_parts = True
        return [self._typed_part(number, _without_nulls(part)) for part in content]  # type: ignore[attr-defined]

    def _typed_part(self, number: int, part: dict[str, Any]) -> dict[str, Any]:
        """Return a part of a row as an example has it: text, or a media item with its source."""
        name = part_type(part)
        if len(part) > 2 or not isinstance(part.get(name), str):
            self.unused |= unused_in_part(part)
        elif name == "text" and "type" in part:
            return {"type": "text", "text": part["text"]}  # most parts
        if name == "text":
            text = next((part[field] for field in TEXT_FIELDS if field in part), None)
            rest = {field: value for field, value in part.items() if field not in TEXT_FIELDS}
            return {**rest, "type": "text", "text": text}
        kind = PART_TYPES.get(name) if name is not None else None
        if kind is None:
            return part  # parse_conversation rejects it, with the turn
        for field in dict.fromkeys((kind, name, f"{kind}_url", f"input_{kind}", *SOURCE_FIELDS)):
            if field in part:
                rest = {other: value for other, value in part.items() if other not in (field, "type")}
                return self._media_part(kind, self._entry(field, part[field]), rest)
        entry = next(self.media.get(kind, iter(())), _SURPLUS)
        if entry is _SURPLUS or _is_empty(entry):
            raise self._bad(
                "media_mismatch",
                f"turn {number} has a part of type {name} without a source, and the row has no {kind} for it",
            )
        if isinstance(entry, Mapping):
            self.unused |= name_unused(f"{kind}s", entry, MEDIA_FIELDS)
        return self._media_part(
            kind, entry, {other: value for other, value in part.items() if other != "type"}
        )

    @staticmethod
    def _entry(field: str, value: Any) -> Any:
        """Return what a part's field holds as an entry of a media column."""
        if field == "base64":
            return {"base64": value}
        if field == "bytes":
            return {"bytes": value}
        return value

    def _media_part(
        self, kind: MediaKind, entry: object, options: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the part of a media item, with its options and those of the dataset."""
        part = self._own_part(kind, entry, options)
        settings = self.rules.media_settings
        return with_dataset_settings(kind, part, settings) if settings else part

    def source(self, kind: MediaKind, entry: object) -> Any:
        """Return the source of a media item, as far as the dataset allows it."""
        return self._own_part(kind, entry, None)[kind]

    def _own_part(self, kind: MediaKind, entry: object, options: Mapping[str, Any] | None) -> dict[str, Any]:
        if not isinstance(entry, Mapping):
            return {**(options or {}), "type": kind, kind: self._resolve(entry)}
        # Other fields of an entry are passed on, but do not replace the part's own.
        own = (*SOURCE_FIELDS, "type", *MEDIA_KINDS, *(DECODED_AUDIO if kind == "audio" else ()))
        extras = {name: value for name, value in entry.items() if name not in own and value is not None}
        if options is None and extras:  # of a column: those of a part are noted with it
            self.unused |= name_unused(f"{kind}s", extras, MEDIA_FIELDS)
        part = {**extras, **(options or {}), "type": kind}
        if kind == "audio" and entry.get("array") is not None:  # how the hub's datasets decode audio
            return {**part, kind: {name: entry.get(name) for name in DECODED_AUDIO}}
        if entry.get("bytes") is not None:  # how Parquet files and the hub hold an image
            return {**part, kind: entry["bytes"]}
        for field in ("base64", "data"):
            if entry.get(field) is not None:
                return {**part, kind: self._decode_base64(entry[field])}
        source = entry.get("path") if entry.get("path") is not None else entry.get("url")
        if source is None:
            found = f"an entry for {kind} has neither 'path' nor 'bytes': it is {_summary(entry)}"
            raise self._bad("wrong_format", found)
        return {**part, kind: self._resolve(source)}

    def _resolve(self, source: Any) -> Any:
        if isinstance(source, str) and (uri := _DATA_URI.match(source)) is not None:
            if not uri[2].lower().endswith(";base64"):
                raise self._bad("wrong_format", f"a data: address without base64 ({source:.40}…)")
            return self._decode_base64(source[uri.end() :])
        if isinstance(source, str) and _BASE64_IMAGE.fullmatch(source):
            return self._decode_base64(source)
        if not self.rules.allow_http and is_on_the_web(source):
            raise self._bad(
                "not_allowed",
                f"{describe(source)}: this dataset does not allow media from the web. Set allow_http to true "
                "in its meta entry or in dataset_options=, or download the media",
            )
        try:
            return resolve(source, self.rules.media_dir, confined=self.rules.confine)
        except BadSample as error:
            raise self._bad(error.reason, error.detail) from error

    def _decode_base64(self, data: Any) -> bytes:
        most = limit_of("PACKHORSE_MAX_BASE64_CHARS", MAX_BASE64_CHARS)
        if not isinstance(data, str):
            raise self._bad("wrong_format", f"base64 data is {_summary(data)}, expected text")
        if len(data) > most:
            raise self._bad(
                "media_too_large",
                f"{len(data):,} characters of base64 data, more than the limit of {most:,}: save the media "
                "item as a file, or raise PACKHORSE_MAX_BASE64_CHARS",
            )
        if (uri := _DATA_URI.match(data)) is not None:
            data = data[uri.end() :]
        try:
            return base64.b64decode("".join(data.split()), validate=True)  # it may be wrapped
        except (binascii.Error, ValueError) as error:
            raise self._bad(
                "broken_media", f"base64 data ({data:.24}…) cannot be decoded: {error}"
            ) from error

    def _place_first(self, conversation: list[dict[str, Any]]) -> None:
        """Put the media that no text mentions in front of the first user turn."""
        user = next((turn for turn in conversation if turn["role"] == "user"), None)
        if user is not None:
            left = [
                self._media_part(kind, entry)  # type: ignore[arg-type]
                for kind, rest in self.media.items()
                for entry in rest
                if not _is_empty(entry)
            ]
            user["content"] = [*left, *user["content"]]

    def _entries(self, part: str) -> list[Any]:
        entries = self.values.get(part)
        if isinstance(entries, list | tuple):
            if part != "videos" and list in map(type, entries):
                return self._flatten(part, entries)
            return list(entries)
        return [] if _is_empty(entries) else [entries]

    def _flatten(self, part: str, entries: Sequence[Any]) -> list[Any]:
        """Return the entries of a list for each turn; that of a video is a list of frames instead."""
        lists = [entry if _is_list_of_media(entry) else [entry] for entry in entries]
        if self.rules.media_position == "first" and sum(map(bool, lists)) > 1:
            found = f"{part} has a list for each turn, but media_position='first' puts all before the first"
            raise self._bad("wrong_format", f"{found}: write <{part[:-1]}> where each item belongs")
        return [entry for one in lists for entry in one]

    @staticmethod
    def _add_text(parts: list[dict[str, Any]], text: str) -> None:
        if text:
            parts.append({"type": "text", "text": text})

    def _report(self, reason: Reason, detail: str, action: Action) -> None:
        if self.rules.strict:
            raise self._bad(reason, detail)
        self.record(Drop(self.key, "convert", reason, detail, action, self.dataset))

    def _bad(self, reason: Reason, detail: str) -> BadSample:
        return BadSample(detail, reason=reason, key=self.key, stage="convert")


def _merge_calls(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join consecutive turns that only call tools into one, as templates expect parallel calls."""
    merged: list[dict[str, Any]] = []
    for turn in turns:
        only_calls = turn.pop("_calls", False)
        before = merged[-1] if merged else {}
        if only_calls and before.get("tool_calls") and _other_fields(before) == _other_fields(turn):
            merged[-1] = {**before, "tool_calls": [*before["tool_calls"], *turn["tool_calls"]]}
        else:
            merged.append(turn)
    return merged


def _other_fields(turn: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in turn.items() if name not in ("content", "tool_calls")}


def _without_reasoning(content: Any, extras: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return an answer without its reasoning."""
    kept = {name: value for name, value in extras.items() if name != "reasoning_content"}
    if isinstance(content, str):
        return _THINKING.sub("", content), kept
    if _is_parts(content):
        content = [
            {**part, "text": _THINKING.sub("", part["text"])} if isinstance(part.get("text"), str) else part
            for part in content
        ]
    return content, kept


def is_on_the_web(source: object) -> bool:
    """Return whether a source, or a frame of it, is fetched with HTTP."""
    if isinstance(source, list | tuple):
        return any(map(is_on_the_web, source))
    if isinstance(source, Mapping):
        return is_on_the_web(source.get("path"))
    return isinstance(source, str) and _HTTP.search(source) is not None and is_address(source)


def _common_turns(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> int:
    """Return how many turns two conversations begin with in common; their last one is never common."""
    most = max(min(len(left), len(right)) - 1, 0)
    return next((n for n in range(most) if left[n] != right[n]), most)


def _has_bare_parts(turns: list[Any], tags: Tags) -> bool:
    """Return whether a typed part of a turn has no source: it then stands for the row's next media item."""
    mappings = (turn for turn in turns if isinstance(turn, Mapping))
    contents: list[Any] = [turn.get(turn_names(tags, turn)[1] or "") for turn in mappings]
    parts = [
        part
        for content in contents
        if not isinstance(content, str) and _is_parts(content)
        for part in content
    ]
    return any(
        part.get("type") in MEDIA_KINDS
        and all(part.get(field) is None for field in (part["type"], *SOURCE_FIELDS))
        for part in parts
    )


def _is_parts(content: object) -> bool:
    return isinstance(content, list | tuple) and all(isinstance(part, Mapping) for part in content)


def _are_known_parts(content: object) -> bool:
    """Return whether the result of a tool is a list of parts, and not of other objects."""
    known = ("text", *PART_TYPES)  # a type may be unhashable
    return _is_parts(content) and all(
        part.get("type") in known or ("type" not in part and any(name in part for name in known))
        for part in content  # type: ignore[attr-defined]
    )


def _without_nulls(value: Any) -> Any:
    """Return a dict, or a list of them, without the fields that are null, at any depth."""
    if isinstance(value, Mapping):
        return {
            name: _without_nulls(part) if isinstance(part, _NESTED) else part
            for name, part in value.items()
            if part is not None
        }
    is_nested = isinstance(value, list) and any(isinstance(part, _NESTED) for part in value[:1])
    return list(map(_without_nulls, value)) if is_nested else value


def _is_empty(entry: object) -> bool:
    return entry is None or (isinstance(entry, str) and not entry)


def _is_list_of_media(entry: object) -> bool:
    """Return whether an entry is a list of paths, dicts or images, and not the samples of a clip."""
    return isinstance(entry, list) and not any(isinstance(item, list | int | float) for item in entry)


def _unzip(value: Any) -> Any:
    """Return the turns of a dict of lists; anything else as it is."""
    turns = turns_of_struct(value) if isinstance(value, Mapping) else None
    return value if turns is None else turns


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
