"""What a loader says of its plan and its steps: once, on one rank, and in words that fit."""

import logging
from pathlib import Path

import pytest

import packhorse
from contract.processors import processor
from count_samples import write_meta, write_rows
from loader_samples import load, mixed, texts
from packhorse.loader import TooManyBad
from view_samples import chat


@pytest.fixture
def meta(tmp_path: Path) -> Path:
    """Ten chats, of which one is too long for a pack of 200 tokens, one torn, one with no picture."""
    rows = [chat("Why?", "So. " * (number + 1)) for number in range(10)]
    rows[2] = chat("Why?", "So. " * 400)
    rows[3] = chat("<image>Which?", "This.", images=["none.png"])
    path = write_rows(tmp_path / "chats.jsonl", rows)
    lines = path.read_text().splitlines()
    lines[5] = lines[5][:30]
    path.write_text("\n".join(lines) + "\n")
    return write_meta(tmp_path, {"chats": {"file_name": "chats.jsonl"}})


@pytest.mark.parametrize("accumulation", [1, 3])
def test_waiting_is_told_from_the_second_step_on(accumulation: int) -> None:
    loader = load(texts(60), pack_size=300, accumulation=accumulation)
    batches = iter(loader)
    for _ in range(accumulation):
        next(batches)
    assert "waiting" not in loader.metrics.summary()
    next(batches)
    assert "waiting for data" in loader.metrics.summary()


def test_the_description_says_what_of_a_pack_is_kept_free() -> None:
    loader = load(mixed(30), pack_size=300)
    free = 300 - loader.plan.capacity
    assert free > 0
    assert f"; {free} of the 300 tokens of a pack are kept free for a placeholder\n" in loader.describe()
    assert "kept free" not in load(texts(30), pack_size=300).describe()


def test_a_row_that_is_too_long_is_told_once_with_its_length(
    meta: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        loader = packhorse.load(
            meta, processor("qwen2_vl"), model="unchecked", pack_size=200, max_bad_share=0.5
        )
        loader.set_epoch(1)
    assert caplog.text.count("too_long: 1 of 10") == 1
    caplog.clear()
    with caplog.at_level(logging.WARNING), pytest.raises(TooManyBad, match="2 of 10 samples cannot be used"):
        packhorse.load(meta, processor("qwen2_vl"), model="unchecked", pack_size=200)
    assert caplog.text.count("too_long: 1 of 10") == 1
    (entry,) = [drop for drop in loader.ledger if drop.key == "chats/2"]
    length = int(loader.counts.total[2]) - 1
    assert entry.detail.startswith(f"{length:,} tokens, more than the 200 of a pack; ")


def test_only_media_that_may_arrive_are_to_be_counted_again(meta: Path) -> None:
    loader = packhorse.load(meta, processor("qwen2_vl"), model="unchecked", pack_size=200, max_bad_share=0.5)
    told = {drop.reason: drop.detail for drop in loader.ledger}
    assert (
        "(found when it was counted; between runs `packhorse count --retry-bad` looks again)"
        in told["missing_media"]
    )
    assert "(found when it was counted);" in told["malformed_row"]


def test_one_rank_says_that_rows_are_counted_now(meta: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = []
    for rank in (1, 0):
        for old in meta.parent.glob("*.phc*"):
            old.unlink()
        caplog.clear()
        with caplog.at_level(logging.INFO):
            world = packhorse.World(rank, 2)
            packhorse.load(
                meta, processor("qwen2_vl"), model="unchecked", pack_size=200, max_bad_share=0.5, world=world
            )
        told.append("a loader counts the rows now" in caplog.text)
    assert told == [False, True]
