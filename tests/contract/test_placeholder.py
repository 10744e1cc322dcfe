"""The placeholder that keeps ranks in step: there for the vision tower, invisible to the loss."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F

import packhorse
from contract.processors import FAMILIES, build, processor
from contract.separate import gradients_of
from contract.tiny_models import MODELS, media_of, tiny_model
from noise_floor import largest_difference, noise_floor, relative_difference
from packhorse import World
from packhorse.chat import IGNORE_INDEX
from packhorse.collate_fns import model_inputs
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.families import Encoder
from packhorse.integrations.attention import use_attention
from packhorse.ledger import Ledger
from packhorse.loader.build import PackBuilder, PadBuilder
from packhorse.loader.placeholder import Placeholders
from packhorse.loader.startup import ModelInfo
from packhorse.media import VideoInfo
from packhorse.types import MEDIA_KINDS, MediaMask, WorkItem

pytestmark = pytest.mark.usefixtures("attention_as_before")

CHATS = [name for name, family in FAMILIES.items() if family.chats]
ROWS = [
    {
        "conversation": [
            {"role": "user", "content": [{"type": "text", "text": question}]},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
    }
    for question, answer in [
        ("Who goes there?", "A cat."),
        ("And why?", "It carries salt."),
        ("So?", "Yes."),
    ]
]


def media_mask(name: str) -> MediaMask:
    return MediaMask.of(kind for kind in MEDIA_KINDS if kind in FAMILIES[name].modalities)


@pytest.mark.parametrize("name", CHATS)
def test_every_family_has_a_blank_for_each_of_its_media(name: str) -> None:
    samples = PreTokenizedDatasetWrapper(ROWS, processor(name), inject_fake_images=False, ledger=Ledger())
    placeholders = Placeholders(samples)
    for kind in MEDIA_KINDS:
        if kind not in FAMILIES[name].modalities:
            continue
        mask = MediaMask.of([kind])
        ((blank_kind, blank),) = placeholders.samples(mask)
        assert blank_kind in FAMILIES[name].modalities
        keys = [key for key in blank.media if key in samples.family.layout]
        media = samples.encoder.media_token_ids
        assert any({kind, blank_kind} <= {*samples.family.layout[key].kinds} for key in keys)
        assert bool((blank.labels == IGNORE_INDEX).all())
        assert any(token in media for token in blank.tokens["input_ids"].tolist())
        assert int(blank.tokens["input_ids"][-1]) not in media, "the shift would cut it"
        assert {value.shape[-1] for value in blank.per_token.values()} == {len(blank)}
        assert placeholders.lengths(mask) == [len(blank) - 1]


@pytest.mark.parametrize("name", CHATS)
def test_each_placeholder_of_several_kinds_is_named_by_the_media_that_it_holds(name: str) -> None:
    samples = PreTokenizedDatasetWrapper(ROWS, processor(name), inject_fake_images=False, ledger=Ledger())
    named = Placeholders(samples).samples(media_mask(name))
    assert len({kind for kind, _ in named}) == len(named)
    for kind, blank in named:
        layouts = [layout for key, layout in samples.family.layout.items() if key in blank.media]
        assert any(kind in layout.kinds for layout in layouts), (kind, sorted(blank.media))


@pytest.mark.parametrize("mode", ["pack", "pad"])
def test_a_batch_that_is_changed_in_place_does_not_change_later_placeholders(
    mode: Literal["pack", "pad"],
) -> None:
    samples = PreTokenizedDatasetWrapper(
        ROWS, processor("qwen2_vl"), inject_fake_images=False, ledger=Ledger()
    )
    config = packhorse.LoaderConfig(data=ROWS, mode=mode, pack_size=256)
    builder = (PackBuilder if mode == "pack" else PadBuilder)(config, samples, ModelInfo())
    item = WorkItem(0, 0, ((0,),), MediaMask.IMAGE)
    first = builder.build(item).batch["pixel_values"]
    expected = first.clone()
    first.zero_()
    assert expected.any()
    assert torch.equal(builder.build(item).batch["pixel_values"], expected)


def gradients(model: Any, *batches: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """The summed loss over all tokens, and its gradients."""
    model.zero_grad(set_to_none=True)
    total = 0.0
    for batch in batches:
        logits = model(**model_inputs(batch)).logits
        loss = F.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )
        loss.backward()
        total += float(loss.detach())
    return total, gradients_of(model)


@pytest.mark.parametrize(("mode", "backend"), [("pack", "sdpa"), ("pack", "varlen"), ("pad", "sdpa")])
@pytest.mark.parametrize("name", list(MODELS))
def test_a_rank_without_media_runs_the_tower_and_learns_the_same(
    name: str, mode: str, backend: str, parity: Any
) -> None:
    if backend == "varlen" and name.startswith("gemma"):
        backend = "eager"  # varlen rejects it
    model = tiny_model(name)
    use_attention(model, backend)
    loader = packhorse.load(
        ROWS, processor(name), model=model, world=World(), mode=mode, pack_size=1024, batch_size=3
    )
    build = loader._workers.builder.build
    packs = ((0, 1, 2),) if mode == "pack" else ((0,), (1,), (2,))
    taken = MediaMask.of(kind for kind in MEDIA_KINDS if kind in media_of(name))
    plain, placed = build(WorkItem(0, 0, packs)), build(WorkItem(0, 0, packs, taken))
    layout = loader._samples.family.layout
    there = {kind for key in placed.batch if key in layout for kind in layout[key].kinds}

    assert not any(key in layout for key in plain.batch)
    assert there >= media_of(name) & {"image", "video"}
    assert placed.batch.info.placeholder
    assert not plain.batch.info.placeholder
    assert placed.batch.info.samples == plain.batch.info.samples == (0, 1, 2)
    assert placed.batch.info.tokens == plain.batch.info.tokens
    assert placed.batch.info.supervised == plain.batch.info.supervised
    loss, ours = gradients(model, plain.batch)
    with_it, theirs = gradients(model, placed.batch)
    other_order = ((2, 1, 0),) if mode == "pack" else ((2,), (1,), (0,))
    apart = [build(WorkItem(0, 0, ((number,),))).batch for number in range(3)]
    others = [gradients(model, build(WorkItem(0, 0, other_order)).batch), gradients(model, *apart)]
    media = torch.tensor(sorted(loader._samples.encoder.media_token_ids))
    ids, labels = placed.batch["input_ids"], placed.batch["labels"]
    learns_it = {**placed.batch, "labels": torch.where(torch.isin(ids, media), ids, labels)}
    wrong_loss, wrong = gradients(model, learns_it)
    parity.check(
        "loss",
        largest_difference(with_it, loss),
        noise_floor(loss, *(other for other, _ in others)),
        largest_difference(wrong_loss, loss),
    )
    parity.check(
        "gradients",
        relative_difference(theirs, ours),
        noise_floor(ours, *(other for _, other in others), measure=relative_difference),
        relative_difference(wrong, ours),
    )
    tower = [key for key in theirs if key not in ours]
    assert tower, "the vision tower has no gradient: it did not run"
    assert all(not theirs[key].any() for key in tower)


@pytest.mark.parametrize("mode", ["pack", "pad"])
def test_a_batch_without_samples_is_there_and_teaches_nothing(mode: str) -> None:
    model = tiny_model("qwen2_vl")
    loader = packhorse.load(ROWS, processor("qwen2_vl"), model=model, mode=mode, pack_size=256)
    built = loader._workers.builder.build(WorkItem(0, 0, (), MediaMask(3)))
    loss, found = gradients(model, built.batch)

    assert built.batch.info.is_padding
    assert built.batch.info.supervised == 0
    assert loss == 0
    assert all(not gradient.any() for gradient in found.values())


def reserved_tokens(name: str, made: Any) -> dict[str, int]:
    """Tokens that a pack reserves for a placeholder of each kind."""
    samples = PreTokenizedDatasetWrapper(ROWS, made, inject_fake_images=False, ledger=Ledger())
    placeholders = Placeholders(samples)
    found = {kind: sum(placeholders.lengths(MediaMask.of([kind]))) for kind in media_mask(name).kinds}
    return {**found, "all": sum(placeholders.lengths(media_mask(name)))}


def with_default_budgets(name: str) -> Any:
    """The processor with the settings that its classes have by default, which released models come near."""
    made = build(name)
    for part in ("image_processor", "video_processor"):
        owner = getattr(made, part, None)
        if owner is not None and FAMILIES[name].bundled and name != "nemotron_omni":
            setattr(made, part, type(owner)())
    tokens = {
        "internvl": ("image_seq_length", 256),
        "llava_onevision": ("num_image_tokens", 729),
        "smolvlm": ("image_seq_len", 64),
    }
    if name in tokens:
        setattr(made, *tokens[name])
    return made


@pytest.mark.parametrize("name", CHATS)
def test_a_placeholder_takes_a_small_part_of_a_pack(name: str) -> None:
    for made in (processor(name), with_default_budgets(name)):
        samples = PreTokenizedDatasetWrapper(ROWS, made, inject_fake_images=False, ledger=Ledger())
        found = reserved_tokens(name, made)
        print(f"{name}: {found} tokens")
        assert found["all"] <= sum(value for kind, value in found.items() if kind != "all")
        for kind, tokens in found.items():
            if kind == "all":
                continue
            square: Any = {
                "image": (56, 56),
                "video": VideoInfo(2, 56, 56, None, None, (0, 1)),
                "audio": 16_000,
            }[kind]
            # Two tokens around it; in a family with times or tiles, also what is written between those.
            assert tokens <= samples.encoder.media_tokens(kind, square) + 24


def test_the_placeholder_of_smolvlm_is_one_frame_and_not_seventeen_tiles() -> None:
    made = with_default_budgets("smolvlm")
    assert Encoder(made).media_tokens("image", (56, 56)) == 17 * 64
    assert reserved_tokens("smolvlm", made) == {"image": 66, "video": 66, "all": 66}
