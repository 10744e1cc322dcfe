"""What padding and guessing would cost, on numbers that can be checked by hand."""

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


def test_a_full_pack_turns_away_what_does_not_fit_and_takes_what_does() -> None:
    plan = plan_packs([4, 3, 3], 10)
    assert plan.bins() == [[0, 1, 2]]
    assert find_overflow(plan, np.array([8, 5, 2]), 10) == [1]
    assert find_overflow(plan, np.array([4, 3, 3]), 10) == []


def test_wasted_slots_and_tokens_add_up(planned: PlanResult) -> None:
    found = padding_report(planned)
    for way in ("random", "by_length", "packed"):
        assert found[way]["slots"] * (1 - found[way]["wasted"]) == pytest.approx(found["tokens"])


def test_of_many_rows_some_are_estimated(planned: PlanResult) -> None:
    seen: list[tuple[int, int]] = []
    found = estimate_losses(planned, lambda done, total: seen.append((done, total)), most=5)
    assert found["rows"] == 5
    assert seen[-1] == (5, 5)


def test_a_seed_below_0_is_as_good_as_any_for_a_report(planned: PlanResult) -> None:
    request = planned.request
    seeded = replace(request, config=request.config.with_changes(seed=-1))
    found = plan_report(make_plan(seeded, planned.opened), estimates=False)
    assert found["settings"]["seed"] == -1
    assert found["padding"]["random"]["slots"] >= found["padding"]["by_length"]["slots"]
    assert found["straggler"][0]["random"] == 1
