"""Weights fitted to measured times: noise, outliers, too few times, and times that say nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.plan.cost_fit import fit_weights
from packhorse.plan.cost_model import CostWeights, cost_features, sample_costs
from raising import raises_config

WINDOWED = CostWeights(2e9, 1e5, 6e8, 1e5, window_pairs=((512, 2e4),), item=1e11, supervised=3e8)


def packs(number: int, rng: np.random.Generator, weights: CostWeights = WINDOWED) -> np.ndarray:
    """Features of packs of 8,192 tokens in 4 to 40 documents, half of them with an image."""
    rows = []
    for _ in range(number):
        documents = rng.lognormal(0, 1, rng.integers(4, 40))
        lengths = 8192 * documents / documents.sum()
        patches = np.where(rng.random(len(lengths)) < 0.5, rng.integers(200, 3000, len(lengths)), 0)
        rows.append(cost_features(lengths, weights, patches=patches).sum(axis=0))
    table = np.stack(rows)
    table[:, weights.names.index("supervised")] = rng.uniform(1000, 4000, number)
    table[:, [weights.names.index(name) for name in ("encoder", "pack")]] = 1
    return table


def times_by(features: np.ndarray, weights: CostWeights, factors: np.ndarray) -> np.ndarray:
    """Times by weights that differ from the counted operations by these factors."""
    return features @ (weights.values() * factors) * 1e-14 + 0.01


def worst(fitted: CostWeights, features: np.ndarray, seconds: np.ndarray) -> float:
    return float(np.abs(features @ fitted.values() / seconds - 1).max())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.lists(st.floats(0.3, 4), min_size=9, max_size=9),
    st.floats(0, 0.02),
    st.floats(0, 0.25),
)
def test_a_fit_predicts_times_of_unknown_weights_through_noise_and_outliers(seed, factors, noise, share):
    rng = np.random.default_rng(seed)
    features, others = packs(150, rng), packs(100, rng)
    right = times_by(features, WINDOWED, np.array(factors))
    seconds = right * np.exp(noise * rng.standard_normal(len(right)))
    late = rng.random(len(seconds)) < share
    seconds[late] *= rng.uniform(2, 50, int(late.sum()))
    fit = fit_weights(features, seconds, WINDOWED)

    assert fit.problem == ""
    assert fit.weights.unit == "seconds"
    assert fit.outliers >= late.sum()
    assert worst(fit.weights, others, times_by(others, WINDOWED, np.array(factors))) < 0.02 + 3 * noise


def test_least_squares_alone_is_wrong_where_the_fit_is_right():
    rng = np.random.default_rng(0)
    features = packs(150, rng)
    right = times_by(features, WINDOWED, np.ones(9))
    seconds = right.copy()
    seconds[::8] *= 10
    plain = np.linalg.lstsq(features, seconds, rcond=None)[0]

    assert np.abs(features @ plain / right - 1).max() > 0.3
    fit = fit_weights(features, seconds, WINDOWED)
    assert worst(fit.weights, features, right) < 0.003
    assert (fit.measured, fit.outliers) == (150, 19)
    assert "131 of 150" in fit.describe()


def test_the_same_times_give_the_same_weights_and_the_order_does_not_matter():
    rng = np.random.default_rng(3)
    features = packs(80, rng)
    seconds = times_by(features, WINDOWED, rng.uniform(0.5, 2, 9)) * rng.uniform(0.99, 1.01, 80)
    order = rng.permutation(80)
    one, same = (fit_weights(features, seconds, WINDOWED).weights for _ in range(2))
    other = fit_weights(features[order], seconds[order], WINDOWED).weights
    assert one == same
    assert other.values() == pytest.approx(one.values(), rel=1e-6, abs=1e-20)


def test_times_that_were_not_measured_are_outliers():
    features = packs(60, np.random.default_rng(1))
    seconds = times_by(features, WINDOWED, np.ones(9))
    seconds[:3] = 0, np.nan, np.inf
    fit = fit_weights(features, seconds, WINDOWED)
    assert (fit.measured, fit.outliers, fit.problem) == (60, 3, "")


@pytest.mark.parametrize("number", [0, 1, 6])
def test_with_fewer_times_than_weights_the_weights_stay(number):
    features = packs(number + 1, np.random.default_rng(1))[:number]
    fit = fit_weights(features, times_by(features, WINDOWED, np.ones(9)), WINDOWED)
    assert fit.weights is WINDOWED
    assert (f"{number} measured times for" if number else "no step was measured") in fit.problem
    assert fit.describe().startswith("cost weights unchanged: ")


def test_times_that_do_not_depend_on_the_packs_change_nothing():
    features = packs(200, np.random.default_rng(1))
    seconds = np.random.default_rng(2).normal(1, 0.05, 200)  # of another pack each
    fit = fit_weights(features, seconds, WINDOWED)
    assert fit.weights is WINDOWED
    assert "hardly depend on what is in the batches" in fit.problem


def test_weights_of_what_did_not_occur_keep_their_proportion():
    features = packs(60, np.random.default_rng(1))
    media = [WINDOWED.names.index(name) for name in ("patch", "patch_pair", "item")]
    features[:, media] = 0
    fit = fit_weights(features, 3e-14 * (features @ WINDOWED.values()), WINDOWED)
    assert fit.weights.values()[media] == pytest.approx(3e-14 * WINDOWED.values()[media], rel=0.01)


def test_features_of_other_weights_are_rejected():
    with raises_config("features", match="one column for each of"):
        fit_weights(np.ones((4, 6)), np.ones(4), WINDOWED)


def test_features_times_weights_are_the_costs():
    lengths, patches = np.array([5, 900, 30]), np.array([0, 1024, 64])
    costs = sample_costs(lengths, WINDOWED, patches=patches)
    features = cost_features(lengths, WINDOWED, patches=patches)
    assert (features @ WINDOWED.values()).tolist() == pytest.approx(costs.tolist())
    assert WINDOWED.with_values(WINDOWED.values(), "operations") == WINDOWED
    two = sample_costs(lengths, WINDOWED, patches=patches, patch_pairs=patches**2.0, items=[0, 2, 1])
    assert (two - costs).tolist() == pytest.approx([0, WINDOWED.item, 0], abs=1)
