"""The outcome of every row, exports of lists, and thumbnails."""

import csv
import html
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from count_samples import write_meta, write_rows
from packhorse.ledger import Ledger
from packhorse.loader import LoaderConfig
from packhorse.tools.view.plan_report import plan_report
from packhorse.tools.view.plan_viewer import OUTCOMES, PlanViewer
from packhorse.tools.view.saved_plan import PlanRequest, PlanResult, make_plan, make_saved_plan
from packhorse.tools.view.server import make_app
from packhorse.types import Drop
from view_samples import BROKEN, CUT, SIZES, ask, chat

CHATS = len(SIZES) + 2


@pytest.fixture
def run_viewer(planned: PlanResult) -> PlanViewer:
    """A viewer with the ledger of a run: a row that was lost, a changed one and one with a remark."""
    (location,) = planned.opened.dataset.locations([CUT])
    drops = [
        Drop(f"charts/{CUT}", "media", "broken_media", f"cut.png is broken; {location}", dataset="charts"),
        Drop("charts/1", "convert", "surplus_placeholder", "one <image> too many", "cut", "charts"),
        Drop("chats/6", "encode", "nothing_supervised", "no token of it is supervised", "kept", "chats"),
        Drop("chats/7", "encode", "truncated", "cut to 511 tokens", "cut", "chats"),
        Drop("chats/7", "collate", "collate_failed", "it failed", "replaced", "chats"),
    ]
    drops += [Drop(key, "plan", reason, "as planned") for key, reason in BROKEN.items()]  # type: ignore[arg-type]
    ledger = Ledger()
    ledger.record_all(drops)
    return PlanViewer(make_saved_plan(planned, plan_report(planned)), planned.opened, ledger)


def read_totals(page: str) -> dict[str, int]:
    found = re.findall(r'data-total="([\w, ]+)">([\d,]+)<', page)
    return {name: int(number.replace(",", "")) for name, number in found}


def test_all_pages_have_the_same_totals(run_viewer: PlanViewer) -> None:
    app, rows = make_app(run_viewer), len(run_viewer)
    expected = {"rows": rows, "trained": rows - 6, "trained, changed": 1, "not trained": 5}
    targets = ["/", "/steps", "/packs", "/rows", "/docs", "/search?q=1", "/nothing", "/pack/9999"]
    targets += [f"/pack/{number}" for number in range(len(run_viewer.plan))]
    targets += [f"/row/{index}" for index in range(rows)]
    for target in targets:
        assert read_totals(ask(app, target).text) == expected, target
    overview = ask(app, "/").text
    for outcome in OUTCOMES:
        assert f'data-number="{outcome}">{expected[outcome]}<' in overview
        page = ask(app, f"/rows?outcome={outcome}").text
        assert f'data-number="found">{expected[outcome]}<' in page
        assert f"{outcome} ({expected[outcome]})" in page
        keys = re.findall(r"data-item>([^<]+)<", page)
        assert len(keys) == len(set(keys)) == expected[outcome]
        lines = ask(app, f"/rows.jsonl?outcome={outcome}").text.splitlines()
        assert [json.loads(line)["key"] for line in lines] == keys
        for index in (run_viewer.finder.find(key) for key in keys):
            assert f"data-outcome>{outcome}</b>" in ask(app, f"/row/{index}").text
    by_dataset = run_viewer.totals_by_dataset().values()
    by_reason = run_viewer.reasons()
    for position, outcome in enumerate(OUTCOMES):
        assert sum(counts[position] for counts in by_dataset) == expected[outcome]
    for position in (1, 2):
        assert sum(counts[position] for counts in by_reason.values()) == expected[OUTCOMES[position]]
    for reason, counts in by_reason.items():
        page = ask(app, f"/rows?reason={reason}").text
        assert f'data-number="found">{sum(counts)}<' in page


def test_a_row_counts_once_with_the_reason_that_decides_its_outcome(run_viewer: PlanViewer) -> None:
    index = CHATS + 7  # truncated, then replaced by another row
    assert run_viewer.reason(index) == "collate_failed"
    assert [drop.reason for drop in run_viewer.drops(index)] == ["collate_failed", "truncated"]
    reasons = run_viewer.reasons()
    assert reasons["collate_failed"] == [0, 0, 1]
    assert "truncated" not in reasons
    assert reasons["nothing_supervised"] == [1, 0, 0], "a remark changes nothing"


def test_an_error_is_shown_once(run_viewer: PlanViewer) -> None:
    app = make_app(run_viewer)
    pack = int(run_viewer.pack_of[CUT])
    for target in (f"/row/{CUT}", f"/pack/{pack}", f"/row/{CUT}"):  # then the viewer has found it, too
        page = html.unescape(ask(app, target).text)
        document = page[page.index(f"charts/{CUT}") :]
        assert document.count('<span class="mark">broken media</span>') == 1
        assert document.count("cut.png is broken") == 1
        assert document.count('<p class="missing">cannot be decoded</p>') == 1
    listed = html.unescape(ask(app, "/rows?reason=broken_media").text)
    assert listed.count(">cut.png is broken") == 1
    location = run_viewer.dataset.location(CUT)
    assert listed.count(location) == 1, "in the title of the location, and not in the detail"
    for key, reason in BROKEN.items():
        index = run_viewer.finder.find(key)
        page = ask(app, f"/row/{index}").text
        assert page.count(f'<span class="mark">{reason.replace("_", " ")}</span>') == 1


def test_a_found_error_changes_the_totals_of_every_page(app: Any, viewer: PlanViewer) -> None:
    before = read_totals(ask(app, "/").text)
    ask(app, f"/row/{CUT}")
    for target in ("/", "/rows", "/packs"):
        after = read_totals(ask(app, target).text)
        assert after["not trained"] == before["not trained"] + 1
        assert after["trained"] == before["trained"] - 1


def test_text_that_is_cut_has_its_whole_in_the_title(tmp_path: Path, saved: str) -> None:
    name, detail = "a_dataset_with_a_very_long_name", "no such file " + "x" * 400
    write_rows(tmp_path / "rows.jsonl", [chat("Why? " * 30, "So."), chat("Why?", "So.")])
    meta = write_meta(tmp_path, {name: {"file_name": "rows.jsonl"}})
    planned = make_plan(PlanRequest(LoaderConfig(data=str(meta), pack_size=256), saved))
    viewer = PlanViewer(make_saved_plan(planned, plan_report(planned)), planned.opened)
    viewer.mark(1, [Drop(f"{name}/1", "media", "missing_media", detail)])
    app = make_app(viewer)
    assert f"a_dataset_with…<title>{name}</title>" in ask(app, "/").text
    listed = ask(app, "/rows").text
    assert f'class="lines" title="{detail}"' in listed
    assert f'class="cut" href="/row/1" title="{name}/1"' in listed
    pack = ask(app, "/pack/0").text
    (whole, shown) = re.findall(r'<code><span title="((?:Why\? ?)+)">([^<]*)</span></code>', pack)[0]
    assert shown.endswith("…")
    assert whole.startswith(shown[:-1])


@pytest.mark.parametrize("query", ["", "?dataset=charts", "?outcome=not+trained", "?reason=malformed_row"])
def test_rows_are_exported_as_they_are_listed(run_viewer: PlanViewer, query: str) -> None:
    app = make_app(run_viewer)
    lines = [json.loads(line) for line in ask(app, f"/rows.jsonl{query}").text.splitlines()]
    cells = list(csv.DictReader(io.StringIO(ask(app, f"/rows.csv{query}").text)))
    assert [line["key"] for line in lines] == [row["key"] for row in cells]
    assert [line["key"] for line in lines] == re.findall(
        r"data-item>([^<]+)<", ask(app, f"/rows{query}").text
    )
    for line in lines:
        index = run_viewer.finder.find(line["key"])
        assert index is not None
        pack = int(run_viewer.pack_of[index])
        assert line["pack"] == (None if pack < 0 else pack)
        assert line["location"] == run_viewer.dataset.location(index)
        assert line["reason"] == run_viewer.reason(index)
    answer = ask(app, f"/rows.csv{query}")
    assert answer.headers["content-disposition"] == 'attachment; filename="rows.csv"'
    assert answer.headers["content-type"].startswith("text/csv")


def test_packs_are_exported_as_they_are_filtered_and_sorted(app: Any, viewer: PlanViewer) -> None:
    query = "sort=cost&down=1&dataset=charts"
    listed = re.findall(r'href="/pack/(\d+)" data-item', ask(app, f"/packs?{query}").text)
    lines = [json.loads(line) for line in ask(app, f"/packs.jsonl?{query}").text.splitlines()]
    assert [str(line["pack"]) for line in lines] == listed
    for line in lines:
        assert line["keys"] == [viewer.key(row) for row in viewer.plan[line["pack"]].tolist()]
    cells = list(csv.DictReader(io.StringIO(ask(app, f"/packs.csv?{query}").text)))
    assert [row["keys"].split() for row in cells] == [line["keys"] for line in lines]


def test_an_empty_export_has_a_header_only(app: Any) -> None:
    assert ask(app, "/rows.csv?dataset=no").text == "key,dataset,outcome,reason,detail,location,pack\r\n"
    assert ask(app, "/rows.jsonl?dataset=no").text == ""


def test_a_cell_that_looks_like_a_formula_is_escaped(planned: PlanResult) -> None:
    ledger = Ledger()
    formulas = ['=HYPERLINK("x")', "+1", "-1", "@SUM(A1)", "\tx", "\rx"]
    for row, formula in enumerate(formulas):
        ledger.record(Drop(f"charts/{row}", "media", "broken_media", formula, dataset="charts"))
    ledger.record(Drop("charts/7", "media", "broken_media", 'quotes " and, commas', dataset="charts"))
    saved = make_saved_plan(planned, plan_report(planned))
    text = ask(make_app(PlanViewer(saved, None, ledger)), "/rows.csv?reason=broken_media").text
    cells = [row["detail"] for row in csv.DictReader(io.StringIO(text, newline=""))]
    assert cells == [*(f"'{formula}" for formula in formulas), 'quotes " and, commas']


def test_an_export_is_sent_in_blocks(app: Any, viewer: PlanViewer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packhorse.tools.view.server._EXPORT_BLOCK", 5)
    text = ask(app, "/rows.jsonl").text
    keys = [json.loads(line)["key"] for line in text.splitlines()]
    assert keys == [viewer.key(index) for index in range(len(viewer))]


def test_thumbnails_are_small_and_show_each_image(app: Any) -> None:
    answer = ask(app, "/thumbnails?rows=0,1")
    assert answer.headers["content-type"] == "image/png"
    image = Image.open(io.BytesIO(answer.body))
    assert image.size == (64 + 6 + 64, 64)
    assert image.getpixel((2, 32)) == (250, 247, 240, 255), "the paper of the chart, which is 64 x 43"
    assert image.getpixel((2, 2)) == (128, 128, 128, 60), "above it"
    assert image.getpixel((66, 30)) == (0, 0, 0, 0), "the gap"
    video = Image.open(io.BytesIO(ask(app, f"/thumbnails?rows={CHATS + 12}").body))
    assert video.size == (64, 64)
    many = Image.open(io.BytesIO(ask(app, "/thumbnails?rows=0,1,2,3,4,5").body))
    assert many.width == 4 * 64 + 3 * 6


def test_a_broken_image_has_a_crossed_thumbnail(app: Any) -> None:
    image = Image.open(io.BytesIO(ask(app, f"/thumbnails?rows={CUT}").body))
    assert image.size == (64, 64)
    assert image.getpixel((32, 32)) == (161, 61, 45, 255)


@pytest.mark.parametrize("rows", ["", "x", "-1", "999999", "9" * 5000, "0;1", "../../etc/passwd", "1e3"])
def test_thumbnails_of_rows_that_do_not_exist_are_empty(app: Any, rows: str) -> None:
    answer = ask(app, f"/thumbnails?rows={rows}")
    assert answer.status == 200
    assert not Image.open(io.BytesIO(answer.body)).getbbox()


def test_lists_of_packs_have_lazy_thumbnails(app: Any, viewer: PlanViewer) -> None:
    for target, height in (("/packs", 40), ("/steps?world_size=2", 26)):
        page = ask(app, target).text
        images = re.findall(r'<img src="(/thumbnails\?rows=[\d,]+)"[^>]*height="(\d+)" loading="lazy">', page)
        assert images
        assert {int(size) for _, size in images} == {height}
        for address, _ in images:
            assert Image.open(io.BytesIO(ask(app, address).body)).getbbox(), address


def test_the_documentation_explains_every_outcome(app: Any) -> None:
    page = ask(app, "/docs").text
    for outcome in OUTCOMES:
        assert f"<dt>{outcome}</dt>" in page
    assert 'href="/docs"' in ask(app, "/").text
