"""Pairs in a loader: both answers are counted, planned, built and dropped together."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from contract.processors import processor
from loader_samples import load
from packhorse.count.counting import count_meta
from packhorse.errors import BadSample
from packhorse.formats.meta import open_meta_dataset
from packhorse.loader.build import BatchBuilder, PackBuilder, PadBuilder
from raising import raises_config


def draw_rows(number: int, seed: int = 0, *, images: Any = None) -> list[dict[str, Any]]:
    """Pairs, every third row an answer with a label, half of them with an image."""
    draw = random.Random(seed)
    rows = []
    for n in range(number):
        parts = [
            *([{"type": "image"}] if n % 2 else []),
            {"type": "text", "text": "why " * draw.randint(1, 9)},
        ]
        size = (draw.randint(60, 120), draw.randint(60, 120))
        image = Image.new("RGB", size, (n, 9, 7)) if images is None else images(n, size)
        row: dict[str, Any] = {"prompt": [{"role": "user", "content": parts}], "images": [image] * (n % 2)}
        if n % 3 == 2:
            row |= {"completion": f"so {n} " * draw.randint(1, 8), "label": bool(n % 2)}
        else:
            row |= {
                "chosen": f"so {n} " * draw.randint(1, 8),
                "rejected": f"no {n} " * draw.randint(1, 8),
            }
        rows.append(row)
    return rows


def write(folder: Path, number: int) -> Path:
    """Write rows with images to a data file."""

    def save(n: int, size: tuple[int, int]) -> str:
        Image.new("RGB", size, (n, 9, 7)).save(folder / f"{n}.png")
        return f"{n}.png"

    rows = draw_rows(number, images=save)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def expected_roles(row: dict[str, Any]) -> list[str]:
    if "label" in row:
        return ["good" if row["label"] else "bad"]
    return ["chosen", "rejected"]


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "smolvlm"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"alignment": 8},
        {"batch_size": 2},
        {"max_documents": 3},
        {"mode": "pad", "batch_size": 2},
        {"num_workers": 1},
    ],
    ids=["pack", "aligned", "two packs", "three documents", "pad", "a worker"],
)
def test_each_row_is_delivered_once_with_all_its_documents_next_to_each_other(
    family: str, options: dict[str, Any]
) -> None:
    rows = draw_rows(14)
    loader = load(rows, task="preference", pack_size=1500, family=family, **options)
    seen: list[int] = []
    for batch in loader:
        info = batch.info
        keys = [key for row in info.document_keys for key in row if key]
        roles = [
            role
            for row, of_row in zip(info.document_keys, info.document_roles, strict=True)
            for key, role in zip(row, of_row, strict=True)
            if key
        ]
        assert roles == [role for index in info.samples for role in expected_roles(rows[index])]
        assert keys == [str(index) for index in info.samples for _ in expected_roles(rows[index])]
        assert info.keys == tuple(map(str, info.samples))
        if options.get("mode") == "pad":
            assert all(len(row) == 1 for row in info.document_keys)
        else:  # both answers of a pair in one pack
            for row, of_row in zip(info.document_keys, info.document_roles, strict=True):
                pairs = [before for before, after in pairwise(of_row) if after == "rejected"]
                assert pairs == ["chosen"] * of_row.count("rejected") == ["chosen"] * of_row.count("chosen")
                assert len(row) <= options.get("max_documents", 99)
        assert info.lost == ()
        seen += info.samples
    assert sorted(seen) == list(range(len(rows)))
    assert not len(loader.ledger)


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "llava_onevision"])
@pytest.mark.parametrize("alignment", [1, 8])
def test_counts_of_pairs_are_those_of_both_documents(family: str, alignment: int) -> None:
    rows = draw_rows(9)
    loader = load(rows, task="preference", family=family, pack_size=4096, alignment=alignment)
    lengths: dict[int, list[int]] = {}
    for batch in loader:
        for row, of_row in zip(batch.info.document_keys, batch.info.document_lengths, strict=True):
            for key, length in zip(row, of_row, strict=True):
                if key:
                    lengths.setdefault(int(key), []).append(length)
    counts, planned = loader.counts, loader._planner.lengths
    assert counts.exact.all()
    for index, documents in lengths.items():
        both = [length + 1 for length in documents]
        assert counts.total[index] == sum(both)
        assert counts.rejected[index] == (both[1] if len(both) > 1 else 0)
        padded = [length + -length % alignment for length in documents]
        assert planned[index] == (sum(padded) if len(padded) > 1 else documents[0])
    assert counts.images.tolist() == [len(row["images"]) * len(expected_roles(row)) for row in rows]


def test_a_pair_that_fails_is_dropped_whole_with_one_entry(tmp_path: Path) -> None:
    path = write(tmp_path, 8)
    load(str(path), task="preference", pack_size=2048).close()
    loader = load(str(path), task="preference", pack_size=2048, max_bad_share=None)
    (tmp_path / "3.png").unlink()  # of a pair, after it was counted
    batches = list(loader)
    assert [(drop.key, drop.reason) for drop in loader.ledger] == [("rows/3", "missing_media")]
    keys = [key for batch in batches for row in batch.info.document_keys for key in row]
    assert "rows/3" not in keys
    assert sorted({key for key in keys if key}) == [f"rows/{n}" for n in range(8) if n != 3]


def test_a_pair_of_which_one_answer_cannot_be_counted_is_in_no_pack() -> None:
    rows = draw_rows(6)
    rows[3]["rejected"] = "a typed <|image_pad|>"
    loader = load(rows, task="preference", pack_size=2048, max_bad_share=None)
    assert sorted(index for batch in loader for index in batch.info.samples) == [0, 1, 2, 4, 5]
    assert [(drop.key, drop.stage) for drop in loader.ledger] == [("3", "plan")]


@pytest.mark.parametrize(
    ("builder", "options"),
    [
        (PackBuilder, {"pack_size": 330}),
        (PadBuilder, {"mode": "pad"}),
        (PadBuilder, {"mode": "pad", "batch_size": 3}),
    ],
    ids=["pack", "pad", "pad three rows"],
)
def test_a_pair_that_cannot_be_collated_is_dropped_whole_with_one_entry(
    builder: type[BatchBuilder], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    collate = builder.collate

    def fail(self: Any, rows: Any) -> Any:
        if any(index == 0 and sample.role == "rejected" for row in rows for index, sample in row):
            raise BadSample("cannot be collated", reason="collate_failed", stage="collate")
        return collate(self, rows)

    monkeypatch.setattr(builder, "collate", fail)
    rows = draw_rows(3)
    loader = load(rows, task="preference", max_bad_share=None, placeholder="never", **options)
    infos = [batch.info for batch in loader]
    seen = [index for info in infos for index in info.samples]
    roles = [role for info in infos for row in info.document_roles for role in row if role]
    assert roles == [role for index in seen for role in expected_roles(rows[index])]
    assert 0 not in seen
    dropped = [drop.key for drop in loader.ledger]
    assert dropped.count("0") == 1
    assert sorted([*map(str, seen), *dropped]) == ["0", "1", "2"]


def test_a_pair_longer_than_a_pack_is_dropped_whole() -> None:
    rows = draw_rows(2)
    rows[0]["rejected"] = "no " * 200
    loader = load(rows, task="preference", pack_size=400)
    assert [index for batch in loader for index in batch.info.samples] == [1]
    assert [(drop.key, drop.reason) for drop in loader.ledger] == [("0", "too_long")]
    padded = load(rows, task="preference", mode="pad", pack_size=int(loader.counts.rejected[0]) - 1)
    assert len(padded.plan.indices) == 2  # each answer has a row of its own


def test_both_answers_of_a_pair_count_as_rows_of_a_padded_plan() -> None:
    rows = draw_rows(9)
    longest = max(
        max(loaded.info.document_lengths)[0] for loaded in load(rows, task="preference", mode="pad")
    )
    loader = load(rows, task="preference", mode="pad", pack_size=longest, pad_to_size=True)
    infos = [batch.info for batch in loader]
    tokens, slots = sum(info.tokens for info in infos), sum(info.slots for info in infos)
    text = loader.describe()
    assert f"rows       15 of at most {longest} tokens" in text
    assert f"fill       {100 * tokens / slots:.3f} % of rows of this length: {tokens:,} tokens" in text
    assert "samples    9 packed, 0 dropped" in text


def test_counts_of_both_tasks_are_saved_next_to_each_other(tmp_path: Path) -> None:
    path = write(tmp_path, 8)
    qwen = processor("qwen2_vl")
    saved = count_meta(str(path), qwen, task="preference", verify=8)
    assert saved.verified is not None
    assert not saved.verified.failed
    assert not saved.totals()["bad"]
    loader, in_memory = (load(data, task="preference", pack_size=2048) for data in (str(path), draw_rows(8)))
    assert np.array_equal(loader.counts.total, in_memory.counts.total)
    assert np.array_equal(loader.counts.rejected, in_memory.counts.rejected)
    assert len(list(tmp_path.glob("*.phcount"))) == 1
    plain = count_meta(str(path), qwen)
    assert plain.totals()["bad"] == {"preference_data": 8}
    assert len(list(tmp_path.glob("*.phcount"))) == 2


def test_the_plan_of_another_task_has_another_key() -> None:
    turns = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]
    plain = load([{"messages": turns}])
    labelled = load([{"messages": turns, "label": True}], task="preference")
    assert plain.counts.total.tolist() == labelled.counts.total.tolist()
    assert plain.plan_key != labelled.plan_key


def test_ranks_share_pairs_as_a_whole() -> None:
    rows = draw_rows(10)
    seen = [
        index
        for rank in range(2)
        for batch in load(rows, rank, 2, task="preference", pack_size=1024)
        for index in batch.info.samples
    ]
    assert sorted(seen) == list(range(10))


def test_settings_that_contradict_the_task_are_rejected(tmp_path: Path) -> None:
    rows = draw_rows(2)
    with raises_config("on_overlong", "truncate"):
        load(rows, task="preference", on_overlong="truncate")
    with raises_config("task"):
        load(rows)
    opened = open_meta_dataset(str(write(tmp_path, 3)), task="preference")
    assert len(load(opened, task="preference", pack_size=1024)) > 0
    with raises_config("task", "sft"):
        load(opened)
