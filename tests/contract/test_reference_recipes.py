"""Targets of the reference's recipes run with their arguments once the import prefix is changed."""

import importlib
import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import soundfile
import torch
from torch.utils.data import DataLoader

from contract.processors import processor
from contract.samples import clip, make_image, tone, turns
from packhorse.chat import IGNORE_INDEX
from packhorse.collate_fns import packed_collater
from packhorse.datasets import make_meta_dataset
from packhorse.ledger import Ledger

REFERENCE, OURS = "nemo_automodel.components.datasets.vlm.", "packhorse."


def resolve(target: str) -> Any:
    """What a recipe's ``_target_`` names, with the import prefix changed."""
    module, _, name = target.replace(REFERENCE, OURS).rpartition(".")
    return getattr(importlib.import_module(module), name)


def instantiate(node: dict[str, Any], **more: Any) -> Any:
    """Call a target with its arguments, as a recipe does it."""
    return resolve(REFERENCE + node["_target_"])(**{k: v for k, v in node.items() if k != "_target_"}, **more)


# --- datasets ---------------------------------------------------------------------------------------------


def spoken() -> dict[str, Any]:
    file = io.BytesIO()
    soundfile.write(file, tone(8_000), 16_000, format="WAV")
    return {"bytes": file.getvalue(), "path": "a.wav"}


def hub_rows() -> dict[str, dict[str, list[Any]]]:
    """Small datasets with the public columns of those on the hub, by their hub names."""
    shot = {"bytes": encoded_image(), "path": None}
    said = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A ramp."}]
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    return {
        "quintend/rdr-items": {"image": [shot] * 3, "text": ["a", "b", "c"]},
        "naver-clova-ix/cord-v2": {
            "image": [shot] * 3,
            "ground_truth": [json.dumps({"gt_parse": {"total": {"price": "4"}}})] * 3,
        },
        "medpix-dataset/medpix-dataset": {
            "image_id": [shot] * 3,
            "question": ["What?"] * 3,
            "answer": ["That."] * 3,
        },
        "ysdede/commonvoice_17_tr_fixed": {"audio": [spoken()] * 3, "transcription": ["Merhaba"] * 3},
        "Yirany/UniMM-Chat": {"image": [shot] * 3, "conversation": [json.dumps(said)] * 3},
        "liuhaotian/LLaVA-Instruct-150K": {"image": [shot] * 3, "conversations": [said] * 3},
        "Shopify/product-catalogue": {
            "product_image": [shot] * 3,
            "ground_truth_category": ["Apparel > Hats"] * 3,
        },
        "allenai/tulu-3-sft-mixture": {"messages": [chat] * 8, "source": ["x"] * 8},
        "ise-uiuc/Magicoder-OSS-Instruct-75K": {"problem": ["Add."] * 2, "solution": ["a + b"] * 2},
    }


def encoded_image() -> bytes:
    file = io.BytesIO()
    make_image(64, 48).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of the datasets, by the names that they have on the hub."""
    folders = {}
    for number, (name, columns) in enumerate(hub_rows().items()):
        made = datasets.Dataset.from_dict(columns)
        for column in made.column_names:
            if "image" in column:
                made = made.cast_column(column, datasets.Image())
            elif column == "audio":
                made = made.cast_column(column, datasets.Audio())
        folder = tmp_path_factory.mktemp(f"hub{number}")
        made.to_parquet(str(folder / "train-00000-of-00001.parquet"))
        folders[name] = str(folder)
    return folders


MIX = {"tulu_path": "allenai/tulu-3-sft-mixture", "magicoder_path": "ise-uiuc/Magicoder-OSS-Instruct-75K"}
DATASETS: list[dict[str, Any]] = [
    {"_target_": "datasets.make_rdr_dataset", "path_or_dataset": "quintend/rdr-items", "split": "train"},
    {
        "_target_": "datasets.make_cord_v2_dataset",
        "path_or_dataset": "naver-clova-ix/cord-v2",
        "split": "train",
        "limit_dataset_samples": 2,
    },
    {
        "_target_": "datasets.make_medpix_dataset",
        "path_or_dataset": "medpix-dataset/medpix-dataset",
        "split": "train[:2]",
        "truncate": True,
    },
    {
        "_target_": "datasets.make_cv17_dataset",
        "path_or_dataset": "ysdede/commonvoice_17_tr_fixed",
        "split": "train",
    },
    {
        "_target_": "datasets.make_unimm_chat_dataset",
        "path_or_dataset": "Yirany/UniMM-Chat",
        "split": "train",
    },
    {
        "_target_": "datasets.make_llava_onevision_dataset",
        "path_or_dataset": "liuhaotian/LLaVA-Instruct-150K",
        "split": "train",
        "max_length": 2048,
    },
    {
        "_target_": "datasets.make_shopify_product_catalogue_dataset",
        "path_or_dataset": "Shopify/product-catalogue",
        "split": "train",
        "limit_dataset_samples": 2,
    },
    {"_target_": "datasets.make_tulu3_dataset", "path_or_dataset": "allenai/tulu-3-sft-mixture"},
    {
        "_target_": "datasets.make_tulu3_magicoder_text_mix_dataset",
        "tulu_split": "train",
        "magicoder_split": "train",
        "seed": 42,
        "max_turns": 16,
        "limit_total": 4,
        **MIX,
    },
    {
        "_target_": "mock.build_mock_vlm_dataset",
        "num_samples": 3,
        "num_images_per_sample": 2,
        "image_size": [64, 48],
        "max_length": 8,
        "path_or_dataset": "unused",
    },
]
CONFIGS: list[dict[str, Any]] = [
    {"_target_": "datasets.RdrDatasetConfig", "path_or_dataset": "quintend/rdr-items", "split": "train"},
    {
        "_target_": "datasets.CordV2DatasetConfig",
        "path_or_dataset": "naver-clova-ix/cord-v2",
        "limit_dataset_samples": 2,
    },
    {"_target_": "datasets.MedPixDatasetConfig", "path_or_dataset": "medpix-dataset/medpix-dataset"},
    {"_target_": "datasets.UnimmChatDatasetConfig", "path_or_dataset": "Yirany/UniMM-Chat"},
    {"_target_": "datasets.LlavaOnevisionDatasetConfig", "path_or_dataset": "liuhaotian/LLaVA-Instruct-150K"},
    {
        "_target_": "datasets.ShopifyProductCatalogueDatasetConfig",
        "path_or_dataset": "Shopify/product-catalogue",
        "limit_dataset_samples": 2,
    },
    {"_target_": "datasets.Tulu3MagicoderTextMixDatasetConfig", "limit_total": 4, **MIX},
    {"_target_": "mock.MockVlmDatasetConfig", "num_samples": 2, "image_size": (64, 48), "max_length": 8},
]


def local(node: dict[str, Any], hub: dict[str, str]) -> dict[str, Any]:
    """The arguments with folders in place of names on the hub."""
    return {
        key: hub.get(value, value) if isinstance(value, str) and key != "_target_" else value
        for key, value in node.items()
    }


def assert_trains(dataset: Any, name: str = "qwen2_5_vl") -> None:
    """A batch of the dataset's first two examples has something to learn in each row."""
    collate = resolve(REFERENCE + "collate_fns.COLLATE_FNS")[type(processor(name)).__name__]
    batch = collate([dataset[0], dataset[1]], processor(name))
    assert (batch["labels"] != IGNORE_INDEX).any(dim=1).tolist() == [True, True]


def ids_of(node: Any) -> str:
    return str(node["_target_"])


@pytest.mark.parametrize("node", DATASETS, ids=ids_of)
def test_a_dataset_function_runs_with_a_recipes_arguments(node: dict[str, Any], hub: dict[str, str]) -> None:
    dataset = instantiate(local(node, hub))
    limit = node.get("limit_dataset_samples", node.get("limit_total"))
    assert limit is None or len(dataset) == limit
    assert_trains(dataset, "phi4_mm" if "cv17" in node["_target_"] else "qwen2_5_vl")


@pytest.mark.parametrize("node", CONFIGS, ids=ids_of)
def test_a_dataset_configuration_builds_the_dataset(node: dict[str, Any], hub: dict[str, str]) -> None:
    assert_trains(instantiate(local(node, hub)).build())


@pytest.mark.parametrize("node", CONFIGS, ids=ids_of)
def test_a_mistyped_attribute_of_a_configuration_raises(node: dict[str, Any], hub: dict[str, str]) -> None:
    config = instantiate(local(node, hub))
    with pytest.raises(AttributeError, match="max_sampels"):
        config.max_sampels = 5


def test_defaults_of_configurations_are_those_of_the_functions() -> None:
    import inspect

    pairs = {
        "RdrDatasetConfig": "make_rdr_dataset",
        "CordV2DatasetConfig": "make_cord_v2_dataset",
        "MedPixDatasetConfig": "make_medpix_dataset",
        "UnimmChatDatasetConfig": "make_unimm_chat_dataset",
        "LlavaOnevisionDatasetConfig": "make_llava_onevision_dataset",
        "ShopifyProductCatalogueDatasetConfig": "make_shopify_product_catalogue_dataset",
        "Tulu3MagicoderTextMixDatasetConfig": "make_tulu3_magicoder_text_mix_dataset",
        "MetaDatasetConfig": "make_meta_dataset",
        "PreTokenizedDatasetWrapperConfig": "PreTokenizedDatasetWrapper",
    }
    for config, function in pairs.items():
        fields = inspect.signature(resolve(REFERENCE + f"datasets.{config}")).parameters
        taken = inspect.signature(resolve(REFERENCE + f"datasets.{function}")).parameters
        assert {name: field.default for name, field in fields.items()} == {
            name: taken[name].default for name in fields
        }


# --- collate functions ------------------------------------------------------------------------------------


def image_example(answer: str = "A ramp.") -> dict[str, Any]:
    conversation = turns("image", answer=answer)
    conversation[0]["content"][0]["image"] = make_image(64, 48)
    return {"conversation": conversation}


def audio_example() -> dict[str, Any]:
    return {"conversation": turns(), "audio": (tone(8_000), 16_000)}


COLLATE: list[tuple[dict[str, Any], str, Callable[[], dict[str, Any]]]] = [
    ({"_target_": "collate_fns.default_collate_fn", "max_length": 64}, "qwen3_vl", image_example),
    (
        {"_target_": "collate_fns.default_collate_fn", "max_length": 4096, "drop_overlong": True},
        "qwen3_vl",
        image_example,
    ),
    ({"_target_": "collate_fns.default_collate_fn"}, "gemma3", image_example),
    ({"_target_": "collate_fns.qwen2_5_collate_fn"}, "qwen2_5_vl", image_example),
    ({"_target_": "collate_fns.kimi_vl_collate_fn", "max_length": 64}, "kimi_vl", image_example),
    ({"_target_": "collate_fns.kimi_k25_vl_collate_fn", "max_length": 128}, "kimi_k25", image_example),
    (
        {"_target_": "collate_fns.llava_onevision_collate_fn", "max_length": 4096},
        "llava_onevision",
        image_example,
    ),
    ({"_target_": "collate_fns.gemma4_prefix_collate_fn", "max_length": 512}, "gemma4", image_example),
    ({"_target_": "collate_fns.phi4_mm_collate_fn"}, "phi4_mm", audio_example),
    ({"_target_": "collate_fns.nemotron_parse_collate_fn"}, "nemotron_parse", image_example),
    (
        {"_target_": "collate_fns.nemotron_omni_collate_fn", "max_length": 512, "max_video_frames": 8},
        "nemotron_omni",
        audio_example,
    ),
]


@pytest.mark.parametrize(
    ("node", "family", "example"), COLLATE, ids=lambda value: ids_of(value) if isinstance(value, dict) else ""
)
def test_a_collate_function_runs_at_batch_size_one(
    node: dict[str, Any], family: str, example: Callable[[], dict[str, Any]]
) -> None:
    function = partial(resolve(REFERENCE + node["_target_"]), processor=processor(family))
    options = {key: value for key, value in node.items() if key != "_target_"}
    batch = function([example()], **options)
    assert batch["input_ids"].shape == batch["labels"].shape
    if "max_length" in node:
        assert batch["input_ids"].shape == (1, node["max_length"] - 1)


def test_every_processor_of_the_references_registry_has_a_function() -> None:
    registry = resolve(REFERENCE + "collate_fns.COLLATE_FNS")
    assert registry.keys() >= {
        "Qwen2_5_VLProcessor",
        "Qwen3OmniMoeProcessor",
        "KimiVLProcessor",
        "KimiK25Processor",
        "NemotronParseProcessor",
        "NemotronH_Nano_Omni_Reasoning_V3Processor",
        "NemotronH_Omni_Reasoning_V3Processor",
        "default",
    }


# --- from a meta file to packed batches -------------------------------------------------------------------


@pytest.fixture
def meta(tmp_path: Path) -> str:
    make_image(64, 48).save(tmp_path / "ramp.png")
    with (tmp_path / "train.jsonl").open("w") as file:
        for number in range(12):
            said = [
                {"role": "user", "content": "<image>" * (number % 2) + f"What is number {number}?"},
                {"role": "assistant", "content": "A ramp. " * (number % 5 + 1)},
            ]
            file.write(json.dumps({"messages": said, "images": ["ramp.png"] * (number % 2)}) + "\n")
    path = tmp_path / "meta.json"
    path.write_text(json.dumps({"ramps": {"file_name": "train.jsonl", "media_dir": str(tmp_path)}}))
    return str(path)


def test_a_meta_configuration_takes_the_data_parallel_rank(meta: str) -> None:
    config = instantiate(
        {"_target_": "datasets.MetaDatasetConfig", "path_or_dataset": meta, "shard_data": True}
    )
    assert config.builds_with_data_parallel_rank
    shards = [config.build(rank=rank, world_size=3) for rank in range(3)]
    assert [len(shard) for shard in shards] == [4, 4, 4]
    everything = make_meta_dataset(meta)
    assert [shards[n % 3][n // 3] for n in range(12)] == list(everything)
    whole = instantiate({"_target_": "datasets.MetaDatasetConfig", "path_or_dataset": meta})
    assert len(whole.build(rank=1, world_size=3)) == 12


@pytest.mark.parametrize("packing_format", ["neat", "thd"])
def test_packing_configurations_make_the_batches_of_a_recipe(meta: str, packing_format: str) -> None:
    real = processor("qwen2_5_vl")
    raw = instantiate({"_target_": "datasets.make_meta_dataset", "path_or_dataset": meta})
    samples = instantiate(
        {"_target_": "datasets.PreTokenizedDatasetWrapperConfig", "max_length": 256, "truncate": True}
    ).build(raw, real)
    config = instantiate(
        {
            "_target_": "neat_packing_vlm.NeatPackConfig",
            "pack_size": 256,
            "packing_ratio": 0.9,
            "drop_long_samples": True,
            "collate_max_length": 256,
            "packing_format": packing_format,
        }
    )
    packs = config.build(samples, padding_idx=0, ds_raw=raw, processor=real)
    assert all(isinstance(pack.get("pixel_values", torch.zeros(1)), torch.Tensor) for pack in packs)
    collate = packs.robust_collate(packed_collater(config))
    batches = list(DataLoader(packs, batch_size=2, collate_fn=collate))
    assert all(batch["input_ids"].shape[1] == 256 for batch in batches)
    documents = "seq_lens" if packing_format == "thd" else "_packed_seq_ids"
    assert any(documents in batch for batch in batches)  # of a single document there is none
    pixels = [batch["pixel_values"] for batch in batches if "pixel_values" in batch]
    assert pixels
    assert all(value.dtype == torch.bfloat16 for value in pixels)
    by_hand = instantiate(
        {"_target_": "neat_packing_vlm.PackedDatasetWrapperConfig", "pack_size": 256, "sequence_alignment": 4}
    ).build(samples, [[0, 1], [2]])
    assert len(by_hand[0]["input_ids"]) % 4 == 0


def test_a_sampler_and_pipeline_chunks_take_a_recipes_arguments(meta: str) -> None:
    real = processor("qwen2_5_vl")
    raw = make_meta_dataset(meta)
    sampler = resolve(REFERENCE + "samplers.LengthGroupedSampler")(
        raw, seed=7, processor=real, max_length=512
    )
    samples = resolve(REFERENCE + "datasets.PreTokenizedDatasetWrapper")(raw, real, 512, ledger=Ledger())
    pad = partial(resolve(REFERENCE + "collate_fns.pad_collate_fn"), processor=real)
    wrapped = resolve(REFERENCE + "pp_media.wrap_vlm_collate_for_pp")(pad, 2)
    (batch, *_) = DataLoader(samples, batch_size=4, sampler=sampler, collate_fn=wrapped)
    chunks = batch[resolve(REFERENCE + "pp_media.VLM_PP_MEDIA_KEY")]
    assert {"pixel_values", "image_grid_hws"} <= chunks.keys()
    assert all(len(parts) == 2 for parts in chunks.values())


def test_random_images_are_the_same_for_the_same_seed_and_answers_have_the_requested_length() -> None:
    build = resolve(REFERENCE + "mock.build_mock_vlm_dataset")
    first, again, other = (build(num_samples=2, image_size=(32, 24), seed=seed) for seed in (1, 1, 2))
    images = [np.asarray(made[0]["conversation"][0]["content"][0]["image"]) for made in (first, again, other)]
    assert images[0].shape == (24, 32, 3)
    assert (images[0] == images[1]).all()
    assert (images[0] != images[2]).any()
    assert len(first[0]["conversation"][1]["content"][0]["text"].split()) == 256
    short = build(num_samples=1, max_length=9)[0]["conversation"][1]["content"][0]["text"]
    assert len(short.split()) == 9
    said = {
        row["conversation"][1]["content"][0]["text"] for row in build(responses=["Yes.", "No."], max_length=9)
    }
    assert said == {"Yes.", "No."}


def test_a_video_goes_through_the_omni_function_with_few_frames() -> None:
    conversation = turns("video")
    conversation[0]["content"][0]["video"] = list(clip(12)[0])
    collate = resolve(REFERENCE + "collate_fns.nemotron_omni_collate_fn")
    batch = collate([{"conversation": conversation}], processor("nemotron_omni"))
    assert len(batch["pixel_values_videos"]) == 8
