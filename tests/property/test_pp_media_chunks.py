"""Of any batch, each microbatch holds exactly the media of its own samples.

Five thousand random batches from seeded loops, which are far quicker than hypothesis here.
"""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from packhorse.pp_media import MEDIA_LAYOUT_KEY, MEDIA_ROWS_KEY, VLM_PP_MEDIA_KEY, prepare_vlm_media_for_pp
from packhorse.types import MediaKind, TensorLayout

SEEDED, CHUNKS = 500, 10
KINDS: tuple[MediaKind, ...] = ("image", "video", "audio")


class Drawn:
    """A batch, and for each of its media tensors the row that each entry belongs to."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.rows, self.microbatches = rng, rng.randint(1, 16), rng.randint(1, 8)
        self.batch: dict[str, Any] = {"input_ids": torch.zeros(self.rows, 2, dtype=torch.int64)}
        self.owners: dict[str, list[int]] = {}
        self.layout: dict[str, TensorLayout] = {}
        self.seen: set[str] = {"short"} if self.rows < self.microbatches else set()
        self.seen |= {"uneven"} if self.rows % self.microbatches else set()

    def add(self, key: str, tensor: torch.Tensor, owners: list[int], layout: TensorLayout) -> None:
        assert len(tensor) == len(owners)
        self.batch[key], self.owners[key], self.layout[key] = tensor, owners, layout

    def make_tensor(self, owners: list[int], *sides: int) -> torch.Tensor:
        """Entries that hold their row and their own number."""
        numbers = torch.tensor([[row, place] for place, row in enumerate(owners)]).reshape(-1, 2)
        shaped = numbers.reshape(len(owners), *[1] * (len(sides) - 1), 2)
        return shaped.expand(len(owners), *sides[:-1], 2)

    def rows_of(self, key: str) -> torch.Tensor:
        return torch.bincount(torch.tensor(self.owners[key], dtype=torch.int64), minlength=self.rows)


def counts_of(rng: random.Random, rows: int) -> tuple[list[int], str]:
    """Media of each row: any number, one each, or as many as rows and not one each."""
    pattern = rng.choice(("any", "one each", "coincidence"))
    if pattern == "one each":
        return [1] * rows, pattern
    if pattern == "coincidence" and rows > 1:
        places = [rng.randrange(rows) for _ in range(rows - 2)]
        twice = rng.randrange(rows)
        counts = Counter([*places, twice, twice])
        return [counts[row] for row in range(rows)], pattern
    most = rng.choice((0, 1, 4))
    return [rng.randint(0, most) for _ in range(rows)], "any"


def flat(drawn: Drawn, owners: list[int], kind: MediaKind) -> None:
    key = "pixel_values_videos" if kind == "video" else "pixel_values"
    names = ("video_grid_thw",) if kind == "video" else ("image_grid_thw", "image_grid_hws", "grid_thws")
    grid_key = drawn.rng.choice(names)
    sides = 2 if grid_key.endswith("hws") and "thw" not in grid_key else 3
    grid = torch.tensor([[drawn.rng.randint(1, 3) for _ in range(sides)] for _ in owners])
    patches = [row for row, size in zip(owners, grid.prod(1).tolist(), strict=True) for _ in range(size)]
    drawn.add(grid_key, grid, owners, TensorLayout((kind,), "item"))
    drawn.add(key, drawn.make_tensor(patches, 2), patches, TensorLayout((kind,), "rows", grid_key))


def padded_patches(drawn: Drawn, owners: list[int], kind: MediaKind) -> None:
    """Patches padded to one length: one entry per media item, as in its grid."""
    key = "pixel_values_videos" if kind == "video" else "pixel_values"
    item = TensorLayout((kind,), "item")
    names = ("image_grid_thw", "image_sizes", "image_position_ids", "spatial_shapes", None)
    about = "video_grid_thw" if kind == "video" else drawn.rng.choice(names)
    if about is not None:
        shape = (len(owners), 30, 2) if about == "image_position_ids" else (len(owners), 3)
        shape = (len(owners), 2) if about in ("image_sizes", "spatial_shapes") else shape
        # At least 2 patches each, so that they are not as many as entries.
        drawn.add(about, torch.tensor([drawn.rng.randint(2, 9)]).expand(shape), owners, item)
        drawn.seen.add(about)
    if about == "spatial_shapes":
        drawn.add("pixel_attention_mask", drawn.make_tensor(owners, 2), owners, item)
    drawn.add(key, drawn.make_tensor(owners, 30, 2), owners, item)


def whole(drawn: Drawn, owners: list[int], kind: MediaKind) -> None:
    """[N, C, H, W]"""
    key = "pixel_values_videos" if kind == "video" else "pixel_values"
    drawn.add(key, drawn.make_tensor(owners, 3, 4, 2), owners, TensorLayout((kind,), "item"))


def frames(drawn: Drawn, owners: list[int], kind: MediaKind) -> None:
    numbers = [drawn.rng.randint(1, 4) for _ in owners]
    each = [row for row, number in zip(owners, numbers, strict=True) for _ in range(number)]
    layout = TensorLayout((kind,), "rows", "num_frames_per_video")
    drawn.add("num_frames_per_video", torch.tensor(numbers), owners, TensorLayout((kind,), "item"))
    drawn.add("pixel_values_videos", drawn.make_tensor(each, 6, 2), each, layout)
    drawn.add("video_position_ids", drawn.make_tensor(each, 6, 2), each, layout)


def crops(drawn: Drawn, owners: list[int], kind: MediaKind) -> None:
    """Step-3: whole images, and crops of them."""
    numbers = [drawn.rng.randint(0, 3) for _ in owners]
    each = [row for row, number in zip(owners, numbers, strict=True) for _ in range(number)]
    item, rows = TensorLayout((kind,), "item"), TensorLayout((kind,), "rows", "num_patches")
    drawn.add("pixel_values", drawn.make_tensor(owners, 3, 4, 2), owners, item)
    drawn.add("num_patches", torch.tensor(numbers), owners, item)
    drawn.add("patch_pixel_values", drawn.make_tensor(each, 3, 2), each, rows)
    drawn.add("patch_newline_mask", drawn.make_tensor(each, 2)[:, 1] % 2 == 0, each, rows)


def tiles(drawn: Drawn, owners: list[int], kind: MediaKind) -> None:
    """Entries that no grid counts: the batch says how many each row has."""
    each = [row for row in owners for _ in range(drawn.rng.randint(1, 5))]
    drawn.add("pixel_values", drawn.make_tensor(each, 3, 4, 2), each, TensorLayout((kind,), "rows"))
    drawn.seen.add("rows needed")


def of_samples(drawn: Drawn, owners: list[int], kind: MediaKind) -> None:
    """[B, n, C, H, W] and a mask: one entry per row, whatever the counts."""
    each = list(range(drawn.rows))
    layout = TensorLayout((kind,), "sample")
    drawn.add("pixel_values", drawn.make_tensor(each, 2, 3, 4, 2), each, layout)
    drawn.add("pixel_attention_mask", drawn.make_tensor(each, 2, 4, 2), each, layout)


def audio(drawn: Drawn, owners: list[int], kind: MediaKind) -> None:
    names = drawn.rng.choice(
        (("input_features", "feature_attention_mask"), ("audio_input_features", "audio_embed_sizes"))
    )
    for key in names:
        drawn.add(key, drawn.make_tensor(owners, 8, 2), owners, TensorLayout((kind,), "item"))


STYLES: dict[MediaKind, tuple[Callable[[Drawn, list[int], MediaKind], None], ...]] = {
    "image": (flat, flat, padded_patches, padded_patches, whole, crops, tiles, of_samples),
    "video": (flat, padded_patches, whole, frames),
    "audio": (audio,),
}


def random_batch(rng: random.Random) -> Drawn:
    drawn = Drawn(rng)
    if rng.random() < 0.1:
        style = rng.choice((flat, padded_patches, whole, crops))
        style(drawn, list(range(drawn.rows)), "image")
        drawn.seen |= {"legacy", style.__name__}  # one image a row, and nothing says so
        return drawn
    for kind in KINDS:
        counts, pattern = counts_of(rng, drawn.rows)
        if not any(counts) or rng.random() < 0.3:
            continue
        style = rng.choice(STYLES[kind])
        style(drawn, [row for row, number in enumerate(counts) for _ in range(number)], kind)
        drawn.batch[f"n_{kind}s_per_sample"] = torch.tensor(counts)
        drawn.seen |= {kind, style.__name__, pattern}
    if "rows needed" in drawn.seen or rng.random() < 0.5:
        drawn.batch[MEDIA_LAYOUT_KEY] = drawn.layout
        if "rows needed" in drawn.seen or rng.random() < 0.5:
            drawn.batch[MEDIA_ROWS_KEY] = {key: drawn.rows_of(key) for key in drawn.owners}
            drawn.seen.add("rows given")
    return drawn


def check(drawn: Drawn) -> None:
    before = dict(drawn.batch)
    prepared = prepare_vlm_media_for_pp(drawn.batch, drawn.rows, drawn.microbatches)
    chunks = dict(prepared.get(VLM_PP_MEDIA_KEY, {}))
    if "image_grid_hws" not in drawn.owners:
        chunks.pop("image_grid_hws", None)  # the second name of another grid
    assert set(chunks) == set(drawn.owners), "names are kept"
    assert set(prepared) == {"input_ids"} | ({VLM_PP_MEDIA_KEY} if chunks else set())
    shares = [share.tolist() for share in torch.tensor_split(torch.arange(drawn.rows), drawn.microbatches)]
    for key, parts in chunks.items():
        assert len(parts) == drawn.microbatches
        assert torch.equal(torch.cat(parts), before[key])
        for share, part in zip(shares, parts, strict=True):
            own = torch.tensor([row in share for row in drawn.owners[key]], dtype=torch.bool)
            assert torch.equal(part, before[key][own]), f"{key}: all media of the rows, and no other"


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_each_microbatch_holds_exactly_the_media_of_its_samples(chunk: int) -> None:
    rng = random.Random(f"pp_media {chunk}")
    seen: Counter[str] = Counter()
    for _ in range(SEEDED):
        drawn = random_batch(rng)
        seen.update(drawn.seen)
        check(drawn)
    styles = {style.__name__ for some in STYLES.values() for style in some}
    wanted = {*KINDS, *styles, "short", "uneven", "coincidence", "rows given", "legacy"}
    wanted |= {"image_sizes", "image_position_ids", "spatial_shapes"}
    assert wanted <= seen.keys()
    assert min(seen[name] for name in wanted) >= 5, seen
    assert min(seen[name] for name in (*KINDS, "short", "uneven", "coincidence")) > SEEDED // 10, seen


def test_a_count_that_is_wrong_is_never_split_in_silence() -> None:
    rng = random.Random("wrong counts")
    rejected = 0
    for _ in range(SEEDED):
        drawn = random_batch(rng)
        if {"of_samples", "tiles"} & drawn.seen:  # what samples own, or rows say, needs no counts
            continue
        for key in [key for key in drawn.batch if key.startswith("n_")]:
            wrong = drawn.batch[key].clone()
            wrong[rng.randrange(drawn.rows)] += rng.randint(1, 3)
            with pytest.raises(ValueError, match=f"{key}"):
                prepare_vlm_media_for_pp({**drawn.batch, key: wrong}, drawn.rows, drawn.microbatches)
            rejected += 1
    assert rejected > SEEDED // 2


def test_wrong_counts_that_keep_the_sum_are_rejected_where_the_batch_says_its_rows() -> None:
    """Only the rows that collate functions return with ``media_layout=True`` show it."""
    rng = random.Random("wrong counts with the right sum")
    rejected = 0
    for _ in range(SEEDED):
        drawn = random_batch(rng)
        if "rows given" not in drawn.seen or {"of_samples", "tiles"} & drawn.seen:
            continue
        for key in [key for key in drawn.batch if key.startswith("n_")]:
            wrong = drawn.batch[key][torch.randperm(drawn.rows, generator=torch.Generator().manual_seed(1))]
            if torch.equal(wrong, drawn.batch[key]):
                continue
            with pytest.raises(ValueError, match=rf"by '_media_rows' .*, by {key} \["):
                prepare_vlm_media_for_pp({**drawn.batch, key: wrong}, drawn.rows, drawn.microbatches)
            rejected += 1
    assert rejected > SEEDED // 10


def test_uncounted_media_are_rejected_except_for_one_image_a_row() -> None:
    rng = random.Random("no counts")
    rejected = 0
    for _ in range(SEEDED):
        drawn = random_batch(rng)
        counted = [key for key in drawn.batch if key.startswith("n_")]
        if {"of_samples", "rows given"} & drawn.seen or not counted:
            continue
        left = {key: value for key, value in drawn.batch.items() if key not in counted}
        one_each = counted == ["n_images_per_sample"] and MEDIA_LAYOUT_KEY not in left
        images = sum(drawn.batch[counted[0]].tolist())
        if one_each and images == drawn.rows:
            continue  # the documented rule: it looks like one image a row
        with pytest.raises(ValueError, match=r"without 'n_\w+_per_sample'"):
            prepare_vlm_media_for_pp(left, drawn.rows, drawn.microbatches)
        rejected += 1
    assert rejected > SEEDED // 4
