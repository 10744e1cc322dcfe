"""Well-known datasets of the hub in the example format.

Each loader goes through ``datasets.load_dataset`` (a hub name, or a local folder with the same columns) and
returns a Hugging Face ``Dataset`` that stays on disk: a row is formatted and its image or sound decoded when
it is asked for, so loading costs nothing and ``select``, ``shuffle``, ``shard`` … keep working. Images come
upright and in RGB; where the column holds paths, these are handed on. Further keyword arguments go to
``load_dataset``.

A row that cannot be used raises :class:`~packhorse.errors.BadSample` when it is asked for: ``missing_media``
(no image or sound), ``broken_media``, ``media_too_large``, or ``wrong_format`` (no text, or not the JSON that
is expected).
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packhorse.errors import BadSample, ConfigError, require
from packhorse.media import load_audio, load_image

if TYPE_CHECKING:
    from datasets import Dataset

_UNIMM_IMAGE = re.compile(r"<image\s*>", re.IGNORECASE)
_UNIMM_ROLES = {"human": "user", "gpt": "assistant"}


def make_rdr_dataset(
    path_or_dataset: str = "quintend/rdr-items", split: str = "train", **kwargs: Any
) -> Dataset:
    """RDR: an image and its description.

    Args:
        path_or_dataset: hub name or local folder; columns ``image`` and ``text``.
        split: which split.
        **kwargs: passed to ``load_dataset``.

    Returns:
        A dataset of ``{"conversation": [user: image + "Describe this image.", assistant: text]}``.
    """
    return _load(path_or_dataset, split, kwargs, ("image", "text"), _rdr)


def _rdr(row: Mapping[str, Any]) -> dict[str, Any]:
    answer = _text(row["text"], "text")
    return _example(_image_question(row, "image", "Describe this image."), answer)


def make_cord_v2_dataset(
    path_or_dataset: str = "naver-clova-ix/cord-v2",
    split: str = "train",
    *,
    limit_dataset_samples: int | None = None,
    seed: int = 0,
    **kwargs: Any,
) -> Dataset:
    """CORD-v2: a receipt and what stands on it, as nested tokens (see :func:`json2token`).

    Args:
        path_or_dataset: hub name or local folder; columns ``image`` and ``ground_truth``.
        split: which split.
        limit_dataset_samples: only the first so many rows.
        seed: where a row has several parses, ``seed`` and the row's content decide which one is taken.
        **kwargs: passed to ``load_dataset``.
    """
    if limit_dataset_samples is not None and limit_dataset_samples < 0:
        raise ConfigError(
            f"limit_dataset_samples={limit_dataset_samples}: expected at least 0, or None for all"
        )
    dataset = _load(path_or_dataset, split, kwargs, ("image", "ground_truth"), _Cord(seed))
    if limit_dataset_samples is None:
        return dataset
    return dataset.select(range(min(limit_dataset_samples, len(dataset))))


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
        **kwargs: passed to ``load_dataset``.
    """
    return _load(path_or_dataset, split, kwargs, ("image_id", "question", "answer"), _medpix)


def _medpix(row: Mapping[str, Any]) -> dict[str, Any]:
    question, answer = _text(row["question"], "question"), _text(row["answer"], "answer")
    return _example(_image_question(row, "image_id", question), answer)


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
        audio_placeholder: what stands for the sound in the prompt; Phi-4's by default.
        **kwargs: passed to ``load_dataset``.

    Returns:
        A dataset of ``{"conversation": […], "audio": (mono float32 array, sampling rate)}``.
    """
    datasets = require("datasets", "hub")
    dataset = _load(path_or_dataset, split, kwargs, ("audio", "transcription"), None)
    # Undecoded: the clip's bytes are read and decoded by us when the row is asked for.
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
        **kwargs: passed to ``load_dataset``.
    """
    return _load(path_or_dataset, split, kwargs, ("image", "conversation"), _unimm)


def _unimm(row: Mapping[str, Any]) -> dict[str, Any]:
    turns = _parsed_json(row["conversation"], "conversation", list)
    for turn in turns:
        _check_unimm_turn(turn)
    image = _image(row, "image")
    return {"conversation": [_unimm_turn(turn, image) for turn in turns]}


def _check_unimm_turn(turn: Any) -> None:
    fields = turn if isinstance(turn, dict) else {}
    speaker, value = fields.get("from"), fields.get("value")
    if not isinstance(speaker, str) or speaker not in _UNIMM_ROLES or not isinstance(value, str):
        raise _wrong(
            f"a turn needs 'from' (one of {', '.join(_UNIMM_ROLES)}) and 'value' (text), found {turn!r:.80}"
        )


def _unimm_turn(turn: Mapping[str, str], image: Any) -> dict[str, Any]:
    role = _UNIMM_ROLES[turn["from"]]
    if role == "assistant":
        return {"role": role, "content": [{"type": "text", "text": turn["value"].strip()}]}
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(_UNIMM_IMAGE.split(turn["value"])):
        if number:
            parts.append({"type": "image", "image": image})
        if text.strip():
            parts.append({"type": "text", "text": text.strip()})
    return {"role": role, "content": parts or [{"type": "image", "image": image}]}


def _load(
    path: str,
    split: str,
    kwargs: Mapping[str, Any],
    columns: Sequence[str],
    format_row: Callable[[Mapping[str, Any]], dict[str, Any]] | None,
) -> Dataset:
    datasets = require("datasets", "hub")
    dataset = datasets.load_dataset(path, split=split, **kwargs)
    if not isinstance(dataset, datasets.Dataset):
        raise ConfigError(
            f"{path}: load_dataset gives a {type(dataset).__name__}, expected a Dataset: name one split, and "
            "leave streaming out"
        )
    missing = [name for name in columns if name not in dataset.column_names]
    if missing:
        raise ConfigError(f"{path}: no column {', '.join(missing)}; it has {', '.join(dataset.column_names)}")
    for name, feature in dataset.features.items():
        if isinstance(feature, datasets.Image):
            # Undecoded: packhorse.media decodes the one that is used, and says what is wrong with it.
            dataset = dataset.cast_column(name, datasets.Image(decode=False))
    return dataset if format_row is None else dataset.with_transform(_EachRow(format_row))


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
    source = row[column]
    if source is None:
        raise _missing(column)
    # Upright, as the hub's own decoding gives it.
    return load_image(source) if isinstance(source, Mapping | bytes) else source


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise _wrong(f"column '{column}' holds {_kind(value)}, expected text")
    return value


def _parsed_json(text: Any, column: str, wanted: type) -> Any:
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


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _missing(column: str) -> BadSample:
    return BadSample(f"column '{column}' holds nothing", reason="missing_media", stage="media")


def _wrong(detail: str) -> BadSample:
    return BadSample(detail, reason="wrong_format", stage="convert")
