"""Where a pass over many independent tasks runs: processes on this machine, or a Ray cluster.

Every engine gives the same results for the same tasks; they differ in where the work is done.
"""

from packhorse.engines.base import MAX_RETRIES, Engine, EngineError
from packhorse.engines.choose import ENGINES, engine_named
from packhorse.engines.local import LocalEngine

__all__ = ["ENGINES", "MAX_RETRIES", "Engine", "EngineError", "LocalEngine", "engine_named"]
