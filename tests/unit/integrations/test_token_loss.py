"""One mean over the supervised tokens of a step, however they are spread over batches."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from noise_floor import largest_difference, noise_floor, relative_difference
from packhorse.families import logits as module
from packhorse.integrations.loss import count_supervised, grouped, token_loss
from packhorse.types import Batch, BatchInfo, to_device
from raising import raises_config


def logits_and_labels(rows: int, length: int, share: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, length, 50, generator=generator, requires_grad=True)
    labels = torch.randint(0, 50, (rows, length), generator=generator)
    labels[torch.rand(rows, length, generator=generator) > share] = -100
    return logits, labels


def summed_loss(logits: torch.Tensor, labels: torch.Tensor, order: int = 1) -> torch.Tensor:
    """The cross entropy of every token, summed from the first to the last or the other way round."""
    tokens = range(labels.numel())[::order]
    return F.cross_entropy(logits.flatten(0, 1)[tokens], labels.flatten()[tokens], reduction="sum")


def check(parity: Any, what: str, found: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> None:
    """Compare a summed loss with sums in two orders; the control has labels of other tokens."""
    expected = summed_loss(logits, labels)
    parity.check(
        what,
        largest_difference(found, expected),
        noise_floor(expected, summed_loss(logits, labels, -1)),
        largest_difference(summed_loss(logits, labels.flip(-1)), expected),
    )


@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
def test_loss_and_gradient_are_those_of_cross_entropy(
    share: float, monkeypatch: pytest.MonkeyPatch, parity: Any
) -> None:
    monkeypatch.setattr(module, "CHUNK_TOKENS", 7)  # several pieces, the last one short
    logits, labels = logits_and_labels(3, 31, share, seed=1)
    wanted, other, wrong = (
        torch.autograd.grad(loss / 40, logits)[0]
        for loss in (
            summed_loss(logits, labels),
            summed_loss(logits, labels, -1),
            summed_loss(logits, labels.flip(-1)),
        )
    )
    found = token_loss(logits, labels, 40)
    (gradient,) = torch.autograd.grad(found, logits)
    check(parity, "loss", found * 40, logits, labels)
    parity.check(
        "gradient",
        relative_difference(gradient, wanted),
        noise_floor(wanted, other, measure=relative_difference),
        relative_difference(wrong, wanted),
    )


def test_bfloat16_logits_are_summed_in_float32_and_get_a_bfloat16_gradient(parity: Any) -> None:
    exact, labels = logits_and_labels(2, 300, 1.0, seed=2)
    logits = exact.detach().bfloat16().requires_grad_()
    found = token_loss(logits, labels, labels.numel())
    assert found.dtype == torch.float32
    check(parity, "loss", found * labels.numel(), logits.float(), labels)
    found.backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_a_batch_without_a_label_gives_zero_and_zero_gradients() -> None:
    logits, labels = logits_and_labels(1, 9, 0.0, seed=3)
    assert bool((labels == -100).all())
    for tokens in (0, 12, torch.tensor(0)):
        found = token_loss(logits, labels, tokens)
        assert float(found.detach()) == 0.0
        (gradient,) = torch.autograd.grad(found, logits)
        assert not bool(gradient.any())
    assert bool(F.cross_entropy(logits.flatten(0, 1), labels.flatten()).isnan()), "the mean would be NaN"


def test_what_hidden_rows_hold_never_matters(parity: Any) -> None:
    logits, labels = logits_and_labels(1, 20, 0.5, seed=4)
    spoiled = logits.detach().clone()
    spoiled[labels == -100] = float("inf")
    spoiled.requires_grad_()
    found = token_loss(spoiled, labels, 3)
    check(parity, "loss", found * 3, logits, labels)
    found.backward()
    assert spoiled.grad is not None
    assert bool(spoiled.grad.isfinite().all())


def test_the_sum_over_parts_is_the_loss_of_one_big_batch(parity: Any) -> None:
    logits, labels = logits_and_labels(4, 25, 0.4, seed=5)
    tokens = int((labels != -100).sum())
    rows = [token_loss(logits[row : row + 1], labels[row : row + 1], tokens) for row in range(4)]
    check(parity, "loss", torch.stack(rows).sum() * tokens, logits, labels)


def weighted_sum(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (
        F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none") * weights.flatten()
    ).sum()


def test_the_loss_and_gradient_of_weighted_tokens(monkeypatch: pytest.MonkeyPatch, parity: Any) -> None:
    monkeypatch.setattr(module, "CHUNK_TOKENS", 7)
    logits, labels = logits_and_labels(3, 31, 0.5, seed=7)
    weights = torch.rand(3, 31, generator=torch.Generator().manual_seed(8)).mul(2)
    weights[:, ::5] = 0
    rows = list(zip(logits, labels, weights, strict=True))
    expected, other, wrong = (
        weighted_sum(logits, labels, weights),
        torch.stack([weighted_sum(*(each[None] for each in row)) for row in rows[::-1]]).sum(),
        weighted_sum(logits, labels, torch.ones_like(weights)),
    )
    gradients = [torch.autograd.grad(loss, logits)[0] for loss in (expected, other, wrong)]
    found = token_loss(logits, labels, 0.25, weights=weights) * 0.25
    (gradient,) = torch.autograd.grad(found, logits)
    parity.check(
        "loss",
        largest_difference(found, expected),
        noise_floor(expected, other),
        largest_difference(wrong, expected),
    )
    floor = noise_floor(*gradients[:2], measure=relative_difference)
    control = relative_difference(gradients[2], gradients[0])
    parity.check("gradient", relative_difference(gradient, gradients[0]), floor, control)


@pytest.mark.parametrize("tokens", [0.5, torch.tensor(0.5)], ids=["a number", "a tensor"])
def test_a_sum_of_weights_below_1_divides_too(tokens: Any) -> None:
    logits, labels = logits_and_labels(1, 4, 1.0, seed=9)
    half = torch.full((1, 4), 0.125)
    mean = token_loss(logits, labels, tokens, weights=half)
    assert float(mean.detach()) == pytest.approx(float(token_loss(logits, labels, 4).detach()), rel=1e-6)


def test_logits_of_tokens_with_weight_0_never_matter() -> None:
    logits, labels = logits_and_labels(1, 4, 1.0, seed=10)
    spoiled = logits.detach().clone()
    spoiled[0, 1] = float("inf")
    spoiled.requires_grad_()
    found = token_loss(spoiled, labels, 3, weights=torch.tensor([[1.0, 0, 1, 1]]))
    found.backward()
    assert spoiled.grad is not None
    assert bool(spoiled.grad.isfinite().all())
    assert not bool(spoiled.grad[0, 1].any())
    nothing = token_loss(logits, labels, 0.0, weights=torch.zeros(1, 4))
    assert float(nothing.detach()) == 0.0


def test_weights_save_nothing_of_the_size_of_the_logits() -> None:
    logits, labels = logits_and_labels(2, 300, 1.0, seed=11)
    sizes: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.untyped_storage().nbytes() if tensor.data_ptr() != logits.data_ptr() else 0)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        token_loss(logits, labels, 9.0, weights=torch.full((2, 300), 0.5))
    assert sizes.count(0) == 1, "the logits, not a copy of them"
    assert sum(sizes) < logits.numel()


def test_weights_of_another_shape_are_rejected() -> None:
    logits, labels = logits_and_labels(1, 9, 1.0, seed=6)
    with raises_config("weights", (1, 8)):
        token_loss(logits, labels, 8, weights=torch.ones(1, 8))


def test_weights_of_batches_are_counted_instead_of_tokens() -> None:
    labels, weights = torch.tensor([[1, -100, 2]]), torch.tensor([[0.5, 7, 2]])
    plain = Batch({"labels": labels}, BatchInfo(0, 0))
    weighted = Batch({"labels": labels}, BatchInfo(0, 0, loss_weights=weights))
    collated = {"labels": labels, "loss_weights": weights}  # of a collate function
    for batches, expected in (([plain], 2), ([weighted], 2.5), ([collated, plain], 4.5)):
        found = count_supervised(batches)
        assert (found, type(found)) == (expected, type(expected))


def test_labels_of_another_length_are_rejected() -> None:
    logits, labels = logits_and_labels(1, 9, 1.0, seed=6)
    with raises_config("labels", (1, 8), match="already shifted"):
        token_loss(logits, labels[:, 1:], 8)


def test_groups_hold_the_batches_of_a_step() -> None:
    assert list(grouped(range(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(grouped([], 3)) == []
    with raises_config("gradient_accumulation_steps", 0):
        list(grouped([1], 0))


def test_a_group_is_handed_on_before_the_next_one_is_fetched() -> None:
    fetched: list[int] = []

    def fetch():
        for number in range(4):
            fetched.append(number)
            yield number

    groups = grouped(fetch(), 2)
    assert next(groups) == [0, 1]
    assert fetched == [0, 1], "a checkpoint made now must not count batches of the next step"


def test_without_a_process_group_the_own_tokens_are_all() -> None:
    batches = [{"labels": torch.tensor([[1, -100, 2]])}, {"labels": torch.full((1, 4), -100)}]
    assert count_supervised(batches) == 2
    assert count_supervised([]) == 0


def test_masks_of_every_kind_are_moved_with_the_batch() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    block = create_block_mask(lambda b, h, q, k: q >= k, 1, None, 128, 128, device="cpu")
    batch = {
        "input_ids": torch.zeros(1, 2),
        "attention_mask": {"full_attention": torch.zeros(1, 2), "block": block},
        "max_length_q": 2,
    }
    moved = to_device(batch, "meta")
    assert moved["input_ids"].device.type == moved["attention_mask"]["full_attention"].device.type == "meta"
    assert moved["attention_mask"]["block"].kv_indices.device.type == "meta"
    assert moved["max_length_q"] == 2


@pytest.mark.parametrize("tokens", [5, torch.tensor(5)], ids=["a number", "a tensor"])
def test_with_replicas_the_average_over_ranks_is_the_sum(tokens: int | torch.Tensor, parity: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 4, 7, generator=generator)
    labels = torch.tensor([[1, -100, 3, 0]])
    for replicas in (1, 3):
        found = token_loss(logits, labels, tokens, replicas=replicas)
        check(parity, f"loss of {replicas}", found / replicas * 5, logits, labels)
