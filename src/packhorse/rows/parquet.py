"""Parquet files by row number.

Parquet can only be read a row group at a time, so the file is rewritten once into the cache as an Arrow file,
uncompressed and memory-mapped: any row then costs tens of microseconds, and processes share the pages. The
cache needs the space of the uncompressed table.

Arrow believes what a file says of itself, and a damaged offset ends the process. So a copy whose columns or
number of rows are not those that were written is made anew, and each batch is looked through before the
first of its rows is read. That reads all texts of the batch, 256 rows: where texts are short it costs about
as much as another row, and 10 to 20 ms where each has 200 kB; bytes of media are not read for it. It finds a
contradiction, not another letter: what is valid in itself is taken for what the Parquet file has.
"""

from __future__ import annotations

from collections.abc import Sequence
from logging import getLogger
from pathlib import Path
from typing import IO, Any

import numpy as np

from packhorse.errors import BadSample, ConfigError
from packhorse.rows.row_files import Row, RowFile
from packhorse.utils.files import Fingerprint, build_once, digest, is_machine_error, rebuild

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
            self._must_be_as_opened()  # the copy has the name of the file that was opened
        except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError, OSError) as error:
            if is_machine_error(error):
                raise
            raise ConfigError(f"{self.name}: not a readable Parquet file ({error})") from error

    def _must_be_as_opened(self) -> None:
        if Fingerprint.of(self.path) != self._fingerprint:
            raise ConfigError(f"{self.name}: the file has changed since it was opened")

    @property
    def _in_cache(self) -> str:
        # Copies under arrow/ say nothing, or something else, of their columns.
        return f"arrow-2/{self._fingerprint.key(self.path)}.arrow"

    def _open(self) -> None:
        import pyarrow

        path = build_once(self._in_cache, self._rewrite)
        self._inode = 0  # until a copy was found, which somebody may delete before it is mapped
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
            ConfigError: the new one is damaged as well, or the Parquet file is another one by now.
        """
        import pyarrow

        if is_machine_error(error) and _holds_anything(path):  # an empty file cannot be mapped
            raise error
        self._must_be_as_opened()
        logger.warning("%s, the copy of %s, is damaged (%s): making it anew", path, self.name, error)
        path = rebuild(self._in_cache, self._rewrite, self._inode)
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

        number = self._number_of_batch(row)
        try:
            batch = self._look_through(number)
        except (pyarrow.ArrowException, ValueError, OSError) as error:
            self._make_anew(self._copy, error)
            number = self._number_of_batch(row)
            batch = self._look_through(number)
        return int(self._ends[number]) - batch.num_rows, batch

    def _number_of_batch(self, row: int) -> int:
        return int(np.searchsorted(self._ends, row, side="right"))

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
        return values[0]

    def table(self, rows: Sequence[int]) -> Any:
        """These rows, in this order, as an Arrow table with the types and the metadata of the file."""
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
            # Taken, not sliced: a cast does not see where a slice of nested values begins.
            pieces.append(batch.take(pyarrow.array(here)))
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
        return f"{self.name}, row {self._check_index(row)}"

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "path": self.path, "_fingerprint": self._fingerprint}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._must_be_as_opened()
        self._open()


def _holds_anything(path: Path) -> bool:
    """Whether a file is there and is not empty."""
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


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
    return digest(repr([_described(field) for field in schema]), str(rows)).encode()


def _described(field: Any) -> list[Any]:
    """A column (or a field inside of one) in words that are the same for the Parquet file and for the copy.

    And for all versions of pyarrow that share a cache. So it is not what pyarrow prints, which has a name for
    the entries of a map; and a type that only some versions know is told as the others see it.
    """
    import pyarrow

    kind, extension = field.type, (field.metadata or {}).get(b"ARROW:extension:name", b"").decode("latin-1")
    if isinstance(kind, pyarrow.BaseExtensionType):
        kind, extension = kind.storage_type, kind.extension_name
    inner = [_described(part) for part in _parts(kind)]
    told = [_kind_of_nesting(kind), getattr(kind, "list_size", None), inner] if inner else str(kind)
    return [field.name, field.nullable, extension, told]


def _parts(kind: Any) -> list[Any]:
    """The fields that a type is made of."""
    from pyarrow import types

    if types.is_struct(kind):
        return list(kind)
    if types.is_map(kind):
        return [kind.key_field.with_name("key"), kind.item_field.with_name("value")]
    return [kind.value_field] if hasattr(kind, "value_field") else []


def _kind_of_nesting(kind: Any) -> str:
    """``large_list`` for ``large_list<item: string>``."""
    return str(kind).partition("<")[0]


def _validate(column: Any) -> None:
    """Look through a column; raises what Arrow raises where it contradicts itself."""
    import pyarrow

    try:
        column.validate(full=True)
    except pyarrow.ArrowInvalid:
        # A text that is no UTF-8 is no damage: the Parquet file has it so, and its row is told to be bad. But
        # handed over as bytes, texts end where their last offset says, so this is looked at before.
        column.validate()
        pyarrow.array(_AsBytes(column)).validate(full=True)


class _AsBytes:
    """A column whose texts are to be seen as bytes, for Arrow's C interface. Nothing is copied.

    Not ``column.view``, which gives fields without values other lengths.
    """

    def __init__(self, column: Any) -> None:
        self._column = column

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[Any, Any]:
        _, values = self._column.__arrow_c_array__()
        return _without_texts(self._column.type).__arrow_c_schema__(), values


def _without_texts(kind: Any) -> Any:
    """The same type, with bytes in place of texts, and with what an extension type stores in place of it."""
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
    match _kind_of_nesting(kind):
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
