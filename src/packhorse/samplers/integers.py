"""A list of many whole numbers in eight bytes each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt


class Integers(Sequence[int]):
    """Reads like a list of ints (``[i]``, ``len``, ``==`` with a list), is kept like a numpy array.

    ``np.asarray`` of it costs nothing. Ten million numbers take 80 MB; as a list they would take 400.
    """

    __slots__ = ("_values",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, values: npt.NDArray[np.int64]) -> None:
        self._values = values.view()
        self._values.flags.writeable = False

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        found: int | list[int] = self._values[index].tolist()
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | tuple | Integers | np.ndarray):
            return NotImplemented
        return len(self) == len(other) and bool(np.array_equal(self._values, np.asarray(other)))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self._values.astype(dtype or np.int64, copy=bool(copy))

    def __repr__(self) -> str:
        first = ", ".join(map(str, self[:8]))
        return f"Integers([{first}{', …' if len(self) > 8 else ''}], {len(self):,} in all)"
