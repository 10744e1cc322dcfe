"""Conversion to JSONL: whatever the rows, reading the output gives the same examples."""

import base64
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from packhorse.errors import BadSample, data_errors
from packhorse.formats.meta import open_meta_dataset
from packhorse.ledger import Ledger
from packhorse.tools.to_jsonl import write_jsonl
from packhorse.types import MEDIA_KINDS, Task

KINDS = st.sampled_from(MEDIA_KINDS)
WORDS = st.sampled_from(
    [
        *(
            "A cat.",
            " ",
            "",
            "\n",
            " What? ",
            "<image>",
            "<video>",
            "<AUDIO>",
            "x<image>y",
            "< image>",
            "é\u2028",
        ),
        *("<think>Hm.</think>\n\nYes", "<|image_pad|>", "data:image/png;base64,AAAA", '{"a": 1}'),
    ]
)
TEXTS = st.lists(WORDS, max_size=3).map("".join)
PATHS = st.sampled_from(
    ["a.png", "b/c.png", "../d.png", "./e.png", "b//f.png", "/abs/g.png", "s3://h/i.png", ""]
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "num_frames": st.integers(1, 8),
        "note": st.sampled_from(["x", None]),
        "detail": st.just({"a": [1]}),
    },
)
BYTES = st.binary(min_size=1, max_size=4).map(lambda data: base64.b64encode(data).decode())
ENTRIES = st.one_of(
    PATHS,
    st.lists(PATHS.filter(bool), min_size=1, max_size=2),
    st.builds(lambda path, options: {**options, "path": path}, PATHS, OPTIONS),
    st.builds(lambda data, options: {**options, "base64": data}, BYTES, OPTIONS),
    BYTES.map(lambda data: f"data:image/png;base64,{data}"),
)


@st.composite
def parts(draw: st.DrawFn) -> dict[str, Any]:
    if draw(st.booleans()):
        return {"type": "text", draw(st.sampled_from(["text", "value"])): draw(TEXTS), **draw(OPTIONS)}
    kind = draw(KINDS)
    form = draw(st.sampled_from(["bare", "own", "path", "url", "base64", "openai"]))
    rest = draw(OPTIONS)
    if form == "base64":
        return {"type": kind, "base64": draw(BYTES), **rest}
    if form == "openai":
        return {"type": f"{kind}_url", f"{kind}_url": {"url": draw(PATHS.filter(bool))}}
    return {
        "type": kind,
        **({} if form == "bare" else {kind if form == "own" else form: draw(PATHS)}),
        **rest,
    }


CALLS = st.sampled_from(
    [
        [{"type": "function", "function": {"name": "look", "arguments": {"at": "cat", "n": None}}}],
        [{"name": "look", "arguments": '{"at": [1, {"b": null}]}', "id": "c1"}, {"name": "stop"}],
    ]
)
EXTRAS = st.fixed_dictionaries(
    {},
    optional={
        "reasoning_content": TEXTS,
        "weight": st.sampled_from([0, 0.5, 2]),
        "loss": st.booleans(),
        "tool_calls": CALLS,
        "name": st.just("look"),
        "value": st.just("other"),
        "big": st.just(10**30),
    },
)
ROLES = st.sampled_from(["user", "human", "assistant", "gpt", "system", "tool", "observation", "stranger"])
CONTENTS = st.one_of(TEXTS, st.lists(parts(), max_size=4), st.just({"found": [1, 2.5]}))
TURNS = st.builds(
    lambda role, content, rest: {**rest, "role": role, "content": content}, ROLES, CONTENTS, EXTRAS
)
CALL_TURNS = st.just({"from": "function_call", "value": '{"name": "look", "arguments": {"at": "cat"}}'})
COLUMNS = st.fixed_dictionaries(
    {},
    optional={
        **{f"{kind}s": st.one_of(st.lists(ENTRIES, max_size=3), PATHS) for kind in MEDIA_KINDS},
        "system": TEXTS,
        "tools": st.sampled_from(
            [[{"name": "look"}], '[{"type": "function", "function": {"name": "a"}}]', "[", None]
        ),
        "weight": st.sampled_from([0.25, 1, 0, -1]),
        "_text_tokens": st.integers(0, 9),
        "mm_inputs_meta": st.just({"images_meta": [{"n_tokens": 4}]}),
        "note": st.just("not used"),
    },
)
ROWS = st.builds(
    lambda turns, columns: {**columns, **turns},
    st.one_of(
        st.lists(st.one_of(TURNS, CALL_TURNS), max_size=4).map(lambda turns: {"messages": turns}),
        st.builds(lambda prompt, answer: {"prompt": prompt, "completion": answer}, CONTENTS, TEXTS),
        st.builds(
            lambda *texts: dict(zip(("instruction", "input", "output"), texts, strict=True)),
            TEXTS,
            TEXTS,
            TEXTS,
        ),
    ),
    COLUMNS,
)
SETTINGS = st.fixed_dictionaries(
    {"media_dir": st.sampled_from([".", "images"])},
    optional={
        "system": st.just("Be brief."),
        "weight": st.just(2.0),
        "reasoning": st.sampled_from(["mask", "drop"]),
        "chat_template_kwargs": st.just({"enable_thinking": False}),
        "media_position": st.just("first"),
        "max_pixels": st.just(1003520),
        "fps": st.just(2),
        "sample_ratio": st.sampled_from([0.5, 2.0]),
    },
)
GOOD = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]}


def readable(dataset: Any) -> list[dict[str, Any]]:
    examples = []
    for index in range(len(dataset)):
        with data_errors() as outcome:
            examples.append(dataset[index])
        assert outcome.error is None or isinstance(outcome.error, BadSample)
    return examples


def with_content(value: Any, folder: Path) -> Any:
    """Files that were written for bytes as bytes again; other paths without what does not matter in them."""
    if isinstance(value, dict):
        return {name: with_content(part, folder) for name, part in value.items()}
    if isinstance(value, list):
        return [with_content(part, folder) for part in value]
    if isinstance(value, str) and value.startswith(str(folder)):
        path = Path(value)
        return path.read_bytes() if path.parent == folder / "media" else str(path)
    return value


ANSWERS = st.one_of(TEXTS, st.builds(lambda text: [{"role": "assistant", "content": text}], TEXTS))
PROMPTS = st.lists(st.one_of(TURNS, CALL_TURNS), max_size=3)
PAIRS = st.builds(
    lambda turns, columns: {**columns, **turns},
    st.one_of(
        st.builds(
            lambda prompt, chosen, rejected: {"prompt": prompt, "chosen": chosen, "rejected": rejected},
            st.one_of(CONTENTS, PROMPTS),
            ANSWERS,
            ANSWERS,
        ),
        st.builds(lambda turns, other: {"messages": turns, "rejected_response": other}, PROMPTS, TEXTS),
        st.builds(lambda turns, label: {"messages": turns, "label": label}, PROMPTS, st.booleans()),
    ),
    COLUMNS,
)
GOOD_PAIR = {"prompt": "Who?", "chosen": "Me.", "rejected": "You."}


def check(rows: list[dict[str, Any]], entry: dict[str, Any], task: Task) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "images").mkdir()
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        meta = {
            "rows": {
                **entry,
                "file_name": str(folder / "rows.jsonl"),
                "media_dir": str(folder / entry["media_dir"]),
            }
        }
        converted = write_jsonl(meta, folder / "out.jsonl", task=task)
        expected = readable(open_meta_dataset(meta, task=task))
        read_as = {"file_name": str(folder / "out.jsonl"), "media_dir": str(folder), **converted.options}
        again = open_meta_dataset({"rows": read_as})
        assert with_content(list(again), folder) == with_content(expected, folder)
        entries = Ledger.load(converted.ledger)
        (dataset,) = converted.datasets
        assert (dataset.rows, dataset.written) == (len(open_meta_dataset(meta, task=task)), len(expected))
        assert dataset.dropped == dataset.rows - dataset.written
        lost = {drop.key for drop in entries if drop.action == "dropped" and drop.reason != "not_sampled"}
        assert len(lost) == dataset.dropped


@settings(max_examples=300, deadline=None)
@given(rows=st.lists(ROWS, max_size=4), entry=SETTINGS)
def test_reading_the_output_gives_the_same_examples(
    rows: list[dict[str, Any]], entry: dict[str, Any]
) -> None:
    check([GOOD, *rows], entry, "sft")


@settings(max_examples=300, deadline=None)
@given(rows=st.lists(PAIRS, max_size=4), entry=SETTINGS.filter(lambda entry: "weight" not in entry))
def test_reading_the_output_gives_the_same_pairs_and_labels(
    rows: list[dict[str, Any]], entry: dict[str, Any]
) -> None:
    check([GOOD_PAIR, *rows], entry, "preference")
