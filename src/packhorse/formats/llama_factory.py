"""LLaMA-Factory's ``dataset_info.json``: its entries as entries of a meta file.

The columns and tags of an entry have LLaMA-Factory's own defaults. Media paths start at the folder of the
file. A dataset of a hub is loaded with the ``datasets`` library and kept as a Parquet file in the cache, so
that it is indexed, counted and hashed like any other file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from logging import getLogger
from typing import Any

from packhorse.errors import ConfigError, require, suggest
from packhorse.utils.files import build_once, cache_lock, digest

logger = getLogger("packhorse.datasets")

FILE_NAME = "dataset_info.json"

KEYS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "formatting", "ranking")
"""Keys that only entries of LLaMA-Factory have."""

_KNOWN = (*KEYS, "file_name", "file_sha1", "subset", "split", "folder", "num_samples", "columns", "tags")
_FORMATTINGS = ("alpaca", "sharegpt", "openai")
_COLUMNS: Mapping[str, Mapping[str, str]] = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output"},
    "sharegpt": {"messages": "conversations"},
    "openai": {"messages": "messages"},
}
_TAGS: Mapping[str, Mapping[str, str]] = {
    "alpaca": {},
    "sharegpt": {
        **{"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"},
        **{"observation_tag": "observation", "function_tag": "function_call", "system_tag": "system"},
    },
    "openai": {"role_tag": "role", "content_tag": "content"},
}
_OF_HUBS = ("subset", "folder")  # LLaMA-Factory does not read them for a file either
_OTHER_HUBS = {"ms_hub_url": "ModelScope", "om_hub_url": "Modelers"}
_NOT_READ = (*_OTHER_HUBS, "script_url", "cloud_file_name")


def is_entry(entry: object) -> bool:
    """Return whether an entry of a meta file is one of LLaMA-Factory."""
    return isinstance(entry, Mapping) and any(key in entry for key in (*KEYS, "subset"))


def meta_entry(entry: Mapping[str, Any], own_keys: Collection[str]) -> dict[str, Any]:
    """Return an entry as a meta file has it; a hub's dataset is loaded, and its file is in the cache.

    Args:
        entry: of LLaMA-Factory, which ignores keys that it does not know; so ours may be among its keys.
        own_keys: keys of an entry of a meta file.

    Raises:
        ConfigError: a key or value is unknown, or the dataset cannot be loaded.
    """
    known = dict.fromkeys((*_KNOWN, *(key for key in own_keys if key != "format")))
    own = {key: value for key, value in entry.items() if key in own_keys}
    if unknown := sorted(set(entry) - set(known)):
        hints = ", ".join(f"{key}{suggest(key, known)}" for key in unknown)
        raise ConfigError(f"unknown {hints}; known are {', '.join(known)}", setting=unknown[0])
    formatting = entry.get("formatting", "alpaca")
    if formatting not in _FORMATTINGS:
        expected = f"expected one of {', '.join(_FORMATTINGS)}{suggest(str(formatting), _FORMATTINGS)}"
        raise ConfigError.of("formatting", formatting, expected)
    columns = {**_COLUMNS[formatting], **_names(entry, "columns")}
    if "kto_tag" in columns:
        columns["label"] = columns.pop("kto_tag")
    is_preference = entry.get("ranking") or "label" in columns
    return {
        "media_dir": ".",
        **({"task": "preference"} if is_preference else {}),
        **own,
        "file_name": _file_of(entry),
        "format": "prompt_response" if formatting == "alpaca" else "messages",
        "columns": columns,
        "tags": {**_TAGS[formatting], **_names(entry, "tags")},
    }


def _names(entry: Mapping[str, Any], key: str) -> Mapping[str, str]:
    """Return the columns or tags of an entry."""
    names = entry.get(key) or {}
    if not isinstance(names, Mapping):
        raise ConfigError.of(key, names, "expected an object of names")
    return names


def unused_keys(entry: Mapping[str, Any]) -> list[str]:
    """Return the keys of an entry that nothing reads."""
    of_file = () if entry.get("hf_hub_url") else (*_OF_HUBS, *_OTHER_HUBS)
    return [key for key in ("file_sha1", "script_url", "cloud_file_name", *of_file) if entry.get(key)]


def _file_of(entry: Mapping[str, Any]) -> str:
    """Return the file of an entry; a dataset of the Hugging Face hub comes first, as in LLaMA-Factory."""
    if entry.get("hf_hub_url"):
        return _hub_file(str(entry["hf_hub_url"]), entry)
    if entry.get("file_name"):
        if (entry.get("split") or "train") != "train":
            expected = "a file has the split 'train' only; for a part of it set num_samples, or file_name"
            raise ConfigError.of("split", entry["split"], f"{expected} to a file with these rows")
        return str(entry["file_name"])
    other = next((key for key in _NOT_READ if entry.get(key)), "file_name")
    what, remedy = f"{other} is not read", "download the data, and set file_name to its file"
    if other == "file_name":
        what = "there is no file_name and no hf_hub_url"
    elif hub := _OTHER_HUBS.get(other):  # a repository of that name on the Hugging Face hub may be another
        what = f"{other}={entry[other]!r} is not read (the datasets library does not load from {hub})"
        remedy = f"set hf_hub_url if the Hugging Face hub has the same data; or {remedy}"
    raise ConfigError(f"{what}: {remedy}", setting=other, value=entry.get(other))


def _hub_file(name: str, entry: Mapping[str, Any]) -> str:
    """Load a dataset of the hub (or of a folder) and return the Parquet file with its rows."""
    options = {
        "name": entry.get("subset"),
        "data_dir": entry.get("folder"),
        "split": entry.get("split") or "train",
    }
    datasets = require("datasets", "hub")
    with cache_lock(f"hub-{name}-{options}"):
        try:
            dataset = datasets.load_dataset(name, **options)
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            raise ConfigError(
                f"hf_hub_url={name!r} cannot be loaded ({type(error).__name__}: {error}). Load it once with "
                "a network (it stays in the cache of the datasets library), or download it and set file_name",
                setting="hf_hub_url",
                value=name,
            ) from error
        dataset = without_decoding(dataset)
        logger.info("%s: %s rows of %s", name, f"{len(dataset):,}", options["split"])
        file = f"hub/{digest(name, str(options), dataset._fingerprint)}.parquet"
        return str(build_once(file, lambda target: dataset.to_parquet(target)))


def without_decoding(dataset: Any) -> Any:
    """Return a Hugging Face dataset whose media come as bytes or paths: workers decode what is used."""
    datasets = require("datasets", "hub")
    given = dataset.format
    if given["type"] not in (None, "python", "custom"):  # rows are not of numpy or torch
        dataset = dataset.with_format(None, given["columns"], given["output_all_columns"])
    media = tuple(getattr(datasets, name) for name in ("Image", "Audio", "Video") if hasattr(datasets, name))

    def cast(feature: Any) -> Any:
        if isinstance(feature, media):
            return type(feature)(decode=False)
        if isinstance(feature, datasets.List):
            return datasets.List(cast(feature.feature), feature.length)
        if isinstance(feature, dict):
            return {name: cast(part) for name, part in feature.items()}
        return feature

    for name, feature in dataset.features.items():
        if (changed := cast(feature)) != feature:
            dataset = dataset.cast_column(name, changed)
    return dataset
