"""The difference of two correct computations of the same numbers on this machine.

Sums of float32 depend on their order, which depends on the CPU, the kernel and the shape of the batch. So no
test has a tolerance of its own: it computes its numbers in several correct ways (documents in another order,
in a padded batch, with another kernel), takes the largest difference between them as the noise floor, and
allows :data:`FACTOR` times that. A control, computed with a deliberate mistake, has to be at least
:data:`CONTROL` times the allowed difference away, so that the mistake is caught on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

FACTOR = 4
CONTROL = 20
_LEAST_EPS = 4  # floor, in units of rounding, where two computations agree to the bit

Numbers = torch.Tensor | float | Sequence[Any] | Mapping[Any, Any]


def largest_difference(actual: Numbers, expected: Numbers) -> float:
    """Return the largest absolute difference of two values; NaN if one of them has a NaN."""
    return float(torch.stack([(a - b).abs().max() for a, b in _pairs(actual, expected)]).max())


def relative_difference(actual: Numbers, expected: Numbers) -> float:
    """Return the norm of the difference / norm of the expected values, over all tensors."""
    pairs = _pairs(actual, expected)
    size = torch.stack([b.norm() for _, b in pairs]).norm()
    return float(torch.stack([(a - b).norm() for a, b in pairs]).norm() / size)


Measure = Callable[[Numbers, Numbers], float]


def noise_floor(expected: Numbers, *others: Numbers, measure: Measure = largest_difference) -> float:
    """Return the largest difference between correct computations of the same values.

    Never below a few units of rounding of the values themselves: computations may agree to the bit.

    Args:
        expected: what the test compares with.
        others: the same values, computed in other correct ways.
        measure: the difference that the test looks at.
    """
    tensors = [tensor for tensor, _ in _pairs(expected, expected)]
    unit = max(torch.finfo(tensor.dtype).eps for tensor in tensors)
    scale = 1.0
    if measure is largest_difference:
        scale = max(float(tensor.abs().max()) for tensor in tensors)
    return max([_LEAST_EPS * unit * scale, *(measure(other, expected) for other in others)])


class ParityRecorder:
    """Compare differences with the noise floor, and record every comparison for the table at the end.

    Args:
        record: pytest's ``record_property``.
    """

    def __init__(self, record: Callable[[str, object], None]) -> None:
        self._record = record

    def check(
        self, what: str, difference: float, floor: float, control: float, *, exact: bool = True
    ) -> None:
        """Assert that a difference is noise, and that the control is not.

        Args:
            what: is compared, for the table: ``"logits"``.
            difference: of the two computations under test.
            floor: of :func:`noise_floor`.
            control: the same difference for a computation with a deliberate mistake.
            exact: False for bfloat16 and float16, where noise may hide a mistake: the control is recorded.
        """
        allowed = FACTOR * floor
        self._record("parity", [what, difference, floor, allowed, control])
        assert difference <= allowed, (
            f"{what}: {difference:.1e} apart, allowed {allowed:.1e} (noise floor {floor:.1e})"
        )
        if exact:
            assert control >= CONTROL * allowed, (
                f"{what}: the control is {control:.1e} away, expected at least {CONTROL * allowed:.1e}: "
                "a mistake could pass for noise"
            )


def _pairs(actual: Numbers, expected: Numbers) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if isinstance(expected, Mapping):
        assert isinstance(actual, Mapping)
        assert actual.keys() >= expected.keys(), expected.keys() - actual.keys()
        actual, expected = [actual[key] for key in expected], list(expected.values())
    if isinstance(expected, Sequence):
        assert isinstance(actual, Sequence)
        assert len(actual) == len(expected)
        return [pair for a, b in zip(actual, expected, strict=True) for pair in _pairs(a, b)]
    a, b = (_as_tensor(value) for value in (actual, expected))
    assert a.shape == b.shape
    return [(a, b)]


def _as_tensor(value: Any) -> torch.Tensor:
    # A Python float comes from a float32 loss, as logs and JSON have them.
    return value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float32)
