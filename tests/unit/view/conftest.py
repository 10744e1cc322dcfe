"""A plan of the small mixed dataset, and the application that shows it."""

from pathlib import Path
from typing import Any

import pytest

from count_samples import save_processor
from packhorse.loader import LoaderConfig
from packhorse.tools.view.plan_report import plan_report
from packhorse.tools.view.plan_viewer import PlanViewer
from packhorse.tools.view.saved_plan import PlanRequest, PlanResult, make_plan, save_plan
from packhorse.tools.view.server import make_app
from view_samples import write_samples


@pytest.fixture(scope="package")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_processor(tmp_path_factory.mktemp("processor"))


@pytest.fixture(scope="package")
def planned(tmp_path_factory: pytest.TempPathFactory, saved: str) -> PlanResult:
    meta = write_samples(tmp_path_factory.mktemp("view") / "data")
    return make_plan(PlanRequest(LoaderConfig(data=str(meta), pack_size=512, max_bad_share=0.0), saved))


@pytest.fixture(scope="package")
def plan_file(planned: PlanResult) -> Path:
    path = Path(str(planned.request.config.data)).parent / "plan.phplan"
    save_plan(planned, plan_report(planned), path)
    return path


@pytest.fixture
def viewer(plan_file: Path) -> PlanViewer:
    return PlanViewer.open(str(plan_file))


@pytest.fixture
def app(viewer: PlanViewer) -> Any:
    return make_app(viewer)
