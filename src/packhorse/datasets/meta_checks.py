"""What is looked at when a mixture is opened: before a run begins on data that cannot be meant so."""

from __future__ import annotations

import os
from collections.abc import Sequence
from logging import getLogger
from typing import TYPE_CHECKING

from packhorse.datasets.meta_file import DatasetConfig
from packhorse.datasets.rows import RowFile
from packhorse.datasets.select import row_key
from packhorse.datasets.sharegpt import convert_row
from packhorse.errors import BadSample, ConfigError, naming
from packhorse.ledger import Ledger
from packhorse.media.remote import require_driver
from packhorse.media.source import is_address
from packhorse.types import Drop

if TYPE_CHECKING:
    from packhorse.datasets.meta import Source

logger = getLogger("packhorse.datasets")

_FIRST_ROWS = 8


def check_first_rows(config: DatasetConfig, file: RowFile) -> None:
    """Refuse a dataset whose rows all come out without an answer because its roles have other names.

    A single row with an unknown role is that row's affair; when each of the first rows of the file has one
    and no assistant turn, the tags are wrong, and training would run on nothing. All ranks look at the same
    rows, so all stop or none.
    """
    media_dir = config.rules.media_dir
    if media_dir is not None and is_address(media_dir):
        with naming(f"dataset '{config.name}'"):
            require_driver(media_dir)
    elif media_dir is not None and not os.path.isdir(media_dir):
        logger.warning(
            "%s: media_dir %s is not a folder (nor is it one beside the meta file): every medium with a "
            "relative path will be missing, and its row left out or replaced as missing_media",
            config.name,
            media_dir,
        )
    findings = Ledger()
    first = range(min(len(file), _FIRST_ROWS))
    for number, row in zip(first, file.read(first), strict=True):
        if isinstance(row, BadSample):
            return  # told when the row is read
        key = row_key(config.name, number)
        try:
            example = convert_row(row, config.rules, key=key, dataset=config.name, record=findings.record)
        except BadSample:
            return
        if any(turn["role"] == "assistant" for turn in example["conversation"]):
            return
    unknown = [drop for drop in findings if drop.reason == "unknown_role"]
    if len(first) > 1 and len({drop.key for drop in unknown}) == len(first):
        raise ConfigError(
            f"dataset '{config.name}': none of the first rows has an assistant turn; {unknown[0].key}: "
            f"{unknown[0].detail}. Set tags={{'user_tag': …, 'assistant_tag': …}} to what the rows say"
        )


def record_same_files(sources: Sequence[Source], ledger: Ledger) -> None:
    """Say of data sets that they have the same file, in the log and in the ledger."""
    first: dict[str, str] = {}
    for source in sources:
        name, path = source.config.name, os.path.realpath(source.file.path)
        other = first.setdefault(path, name)
        if other != name and source.selection.world.rank == 0:
            detail = f"{source.file.name} is also the file of dataset '{other}'; its rows come twice"
            logger.warning("%s: %s", name, detail)
            ledger.record(Drop(name, "select", "same_file", detail, "kept", name))
