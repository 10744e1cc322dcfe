"""``packhorse convert`` as a user types it."""

import base64
import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from count_samples import write_chats, write_rows
from packhorse.cli.app import app
from packhorse.count.counting import count_meta
from packhorse.formats.meta import open_meta_dataset
from packhorse.ledger import Ledger
from packhorse.tools.to_jsonl import write_jsonl
from raising import raises_config
from row_files import WRITERS, write_parquet

QUESTION, ANSWER = "What is it?", "A bar chart."


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def png(colour: str = "tan", size: tuple[int, int] = (60, 40)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


def from_value(question: str = QUESTION) -> list[dict[str, Any]]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": ANSWER}]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_rows_become_messages_and_columns_and_the_rest_is_in_the_ledger(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "1.png").write_bytes(png())
    rows: list[Any] = [
        {"conversations": from_value("<image>\n" + QUESTION), "image": "images/1.png", "id": 7},
        {"conversations": [{"from": "system", "value": "Be brief."}, *from_value()], "weight": 0.5},
        "{no JSON",
        {"conversations": [*from_value(), {"from": "stranger", "value": "Hm."}]},
        {"conversations": from_value(" <image> as a word"), "source": "web"},
    ]
    write_rows(tmp_path / "llava.jsonl", rows)
    result = run(tmp_path / "llava.jsonl", tmp_path / "out.jsonl")
    assert result.exit_code == 1, result.output
    image, weighted, cut, word = lines(tmp_path / "out.jsonl")
    answer = {"role": "assistant", "content": ANSWER}
    assert image == {
        "messages": [{"role": "user", "content": f"<image>{QUESTION}"}, answer],
        "images": ["images/1.png"],
    }
    assert weighted["messages"][0] == {"role": "system", "content": "Be brief."}
    assert weighted["weight"] == 0.5
    assert cut["messages"] == [{"role": "user", "content": QUESTION}, answer]
    assert word["messages"][0]["content"] == "as a word"  # the row has no image for its marker
    ledger = Ledger.load(tmp_path / "out.ledger.jsonl")
    assert [(drop.key, drop.reason, drop.action, re.split("[:,]", drop.detail)[0]) for drop in ledger] == [
        ("llava", "unused_field", "kept", "not used"),
        ("llava/2", "malformed_row", "dropped", f"{tmp_path}/llava.jsonl"),
        ("llava/3", "unknown_role", "cut", "turn 2 has role 'stranger'"),
        ("llava/4", "surplus_placeholder", "cut", "turn 0 has 1 more <image> than the row has images"),
    ]
    assert "llava: messages (messages=conversations, images=image, weight)\n" in result.stdout
    assert "llava: 1 malformed_row\n" in result.stdout
    assert f"wrote {tmp_path}/out.jsonl (4 rows)\n" in result.stdout
    assert f"{tmp_path}/out.ledger.jsonl lists what was dropped or changed\n" in result.stdout


def test_only_a_ledger_with_entries_is_named(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"conversations": from_value()}])
    result = run(tmp_path / "rows.jsonl", tmp_path / "out.jsonl")
    assert result.exit_code == 0, result.output
    assert "dropped or changed" not in result.stdout


def test_media_that_no_text_mentions_have_the_advice_of_check(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(png())
    write_rows(tmp_path / "rows.jsonl", [{"conversations": from_value(), "image": "1.png"}])
    result = run(tmp_path / "rows.jsonl", tmp_path / "out.jsonl")
    assert "rows: no text mentions the media of its row" in " ".join(result.stdout.split())
    assert 'set media_position to "first"' in " ".join(result.stdout.split())


@pytest.mark.parametrize("form", WRITERS)
def test_every_file_type_is_converted(form: str, tmp_path: Path) -> None:
    rows = [{"instruction": f"Count to {n}.", "input": "", "output": "1, " * n} for n in range(1, 40)]
    source = WRITERS[form](tmp_path, rows)
    result = run(source, tmp_path / "out.jsonl", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    assert (report["rows"], report["written"], report["dropped"], report["media_files"]) == (39, 39, 0, 0)
    assert report["datasets"][0]["format"] == ["prompt_response"]
    assert report["options"] == {}
    assert list(open_meta_dataset(str(tmp_path / "out.jsonl"))) == list(open_meta_dataset(source))
    assert os.path.getsize(report["ledger"]) == 0


def test_bytes_become_files_once_per_content_and_counts_and_labels_stay(tmp_path: Path, qwen: Any) -> None:
    images = [png("red"), png("blue", (200, 90)), png("red")]
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"<image>{QUESTION}"},
                {"role": "assistant", "content": ANSWER * n},
            ],
            "images": [{"bytes": image, "path": None}],
        }
        for n, image in enumerate(images, 1)
    ]
    encoded = base64.b64encode(images[1]).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
    turns = [{"role": "user", "content": [part]}, {"role": "assistant", "content": ANSWER}]
    write_parquet(tmp_path, rows)
    write_rows(tmp_path / "openai.jsonl", [{"messages": turns}])
    entries = {"a": {"file_name": "rows.parquet"}, "b": {"file_name": "openai.jsonl"}}
    (tmp_path / "meta.json").write_text(json.dumps(entries))
    out = tmp_path / "new"
    out.mkdir()
    result = run(tmp_path / "meta.json", out / "train.jsonl")
    assert result.exit_code == 0, result.output
    assert "wrote " in result.stdout
    assert "(4 rows), 2 media files\n" in result.stdout
    assert names(out) == ["media", "train.jsonl", "train.ledger.jsonl"]
    written = [Path(row["images"][0]) for row in lines(out / "train.jsonl")]
    assert [(out / path).read_bytes() for path in written] == [*images, images[1]]
    assert len(names(out / "media")) == 2
    assert all(path.suffix == ".png" and path.parent == Path("media") for path in written)
    before, after = count_meta(str(tmp_path / "meta.json"), qwen), count_meta(str(out / "train.jsonl"), qwen)
    totals = [report.totals() for report in (before, after)]
    for name in ("rows", "tokens", "supervised", "media"):
        assert totals[0][name] == totals[1][name]
    again = run(tmp_path / "meta.json", out / "train.jsonl", "--overwrite", "--json")
    assert json.loads(again.stdout)["media_files"] == 0  # they are there


def test_paths_are_relative_to_the_media_folder_where_possible(tmp_path: Path) -> None:
    (tmp_path / "data" / "images").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    images = ["images/1.png", str(tmp_path / "other" / "2.png"), "../other/3.png", "s3://bucket/4.png"]
    row = {"messages": [{"role": "user", "content": "<image>" * 4}, {"role": "assistant", "content": ANSWER}]}
    write_rows(tmp_path / "data" / "rows.jsonl", [{**row, "images": images}])
    for options, expected in (
        ([], ["images/1.png", images[1], f"{tmp_path}/data/../other/3.png", images[3]]),
        (
            ["--media-dir", tmp_path / "data" / "images"],
            ["1.png", images[1], f"{tmp_path}/data/../other/3.png", images[3]],
        ),
        (
            ["--media-dir", tmp_path],
            ["data/images/1.png", "other/2.png", f"{tmp_path}/data/../other/3.png", images[3]],
        ),
    ):
        out = tmp_path / "data" / "out.jsonl"
        result = run(tmp_path / "data" / "rows.jsonl", out, "--overwrite", "--json", *options)
        assert result.exit_code == 0, result.output
        assert lines(out)[0]["images"] == expected
        read_as = json.loads(result.stdout)["options"]
        assert read_as == ({"media_dir": str(options[1])} if options else {})
        (example,) = open_meta_dataset(
            {"a": {"file_name": str(out), "media_dir": str(out.parent), **read_as}}
        )
        assert example == open_meta_dataset(str(tmp_path / "data" / "rows.jsonl"))[0]


def test_a_dataset_of_llama_factory_is_converted_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "stories.json").write_text(json.dumps([{"instruction": QUESTION, "output": ANSWER}]))
    info = {"stories": {"file_name": "stories.json"}, "elsewhere": {"hf_hub_url": "someone/data"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    result = run(tmp_path / "dataset_info.json", tmp_path / "out.jsonl", "--dataset", "stories")
    assert result.exit_code == 0, result.output
    assert [turn["content"] for turn in lines(tmp_path / "out.jsonl")[0]["messages"]] == [QUESTION, ANSWER]


def test_settings_that_no_row_has_are_named(tmp_path: Path) -> None:
    write_rows(
        tmp_path / "a.jsonl",
        [
            {
                "messages": [
                    {"role": "user", "content": QUESTION},
                    {"role": "assistant", "content": [{"type": "image", "url": "https://host/a.png"}]},
                ]
            }
        ],
    )
    entry = {
        "file_name": str(tmp_path / "a.jsonl"),
        "allow_http": True,
        "reasoning": "mask",
        "system": "Be brief.",
    }
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    converted = write_jsonl({"a": {**entry, **kwargs}}, tmp_path / "out.jsonl")
    assert converted.options == {"allow_http": True, "reasoning": "mask"}
    read_as = {"file_name": converted.out, **converted.options}
    assert open_meta_dataset({"a": read_as})[0] == open_meta_dataset({"a": {**entry, **kwargs}})[0]
    with raises_config("dataset_names", match="convert the datasets one by one"):
        write_jsonl({"a": entry, "b": {**entry, "reasoning": "keep"}}, tmp_path / "both.jsonl")


def test_preference_data_keeps_both_answers_and_labels(tmp_path: Path) -> None:
    question = {"role": "user", "content": f"<image>{QUESTION}"}
    earlier = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ho."}]
    rows: list[Any] = [
        {"messages": [question, {"role": "assistant", "content": ANSWER}], "rejected_response": "A cat."},
        {
            "prompt": [*earlier, question],
            "chosen": ANSWER,
            "rejected": [{"role": "assistant", "content": "No."}],
        },
        {"messages": [*earlier, question, {"role": "assistant", "content": ANSWER}], "label": False},
        {"prompt": "Who?", "chosen": "Me."},
    ]
    write_rows(tmp_path / "pairs.jsonl", [{**row, "images": ["1.png"]} for row in rows])
    assert run(tmp_path / "pairs.jsonl", tmp_path / "out.jsonl").exit_code == 2
    result = run(tmp_path / "pairs.jsonl", tmp_path / "out.jsonl", "--task", "preference")
    assert result.exit_code == 1, result.output
    assert "pairs: 1 wrong_format\n" in result.stdout
    assert "read it with task='preference'\n" in result.stdout
    pair, longer, labelled = lines(tmp_path / "out.jsonl")
    assert [list(row) for row in (pair, longer)] == [["prompt", "chosen", "rejected"]] * 2
    assert (labelled["label"], labelled["images"]) == (False, ["1.png"])
    source, again = (
        open_meta_dataset(str(tmp_path / name), task="preference") for name in ("pairs.jsonl", "out.jsonl")
    )
    assert list(again) == [source[index] for index in range(3)]


@pytest.mark.parametrize("name", ["out.jsonl", "out.ledger.jsonl"])
def test_an_existing_file_is_kept_unless_it_may_be_replaced(name: str, tmp_path: Path) -> None:
    meta = write_chats(tmp_path, 3)
    out, existing = tmp_path / "out.jsonl", tmp_path / name
    existing.write_text("mine")
    result = run(meta, out)
    assert result.exit_code == 2
    assert f"{existing}: it exists" in result.stderr
    assert "--overwrite" in result.stderr
    assert (existing.read_text(), names(tmp_path)) == ("mine", ["chats.jsonl", "meta.json", name])
    assert run(meta, out, "--overwrite").exit_code == 0
    assert len(lines(out)) == 3
    assert "mine" not in existing.read_text()


def test_a_folder_with_the_name_of_the_ledger_is_one_line(tmp_path: Path) -> None:
    meta = write_chats(tmp_path, 3)
    (tmp_path / "out.ledger.jsonl").mkdir()
    result = run(meta, tmp_path / "out.jsonl", "--overwrite")
    assert result.exit_code == 2
    assert "out.ledger.jsonl: is a folder" in result.stderr
    assert names(tmp_path) == ["chats.jsonl", "meta.json", "out.ledger.jsonl"]


@pytest.mark.parametrize(
    ("out", "says"),
    [
        ("chats.jsonl", "a data file of"),
        ("link.jsonl", "a data file of"),
        ("out.json", "ends in .jsonl"),
        ("s3://bucket/out.jsonl", "expected a local file"),
        ("no/folder/out.jsonl", "its folder does not exist"),
        ("folder.jsonl", "is a folder"),
    ],
)
def test_an_output_that_cannot_be_is_one_line_and_nothing_is_written(
    tmp_path: Path, out: str, says: str
) -> None:
    meta = write_chats(tmp_path, 3)
    (tmp_path / "link.jsonl").symlink_to("chats.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    before = (tmp_path / "chats.jsonl").read_bytes()
    result = run(meta, out if "://" in out else tmp_path / out, "--overwrite")
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert says in line
    assert names(tmp_path) == ["chats.jsonl", "folder.jsonl", "link.jsonl", "meta.json"]
    assert (tmp_path / "chats.jsonl").read_bytes() == before


def test_an_error_in_the_middle_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"messages": from_value("<image>"), "images": [{"bytes": png("tan", (n + 1, 9)), "path": None}]}
        for n in range(9)
    ]
    source = write_parquet(tmp_path, rows)
    replace = os.replace

    def fail(first: Any, second: Any) -> None:
        if str(second).endswith("train.jsonl"):  # the last file
            raise OSError(errno.ENOSPC, "No space left on device", str(second))
        replace(first, second)

    monkeypatch.setattr(os, "replace", fail)
    (tmp_path / "out").mkdir()
    result = run(source, tmp_path / "out" / "train.jsonl")
    assert result.exit_code == 2
    assert "cannot be written: the disk is full" in result.stderr
    assert names(tmp_path / "out") == []


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    part = {"type": "image", "base64": base64.b64encode(png()).decode()}
    row = {"messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": ANSWER}]}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 200_000)
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-m", "packhorse", "convert", str(tmp_path / "rows.jsonl"), "train.jsonl"]
    with subprocess.Popen(
        command, cwd=tmp_path / "out", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None and len(names(tmp_path / "out")) < 3:  # both files and the media
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    assert err == "packhorse convert: stopped; nothing was written\n"
    assert names(tmp_path / "out") == []
