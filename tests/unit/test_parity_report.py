"""The verdict of a parity check, and which samples and backends the command takes."""

import json
import math
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from packhorse.cli import parity as command
from packhorse.errors import BadSample, ConfigError
from packhorse.parity import DocumentParity, ParityReport


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


def test_no_row_is_taken_twice(monkeypatch):
    class Rows(list):
        def __getitem__(self, place):
            if place in (2, 4):
                raise BadSample("torn", reason="broken_media", stage="media")
            return {"row": place}

    monkeypatch.setattr("packhorse.datasets.open_meta_dataset", lambda meta, names: Rows(range(8)))
    for number in (4, 8):
        chosen = [row["row"] for row in command._samples("meta.json", None, number)]
        assert len(chosen) == len(set(chosen)) == min(number, 6)


@pytest.fixture
def run(monkeypatch):
    def check(model, processor, samples, backend, *, rows):
        if backend in ("varlen", model):
            raise ConfigError(f"no {backend} here")
        return report(1e-6, attention=backend)

    monkeypatch.setattr("packhorse.parity.check_parity", check)
    monkeypatch.setattr("packhorse.datasets.count_part.open_processor", lambda *_: SimpleNamespace())
    monkeypatch.setattr(command, "_samples", lambda *_: [{}, {}, {}, {}])
    monkeypatch.setattr(command, "_load", lambda model, *_: model)
    app = typer.Typer()
    app.command()(command.parity)
    return lambda *arguments: CliRunner().invoke(app, ["meta.json", "--model", "m", *arguments])


def test_a_backend_that_is_not_possible_does_not_stop_the_others(run):
    result = run()
    assert result.exit_code == 0
    assert "sdpa: packed is unpacked" in result.output
    assert "eager: packed is unpacked" in result.output
    assert "varlen: not possible: no varlen here" in result.output
    assert [one["attention"] for one in json.loads(run("--json").stdout)] == ["sdpa", "eager"]


def test_a_backend_that_is_asked_for_must_be_possible(run, monkeypatch):
    result = run("--attention", "sdpa", "--attention", "varlen")
    assert result.exit_code == 1
    assert "no varlen here" in result.output
    monkeypatch.setattr(command, "_BACKENDS", ("varlen",))
    assert run().exit_code == 1
