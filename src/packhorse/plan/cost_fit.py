"""Fit the weights of the cost model to measured times.

Measured times have outliers: steps in which the loop waited for data, evaluated, or saved a checkpoint. Some
features hardly differ between packs, such as their tokens. So times that are far from the fit do not count,
and it stays near the weights before wherever the times do not determine it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from packhorse.errors import ConfigError
from packhorse.plan.cost_model import CostWeights
from packhorse.types import Floats

_ROUNDS = 50
_TUNING = 4.685  # of Tukey's bisquare: 95 % as efficient as least squares where there are no outliers
_LEAST_NOISE = 0.003  # no clock and no kernel is more regular than that
# A weight may well change by itself, or by this share of the time. So if all packs have as many tokens, what
# their times have in common is due to tokens.
_SHARE = 0.1
_TOO_SHORT = 0.05  # share of the median of times
_PARTS = 5
_EXPLAINED = 0.8  # of the differences between times, at most this much may be left unexplained


@dataclass(frozen=True, slots=True)
class CostFit:
    """Weights that were fitted to measured times, and how well they fit.

    Attributes:
        weights: in seconds; those before the fit, in their unit, if there were too few measurements.
        measured: the measurements.
        outliers: how many of them do not count.
        residual: mean relative difference between times that are no outliers and what weights predict that
            were fitted to other times.
        prior_residual: the same of the weights before the fit, scaled to the times.
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
            f"({self.outliers:,} outliers): mean error {self.residual:.2%}, was {self.prior_residual:.2%}"
        )


def fit_weights(features: npt.ArrayLike, seconds: npt.ArrayLike, weights: CostWeights) -> CostFit:
    """Fit weights to measured times by robust non-negative least squares of the relative errors.

    The weights before the fit count a little: enough for weights that the times do not determine, such as
    those of tokens and packs if all packs have equally many tokens. Deterministic.

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
    if usable.any():  # the relative error of a short time has no limit
        usable &= y > _TOO_SHORT * np.median(y[usable])
    x, y, measured = x[usable], y[usable], len(y)
    present = (x > 0).any(axis=0)
    if len(y) <= present.sum():
        problem = f"{len(y)} measured times for {int(present.sum())} weights; more are needed"
        if not measured:
            problem = "no step was measured on all ranks"
        return CostFit(weights, measured, measured - len(y), problem=problem)
    scaled = before * float(np.median(y / (x @ before)))
    fitted, counts = _fit(x[:, present], y, scaled[present])
    kept = counts > 0
    held_out = _held_out(x[:, present], y, scaled[present])
    residual, prior_residual, constant = (
        float(np.abs(np.log(predicted[kept] / y[kept])).mean()) if kept.any() else 0.0
        for predicted in (held_out, x @ scaled, np.full_like(y, np.median(y)))
    )
    found = CostFit(weights, measured, measured - int(kept.sum()), residual, prior_residual)
    if 2 * found.outliers > measured:
        return replace(found, problem=f"{found.outliers:,} of {measured:,} measured times are outliers")
    if residual > _EXPLAINED * constant:
        differ = f"by {constant:.2%} from their median, and by {residual:.2%} from what weights predict"
        problem = f"{measured:,} measured times hardly depend on what is in the batches: they differ {differ}"
        return replace(found, problem=problem)
    values = np.where(present, 0.0, scaled)  # what did not occur keeps its proportion
    values[present] = fitted
    token = weights.names.index("token")
    values[token] = max(values[token], 1e-6 * scaled[token])  # so that every sample costs something
    return replace(found, weights=weights.with_values(values, "seconds"))


def _held_out(x: Floats, y: Floats, prior: Floats) -> Floats:
    """Return each time as predicted by weights that were fitted without it, in five parts."""
    predicted = np.empty(len(y))
    part = np.arange(len(y)) % _PARTS
    for number in range(min(_PARTS, len(y))):
        fitted, _ = _fit(x[part != number], y[part != number], prior)
        predicted[part == number] = x[part == number] @ fitted
    return np.maximum(predicted, _TOO_SHORT * float(np.median(y)))


def _fit(x: Floats, y: Floats, prior: Floats) -> tuple[Floats, Floats]:
    """Return the fitted weights, and how much each time counts (0 to 1).

    First the least absolute errors, which outliers hardly change; near them the least squared errors, of
    which those far beyond the noise do not count.
    """
    from scipy.optimize import nnls  # slow to import, and only needed here

    shares = (x / y[:, None]).mean(axis=0)
    units = np.maximum(prior, _SHARE / np.where(shares > 0, shares, np.inf))
    units[units == 0] = 1.0  # of what did not occur in these times
    table, usual = x * units / y[:, None], prior / units
    first, noise = usual, _LEAST_NOISE
    for _ in range(2):  # the noise says how much the weights before count
        first = _least_absolute_errors(table, usual, noise)
        # As many times as there are weights fit exactly, whatever the noise.
        errors = np.sort(np.abs(table @ first - 1))[min(len(first), len(y) // 2) :]
        noise = max(_LEAST_NOISE, 1.4826 * float(np.median(errors)))
    values, ridge = first, noise * np.eye(len(first))
    counts = np.ones_like(y)
    for _ in range(_ROUNDS):
        counts = np.clip(1 - ((table @ values - 1) / (_TUNING * noise)) ** 2, 0, None) ** 2
        rows = np.sqrt(counts)
        with_prior = np.concatenate([rows[:, None] * table, ridge])
        before, values = values, nnls(with_prior, np.concatenate([rows, ridge @ first]))[0]
        if np.abs(table @ (values - before)).max() < 1e-6:
            break
    return values * units, counts


def _least_absolute_errors(table: Floats, usual: Floats, penalty: float) -> Floats:
    """Return the values of least absolute errors of ``table @ values`` from 1, near the usual values.

    A linear program: each error, and each distance from the usual value, is a variable of its own.
    """
    from scipy.optimize import linprog
    from scipy.sparse import block_array, csc_array, eye_array

    number, width = table.shape
    both = csc_array(np.concatenate([table, np.eye(width)]))
    distances = eye_array(number + width)
    bounds = np.concatenate([np.ones(number), usual])
    found = linprog(
        np.concatenate([np.zeros(width), np.ones(number), np.full(width, penalty)]),
        A_ub=block_array([[both, -distances], [-both, -distances]], format="csc"),
        b_ub=np.concatenate([bounds, -bounds]),
    )
    values: Floats = usual if found.x is None else found.x[:width]
    return values
