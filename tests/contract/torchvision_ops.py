"""Lets torchvision import beside a CPU build of torch that has no matching torchvision wheel.

The wheel for another build loads no C++ extension, so the schema of ``torchvision::nms`` is missing and the
first import fails. The schema alone is enough: the transforms that image and video processors use are
written in torch. Where torchvision imports by itself, nothing is touched.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


@lru_cache(maxsize=1)
def make_torchvision_importable() -> Any:
    """Import torchvision, defining the two missing schemas first where it cannot import without.

    Returns the library that owns the definitions (it must live as long as the process), or None.
    """
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    else:
        return None
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]  # what the failed import left half done

    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(operator + _SCHEMA)
    import torchvision  # noqa: F401

    return library
