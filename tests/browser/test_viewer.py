"""The viewer in a real browser, with the real server, on a small mixed dataset with three broken rows."""

import re
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from browser.conftest import Server, new_context
from view_samples import BROKEN, SCRIPT, SIZES, SPOKEN


def number(page: Page, name: str) -> str:
    return page.locator(f"[data-number='{name}']").inner_text().replace("\N{NO-BREAK SPACE}", " ")


def test_the_overview_has_the_numbers_of_plan_json(page: Page, server: Server, keep: Any) -> None:
    for name in ("rows", "packs", "tokens"):
        assert number(page, name) == f"{server.report[name]:,}"
    assert number(page, "trained") == f"{server.report['packed']:,}"
    assert number(page, "not trained") == f"{server.report['dropped']:,}"
    assert number(page, "fill") == f"{100 * server.report['fill']:.2f} %"
    assert number(page, "documents") == f"{server.report['documents_per_pack']['mean']:.2f}"
    times = page.locator("section", has_text="Cost of the same rows").locator("tbody td:nth-child(3)")
    costs = server.report["comparison"]
    by_method = [costs[name]["time"] for name in ("packed", "random", "length_grouped", "trl")]
    assert times.all_inner_texts() == [f"{value:.2f}" for value in by_method]
    bars = page.get_by_role("img", name="Histogram of the fill").locator("rect.bar")
    assert bars.count() == len(server.report["histograms"]["fill"]["counts"])
    keep(page, "overview", full_page=True)


@pytest.mark.parametrize("key", BROKEN)
def test_a_broken_row_is_found_in_two_clicks(page: Page, key: str, keep: Any) -> None:
    page.get_by_role("link", name=BROKEN[key].replace("_", " "), exact=True).click()
    page.get_by_role("link", name=key, exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(key)
    expect(page.locator("[data-outcome]")).to_have_text("not trained")
    expect(page.locator(".bad .mark").first).to_have_text(BROKEN[key].replace("_", " "))
    name, row = key.split("/")
    expect(page.locator("main code").first).to_contain_text(f"{name}.jsonl:{int(row) + 1}")
    keep(page, f"broken-{key.replace('/', '-')}", full_page=True)


def test_filters_and_sorting_apply(page: Page, keep: Any) -> None:
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Packs").click()
    page.wait_for_url("**/packs")
    rows = page.locator("table.list tbody tr")
    total = rows.count()
    page.get_by_label("Dataset").select_option("clips")
    page.wait_for_url(re.compile("dataset=clips"))
    assert 0 < rows.count() < total
    assert all("clips" in text for text in rows.locator("td:nth-child(7)").all_inner_texts())
    page.get_by_role("link", name="Clear").click()
    page.wait_for_url("**/packs")
    page.get_by_label("Fill from").fill("95")
    page.get_by_role("button", name="Filter").click()
    page.wait_for_url(re.compile("least=95"))
    shares = [
        float(text.rstrip("\N{NO-BREAK SPACE}%"))
        for text in rows.locator("td:nth-child(2) .num").all_inner_texts()
    ]
    assert shares == [share for share in shares if share >= 95]
    assert number(page, "found") == str(len(shares))
    page.goto("/packs")
    page.get_by_role("link", name="Fill", exact=True).click()
    page.wait_for_url(re.compile("sort=fill"))
    shares = [
        float(text.rstrip("\N{NO-BREAK SPACE}%"))
        for text in rows.locator("td:nth-child(2) .num").all_inner_texts()
    ]
    assert shares == sorted(shares)
    keep(page, "packs")


def test_a_pack_shows_the_right_images_in_their_original_size(page: Page, keep: Any) -> None:
    seen: dict[str, tuple[int, int]] = {}
    page.goto("/packs?dataset=charts")
    for address in [link.get_attribute("href") for link in page.locator("a[data-item]").all()]:
        page.goto(str(address))
        for image in page.locator("figure a > img").all():
            name = str(image.get_attribute("alt")).partition(": ")[2]
            image.scroll_into_view_if_needed()
            page.wait_for_function(
                "image => image.complete && image.naturalWidth", arg=image.element_handle()
            )
            size = image.evaluate("image => [image.naturalWidth, image.naturalHeight]")
            assert name not in seen, "each image is in one pack only"
            seen[name] = tuple(size)
        keep(page, f"pack-{str(address).rpartition('/')[2]}", full_page=True)
    assert seen == {f"chart{n}.png": size for n, size in enumerate(SIZES)}
    page.goto("/search?q=charts/9")
    page.get_by_role("link", name="charts/9", exact=True).first.click()
    expect(page.locator("p.bad")).to_contain_text("cut.png")
    expect(page.locator("figure")).to_contain_text("cannot be decoded")


def test_a_video_shows_frames(page: Page) -> None:
    page.goto("/search?q=clips/0")
    page.get_by_role("link", name="clips/0", exact=True).first.click()
    frames = page.locator(".frames img")
    frames.nth(1).wait_for(state="attached")  # at least two, once the page is there
    for frame in frames.all():
        frame.scroll_into_view_if_needed()
        page.wait_for_function(
            "image => image.complete && image.naturalWidth === 96", arg=frame.element_handle()
        )


def test_tokens_have_the_colour_of_their_role_and_answers_are_underlined(page: Page) -> None:
    page.goto("/search?q=chats/0")
    page.get_by_role("link", name="chats/0", exact=True).first.click()
    tokens = page.locator(".tokens")
    texts = {
        "system": "You are a patient assistant.",
        "user": "Describe report number 0. ",
        "assistant": "It lists 0 items in stock. ",
    }
    colours = {}
    for role, text in texts.items():
        run = tokens.locator(f".run.{role}", has_text=text.strip()).first
        expect(run).to_be_visible()
        colours[role] = run.evaluate("run => getComputedStyle(run).backgroundColor")
    assert len(set(colours.values())) == 3
    lines = {
        role: tokens.locator(f".run.{role}").first.evaluate("run => getComputedStyle(run).borderBottomStyle")
        for role in texts
    }
    assert [role for role, line in lines.items() if line == "solid"] == ["assistant"]
    title = tokens.locator(".run.assistant").first.get_attribute("title")
    assert re.match(r"assistant, supervised; tokens \d+-\d+; positions \d+-\d+", str(title))


def test_a_script_in_a_row_is_not_executed(page: Page) -> None:
    page.goto(f"/search?q=chats/{SPOKEN}")
    page.get_by_role("link", name=f"chats/{SPOKEN}", exact=True).first.click()
    assert SCRIPT in page.locator(".said").first.inner_text()
    assert SCRIPT in page.locator(".tokens").inner_text().replace("\n", "")
    assert "owned" not in page.title()
    assert page.locator("main script").count() == 0


def test_every_page_can_be_used_with_the_keyboard(page: Page) -> None:
    page.keyboard.press("p")
    page.wait_for_url("**/packs")
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(page.locator("a[data-item]").nth(1)).to_be_focused()
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_url("**/pack/0")
    page.keyboard.press("j")
    expect(page.locator("#d1")).to_be_focused()
    outline = page.locator("#d1").evaluate("article => getComputedStyle(article).outlineStyle")
    assert outline == "solid", "focus is visible"
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**/pack/1")
    page.keyboard.press("ArrowLeft")
    page.wait_for_url("**/pack/0")
    page.keyboard.press("/")
    page.keyboard.type("report number 7")
    page.keyboard.press("Enter")
    page.wait_for_url("**/search?q=report*")
    expect(page.locator("a[data-item]")).to_have_text(["chats/7"])
    for key, path in (("s", "/steps"), ("r", "/rows"), ("d", "/docs"), ("o", "/")):
        page.keyboard.press(key)
        page.wait_for_url(f"**{path}")
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the content")).to_be_focused()


def test_pages_work_without_javascript(browser: Browser, server: Server) -> None:
    context = new_context(browser, server, java_script_enabled=False)
    page = context.new_page()
    page.goto("/packs")
    page.get_by_label("Dataset").select_option("clips")
    page.get_by_role("button", name="Filter").click()
    assert "dataset=clips" in page.url
    page.locator("a[data-item]").first.click()
    expect(page.locator("article.document").first).to_be_visible()
    context.close()


def test_every_image_has_an_alternative_text_and_every_field_a_label(page: Page) -> None:
    for target in ("/", "/steps", "/packs", "/pack/0", "/rows", "/search?q=report", "/docs"):
        page.goto(target)
        assert page.locator("img:not([alt])").count() == 0
        assert page.locator("svg[role=img]:not([aria-label])").count() == 0
        fields = page.locator("input:not([type=hidden]), select")
        for index in range(fields.count()):
            assert fields.nth(index).evaluate("field => field.labels.length") == 1
        assert page.locator("h1").count() == 1
        assert page.locator("html").get_attribute("lang") == "en"


def test_the_theme_follows_the_system_and_a_choice_is_remembered(page: Page) -> None:
    def is_dark() -> bool:
        paper = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        return int(re.findall(r"\d+", str(paper))[0]) < 60

    switch = page.locator("[data-theme-switch]")
    page.emulate_media(color_scheme="dark")
    expect(switch).to_have_accessible_name("Theme: system")
    assert is_dark()
    page.emulate_media(color_scheme="light")
    assert not is_dark()
    switch.click()
    expect(switch).to_have_accessible_name("Theme: light")
    page.emulate_media(color_scheme="dark")
    assert not is_dark()
    switch.click()
    page.emulate_media(color_scheme="light")
    page.goto("/packs")
    expect(switch).to_have_accessible_name("Theme: dark")
    assert is_dark()
    switch.click()
    expect(switch).to_have_accessible_name("Theme: system")
    assert not is_dark()


def test_steps_are_shown_for_the_layout_in_the_form(page: Page) -> None:
    page.goto("/steps")
    page.get_by_label("World size").fill("2")
    page.get_by_label("Epoch").fill("1")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url(re.compile("world_size=2.*epoch=1"))
    first = page.locator("section.step").first
    expect(first.locator("td.rank")).to_have_text(["rank 0", "rank 1"])
    assert first.locator("svg.strip .doc").count() > 0
    for image in page.locator(".thumbs img").all():
        image.scroll_into_view_if_needed()
        page.wait_for_function("image => image.complete && image.naturalWidth", arg=image.element_handle())
    link = first.locator("a[data-item]").first
    name = link.inner_text()
    link.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(re.compile(f"{name} .*of epoch 1", re.I))


@pytest.mark.parametrize("form", ["CSV", "JSONL"])
def test_a_filtered_list_can_be_downloaded(page: Page, form: str) -> None:
    page.goto("/rows?outcome=not+trained")
    keys = page.locator("a[data-item]").all_inner_texts()
    with page.expect_download() as download:
        page.get_by_role("link", name=form, exact=True).click()
    path = download.value.path()
    assert download.value.suggested_filename == f"rows.{form.lower()}"
    lines = path.read_text().splitlines()[form == "CSV" :]
    assert set(BROKEN) <= set(keys)
    assert len(lines) == len(keys)
    assert all(key in line for key, line in zip(keys, lines, strict=True))
