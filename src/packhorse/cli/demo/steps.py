"""The demo, step by step: write, check, count, plan, train, kill, go on, compare, report.

Everything stays inside one folder. Takes well under three minutes on two cores, without a network.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packhorse.cli.demo.page import Story
from packhorse.cli.terminal import out_console
from packhorse.errors import ConfigError, PackhorseError, plain_error

if TYPE_CHECKING:
    from rich.console import Console


_MARKER = ".packhorse-demo"
_OURS = ("data", "model", "runs", "cache", "plan.phplan", "ledger.jsonl")
_REPORT = "report.html"  # stays until there is a new one
_WIDTH = 100  # of what goes to a file
_WORDS = 256  # pairs of letters the tokenizer learns: a token is then some three letters long
_PARITY_SAMPLES = 8


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the demo; ``--out`` is the folder it writes to."""
    parser = argparse.ArgumentParser(prog="packhorse demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder to write to")
    out: Path = parser.parse_args(arguments).out
    try:
        held = run_demo(out)
    except (PackhorseError, OSError) as error:
        print(f"packhorse demo: {plain_error(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        old = f"; {out / _REPORT} is of an earlier run" if (out / _REPORT).exists() else ""
        print(f"stopped; {out} is unfinished (the next run starts again){old}", file=sys.stderr)
        sys.exit(130)
    sys.exit(not held)


def run_demo(out: Path) -> bool:
    """Run all of it inside ``out``; whether all that was promised on the way was kept.

    Raises:
        ConfigError: ``out`` has files that are not the demo's.
    """
    from packhorse.cli.demo.page import write_report

    started = time.monotonic()
    take_folder(out)
    story = Story(out)
    console = out_console(_WIDTH)
    with _quiet():
        _write(story, console)
        _check(story, console)
        _count(story, console)
        _plan(story, console)
        _train(story, console)
        _compare(story, console)
        _parity(story, console)
        story.seconds = time.monotonic() - started
        write_report(story, out / _REPORT)
    _last_screen(story, console)
    return all(held for _, held in story.promises)


def take_folder(out: Path) -> None:
    """Make the folder ready: a new one, an empty one, or the demo's own, whose files are deleted.

    The report stays until there is a new one. What else lies in the demo's own folder is not touched.

    Raises:
        ConfigError: it has files and is not the demo's.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file: name another folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    marker = out / _MARKER
    if not marker.exists() and any(out.iterdir()):
        raise ConfigError(
            f"{out} is not empty and was not written by the demo: nothing was touched; name another folder "
            "with --out"
        )
    marker.write_text(
        "This folder was written by `packhorse demo`, which overwrites it when it runs again.\n"
    )
    for name in _OURS:
        path = out / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _write(story: Story, console: Console) -> None:
    from packhorse.cli.demo.data import write_demo_mix
    from packhorse.cli.demo.tiny import tiny_model, tiny_processor

    _title(console, 1, "A small mixed data set, with a few broken rows")
    meta = write_demo_mix(story.out / "data")
    rows = {path.stem: path.read_text().splitlines() for path in sorted(meta.parent.glob("*.jsonl"))}
    story.rows = sum(map(len, rows.values()))
    told = ", ".join(f"{len(lines)} {name}" for name, lines in rows.items())
    _say(console, f"{told}: {story.rows} rows, drawn here. Seven are broken or odd on purpose.")
    processor = tiny_processor((line for lines in rows.values() for line in lines), _WORDS)
    processor.save_pretrained(story.model)
    model = tiny_model(processor)
    model.config.save_pretrained(story.model)
    size = sum(weight.numel() for weight in model.parameters())
    _say(console, f"A Qwen2-VL of {size:,} random weights, with the processor of transformers.")


def _check(story: Story, console: Console) -> None:
    from packhorse.tools.check import check_meta

    told = story.command("check", "--processor", story.model, "--max-length", _pack_size())
    _title(console, 2, f"What is wrong with them?  {told}")
    report = check_meta(str(story.meta), str(story.model), max_length=_pack_size(), decode=True)
    story.findings = [
        (one.severity, one.rule, one.key, one.found) for one in report.findings() if one.severity != "note"
    ]
    for severity, rule, key, found in story.findings:
        _say(console, f"{severity:<8} {rule:<20} {key:<12} {_short(found)}")


def _count(story: Story, console: Console) -> None:
    from packhorse.count.counting import count_meta

    _title(console, 3, f"How long is each row?  {story.command('count', '--processor', story.model)}")
    report = count_meta(str(story.meta), str(story.model), verify=20)
    totals, verified = report.totals(), report.verified
    assert verified is not None  # it was asked for
    tokens = ", ".join(f"{number:,} {kind}" for kind, number in totals["tokens"].items() if number)
    _say(console, f"{tokens} tokens, counted without decoding a picture.")
    _promise(
        story,
        console,
        f"{verified.checked} random rows through the real processor: {len(verified.failed)} counts differ",
        verified.checked > 0 and not verified.failed,
    )


def _plan(story: Story, console: Console) -> None:
    from packhorse.cli.demo.train import demo_config
    from packhorse.cli.plan import print_costs, print_left_out, summary_lines
    from packhorse.tools.view.plan_book import Request, make_plan, save_book
    from packhorse.tools.view.plan_report import plan_report

    told = story.command("plan", "--processor", story.model, "--pack-size", _pack_size())
    _title(console, 4, f"Which rows share a pack?  {told}")
    planned = make_plan(Request(demo_config(story.out), str(story.model), str(story.model)))
    story.plan = plan_report(planned)
    save_book(planned, story.plan, story.plan_file)
    for name, text in summary_lines(story.plan):
        _say(console, f"{name:<10} {text}")
    console.print()
    print_costs(story.plan, console)
    print_left_out(story.plan, console)


def _train(story: Story, console: Console) -> None:
    """An uninterrupted run in the background; beside it one that is killed, and one that goes on from it."""
    from packhorse.cli.demo.train import SAVE_EVERY, read_trace

    steps = story.plan["packs"]
    story.saved_at = steps // 2 // SAVE_EVERY * SAVE_EVERY
    story.kill_at = story.saved_at + SAVE_EVERY // 2 + 1
    _title(console, 5, f"Train it packed: {steps} steps, and kill -9 in step {story.kill_at}")
    whole = _start(story, "whole")
    try:
        code = _relayed(_start(story, "killed", "--kill-at", str(story.kill_at)), console)
        if code != -signal.SIGKILL:
            raise PackhorseError(f"the run that was to be killed ended with exit code {code}")
        _say(console, f"killed in step {story.kill_at}; the last checkpoint is of step {story.saved_at}")
        _title(console, 6, f"Go on from step {story.saved_at}, in a new process")
        if code := _relayed(_start(story, "resumed", "--from", "killed"), console):
            raise PackhorseError(f"the run that goes on ended with exit code {code}")
        if code := whole.wait():
            raise PackhorseError(f"the uninterrupted run ended with exit code {code}")
    finally:
        if whole.poll() is None:
            whole.kill()
        whole.wait()
    story.whole, story.killed, story.resumed = (
        read_trace(story.out / "runs" / name) for name in ("whole", "killed", "resumed")
    )


def _start(story: Story, name: str, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "packhorse.cli.demo.train", str(story.out), name, *options]
    told = subprocess.DEVNULL if name == "whole" else subprocess.PIPE
    return subprocess.Popen(command, stdout=told, text=True)


def _relayed(process: subprocess.Popen[str], console: Console) -> int:
    """Print what a run says as it says it; its exit code."""
    assert process.stdout is not None  # it has a pipe
    try:
        for line in process.stdout:
            _say(console, line.rstrip())
        return process.wait()
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


def _compare(story: Story, console: Console) -> None:
    from packhorse.tools.ledgers import read_ledgers

    _title(console, 7, "Did the kill change anything? Is every row accounted for?")
    kept = [one for one in story.killed if one.step <= story.saved_at]
    together = [*kept, *story.resumed]
    _promise(
        story,
        console,
        f"steps {story.saved_at + 1} to {len(story.whole)}: losses are those of an uninterrupted run, to the "
        "last bit",
        [one.loss for one in story.resumed] == [one.loss for one in story.whole[story.saved_at :]],
    )
    _promise(
        story, console, "every step has the same rows as in an uninterrupted run", together == story.whole
    )
    first, last = _mean(story.whole[:5]), _mean(story.whole[-5:])
    told = f"the loss falls: {first:.2f} in the first five steps, {last:.2f} in the last five"
    _promise(story, console, told, last < first)
    story.ledger, _ = read_ledgers(story.out / "runs" / "resumed" / "ledger")
    story.ledger.save(story.out / "ledger.jsonl")
    delivered = [key for one in together for key in one.samples]
    story.delivered, lost = len(delivered), story.ledger.lost()
    _promise(
        story,
        console,
        f"{story.rows} rows = {len(delivered)} trained, each once + {story.plan['left_out']} in no pack + "
        f"{story.failed} that failed when decoded, each with its reason",
        len(set(delivered)) == len(delivered) and len(delivered) + lost == story.rows,
    )
    for drop in story.ledger:
        _say(console, f"  {drop.key:<12} {drop.action:<9} {drop.reason:<20} {_short(drop.detail)}")


def _mean(steps: Sequence[Any]) -> float:
    return float(sum(one.loss for one in steps) / max(1, len(steps)))


def _parity(story: Story, console: Console) -> None:
    from packhorse.cli.parity import choose_samples, load_model
    from packhorse.families.processors import open_processor
    from packhorse.tools.parity import check_parity

    told = story.command("parity", "--model", story.model)
    _title(console, 8, f"Is packed training the same as unpacked training?  {told}")
    processor = open_processor(str(story.model))
    model = load_model(str(story.model), "float32", "cpu", False, False)
    chosen = choose_samples(str(story.meta), None, _PARITY_SAMPLES, processor)
    for backend in ("sdpa", "eager"):
        report = check_parity(model, processor, chosen.samples, backend, rows=2, keys=chosen.keys)
        _promise(story, console, report.describe(), report.ok)


def _last_screen(story: Story, console: Console) -> None:
    broken = [told for told, held in story.promises if not held]
    console.rule(style="dim")
    verdict = "All of it held." if not broken else f"{len(broken)} of {len(story.promises)} did NOT hold."
    console.print(f"{verdict} {story.seconds:.0f} s. Where to look:", style="bold")
    _say(console, f"{story.out}/report.html    the run in plots (open it in a browser)")
    _say(console, f"{story.out}/ledger.jsonl   every row that is not trained as its file has it")
    console.print("What to type next:", style="bold")
    for command, about in story.next_commands():
        _say(console, f"{command}   # {about}")


def _pack_size() -> int:
    from packhorse.cli.demo.train import PACK_SIZE

    return PACK_SIZE


def _promise(story: Story, console: Console, told: str, held: bool) -> None:
    story.promises.append((told, held))
    style = "green" if held else "bold red"
    console.print("ok  " if held else "MISS", style=style, end=" ")
    console.print(told, markup=False, soft_wrap=True)


def _title(console: Console, number: int, told: str) -> None:
    console.print()
    console.print(f"{number}. {told}", style="bold", markup=False, soft_wrap=True)


def _say(console: Console, told: str) -> None:
    console.print(f"   {told}", markup=False, soft_wrap=True)


def _short(text: str, most: int = 90) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing is asked of the network, libraries do not talk in between, and one core is enough for each.

    (Several threads for so small a model wait for each other more than they compute.)
    """
    import torch

    wanted = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    wanted |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    log, threads = logging.getLogger("packhorse"), torch.get_num_threads()
    level = log.level
    log.setLevel(logging.ERROR)  # what it says, the demo says too
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
