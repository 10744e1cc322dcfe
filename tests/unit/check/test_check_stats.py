"""Statistics: exact where rows are counted, and called estimates where they are not."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import image_row, make_image, text_row, write_clean

from contract.processors import processor
from count_samples import sidecars, write_chats, write_meta, write_rows
from demo_data import write_demo_data
from packhorse import counts_of, open_meta_dataset
from packhorse.count.columns import Distribution
from packhorse.errors import ConfigError
from packhorse.tools.stats import compute_stats
from packhorse.utils.pool import LocalEngine

NUMBERS = st.lists(st.integers(0, 5_000), max_size=60)


@given(NUMBERS, NUMBERS)
def test_a_distribution_has_the_statistics_of_its_values(some: list[int], more: list[int]) -> None:
    spread = Distribution.merge([Distribution.of(some), Distribution.of(more)])
    values = sorted(some + more)
    assert (spread.n, spread.sum) == (len(values), sum(values))
    assert (spread.min, spread.max) == ((values[0], values[-1]) if values else (0, 0))
    for percent in (1, 50, 90, 99, 100):
        rank = max(1, math.ceil(len(values) * percent / 100))
        assert spread.percentile(percent) == (values[rank - 1] if values else 0)
    edges = spread.doubling_edges()
    assert edges == sorted(set(edges))
    assert sum(spread.histogram(edges)) == len(values)


def test_a_row_that_claims_a_huge_number_of_tokens_does_not_cost_the_memory_for_it(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{**text_row(1), "_text_tokens": 10**12}])
    meta = write_meta(tmp_path, {"rows": {"file_name": "rows.jsonl"}})
    assert compute_stats(meta).all().spreads["tokens"].max == (1 << 24) - 1


def test_the_weight_of_supervised_tokens_is_summed(tmp_path: Path) -> None:
    """Of the dataset, of rows and of turns; rows without weights count their tokens."""
    rows = [text_row(n) for n in range(4)]
    rows[1]["weight"] = 0.5
    rows[2]["messages"][-1]["loss"] = False
    write_rows(tmp_path / "rows.jsonl", rows)
    entries = {"plain": {"file_name": "rows.jsonl"}, "double": {"file_name": "rows.jsonl", "weight": 2}}
    meta = write_meta(tmp_path, entries)
    report = compute_stats(meta, processor("qwen2_vl"))
    counts = counts_of(open_meta_dataset(meta), processor("qwen2_vl"))
    assert counts is not None
    expected = counts.supervised[:4] @ np.array([1, 0.5, 0, 1])
    assert counts.supervised[2] == 0
    weights = {dataset.name: dataset.supervised_weight for dataset in report.datasets}
    assert weights == {"plain": expected, "double": 2 * expected}
    assert report.as_dict()["all"]["supervised_weight"] == 3 * expected
    assert compute_stats(meta).all().supervised_weight is None, "an estimate knows no weights"
    rows = [text_row(n) for n in range(4)]
    write_rows(tmp_path / "rows.jsonl", rows)
    report = compute_stats({"plain": {"file_name": str(tmp_path / "rows.jsonl")}}, processor("qwen2_vl"))
    assert report.all().supervised_weight == report.all().spreads["supervised_tokens"].sum


def test_counted_statistics_are_those_of_the_counts(tmp_path: Path) -> None:
    meta = write_demo_data(tmp_path)
    report = compute_stats(meta, processor("qwen2_vl"))
    assert (report.estimated, report.off_by, report.counted_rows) == (False, 0, 40)
    dataset = open_meta_dataset(meta)
    counts = counts_of(dataset, processor("qwen2_vl"))
    assert counts is not None
    every = report.all()
    total = counts.total[counts.ok]
    tokens = every.spreads["tokens"]
    assert (tokens.n, tokens.sum, tokens.max) == (39, total.sum(), total.max())
    assert tokens.percentile(50) == np.sort(total)[19]
    assert every.spreads["supervised_tokens"].sum == counts.supervised.sum()
    assert every.supervised_share == counts.supervised.sum() / total.sum()
    assert every.spreads["visual_tokens"].sum == (counts.image + counts.video).sum()
    assert every.media == {"images": 23, "videos": 4, "audios": 0}
    assert (every.rows, every.text_only, every.bad) == (40, 12, {"malformed_row": 1})
    assert every.spreads["image_side"].n == every.spreads["image_tokens"].n == 23
    assert every.spreads["image_tokens"].sum == counts.image.sum()
    again = compute_stats(meta, processor("qwen2_vl"))
    assert again.counted_rows == 0
    assert again.as_dict()["datasets"] == report.as_dict()["datasets"]


def test_estimates_write_nothing_and_are_called_so(tmp_path: Path) -> None:
    meta = write_demo_data(tmp_path)
    report = compute_stats(meta)
    assert report.estimated
    assert report.as_dict()["exact"] is False
    assert sidecars(tmp_path) == []
    every = report.all()
    assert every.media == {"images": 23, "videos": 4, "audios": 0}
    assert every.spreads["visual_tokens"].sum == 27 * 500
    assert every.spreads["image_side"].max == 320  # from headers: exact
    assert 0 < every.spreads["supervised_tokens"].sum < every.spreads["tokens"].sum


def test_estimates_are_the_same_from_two_processes(tmp_path: Path) -> None:
    meta = write_chats(tmp_path, 9_000)
    one, two = compute_stats(meta), compute_stats(meta, engine=LocalEngine(2, multiprocessing_context="fork"))
    assert one.as_dict()["all"] == two.as_dict()["all"]
    assert one.all().rows == 9_000


@pytest.mark.parametrize("rows", [0, 1])
def test_no_rows_and_one_row_have_statistics(tmp_path: Path, rows: int) -> None:
    write_rows(tmp_path / "rows.jsonl", [text_row(1)] * rows)
    meta = write_meta(tmp_path, {"rows": {"file_name": "rows.jsonl"}})
    for report in (compute_stats(meta), compute_stats(meta, processor("qwen2_vl"))):
        every = report.all()
        assert (every.rows, every.text_only, every.spreads["tokens"].n) == (rows, rows, rows)
        json.dumps(report.as_dict())


def test_rows_with_missing_images_are_reported_and_in_no_distribution(tmp_path: Path) -> None:
    write_clean(tmp_path, 3)
    make_image(tmp_path / "media" / "p.png", 1)
    write_rows(tmp_path / "clean.jsonl", [image_row(1, "p.png"), image_row(2, "gone.png")])
    for report in (
        compute_stats(tmp_path / "meta.json"),
        compute_stats(tmp_path / "meta.json", processor("qwen2_vl")),
    ):
        assert report.all().bad == {"missing_media": 1}
        assert report.all().spreads["tokens"].n == 1


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text('[{"messages": [')
    meta = write_meta(tmp_path, {"cut": {"file_name": "cut.json"}})
    with pytest.raises(ConfigError, match="not closed"):
        compute_stats(meta)
