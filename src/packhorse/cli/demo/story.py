"""What a run of the demo has found, for its last screen and its report."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packhorse.cli.screen import own_command
from packhorse.ledger import Ledger

if TYPE_CHECKING:
    from packhorse.cli.demo.train import Step


@dataclass
class Story:
    """Filled in step by step.

    Attributes:
        out: the demo's folder.
        rows: of all files.
        findings: of the check: severity, rule, row, what was found.
        plan: see :func:`packhorse.view.report.plan_report`.
        saved_at: the step of the checkpoint that the killed run left.
        kill_at: the step in whose middle it was killed.
        whole: the steps of the uninterrupted run.
        killed: of the one that was killed.
        resumed: of the one that went on.
        ledger: of the killed run and the one that went on.
        delivered: rows that were trained.
        promises: what was promised, and whether it was kept.
        seconds: all of it took.
    """

    out: Path
    rows: int = 0
    findings: list[tuple[str, str, str, str]] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    saved_at: int = 0
    kill_at: int = 0
    whole: list[Step] = field(default_factory=list)
    killed: list[Step] = field(default_factory=list)
    resumed: list[Step] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    delivered: int = 0
    promises: list[tuple[str, bool]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def meta(self) -> Path:
        """The meta file."""
        return self.out / "data" / "meta.json"

    @property
    def model(self) -> Path:
        """Processor, config and, at the end, weights."""
        return self.out / "model"

    @property
    def plan_file(self) -> Path:
        """The plan that is trained."""
        return self.out / "plan.phplan"

    def command(self, name: str, *options: object) -> str:
        """A command as it can be typed here, on the demo's data."""
        return " ".join([own_command(), name, str(self.meta), *map(str, options)])

    def next_commands(self) -> list[tuple[str, str]]:
        """What to type next, and what it shows."""
        view = f"{own_command()} view {self.plan_file} --ledger {self.out / 'ledger.jsonl'}"
        return [
            (view, "packs, rows and losses in a browser"),
            (self.command("check", "--fix", self.out / "clean"), "a copy without the broken rows"),
            (self.command("stats", "--processor", self.model), "lengths and media of each data set"),
        ]

    @property
    def failed(self) -> int:
        """Rows of the plan that were not trained: they failed when they were decoded."""
        return self.ledger.lost() - int(self.plan["left_out"])
