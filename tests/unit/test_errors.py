"""Errors: which ones a sample can cause, what becomes of them, and what messages say."""

import errno
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from packhorse.errors import (
    BadSample,
    ConfigError,
    MissingDependency,
    SystemFault,
    data_errors,
    is_data_error,
    list_some,
    naming,
    require,
    write_fault,
)
from packhorse.types import Drop, mask_secrets


@pytest.mark.parametrize(
    "error", [BadSample("x"), OSError(), ValueError(), KeyError("a"), EOFError(), RuntimeError()]
)
def test_an_error_of_the_data_ends_the_block_and_is_recorded(error: Exception) -> None:
    assert is_data_error(error)
    recorded: list[BadSample] = []
    with data_errors("drop", recorded.append, key="coco/3", stage="encode") as outcome:
        raise error
    assert outcome.error is not None
    assert recorded == [outcome.error]
    assert outcome.error.original is error
    if outcome.error is not error:
        assert (outcome.error.key, outcome.error.reason) == ("coco/3", "sample_failed")
        assert outcome.error.detail == f"{type(error).__name__}: {error}"
        assert outcome.error.stage == "encode"
        assert outcome.error.__cause__ is error
    with pytest.raises(type(error)) as raised, data_errors("raise", recorded.append):
        raise error
    assert raised.value is error
    assert len(recorded) == 1


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
        SystemFault("x"),
    ],
)
@pytest.mark.parametrize("policy", ["raise", "drop", "replace"])
def test_any_other_error_stops_the_run(policy: str, error: BaseException) -> None:
    assert not is_data_error(error)
    recorded: list[BadSample] = []
    with pytest.raises(type(error)) as raised, data_errors(policy, recorded.append):
        raise error
    assert raised.value is error
    assert not recorded


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_fault_of_the_machine_stops_the_run_and_is_not_recorded(code: int) -> None:
    error = OSError(code, os.strerror(code), "chats.jsonl")
    recorded: list[BadSample] = []
    with pytest.raises(SystemFault) as raised, data_errors("drop", recorded.append, key="chats/3"):
        raise error
    assert str(raised.value).startswith(
        f"chats/3: chats.jsonl: {os.strerror(code).lower()}: the machine is at fault, not the sample; "
    )
    assert raised.value.__cause__ is error
    assert not recorded
    with pytest.raises(OSError, match=r"chats\.jsonl") as same, data_errors("raise", recorded.append):
        raise error
    assert same.value is error


def test_an_io_error_of_ffmpeg_is_damaged_data() -> None:
    from av.error import FFmpegError
    from av.error import OSError as FFmpegOSError

    error = FFmpegOSError(errno.EIO, "Input/output error", "a.mp4")
    assert isinstance(error, FFmpegError)
    assert isinstance(error, OSError)
    with data_errors() as outcome:
        raise error
    assert outcome.error is not None


def test_a_block_without_an_error_records_nothing() -> None:
    recorded: list[BadSample] = []
    with data_errors("drop", recorded.append) as outcome:
        pass
    assert outcome.error is None
    assert not recorded


def test_a_bad_sample_keeps_its_fields_under_another_key() -> None:
    bad = BadSample("no file", reason="missing_media", stage="media")
    named = bad.with_key("coco/3")
    assert (named.key, named.reason, named.stage, named.detail) == (
        "coco/3",
        "missing_media",
        "media",
        "no file",
    )
    assert str(named) == "coco/3: no file"
    assert named.__cause__ is bad


def test_a_missing_package_says_the_line_that_installs_it() -> None:
    with pytest.raises(MissingDependency, match=r"pip install -e '\.\[video\]'"):
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


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "the disk is full"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "the quota is used up"),
        (OSError(errno.EACCES, "Permission denied"), "Permission denied"),
        (OSError("no errno"), "no errno"),
    ],
)
def test_the_error_of_a_file_that_cannot_be_written_has_path_reason_and_remedy(
    error: OSError, reason: str
) -> None:
    fault = write_fault(error, Path("a/rank-0.jsonl"), "Choose another folder")
    assert isinstance(fault, SystemFault)
    assert str(fault) == f"a/rank-0.jsonl cannot be written: {reason}. Choose another folder"


def test_configuration_errors_get_the_name_once() -> None:
    with pytest.raises(ConfigError, match=r"^coco: no such file$"), naming("coco"), naming("coco"):
        raise ConfigError("no such file")
    with pytest.raises(ConfigError, match=r"^no such file$"), naming(""):
        raise ConfigError("no such file")


def test_long_lists_in_messages_are_shortened() -> None:
    assert list_some([], 2) == ""
    assert list_some([3, 5], 2) == "3, 5"
    assert list_some(iter([3, 5, 8]), 2) == "3, 5, …"
    assert list_some([3, 5, 8], 2, "; ") == "3; 5; …"


def test_a_config_error_keeps_its_fields_when_it_is_named_and_when_it_is_pickled() -> None:
    with pytest.raises(ConfigError) as caught, naming("coco"):
        raise ConfigError.of("sample_ratio", "half", "expected a number")
    assert str(caught.value) == "coco: sample_ratio='half': expected a number"
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.setting, error.value, error.path) == ("sample_ratio", "half", "")


def test_the_path_of_a_config_error_holds_no_secrets() -> None:
    error = ConfigError("cannot be read", path="s3://user:secret@bucket/rows.jsonl")
    assert "secret" not in error.path
