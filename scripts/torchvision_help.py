"""Let torchvision import next to a build of torch that its compiled operators were not built for.

The processors of transformers use torchvision's transforms, which are written in torch. The import of
torchvision first registers shapes for ``torchvision::nms``, and fails if no compiled extension has declared
that operator. Declaring it is enough. If torchvision imports without help, nothing changes.

``make`` copies this file into the environment and runs it in every process through a ``.pth`` file;
docs/reference/troubleshooting.md says how to do the same elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ARGUMENTS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: list[Any] = []  # a declaration ends when its Library object is garbage-collected


def help_torchvision() -> None:
    """Retry an import of torchvision that lacks its operators, with the operators declared.

    Costs nothing until torchvision is imported; a second call changes nothing.
    """
    if "torchvision" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchvision":
            return None
        # Only the finders after this one: a second copy of this module may have its own finder.
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec, spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, spec: ModuleSpec, original: Loader) -> None:
        self.spec, self.original = spec, original

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.spec.loader = module.__loader__ = self.original  # other code sees an ordinary module
        try:
            self.original.exec_module(module)
        except RuntimeError as error:
            if "torchvision::nms" not in str(error):
                raise
            for name in [name for name in sys.modules if name.startswith("torchvision.")]:
                del sys.modules[name]  # left over from the failed import
            from torch import library

            untyped: Any = library
            _declared.append(untyped.Library("torchvision", "FRAGMENT"))
            for operator in ("nms", "qnms"):
                _declared[0].define(operator + _ARGUMENTS)
            self.original.exec_module(module)
