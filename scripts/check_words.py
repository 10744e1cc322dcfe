"""Print words that the project does not use, with the word to write instead; exit 1 if there are any.

    python scripts/check_words.py [PATH …]

Reads Python, Markdown, HTML and TOML files as plain text. Identifiers are split at underscores and capitals,
so ``dropped`` is found as "dropped" and ``MediumCount`` as "media item count".
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOTS = ("src", "docs", "tests", "benchmarks", "examples", "scripts", "README.md", "CONTRIBUTING.md")
SUFFIXES = {".py", ".md", ".html", ".toml"}
OWN_FILES = {Path("scripts/check_words.py"), Path("tests/unit/scripts/test_check_words.py")}

# A regular expression over lower-case words, and what to write instead.
WORDS = {
    r"tickets?": "work item",
    r"deals?|dealt|dealing": "schedule (packs to steps and ranks), assign (samples to packs)",
    r"strata|stratum": "dataset ids",
    r"told|tells?|telling": "report, describe, message",
    r"media_item": "media item",
    r"images?": "image",
    r"videos?": "video",
    r"sounds?": "audio",
    r"learned": "supervised",
    r"dropped|leave out|leaves out|leaving out": "dropped (ledger, messages), excluded (from a plan)",
    r"reused": "reused, cached",
    r"leavings": "stale files",
    r"stand in|stands in|stand ins": "substitute, sentinel, placeholder",
    r"datasets?": "dataset",
    r"both ways": "bidirectional",
    r"anew": "re- (rebuild, recount, retry)",
    r"after": "after",
    r"beside": "next to, in addition to",
    r"so many": "state the number",
    r"nobody|somebody|whoever": "unknown; name who or what",
    r"to be had": "available",
    r"stands there": "name the fact, e.g. duplicate",
    r"rejected": "rejected, raises",
    r"fillers?": "placeholder, padding batch",
    r"micro (?:steps?|batch(?:es)?)": "micro-step, micro-batch",
    r"in a row": "consecutive",
    r"does not add up|adds? up": "reconcile",
    r"affair|burial|wishes|trusted with|bear(?:s|able)?|borne": "plain words",
    r"mules?|saddle|brim": "data people have: train.jsonl, coco",
    r"dearest|dearer": "most expensive",
    r"taken up again|takes? up again": "resumed",
    r"delivered|deliver|delivers": "delivered, yielded",
    r"asked for": "requested",
    r"made for it|makes sense": "valid; say the condition",
}
ALLOWED = (r"connection refused", r"side ?by ?side", r"soundfile", r"sounddevice", r"media item\.com")
_HYPHENED = ("micro-step", "micro-steps", "micro-batch", "micro-batches")
_FIND = re.compile(r"\b(?:" + "|".join(f"(?P<w{n}>{word})" for n, word in enumerate(WORDS)) + r")\b")


def split_identifiers(line: str) -> str:
    """Return the line in lower case with identifiers split into words."""
    line = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", line).lower()
    for word in _HYPHENED:
        line = line.replace(word, "")
    for allowed in ALLOWED:
        line = re.sub(allowed, "", line)
    return re.sub(r"[_\-]+", " ", line)


def find_words(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line number, word and replacement for each unwanted word of a file."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        for match in _FIND.finditer(split_identifiers(line)):
            yield number, match[0], list(WORDS.values())[int(str(match.lastgroup)[1:])]


def main(arguments: list[str]) -> int:
    """Check the files and folders named in the arguments, or the whole project."""
    found = 0
    for root in map(Path, arguments or ROOTS):
        for path in [root] if root.is_file() else sorted(root.rglob("*")):
            if path.suffix not in SUFFIXES or path in OWN_FILES or "results" in path.parts:
                continue
            for number, word, instead in find_words(path):
                found += 1
                print(f"{path}:{number}: {word!r}: write {instead}")
    if found:
        print(f"{found:,} words to replace", file=sys.stderr)
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
