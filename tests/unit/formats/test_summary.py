"""The summary table and the statistics under it."""

import logging
from typing import Any

import pytest

from packhorse.datasets import _collect_sample_stats, _ExamplesWithStats, _log_dataset_loading_summary

TIMINGS = [
    {"name": "quick", "io_s": 0.5, "convert_s": 0.25, "samples": 1200, "n_images": 1100, "n_text_only": 100},
    {"name": "slow", "io_s": 2.0, "convert_s": 1.0, "samples": 34, "n_videos": 34, "n_media_tokens": 17_000},
]


def test_the_table_has_a_line_per_dataset_the_slowest_first_and_sums(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        _log_dataset_loading_summary(TIMINGS, 2.5, 1234, rank=3)
    lines = caplog.records[0].getMessage().splitlines()
    assert lines[0] == "rank 3: 2 dataset(s), 1,234 samples, about 17,000 tokens"
    assert [line.split()[0] for line in lines[3:5]] == ["slow", "quick"]
    assert lines[6].split() == ["all", "1,234", "1,100", "34", "100", "17,000", "2.50", "1.25", "3.75"]
    assert lines[7] == "2.50 s wall time, 3.75 s of work: 1.5 at a time"
    assert len({len(line) for line in lines[1:7]}) == 1, "columns are aligned"


def test_a_dict_of_timings_and_no_dataset_at_all_are_fine(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        _log_dataset_loading_summary({"only": {"io_s": 1.0}}, 1.0, 0)
        _log_dataset_loading_summary([], 0.0, 0)
    assert "only" in caplog.records[0].getMessage()
    assert caplog.records[1].getMessage().startswith("0 dataset(s), 0 samples")


def example(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": "123456"}]
    return {"conversation": turns, **more}


IMAGE = {"type": "image", "image": "a.jpg"}
VIDEO = {"type": "video", "video": "a.mp4"}


def test_text_is_counted_by_its_field_or_by_characters() -> None:
    stats = _collect_sample_stats([example(), example(_text_tokens=100)])
    assert stats["n_text_tokens"] == 6 // 3 + 100
    assert stats["n_missing_text_tokens"] == 1
    assert stats["n_text_only"] == 2


def test_media_are_counted_by_their_meta_or_as_500_each() -> None:
    meta = {"images_meta": [{"n_tokens": 64}, [480, 640], None], "videos_meta": [{"n_tokens": 1000}]}
    stats = _collect_sample_stats([example(IMAGE, IMAGE, IMAGE, VIDEO, mm_inputs_meta=meta), example(IMAGE)])
    assert stats["n_media_tokens"] == 64 + 500 + 0 + 1000 + 500
    assert (stats["n_images"], stats["n_videos"], stats["n_missing_mm_inputs_meta"]) == (4, 1, 1)


def test_no_examples_have_statistics_of_zero() -> None:
    assert set(_collect_sample_stats([]).values()) == {0}


def test_the_list_carries_its_statistics_and_nothing_else() -> None:
    examples = _ExamplesWithStats([{"conversation": []}])
    examples.stats = {"n_images": 0}
    assert _ExamplesWithStats.__slots__ == ("stats",)
    assert examples == [{"conversation": []}]
