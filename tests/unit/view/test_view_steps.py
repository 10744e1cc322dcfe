"""The list of steps, compared with what real loaders with the same settings deliver."""

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

import packhorse
from packhorse import World
from packhorse.loader import LoaderConfig
from packhorse.plan.schedule import BatchLayout
from packhorse.tools.view.plan_report import plan_report
from packhorse.tools.view.plan_viewer import PlanViewer
from packhorse.tools.view.saved_plan import PlanRequest, make_plan, save_plan
from packhorse.tools.view.server import make_app
from view_samples import CUT, ask, write_samples

SIZE = 320
Steps = dict[int, dict[int, list[list[str]]]]


@pytest.fixture(scope="module")
def small_packs(tmp_path_factory: pytest.TempPathFactory, saved: str) -> Path:
    """A plan file of about a dozen packs."""
    meta = write_samples(tmp_path_factory.mktemp("steps") / "data")
    planned = make_plan(PlanRequest(LoaderConfig(data=str(meta), pack_size=SIZE), saved))
    save_plan(planned, plan_report(planned), meta.parent / "plan.phplan")
    assert len(planned.packs.plan) > 6
    return meta.parent / "plan.phplan"


def read_steps(app: Any, query: str) -> tuple[Steps, dict[int, float]]:
    """Return the rows of each pack by step and rank, and the straggler ratios, from all pages of a list."""
    steps: Steps = {}
    ratios: dict[int, float] = {}
    target: str | None = f"/steps?{query}"
    while target is not None:
        page = html.unescape(ask(app, target).text)
        for section in page.split('<section class="step"')[1:]:
            step = int(re.findall(r'data-step="(\d+)"', section)[0])
            ratios[step] = float(re.findall(r"straggler ratio ([\d.]+)", section)[0])
            for rank, keys in re.findall(r'<tr data-rank="(\d+)" data-keys="([^"]*)"', section):
                packs = steps.setdefault(step, {}).setdefault(int(rank), [])
                packs += [keys.split()] if keys else []
        link = re.search(r'rel="next" href="([^"]+)"', page)
        target = link.group(1) if link else None
    return steps, ratios


@pytest.mark.parametrize(
    ("world_size", "batch_size", "accumulation", "epoch"),
    [(1, 1, 1, 0), (2, 1, 1, 0), (2, 2, 1, 1), (3, 1, 2, 2), (16, 1, 2, 1)],
)
def test_steps_are_those_that_real_loaders_deliver(
    small_packs: Path, saved: str, world_size: int, batch_size: int, accumulation: int, epoch: int
) -> None:
    app = make_app(PlanViewer.open(str(small_packs)))
    layout = {
        "world_size": world_size,
        "batch_size": batch_size,
        "gradient_accumulation_steps": accumulation,
        "epoch": epoch,
    }
    query = "&".join(f"{name}={value}" for name, value in layout.items())
    shown, _ = read_steps(app, query)
    delivered: Steps = {}
    for rank in range(world_size):
        loader = packhorse.load(
            str(small_packs.with_name("meta.json")),
            saved,
            model="unchecked",
            world=World(rank, world_size),
            pack_size=SIZE,
            batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            max_bad_share=1.0,
            num_workers=0,
        )
        loader.set_epoch(epoch)
        assert loader.plan_key == json.loads(ask(app, "/report.json").body)["name"]
        for batch in loader:
            assert batch.info.epoch == epoch
            documents = [[key for key in row if key] for row in batch.info.document_keys]
            delivered.setdefault(batch.info.step, {})[rank] = [row for row in documents if row]
    assert max(map(len, delivered.values())) == world_size
    lost = f"charts/{CUT}"  # in a pack, but its image cannot be decoded
    assert lost in str(shown)
    planned = {
        step: {rank: [row for row in _without(packs, lost) if row] for rank, packs in ranks.items()}
        for step, ranks in shown.items()
    }
    assert planned == delivered


def _without(packs: list[list[str]], lost: str) -> list[list[str]]:
    return [[key for key in pack if key != lost] for pack in packs]


def test_costs_and_straggler_ratios_are_those_of_the_schedule(small_packs: Path) -> None:
    viewer = PlanViewer.open(str(small_packs))
    app, schedule = make_app(viewer), viewer.schedule(BatchLayout(3), 0)
    _, ratios = read_steps(app, "world_size=3")
    for step in range(len(schedule.steps)):
        costs = schedule.steps.costs(step)
        assert ratios[step] == round(float(costs.max() / costs.mean()), 3)
    page = ask(app, "/steps?world_size=3").text
    assert f'data-number="straggler">{schedule.steps.straggler_ratio():.4f}<' in page
    ranks = [json.loads(line) for line in ask(app, "/steps.jsonl?world_size=3").text.splitlines()]
    mean = float(viewer.packs(0).costs.mean())
    for line in ranks:
        assert line["rank_cost"] * mean == pytest.approx(schedule.steps.costs(line["step"])[line["rank"]])


def test_one_rank_can_be_listed_and_a_step_can_be_chosen(small_packs: Path) -> None:
    app = make_app(PlanViewer.open(str(small_packs)))
    steps, _ = read_steps(app, "world_size=2")
    alone, _ = read_steps(app, "world_size=2&rank=1")
    assert alone == {step: {1: ranks[1]} for step, ranks in steps.items()}
    last = max(steps)
    assert f'data-step="{last}"' in ask(app, f"/steps?world_size=2&step={last}").text
    assert f'data-step="{last}"' in ask(app, f"/steps?world_size=2&step={last + 99}").text


def test_a_pack_of_another_epoch_is_shown_with_its_rows(small_packs: Path) -> None:
    viewer = PlanViewer.open(str(small_packs))
    app = make_app(viewer)
    plan = viewer.packs(5).plan
    assert plan.bins() != viewer.plan.bins()
    page = ask(app, "/steps?world_size=2&epoch=5").text
    assert 'href="/pack/0?epoch=5"' in page
    shown = ask(app, "/pack/0?epoch=5").text
    assert re.findall(r'<a href="/row/(\d+)">', shown) == [str(row) for row in plan[0].tolist()]
    assert 'rel="next" href="/pack/1?epoch=5"' in shown


def test_a_layout_that_is_too_large_is_rejected_with_the_limit(small_packs: Path) -> None:
    app = make_app(PlanViewer.open(str(small_packs)))
    for target in ("/steps?world_size=1000000", "/steps.csv?world_size=99999&batch_size=99"):
        answer = ask(app, target)
        assert answer.status == 503
        assert "expected at most 100,000 packs in an optimizer step" in answer.text


def test_data_that_changed_since_the_plan_have_no_steps(
    small_packs: Path, saved: str, tmp_path: Path
) -> None:
    meta = write_samples(tmp_path / "data")
    planned = make_plan(PlanRequest(LoaderConfig(data=str(meta), pack_size=SIZE), saved))
    save_plan(planned, plan_report(planned), tmp_path / "plan.phplan")
    text = (meta.parent / "chats.jsonl").read_text()
    (meta.parent / "chats.jsonl").write_text(text.replace("report number 7", "summary number 7"))
    make_plan(planned.request)  # counts the changed rows
    answer = ask(make_app(PlanViewer.open(str(tmp_path / "plan.phplan"))), "/steps")
    assert answer.status == 503
    assert "have changed since the plan was made" in answer.text
