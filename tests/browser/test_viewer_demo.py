"""The viewer in a real browser on the data of ``packhorse demo``, compared with files and ``plan --json``."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, expect

from browser.conftest import SCREENSHOTS, Server, new_context, serving
from contract.torchvision_ops import make_torchvision_importable
from packhorse.cli.demo.data import tiny_model, tiny_processor, write_demo_mix
from packhorse.ledger import Ledger
from packhorse.types import Drop

BROKEN = {"charts/7": "malformed row", "drawings/31": "missing media", "clips/5": "broken media"}
CUT = "charts/13"  # its image fails to decode; only the ledger of a run names it


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo's data, processor and model, in packs of 256 tokens, so that the list has two pages."""
    make_torchvision_importable()
    home = tmp_path_factory.mktemp("demo")
    meta = write_demo_mix(home / "data")
    lines = [line for path in sorted(meta.parent.glob("*.jsonl")) for line in path.read_text().splitlines()]
    processor = tiny_processor(lines, 256)
    processor.save_pretrained(home / "model")
    tiny_model(processor).config.save_pretrained(home / "model")
    ledger = Ledger()
    ledger.record(Drop(CUT, "media", "broken_media", "cannot be decoded", "dropped", "charts"))
    ledger.record(Drop("charts/19", "template", "surplus_placeholder", "one too many", "cut", "charts"))
    ledger.save(home / "ledger.jsonl")
    with serving(home, meta, str(home / "model"), 256, "--ledger", str(home / "ledger.jsonl")) as running:
        yield running


def parse_numbers(texts: list[str]) -> list[float]:
    return [float(text.replace(",", "").rstrip("\N{NO-BREAK SPACE}%")) for text in texts]


def plotted_values(plot: Locator, shapes: str) -> list[float]:
    """Return the numbers in the titles of a plot's shapes: those after the last colon."""
    titles = plot.locator(f"{shapes} title").all_text_contents()
    return [float(re.findall(r": ([\d.,]+)", title)[-1].replace(",", "")) for title in titles]


def read_row(server: Server, key: str) -> Any:
    """Return a row of a data file."""
    name, number = key.split("/")
    return json.loads((server.data / f"{name}.jsonl").read_text().splitlines()[int(number)])


def open_pack_with(page: Page, dataset: str) -> None:
    """Go to the first pack with rows of a dataset."""
    page.goto(f"/packs?dataset={dataset}")
    page.locator("a[data-item]").first.click()
    page.wait_for_url(re.compile(r"/pack/\d+"))


def fetch_pixels(page: Page, image: Locator) -> np.ndarray:
    """Return the pixels of an image that the browser has loaded in its original size."""
    image.scroll_into_view_if_needed()
    page.wait_for_function("image => image.complete && image.naturalWidth", arg=image.element_handle())
    answer = page.request.get(str(image.get_attribute("src")))
    pixels = np.asarray(Image.open(io.BytesIO(answer.body())).convert("RGB"))
    size = image.evaluate("image => [image.naturalHeight, image.naturalWidth]")
    assert list(pixels.shape[:2]) == size
    return pixels


def test_numbers_plots_and_tables_of_the_overview_are_those_of_plan_json(
    page: Page, server: Server, keep: Any
) -> None:
    report = server.report
    for name in ("rows", "packs", "tokens"):
        expect(page.locator(f"[data-number={name}]")).to_have_text(f"{report[name]:,}")
    outcomes = {"trained": report["packed"] - 2, "trained, changed": 1, "not trained": report["dropped"] + 1}
    for name, rows in outcomes.items():
        expect(page.locator(f"[data-number='{name}']")).to_have_text(f"{rows:,}")
    fill = page.get_by_role("img", name="Histogram of the fill")
    assert plotted_values(fill, "rect.bar") == report["histograms"]["fill"]["counts"]
    lengths = report["histograms"]["length"]["counts"]
    counts = plotted_values(page.get_by_role("img", name="Histogram of the tokens of a row"), "rect.bar")
    assert counts == lengths[-len(counts) :]
    assert sum(counts) == sum(lengths) > 0
    mix = page.get_by_role("img", name="Tokens of each dataset by kind")
    largest = sorted(report["datasets"], key=lambda dataset: -dataset["tokens"])
    kinds = ("text", "image", "video", "audio")
    assert plotted_values(mix, "rect.kind") == [
        dataset[kind] for dataset in largest for kind in kinds if dataset[kind]
    ]
    points = [point for point in report["straggler"] if point["ranks"] <= report["packs"]]
    stragglers = page.get_by_role("img", name="Straggler ratio")
    assert plotted_values(stragglers, "circle.ratio") == [round(point["ratio"], 4) for point in points]
    assert plotted_values(stragglers, "circle.random") == [round(point["random"], 4) for point in points]
    reasons = page.locator("section", has_text="Rows by reason").locator("tbody tr")
    table = {row.locator("td").nth(0).inner_text(): row.locator("td") for row in reasons.all()}
    dropped = {name: int(cells.nth(1).inner_text() or 0) for name, cells in table.items()}
    expected = {entry["reason"].replace("_", " "): entry["rows"] for entry in report["reasons"]}
    expected["broken media"] += 1  # the ledger's
    assert {name: rows for name, rows in dropped.items() if rows} == expected
    assert sum(dropped.values()) == outcomes["not trained"]
    changed = {name for name, cells in table.items() if cells.nth(2).inner_text()}
    assert changed == {"surplus placeholder"}
    lines = page.locator("section", has_text="Datasets").locator("tbody tr").all()
    for dataset, line in zip(report["datasets"], lines, strict=True):
        cells = line.locator("td").all_inner_texts()
        numbers = parse_numbers(cells[1:6])
        assert (cells[0], numbers[0], numbers[4]) == (dataset["name"], dataset["rows"], dataset["tokens"])
        assert sum(numbers[1:4]) == dataset["rows"]
    keep(page, "demo-overview", full_page=True)


@pytest.mark.parametrize("key", [*BROKEN, CUT])
def test_a_broken_row_is_two_real_clicks_away(page: Page, key: str) -> None:
    reason = BROKEN.get(key, "broken media")
    page.get_by_role("link", name=reason, exact=True).click()
    page.get_by_role("link", name=key, exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(key)
    assert page.evaluate("Number(sessionStorage.clicks)") == 2
    expect(page.locator(".bad .mark").first).to_have_text(reason)
    name, number = key.split("/")
    expect(page.locator("main code").first).to_contain_text(f"{name}.jsonl:{int(number) + 1}")


def test_the_list_has_every_pack_once_over_its_pages(page: Page, server: Server) -> None:
    page.goto("/packs")
    first = page.locator("a[data-item]").all_inner_texts()
    expect(page.get_by_text("page 1 of 2")).to_be_visible()
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**page=2")
    packs = first + page.locator("a[data-item]").all_inner_texts()
    assert list(map(int, packs)) == list(range(server.report["packs"]))
    page.get_by_role("link", name="← Previous").click()
    expect(page.locator("a[data-item]").first).to_have_text("0")


@pytest.mark.parametrize(("name", "column"), [("Fill", 2), ("Documents", 4), ("Cost", 5)])
def test_the_list_is_sorted_in_both_directions(page: Page, name: str, column: int) -> None:
    page.goto("/packs")
    cells = page.locator(f"tbody td:nth-child({column})")
    head = page.get_by_role("columnheader", name=name)
    ends = []
    for direction in ("ascending", "descending"):
        head.get_by_role("link").click()
        expect(head).to_have_attribute("aria-sort", direction)
        values = parse_numbers(cells.all_inner_texts())
        assert values == sorted(values, reverse=direction == "descending")
        ends.append(values[0])
    assert ends[0] < ends[1]


def test_the_list_is_filtered_by_dataset_fill_and_error(page: Page, server: Server) -> None:
    def count_packs() -> int:
        return int(page.locator("[data-number=found]").inner_text())

    page.goto("/packs")
    page.get_by_label("Dataset").select_option("clips")
    page.wait_for_url(re.compile("dataset=clips"))
    assert 0 < count_packs() < server.report["packs"]
    assert all("clips" in text for text in page.locator("tbody td:nth-child(7)").all_inner_texts())
    page.goto("/packs")
    page.locator("[name=most]").fill("94.9")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("most=94.9"))
    assert count_packs() == sum(server.report["histograms"]["fill"]["counts"][:19])
    page.goto("/packs")
    page.get_by_label("With rows not trained or changed").select_option("broken_media")
    page.wait_for_url(re.compile("reason=broken_media"))
    assert count_packs() == 1
    page.locator("a[data-item]").click()
    document = page.locator("article", has=page.get_by_role("link", name=CUT, exact=True))
    expect(document.locator("h2 .mark")).to_have_text("not trained")
    expect(document.locator(".bad .mark")).to_have_text("broken media")
    expect(document.locator("small").first).to_have_text("not in the pack")


@pytest.mark.parametrize("dataset", ["charts", "drawings"])
def test_images_of_a_pack_are_those_of_its_rows_files(page: Page, server: Server, dataset: str) -> None:
    open_pack_with(page, dataset)
    compared = 0
    for document in page.locator("article:not(.fake)").all():
        key = document.locator("h2 a").inner_text()
        files = read_row(server, key).get("images", []) if key != CUT else []
        images = document.locator("figure a > img")
        assert images.count() == len(files), key
        for image, name in zip(images.all(), files, strict=True):
            pixels = np.asarray(Image.open(server.data / "media" / name).convert("RGB"))
            assert np.array_equal(fetch_pixels(page, image), pixels), f"{key}: {name}"
            compared += 1
    assert compared


def test_frames_of_a_video_are_those_of_its_file(page: Page, server: Server, keep: Any) -> None:
    open_pack_with(page, "clips")
    document = page.locator("article", has=page.locator(".frames")).first
    (name,) = read_row(server, document.locator("h2 a").inner_text())["videos"]
    with av.open(str(server.data / "media" / name)) as video:
        frames = [frame.to_ndarray(format="rgb24").astype(int) for frame in video.decode(video=0)]
    images = document.locator(".frames img")
    assert images.count() >= 4
    for image in images.all():
        number = int(re.findall(r"frame (\d+) of", str(image.get_attribute("alt")))[0])
        errors = [np.abs(fetch_pixels(page, image) - frame).mean() for frame in frames]
        assert errors[number] < 4
        assert errors[number] == min(errors)
    keep(page, "demo-pack", full_page=True)


def test_underlined_text_is_the_answer_of_the_assistant(page: Page, server: Server) -> None:
    open_pack_with(page, "charts")
    for document in page.locator("article:not(.fake)").all():
        key = document.locator("h2 a").inner_text()
        if key == CUT:
            continue
        answers = [
            turn["content"] for turn in read_row(server, key)["messages"] if turn["role"] == "assistant"
        ]
        supervised = document.locator(".tokens .run.supervised").evaluate_all(
            "runs => runs.map(run => run.lastChild.data)"  # without the number in front
        )
        assert "".join(supervised) == "".join(f"{text}<|im_end|>" for text in answers), key


def test_documents_follow_each_other_and_the_mask_has_a_triangle_for_each(page: Page) -> None:
    open_pack_with(page, "drawings")
    headings = page.locator("article:not(.fake) h2 small").all_inner_texts()
    offsets = [tuple(map(int, re.findall(r"offsets (\d+) to (\d+)", text)[0])) for text in headings]
    assert [first for first, _ in offsets] == [0, *(last + 1 for _, last in offsets[:-1])]
    paths = [path.get_attribute("d") for path in page.locator("svg.mask path.seen").all()]
    corners = [[float(number) for number in re.findall(r"[\d.]+", str(path))] for path in paths]
    scale = 160 / 256
    assert [(round(corner[0] / scale), round(corner[-1] / scale)) for corner in corners] == [
        (first, last + 1) for first, last in offsets
    ]


def test_positions_can_be_read_without_a_mouse(page: Page) -> None:
    open_pack_with(page, "clips")
    document = page.locator("article", has=page.locator(".frames")).first
    lines = document.locator("details.offsets tbody tr")
    expect(lines.first).not_to_be_visible()
    document.locator("details.offsets summary").focus()
    page.keyboard.press("Enter")
    video = lines.filter(has_text="<|video_pad|>")
    assert re.search(r"t \d+-\d+, h \d+-\d+, w \d+-\d+", video.inner_text())


def test_a_pack_without_media_shows_the_placeholders_it_may_get(page: Page) -> None:
    page.goto("/packs?media=none")
    page.locator("a[data-item]").first.click()
    fake = page.locator("article.fake")
    expect(fake.locator(".mark")).to_have_text(["fake image", "fake video"])
    assert fake.locator(".run.supervised").count() == 0
    expect(fake.first.locator(".run.media-item")).to_contain_text("<|image_pad|>")
    page.goto("/packs?media=video")
    page.locator("a[data-item]").first.click()
    assert "fake video" not in page.locator("main").inner_text()


def test_search_finds_rows_by_key_and_by_text_and_shows_both_sides(page: Page, server: Server) -> None:
    page.get_by_label("Search by row key or text").fill("drawings/12")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="drawings/12", exact=True).first.click()
    question, answer = (turn["content"] for turn in read_row(server, "drawings/12")["messages"])
    file = page.get_by_label("In the file")
    expect(file).to_contain_text(question.replace("<image>", "").strip())
    model = page.get_by_label("What the model sees")
    expect(model.locator(".supervised").first).to_contain_text(answer)
    expect(model).to_contain_text("<|im_start|>")
    page.get_by_label("Search by row key or text").fill(answer[2:-1].upper())
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="drawings/12", exact=True)).to_be_visible()


PAGES = {
    "overview": "/",
    "packs": "/packs?sort=fill",
    "pack": "/pack/0",
    "images": "/packs?media=image",
    "steps": "/steps",
    "last-step": "/steps?world_size=16&batch_size=2&gradient_accumulation_steps=2&step=999",
    "rows": "/rows",
    "not-trained": "/rows?outcome=not+trained",
    "docs": "/docs",
    "row": "/row/13",
    "broken": "/row/7",
    "search": "/search?q=bar",
    "empty-search": "/search",
}


@pytest.mark.parametrize(
    ("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark"), (320, "light")]
)
def test_every_page_fits_at_any_width_in_light_and_dark(
    browser: Browser, server: Server, width: int, scheme: Any, keep: Any
) -> None:
    context = new_context(browser, server, viewport={"width": width, "height": 844}, color_scheme=scheme)
    page = context.new_page()
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    for name, target in PAGES.items():
        page.goto(target)
        if name == "images":
            page.goto(str(page.locator("a[data-item]").first.get_attribute("href")))
        page.evaluate("document.querySelectorAll('details.offsets').forEach(element => element.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, target
        hidden = page.evaluate(
            "[...document.querySelectorAll('.scroll')].filter(a => a.scrollWidth > a.clientWidth).length"
        )
        assert hidden == 0, f"{target}: the page scrolls sideways"
        paper = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        red = int(str(re.findall(r"\d+", paper)[0]))
        assert red < 60 if scheme == "dark" else red > 200
        _load_images(page)
        keep(page, f"demo-{name}-{width}-{scheme}", full_page=True)
    context.close()
    assert errors == []


def _load_images(page: Page) -> None:
    """Load the lazy images of a page."""
    page.evaluate("document.querySelectorAll('img').forEach(image => { image.loading = 'eager'; })")
    page.wait_for_function("() => [...document.images].every(image => image.complete && image.naturalWidth)")


_CONTRASTS = """() => {
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, n) => sum + v * [.2126, .7152, .0722][n], 0);
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const paper = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
  };
  return [...document.querySelectorAll("main *")].filter(element => element.checkVisibility()
      && !element.closest("svg") && [...element.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
    .map(element => {
      const [a, b] = [light(parse(getComputedStyle(element).color)), light(paper(element))];
      const name = element.className + " " + element.textContent.slice(0, 40);
      return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), name];
    }).filter(([ratio]) => ratio < 4.5);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(browser: Browser, server: Server, scheme: Any) -> None:
    context = new_context(browser, server, color_scheme=scheme)
    page = context.new_page()
    for target in PAGES.values():
        page.goto(target)
        assert page.evaluate(_CONTRASTS) == [], target
    context.close()


def test_the_image_in_the_readme_is_of_this_viewer(page: Page, keep: Any) -> None:
    """``cp build/screenshots/viewer.png docs/images/`` renews it."""
    page.set_viewport_size({"width": 1280, "height": 766})
    page.goto("/steps?world_size=4&epoch=2")
    _load_images(page)
    keep(page, "viewer")
    root = Path(__file__).parents[2]
    path = root / "docs" / "images" / "viewer.png"
    assert path.stat().st_size < 300_000
    with Image.open(path) as saved, Image.open(SCREENSHOTS / "viewer.png") as renewed:
        assert saved.size == renewed.size
        small = [np.asarray(image.convert("L").resize((64, 43)), int) for image in (saved, renewed)]
    # Fonts differ between machines; another page, or one of an earlier design, differs by more.
    assert np.abs(small[0] - small[1]).mean() < 4, "the viewer has changed: renew the image"
    assert "docs/images/viewer.png" in (root / "README.md").read_text()
