"""Run the steps of the demo: write, check, count, plan, train, kill, resume, compare, report.

All files are in one folder. Takes well under three minutes on two cores, without a network.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from packhorse.cli import terminal
from packhorse.cli.demo.data import tiny_model, tiny_processor, write_demo_mix
from packhorse.cli.demo.train import PACK_SIZE, SAVE_EVERY, Step, demo_config, read_trace
from packhorse.cli.parity import choose_samples, load_model
from packhorse.cli.plan import print_comparison, print_dropped, summary_lines
from packhorse.count.counting import count_meta
from packhorse.errors import ConfigError, PackhorseError
from packhorse.families.models import open_processor
from packhorse.ledger import Ledger, read_ledgers
from packhorse.tools.check import check_meta
from packhorse.tools.parity import check_parity
from packhorse.tools.view import plots
from packhorse.tools.view.pages import plan_plots
from packhorse.tools.view.plan_report import plan_report
from packhorse.tools.view.saved_plan import PlanRequest, make_plan, save_plan, shorten
from packhorse.tools.view.server import make_renderer
from packhorse.utils.files import write_atomic

REPORT = "report.html"  # stays until there is a new one
_MARKER = ".packhorse-demo"
_OURS = ("data", "model", "runs", "cache", "plan.phplan", "ledger.jsonl")
_WIDTH = 100  # if stdout is not a terminal
_MERGES = 256  # of the tokenizer: a token is then about three letters long
_PARITY_SAMPLES = 8
_MAX_DETAIL = 90  # characters


def run_demo(folder: Path) -> bool:
    """Run all steps in ``folder`` and return whether every check passed."""
    prepare_folder(folder)
    demo = Demo(folder)
    with _quiet():
        demo.write()
        demo.check()
        demo.count()
        demo.make_plan()
        demo.train()
        demo.compare()
        demo.check_parity()
        demo.write_report()
    demo.show_summary()
    return all(passed for _, passed in demo.promises)


def prepare_folder(folder: Path) -> None:
    """Create the folder, or delete the files of an earlier demo in it; raise if its files are not a demo's.

    The report stays until there is a new one; other files are not touched.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: choose another folder with --out", path=folder)
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder / _MARKER
    if not marker.exists() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder} is not empty and was not written by the demo: nothing was changed; choose another "
            "folder with --out",
            path=folder,
        )
    marker.write_text(
        "This folder was written by `packhorse demo`, which overwrites it when it is run next.\n"
    )
    for name in _OURS:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


class Demo:
    """One run of the demo; each step prints its results and keeps them for the report."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self.started = folder, terminal.Output(_WIDTH), time.monotonic()
        self.meta, self.model = folder / "data" / "meta.json", folder / "model"
        self.plan_file, self.ledger_file = folder / "plan.phplan", folder / "ledger.jsonl"
        self.rows = self.delivered = 0  # all rows, and trained ones
        self.saved_at = self.kill_at = 0  # steps of the killed run: last checkpoint, kill
        self.seconds = 0.0
        self.findings: list[tuple[str, str, str, str]] = []  # (severity, rule, row, finding)
        self.plan: dict[str, Any] = {}  # see plan_report
        self.runs: dict[str, list[Step]] = {}  # "whole", "killed" and "resumed"
        self.ledger = Ledger()
        self.promises: list[tuple[str, bool]] = []  # the checks, and whether they passed

    def write(self) -> None:
        """Write the data, the processor and the model's config."""
        self._title(1, "Generate a small mixed dataset with a few broken rows")
        write_demo_mix(self.folder / "data")
        rows = {path.stem: path.read_text().splitlines() for path in sorted(self.meta.parent.glob("*.jsonl"))}
        self.rows = sum(map(len, rows.values()))
        sizes = ", ".join(f"{len(lines)} {name}" for name, lines in rows.items())
        self._line(f"{sizes}: {self.rows} rows. Seven of them have errors on purpose.")
        processor = tiny_processor((line for lines in rows.values() for line in lines), _MERGES)
        processor.save_pretrained(self.model)
        model = tiny_model(processor)
        model.config.save_pretrained(self.model)
        weights = sum(weight.numel() for weight in model.parameters())
        self._line(f"A Qwen2-VL with {weights:,} random weights and the processor of transformers.")

    def check(self) -> None:
        """Look for broken rows."""
        command = self._command("check", "--processor", self.model, "--max-length", PACK_SIZE)
        self._title(2, f"Find errors in the data: {command}")
        report = check_meta(str(self.meta), str(self.model), max_length=PACK_SIZE, decode=True)
        self.findings = [
            (finding.severity, finding.rule, finding.key, finding.found)
            for finding in report.findings()
            if finding.severity != "note"
        ]
        for severity, rule, key, found in self.findings:
            self._line(f"{severity:<8} {rule:<20} {key:<12} {shorten(found, _MAX_DETAIL)}")

    def count(self) -> None:
        """Count the tokens of every row, and compare some with the real processor."""
        self._title(3, f"Count the tokens of each row: {self._command('count', '--processor', self.model)}")
        report = count_meta(str(self.meta), str(self.model), verify=20)
        totals, verified = report.totals(), report.verified
        assert verified is not None  # verify=20
        tokens = ", ".join(f"{count:,} {kind}" for kind, count in totals["tokens"].items() if count)
        self._line(f"{tokens} tokens, counted without decoding an image.")
        checked, failed = verified.checked, len(verified.failed)
        self._promise(
            f"{checked} random rows encoded by the real processor: {failed} counts differ",
            failed == 0 < checked,
        )

    def make_plan(self) -> None:
        """Plan the packs, and save the plan."""
        command = self._command("plan", "--processor", self.model, "--pack-size", PACK_SIZE)
        self._title(4, f"Assign rows to packs: {command}")
        planned = make_plan(PlanRequest(demo_config(self.folder), str(self.model), str(self.model)))
        self.plan = plan_report(planned)
        save_plan(planned, self.plan, self.plan_file)
        for name, text in summary_lines(self.plan):
            self._line(f"{name:<10} {text}")
        self.out.line()
        print_comparison(self.plan, self.out)
        print_dropped(self.plan, self.out)

    def train(self) -> None:
        """Train without interruption in the background; meanwhile train, kill the run and resume it."""
        steps = self.plan["packs"]
        self.saved_at = steps // 2 // SAVE_EVERY * SAVE_EVERY
        self.kill_at = self.saved_at + SAVE_EVERY // 2 + 1
        self._title(5, f"Train with packs: {steps} steps, with kill -9 in step {self.kill_at}")
        whole = self._start("whole")
        try:
            code = self._relay(self._start("killed", "--kill-at", str(self.kill_at)))
            if code != -signal.SIGKILL:
                raise PackhorseError(f"expected a killed run, but it ended with exit code {code}")
            self._line(f"killed in step {self.kill_at}; the last checkpoint is that of step {self.saved_at}")
            self._title(6, f"Resume from step {self.saved_at} in a new process")
            if code := self._relay(self._start("resumed", "--from", "killed")):
                raise PackhorseError(f"the resumed run ended with exit code {code}")
            if code := whole.wait():
                raise PackhorseError(f"the uninterrupted run ended with exit code {code}")
        finally:
            if whole.poll() is None:
                whole.kill()
            whole.wait()
        names = ("whole", "killed", "resumed")
        self.runs = {name: read_trace(self.folder / "runs" / name) for name in names}

    def _start(self, name: str, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "packhorse.cli.demo.train", str(self.folder), name, *options]
        stdout = subprocess.DEVNULL if name == "whole" else subprocess.PIPE
        return subprocess.Popen(command, stdout=stdout, text=True)

    def _relay(self, process: subprocess.Popen[str]) -> int:
        """Print the output of a run as it arrives, and return its exit code."""
        assert process.stdout is not None  # a pipe
        try:
            for line in process.stdout:
                self._line(line.rstrip())
            return process.wait()
        finally:
            process.kill()
            process.stdout.close()
            process.wait()

    def compare(self) -> None:
        """Compare the resumed run with the uninterrupted one, and reconcile the rows with the ledger."""
        self._title(7, "Compare with an uninterrupted run, and look for every row")
        whole, resumed = self.runs["whole"], self.runs["resumed"]
        steps = [*(step for step in self.runs["killed"] if step.step <= self.saved_at), *resumed]
        self._promise(
            f"steps {self.saved_at + 1} to {len(whole)}: losses equal those of an uninterrupted run exactly",
            [step.loss for step in resumed] == [step.loss for step in whole[self.saved_at :]],
        )
        self._promise("every step has the same rows as in an uninterrupted run", steps == whole)
        first, last = (sum(step.loss for step in part) / 5 for part in (whole[:5], whole[-5:]))
        self._promise(
            f"the loss decreases: {first:.2f} in the first five steps, {last:.2f} in the last five",
            last < first,
        )
        self.ledger, _ = read_ledgers(self.folder / "runs" / "resumed" / "ledger")
        self.ledger.save(self.ledger_file)
        delivered = [key for step in steps for key in step.samples]
        self.delivered = len(delivered)
        self._promise(
            f"{self.rows} rows = {len(delivered)} trained once + {self.plan['dropped']} in no pack + "
            f"{self._num_failed()} that could not be decoded; the ledger has their reasons",
            len(set(delivered)) == len(delivered) and len(delivered) + self.ledger.lost() == self.rows,
        )
        for drop in self.ledger:
            detail = shorten(" ".join(drop.detail.split()), _MAX_DETAIL)
            self._line(f"  {drop.key:<12} {drop.action:<9} {drop.reason:<20} {detail}")

    def _num_failed(self) -> int:
        """Return how many rows of the plan could not be decoded."""
        return self.ledger.lost() - int(self.plan["dropped"])

    def check_parity(self) -> None:
        """Compare packed with unpacked training."""
        command = self._command("parity", "--model", self.model)
        self._title(8, f"Compare packed with unpacked training: {command}")
        processor = open_processor(str(self.model))
        model = load_model(str(self.model), "float32", "cpu", False, False)
        chosen = choose_samples(str(self.meta), None, _PARITY_SAMPLES, processor)
        for backend in ("sdpa", "eager"):
            report = check_parity(model, processor, chosen.samples, backend, rows=2, keys=chosen.keys)
            self._promise(report.describe(), report.ok)

    def write_report(self) -> None:
        """Write one HTML page that includes its style and plots, with the viewer's templates."""
        self.seconds = time.monotonic() - self.started
        losses = {name: [(step.step, step.loss) for step in steps] for name, steps in self.runs.items()}
        page = make_renderer()(
            "demo.html",
            style=files("packhorse.tools.view").joinpath("static", "style.css").read_text(encoding="utf-8"),
            demo=self,
            report=self.plan,
            linked=False,
            failed=self._num_failed(),
            loss_plot=plots.losses(losses, self.kill_at, "Loss by step"),
            rows_plot=plots.meter(self.delivered / max(1, self.rows), "Rows trained"),
            drops=[(drop.key, drop.action, drop.reason, drop.detail) for drop in self.ledger],
            commands=self._next_commands(),
            **plan_plots(self.plan),
        )
        write_atomic(self.folder / REPORT, lambda file: file.writelines([page.encode()]))

    def show_summary(self) -> None:
        """Print whether all checks passed, the files, and the next commands."""
        failed = sum(not passed for _, passed in self.promises)
        self.out.console.rule(style="dim")
        verdict = f"{failed} of {len(self.promises)} checks FAILED." if failed else "All checks passed."
        self.out.line(f"{verdict} {self.seconds:.0f} s. Files:", style="bold")
        self._line(f"{self.folder / REPORT}    plots of the run (open it in a browser)")
        self._line(f"{self.ledger_file}   every row that was dropped, replaced, cut or repaired")
        self.out.line("Next commands:", style="bold")
        for command, comment in self._next_commands():
            self._line(f"{command}   # {comment}")

    def _next_commands(self) -> list[tuple[str, str]]:
        """Return commands to try on the demo's files, with comments."""
        view = f"{terminal.command_name()} view {self.plan_file} --ledger {self.ledger_file}"
        return [
            (view, "packs, rows and dropped rows in a browser"),
            (self._command("check", "--fix", self.folder / "clean"), "a copy without the broken rows"),
            (self._command("stats", "--processor", self.model), "lengths and media of each dataset"),
        ]

    def _command(self, name: str, *options: object) -> str:
        """Return a command line on the demo's data."""
        return " ".join([terminal.command_name(), name, str(self.meta), *map(str, options)])

    def _title(self, number: int, text: str) -> None:
        self.out.line()
        self.out.line(f"{number}. {text}", style="bold")

    def _line(self, text: str) -> None:
        self.out.line(f"   {text}")

    def _promise(self, text: str, passed: bool) -> None:
        self.promises.append((text, passed))
        self.out.line("ok  " if passed else "FAIL", style="green" if passed else "bold red", end=" ")
        self.out.line(text)


@contextmanager
def _quiet() -> Iterator[None]:
    """Work offline, without logs of Packhorse, and use one thread per process, which is faster here."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    log, threads = logging.getLogger("packhorse"), torch.get_num_threads()
    level = log.level
    log.setLevel(logging.ERROR)  # the demo prints the same
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        log.setLevel(level)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
