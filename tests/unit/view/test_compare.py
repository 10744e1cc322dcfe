"""The cost of padding and of estimated lengths, on numbers that can be checked by hand."""

from dataclasses import replace

import numpy as np
import pytest

from packhorse.neat_packing_vlm import plan_packs
from packhorse.tools.view.plan_report import (
    estimate_losses,
    find_overflow,
    padded_slots,
    padding_report,
    plan_report,
)
from packhorse.tools.view.saved_plan import PlanResult, make_plan


@pytest.mark.parametrize(
    ("lengths", "slots"), [([], 0), ([7], 7), ([3, 1, 2, 9], 3 * 2 + 9 * 2), ([5, 1, 4], 5 * 2 + 4)]
)
def test_a_batch_is_padded_to_its_longest_row(lengths: list[int], slots: int) -> None:
    assert padded_slots(np.array(lengths, np.int64), 2) == slots


def test_a_pack_drops_the_samples_that_do_not_fit() -> None:
    plan = plan_packs([4, 3, 3], 10)
    assert plan.bins() == [[0, 1, 2]]
    assert find_overflow(plan, np.array([8, 5, 2]), 10) == [1]
    assert find_overflow(plan, np.array([4, 3, 3]), 10) == []


def test_slots_times_the_used_share_are_the_tokens(planned: PlanResult) -> None:
    report = padding_report(planned)
    for method in ("random", "by_length", "packed"):
        assert report[method]["slots"] * (1 - report[method]["wasted"]) == pytest.approx(report["tokens"])


def test_of_many_rows_only_some_are_estimated(planned: PlanResult) -> None:
    calls: list[tuple[int, int]] = []
    report = estimate_losses(planned, lambda done, total: calls.append((done, total)), limit=5)
    assert report["rows"] == 5
    assert calls[-1] == (5, 5)


def test_a_negative_seed_gives_a_report(planned: PlanResult) -> None:
    request = planned.request
    seeded = replace(request, config=request.config.with_changes(seed=-1))
    report = plan_report(make_plan(seeded, planned.opened), estimates=False)
    assert report["settings"]["seed"] == -1
    assert report["padding"]["random"]["slots"] >= report["padding"]["by_length"]["slots"]
    assert report["straggler"][0]["random"] == 1
