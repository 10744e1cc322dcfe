"""Whose the media of real batches are: every chunk is compared with what its samples are alone."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.calls import render  # noqa: F401 - makes torchvision importable with a CPU torch
from contract.cases import REJECTED, conversation, takes
from contract.media_files import write_media
from contract.processors import FAMILIES, processor
from packhorse.collate_fns import (
    COLLATE_FNS,
    default_collate_fn,
    neat_packed_vlm_collater,
    packed_sequence_thd_vlm_collater,
    pad_collate_fn,
)
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.families import FAMILIES as DECLARED
from packhorse.families import family_of
from packhorse.ledger import Ledger
from packhorse.neat_packing_vlm import PackedDatasetWrapper
from packhorse.pp_media import (
    _VLM_MEDIA_KEYS,
    MEDIA_LAYOUT_KEY,
    MEDIA_ROWS_KEY,
    VLM_PP_MEDIA_KEY,
    prepare_vlm_media_for_pp,
    wrap_vlm_collate_for_pp,
)
from packhorse.pp_media.documented import _BY_NAME, without_added_grid
from packhorse.types import TensorLayout

CHATTING = [name for name in FAMILIES if FAMILIES[name].chats]
HEARING = [name for name in CHATTING if "audio" in FAMILIES[name].modalities]
CASES = ("one image", "text", "video", "two images", "audio", "image and video", "two audio clips", "text")
THREE = [[0, 1], [2], [3, 4, 5, 6, 7]]  # documents of packed rows

Sample = dict[str, Any]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_media(tmp_path_factory.mktemp("media"))


@pytest.fixture(scope="module")
def encoded(files: dict[str, Path]) -> Callable[[str, str], Sample]:
    """The sample of a case, as the family's processor encodes it alone."""

    @cache
    def alone(name: str, case: str) -> Sample:
        rows = [{"conversation": conversation(name, case, files)}]
        wrapped = PreTokenizedDatasetWrapper(
            rows, processor(name), inject_fake_images=False, on_bad="raise", ledger=Ledger()
        )
        return wrapped[0]

    return alone


class Encoded(list[Sample]):
    """Samples that know their family, as those of a dataset do."""

    family: Any = None


def packs_of(name: str | None, samples: list[Sample], documents: list[list[int]]) -> list[dict[str, Any]]:
    """Packs of samples; without a name, of samples of unknown family."""
    known = Encoded(samples)
    known.family = None if name is None else family_of(processor(name))
    packs = PackedDatasetWrapper(known, documents, 8192, 0, None, on_bad="raise")
    return [packs[row] for row in range(len(documents))]


def chunks_of(batch: dict[str, Any], n: int, **more: Any) -> dict[str, list[torch.Tensor]]:
    """The chunks by the names of the tensors."""
    prepared = prepare_vlm_media_for_pp(batch, len(batch["input_ids"]), n, **more)
    return without_added_grid(prepared[VLM_PP_MEDIA_KEY])


def assert_holds(part: torch.Tensor, own: list[torch.Tensor | None], key: str) -> None:
    """The entries of a chunk are those of the samples; after their ends they are filled up. None: zeros."""
    first = 0
    for tensor in own:
        entries = part[first : first + (1 if tensor is None else len(tensor))]
        first += len(entries)
        if tensor is None:
            assert len(entries) == 1, key
            assert not bool(entries.any()), key
        else:
            inside = (slice(None), *(slice(0, side) for side in tensor.shape[1:]))
            assert torch.equal(entries[inside], tensor), key
    assert first == len(part), key


# --- every family ------------------------------------------------------------------------------------------


BIDIRECTIONAL = ("gemma3", "gemma4")  # in images, which Transformer Engine does not support
SHAPES = [
    (name, shape)
    for shape in ("padded", "packed", "packed, family unknown", "thd")
    for name in CHATTING
    if shape != "thd" or name not in BIDIRECTIONAL
]


@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_each_chunk_is_what_its_samples_have_alone_where_the_collate_function_says_whose(
    name: str, shape: str, encoded: Callable[[str, str], Sample]
) -> None:
    rejected = {case for family, case in REJECTED if family == name}
    rejected |= {"image and video"} if name == "llava_onevision" else set()  # its videos have as many frames
    samples = [encoded(name, case) for case in CASES if takes(name, case) and case not in rejected]
    rows = [[place] for place in range(len(samples))]
    if shape == "padded":
        batch = pad_collate_fn(samples, processor(name), pixel_dtype=None, media_layout=True)
    else:
        rows = [[place for place in row if place < len(samples)] for row in THREE]
        collate: Callable[..., dict[str, Any]] = packed_sequence_thd_vlm_collater
        if shape != "thd":
            collate = partial(neat_packed_vlm_collater, attn_implementation="flex_attention")
        packs = packs_of(None if "unknown" in shape else name, samples, rows)
        batch = collate(packs, pixel_dtype=None, media_layout=True)
    layout = family_of(processor(name)).layout
    present = {key: value for key, value in layout.items() if key in batch}
    assert set(batch[MEDIA_LAYOUT_KEY]) == set(batch[MEDIA_ROWS_KEY]) == set(present)
    n = len(rows) - 1  # the first microbatch has two rows
    chunks = chunks_of(batch, n)
    assert set(chunks) == set(present)
    shares = torch.tensor_split(torch.arange(len(rows)), n)
    for key, parts in chunks.items():
        for share, part in zip(shares, parts, strict=True):
            own = [samples[place].get(key) for row in share.tolist() for place in rows[row]]
            if shape != "padded" or present[key].owner != "sample":  # padded rows have an entry each
                own = [tensor for tensor in own if tensor is not None]
            assert_holds(part, own, key)


# Tiles of InternVL and LFM2-VL are rejected.
@pytest.mark.parametrize("name", [name for name in CHATTING if name not in ("internvl", "lfm2_vl")])
def test_counts_of_collate_functions_are_enough_if_a_tensor_separates_media_items(
    name: str, files: dict[str, Path], encoded: Callable[[str, str], Sample]
) -> None:
    """The function that examples of the family go through, by its layout and by the names alone."""
    given = [case for case in ("two images", "text", "one image", "text") if takes(name, case)]
    rows = [{"conversation": conversation(name, case, files)} for case in given]
    function = COLLATE_FNS.get(type(processor(name)).__name__, default_collate_fn)
    for layout in (None, family_of(processor(name)).layout):
        collate = wrap_vlm_collate_for_pp(lambda some: function(some, processor(name)), 4, layout=layout)
        for key, parts in without_added_grid(collate(rows)[VLM_PP_MEDIA_KEY]).items():
            for case, part in zip(given, parts, strict=True):
                tensor = encoded(name, case).get(key)
                if tensor is None and len(part) == 1:
                    assert name in ("smolvlm", "llava_onevision")  # a row of zeros for each sample
                    continue
                assert len(part) == (0 if tensor is None else len(tensor)), (key, case)


# --- audio --------------------------------------------------------------------------------------------------

AUDIO_CASES = ("two audio clips", "text", "audio")  # as many as rows, and not one each


def assert_two_none_one(chunks: dict[str, list[torch.Tensor]]) -> None:
    assert chunks
    for key, parts in chunks.items():
        assert [len(part) for part in parts] == [2, 0, 1], key


@pytest.mark.parametrize("name", HEARING)
@pytest.mark.parametrize("which", ["default", "its own"])
def test_as_many_audio_clips_as_rows_are_not_taken_for_one_each(
    name: str, which: str, files: dict[str, Path]
) -> None:
    function = default_collate_fn
    if which == "its own":
        function = COLLATE_FNS.get(type(processor(name)).__name__, default_collate_fn)
    rows = [{"conversation": conversation(name, case, files)} for case in AUDIO_CASES]
    batch = function(rows, processor(name))
    assert batch["n_audios_per_sample"].tolist() == [2, 0, 1]
    assert_two_none_one(chunks_of(batch, 3))


@pytest.mark.parametrize("name", HEARING)
@pytest.mark.parametrize("said", [False, True], ids=["by counts", "as the collate function says"])
def test_audio_clips_of_encoded_samples_are_counted_padded_and_packed(
    name: str, said: bool, encoded: Callable[[str, str], Sample]
) -> None:
    samples = [encoded(name, case) for case in AUDIO_CASES]
    padded = pad_collate_fn(samples, processor(name), media_layout=said)
    packs = packs_of(name, [*samples, samples[1]], [[1, 0], [1], [2, 3]])
    packed = neat_packed_vlm_collater(packs, attn_implementation="flex_attention", media_layout=said)
    for batch in (padded, packed):
        assert batch["n_audios_per_sample"].tolist() == [2, 0, 1]
        assert_two_none_one(chunks_of(batch, 3))


def test_audio_next_to_a_conversation_is_counted(files: dict[str, Path]) -> None:
    clip = str(files["second.wav"])
    rows = [{"conversation": conversation("phi4_mm", "text", files)} for _ in range(3)]
    rows[0]["audio"], rows[2]["audio"] = [clip, clip], clip
    batch = COLLATE_FNS["Phi4MultimodalProcessor"](rows, processor("phi4_mm"))
    assert batch["n_audios_per_sample"].tolist() == [2, 0, 1]
    assert_two_none_one(chunks_of(batch, 3))


def test_a_batch_without_audio_counts_none(encoded: Callable[[str, str], Sample]) -> None:
    assert "n_audios_per_sample" not in pad_collate_fn([encoded("gemma4", "text")], processor("gemma4"))


# --- entries of samples in packed rows ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["smolvlm", "llava_onevision"])
@pytest.mark.parametrize("backend", ["sdpa", "varlen", "flex_attention", "thd"])
def test_entries_of_samples_in_packed_rows_are_rejected_or_counted_by_the_collate_function(
    name: str, backend: str, encoded: Callable[[str, str], Sample]
) -> None:
    """Three entries for three rows, and not one each."""
    packs = packs_of(name, [encoded(name, "one image"), encoded(name, "text")], [[0, 1, 0], [1], [1, 0]])
    collate: Callable[..., dict[str, Any]] = partial(neat_packed_vlm_collater, attn_implementation=backend)
    if backend == "thd":
        collate = packed_sequence_thd_vlm_collater
    key = "pixel_values" if name == "smolvlm" else "batch_num_images"
    for layout in (family_of(processor(name)).layout, None):
        batch = collate(packs)
        assert len(batch[key]) == 3
        with pytest.raises(ValueError, match=r"' of shape .* one entry per sample.*packs.*media_layout=True"):
            prepare_vlm_media_for_pp(batch, 3, 3, layout=layout)
    chunks = chunks_of(collate(packs, media_layout=True), 3)
    assert [len(part) for part in chunks[key]] == [2, 0, 1]


# --- entries that no tensor counts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "case", "key"),
    [
        ("internvl", "two images", "pixel_values"),
        ("internvl", "video", "pixel_values"),
        ("nemotron_omni", "video", "pixel_values_videos"),
        ("kimi_k25", "image and video", "video_grid_thw"),
    ],
)
def test_a_wrapped_collate_function_without_rows_names_those_that_return_them(
    name: str, case: str, key: str, files: dict[str, Path], encoded: Callable[[str, str], Sample]
) -> None:
    function = COLLATE_FNS.get(type(processor(name)).__name__, default_collate_fn)
    rows = [{"conversation": conversation(name, each, files)} for each in ("text", case)]
    layout = family_of(processor(name)).layout
    collate = wrap_vlm_collate_for_pp(lambda given: function(given, processor(name)), 2, layout=layout)
    way = r"pad_collate_fn\(…, media_layout=True\).*packhorse.load\(…, pipeline_microbatches=…\)"
    with pytest.raises(ValueError, match=rf"'{key}' has shape .*{way}"):
        collate(rows)
    samples = [encoded(name, "text"), encoded(name, case)]
    wrapped = wrap_vlm_collate_for_pp(
        partial(pad_collate_fn, processor=processor(name), media_layout=True), n_microbatches=2
    )
    parts = wrapped(samples)[VLM_PP_MEDIA_KEY][key]
    assert [len(part) for part in parts] == [0, len(samples[1][key])]


# --- the names ---------------------------------------------------------------------------------------------


def test_the_documented_names_are_those_of_the_families() -> None:
    """What families declare stands a second time among the documented names; here they are compared."""
    not_alike = {
        "pixel_attention_mask": "as the pixels are",
        "spatial_shapes": "LFM2-VL has one for each tile",
        "video_grid_thw": "Kimi K2.5 has several for a video",
    }
    for family in DECLARED:
        for key, layout in family.layout.items():
            assert key in _VLM_MEDIA_KEYS, (family.name, key)
            if key in _BY_NAME and key not in not_alike:
                plain = TensorLayout(layout.kinds, layout.owner, layout.rows_from)
                assert _BY_NAME[key] == plain, (family.name, key)
