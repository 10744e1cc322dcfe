"""Parquet files by row number.

Parquet can only be read by row group, so the file is rewritten once into the cache as an uncompressed,
memory-mapped Arrow file: reading a row then takes tens of microseconds, and processes share the pages. The
cache needs the space of the uncompressed table.

Arrow trusts what a file says about itself, and a damaged offset crashes the process. So a copy whose columns
or number of rows differ from what was written is rebuilt, and each batch of 256 rows is validated before its
first row is read, which finds invalid offsets, not changed letters.
"""

from __future__ import annotations

from collections.abc import Sequence
from logging import getLogger
from pathlib import Path
from typing import IO, Any

import numpy as np

from packhorse.errors import BadSample
from packhorse.rows.index import file_error
from packhorse.rows.row_files import Row, RowFile, TableRow
from packhorse.utils.files import Fingerprint, build_once, digest, is_machine_error, rebuild

logger = getLogger(__name__)

_ROWS_PER_BATCH = 256
_CHECK = b"packhorse"
"""Metadata key of the digest of a copy's columns and number of rows."""


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
                        # Not a cast of the whole, which fails for fields without values.
                        columns = [
                            column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column
                            for column in batch.columns
                        ]
                        writer.write_batch(pyarrow.RecordBatch.from_arrays(columns, schema=schema))
            self._check_unchanged()  # the name of the copy is that of the opened state
        except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError, OSError) as error:
            if is_machine_error(error):
                raise
            raise file_error(self.name, f"not a readable Parquet file ({error})") from error

    def _check_unchanged(self) -> None:
        if Fingerprint.of(self.path) != self._fingerprint:
            raise file_error(self.name, "the file has changed since it was opened")

    @property
    def _cache_name(self) -> str:
        # Copies under arrow/ are of an older format.
        return f"arrow-2/{self._fingerprint.key(self.path)}.arrow"

    def _open(self) -> None:
        import pyarrow

        path = build_once(self._cache_name, self._rewrite)
        self._inode = 0  # until a copy is found, which another process may delete before it is mapped
        try:
            self._map(path)
        except (pyarrow.ArrowException, ValueError, OSError) as error:
            self._rebuild(path, error)

    def _map(self, path: Path) -> None:
        """Open the copy; raise a ValueError, or what Arrow raises, if it is damaged."""
        import pyarrow

        self._copy, self._inode = path, path.stat().st_ino
        reader = pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))
        sizes = [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]
        if (reader.schema.metadata or {}).get(_CHECK) != _check(reader.schema, sum(sizes)):
            raise ValueError("its columns and rows are not those that were written")
        self._reader, self._ends = reader, np.cumsum(sizes, dtype=np.int64)
        self._validated = np.zeros(len(sizes), np.bool_)

    def _rebuild(self, path: Path, error: Exception) -> None:
        """Replace the damaged copy; raise if the new one is damaged too, or the Parquet file has changed."""
        import pyarrow

        is_empty = not path.exists() or not path.stat().st_size  # then it cannot be mapped
        if is_machine_error(error) and not is_empty:
            raise error
        self._check_unchanged()
        logger.warning("%s, the copy of %s, is damaged (%s): rebuilding it", path, self.name, error)
        path = rebuild(self._cache_name, self._rewrite, self._inode)
        try:
            self._map(path)
            for batch in range(len(self._ends)):
                self._read_batch(batch)
        except (pyarrow.ArrowException, ValueError, OSError) as again:
            problem = (
                f"the copy of {self.name} is damaged right after it was written ({again}): check the disk"
            )
            raise file_error(path, f"{problem}, or set PACKHORSE_CACHE to another folder") from again

    def _read_batch(self, number: int) -> Any:
        """Return a valid batch; raise what Arrow raises if it is damaged."""
        batch = self._reader.get_batch(number)
        if not self._validated[number]:
            for column in batch.columns:
                _validate(column)
            self._validated[number] = True
        return batch

    def _batch_of(self, row: int) -> tuple[int, Any]:
        """Return the first row of the batch that a row is in, and the batch."""
        import pyarrow

        number = int(np.searchsorted(self._ends, row, side="right"))
        try:
            batch = self._read_batch(number)
        except (pyarrow.ArrowException, ValueError, OSError) as error:
            self._rebuild(self._copy, error)
            number = int(np.searchsorted(self._ends, row, side="right"))  # sizes of batches may differ
            batch = self._read_batch(number)
        return int(self._ends[number]) - batch.num_rows, batch

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, row: int) -> Row:
        row = self._check_index(row)
        start, batch = self._batch_of(row)
        try:
            values: list[Row] = batch.slice(row - start, 1).to_pylist()
        except UnicodeDecodeError as error:
            detail = f"{self.location(row)}: not UTF-8: {error}"
            raise BadSample(detail, reason="malformed_row", stage="read") from error
        return TableRow(values[0])

    def table(self, rows: Sequence[int]) -> Any:
        """Return these rows, in this order, as an Arrow table with the types and metadata of the file."""
        import pyarrow
        import pyarrow.parquet

        numbers = [self._check_index(row) for row in rows]
        pieces, done = [], 0
        while done < len(numbers):
            start, batch = self._batch_of(numbers[done])
            here = []
            while done < len(numbers) and 0 <= numbers[done] - start < batch.num_rows:
                here.append(numbers[done] - start)
                done += 1
            # Taken, not sliced: a cast ignores the offset of a slice of nested values.
            pieces.append(batch.take(pyarrow.array(here)))
        schema = pyarrow.parquet.read_schema(self.path)
        taken = pyarrow.Table.from_batches(pieces, self._reader.schema)
        columns = [
            column if column.type == field.type else column.cast(field.type)
            for column, field in zip(taken, schema, strict=True)
        ]
        return pyarrow.Table.from_arrays(columns, schema=schema)

    def location(self, row: int) -> str:
        """Return file and row number."""
        return f"{self.name}, row {self._check_index(row)}"

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "path": self.path, "_fingerprint": self._fingerprint}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._check_unchanged()
        self._open()


def _plain(schema: Any) -> Any:
    """Return the schema without dictionary encoding: batches may have different dictionaries."""
    import pyarrow

    is_dictionary = pyarrow.types.is_dictionary
    return pyarrow.schema([f.with_type(f.type.value_type) if is_dictionary(f.type) else f for f in schema])


def _check(schema: Any, rows: int) -> bytes:
    """Return a digest of columns and number of rows, to detect a damaged copy."""
    return digest(repr([_describe(field) for field in schema]), str(rows)).encode()


def _describe(field: Any) -> list[Any]:
    """Return a description of a column (or a field inside of one).

    It is the same for the Parquet file, for the copy and for all versions of pyarrow that share a cache: not
    pyarrow's own, which has a name for the entries of a map; extension types are described by their storage.
    """
    import pyarrow

    kind, extension = field.type, (field.metadata or {}).get(b"ARROW:extension:name", b"").decode("latin-1")
    if isinstance(kind, pyarrow.BaseExtensionType):
        kind, extension = kind.storage_type, kind.extension_name
    inner = [_describe(part) for part in _parts(kind)]
    description = [_nesting(kind), getattr(kind, "list_size", None), inner] if inner else str(kind)
    return [field.name, field.nullable, extension, description]


def _parts(kind: Any) -> list[Any]:
    """Return the fields of a nested type."""
    from pyarrow import types

    if types.is_struct(kind):
        return list(kind)
    if types.is_map(kind):
        return [kind.key_field.with_name("key"), kind.item_field.with_name("value")]
    return [kind.value_field] if hasattr(kind, "value_field") else []


def _nesting(kind: Any) -> str:
    """Return ``large_list`` for ``large_list<item: string>``."""
    return str(kind).partition("<")[0]


def _validate(column: Any) -> None:
    """Validate a column; raise what Arrow raises if it is invalid."""
    import pyarrow

    try:
        column.validate(full=True)
    except pyarrow.ArrowInvalid:
        # A text that is not UTF-8 is no damage: it is the same in the Parquet file, and its row is reported.
        # As bytes, texts end at their last offset, which is validated first.
        column.validate()
        pyarrow.array(_AsBytes(column)).validate(full=True)


class _AsBytes:
    """A column with its texts as bytes, for Arrow's C interface, without a copy.

    Not ``column.view``, which changes the lengths of fields without values.
    """

    def __init__(self, column: Any) -> None:
        self._column = column

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[Any, Any]:
        _, values = self._column.__arrow_c_array__()
        return _without_texts(self._column.type).__arrow_c_schema__(), values


def _without_texts(kind: Any) -> Any:
    """Return the type with bytes instead of texts, and storage types instead of extension types."""
    import pyarrow
    from pyarrow import types

    bytes_for = {
        pyarrow.string(): pyarrow.binary(),
        pyarrow.large_string(): pyarrow.large_binary(),
        pyarrow.string_view(): pyarrow.binary_view(),
    }
    if kind in bytes_for:
        return bytes_for[kind]
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _without_texts(kind.storage_type)
    if types.is_dictionary(kind):
        return pyarrow.dictionary(kind.index_type, _without_texts(kind.value_type), kind.ordered)
    parts = [part.with_type(_without_texts(part.type)).remove_metadata() for part in _parts(kind)]
    match _nesting(kind):
        case "struct":
            return pyarrow.struct(parts)
        case "map":
            return pyarrow.map_(*parts)
        case "fixed_size_list":
            return pyarrow.list_(*parts, kind.list_size)
        case "list":
            return pyarrow.list_(*parts)
        case "large_list" | "list_view" | "large_list_view" as name:
            return getattr(pyarrow, name)(*parts)
    return kind
