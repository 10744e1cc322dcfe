"""An engine by its name, as a command line says it."""

from __future__ import annotations

import sys

from packhorse.engines.base import Engine
from packhorse.engines.local import LocalEngine
from packhorse.errors import ConfigError

ENGINES = ("local", "ray")


def engine_named(name: str, workers: int | None = None, ray_address: str | None = None) -> Engine:
    """The engine ``name`` ("local" or "ray").

    Args:
        name: one of :data:`ENGINES`.
        workers: how many tasks run at the same time; None leaves it to the engine (all cores, or as many as
            the cluster has).
        ray_address: an existing Ray cluster; None takes that of ``RAY_ADDRESS``, else starts one on this
            machine.
    """
    if name == "local":
        if ray_address is not None:
            raise ConfigError(f"ray_address={ray_address!r} goes with the engine 'ray', not with 'local'")
        # The process of a command is our own: it has used no GPU, and forks start at once with all it loaded.
        return LocalEngine(workers, start="fork" if sys.platform == "linux" else "spawn")
    if name == "ray":
        from packhorse.engines.ray_engine import RayEngine

        return RayEngine(ray_address, workers)
    raise ConfigError(f"unknown engine {name!r}: expected one of {', '.join(ENGINES)}")
