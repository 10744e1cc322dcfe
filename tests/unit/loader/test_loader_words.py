"""What a loader says of its plan and its steps: once, on one rank, and in words that fit."""

import logging
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import packhorse
from contract.processors import processor
from count_samples import write_meta, write_rows
from loader_samples import chat as chat_of
from loader_samples import delivered_rows, image, load, mixed_rows, texts
from packhorse.errors import ConfigError
from packhorse.loader import TooManyBad
from view_samples import chat


@pytest.fixture
def meta(tmp_path: Path) -> Path:
    """Ten chats, of which one is too long for a pack of 200 tokens, one torn, one with no image."""
    rows = [chat("Why?", "So. " * (number + 1)) for number in range(10)]
    rows[2] = chat("Why?", "So. " * 400)
    rows[3] = chat("<image>Which?", "This.", images=["none.png"])
    path = write_rows(tmp_path / "chats.jsonl", rows)
    lines = path.read_text().splitlines()
    lines[5] = lines[5][:30]
    path.write_text("\n".join(lines) + "\n")
    return write_meta(tmp_path, {"chats": {"file_name": "chats.jsonl"}})


@pytest.mark.parametrize("gradient_accumulation_steps", [1, 3])
def test_waiting_is_reported_from_the_second_step_on(gradient_accumulation_steps: int) -> None:
    loader = load(texts(60), pack_size=300, gradient_accumulation_steps=gradient_accumulation_steps)
    batches = iter(loader)
    for _ in range(gradient_accumulation_steps):
        next(batches)
    assert "waiting" not in loader.metrics.summary()
    next(batches)
    assert "waiting for data" in loader.metrics.summary()


def test_the_description_says_what_of_a_pack_is_reserved() -> None:
    loader = load(mixed_rows(30), pack_size=300)
    reserved = 300 - loader.plan.capacity
    assert reserved > 0
    assert f"; {reserved} of the 300 tokens of a pack are reserved for a placeholder\n" in loader.describe()
    assert "reserved" not in load(texts(30), pack_size=300).describe()


def few_texts_among_images(number: int) -> list[dict[str, Any]]:
    draw = random.Random(0)
    images = [chat_of("why " * draw.randint(1, 9), f"so {n} " * 9, image(draw)) for n in range(number)]
    return [*texts(number // 30), *images]


def test_nothing_is_reserved_if_every_pack_has_an_image() -> None:
    rows = few_texts_among_images(120)
    with_image = [load(rows, rank, 2, pack_size=600) for rank in range(2)]
    assert {loader.plan.capacity for loader in with_image} == {600}
    assert "reserved" not in with_image[0].describe()
    delivered = sorted(index for loader in with_image for index in delivered_rows(loader))
    assert delivered == list(range(len(rows)))
    # Packs of a single sample: some hold text alone.
    assert load(rows, pack_size=600, max_documents=1).plan.capacity < 600
    # A row that fits only without the placeholder: the rows of an epoch must not depend on its packs.
    longest = max(load(rows, pack_size=600).counts.total) - 1
    assert load(rows, pack_size=int(longest) + 2).plan.capacity < longest + 2


def test_the_entry_of_a_row_that_is_too_long_has_the_reserve_of_its_plan() -> None:
    rows = [*few_texts_among_images(120), chat_of("why " * 900, "so")]
    loader = load(rows, pack_size=600)
    (drop,) = loader.ledger
    assert (loader.plan.capacity, drop.reason) == (600, "too_long")
    assert drop.detail.endswith("tokens, more than the 600 of a pack")
    reserving = load(rows, pack_size=600, max_documents=1)
    (drop,) = reserving.ledger
    capacity = reserving.plan.capacity
    assert drop.detail.endswith(f"more than the {capacity} of a pack (600 less {600 - capacity} reserved)")


def test_a_row_that_is_too_long_is_logged_once_with_its_length(
    meta: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        loader = packhorse.load(
            meta, processor("qwen2_vl"), model="unchecked", pack_size=200, max_bad_share=0.5
        )
        loader.set_epoch(1)
    assert caplog.text.count("too_long: 1 of 10") == 1
    bad = next(drop for drop in loader.ledger if drop.stage == "plan" and drop.reason != "too_long")
    assert caplog.text.count(f"{bad.reason}: 1 of 10 rows are in no pack, first {bad.key}: ") == 1
    caplog.clear()
    with caplog.at_level(logging.WARNING), pytest.raises(TooManyBad) as caught:
        packhorse.load(meta, processor("qwen2_vl"), model="unchecked", pack_size=200, max_bad_share=0.0)
    assert (caught.value.setting, caught.value.bad, caught.value.samples) == ("max_bad_share", 2, 10)
    assert caplog.text.count("too_long: 1 of 10") == 1
    (entry,) = [drop for drop in loader.ledger if drop.key == "chats/2"]
    length = int(loader.counts.total[2]) - 1
    assert entry.detail.startswith(f"{length:,} tokens, more than the 200 of a pack; ")


def test_only_media_that_may_arrive_are_to_be_counted_again(meta: Path) -> None:
    loader = packhorse.load(meta, processor("qwen2_vl"), model="unchecked", pack_size=200, max_bad_share=0.5)
    details = {drop.reason: drop.detail for drop in loader.ledger}
    assert (
        "(found when it was counted; `packhorse count --retry-bad` between runs retries it)"
        in details["missing_media"]
    )
    assert "(found when it was counted);" in details["malformed_row"]


@pytest.mark.parametrize("media_dir", [None, "elsewhere"])
def test_missing_media_of_rows_in_memory_have_the_folder_they_are_looked_up_in(
    media_dir: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their counts are not saved, and no command can check them."""
    monkeypatch.chdir(tmp_path)
    turns = [{"role": "user", "content": "<image>Who?"}, {"role": "assistant", "content": "Me."}]
    options = {"dataset_options": {"media_dir": media_dir}} if media_dir else {}
    with pytest.raises(ConfigError, match="no example can be used") as caught:
        packhorse.load(
            [{"messages": turns, "images": ["a.png"]}],
            processor("qwen2_vl"),
            model="unchecked",
            max_bad_share=None,
            **options,
        )
    message, folder = str(caught.value), media_dir or f"the working directory, {tmp_path}"
    assert f"Relative paths of media start at {folder}: dataset_options={{'media_dir': …}} sets" in message
    assert "packhorse c" not in message


@pytest.mark.parametrize("media_dir", ["images", "no such folder"])
def test_embedded_images_need_no_folder(media_dir: str, tmp_path: Path) -> None:
    Image.new("RGB", (60, 60)).save(tmp_path / "a.png")
    image = {"bytes": (tmp_path / "a.png").read_bytes(), "path": "a.png"}
    turns = [{"role": "user", "content": "<image>Who?"}, {"role": "assistant", "content": "Me."}]
    loader = packhorse.load(
        [{"messages": turns, "images": [image]}],
        processor("qwen2_vl"),
        model="unchecked",
        dataset_options={"media_dir": str(tmp_path / media_dir)},
        num_workers=0,
    )
    assert [batch.info.num_images for batch in loader] == [(1,)]
    assert not len(loader.ledger)


def test_one_rank_says_that_rows_are_counted_now(meta: Path, caplog: pytest.LogCaptureFixture) -> None:
    logged = []
    for rank in (1, 0):
        for old in meta.parent.glob("*.phc*"):
            old.unlink()
        caplog.clear()
        with caplog.at_level(logging.INFO):
            world = packhorse.World(rank, 2)
            packhorse.load(
                meta, processor("qwen2_vl"), model="unchecked", pack_size=200, max_bad_share=0.5, world=world
            )
        logged.append("a loader counts the rows now" in caplog.text)
    assert logged == [False, True]
