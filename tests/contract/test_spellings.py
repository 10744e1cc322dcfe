"""The same conversations in the spellings of people's datasets: the same ids, labels, weights and media.

Ten conversations are written in every spelling, read through ``packhorse``'s own way (files, Parquet, lists,
Hugging Face datasets), encoded and counted. What they must be comes from the processor itself: its
``apply_chat_template`` and call on the canonical messages, and incremental rendering for the labels.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import packhorse
from contract.chat_templates import TOOLS
from contract.processors import build
from contract.test_tools import bare, expected_labels, expected_spans
from packhorse.chat import IGNORE_INDEX
from packhorse.count.token_counter import TokenCounter
from packhorse.families import Encoder
from packhorse.formats.conversation import parse_conversation
from packhorse.formats.in_memory import open_examples
from packhorse.formats.meta import open_meta_dataset
from packhorse.ledger import Ledger
from packhorse.media import load_image, load_video
from row_files import write_json, write_jsonl, write_parquet

Row = dict[str, Any]
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}}
LOOK = {"name": "look", "description": "Look.", "parameters": PARAMETERS}
TOOLS_OF_ROW = [{"type": "function", "function": LOOK}]
CALL = {"name": "look", "arguments": {"at": "cat"}}


@dataclass(frozen=True)
class Turn:
    """One turn: texts, and names of files in the order of the text."""

    role: str
    parts: tuple[str, ...]  # texts and files
    calls: bool = False
    thought: str = ""
    weight: float = 1  # for the loss


def user(*parts: str) -> Turn:
    return Turn("user", parts)


def answer(text: str, **options: Any) -> Turn:
    return Turn("assistant", (text,), **options)


STORIES: dict[str, tuple[Turn, ...]] = {
    "text": (user("Who?"), answer("Me.")),
    "system": (Turn("system", ("Be brief.",)), user("Who?"), answer("Me.")),
    "several turns": (user("Who?"), answer("Me."), user("And now?"), answer("Still me.")),
    "an image": (user("wide.png", "What is it?"), answer("Noise.")),
    "two images": (user("wide.png", "pixel.png", "Which is larger?"), answer("The first.")),
    "an image between texts": (user("Look:", "wide.png", "What is it?"), answer("Noise.")),
    "images in two turns": (
        user("wide.png", "This?"),
        answer("Noise."),
        user("tall.png", "That?"),
        answer("Too."),
    ),
    "a video": (user("video.mp4", "What moves?"), answer("Nothing.")),
    "reasoning": (user("1 + 1?"), answer("Two.", thought="Add them.")),
    "tools": (user("wide.png", "Look."), answer("", calls=True), Turn("tool", ("fur",)), answer("A cat.")),
    "an answer that is not trained": (
        user("Who?"),
        answer("You.", weight=0),
        user("Who?"),
        answer("Me."),
    ),
    "an answer with a weight": (user("wide.png", "What is it?"), answer("Noise.", weight=0.5)),
    "answers with weights": (
        user("Who?"),
        answer("You.", weight=2),
        user("Who?"),
        answer("Me.", weight=0.25),
        user("Sure?"),
        answer("Yes."),
    ),
}


def is_file(part: str) -> bool:
    return part.endswith((".png", ".mp4"))


def kind_of(part: str) -> str:
    return "video" if part.endswith(".mp4") else "image"


# --- how parts are written ---

Content = Callable[[Turn, Path], Any]


def marked_text(turn: Turn, folder: Path) -> str:
    return "".join(f"<{kind_of(part)}>" if is_file(part) else part for part in turn.parts)


def parts_with(source: Callable[[str, Path], Row]) -> Content:
    def content(turn: Turn, folder: Path) -> list[Row]:
        return [source(p, folder) if is_file(p) else {"type": "text", "text": p} for p in turn.parts]

    return content


def image_or_path(image: Callable[[str, Path], Row]) -> Callable[[str, Path], Row]:
    """Videos always as paths."""
    return lambda part, folder: (
        image(part, folder) if kind_of(part) == "image" else {"type": "video", "video": str(folder / part)}
    )


def base64_of(part: str, folder: Path) -> str:
    return base64.b64encode((folder / part).read_bytes()).decode()


CONTENTS: dict[str, Content] = {
    "markers": marked_text,
    "bare parts": parts_with(lambda part, folder: {"type": kind_of(part)}),
    "image": parts_with(lambda part, folder: {"type": kind_of(part), kind_of(part): part}),
    "path": parts_with(lambda part, folder: {"type": kind_of(part), "path": part}),
    "url": parts_with(lambda part, folder: {"type": kind_of(part), "url": f"file://{folder / part}"}),
    "no type": parts_with(lambda part, folder: {kind_of(part): part}),
    "base64": parts_with(image_or_path(lambda p, folder: {"type": "image", "base64": base64_of(p, folder)})),
    "data URI": parts_with(
        image_or_path(
            lambda p, folder: {"type": "image", "image": f"data:image/png;base64,{base64_of(p, folder)}"}
        )
    ),
    "image_url": parts_with(
        lambda p, folder: {"type": f"{kind_of(p)}_url", f"{kind_of(p)}_url": {"url": f"file://{folder / p}"}}
    ),
    "image_url with data": parts_with(
        image_or_path(
            lambda p, folder: {
                "type": "image_url",
                "image_url": {"url": f"data:image/png;base64,{base64_of(p, folder)}"},
            }
        )
    ),
}
NEED_COLUMNS = ("markers", "bare parts")


# --- how turns are written ---


@dataclass(frozen=True)
class Names:
    """How a dataset names turns."""

    role: str = "role"
    content: str = "content"
    roles: tuple[tuple[str, str], ...] = ()
    call_role: str = ""  # of a turn that only calls a tool; otherwise tool_calls
    untrained: tuple[str, Any] = ("loss", False)
    thought: str = "field"

    def turns(self, story: tuple[Turn, ...], content: Content, folder: Path) -> list[Row]:
        rows = []
        for turn in story:
            role, value, more = (
                dict(self.roles).get(turn.role, turn.role),
                content(turn, folder),
                dict[str, Any](),
            )
            if turn.calls and self.call_role:
                role, value = self.call_role, json.dumps(CALL)
            elif turn.calls:
                more["tool_calls"] = [{"type": "function", "function": CALL}]
            if turn.thought and self.thought == "field":
                more["reasoning_content"] = turn.thought
            elif turn.thought:
                value = content(Turn(turn.role, (f"<think>{turn.thought}</think>\n{turn.parts[0]}",)), folder)
            if not turn.weight:
                more[self.untrained[0]] = self.untrained[1]
            elif turn.weight != 1:
                more["weight"] = turn.weight
            rows.append({self.role: role, self.content: value, **more})
        return rows


OPENAI = Names()
SHAREGPT = Names(
    "from",
    "value",
    (("user", "human"), ("assistant", "gpt"), ("tool", "observation")),
    "function_call",
    ("train", False),
    "text",
)
MS_SWIFT = Names(
    roles=(("tool", "tool_response"),), call_role="tool_call", untrained=("weight", 0), thought="text"
)


def media_columns(story: tuple[Turn, ...], form: Callable[[str], Any] = str) -> Row:
    files = [part for turn in story for part in turn.parts if is_file(part)]
    return {
        f"{kind}s": [form(part) for part in files if kind_of(part) == kind]
        for kind in ("image", "video")
        if any(kind_of(part) == kind for part in files)
    }


def of_messages(column: str, names: Names, content: str, tools: Callable[[Any], Any] = json.dumps) -> Any:
    def row(story: tuple[Turn, ...], folder: Path) -> Row:
        turns = names.turns(story, CONTENTS[content], folder)
        more = {"tools": tools(TOOLS_OF_ROW)} if any(turn.calls for turn in story) else {}
        return {column: turns, **more, **(media_columns(story) if content in NEED_COLUMNS else {})}

    return row


def simple(story: tuple[Turn, ...]) -> tuple[str, tuple[Turn, ...]] | None:
    """The system prompt and the other turns of a conversation of plain questions and answers.

    The weight of a single answer may be the row's.
    """
    system = story[0].parts[0] if story[0].role == "system" else ""
    rest = story[1:] if system else story
    plain = all(
        turn.role in ("user", "assistant") and not turn.calls and (turn.weight == 1 or len(rest) == 2)
        for turn in rest
    )
    return (system, rest) if plain else None


def text_of(turn: Turn) -> str:
    thought = f"<think>{turn.thought}</think>\n" if turn.thought else ""
    return thought + marked_text(turn, Path())


def of_columns(
    prompt: str, response: str, history: bool = False, system: str = "system", split: bool = False
) -> Any:
    def row(story: tuple[Turn, ...], folder: Path) -> Row | None:
        found = simple(story)
        if found is None or (len(found[1]) > 2 and not history):
            return None
        texts = [text_of(turn) for turn in found[1]]
        result = {prompt: texts[-2], response: texts[-1], **media_columns(story)}
        if history:
            result["history"] = [list(pair) for pair in zip(texts[:-2:2], texts[1:-2:2], strict=True)]
        if split:
            result["input"] = ""
        if found[1][-1].weight != 1:
            result["weight"] = found[1][-1].weight
        return result | ({system: found[0]} if found[0] else {})

    return row


def of_message_lists(content: str) -> Any:
    def row(story: tuple[Turn, ...], folder: Path) -> Row:
        turns = OPENAI.turns(story, CONTENTS[content], folder)
        more = {"tools": TOOLS_OF_ROW} if any(turn.calls for turn in story) else {}
        columns = media_columns(story) if content in NEED_COLUMNS else {}
        return {"prompt": turns[:-1], "completion": turns[-1:], **more, **columns}

    return row


def as_text(story: tuple[Turn, ...], folder: Path) -> Row:
    row: Row = of_messages("messages", OPENAI, "markers")(story, folder)
    return {**row, "messages": json.dumps(row["messages"])}


def with_system_column(story: tuple[Turn, ...], folder: Path) -> Row:
    rest = story[1:] if story[0].role == "system" else story
    row: Row = of_messages("conversations", SHAREGPT, "markers")(rest, folder)
    return {**row, "system": story[0].parts[0]} if rest is not story else row


def with_dicts_of_media(story: tuple[Turn, ...], folder: Path) -> Row:
    row: Row = of_messages("messages", MS_SWIFT, "markers")(story, folder)
    return row | media_columns(story, lambda part: {"path": part, "bytes": None})


def with_bytes(story: tuple[Turn, ...], folder: Path) -> Row:
    row: Row = of_messages("messages", OPENAI, "bare parts")(story, folder)
    images = [{"bytes": (folder / part).read_bytes()} for part in media_columns(story).get("images", [])]
    return row | ({"images": images} if images else {})


SPELLINGS: dict[str, Callable[[tuple[Turn, ...], Path], Row | None]] = {
    **{f"messages, {content}": of_messages("messages", OPENAI, content) for content in CONTENTS},
    **{
        f"conversations, {content}": of_messages("conversations", OPENAI, content, list)
        for content in CONTENTS
    },
    "ShareGPT": of_messages("conversations", SHAREGPT, "markers"),
    "ShareGPT with parts": of_messages("conversations", SHAREGPT, "image"),
    "ShareGPT with a system column": with_system_column,
    "ms-swift messages": of_messages("messages", MS_SWIFT, "markers"),
    "ms-swift messages, media as dicts": with_dicts_of_media,
    "messages as JSON text": as_text,
    "images as bytes": with_bytes,
    "prompt and completion": of_columns("prompt", "completion"),
    "prompt and completion of messages": of_message_lists("bare parts"),
    "prompt and completion of messages with markers": of_message_lists("markers"),
    "Alpaca": of_columns("instruction", "output", history=True, split=True),
    "Alpaca without input": of_columns("instruction", "output"),
    "ms-swift": of_columns("query", "response", history=True),
    "prompt and response": of_columns("prompt", "response", system="system_prompt"),
    "question and answer": of_columns("question", "answer"),
}


def read_list(rows: list[Row], folder: Path) -> Any:
    return open_examples(rows, in_folder(folder), Ledger())


def in_folder(folder: Path) -> Any:
    from packhorse.formats.row_format import RowFormat

    return RowFormat(media_dir=str(folder))


def read_dataset(rows: list[Row], folder: Path) -> Any:
    import datasets

    table = datasets.Dataset.from_list(with_all_columns(rows))  # one: its structs have all fields of all rows
    return open_examples(table, in_folder(folder), Ledger())


def with_all_columns(rows: list[Row]) -> list[Row]:
    """A table has every column in every row."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def read_file(write: Callable[[Path, list[Row]], str]) -> Any:
    def read(rows: list[Row], folder: Path) -> Any:
        return open_meta_dataset(write(folder, rows))

    return read


READERS: dict[str, Callable[[list[Row], Path], Any]] = {
    "list": read_list,
    "jsonl": read_file(write_jsonl),
    "json": read_file(write_json),
    "parquet": read_file(lambda folder, rows: write_parquet(folder, with_all_columns(rows))),
    "dataset": read_dataset,
}


# --- what they must be ---


@dataclass(frozen=True)
class Expected:
    """What the processor itself makes of a conversation, and the labels of incremental rendering.

    Weights are those of supervised tokens, in order.
    """

    ids: list[int]
    labels: list[int]
    weights: list[float]
    media: dict[str, torch.Tensor]


@cache
def processor() -> Any:
    made = build("qwen3_vl")
    made.chat_template = TOOLS
    return made


@cache
def expect(name: str, folder: Path) -> Expected:
    made, story = processor(), STORIES[name]
    turns, images, videos = list[Row](), [], []
    for turn in story:
        parts: list[Row] = []
        for part in turn.parts:
            parts.append({"type": kind_of(part)} if is_file(part) else {"type": "text", "text": part})
            if is_file(part) and kind_of(part) == "image":
                images.append(load_image(folder / part))
            elif is_file(part):
                videos.append(load_video(folder / part, sampling=Encoder(made).video_sampling))
        if turn.thought:
            parts[0]["text"] = f"<think>{turn.thought}</think>\n{parts[0]['text']}"
        calls = {"tool_calls": [{"type": "function", "function": CALL}]} if turn.calls else {}
        turns.append({"role": turn.role, "content": parts, **calls})
    tools = TOOLS_OF_ROW if any(turn.calls for turn in story) else None
    text, spans = expected_spans(made, bare(turns), tools)

    def call(some: str) -> Any:
        """Encode a beginning of the text with the media in it."""
        shown = some.count("<|image_pad|>"), some.count("<|video_pad|>")
        media: dict[str, Any] = {"images": [images[: shown[0]]]} if shown[0] else {}
        if shown[1]:
            media["videos"] = [[video.frames for video in videos[: shown[1]]]]
            media["videos_kwargs"] = {
                "video_metadata": [video.metadata.as_dict() for video in videos[: shown[1]]],
                "do_sample_frames": False,
                "input_data_format": "channels_last",
            }
        return made(text=[some], text_kwargs={"add_special_tokens": False}, return_tensors="pt", **media)

    def encode(some: str) -> list[int]:
        ids: list[int] = call(some)["input_ids"][0].tolist()
        return ids

    all_labels = [IGNORE_INDEX] * len(encode(text))
    weights = list[float]()
    for span, turn in zip(spans, (turn for turn in story if turn.role == "assistant"), strict=True):
        _, labels = expected_labels(encode, text, [span])
        supervised = [at for at, label in enumerate(labels) if label != IGNORE_INDEX]
        for at in supervised if turn.weight else ():
            all_labels[at] = labels[at]
            weights.append(turn.weight)
    output = dict(call(text))
    ids = output.pop("input_ids")[0].tolist()
    tensors = {
        key: value for key, value in output.items() if key not in ("attention_mask", "mm_token_type_ids")
    }
    return Expected(ids, all_labels, weights, tensors)


def test_there_are_thirty_spellings_of_ten_conversations() -> None:
    assert len(SPELLINGS) >= 30
    assert len(STORIES) >= 10


_TABLES = ("parquet", "dataset")
ON_DISK = {"jsonl": 3, "json": 5, "parquet": 2, "dataset": 3}  # every n-th spelling; the list has all


def pairs() -> list[tuple[str, str]]:
    chosen = [(spelling, "list") for spelling in SPELLINGS]
    for reader, step in ON_DISK.items():
        chosen += [(spelling, reader) for spelling in list(SPELLINGS)[::step]]
    # Its calls are texts next to lists of parts, which no column of a table can hold.
    return [pair for pair in chosen if pair not in {("ShareGPT with parts", name) for name in _TABLES}]


@pytest.mark.parametrize(("spelling", "reader"), pairs())
def test_a_conversation_is_the_same_in_every_spelling(
    spelling: str, reader: str, files: dict[str, Path], tmp_path: Path
) -> None:
    folder = files["wide.png"].parent
    encoder, counter = Encoder(processor()), TokenCounter(Encoder(processor()))
    rows = {name: SPELLINGS[spelling](story, folder) for name, story in STORIES.items()}
    written = {name: row for name, row in rows.items() if row is not None}
    for path in folder.iterdir():  # next to the data file, where relative paths are looked up
        (tmp_path / path.name).symlink_to(path)
    examples = list(READERS[reader](list(written.values()), tmp_path))
    assert len(examples) == len(written) >= 6
    for name, example in zip(written, examples, strict=True):
        conversation = parse_conversation(example, name)
        sample = encoder.label_sample(encoder.encode(conversation), name)
        want = expect(name, folder)
        assert sample.tokens["input_ids"].tolist() == want.ids, name
        assert sample.labels is not None
        assert sample.labels.tolist() == want.labels, name
        if set(want.weights) == {1}:
            assert sample.loss_weights is None, name
        else:
            assert sample.loss_weights is not None, name
            assert sample.loss_weights[sample.labels != IGNORE_INDEX].tolist() == want.weights, name
        assert sample.media.keys() == want.media.keys(), name
        for key, value in want.media.items():
            assert torch.equal(sample.media[key], value), (name, key)
        counted = counter.count(conversation)
        numbers = counted.count.total, counted.count.supervised
        assert numbers == (len(want.ids), len(want.weights)), name
        assert counted.weight == (None if set(want.weights) == {1} else sum(want.weights)), name


def test_every_row_of_every_spelling_is_delivered_once_or_in_the_ledger(
    files: dict[str, Path], tmp_path: Path
) -> None:
    folder = files["wide.png"].parent
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    broken: list[Row] = [{"messages": []}, {"messages": [{"role": "user"}]}]
    meta, good = {}, set[str]()
    for number, (name, spelling) in enumerate(SPELLINGS.items()):
        rows = [row for story in STORIES.values() if (row := spelling(story, folder)) is not None][
            number % 3 :: 3
        ]
        try:
            written = Path(write_jsonl(tmp_path, [*rows, *broken]))
        except TypeError:  # bytes are no JSON
            assert "bytes" in name
            continue
        meta[f"s{number}"] = {"file_name": f"s{number}.jsonl", "media_dir": "."}
        written.rename(tmp_path / f"s{number}.jsonl")
        good |= {f"s{number}/{row}" for row in range(len(rows))}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    settings: dict[str, Any] = {"model": "unchecked", "pack_size": 2048, "max_bad_share": None}
    loader = packhorse.load(str(tmp_path / "meta.json"), processor(), num_workers=0, **settings)
    delivered = [key for batch in loader for key in batch.info.keys]
    assert len(meta) >= 30
    assert sorted(delivered) == sorted(good)
    stats = loader.epoch_stats
    assert stats is not None
    assert (stats.rows, stats.delivered, stats.lost) == (len(good) + 2 * len(meta), len(good), 0)
    assert sum(stats.reasons.values()) == 2 * len(meta)
