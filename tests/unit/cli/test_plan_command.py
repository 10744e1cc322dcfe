"""``packhorse plan`` as a user types it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

import packhorse
from contract.media_files import write_video
from contract.processors import build
from count_samples import python_path, save_processor, sidecars, write_chats, write_meta, write_rows
from packhorse.cli.app import app
from packhorse.neat_packing_vlm import PackPlan, plan_packs
from packhorse.plan.pack_plan import load_key
from packhorse.plan.schedule import Packs, SampleInfo
from packhorse.tools.view.plan_report import stragglers
from view_samples import BROKEN, chat, write_samples

SIZE = 512


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_processor(tmp_path_factory.mktemp("processor"))


@pytest.fixture(scope="module")
def meta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("view") / "data")


def run(meta: Path, saved: str, *more: object) -> Result:
    options = ["--processor", saved, "--pack-size", SIZE, "--num-workers", 1, *more]
    return CliRunner().invoke(app, ["plan", str(meta), *map(str, options)])


@pytest.fixture(scope="module")
def report(meta: Path, saved: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("plan") / "made.phplan"
    result = run(meta, saved, "--json", "--out", out)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_the_plan_is_the_one_that_the_loader_trains(report: dict[str, Any], meta: Path, saved: str) -> None:
    for epoch in (0, 1):
        loader = packhorse.load(str(meta), saved, model="unchecked", pack_size=SIZE, max_bad_share=None)
        loader.set_epoch(epoch)
        out = meta.parent / f"epoch{epoch}.phplan"
        planned = json.loads(run(meta, saved, "--json", "--epoch", epoch, "--out", out).stdout)
        assert planned["name"] == loader.plan_key == report["name"]
        made = PackPlan.load(out)
        assert made.bins() == loader.plan.bins()
        assert made.dropped.tolist() == loader.plan.dropped.tolist()
        assert planned["straggler"][0]["ratio"] == loader.straggler_ratio() == 1.0
        assert (planned["packs"], planned["fill"]) == (len(loader.plan), loader.plan.fill)


def test_command_and_loader_print_the_same_quartiles(meta: Path, saved: str, tmp_path: Path) -> None:
    for size in (128, 256, SIZE):
        printed = run(meta, saved, "--pack-size", size, "--out", tmp_path / f"{size}.phplan").stdout
        loader = packhorse.load(str(meta), saved, model="unchecked", pack_size=size, max_bad_share=None)
        lines = [
            [line.split() for line in text.splitlines() if line.startswith("per pack")]
            for text in (printed, loader.describe())
        ]
        assert lines[0] == lines[1] != []


def test_so_it_is_where_long_samples_are_cut(meta: Path, saved: str, tmp_path: Path) -> None:
    out = tmp_path / "cut.phplan"
    result = run(meta, saved, "--json", "--pack-size", 128, "--on-overlong", "truncate", "--out", out)
    loader = packhorse.load(
        str(meta), saved, model="unchecked", pack_size=128, on_overlong="truncate", max_bad_share=None
    )
    assert json.loads(result.stdout)["name"] == loader.plan_key
    assert PackPlan.load(out).bins() == loader.plan.bins()


def test_every_row_is_packed_or_dropped_for_a_named_reason(report: dict[str, Any]) -> None:
    assert report["rows"] == 24 == report["packed"] + report["dropped"]
    assert report["dropped"] == len(BROKEN) == sum(one["rows"] for one in report["reasons"])
    found = {key: one["reason"] for one in report["reasons"] for key in one["keys"]}
    assert found == BROKEN
    assert sum(one["packed"] for one in report["datasets"]) == report["packed"]


def test_the_names_of_the_json_stay(report: dict[str, Any]) -> None:
    assert list(report) == [
        *("version", "name", "meta", "processor", "model", "epoch", "settings", "rows", "packed", "dropped"),
        *("packs", "fewest_packs", "pack_size", "reserve", "capacity", "tokens", "supervised", "fill"),
        *(
            "padded_wasted",
            "documents_per_pack",
            "cost_basis",
            "straggler",
            "reasons",
            "bad",
            "max_bad_share",
            "nothing_supervised",
        ),
        *("not_drawn", "datasets", "histograms", "comparison", "plan"),
    ]
    assert [one["ranks"] for one in report["straggler"]] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    methods = ("packed", "random", "length_grouped", "trl")
    assert list(report["comparison"]) == ["ranks", "batch_size", "tokens", *methods]
    numbers = ["steps", "slots", "wasted", "fill", "straggler", "time"]
    assert [list(report["comparison"][name]) for name in methods] == [numbers] * 4
    assert report["comparison"]["tokens"] == report["tokens"]
    assert report["packs"] * SIZE * (1 - report["padded_wasted"]) == pytest.approx(report["tokens"])
    assert sum(report["histograms"]["fill"]["counts"]) == report["packs"]
    assert sum(report["histograms"]["length"]["counts"]) == report["packed"]


def test_planned_and_random_steps_are_compared_over_the_same_steps(report: dict[str, Any]) -> None:
    for one in report["straggler"]:
        assert one["steps"] == -(-report["packs"] // one["ranks"])
        assert one["ratio"] >= 1
        assert one["random"] >= 1
        if one["ranks"] >= report["packs"]:  # a single step: there is nothing to put in order
            assert one["random"] == pytest.approx(one["ratio"])


@pytest.mark.parametrize("packs", [1, 20, 64, 1001])
def test_where_all_packs_cost_the_same_no_order_is_better_than_another(packs: int) -> None:
    plan = plan_packs(np.full(packs * 4, 25), 100)
    assert len(plan) == packs
    facts = SampleInfo(np.full(packs * 4, 25.0), np.zeros(packs * 4, np.uint8))
    for one in stragglers(Packs(plan, facts), seed=0, epoch=0, more=(3, 24)):
        assert one["random"] == pytest.approx(one["ratio"]), one


def test_of_uneven_packs_the_planned_steps_are_the_more_even_ones() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 100, 4000)
    plan = plan_packs(lengths, 100)
    facts = SampleInfo(lengths.astype(float) ** 2, np.zeros(4000, np.uint8))
    for one in stragglers(Packs(plan, facts), seed=0, epoch=0):
        assert one["ratio"] < one["random"] or one["ranks"] == 1


def test_the_straggler_ratio_is_printed_for_any_number_of_ranks(
    meta: Path, saved: str, tmp_path: Path
) -> None:
    out = tmp_path / "made.phplan"
    asked = ("--out", out, "--ranks", "3,24", "--ranks", 8)
    entries = json.loads(run(meta, saved, "--json", *asked).stdout)["straggler"]
    assert [one["ranks"] for one in entries] == [1, 2, 3, 4, 8, 16, 24, 32, 64, 128, 256, 512]
    shown = run(meta, saved, *asked).stdout
    table = shown.partition("Straggler ratio")[2].partition("The same rows")[0]
    assert re.findall(r"^ *(\d+) +\d+ +[\d.]+ +[\d.]+ *$", table, re.MULTILINE) == [
        *("1", "3", "8", "24", "64", "512")
    ]
    for wrong in ("0", "x", "8,", "-1", "²"):
        rejected = run(meta, saved, "--ranks", wrong)
        assert rejected.exit_code == 2
        assert "expected integers above 0" in rejected.stderr


def test_plan_and_stats_say_that_their_tokens_differ_by_the_label_shift(
    report: dict[str, Any], meta: Path, saved: str
) -> None:
    shown = CliRunner().invoke(app, ["stats", str(meta), "--processor", saved, "--num-workers", "1"]).stdout
    assert "A plan counts them after the label shift" in shown
    planned = run(meta, saved, "--out", meta.parent / "shift.phplan").stdout
    assert f"{report['tokens']:,} tokens after the label shift (one less per row)" in planned
    stats = CliRunner().invoke(
        app, ["stats", str(meta), "--processor", saved, "--num-workers", "1", "--json"]
    )
    assert json.loads(stats.stdout)["all"]["tokens"]["sum"] == report["tokens"] + report["packed"]


def test_rows_that_are_dropped_are_reported_with_file_and_line(report: dict[str, Any], meta: Path) -> None:
    details = {one["reason"]: one["detail"] for one in report["reasons"]}
    assert re.search(rf"; {meta.parent}/chats\.jsonl:4 \(byte \d+\)$", details["malformed_row"])
    assert re.search(rf"; {meta.parent}/charts\.jsonl:9 \(byte \d+\)$", details["missing_media"])


def test_the_plan_is_compared_with_padded_batches_and_trl_packing(
    report: dict[str, Any], meta: Path, saved: str, tmp_path: Path
) -> None:
    shown = run(meta, saved, "--out", tmp_path / "made.phplan").stdout
    table = shown.partition("The same rows in batches of other libraries, on 8 ranks")[2]
    lines = re.findall(r"^  (\S.*?)  +(\d+) +([\d.]+%) +(\S+) +([\d.]+) +([\d.]+) *$", table, re.MULTILINE)
    names = ("packed", "random", "length_grouped", "trl")
    methods = [report["comparison"][name] for name in names]
    assert [line[0] for line in lines] == [
        "these packs",
        "random batches of 8, padded",
        "length-grouped batches of 8, padded (transformers)",
        "packs of 512, best fit (TRL bfd)",
    ]
    assert [line[1] for line in lines] == [str(method["steps"]) for method in methods]
    assert [line[2] for line in lines] == [f"{method['wasted']:.1%}" for method in methods]
    assert [line[5] for line in lines] == [f"{method['time']:.2f}" for method in methods]
    assert "TRL packs text only" in shown
    text_only = run(meta, saved, "--dataset", "chats", "--out", tmp_path / "made.phplan").stdout
    assert "TRL packs text only" not in text_only


def test_text_without_a_terminal_has_no_control_codes_and_says_what_json_says(
    report: dict[str, Any], meta: Path, saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path / "path"))
    out = tmp_path / "made.phplan"
    command = [sys.executable, "-m", "packhorse", "plan", str(meta), "--processor", saved]
    command += ["--pack-size", str(SIZE), "--out", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", result.stdout)
    assert f"{report['packed']} of {report['rows']} packed" in result.stdout
    assert f"fill       {report['fill']:.3%}" in result.stdout
    for ranks in (1, 8, 64, 512):
        ratio = next(one["ratio"] for one in report["straggler"] if one["ranks"] == ranks)
        assert re.search(rf"^ *{ranks} +\d+ +{ratio:.4f} ", result.stdout, re.MULTILINE)
    for key, reason in BROKEN.items():
        assert re.search(rf"dropped: 1 {reason} \({key}\)", result.stdout)
    shown = re.search(r"show it: (\S*packhorse) view (\S+)\n$", result.stdout)
    assert shown is not None
    assert shown[2] == str(out)
    assert shutil.which(shown[1]) is not None  # as printed it can be typed


def test_without_a_name_the_plan_is_written_next_to_the_meta_file(tmp_path: Path, saved: str) -> None:
    meta = write_chats(tmp_path, 8)
    result = run(meta, saved)
    assert result.exit_code == 0, result.output
    assert len(PackPlan.load(tmp_path / "meta.phplan")) >= 1
    assert len(sidecars(tmp_path)) == 1
    assert "every row is in a pack" in result.stdout


def test_the_file_says_what_it_was_made_from_without_pickle(
    report: dict[str, Any], meta: Path, saved: str
) -> None:
    key = load_key(report["plan"])
    source = key["made_from"]
    assert source["meta"]["name"] == str(meta)
    assert source["processor"]["name"] == saved
    assert (source["settings"]["pack_size"], source["epoch"]) == (SIZE, 0)
    assert key["report"] == {name: value for name, value in report.items() if name != "plan"}
    assert b"pickle" not in Path(report["plan"]).read_bytes()


def test_long_samples_are_dropped_cut_or_an_error_as_asked(tmp_path: Path, saved: str) -> None:
    meta = write_chats(tmp_path, 6)
    write_rows(tmp_path / "chats.jsonl", [*[chat("Why?", "So.")] * 5, chat("Why?", "so " * 400)])
    dropped = json.loads(run(meta, saved, "--json").stdout)
    assert [(one["reason"], one["keys"]) for one in dropped["reasons"]] == [("too_long", ["chats/5"])]
    assert re.match(r"1,2\d\d tokens, more than the 512 of a pack; .*:6 ", dropped["reasons"][0]["detail"])
    assert run(meta, saved).stderr == ""  # said once, in the report
    assert json.loads(run(meta, saved, "--json", "--on-overlong", "truncate").stdout)["dropped"] == 0
    rejected = run(meta, saved, "--on-overlong", "raise", "--out", tmp_path / "never.phplan")
    assert rejected.exit_code == 2
    assert "chats/5" in rejected.stderr
    assert not (tmp_path / "never.phplan").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no.json", "--processor", "{saved}"], r"no\.json: no such file"),
        (["{meta}", "--processor", "./nowhere"], "processor ./nowhere: no such folder"),
        (["{meta}", "--processor", "{saved}", "--dataset", "other"], "no dataset other"),
        (["s3://bucket/meta.json", "--processor", "{saved}"], "--out"),
        (["{meta}", "--processor", "{saved}", "--model", "{empty}"], "no config there"),
        (["{meta}", "--processor", "{saved}", "--out", "{empty}/no/p.phplan"], "there is no folder .*/no;"),
        (
            ["{meta}", "--processor", "{saved}", "--pack-size", "512,many"],
            "--pack-size many: expected integers",
        ),
        (
            ["{meta}", "--processor", "{saved}", "--pack-size", "1,2", "--ranks", "4"],
            "--ranks needs a single",
        ),
        (["{meta}", "--processor", "{saved}", "--pack-size", "1,2", "--out", "p"], "--out needs a single"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_two(
    arguments: list[str], says: str, meta: Path, saved: str, tmp_path: Path
) -> None:
    filled = [one.format(meta=meta, saved=saved, empty=tmp_path) for one in arguments]
    result = CliRunner().invoke(app, ["plan", *filled])
    assert result.exit_code == 2, result.output
    assert re.search(says, result.stderr)
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stderr.startswith("packhorse plan: ")


def test_a_model_config_next_to_the_processor_changes_costs_but_not_packs(meta: Path, tmp_path: Path) -> None:
    from contract.tiny_models import tiny_model

    plain = save_processor(tmp_path / "plain")
    build("qwen2_vl").save_pretrained(tmp_path / "whole")
    tiny_model("qwen2_vl").config.save_pretrained(tmp_path / "whole")
    made = [
        run(meta, folder, "--json", "--out", tmp_path / f"{n}.phplan")
        for n, folder in enumerate((plain, tmp_path / "whole"))
    ]
    one, other = (json.loads(result.stdout) for result in made)
    assert PackPlan.load(tmp_path / "0.phplan").bins() == PackPlan.load(tmp_path / "1.phplan").bins()
    assert one["name"] != other["name"]
    assert (one["model"], other["model"]) == (None, str(tmp_path / "whole"))
    loader = packhorse.load(
        str(meta), build("qwen2_vl"), model=tiny_model("qwen2_vl"), pack_size=SIZE, max_bad_share=None
    )
    assert other["name"] == loader.plan_key


def test_packs_as_they_are_delivered_waste_nothing_but_what_alignment_adds(
    report: dict[str, Any], meta: Path, saved: str, tmp_path: Path
) -> None:
    packed = report["comparison"]["packed"]
    assert (packed["slots"], packed["wasted"]) == (report["tokens"], 0.0)
    settings: dict[str, Any] = {"pack_size": SIZE, "dataset_names": ["chats"], "max_bad_share": None}
    loader = packhorse.load(str(meta), build("qwen2_vl"), model="unchecked", **settings)
    made = json.loads(run(meta, saved, "--json", "--dataset", "chats", "--out", tmp_path / "p").stdout)
    assert made["name"] == loader.plan_key
    delivered = 0
    for batch in loader:
        delivered += batch.info.slots
    assert made["comparison"]["packed"]["slots"] == delivered
    aligned = json.loads(run(meta, saved, "--json", "--alignment", 16, "--out", tmp_path / "p").stdout)
    assert aligned["comparison"]["packed"]["slots"] % 16 == 0
    assert 0 < aligned["comparison"]["packed"]["wasted"] < aligned["padded_wasted"]


def test_a_plan_says_where_the_loader_would_stop_because_of_bad_rows(
    meta: Path, saved: str, tmp_path: Path
) -> None:
    out = ["--out", tmp_path / "p.phplan"]
    result = run(meta, saved, *out, "--max-bad-share", 0)
    assert result.exit_code == 0
    bad = json.loads(run(meta, saved, "--json", *out).stdout)["bad"]
    assert f"the loader stops at more than 0 % bad rows (max_bad_share): {bad} of 24 are" in result.stdout
    with pytest.raises(packhorse.PackhorseError, match=f"{bad} of 24 samples cannot be used"):
        packhorse.load(str(meta), build("qwen2_vl"), model="unchecked", pack_size=SIZE, max_bad_share=0.0)
    assert "the loader stops" not in run(meta, saved, *out).stdout, "three bad rows are tolerated"


def test_rows_with_no_supervised_token_are_packed_and_reported(tmp_path: Path, saved: str) -> None:
    meta = write_chats(tmp_path, 6)
    write_rows(
        tmp_path / "chats.jsonl", [*[chat("Why?", "So.")] * 5, {"messages": [chat("A", "B")["messages"][0]]}]
    )
    report = json.loads(run(meta, saved, "--json").stdout)
    assert (report["packed"], report["nothing_supervised"]) == (6, {"rows": 1, "keys": ["chats/5"]})
    shown = run(meta, saved).stdout
    assert "1 packed row has no supervised token (chats/5)" in shown
    assert "Media were not decoded" not in shown  # there is none


def test_several_pack_sizes_are_compared_and_no_plan_is_written(meta: Path, saved: str) -> None:
    before = set(meta.parent.glob("*.phplan"))
    report = json.loads(run(meta, saved, "--pack-size", "512,1024,2048", "--json").stdout)
    assert [one["pack_size"] for one in report["sizes"]] == [512, 1024, 2048]
    for one in report["sizes"]:
        loader = packhorse.load(
            str(meta), build("qwen2_vl"), model="unchecked", pack_size=one["pack_size"], max_bad_share=None
        )
        assert (one["packs"], one["fill"]) == (len(loader.plan), loader.plan.fill)
    largest = report["sizes"][-1]
    assert report["comparison"]["packed"]["straggler"] == largest["straggler_8"]
    table = run(meta, saved, "--pack-size", "512,1024")
    assert re.search(rf"^ *1,024 +{report['sizes'][1]['packs']} ", table.stdout, re.MULTILINE)
    assert set(meta.parent.glob("*.phplan")) == before


def test_ctrl_c_leaves_no_half_plan(tmp_path: Path, saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path / "path"))
    meta = write_chats(tmp_path / "data", 20_000)
    command = [
        sys.executable,
        "-m",
        "packhorse",
        "plan",
        str(meta),
        "--processor",
        saved,
        "--num-workers",
        "1",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as started:
        while not list(meta.parent.glob("*.parts/*.arrow")) and started.poll() is None:
            time.sleep(0.02)
        os.killpg(started.pid, signal.SIGINT)
        _, errors = started.communicate(timeout=60)
    assert started.returncode == 130, errors
    assert b"no plan was written" in errors
    assert b"Traceback" not in errors
    assert not list(meta.parent.glob("*.phplan*"))


# --- --sweep ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def charts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of several sizes, one with a budget of its own, a video, and rows without media."""
    folder = tmp_path_factory.mktemp("charts")
    rows: list[Any] = [chat(f"Question {n}?", f"Answer {n}.") for n in range(5)]
    for at, size in enumerate([(300, 200), (640, 480), (40, 50), (900, 100)]):
        Image.new("RGB", size).save(folder / f"{at}.png")
        rows.append(chat("<image><image>Which?", "The first.", images=[f"{at}.png", "1.png"]))
    rows.append({**rows[-1], "images": ["1.png", {"path": "1.png", "max_pixels": 9_000}]})
    write_video(folder / "clip.mp4", frames=12, fps=4, width=160, height=120)
    rows.append(chat("<video>What?", "A cat.", videos=["clip.mp4"]))
    write_rows(folder / "pics.jsonl", rows)
    write_rows(folder / "more.jsonl", rows[4:8])
    pics = {"file_name": "pics.jsonl", "media_dir": "."}
    more = {"file_name": "more.jsonl", "media_dir": ".", "min_pixels": 20_000}
    return write_meta(folder, {"pics": pics, "more": more})


def sweep(meta: Path, saved: str, setting: str) -> dict[str, Any]:
    result = run(meta, saved, "--sweep", setting, "--json", "--pack-size", 4096)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


@pytest.mark.parametrize(
    ("name", "values"),
    [("max_pixels", (50_000, 12_000, 400_000)), ("min_pixels", (100_000,)), ("video_max_pixels", (5_000,))],
)
def test_a_sweep_plans_what_a_count_with_that_setting_gives(
    charts: Path, saved: str, tmp_path: Path, name: str, values: tuple[int, ...]
) -> None:
    report = sweep(charts, saved, f"{name}={','.join(map(str, values))}")
    assert [entry["value"] for entry in report["values"]] == [None, *sorted(values)]
    for entry in report["values"]:
        meta = json.loads(charts.read_text())
        for dataset in meta.values():
            dataset |= {} if entry["value"] is None else {name: entry["value"]}
            if entry["value"] is not None and dataset.get("min_pixels", 0) > dataset.get("max_pixels", 1e9):
                dataset.pop("min_pixels" if name == "max_pixels" else "max_pixels")
        counted = charts.parent / f"{name}-{entry['value']}.json"
        counted.write_text(json.dumps(meta))
        out = tmp_path / "out.phplan"
        result = run(counted, saved, "--json", "--out", out, "--pack-size", 4096)
        assert result.exit_code == 0, result.output
        planned = json.loads(result.stdout)
        found = {kind: sum(part[kind] for part in planned["datasets"]) for kind in ("image", "video")}
        assert {kind: entry[kind] for kind in found} == found
        assert entry["tokens"] == sum(part["tokens"] for part in planned["datasets"])
        assert (entry["packs"], entry["fill"]) == (planned["packs"], planned["fill"])
    costs = [entry["cost"] for entry in report["values"]]
    assert costs[0] == 1.0
    assert len(set(costs)) == len(costs)


def test_a_sweep_reads_no_row_and_no_media_header(charts: Path, saved: str, tmp_path: Path) -> None:
    copy = tmp_path / "data"
    shutil.copytree(charts.parent, copy, ignore=shutil.ignore_patterns("*.phcount"))
    before = sweep(copy / "meta.json", saved, "max_pixels=20000,30000")
    for path in copy.glob("*.png"):
        path.unlink()
    after = sweep(copy / "meta.json", saved, "max_pixels=20000,30000")
    assert after == before
    assert not list(copy.glob("*.phplan"))


def test_a_sweep_over_rows_without_media_changes_nothing(saved: str, tmp_path: Path) -> None:
    report = sweep(write_chats(tmp_path / "chats", 10), saved, "max_pixels=20000")
    now, swept = report["values"]
    assert {**now, "value": 20_000} == swept
    assert (report["items"], report["items_with_own"]) == (0, 0)


def test_a_sweep_is_a_table_with_a_line_about_each_column(charts: Path, saved: str) -> None:
    result = run(charts, saved, "--sweep", "max_pixels=12000,50000")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[0] for row in rows if row and row[0].replace(",", "").isdigit()][:2] == ["12,000", "50,000"]
    for column in ("tokens", "media", "longest", "too long", "packs", "fill", "cost"):
        assert f"\n{column}: " in result.stdout
    assert "1 of 16 images has an own value, which stays" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("max_pixel=1000", "did you mean 'max_pixels'"),
        ("fps=2", "expected NAME=N"),
        ("max_pixels=", "whole numbers above 0"),
        ("max_pixels=10,many", "whole numbers above 0"),
        ("max_pixels=0", "whole numbers above 0"),
        ("max_soft_tokens=70", "max_soft_tokens has no effect on images of qwen2_vl"),
    ],
)
def test_a_sweep_over_something_else_is_an_error(charts: Path, saved: str, setting: str, words: str) -> None:
    result = run(charts, saved, "--sweep", setting)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_a_sweep_writes_no_plan_and_takes_one_pack_size(charts: Path, saved: str, tmp_path: Path) -> None:
    for more in (["--out", tmp_path / "a.phplan"], ["--ranks", "8"], ["--pack-size", "512,1024"]):
        result = run(charts, saved, "--sweep", "max_pixels=1000", *more)
        assert result.exit_code == 2
        assert "--sweep compares values without a plan" in " ".join(result.output.split())
