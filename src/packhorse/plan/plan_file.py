"""A plan as a file: Arrow, memory-mapped, under a key that says what it was made from.

The file has one row of lists, so each array of the plan is one piece of the file and is used where it lies.
No time and no path is in it: the same plan gives the same bytes. Loading reads all of it once to see that it
is whole (some 40 bytes a sample, a tenth of a second for ten million).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from packhorse.errors import ConfigError
from packhorse.plan.pack_plan import DROP_REASONS, PackPlan, PlanKey
from packhorse.plan.planning import Limits, as_integers
from packhorse.utils.files import write_whole

_FORMAT = "packhorse-plan-1"
_PLANNER = 1  # goes up when the same lengths give another plan
# The columns, and of what kind numpy says their numbers are; the last two may be missing.
_ARRAYS = {"offsets": "i", "indices": "i", "tokens": "i", "dropped": "i", "drop_codes": "u"}
_MORE_ARRAYS = {"costs": "f", "kinds": "u"}


def plan_key(
    lengths: npt.ArrayLike,
    capacity: int,
    *,
    limits: Limits | None = None,
    alignment: int = 1,
    seed: int | None = None,
    epoch: int = 0,
    strata: npt.ArrayLike | None = None,
    effort: float | None = None,
    empty: str = "drop",
    source: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What ``plan_packs`` would plan from: a digest of all counts, and the settings.

    It takes the arguments of ``plan_packs``, and as ``source`` anything else that JSON can hold and on which
    the plan depends: names of data, of the processor.
    """
    hashed = hashlib.blake2b(digest_size=16)
    tokens = as_integers(lengths, "lengths")
    columns = {"lengths": tokens} | {
        f"limit {name}": as_integers(values[0], name) for name, values in (limits or {}).items()
    }
    if strata is not None:
        columns["strata"] = as_integers(strata, "strata")
    for name, column in sorted(columns.items()):
        hashed.update(f"{name} {len(column)} ".encode())
        hashed.update(np.ascontiguousarray(column, "<i8").data)
    key = {
        "counts": hashed.hexdigest(),
        "samples": len(tokens),
        "capacity": capacity,
        "alignment": alignment,
        "limits": {name: int(limit) for name, (_, limit) in (limits or {}).items()},
        "seed": seed,
        "epoch": epoch,
        "effort": effort,
        "empty": empty,
        "source": dict(source or {}),
        "planner": _PLANNER,
    }
    plain: dict[str, Any] = json.loads(json.dumps(key))
    return plain


def save(plan: PackPlan, path: str | os.PathLike[str], key: PlanKey) -> None:
    """Write a plan; the file appears under its name when it is whole."""
    import pyarrow as pa

    arrays = {name: getattr(plan, name) for name in (*_ARRAYS, *_MORE_ARRAYS)}
    present = {name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None}
    about = {
        "format": _FORMAT,
        "key": key,
        "capacity": plan.capacity,
        "bound": plan.bound,
        "reasons": DROP_REASONS,
    }
    about["digest"] = _digest(about, present)
    columns = [
        pa.LargeListArray.from_arrays(np.array([0, len(array)], np.int64), pa.array(array))
        for array in present.values()
    ]
    schema = pa.schema(
        [(name, column.type) for name, column in zip(present, columns, strict=True)],
        metadata={"packhorse": json.dumps(about, sort_keys=True)},
    )

    def write(file: IO[bytes]) -> None:
        with pa.ipc.new_file(file, schema) as writer:
            writer.write_batch(pa.record_batch(columns, schema=schema))

    write_whole(Path(path), write)


def load(path: str | os.PathLike[str], key: PlanKey | None = None) -> PackPlan:
    """Open a plan; see ``PackPlan.load``."""
    about, arrays = _read(path)
    if key is not None:
        _refuse_another_key(path, about["key"], key)
    plan = PackPlan(**arrays, capacity=about["capacity"], bound=about["bound"])
    if wrong := _contradiction(plan):
        raise _damaged(path, wrong)
    return plan


def load_key(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The key a plan was saved under."""
    key: dict[str, Any] = _read(path)[0]["key"]
    return key


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the file says about itself, and its arrays as they lie in the file."""
    import pyarrow as pa

    if not os.path.getsize(path):
        raise _damaged(path, "it is empty")
    try:
        with pa.memory_map(os.fspath(path)) as mapped:
            reader = pa.ipc.open_file(mapped)
            about = json.loads((reader.schema.metadata or {})[b"packhorse"])
            if about["format"] != _FORMAT:
                raise ConfigError(
                    f"{os.fspath(path)}: expected {_FORMAT}, found {about['format']}; plan anew"
                )
            batch = reader.get_batch(0)
            batch.validate(full=True)
            arrays = {name: _as_it_lies(batch.column(name)[0].values) for name in batch.schema.names}
        _check_columns(arrays)
        if tuple(about["reasons"]) != DROP_REASONS or about.pop("digest") != _digest(about, arrays):
            raise ValueError("its content does not match its digest")
        if not isinstance(about["key"], dict) or type(about["capacity"]) is not int or about["capacity"] < 1:
            raise ValueError("it does not say what it was planned from")
        if type(about["bound"]) is not int or about["bound"] < 0:
            raise ValueError("it does not say how few packs there could be")
    except ConfigError:
        raise
    except (
        *(pa.ArrowException, ValueError, LookupError, TypeError, AttributeError, OSError),
        RecursionError,  # JSON nested without end
    ) as error:
        raise _damaged(path, str(error)) from error
    return about, arrays


def _as_it_lies(values: Any) -> npt.NDArray[Any]:
    """An array over the file's own memory.

    (``to_numpy`` imports pandas first, which takes half a second.)

    Raises:
        ValueError: these are no numbers, or some are missing.
    """
    from pyarrow import types

    if not (types.is_integer(values.type) or types.is_floating(values.type)):
        raise ValueError(f"{values.type} in place of numbers")
    kind = np.dtype(values.type.to_pandas_dtype())
    if values.null_count:
        raise ValueError("empty places in an array of numbers")
    if not len(values):
        return np.empty(0, kind)
    return np.frombuffer(values.buffers()[1], kind, len(values), values.offset * kind.itemsize)


def _check_columns(arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    if missing := sorted(set(_ARRAYS) - set(arrays)):
        raise ValueError(f"without {', '.join(missing)}")
    known = _ARRAYS | _MORE_ARRAYS
    if wrong := sorted(name for name, array in arrays.items() if array.dtype.kind != known.get(name)):
        raise ValueError(f"unknown columns, or of another kind: {', '.join(wrong)}")


def _digest(about: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    hashed = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=16)
    for name, array in arrays.items():
        hashed.update(f"{name} {array.dtype.str} {len(array)} ".encode())
        hashed.update(array.data)
    return hashed.hexdigest()


def _contradiction(plan: PackPlan) -> str:
    """What cannot be true of a plan, however it was saved; nothing if all is well."""
    sizes = np.diff(plan.offsets)
    if (
        not len(plan.offsets)
        or plan.offsets[0]
        or (sizes <= 0).any()
        or plan.offsets[-1] != len(plan.indices)
    ):
        return "the packs do not cover its samples"
    if len(plan.tokens) != len(plan) or len(plan.dropped) != len(plan.drop_codes):
        return "its columns have different lengths"
    for column in (plan.costs, plan.kinds):
        if column is not None and len(column) != len(plan):
            return "its columns have different lengths"
    if (plan.drop_codes >= len(DROP_REASONS)).any():
        return "it drops samples for an unknown reason"
    every = np.concatenate([plan.indices, plan.dropped])
    if len(every) and (every.min() < 0 or every.max() >= len(every) or np.bincount(every).max() > 1):
        return "a sample is missing or in two packs"
    return ""


def _refuse_another_key(path: str | os.PathLike[str], found: Mapping[str, Any], wanted: PlanKey) -> None:
    try:
        plain = json.loads(json.dumps(dict(wanted)))  # as it comes back from a file: lists for tuples
    except TypeError as error:
        raise ConfigError(f"the key of a plan: expected what JSON can hold ({error})") from error
    absent = object()
    names = [name for name in sorted({*found, *plain}) if found.get(name, absent) != plain.get(name, absent)]
    if names:
        theirs, ours = (
            ", ".join(f"{name}={key[name]}" if name in key else f"no {name}" for name in names)
            for key in (found, plain)
        )
        raise ConfigError(f"{os.fspath(path)} was planned from {theirs}; asked for {ours}: plan anew")


def _damaged(path: str | os.PathLike[str], why: str) -> ConfigError:
    return ConfigError(f"{os.fspath(path)} is not a whole plan ({why}): remove it and plan anew")
