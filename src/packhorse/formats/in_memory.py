"""Rows in memory: lists and Hugging Face datasets in any row format, as examples."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from logging import getLogger
from typing import Any

from packhorse.errors import ConfigError, data_errors, list_some
from packhorse.formats.conversation import EXAMPLE_SETTINGS, PASSED_ON, ROW_SETTINGS, has_preference
from packhorse.formats.convert import convert_example, convert_row
from packhorse.formats.found_format import FoundFormat, find_format
from packhorse.formats.llama_factory import without_decoding
from packhorse.formats.meta import UnusedFields, check_rows_format, describe_rows, record_unused_fields
from packhorse.formats.row_format import RowFormat
from packhorse.ledger import Ledger
from packhorse.rows.row_files import TableRow
from packhorse.types import Rows

logger = getLogger("packhorse.datasets")

_FIRST_ROWS = 8
_EXAMPLE_FIELDS = frozenset({"conversation", "audio", *ROW_SETTINGS, *EXAMPLE_SETTINGS, *PASSED_ON})
_ROLES = ("user", "assistant", "system", "tool")
_OTHER_COLUMNS = ("images", "image", "videos", "video", "audios", "system")


class ConvertedRows(Sequence[dict[str, Any]]):
    """The examples of rows in memory, converted on access.

    Attributes:
        rows: what was given; a Hugging Face dataset with its media undecoded.
        rules: their format.
        ledger: what conversion finds.
        found: the format of the first rows.
    """

    def __init__(self, rows: Rows, rules: RowFormat, ledger: Ledger, found: FoundFormat) -> None:
        self.rows, self.rules, self.ledger, self.found = rows, rules, ledger, found
        self._unused = UnusedFields("", found.unused)
        self._is_table = hasattr(rows, "features")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        row = TableRow(self.rows[index]) if self._is_table else self.rows[index]
        unused: set[str] = set()
        key, record = self.key(index), self.ledger.record
        convert = convert_example if "conversation" in row and _is_example(row) else convert_row
        example = convert(row, self.rules, key=key, dataset="", record=record, unused=unused)
        if unused:
            self._unused.report(unused, self.ledger)
        return example

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def describe(self) -> list[str]:
        """Return a line about the rows: how many, the format of the first ones, what is not used."""
        return [describe_rows(type(self.rows).__name__, len(self), self.rules, self.found)]

    def key(self, index: int) -> str:
        """Return the key of an example: that of the rows, or its index."""
        key = getattr(self.rows, "key", None)
        return str(key(index)) if callable(key) else str(index)


def open_examples(data: Rows, rules: RowFormat | None, ledger: Ledger) -> Rows:
    """Return the examples of rows in memory: the rows themselves if they are examples already.

    Args:
        data: a list, a Hugging Face dataset, anything with ``len`` and ``[index]``.
        rules: their format; None to find it.
        ledger: gets an entry for fields that nothing reads, and what conversion finds.

    Raises:
        ConfigError: the first rows are no conversations in a known format.
    """
    if hasattr(data, "features") and hasattr(data, "cast_column") and "datasets" in sys.modules:
        data = without_decoding(data)
    first: dict[str, Any] = {}
    if isinstance(data, Mapping) and 0 not in data:  # a DatasetDict
        names = list_some(map(repr, data), 4)
        message = f"data is a dict of {names or 'nothing'}: pass one of its datasets, such as data['train']"
        raise ConfigError(message, setting="data")
    for index in range(min(len(data), _FIRST_ROWS)):
        with data_errors():  # a row that cannot be read is a bad sample when it is delivered
            first[str(index)] = data[index]
    if not first and rules is None:
        return data
    for key, row in islice(first.items(), 1):
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"row {key} of data is a {type(row).__name__}, expected a dict such as "
                '{"messages": [{"role": "user", "content": "…"}, …]}: see docs/reference/data.md',
                setting="data",
                value=type(row).__name__,
            )
    rows = {key: row for key, row in first.items() if isinstance(row, Mapping)}
    if rules is None and all(map(_is_example, rows.values())):
        unused = find_format(rows.values(), RowFormat()).unused
        if isinstance(data, list | tuple):  # they are not converted, so later rows are looked at here
            unused |= {name for row in data if isinstance(row, Mapping) for name in row}
        record_unused_fields("", unused - _EXAMPLE_FIELDS, ledger)
        return data
    rules = rules if rules is not None else RowFormat()
    check_rows_format(rows, rules)
    found = find_format(rows.values(), rules)
    if all(map(_is_example, rows.values())):
        found = replace(found, unused=found.unused - _EXAMPLE_FIELDS)
    record_unused_fields("", found.unused, ledger)
    return ConvertedRows(data, rules, ledger, found)


def _is_example(row: Mapping[str, Any]) -> bool:
    """Return whether a row is in the example format: turns with role and content that hold their media."""
    turns = row.get("conversation")
    if has_preference(row):
        return False
    if not isinstance(turns, list | tuple) or any(row.get(name) is not None for name in _OTHER_COLUMNS):
        return False
    return all(
        isinstance(turn, Mapping) and turn.get("role") in _ROLES and "content" in turn for turn in turns
    )
