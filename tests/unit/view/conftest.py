"""A plan of the small mixed set, and the application that shows it."""

from pathlib import Path
from typing import Any

import pytest

from count_samples import save_processor
from packhorse.loader import LoaderConfig
from packhorse.tools.view.book import Book
from packhorse.tools.view.plan_book import Planned, Request, make_plan, save_book
from packhorse.tools.view.plan_report import plan_report
from packhorse.tools.view.server import make_app
from view_samples import write_samples


@pytest.fixture(scope="package")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_processor(tmp_path_factory.mktemp("processor"))


@pytest.fixture(scope="package")
def planned(tmp_path_factory: pytest.TempPathFactory, saved: str) -> Planned:
    meta = write_samples(tmp_path_factory.mktemp("view") / "data")
    return make_plan(Request(LoaderConfig(data=str(meta), pack_size=512, max_bad_share=0.0), saved))


@pytest.fixture(scope="package")
def plan_file(planned: Planned) -> Path:
    path = Path(planned.request.config.data).parent / "made.phplan"
    save_book(planned, plan_report(planned), path)
    return path


@pytest.fixture
def book(plan_file: Path) -> Book:
    return Book.open(str(plan_file))


@pytest.fixture
def app(book: Book) -> Any:
    return make_app(book)
