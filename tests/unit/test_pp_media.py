"""Media chunks for microbatches: whose they are, what is refused, and what stage 0 holds, and when."""

import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import packhorse.pp_media as pp_media
from contract.calls import rendered  # noqa: F401 - makes torchvision importable beside a CPU torch
from contract.cases import REFUSED, conversation, takes
from contract.media_files import write_media
from contract.processors import FAMILIES, processor
from packhorse.collate_fns import neat_packed_vlm_collater, pad_collate_fn
from packhorse.datasets.tokenized import PreTokenizedDatasetWrapper
from packhorse.families import family_of
from packhorse.ledger import Ledger
from packhorse.neat_packing_vlm import PackedDatasetWrapper
from packhorse.pp_media import (
    MEDIA_LAYOUT_KEY,
    MEDIA_ROWS_KEY,
    VLM_PP_MEDIA_KEY,
    _select_image_grid,
    chunk_step3_media,
    chunk_vlm_media,
    prepare_vlm_media_for_pp,
    stage_vlm_media_for_pp,
    wrap_vlm_collate_for_pp,
)
from packhorse.types import TensorLayout

GRID = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 4, 4]])  # 4, 8 and 16 patches
PATCHES = torch.arange(28.0)[:, None].expand(28, 3)
LAYOUT = {
    "pixel_values": TensorLayout(("image",), "rows", "image_grid_thw"),
    "image_grid_thw": TensorLayout(("image",), "item"),
}


def batch_of(rows: int, **more: Any) -> dict[str, Any]:
    return {"input_ids": torch.zeros(rows, 5, dtype=torch.int64), **more}


def lengths(chunks: list[torch.Tensor]) -> list[int]:
    return [len(chunk) for chunk in chunks]


# --- the door ---------------------------------------------------------------------------------------------


def test_importing_it_imports_torch_and_the_types_only() -> None:
    script = "import sys, torch; before = set(sys.modules); import packhorse.pp_media; "
    script += "print(*set(sys.modules) - before)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    own = {name for name in run.stdout.split() if name.startswith("packhorse")}
    assert own - {"packhorse", "packhorse.types"} == {n for n in own if n.startswith("packhorse.pp_media")}
    foreign = (
        {name.split(".")[0] for name in run.stdout.split()} - {"packhorse"} - set(sys.stdlib_module_names)
    )
    assert foreign <= {"torch", "numpy"}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        (
            "_select_image_grid",
            "image_grid_hws image_grid_thw image_sizes image_position_ids",
        ),
        (
            "chunk_step3_media",
            "pixel_values batch_size n_microbatches num_patches=None patch_pixel_values=None "
            "patch_newline_mask=None",
        ),
        ("chunk_vlm_media", "pixel_values image_grid batch_size n_microbatches n_images_per_sample=None"),
        ("prepare_vlm_media_for_pp", "batch batch_size n_microbatches"),
        ("stage_vlm_media_for_pp", "pp model_parts batch"),
        ("wrap_vlm_collate_for_pp", "collate_fn n_microbatches"),
    ],
)
def test_documented_calls_have_the_documented_arguments(name: str, parameters: str) -> None:
    found = inspect.signature(getattr(pp_media, name)).parameters.values()
    positional = [p for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [
        p.name if p.default is p.empty else f"{p.name}={p.default}" for p in positional
    ] == parameters.split()


def test_documented_data_is_there() -> None:
    assert VLM_PP_MEDIA_KEY == "_vlm_pp_media_chunks"
    assert {
        "pixel_values",
        "patch_pixel_values",
        "num_patches",
        "patch_newline_mask",
        "image_grid_hws",
    } <= set(pp_media._VLM_MEDIA_KEYS)


# --- layouts ----------------------------------------------------------------------------------------------


def test_seven_rows_in_three_microbatches_are_three_two_two() -> None:
    images, grids = chunk_vlm_media(torch.rand(7, 3, 4, 4), torch.ones(7, 3, dtype=torch.int64), 7, 3)
    assert lengths(images) == lengths(grids) == [3, 2, 2]
    split = torch.tensor_split(torch.arange(7), 3)
    assert lengths(images) == lengths(list(split))


def test_fewer_rows_than_microbatches_still_make_as_many_chunks() -> None:
    images, grids = chunk_vlm_media(torch.rand(2, 6, 5), torch.tensor([[1, 2, 3], [1, 3, 2]]), 2, 4)
    assert lengths(images) == lengths(grids) == [1, 1, 0, 0]
    assert images[3].shape == (0, 6, 5)


def test_flat_patches_go_with_their_samples_by_counts() -> None:
    pixels, grids = chunk_vlm_media(PATCHES, GRID, 4, 2, torch.tensor([0, 1, 2, 0]))
    assert lengths(pixels) == [4, 24]
    assert lengths(grids) == [1, 2]
    assert torch.equal(torch.cat(pixels), PATCHES)
    assert pixels[1].data_ptr() == PATCHES[4:].data_ptr(), "chunks are views"


def test_flat_patches_with_one_image_a_row_need_no_counts() -> None:
    pixels, _ = chunk_vlm_media(PATCHES, GRID, 3, 3)
    assert lengths(pixels) == [4, 8, 16]


def test_as_many_images_as_rows_are_not_taken_for_one_each_when_counts_say_otherwise() -> None:
    pixels, grids = chunk_vlm_media(PATCHES, GRID, 3, 3, torch.tensor([2, 0, 1]))
    assert lengths(pixels) == [12, 0, 16]
    assert lengths(grids) == [2, 0, 1]


def test_patches_of_four_axes_are_flat_when_the_grid_says_so() -> None:
    pixels, _ = chunk_vlm_media(torch.rand(28, 3, 14, 14), GRID, 2, 2, torch.tensor([1, 2]))
    assert lengths(pixels) == [4, 24]


def test_step3_crops_follow_their_image() -> None:
    chunks = chunk_step3_media(
        torch.rand(3, 3, 8, 8), 3, 2, torch.tensor([2, 0, 3]), torch.rand(5, 3, 4, 4), torch.zeros(5).bool()
    )
    assert {key: lengths(value) for key, value in chunks.items()} == {
        "pixel_values": [2, 1],
        "num_patches": [2, 1],
        "patch_pixel_values": [2, 3],
        "patch_newline_mask": [2, 3],
    }


def test_step3_batches_are_prepared_by_their_names() -> None:
    batch = batch_of(
        3,
        pixel_values=torch.rand(3, 3, 8, 8),
        num_patches=torch.tensor([2, 0, 3]),
        patch_pixel_values=torch.rand(5, 3, 4, 4),
        patch_newline_mask=torch.zeros(5).bool(),
    )
    chunks = prepare_vlm_media_for_pp(batch, 3, 3)[VLM_PP_MEDIA_KEY]
    assert lengths(chunks["patch_pixel_values"]) == lengths(chunks["patch_newline_mask"]) == [2, 0, 3]


@pytest.mark.parametrize("grid", ["image_sizes", "image_position_ids", "image_grid_hws"])
def test_what_tells_about_images_is_split_by_image_under_its_own_name(grid: str) -> None:
    values = torch.randint(1, 9, (4, 6, 2) if grid == "image_position_ids" else (4, 2))
    batch = batch_of(
        3, pixel_values=torch.rand(4, 6, 5), n_images_per_sample=torch.tensor([3, 0, 1]), **{grid: values}
    )
    chunks = prepare_vlm_media_for_pp(batch, 3, 3)[VLM_PP_MEDIA_KEY]
    assert set(chunks) == {"pixel_values", grid}
    assert lengths(chunks[grid]) == lengths(chunks["pixel_values"]) == [3, 0, 1]


def test_videos_and_sound_have_counts_of_their_own() -> None:
    batch = batch_of(
        3,
        pixel_values_videos=torch.rand(24, 5),
        video_grid_thw=torch.tensor([[2, 2, 2], [4, 2, 2]]),
        second_per_grid_ts=torch.tensor([1.0, 2.0]),
        n_videos_per_sample=torch.tensor([0, 2, 0]),
        input_features=torch.rand(3, 8, 9),
        feature_attention_mask=torch.ones(3, 9),
        n_audios_per_sample=torch.tensor([1, 0, 2]),
    )
    chunks = prepare_vlm_media_for_pp(batch, 3, 3)[VLM_PP_MEDIA_KEY]
    assert lengths(chunks["pixel_values_videos"]) == [0, 24, 0]
    assert lengths(chunks["video_grid_thw"]) == lengths(chunks["second_per_grid_ts"]) == [0, 2, 0]
    assert lengths(chunks["input_features"]) == lengths(chunks["feature_attention_mask"]) == [1, 0, 2]
    assert set(batch) == {"input_ids", VLM_PP_MEDIA_KEY}


def test_the_first_grid_that_is_there_is_selected() -> None:
    a, b = torch.ones(1), torch.zeros(1)
    assert _select_image_grid(None, a, b, None) is a
    assert _select_image_grid(a, b, None, None) is a
    assert _select_image_grid(None, None, None, b) is b
    assert _select_image_grid(None, None, None, None) is None


# --- declared layouts --------------------------------------------------------------------------------------


def test_a_declared_layout_wins_over_what_the_shapes_suggest() -> None:
    tiles = torch.rand(3, 4, 5)  # as many as rows, but the first row has them all
    declared = {"pixel_values": TensorLayout(("image", "video"), "rows")}
    rows = {"pixel_values": torch.tensor([3, 0, 0])}
    carried = batch_of(3, pixel_values=tiles, **{MEDIA_LAYOUT_KEY: declared, MEDIA_ROWS_KEY: rows})
    chunks = prepare_vlm_media_for_pp(carried, 3, 3)[VLM_PP_MEDIA_KEY]
    assert lengths(chunks["pixel_values"]) == [3, 0, 0]
    assert set(carried) == {"input_ids", VLM_PP_MEDIA_KEY}


def test_an_unheard_of_tensor_is_split_as_it_is_declared() -> None:
    batch = batch_of(2, depth_maps=torch.rand(3, 4), n_images_per_sample=torch.tensor([1, 2]))
    layout = {"depth_maps": TensorLayout(("image",), "item")}
    chunks = prepare_vlm_media_for_pp(batch, 2, 2, layout=layout)[VLM_PP_MEDIA_KEY]
    assert lengths(chunks["depth_maps"]) == [1, 2]


def test_a_batch_without_media_is_left_as_it_is() -> None:
    batch = batch_of(2, labels=torch.zeros(2, 5), pixel_values=None, **{MEDIA_LAYOUT_KEY: LAYOUT})
    assert set(prepare_vlm_media_for_pp(batch, 2, 2)) == {"input_ids", "labels"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_media(tmp_path_factory.mktemp("media"))


CASES = ("one image", "text", "video", "two images", "audio", "image and video", "two sounds", "text")


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].chats])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_each_microbatch_gets_what_its_samples_have_alone(
    name: str, packed: bool, files: dict[str, Path]
) -> None:
    """Real processors and batches; the family's layout, and the rows as collate functions know them."""
    refused = {case for family, case in REFUSED if family == name}
    refused |= {"image and video"} if name == "llava_onevision" else set()  # its films have as many frames
    cases = [case for case in CASES if takes(name, case) and case not in refused]
    rows = [{"conversation": conversation(name, case, files)} for case in cases]
    encoded = PreTokenizedDatasetWrapper(
        rows, processor(name), inject_fake_images=False, on_bad="raise", ledger=Ledger()
    )
    samples = [encoded[index] for index in range(len(cases))]
    family = family_of(processor(name))
    per_row = [[index] for index in range(len(cases))]
    if packed:
        per_row = [[0, 1], [2], list(range(3, len(cases)))]
        packs = PackedDatasetWrapper(samples, per_row, 8192, 0, None, on_bad="raise")
        batch = neat_packed_vlm_collater(
            [packs[row] for row in range(3)], attn_implementation="flex_attention"
        )
    else:
        batch = pad_collate_fn(samples, processor(name))
    present = {key: value for key, value in family.layout.items() if key in batch}
    padding = 0 if packed else 1  # padded batches have a row of zeros for samples without their entry
    batch[MEDIA_ROWS_KEY] = {
        key: torch.tensor([sum(_entries(samples[i], key, layout, padding) for i in row) for row in per_row])
        for key, layout in present.items()
    }
    whole = {key: batch[key] for key in present}
    n = len(per_row) - 1  # the first microbatch has two rows
    chunks = prepare_vlm_media_for_pp(batch, len(per_row), n, layout=family.layout)[VLM_PP_MEDIA_KEY]
    assert set(chunks) == set(present)
    shares = torch.tensor_split(torch.arange(len(per_row)), n)
    for key, parts in chunks.items():
        assert torch.equal(torch.cat(parts), whole[key])
        for share, part in zip(shares, parts, strict=True):
            own = [samples[index].get(key) for row in share.tolist() for index in per_row[row]]
            total = sum(_entries({key: value}, key, present[key], padding) for value in own)
            assert len(part) == total
            known = [value for value in own if value is not None]
            if known and not present[key].ragged and padding == 0:
                assert torch.equal(part, torch.cat(known))


def _entries(sample: Any, key: str, layout: TensorLayout, missing: int) -> int:
    value = sample.get(key)
    return (missing if layout.owner == "sample" else 0) if value is None else len(value)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "llava_onevision"])
def test_the_familys_layout_and_the_counts_of_collate_functions_are_enough(
    name: str, files: dict[str, Path]
) -> None:
    cases = [case for case in ("one image", "text", "two images", "video", "text") if takes(name, case)]
    rows = [{"conversation": conversation(name, case, files)} for case in cases]
    samples = PreTokenizedDatasetWrapper(
        rows, processor(name), inject_fake_images=False, on_bad="raise", ledger=Ledger()
    )
    own = [samples[index] for index in range(len(cases))]
    collate = wrap_vlm_collate_for_pp(
        lambda given: pad_collate_fn(given, processor(name)),
        len(cases),
        layout=family_of(processor(name)).layout,
    )
    chunks = collate(own)[VLM_PP_MEDIA_KEY]
    assert "pixel_values" in chunks
    for key, parts in chunks.items():
        if key == "batch_num_images":
            continue
        for sample, part in zip(own, parts, strict=True):
            assert len(part) == (0 if sample.get(key) is None else len(sample[key]))


# --- what is refused ---------------------------------------------------------------------------------------

_IMAGES = {"pixel_values": PATCHES, "image_grid_thw": GRID}
BAD = {
    "counts too small": (
        {**_IMAGES, "n_images_per_sample": torch.tensor([1, 1])},
        r"'image_grid_thw' has shape \(3, 3\).*\[1, 1\] by row \(n_images_per_sample\) make 2 entries, not 3",
    ),
    "counts of other rows": (
        {**_IMAGES, "n_images_per_sample": torch.tensor([1, 1, 1])},
        r"'n_images_per_sample' is torch.int64 of shape \(3,\), expected .* \(2,\)",
    ),
    "a negative count": (
        {**_IMAGES, "n_images_per_sample": torch.tensor([4, -1])},
        r"'n_images_per_sample' is \[4, -1\]",
    ),
    "no counts": (
        _IMAGES,
        r"'image_grid_thw' of shape \(3, 3\) in a batch of 2 rows without 'n_images_per_sample'",
    ),
    "no grid": (
        {"pixel_values": PATCHES, "n_images_per_sample": torch.tensor([1, 2])},
        r"'pixel_values'.*\(28, 3\).*image_grid_thw",
    ),
    "patches and grid apart": (
        {**_IMAGES, "pixel_values": PATCHES[:27], "n_images_per_sample": torch.tensor([1, 2])},
        r"'pixel_values' has shape \(27, 3\).*28",
    ),
    "a list of tensors": (
        {**_IMAGES, "pixel_values": [PATCHES], "n_images_per_sample": torch.tensor([1, 2])},
        "'pixel_values' is a list",
    ),
}


@pytest.mark.parametrize("layout", [None, LAYOUT], ids=["by name", "declared"])
@pytest.mark.parametrize("case", BAD)
def test_media_that_do_not_add_up_are_refused_by_name_and_the_batch_stays(
    case: str, layout: dict[str, TensorLayout] | None
) -> None:
    media, message = BAD[case]
    batch = batch_of(2, **media)
    with pytest.raises(ValueError, match=message):
        prepare_vlm_media_for_pp(batch, 2, 2, layout=layout)
    assert set(batch) == {"input_ids", *media}


@pytest.mark.parametrize(
    ("owner", "message"),
    [
        (
            "sample",
            r"'pixel_values' has shape \(28, 3\).*the sample\): \[1, 1\] by row.*make 2 entries, not 28",
        ),
        ("item", r"'pixel_values' has shape \(28, 3\).*the item\): \[1, 2\] by row.*make 3 entries, not 28"),
        ("rows", "'_media_rows' must say how many each row has"),
    ],
)
def test_a_tensor_that_contradicts_its_declaration_is_refused(owner: Any, message: str) -> None:
    batch = batch_of(2, **_IMAGES, n_images_per_sample=torch.tensor([1, 2]))
    layout = {**LAYOUT, "pixel_values": TensorLayout(("image",), owner)}
    with pytest.raises(ValueError, match=message):
        prepare_vlm_media_for_pp(batch, 2, 2, layout=layout)


def test_a_declared_batch_is_not_taken_for_one_image_a_row() -> None:
    with pytest.raises(ValueError, match="without 'n_images_per_sample'"):
        prepare_vlm_media_for_pp(batch_of(3, **_IMAGES), 3, 3, layout=LAYOUT)
    assert VLM_PP_MEDIA_KEY in prepare_vlm_media_for_pp(batch_of(3, **_IMAGES), 3, 3)


@pytest.mark.parametrize("number", [0, -1, 1.5, True, None])
def test_a_number_of_microbatches_that_is_none_is_refused_everywhere(number: Any) -> None:
    with pytest.raises(ValueError, match="n_microbatches="):
        prepare_vlm_media_for_pp(batch_of(3, **_IMAGES), 3, number)
    with pytest.raises(ValueError, match="n_microbatches="):
        chunk_vlm_media(PATCHES, GRID, 3, number)
    with pytest.raises(ValueError, match="n_microbatches="):
        chunk_step3_media(PATCHES, 3, number)
    with pytest.raises(ValueError, match="n_microbatches="):
        wrap_vlm_collate_for_pp(dict, number)


def test_a_batch_size_that_the_ids_contradict_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batch_size=3, but 'input_ids' has shape \(4, 5\)"):
        prepare_vlm_media_for_pp(batch_of(4, **_IMAGES), 3, 2)


def test_step3_crops_without_their_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'patch_pixel_values' of shape .* without 'num_patches'"):
        chunk_step3_media(torch.rand(3, 3, 8, 8), 3, 2, None, torch.rand(5, 3, 4, 4))
    with pytest.raises(ValueError, match=r"'pixel_values' has shape \(4, 3, 8, 8\)"):
        chunk_step3_media(torch.rand(4, 3, 8, 8), 3, 2)
    with pytest.raises(ValueError, match=r"'patch_pixel_values' .*make 6 entries, not 5"):
        chunk_step3_media(torch.rand(3, 3), 3, 2, torch.tensor([1, 2, 3]), torch.rand(5, 3))


# --- collate functions -------------------------------------------------------------------------------------


def _collate(rows: list[int]) -> dict[str, Any] | None:
    if not rows:
        return None
    return batch_of(len(rows), pixel_values=torch.rand(len(rows), 3, 4, 4), labels=torch.tensor(rows))


def test_a_wrapped_collate_function_prepares_its_batches_in_workers_too() -> None:
    wrapped = pickle.loads(pickle.dumps(wrap_vlm_collate_for_pp(_collate, 2)))
    loader = torch.utils.data.DataLoader(list(range(5)), batch_size=3, collate_fn=wrapped, num_workers=1)
    assert [lengths(batch[VLM_PP_MEDIA_KEY]["pixel_values"]) for batch in loader] == [[2, 1], [1, 1]]
    assert wrapped([]) is None


def test_a_collate_function_without_ids_is_told_so() -> None:
    with pytest.raises(ValueError, match="no tensor 'input_ids' to tell its rows, only labels"):
        wrap_vlm_collate_for_pp(dict, 2)({"labels": 1})


# --- stage 0 -----------------------------------------------------------------------------------------------

STAGED = (
    *("_vlm_pixel_values_chunks", "_vlm_image_grid_hws_chunks", "_vlm_pixel_values_videos_chunks"),
    *("_vlm_video_grid_thw_chunks", "_vlm_num_patches_chunks", "_vlm_patch_pixel_values_chunks"),
    *("_vlm_patch_newline_mask_chunks", "_vlm_chunk_idx", "_vlm_media_chunks"),
)


class Taking(torch.nn.Module):
    """Stage 0 of someone's own: notes which chunk each forward takes."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[int] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.taken.append(self._vlm_chunk_idx)
        self._vlm_chunk_idx += 1
        return ids


def pipe(first: bool) -> Any:
    return SimpleNamespace(info=SimpleNamespace(has_first_stage=first))


def prepared() -> dict[str, Any]:
    return dict(prepare_vlm_media_for_pp(batch_of(3, **_IMAGES), 3, 3))


def test_stage_0_holds_the_chunks_during_the_call_and_nothing_afterwards() -> None:
    stage, batch = Taking(), prepared()
    chunks = batch[VLM_PP_MEDIA_KEY]
    with stage_vlm_media_for_pp(pipe(True), [stage, torch.nn.Identity()], batch):
        assert stage._vlm_pixel_values_chunks is chunks["pixel_values"]
        assert stage._vlm_image_grid_hws_chunks is chunks["image_grid_thw"]
        assert stage._vlm_media_chunks == chunks
        assert stage._vlm_num_patches_chunks is None
        assert stage._vlm_chunk_idx == 0
        assert set(batch) == {"input_ids"}, "the rest can go to the schedule"
    assert {name: getattr(stage, name) for name in STAGED} == dict.fromkeys(STAGED)
    assert batch[VLM_PP_MEDIA_KEY] is chunks, "the batch can be used again"
    assert not stage._forward_pre_hooks


def test_an_exception_inside_the_call_leaves_nothing_staged() -> None:
    stage, batch = Taking(), prepared()
    with pytest.raises(KeyError), stage_vlm_media_for_pp(pipe(True), [stage], batch):
        raise KeyError("inside the schedule")
    assert {name: getattr(stage, name) for name in STAGED} == dict.fromkeys(STAGED)
    assert not stage._forward_pre_hooks


def test_other_ranks_hold_nothing() -> None:
    stage, batch = Taking(), prepared()
    with stage_vlm_media_for_pp(pipe(False), [stage], batch):
        assert not any(hasattr(stage, name) for name in STAGED)
        assert VLM_PP_MEDIA_KEY not in batch
    assert VLM_PP_MEDIA_KEY in batch


@pytest.mark.parametrize("probe", ["none", "the same microbatch", "on the meta device"])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_cursor_starts_again_after_a_probe(probe: str, rows: int) -> None:
    stage, ids = Taking(), torch.arange(rows * 5).view(rows, 5)
    microbatches = torch.tensor_split(ids, rows)
    with stage_vlm_media_for_pp(pipe(True), [stage], prepared()):
        if probe != "none":
            stage(microbatches[0].detach().to("meta" if "meta" in probe else "cpu"))
        for microbatch in microbatches:
            stage(microbatch)
    assert stage.taken == [0] * (probe != "none") + list(range(rows))


def test_a_batch_that_was_not_prepared_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="the batch holds 'pixel_values', which the schedule would split"),
        stage_vlm_media_for_pp(pipe(True), [Taking()], batch_of(3, **_IMAGES)),
    ):
        pass
