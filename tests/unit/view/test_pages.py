"""The pages of the viewer, asked for as a browser asks."""

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
from packhorse.errors import ConfigError
from packhorse.ledger import Ledger
from packhorse.neat_packing_vlm import plan_packs
from packhorse.plan.pack_plan import PackPlan, load_key
from packhorse.tools.view.book import Book
from packhorse.tools.view.plan_book import Planned, Request, book_of, make_plan, save_book
from packhorse.tools.view.plan_report import plan_report
from packhorse.tools.view.server import make_app
from packhorse.types import Drop
from view_samples import BROKEN, CUT, MALFORMED, SCRIPT, SIZES, SPOKEN, ask

CHATS = len(SIZES) + 2  # the first row of chats, after those of charts


def numbers(page: str) -> dict[str, str]:
    return dict(re.findall(r'data-number="(\w+)">([^<]*)<', page))


def test_the_overview_has_the_numbers_of_the_report(app: Any, book: Book) -> None:
    shown, report = numbers(ask(app, "/").text), json.loads(ask(app, "/report.json").body)
    assert report == book.report
    for name in ("rows", "packed", "dropped", "packs", "tokens"):
        assert shown[name] == f"{report[name]:,}"
    assert shown["fill"] == f"{100 * report['fill']:.2f}\N{NO-BREAK SPACE}%"


def test_the_overview_says_where_the_loader_would_not_start_and_how_tokens_are_counted(
    app: Any, book: Book
) -> None:
    page = html.unescape(ask(app, "/").text)
    bad = book.report["bad"]
    assert f"The loader stops at more than 0 % bad rows (max_bad_share): {bad} of {len(book)} are" in page
    assert "before the label shift takes one from each" in page
    assert "kept free for a placeholder" in page
    assert "name no row of" not in page


def test_a_plan_of_an_earlier_version_without_the_later_numbers_is_shown(planned: Planned) -> None:
    report = plan_report(planned, estimates=False)
    later = ("bad", "max_bad_share", "nothing_supervised")
    old = {name: value for name, value in report.items() if name not in later}
    old["padding"] = {name: value for name, value in old["padding"].items() if name != "packed_unpadded"}
    page = ask(make_app(Book(book_of(planned, old), planned.opened), "127.0.0.1"), "/")
    assert page.status == 200
    assert numbers(page.text)["packed"] == str(report["packed"])


def test_a_ledger_of_other_data_is_warned_of(planned: Planned) -> None:
    ledger = Ledger()
    ledger.record(Drop("coco/3", "media", "missing_media", "no file a.png", dataset="coco"))
    ledger.record(Drop("chats/1", "media", "missing_media", "no file a.png", dataset="chats"))
    book = Book(book_of(planned, plan_report(planned, estimates=False)), planned.opened, ledger)
    assert book.wrong_ledger().startswith("1 of 2 entries of the ledger name no row of ")
    page = html.unescape(ask(make_app(book, "127.0.0.1"), "/").text)
    assert book.wrong_ledger() in page


def test_each_row_that_is_too_long_says_how_long_it_is(planned: Planned, tmp_path: Path) -> None:
    config = planned.request.config.with_changes(pack_size=100)
    small = make_plan(replace(planned.request, config=config), planned.opened)
    report = plan_report(small, estimates=False)
    save_book(small, report, tmp_path / "small.phplan")
    made, again = Book(book_of(small, report), small.opened), Book.open(str(tmp_path / "small.phplan"))
    told = {drop.key: drop.detail for drop in small.dropped if drop.reason == "too_long"}
    assert len(told) > 1
    for index in small.packs.plan.dropped_by_reason()["too_long"].tolist():
        detail = f"{small.planner.lengths[index]:,} tokens, more than the {small.planner.capacity} of a pack"
        for book in (made, again):
            drop = book.dropped(index)
            assert drop is not None
            assert drop.detail.startswith(detail)
            assert told[drop.key].startswith(drop.detail)  # the ledger adds where it is


@pytest.mark.parametrize("key", BROKEN)
def test_a_broken_row_is_two_links_from_the_overview(app: Any, key: str) -> None:
    (reason,) = re.findall(rf'href="(/problems\?reason={BROKEN[key]})"', ask(app, "/").text)
    page = ask(app, reason).text
    (row,) = re.findall(rf'href="(/row/\d+)"[^>]*>{key}<', page)
    name, number = key.split("/")
    assert f"{name}.jsonl:{int(number) + 1} " in page
    shown = ask(app, row).text
    assert BROKEN[key].replace("_", " ") in shown
    assert "in no pack" in shown


def test_a_row_that_is_not_json_is_shown_as_it_stands(app: Any, book: Book) -> None:
    page = ask(app, f"/row/{CHATS + MALFORMED}").text
    assert html.escape(book.raw(CHATS + MALFORMED), quote=False).replace('"', "&#34;") in page
    assert "cannot be read as a conversation" in page


def test_what_rows_hold_is_text_and_never_markup(app: Any, book: Book) -> None:
    pack = int(book.pack_of[CHATS + SPOKEN])
    for target in (f"/row/{CHATS + SPOKEN}", f"/pack/{pack}", "/search?q=%3Cscript", f"/search?q={SCRIPT}"):
        page = ask(app, target).text
        assert SCRIPT not in page
        assert "<script>" not in page
        assert "&lt;script" in page, target


def test_details_of_ledgers_are_escaped_too(planned: Planned) -> None:
    bad = Drop("charts/1", "encode", "truncated", "<b>bold</b>", "cut", "charts")
    ledger = Ledger()
    ledger.record(bad)
    made = Book.open(_file(planned))
    app = make_app(Book(made.made, None, ledger))
    for target in ("/problems", "/row/1", f"/pack/{int(made.pack_of[1])}"):
        page = ask(app, target).text
        assert "<b>bold" not in page
        assert "&lt;b&gt;bold&lt;/b&gt;" in page


def _file(planned: Planned) -> str:
    path = Path(planned.request.config.data).parent / "again.phplan"
    save_book(planned, plan_report(planned, estimates=False), path)
    return str(path)


def test_images_are_served_in_their_own_size(app: Any) -> None:
    for row, size in enumerate(SIZES):
        answer = ask(app, f"/media/{row}/0")
        assert answer.headers["content-type"] == "image/png"
        assert Image.open(io.BytesIO(answer.body)).size == size


def test_a_video_is_served_by_its_frames(app: Any, book: Book) -> None:
    row = len(book) - 1
    page = ask(app, f"/row/{row}").text
    frames = re.findall(rf'src="(/media/{row}/0/\d+)" alt="frame (\d+) of video.mp4"', page)
    assert 2 <= len(frames) <= 8
    images = [ask(app, address).body for address, _ in frames]
    assert all(Image.open(io.BytesIO(image)).size == (96, 64) for image in images)
    assert len(set(images)) == len(images)
    assert ask(app, f"/media/{row}/0").status == 404


def test_an_image_that_breaks_when_decoded_is_marked_once_it_was_looked_at(app: Any, book: Book) -> None:
    pack = int(book.pack_of[CUT])
    assert "broken media" not in ask(app, "/").text
    page = ask(app, f"/pack/{pack}").text
    assert "broken media" in page
    assert "not in the pack" in page
    assert ask(app, f"/media/{CUT}/0").status == 404
    assert "broken media" in ask(app, "/").text
    assert numbers(ask(app, "/packs?error=broken_media").text)["found"] == "1"
    assert f'href="/pack/{pack}"' in ask(app, "/packs?error=any").text


def test_a_pack_has_the_tokens_that_were_planned(app: Any, book: Book) -> None:
    for pack in range(len(book.plan)):
        if CUT in book.plan[pack]:
            continue
        shown = numbers(ask(app, f"/pack/{pack}").text)
        assert shown["tokens"] == f"{int(book.plan.tokens[pack]):,}"
        assert shown["documents"] == str(len(book.plan[pack]))


def test_supervised_tokens_of_a_page_are_those_that_were_counted(app: Any, planned: Planned) -> None:
    for row in (0, CHATS, CHATS + SPOKEN):
        page = ask(app, f"/row/{row}").text
        assert f"{int(planned.counts.supervised[row]):,} supervised" in page
        assert re.search(r'class="run assistant supervised"', page)


@pytest.mark.parametrize("target", ["/pack/99999", "/row/99999", "/nowhere", "/pack/-1", "/pack/x"])
def test_what_is_not_there_is_said_so(app: Any, target: str) -> None:
    answer = ask(app, target)
    assert answer.status == 404
    assert "There is no" in answer.text


@pytest.mark.parametrize("digits", [17, 18, 19, 400, 5000])
@pytest.mark.parametrize("path", ["/row/{}", "/pack/{}", "/media/{}/0", "/media/0/{}", "/media/10/0/{}"])
def test_a_number_with_thousands_of_digits_is_not_found(app: Any, path: str, digits: int) -> None:
    assert ask(app, path.format("9" * digits)).status == 404


def test_a_query_or_a_key_with_thousands_of_digits_shows_a_page(app: Any) -> None:
    many = "9" * 5000
    for target in (f"/packs?page={many}&least={many}", f"/problems?page={many}"):
        assert ask(app, target).status == 200
    for query in (f"charts/{many}", f"charts/0#{many}", many):
        assert ask(app, f"/search?q={query}&from={many}".replace("#", "%23")).status == 200


@pytest.mark.parametrize(
    "query",
    ["page=0", "page=-3", "page=999999999999999999999", "least=x", "sort=evil", "most=nan", "dataset=no"],
)
def test_a_query_that_makes_no_sense_shows_a_list(app: Any, query: str) -> None:
    assert ask(app, f"/packs?{query}").status == 200
    assert ask(app, f"/problems?{query}").status == 200


def test_packs_are_filtered_by_dataset_fill_and_media(app: Any, book: Book) -> None:
    def found(query: str) -> set[int]:
        return set(map(int, re.findall(r'href="/pack/(\d+)" data-item', ask(app, f"/packs?{query}").text)))

    packs = range(len(book.plan))
    datasets = {pack: {book.key(int(row)).split("/")[0] for row in book.plan[pack]} for pack in packs}
    for name in book.names:
        assert found(f"dataset={name}") == {pack for pack in packs if name in datasets[pack]}
    fill = 100 * book.plan.tokens / book.plan.capacity
    middle = float(sorted(fill)[len(fill) // 2])
    assert found(f"least={middle}") == {pack for pack in packs if fill[pack] >= middle}
    assert found(f"most={middle}") == {pack for pack in packs if fill[pack] <= middle}
    videos = {pack for pack in packs if "clips" in datasets[pack]}
    assert found("media=video") == videos
    assert found("media=none") == {pack for pack in packs if datasets[pack] == {"chats"}}
    assert found("error=any") == set()


def test_packs_are_sorted_both_ways(app: Any, book: Book) -> None:
    for name, values in (("fill", book.plan.tokens), ("cost", book.plan.costs)):
        for down in ("", "&down=1"):
            page = ask(app, f"/packs?sort={name}{down}").text
            order = list(map(int, re.findall(r'href="/pack/(\d+)" data-item', page)))
            assert values is not None
            assert [values[n] for n in order] == sorted(values, reverse=bool(down))


def test_rows_are_found_by_key_number_and_text(app: Any) -> None:
    assert 'href="/row/1" data-item>charts/1<' in ask(app, "/search?q=charts/1").text
    by_number = ask(app, "/search?q=1").text.partition("By text")[0]
    assert re.findall(r"data-item>(\w+/1)<", by_number) == ["charts/1", "chats/1", "clips/1"]
    by_text = ask(app, "/search?q=MULE%20number%207").text
    assert re.findall(r"data-item>([\w/]+)<", by_text) == ["chats/7"]
    assert "<mark>mule number 7</mark>" in by_text
    broken = ask(app, "/search?q=number%203").text
    assert re.findall(r"data-item>([\w/]+)<", broken) == [f"chats/{MALFORMED}"]


def test_a_number_of_thousands_of_digits_is_no_row(app: Any, book: Book) -> None:
    for asked in ("9" * 5000, f"charts/{'9' * 5000}", f"charts/1%23{'9' * 5000}"):
        answer = ask(app, f"/search?q={asked}")
        assert answer.status == 200
        assert "data-item" not in answer.text
    assert book.finder.find("charts/" + "9" * 30) is None


def test_a_search_stops_in_time_and_goes_on_where_it_stopped(book: Book) -> None:
    from packhorse.tools.view.book import find_text

    first = find_text(book, "bar", seconds=-1)
    assert first.next is not None
    rest = find_text(book, "bar", first.next, seconds=60)
    assert rest.next is None
    every = [hit.index for hit in find_text(book, "bar", seconds=60).hits]
    assert [hit.index for hit in first.hits + rest.hits] == every
    assert len(every) == 8


def test_ledgers_of_a_run_are_shown_with_their_rows(planned: Planned, tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.record(Drop("chats/7", "encode", "truncated", "cut here", "cut", "chats"))
    ledger.record(Drop("elsewhere/3", "read", "malformed_row", "not of this data", dataset="elsewhere"))
    ledger.save(tmp_path / "rank0.jsonl")
    book = Book.open(_file(planned), ledger=tmp_path)
    app = make_app(book)
    assert "cut here" in ask(app, "/problems?reason=truncated").text
    assert "elsewhere/3" in ask(app, "/problems").text
    pack = int(book.pack_of[CHATS + 7])
    assert re.findall(r'href="/pack/(\d+)" data-item', ask(app, "/packs?error=truncated").text) == [str(pack)]


def test_a_plan_moved_together_with_its_data_still_opens(
    planned: Planned, tmp_path: Path, saved: str
) -> None:
    home = Path(planned.request.config.data).parent
    _file(planned)
    shutil.copytree(home, tmp_path / "moved")
    book = Book.open(str(tmp_path / "moved" / "again.phplan"))
    assert len(book) == 24
    hidden = home.rename(home.with_name("away"))
    try:
        moved = Book.open(str(tmp_path / "moved" / "again.phplan"))
        assert moved.made.request.config.data == str(tmp_path / "moved" / "meta.json")
        assert ask(make_app(moved), "/pack/0").status == 200
    finally:
        hidden.rename(home)


def test_without_its_processor_a_plan_can_be_looked_at_but_for_its_rows(plan_file: Path) -> None:
    app = make_app(Book.open(str(plan_file), processor="./gone"))
    assert ask(app, "/").status == ask(app, "/packs").status == ask(app, "/problems").status == 200
    rejected = ask(app, "/pack/0")
    assert rejected.status == 503
    assert "processor ./gone: no such folder" in rejected.text


def test_a_plan_file_of_an_earlier_format_is_rejected_with_the_remedy(
    plan_file: Path, tmp_path: Path
) -> None:
    key = load_key(plan_file)
    del key["made_from"]["version"]
    PackPlan.load(plan_file).save(tmp_path / "old.phplan", key)
    with pytest.raises(ConfigError, match="plan format 1"):
        Book.open(str(tmp_path / "old.phplan"))


def test_a_plan_of_other_data_is_rejected(planned: Planned, tmp_path: Path) -> None:
    plan_packs([3, 4], 8).save(tmp_path / "bare.phplan")
    with pytest.raises(ConfigError, match="does not say which data"):
        Book.open(str(tmp_path / "bare.phplan"))
    home = Path(planned.request.config.data).parent
    shutil.copytree(home, tmp_path / "grown")
    made = make_plan(
        Request(
            planned.request.config.with_changes(data=str(tmp_path / "grown" / "meta.json")),
            planned.request.processor,
        )
    )
    save_book(made, plan_report(made, estimates=False), tmp_path / "grown" / "made.phplan")
    with open(tmp_path / "grown" / "chats.jsonl", "a") as file:
        file.write('{"messages": []}\n')
    with pytest.raises(ConfigError, match=r"24 rows.*25 now: plan anew"):
        Book.open(str(tmp_path / "grown" / "made.phplan"))


def test_positions_in_three_rows_are_shown_where_the_config_is_known(
    planned: Planned, tmp_path: Path
) -> None:
    whole = save_processor(tmp_path / "whole")
    tiny_model("qwen2_vl").config.save_pretrained(whole)
    known = make_app(Book.open(_file(planned), processor=whole))
    page = ask(known, "/row/0").text
    assert re.search(r"positions t \d+, h \d+-\d+, w \d+-\d+", page)
    assert "packhorse plan --model" not in page
    unknown = make_app(Book.open(_file(planned)))
    assert "packhorse plan --model" in ask(unknown, "/row/0").text


def test_a_meta_file_is_planned_first_and_needs_a_processor(planned: Planned, saved: str) -> None:
    meta = planned.request.config.data
    with pytest.raises(ConfigError, match="--processor"):
        Book.open(meta)
    book = Book.open(meta, saved, pack_size=512)
    assert book.plan.bins() == planned.packs.plan.bins()
    assert ask(make_app(book), "/pack/0").status == 200
