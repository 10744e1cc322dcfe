"""Fit the weights of the cost model to measured times.

Measured times have outliers: steps in which the loop waited for data, evaluated, or saved a checkpoint. Some
features hardly differ between packs, such as their tokens. So the fit gives little weight to
times that are far from it, and stays near the weights before wherever the times say nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packhorse.errors import ConfigError
from packhorse.plan.cost_model import CostWeights
from packhorse.types import Floats

_ROUNDS = 50
_TUNING = 4.685  # of Tukey's bisquare: 95 % as efficient as least squares where there are no outliers
_LEAST_NOISE = 0.003  # no clock and no kernel is more regular than that
_DOUBT = 1.0  # standard deviation of the factor by which a weight before the fit may be wrong
_SHARE = 0.1  # likewise of the share of the time of a feature that had no weight


@dataclass(frozen=True, slots=True)
class CostFit:
    """Weights that were fitted to measured times, and how well they fit.

    Attributes:
        weights: in seconds; those before the fit, in their unit, if there were too few measurements.
        measured: the measurements.
        outliers: how many of them do not count.
        residual: median of the relative difference between measured and fitted times, without outliers.
        prior_residual: the same of the weights before, scaled to the times.
        problem: why the weights were not fitted; empty if they were.
    """

    weights: CostWeights
    measured: int
    outliers: int = 0
    residual: float = 0.0
    prior_residual: float = 0.0
    problem: str = ""

    def describe(self) -> str:
        """Return one line for the log."""
        if self.problem:
            return f"cost weights unchanged: {self.problem}"
        return (
            f"cost weights fitted to {self.measured - self.outliers:,} of {self.measured:,} times measured "
            f"({self.outliers:,} outliers): median error {self.residual:.2%}, was {self.prior_residual:.2%}"
        )


def fit_weights(features: npt.ArrayLike, seconds: npt.ArrayLike, weights: CostWeights) -> CostFit:
    """Fit weights to measured times by robust non-negative least squares of the relative errors.

    The weights before the fit count like one more measurement of each weight, wrong by a factor of about two:
    enough for weights that the times do not determine, and soon outvoted otherwise. Deterministic.

    Args:
        features: [measurements, weights], see :func:`~packhorse.plan.cost_model.cost_features`.
        seconds: the time of each measurement; those that are not finite or not above 0 are outliers.
        weights: before the fit.
    """
    x, y = np.asarray(features, np.float64), np.asarray(seconds, np.float64)
    if x.ndim != 2 or x.shape[1] != len(weights.names) or len(x) != len(y):
        expected = f"expected [{len(y)}, {len(weights.names)}], one column for each of {weights.names}"
        raise ConfigError.of("features", x.shape, expected)
    before = weights.values()
    usable = np.isfinite(y) & (y > 0) & (x @ before > 0)
    x, y, measured = x[usable], y[usable], len(y)
    present = (x > 0).any(axis=0)
    if len(y) <= present.sum():
        problem = f"{len(y)} measured times for {int(present.sum())} weights; more are needed"
        return CostFit(weights, measured, measured - len(y), problem=problem)
    scaled = before * float(np.median(y / (x @ before)))
    prior_errors = y / (x @ scaled) - 1
    fitted, errors, counts = _fit(x[:, present], y, scaled[present])
    values = np.where(present, 0.0, scaled)  # what did not occur keeps its proportion
    values[present] = fitted
    kept = counts > 0
    return CostFit(
        weights.with_values(values, "seconds"),
        measured,
        measured - int(kept.sum()),
        float(np.median(np.abs(errors[kept]))),
        float(np.median(np.abs(prior_errors[kept]))),
    )


def _fit(x: Floats, y: Floats, prior: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the fitted weights, the relative error of each time, and how much each time counts (0 to 1)."""
    from scipy.optimize import nnls  # slow to import, and only needed here

    predicted, noise = x @ prior, np.inf
    # A unit of each column is its weight before, or as much as the whole time if it had none.
    units = np.where(prior > 0, prior, 1 / (x / predicted[:, None]).mean(axis=0))
    doubt = np.where(prior > 0, _DOUBT, _SHARE)
    values, counts = prior, np.ones_like(y)
    for _ in range(_ROUNDS):
        errors = y / predicted - 1
        noise = max(_LEAST_NOISE, 1.4826 * float(np.median(np.abs(errors - np.median(errors)))))
        counts = np.clip(1 - (errors / (_TUNING * noise)) ** 2, 0, None) ** 2
        rows = np.sqrt(counts)[:, None] / noise
        table = np.concatenate([rows * (x * units / predicted[:, None]), np.diag(1 / doubt)])
        target = np.concatenate([rows[:, 0] * y / predicted, (prior > 0) / doubt])
        found = nnls(table, target)[0] * units
        moved = float(np.abs(x @ found / predicted - 1).max())
        values, predicted = found, np.maximum(x @ found, 0.01 * predicted)
        if moved < 1e-6:
            break
    return values, y / predicted - 1, counts
