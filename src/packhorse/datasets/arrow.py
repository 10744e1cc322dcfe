"""Parquet files by row number.

Parquet can only be read a row group at a time, so the file is rewritten once into the cache as an Arrow file,
uncompressed and memory-mapped: any row then costs tens of microseconds, and processes share the pages. The
cache needs the space of the uncompressed table.

Arrow believes what a file says of itself, and a damaged offset ends the process. So a copy whose columns or
number of rows are not those that were written is made anew, and each batch is looked through before the
first of its rows is read (which costs about as much as another row; bytes of media are not read for it).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from logging import getLogger
from pathlib import Path
from typing import IO, Any

import numpy as np

from packhorse.datasets.cache import Fingerprint, build_anew, build_once, digest, is_of_the_system
from packhorse.datasets.rows import Row, RowFile
from packhorse.errors import BadSample, ConfigError

logger = getLogger(__name__)

_ROWS_PER_BATCH = 256
_CHECK = b"packhorse"
"""Under this name a copy has the digest of its columns and its number of rows."""


class ParquetRows(RowFile):
    """The rows of one Parquet file as dicts of plain Python values."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__(name, path)
        self._fingerprint = Fingerprint.of(path)
        self._open()

    def _rewrite(self, file: IO[bytes]) -> None:
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(self.path) as parquet:
                schema = _plain(parquet.schema_arrow)
                check = _check(schema, parquet.metadata.num_rows)
                with pyarrow.ipc.new_file(file, schema.with_metadata({_CHECK: check})) as writer:
                    for batch in parquet.iter_batches(batch_size=_ROWS_PER_BATCH):
                        # Not a cast of the whole, which stumbles over fields that hold nothing.
                        columns = map(_values, batch.columns)
                        writer.write_batch(pyarrow.RecordBatch.from_arrays(list(columns), schema=schema))
        except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError, OSError) as error:
            if is_of_the_system(error):
                raise
            raise ConfigError(f"{self.name}: not a readable Parquet file ({error})") from error

    @property
    def _in_cache(self) -> str:
        return f"arrow/{self._fingerprint.key(self.path)}.arrow"

    def _open(self) -> None:
        import pyarrow

        path = build_once(self._in_cache, self._rewrite)
        try:
            self._map(path)
        except (pyarrow.ArrowException, ValueError, OSError) as error:
            self._make_anew(path, error)

    def _map(self, path: Path) -> None:
        """Open the copy. What Arrow raises, and a ValueError, say that it is damaged."""
        import pyarrow

        self._copy, self._inode = path, path.stat().st_ino
        reader = pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))
        sizes = [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]
        if (reader.schema.metadata or {}).get(_CHECK) != _check(reader.schema, sum(sizes)):
            raise ValueError("its columns and rows are not those that were written")
        self._reader, self._ends = reader, np.cumsum(sizes, dtype=np.int64)
        self._looked_through = np.zeros(len(sizes), np.bool_)

    def _make_anew(self, path: Path, error: Exception) -> None:
        """Replace the damaged copy.

        Raises:
            ConfigError: the new one is damaged as well.
        """
        import pyarrow

        if is_of_the_system(error) and path.stat().st_size:  # an empty file cannot be mapped
            raise error
        logger.warning("%s, the copy of %s, is damaged (%s): making it anew", path, self.name, error)
        path = build_anew(self._in_cache, self._rewrite, self._inode)
        try:
            self._map(path)
            for batch in range(len(self._ends)):
                self._look_through(batch)
        except (pyarrow.ArrowException, ValueError, OSError) as again:
            raise ConfigError(
                f"{path}, the copy of {self.name}, is damaged as soon as it is made ({again}): is the disk "
                "in order? PACKHORSE_CACHE names another folder"
            ) from again

    def _look_through(self, number: int) -> Any:
        """A batch that can be read; raises what Arrow raises over one that is damaged."""
        batch = self._reader.get_batch(number)
        if not self._looked_through[number]:
            for column in batch.columns:
                _validate(column)
            self._looked_through[number] = True
        return batch

    def _batch_of(self, row: int) -> tuple[int, Any]:
        """The first row of the batch that a row is in, and the batch."""
        import pyarrow

        number = int(np.searchsorted(self._ends, row, side="right"))
        try:
            batch = self._look_through(number)
        except (pyarrow.ArrowException, ValueError, OSError) as error:
            self._make_anew(self._copy, error)
            return self._batch_of(row)
        return int(self._ends[number]) - batch.num_rows, batch

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, row: int) -> Row:
        row = self._checked(row)
        start, batch = self._batch_of(row)
        try:
            values: list[Row] = batch.slice(row - start, 1).to_pylist()
        except UnicodeDecodeError as error:
            detail = f"{self.location(row)}: not UTF-8: {error}"
            raise BadSample(detail, reason="malformed_row", stage="read") from error
        return values[0]

    def table(self, rows: Sequence[int]) -> Any:
        """These rows, in this order, as an Arrow table with the types and the metadata of the file."""
        import pyarrow
        import pyarrow.parquet

        left = [self._checked(row) for row in rows]
        pieces = []
        while left:
            start, batch = self._batch_of(left[0])
            inside = range(start, start + batch.num_rows)
            here = list(itertools.takewhile(inside.__contains__, left))
            # Taken, not sliced: a cast does not see where a slice of nested values begins.
            pieces.append(batch.take(pyarrow.array([row - start for row in here])))
            left = left[len(here) :]
        schema = pyarrow.parquet.read_schema(self.path)
        columns = [
            column if column.type == field.type else column.cast(field.type)
            for column, field in zip(
                pyarrow.Table.from_batches(pieces, self._reader.schema), schema, strict=True
            )
        ]
        return pyarrow.Table.from_arrays(columns, schema=schema)

    def location(self, row: int) -> str:
        """File and row number."""
        return f"{self.name}, row {self._checked(row)}"

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "path": self.path, "_fingerprint": self._fingerprint}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if Fingerprint.of(self.path) != self._fingerprint:
            raise ConfigError(f"{self.name}: the file has changed since it was opened by another process")
        self._open()


def _plain(schema: Any) -> Any:
    """The schema with dictionary-encoded columns as their values: batches may have different dictionaries."""
    import pyarrow

    return pyarrow.schema(
        [
            field.with_type(field.type.value_type) if pyarrow.types.is_dictionary(field.type) else field
            for field in schema
        ]
    )


def _values(column: Any) -> Any:
    """A column of a batch as :func:`_plain` has it."""
    import pyarrow

    return column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column


def _check(schema: Any, rows: int) -> bytes:
    """What a copy says of itself, to be compared with what it is."""
    return digest(str(schema.remove_metadata()), str(rows)).encode()


def _validate(column: Any) -> None:
    """Look through a column; raises what Arrow raises where it contradicts itself."""
    import pyarrow

    try:
        column.validate(full=True)
    except pyarrow.ArrowInvalid:
        # A text that is no UTF-8 is no damage: the Parquet file has it so, and its row is told to be bad. Seen
        # as bytes, a column has other lengths where fields hold nothing, so these are looked at before.
        column.validate()
        column.view(_without_texts(column.type)).validate(full=True)


def _without_texts(kind: Any) -> Any:
    """The same type, with bytes in place of texts."""
    import pyarrow
    from pyarrow import types

    if types.is_string(kind):
        return pyarrow.binary()
    if types.is_large_string(kind):
        return pyarrow.large_binary()
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(_without_texts(field.type)) for field in kind])
    if types.is_list(kind) or types.is_large_list(kind):
        make = pyarrow.list_ if types.is_list(kind) else pyarrow.large_list
        return make(kind.value_field.with_type(_without_texts(kind.value_type)))
    return kind
