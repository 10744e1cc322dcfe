"""Lets torchvision import beside a build of torch that its compiled operators were not made for.

The processors of transformers use torchvision's transforms, which are written in torch. Its import defines
shapes for ``torchvision::nms`` first, and fails where no compiled extension has declared that operator. The
declaration alone is enough. Where torchvision imports by itself, nothing is touched.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ARGUMENTS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: list[Any] = []  # the declarations live as long as what holds them


def help_torchvision() -> None:
    """From now on an import of torchvision that lacks its operators is tried again with them declared.

    Costs nothing until torchvision is imported; a second call changes nothing.
    """
    if "torchvision" not in sys.modules and not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchvision":
            return None
        # Those behind this one only: a second copy of this module may have a finder of its own.
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((one for one in found if one is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec, spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, spec: ModuleSpec, own: Loader) -> None:
        self.spec, self.own = spec, own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.spec.loader = module.__loader__ = self.own  # everybody else sees the module as it is
        try:
            self.own.exec_module(module)
        except RuntimeError as error:
            if "torchvision::nms" not in str(error):
                raise
            for name in [name for name in sys.modules if name.startswith("torchvision.")]:
                del sys.modules[name]  # what the failed import left half done
            from torch import library

            untyped: Any = library
            _declared.append(untyped.Library("torchvision", "FRAGMENT"))
            for operator in ("nms", "qnms"):
                _declared[0].define(operator + _ARGUMENTS)
            self.own.exec_module(module)
