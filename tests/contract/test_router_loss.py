"""The auxiliary loss of a mixture of experts: right for padded batches, rejected where it would be wrong."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import packhorse
from contract.processors import processor
from contract.text_models import text_model
from loader_samples import texts
from noise_floor import largest_difference, noise_floor
from packhorse.collate_fns import model_inputs
from packhorse.families.models import make_honour_shift_labels
from packhorse.integrations.transformers import TrainFromLoader, prepare
from raising import raises_config


@pytest.fixture
def experts() -> Any:
    model = copy.deepcopy(text_model("qwen3_vl_moe"))
    model.config.get_text_config().output_router_logits = True
    return model


def load(model: Any, **settings: Any) -> packhorse.Loader:
    return packhorse.load(texts(6), processor("qwen3_vl"), model=model, pack_size=512, **settings)


def test_packed_training_with_a_router_loss_is_rejected_by_name(experts: Any, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    class PackedTrainer(TrainFromLoader, Trainer):
        pass

    for attention in ("sdpa", "varlen"):
        with raises_config("output_router_logits", True):
            load(experts, attn_implementation=attention)
    with raises_config("output_router_logits", True):
        prepare(experts)
    loader = load(experts, mode="pad", batch_size=2)
    with raises_config("output_router_logits", True):
        model_inputs(next(iter(loader)), experts)
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with raises_config("output_router_logits", True):
        PackedTrainer(experts, args, loader=loader)
    experts.config.get_text_config().output_router_logits = False
    assert prepare(experts, "sdpa") == "sdpa"
    assert next(iter(load(experts))).info.samples


def test_model_inputs_find_the_router_loss_inside_several_wrappers(experts: Any) -> None:
    (batch,) = load(experts, mode="pad", batch_size=6)
    wrapped = torch.nn.DataParallel(torch.nn.DataParallel(experts))
    with raises_config("output_router_logits", True):
        model_inputs(batch, wrapped)


def test_padding_is_not_in_the_router_loss_of_a_padded_batch(experts: Any) -> None:
    (plain,) = load(experts, mode="pad", batch_size=6)
    (wide,) = load(experts, mode="pad", batch_size=6, pad_to_size=True)
    width = plain["labels"].shape[1]
    wide["attention_mask"][:, width:] = 0  # the shift takes the last token of the longest row where it can
    assert wide["labels"].shape[1] > width
    with torch.no_grad():
        short, long = (experts(**batch) for batch in (plain, wide))
    entropy = F.cross_entropy(short.logits.flatten(0, 1), plain["labels"].flatten())
    weight = experts.config.get_text_config().router_aux_loss_coef
    assert torch.equal(short.loss, entropy + weight * short.aux_loss)
    torch.testing.assert_close(long.aux_loss, short.aux_loss)
    with torch.no_grad():
        unmasked = experts(**{key: value for key, value in wide.items() if key != "attention_mask"}).aux_loss
    assert abs(float(unmasked - short.aux_loss)) > 20 * abs(float(long.aux_loss - short.aux_loss))


def test_a_class_that_drops_shift_labels_has_the_router_loss_in_padded_training(
    experts: Any, parity: Any
) -> None:
    from transformers import Qwen3VLMoeForConditionalGeneration

    class Dropping(Qwen3VLMoeForConditionalGeneration):
        """Its loss gets no shift_labels, as that of older versions of transformers."""

        __module__ = "transformers.models.dropping"

        def forward(self, labels: Any = None, shift_labels: Any = None, **options: Any) -> Any:
            made = super().forward(**options)
            if labels is not None:
                size = made.logits.shape[-1]
                made.loss = self.loss_function(logits=made.logits, labels=labels, vocab_size=size)
            return made

    dropping = Dropping(copy.deepcopy(experts.config)).eval()
    dropping.load_state_dict(experts.state_dict())
    with raises_config("model", "Dropping", match=r"drops shift_labels.*make_honour_shift_labels\(model\)"):
        load(dropping, mode="pad")
    make_honour_shift_labels(dropping)
    (batch,) = load(dropping, mode="pad", batch_size=6)
    with torch.no_grad():
        right, found = experts(**batch), dropping(**batch).loss
        as_tuple = dropping(**batch, return_dict=False)[0]
    entropy = F.cross_entropy(right.logits.flatten(0, 1), batch["labels"].flatten())
    floor = noise_floor(right.loss)
    for loss in (found, as_tuple):
        control = largest_difference(entropy, right.loss)
        parity.check("loss with a router's", largest_difference(loss, right.loss), floor, control)
