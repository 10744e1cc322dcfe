"""Pixels that are put in their place as they are made are joined without copying, to the same batch."""

import io

import numpy as np
import pytest
import torch

from loader_samples import load, mixed
from packhorse.collate.packer import join
from packhorse.collate.pixel_buffer import BufferPool, PixelBuffer, Settled, already_joined
from packhorse.loader import build
from packhorse.types import Sample

WIDE = 1 << 18  # numbers in a row of pixels: large enough that their place matters


def sample(rows: int, tokens: int = 10, seed: int = 0) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    media = {
        "pixel_values": torch.randn(rows, WIDE, generator=generator),
        "image_grid_thw": torch.ones(1, 3, dtype=torch.long),
    }
    return Sample(tokens={"input_ids": torch.arange(tokens)}, media=media)


def pixels(samples: list[Sample]) -> list[torch.Tensor]:
    return [one.media["pixel_values"] for one in samples]


def settled(samples: list[Sample], dtype: torch.dtype | None) -> list[torch.Tensor]:
    room = PixelBuffer(10 * len(samples), dtype, BufferPool())
    return pixels([room.settle(one) for one in samples])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [[3], [3, 2], [5, 1, 4, 2]])
def test_settled_pixels_are_joined_without_a_copy_and_are_the_same(
    rows: list[int], dtype: torch.dtype | None
) -> None:
    samples = [sample(number, seed=number) for number in rows]
    wanted = torch.cat(pixels(samples)).to(dtype or torch.float32)
    parts = settled(samples, dtype)
    joined = join("pixel_values", parts, dtype=dtype)
    assert joined.data_ptr() == parts[0].data_ptr()
    assert torch.equal(joined, wanted)


def test_a_joined_tensor_holds_no_more_memory_than_itself() -> None:
    joined = join("pixel_values", settled([sample(3), sample(2)], torch.bfloat16), dtype=torch.bfloat16)
    assert joined.untyped_storage().nbytes() == joined.nbytes
    file = io.BytesIO()
    torch.save(joined, file)
    assert len(file.getvalue()) < joined.nbytes + 10_000
    alone = join("pixel_values", settled([sample(3)], torch.bfloat16), dtype=torch.bfloat16)
    assert alone.untyped_storage().nbytes() == alone.nbytes


def test_a_sample_dropped_leaves_a_gap_and_the_others_are_copied() -> None:
    samples = [sample(2, seed=1), sample(3, seed=2), sample(1, seed=3)]
    wanted = torch.cat(pixels([samples[0], samples[2]]))
    parts = settled(samples, None)
    joined = join("pixel_values", [parts[0], parts[2]])
    assert joined.data_ptr() != parts[0].data_ptr()
    assert torch.equal(joined, wanted)


def test_another_order_or_type_is_copied() -> None:
    parts = settled([sample(2, seed=1), sample(3, seed=2)], None)
    assert already_joined(parts[::-1], torch.float32) is None
    assert already_joined(parts, torch.bfloat16) is None
    assert torch.equal(join("pixel_values", parts[::-1]), torch.cat(parts[::-1]))


def test_a_sample_with_far_more_pixels_than_the_first_still_fits_in_the_batch() -> None:
    samples = [sample(1, tokens=100, seed=1), sample(40, tokens=5, seed=2), sample(2, seed=3)]
    wanted = torch.cat(pixels(samples))
    assert torch.equal(join("pixel_values", settled(samples, None)), wanted)


def test_small_pixels_and_other_tensors_stay_where_they_are() -> None:
    media = {"pixel_values": torch.ones(2, 3), "input_features": torch.ones(2, 3)}
    one = Sample(tokens={"input_ids": torch.arange(4)}, media=media)
    after = PixelBuffer(8, torch.bfloat16, BufferPool()).settle(one)
    assert all(after.media[key] is media[key] for key in media)


def test_tensors_without_entries_are_joined() -> None:
    parts = [torch.zeros(0, 4), torch.ones(2, 4), torch.zeros(0, 4)]
    assert torch.equal(join("pixel_values", parts), torch.ones(2, 4))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_what_others_hold_is_copied_even_where_it_lies_one_after_the_other(rows: int) -> None:
    dataset = torch.arange(6.0 * 4).reshape(6, 4)  # say a dataset in one storage
    before = dataset.clone()
    parts = list(dataset.split(rows))
    joined = join("pixel_values", parts)
    assert torch.equal(joined, before)
    joined.zero_()
    assert torch.equal(dataset, before)


def test_a_first_part_of_one_row_with_another_stride_is_joined_right() -> None:
    whole = torch.arange(8.0).reshape(4, 1, 2)
    parts = [whole[:2].transpose(0, 1), whole[2:].transpose(0, 1)]
    assert torch.equal(join("pixel_values", parts), torch.cat(parts))
    samples = [
        Sample(
            tokens={"input_ids": torch.arange(4)},
            media={"pixel_values": torch.randn(1, 2 * WIDE).as_strided((1, WIDE), (7, 1))},
        ),
        sample(2),
    ]
    wanted = torch.cat(pixels(samples))
    assert torch.equal(join("pixel_values", settled(samples, None)), wanted)


def test_what_is_made_of_settled_pixels_is_a_plain_tensor() -> None:
    parts = settled([sample(2), sample(1)], None)
    assert {type(one) for one in parts} == {Settled}
    joined = join("pixel_values", parts)
    made = [joined, join("pixel_values", parts[::-1]), parts[0][:1], parts[0] + 1, parts[0].clone()]
    assert {type(one) for one in made} == {torch.Tensor}


def test_a_room_never_asks_for_more_than_its_limit_or_than_the_machine_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    empty = np.empty
    monkeypatch.setattr(np, "empty", lambda size, kind: asked.append(size) or empty(size, kind))
    one = sample(4, tokens=2)
    PixelBuffer(10**12, torch.bfloat16, BufferPool()).settle(one)
    assert asked == [1 << 32]

    def refuse(size: int, kind: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "empty", refuse)
    other = sample(4, tokens=2)
    room = PixelBuffer(10**12, torch.bfloat16, BufferPool())
    assert room.settle(other).media["pixel_values"] is other.media["pixel_values"]
    room.settle(sample(1))  # and asks no more


def test_batches_are_the_same_with_and_without_room_for_their_pixels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = mixed(24)
    monkeypatch.setattr("packhorse.collate.pixel_buffer._LARGE", 1)
    seen: list[torch.Tensor | None] = []
    found = already_joined
    monkeypatch.setattr(
        "packhorse.collate.packer.already_joined",
        lambda parts, dtype: seen.append(found(parts, dtype)) or seen[-1],
    )
    with_room = list(load(rows, pack_size=512, num_workers=0, pixel_dtype="bfloat16"))
    assert any(one is not None and len(one) > 1 for one in seen)
    monkeypatch.setattr(build.PixelBuffer, "settle", lambda self, sample: sample)
    without = list(load(rows, pack_size=512, num_workers=0, pixel_dtype="bfloat16"))
    assert len(with_room) == len(without) > 1
    for one, other in zip(with_room, without, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert not isinstance(value, torch.Tensor) or torch.equal(value, other[key])


def test_a_sample_that_fails_a_blank_and_one_too_long_leave_the_others_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = mixed(20, seed=3)
    monkeypatch.setattr("packhorse.collate.pixel_buffer._LARGE", 1)

    def batches(settle: bool) -> list[dict[str, torch.Tensor]]:
        loader = load(rows, 0, 2, pack_size=512, num_workers=0, pixel_dtype="bfloat16", max_bad_share=None)
        loader.close()
        builder = loader._workers.builder
        own = builder.sample

        def sometimes(index: int):
            found = own(index)
            if index % 5 == 1 or found is None:
                return None  # fails
            if index % 7 == 2:  # turns out longer than it was counted
                tensors = found.per_token
                longer = {
                    key: tensors[key].repeat(1, 9)[0] for key in ("input_ids", "labels", "attention_mask")
                }
                return found.with_per_token({**tensors, **longer})
            return found

        monkeypatch.setattr(builder, "sample", sometimes)
        if not settle:
            monkeypatch.setattr(build.PixelBuffer, "settle", lambda self, sample: sample)
        return list(loader)

    with_room, without = batches(True), batches(False)
    assert len(with_room) == len(without) > 1
    for one, other in zip(with_room, without, strict=True):
        for key, value in one.items():
            assert not isinstance(value, torch.Tensor) or torch.equal(value, other[key])


def test_memory_is_used_again_once_nobody_holds_the_batch_and_not_before() -> None:
    pool = BufferPool()

    def batch(seed: int) -> torch.Tensor:
        samples = [sample(3, seed=seed), sample(2, seed=seed + 1)]
        room = PixelBuffer(20, None, pool)
        return join("pixel_values", pixels([room.settle(one) for one in samples]))

    first = batch(1)
    kept, place = first.clone(), first.data_ptr()
    second = batch(5)
    assert second.data_ptr() != place
    assert torch.equal(first, kept)  # nobody wrote over it
    row = first[2:3]  # a view holds it too
    del first
    third = batch(9)
    assert place not in (second.data_ptr(), third.data_ptr())
    assert torch.equal(row, kept[2:3])
    del row
    assert batch(11).data_ptr() == place


def test_batches_that_are_all_kept_are_all_different(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packhorse.collate.pixel_buffer._LARGE", 1)
    rows = mixed(40, seed=5)
    kept = list(load(rows, pack_size=512, num_workers=0, pixel_dtype="bfloat16"))
    for one, other in zip(
        kept, load(rows, pack_size=512, num_workers=0, pixel_dtype="bfloat16"), strict=True
    ):
        assert torch.equal(one["pixel_values"], other["pixel_values"]) if "pixel_values" in one else True
    places = [one["pixel_values"].data_ptr() for one in kept if "pixel_values" in one]
    assert len(set(places)) == len(places) > 3


def test_batches_of_workers_are_those_of_the_process_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packhorse.collate.pixel_buffer._LARGE", 1)  # workers are forked, and have it too
    rows = mixed(30, seed=7)
    own, theirs = (
        [dict(batch) for batch in load(rows, pack_size=512, num_workers=num_workers, pixel_dtype="bfloat16")]
        for num_workers in (0, 2)
    )
    assert len(own) == len(theirs) > 3
    for one, other in zip(own, theirs, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert not isinstance(value, torch.Tensor) or torch.equal(value, other[key])
