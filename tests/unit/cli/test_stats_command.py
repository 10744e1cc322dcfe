"""``packhorse stats`` as a user types it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from count_samples import chat, save_processor, sidecars, write_chats, write_meta, write_rows
from demo_data import write_demo_data
from packhorse.cli.app import app
from packhorse.cli.stats import bins_for, histogram_lines, short
from packhorse.count.columns import Distribution


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_processor(tmp_path_factory.mktemp("processor"))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["stats", *map(str, arguments), "--num-workers", "1"])


def test_estimates_are_shown_as_such_at_eighty_columns_without_control_codes(tmp_path: Path) -> None:
    meta = write_demo_data(tmp_path)
    command = [sys.executable, "-m", "packhorse", "stats", str(meta), "--each", "-v"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("ESTIMATES: ")
    assert result.stderr == ""
    assert re.search(r"^ *charts +24 +~", result.stdout, re.MULTILINE)
    assert "all: tokens of a row, estimated\n" in result.stdout
    assert "clips: media of a row\n" in result.stdout
    assert "charts: excluded: 1 malformed_row\n" in result.stdout
    lines = [line for line in result.stdout.splitlines() if str(tmp_path) not in line]  # paths may be long
    assert max(map(len, lines)) <= 80
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", result.stdout)
    assert sidecars(tmp_path) == []


def test_with_a_processor_rows_are_counted_first_and_reused_then(tmp_path: Path, saved: str) -> None:
    meta = write_demo_data(tmp_path)
    first = run(meta, "--processor", saved)
    assert first.exit_code == 0, first.output
    assert "ESTIMATES" not in first.stdout
    assert "40 rows counted, 0 reused." in first.stdout
    assert "all: tokens of an image\n" in run(meta, "--processor", saved, "-v").stdout
    assert "0 rows counted, 40 reused." in run(meta, "--processor", saved).stdout
    counted = CliRunner().invoke(app, ["count", str(meta), "--processor", saved, "--json"])
    report = json.loads(run(meta, "--processor", saved, "--json").stdout)
    totals = json.loads(counted.stdout)["all"]
    assert report["all"]["tokens"]["sum"] == totals["total"]
    assert report["all"]["tokens"]["max"] == totals["longest"]
    assert report["all"]["supervised_tokens"]["sum"] == totals["supervised"]
    assert (report["estimated"], report["exact"]) == (False, True)


def test_loss_weights_are_shown_if_rows_have_them(tmp_path: Path, saved: str) -> None:
    rows = [{**chat(n), **({"weight": 0.5} if n % 2 else {})} for n in range(4)]
    write_rows(tmp_path / "some.jsonl", rows)
    write_rows(tmp_path / "none.jsonl", [chat(n) for n in range(4)])
    meta = write_meta(tmp_path, {name: {"file_name": f"{name}.jsonl"} for name in ("some", "none")})
    lines = [line for line in run(meta, "--processor", saved).stdout.splitlines() if "loss weights" in line]
    assert [line.partition(":")[0] for line in lines] == ["some", "all"]
    report = json.loads(run(meta, "--processor", saved, "--json").stdout)
    (some,) = (dataset for dataset in report["datasets"] if dataset["name"] == "some")
    weight, tokens = some["supervised_weight"], some["supervised_tokens"]
    assert lines[0] == f"some: loss weights sum to {weight:,.1f} over {tokens['sum']:,} supervised tokens"


def test_the_output_is_short_unless_more_is_requested(tmp_path: Path, saved: str) -> None:
    meta = write_demo_data(tmp_path)
    short_output = run(meta, "--processor", saved).stdout
    assert len(short_output.splitlines()) <= 20
    assert "Tokens of a row" in short_output
    assert re.search(
        r"^media: \d+ images, \d videos?; \d+ of 40 rows are text only$", short_output, re.MULTILINE
    )
    assert "charts: excluded: 1 malformed_row\n" in short_output
    long_output = run(meta, "--processor", saved, "-v").stdout
    for added in ("\nMedia\n", "\nImages\n", "all: tokens of a row\n", "charts: the longest rows\n"):
        assert added not in short_output
        assert added in long_output
    assert "charts: tokens of a row\n" in run(meta, "--processor", saved, "--each").stdout
    assert (
        run(meta, "-v", "--json").stdout.count("longest") == run(meta, "--json").stdout.count("longest") > 0
    )


def test_the_statistics_can_be_had_as_json(tmp_path: Path) -> None:
    report = json.loads(run(write_chats(tmp_path, 10), "--json").stdout)
    (chats,) = report["datasets"]
    assert list(chats) == [
        *("name", "file", "rows", "bad", "text_only", "media"),
        *("supervised_weight", "tokens", "supervised_tokens"),
        *("supervised_percent", "visual_tokens", "media_per_row", "image_side", "image_tokens", "longest"),
    ]
    assert {"n", "sum", "mean", "p50", "p90", "p99", "max", "histogram"} <= set(chats["tokens"])
    assert sum(chats["tokens"]["histogram"]["counts"]) == chats["rows"] == 10
    assert report["estimated"] is True


@pytest.mark.parametrize("exact", [True, False])
def test_the_longest_rows_are_named_with_file_and_line(tmp_path: Path, saved: str, exact: bool) -> None:
    meta = write_chats(tmp_path, 9)
    words = [3, 40, 7, 90, 40, 1, 2, 5]
    rows = [
        {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "so " * n}]}
        for n in words
    ]
    write_rows(tmp_path / "chats.jsonl", rows)
    with open(tmp_path / "chats.jsonl", "a") as file:
        file.write("{torn\n")
    more = ["--processor", saved] if exact else []
    report = json.loads(run(meta, *more, "--longest", 3, "--json").stdout)
    for one in (report["datasets"][0], report["all"]):
        assert [row["key"] for row in one["longest"]] == ["chats/3", "chats/1", "chats/4"]
        assert one["longest"][0]["tokens"] == one["tokens"]["max"]
        assert re.search(r"chats\.jsonl:4 \(byte \d+\)$", one["longest"][0]["location"])
    shown = run(meta, *more, "--longest", 1).stdout
    about = "" if exact else "about "
    longest = report["all"]["tokens"]["max"]
    assert f"chats: the longest rows\n  chats/3, {about}{longest} tokens, " in shown
    assert "chats/1," not in shown
    assert "(1 of 9 rows could not be counted; only the column `rows` includes them.)" in shown
    assert "chats: the longest rows" not in run(meta, *more, "--longest", 0).stdout


def test_no_rows_and_text_alone_are_shown(tmp_path: Path, saved: str) -> None:
    text = run(write_chats(tmp_path / "text", 3), "--processor", saved, "-v")
    assert text.exit_code == 0
    assert "visual" not in text.stdout
    assert "media: none; 3 of 3 rows are text only" in run(tmp_path / "text" / "meta.json").stdout
    meta = write_chats(tmp_path / "none", 0)
    write_rows(tmp_path / "none" / "chats.jsonl", [])
    for result in (run(meta), run(meta, "-v"), run(meta, "--processor", saved)):
        assert result.exit_code == 0, result.output
        assert re.search(r"^ *chats +0 ", result.stdout, re.MULTILINE)


def test_errors_are_one_line_and_exit_code_2(tmp_path: Path) -> None:
    result = run(tmp_path / "meta.json")
    assert result.exit_code == 2
    assert result.stderr == f"packhorse stats: {tmp_path}/meta.json: no such file or directory\n"
    (tmp_path / "cut.json").write_text("[{")
    (tmp_path / "meta.json").write_text('{"cut": {"file_name": "cut.json"}}')
    result = run(tmp_path / "meta.json")
    assert result.exit_code == 2
    assert "the JSON array is not closed" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_histogram_fits_its_width_and_shows_what_is_rare() -> None:
    spread = Distribution.of([100] * 1_000_000 + [5_000])
    for width in (60, 80, 100):
        for blocks in (True, False):
            lines = histogram_lines(spread, bins_for("tokens", spread), width, blocks)
            assert max(map(len, lines)) <= width
            assert lines[0].strip().startswith("64-127")
            assert "█████" in lines[0] if blocks else "#####" in lines[0]
            rare = lines[-1]
            assert "4,096-8,191" in rare
            assert ("▏" if blocks else "#") in rare
            assert rare.endswith("1   0.0%")
    assert histogram_lines(Distribution(), [0, 1], 80) == histogram_lines(Distribution.of([]), [0, 1], 80)


def test_few_media_have_a_bar_each_and_shares_go_by_tens() -> None:
    assert bins_for("media_per_row", Distribution.of([0, 2])) == [0, 1, 2, 3]
    assert bins_for("media_per_row", Distribution.of([0, 40])) == [0, 1, 32, 64]
    assert bins_for("supervised_percent", Distribution.of([100]))[-2:] == [90, 101]
    assert [short(n) for n in (0, 9_999, 12_345, 8_900_000, 1_200_000_000)] == [
        *("0", "9,999", "12.3k", "8.9M", "1.2G")
    ]
