"""A viewer over a million packs."""

import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from count_samples import python_path, write_meta
from packhorse.datasets.count_columns import COUNTS, CountColumns
from packhorse.loader import LoaderConfig
from packhorse.loader.assemble import plan_settings
from packhorse.loader.deal import Packs
from packhorse.loader.plans import Planner
from packhorse.view.plan_book import save_book
from packhorse.view.planning import Planned, Request, open_request
from packhorse.view.report import plan_report

PACKS = 1_000_000
ROW = '{"messages":[{"role":"user","content":"Why?"},{"role":"assistant","content":"So."}]}\n'


def write_plan(folder: Path, saved: str) -> Path:
    """A plan of a million packs of two rows each, whose counts are made up (counting them takes minutes)."""
    (folder / "chats.jsonl").write_text(ROW * (2 * PACKS))
    meta = write_meta(folder, {"chats": {"file_name": "chats.jsonl"}})
    opened = open_request(Request(LoaderConfig(data=str(meta), pack_size=100), saved))
    lengths = np.random.default_rng(0).integers(35, 51, 2 * PACKS)  # two fit, never three
    columns = {name: np.zeros(2 * PACKS, np.int64) for name in (*COUNTS, "off_by")}
    ones = np.ones(2 * PACKS, bool)
    status = np.full(2 * PACKS, "ok", object)
    counts = CountColumns(**columns | {"text": lengths}, status=status, ok=ones, exact=ones)
    planner = Planner(counts, plan_settings(opened.request.config, opened.facts, 0), cache=False)
    plan = planner.plan(0)
    assert len(plan) == PACKS
    planned = Planned(opened, counts, planner, Packs(plan, planner.facts), 0)
    save_book(planned, plan_report(planned, estimates=False), folder / "many.phplan")
    return folder / "many.phplan"


@pytest.mark.slow
def test_the_first_page_is_there_within_a_second_of_the_servers_start(tmp_path: Path, saved: str) -> None:
    plan = write_plan(tmp_path, saved)
    command = [sys.executable, "-m", "packhorse", "view", str(plan), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": python_path(tmp_path / "path")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as running:
        try:
            assert running.stdout is not None
            address = re.findall(r"http://\S+/", running.stdout.readline())[0]
            seconds = {}
            for target in ("", "packs", "packs?sort=cost&down=1", "packs?dataset=chats&least=90", "problems"):
                started = time.monotonic()
                with urllib.request.urlopen(address + target) as answer:
                    assert b"Packhorse" in answer.read()
                seconds[target] = time.monotonic() - started
        finally:
            running.terminate()
    print(seconds)
    assert seconds[""] < 1.0
