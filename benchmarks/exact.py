"""Exactness of token counts, and the error of the usual estimate.

    python benchmarks/exact.py [--quick] [--sizes 400] [--videos 60] [--conversations 1000] [--family NAME]

For every family: image sizes from 1 x 1 to 8000 x 200, video files with the processor's default settings and
with ``fps`` and ``num_frames`` set on the processor and in the row, decoded videos of 1 to 300 frames, audio
clips, and (over all families together) conversations of all shapes. The reference for a video file is the
processor's own call on its path, so that transformers samples the frames; for all else it is the processor's
call on the loaded media. Printed: rows, counts that differ (there must be none) and rows that the processor
rejects (the count has to reject all but video files, too); then the relative error of the usual estimate.
Exit code 1 if a count differs.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from contract.torchvision_ops import make_torchvision_importable

make_torchvision_importable()

from contract.exact import conversations, image_sizes, own_call, video, with_video_settings
from contract.media_files import write_media, write_video
from contract.processors import FAMILIES, processor
from contract.samples import tone
from packhorse.count.token_counter import TokenCounter
from packhorse.errors import BadSample
from packhorse.families import Encoder
from packhorse.formats.estimate import estimate_sample_length, image_config, video_config
from packhorse.media import media_size
from packhorse.types import Conversation, MediaRef, Message, TextPart
from promises import fact, make_parser, parse, promise, record_outcome

RATES = (None, 0.5, 1.0, 7.3, 24.0, 29.97, 60.0)
FILE_RATES = (10, 12, 25, Fraction(24000, 1001), Fraction(30000, 1001), 60)
SETTINGS: tuple[dict[str, Any], ...] = ({}, {"fps": 2}, {"fps": 0.8}, {"num_frames": 6}, {"num_frames": 5})
FRAMES = (1, 2, 3, 4, 5, 7, 8, 15, 16, 31, 33, 47, 64, 100, 128, 199, 256, 300)


@record_outcome()
def main() -> None:
    """Compare each family and print the table."""
    parser = make_parser(__doc__, sizes=400, videos=60, conversations=1000)
    parser.add_argument("--family", choices=tuple(FAMILIES), action="append")
    options = parse(parser, sizes=5, videos=2, conversations=14)
    print(f"{'family':17}{'modality':16}{'settings':34}{'rows':>7}{'differences':>13}{'rejected':>10}")
    names = options.family or tuple(FAMILIES)
    share = -(-options.conversations // len(FAMILIES))
    tallies: list[Tally] = []
    with tempfile.TemporaryDirectory() as folder:
        files = write_media(Path(folder))
        clips = video_files(Path(folder), options.videos)
        for name in names:
            sizes = image_sizes(every=max(1, 2800 // options.sizes))
            tallies.append(compare(name, "image", images(sizes)))
            if "video" in FAMILIES[name].modalities:
                cases = [(settings, in_row) for settings in SETTINGS for in_row in (False, True)]
                tallies += [compare_files(name, *case, clips) for case in cases if case != ({}, True)]
                # At least 64 tokens a frame: large tensors.
                number = max(1, options.videos // 4) if name == "qwen3_omni" else options.videos
                tallies.append(compare(name, "decoded video", videos(number)))
            if "audio" in FAMILIES[name].modalities:
                tallies.append(compare(name, "audio", audio_clips()))
            tallies.append(compare(name, "conversations", conversations(name, share, files)))
    print()
    compared, differ, rejected = (sum(getattr(one, name) for one in tallies) for name in Tally._fields[:3])
    fact("samples compared", compared)
    fact("families", len(names))
    fact("rejected by the processor", rejected)
    errors = np.concatenate([one.errors for one in tallies if one.errors])
    fact("error of the usual estimate, mean", 100 * float(errors.mean()), "%")
    fact("error of the usual estimate, 95th percentile", 100 * float(np.percentile(errors, 95)), "%")
    processors = "tokens that each family's real processor makes"
    promise("counts that differ", differ, 0, baseline=processors, unit="", at_least=False, kind="exact")


def make_conversation(*parts: Any) -> Conversation:
    """Return a question about media, and an answer."""
    question = (*parts, TextPart("What is it?"))
    return Conversation((Message("user", question), Message("assistant", (TextPart("A cat."),))))


def images(sizes: list[tuple[int, int]]) -> Iterator[Conversation]:
    """Yield one image of each size."""
    for height, width in sizes:
        yield make_conversation(MediaRef("image", Image.new("RGB", (width, height))))


def videos(number: int) -> Iterator[Conversation]:
    """Yield decoded videos of many lengths and rates."""
    cases = [(frames, fps) for frames in FRAMES for fps in RATES]
    for at, (frames, fps) in enumerate(cases[:: max(1, len(cases) // number)]):
        made = video(frames, fps, (1, 2, 13)[at % 3], 20 + at % 40, 30 + at % 7)
        yield make_conversation(MediaRef("video", made.frames, {"video_metadata": made.metadata.as_dict()}))


def video_files(folder: Path, number: int) -> list[Path]:
    """Write video files of many lengths and rates, in two containers."""
    cases = [(frames, rate) for rate in FILE_RATES for frames in (41, 60, 75, 94, 130)]
    paths = []
    for at, (frames, rate) in enumerate(cases[:: max(1, len(cases) // number)]):
        paths.append(folder / f"{frames}-{at}.{('mp4', 'mkv')[at % 2]}")
        write_video(paths[-1], frames=frames, fps=rate, width=48, height=32)
    return paths


def audio_clips() -> Iterator[Conversation]:
    """Yield audio clips of many lengths, at the models' rate and at others."""
    for samples in (100, 400, 1_000, 5_000, 15_999, 16_000, 16_001, 40_000, 100_003, 480_005):
        for rate in (16_000, 8_000, 44_100):
            yield make_conversation(MediaRef("audio", (tone(samples), rate)))


def compare_files(name: str, settings: dict[str, Any], in_row: bool, paths: list[Path]) -> Tally:
    """Count video files and run the processor on their paths; print one line."""
    configured = with_video_settings(name, settings)
    made = processor(name) if in_row else configured
    encoder = Encoder(made)
    counter = TokenCounter(encoder)
    differ = rejected = 0
    for path in paths:
        ref = MediaRef("video", str(path), settings if in_row else {})
        question = (ref, TextPart("\n5: the"))  # as `rendered` asks
        said = Conversation((Message("user", question), Message("assistant", (TextPart("A cat."),))))
        (counted,) = counter.count_many([said])
        try:
            frames, ids = own_call(Encoder(configured), path)
        except (IndexError, ValueError, ZeroDivisionError):
            rejected += 1  # the processor has no frames for this file
            continue
        size: Any = encoder.size_of(ref)
        differ += isinstance(counted, BadSample) or counted.count.total != len(ids)
        differ += list(size.indices) != frames
    where = "default" if not settings else f"{settings} in the {'row' if in_row else 'processor'}"
    return Tally.from_values(name, "video file", where, len(paths), differ, rejected, [])


class Tally(NamedTuple):
    """Numbers of compared, different and rejected samples, and the errors of the estimate."""

    compared: int
    differ: int
    rejected: int
    errors: list[float]

    @classmethod
    def from_values(cls, name: str, modality: str, settings: str, *values: Any) -> Tally:
        """Make a tally and print its line."""
        tally = cls(*values)
        counts = f"{tally.compared:7,}{tally.differ:13,}{tally.rejected:10,}"
        print(f"{name:17}{modality:16}{settings.translate(_PLAIN):34}{counts}", flush=True)
        return tally


_PLAIN = str.maketrans("", "", "{}'")


def compare(name: str, what: str, conversations: Iterator[Conversation]) -> Tally:
    """Count and encode each conversation; print one line."""
    made = processor(name)
    encoder = Encoder(made)
    counter = TokenCounter(encoder)
    configs = image_config(made), video_config(made)
    compared = differ = rejected = 0
    errors = []
    for conversation in conversations:
        compared += 1
        (counted,) = counter.count_many([conversation])
        try:
            real = len(encoder.encode(conversation).tokens["input_ids"])
        except BadSample as error:
            rejected += 1
            differ += not isinstance(counted, BadSample) or counted.reason != error.reason
            continue
        differ += isinstance(counted, BadSample) or counted.count.total != real
        errors.append(abs(estimate_sample_length(example(encoder, conversation), *configs) - real) / real)
    return Tally.from_values(name, what, "default", compared, differ, rejected, errors)


def example(encoder: Encoder, conversation: Conversation) -> dict[str, Any]:
    """Return the conversation as a row with media sizes, as the estimate takes it."""
    sizes: dict[str, list[Any]] = {"image": [], "video": [], "audio": []}
    for ref in conversation.media:
        video = ref.kind == "video"
        size: Any = media_size(ref) if video else encoder.size_of(ref)
        sizes[ref.kind].append(
            [size.total_frames, size.height, size.width, size.fps, size.duration] if video else size
        )
    return {
        "conversation": encoder.family.turns(conversation),
        "mm_inputs_meta": {
            "images_meta": [list(size) for size in sizes["image"]],
            "videos_meta": sizes["video"],
        },
    }


if __name__ == "__main__":
    main()
