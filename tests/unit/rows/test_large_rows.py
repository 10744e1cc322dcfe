"""Rows that are far too large are rejected by their size, before they cost minutes."""

import json
from pathlib import Path
from typing import Any

import pytest

import packhorse
from contract.processors import processor
from count_samples import chat, save_processor, write_meta
from packhorse import LoaderConfig, World
from packhorse.count.counting import count_meta
from packhorse.datasets import convert_sharegpt_to_conversation, open_rows
from packhorse.errors import BadSample
from packhorse.formats.conversation import parse_conversation
from packhorse.tools.check import check_meta
from packhorse.tools.view.plan_report import plan_report
from packhorse.tools.view.plan_viewer import PlanViewer
from packhorse.tools.view.saved_plan import PlanRequest, make_plan, save_plan
from packhorse.tools.view.server import make_app
from raising import raises_bad_sample, raises_config
from view_samples import ask


def row(words: int) -> dict[str, Any]:
    turns = [{"role": "user", "content": "word " * words}, {"role": "assistant", "content": "ok"}]
    return {"messages": turns}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_row_above_the_limit_is_rejected_with_its_size_and_place_and_never_parsed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACKHORSE_MAX_ROW_BYTES", "1000")
    cut = json.dumps(row(300))[:-20]
    texts = [json.dumps(chat(1)), json.dumps(row(300)), json.dumps(chat(2)), json.dumps(chat(3))]
    if name == "a.json":
        (tmp_path / name).write_text("[" + ",\n".join(texts) + "]")
    else:
        (tmp_path / name).write_text("\n".join([*texts, cut]) + "\n")
    rows = open_rows(str(tmp_path / name))
    found = list(rows.read(range(len(rows))))
    assert [found[0], found[2], found[3]] == [chat(1), chat(2), chat(3)]
    for number in range(1, len(rows), 3):
        error = found[number]
        assert isinstance(error, BadSample)
        assert error.reason == "row_too_large"
        assert rows.location(number) in error.detail
        assert "bytes, more than the limit of 1,000" in error.detail
        with raises_bad_sample("row_too_large", match="more than the limit of 1,000"):
            rows[number]


def test_the_text_of_a_conversation_has_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKHORSE_MAX_TEXT_CHARS", "1000")
    parts = [{"type": "text", "text": "a" * 600}, {"type": "text", "text": "b" * 600}]
    words = "1,200 characters of text, more than the limit of 1,000"
    with raises_bad_sample("row_too_large", key="coco/1", match=words):
        parse_conversation({"conversation": [{"role": "user", "content": parts}]}, "coco/1")
    with raises_bad_sample("row_too_large", match="1,500,000 characters of text"):
        convert_sharegpt_to_conversation(row(300_000))
    assert parse_conversation({"conversation": [{"role": "user", "content": "a" * 1000}]}).messages


def test_a_limit_that_is_no_number_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("many", "0", "-1", "9" * 5000):
        monkeypatch.setenv("PACKHORSE_MAX_TEXT_CHARS", value)
        with raises_config("PACKHORSE_MAX_TEXT_CHARS", value):
            parse_conversation({"conversation": []})


def test_rows_of_a_hundred_megabytes_are_in_the_ledger_and_the_others_are_delivered(tmp_path: Path) -> None:
    words = 100_000_000 // 5
    huge = json.dumps(row(words))
    with (tmp_path / "a.jsonl").open("w") as file:
        for text in (json.dumps(chat(1)), huge, huge[:-40], json.dumps(row(words // 2)), json.dumps(chat(2))):
            file.write(text + "\n")
    meta = write_meta(tmp_path, {"a": {"file_name": "a.jsonl"}})
    report = count_meta(meta, processor("qwen2_vl"))
    assert report.datasets[0].bad == {"row_too_large": 3}
    loader = packhorse.load(
        str(meta),
        processor("qwen2_vl"),
        model="unchecked",
        world=World(),
        pack_size=256,
        max_bad_share=None,
    )
    found = {drop.key: drop.reason for drop in loader.ledger}
    assert found == dict.fromkeys(("a/1", "a/2", "a/3"), "row_too_large")
    delivered = [index for batch in loader for index in batch.info.samples]
    assert sorted(delivered) == [0, 4]
    assert check_meta(meta).files[0].counts == {("row_too_large", "error"): 3}
    planned = make_plan(
        PlanRequest(LoaderConfig(data=str(meta), pack_size=256), save_processor(tmp_path / "p"))
    )
    save_plan(planned, plan_report(planned), tmp_path / "made.phplan")
    app = make_app(PlanViewer.open(str(tmp_path / "made.phplan")))
    page = ask(app, "/row/1")
    assert page.status == 200
    assert len(page.body) < 1_000_000
