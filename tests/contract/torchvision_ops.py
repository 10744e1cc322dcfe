"""Make torchvision importable next to a CPU build of torch, for which there is no torchvision wheel."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from torchvision_help import help_torchvision as make_torchvision_importable

__all__ = ["make_torchvision_importable"]
