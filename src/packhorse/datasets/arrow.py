"""Parquet files by row number.

Parquet can only be read a row group at a time, so the file is rewritten once into the cache as an Arrow file,
uncompressed and memory-mapped: any row then costs tens of microseconds, and processes share the pages. The
cache needs the space of the uncompressed table.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import IO, Any

import numpy as np

from packhorse.datasets.cache import Fingerprint, build_once
from packhorse.datasets.rows import Row, RowFile
from packhorse.errors import ConfigError

_ROWS_PER_BATCH = 256


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
            with (
                pyarrow.parquet.ParquetFile(self.path) as parquet,
                pyarrow.ipc.new_file(file, _plain(parquet.schema_arrow)) as writer,
            ):
                for batch in parquet.iter_batches(batch_size=_ROWS_PER_BATCH):
                    writer.write_batch(batch.cast(_plain(batch.schema)))
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise ConfigError(f"{self.name}: not a readable Parquet file ({error})") from error

    def _open(self) -> None:
        import pyarrow

        name = f"arrow/{self._fingerprint.key(self.path)}.arrow"
        self._reader = pyarrow.ipc.open_file(pyarrow.memory_map(str(build_once(name, self._rewrite))))
        sizes = [self._reader.get_batch(i).num_rows for i in range(self._reader.num_record_batches)]
        self._ends = np.cumsum(sizes, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, row: int) -> Row:
        row = self._checked(row)
        batch = int(np.searchsorted(self._ends, row, side="right"))
        start = int(self._ends[batch - 1]) if batch else 0
        values: list[Row] = self._reader.get_batch(batch).slice(row - start, 1).to_pylist()
        return values[0]

    def table(self, rows: Sequence[int]) -> Any:
        """These rows, in this order, as an Arrow table with the types and the metadata of the file."""
        import pyarrow
        import pyarrow.parquet

        at = [self._checked(row) for row in rows]
        starts = [0, *self._ends.tolist()]
        by_batch = itertools.groupby(at, lambda row: int(np.searchsorted(self._ends, row, side="right")))
        # Taken, not sliced: a cast does not see where a slice of nested values begins.
        pieces = [
            self._reader.get_batch(batch).take(pyarrow.array([row - starts[batch] for row in group]))
            for batch, group in by_batch
        ]
        whole = pyarrow.Table.from_batches(pieces, self._reader.schema)
        return whole.cast(pyarrow.parquet.read_schema(self.path))

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
