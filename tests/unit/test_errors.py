"""Which failures may be a sample's fault, and what a missing package says."""

from pathlib import Path

import pytest

from packhorse.errors import BadSample, ConfigError, MissingDependency, is_data_error, require


@pytest.mark.parametrize(
    "error", [BadSample("x"), OSError(), ValueError(), KeyError("a"), EOFError(), RuntimeError()]
)
def test_these_may_be_the_fault_of_one_sample(error: Exception) -> None:
    assert is_data_error(error)


@pytest.mark.parametrize(
    "error",
    [
        NameError(),
        TypeError(),
        AttributeError(),
        ImportError(),
        AssertionError(),
        NotImplementedError(),
        RecursionError(),
        MemoryError(),
        KeyboardInterrupt(),
        ConfigError("x"),
        MissingDependency("x"),
    ],
)
def test_these_stop_the_run(error: BaseException) -> None:
    assert not is_data_error(error)


def test_a_missing_package_says_the_line_that_installs_it() -> None:
    with pytest.raises(MissingDependency, match=r"pip install 'packhorse\[video\]'"):
        require("no_such_package_here", "video")


def test_a_package_that_another_one_misses_is_named_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "has_a_need.py").write_text("import no_such_need.inside\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingDependency, match="needs the package 'no_such_need': pip install"):
        require("has_a_need", "video")
