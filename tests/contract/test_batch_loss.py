"""``model(**batch).loss`` is the mean cross entropy over the supervised tokens of a loader's batch.

The expected loss does not come from a batch: each sample goes through its model alone, with labels that are
not shifted, and transformers shifts them. What two correct ways of computing it differ by on this machine (a
sample alone and in a padded batch) is the noise floor. The control shifts the labels of the batch twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers.utils.generic import TransformersKwargs

import packhorse
from contract.cases import ACCEPTED, conversation
from contract.processors import FAMILIES, processor
from contract.text_models import TEXT_MODELS, text_model
from contract.tiny_models import MODELS, WITHOUT_VIDEO, tiny_model
from noise_floor import ParityRecorder, noise_floor
from packhorse import Batch
from packhorse.chat import IGNORE_INDEX
from packhorse.collate.padded import pad_samples
from packhorse.collate_fns import neat_packed_vlm_collater
from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
from packhorse.families import family_of
from packhorse.families.models import attention_of
from packhorse.families.qwen_vl import rope_index
from packhorse.integrations.attention import use_attention
from packhorse.integrations.loss import count_supervised, token_loss
from packhorse.ledger import Ledger
from packhorse.neat_packing_vlm import PackedDatasetWrapper

pytestmark = pytest.mark.usefixtures("attention_as_before")

CASES = ("text", "one image", "many turns", "two images", "video")
BACKENDS = ("sdpa", "eager", "varlen", "flex_attention")
# Compiling takes ten seconds for a model: one with a causal mask, and one with windows and images that are
# bidirectional. The others differ in their masks, which flex attention also applies without compiling.
COMPILED = ("qwen2_vl", "gemma4")
# Gemma's images attend in both directions, which a causal kernel cannot do.
PACKED = [
    (name, backend)
    for name in MODELS
    for backend in BACKENDS
    if name not in ("gemma3", "gemma4") or backend != "varlen"
]


@dataclass(frozen=True)
class Expected:
    """The loss over all rows of a family, and the noise floor of their losses."""

    loss: float
    floor: float
    tokens: int


def rows_of(name: str, files: dict[str, Path]) -> list[dict[str, Any]]:
    cases = [
        case for case in CASES if (name, case) in ACCEPTED and not (case == "video" and name in WITHOUT_VIDEO)
    ]
    return [{"conversation": conversation(name, case, files)} for case in cases]


def load(name: str, files: dict[str, Path], model: Any, **settings: Any) -> packhorse.Loader:
    settings = {"pack_size": 4096, "effort": 0, "placeholder": "never", **settings}
    return packhorse.load(rows_of(name, files), processor(name), model=model, **settings)


def losses_of_rows(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean loss of each row; labels are not shifted."""
    summed = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none").sum(-1)
    return summed / (labels[:, 1:] != IGNORE_INDEX).sum(-1)


@pytest.fixture(scope="module")
def expected(files: dict[str, Path]) -> Callable[[str], Expected]:
    @cache
    def expect(name: str) -> Expected:
        model, family = tiny_model(name), family_of(processor(name))
        dataset = PreTokenizedDatasetWrapper(
            rows_of(name, files), processor(name), inject_fake_images=False, on_bad="raise", ledger=Ledger()
        )
        samples = [dataset[index] for index in range(len(dataset))]
        pad = processor(name).tokenizer.pad_token_id
        with torch.no_grad():
            alone = [model(**pad_samples([s], family, pad)).loss for s in samples]
            together = pad_samples(samples, family, pad)
            labels = together.pop("labels")
            in_batch = losses_of_rows(model(**together).logits, labels)
        tokens = (labels[:, 1:] != IGNORE_INDEX).sum(-1)
        losses = torch.stack(alone)
        loss = float((losses * tokens).sum() / tokens.sum())
        return Expected(loss, noise_floor(losses, in_batch), int(tokens.sum()))

    return expect


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    yield
    # Flex attention that was compiled for one number of rows is recompiled for any number, which torch 2.13
    # writes wrong C++ for on a CPU. So every test begins with nothing compiled.
    torch.compiler.reset()


def forward_takes(model: Any) -> set[str]:
    """Named parameters of a model, and keyword arguments that transformers documents."""
    return {*inspect.signature(type(model).forward).parameters, *TransformersKwargs.__annotations__}


def mean_loss(batches: Sequence[Mapping[str, Any]], model: Any, *, shifted_twice: bool = False) -> float:
    """The mean over the supervised tokens of all batches, from each batch's own mean.

    Args:
        batches: with labels that are shifted.
        model: computes the losses.
        shifted_twice: without ``shift_labels``, so that the model shifts the labels again.
    """
    dropped = {"shift_labels"} if shifted_twice else set()
    total = 0.0
    for batch in batches:
        given = {key: value for key, value in batch.items() if key not in dropped}
        with torch.no_grad():
            total += float(model(**given).loss) * count_supervised([batch])
    return total / count_supervised(batches)


def check_loss(
    parity: ParityRecorder, batches: Sequence[Mapping[str, Any]], model: Any, right: Expected
) -> None:
    difference = abs(mean_loss(batches, model) - right.loss)
    control = abs(mean_loss(batches, model, shifted_twice=True) - right.loss)
    parity.check("loss", difference, right.floor, control)


@pytest.mark.parametrize(("name", "backend"), PACKED)
def test_the_loss_of_a_packed_batch_is_the_mean_over_its_supervised_tokens(
    name: str,
    backend: str,
    files: dict[str, Path],
    expected: Callable[[str], Expected],
    parity: ParityRecorder,
    request: pytest.FixtureRequest,
) -> None:
    model = tiny_model(name)
    right = expected(name)
    use_attention(model, backend)
    if backend == "flex_attention" and name not in COMPILED:
        request.getfixturevalue("uncompiled_flex")
    (batch,) = load(name, files, model)
    assert isinstance(batch, Batch)
    assert len(batch.info.document_keys[0]) == len(rows_of(name, files))
    assert batch["shift_labels"] is batch["labels"]
    assert batch.keys() - forward_takes(model) == {"shift_labels"}
    assert batch.info.supervised == right.tokens
    check_loss(parity, [batch], model, right)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_loss_of_a_documented_collate_functions_batch_is_right_too(
    backend: str, files: dict[str, Path], expected: Callable[[str], Expected], parity: ParityRecorder
) -> None:
    """It has keys that are no inputs of the model, as the reference's pages say; models ignore them."""
    model = tiny_model("qwen2_vl")
    right = expected("qwen2_vl")
    use_attention(model, backend)
    rows = rows_of("qwen2_vl", files)
    samples = PreTokenizedDatasetWrapper(rows, processor("qwen2_vl"), inject_fake_images=False)
    packs = PackedDatasetWrapper(samples, [range(3), range(3, len(rows))], 4096, 0, rope_index(model))
    torch.compiler.reset()  # also what other tests have compiled
    # Pixels of the samples alone are float32 too: rounded to bfloat16 they are others.
    batch = neat_packed_vlm_collater([packs[0], packs[1]], attn_implementation=backend, pixel_dtype=None)
    assert batch["shift_labels"] is batch["labels"]
    assert {"n_images_per_sample", "_packed_seq_ids"} <= batch.keys()
    check_loss(parity, [batch], model, right)


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_of_padded_batches_is_the_mean_over_their_supervised_tokens(
    name: str, files: dict[str, Path], expected: Callable[[str], Expected], parity: ParityRecorder
) -> None:
    model = tiny_model(name)
    right = expected(name)
    batches = list(load(name, files, model, mode="pad", batch_size=2))
    for batch in batches:
        assert batch.keys() - forward_takes(model) == {"shift_labels"}
    assert sum(batch.info.supervised for batch in batches) == right.tokens
    check_loss(parity, batches, model, right)


@pytest.mark.parametrize("name", [name for name in TEXT_MODELS if name in FAMILIES])
@pytest.mark.parametrize("mode", ["pack", "pad"])
def test_models_take_every_key_of_a_batch_by_name(name: str, mode: str, files: dict[str, Path]) -> None:
    takes = forward_takes(text_model(name))
    for batch in load(name, files, "unchecked", mode=mode):
        assert batch.keys() - takes == {"shift_labels"}


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_every_class_takes_shift_labels_as_they_are(name: str) -> None:
    ids = torch.arange(3, 23).view(2, 10)
    labels = ids.roll(-1, 1)
    labels[:, :4] = IGNORE_INDEX
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    with torch.no_grad():
        out = text_model(name)(**given, shift_labels=labels)
        twice = text_model(name)(**given).loss
    assert torch.equal(out.loss, F.cross_entropy(out.logits.flatten(0, 1), labels.flatten()))
    assert not torch.equal(twice, out.loss)


def test_a_batch_without_a_label_has_no_mean_but_a_token_loss_of_zero(files: dict[str, Path]) -> None:
    model = tiny_model("qwen2_vl", seed=1)
    (batch,) = load("qwen2_vl", files, model)
    batch["labels"].fill_(IGNORE_INDEX)
    out = model(**batch)
    assert bool(out.loss.isnan())
    loss = token_loss(out.logits, batch["labels"], count_supervised([batch]))
    loss.backward()
    assert float(loss) == 0
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    assert not any(bool(gradient.any()) for gradient in gradients)
    model.zero_grad(set_to_none=True)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A real group of this one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def with_lora(model: Any) -> Any:
    """LoRA adapters as they begin: B is zero, so they add nothing."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).eval()


def wrap_ddp(model: Any) -> Any:
    return torch.nn.parallel.DistributedDataParallel(model).eval()


def compile_model(model: Any) -> Any:
    # Varlen attention calls an operator whose backward pass must be traceable as well, which takes seconds.
    backend = "aot_eager" if attention_of(model) == "varlen" else "eager"
    return torch.compile(model, backend=backend)


@pytest.mark.parametrize("wrap", [with_lora, compile_model, wrap_ddp])
@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
@pytest.mark.usefixtures("process_group")
def test_a_wrapped_model_has_the_same_loss(
    wrap: Callable[[Any], Any],
    backend: str,
    files: dict[str, Path],
    expected: Callable[[str], Expected],
    parity: ParityRecorder,
) -> None:
    from copy import deepcopy

    right = expected("qwen2_vl")
    model = deepcopy(tiny_model("qwen2_vl"))
    use_attention(model, backend)
    (batch,) = load("qwen2_vl", files, model)
    wrapped = wrap(model)
    loss = wrapped(**batch).loss
    control = abs(mean_loss([batch], model, shifted_twice=True) - right.loss)
    parity.check("loss", abs(float(loss.detach()) - right.loss), right.floor, control)
    loss.backward()
    trained = {n: p.grad for n, p in wrapped.named_parameters() if p.requires_grad and "visual" not in n}
    assert trained
    assert all(gradient is not None for gradient in trained.values())
