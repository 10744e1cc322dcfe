"""A small mixed dataset with known media and known errors, for the tests of plans and of the viewer."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from contract.media_files import write_video
from count_samples import write_meta, write_rows
from packhorse.count.columns import COUNTS, CountColumns
from packhorse.loader import LoaderConfig
from packhorse.tools.view.plan_report import plan_report
from packhorse.tools.view.saved_plan import PlanRequest, PlanResult, make_plan, save_plan

SIZES = [(96, 64), (128, 96), (160, 80), (84, 112), (200, 120), (64, 64), (144, 108), (112, 168)]
"""Width and height of the images, by row of ``charts`` (two more rows are broken)."""

SCRIPT = "<script>document.title = 'owned'</script>"
"""The text of one row of ``chats``."""

MISSING, CUT, MALFORMED, SHAPELESS, SPOKEN = 8, 9, 3, 2, 5
"""Rows of ``charts`` with a missing image and with a truncated one; rows of ``chats`` that are not JSON, no
conversation, and with the script in the text."""

BROKEN = {f"charts/{MISSING}": "missing_media", f"chats/{MALFORMED}": "malformed_row"}
BROKEN[f"chats/{SHAPELESS}"] = "wrong_format"
"""Rows that cannot be counted, with the reason."""


def chat(question: str, answer: str, **media: list[str]) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **media}


def write_samples(folder: Path) -> Path:
    """Write ten rows with images, two with a video and twelve with text; return the meta file."""
    media = folder / "media"
    media.mkdir(parents=True)
    charts = []
    for number, size in enumerate(SIZES):
        _draw_chart(size, number).save(media / f"chart{number}.png")
        charts.append(
            chat("<image>Which bar is the highest?", f"Bar {number}.", images=[f"chart{number}.png"])
        )
    charts.append(chat("<image>What is it?", "It is unknown.", images=["gone.png"]))
    _draw_chart((320, 240), 3).save(media / "cut.png")
    whole = (media / "cut.png").read_bytes()
    (media / "cut.png").write_bytes(whole[: len(whole) // 3])
    charts.append(chat("<image>What is half of it?", "The upper half.", images=["cut.png"]))
    write_video(media / "video.mp4", frames=12, fps=6, width=96, height=64)
    video = chat("<video>What happens in the video?", "It gets lighter.", videos=["video.mp4"])
    chats: list[Any] = [
        chat(f"Describe report number {n}. " * (1 + n % 4), f"It lists {n} items in stock. " * (1 + n % 3))
        for n in range(12)
    ]
    chats[0]["messages"].insert(0, {"role": "system", "content": "You are a patient assistant."})
    chats[SPOKEN] = chat(f"What does {SCRIPT} do?", f"Nothing here: {SCRIPT}")
    chats[MALFORMED] = json.dumps(chats[MALFORMED])[:80]
    chats[SHAPELESS] = {"text": "no messages at all"}
    write_rows(folder / "charts.jsonl", charts)
    write_rows(folder / "chats.jsonl", chats)
    write_rows(folder / "clips.jsonl", [video, video])
    names = ("charts", "chats", "clips")
    return write_meta(folder, {name: {"file_name": f"{name}.jsonl", "media_dir": "media"} for name in names})


def plan_many(folder: Path, packs: int, saved: str) -> PlanResult:
    """Make a plan with ``packs`` packs of two rows each, with invented counts (counting takes minutes).

    Args:
        folder: an existing folder to write to.
        packs: number of packs.
        saved: folder of the processor.
    """
    rows = 2 * packs
    (folder / "chats.jsonl").write_text((json.dumps(chat("Why?", "So.")) + "\n") * rows)
    meta = write_meta(folder, {"chats": {"file_name": "chats.jsonl"}})
    config = LoaderConfig(data=str(meta), pack_size=100, cache_dir=folder / "plans")
    lengths = np.random.default_rng(0).integers(35, 51, rows)  # two fit, never three
    columns: dict[str, Any] = {name: np.zeros(rows, np.int64) for name in (*COUNTS, "off_by")}
    ones = np.ones(rows, bool)
    counts = CountColumns(
        **columns | {"text": lengths}, status=np.full(rows, "ok", object), ok=ones, exact=ones
    )
    planned = make_plan(PlanRequest(config, saved), counts=counts)
    plan = planned.packs.plan
    assert len(plan) == packs, f"planned {len(plan):,} packs instead of {packs:,}"
    return planned


def write_many(folder: Path, packs: int, saved: str) -> Path:
    """Write the plan of :func:`plan_many` to a file."""
    planned = plan_many(folder, packs, saved)
    save_plan(planned, plan_report(planned), folder / "many.phplan")
    return folder / "many.phplan"


def _draw_chart(size: tuple[int, int], number: int) -> Image.Image:
    image = Image.new("RGB", size, (250, 247, 240))
    draw, width = ImageDraw.Draw(image), size[0] // 9
    for bar, colour in enumerate([(91, 143, 127), (217, 165, 74), (181, 107, 83), (90, 134, 176)]):
        height = size[1] * (2 + (bar * 3 + number * 5) % 7) // 9
        left = width // 2 + bar * 2 * width
        draw.rectangle((left, size[1] - height, left + width, size[1] - 1), fill=colour)
    return image


@dataclass(frozen=True)
class Answer:
    """A response of the server."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


def ask(app: Any, target: str, *, host: str | None = "127.0.0.1:8123", method: str = "GET") -> Answer:
    """Send one request to an ASGI application, without normalizing its path."""
    path, _, query = target.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},  # as of uvicorn
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [] if host is None else [(b"host", host.encode())],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8123),
    }
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    headers = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    return Answer(sent[0]["status"], headers, b"".join(part.get("body", b"") for part in sent[1:]))
