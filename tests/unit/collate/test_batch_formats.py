"""The batch format of each attention implementation, by its name in transformers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers import AttentionInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from packhorse.collate import batch_formats
from packhorse.collate.batch_formats import (
    ATTENTION,
    batch_format_of,
    declare_batch_format,
    find_batch_format,
    is_hub_kernel,
)
from packhorse.collate.packed import takes_batches_of
from packhorse.families.vision import FLASH_VARLEN
from packhorse.integrations.attention import check_attention
from raising import raises_config


@pytest.fixture(autouse=True)
def _declarations_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(batch_formats, "_declared", {})
    names = [*AttentionInterface()]
    yield
    for name in {*AttentionInterface()} - {*names}:
        # transformers has no way to unregister a function.
        del AttentionInterface._global_mapping[name]
        AttentionMaskInterface._global_mapping.pop(name, None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, name) for name in ATTENTION),
        ("flash_attention_3", "flash_attention_2"),
        ("flash_attention_4", "flash_attention_2"),
        ("kernels-community/flash-attn2", "flash_attention_2"),
        ("kernels-community/flash-attn2@v1.2", "flash_attention_2"),
        ("kernels-community/vllm-flash-attn3", "flash_attention_2"),
        ("someone/flash-kernel@main:forward", "flash_attention_2"),
        ("someone/sage:flash", None),
        ("someone/sage", None),
        ("paged|eager", None),
        ("paged|kernels-community/flash-attn2", None),
        ("flash", None),
    ],
)
def test_a_name_of_transformers_has_one_format(name: str, expected: str | None) -> None:
    assert find_batch_format(name) == expected
    if expected is None:
        with raises_config("attn_implementation", name):
            batch_format_of(name)
    else:
        assert batch_format_of(name) == expected


def test_every_attention_of_transformers_has_a_format_or_is_for_generation() -> None:
    for name in set(AttentionInterface()) - {FLASH_VARLEN}:  # which is for vision towers
        assert (find_batch_format(name) is None) == name.startswith("paged|")


@pytest.mark.parametrize(
    "name",
    [
        "kernels-community/flash-attn2",
        "a/b:f",
        "a/b@c",
        "a/b@c:f",
        "a/b/c",
        "a:b",
        "sdpa",
        "a/b:",
        "paged|a/b",
    ],
)
def test_kernels_of_the_hub_are_spelt_as_in_transformers(name: str) -> None:
    from transformers.integrations.hub_kernels import is_kernel

    # transformers removes the prefix of paged attention before it compares.
    assert is_hub_kernel(name) == (is_kernel(name) and not name.startswith("paged|"))


def test_a_loaded_kernel_goes_by_the_function_that_transformers_chose() -> None:
    AttentionInterface.register("someone/fast", flash_attention_forward)
    AttentionInterface.register("someone/not-flash", sdpa_attention_forward)
    assert batch_format_of("someone/fast") == "flash_attention_2"
    with raises_config("attn_implementation", "someone/not-flash", match="declare_batch_format"):
        batch_format_of("someone/not-flash")


def test_a_registered_function_needs_a_declared_format() -> None:
    AttentionInterface.register("packed_flash", sdpa_attention_forward)
    with raises_config("attn_implementation", "packed_flash", match="declare_batch_format"):
        batch_format_of("packed_flash")
    assert not takes_batches_of("packed_flash", "varlen")
    declare_batch_format("packed_flash", "varlen")
    assert batch_format_of("packed_flash") == "varlen"
    assert takes_batches_of("packed_flash", "flash_attention_3")
    assert not takes_batches_of("packed_flash", "sdpa")
    assert check_attention("packed_flash") == "packed_flash"


def test_a_declared_mask_needs_a_mask_that_transformers_can_build() -> None:
    AttentionInterface.register("own_sdpa", sdpa_attention_forward)
    with raises_config("attn_implementation", "own_sdpa", match="AttentionMaskInterface.register"):
        declare_batch_format("own_sdpa", "sdpa")
    AttentionMaskInterface.register("own_sdpa", sdpa_mask)
    declare_batch_format("own_sdpa", "sdpa")
    assert takes_batches_of("own_sdpa", "eager")


def test_wrong_declarations_raise() -> None:
    with raises_config("batch_format", "varlne", match="did you mean 'varlen'"):
        declare_batch_format("mine", "varlne")
    with raises_config("attn_implementation", "mine", match="AttentionInterface.register"):
        declare_batch_format("mine", "varlen")
    with raises_config("attn_implementation", "sdpa", match="a name of its own"):
        declare_batch_format("sdpa", "varlen")


def test_an_unknown_name_is_rejected_with_all_names_and_the_nearest() -> None:
    AttentionInterface.register("striped", sdpa_attention_forward)
    with raises_config(
        "attn_implementation", match=r"one of sdpa, .*flash_attention_4.*mean 'flash_attention_3'"
    ):
        batch_format_of("flash_atention_3")
    with raises_config("attn_implementation", match="mean 'striped'"):
        batch_format_of("stripd")
    with raises_config("attn_implementation", match="for generation"):
        batch_format_of("paged|sdpa")


@pytest.mark.parametrize(
    ("name", "install"),
    [
        ("flash_attention_2", "pip install flash-attn "),
        ("flash_attention_3", "pip install flash-attn-3 "),
        ("flash_attention_4", "pip install flash-attn-4 "),
        ("kernels-community/flash-attn2", "pip install kernels,"),
    ],
)
def test_a_missing_package_is_named_with_its_install_line(name: str, install: str) -> None:
    from transformers.utils import is_kernels_available

    if is_kernels_available():
        pytest.skip("the package kernels is installed")
    with raises_config("attn_implementation", name, match=install):
        check_attention(name)


def test_an_attention_for_generation_and_auto_are_rejected_with_what_to_do() -> None:
    with raises_config("attn_implementation", "paged|eager", match="expected one of (?!.*paged)"):
        check_attention("paged|eager")
    with raises_config("attn_implementation", "auto", match=r"leave it out.*packhorse\.prepare\(model\)"):
        batch_format_of("auto", ("None",))
    with raises_config("attn_implementation", "SDPA", match="did you mean 'sdpa'"):
        batch_format_of("SDPA")
