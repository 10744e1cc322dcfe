"""The ledger of a resumed run has its whole epoch once; a rejected resume adds nothing."""

import json
import logging
import traceback
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import packhorse
from contract.processors import processor
from count_samples import write_meta, write_rows
from loader_samples import delivered_rows, load, texts
from packhorse.ledger import Ledger, read_ledgers
from packhorse.loader import TooManyBad
from raising import raises_config
from view_samples import chat

ROWS = 40
NEVER_PLANNED = {"photos/20": "too_long", "photos/30": "malformed_row"}


@pytest.fixture
def meta(tmp_path: Path) -> Path:
    """Forty rows with an image each, of which one is too long for a pack of 256 tokens and one torn."""
    rows: list[Any] = []
    for number in range(ROWS):
        Image.new("RGB", (60 + number, 80), "tan").save(tmp_path / f"{number}.png")
        rows.append(
            chat(f"<image>What is {number}?", "A horse. " * (number % 5 + 1), images=[f"{number}.png"])
        )
    rows[20] = chat("Why?", "So. " * 400)
    rows[30] = json.dumps(rows[30])[:40]
    write_rows(tmp_path / "photos.jsonl", rows)
    return write_meta(tmp_path, {"photos": {"file_name": "photos.jsonl", "media_dir": str(tmp_path)}})


def open_loader(meta: Path, rank: int = 0, size: int = 1, **options: Any) -> packhorse.Loader:
    settings = {"ledger_dir": meta.parent / "ledger", "max_bad_share": None, "mode": "pad", **options}
    return load(meta, rank, size, **settings)


def order_of(meta: Path, epoch: int = 0) -> list[int]:
    """The rows of an epoch, one in each step, as they will be delivered to one rank."""
    loader = open_loader(meta, ledger_dir=None)
    loader.set_epoch(epoch)
    return delivered_rows(loader)


def take_away(meta: Path, rows: list[int]) -> None:
    for row in rows:
        (meta.parent / f"{row}.png").unlink(missing_ok=True)


def lines_of(meta: Path, rank: int = 0) -> list[dict[str, Any]]:
    text = (meta.parent / "ledger" / f"rank-{rank:05d}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def keys_of(ledger: Ledger, epoch: int | None = None) -> list[str]:
    return sorted(drop.key for drop in ledger if epoch is None or drop.epoch in (None, epoch))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_run_that_goes_on_has_in_its_ledger_what_failed_before(
    meta: Path, epoch: int, num_workers: int
) -> None:
    """Rows fail before the state, after it (one is mended in time), and after the restart."""
    order = order_of(meta, epoch)
    early, mended, late = order[1:3], order[7], order[20:22]
    first = open_loader(meta, num_workers=num_workers)
    if epoch:
        delivered_rows(first)
    take_away(meta, [*early, mended, *late])
    before = delivered_rows(first, 5)
    state = json.loads(json.dumps(first.state_dict()))
    delivered_rows(first, 5)
    first.close()
    Image.new("RGB", (60 + mended, 80), "tan").save(meta.parent / f"{mended}.png")

    again = open_loader(meta, num_workers=num_workers)
    again.load_state_dict(state)
    never = sorted(NEVER_PLANNED)
    assert keys_of(again.ledger) == sorted([*never, *(f"photos/{row}" for row in early)])
    after = delivered_rows(again)
    again.close()

    gone = sorted([*never, *(f"photos/{row}" for row in early + late)])
    stats = again.epoch_stats
    assert stats is not None
    assert (stats.epoch, stats.delivered, stats.lost, stats.dropped) == (epoch, ROWS - 6, 4, 2)
    assert stats.delivered == len(before) + len(after)
    assert stats.delivered + again.ledger.lost() == ROWS == stats.delivered + sum(stats.reasons.values())
    assert keys_of(again.ledger) == gone
    assert sorted(line["key"] for line in lines_of(meta)) == gone, "nothing is written twice"

    delivered_rows(again)  # the next epoch: all four fail once more
    assert again.epoch_stats is not None
    assert (again.epoch_stats.delivered, again.epoch_stats.lost) == (ROWS - 6, 4)
    assert keys_of(again.ledger, epoch + 1) == gone
    assert again.epoch_stats.delivered + again.ledger.of_epoch(epoch + 1).lost() == ROWS
    again.close()


def test_what_an_epoch_recorded_after_the_state_is_rolled_back(meta: Path) -> None:
    first = open_loader(meta)
    delivered_rows(first)
    state = first.state_dict()  # at the end of epoch 0
    broken = order_of(meta, 1)[0]
    take_away(meta, [broken])
    delivered_rows(first, 3)
    assert f"photos/{broken}" in keys_of(Ledger.load(meta.parent / "ledger" / "rank-00000.jsonl"))
    Image.new("RGB", (60 + broken, 80), "tan").save(meta.parent / f"{broken}.png")

    again = open_loader(meta)
    again.load_state_dict(state)
    delivered_rows(again)
    assert again.epoch_stats is not None
    assert (again.epoch_stats.epoch, again.epoch_stats.delivered, again.epoch_stats.lost) == (1, ROWS - 2, 0)
    assert keys_of(again.ledger) == sorted(line["key"] for line in lines_of(meta)) == sorted(NEVER_PLANNED)


def test_with_other_ranks_each_knows_its_own_file_and_the_folder_has_all(meta: Path) -> None:
    gone = [delivered_rows(open_loader(meta, rank, 3, ledger_dir=None), 1)[0] for rank in range(3)]
    loaders = [open_loader(meta, rank, 3) for rank in range(3)]
    take_away(meta, gone)
    for loader in loaders:
        delivered_rows(loader, 2)
    state = loaders[0].state_dict()
    by_rank = [{f"photos/{row}" for row in gone} & set(keys_of(loader.ledger)) for loader in loaders]
    assert list(map(len, by_rank)) == [1, 1, 1], "a rank that will be no more has a failure, too"

    again = [open_loader(meta, rank, 2) for rank in range(2)]
    for rank, loader in enumerate(again):
        loader.load_state_dict(state)
        assert set(keys_of(loader.ledger)) - set(NEVER_PLANNED) == by_rank[rank]
        delivered_rows(loader)
    names = sorted(drop.key for drop in read_ledgers(meta.parent / "ledger")[0])
    assert names == sorted([*NEVER_PLANNED, *(f"photos/{row}" for row in gone)])


def test_a_loader_that_is_rejected_or_never_used_leaves_nothing_in_the_ledger_of_a_run(meta: Path) -> None:
    folder = meta.parent / "ledger"
    open_loader(meta)
    assert not folder.exists()
    loader = open_loader(meta)
    delivered_rows(loader, 2)
    before = lines_of(meta)
    assert {line["key"]: line["reason"] for line in before} == NEVER_PLANNED
    other = open_loader(meta, pack_size=512)
    assert {drop.key: drop.reason for drop in other.ledger} == NEVER_PLANNED
    with raises_config("plan", loader.plan_key, match="the capacity of a pack"):
        other.load_state_dict(loader.state_dict())
    with pytest.raises(TooManyBad):
        open_loader(meta, max_bad_share=0.0, pack_size=512)
    assert lines_of(meta) == before
    again = open_loader(meta)
    again.load_state_dict(loader.state_dict())
    assert lines_of(meta) == before
    delivered_rows(again)
    assert lines_of(meta) == before


def test_a_state_from_before_the_first_batch_misses_no_entry(
    meta: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = open_loader(meta).state_dict()
    with caplog.at_level(logging.WARNING):
        open_loader(meta).load_state_dict(state)
    assert "entries were lost" not in caplog.text


def test_epoch_stats_without_delivered_say_how_to_have_it() -> None:
    loader = load(texts(20), 0, 2, mode="pad")
    delivered_rows(loader, 5)
    again = load(texts(20), mode="pad")
    again.load_state_dict(loader.state_dict())
    delivered_rows(again)
    text = str(again.epoch_stats)
    assert "20 in the plan, delivered unknown (part of the epoch was before a restart: set " in text
    assert "set ledger_dir to have it" in text
    part = load(texts(20), 0, 2)
    delivered_rows(part)
    assert "delivered unknown (this rank's part alone" in str(part.epoch_stats)


def test_rows_that_are_counted_again_stop_a_resume_which_says_so_and_how_to_go_on(meta: Path) -> None:
    take_away(meta, [3])
    loader = open_loader(meta)
    delivered_rows(loader, 2)
    state = loader.state_dict()
    Image.new("RGB", (63, 80), "tan").save(meta.parent / "3.png")
    packhorse.count_meta(str(meta), processor("qwen2_vl"), retry_bad=True)
    remedy = r"rows that were bad .* are good now.*PACKHORSE_KEEP_COUNTS=1"
    with raises_config("plan", state["plan"], match=remedy):
        open_loader(meta).load_state_dict(state)
    take_away(meta, [3])
    packhorse.count_meta(str(meta), processor("qwen2_vl"), fresh=True)
    open_loader(meta).load_state_dict(state)


@pytest.mark.parametrize("rank", [0, 1])
def test_too_many_bad_is_raised_once_and_names_only_what_is_bad(meta: Path, rank: int) -> None:
    with pytest.raises(TooManyBad) as caught:
        open_loader(meta, rank, 2, max_bad_share=0.0)
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("TooManyBad: 1 of 40 samples cannot be used") == 1
    assert "During handling" not in text
    assert "For example photos/30: malformed_row" in text
    assert "photos/20" not in text
    assert "--fix" in text


def test_the_description_names_rows_by_their_keys(meta: Path) -> None:
    for rank in range(2):
        text = open_loader(meta, rank, 2).describe()
        assert "\ndropped    too_long: 1 of 40 (photos/20)\n" in text
        assert "\ndropped    malformed_row: 1 of 40 (photos/30)\n" in text
        assert "\nfill       " in text
        assert "(samples" not in text
        assert "38 packed, 1 bad, 1 dropped" in text
