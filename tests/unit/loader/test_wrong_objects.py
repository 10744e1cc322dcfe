"""What a loader says about a wrong processor, model or data: what was given, and what to write instead."""

import copy
import json
import socket
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import datasets
import pytest
import torch

import packhorse
from contract.processors import processor
from contract.tiny_models import tiny_model
from contract.tiny_tokenizers import tokenizer
from contract.torchvision_ops import make_torchvision_importable
from loader_samples import chat, load, mixed_rows, texts
from packhorse.errors import ConfigError
from packhorse.families.models import check_name
from packhorse.types import World
from raising import raises_config

make_torchvision_importable()

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text if p.type == 'text' else '' }}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
)


def words() -> Any:
    """A tokenizer that writes conversations."""
    made = copy.deepcopy(tokenizer("qwen2_vl"))
    made.chat_template = TEMPLATE
    return made


def text_model() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=len(words()), num_key_value_heads=1, **sizes))


# Each makes the argument in an empty folder, and says what the message has to hold.
WRONG: dict[str, tuple[str, Callable[[Path], Any], tuple[str, ...]]] = {
    "a tokenizer for a model with images": (
        "processor",
        lambda folder: words(),
        ("Qwen2VLForConditionalGeneration has a vision_config", "AutoProcessor.from_pretrained"),
    ),
    "an image processor": (
        "processor",
        lambda folder: processor("qwen2_vl").image_processor,
        ("Qwen2VLImageProcessor", "expected the model's whole processor", "AutoProcessor.from_pretrained"),
    ),
    "no processor": (
        "processor",
        lambda folder: None,
        ("processor is None", "AutoProcessor.from_pretrained"),
    ),
    "a processor's class": (
        "processor",
        lambda folder: type(processor("qwen2_vl")),
        ("the class Qwen2VLProcessor", "AutoProcessor.from_pretrained"),
    ),
    "a model for a processor": (
        "processor",
        lambda folder: tiny_model("qwen2_vl"),
        ("processor is Qwen2VLForConditionalGeneration", "AutoProcessor.from_pretrained"),
    ),
    "a processor's name that is none": (
        "processor",
        lambda folder: "my processor",
        ("processor my processor: no such folder", "hub name"),
    ),
    "a processor's name, offline": (
        "processor",
        lambda folder: "someone/missing",
        ("processor someone/missing: no such folder", "HF_HUB_OFFLINE", "hf download someone/missing"),
    ),
    "no model": (
        "model",
        lambda folder: None,
        ("model is missing", "model=model", 'mode="pad"', "unchecked"),
    ),
    "a model's class": (
        "model",
        lambda folder: type(tiny_model("qwen2_vl")),
        ("the class Qwen2VLForConditionalGeneration", "model=model"),
    ),
    "a model's name that is none": (
        "model",
        lambda folder: "uncheked",
        ("model uncheked: no such folder", "Pass the folder of a model", "hf download uncheked"),
    ),
    "a model's name, offline": (
        "model",
        lambda folder: "someone/missing",
        ("model someone/missing: no such folder", "HF_HUB_OFFLINE", "hf download someone/missing"),
    ),
    "an empty folder for a model": (
        "model",
        lambda folder: folder,
        ("no config there", "expected a model of transformers"),
    ),
    "a module that is no model": (
        "model",
        lambda folder: torch.nn.Linear(2, 2),
        ("model is a Linear without a config", "expected a model of transformers"),
    ),
    "a number for a model": (
        "model",
        lambda folder: 7,
        ("model is a int", "expected a model of transformers"),
    ),
    "a model without mRoPE for a processor with it": (
        "model",
        lambda folder: text_model(),
        ("Qwen2ForCausalLM has no get_rope_index", "mRoPE", "processor.tokenizer if the data has no media"),
    ),
    "a folder": (
        "data",
        lambda folder: write_file(folder, "rows/train.jsonl").parent,
        ("is a directory", "a data file", "Pass ", "rows/train.jsonl"),
    ),
    "an archive": (
        "data",
        lambda folder: write_file(folder, "train.tar"),
        ("train.tar is an archive", "a meta file", "then pass ", "train.jsonl"),
    ),
    "a table": (
        "data",
        lambda folder: write_file(folder, "train.csv"),
        ("train.csv is an archive or table", "a meta file", "train.jsonl"),
    ),
    "an Arrow file": (
        "data",
        lambda folder: str(write_file(folder, "train.arrow")),
        ("train.arrow is an archive or table", "a data file", "train.jsonl"),
    ),
    "a JSON file with one row": (
        "data",
        lambda folder: write_file(folder, "train.json", json.dumps({"messages": []})),
        ("is a single row", "expected a meta file or a data file"),
    ),
    "a path to nothing": (
        "data",
        lambda folder: folder / "meta.json",
        ("meta.json: no such file or directory", "a meta file"),
    ),
    "the report of prepare": (
        "model",
        lambda folder: packhorse.prepare(copy.deepcopy(tiny_model("qwen2_vl"))),
        ("the report of packhorse.prepare", "pass the model"),
    ),
    "no data": ("data", lambda folder: None, ("data is a NoneType", 'data="train.jsonl"')),
    "a generator": ("data", lambda folder: iter(texts(2)), ("with len() and [index]", 'data="train.jsonl"')),
}


def write_file(folder: Path, name: str, content: str = "{}\n") -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    return path


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_object_is_one_error_that_says_what_to_write(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, make, says = WRONG[wrong]
    right = {"data": texts(4), "processor": processor("qwen2_vl"), "model": tiny_model("qwen2_vl")}
    with pytest.raises(ConfigError) as caught:
        packhorse.load(**{**right, name: make(tmp_path)}, world=World(), pack_size=256)
    message = str(caught.value)
    for expected in says:
        assert expected.lower() in message.lower()
    assert "\n" not in message


def test_a_name_that_the_hub_cannot_look_up_is_rejected_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    started = time.monotonic()
    for arguments in ({"model": "someone/missing"}, {"processor": "someone/missing"}, {"model": "gpt2"}):
        with pytest.raises(ConfigError, match="the hub cannot be reached"):
            packhorse.load(**{"data": texts(4), "processor": processor("qwen2_vl"), **arguments})
    assert time.monotonic() - started < 20, "the hub's client alone retries for longer"


def test_the_hub_looks_up_a_name_without_an_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        check_name("model", "gpt2")
        server.shutdown()
    assert asked == ["/gpt2"]


def test_without_a_model_packs_are_rejected_and_padded_batches_are_not() -> None:
    with raises_config("model", None):
        packhorse.load(texts(4), processor("qwen2_vl"), world=World())
    with raises_config("model", None):
        packhorse.LoaderConfig(data=texts(4)).build(processor("qwen2_vl"), world=World())
    with raises_config("model", None):
        packhorse.Loader(packhorse.LoaderConfig(data=texts(4)), processor("qwen2_vl"), world=World())
    loader = packhorse.load(texts(4), processor("qwen2_vl"), world=World(), mode="pad")
    assert "model=None," in repr(loader)


def test_the_loader_shows_which_model_it_makes_batches_for() -> None:
    model = tiny_model("qwen2_vl")
    assert "model=unchecked," in repr(load(texts(4), model="unchecked"))
    assert "model=Qwen2VLForConditionalGeneration (checked)," in repr(load(texts(4), model=model))
    assert "model=Qwen2VLConfig (checked)," in repr(load(texts(4), model=model.config))
    assert "rank=1 of 2," in repr(load(texts(4), 1, 2))


# A tokenizer in place of a processor.


@pytest.mark.parametrize("mode", ["pack", "pad"])
def test_a_tokenizer_is_enough_for_texts_and_a_model_without_media(mode: Any) -> None:
    loader = packhorse.load(texts(8), words(), model=text_model(), world=World(), mode=mode)
    seen = [index for batch in loader for index in batch.info.samples]
    assert sorted(seen) == list(range(8))


@pytest.mark.parametrize("mode", ["pack", "pad"])
def test_a_tokenizer_is_rejected_at_the_first_row_with_media(mode: Any, tmp_path: Path) -> None:
    from PIL import Image

    rows = [*texts(5), chat("What?", "That.", {"type": "image", "image": Image.new("RGB", (60, 60))})]
    with pytest.raises(ConfigError, match=r"row 5 has media \(image\), but the processor is a tokenizer"):
        packhorse.load(rows, words(), model=text_model(), world=World(), mode=mode)
    Image.new("RGB", (60, 60)).save(tmp_path / "a.png")
    row = {"messages": [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "It."}]}
    (tmp_path / "shots.jsonl").write_text(json.dumps({**row, "images": ["a.png"]}) + "\n")
    meta = {"shots": {"file_name": str(tmp_path / "shots.jsonl"), "media_dir": str(tmp_path)}}
    with pytest.raises(ConfigError, match=r"row shots/0 has media \(image\)"):
        packhorse.load(meta, words(), model=text_model(), world=World(), mode=mode)


def test_media_that_the_processor_makes_no_tensor_of_are_bad_samples() -> None:
    class Blind:
        """Writes placeholders and drops what they stand for."""

        def __init__(self) -> None:
            self.inner = processor("qwen2_vl")
            self.tokenizer, self.chat_template = self.inner.tokenizer, self.inner.chat_template

        def apply_chat_template(self, *arguments: Any, **options: Any) -> Any:
            return self.inner.apply_chat_template(*arguments, **options)

        def __call__(self, text: Any, images: Any = None, videos: Any = None, **options: Any) -> Any:
            return self.tokenizer(text, **options)

    rows = mixed_rows(20)
    plain = {
        index
        for index, row in enumerate(rows)
        if all(part["type"] == "text" for part in row["conversation"][0]["content"])
    }
    loader = packhorse.load(rows, Blind(), model="unchecked", world=World(), max_bad_share=None)
    seen = {index for batch in loader for index in batch.info.samples}
    assert seen == plain
    assert {int(drop.key): drop.reason for drop in loader.ledger} == dict.fromkeys(
        set(range(20)) - plain, "media_mismatch"
    )


def test_a_folder_of_the_datasets_library_says_how_to_load_it(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"messages": []}]).save_to_disk(str(tmp_path / "saved"))
    with raises_config("data", path=str(tmp_path / "saved"), match="load_from_disk"):
        packhorse.load(str(tmp_path / "saved"), processor("qwen2_vl"), mode="pad")
