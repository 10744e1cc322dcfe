"""The pages of the viewer, requested from the ASGI application."""

import html
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from contract.tiny_models import tiny_model
from count_samples import save_processor
from packhorse.ledger import Ledger
from packhorse.neat_packing_vlm import plan_packs
from packhorse.plan.pack_plan import PackPlan, load_key
from packhorse.tools.view.plan_report import plan_report
from packhorse.tools.view.plan_viewer import PlanViewer
from packhorse.tools.view.saved_plan import PlanRequest, PlanResult, make_plan, make_saved_plan, save_plan
from packhorse.tools.view.server import make_app
from packhorse.types import Drop
from raising import raises_config
from view_samples import BROKEN, CUT, MALFORMED, SCRIPT, SIZES, SPOKEN, ask

CHATS = len(SIZES) + 2  # the first row of chats, after those of charts


def numbers(page: str) -> dict[str, str]:
    return dict(re.findall(r'data-number="([\w, ]+)">([^<]*)<', page))


def test_the_overview_has_the_numbers_of_the_report(app: Any, viewer: PlanViewer) -> None:
    values, report = numbers(ask(app, "/").text), json.loads(ask(app, "/report.json").body)
    assert report == viewer.report
    for name in ("rows", "packs", "tokens"):
        assert values[name] == f"{report[name]:,}"
    assert values["not trained"] == f"{report['dropped']:,}"
    assert values["fill"] == f"{100 * report['fill']:.2f}\N{NO-BREAK SPACE}%"


def test_the_overview_warns_of_too_many_bad_rows_and_says_how_tokens_are_counted(
    app: Any, viewer: PlanViewer
) -> None:
    page = html.unescape(ask(app, "/").text)
    bad = viewer.report["bad"]
    assert f"The loader stops at more than 0 % bad rows (max_bad_share): {bad} of {len(viewer)} are" in page
    assert "Tokens of the encoded rows, before the label shift" in page
    assert "reserved for a placeholder" in page
    assert "name no row of" not in page


def test_a_plan_of_an_earlier_version_without_the_later_numbers_is_shown(planned: PlanResult) -> None:
    report = plan_report(planned)
    later = ("bad", "max_bad_share", "nothing_supervised")
    old = {name: value for name, value in report.items() if name not in later}
    page = ask(make_app(PlanViewer(make_saved_plan(planned, old), planned.opened), "127.0.0.1"), "/")
    assert page.status == 200
    assert numbers(page.text)["trained"] == str(report["packed"])


def test_a_ledger_of_other_data_gives_a_warning(planned: PlanResult) -> None:
    ledger = Ledger()
    ledger.record(Drop("coco/3", "media", "missing_media", "no file a.png", dataset="coco"))
    ledger.record(Drop("chats/1", "media", "missing_media", "no file a.png", dataset="chats"))
    viewer = PlanViewer(make_saved_plan(planned, plan_report(planned)), planned.opened, ledger)
    assert viewer.unmatched_warning().startswith("1 of 2 ledger entries name no row of ")
    page = html.unescape(ask(make_app(viewer, "127.0.0.1"), "/").text)
    assert viewer.unmatched_warning() in page


def test_a_row_that_is_too_long_has_its_length_in_the_detail(planned: PlanResult, tmp_path: Path) -> None:
    config = planned.request.config.with_changes(pack_size=100)
    small = make_plan(replace(planned.request, config=config), planned.opened)
    report = plan_report(small)
    save_plan(small, report, tmp_path / "small.phplan")
    unsaved = PlanViewer(make_saved_plan(small, report), small.opened)
    reopened = PlanViewer.open(str(tmp_path / "small.phplan"))
    details = {drop.key: drop.detail for drop in small.dropped if drop.reason == "too_long"}
    assert len(details) > 1
    for index in small.packs.plan.dropped_by_reason()["too_long"].tolist():
        detail = f"{small.planner.lengths[index]:,} tokens, more than the {small.planner.capacity} of a pack"
        for viewer in (unsaved, reopened):
            drop = viewer.plan_drop(index)
            assert drop is not None
            assert drop.detail.startswith(detail)
            assert details[drop.key].startswith(drop.detail)  # the ledger adds the location


@pytest.mark.parametrize("key", BROKEN)
def test_a_broken_row_is_two_links_from_the_overview(app: Any, key: str) -> None:
    (reason,) = re.findall(rf'href="(/rows\?reason={BROKEN[key]})"', ask(app, "/").text)
    page = ask(app, reason).text
    (row,) = re.findall(rf'href="(/row/\d+)"[^>]*>{key}<', page)
    name, number = key.split("/")
    assert f"{name}.jsonl:{int(number) + 1} " in page
    shown = ask(app, row).text
    assert BROKEN[key].replace("_", " ") in shown
    assert re.search(r"data-outcome>not trained</b>, in no pack", shown)


def test_a_row_that_is_not_json_is_shown_as_raw_text(app: Any, viewer: PlanViewer) -> None:
    page = ask(app, f"/row/{CHATS + MALFORMED}").text
    assert html.escape(viewer.raw(CHATS + MALFORMED), quote=False).replace('"', "&#34;") in page
    assert "cannot be read as a conversation" in page


def test_the_content_of_rows_is_escaped(app: Any, viewer: PlanViewer) -> None:
    pack = int(viewer.pack_of[CHATS + SPOKEN])
    for target in (f"/row/{CHATS + SPOKEN}", f"/pack/{pack}", "/search?q=%3Cscript", f"/search?q={SCRIPT}"):
        page = ask(app, target).text
        assert SCRIPT not in page
        assert "<script>" not in page
        assert "&lt;script" in page, target


def test_details_of_ledger_entries_are_escaped(planned: PlanResult) -> None:
    bad = Drop("charts/1", "encode", "truncated", "<b>bold</b>", "cut", "charts")
    ledger = Ledger()
    ledger.record(bad)
    viewer = PlanViewer.open(_save(planned))
    app = make_app(PlanViewer(viewer.saved, None, ledger))
    for target in ("/rows", "/row/1", f"/pack/{int(viewer.pack_of[1])}"):
        page = ask(app, target).text
        assert "<b>bold" not in page
        assert "&lt;b&gt;bold&lt;/b&gt;" in page


def _save(planned: PlanResult) -> str:
    path = Path(planned.request.config.data).parent / "saved.phplan"
    save_plan(planned, plan_report(planned), path)
    return str(path)


def test_images_are_served_in_their_original_size(app: Any) -> None:
    for row, size in enumerate(SIZES):
        answer = ask(app, f"/media/{row}/0")
        assert answer.headers["content-type"] == "image/png"
        assert Image.open(io.BytesIO(answer.body)).size == size


def test_a_video_is_served_as_frames(app: Any, viewer: PlanViewer) -> None:
    row = len(viewer) - 1
    page = ask(app, f"/row/{row}").text
    frames = re.findall(rf'src="(/media/{row}/0/\d+)" alt="frame (\d+) of video.mp4"', page)
    assert 2 <= len(frames) <= 8
    images = [ask(app, address).body for address, _ in frames]
    assert all(Image.open(io.BytesIO(image)).size == (96, 64) for image in images)
    assert len(set(images)) == len(images)
    assert ask(app, f"/media/{row}/0").status == 404


def test_an_image_that_cannot_be_decoded_is_marked_after_its_page_was_shown(
    app: Any, viewer: PlanViewer
) -> None:
    pack = int(viewer.pack_of[CUT])
    assert "broken media" not in ask(app, "/").text
    page = ask(app, f"/pack/{pack}").text
    assert "broken media" in page
    assert "not in the pack" in page
    assert ask(app, f"/media/{CUT}/0").status == 404
    assert "broken media" in ask(app, "/").text
    assert numbers(ask(app, "/packs?reason=broken_media").text)["found"] == "1"
    assert f'href="/pack/{pack}"' in ask(app, "/packs?reason=any").text


def test_a_pack_has_the_tokens_that_were_planned(app: Any, viewer: PlanViewer) -> None:
    for pack in range(len(viewer.plan)):
        if CUT in viewer.plan[pack]:
            continue
        shown = numbers(ask(app, f"/pack/{pack}").text)
        assert shown["tokens"] == f"{int(viewer.plan.tokens[pack]):,}"
        assert shown["documents"] == str(len(viewer.plan[pack]))


def test_supervised_tokens_of_a_page_are_those_that_were_counted(app: Any, planned: PlanResult) -> None:
    for row in (0, CHATS, CHATS + SPOKEN):
        page = ask(app, f"/row/{row}").text
        assert f"{int(planned.counts.supervised[row]):,} supervised" in page
        assert re.search(r'class="run assistant supervised"', page)


@pytest.mark.parametrize("target", ["/pack/99999", "/row/99999", "/nowhere", "/pack/-1", "/pack/x"])
def test_a_page_that_does_not_exist_is_a_404_with_a_message(app: Any, target: str) -> None:
    answer = ask(app, target)
    assert answer.status == 404
    assert "There is no" in answer.text


@pytest.mark.parametrize("digits", [17, 18, 19, 400, 5000])
@pytest.mark.parametrize("path", ["/row/{}", "/pack/{}", "/media/{}/0", "/media/0/{}", "/media/10/0/{}"])
def test_a_number_with_thousands_of_digits_is_not_found(app: Any, path: str, digits: int) -> None:
    assert ask(app, path.format("9" * digits)).status == 404


def test_a_query_or_a_key_with_thousands_of_digits_shows_a_page(app: Any) -> None:
    many = "9" * 5000
    for target in (
        f"/packs?page={many}&least={many}",
        f"/rows?page={many}",
        f"/steps?page={many}&rank={many}",
    ):
        assert ask(app, target).status == 200
    for query in (f"charts/{many}", f"charts/0#{many}", many):
        assert ask(app, f"/search?q={query}&from={many}".replace("#", "%23")).status == 200


@pytest.mark.parametrize(
    "query",
    ["page=0", "page=-3", "page=999999999999999999999", "least=x", "sort=evil", "most=nan", "dataset=no"],
)
def test_an_invalid_query_shows_the_list(app: Any, query: str) -> None:
    assert ask(app, f"/packs?{query}").status == 200
    assert ask(app, f"/rows?{query}").status == 200
    assert ask(app, f"/steps?{query}").status == 200


def test_packs_are_filtered_by_dataset_fill_and_media(app: Any, viewer: PlanViewer) -> None:
    def list_packs(query: str) -> set[int]:
        return set(map(int, re.findall(r'href="/pack/(\d+)" data-item', ask(app, f"/packs?{query}").text)))

    packs = range(len(viewer.plan))
    datasets = {pack: {viewer.key(int(row)).split("/")[0] for row in viewer.plan[pack]} for pack in packs}
    for name in viewer.names:
        assert list_packs(f"dataset={name}") == {pack for pack in packs if name in datasets[pack]}
    fill = 100 * viewer.plan.tokens / viewer.plan.capacity
    middle = float(sorted(fill)[len(fill) // 2])
    assert list_packs(f"least={middle}") == {pack for pack in packs if fill[pack] >= middle}
    assert list_packs(f"most={middle}") == {pack for pack in packs if fill[pack] <= middle}
    videos = {pack for pack in packs if "clips" in datasets[pack]}
    assert list_packs("media=video") == videos
    assert list_packs("media=none") == {pack for pack in packs if datasets[pack] == {"chats"}}
    assert list_packs("reason=any") == set()


def test_packs_are_sorted_in_both_directions(app: Any, viewer: PlanViewer) -> None:
    for name, values in (("fill", viewer.plan.tokens), ("cost", viewer.plan.costs)):
        for down in ("", "&down=1"):
            page = ask(app, f"/packs?sort={name}{down}").text
            order = list(map(int, re.findall(r'href="/pack/(\d+)" data-item', page)))
            assert values is not None
            assert [values[n] for n in order] == sorted(values, reverse=bool(down))


def test_rows_are_found_by_key_number_and_text(app: Any) -> None:
    assert 'href="/row/1" data-item>charts/1<' in ask(app, "/search?q=charts/1").text
    by_number = ask(app, "/search?q=1").text.partition("By text")[0]
    assert re.findall(r"data-item>(\w+/1)<", by_number) == ["charts/1", "chats/1", "clips/1"]
    by_text = ask(app, "/search?q=REPORT%20number%207").text
    assert re.findall(r"data-item>([\w/]+)<", by_text) == ["chats/7"]
    assert "<mark>report number 7</mark>" in by_text
    broken = ask(app, "/search?q=number%203").text
    assert re.findall(r"data-item>([\w/]+)<", broken) == [f"chats/{MALFORMED}"]


def test_a_number_of_thousands_of_digits_is_no_row(app: Any, viewer: PlanViewer) -> None:
    for query in ("9" * 5000, f"charts/{'9' * 5000}", f"charts/1%23{'9' * 5000}"):
        answer = ask(app, f"/search?q={query}")
        assert answer.status == 200
        assert "data-item" not in answer.text
    assert viewer.finder.find("charts/" + "9" * 30) is None


def test_a_search_stops_after_the_time_limit_and_continues_there(viewer: PlanViewer) -> None:
    from packhorse.tools.view.plan_viewer import find_text

    first = find_text(viewer, "bar", seconds=-1)
    assert first.next is not None
    rest = find_text(viewer, "bar", first.next, seconds=60)
    assert rest.next is None
    indices = [hit.row for hit in find_text(viewer, "bar", seconds=60).hits]
    assert [hit.row for hit in first.hits + rest.hits] == indices
    assert len(indices) == 8


def test_ledgers_of_a_run_are_shown_with_their_rows(planned: PlanResult, tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.record(Drop("chats/7", "encode", "truncated", "cut here", "cut", "chats"))
    ledger.record(Drop("coco/3", "read", "malformed_row", "not of this data", dataset="coco"))
    ledger.save(tmp_path / "rank0.jsonl")
    viewer = PlanViewer.open(_save(planned), ledger=tmp_path)
    app = make_app(viewer)
    assert "cut here" in ask(app, "/rows?reason=truncated").text
    assert "coco/3" in ask(app, "/rows").text
    pack = int(viewer.pack_of[CHATS + 7])
    assert re.findall(r'href="/pack/(\d+)" data-item', ask(app, "/packs?reason=truncated").text) == [
        str(pack)
    ]


def test_a_plan_moved_together_with_its_data_still_opens(
    planned: PlanResult, tmp_path: Path, saved: str
) -> None:
    home = Path(planned.request.config.data).parent
    _save(planned)
    shutil.copytree(home, tmp_path / "moved")
    viewer = PlanViewer.open(str(tmp_path / "moved" / "saved.phplan"))
    assert len(viewer) == 24
    hidden = home.rename(home.with_name("away"))
    try:
        moved = PlanViewer.open(str(tmp_path / "moved" / "saved.phplan"))
        assert moved.saved.request.config.data == str(tmp_path / "moved" / "meta.json")
        assert ask(make_app(moved), "/pack/0").status == 200
    finally:
        hidden.rename(home)


def test_without_its_processor_a_plan_opens_but_its_rows_cannot_be_shown(plan_file: Path) -> None:
    app = make_app(PlanViewer.open(str(plan_file), processor="./gone"))
    assert ask(app, "/").status == ask(app, "/packs").status == ask(app, "/rows").status == 200
    assert Image.open(io.BytesIO(ask(app, "/thumbnails?rows=0").body)).width > 0, "an empty image"
    rejected = ask(app, "/pack/0")
    assert rejected.status == 503
    assert "processor ./gone: no such folder" in rejected.text


def test_a_plan_file_of_an_earlier_format_is_rejected_with_the_remedy(
    plan_file: Path, tmp_path: Path
) -> None:
    key = load_key(plan_file)
    del key["made_from"]["version"]
    PackPlan.load(plan_file).save(tmp_path / "old.phplan", key)
    with raises_config(path=str(tmp_path / "old.phplan"), match="plan format 1"):
        PlanViewer.open(str(tmp_path / "old.phplan"))


def test_a_plan_of_other_data_is_rejected(planned: PlanResult, tmp_path: Path) -> None:
    plan_packs([3, 4], 8).save(tmp_path / "bare.phplan")
    with raises_config(path=str(tmp_path / "bare.phplan"), match="does not name its data"):
        PlanViewer.open(str(tmp_path / "bare.phplan"))
    home = Path(planned.request.config.data).parent
    shutil.copytree(home, tmp_path / "grown")
    made = make_plan(
        PlanRequest(
            planned.request.config.with_changes(data=str(tmp_path / "grown" / "meta.json")),
            planned.request.processor,
        )
    )
    save_plan(made, plan_report(made), tmp_path / "grown" / "made.phplan")
    with open(tmp_path / "grown" / "chats.jsonl", "a") as file:
        file.write('{"messages": []}\n')
    data = tmp_path / "grown" / "meta.json"
    with raises_config(path=data, match=r"24 rows.*now has 25: run `packhorse plan` again"):
        PlanViewer.open(str(tmp_path / "grown" / "made.phplan"))


def test_three_row_positions_are_shown_if_the_config_is_known(planned: PlanResult, tmp_path: Path) -> None:
    whole = save_processor(tmp_path / "whole")
    tiny_model("qwen2_vl").config.save_pretrained(whole)
    known = make_app(PlanViewer.open(_save(planned), processor=whole))
    page = ask(known, "/row/0").text
    assert re.search(r"positions t \d+, h \d+-\d+, w \d+-\d+", page)
    assert "packhorse plan --model" not in page
    unknown = make_app(PlanViewer.open(_save(planned)))
    assert "packhorse plan --model" in ask(unknown, "/row/0").text


def test_a_meta_file_is_planned_first_and_needs_a_processor(planned: PlanResult, saved: str) -> None:
    meta = planned.request.config.data
    with raises_config("processor", path=meta, match="--processor"):
        PlanViewer.open(meta)
    viewer = PlanViewer.open(meta, saved, pack_size=512)
    assert viewer.plan.bins() == planned.packs.plan.bins()
    assert ask(make_app(viewer), "/pack/0").status == 200
