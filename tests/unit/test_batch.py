"""A batch is a dict of model inputs, and what else is known about it goes wherever it goes."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

import packhorse
from contract.tiny_models import tiny_model
from loader_samples import load, mixed_rows, texts
from packhorse import Batch, BatchInfo
from packhorse.chat import IGNORE_INDEX
from packhorse.pp_media import VLM_PP_MEDIA_KEY, prepare_vlm_media_for_pp
from packhorse.types import to_device
from raising import raises_config

# Tensors that are no tensors of this device: moving makes others of them.
ELSEWHERE = torch.device("meta")


def make_batch() -> Batch:
    labels = torch.tensor([[1, 2, IGNORE_INDEX]])
    info = BatchInfo(
        3,
        7,
        samples=(4,),
        supervised=2,
        document_keys=(("coco/4", ""),),
        document_lengths=((2, 1),),
        loss_weights=torch.tensor([[0.5, 2.0, 1.0]]),
    )
    masks = {"full_attention": torch.ones(1, 1, 3, 3)}
    inputs = {"input_ids": torch.ones(1, 3), "labels": labels, "shift_labels": labels}
    return Batch({**inputs, "attention_mask": masks, "max_length_q": 2}, info)


def with_accelerate(batch: Batch) -> Any:
    from accelerate.utils import send_to_device

    return send_to_device(batch, ELSEWHERE, non_blocking=True)


def with_lightning(batch: Batch) -> Any:
    from lightning.pytorch.utilities import move_data_to_device

    return move_data_to_device(batch, ELSEWHERE)


def moved_here(batch: Batch) -> Any:
    return to_device(batch, ELSEWHERE)


@pytest.mark.parametrize("move", [with_accelerate, with_lightning, moved_here])
def test_a_batch_on_another_device_keeps_its_info(move: Callable[[Batch], Any]) -> None:
    batch = make_batch()
    there = move(batch)
    assert type(there) is Batch
    assert there.info is batch.info
    assert there.info.loss_weights.device.type == "cpu"  # token_loss moves them to the logits
    assert there.keys() == batch.keys()
    assert there["shift_labels"] is there["labels"]
    assert there["max_length_q"] == 2
    tensors = (there["input_ids"], there["labels"], there["attention_mask"]["full_attention"])
    assert {tensor.device for tensor in tensors} == {ELSEWHERE}
    assert batch["labels"].device.type == "cpu"


class Watched(torch.Tensor):
    """Remembers whether its copies were waited for."""

    waited: list[bool]

    def to(self, device: Any, non_blocking: bool = False) -> Any:  # type: ignore[override]
        self.waited.append(not non_blocking)
        return self


def test_only_copies_from_the_cpu_to_a_device_are_not_waited_for() -> None:
    def waits(move: Callable[[Batch], Any]) -> list[bool]:
        tensor = torch.ones(2).as_subclass(Watched)
        tensor.waited = []
        move(Batch({"masks": {"full_attention": tensor}}, make_batch().info))
        return tensor.waited

    assert waits(lambda batch: batch.to("cpu")) == [True]
    assert waits(lambda batch: batch.to(ELSEWHERE)) == [True]  # as for tensors
    assert waits(lambda batch: batch.to(ELSEWHERE, non_blocking=True)) == [False]
    assert waits(lambda batch: to_device(batch, "cpu")) == [True]
    assert waits(lambda batch: to_device(batch, "mps")) == [True]
    assert waits(lambda batch: to_device(batch, ELSEWHERE)) == [False]
    assert waits(with_accelerate) == [False]


def pickle_and_load(batch: Batch) -> Any:
    return pickle.loads(pickle.dumps(batch))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, Batch.copy, pickle_and_load])
def test_copies_keep_info(copied: Callable[[Batch], Any]) -> None:
    batch = make_batch()
    other = copied(batch)
    assert type(other) is Batch
    assert other is not batch
    assert other.info == batch.info
    assert other.info.loss_weights.tolist() == [[0.5, 2.0, 1.0]]
    assert other["shift_labels"] is other["labels"]
    other["extra"] = 1
    assert "extra" not in batch


def test_inputs_are_added_to_a_batch_with_its_info_kept() -> None:
    batch = make_batch()
    more = batch | {"max_length_q": 5, "extra": 1}
    assert type(more) is Batch
    assert more.info is batch.info
    assert (more["max_length_q"], more["extra"], batch["max_length_q"]) == (5, 1, 2)
    assert more["shift_labels"] is more["labels"]
    less = {"max_length_q": 5, "extra": 1} | batch
    assert type(less) is Batch
    assert less.info is batch.info
    assert (less["max_length_q"], less["extra"]) == (2, 1)
    assert next(iter(less)) == "max_length_q"
    other = Batch({"extra": 2}, BatchInfo(4, 0))
    assert (batch | other).info is batch.info
    assert (Batch({"extra": 1}) | other).info is other.info
    batch |= {"extra": 3}
    assert type(batch) is Batch
    assert batch.info is more.info
    with pytest.raises(TypeError):
        batch | [("extra", 1)]


def test_pinned_batches_keep_info() -> None:
    # Tensors can only be pinned where there is a GPU; the mapping is treated alike.
    batch = Batch({"max_length_q": 2, "masks": {"kind": "full"}}, make_batch().info)
    pinned: Any = pin_memory((batch, batch.info))
    assert type(pinned[0]) is Batch
    assert pinned[0] == batch
    assert pinned[0].info is batch.info


def test_a_batch_behaves_as_a_plain_dict() -> None:
    assert not {"keys", "items", "values", "get", "__getitem__", "__iter__", "__len__"} & vars(Batch).keys()
    batch = make_batch()
    assert dict(**batch) == dict(batch.items())


def test_a_batch_made_from_a_mapping_says_that_it_has_no_info() -> None:
    assert Batch(make_batch(), make_batch().info).info.epoch == 3
    with pytest.raises(AttributeError, match=r"use Batch\(inputs, batch.info\)"):
        Batch(dict(make_batch())).info  # noqa: B018


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("mode", ["pack", "pad"])
def test_info_says_what_a_batch_of_the_loader_is_made_of(mode: str, num_workers: int) -> None:
    rows = mixed_rows(24)
    loader = load(rows, mode=mode, batch_size=2, num_workers=num_workers, model=tiny_model("qwen2_vl"))
    content = [row["conversation"][0]["content"] for row in rows]
    media_of = {loader.key(n): [part["type"] for part in parts] for n, parts in enumerate(content)}
    seen: list[int] = []
    for step, batch in enumerate(loader):
        info = batch.info
        assert (info.epoch, info.step) == (0, step)
        assert info.keys == tuple(map(loader.key, info.samples))
        assert info.tokens <= info.slots == batch["labels"].numel()
        assert info.supervised == int((batch["labels"] != IGNORE_INDEX).sum())
        shapes = [len(info.document_keys), len(info.document_lengths), len(info.num_images)]
        assert shapes == [len(batch["labels"])] * 3
        assert info.placeholder is any("" in row for row in info.document_keys)
        for row, lengths in enumerate(info.document_lengths):
            if info.document_ids is None:
                assert len(lengths) == 1
                continue
            found = torch.bincount(info.document_ids[row])[1:].tolist()
            assert found == list(lengths)
        for keys, images, videos in zip(info.document_keys, info.num_images, info.num_videos, strict=True):
            kinds = [kind for key in keys if key for kind in media_of[key]]
            assert "" in keys or (images, videos) == (kinds.count("image"), kinds.count("video"))
        seen += info.samples
        assert batch["shift_labels"] is batch["labels"]
    assert sorted(seen) == list(range(24))
    loader.close()


def test_media_of_a_loaders_batch_are_split_by_the_counts_in_its_info() -> None:
    """By the number of rows alone it would give each row one image."""
    loader = load(mixed_rows(24, seed=2), mode="pad", batch_size=3, model=tiny_model("qwen2_vl"))
    uneven = 0
    for batch in loader:
        counts = batch.info.num_images
        if sum(counts) == 0 or any(batch.info.num_videos):
            continue
        uneven += counts != (1,) * len(counts)
        prepared = prepare_vlm_media_for_pp(batch, len(counts), len(counts))
        grids = prepared[VLM_PP_MEDIA_KEY]["image_grid_thw"]
        assert tuple(map(len, grids)) == counts
    assert uneven


def test_batches_for_a_pipeline_hold_their_chunks_and_no_counts() -> None:
    loader = load(
        mixed_rows(12), mode="pad", batch_size=2, pipeline_microbatches=2, model=tiny_model("qwen2_vl")
    )
    keys = {key for batch in loader for key in batch}
    assert VLM_PP_MEDIA_KEY in keys
    known = {"input_ids", "attention_mask", "mm_token_type_ids", "labels", "shift_labels", VLM_PP_MEDIA_KEY}
    assert keys <= known


def test_the_loader_says_what_it_yields() -> None:
    (batch,) = load(texts(3), pack_size=512, model="unchecked")
    assert isinstance(batch, packhorse.Batch)
    assert isinstance(batch.info, packhorse.BatchInfo)
    assert not batch.info.is_padding
    assert 0 <= batch.info.padding < 1


def test_a_padded_pack_that_cannot_be_aligned_is_rejected_before_the_first_batch() -> None:
    settings = {"pack_size": 250, "alignment": 8, "model": "unchecked"}
    assert load(texts(3), **settings)
    with raises_config("pack_size", 250, match="a multiple of alignment=8"):
        load(texts(3), **settings, pad_to_size=True)
