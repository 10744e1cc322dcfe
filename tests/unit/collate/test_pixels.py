"""Pixels of a batch are copied once, and are the same in this process and in workers."""

import io

import pytest
import torch

from loader_samples import load, mixed_rows
from packhorse.collate.packer import join

LARGE = 1 << 20  # values of a row; a few rows are allocated as large tensors are


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [[3], [3, 2], [5, 1, 4, 2]])
def test_large_pixels_are_joined_and_converted(rows: list[int], dtype: torch.dtype | None) -> None:
    parts = [torch.randn(number, LARGE // 4) for number in rows]
    assert torch.equal(join("pixel_values", parts, dtype=dtype), torch.cat(parts).to(dtype or torch.float32))


def test_a_joined_tensor_holds_no_more_memory_than_itself() -> None:
    joined = join("pixel_values", [torch.zeros(3, LARGE), torch.zeros(2, LARGE)], dtype=torch.bfloat16)
    assert joined.untyped_storage().nbytes() == joined.nbytes
    file = io.BytesIO()
    torch.save(joined, file)
    assert len(file.getvalue()) < joined.nbytes + 10_000


def test_tensors_without_entries_are_joined() -> None:
    parts = [torch.zeros(0, 4), torch.ones(2, 4), torch.zeros(0, 4)]
    assert torch.equal(join("pixel_values", parts), torch.ones(2, 4))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_changing_a_batch_does_not_change_the_samples(rows: int) -> None:
    dataset = torch.arange(6.0 * 4).reshape(6, 4)
    before = dataset.clone()
    joined = join("pixel_values", list(dataset.split(rows)))
    assert torch.equal(joined, before)
    joined.zero_()
    assert torch.equal(dataset, before)


def test_a_part_with_another_stride_is_joined_by_its_values() -> None:
    whole = torch.arange(8.0).reshape(4, 1, 2)
    parts = [whole[:2].transpose(0, 1), whole[2:].transpose(0, 1)]
    assert torch.equal(join("pixel_values", parts), torch.cat(parts))


def test_batches_of_workers_are_those_of_the_process_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packhorse.collate.packer._LARGE", 1)  # forked workers inherit it
    rows = mixed_rows(30, seed=7)
    settings = {"pack_size": 512, "pixel_dtype": "bfloat16", "multiprocessing_context": "fork"}
    in_process, in_workers = (
        [dict(batch) for batch in load(rows, num_workers=num_workers, **settings)] for num_workers in (0, 2)
    )
    assert len(in_process) == len(in_workers) > 3
    for batch, other in zip(in_process, in_workers, strict=True):
        assert batch.keys() == other.keys()
        for key, value in batch.items():
            assert not isinstance(value, torch.Tensor) or torch.equal(value, other[key])


def test_batches_that_are_all_kept_are_all_different(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packhorse.collate.packer._LARGE", 1)
    rows = mixed_rows(40, seed=5)
    kept = list(load(rows, pack_size=512, num_workers=0, pixel_dtype="bfloat16"))
    repeated = load(rows, pack_size=512, num_workers=0, pixel_dtype="bfloat16")
    for batch, other in zip(kept, repeated, strict=True):
        assert "pixel_values" not in batch or torch.equal(batch["pixel_values"], other["pixel_values"])
    addresses = [batch["pixel_values"].data_ptr() for batch in kept if "pixel_values" in batch]
    assert len(set(addresses)) == len(addresses) > 3
