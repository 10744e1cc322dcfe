"""What a user's hook gives back is looked at before it is taken for a sample."""

from typing import Any

import pytest
import torch

from packhorse.encode.tokenized import run_hook
from packhorse.errors import is_data_error
from raising import raises_config

GIVEN = {"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.tensor([[1, 1]])}


@pytest.mark.parametrize("made", [None, {"attention_mask": GIVEN["attention_mask"]}, [1, 2]])
def test_a_hook_that_forgets_to_give_the_sample_back_stops_the_run(made: Any) -> None:
    with raises_config("post_tokenize_hook", type(made).__name__) as found:
        run_hook(lambda result, processor: made, dict(GIVEN), None)
    assert not is_data_error(found.value)


def test_what_a_hook_gives_back_is_passed_on() -> None:
    made = run_hook(lambda result, processor: {**result, "more": processor}, dict(GIVEN), 7)
    assert made == {**GIVEN, "more": 7}
