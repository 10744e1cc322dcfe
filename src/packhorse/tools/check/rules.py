"""The rules of the linter: what each finds, its severity, and what to do about it.

``error`` means that the row is lost or wrong in training; ``warning`` that it is probably a mistake; ``note``
that it is worth knowing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast, get_args

from packhorse.types import Reason, Stage, mask_secrets

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)

Needs = Literal["", "content", "processor", "max_length"]
"""What a rule needs: the content of media (not their headers alone), a processor, a limit."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Attributes:
        name: for reports and ``--ignore``; also the ledger's reason for the same defect.
        severity: of its findings, unless something makes them worse (see :attr:`about`).
        about: what it finds, in a line.
        advice: what to do, unless a finding has advice of its own.
        stage: the ledger's stage at which the row would be lost later.
        needs: what it cannot be applied without.
        repair: what a cleaned copy does about it, unless it drops the row.
    """

    name: str
    severity: Severity
    about: str
    advice: str
    stage: Stage
    needs: Needs = ""
    repair: str = ""

    @property
    def reason(self) -> Reason:
        """The ledger's reason."""
        return cast("Reason", self.name)


_REPLACE_MEDIA = "replace the media item, or delete the row"

_ALL = (
    Rule(
        "unreadable_file",
        "error",
        "a data file is missing, or its content does not match its suffix",
        "restore the file, or correct file_name in the meta file",
        "read",
    ),
    Rule(
        "malformed_row",
        "error",
        "a row is not a JSON object in UTF-8",
        "write the row again, or delete it",
        "read",
    ),
    Rule(
        "row_too_large",
        "error",
        "a row has more bytes or text than a row may have",
        "split the row (is a line end missing?), or raise the limit that the finding names",
        "read",
    ),
    Rule(
        "wrong_format",
        "error",
        "a row is no conversation under the declared columns and tags",
        "set columns and tags in the meta file to those of the rows, or correct the row",
        "convert",
    ),
    Rule(
        "equal_answers",
        "warning",
        "the chosen and the rejected answer of a pair are the same, so it shows no preference",
        "correct one of the answers, or delete the row",
        "convert",
    ),
    Rule(
        "preference_data",
        "error",
        "the row has a rejected answer, or says whether its answer is good",
        "train it as preference data, or keep only the answers to train on",
        "convert",
    ),
    Rule(
        "media_mismatch",
        "error",
        "a part of a turn stands for a media item that the row does not have",
        "add the media item, or delete the part",
        "convert",
    ),
    Rule(
        "not_allowed",
        "error",
        "a media item is at an address of the web",
        "set allow_http in the meta file, or download the media",
        "convert",
    ),
    Rule("empty_conversation", "error", "there is no turn", "delete the row", "convert"),
    Rule(
        "no_assistant_turn",
        "error",
        "there is no assistant turn, so no token is supervised",
        "add the answer, or delete the row",
        "convert",
    ),
    Rule(
        "unknown_role",
        "error",
        "the role of a turn is unknown: it would be cut, and a row with tools rejected",
        "name the roles of the dataset in its tags, or correct the row",
        "convert",
        repair="a role that is known by another name (human, gpt) gets the dataset's own",
    ),
    Rule(
        "surplus_placeholder",
        "error",
        "the text has more <image> (<video>, <audio>) than the row has media",
        "add the media, or delete the placeholder",
        "convert",
    ),
    Rule(
        "surplus_media",
        "error",
        "the row has media that the text does not mention: they would be cut",
        "write a placeholder where each media item belongs, or set media_position to first",
        "convert",
        repair="where the text has no placeholder of that kind, they go to the front of the first question",
    ),
    Rule(
        "placeholder_as_text",
        "warning",
        "a literal <image> or <video> that stands for no media item, in an answer for instance",
        "delete it, or move it to a user turn",
        "convert",
    ),
    Rule(
        "turns_out_of_order",
        "warning",
        "user and assistant do not take turns, or a system turn is not the first",
        "put the turns in order, or join neighbours; some chat templates reject such rows",
        "convert",
    ),
    Rule(
        "unanswered_turn", "note", "the last turn is not an answer", "add the answer, or ignore it", "convert"
    ),
    Rule("empty_turn", "warning", "a turn is empty", "fill it, or delete the row", "convert"),
    Rule(
        "outside_media_dir",
        "warning",
        "a media item lies outside media_dir; an error if the meta file sets confine",
        "move it into media_dir, or widen media_dir",
        "convert",
    ),
    Rule("missing_media", "error", "a media item does not exist", "restore it, or correct its path", "media"),
    Rule(
        "unreachable_media",
        "error",
        "a media item may not be read, or its store does not answer",
        "grant the permission to read it, or rerun the check when the store answers; --fix keeps the row",
        "media",
    ),
    Rule("broken_media", "error", "a media item cannot be decoded", _REPLACE_MEDIA, "media"),
    Rule("media_too_large", "error", "a media item is too large to decode", _REPLACE_MEDIA, "media"),
    Rule(
        "extreme_aspect_ratio",
        "warning",
        "an image's sides differ so much that processors reject it; an error where the given one does",
        "crop or cut the image, or delete the row",
        "media",
    ),
    Rule("tiny_image", "warning", "an image of few pixels", "check that it shows something", "media"),
    Rule(
        "duplicate_conversation",
        "warning",
        "the same turns with the same media as an earlier row, in any dataset",
        "delete one of them, or make a cleaned copy with --drop-duplicates",
        "select",
    ),
    Rule(
        "duplicate_image",
        "warning",
        "byte for byte the same image under another name, or in another dataset",
        "see whether the rows are copies, or whether training and test data share images",
        "select",
        needs="content",
    ),
    Rule(
        "same_file",
        "note",
        "two datasets read the same file",
        "remove one of them, or train on their rows twice",
        "select",
    ),
    Rule(
        "unused_field",
        "note",
        "rows have fields that nothing reads",
        "name the field in columns if it is to be used, or ignore it",
        "select",
    ),
    Rule(
        "unsupported_turn",
        "error",
        "the chat template does not write tools, tool calls or tool results of the row",
        "use a processor whose template does, or set its chat_template",
        "encode",
        needs="processor",
    ),
    Rule(
        "answer_shortened",
        "warning",
        "the chat template drops a part of an answer, such as earlier reasoning",
        "move the reasoning to the last answer, split the row, or set reasoning to drop",
        "encode",
        needs="processor",
    ),
    Rule(
        "special_token_in_text",
        "error",
        "a text types out a special token, which the model would read as one",
        "write it otherwise in the text, or delete the row",
        "encode",
        needs="processor",
    ),
    Rule(
        "sample_failed",
        "error",
        "the processor or its chat template rejects the row",
        "correct or delete the row",
        "encode",
        needs="processor",
    ),
    Rule(
        "nothing_supervised",
        "error",
        "no token of the row is supervised",
        "correct or delete the row",
        "encode",
        needs="processor",
    ),
    Rule(
        "too_long",
        "error",
        "more tokens than the limit",
        'shorten the row, raise the limit, or train with on_overlong="truncate"',
        "encode",
        needs="max_length",
    ),
)

RULES: dict[str, Rule] = {rule.name: rule for rule in _ALL}
"""All rules by name, in the order in which they are applied."""


_MAX_LENGTH = 500
_NOT_PRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def on_one_line(text: str) -> str:
    """Return a text from data for printing: shortened, without line ends and control codes."""
    short = text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}…"
    return _NOT_PRINTABLE.sub(lambda match: repr(match[0])[1:-1], short)


class Violation(NamedTuple):
    """What a rule has found in one row."""

    rule: str
    severity: Severity
    found: str
    advice: str = ""  # what to do; empty for the rule's advice


def violation(rule: str, found: str, severity: Severity | None = None, *, advice: str = "") -> Violation:
    """Return what a rule has found, with the rule's severity and advice unless others are given."""
    return Violation(rule, severity or RULES[rule].severity, on_one_line(mask_secrets(found)), advice)


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding of a report.

    Attributes:
        row: its number in the file, from 0; None if the finding is about the whole file.
        key: of the row, ``coco/812``; the dataset's name if there is no row.
        file: the data file.
        line: of a JSONL file, from 1; None for other files.
        location: file and position, for people.
        found: what was found.
        advice: what to do.
    """

    rule: str
    severity: Severity
    dataset: str
    row: int | None
    key: str
    file: str
    line: int | None
    location: str
    found: str
    advice: str
