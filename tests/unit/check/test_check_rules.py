"""What the linter finds, on real files with a real processor."""

import copy
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from planted import MAX_LENGTH, image_row, make_image, text_row, turns, write_clean, write_planted

from contract.processors import build, processor
from count_samples import write_meta, write_rows
from packhorse.tools.check import RULES, CheckReport, check_meta
from packhorse.utils.pool import LocalEngine
from raising import raises_config


def by_row(report: CheckReport) -> dict[int | None, set[str]]:
    found: dict[int | None, set[str]] = defaultdict(set)
    for finding in report.findings():
        found[finding.row].add(finding.rule)
    return dict(found)


def mixture(folder: Path, rows: list[Any], **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "media").mkdir(exist_ok=True)
    write_rows(folder / "rows.jsonl", rows)
    return write_meta(folder, {"rows": {"file_name": "rows.jsonl", "media_dir": "media", **settings}})


def test_every_planted_defect_is_found_and_nothing_else(tmp_path: Path) -> None:
    meta, planted = write_planted(tmp_path)
    report = check_meta(meta, processor("qwen2_vl"), max_length=MAX_LENGTH)
    assert len(planted.lines) == 200
    assert by_row(report) == planted.expected
    assert not report.passed()
    assert report.skipped_rules() == {}
    rules = {rule for rules in planted.expected.values() for rule in rules}
    assert len(rules) >= 20
    found = list(report.findings())
    assert sum(report.counts().values()) == len(found)
    assert [one.row for one in found] == sorted(one.row or 0 for one in found)
    for one in found:
        assert one.key == f"mixed/{one.row}"
        assert one.line == (one.row or 0) + 1
        assert one.location.startswith(f"{tmp_path}/mixed.jsonl:{one.line} (byte ")
        assert one.found
        assert one.advice == RULES[one.rule].advice


def test_a_clean_set_gives_no_finding(tmp_path: Path) -> None:
    report = check_meta(write_clean(tmp_path, 60), processor("qwen2_vl"), max_length=MAX_LENGTH)
    assert list(report.findings()) == []
    assert report.passed(strict=True)
    assert report.as_dict()["rows"] == 60
    assert report.as_dict()["media"] == 20


@pytest.mark.parametrize("name", ["gemma3", "llava_onevision", "phi4_mm", "smolvlm"])
def test_a_clean_set_is_clean_for_other_families_too(tmp_path: Path, name: str) -> None:
    assert check_meta(write_clean(tmp_path, 9), processor(name)).passed(strict=True)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_few_rows_are_checked_like_many(tmp_path: Path, rows: int) -> None:
    report = check_meta(mixture(tmp_path, [text_row(n) for n in range(rows)]), processor("qwen2_vl"))
    assert report.passed(strict=True)
    assert report.as_dict()["rows"] == rows


def test_two_processes_find_what_one_finds_in_the_same_order(tmp_path: Path) -> None:
    meta, _ = write_planted(tmp_path)
    one = check_meta(meta, part_rows=7)
    two = check_meta(meta, part_rows=16, engine=LocalEngine(2, multiprocessing_context="fork"))
    assert list(one.findings()) == list(two.findings())
    assert one.counts() == two.counts()


def test_without_a_processor_its_rules_are_skipped_and_named(tmp_path: Path) -> None:
    meta, planted = write_planted(tmp_path)
    report = check_meta(meta)
    needed = {name for name, rule in RULES.items() if rule.needs in ("processor", "max_length")}
    assert set(report.skipped_rules()) == needed
    expected = {row: rules - needed for row, rules in planted.expected.items() if rules - needed}
    assert by_row(report) == expected


def test_headers_alone_show_what_is_missing_but_not_what_is_cut_off(tmp_path: Path) -> None:
    meta, _ = write_planted(tmp_path)
    rules = {rule for found in by_row(check_meta(meta, decode=False)).values() for rule in found}
    assert "missing_media" in rules
    assert "tiny_image" in rules
    assert not {"broken_media", "duplicate_image"} & rules
    assert "duplicate_image" in check_meta(meta, decode=False).skipped_rules()


def test_the_shape_that_a_processor_rejects_is_an_error_that_names_its_family(tmp_path: Path) -> None:
    meta = mixture(tmp_path, [image_row(0, "line.png")])
    make_image(tmp_path / "media" / "line.png", 0, (4200, 20))
    (alone,) = check_meta(meta).findings()
    assert (alone.rule, alone.severity) == ("extreme_aspect_ratio", "warning")
    assert "4,200 x 20, sides of 1 to 210" in alone.found
    (rejected,) = check_meta(meta, processor("qwen2_vl")).findings()
    assert (rejected.rule, rejected.severity) == ("extreme_aspect_ratio", "error")
    assert "Qwen2VLProcessor (family qwen2_vl) rejects it" in rejected.found
    assert list(check_meta(meta, processor("gemma3")).findings()) == []  # which squeezes any shape


def test_tokens_that_are_meant_to_be_typed_are_no_special_tokens(tmp_path: Path) -> None:
    from tokenizers import AddedToken

    own = build("qwen2_vl")
    own.tokenizer = copy.deepcopy(own.tokenizer)  # processors of one family share theirs
    own.tokenizer.add_tokens([AddedToken("<think>", special=False)])
    rows = [{"messages": turns("Why?", "<think>Hm.")}, {"messages": turns("<|im_end|>", "No")}]
    report = check_meta(mixture(tmp_path, rows), own)
    assert by_row(report) == {1: {"special_token_in_text"}}


def test_reasoning_that_the_chat_template_does_not_write_is_a_shortened_answer(tmp_path: Path) -> None:
    question, answer = turns("1 + 1?", "Two.")
    meta = mixture(tmp_path, [{"messages": [question, {**answer, "reasoning_content": "Add them."}]}])
    (finding,) = check_meta(meta, processor("qwen2_vl")).findings()
    assert (finding.rule, finding.severity) == ("answer_shortened", "warning")
    assert "drops 9 characters of the answer in turn 1" in finding.found
    assert finding.advice.startswith("the chat template does not write reasoning_content: write <think>")
    writes = build("qwen2_vl")
    writes.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.get('reasoning_content', '') }}"
        "{{ m.content[0].text + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    assert list(check_meta(meta, writes).findings()) == []


def test_reasoning_that_the_chat_template_writes_in_the_last_answer_is_to_be_moved_there(
    tmp_path: Path,
) -> None:
    question, answer = turns("1 + 1?", "Two.")
    reasoned = {**answer, "reasoning_content": "Add them."}
    writes_last = build("qwen2_vl")
    writes_last.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if loop.last %}{{ m.get('reasoning_content', '') }}{% endif %}"
        "{{ m.content[0].text + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    rows = [{"messages": [question, reasoned, question, answer]}]
    (finding,) = check_meta(mixture(tmp_path, rows), writes_last).findings()
    assert finding.rule == "answer_shortened"
    assert finding.advice.startswith("move the reasoning to the last answer")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": turns("1 + 1?", "Two."), "weight": "high"},
        {"messages": turns("1 + 1?", "Two."), "tools": "[{no JSON"},
        {"messages": [turns("1 + 1?", "Two.")[0], {**turns("1 + 1?", "Two.")[1], "loss": "no"}]},
        {"messages": json.dumps(turns("1 + 1?", "Two.")), "weight": -1},
        {"instruction": "1 + 1?", "output": "Two.", "weight": -1},
    ],
    ids=["weight", "tools", "loss", "turns as JSON", "prompt and response"],
)
def test_a_wrong_value_is_to_be_corrected_in_its_row(row: dict[str, Any], tmp_path: Path) -> None:
    (finding,) = check_meta(mixture(tmp_path, [row])).findings()
    assert (finding.rule, finding.advice) == ("wrong_format", "correct the row as the finding says")


@pytest.mark.parametrize(
    "row",
    [
        {"said": "Hm."},
        {"messages": [{"role": "user"}]},
        {"messages": {"user": "Hm."}},
        {"messages": [{"by": "user"}]},
    ],
    ids=["no column", "no content", "no list", "no role"],
)
def test_a_row_of_other_names_is_for_columns_and_tags(row: dict[str, Any], tmp_path: Path) -> None:
    (finding,) = check_meta(mixture(tmp_path, [row])).findings()
    assert (finding.rule, finding.advice) == ("wrong_format", RULES["wrong_format"].advice)


def test_a_pair_of_equal_answers_is_warned_about(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1 + 1?", "chosen": "Two.", "rejected": "Two."},
        {"prompt": "1 + 2?", "chosen": "Three.", "rejected": "Two."},
        {"prompt": "1 + 3?", "chosen": "Four."},
    ]
    equal, incomplete = check_meta(mixture(tmp_path, rows), task="preference").findings()
    assert (equal.row, equal.rule, equal.severity) == (0, "equal_answers", "warning")
    assert (incomplete.row, incomplete.rule) == (2, "wrong_format")
    assert incomplete.advice == "correct the row as the finding says"


def test_fields_of_turns_and_parts_that_nothing_reads_are_noted_once(tmp_path: Path) -> None:
    question, answer = turns("1 + 1?", "Two.")
    typed = {**question, "content": [{"type": "text", "text": "1 + 1?", "language": "en"}]}
    meta = mixture(tmp_path, [{"messages": [one, {**answer, "score": 3}]} for one in (question, typed)])
    report = check_meta(meta, ignore=["duplicate_conversation"])
    (finding,) = report.findings()
    assert (finding.rule, finding.severity, finding.row) == ("unused_field", "note", None)
    assert finding.found == "not used: messages[].content[].language, messages[].score"


def test_rows_that_the_chat_template_rejects_are_found(tmp_path: Path) -> None:
    strict = build("qwen2_vl")
    condition = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    strict.chat_template = condition + strict.chat_template
    rows = [{"messages": [{"role": "system", "content": "Be brief."}, *turns("Who?", "Me.")]}, text_row(1)]
    (finding,) = check_meta(mixture(tmp_path, rows), strict).findings()
    assert (finding.row, finding.rule) == (0, "sample_failed")
    assert "no system turns" in finding.found


def test_a_row_of_which_nothing_is_supervised_is_found(tmp_path: Path) -> None:
    plain = build("qwen2_vl")
    # A template without an end of turn: an empty answer is nothing at all.
    plain.chat_template = (
        "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p.text }}{% endfor %}\n{% endfor %}"
    )
    rows = [text_row(1), {"messages": turns("Say nothing.", "")}, {"messages": turns("Hm?", "")[:1]}]
    report = check_meta(mixture(tmp_path, rows), plain, ignore=["no_assistant_turn"])
    assert by_row(report) == {1: {"empty_turn", "nothing_supervised"}, 2: {"nothing_supervised"}}


def test_an_image_used_again_is_no_copy_but_another_name_or_dataset_is(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        make_image(tmp_path / "media" / name, 5)
    make_image(tmp_path / "media" / "c.png", 6)
    write_rows(tmp_path / "one.jsonl", [image_row(n, "a.png") for n in range(3)] + [image_row(9, "c.png")])
    write_rows(
        tmp_path / "two.jsonl",
        [image_row(n, name) for n, name in ((4, "b.png"), (5, "b.png"), (6, "c.png"))],
    )
    entry = {"media_dir": "media"}
    meta = write_meta(tmp_path, {name: {"file_name": f"{name}.jsonl", **entry} for name in ("one", "two")})
    found = [(one.key, one.rule, one.found) for one in check_meta(meta).findings()]
    assert found == [
        ("two/0", "duplicate_image", "media item 0 is, byte for byte, media item 0 of one/0"),
        ("two/2", "duplicate_image", "media item 0 is, byte for byte, media item 0 of one/3"),
    ]


def test_the_same_question_to_another_image_is_no_duplicate(tmp_path: Path) -> None:
    for number in (1, 2):
        make_image(tmp_path / "media" / f"{number}.png", number)
    rows = [{**image_row(0), "images": [f"{number}.png"]} for number in (1, 2, 1)]
    assert by_row(check_meta(mixture(tmp_path, rows))) == {2: {"duplicate_conversation"}}


def test_duplicates_are_found_across_datasets_and_parts(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [text_row(n) for n in range(50)])
    write_rows(tmp_path / "b.jsonl", [text_row(n) for n in range(45, 60)])
    meta = write_meta(tmp_path, {name: {"file_name": f"{name}.jsonl"} for name in "ab"})
    found = [(one.key, one.found) for one in check_meta(meta, part_rows=4).findings()]
    assert found == [(f"b/{n}", f"the same as a/{45 + n}") for n in range(5)]


def test_a_row_with_an_error_is_nobodys_original(tmp_path: Path) -> None:
    bad = image_row(1, "gone.png")
    assert by_row(check_meta(mixture(tmp_path, [bad, bad]))) == {0: {"missing_media"}, 1: {"missing_media"}}


def test_media_outside_the_folder_are_errors_where_the_dataset_is_confined(tmp_path: Path) -> None:
    make_image(tmp_path / "elsewhere.png", 1)
    rows = [image_row(1, str(tmp_path / "elsewhere.png")), image_row(2, "link.png")]
    meta = mixture(tmp_path, rows, confine=True)
    os.symlink(tmp_path / "elsewhere.png", tmp_path / "media" / "link.png")
    found = [(one.rule, one.severity) for one in check_meta(meta, ignore=["duplicate_image"]).findings()]
    assert found == [("outside_media_dir", "error")] * 2


def test_a_data_file_that_cannot_be_read_is_a_finding_and_the_others_are_checked(tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text('[{"messages": [')
    write_rows(tmp_path / "good.jsonl", [text_row(1), {"messages": []}])
    names = {"cut": "cut.json", "gone": "gone.jsonl", "good": "good.jsonl"}
    meta = write_meta(tmp_path, {name: {"file_name": file} for name, file in names.items()})
    report = check_meta(meta)
    found = [(one.key, one.rule, one.row) for one in report.findings()]
    assert found == [
        ("cut", "unreadable_file", None),
        ("gone", "unreadable_file", None),
        ("good/1", "empty_conversation", 1),
    ]
    assert report.counts()["error"] == 3


def test_rows_of_arrays_of_compressed_files_and_between_empty_lines_are_located(tmp_path: Path) -> None:
    import gzip

    rows = [text_row(1), {"messages": []}]
    (tmp_path / "array.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "gaps.jsonl").write_text("\n\n" + "\n\n".join(map(json.dumps, rows)) + "\n")
    with gzip.open(tmp_path / "packed.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps({**row, "n": 1}) + "\n" for row in rows))
    names = {"array": "array.json", "gaps": "gaps.jsonl", "packed": "packed.jsonl.gz"}
    meta = write_meta(tmp_path, {name: {"file_name": file} for name, file in names.items()})
    found = check_meta(meta, ignore=["duplicate_conversation"]).findings()
    places = {one.dataset: (one.line, one.location) for one in found}
    assert places["array"][0] is None
    assert "array.json, element 1" in places["array"][1]
    assert places["gaps"][0] == 5
    assert places["packed"][0] == 2


def test_images_in_a_parquet_file_are_decoded(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    good = make_image(tmp_path / "good.png", 1).read_bytes()
    rows = [
        {"messages": turns(f"<image>What is {n}?", "Dots."), "images": [{"bytes": data, "path": None}]}
        for n, data in enumerate((good, good[:150], good))
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    meta = write_meta(tmp_path, {"rows": {"file_name": "rows.parquet"}})
    (finding,) = check_meta(meta, processor("qwen2_vl")).findings()
    assert (finding.key, finding.rule, finding.line) == ("rows/1", "broken_media", None)
    assert finding.location.endswith("rows.parquet, row 1")


def test_a_cut_off_video_is_found_and_a_whole_one_is_not(tmp_path: Path) -> None:
    from demo_data import write_demo_data

    meta = write_demo_data(tmp_path)
    clip = tmp_path / "media" / "clip1.mp4"
    clip.write_bytes(clip.read_bytes()[: clip.stat().st_size // 2])
    found = check_meta(meta, dataset_names=["clips"], ignore=["duplicate_conversation"]).findings()
    assert [(one.key, one.rule) for one in found] == [("clips/1", "broken_media")]


def test_a_rule_can_be_ignored_and_an_unknown_one_is_rejected(tmp_path: Path) -> None:
    meta = mixture(tmp_path, [{"messages": []}, text_row(1), text_row(1)])
    report = check_meta(meta, ignore=["empty_conversation", "duplicate_conversation"])
    assert list(report.findings()) == []
    assert report.skipped_rules()["empty_conversation"] == "ignored"
    with raises_config("ignore", ["empty"], match=r"\(did you mean 'empty_turn'\?\); there are"):
        check_meta(meta, ignore=["empty"])
    with raises_config("max_length", 5):
        check_meta(meta, max_length=5)
    with raises_config("part_rows", 0):
        check_meta(meta, part_rows=0)
    with raises_config(match="it lists no dataset"):
        check_meta({})


def test_two_datasets_of_one_file_are_noted(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [text_row(1)])
    meta = write_meta(tmp_path, {name: {"file_name": "rows.jsonl"} for name in "ab"})
    found = [(one.key, one.rule) for one in check_meta(meta).findings()]
    assert found == [("b", "same_file"), ("b/0", "duplicate_conversation")]


def test_a_check_changes_nothing_on_disk(tmp_path: Path) -> None:
    meta, _ = write_planted(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    check_meta(meta)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
