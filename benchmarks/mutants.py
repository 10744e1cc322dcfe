"""Mutation tests: do tests fail if an important line is wrong?

    python benchmarks/mutants.py [--quick] [--only NAME]

Each mutant is one line of ``src`` changed for the worse, in a copy of it. The tests that should notice run
against the copy; first against one without a change, where they have to pass. A mutant that its tests do not
notice is a hole in the suite. ``--quick`` takes those of the quickest tests.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from promises import fact, make_parser, parse, promise, record_outcome

ROOT = Path(__file__).resolve().parents[1]
_TOO_LONG = 600


@dataclass(frozen=True)
class Mutant:
    """A wrong line.

    Attributes:
        name: what it breaks.
        file: of ``src/packhorse``.
        right: the text as it is; it occurs once in the file.
        wrong: the text that replaces it.
        tests: what has to notice.
        quick: whether these take seconds.
    """

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]
    quick: bool = False


MUTANTS = (
    Mutant(
        "labels are not shifted",
        "chat.py",
        'batch[key][..., 1:] if key in ("labels", "loss_weights") else',
        'batch[key][..., :-1] if key in ("labels", "loss_weights") else',
        ("tests/unit/test_chat.py",),
        quick=True,
    ),
    Mutant(
        "the token before an answer is supervised too",
        "chat.py",
        "bisect.bisect_left(tokens.starts, span[0])",
        "bisect.bisect_left(tokens.ends, span[0])",
        ("tests/unit/test_chat.py", "tests/contract/test_tokenized.py"),
    ),
    Mutant(
        "an image has one token more",
        "chat.py",
        "written += [row[start]] * length",
        "written += [row[start]] * (length + 1)",
        ("tests/unit/test_chat_runs.py", "tests/contract/test_family.py"),
    ),
    Mutant(
        "the mean loss is that of one rank",
        "integrations/loss.py",
        "return replicas / (tokens or 1)",
        "return 1 / (tokens or 1)",
        ("tests/unit/integrations/test_token_loss.py",),
    ),
    Mutant(
        "the gradient is that of the first token's factor",
        "families/logits.py",
        "shares.mul_(-outer[part, None])",
        "shares.mul_(-outer[part][:1, None])",
        ("tests/unit/integrations/test_token_loss.py",),
    ),
    Mutant(
        "a step divides by its tokens, not by their weights",
        "integrations/loss.py",
        'return float(weights.to("cpu", torch.float64)[supervised.cpu()].sum())',
        "return float(supervised.sum())",
        ("tests/unit/integrations/test_token_loss.py", "tests/unit/integrations/test_weights.py"),
    ),
    Mutant(
        "neighbours of a pack see each other",
        "collate/masks.py",
        "starts[:, 1:] = sorted_keys.diff() != 0",
        "starts[:, 1:] = sorted_keys.diff() > 2",
        ("tests/unit/collate/test_packed_collate.py",),
    ),
    Mutant(
        "positions do not restart with a document",
        "collate/packer.py",
        'row["position_ids"] = torch.arange(len(ids))',
        'row["position_ids"] = torch.arange(len(ids)) + number',
        ("tests/unit/collate/test_pack.py",),
    ),
    Mutant(
        "a resumed run loses a step",
        "plan/schedule.py",
        "rest = table[segment.steps :].reshape(-1)",
        "rest = table[segment.steps + 1 :].reshape(-1)",
        ("tests/property/test_schedule.py",),
    ),
    Mutant(
        "packs are a unit too large",
        "plan/planning.py",
        "units_per_pack = capacity // alignment",
        "units_per_pack = -(-capacity // alignment)",
        ("tests/property/test_plan.py",),
    ),
    Mutant(
        "image sizes are cut, not rounded",
        "media/images.py",
        "rows, columns = round(height / factor), round(width / factor)\n    area = rows",
        "rows, columns = int(height / factor), int(width / factor)\n    area = rows",
        ("tests/property/test_resize.py",),
    ),
    Mutant(
        "a drop is not written",
        "ledger.py",
        "if drop not in self._drops or not drop.key:",
        "if not drop.key:",
        ("tests/unit/test_ledger.py",),
        quick=True,
    ),
    Mutant(
        "lost samples do not count",
        "loader/epoch_stats.py",
        "        lost += len(info.lost)\n",
        "        lost += 0\n",
        ("tests/unit/loader/test_loader.py",),
    ),
    Mutant(
        "an index of another file is used",
        "rows/index.py",
        "any(header.get(name) != value for name, value in wanted.items())",
        "any(header.get(name) != value for name, value in list(wanted.items())[:2])",
        ("tests/unit/rows/test_rows.py",),
    ),
    Mutant(
        "a path may leave the media folder",
        "media/source.py",
        "        if not inside:",
        "        if not inside and isinstance(root, Address):",
        ("tests/unit/media/test_media_confine.py",),
    ),
    Mutant(
        "the viewer answers to any host",
        "tools/view/server.py",
        "if len(hosts) != 1 or not self.allows",
        "if len(hosts) != 1 and not self.allows",
        ("tests/unit/view/test_guard.py",),
    ),
    Mutant(
        "a packed batch is cut as if each row held one sample",
        "pp_media/rows.py",
        "        if self._is_packed():",
        "        if not self._is_packed():",
        ("tests/unit/test_pp_media.py", "tests/unit/test_pp_media_rejected.py"),
    ),
    Mutant(
        "frames are spread by our own rule and not by the processor's",
        "media/sampling.py",
        "chosen = _spread_evenly(info, sampling) if taken is None else taken",
        "chosen = _spread_evenly(info, sampling)",
        ("tests/contract/test_video_frames.py",),
    ),
    Mutant(
        "the rate of a video is the header's and not that of its frames",
        "media/container.py",
        "return total / (end - begin), end - begin",
        "return float(self.stream.average_rate), end - begin",
        ("tests/unit/media/test_media_videos.py",),
    ),
    Mutant(
        "an image of any format is opened",
        "media/images.py",
        "Image.open(file, formats=_formats())",
        "Image.open(file)",
        ("tests/unit/test_security.py",),
    ),
    Mutant(
        "a photo is loaded as it is stored",
        "media/images.py",
        "image = image.transpose(turn)",
        "image = image.transpose(Image.Transpose.ROTATE_180).transpose(Image.Transpose.ROTATE_180)",
        ("tests/unit/media/test_media_images.py",),
        quick=True,
    ),
    Mutant(
        "the size of a photo is the stored one",
        "media/image_headers.py",
        "return size[::-1] if _FIRST_SIDEWAYS <= orientation <= _LAST_SIDEWAYS else size",
        "return size",
        ("tests/unit/media/test_media_images.py",),
        quick=True,
    ),
    Mutant(
        "models shift the labels of a batch again",
        "collate/finish.py",
        'result = {**batch, "shift_labels": batch["labels"]}',
        "result = dict(batch)",
        ("tests/unit/collate/test_pad_collate.py",),
        quick=True,
    ),
    Mutant(
        "shift_labels are shifted once more",
        "collate/finish.py",
        'result = {**batch, "shift_labels": batch["labels"]}',
        'result = {**batch, "shift_labels": batch["labels"].roll(-1, -1)}',
        ("tests/unit/test_batch.py",),
    ),
    Mutant(
        "a list of pixels is lost",
        "collate/packer.py",
        "return key in MEDIA_KEYS or any(",
        "return not isinstance(value, list) and any(",
        ("tests/unit/collate/test_pack.py",),
        quick=True,
    ),
    Mutant(
        "segments begin inside the padding of a document",
        "collate/masks.py",
        "row_index * length + index + -index % multiple",
        "row_index * length + index",
        ("tests/unit/collate/test_packed_collate.py",),
    ),
    Mutant(
        "models with layers that carry state train without being prepared",
        "families/packing.py",
        "prepared = inner is not None and has_document_bounds(inner, packing.layers)",
        "prepared = inner is not None",
        ("tests/unit/test_models.py",),
    ),
    Mutant(
        "recurrent models that list no layers are packed as they are",
        "families/packing.py",
        "ours and not untested and _has_tested_layers(",
        "ours and _has_tested_layers(",
        ("tests/contract/test_packable_types.py",),
    ),
    Mutant(
        "layers with state see the document before theirs",
        "families/stateful.py",
        "flat = (flat + torch.arange(self.rows)[:, None]",
        "flat = ((flat > 0).long() + torch.arange(self.rows)[:, None]",
        ("tests/contract/test_stateful_layers.py",),
    ),
    Mutant(
        "a measurement takes a leak for noise",
        "families/probe.py",
        "return self.leak <= self.allowed and self.difference <= self.allowed",
        "return self.leak <= self.allowed or self.difference <= self.allowed",
        ("tests/contract/test_packable_types.py",),
    ),
    Mutant(
        "media without a tensor are trained as placeholders",
        "families/encoder.py",
        "if kind not in returned:",
        "if kind not in returned and not conversation.media:",
        ("tests/unit/loader/test_wrong_objects.py",),
        quick=True,
    ),
    Mutant(
        "the content of a row file does not count",
        "count/contents.py",
        "rows_digest = digest(str(len(source.file)), *parts)",
        "rows_digest = digest(str(len(source.file)))",
        ("tests/unit/loader/test_changed_data.py",),
        quick=True,
    ),
    Mutant(
        "rows in memory are not hashed",
        "count/contents.py",
        "        state.update(row)\n",
        "",
        ("tests/unit/loader/test_changed_data.py",),
        quick=True,
    ),
    Mutant(
        "entries of batches that are built ahead are written at once",
        "ledger.py",
        "            self._staged.extend(drops)\n            return\n",
        "            drops = list(drops)\n",
        ("tests/faults/test_counted.py",),
    ),
    Mutant(
        "entries recorded after a state are not rolled back",
        "loader/loader.py",
        "roll_back(self.ledger, self.world, state.epoch, self._remaining_keys)",
        "roll_back(self.ledger, self.world, state.epoch, set)",
        ("tests/unit/loader/test_resumed_ledger.py",),
    ),
    Mutant(
        "ranks may load different states",
        "distributed.py",
        "        if len(by_value) > 1:\n",
        "        if len(by_value) > self.world.size:\n",
        ("tests/property/test_ranks_machine.py",),
    ),
    Mutant(
        "a checkpoint within an optimizer step is saved",
        "integrations/accelerate.py",
        "if not accelerator.sync_gradients or loader.cursor % per_step:",
        "if loader.cursor % per_step:",
        ("tests/unit/integrations/test_accelerate.py",),
    ),
)


def apply(mutant: Mutant, source: Path) -> None:
    """Change the file.

    Raises:
        ValueError: the line is not there, or more than once.
    """
    path = source / "packhorse" / mutant.file
    text = path.read_text("utf-8")
    if text.count(mutant.right) != 1:
        raise ValueError(
            f"{mutant.name}: {mutant.right!r} is {text.count(mutant.right)} times in {mutant.file}"
        )
    path.write_text(text.replace(mutant.right, mutant.wrong), "utf-8")


def passes(tests: tuple[str, ...], source: Path) -> bool:
    """Return whether tests pass with the package at ``source``.

    Raises:
        RuntimeError: they neither passed nor failed, but could not run (an import error, no such file).
    """
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_TOO_LONG, check=False
    )
    failed = re.search(r"\b\d+ failed\b", done.stdout.rstrip().rpartition("\n")[2])
    if done.returncode and not (done.returncode == 1 and failed):
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-2000:]}")
    return done.returncode == 0


def is_noticed(mutant: Mutant, folder: Path) -> bool:
    """Return whether the tests of a mutant fail with it, and pass without."""
    source = folder / "src"
    ignored = shutil.ignore_patterns("__pycache__")
    for changed in (False, True):
        shutil.rmtree(source, ignore_errors=True)
        shutil.copytree(ROOT / "src", source, ignore=ignored)
        if changed:
            apply(mutant, source)
            return not passes(mutant.tests, source)
        if not passes(mutant.tests, source):
            raise RuntimeError(f"{', '.join(mutant.tests)}: fail without a mutant")
    raise AssertionError


@record_outcome()
def main() -> None:
    """Try every mutant."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", help="a part of a mutant's name")
    options = parse(parser)
    chosen = [one for one in MUTANTS if one.quick or not options.quick]
    chosen = [one for one in chosen if not options.only or options.only in one.name]
    found = 0
    with tempfile.TemporaryDirectory() as folder:
        for mutant in chosen:
            seen = is_noticed(mutant, Path(folder))
            found += seen
            fact(f"{mutant.file}, {mutant.name}", "noticed" if seen else "NOT NOTICED")
    share = found / max(len(chosen), 1)
    claim = f"wrong lines that the tests notice, of {len(chosen)}"
    promise(claim, share, 1.0, baseline="the tests without a change", kind="exact")


if __name__ == "__main__":
    main()
