"""Of any batch, each microbatch holds exactly the media of its own samples.

Five thousand random batches from seeded loops, which are far quicker than hypothesis here.
"""

import random
from typing import Any

import pytest
import torch

from packhorse.pp_media import MEDIA_LAYOUT_KEY, VLM_PP_MEDIA_KEY, prepare_vlm_media_for_pp
from packhorse.types import MediaKind, TensorLayout

SEEDED, CHUNKS = 500, 10
KINDS: tuple[MediaKind, ...] = ("image", "video")
GRIDS = {"image": ("image_grid_thw", "image_grid_hws"), "video": ("video_grid_thw",)}
PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


def random_batch(rng: random.Random) -> tuple[dict[str, Any], int, int]:
    """A batch of media that name their row and their own number, its rows and its microbatches."""
    rows, microbatches = rng.randint(1, 16), rng.randint(1, 8)
    batch: dict[str, Any] = {"input_ids": torch.zeros(rows, 2, dtype=torch.int64)}
    layout: dict[str, TensorLayout] = {}
    for kind in KINDS:
        most = rng.choice((0, 1, 4))
        counts = [rng.randint(0, most) for _ in range(rows)]
        if not any(counts):
            continue
        flat, grid_key = rng.random() < 0.6, rng.choice(GRIDS[kind])
        owners = [row for row, number in enumerate(counts) for _ in range(number)]
        sides = 2 if grid_key.endswith("hws") else 3
        grid = torch.tensor([[rng.randint(1, 3) for _ in range(sides)] for _ in owners])
        patches = grid.prod(1)
        named = torch.tensor([[row, number] for number, row in enumerate(owners)])
        if flat:
            pixels = named.repeat_interleave(patches, dim=0)
        else:
            pixels = named[:, None, :].expand(len(owners), int(patches.max()) + 1, 2)  # padded patches
        batch |= {PIXELS[kind]: pixels, grid_key: grid, f"n_{kind}s_per_sample": torch.tensor(counts)}
        layout[grid_key] = TensorLayout((kind,), "item")
        layout[PIXELS[kind]] = TensorLayout((kind,), "rows", grid_key) if flat else layout[grid_key]
    if rng.random() < 0.5:
        batch[MEDIA_LAYOUT_KEY] = layout
    return batch, rows, microbatches


def check(batch: dict[str, Any], rows: int, microbatches: int) -> None:
    before = dict(batch)
    media = {key for key in batch if "pixel_values" in key or "grid" in key}
    prepared = prepare_vlm_media_for_pp(batch, rows, microbatches)
    chunks = prepared.get(VLM_PP_MEDIA_KEY, {})
    assert set(chunks) == media, "names are kept"
    assert set(prepared) == {"input_ids"} | ({VLM_PP_MEDIA_KEY} if media else set())
    shares = [share.tolist() for share in torch.tensor_split(torch.arange(rows), microbatches)]
    for key, parts in chunks.items():
        assert len(parts) == microbatches
        assert torch.equal(torch.cat(parts), before[key])
        counts = before["n_videos_per_sample" if "video" in key else "n_images_per_sample"].tolist()
        for share, part in zip(shares, parts, strict=True):
            number = sum(counts[row] for row in share)
            if "grid" in key:
                assert len(part) == number
                continue
            named = set(map(tuple, part.reshape(-1, 2).tolist()))
            assert len(named) == number, "all media of the rows"
            assert {row for row, _ in named} == {row for row in share if counts[row]}, "and of no other"


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_each_microbatch_holds_exactly_the_media_of_its_samples(chunk: int) -> None:
    rng = random.Random(f"pp_media {chunk}")
    seen = {"short": 0, "uneven": 0, "both kinds": 0}
    for _ in range(SEEDED):
        batch, rows, microbatches = random_batch(rng)
        seen["short"] += rows < microbatches
        seen["uneven"] += rows % microbatches > 0
        seen["both kinds"] += set(PIXELS.values()) <= set(batch)
        check(batch, rows, microbatches)
    assert min(seen.values()) > SEEDED // 10, seen


def test_a_count_that_is_wrong_is_never_split_in_silence() -> None:
    rng = random.Random("wrong counts")
    refused = 0
    for _ in range(SEEDED):
        batch, rows, microbatches = random_batch(rng)
        counted = [key for key in batch if key.startswith("n_")]
        for key in counted:
            wrong = batch[key].clone()
            wrong[rng.randrange(rows)] += rng.randint(1, 3)
            with pytest.raises(ValueError, match=f"{key}.* make {int(wrong.sum())} entries, not"):
                prepare_vlm_media_for_pp({**batch, key: wrong}, rows, microbatches)
            refused += 1
    assert refused > SEEDED // 2
