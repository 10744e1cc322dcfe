"""The loader in one process: what it opens, what it delivers, what it drops and records."""

import copy
import dataclasses
import json
import logging
import math
import os
import random
import re
import time
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

import packhorse
from contract.processors import build, processor
from loader_samples import chat, delivered_rows, image, load, mixed_rows, texts
from packhorse import ConfigError, Ledger, LoaderConfig, World
from packhorse.chat import IGNORE_INDEX
from packhorse.loader import TooManyBad
from packhorse.loader.startup import count_examples
from raising import raises_bad_sample, raises_config


@pytest.fixture
def meta(tmp_path):
    """A mixture of two files: images (one missing, one row cut), and chats."""
    (tmp_path / "images").mkdir()
    rows = []
    for n in range(30):
        Image.new("RGB", (60 + n, 80), "tan").save(tmp_path / "images" / f"{n}.png")
        turns = [("user", f"<image>What is {n}?"), ("assistant", "A horse. " * (n % 5 + 1))]
        rows.append(
            {"images": [f"images/{n}.png"], "messages": [{"role": r, "content": c} for r, c in turns]}
        )
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "images" / "7.png").unlink()
    lines[11] = lines[11][:40]
    (tmp_path / "images.jsonl").write_text("\n".join(lines) + "\n")
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"Count to {n}."},
                {"role": "assistant", "content": "1 " * n},
            ]
        }
        for n in range(1, 21)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)) + "\n")
    content = {
        "images": {"file_name": str(tmp_path / "images.jsonl"), "media_dir": str(tmp_path)},
        "chats": {"file_name": str(tmp_path / "chats.jsonl")},
    }
    (tmp_path / "meta.json").write_text(json.dumps(content))
    return tmp_path / "meta.json"


def test_a_meta_file_is_counted_planned_and_delivered_and_bad_rows_are_in_the_ledger(meta):
    loader = load(meta, max_bad_share=0.1, pack_size=300)
    seen = delivered_rows(loader)
    drops = {drop.key: drop.reason for drop in loader.ledger}

    assert drops == {"images/7": "missing_media", "images/11": "malformed_row"}
    assert {loader.key(index) for index in seen} | set(drops) == {
        loader.dataset.key(n) for n in range(len(loader.dataset))
    }
    assert len(seen) == len(set(seen)) == 48
    stats = loader.epoch_stats
    assert (stats.rows, stats.planned, stats.delivered, stats.lost) == (50, 48, 48, 0)
    assert stats.reasons == {"missing_media": 1, "malformed_row": 1}
    assert list(meta.parent.glob("*.phcount")), "counts are kept for the next start"


@pytest.mark.parametrize("mode", ["pack", "pad"])
def test_batches_are_what_the_processor_makes_of_the_samples(mode):
    rows = mixed_rows(12)
    loader = load(rows, mode=mode, batch_size=2)
    expected = count_examples(rows, processor("qwen2_vl"))
    for batch in loader:
        report = batch.info
        supervised = (batch["labels"] != IGNORE_INDEX).sum()
        assert report.supervised == supervised == expected.supervised[list(report.samples)].sum()
        assert report.tokens == expected.total[list(report.samples)].sum() - len(report.samples)
        assert report.slots == batch["labels"].numel()
        assert batch["input_ids"].shape == batch["labels"].shape
        grids = [batch[key] for key in ("image_grid_thw", "video_grid_thw") if key in batch]
        media = expected.images[list(report.samples)].sum() + expected.videos[list(report.samples)].sum()
        assert sum(map(len, grids)) == media  # alone in the world: no placeholder


def test_packs_of_a_model_with_mrope_have_its_positions():
    from contract.tiny_models import tiny_model

    model = tiny_model("qwen2_vl")
    loader = packhorse.load(mixed_rows(8), processor("qwen2_vl"), model=model, world=World(), pack_size=256)
    batch = next(iter(loader))
    assert batch["position_ids"].shape == (3, *batch["input_ids"].shape)
    assert batch["pixel_values"].dtype == model.dtype if "pixel_values" in batch else True


def test_a_hugging_face_dataset_is_data_too():
    import datasets

    rows = datasets.Dataset.from_list([{"conversation": row["conversation"]} for row in texts(9)])
    assert sorted(delivered_rows(load(rows))) == list(range(9))


@pytest.mark.parametrize(
    ("data", "setting", "found"),
    [
        ([], "data", None),
        ([{"text": "hello"}], "columns", ["text"]),
        (["hello"], "data", "str"),
        (7, "data", "int"),
        (iter([]), "data", "list_iterator"),
    ],
)
def test_something_that_is_no_data_is_rejected(data, setting, found):
    with raises_config(setting, found):
        load(data)


def test_a_single_sample_on_many_ranks_is_delivered_once_and_all_ranks_step():
    seen, padding_batches = [], 0
    for rank in range(4):
        loader = load(texts(1), rank, 4, gradient_accumulation_steps=2)
        assert len(loader) == 2
        for batch in loader:
            seen += batch.info.samples
            padding_batches += batch.info.is_padding
            assert batch.info.is_padding == bool((batch["labels"] == IGNORE_INDEX).all())
    assert seen == [0]
    assert padding_batches == 7


def test_all_ranks_have_the_same_media_in_a_step(caplog):
    rows = mixed_rows(50)
    kinds = {"image_grid_thw": "image", "video_grid_thw": "video"}
    differ = 0
    for placeholder in ("auto", "never"):
        steps: dict[int, set] = {}
        for rank in range(4):
            loader = load(rows, rank, 4, placeholder=placeholder)
            for batch in loader:
                there = frozenset(kinds[key] for key in batch if key in kinds)
                steps.setdefault(batch.info.step, set()).add(there)
        mixed_steps = sum(len(found) > 1 for found in steps.values())
        assert (mixed_steps == 0) == (placeholder == "auto"), "the data do not test anything"
        differ += mixed_steps
    assert differ


def test_packs_with_a_placeholder_are_not_longer_than_a_pack():
    for rank in range(3):
        loader = load(mixed_rows(40), rank, 3, pad_to_size=True)
        assert all(batch["input_ids"].shape == (1, 256) for batch in loader)


# What does not fit, and what fails.


def long_and_short():
    return [*texts(10), chat("why " * 5, "so " * 300), *texts(3, seed=1)]


def test_samples_longer_than_a_pack_are_dropped_and_named():
    loader = load(long_and_short())
    assert sorted(delivered_rows(loader)) == [n for n in range(14) if n != 10]
    (drop,) = loader.ledger
    assert (drop.key, drop.reason, drop.stage) == ("10", "too_long", "plan")


@pytest.mark.parametrize(
    ("before", "place"), [("", r"a\.jsonl:200 \(byte"), ("\n", r"a\.jsonl, row 199 \(byte")]
)
def test_a_start_does_not_read_the_data_to_name_a_row_at_their_end(tmp_path, monkeypatch, before, place):
    def row(number):
        answer = "so " * (300 if number == 199 else 3)
        turns = [{"role": "user", "content": "why"}, {"role": "assistant", "content": answer}]
        return json.dumps({"messages": turns, "note": "x" * 50_000}) + "\n"

    (tmp_path / "a.jsonl").write_text(before + "".join(map(row, range(200))))
    (tmp_path / "meta.json").write_text('{"a": {"file_name": "a.jsonl"}}')
    load(tmp_path / "meta.json").close()
    read, pread = [], os.pread

    def count_reads(fd, size, offset):
        data = pread(fd, size, offset)
        read.append(len(data))
        return data

    monkeypatch.setattr(os, "pread", count_reads)
    unused, drop = load(tmp_path / "meta.json").ledger
    assert sum(read) < 5_000_000, "of 10 million bytes"
    assert re.search(place, drop.detail)
    assert (unused.reason, unused.detail) == ("unused_field", "not used: note")


def test_samples_longer_than_a_pack_can_be_an_error_that_says_what_to_do():
    with raises_config("pack_size", 256, match=r"longest sample .*, 10\): raise pack_size"):
        load(long_and_short(), on_overlong="raise")


@pytest.mark.parametrize("mode", ["pack", "pad"])
def test_samples_longer_than_a_pack_can_be_truncated(mode):
    loader = load(long_and_short(), on_overlong="truncate", mode=mode)
    assert sorted(delivered_rows(loader)) == list(range(14))
    assert [(drop.key, drop.reason, drop.action) for drop in loader.ledger] == [("10", "truncated", "cut")]


class Breaking(list):
    """Examples of which some turn out to be broken when they are encoded, but not when they are counted."""

    def __init__(self, rows, bad):
        super().__init__(rows)
        self.bad, self.counted = set(bad), False

    def __getitem__(self, index):
        if self.counted and index in self.bad:
            raise OSError(f"row {index} cannot be read")
        return super().__getitem__(index)


@pytest.mark.parametrize("mode", ["pack", "pad"])
def test_a_sample_that_fails_on_the_way_is_dropped_of_its_batch_and_named(mode):
    rows = Breaking(texts(30), {3, 17})
    loader = load(rows, mode=mode, max_bad_share=0.1, batch_size=2)
    rows.counted = True
    lost = []
    seen = []
    for batch in loader:
        seen += batch.info.samples
        lost += batch.info.lost
    assert sorted(seen + lost) == list(range(30))
    assert sorted(lost) == [3, 17]
    assert sorted(drop.key for drop in loader.ledger) == ["17", "3"]
    assert {drop.epoch for drop in loader.ledger} == {0}
    assert loader.epoch_stats.delivered == 28
    assert loader.epoch_stats.lost == 2


def test_a_batch_of_which_nothing_can_be_used_is_still_a_step():
    rows = Breaking(texts(6), range(6))
    loader = load(rows, mode="pad", max_bad_share=None, max_consecutive_bad=None)
    rows.counted = True
    reports = [batch.info for batch in loader]
    assert len(reports) == 6
    assert all(report.is_padding for report in reports)
    assert loader.epoch_stats.lost == 6


def test_a_bad_sample_can_stop_the_run():
    rows = Breaking(texts(6), {2})
    loader = load(rows, on_bad="raise")
    rows.counted = True
    with pytest.raises(OSError, match="row 2"):
        delivered_rows(loader)


def test_too_many_bad_samples_stop_the_run_with_the_reasons():
    rows = Breaking(texts(100), {5, 50, 70, 80, 90})
    loader = load(rows, max_bad_share=0.04)
    rows.counted = True
    with pytest.raises(TooManyBad, match=r"sample_failed 5.*cannot be read") as caught:
        delivered_rows(loader)
    assert caught.value.reasons == {"sample_failed": 5}
    rows.bad = {5, 50, 70, 80}
    loader = load(rows, max_bad_share=0.04)
    assert len(delivered_rows(loader)) == 96


def test_too_many_rows_that_cannot_be_counted_stop_the_run_at_once():
    rows = texts(100)
    for index in range(4, 8):
        rows[index] = chat("look", "so", {"type": "image", "image": "no/such.png"})
    with pytest.raises(TooManyBad) as caught:
        load(rows)
    error = caught.value
    assert (error.setting, error.bad, error.samples) == ("max_bad_share", 4, 100)
    assert error.reasons == {"missing_media": 4}
    assert len(delivered_rows(load(rows, max_bad_share=0.04))) == 96


@pytest.mark.parametrize("mode", ["pack", "pad"])
def test_a_template_that_is_changed_after_counting_stops_the_loader(mode):
    made = build("qwen2_vl")
    loader = packhorse.load(texts(8), made, model="unchecked", mode=mode, pack_size=256, num_workers=0)
    template = made.chat_template
    made.chat_template = template.replace("assistant", "helper")
    with pytest.raises(ConfigError, match="the chat template of Qwen2VLProcessor was changed after"):
        iter(loader)
    made.chat_template = str(template)
    assert len(delivered_rows(loader)) == 8


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_template_that_is_changed_while_iterating_stops_the_loader_at_the_next_batch(num_workers):
    made = build("qwen2_vl")
    settings = {"model": "unchecked", "mode": "pad", "num_workers": num_workers}
    loader = packhorse.load(texts(8), made, **settings)
    template, batches = made.chat_template, iter(loader)
    seen = [*next(batches).info.samples]
    made.chat_template = template.replace("assistant", "helper")
    with pytest.raises(ConfigError, match="the chat template of Qwen2VLProcessor was changed after"):
        next(batches)
    assert loader.cursor == 1
    made.chat_template = template
    assert sorted(seen + delivered_rows(loader)) == list(range(8))
    loader.close()


def test_a_template_may_be_changed_with_the_last_batch():
    made = build("qwen2_vl")
    loader = packhorse.load(texts(8), made, model="unchecked", mode="pad", num_workers=0)
    for batch in loader:
        if batch.info.step == len(loader) - 1:
            made.chat_template = "{{ messages }}"
    assert loader.epoch_stats.delivered == 8


def test_a_template_of_several_that_is_changed_in_place_stops_the_loader():
    made = build("qwen2_vl")
    made.chat_template = {"default": made.chat_template, "tools": made.chat_template}
    loader = packhorse.load(texts(8), made, model="unchecked", mode="pad", num_workers=0)
    batches = iter(loader)
    next(batches)
    made.chat_template["default"] = made.chat_template["default"].replace("assistant", "helper")
    with pytest.raises(ConfigError, match="was changed after its tokens were counted"):
        next(batches)


def test_more_rows_never_tolerate_fewer_bad_samples():
    from packhorse.loader.epoch_stats import exceeds_share

    def count_tolerated(samples, share):
        return next(bad for bad in range(samples + 1) if exceeds_share(bad + 1, samples, share))

    assert [count_tolerated(samples, 0.01) for samples in (99, 100, 399, 400, 1_000)] == [3, 3, 3, 4, 10]
    for share in (0.0, 0.01, 0.05, 0.5):
        limits = [count_tolerated(samples, share) for samples in range(4, 1_200)]
        assert limits == sorted(limits)
        assert limits[0] == (3 if share else 0)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("number", [99, 100])
def test_three_bad_samples_are_tolerated_whatever_their_share(number, counted):
    rows = Breaking(texts(number), {5, 50, 70})
    loader = load(rows) if not counted else None
    rows.counted = True
    loader = load(rows) if counted else loader
    assert len(delivered_rows(loader)) == number - 3
    rows.counted, rows.bad = False, {5, 50, 70, 80}
    loader = load(rows)
    rows.counted = True
    with pytest.raises(TooManyBad, match=r"max_bad_share=1\.00%") as caught:
        delivered_rows(loader)
    assert (caught.value.bad, caught.value.samples) == (4, number)
    rows.counted = False
    loader = load(rows, max_bad_share=0.0)
    rows.counted = True
    with pytest.raises(TooManyBad) as caught:
        delivered_rows(loader)
    assert (caught.value.setting, caught.value.bad, caught.value.samples) == ("max_bad_share", 1, number)


def test_failures_in_a_row_stop_the_run():
    rows = Breaking(texts(40), range(40))
    loader = load(rows, mode="pad", max_bad_share=None, max_consecutive_bad=7)
    rows.counted = True
    with pytest.raises(TooManyBad) as caught:
        delivered_rows(loader)
    assert (caught.value.setting, caught.value.bad) == ("max_consecutive_bad", 8)


def test_a_programming_error_stops_the_run():
    rows = Breaking(texts(10), ())
    loader = load(rows)
    rows.counted = True
    rows.bad = None  # "argument of type 'NoneType' is not iterable"
    with pytest.raises(TypeError):
        delivered_rows(loader)
    assert not len(loader.ledger)


def test_limits_of_a_pack_hold():
    draw = __import__("random").Random(0)
    rows = [chat("why", "so", image(draw)) for _ in range(20)]
    loader = load(rows, max_media=2, max_documents=2, pack_size=512)
    assert all(len(batch.info.samples) <= 2 for batch in loader)
    patches = loader.counts.patches
    loader = load(rows, max_patches=int(patches.max()) + 10, pack_size=512)
    assert all(patches[list(batch.info.samples)].sum() <= patches.max() + 10 for batch in loader)


def test_documents_can_be_aligned():
    loader = load(texts(20), alignment=8)
    for batch in loader:
        numbers = batch.get("_packed_seq_ids")
        if numbers is not None:
            starts = np.flatnonzero(np.diff(numbers[0].numpy(), prepend=0) > 0)
            assert all(start % 8 == 0 for start in starts)
    assert loader.cursor == len(loader)


def test_an_epoch_that_begins_again_in_the_same_folder_does_not_count_what_the_earlier_run_lost(tmp_path):
    rows = Breaking(texts(30), {3, 17})
    for rank in range(3):
        loader = load(rows, rank, 3, max_bad_share=None, ledger_dir=tmp_path)
        rows.counted = True
        delivered_rows(loader)
        rows.counted = False
    assert sum(len(Ledger.load(file)) for file in tmp_path.glob("rank-*.jsonl")) == 2
    rows.bad = set()
    loader = load(rows, ledger_dir=tmp_path)
    assert sum(len(Ledger.load(file)) for file in tmp_path.glob("rank-*.jsonl")) == 2  # nothing begun yet
    delivered_rows(loader)
    assert (loader.epoch_stats.delivered, loader.epoch_stats.reasons) == (30, {})
    assert sum(len(Ledger.load(file)) for file in tmp_path.glob("rank-*.jsonl")) == 0


# Settings.


def test_settings_come_from_a_yaml_file_and_data_are_found_next_to_it(meta):
    (meta.parent / "run.yaml").write_text("data: meta.json\npack_size: 300\nmax_bad_share: 0.1\n")
    config = LoaderConfig.from_yaml(meta.parent / "run.yaml")
    assert config.pack_size == 300
    loader = config.with_changes(mode="pad").build(processor("qwen2_vl"), world=World())
    assert len(delivered_rows(loader)) == 48


@pytest.mark.parametrize(
    ("setting", "value", "match"),
    [
        ("pack_siz", 3, "unknown setting"),
        ("mode", "stack", "expected one of 'pack', 'pad'"),
        ("batch_size", 0, "at least 1"),
        ("pack_size", "8k", "whole number"),
        ("num_workers", -1, "at least 0"),
        ("max_bad_share", 7, "share from 0 to 1"),
        ("seed", 1.5, "whole number"),
        ("num_workers", "4", "whole number"),
        ("timeout", -1, "above 0"),
        ("sample_timeout", "x", "a number"),
        ("pixel_dtype", "bf17", "torch dtype"),
        ("pack_size", 10, "too small for the placeholder"),
        ("dataset_names", ["coco"], "only for a meta file"),
    ],
)
def test_wrong_settings_are_rejected(setting, value, match):
    with raises_config(setting, match=match):
        load(mixed_rows(6), **{setting: value})


@pytest.mark.parametrize(("setting", "value"), [("alignment", 2), ("max_patches", 50)])
def test_settings_of_packs_are_rejected_with_padding(setting, value):
    with raises_config(setting, value, match="mode='pack'"):
        load(mixed_rows(6), mode="pad", **{setting: value})


def test_a_yaml_file_that_is_none_is_rejected(tmp_path):
    (tmp_path / "a.yaml").write_text("- just\n- a list\n")
    with raises_config(path=tmp_path / "a.yaml", match="found list"):
        LoaderConfig.from_yaml(tmp_path / "a.yaml")
    (tmp_path / "b.yaml").write_text("pack_size: 3\n")
    with raises_config("data"):
        LoaderConfig.from_yaml(tmp_path / "b.yaml")


def test_shards_need_a_process_group():
    with raises_config("shard_data", True, match=r"Initialise torch\.distributed"):
        load(texts(8), 0, 2, shard_data=True)
    assert sorted(delivered_rows(load(texts(8), shard_data=True))) == list(range(8))


# Metrics and messages.


def test_metrics_are_summed_and_go_to_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    loader = load(texts(30), pad_to_size=True)
    tokens = slots = 0
    for batch in loader:
        tokens += batch.info.tokens
        slots += batch.info.slots
    numbers = loader.metrics.numbers()
    assert numbers.fill == pytest.approx(tokens / slots)
    assert numbers.fill + numbers.padding == pytest.approx(1)
    assert 0 < numbers.wait <= 1
    assert numbers.samples == 30
    assert "fill" in loader.metrics.summary()
    with SummaryWriter(tmp_path) as writer:
        loader.metrics.log(writer, 3)
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    assert {"data/fill", "data/wait", "data/straggler"} <= set(board.Tags()["scalars"])
    assert [event.step for event in board.Scalars("data/fill")] == [3]
    assert board.Scalars("data/fill")[0].value == pytest.approx(numbers.fill)
    assert all(math.isfinite(event.value) for event in board.Scalars("data/tokens_per_second"))


def test_the_description_names_plan_steps_and_losses():
    text = load(long_and_short()).describe()
    assert "14 rows" in text
    assert "too_long, dropped: 1 of 14" in text
    assert "micro-steps" in text


def test_the_description_has_the_format_of_each_dataset_and_what_nothing_reads(tmp_path):
    turns = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Me."}]
    rows = [{"conversations": turns, "id": n} for n in range(3)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "story.json").write_text(
        json.dumps([{"instruction": "Go on.", "input": "", "output": "No."}])
    )
    entries = {"a": {"file_name": "chats.jsonl"}, "b": {"file_name": "story.json", "system": "Be brief."}}
    (tmp_path / "meta.json").write_text(json.dumps(entries))
    lines = load(tmp_path / "meta.json").describe().splitlines()
    assert lines[0] == (
        f"a ({tmp_path}/chats.jsonl): 3 rows, messages (messages=conversations); not used: id"
    )
    assert lines[1] == (
        f"b ({tmp_path}/story.json): 1 row, prompt_response (prompt=instruction, query=input, "
        "response=output); system='Be brief.'"
    )
    assert lines[2].startswith("4 rows, plan ")
    assert lines[2].partition(", mode ")[2].startswith("pack, epoch 0")
    (of_list, *_) = load(rows).describe().splitlines()
    assert of_list == "list: 3 rows, messages (messages=conversations); not used: id"
    (of_examples, *_) = load(texts(3)).describe().splitlines()
    assert of_examples == "list: 3 rows, examples"


def test_media_that_no_text_mentions_are_one_warning_with_the_setting_to_change(tmp_path, caplog):
    Image.new("RGB", (64, 64)).save(tmp_path / "1.png")
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]
    rows = [{"messages": turns, "images": [str(tmp_path / "1.png")]}] * 3
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for data in (rows, str(tmp_path / "a.jsonl")):
        name = "data" if data is rows else "a"
        advice = f"{name}: no text mentions the media of its row"
        caplog.clear()
        described = load(data).describe()
        assert [advice in record.message for record in caplog.records].count(True) == 1
        assert [line.startswith(advice) for line in described.splitlines()].count(True) == 1
        assert 'set media_position to "first"' in described
        caplog.clear()
        described = load(data, dataset_options={"media_position": "first"}).describe()
        assert "no text mentions" not in caplog.text + described


def test_the_end_of_an_epoch_is_logged(caplog):
    with caplog.at_level(logging.INFO, "packhorse.loader"):
        delivered_rows(load(texts(5)))
    assert "epoch 0: 5 rows, 5 in the plan, 5 delivered" in caplog.text


class Drawing(list):
    """Rows whose answer ends with numbers that are drawn when they are read; counted without."""

    armed = False

    def __getitem__(self, index):
        row = copy.deepcopy(super().__getitem__(index))
        if self.armed:
            drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
            row["conversation"][1]["content"][0]["text"] += f" {index}: {drawn}"
        return row


def drawn_by(loader, steps=None):
    """The numbers that were drawn for each sample, from the texts of the batches."""
    loader.dataset.armed = True
    drawn = {}
    for step, batch in enumerate(loader, 1):
        text = loader.processor.tokenizer.decode(batch["input_ids"].flatten())
        found = re.findall(r" (\d+): \[(0\.\S+, 0\.\S+, 0\.\S+)\]", text)
        assert len(found) == len(batch.info.samples)
        drawn |= {int(index): numbers for index, numbers in found}
        if step == steps:
            break
    loader.close()
    return drawn


def load_drawing(rank=0, size=1, **options):
    return load(Drawing(texts(20)), rank, size, pack_size=2048, max_documents=3, **options)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_feeding_draws_nothing_from_the_programs_random_numbers(num_workers):
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    loader = load_drawing(num_workers=num_workers)
    assert len(drawn_by(loader)) == 20
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


def test_random_numbers_of_a_sample_depend_on_seed_epoch_and_sample_alone():
    whole = drawn_by(load_drawing())
    assert len(whole) == len(set(whole.values())) == 20
    for num_workers in (1, 2):
        assert drawn_by(load_drawing(num_workers=num_workers)) == whole
    ranks = [drawn_by(load_drawing(rank, 2, batch_size=2)) for rank in (0, 1)]
    assert ranks[0] | ranks[1] == whole
    assert not set(ranks[0].values()) & set(ranks[1].values())
    assert not set(drawn_by(load_drawing(seed=1)).values()) & set(whole.values())
    next_epoch = load_drawing()
    next_epoch.set_epoch(1)
    assert not set(drawn_by(next_epoch).values()) & set(whole.values())


def test_random_numbers_after_a_resume_on_another_number_of_ranks_are_those_of_the_whole_run():
    whole = drawn_by(load_drawing(num_workers=1))
    begun = load_drawing(batch_size=2)
    drawn = drawn_by(begun, steps=2)
    state = begun.state_dict()
    assert 0 < len(drawn) < 20
    for rank in range(3):
        resumed = load_drawing(rank, 3)
        resumed.load_state_dict(state)
        rest = drawn_by(resumed)
        assert rest
        assert not rest.keys() & drawn.keys()
        drawn |= rest
    assert drawn == whole


@pytest.mark.parametrize("mode", ["pack", "pad"])
@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "llava_onevision", "smolvlm", "internvl"])
def test_media_can_be_cut_for_a_pipeline(mode, family):
    """Each chunk is what the samples of its rows have alone; which ones they are is read from the text."""
    from packhorse.encode.tokenized import PreTokenizedDatasetWrapper
    from packhorse.families import family_of
    from packhorse.pp_media import VLM_PP_MEDIA_KEY
    from packhorse.pp_media.documented import without_added_grid

    rows = [row for row in mixed_rows(24) if family != "gemma3" or "video" not in str(row)]
    settings = {"family": family, "mode": mode, "batch_size": 5, "pack_size": 900, "max_bad_share": None}
    alone = PreTokenizedDatasetWrapper(rows, processor(family), inject_fake_images=False, on_bad="raise")
    said = [re.search(r"so (\d+) ", str(row)).group(1) for row in rows]
    layout, compared = family_of(processor(family)).layout, Counter()
    for batch in load(rows, **settings, pipeline_microbatches=2):
        chunks = without_added_grid(batch.pop(VLM_PP_MEDIA_KEY, {}))
        assert not any(key in layout or key.startswith(("_media", "n_")) for key in batch)
        texts = [processor(family).tokenizer.decode(ids) for ids in batch["input_ids"]]
        held = [[said.index(number) for number in dict.fromkeys(re.findall(r"so (\d+) ", t))] for t in texts]
        for key, parts in chunks.items():
            filled = mode == "pad" and layout[key].owner == "sample"  # a row of zeros without a media item
            for share, part in zip(torch.tensor_split(torch.arange(len(held)), 2), parts, strict=True):
                own = [alone[index].get(key) for row in share for index in held[row]]
                own = [tensor for tensor in own if filled or tensor is not None]
                assert sum(1 if tensor is None else len(tensor) for tensor in own) == len(part), key
                place = 0
                for tensor in own:
                    entries = part[place : place + (1 if tensor is None else len(tensor))]
                    place += len(entries)
                    if tensor is not None:
                        inside = (slice(None), *(slice(0, side) for side in tensor.shape[1:]))
                        assert torch.equal(entries[inside], tensor), key
                        compared[key] += 1
    assert min(compared.values()) > 2
    assert "pixel_values" in compared


def test_the_time_to_build_a_batch_includes_its_pipeline_chunks(monkeypatch):
    from packhorse.loader import build as builders
    from packhorse.pp_media import prepare_vlm_media_for_pp

    def prepare_slowly(*arguments):
        time.sleep(0.3)
        return prepare_vlm_media_for_pp(*arguments)

    monkeypatch.setattr(builders, "prepare_vlm_media_for_pp", prepare_slowly)
    rows = [row for row in mixed_rows(8) if "video" not in str(row)]
    for batch in load(rows, mode="pad", batch_size=4, max_bad_share=None, pipeline_microbatches=2):
        assert batch.info.seconds >= 0.3


@pytest.mark.parametrize("number", [0, -1, True, 1.5, "2"])
def test_a_number_of_microbatches_that_is_none_is_rejected(number):
    with raises_config("pipeline_microbatches", number):
        LoaderConfig(data=[], pipeline_microbatches=number)


def test_images_that_truncation_cuts_off_do_not_overfill_a_pack():
    draw = __import__("random").Random(1)
    turns = []
    for _ in range(8):
        turns += chat("why " * 8, "so " * 8, image(draw))["conversation"]
    late = [
        {**chat("why " * 9, "so " * 9), "conversation": chat("why " * 9, "so " * 9)["conversation"] + turns}
    ]
    rows = late * 3 + [chat("why", "so", image(draw)) for _ in range(9)]
    for rank in range(2):
        loader = load(rows, rank, 2, on_overlong="truncate", pack_size=200, pad_to_size=True)
        assert all(batch["input_ids"].shape == (1, 200) for batch in loader)


def test_samples_longer_than_they_were_counted_get_a_row_of_their_own():
    rows = texts(30)
    counts = count_examples(rows, processor("qwen2_vl"))
    short = dataclasses.replace(
        counts, text=np.maximum(counts.text - 6, 2), exact=~counts.ok, off_by=np.full(30, -1)
    )
    loader = load(rows, pack_size=180, counts=short)
    assert sorted(delivered_rows(loader)) == list(range(30))
    assert not loader.ledger.lost()


def test_a_broken_first_row_does_not_stop_the_run():
    class Broken(list):
        def __getitem__(self, index):
            if index == 0:
                raise OSError("row 0 cannot be read")
            return super().__getitem__(index)

    loader = load(Broken(texts(30)), max_bad_share=0.1)
    assert sorted(delivered_rows(loader)) == list(range(1, 30))


def test_the_reasons_of_epoch_stats_are_those_of_their_epoch(tmp_path):
    rows = Breaking(texts(30), {3})
    loader = load(rows, max_bad_share=0.1, ledger_dir=tmp_path)
    rows.counted = True
    for epoch in range(3):
        delivered_rows(loader)
        assert (loader.epoch_stats.epoch, loader.epoch_stats.reasons) == (epoch, {"sample_failed": 1})


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_reconciles_whatever_was_recorded_after_its_state(tmp_path, ranks):
    """Rows fail before and after the state; one of them is mended before the run goes on with one rank."""
    rows = Breaking(texts(40), set())
    settings = {"max_bad_share": None, "ledger_dir": tmp_path, "mode": "pad"}
    loaders = [load(rows, rank, ranks, **settings) for rank in range(ranks)]
    order = [
        [loader._current.schedule.samples(step, rank)[0][0] for step in range(6)]
        for rank, loader in enumerate(loaders)
    ]
    early, mended, late = order[-1][0], order[-1][4], order[-1][5]
    rows.counted, rows.bad = True, {early, mended, late}
    before, state = [], None
    for loader in loaders:
        for step, batch in enumerate(loader, 1):
            if step <= 3:
                before += batch.info.samples
            if step == 3:
                state = loader.state_dict()
            if step == 6:
                break
    rows.counted = False
    again = load(rows, **settings)
    again.load_state_dict(state)
    rows.counted, rows.bad = True, {early, late}
    after = delivered_rows(again)

    assert sorted(before + after) == [n for n in range(40) if n not in (early, late)]
    stats = again.epoch_stats
    assert (stats.delivered, stats.lost, stats.dropped) == (38, 2, 0)
    assert stats.reasons == {"sample_failed": 2}
    from packhorse.ledger import read_ledgers

    names = {drop.key for drop in read_ledgers(tmp_path)[0]}
    assert names == {str(early), str(late)}


def test_a_run_of_one_rank_that_goes_on_without_a_ledger_folder_knows_what_it_delivered_before():
    rows = Breaking(texts(20), {3})
    loader = load(rows, mode="pad", max_bad_share=0.1)
    rows.counted = True
    delivered_rows(loader, 15)
    state = loader.state_dict(consumed=12)
    rows.counted = False
    again = load(rows, mode="pad", max_bad_share=0.1)
    rows.counted = True
    again.load_state_dict(state)
    delivered_rows(again)
    assert (again.epoch_stats.delivered, again.epoch_stats.lost) == (19, 1)


def test_a_bad_row_stops_the_run_with_on_bad_raise(meta):
    with raises_bad_sample("missing_media", key="images/7", stage="plan", match="retry-bad"):
        load(meta, on_bad="raise", pack_size=300)


def test_the_plan_says_that_bad_rows_failed(meta):
    loader = load(meta, max_bad_share=0.1, pack_size=300)
    assert set(loader.plan.dropped_by_reason()) == {"sample_failed"}


def test_losses_before_a_restart_count(tmp_path):
    rows = Breaking(texts(60), set())
    settings = {"max_bad_share": 0.05, "ledger_dir": tmp_path, "mode": "pad"}
    loader = load(rows, **settings)
    order = [loader._current.schedule.samples(step, 0)[0][0] for step in range(60)]
    rows.counted, rows.bad = True, {order[1], order[2], order[30], order[31]}
    delivered_rows(loader, 10)
    rows.counted = False
    again = load(rows, **settings)
    again.load_state_dict(loader.state_dict())
    rows.counted = True
    with pytest.raises(TooManyBad):
        delivered_rows(again)


@pytest.mark.parametrize("how", ["earlier state", "damage"])
def test_entries_from_before_a_state_are_restored_when_the_ledger_has_lost_them(tmp_path, how):
    rows = Breaking(texts(30), set())
    loader = load(rows, max_bad_share=0.1, ledger_dir=tmp_path)
    rows.counted, rows.bad = True, {loader._current.schedule.samples(0, 0)[0][0]}
    beginning = loader.state_dict()
    delivered_rows(loader, 2)
    state, file = loader.state_dict(), tmp_path / "rank-00000.jsonl"
    entries = set(Ledger.load(file))
    assert len(entries) == 1
    rows.counted = False
    if how == "damage":
        file.write_text("")
    else:
        load(rows, max_bad_share=0.1, ledger_dir=tmp_path).load_state_dict(beginning)
        assert not len(Ledger.load(file))
    load(rows, max_bad_share=0.1, ledger_dir=tmp_path).load_state_dict(state)
    assert set(Ledger.load(file)) == entries


def test_many_ranks_do_not_stop_for_what_chance_assigns_to_one_of_them():
    from packhorse.loader.epoch_stats import BadSampleBudget
    from packhorse.types import BatchInfo

    budget = BadSampleBudget(1_000_000, 0, 1024, 0.01, None, Ledger())
    for step in range(30):  # three times its share
        budget.update(BatchInfo(0, step, (), (step,), (False,)))
    more = tuple(range(30, 60))
    with pytest.raises(TooManyBad, match="on this rank"):
        budget.update(BatchInfo(0, 30, (), more, (False,) * len(more)))


def test_datasets_of_the_same_lengths_have_plans_of_different_names():
    one = [chat(f"why {n:03}", "so") for n in range(20)]
    other = [chat(f"who {n:03}", "so") for n in range(20)]
    assert load(one).plan_key == load(list(one)).plan_key
    assert load(one).plan_key != load(other).plan_key


def test_an_opened_mixture_is_data_too(meta):
    dataset = packhorse.open_meta_dataset(str(meta))
    assert len(delivered_rows(load(dataset, max_bad_share=0.1, pack_size=300))) == 48


def test_a_dataset_with_splits_is_rejected_with_advice():
    import datasets

    rows = datasets.DatasetDict({"train": datasets.Dataset.from_list(texts(2))})
    with raises_config("data", ["train"], match=r"data\['train'\]"):
        load(rows)


def test_plans_of_large_datasets_are_saved_and_a_damaged_one_is_replanned(tmp_path, monkeypatch):
    from packhorse.loader import planner as plans

    monkeypatch.setattr(plans, "_CACHED_FROM", 10)
    rows = texts(30)
    first = load(rows, cache_dir=tmp_path)
    (path,) = tmp_path.glob("*.phplan")
    again = load(rows, cache_dir=tmp_path)
    assert again.plan.bins() == first.plan.bins()
    path.write_bytes(path.read_bytes()[:-20])
    assert load(rows, cache_dir=tmp_path).plan.bins() == first.plan.bins()
