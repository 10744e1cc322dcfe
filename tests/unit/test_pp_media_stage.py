"""What stage 0 holds during a schedule call, and which chunk each forward takes."""

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint

from packhorse.pp_media import VLM_PP_MEDIA_KEY, prepare_vlm_media_for_pp, stage_vlm_media_for_pp

GRID = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 4, 4]])  # 4, 8 and 16 patches
IMAGES = {"pixel_values": torch.arange(28.0)[:, None].expand(28, 3), "image_grid_thw": GRID}


def batch_of(rows: int, **more: Any) -> dict[str, Any]:
    return {"input_ids": torch.zeros(rows, 5, dtype=torch.int64), **more}


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


def make_prepared_batch() -> dict[str, Any]:
    return dict(prepare_vlm_media_for_pp(batch_of(3, **IMAGES), 3, 3))


def test_stage_0_holds_the_chunks_during_the_call_and_nothing_afterwards() -> None:
    stage, batch = Taking(), make_prepared_batch()
    chunks = batch[VLM_PP_MEDIA_KEY]
    with stage_vlm_media_for_pp(pipe(True), [stage, torch.nn.Identity()], batch):
        assert stage._vlm_pixel_values_chunks is chunks["pixel_values"]
        assert stage._vlm_image_grid_hws_chunks is chunks["image_grid_thw"]
        assert stage._vlm_media_chunks.keys() == {"pixel_values", "image_grid_thw"}
        assert stage._vlm_num_patches_chunks is None
        assert stage._vlm_chunk_idx == 0
        assert set(batch) == {"input_ids"}, "the rest can go to the schedule"
    assert {name: getattr(stage, name) for name in STAGED} == dict.fromkeys(STAGED)
    assert batch[VLM_PP_MEDIA_KEY] is chunks, "the batch can be used again"
    assert not stage._forward_pre_hooks


def test_an_exception_inside_the_call_leaves_nothing_staged() -> None:
    stage, batch = Taking(), make_prepared_batch()
    with pytest.raises(KeyError), stage_vlm_media_for_pp(pipe(True), [stage], batch):
        raise KeyError("inside the schedule")
    assert {name: getattr(stage, name) for name in STAGED} == dict.fromkeys(STAGED)
    assert not stage._forward_pre_hooks


def test_other_ranks_hold_nothing() -> None:
    stage, batch = Taking(), make_prepared_batch()
    with stage_vlm_media_for_pp(pipe(False), [stage], batch):
        assert not any(hasattr(stage, name) for name in STAGED)
        assert VLM_PP_MEDIA_KEY not in batch
    assert VLM_PP_MEDIA_KEY in batch


@pytest.mark.parametrize("probe", ["none", "the same microbatch", "on the meta device"])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_cursor_starts_again_after_a_probe(probe: str, rows: int) -> None:
    stage, ids = Taking(), torch.arange(rows * 5).view(rows, 5)
    microbatches = torch.tensor_split(ids, rows)
    with stage_vlm_media_for_pp(pipe(True), [stage], make_prepared_batch()):
        if probe != "none":
            stage(microbatches[0].detach().to("meta" if "meta" in probe else "cpu"))
        for microbatch in microbatches:
            stage(microbatch)
    assert stage.taken == [0] * (probe != "none") + list(range(rows))


def test_a_batch_that_was_not_prepared_is_rejected() -> None:
    with (
        pytest.raises(ValueError, match="the batch has 'pixel_values', which the schedule would split"),
        stage_vlm_media_for_pp(pipe(True), [Taking()], batch_of(3, **IMAGES)),
    ):
        pass


# --- wrapped stages ----------------------------------------------------------------------------------------


class Learning(torch.nn.Module):
    """Stage 0 of someone's own, with a weight: takes the mean of its media."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.taken: list[int] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        place = self._vlm_chunk_idx
        self._vlm_chunk_idx += 1
        self.taken.append(place)
        media = self._vlm_pixel_values_chunks[place].mean()
        return (self.weight * media).sin() * torch.ones_like(ids, dtype=torch.float32)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


WRAPPERS = {
    "DDP": torch.nn.parallel.DistributedDataParallel,
    "FSDP": lambda stage: FullyShardedDataParallel(stage, device_id=torch.device("cpu")),
    "checkpoint_wrapper": checkpoint_wrapper,
    "checkpoint_wrapper in DDP": lambda s: torch.nn.parallel.DistributedDataParallel(checkpoint_wrapper(s)),
    "checkpoint_wrapper in FSDP": lambda s: FullyShardedDataParallel(
        checkpoint_wrapper(s), device_id=torch.device("cpu")
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_stage_takes_the_media_of_its_microbatches(wrapper: str, group: None) -> None:
    stage = Learning()
    wrapped = WRAPPERS[wrapper](stage)
    with stage_vlm_media_for_pp(pipe(True), [wrapped], make_prepared_batch()):
        for ids in torch.tensor_split(torch.arange(15).view(3, 5), 3):
            wrapped(ids).sum().backward()
    forwards = [0, 0, 1, 1, 2, 2] if "checkpoint" in wrapper else [0, 1, 2]
    assert stage.taken == forwards, "what is run again takes the same media"
    assert {name: getattr(stage, name) for name in STAGED} == dict.fromkeys(STAGED)


def test_a_compiled_stage_takes_the_media_of_each_step() -> None:
    stage = Learning()
    wrapped = torch.compile(stage, backend="eager")
    ids = torch.arange(15).view(3, 5)
    for step in range(2):
        batch = make_prepared_batch()
        batch[VLM_PP_MEDIA_KEY]["pixel_values"] = [
            part + step for part in batch[VLM_PP_MEDIA_KEY]["pixel_values"]
        ]
        with stage_vlm_media_for_pp(pipe(True), [wrapped], batch):
            assert stage._forward_pre_hooks, "the innermost module has it all"
            found = [float(wrapped(part).detach()[0, 0]) for part in torch.tensor_split(ids, 3)]
        means = torch.tensor([1.5, 7.5, 19.5]) + step
        assert torch.allclose(torch.tensor(found), means.sin())


# --- microbatches that are run again -----------------------------------------------------------------------

ORDERS = {
    "gpipe": ("F0", "F1", "F2", "B2", "B1", "B0"),
    "1f1b": ("F0", "F1", "B0", "F2", "B1", "B2"),
    "one after the other": ("F0", "B0", "F1", "B1", "F2", "B2"),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("probe", [False, True], ids=["no probe", "probe"])
def test_gradients_under_activation_checkpointing_are_those_without(
    order: str, reentrant: bool, probe: bool
) -> None:
    """The whole stage is run again in the backward, between the forwards of other microbatches."""
    found = []
    for again in (False, True):
        stage, ids = Learning(), torch.arange(15).view(3, 5)
        microbatches, outputs = torch.tensor_split(ids, 3), {}
        with stage_vlm_media_for_pp(pipe(True), [stage], make_prepared_batch()):
            if probe:
                stage(microbatches[0].detach())
            for kind, number in (tuple(step) for step in ORDERS[order]):
                if kind == "B":
                    outputs.pop(number).sum().backward()
                elif again:
                    given = microbatches[int(number)]
                    # torch's reentrant kind wants an input with a gradient
                    start = torch.zeros((), requires_grad=True)
                    outputs[number] = checkpoint(
                        lambda start, ids, stage=stage: stage(ids) + start,
                        start,
                        given,
                        use_reentrant=reentrant,
                    )
                else:
                    outputs[number] = stage(microbatches[int(number)])
        found.append(stage.weight.grad)
    assert found[0] is not None
    assert torch.equal(*found)


def test_a_microbatch_that_is_run_again_with_a_copy_of_its_tokens_is_rejected() -> None:
    stage, ids = Learning(), torch.arange(15).view(3, 5)
    with stage_vlm_media_for_pp(pipe(True), [stage], make_prepared_batch()):
        out = checkpoint(lambda given: stage(given.clone()), ids[:1], use_reentrant=False)
        with pytest.raises(RuntimeError, match=r"recomputes stage 0 with a copy of its input"):
            out.sum().backward()


def test_memory_of_a_microbatch_is_kept_so_that_the_next_one_does_not_get_it() -> None:
    stage, ids, alive = Taking(), torch.arange(15).view(3, 5), []
    with stage_vlm_media_for_pp(pipe(True), [stage], make_prepared_batch()):
        for microbatch in torch.tensor_split(ids, 3):
            copied = microbatch.clone()
            alive.append(weakref.ref(copied))
            stage(copied)
            del copied
        assert all(reference() is not None for reference in alive)
    assert stage.taken == [0, 1, 2]
    assert all(reference() is None for reference in alive), "but not for longer than the call"


def test_expanded_tokens_are_rejected_and_not_taken_for_a_probe() -> None:
    stage, ids = Taking(), torch.arange(5).expand(3, 5)
    with stage_vlm_media_for_pp(pipe(True), [stage], make_prepared_batch()):
        for microbatch in torch.tensor_split(ids, 3):
            with pytest.raises(ValueError, match=r"expanded \(strides \[\(0, 1\)\]\).*contiguous"):
                stage(microbatch)
    assert stage.taken == []


def test_a_microbatch_too_many_or_twice_is_rejected() -> None:
    stage, ids = Taking(), torch.arange(20).view(4, 5)
    with stage_vlm_media_for_pp(pipe(True), [stage], make_prepared_batch()):
        stage(ids[:1]), stage(ids[1:2])
        with pytest.raises(RuntimeError, match="microbatch 1 runs through stage 0 a second time"):
            stage(ids[:1])
        stage(ids[2:3])
        with pytest.raises(RuntimeError, match="microbatch 4 of a batch whose media were split for 3"):
            stage(ids[3:])
    assert stage.taken == [0, 1, 2]
