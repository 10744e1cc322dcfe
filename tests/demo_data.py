"""A small mixture of charts, clips and chats with three broken rows, for tests of counting and checking."""

import json
import random
from pathlib import Path

from packhorse.cli.demo.data import _write_charts, _write_clips, _write_meta


def write_demo_data(folder: Path, seed: int = 0) -> Path:
    """Fill ``folder`` with three small datasets and return the meta file that names them.

    24 chart questions (JSONL and PNG), 4 clip questions (JSONL and MP4), 12 text chats (a JSON array). Three
    rows are broken: a line that is not JSON, a truncated image, a question with one ``<image>`` too many.
    """
    rng = random.Random(seed)
    media = folder / "media"
    media.mkdir(parents=True, exist_ok=True)
    _write_charts(folder / "charts.jsonl", media, rng)
    _write_clips(folder / "clips.jsonl", media, rng)
    _write_chats(folder / "chats.json")
    from_value = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}
    meta = {
        "charts": {"file_name": "charts.jsonl", "media_dir": "media"},
        "clips": {"file_name": "clips.jsonl", "media_dir": "media"},
        "chats": {"file_name": "chats.json", "columns": {"messages": "conversations"}, "tags": from_value},
    }
    return _write_meta(folder, meta)


def _write_chats(path: Path) -> None:
    topics = ["a boat", "a market", "a mountain pass", "a bale of wool", "a bridge", "a toll gate"]
    rows = []
    for topic in topics:
        for question in (f"Describe {topic} in one sentence.", f"Why would a visitor care about {topic}?"):
            turns = [
                {"from": "system", "value": "You are a patient guide."},
                {"from": "human", "value": question},
                {"from": "gpt", "value": f"That depends on the road; {topic} matters more on a steep one."},
            ]
            rows.append({"conversations": turns})
    path.write_text(json.dumps(rows, indent=1))
