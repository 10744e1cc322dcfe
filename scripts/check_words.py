"""Print words that the project does not use, with the word to write instead; exit 1 if there are any.

    python scripts/check_words.py [PATH …]

Reads Python, Markdown, HTML, JavaScript and TOML files as plain text: identifiers, comments, docstrings and
messages alike. Identifiers are split at underscores and capitals, so ``left_out`` is found as "left out" and
``MediumCount`` as "medium". In Python files a function named by a bare participle (``def _made``) is found
too, unless it is a property or a fixture: those name a value.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOTS = ("src", "docs", "tests", "benchmarks", "examples", "scripts", "README.md", "CONTRIBUTING.md")
SUFFIXES = {".py", ".md", ".html", ".js", ".toml"}
PROJECT = Path(__file__).resolve().parents[1]
# This file and its test name the words.
OWN_FILES = {PROJECT / "scripts/check_words.py", PROJECT / "tests/unit/scripts/test_check_words.py"}

# A regular expression over lower-case words, and what to write instead.
WORDS = {
    r"tickets?": "work item",
    r"(?:re)?(?:deals?|dealt|dealing)": "schedule (packs to steps and ranks), assign (samples to packs)",
    r"strata|stratum": "dataset ids",
    r"told|tells?|telling": "report, describe, message",
    r"mediums?": "media item",
    r"pictures?": "image",
    r"films?": "video",
    r"sounds?": "audio",
    r"learned": "supervised",
    r"left out|leave out|leaves out|leaving out": "dropped (ledger, messages), excluded (from a plan)",
    r"taken over|takes? over|took over": "reused, cached",
    r"leavings": "stale files",
    r"stand in|stands in|stand ins": "substitute, sentinel, placeholder",
    r"data sets?": "dataset",
    r"both ways": "bidirectional",
    r"anew": "re- (rebuild, recount, retry)",
    r"behind": "after",
    r"besides?": "next to, in addition to",
    r"so many": "state the number",
    r"nobody|somebody|whoever": "unknown; name who or what",
    r"to be had": "available",
    r"stands there": "name the fact, e.g. duplicate",
    r"refus(?:e|es|ed|ing|al|als)": "rejected, raises",
    r"fillers?": "placeholder, padding batch",
    r"blanks|blank (?:media|images?|videos?|audio|samples?|ones?|batch(?:es)?)": "placeholder",
    r"rooms?": "capacity, free space, padded length",
    r"facts of": "inspect_model, ModelInfo",
    r"accounts?": "epoch summary, EpochStats",
    r"talks?|talker": "communicate, collectives; conversation",
    r"micro (?:steps?|batch(?:es)?)": "micro-step, micro-batch",
    r"bad (?:ones |samples )?in a row": "consecutive",
    r"does not add up|adds? up": "reconcile",
    r"takes? back|taken back|took back": "roll back",
    r"affair|burial|wishes|trusted with|bear(?:s|able)?|borne|in vain": "plain words",
    r"mules?|saddle|brim": "data people have: train.jsonl, coco",
    r"dearest|dearer": "most expensive",
    r"taken up again|takes? up again": "resumed",
    r"handed out|hands? out|handing out": "delivered, yielded",
    r"asked for": "requested",
    r"made for it|makes sense": "valid; say the condition",
}
ALLOWED = (
    r"connection refused",
    r"into account",
    r"accounts? for",
    r"blank lines?",
    r"(?:\.|def )tell\((?:self)?\)",  # of file objects
    r"sound ?file",
    r"\"max_bad_in_a_row\"",  # a setting's earlier name, for "did you mean"
    r"[`\"]left_out[`\"]",  # the action's name in older ledger files
    r"\[\"strata\"\]",  # part of the digest of plans
)
_HYPHENED = re.compile(r"\bmicro-(?:step|batch)")
_ALLOWED = re.compile("|".join(ALLOWED))
_FIND = re.compile(r"\b(?:" + "|".join(f"(?P<w{n}>{word})" for n, word in enumerate(WORDS)) + r")\b")

# Functions are verbs or nouns. ``grouped``, ``lost`` and ``passed`` are public names; the others are nouns or
# verbs.
_PARTICIPLE = re.compile(
    r"\s*(?:async )?def _*((?:[a-z]+ed|begun|built|chosen|drawn|found|given|gone|heard|held|kept|known|lost"
    r"|made|meant|said|seen|sent|shown|taken|told|written))\("
)
_NOT_PARTICIPLES = {"embed", "feed", "grouped", "lost", "need", "passed", "seed", "shed", "speed"}
_NAMES_A_VALUE = re.compile(r"\s*@(?:\w+\.)*(?:property|cached_property|fixture|setter)\b")


def split_identifiers(line: str) -> str:
    """Return the line in lower case with identifiers split into words."""
    line = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", line).lower()
    line = _ALLOWED.sub("", _HYPHENED.sub("", line))
    return re.sub(r"[_\-]+", " ", line)


def find_words(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line number, word and replacement for each unwanted word of a text."""
    for number, line in enumerate(text.splitlines(), 1):
        for match in _FIND.finditer(split_identifiers(line)):
            yield number, match[0], list(WORDS.values())[int(str(match.lastgroup)[1:])]


def find_participles(code: str) -> Iterator[tuple[int, str, str]]:
    """Yield line number, name and advice for each function of Python code that is named by a participle."""
    previous = ""
    for number, line in enumerate(code.splitlines(), 1):
        match = _PARTICIPLE.match(line)
        if match and match[1] not in _NOT_PARTICIPLES and not _NAMES_A_VALUE.match(previous):
            yield number, f"def {match[1]}", "a verb, or a noun that says what comes back"
        previous = line


def list_files(roots: list[str]) -> Iterator[Path]:
    """Yield the files to check: those named, and those in the folders named."""
    for root in map(Path, roots):
        if not root.exists():
            raise SystemExit(f"{root}: no such file or folder")
        for path in [root] if root.is_file() else sorted(root.rglob("*")):
            if path.suffix in SUFFIXES and path.resolve() not in OWN_FILES and "results" not in path.parts:
                yield path


def main(arguments: list[str]) -> int:
    """Check the files and folders named in the arguments, or the whole project; return the exit status."""
    count = 0
    for path in list_files(arguments or [os.path.relpath(PROJECT / root) for root in ROOTS]):
        text = path.read_text(encoding="utf-8")
        if text.startswith("<!-- Generated"):  # from records that keep the words of their time
            continue
        hits = [*find_words(text), *(find_participles(text) if path.suffix == ".py" else ())]
        for number, word, instead in sorted(hits):
            print(f"{path}:{number}: {word!r}: write {instead}")
        count += len(hits)
    if count:
        print(f"{count:,} words to replace", file=sys.stderr)
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
