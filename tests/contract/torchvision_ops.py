"""Real processors beside a CPU build of torch that has no matching torchvision wheel."""

from packhorse.cli.torchvision_help import help_torchvision as make_torchvision_importable

__all__ = ["make_torchvision_importable"]
