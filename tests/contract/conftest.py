"""Real processors need torchvision; make sure it imports before any test module imports transformers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from contract.torchvision_ops import make_torchvision_importable

make_torchvision_importable()


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Media files by name."""
    from contract.media_files import write_media

    return write_media(tmp_path_factory.mktemp("media"))


@pytest.fixture(scope="session")
def made(files: dict[str, Path]) -> Callable[[str, str], Any]:
    """A function that encodes a case for a family, once per test run."""
    from functools import cache

    from contract.encoding import make

    return cache(lambda name, case: make(name, case, files))


@pytest.fixture
def uncompiled_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex attention and its masks as plain PyTorch: compiling them takes a minute."""
    from contract.sweep import without_compiling_flex

    without_compiling_flex(monkeypatch)


@pytest.fixture
def attention_as_before() -> Iterator[None]:
    """Restore the attention backend of every tiny model after the test, and let it compute all logits."""
    from contract.tiny_models import MODELS, tiny_model
    from packhorse.families.logits import LogitsChoice, set_logits
    from packhorse.families.models import attention_of
    from packhorse.integrations.attention import use_attention

    before = {name: attention_of(tiny_model(name)) for name in MODELS}
    yield
    for name, attention in before.items():
        use_attention(tiny_model(name), attention)
        set_logits(tiny_model(name), LogitsChoice())
