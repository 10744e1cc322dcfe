"""The verdict of a parity check, and which samples and backends the command takes."""

import json
import math
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from contract.processors import processor
from count_samples import chat, write_meta, write_rows
from packhorse.cli import parity as command
from packhorse.cli.app import app
from packhorse.errors import ConfigError
from packhorse.families.packing import Packing
from packhorse.tools.parity import DocumentParity, ParityReport
from raising import raises_config


def report(*largest: float, gradients: float | None = None, attention: str = "sdpa") -> ParityReport:
    documents = tuple(DocumentParity(0, 1, 1, 1, 0.0, 0.0, value) for value in largest)
    return ParityReport(attention, documents, gradients, 1e-4, 1e-3)


@pytest.mark.parametrize("values", [(1e-6, math.nan), (math.nan, 1e-6)])
def test_a_loss_that_is_no_number_is_no_parity(values):
    assert not report(*values).ok
    assert math.isnan(report(*values).largest)
    assert "NOT" in report(*values).describe()
    assert not report(1e-6, gradients=math.nan).ok


def test_small_differences_are_parity():
    assert report(1e-6, 2e-6, gradients=1e-5).ok
    assert report(1e-6, 2e-6).largest == 2e-6
    assert not report(1e-6, 2e-3).ok


def test_why_gradients_were_not_compared_is_said():
    assert "gradients not compared (not requested)" in report(1e-6).describe()
    assert "gradients 1.0e-05 apart (allowed 1.0e-03)" in report(1e-6, gradients=1e-5).describe()


def test_compared_gradients_have_no_reason_against_them_in_the_json():
    assert report(1e-6, gradients=1e-5).as_dict()["why_no_gradients"] == ""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model", "/nowhere"], "model /nowhere: no such folder"),
        (["--model", "m", "--processor", "/nowhere"], "processor /nowhere: no such folder"),
        (["--model", "m", "--attn-implementation", "foo"], "--attn-implementation foo: expected one of"),
        (["--model", "m", "--dtype", "int"], "--dtype int: expected float32, bfloat16 or float16"),
        (["--model", "m", "--device", "abacus"], "--device abacus: not available here"),
    ],
)
def test_what_cannot_be_compared_is_one_line_and_exit_code_two(options, says):
    result = CliRunner().invoke(app, ["parity", "meta.json", *options])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"packhorse parity: {says}")
    assert len(result.stderr.splitlines()) == 1


def test_no_row_is_taken_twice_and_bad_ones_are_named(tmp_path):
    lines = [json.dumps(chat(number)) for number in range(8)]
    lines[2] = lines[2][:20]
    lines[4] = json.dumps({**chat(4), "images": ["none.png"]}).replace("Question", "<image>Question")
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    meta = write_meta(tmp_path, {"chats": {"file_name": "chats.jsonl"}})
    for number in (4, 8):
        chosen = command.choose_samples(str(meta), None, number, processor("qwen2_vl"))
        assert len(chosen.keys) == len(set(chosen.keys)) == len(chosen.samples) == min(number, 6)
        torn, missing = chosen.dropped
        assert torn.startswith("chats/2: malformed_row, ")
        assert missing == "chats/4: missing_media, no file none.png"
        assert chosen.describe_dropped().startswith("2 rows dropped:\n  chats/2: malformed_row")


def test_data_without_a_good_row_are_given_up_and_named(tmp_path):
    rows = [{**chat(n), "images": ["none.png"]} for n in range(300)]
    for row in rows:
        row["messages"][0]["content"] = "<image>Why?"
    write_rows(tmp_path / "chats.jsonl", rows)
    meta = write_meta(tmp_path, {"chats": {"file_name": "chats.jsonl"}})
    with raises_config(path=meta, match=r"\. 100 rows dropped:\n  chats/0: miss"):
        command.choose_samples(str(meta), None, 4, processor("qwen2_vl"))


@pytest.fixture
def run(monkeypatch):
    def check(model, processor, samples, backend, *, rows, keys):
        if backend in ("varlen", model):
            raise ConfigError(f"no {backend} here")
        return report(1e-6, attention=backend)

    monkeypatch.setattr("packhorse.tools.parity.check_parity", check)
    monkeypatch.setattr("packhorse.families.models.open_processor", lambda *_: SimpleNamespace())
    monkeypatch.setattr(command, "choose_samples", lambda *_: command.Chosen([{}] * 4, list("abcd")))
    monkeypatch.setattr(command, "load_model", lambda model, *_: model)
    monkeypatch.setattr(command, "prepare_layers", lambda *_: command.PreparedLayers(Packing(), {}, "auto"))
    app = typer.Typer()
    app.command()(command.parity)
    return lambda *arguments: CliRunner().invoke(app, ["meta.json", "--model", "m", *arguments])


def test_a_backend_that_is_not_possible_does_not_stop_the_others(run):
    result = run()
    assert result.exit_code == 0
    assert "sdpa: packed equals unpacked" in result.output
    assert "eager: packed equals unpacked" in result.output
    assert "varlen: not available: no varlen here" in result.output
    result = json.loads(run("--json").stdout)
    assert list(result) == [
        "version",
        "passed",
        "dropped",
        "not_possible",
        "failed",
        "reports",
        "stateful_layers",
        "proven",
    ]
    assert [one["attention"] for one in result["reports"]] == ["sdpa", "eager"]
    assert result["not_possible"] == {"varlen": "no varlen here"}


def test_documents_are_listed_with_v_and_if_they_differ(run, monkeypatch):
    assert "document 1" not in run().output
    assert (
        "pack 0, document 1, : 1 tokens, 1 supervised, loss 0.0000 alone, 0.0000 packed, ok"
        in run("-v").output
    )
    found = report(1e-6, 2e-3, math.nan)
    monkeypatch.setattr("packhorse.tools.parity.check_parity", lambda *_, **__: found)
    result = run("--attn-implementation", "sdpa")
    assert result.exit_code == 1
    assert result.output.count(", DIFFERS") == 2
    assert ", ok" not in result.output


def test_a_requested_backend_must_be_available(run, monkeypatch):
    result = run("--attn-implementation", "sdpa", "--attn-implementation", "varlen")
    assert result.exit_code == 2
    assert "no varlen here" in result.output
    monkeypatch.setattr(command, "_BACKENDS", ("varlen",))
    assert run().exit_code == 2
