"""For every world size, file type and ratio: the shards and the ledger together are the whole set."""

import json
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packhorse.datasets import _load_jsonl_for_rank, make_meta_dataset, open_meta_dataset
from packhorse.ledger import Ledger
from packhorse.rows.selection import RowSelection, row_key
from packhorse.types import World
from row_files import WRITERS

RATIOS = st.one_of(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 2.3, 3.0]), st.floats(0, 4, allow_nan=False))


def expected_entries(total: int, ratio: float) -> int:
    if ratio < 1:
        return min(total, max(1, int(total * ratio)))
    return int(total * ratio)


@settings(max_examples=400, deadline=None)
@given(total=st.integers(0, 300), ratio=RATIOS, size=st.integers(1, 9))
def test_shards_are_disjoint_equal_and_with_the_ledger_complete(total: int, ratio: float, size: int) -> None:
    ledger, assigned = Ledger(), Counter()
    lengths = set()
    for rank in range(size):
        selection = RowSelection(total, ratio, World(rank, size))
        selection.record_losses("set", ledger)
        keys = [row_key("set", selection.row(p), selection.copy(p)) for p in range(len(selection))]
        assert [selection.row(p) for p in range(len(selection))] == selection.rows().tolist()
        assigned.update(keys)
        lengths.add(len(keys))
    assert len(lengths) == 1, "every rank gets the same number"
    assert not [key for key, n in assigned.items() if n > 1], "no entry goes to two ranks"

    left_over = {drop.key for drop in ledger if drop.reason == "left_over"}
    assert len(left_over) < size
    assert not left_over & assigned.keys()
    assert len(assigned) + len(left_over) == expected_entries(total, ratio)

    rows_named = {int(key.split("/")[1].split("#")[0]) for key in [*assigned, *(d.key for d in ledger)]}
    assert rows_named == set(range(total)), "every row of the file is assigned or recorded"


@settings(max_examples=200, deadline=None)
@given(total=st.integers(0, 200), ratio=RATIOS, size=st.integers(1, 9))
def test_keeping_the_remainder_loses_nothing_of_the_selection(total: int, ratio: float, size: int) -> None:
    shards = [RowSelection(total, ratio, World(rank, size), "keep") for rank in range(size)]
    assert sum(map(len, shards)) == expected_entries(total, ratio)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert shards[0].left_over() == []


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@pytest.mark.parametrize("kind", WRITERS)
@given(
    total=st.integers(0, 40),
    ratio=st.sampled_from([0.0, 0.3, 0.5, 1.0, 1.5, 2.0, 2.7]),
    size=st.integers(1, 9),
)
def test_every_file_type_is_sharded_the_same_way(kind: str, total: int, ratio: float, size: int) -> None:
    rows = [{"id": i, "messages": [{"role": "assistant", "content": str(i)}]} for i in range(total)]
    with tempfile.TemporaryDirectory() as folder:
        path = WRITERS[kind](Path(folder), rows)
        ledger, ids, lengths = Ledger(), Counter(), set()
        for rank in range(size):
            part, count = _load_jsonl_for_rank(path, ratio, rank, size, ledger=ledger)
            assert count == total
            assert part == [rows[i] for i in RowSelection(total, ratio, World(rank, size)).rows()]
            ids.update(row["id"] for row in part)
            lengths.add(len(part))
    assert len(lengths) == 1
    assert sum(ids.values()) + ledger.counts().get("left_over", 0) == expected_entries(total, ratio)
    assert ids.keys() | {int(d.key.rsplit("/", 1)[1].split("#")[0]) for d in ledger} == set(range(total))


@settings(max_examples=25, deadline=None)
@given(
    totals=st.tuples(st.integers(0, 25), st.integers(0, 25)),
    ratios=st.tuples(*[st.sampled_from([0.4, 1.0, 1.5])] * 2),
    size=st.integers(1, 9),
)
def test_a_sharded_mixture_is_whole_and_lazy_equals_eager(
    totals: tuple[int, int], ratios: tuple[float, float], size: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        meta, wanted = {}, 0
        for label, total, ratio in zip("ab", totals, ratios, strict=True):
            turns = [[{"role": "assistant", "content": f"{label}{i}"}] for i in range(total)]
            lines = "".join(json.dumps({"messages": turn}) + "\n" for turn in turns)
            (folder / f"{label}.jsonl").write_text(lines)
            meta[label] = {"file_name": f"{label}.jsonl", "sample_ratio": ratio}
            wanted += expected_entries(total, ratio)
        (folder / "meta.json").write_text(json.dumps(meta))
        ledger, keys = Ledger(), Counter()
        for rank in range(size):
            lazy = open_meta_dataset(folder / "meta.json", None, "train", True, rank, size, ledger=ledger)
            eager = make_meta_dataset(folder / "meta.json", shard_data=True, rank=rank, world_size=size)
            assert list(lazy) == list(eager)
            keys.update(lazy.key(i) for i in range(len(lazy)))
    assert not [key for key, n in keys.items() if n > 1]
    assert len(keys) + ledger.counts().get("left_over", 0) == wanted


def test_the_draw_is_the_documented_one() -> None:
    import random

    assert RowSelection(100, 0.25).rows().tolist() == random.Random(42).sample(range(100), 25)
    assert RowSelection(4, 2.5).rows().tolist() == [0, 1, 2, 3] * 2 + random.Random(42).sample(range(4), 2)
    assert RowSelection(10, 1.0, World(1, 3)).rows().tolist() == [1, 4, 7]


def test_a_large_draw_is_kept_and_is_the_same_draw(cache: Path) -> None:
    import pickle
    import random

    first = RowSelection(300_000, 0.5)
    again = pickle.loads(pickle.dumps(RowSelection(300_000, 0.5, World(1, 2))))
    drawn = random.Random(42).sample(range(300_000), 150_000)
    assert first.rows().tolist() == drawn
    assert again.rows().tolist() == drawn[1::2]
    assert len(list((cache / "draws").iterdir())) == 1


@pytest.mark.parametrize("ratio", [-0.1, float("nan"), float("inf")])
def test_a_ratio_that_is_no_share_is_rejected(ratio: float) -> None:
    with pytest.raises(ValueError, match="sample_ratio"):
        RowSelection(10, ratio)
