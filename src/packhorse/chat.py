"""Chat templates, tokenizers and labels: how a conversation is rendered, and which tokens are supervised.

:class:`ChatProcessor` renders with the processor's own chat template. :func:`answer_spans` locates the
answers in the rendered text: by ``{% generation %}`` marks if the template has them, else by a rendering with
sentinels for the texts. So whatever a user types, a literal ``<|im_start|>assistant`` included, never becomes
a label. :func:`supervised_tokens` maps these characters to token positions by the
special tokens around them and compares the ids; what does not agree raises :class:`CannotAlign`.
"""

from __future__ import annotations

import bisect
import copy
import inspect
import json
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from itertools import compress, groupby, pairwise, takewhile
from logging import getLogger
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from packhorse.errors import BadSample, ConfigError, PackhorseError
from packhorse.types import IGNORE_INDEX as IGNORE_INDEX
from packhorse.types import Stage

if TYPE_CHECKING:
    from typing_extensions import Self

Turns = Sequence[Mapping[str, Any]]
Render = Callable[[Turns], str]
Span = tuple[int, int]


class Answer(NamedTuple):
    """The supervised characters of one assistant turn in a rendered text; ``turn`` is its number."""

    start: int
    end: int
    turn: int = -1


Structure = tuple[tuple[str, tuple[str, ...] | None], ...]
"""The role of each turn and the types of its parts; None for a turn that is one string."""

T = TypeVar("T")

logger = getLogger("packhorse.loader")

TOKEN_KEYS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
"""Tensors with one entry per token, whatever the family."""

PRIVATE_USE = range(0xE000, 0xF900)
"""Characters for sentinels: no template writes them, and they are hardly ever typed."""

_CHATML = ("<|im_start|>", "<|im_end|>")
_CHATML_OPENING = "<|im_start|>assistant\n"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
SOME_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "packhorse_tool",
        "description": "D.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "A."}}},
    },
}
"""A tool with which a template is tried: how it opens and closes answers is the same with every tool."""

_SOME_TOOLS = [SOME_TOOL]
_MAX_CACHED = 10_000  # of conversations with different structures, a kilobyte each
_MAX_OPTIONS = 1_000  # of options for the template, mostly lists of tools
_PER_TOKEN = frozenset({"labels", *TOKEN_KEYS, "position_ids", "loss_weights"})
# Options of a tokenizer's call for a single text that is neither padded nor truncated.
_PASSED_ON = frozenset({"add_special_tokens", "return_token_type_ids", "return_attention_mask"})
_UNDERSTOOD = _PASSED_ON | {"padding", "padding_side", "return_tensors", "is_split_into_words"}
_NO_PADDING = (False, True, "longest", "do_not_pad")


class Processor(Protocol):
    """A processor of transformers or one like it, or a tokenizer for text alone.

    What else it has (``tokenizer``, ``image_processor``, ``chat_template``, …) differs by class: a
    :class:`~packhorse.families.Encoder` looks it up.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode text and media."""


class Tokenizer(Protocol):
    """A tokenizer of transformers, or one like it; fast ones have offsets."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode text."""

    def convert_tokens_to_ids(self, tokens: Any, /) -> Any:
        """Return the id of a token."""

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        """Return the text of ids."""


class CannotAlign(PackhorseError):
    """The assistant turns of this conversation could not be located in its token ids with certainty."""


class TemplateFailed(PackhorseError):
    """A chat template failed on a conversation with an error that is not Jinja's, which is the cause.

    Such as a TypeError of a template that adds a text and a field that is none in this conversation.
    """


@dataclass(frozen=True, slots=True)
class TurnMarkers:
    """How a template writes an assistant turn.

    Attributes:
        assistant: the tokens that open it, after the end of the turn before.
        stop: the special token that closes it; None if the template writes none.
        assistant_text: the opening as text; empty if the tokenizer has no offsets.
        stop_text: what closes it as text, up to the stop token; empty if the template writes nothing.
    """

    assistant: tuple[int, ...]
    stop: int | None
    assistant_text: str = ""
    stop_text: str = ""


class ChatProcessor:
    """A processor with its tokenizer, which is looked up once, and its chat template.

    Args:
        processor: of any kind, or a tokenizer. A chat template that is set later is used from then on; other
            changes made to it after the first use have no effect.
    """

    template_kwargs: Mapping[str, Any] = MappingProxyType({})
    """Options for the template (``tools``, ``enable_thinking``, …); see :meth:`with_template_kwargs`."""

    def __init__(self, processor: Processor) -> None:
        self.processor: Any = processor
        self._template_cache: tuple[Any, dict[str, Any]] = None, {}
        self._with_kwargs: dict[str, Self] = {}
        self._of_any_tools: Self | None = None

    def with_template_kwargs(self, options: Mapping[str, Any]) -> Self:
        """Return a copy that renders with these options for the template; itself without any."""
        if not options:
            return self
        key = json.dumps(options, default=repr)  # in their order: templates write tools as they are
        if key not in self._with_kwargs:
            of_any_tools = None
            if options.get("tools") and options["tools"] is not _SOME_TOOLS:
                of_any_tools = self.with_template_kwargs({**options, "tools": _SOME_TOOLS})
            if len(self._with_kwargs) >= _MAX_OPTIONS:
                self._with_kwargs.clear()
            bound = copy.copy(self if of_any_tools is None else of_any_tools)
            bound.template_kwargs, bound._template_cache = dict(options), (None, {})
            bound._of_any_tools = of_any_tools
            self._with_kwargs[key] = bound
        return self._with_kwargs[key]

    def _cache_for_any_tools(self, name: str, make: Callable[[Self], T]) -> T:
        """:meth:`_cache_for_template` for what is the same with all tools: rows may have a list each."""
        owner = self if self._of_any_tools is None else self._of_any_tools
        return owner._cache_for_template(name, lambda: make(owner))

    @cached_property
    def tokenizer(self) -> Any:
        """See :func:`tokenizer_of`."""
        return tokenizer_of(self.processor)

    @property
    def chat_template(self) -> str | None:
        """See :func:`chat_template`."""
        return chat_template(self.processor)

    def _cache_for_template(self, name: str, make: Callable[[], T]) -> T:
        """Return ``make()``, cached under ``name`` until the processor has another chat template."""
        owners = (self.processor, self.tokenizer)
        templates = [getattr(owner, "chat_template", None) for owner in owners]
        if self._template_cache[0] != templates:
            self._template_cache = copy.deepcopy(templates), {}  # a dict of them may be changed in place
        cached = self._template_cache[1]
        if name not in cached:
            cached[name] = make()
        value: T = cached[name]
        return value

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """See :func:`special_tokens`."""
        return special_tokens(self.tokenizer)

    @property
    def turn_markers(self) -> TurnMarkers:
        r"""How the template opens and closes an assistant turn.

        ``<|im_start|>assistant\n`` and ``<|im_end|>`` for ChatML templates; for others, what surrounds an
        answer in a rendered example. A space at the end of the opening belongs to the answer's first token
        and is not part of it. CannotAlign if no example has a user turn and an answer one after the other.
        """
        return self._cache_for_any_tools("turn_markers", lambda owner: owner._find_turn_markers())

    @property
    def texts_around(self) -> dict[Structure, list[str]]:
        """What the template writes around the texts of conversations; filled by :func:`answer_spans`."""
        return self._cache_for_template("texts_around", dict)

    def _find_turn_markers(self) -> TurnMarkers:
        tokenizer, template, special = self.tokenizer, self.chat_template, self.special_tokens
        if template is not None and all(token in template and token in special for token in _CHATML):
            opening = token_ids(tokenizer(_CHATML_OPENING, add_special_tokens=False))
            return TurnMarkers(tuple(opening), special["<|im_end|>"], _CHATML_OPENING, "<|im_end|>")
        between, after = self._text_around_answer()
        between = between.rstrip(" ")
        closing = compile_tokens(special).search(after)
        ends = token_ids(tokenizer(after, add_special_tokens=False))
        opening = token_ids(tokenizer(between, add_special_tokens=False))
        names = {token_id: token for token, token_id in special.items()}
        stop = next((token for token in ends if token in names), None)
        # A user's turn ends as an answer does; the rest of the text between them opens the answer.
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(opening, ends, strict=False))))
        if stop not in opening[:same]:
            same = 0
        text = "" if same else between
        if same < len(opening) and getattr(tokenizer, "is_fast", False):
            encoded = tokenizer(between, add_special_tokens=False, return_offsets_mapping=True)
            text = between[encoded["offset_mapping"][same][0] :]
        closed = (after.rstrip() or after) if closing is None else after[: closing.end()]
        return TurnMarkers(tuple(opening[same:]), stop, text, closed)

    @property
    def generation_prompt(self) -> str:
        """What the template writes for a model to continue; empty if it has no generation prompt."""
        return self._cache_for_any_tools("generation_prompt", lambda owner: owner._find_generation_prompt())

    def _find_generation_prompt(self) -> str:
        if not hasattr(self.processor, "apply_chat_template"):
            return ""
        question = chr(PRIVATE_USE[0])
        for content in (question, [{"type": "text", "text": question}]):
            turns = [{"role": "user", "content": content}]
            try:
                text = self.apply_chat_template(turns)
                asked = self.apply_chat_template(turns, add_generation_prompt=True)
            except template_errors():
                continue
            if text.count(question) == 1 and asked.startswith(text):
                return asked[len(text) :]
        return ""

    @property
    def openings(self) -> tuple[str, ...]:
        """What opens an assistant turn, the most complete first."""
        return self._cache_for_any_tools("openings", lambda owner: owner._find_openings())

    def _find_openings(self) -> tuple[str, ...]:
        found = (self.generation_prompt, self.turn_markers.assistant_text)
        return tuple(dict.fromkeys(opening for opening in found if opening))

    @property
    def takes_parts(self) -> bool:
        """Whether the template writes the text of a list of parts, and not the list."""
        return self._cache_for_any_tools("takes_parts", lambda owner: owner._try_parts())

    def _try_parts(self) -> bool:
        turn = {"role": "user", "content": [{"type": "text", "text": chr(PRIVATE_USE[0])}]}
        try:
            text = self.apply_chat_template([turn])
        except template_errors():
            return False
        return chr(PRIVATE_USE[0]) in text and not any(quoted in text for quoted in ("'text'", '"text"'))

    def apply_chat_template(self, turns: Turns, **options: Any) -> str:
        """Render turns as one text with the processor's own method."""
        own = self._cache_for_template("options", self._find_used_options) if self.template_kwargs else {}
        options = {"tokenize": False, "add_generation_prompt": False, **own, **options}
        text: Any = _call_template(self.processor.apply_chat_template, list(turns), **options)
        # Some processors return a list, as for a batch of one.
        return str(text[0] if isinstance(text, list) else text)

    def _find_used_options(self) -> dict[str, Any]:
        """Return the options that have an effect: for others transformers logs a line with every call."""
        templates = " ".join(map(str, chat_templates(self.processor)))
        known = {"tools", *inspect.signature(self.processor.apply_chat_template).parameters}
        used = {
            name: value
            for name, value in self.template_kwargs.items()
            if name in known or not self.chat_template or re.search(rf"\b{re.escape(name)}\b", templates)
        }
        for name in self.template_kwargs.keys() - used.keys():
            _warn_unused_option(type(self.processor).__name__, name)
        return used

    def render(self, turns: Turns) -> str:
        """Render turns as one text, media placeholders not expanded."""
        return self.apply_chat_template(turns)

    def _text_around_answer(self) -> tuple[str, str]:
        """What a rendered example has between a question and its answer, and after the answer."""
        if not hasattr(self.processor, "apply_chat_template"):
            raise CannotAlign(f"{type(self.processor).__name__} has no chat template")
        question, answer = chr(PRIVATE_USE[0]), chr(PRIVATE_USE[1])
        texts = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in texts]
        # Texts first: a template that takes texts would print a list of parts as Python does.
        for example in (texts, parts):
            try:
                text = self.apply_chat_template(example)
            except template_errors():
                continue
            if text.count(question) == 1 == text.count(answer):
                between, _, after = text.partition(question)[2].partition(answer)
                return between, after
        raise CannotAlign("the template does not write a question and its answer as they are")


def _call_template(render: Callable[..., T], turns: Any, **options: Any) -> T:
    """Render turns; raise what the expressions of a template raise for their values as TemplateFailed."""
    try:
        return render(turns, **options)
    except PackhorseError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise TemplateFailed(f"{type(error).__name__}: {error}") from error


def template_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Return what a chat template raises for a conversation that it rejects, for an ``except`` clause."""
    jinja2 = sys.modules.get("jinja2")  # imported if anything was rendered with it
    errors = (*others, TemplateFailed)
    return errors if jinja2 is None else (*errors, jinja2.TemplateError)


def rejected_by_template(error: Exception, key: str, stage: Stage = "encode") -> BadSample:
    """Return the error for a conversation for which the chat template raises ``error``."""
    return BadSample(f"the chat template rejects it: {error}", reason="wrong_format", key=key, stage=stage)


def is_transformers(processor: Processor) -> bool:
    """Whether a processor is one that transformers ships (or a subclass), and so takes grouped options.

    One that comes with a model's repository only shares the base class; its call takes other arguments.
    """
    return any(kind.__module__.startswith("transformers.models.") for kind in type(processor).__mro__)


def tokenizer_of(processor: Processor) -> Any:
    """Return the processor's tokenizer, or the processor itself if it is one."""
    tokenizer = getattr(processor, "tokenizer", None)
    return processor if tokenizer is None else tokenizer


def is_tokenizer(processor: Processor) -> bool:
    """Whether a tokenizer was given in place of a processor."""
    known = any(kind.__name__ == "PreTrainedTokenizerBase" for kind in type(processor).__mro__)
    return known or (tokenizer_of(processor) is processor and hasattr(processor, "convert_tokens_to_ids"))


@cache
def _warn_unused_option(processor: str, name: str) -> None:
    logger.warning("the chat template of %s does not use %s, which has no effect", processor, name)


def chat_template(processor: Processor) -> str | None:
    """Return the processor's template (of several: ``"default"``), else the tokenizer's; None without one."""
    template = getattr(processor, "chat_template", None)
    if template is None:
        template = getattr(tokenizer_of(processor), "chat_template", None)
    if isinstance(template, Mapping):  # from a folder additional_chat_templates
        template = template.get("default")
    return template if isinstance(template, str) else None


def chat_templates(processor: Processor) -> list[Any]:
    """Return all templates that a processor may use; those of transformers do not use the tokenizer's."""
    owners = (processor,) if is_transformers(processor) else (processor, tokenizer_of(processor))
    return [getattr(owner, "chat_template", None) for owner in owners]


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Text -> id of the tokens that a tokenizer never splits: special and added ones."""
    tokens = dict(getattr(tokenizer, "get_added_vocab", dict)())
    for token in getattr(tokenizer, "all_special_tokens", ()):
        tokens.setdefault(str(token), int(tokenizer.convert_tokens_to_ids(str(token))))
    return {token: token_id for token, token_id in tokens.items() if token}


def compile_tokens(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds the longest of these tokens at each position of a text."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def pad_token_id(processor: Processor) -> int:
    """Return the id that pads short rows; ConfigError if the tokenizer has none."""
    tokenizer = tokenizer_of(processor)
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None:
        remedy = "set tokenizer.pad_token (to tokenizer.eos_token, say), with which short rows are padded"
        what = f"{type(tokenizer).__name__} has no pad token: {remedy}"
        raise ConfigError(what, setting="tokenizer.pad_token")
    return int(pad)


def token_id(tokenizer: Tokenizer, token: str) -> int | None:
    """Return the id of a token; None if the tokenizer has no such token."""
    convert = getattr(tokenizer, "convert_tokens_to_ids", None)
    if convert is None:
        return None
    number = convert(token)
    unknown = getattr(tokenizer, "unk_token_id", None)
    return None if not isinstance(number, int) or number == unknown else number


def token_ids(encoded: Any) -> list[int]:
    """Return the ids in what a tokenizer returned for one text."""
    ids = encoded["input_ids"] if hasattr(encoded, "keys") else encoded
    return list(ids[0]) if len(ids) and isinstance(ids[0], list | tuple) else list(ids)


# --- repeated tokens --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """The tokens of a text, and where in the text each begins and ends."""

    text: str
    ids: list[int]
    starts: list[int]
    ends: list[int]


def _with_offsets(encoded: Any, text: str) -> TokenizedText:
    offsets = encoded["offset_mapping"]
    starts, ends = [a for a, _ in offsets], [b for _, b in offsets]
    # What the tokenizer adds after a text has the offset 0: positions would not be in order.
    position = len(ends)
    while position and not ends[position - 1]:
        position -= 1
    if position:
        starts[position:] = ends[position:] = [len(text)] * (len(ends) - position)
    return TokenizedText(text, list(encoded["input_ids"]), starts, ends)


class RepeatedTokenTokenizer:
    """Replaces a processor's tokenizer during one call, and tokenizes runs of a token once.

    A processor writes an image's token thousands of times and tokenizes all of it: without this, a loader
    without workers makes 0.84x the tokens of a plain DataLoader (benchmarks/feed.py promises 0.9x), with it
    0.98x. A call with several texts, truncation or padding to a length goes to the tokenizer itself.

    Args:
        tokenizer: a fast one.
        tokens: text and id of the tokens whose runs are shortened; see :func:`repeated_media_tokens`.

    Attributes:
        read: the text that was tokenized, runs written once; None before a call, or if the tokenizer did it.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: Mapping[str, int]) -> None:
        self._original, self._shortened = tokenizer, tokens
        self._pattern = re.compile(f"({compile_tokens(tokens).pattern})(?:\\1)*")
        self.read: TokenizedText | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_original" or name.startswith("__"):  # looked up by copy before attributes exist
            raise AttributeError(name)
        return getattr(self._original, name)

    def __len__(self) -> int:
        return len(self._original)  # type: ignore[arg-type]

    def __call__(self, text: Any = None, *others: Any, **options: Any) -> Any:
        """As the tokenizer's own call."""
        self.read = None
        single = text[0] if isinstance(text, list) and len(text) == 1 else None
        understood = (
            not others
            and options.keys() <= _UNDERSTOOD
            and options.get("padding", False) in _NO_PADDING
            and options.get("return_tensors") in (None, "pt")
            and not options.get("is_split_into_words")
        )
        encoded = self._tokenize(single, options) if isinstance(single, str) and understood else None
        return self._original(text, *others, **options) if encoded is None else encoded

    def _tokenize(self, text: str, options: Mapping[str, Any]) -> Any:
        """Return what the tokenizer returns for one text; None if the runs do not match the tokens."""
        runs: list[tuple[int, int]] = []

        def write_once(run: re.Match[str]) -> str:
            token = run[1]
            runs.append((self._shortened[token], len(run[0]) // len(token)))
            return token

        short = self._pattern.sub(write_once, text)
        passed_on = {name: value for name, value in options.items() if name in _PASSED_ON}
        encoded = self._original(short, **passed_on, return_offsets_mapping=True)
        read = _with_offsets(encoded, short)
        shortened_ids = frozenset(self._shortened.values())
        positions = [position for position, token in enumerate(read.ids) if token in shortened_ids]
        if [read.ids[position] for position in positions] != [token for token, _ in runs]:
            return None
        self.read = read
        rows = {key: row for key, row in encoded.items() if key != "offset_mapping"}
        for key, row in rows.items():
            written: list[int] = []
            position = 0
            for start, (_, length) in zip(positions, runs, strict=True):
                written += row[position:start]
                written += [row[start]] * length
                position = start + 1
            rows[key] = [written + row[position:]]
        return type(encoded)(rows, tensor_type=options.get("return_tensors"))


def repeated_media_tokens(tokenizer: Tokenizer, ids: frozenset[int]) -> dict[str, int]:
    """Text and id of those tokens of ``ids`` that tokenize the same alone and in a run."""
    special = special_tokens(tokenizer)
    added = getattr(tokenizer, "added_tokens_decoder", {})

    def is_independent(text: str, token_id: int) -> bool:
        token = added.get(token_id)
        if token is None or token.single_word or token.normalized:
            return False  # its ids depend on its neighbours
        if any(text + text[0] in other for other in special):
            return False  # two of them may begin another token
        encoded = tokenizer(text * 3, add_special_tokens=False)
        return list(encoded["input_ids"]) == [token_id] * 3

    return {text: token for text, token in special.items() if token in ids and is_independent(text, token)}


def with_repeated_tokens(
    processor: Processor, ids: frozenset[int]
) -> tuple[Processor, RepeatedTokenTokenizer | None]:
    """Return a copy of the processor with a :class:`RepeatedTokenTokenizer`, and that tokenizer.

    Returns the processor itself and None if it has no fast tokenizer, or a call that transformers does not
    define (it may use its tokenizer in any way). The copy shares all else with the processor. ``ids`` are the
    tokens for the content of media.
    """
    tokenizer: Any = getattr(processor, "tokenizer", None)
    fast = is_transformers(processor) and getattr(tokenizer, "is_fast", False)
    if not fast or not type(processor).__call__.__module__.startswith("transformers."):
        return processor, None
    tokens = repeated_media_tokens(tokenizer, ids)
    if not tokens:
        return processor, None
    quick: Any = copy.copy(processor)
    quick.tokenizer = RepeatedTokenTokenizer(tokenizer, tokens)
    return quick, quick.tokenizer


# --- labels -----------------------------------------------------------------------------------------------


def token_keys(values: Mapping[str, Any], media: Container[str] = ()) -> list[str]:
    """Names of the entries with one value per token, in a sample or a batch of unknown origin.

    These are the known names, and tensors shaped like ``input_ids`` that are no ``media``. This is the only
    place that distinguishes tokens from media by their shape.
    """
    shape = getattr(values.get("input_ids"), "shape", None)
    return [
        key
        for key, value in values.items()
        if value is not None
        and (
            key in _PER_TOKEN
            or (key not in media and shape is not None and getattr(value, "shape", None) == shape)
        )
    ]


def shift_tokens(batch: Mapping[str, Any], media: Container[str] = ()) -> dict[str, Any]:
    """Shift labels by one: each position gets the label of the next token.

    Takes tensors of one sample ([S]) or a batch ([B, S]; ``position_ids`` also [3, B, S]); returns a new dict
    of views one token shorter: ``labels`` and ``loss_weights`` without the first, every other token tensor
    (see :func:`token_keys`) without the last. Everything else stays. This is the only shift.

    Raises:
        ConfigError: there are no labels, or a token tensor has another length than they.
    """
    if "labels" not in batch:
        raise ConfigError(f"cannot shift without 'labels', only {', '.join(batch)}", setting="labels")
    shifted = dict(batch)
    length = batch["labels"].shape[-1]
    for key in token_keys(batch, media):
        shape = tuple(batch[key].shape)
        if shape[-1] != length or len(shape) > (3 if key == "position_ids" else 2):
            raise ConfigError.of(key, shape, f"expected one entry for each of {length} labels")
        shifted[key] = batch[key][..., 1:] if key in ("labels", "loss_weights") else batch[key][..., :-1]
    return shifted


def answer_spans(chat: ChatProcessor, turns: Turns, text: str, render: Render | None = None) -> list[Answer]:
    """Locate the assistant turns in the rendered ``text``: all that a model has to generate.

    That is what follows the generation prompt (a template may write an empty ``<think></think>`` there), up
    to and including the end of the turn. Templates with generation marks define it. ``text`` was
    rendered from ``turns`` by ``render`` (None for ``chat.render``), placeholders not expanded.
    Raises :class:`CannotAlign` if the template writes something that does not lead back to the answers.
    """
    template = chat.chat_template
    if template is not None and _GENERATION.search(template):
        answers = _marked_answers(chat, template, turns, text)
        stop = ""
        with suppress(CannotAlign):  # the marks alone are exact
            stop = chat.turn_markers.stop_text
    else:
        stop = chat.turn_markers.stop_text
        cached = _answers_by_structure(chat, turns, text) if render is None else None
        if cached is None:
            cached = [
                Answer(start, end, turn)
                for turn, (start, end) in text_spans(
                    render or chat.render, turns, text, chat.openings, roles=("assistant",)
                )
            ]
        answers = list(_join_parts(cached, turns))
    closed = (Answer(*_extend_to_stop(text, (start, end), stop), turn) for start, end, turn in answers)
    return [answer for answer in closed if answer.start < answer.end]


def _marked_answers(chat: ChatProcessor, template: str, turns: Turns, text: str) -> list[Answer]:
    from transformers.utils.chat_template_utils import render_jinja_template

    special = getattr(chat.tokenizer, "special_tokens_map", {})
    render: Any = render_jinja_template  # it returns a pair, whatever its annotation says
    options = {**special, **chat.template_kwargs}
    try:
        rendered, marks = _call_template(
            render, [list(turns)], chat_template=template, return_assistant_tokens_mask=True, **options
        )
    except template_errors() as error:
        raise CannotAlign(f"the template fails when its generation marks are requested: {error}") from error
    if rendered[0] != text:
        raise CannotAlign("the template renders differently when its generation marks are requested")
    numbers = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
    if len(numbers) != len(marks[0]):  # several marks in a turn: which turn they are of is unknown
        numbers = [-1] * len(marks[0])
    return [Answer(start, end, number) for number, (start, end) in zip(numbers, marks[0], strict=True)]


def _join_parts(answers: Sequence[Answer], turns: Turns) -> Iterator[Answer]:
    """Join the texts of each turn, with what the template writes between them; not across media."""
    if len({answer.turn for answer in answers}) == len(answers):
        yield from answers
        return
    for number, group in groupby(answers, attrgetter("turn")):
        parts, content = list(group), turns[number]["content"]
        if len(parts) == 1 or isinstance(content, str) or all(part.get("type") == "text" for part in content):
            yield Answer(parts[0].start, parts[-1].end, number)
        else:
            yield from parts


def _answers_by_structure(chat: ChatProcessor, turns: Turns, text: str) -> list[Answer] | None:
    """Locate the answers by what the template writes around the texts of conversations of this structure.

    That is rendered once. None if a turn has other fields, or if the template writes anything else around
    these texts: then :func:`text_spans` renders this conversation again. The promise of
    benchmarks/count.py needs it (1.5 times the baseline): 1.65, and 1.48 with two renderings of every row.
    """
    structure: list[tuple[str, tuple[str, ...] | None]] = []
    texts: list[str] = []
    numbers: list[int] = []  # of the answer that each text belongs to; -1 for other turns
    for number, turn in enumerate(turns):
        role, content = turn["role"], turn["content"]
        parts: Sequence[Any] = (
            [{"type": "text", "text": content}] if isinstance(content, str) else content or ()
        )
        types = tuple([part.get("type") for part in parts])
        texts_of_turn = [part.get("text") for part in parts if part.get("type") == "text"]
        if len(turn) != 2 or None in types or None in texts_of_turn:
            return None
        if role == "assistant" and not texts_of_turn:
            return None
        structure.append((role, None if isinstance(content, str) else types))
        texts += texts_of_turn
        numbers += [number if role == "assistant" else -1] * len(texts_of_turn)
    cached, key = chat.texts_around, tuple(structure)
    if key not in cached:
        if len(cached) >= _MAX_CACHED:
            cached.clear()
        try:
            cached[key], _ = _render_with_sentinels(chat.render, turns, chr(PRIVATE_USE[0]))
        except template_errors(CannotAlign, TypeError, ValueError, LookupError):
            cached[key] = []
    if not cached[key]:
        return None
    opens: tuple[str, ...] = chat.openings
    openings = [opens if number >= 0 else () for number in numbers]
    try:
        spans = list(_locate_texts(text, cached[key], texts, openings, rewritten=False))
    except CannotAlign:
        return None
    return [Answer(*span, number) for span, number in zip(spans, numbers, strict=True) if number >= 0]


def text_spans(
    render: Render,
    turns: Turns,
    text: str,
    openings: Sequence[str] = (),
    roles: Container[str] | None = None,
) -> Iterator[tuple[int, Span]]:
    """Yield the turn and the span of each text in a rendered conversation, in order.

    Renders the turns with sentinels for the texts, and locates the texts by what is around them.

    Args:
        render: the rendering that made ``text`` of ``turns``.
        turns: the conversation.
        text: the rendered conversation.
        openings: what may open an assistant turn. The span of an answer then begins after it, and that of an
            answer that the template rewrites is all that it writes in the turn.
        roles: only texts of these roles; None for all.

    Raises:
        CannotAlign: a text is not found with certainty; those before it have been yielded.
    """
    mark = next(char for char in map(chr, PRIVATE_USE) if char not in text)
    around, texts = _render_with_sentinels(render, turns, mark, roles)
    if texts:
        opens = [openings if turns[turn]["role"] == "assistant" else () for turn, _ in texts]
        spans = _locate_texts(text, around, [content for _, content in texts], opens)
        yield from zip((turn for turn, _ in texts), spans, strict=True)


def _render_with_sentinels(
    render: Render, turns: Turns, mark: str, roles: Container[str] | None = None
) -> tuple[list[str], list[tuple[int, str]]]:
    """Return what the template writes around the texts of these roles (None: of all), and turn and text.

    Raises :class:`CannotAlign` if it does not write each text once, in order.
    """
    texts: list[tuple[int, str]] = []

    def sentinel(turn: int, text: str) -> str:
        texts.append((turn, text))
        return f"{mark}{len(texts) - 1}{mark}"

    masked = [
        turn if roles and turn["role"] not in roles else _replace_text(turn, partial(sentinel, number))
        for number, turn in enumerate(turns)
    ]
    if not texts:
        return [], []
    try:
        pieces = re.split(f"{mark}(\\d+){mark}", render(masked))
    except template_errors() as error:
        raise CannotAlign(f"the template rejects sentinels for the texts: {error}") from error
    if [int(index) for index in pieces[1::2]] != list(range(len(texts))):
        raise CannotAlign("the template does not write every text exactly once")
    return pieces[0::2], texts


def _replace_text(turn: Mapping[str, Any], replace: Callable[[str], str]) -> dict[str, Any]:
    """The turn with its texts replaced; an answer without other fields, with an empty text if it has none.

    What the template writes of other fields (``tool_calls``, ``reasoning_content``) is then not around the
    answer, but part of it.
    """
    content = turn["content"]
    is_answer = turn["role"] == "assistant"
    kept = {"role": turn["role"]} if is_answer else turn
    if isinstance(content, str):
        return {**kept, "content": replace(content)}
    parts = [{**p, "text": replace(p["text"])} if p.get("type") == "text" else p for p in content or ()]
    if is_answer and not any(part.get("type") == "text" for part in parts):
        parts.append({"type": "text", "text": replace("")})
    return {**kept, "content": parts}


def _locate_texts(
    text: str,
    around: Sequence[str],
    parts: Sequence[str],
    openings: Sequence[Sequence[str]],
    *,
    rewritten: bool = True,
) -> Iterator[Span]:
    """Yield where the parts are in a text, perhaps trimmed, given the pieces of text around them.

    ``openings`` are what may open the turn of each part: its span then begins after that. ``rewritten``
    allows an answer that the template changes.
    """
    cut = [_split_at_opening(piece, tuple(opens)) for piece, opens in zip(around[:-1], openings, strict=True)]
    heads = [*(head for head, _, _ in cut), around[-1]]
    if not text.startswith(heads[0]):
        raise CannotAlign("the rendered text does not begin as it does with sentinels")
    start = len(heads[0])
    for number, (part, (_, extra, opened), after) in enumerate(zip(parts, cut, heads[1:], strict=True), 1):
        last = number == len(parts)
        span = _verbatim_span(text, start, part, extra, after, last)
        if span is not None and opened:
            span = start, span[1]  # what the template writes before the answer has to be generated too
        if span is None and opened and rewritten:
            span = _rewritten_span(text, start, part, after, last)
        if span is None:
            raise CannotAlign(f"the template changes the answer {part[:40]!r}")
        yield span
        start = span[1] + len(after)


@lru_cache(maxsize=256)
def _split_at_opening(piece: str, openings: tuple[str, ...]) -> tuple[str, str, bool]:
    """A piece of text up to the opening of a turn, what it has after that, and whether it has one."""
    for opening in openings:
        head, separator, extra = piece.rpartition(opening)
        if separator:
            return head + separator, extra, True
    return piece, "", False


def _verbatim_span(text: str, start: int, answer: str, extra: str, after: str, last: bool) -> Span | None:
    if not text.startswith(extra, start):
        return None
    first = start + len(extra)
    for form in (answer, answer.strip(), answer.lstrip(), answer.rstrip(), answer.strip("\n")):
        end = first + len(form)
        ends = not last or end + len(after) == len(text)
        if ends and text.startswith(form, first) and text.startswith(after, end):
            return first, end
    return None


def _rewritten_span(text: str, start: int, answer: str, after: str, last: bool) -> Span | None:
    """All that the template writes in the turn, for an answer that it rewrites (mostly one that reasons)."""
    end = len(text) - len(after) if last else text.find(after, start)
    # In the middle, what follows must not be found too early.
    certain = last or (after and after not in answer)
    return (start, end) if certain and start <= end and text.startswith(after, end) else None


def _extend_to_stop(text: str, span: Span, stop: str) -> Span:
    """The span with the stop token that follows it, and with nothing after a stop token inside it."""
    start, end = span
    if not stop:
        return span
    if text.startswith(stop, end):
        return start, end + len(stop)
    follows = re.compile(rf"\s*{re.escape(stop)}").match(text, end)
    if follows:
        return start, follows.end()
    inside = text[start:end].rstrip()  # generation marks may include the newline after the turn
    return (start, start + len(inside)) if inside.endswith(stop) else span


def label_tokens(
    chat: ChatProcessor,
    text: str,
    spans: Sequence[Span],
    ids: Sequence[int],
    media_ids: frozenset[int],
    read: TokenizedText | None = None,
) -> list[int]:
    """Labels for ``ids``: the id itself inside the spans, :data:`IGNORE_INDEX` elsewhere.

    Arguments and errors are those of :func:`supervised_tokens`.
    """
    labels = [IGNORE_INDEX] * len(ids)
    for start, end in supervised_tokens(chat, text, spans, ids, media_ids, read):
        labels[start:end] = ids[start:end]
    return labels


def supervised_tokens(
    chat: ChatProcessor,
    text: str,
    spans: Sequence[Span],
    ids: Sequence[int],
    media_ids: frozenset[int],
    read: TokenizedText | None = None,
) -> list[Span]:
    """Map spans of a text to its ids: first and after-last token of each piece, media excluded.

    Args:
        chat: its tokenizer made ``ids``.
        text: the rendered conversation with unexpanded placeholders.
        spans: characters of ``text`` to supervise, none of them empty.
        ids: the tokens of ``text`` with placeholders expanded; may be padded, or cut at the end.
        media_ids: ids of media content or placeholders; never supervised.
        read: tokens of a text, as the processor's call made them; used if it is this text.

    Raises:
        CannotAlign: a span's tokens are not where they must be.
    """
    if not spans:
        return []
    special = frozenset(chat.special_tokens.values()) - media_ids
    pad = getattr(chat.tokenizer, "pad_token_id", None)

    def align(tokens: TokenizedText, padded: bool) -> list[Span]:
        low, high = _without_padding(tokens.ids, ids, pad) if padded else (0, len(ids))
        pieces = [piece for span in spans for piece in _pieces(tokens, span, media_ids)]
        aligned = _align_pieces(tokens.ids, pieces, ids[low:high], special)
        return [(low + start, low + end) for start, end in aligned]

    if read is not None and read.text == text:
        with suppress(CannotAlign):
            return align(read, padded=False)
    try:
        return align(_tokenize(chat.tokenizer, text, spans, bos=False), padded=False)
    except CannotAlign:
        # Pad tokens may hide the stop tokens they are equal to. And if no special token comes before an
        # answer, the one that the tokenizer puts in front must be counted.
        for bos, padded in ((False, True), (True, False), (True, True)):
            with suppress(CannotAlign):
                return align(_tokenize(chat.tokenizer, text, spans, bos=bos), padded)
        raise


def _pieces(tokens: TokenizedText, span: Span, media_ids: frozenset[int]) -> Iterator[Span]:
    """First and after-last token of each run that begins inside ``span``, between media.

    A token that joins the end of the generation prompt and the beginning of the answer is no label: the model
    has read a part of it when it begins to generate.
    """
    first, last = bisect.bisect_left(tokens.starts, span[0]), bisect.bisect_left(tokens.starts, span[1])
    for position in range(first, last):
        if tokens.ids[position] in media_ids:
            yield first, position
            first = position + 1
    if first < last:
        yield first, last


def _tokenize(tokenizer: Tokenizer, text: str, spans: Sequence[Span], *, bos: bool) -> TokenizedText:
    """Tokenize with offsets; without them, cut the text at the spans, if that gives the same ids."""
    if getattr(tokenizer, "is_fast", False):
        return _with_offsets(tokenizer(text, add_special_tokens=bos, return_offsets_mapping=True), text)
    cuts = sorted({0, len(text), *(position for span in spans for position in span[:2])})
    tokens = TokenizedText(text, [], [], [])
    for start, end in pairwise(cuts):
        piece = token_ids(tokenizer(text[start:end], add_special_tokens=bos and start == 0))
        tokens.ids.extend(piece)
        # Positions inside a piece do not matter, only that they are inside it.
        tokens.starts.extend([start] * len(piece))
        tokens.ends.extend([end] * len(piece))
    if tokens.ids != token_ids(tokenizer(text, add_special_tokens=bos)):
        raise CannotAlign("the tokenizer has no offsets, and the text cut at its turns gives other tokens")
    return tokens


def _align_pieces(
    text: Sequence[int], pieces: Iterable[Span], body: Sequence[int], special: frozenset[int]
) -> Iterator[Span]:
    """Positions in ``body`` of pieces of the text's tokens; a piece after a cut is skipped.

    A position is the nearest anchor before it plus the plain tokens in between; or, if tokens were inserted
    there (a media item, what a hook inserts after the assistant's marker), the nearest anchor after it.
    """
    in_text, in_body = _anchors(text, body, special)
    for first, last in pieces:
        wanted = list(text[first:last])
        before, after = bisect.bisect_right(in_text, first) - 1, bisect.bisect_left(in_text, last - 1)
        if before >= len(in_body):
            continue  # even its anchor is after the cut
        # Text before the first anchor begins where the ids begin.
        start = first + (in_body[before] - in_text[before] if before >= 0 else 0)
        actual = list(body[start : start + len(wanted)])
        if actual != wanted[: len(body) - start] and after < len(in_body):
            start = first + in_body[after] - in_text[after]
            actual = list(body[start : start + len(wanted)]) if start >= 0 else []
        if start >= len(body):
            continue
        if actual != wanted[: len(body) - start]:
            raise CannotAlign(f"tokens from {start} on differ from tokens {first} to {last} of the text")
        yield start, start + len(actual)


def _without_padding(text: Sequence[int], ids: Sequence[int], pad: int | None) -> Span:
    """Where ``ids`` begin and end without padding: pad tokens at an end that the text does not have."""

    def surplus(row: Iterable[int], expected: Iterable[int]) -> int:
        runs = [sum(1 for _ in takewhile(lambda token: token == pad, ends)) for ends in (row, expected)]
        return max(0, runs[0] - runs[1])

    low = surplus(ids, text)
    return low, max(low, len(ids) - surplus(reversed(ids), reversed(text)))


def _anchors(text: Sequence[int], body: Sequence[int], special: frozenset[int]) -> list[list[int]]:
    """Positions of the special tokens that both have, in the text and in the ids (fewer, after a cut).

    Expanding a media item adds tokens but keeps the others and their order. So a kind of token that comes
    out of order (the brackets around each frame of a video) is no anchor.
    """
    kinds = set(special)
    while True:
        in_text = list(compress(range(len(text)), map(kinds.__contains__, text)))
        in_body = list(compress(range(len(body)), map(kinds.__contains__, body)))
        pairs = ((text[a], body[b]) for a, b in zip(in_text, in_body, strict=False))
        wrong = next((pair for pair in pairs if pair[0] != pair[1]), None)
        if wrong is None:
            return [in_text, in_body[: len(in_text)]]
        # A token of the text that is missing from the ids was expanded; else the other one was inserted.
        kinds.discard(wrong[0] if wrong[0] not in body else wrong[1])


def content_text(content: Any, write_media: Callable[[Mapping[str, Any]], str] = lambda part: "") -> str:
    """Return the text of a turn's content: a string, or its text parts joined; empty without any.

    ``write_media`` returns what is written for a part of another type.
    """
    if isinstance(content, str):
        return content
    items = content if isinstance(content, list | tuple) else ()
    parts = (item for item in items if isinstance(item, Mapping))
    texts = (part.get("text") if part.get("type") == "text" else write_media(part) for part in parts)
    return "".join(text for text in texts if isinstance(text, str))
