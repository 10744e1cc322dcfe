"""Well-known datasets of the hub in the example format.

Each loader calls ``datasets.load_dataset`` (a hub name, or a local folder with the same columns) and returns
a Hugging Face ``Dataset`` that stays on disk: a row is formatted and its image or audio decoded on access, so
``select``, ``shuffle``, ``shard`` … keep working. Images are upright and RGB; paths are passed on.

Keyword arguments that ``load_dataset`` names (``data_files``, ``name``, …) are passed to it; all
others are ignored, and named once in the log: recipes pass settings of other parts (``truncate``) along.

A row that cannot be used raises :class:`~packhorse.errors.BadSample` on access: ``missing_media`` (no image
or audio), ``broken_media``, ``media_too_large``, or ``wrong_format`` (no text, or not the expected JSON).

Turns of an unknown role and images without a place in the text are dropped. The ledger of the loader (or of
another dataset of packhorse that reads the row) names each such row. Where rows are read by hand, the default
ledger has one entry for all rows with the same remark.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import random
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from logging import getLogger
from typing import TYPE_CHECKING, Any

import numpy as np

from packhorse.errors import BadSample, ConfigError, require
from packhorse.ledger import Ledger, default_ledger, remark
from packhorse.media import load_audio, load_image
from packhorse.types import Drop, Reason

if TYPE_CHECKING:
    from datasets import Dataset


logger = getLogger("packhorse.datasets")

_IMAGE_TAG = re.compile(r"<image\s*>", re.IGNORECASE)
_SPEAKERS = {"human": "user", "gpt": "assistant"}
_ROLES = {role: role for role in ("system", "user", "assistant")}
TULU3, MAGICODER = "allenai/tulu-3-sft-mixture", "ise-uiuc/Magicoder-OSS-Instruct-75K"
_TULU3_SHARE = 0.8  # of the text mix; the rest is Magicoder
_CATEGORY_QUESTION = "Which taxonomy category does this product belong to? Give its full path."


def make_rdr_dataset(
    path_or_dataset: str = "quintend/rdr-items", split: str = "train", **kwargs: Any
) -> Dataset:
    """RDR: an image and its description.

    Args:
        path_or_dataset: hub name or local folder; columns ``image`` and ``text``.
        split: which split.
        **kwargs: see the module.

    Returns:
        A dataset of ``{"conversation": [user: image + "Describe this image.", assistant: text]}``.
    """
    return _load_image_questions(path_or_dataset, split, kwargs, "image", "text", "Describe this image.")


def make_cord_v2_dataset(
    path_or_dataset: str = "naver-clova-ix/cord-v2",
    split: str = "train",
    *,
    limit_dataset_samples: int | None = None,
    seed: int = 0,
    **kwargs: Any,
) -> Dataset:
    """CORD-v2: a receipt and its text, as nested tokens (see :func:`json2token`).

    Args:
        path_or_dataset: hub name or local folder; columns ``image`` and ``ground_truth``.
        split: which split.
        limit_dataset_samples: only the first n rows.
        seed: if a row has several parses, ``seed`` and the row's content choose one.
        **kwargs: see the module.
    """
    _check_limit("limit_dataset_samples", limit_dataset_samples)
    dataset = _load(path_or_dataset, split, kwargs, ("image", "ground_truth"), _Cord(seed))
    return _first_rows(dataset, limit_dataset_samples)


@dataclass(frozen=True, slots=True)
class _Cord:
    seed: int

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        text = row["ground_truth"]
        truth = _parsed_json(text, "ground_truth", dict)
        parses = truth["gt_parses"] if "gt_parses" in truth else [truth.get("gt_parse")]
        if not isinstance(parses, list) or not parses or not all(isinstance(p, dict) for p in parses):
            raise _wrong("ground_truth has neither 'gt_parses' (a list) nor 'gt_parse' (an object)")
        digest = hashlib.blake2b(f"{self.seed} {text}".encode(), digest_size=8).digest()
        parse = random.Random(int.from_bytes(digest, "big")).choice(parses)
        try:
            answer = json2token(parse)
        except RecursionError as error:
            raise _wrong("ground_truth is nested too deep") from error
        return _example(_image_question(row, "image", "Describe this image."), answer)


def json2token(obj: Any, sort_json_key: bool = True) -> str:
    """Nested data as one line of tokens.

    >>> json2token({"menu": [{"nm": "tea"}, {"nm": "pie"}]})
    '<s_menu><s_nm>tea</s_nm><sep/><s_nm>pie</s_nm></s_menu>'

    Keys come in reverse sorted order (as they stand if ``sort_json_key`` is False), list items are joined by
    ``<sep/>``, and a dict whose only key is ``text_sequence`` is that text.
    """
    if isinstance(obj, Mapping):
        if len(obj) == 1 and "text_sequence" in obj:
            return str(obj["text_sequence"])
        keys = sorted(obj, reverse=True) if sort_json_key else list(obj)
        return "".join(f"<s_{key}>{json2token(obj[key], sort_json_key)}</s_{key}>" for key in keys)
    if isinstance(obj, list):
        return "<sep/>".join(json2token(item, sort_json_key) for item in obj)
    return str(obj)


def make_medpix_dataset(
    path_or_dataset: str = "medpix-dataset/medpix-dataset", split: str = "train", **kwargs: Any
) -> Dataset:
    """MedPix: a medical image, a question and its answer.

    Args:
        path_or_dataset: hub name or local folder; columns ``image_id`` (the image), ``question``, ``answer``.
        split: which split.
        **kwargs: see the module.
    """
    return _load_image_questions(path_or_dataset, split, kwargs, "image_id", "answer")


def make_cv17_dataset(
    path_or_dataset: str = "ysdede/commonvoice_17_tr_fixed",
    split: str = "train",
    *,
    audio_placeholder: str = "<|endoftext11|>",
    **kwargs: Any,
) -> Dataset:
    """CommonVoice 17 (Turkish): a clip and its transcription.

    Args:
        path_or_dataset: hub name or local folder; columns ``audio`` and ``transcription``.
        split: which split.
        audio_placeholder: the placeholder of the audio in the prompt; Phi-4's by default.
        **kwargs: see the module.

    Returns:
        A dataset of ``{"conversation": […], "audio": (mono float32 array, sampling rate)}``.
    """
    datasets = require("datasets", "hub")
    dataset = _load(path_or_dataset, split, kwargs, ("audio", "transcription"), None)
    # Undecoded: packhorse.media decodes the clip on access.
    dataset = dataset.cast_column("audio", datasets.Audio(decode=False))
    return dataset.with_transform(_EachRow(_Cv17(audio_placeholder)))


@dataclass(frozen=True, slots=True)
class _Cv17:
    placeholder: str

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        conversation = [
            {"role": "user", "content": f"{self.placeholder}Transcribe the Turkish audio clip."},
            {"role": "assistant", "content": _text(row["transcription"], "transcription")},
        ]
        if row["audio"] is None:
            raise _missing("audio")
        return {"conversation": conversation, "audio": load_audio(row["audio"])}


def make_unimm_chat_dataset(
    path_or_dataset: str = "Yirany/UniMM-Chat", split: str = "train", **kwargs: Any
) -> Dataset:
    """UniMM-Chat: conversations of several turns about one image.

    Args:
        path_or_dataset: hub name or local folder; columns ``image`` and ``conversation`` (JSON text of turns
            with ``from`` and ``value``).
        split: which split.
        **kwargs: see the module.
    """
    return _load(path_or_dataset, split, kwargs, ("image", "conversation"), _Unimm(path_or_dataset))


@dataclass(frozen=True, slots=True)
class _Unimm:
    dataset: str

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        said = _parsed_json(row["conversation"], "conversation", list)
        turns = _known_turns(said, self.dataset, "from", "value", _SPEAKERS)
        image = _image(row, "image")
        return {"conversation": [_unimm_turn(role, text, image) for role, text in turns]}


def _unimm_turn(role: str, text: str, image: Any) -> dict[str, Any]:
    if role == "assistant":
        return _text_turn(role, text.strip())
    parts = _tagged_parts(text, lambda: image)
    return {"role": role, "content": parts or [{"type": "image", "image": image}]}


def make_llava_onevision_dataset(
    path_or_dataset: str = "liuhaotian/LLaVA-Instruct-150K",
    split: str = "train",
    *,
    media_dir: str | None = None,
    **kwargs: Any,
) -> Dataset:
    """LLaVA's instruction data: conversations with ``<image>`` where the image belongs.

    Args:
        path_or_dataset: hub name or local folder; columns ``conversations`` (turns with ``from`` and
            ``value``) and, unless all rows are text, ``image`` (an image, a path, or a list of them).
        split: which split.
        media_dir: the folder of relative image paths.
        **kwargs: see the module.

    Returns:
        A dataset of ``{"conversation": [...]}``. Each ``<image>`` becomes an image part: of a list the next
        one, otherwise the row's image.
    """
    row_format = _Llava(path_or_dataset, media_dir)
    return _load(path_or_dataset, split, kwargs, ("conversations",), row_format)


@dataclass(frozen=True, slots=True)
class _Llava:
    dataset: str
    media_dir: str | None

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        said = _list_of_turns(row["conversations"], "conversations")
        turns = _known_turns(said, self.dataset, "from", "value", _SPEAKERS)
        source: Any = row.get("image")
        several = isinstance(source, list)
        images: list[Any] = source if several else [source] * (source is not None)
        used = 0

        def next_image() -> Any:
            nonlocal used
            if used >= len(images) and (several or not images):
                raise _missing("image")
            image = _loaded_image(images[used if several else 0], self.media_dir)
            used += 1
            return image

        conversation = []
        for role, text in turns:
            # Tags are placeholders in questions only: an answer may speak about them.
            parts = _tagged_parts(text, next_image) if role == "user" else []
            conversation.append({"role": role, "content": parts} if parts else _text_turn(role, text.strip()))
        if used < len(images):
            detail = f"{len(images)} images, {used} <image> in the text"
            _record_unnamed(self.dataset, "surplus_media", detail)
        return {"conversation": conversation}


def make_shopify_product_catalogue_dataset(
    path_or_dataset: str = "Shopify/product-catalogue",
    split: str = "train",
    limit_dataset_samples: int | None = None,
    **kwargs: Any,
) -> Dataset:
    """Shopify's product catalogue: a product's image and its category in Shopify's taxonomy.

    Args:
        path_or_dataset: hub name or local folder; columns ``product_image`` and ``ground_truth_category``.
        split: which split.
        limit_dataset_samples: only the first n rows.
        **kwargs: see the module.
    """
    _check_limit("limit_dataset_samples", limit_dataset_samples)
    image, answer = "product_image", "ground_truth_category"
    dataset = _load_image_questions(path_or_dataset, split, kwargs, image, answer, _CATEGORY_QUESTION)
    return _first_rows(dataset, limit_dataset_samples)


def make_tulu3_dataset(path_or_dataset: str = TULU3, split: str = "train", **kwargs: Any) -> Dataset:
    """Tulu 3: text conversations, system turns included, every row in its order.

    Args:
        path_or_dataset: hub name or local folder; column ``messages`` (turns with ``role`` and ``content``).
        split: which split.
        **kwargs: see the module.
    """
    return _load(path_or_dataset, split, kwargs, ("messages",), _Tulu3(path_or_dataset))


@dataclass(frozen=True, slots=True)
class _Tulu3:
    dataset: str

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        messages = _list_of_turns(row["messages"], "messages")
        turns = _known_turns(messages, self.dataset, "role", "content", _ROLES)
        return {"conversation": [_text_turn(role, text) for role, text in turns]}


def make_tulu3_magicoder_text_mix_dataset(
    tulu_split: str = "train",
    magicoder_split: str = "train",
    seed: int = 42,
    max_turns: int = 16,
    limit_total: int | None = None,
    *,
    tulu_path: str = TULU3,
    magicoder_path: str = MAGICODER,
    ledger: Ledger | None = None,
    **kwargs: Any,
) -> Dataset:
    """Text from Tulu 3 (80 %) and Magicoder (20 %), interleaved until each row of both was there once.

    Tulu rows with more than ``max_turns`` turns, fewer than two usable turns or no answer are dropped and
    recorded in the ledger; that takes one pass over the texts. Empty turns, and turns of other roles than
    system, user and assistant, are skipped.

    Args:
        tulu_split: split of Tulu 3.
        magicoder_split: split of Magicoder.
        seed: of the interleaving.
        max_turns: most turns of a Tulu conversation.
        limit_total: only the first n rows of the mix.
        tulu_path: hub name or local folder; column ``messages``.
        magicoder_path: hub name or local folder; columns ``problem`` and ``solution``.
        ledger: where dropped rows are recorded; the process's own if None.
        **kwargs: see the module.
    """
    datasets = require("datasets", "hub")
    _check_limit("limit_total", limit_total)
    tulu = _load(tulu_path, tulu_split, kwargs, ("messages",), None).select_columns("messages")
    code = _load(magicoder_path, magicoder_split, kwargs, ("problem", "solution"), None)
    code = code.select_columns(["problem", "solution"])
    ledger = default_ledger() if ledger is None else ledger
    tulu = tulu.select(_usable_rows(tulu, tulu_path, max_turns, ledger))
    if not len(tulu) or not len(code):
        raise ConfigError(
            f"{tulu_path} has {len(tulu)} usable rows and {magicoder_path} {len(code)}: a mix needs both",
            path=magicoder_path if len(tulu) else tulu_path,
        )
    # A row of the result has the columns of both, and None in those of the other one.
    mixed = datasets.interleave_datasets(
        [tulu, code],
        probabilities=[_TULU3_SHARE, 1 - _TULU3_SHARE],
        seed=seed,
        stopping_strategy="all_exhausted",
    )
    return _first_rows(mixed, limit_total).with_transform(_EachRow(_mixed_text))


def _mixed_text(row: Mapping[str, Any]) -> dict[str, Any]:
    if row["messages"] is not None:
        return {"conversation": [_text_turn(role, text) for role, text in _usable_turns(row["messages"])]}
    question = [{"type": "text", "text": _text(row["problem"], "problem")}]
    return _example(question, _text(row["solution"], "solution"))


def _usable_turns(messages: object) -> list[tuple[str, str]]:
    """Role and text of the turns of a Tulu row that are neither empty nor of another role."""
    turns = [_role_and_text(turn, "role", "content") for turn in _list_of_turns(messages, "messages")]
    return [(role, text) for role, text in turns if role in _ROLES and text.strip()]


def _usable_rows(tulu: Dataset, name: str, max_turns: int, ledger: Ledger) -> list[int]:
    """The rows of Tulu that the mix takes; the others are recorded."""
    kept: list[int] = []
    cut: list[int] = []
    dropped: dict[tuple[Reason, str], list[int]] = defaultdict(list)
    rows = (messages for batch in tulu.iter(batch_size=1000) for messages in batch["messages"])
    for number, messages in enumerate(rows):
        reason = _why_unusable(messages, max_turns)
        if reason is not None:
            dropped[reason].append(number)
            continue
        kept.append(number)
        if any(turn["role"] not in _ROLES for turn in _list_of_turns(messages, "messages")):
            cut.append(number)
    for (why, detail), numbers in dropped.items():
        ledger.record_rows(name, np.array(numbers), stage="select", reason=why, detail=detail)
    detail = f"turns of other roles than {', '.join(_ROLES)} skipped"
    ledger.record_rows(
        name, np.array(cut), stage="select", reason="unknown_role", detail=detail, action="cut"
    )
    if dropped:
        logger.warning("%s: %s of %s rows dropped", name, f"{len(tulu) - len(kept):,}", f"{len(tulu):,}")
    return kept


def _why_unusable(messages: object, max_turns: int) -> tuple[Reason, str] | None:
    try:
        turns = _usable_turns(messages)
    except BadSample as error:
        return error.reason, error.detail
    if len(_list_of_turns(messages, "messages")) > max_turns:
        return "over_limit", f"more than max_turns={max_turns} turns"
    if len(turns) < 2:
        return "empty_conversation", "fewer than two usable turns"
    if all(role != "assistant" for role, _ in turns):
        return "no_assistant_turn", "no assistant turn"
    return None


# --- turns ------------------------------------------------------------------------------------------------


def _known_turns(
    turns: Sequence[Any], dataset: str, role: str, content: str, roles: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Role and text of turns; turns of other speakers than ``roles`` are skipped and recorded."""
    found = []
    for turn in turns:
        speaker, text = _role_and_text(turn, role, content)
        if speaker in roles:
            found.append((roles[speaker], text))
        else:
            _record_unnamed(dataset, "unknown_role", f"turn of role {speaker!r:.40} skipped")
    if not found:
        raise BadSample("no usable turn", reason="empty_conversation", stage="convert")
    return found


def _role_and_text(turn: object, role: str, content: str) -> tuple[str, str]:
    fields = turn if isinstance(turn, Mapping) else {}
    speaker, text = fields.get(role), fields.get(content)
    if not isinstance(speaker, str) or not isinstance(text, str):
        raise _wrong(f"a turn needs '{role}' and '{content}' (text), found {turn!r:.80}")
    return speaker, text


def _list_of_turns(value: object, column: str) -> list[Any]:
    if isinstance(value, Mapping):  # a table of turns comes as its columns
        value = [dict(zip(value, turn, strict=True)) for turn in zip(*value.values(), strict=True)]
    if not isinstance(value, list):
        raise _wrong(f"column '{column}' holds {_kind(value)}, expected a list of turns")
    return value


def _text_turn(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}]}


def _tagged_parts(text: str, next_image: Callable[[], Any]) -> list[dict[str, Any]]:
    """The parts of a text in which each ``<image>`` is an image; empty pieces are dropped."""
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(_IMAGE_TAG.split(text)):
        if number:
            parts.append({"type": "image", "image": next_image()})
        if piece.strip():
            parts.append({"type": "text", "text": piece.strip()})
    return parts


def _record_unnamed(dataset: str, reason: Reason, detail: str) -> None:
    """Record what happened to a row; transforms do not get its number, but the reader may know it."""
    remark(Drop("", "convert", reason, detail, "cut", dataset))
    _warn_once(f"{dataset}: {detail} (further rows like this are only recorded in the ledger)")


@cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


# --- loading ----------------------------------------------------------------------------------------------


def _load(
    path: str,
    split: str,
    kwargs: Mapping[str, Any],
    columns: Sequence[str],
    format_row: Callable[[Mapping[str, Any]], dict[str, Any]] | None,
) -> Dataset:
    datasets = require("datasets", "hub")
    dataset = datasets.load_dataset(path, split=split, **_known_options(path, kwargs, datasets.load_dataset))
    if not isinstance(dataset, datasets.Dataset):
        problem = f"load_dataset gives a {type(dataset).__name__}, expected a Dataset"
        raise ConfigError(f"{path}: {problem}: name one split, and leave streaming out", path=path)
    missing = [name for name in columns if name not in dataset.column_names]
    if missing:
        problem = f"{path}: no column {', '.join(missing)}; it has {', '.join(dataset.column_names)}"
        raise ConfigError(problem, setting=missing[0], path=path)
    for name, feature in dataset.features.items():
        if isinstance(feature, datasets.Image):
            # Undecoded: packhorse.media decodes the one that is used, and says what is wrong with it.
            dataset = dataset.cast_column(name, datasets.Image(decode=False))
    return dataset if format_row is None else dataset.with_transform(_EachRow(format_row))


def _load_image_questions(
    path: str, split: str, kwargs: Mapping[str, Any], image: str, answer: str, question: str | None = None
) -> Dataset:
    """Load rows of an image, a question (the column ``question`` if None) and an answer."""
    columns = (image, answer) if question is not None else (image, "question", answer)
    return _load(path, split, kwargs, columns, _ImageQuestion(image, answer, question))


@dataclass(frozen=True, slots=True)
class _ImageQuestion:
    image: str
    answer: str
    question: str | None

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        question = _text(row["question"], "question") if self.question is None else self.question
        answer = _text(row[self.answer], self.answer)
        return _example(_image_question(row, self.image, question), answer)


def _known_options(path: str, kwargs: Mapping[str, Any], load_dataset: Callable[..., Any]) -> dict[str, Any]:
    """Those of the keyword arguments that ``load_dataset`` names; the others are reported once."""
    parameters = inspect.signature(load_dataset).parameters.values()
    known = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
    ignored = sorted(kwargs.keys() - known)
    if ignored:
        _warn_once(f"{path}: ignoring {', '.join(ignored)}, which is no setting of this dataset")
    return {name: value for name, value in kwargs.items() if name in known}


def _check_limit(name: str, limit: int | None) -> None:
    if limit is not None and limit < 0:
        raise ConfigError.of(name, limit, "expected at least 0, or None for all")


def _first_rows(dataset: Dataset, limit: int | None) -> Dataset:
    return dataset if limit is None else dataset.select(range(min(limit, len(dataset))))


@dataclass(frozen=True, slots=True)
class _EachRow:
    """Turns a function of one row into the function of a batch of columns that ``with_transform`` wants."""

    format_row: Callable[[Mapping[str, Any]], dict[str, Any]]

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        examples = [self.format_row(row) for row in rows]
        return {name: [example[name] for example in examples] for name in (examples[0] if examples else ())}


def _example(question: list[dict[str, Any]], answer: str) -> dict[str, Any]:
    turns = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]
    return {"conversation": turns}


def _image_question(row: Mapping[str, Any], column: str, text: str) -> list[dict[str, Any]]:
    return [{"type": "image", "image": _image(row, column)}, {"type": "text", "text": text}]


def _image(row: Mapping[str, Any], column: str) -> Any:
    if row[column] is None:
        raise _missing(column)
    return _loaded_image(row[column])


def _loaded_image(source: Any, media_dir: str | None = None) -> Any:
    if isinstance(source, Mapping | bytes):
        # Upright, as the hub's own decoding gives it.
        return load_image(source)
    relative = media_dir is not None and isinstance(source, str) and "://" not in source
    return os.path.join(str(media_dir), source) if relative else source


def _text(value: object, column: str) -> str:
    if not isinstance(value, str):
        raise _wrong(f"column '{column}' holds {_kind(value)}, expected text")
    return value


def _parsed_json(text: object, column: str, wanted: type) -> Any:
    checked = _text(text, column)
    try:
        value = json.loads(checked)
    except RecursionError as error:
        raise _wrong(f"column '{column}' is JSON that is nested too deep") from error
    except ValueError as error:
        raise _wrong(f"column '{column}' is not valid JSON: {error}") from error
    if not isinstance(value, wanted):
        raise _wrong(f"column '{column}' is JSON of {_kind(value)}, expected a {wanted.__name__}")
    return value


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _missing(column: str) -> BadSample:
    return BadSample(f"column '{column}' holds nothing", reason="missing_media", stage="media")


def _wrong(detail: str) -> BadSample:
    return BadSample(detail, reason="wrong_format", stage="convert")
