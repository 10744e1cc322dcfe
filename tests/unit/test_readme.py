"""The README: its quickstart runs on a user's own file, and its tables are those of the code."""

import json
import re
from pathlib import Path

from PIL import Image

from packhorse.families import FAMILIES
from page_code import SMALL_MODELS, python_blocks
from warm_python import run_warm

README = Path(__file__).parents[2] / "README.md"
TEXT = README.read_text("utf-8")


def test_the_readme_is_short() -> None:
    assert len(TEXT.splitlines()) <= 150


def test_the_quickstart_trains_on_rows_like_the_one_shown(tmp_path: Path) -> None:
    (row,) = map(json.loads, re.findall(r"^```json\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL))
    (image,) = row["images"]
    (tmp_path / image).parent.mkdir()
    Image.new("RGB", (320, 240), "tan").save(tmp_path / image)
    missing = {**row, "images": ["images/missing.png"]}
    lines = [*[json.dumps(row)] * 3, json.dumps(missing), json.dumps(row)[:40]]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    (quickstart,) = python_blocks(README)
    run = run_warm("-c", SMALL_MODELS + quickstart, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "5 rows, 3 in the plan, 3 delivered" in run.stdout
    for reason in ("missing_media: 1", "malformed_row: 1"):
        assert reason in run.stdout


def test_every_family_is_in_the_table_of_models() -> None:
    table = TEXT.partition("| family |")[2].partition("\n\n")[0]
    names = re.sub(r"[^a-z0-9]", "", table.lower())
    for family in FAMILIES:
        name = family.name.removesuffix("_remote").replace("_mm", "multimodal").replace("_", "")
        assert name in names, family.name
