"""A viewer of many packs; ``benchmarks/view.py`` measures a million."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packhorse.plan.schedule import PackSchedule
from packhorse.rows.row_files import JsonRows
from packhorse.tools.view import plan_viewer
from packhorse.tools.view.pages import STEP_LINES
from packhorse.tools.view.plan_report import plan_report
from packhorse.tools.view.plan_viewer import PlanViewer
from packhorse.tools.view.saved_plan import make_saved_plan
from packhorse.tools.view.server import make_app
from view_samples import ask, plan_many, write_many

PACKS = 3_000


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory, saved: str) -> Path:
    return write_many(tmp_path_factory.mktemp("many"), PACKS, saved)


def test_the_first_pages_read_no_row_and_need_no_processor(
    many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(PlanViewer.open(str(many), processor="./gone"))

    def read(*_: Any) -> None:
        raise AssertionError("a row was read")

    for name in ("raw", "read", "__getitem__"):
        monkeypatch.setattr(JsonRows, name, read)
    lists = ("/packs?sort=cost&down=1", "/packs?dataset=chats&least=90", "/rows?outcome=trained", "/rows.csv")
    for target in ("/", "/packs", "/rows", *lists):
        assert ask(app, target).status == 200, target
    with pytest.raises(AssertionError, match="a row was read"):
        ask(app, "/search?q=why")


def test_every_pack_is_on_one_page_of_the_list(many: Path) -> None:
    viewer = PlanViewer.open(str(many))
    app = make_app(viewer)
    packs: list[int] = []
    target: str | None = "/packs?sort=fill"
    while target is not None:
        page = ask(app, target).text
        packs += map(int, re.findall(r'href="/pack/(\d+)" data-item', page))
        link = re.search(r'rel="next" href="([^"]+)"', page)
        target = link.group(1).replace("&amp;", "&") if link else None
    assert sorted(packs) == list(range(PACKS))
    assert np.all(np.diff(viewer.plan.tokens[packs]) >= 0)


def test_steps_read_no_row_and_schedule_once(
    tmp_path: Path, saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan_many(tmp_path, PACKS, saved)
    viewer = PlanViewer(make_saved_plan(planned, plan_report(planned)), planned.opened, None, planned.planner)
    app, scheduled = make_app(viewer), []

    def schedule(*arguments: Any, **options: Any) -> PackSchedule:
        scheduled.append(arguments[1])
        return PackSchedule(*arguments, **options)

    def read(*_: Any) -> None:
        raise AssertionError("a row was read")

    monkeypatch.setattr(plan_viewer, "PackSchedule", schedule)
    for name in ("raw", "read", "__getitem__"):
        monkeypatch.setattr(JsonRows, name, read)
    for query in ("", "page=2", "page=60", "step=1499", "rank=1", "page=9999"):
        assert ask(app, f"/steps?world_size=2&{query}").status == 200
    assert len(scheduled) == 1
    wide = ask(app, "/steps?world_size=512").text
    assert len(re.findall(r'data-rank="\d+"', wide)) == STEP_LINES, "a step of 512 ranks is on several pages"
    assert len(scheduled) == 2


def test_a_plan_whose_counts_are_missing_has_no_steps_but_says_why(many: Path) -> None:
    answer = ask(make_app(PlanViewer.open(str(many))), "/steps")
    assert answer.status == 503
    assert "missing or out of date: run `packhorse plan` again" in answer.text
