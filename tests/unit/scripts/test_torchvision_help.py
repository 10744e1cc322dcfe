"""``scripts/torchvision_help.py`` lets torchvision import next to any build of torch."""

import subprocess
import sys
import sysconfig
from pathlib import Path

SCRIPTS = Path(__file__).parents[3] / "scripts"
# With -S no .pth file of the environment runs, so only this copy of the script can help.
CODE = f"""
import sys
sys.path += [{sysconfig.get_path("purelib")!r}, {sysconfig.get_path("platlib")!r}]
sys.path.insert(0, {str(SCRIPTS)!r})
from torchvision_help import help_torchvision
help_torchvision()
help_torchvision()
import torch, torchvision
from torchvision.transforms.v2 import functional
assert functional.resize(torch.zeros(3, 8, 6), [4, 3]).shape == (3, 4, 3)
print(sys.modules["torchvision_help"].__file__, type(torchvision.__spec__.loader).__name__)
"""


def test_torchvision_imports_and_resizes_without_any_other_help() -> None:
    run = subprocess.run([sys.executable, "-S", "-c", CODE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(SCRIPTS / "torchvision_help.py"), "SourceFileLoader"]
