"""The hub loaders on small real Parquet datasets with the public columns, loaded by path."""

import io
import json
import logging
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import soundfile
from PIL import Image

import packhorse
from contract.processors import processor
from packhorse import datasets as recipes
from packhorse.ledger import Ledger, default_ledger
from packhorse.types import World
from raising import raises_bad_sample, raises_config


def shade_image(shade: int) -> Image.Image:
    return Image.new("RGB", (8, 6), (shade, 0, 0))


def write(folder: Path, columns: dict[str, list[Any]], **features: Any) -> str:
    dataset = datasets.Dataset.from_dict(columns)
    for name, feature in features.items():
        dataset = dataset.cast_column(name, feature)
    (folder / "data").mkdir(exist_ok=True)
    dataset.to_parquet(str(folder / "data" / "train-00000-of-00001.parquet"))
    return str(folder)


def shade(part: dict[str, Any]) -> int:
    assert part["type"] == "image"
    return part["image"].convert("RGB").getpixel((0, 0))[0]


def test_rdr_asks_for_a_description(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"image": [shade_image(10), shade_image(20)], "text": ["ten", "twenty"]},
        image=datasets.Image(),
    )
    dataset = recipes.make_rdr_dataset(path)
    assert len(dataset) == 2
    user, assistant = dataset[1]["conversation"]
    assert shade(user["content"][0]) == 20
    assert user["content"][1] == {"type": "text", "text": "Describe this image."}
    assert assistant == {"role": "assistant", "content": [{"type": "text", "text": "twenty"}]}


def test_medpix_stays_on_disk_and_decodes_on_access(tmp_path: Path) -> None:
    columns = {"image_id": [shade_image(30)], "question": ["What?"], "answer": ["That."]}
    dataset = recipes.make_medpix_dataset(write(tmp_path, columns, image_id=datasets.Image()), split="train")
    assert isinstance(dataset, datasets.Dataset)
    user, assistant = dataset[0]["conversation"]
    assert shade(user["content"][0]) == 30
    assert user["content"][1]["text"] == "What?"
    assert assistant["content"][0]["text"] == "That."
    assert dataset.select([0])[0].keys() == {"conversation"}
    assert pickle.loads(pickle.dumps(dataset))[0]["conversation"][1] == assistant


def test_cord_turns_its_parse_into_tokens(tmp_path: Path) -> None:
    truths = [
        json.dumps({"gt_parse": {"total": {"price": "4"}, "menu": [{"nm": "tea"}, {"nm": "pie"}]}}),
        json.dumps({"gt_parses": [{"a": "1"}, {"a": "2"}, {"a": "3"}]}),
        json.dumps({"meta": {}}),
    ]
    path = write(tmp_path, {"image": [shade_image(1)] * 3, "ground_truth": truths}, image=datasets.Image())
    dataset = recipes.make_cord_v2_dataset(path)
    answer = dataset[0]["conversation"][1]["content"][0]["text"]
    assert answer == (
        "<s_total><s_price>4</s_price></s_total><s_menu><s_nm>tea</s_nm><sep/><s_nm>pie</s_nm></s_menu>"
    )
    picks = {
        recipes.make_cord_v2_dataset(path, seed=s)[1]["conversation"][1]["content"][0]["text"]
        for s in range(30)
    }
    assert picks == {"<s_a>1</s_a>", "<s_a>2</s_a>", "<s_a>3</s_a>"}
    assert len({dataset[1]["conversation"][1]["content"][0]["text"] for _ in range(5)}) == 1
    with raises_bad_sample("wrong_format", match="neither 'gt_parses'"):
        dataset[2]
    assert len(recipes.make_cord_v2_dataset(path, limit_dataset_samples=2)) == 2
    assert len(recipes.make_cord_v2_dataset(path, limit_dataset_samples=9)) == 3
    with raises_config("limit_dataset_samples", -1):
        recipes.make_cord_v2_dataset(path, limit_dataset_samples=-1)


def test_json2token_knows_plain_text_and_key_order() -> None:
    assert recipes.json2token({"text_sequence": "plain"}) == "plain"
    nested = {"a": 1, "b": [2, {"c": None}]}
    assert recipes.json2token(nested) == "<s_b>2<sep/><s_c>None</s_c></s_b><s_a>1</s_a>"
    assert recipes.json2token({"a": 1, "b": 2}, sort_json_key=False) == "<s_a>1</s_a><s_b>2</s_b>"
    assert recipes.json2token({}) == ""


def test_cv17_gives_the_prompt_and_the_audio(tmp_path: Path) -> None:
    wave = np.sin(np.arange(1600) / 10).astype(np.float32) / 2
    clip = io.BytesIO()
    soundfile.write(clip, np.stack([wave, wave], axis=1), 16_000, format="WAV", subtype="FLOAT")
    columns = {"audio": [{"bytes": clip.getvalue(), "path": "a.wav"}], "transcription": ["Merhaba"]}
    path = write(tmp_path, columns, audio=datasets.Audio())
    item = recipes.make_cv17_dataset(path)[0]
    assert item["conversation"] == [
        {"role": "user", "content": "<|endoftext11|>Transcribe the Turkish audio clip."},
        {"role": "assistant", "content": "Merhaba"},
    ]
    array, rate = item["audio"]
    assert rate == 16_000
    assert array.dtype == np.float32
    np.testing.assert_allclose(array, wave, atol=1e-6)
    other = recipes.make_cv17_dataset(path, audio_placeholder="<|audio_1|>")[0]["conversation"][0]["content"]
    assert other.startswith("<|audio_1|>Transcribe")


def test_unimm_puts_the_image_where_the_text_has_it(tmp_path: Path) -> None:
    turns = [
        {"from": "human", "value": "<Image >\nWhat is it?"},
        {"from": "gpt", "value": "A cat. "},
        {"from": "human", "value": "  "},
        {"from": "gpt", "value": "Still a cat."},
        {"from": "human", "value": "Where is <image> from?"},
    ]
    other = [{"from": "judge"}]
    columns = {"image": [shade_image(9)] * 3, "conversation": [json.dumps(turns), json.dumps(other), "{"]}
    dataset = recipes.make_unimm_chat_dataset(write(tmp_path, columns, image=datasets.Image()))
    conversation = dataset[0]["conversation"]
    assert [turn["role"] for turn in conversation] == ["user", "assistant"] * 2 + ["user"]
    kinds = [[part["type"] for part in turn["content"]] for turn in conversation]
    assert kinds == [["image", "text"], ["text"], ["image"], ["text"], ["text", "image", "text"]]
    assert conversation[0]["content"][1]["text"] == "What is it?"
    assert conversation[1]["content"][0]["text"] == "A cat."
    for bad, message in ((1, "'from'"), (2, "not valid JSON")):
        with raises_bad_sample("wrong_format", match=message):
            dataset[bad]


def texts(example: dict[str, Any]) -> list[tuple[str, str]]:
    return [(turn["role"], turn["content"][0]["text"]) for turn in example["conversation"]]


def test_unimm_skips_a_turn_of_another_role_and_records_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    turns = [
        {"from": "human", "value": "<image>What is it?"},
        {"from": "judge", "value": "Well asked."},
        {"from": "gpt", "value": "A cat."},
    ]
    columns = {
        "image": [shade_image(9)] * 2,
        "conversation": [json.dumps(turns), json.dumps(turns[1:2])],
    }
    path = write(tmp_path, columns, image=datasets.Image())
    dataset = recipes.make_unimm_chat_dataset(path)
    with caplog.at_level(logging.WARNING):
        roles = [[turn["role"] for turn in dataset[0]["conversation"]] for _ in range(3)]
    assert roles == [["user", "assistant"]] * 3
    assert caplog.text.count("turn of role 'judge' skipped") == 1
    entries = [drop for drop in default_ledger() if drop.dataset == path]
    assert [(drop.reason, drop.action) for drop in entries] == [("unknown_role", "cut")]
    with raises_bad_sample("empty_conversation"):
        dataset[1]


def test_the_ledger_of_a_loader_names_each_row_with_a_skipped_turn_once(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "What is it?"},
        {"role": "tool", "content": "look up"},
        {"role": "assistant", "content": "A cat."},
    ]
    path = write(tmp_path, {"messages": [turns, turns[::2], turns, turns]})
    rows = recipes.make_tulu3_dataset(path)
    loader = packhorse.load(rows, processor("qwen2_vl"), model="unchecked", world=World(), pack_size=256)
    for _ in range(3):
        list(loader)
    assert sorted((drop.key, drop.reason, drop.action) for drop in loader.ledger) == [
        (key, "unknown_role", "cut") for key in "023"
    ]
    assert len([drop for drop in default_ledger() if drop.dataset == path]) <= 1


def test_llava_puts_images_where_the_questions_have_their_tags(tmp_path: Path) -> None:
    turns = [
        {"from": "human", "value": "What is it?\n<image>"},
        {"from": "gpt", "value": "It says <image>."},
    ]
    plain = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]
    columns = {
        "image": [shade_image(4), None, None, shade_image(5)],
        "conversations": [turns, plain, turns, plain],
    }
    path = write(tmp_path, columns, image=datasets.Image())
    dataset = recipes.make_llava_onevision_dataset(path)
    question, answer = dataset[0]["conversation"]
    assert question["content"][0] == {"type": "text", "text": "What is it?"}
    assert shade(question["content"][1]) == 4
    assert answer == {"role": "assistant", "content": [{"type": "text", "text": "It says <image>."}]}
    assert texts(dataset[1]) == [("user", "Hello"), ("assistant", "Hi")]
    with raises_bad_sample("missing_media", match="column 'image' holds nothing"):
        dataset[2]
    assert texts(dataset[3]) == [("user", "Hello"), ("assistant", "Hi")]
    (entry,) = [drop for drop in default_ledger() if drop.dataset == path]
    assert (entry.reason, entry.detail) == ("surplus_media", "1 images, 0 <image> in the text")


def test_llava_paths_get_the_media_folder_and_lists_are_used_in_order(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "<image><image> Compare."}, {"from": "gpt", "value": "Same."}]
    columns = {"image": [["a.jpg", "/b.jpg"]], "conversations": [turns]}
    dataset = recipes.make_llava_onevision_dataset(write(tmp_path, columns), media_dir="coco")
    parts = dataset[0]["conversation"][0]["content"]
    assert [part.get("image") for part in parts] == ["coco/a.jpg", "/b.jpg", None]
    (tmp_path / "two").mkdir()
    columns = {"image": [["a.jpg"]], "conversations": [turns]}
    with raises_bad_sample("missing_media", match="column 'image' holds nothing"):
        recipes.make_llava_onevision_dataset(write(tmp_path / "two", columns))[0]


def test_shopify_asks_for_the_category_and_decodes_on_access(tmp_path: Path) -> None:
    broken = {"bytes": b"broken", "path": None}
    columns = {
        "product_image": [{"bytes": encode_image(shade_image(7)), "path": None}, broken, broken],
        "ground_truth_category": ["Apparel > Hats", "Toys", "Pets"],
        "product_title": ["Hat", "Toy", "Pet"],
    }
    path = write(tmp_path, columns, product_image=datasets.Image())
    dataset = recipes.make_shopify_product_catalogue_dataset(path, "train", 2)
    assert isinstance(dataset, datasets.Dataset)
    assert len(dataset) == 2
    user, assistant = dataset[0]["conversation"]
    assert shade(user["content"][0]) == 7
    assert "category" in user["content"][1]["text"]
    assert assistant["content"] == [{"type": "text", "text": "Apparel > Hats"}]
    with raises_bad_sample("broken_media"):
        dataset[1]
    with raises_config("limit_dataset_samples", -1):
        recipes.make_shopify_product_catalogue_dataset(path, limit_dataset_samples=-1)


def chat(*turns: str) -> list[dict[str, str]]:
    """Turns as ``role: text``."""
    return [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns]


def test_tulu_keeps_every_row_and_its_system_turns(tmp_path: Path) -> None:
    rows = [chat("system: Be brief.", "user: Hi", "assistant: Hello"), chat("user: 2", "assistant: 3")]
    dataset = recipes.make_tulu3_dataset(write(tmp_path, {"id": ["a", "b"], "messages": rows}))
    assert isinstance(dataset, datasets.Dataset)
    assert texts(dataset[0]) == [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello")]
    assert texts(dataset[1]) == [("user", "2"), ("assistant", "3")]


def test_the_text_mix_takes_four_fifths_of_tulu_and_records_the_rows_that_it_drops(tmp_path: Path) -> None:
    rows = [chat(f"user: {n}", f"assistant: {n}") for n in range(80)]
    rows[3] = chat(*["user: a", "assistant: b"] * 9)  # more than max_turns
    rows[5] = chat("user: a", "assistant:  ")  # a blank turn: one is left
    rows[7] = chat("user: a", "user: b")  # no answer
    rows[9] = chat("user: 9", "tool: x", "assistant: 9")  # another role
    for name in ("tulu", "code"):
        (tmp_path / name).mkdir()
    tulu = write(tmp_path / "tulu", {"messages": rows, "source": ["s"] * 80})
    problems = [f"p{n}" for n in range(20)]
    code = write(tmp_path / "code", {"lang": ["py"] * 20, "problem": problems, "solution": ["s"] * 20})
    ledger = Ledger()

    def make(**more: Any) -> Any:
        paths = {"tulu_path": tulu, "magicoder_path": code}
        return recipes.make_tulu3_magicoder_text_mix_dataset(**paths, ledger=ledger, truncate=True, **more)

    mix = make()
    conversations = [texts(mix[n]) for n in range(len(mix))]
    questions = [turns[0][1] for turns in conversations]
    expected = {str(n) for n in range(80) if n not in (3, 5, 7)} | set(problems)
    assert set(questions) == expected
    share = sum(not question.startswith("p") for question in questions) / len(questions)
    assert 0.7 < share < 0.9
    assert [("user", "9"), ("assistant", "9")] in conversations
    assert {(drop.key, drop.reason) for drop in ledger} == {
        (f"{tulu}/3", "over_limit"),
        (f"{tulu}/5", "empty_conversation"),
        (f"{tulu}/7", "no_assistant_turn"),
        (f"{tulu}/9", "unknown_role"),
    }
    assert ledger.lost() == 3
    assert [texts(make()[n]) for n in range(5)] == conversations[:5]
    assert len(make(limit_total=6)) == 6
    assert [texts(make(seed=1)[n]) for n in range(20)] != conversations[:20]


def test_unknown_arguments_are_ignored_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, {"image": [shade_image(1)] * 4, "text": list("abcd")}, image=datasets.Image())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert len(recipes.make_rdr_dataset(path, truncate=True, tokenizer=None)) == 4
    assert caplog.text.count("ignoring tokenizer, truncate") == 1


def test_arguments_go_on_to_load_dataset_and_a_wrong_folder_says_what_it_has(tmp_path: Path) -> None:
    path = write(tmp_path, {"image": [shade_image(1)] * 4, "text": list("abcd")}, image=datasets.Image())
    assert len(recipes.make_rdr_dataset(path, split="train[:2]")) == 2
    files = str(tmp_path / "data" / "*.parquet")
    assert len(recipes.make_rdr_dataset("parquet", data_files=files)) == 4
    with raises_config("image_id", path=path, match="image_id, question, answer; it has image, text"):
        recipes.make_medpix_dataset(path)
    with raises_config(path=path, match="gives a IterableDataset, expected a Dataset: name one split"):
        recipes.make_rdr_dataset(path, streaming=True)


def encode_image(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def bomb() -> bytes:
    """A few bytes of PNG that name an image of 2.5 billion pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    chunks = [header, b"IDAT" + zlib.compress(bytes(100)), b"IEND"]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks
    )


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (99, 99, 3), dtype=np.uint8))


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        ({"bytes": bomb(), "path": None}, "media_too_large"),
        ({"bytes": encode_image(NOISE)[:5000], "path": None}, "broken_media"),
        ({"bytes": b"no image", "path": None}, "broken_media"),
        ({"bytes": b"", "path": None}, "broken_media"),
        ({"bytes": None, "path": None}, "missing_media"),
        (None, "missing_media"),
    ],
)
def test_an_image_that_cannot_be_used_is_rejected_with_its_reason_and_its_neighbours_are_not(
    tmp_path: Path, image: dict[str, Any] | None, reason: str
) -> None:
    good = {"bytes": encode_image(shade_image(7)), "path": None}
    turns = json.dumps([{"from": "human", "value": "Hi"}])
    columns = {
        "image": [good, image, good],
        "text": list("abc"),
        "ground_truth": ['{"gt_parse": {}}'] * 3,
        "image_id": [good, image, good],
        "question": list("abc"),
        "answer": list("abc"),
        "conversation": [turns] * 3,
    }
    path = write(tmp_path, columns, image=datasets.Image(), image_id=datasets.Image())
    for make in (
        recipes.make_rdr_dataset,
        recipes.make_cord_v2_dataset,
        recipes.make_medpix_dataset,
        recipes.make_unimm_chat_dataset,
    ):
        dataset = make(path)
        with raises_bad_sample(reason, stage="media"):
            dataset[1]
        assert [len(dataset[index]["conversation"]) > 0 for index in (0, 2)] == [True, True]


def test_a_broken_image_in_a_column_that_is_not_used_does_no_harm(tmp_path: Path) -> None:
    columns = {"image": [shade_image(5)], "text": ["five"], "thumbnail": [{"bytes": b"broken", "path": None}]}
    path = write(tmp_path, columns, image=datasets.Image(), thumbnail=datasets.Image())
    assert shade(recipes.make_rdr_dataset(path)[0]["conversation"][0]["content"][0]) == 5


def test_images_come_upright_and_in_rgb_as_the_hub_would_turn_them(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    photo = Image.new("L", (8, 6))
    photo.putpixel((0, 5), 255)
    data = encode_image(photo, exif=exif)
    path = write(tmp_path, {"image": [{"bytes": data, "path": None}], "text": ["x"]}, image=datasets.Image())
    hubs_own = datasets.load_dataset(path, split="train")[0]["image"]
    image = recipes.make_rdr_dataset(path)[0]["conversation"][0]["content"][0]["image"]
    assert (image.mode, image.size) == ("RGB", (6, 8))
    assert image.tobytes() == hubs_own.convert("RGB").tobytes()


def test_a_column_of_paths_is_handed_on_as_it_is(tmp_path: Path) -> None:
    dataset = recipes.make_rdr_dataset(write(tmp_path, {"image": ["cats/1.jpg", None], "text": ["a", "b"]}))
    assert dataset[0]["conversation"][0]["content"][0] == {"type": "image", "image": "cats/1.jpg"}
    with raises_bad_sample("missing_media", match="column 'image' holds nothing"):
        dataset[1]


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("make", "column", "value", "words"),
    [
        (recipes.make_rdr_dataset, "text", None, "column 'text' holds nothing, expected text"),
        (recipes.make_cord_v2_dataset, "ground_truth", None, "holds nothing"),
        (recipes.make_cord_v2_dataset, "ground_truth", "[1]", "JSON of a list, expected a dict"),
        (recipes.make_cord_v2_dataset, "ground_truth", "7", "JSON of a int, expected a dict"),
        (recipes.make_cord_v2_dataset, "ground_truth", '{"gt_parses": {"a": 1}}', "neither 'gt_parses'"),
        (recipes.make_cord_v2_dataset, "ground_truth", DEEP, "nested too deep"),
        (
            recipes.make_cord_v2_dataset,
            "ground_truth",
            '{"gt_parse": ' + '{"a":' * 900 + "1" + "}" * 901,
            "nested too deep",
        ),
        (recipes.make_unimm_chat_dataset, "conversation", None, "holds nothing"),
        (recipes.make_unimm_chat_dataset, "conversation", "null", "JSON of nothing, expected a list"),
        (recipes.make_unimm_chat_dataset, "conversation", "[null]", "a turn needs"),
        (
            recipes.make_unimm_chat_dataset,
            "conversation",
            '[{"from": "gpt", "value": null}]',
            r"'value' \(text\)",
        ),
        (
            recipes.make_unimm_chat_dataset,
            "conversation",
            '[{"from": "human", "value": 3}]',
            r"'value' \(text\)",
        ),
        (
            recipes.make_unimm_chat_dataset,
            "conversation",
            '[{"from": ["gpt"], "value": "x"}]',
            "a turn needs",
        ),
        (recipes.make_unimm_chat_dataset, "conversation", DEEP, "nested too deep"),
    ],
)
def test_texts_and_json_of_another_kind_are_rejected_as_a_wrong_format(
    tmp_path: Path, make: Any, column: str, value: str | None, words: str
) -> None:
    columns = {"image": [shade_image(1)], column: [value]}
    with raises_bad_sample("wrong_format", stage="convert", match=words):
        make(write(tmp_path, columns, image=datasets.Image(), **{column: datasets.Value("string")}))[0]


def test_a_medpix_or_cv17_row_without_text_or_audio_is_rejected(tmp_path: Path) -> None:
    text = datasets.Value("string")
    columns = {"image_id": [shade_image(1)] * 2, "question": ["a", None], "answer": [None, "b"]}
    medpix = recipes.make_medpix_dataset(
        write(tmp_path, columns, image_id=datasets.Image(), question=text, answer=text)
    )
    for index, column in ((0, "answer"), (1, "question")):
        with raises_bad_sample("wrong_format", match=f"column '{column}' holds nothing"):
            medpix[index]
    (tmp_path / "audio").mkdir()
    columns = {"audio": [None, {"bytes": b"x", "path": "a.wav"}], "transcription": ["a", None]}
    path = write(tmp_path / "audio", columns, audio=datasets.Audio(), transcription=text)
    cv17 = recipes.make_cv17_dataset(path)
    for index, reason in ((0, "missing_media"), (1, "wrong_format")):
        with raises_bad_sample(reason):
            cv17[index]
