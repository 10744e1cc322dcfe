"""Labels of a batch are shifted already; a model's own loss must not shift them again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import packhorse
from contract.processors import processor
from contract.tiny_models import MODELS, tiny_model
from contract.torchvision_ops import make_torchvision_importable
from noise_floor import CONTROL, FACTOR, largest_difference, noise_floor
from packhorse.errors import ConfigError
from packhorse.families.models import check_shift_labels, honours_shift_labels, make_honour_shift_labels
from packhorse.integrations.transformers import prepare

make_torchvision_importable()

from transformers import Qwen2VLForConditionalGeneration  # noqa: E402

IDS = torch.tensor([[11, 12, 13, 14, 15, 16, 17, 18], [21, 22, 23, 24, 25, 26, 27, 28]])
LABELS = torch.cat([IDS[:, 1:], torch.full((2, 1), -100)], dim=1).index_fill(1, torch.arange(3), -100)


class Dropping(Qwen2VLForConditionalGeneration):
    """Its loss gets no shift_labels, as that of some classes in older versions of transformers."""

    __module__ = "transformers.models.dropping"

    def forward(
        self, labels: Any = None, shift_labels: Any = None, position_ids: Any = None, **options: Any
    ) -> Any:
        made = super().forward(position_ids=position_ids, **options)
        if labels is not None:
            made.loss = self.loss_function(
                logits=made.logits, labels=labels, vocab_size=made.logits.shape[-1]
            )
        return made


@pytest.fixture
def dropping() -> Any:
    model = Dropping(copy.deepcopy(tiny_model("qwen2_vl").config)).eval()
    model.load_state_dict(tiny_model("qwen2_vl").state_dict())
    return model


def fresh_model(name: str) -> Any:
    """A model as transformers builds it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return type(tiny_model(name))(copy.deepcopy(tiny_model(name).config)).eval()


def losses(model: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The model's own loss, the right one, and the noise floor of that."""
    with torch.no_grad():
        found = model(input_ids=IDS, labels=LABELS, shift_labels=LABELS, **options)
        logits = model(input_ids=IDS).logits
    flat = logits.flatten(0, 1), LABELS.flatten()
    expected, other = F.cross_entropy(*flat), F.cross_entropy(*(part.flip(0) for part in flat))
    return found[0] if isinstance(found, tuple) else found.loss, expected, noise_floor(expected, other)


def twice(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten())


@pytest.mark.parametrize("name", MODELS)
def test_what_is_read_from_the_source_of_a_class_is_what_its_loss_does(name: str) -> None:
    model = fresh_model(name)
    found, expected, floor = losses(model)
    right = largest_difference(found, expected) <= FACTOR * floor
    assert honours_shift_labels(model) is honours_shift_labels(type(model)) is right


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_of_a_prepared_model_is_the_mean_over_its_labels(name: str, parity: Any) -> None:
    model = fresh_model(name)
    prepare(model)
    found, expected, floor = losses(model)
    parity.check(
        "loss", largest_difference(found, expected), floor, largest_difference(twice(model), expected)
    )


def test_a_class_that_drops_them_shifts_twice_until_it_is_prepared(dropping: Any, parity: Any) -> None:
    assert not honours_shift_labels(Dropping)
    found, expected, floor = losses(dropping)
    assert largest_difference(found, expected) > CONTROL * FACTOR * floor
    prepare(dropping)
    prepare(dropping)
    assert honours_shift_labels(dropping)
    assert not honours_shift_labels(Dropping), "other models of the class stay as they are"
    found, _, _ = losses(dropping)
    control = largest_difference(twice(dropping), expected)
    parity.check("loss", largest_difference(found, expected), floor, control)
    as_tuple, _, _ = losses(copy.deepcopy(dropping), return_dict=False)
    parity.check("loss of a tuple", largest_difference(as_tuple, expected), floor, control)


def test_without_shift_labels_a_prepared_model_shifts_as_before(dropping: Any) -> None:
    options = {"input_ids": IDS, "labels": IDS}
    with torch.no_grad():
        before = dropping(**options).loss
        make_honour_shift_labels(dropping)
        assert torch.equal(dropping(**options).loss, before)
        assert next(iter(dropping(**options, shift_labels=LABELS))) == "loss", "the first entry, as always"


def test_a_loader_rejects_a_model_that_would_shift_twice(dropping: Any) -> None:
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    rows = [{"conversation": turns}] * 2
    with pytest.raises(
        ConfigError, match=r"Dropping of transformers .* drops shift_labels.*prepare\(model\)"
    ):
        packhorse.load(rows, processor("qwen2_vl"), model=dropping, pack_size=128)
    prepare(dropping)
    loader = packhorse.load(rows, processor("qwen2_vl"), model=dropping, pack_size=128)
    assert len(list(loader)) == 1


def test_a_loader_rejects_the_config_of_a_class_that_would_shift_twice(
    dropping: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("transformers.Dropping", Dropping, raising=False)
    dropping.config.architectures = ["Dropping"]
    dropping.config.save_pretrained(tmp_path)
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    for given in (dropping.config, tmp_path):
        for mode in ("pack", "pad"):
            with pytest.raises(
                ConfigError, match=r"Dropping .*prepare\(model\) first and pass the model itself"
            ):
                packhorse.load([{"conversation": turns}] * 2, processor("qwen2_vl"), model=given, mode=mode)


def test_models_inside_wrappers_are_looked_at() -> None:
    model = copy.deepcopy(tiny_model("qwen2_vl"))
    for wrapped in (torch.compile(model, backend="eager"), torch.nn.DataParallel(model)):
        assert honours_shift_labels(wrapped)
        check_shift_labels(wrapped)
