"""Cutting models into stages and batches into microbatches, in one process."""

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleLoopedBFS
from torch.distributed.pipelining.microbatch import TensorChunkSpec, split_args_kwargs_into_chunks

from contract.tiny_models import tiny_model, with_layers
from noise_floor import largest_difference, noise_floor, relative_difference
from packhorse.collate.masks import document_block_mask, find_segments
from packhorse.integrations.attention import use_attention
from packhorse.integrations.pipelining import (
    PipelineInputs,
    VlmPipeline,
    _add_rows,
    even_rows,
    pipeline_inputs,
    segment_starts,
    split_vlm,
    varlen_arguments,
)
from packhorse.pp_media import VLM_PP_MEDIA_KEY, prepare_vlm_media_for_pp
from raising import raises_config

CONFIG = SimpleNamespace(image_token_id=0, video_token_id=1)


def batch_of(rows: int, length: int = 6, **more: Any) -> dict[str, Any]:
    ids = torch.arange(2, 2 + rows * length).view(rows, length)
    return {"input_ids": ids, "labels": ids.clone(), **more}


# --- rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "microbatches", "placed"),
    [
        (7, 3, [0, 1, 2, 3, 4, -1, 5, 6, -1]),
        (4, 2, [0, 1, 2, 3]),
        (2, 4, [0, 1, -1, -1]),
        (1, 1, [0]),
    ],
)
def test_rows_are_added_after_shorter_microbatches(rows: int, microbatches: int, placed: list[int]) -> None:
    assert even_rows(rows, microbatches).tolist() == placed


def test_microbatches_hold_the_rows_that_torch_would_give_them() -> None:
    """If torch makes fewer chunks than requested, which its schedules reject, ours are complete."""
    for rows in range(1, 12):
        for microbatches in range(1, 7):
            ids = torch.arange(rows)[:, None]
            theirs, _ = split_args_kwargs_into_chunks((ids,), {}, microbatches)
            ours = [
                part[part >= 0].tolist()
                for part in torch.tensor_split(even_rows(rows, microbatches), microbatches)
            ]
            assert len(theirs) == min(rows, microbatches)
            assert [part.flatten().tolist() for (part,) in theirs] == ours[: len(theirs)]
            assert ours[len(theirs) :] == [[]] * (microbatches - len(theirs))


def test_added_rows_have_no_label_no_media_token_and_a_valid_mask() -> None:
    mask = torch.ones(3, 6, 6, dtype=torch.bool).tril()[:, None]
    positions = torch.arange(6).expand(3, 3, 6)
    made = pipeline_inputs(batch_of(3, attention_mask=mask, position_ids=positions), 2, None, CONFIG)
    assert made.ids.shape == made.labels.shape == (4, 6)
    assert made.ids[3].tolist() == [2] * 6, "neither image nor video token"
    assert made.labels[3].tolist() == [-100] * 6
    assert made.kwargs["attention_mask"].shape == (4, 1, 6, 6)
    assert torch.equal(made.kwargs["attention_mask"][3], mask[0])
    assert made.kwargs["position_ids"].shape == (3, 4, 6)
    assert made.axes == {"attention_mask": 0, "position_ids": 1}
    assert made.tokens == 18


def test_a_batch_that_comes_out_even_is_not_copied() -> None:
    batch = batch_of(4)
    made = pipeline_inputs(batch, 2, None, CONFIG)
    assert made.ids is batch["input_ids"]


def test_where_documents_begin_can_be_split_and_put_together_again() -> None:
    documents = torch.tensor([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1], [1, 2, 3, 0, 0, 0]])
    whole = find_segments(documents)
    starts = segment_starts(whole.cumulative, 3, 6)
    assert varlen_arguments(starts)["cu_seq_lens_q"].tolist() == whole.cumulative.tolist()
    for rows in ([0, 1], [2]):
        alone = find_segments(documents[rows])
        found = varlen_arguments(starts[rows])
        assert found["cu_seq_lens_k"].tolist() == alone.cumulative.tolist()
        assert found["max_length_q"] == found["max_length_k"] == alone.longest


@pytest.mark.parametrize("places", [[0, 4, 8, 12], [0, 6], [0, 6, 13], [1, 6, 12]])
def test_documents_that_cross_rows_cannot_be_split(places: list[int]) -> None:
    with raises_config("cu_seq_lens_q", places):
        segment_starts(torch.tensor(places, dtype=torch.int32), 2, 6)


def test_a_block_mask_is_split_by_rows_but_no_row_can_be_added_to_it() -> None:
    documents = torch.ones(4, 256, dtype=torch.int64)
    documents[1, 100:] = 2
    batch = batch_of(4, 256, attention_mask=document_block_mask(documents))
    made = pipeline_inputs(batch, 2, None, CONFIG)
    _, kwargs = split_args_kwargs_into_chunks((), made.kwargs, 2, None, TensorChunkSpec.from_dict(made.axes))
    dense = batch["attention_mask"].to_dense()
    assert torch.equal(torch.cat([part["attention_mask"].to_dense() for part in kwargs]), dense)
    with raises_config("attention_mask", match="PackedBlockMask, to which no row can be added"):
        pipeline_inputs(batch, 3, None, CONFIG)


@pytest.mark.parametrize("number", [0, -1, True])
def test_no_microbatches_are_rejected(number: Any) -> None:
    with raises_config("n_microbatches", number):
        pipeline_inputs(batch_of(2), number, None, CONFIG)


def test_expanded_ids_get_memory_of_their_own() -> None:
    """Stage 0 identifies microbatches by it."""
    batch = {"input_ids": torch.arange(6).expand(4, 6), "labels": torch.arange(6).expand(4, 6)}
    assert pipeline_inputs(batch, 2, None, CONFIG).ids.stride() == (6, 1)


def test_rows_are_added_on_the_device_of_the_batch() -> None:
    """Without a GPU: torch's fake tensors do not mix devices as real ones do."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        ids = torch.zeros(3, 6, dtype=torch.int64, device="cuda:0")
        mask = torch.zeros(3, 1, 6, 6, dtype=torch.bool, device="cuda:0")
        rows = even_rows(3, 2)
        inputs = PipelineInputs(ids, ids, {"attention_mask": mask}, {"attention_mask": 0}, 0)
        made = _add_rows(inputs, rows, CONFIG)
    for tensor in (made.ids, made.labels, made.kwargs["attention_mask"]):
        assert tensor.device.type == "cuda"
        assert len(tensor) == 4


@pytest.mark.parametrize(
    ("key", "tensor", "shape", "match"),
    [
        ("labels", torch.zeros(2, 5), (2, 5), r"input_ids, \(2, 6\)"),
        ("pixel_values", torch.rand(4, 3), None, "which stages do not take"),
        ("seq_lens", torch.ones(2, 3), None, "which stages do not take"),
        ("attention_mask", torch.ones(1, 6), (1, 6), "cannot be split"),
        ("position_ids", torch.ones(3, 1, 6), (3, 1, 6), "2 rows along axis 1"),
        ("attention_mask", {"full_attention": 1}, (), "a dict .* cannot be split"),
        ("labels", None, None, "no 'labels'"),
    ],
)
def test_what_stages_cannot_be_given_is_rejected(
    key: str, tensor: Any, shape: tuple[int, ...] | None, match: str
) -> None:
    with raises_config(key, shape, match=match):
        pipeline_inputs({**batch_of(2), key: tensor}, 2, None, CONFIG)


def test_media_without_positions_need_token_types_and_packs_need_positions() -> None:
    media = {VLM_PP_MEDIA_KEY: {"image_grid_thw": [torch.ones(1, 3), torch.ones(0, 3)]}}
    with raises_config("mm_token_type_ids"):
        pipeline_inputs(batch_of(2, **media), 2, lambda **given: given, CONFIG)
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    with raises_config("position_ids"):
        pipeline_inputs(batch_of(2, attention_mask=mask, **media), 2, lambda **given: given, CONFIG)


# --- stages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_stages_share_the_weights_of_the_model_under_their_names(name: str) -> None:
    model = with_layers(name, 5)
    parts = split_vlm(model, 3)
    whole = dict(model.named_parameters())
    together = [(key, weight) for part in parts for key, weight in part.named_parameters()]
    assert sorted(key for key, _ in together) == sorted(whole)
    assert all(weight is whole[key] for key, weight in together)
    layers = [{key.split(".")[3] for key, _ in p.named_parameters() if ".layers." in key} for p in parts]
    assert layers == [{"0", "1"}, {"2", "3"}, {"4"}]
    assert any("visual" in key for key, _ in parts[0].named_parameters())
    assert set(model.model._modules) == {"visual", "language_model"}, "the model itself is whole"
    assert len(model.model.language_model.layers) == 5


def test_one_stage_is_the_model() -> None:
    model = tiny_model("qwen2_vl")
    (only,) = split_vlm(model, 1)
    ids = torch.randint(5, 90, (2, 12))
    assert torch.equal(only(ids), model(input_ids=ids).logits)


def test_layers_that_take_visual_features_stay_on_stage_0() -> None:
    model = with_layers("qwen3_vl", 4)
    model.config.vision_config.deepstack_visual_indexes = [0, 0, 1]
    assert [len(part.model.language_model.layers) for part in split_vlm(model, 2)] == [3, 1]
    with raises_config("layers", [2, 2], match=r"the first 3.*at least 3"):
        split_vlm(model, 2, [2, 2])


@pytest.mark.parametrize("layers", [[1], [2, 1], [0, 2], [1, 1, 0]])
def test_layers_with_another_sum_are_rejected(layers: list[int]) -> None:
    with raises_config("layers", layers, match="expected 2 positive numbers with the sum 2"):
        split_vlm(tiny_model("qwen2_vl"), 2, layers)


def test_more_stages_than_layers_and_no_stages_are_rejected() -> None:
    with raises_config("layers", [1, 1, 0], match="expected 3 positive numbers with the sum 2"):
        split_vlm(tiny_model("qwen2_vl"), 3)
    with raises_config("n_stages", 0):
        split_vlm(tiny_model("qwen2_vl"), 0)


def tied_model(name: str) -> Any:
    model = copy.deepcopy(tiny_model(name))
    model.lm_head.weight = model.model.language_model.embed_tokens.weight
    model.config.tie_word_embeddings = True
    return model


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_a_tied_head_is_copied_on_request_and_the_model_says_the_same(name: str, parity: Any) -> None:
    model = tied_model(name)
    embedding = model.model.language_model.embed_tokens.weight
    first, last = split_vlm(model, 2, untie=True)
    head = last.lm_head.weight
    assert torch.equal(head, embedding)
    assert head is not embedding
    assert head.data_ptr() != embedding.data_ptr()
    assert not last.config.tie_word_embeddings
    assert model.lm_head.weight is embedding, "the model itself stays as it is"
    assert model.config.tie_word_embeddings
    ids = torch.randint(5, 90, (2, 12))
    logits = last(first(ids))
    with torch.no_grad():
        whole, others = model(input_ids=ids).logits, model(input_ids=ids.flip(0)).logits.flip(0)
        alone = torch.cat([model(input_ids=row[None]).logits for row in ids])
        wrong = last(first(ids).flip(1))
    parity.check(
        "logits",
        largest_difference(logits, whole),
        noise_floor(whole, others, alone),
        largest_difference(wrong, whole),
    )
    logits.sum().backward()
    assert bool(head.grad.any())
    assert bool(embedding.grad.any())
    assert not torch.equal(head.grad, embedding.grad), "they are trained separately"


def test_a_head_that_is_not_tied_is_not_copied() -> None:
    model = tiny_model("qwen2_vl")
    assert split_vlm(model, 2, untie=True)[1].lm_head is model.lm_head


def test_tied_embeddings_and_other_models_are_rejected() -> None:
    with raises_config("untie", False):
        split_vlm(tied_model("qwen2_vl"), 2)
    with raises_config("model_type", "gemma3"):
        split_vlm(tiny_model("gemma3"), 2)


# --- the pipeline -------------------------------------------------------------------------------------------


def test_a_batch_prepared_for_other_microbatches_is_rejected() -> None:
    pipeline = VlmPipeline(split_vlm(tiny_model("qwen2_vl"), 1), 2, ScheduleGPipe)
    batch = batch_of(3, **{VLM_PP_MEDIA_KEY: {"pixel_values": [torch.rand(1, 3)] * 3}})
    with raises_config("n_microbatches", 2, match=r"split for \[3\] microbatches"):
        pipeline.step(batch)


def test_two_stages_on_a_schedule_of_one_are_rejected() -> None:
    with raises_config("schedule", "ScheduleGPipe", match="one stage per rank, not 2"):
        VlmPipeline(split_vlm(tiny_model("qwen2_vl"), 2), 2, ScheduleGPipe)
    for number in (0, True):
        with raises_config("n_microbatches", number):
            VlmPipeline(split_vlm(tiny_model("qwen2_vl"), 1), number, ScheduleGPipe)
    with raises_config("parts"):
        VlmPipeline([], 2, ScheduleGPipe)


def test_a_schedule_without_kwargs_chunk_spec_is_rejected() -> None:
    with raises_config("schedule", "ScheduleLoopedBFS", match="kwargs_chunk_spec.*ScheduleInterleaved1F1B"):
        VlmPipeline(split_vlm(tiny_model("qwen2_vl"), 2), 2, ScheduleLoopedBFS)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def media_batch(rows: list[int]) -> dict[str, Any]:
    """Rows with these numbers of images of four patches (one token), for as many microbatches as rows."""
    config = tiny_model("qwen2_vl").config
    seeded = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 90, (len(rows), 12), generator=seeded)
    ids[ids == config.image_token_id] = 5
    for row, number in enumerate(rows):
        ids[row, 2 : 2 + number] = config.image_token_id
    patch = config.vision_config.in_channels * config.vision_config.temporal_patch_size
    pixels = torch.rand(4 * sum(rows), patch * config.vision_config.patch_size**2, generator=seeded)
    batch = {
        "input_ids": ids,
        "labels": ids.clone(),
        "position_ids": torch.arange(12).expand(3, len(rows), 12).clone(),
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 2, 2]] * sum(rows)),
        "n_images_per_sample": torch.tensor(rows),
    }
    return dict(prepare_vlm_media_for_pp(batch, len(rows), len(rows)))


def whole_loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The loss of the model that is not split, on all rows at once."""
    chunks = {key: torch.cat(parts) for key, parts in batch[VLM_PP_MEDIA_KEY].items()}
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], **chunks).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def gradients(part: torch.nn.Module) -> list[torch.Tensor]:
    return [weight.grad.clone() for weight in part.parameters() if weight.grad is not None]


@pytest.mark.parametrize(
    "wrapper",
    [
        checkpoint_wrapper,
        torch.nn.parallel.DistributedDataParallel,
        lambda part: torch.nn.parallel.DistributedDataParallel(checkpoint_wrapper(part)),
    ],
    ids=["checkpoint_wrapper", "DDP", "both"],
)
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_a_wrapped_stage_learns_from_its_media_what_it_learns_alone(
    wrapper: Any, schedule: type, group: None, parity: Any
) -> None:
    batch, zeros = media_batch([2, 0, 1]), media_batch([2, 0, 1])
    for chunk in zeros[VLM_PP_MEDIA_KEY]["pixel_values"]:
        chunk.fill_(0.5)
    found = []
    for wrap, given in ((lambda part: part, batch), (wrapper, batch), (wrapper, zeros)):
        (part,) = split_vlm(copy.deepcopy(tiny_model("qwen2_vl")).train(), 1)
        pipeline = VlmPipeline([wrap(part)], 3, schedule)
        loss = pipeline.step(given)
        assert loss is not None
        found.append((loss, gradients(part)))
        assert bool(part.model.visual.patch_embed.proj.weight.grad.any()), "the vision tower learns"
    whole = copy.deepcopy(tiny_model("qwen2_vl")).train()
    in_one_batch = whole_loss(whole, batch)
    in_one_batch.backward()
    (loss, alone), (again, wrapped), (wrong_loss, wrong) = found
    parity.check(
        "loss",
        largest_difference(again, loss),
        noise_floor(loss, in_one_batch),
        largest_difference(wrong_loss, loss),
    )
    parity.check(
        "gradients",
        relative_difference(wrapped, alone),
        noise_floor(alone, gradients(whole), measure=relative_difference),
        relative_difference(wrong, alone),
    )


def test_placeholders_without_their_media_are_rejected(group: None) -> None:
    (part,) = split_vlm(tiny_model("qwen2_vl"), 1)
    batch = media_batch([2, 0, 1])
    with pytest.raises(RuntimeError, match=r"image_token_id .* and stage 0 has no 'pixel_values'"):
        part(batch["input_ids"])
    config = tiny_model("qwen2_vl").config
    video = torch.full((1, 4), config.video_token_id)
    with pytest.raises(RuntimeError, match=r"video_token_id .* and stage 0 has no 'pixel_values_videos'"):
        part(video)
    del batch[VLM_PP_MEDIA_KEY]
    with pytest.raises(RuntimeError) as raised:
        VlmPipeline([part], 3, ScheduleGPipe).step(batch)
    assert "stage 0 has no 'pixel_values'" in str(raised.value.__cause__)


def test_evaluation_is_in_evaluation_mode_without_gradients_and_gives_the_mode_back(
    group: None, parity: Any
) -> None:
    model = copy.deepcopy(tiny_model("qwen2_vl"))
    for layer in model.model.language_model.layers:
        layer.self_attn.attention_dropout = 0.5
    whole = copy.deepcopy(model).eval()
    (part,) = split_vlm(model.train(), 1)
    part.model.visual.eval()  # frozen, say
    graphs: list[Any] = []
    part.register_forward_hook(lambda _, __, logits: graphs.append(logits.grad_fn))
    pipeline = VlmPipeline([part], 3, ScheduleGPipe)
    modes = [module.training for module in part.modules()]
    batch = media_batch([2, 0, 1])
    loss = pipeline.eval(batch)
    assert graphs == [None] * 3
    assert not gradients(part)
    assert [module.training for module in part.modules()] == modes
    with torch.no_grad():
        wanted = whole_loss(whole, batch)
        use_attention(whole, "eager")
        other = whole_loss(whole, batch)
    torch.manual_seed(0)
    dropped = pipeline.step(batch)
    parity.check(
        "loss",
        largest_difference(loss, wanted),
        noise_floor(wanted, other),
        largest_difference(dropped, wanted),
    )
    with raises_config("labels"):
        pipeline.eval({**batch, "labels": None})
    assert [module.training for module in part.modules()] == modes, "after an exception too"
