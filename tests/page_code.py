"""The Python code of a page, and a preamble that replaces released models by small ones."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python_blocks(page: Path) -> list[str]:
    """Return the Python blocks of a page that are run one after another."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


SMALL_MODELS = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from contract.torchvision_ops import make_torchvision_importable
make_torchvision_importable()
from contract.processors import processor
from contract.tiny_models import tiny_model
from copy import deepcopy
import transformers
transformers.AutoProcessor.from_pretrained = lambda name: processor("qwen2_5_vl")
transformers.AutoModelForImageTextToText.from_pretrained = lambda name: deepcopy(tiny_model("qwen2_5_vl"))
"""
