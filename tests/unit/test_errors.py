"""Which failures may be a sample's fault, and what a missing package says."""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from packhorse.errors import BadSample, ConfigError, MissingDependency, SystemFault, is_data_error, require
from packhorse.types import Drop, mask_secrets


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


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://ann:pw@host/a.png", "https://***@host/a.png"),
        ("no file ftp://ann@host/a, nor b", "no file ftp://***@host/a, nor b"),
        ("https://h/a?X-Amz-Signature=5f&w=1", "https://h/a?X-Amz-Signature=***&w=1"),
        ("https://h/a?w=1&sig=5f%2F&se=2026", "https://h/a?w=1&sig=***&se=2026"),
        ("https://h/a?AWSAccessKeyId=AK&Expires=9", "https://h/a?AWSAccessKeyId=***&Expires=9"),
        ("https://h/a?access_token=t#frag", "https://h/a?access_token=***#frag"),
        ("https://h/a?key=AIza&alt=media", "https://h/a?key=***&alt=media"),
        ("https://h/a?code=f00%3D&w=1", "https://h/a?code=***&w=1"),
        (
            "https://h/a?Subscription-Key=5f;clientSecret=s",
            "https://h/a?Subscription-Key=***;clientSecret=***",
        ),
        ("https://h/a?Key-Pair-Id=K&accesstoken=t", "https://h/a?Key-Pair-Id=***&accesstoken=***"),
        ("https://h/a?to=https://h/b?token=t?u&w=1", "https://h/a?to=https://h/b?token=***&w=1"),
        ("https://h/a?keyword=cats", "https://h/a?keyword=cats"),
        ("https://h/a?design=3&author=ann&max_tokens=9", "https://h/a?design=3&author=ann&max_tokens=9"),
        ("https://h/a?zip_code=1&sort_key=date&token=", "https://h/a?zip_code=1&sort_key=date&token="),
        ("(url='https://h/a?token=t')", "(url='https://h/a?token=***')"),
        ("hf://datasets/ann/photos@main/a.png", "hf://datasets/ann/photos@main/a.png"),
        ("s3://bucket/a@2x.png", "s3://bucket/a@2x.png"),
        ("images/a?token=t", "images/a?token=t"),
    ],
)
def test_secrets_of_addresses_are_masked(text: str, masked: str) -> None:
    assert mask_secrets(text) == masked
    assert mask_secrets(masked) == masked
    for error in (
        BadSample(text, key="coco/1"),
        ConfigError(text),
        MissingDependency(text),
        SystemFault(text),
    ):
        assert str(error).removeprefix("coco/1: ") == masked
    assert BadSample(text).detail == Drop("coco/1", "media", "missing_media", text).detail == masked


def go_json(row: object) -> str:
    return json.dumps(row).replace("&", r"\u0026")


def gson(row: object) -> str:
    return json.dumps(row).replace("&", r"\u0026").replace("=", r"\u003d").replace("'", r"\u0027")


def php_json(row: object) -> str:
    return json.dumps(row).replace("/", r"\/")


@pytest.mark.parametrize("again", [str, json.dumps, repr, lambda text: repr({"row": json.dumps(text)})])
@pytest.mark.parametrize("dumps", [json.dumps, go_json, gson, php_json])
def test_secrets_in_json_are_masked_and_the_rest_is_kept(
    dumps: Callable[[object], str], again: Callable[[str], str]
) -> None:
    query = "w=9&X-Amz-Signature=5f3a/9c==&h=7&token=tok-77"
    row = {"image": f"https://ann:hunter2@h/x?{query}", "next": 'say "hi"', "last": "a/b=c"}
    plain = {**row, "image": "https://***@h/x?w=9&X-Amz-Signature=***&h=7&token=***"}
    assert mask_secrets(again(dumps(row))) == again(dumps(plain))


def test_a_long_text_is_masked_in_the_time_of_reading_it() -> None:
    pieces = [
        "?",
        "?token",
        "?token=",
        "&a=",
        "?sig=a&",
        "://",
        "://a:b",
        "A",
        "Aa-",
        "\\",
        ":\\/\\/",
        "\\u0026a",
    ]
    texts = f"('http://h/?' + piece * 300_000 for piece in {pieces})"
    script = f"from packhorse.types import mask_secrets\nfor text in {texts}: mask_secrets(text)"
    # A minute is for slow machines. A search that starts again at each character takes hours.
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_errors_survive_pickling_with_their_message_masked() -> None:
    url = "https://a:b@h/x"
    for error in (BadSample(url, key="k"), ConfigError(url), MissingDependency(url)):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert ":b@" not in str(again)
