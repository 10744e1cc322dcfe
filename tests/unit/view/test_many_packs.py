"""A viewer of many packs; ``benchmarks/view.py`` measures a million."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packhorse.rows.row_files import JsonRows
from packhorse.tools.view.plan_viewer import PlanViewer
from packhorse.tools.view.server import make_app
from view_samples import ask, write_many

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
    for target in ("/", "/packs", "/packs?sort=cost&down=1", "/packs?dataset=chats&least=90", "/problems"):
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
