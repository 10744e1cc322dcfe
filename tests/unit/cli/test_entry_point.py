"""What all commands have in common, through the installed ``packhorse``: help, errors, bars, Ctrl-C, Tab."""

import contextlib
import json
import logging
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

import packhorse
from contract.tiny_models import tiny_model
from count_samples import python_path, save_processor, sidecars, stale_files, write_chats, write_rows
from packhorse.cli.app import app
from packhorse.cli.terminal import in_options
from warm_python import run_warm

PACKHORSE = str(Path(sys.executable).with_name("packhorse"))
COMMANDS = ("demo", "stats", "count", "plan", "check", "view", "parity", "calibrate", "ledger", "convert")
ON_A_META_FILE = ("stats", "count", "plan", "check", "view", "parity")
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_processor(tmp_path_factory.mktemp("processor"))


def run(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PACKHORSE, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
    )


def options(command: str, saved: str) -> list[str]:
    """Options that a command needs in addition to its meta file."""
    return {
        "count": ["--processor", saved, "--num-workers", "1"],
        "plan": ["--processor", saved, "--num-workers", "1"],
        "view": ["--processor", saved, "--port", "0"],
        "parity": ["--model", saved],
        "convert": [f"{saved}/out.jsonl"],
    }.get(command, ["--num-workers", "1"])


def error_line(arguments: list[object]) -> str:
    """The one line that a command says when it cannot do what it is asked to."""
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"packhorse {arguments[0]}: ")
    assert not CONTROL.search(line)
    return line


def test_the_version_is_that_of_the_package() -> None:
    result = run("--version")
    assert (result.returncode, result.stdout) == (0, f"packhorse {packhorse.__version__}\n")


def test_without_a_command_the_help_is_shown() -> None:
    result = run()
    assert result.returncode == 2
    assert all(re.search(rf"\b{name}\b", result.stdout) for name in COMMANDS)
    assert "130 Ctrl-C" in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_examples_exit_codes_and_json(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "160"}).stdout
    assert "Examples" in shown
    assert f"packhorse {command}" in shown.partition("Examples")[2]
    assert "Exit code 0" in shown
    assert re.search(r"--json +[A-Z]", shown)
    narrow = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).stdout
    options = narrow.partition("Options")[2].partition("╰")[0]
    assert "<bool>" not in options  # nothing stands after a flag
    assert not re.search(r"--[\w-]*…", options)  # no name is cut


@pytest.mark.parametrize("command", [*ON_A_META_FILE, "convert"])
@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("no.json", None, "no such file or directory"),
        ("folder", "", "is a directory"),
        ("empty.json", b"", "not a valid meta file"),
        ("cut.json", b'{"a": {', "not a valid meta file"),
        ("binary.json", b"\xff\xfe\x00", "not a valid meta file"),
        ("none.json", b"{}", "no dataset|no example|0 rows"),
        ("row.json", b'{"messages": []}', "is a single row"),
        ("number.json", b'{"a": 3}', "expected an object"),
        ("nameless.json", b'{"a": {}}', "has no file_name"),
    ],
)
def test_a_meta_file_that_is_none_is_one_line_and_exit_code_2(
    command: str, name: str, content: bytes | str | None, says: str, tmp_path: Path, saved: str
) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
    line = error_line([command, path, *options(command, saved)])
    assert str(path) in line
    assert re.search(says, line)


@pytest.mark.parametrize("command", ON_A_META_FILE)
def test_a_processor_that_is_none_is_one_line_and_exit_code_2(
    command: str, tmp_path: Path, saved: str
) -> None:
    meta = write_chats(tmp_path / "data", 3)
    (tmp_path / "empty").mkdir()
    name = "--model" if command == "parity" else "--processor"
    for folder, says in (("nowhere", "no such folder"), ("empty", "cannot be opened")):
        line = error_line([command, meta, *options(command, saved), name, tmp_path / folder])
        assert f"{tmp_path}/{folder}: {says}" in line


@pytest.mark.parametrize("command", ON_A_META_FILE)
def test_a_folder_that_does_not_exist_is_reported_without_asking_the_hub(
    command: str, tmp_path: Path, saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("packhorse.families.models._hub_answers", ask)
    meta = write_chats(tmp_path / "data", 3)
    name = "--model" if command == "parity" else "--processor"
    for folder in ("./nowhere", "../no/where", "~/nowhere", "models/qwen/base", "/nowhere"):
        line = error_line([command, meta, *options(command, saved), name, folder])
        assert f" {folder}: no such folder. Expected a folder or hub name" in line


@pytest.mark.parametrize("name", ["processor_config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", "[]", "null", "{torn"])
def test_a_broken_file_of_a_processor_is_one_line(
    name: str, content: str, tmp_path: Path, saved: str
) -> None:
    meta, folder = write_chats(tmp_path / "data", 3), tmp_path / "model"
    shutil.copytree(saved, folder)
    (folder / name).write_text(content)
    assert f"processor {folder}: cannot be opened (" in error_line(["plan", meta, "--processor", folder])


def test_a_folder_of_a_tokenizer_that_names_a_processor_says_so(tmp_path: Path, saved: str) -> None:
    meta, folder = write_chats(tmp_path / "data", 3), tmp_path / "model"
    folder.mkdir()
    settings = json.loads((Path(saved) / "tokenizer_config.json").read_text())
    shutil.copy(Path(saved) / "tokenizer.json", folder)
    settings["processor_class"] = "Qwen3VLProcessor"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    line = error_line(["plan", meta, "--processor", str(folder)])
    assert '"processor_class": "Qwen3VLProcessor", but files of that processor are missing' in line


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port on which nothing listens, and that no other process takes."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.mark.parametrize("command", ON_A_META_FILE)
def test_without_a_network_a_hub_name_is_one_line_at_once(
    command: str, tmp_path: Path, saved: str, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed_port}")
    meta = write_chats(tmp_path / "data", 3)
    name = "--model" if command == "parity" else "--processor"
    started = time.monotonic()
    line = error_line([command, meta, *options(command, saved), name, "someone/missing"])
    assert time.monotonic() - started < 10, "the hub's client alone retries for 100 s"
    assert "someone/missing: no such folder in" in line
    assert "the hub cannot be reached. Pass the folder" in line


def test_without_a_network_a_new_process_fails_or_takes_a_cached_processor_within_seconds(
    tmp_path: Path, saved: str, closed_port: int
) -> None:
    meta, cached = write_chats(tmp_path / "data", 3), tmp_path / "cache" / "models--someone--model"
    shutil.copytree(saved, cached / "snapshots" / "abc")
    tiny_model("qwen2_vl").config.save_pretrained(cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    env = {"HF_ENDPOINT": f"http://127.0.0.1:{closed_port}", "HF_HUB_OFFLINE": "0"}
    env |= {"HF_HUB_CACHE": str(tmp_path / "cache"), "PYTHONPATH": python_path(tmp_path / "path")}
    started = time.monotonic()
    missing, found = (
        run("stats", meta, "--processor", name, "--num-workers", "1", **env)
        for name in ("someone/missing", "someone/model")
    )
    assert time.monotonic() - started < 60, "the hub's client alone retries for minutes"
    assert (missing.returncode, missing.stdout, len(missing.stderr.splitlines())) == (2, "", 1)
    assert "the hub cannot be reached" in missing.stderr
    assert (found.returncode, found.stderr) == (0, "")


def test_a_hub_that_accepts_and_never_answers_counts_as_no_network(
    tmp_path: Path, saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packhorse.families.models._HUB_SECONDS", 0.3)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    meta = write_chats(tmp_path / "data", 3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        line = error_line(["plan", meta, "--processor", "someone/missing"])
    assert "the hub cannot be reached" in line


@pytest.mark.parametrize(
    ("command", "message", "shown"),
    [
        ("plan", "set placeholder='never'", "set --placeholder never"),
        (
            "plan",
            "raise pack_size or set on_overlong='drop' or 'truncate'",
            "raise --pack-size or set --on-overlong drop or truncate",
        ),
        ("plan", "max_bad_share=0.5 and seed=-1", "--max-bad-share 0.5 and --seed -1"),
        ("plan", "dataset_names has coco twice", "--dataset has coco twice"),
        ("plan", "allow it with trust_remote_code=True.", "allow it with --trust-remote-code."),
        ("plan", "the processor of a model with a seed", "the processor of a model with a seed"),
        ("plan", "/data/pack_size/a.json: no pack_size.json", "/data/pack_size/a.json: no pack_size.json"),
        ("plan", "pad_to_size=True pads them", "pad_to_size=True pads them"),
        ("parity", "attn_implementation='flash': no", "--attn-implementation flash: no"),
        ("count", "ray_address='a:1' goes with", "--ray-address a:1 goes with"),
        ("ledger", "pack_size=3", "pack_size=3"),
    ],
)
def test_messages_name_options_as_they_are_typed(command: str, message: str, shown: str) -> None:
    assert in_options(command, message) == shown


def test_an_error_of_a_setting_is_in_the_spelling_of_the_command(tmp_path: Path, saved: str) -> None:
    meta = write_chats(tmp_path / "data", 30)
    more = ["--processor", saved, "--num-workers", "1", "--pack-size", "8", "--on-overlong", "raise"]
    line = error_line(["plan", meta, *more])
    assert line.endswith(": raise --pack-size or set --on-overlong drop or truncate")


def test_warnings_of_other_libraries_are_only_shown_with_v(tmp_path: Path, saved: str) -> None:
    meta, folder = write_chats(tmp_path / "data", 3), tmp_path / "model"
    shutil.copytree(saved, folder)
    config = tiny_model("qwen2_vl").config.to_dict()
    config["text_config"]["rope_parameters"]["unknown_key"] = 1  # transformers logs a warning
    (folder / "config.json").write_text(json.dumps(config))
    path = python_path(tmp_path / "path")
    site = tmp_path / "path" / "site"
    (site / "warns.py").write_text(
        "import warnings\nimport transformers\nopen_it = transformers.AutoProcessor.from_pretrained\n"
        "def warn(*a, **k):\n    warnings.warn('a library warns')\n    return open_it(*a, **k)\n"
        "transformers.AutoProcessor.from_pretrained = warn\n"
    )
    with open(site / "sitecustomize.py", "a") as file:
        file.write("import warns\n")
    arguments = ["plan", meta, "--processor", folder, "--num-workers", "1"]
    quiet = run(*arguments, PYTHONPATH=path)  # in a new interpreter, whose imports may not warn either
    code = "import warns\nfrom packhorse.cli.app import main\nmain()"
    loud = run_warm("-c", code, *arguments, "-v", env={**os.environ, "PYTHONPATH": path})
    assert (quiet.returncode, quiet.stderr) == (0, "")
    assert "unknown_key" in loud.stderr
    assert "a library warns" in loud.stderr
    assert loud.returncode == 0


def test_a_command_leaves_warnings_loggers_and_environment_as_they_were(tmp_path: Path) -> None:
    before = dict(os.environ), logging.getLogger("transformers").level, list(warnings.filters)
    assert CliRunner().invoke(app, ["stats", str(write_chats(tmp_path, 3))]).exit_code == 0
    assert (dict(os.environ), logging.getLogger("transformers").level, list(warnings.filters)) == before


@pytest.mark.parametrize("command", ["stats", "count", "plan", "check"])
def test_llama_factorys_dataset_info_is_read_as_it_is(command: str, tmp_path: Path, saved: str) -> None:
    rows = [{"instruction": f"Count to {n}.", "input": "", "output": "1, " * n} for n in range(1, 4)]
    (tmp_path / "stories.json").write_text(json.dumps(rows))
    entries = {"stories": {"file_name": "stories.json"}, "elsewhere": {"hf_hub_url": "someone/data"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(entries))
    arguments = [tmp_path / "dataset_info.json", "--dataset", "stories", *options(command, saved)]
    result = CliRunner().invoke(app, [command, *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    (dataset,) = report["datasets"]
    assert (dataset["name"], dataset["rows"]) == ("stories", 3)


def test_a_wrong_entry_of_a_dataset_info_is_one_line_with_dataset_and_key(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps({"a": {"file_name": "a.json", "formating": ""}}))
    line = error_line(["check", tmp_path / "dataset_info.json"])
    assert "dataset_info.json: dataset 'a': unknown formating (did you mean 'formatting'?)" in line


def test_a_mistyped_dataset_gets_a_suggestion(tmp_path: Path) -> None:
    meta = write_chats(tmp_path, 3)
    assert error_line(["check", meta, "--dataset", "chat"]).endswith(
        "no dataset chat (did you mean 'chats'?); it has chats"
    )


def test_a_place_that_cannot_be_written_is_said_before_the_long_work(tmp_path: Path, saved: str) -> None:
    meta, taken = write_chats(tmp_path / "data", 3), tmp_path / "taken"
    taken.write_text("")
    assert "is a folder" in error_line(["plan", meta, *options("plan", saved), "--out", tmp_path])
    assert "cannot be written" in error_line(
        ["plan", meta, *options("plan", saved), "--out", taken / "a.phplan"]
    )
    assert "cannot be written" in error_line(["check", meta, "--fix", taken / "clean"])
    assert sidecars(tmp_path / "data") == []
    assert "cannot be written" in error_line(
        ["count", meta, *options("count", saved), "--write-jsonl", taken]
    )
    assert taken.read_text() == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["pln"], r"packhorse: no such command 'pln'. Did you mean 'plan'\?"),
        (["nothing"], r"packhorse: no such command 'nothing' \(see"),
        (["--nothing"], r"packhorse: no such option: --nothing \(see"),
        (["--verson"], r"packhorse: no such option: --verson. Did you mean '--version'\?"),
        (
            ["check", "m", "--maxlength=5"],
            r"packhorse check: no such option: --maxlength. Did you mean '--max-le",
        ),
        (["parity", "m", "--attention", "sdpa"], r".* --attention. Did you mean '--attn-implementation'"),
        (["plan"], "packhorse plan: missing argument 'META'"),
        (["plan", "meta.json"], "packhorse plan: missing option '--processor'"),
        (["parity", "meta.json"], "packhorse parity: missing option '--model'"),
        (["check", "meta.json", "--num-workers", "0"], "packhorse check: invalid value for '--num-workers'"),
        (
            ["ledger", "a", "--by", "colour"],
            "packhorse ledger: invalid value for '--by': 'colour' is not one",
        ),
    ],
)
def test_wrong_usage_is_one_line_that_says_where_to_look(arguments: list[str], says: str) -> None:
    result = run(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert re.match(says, line)
    assert re.search(r"\(see packhorse( \w+)? --help\)$", line)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_typo_in_a_command_or_an_option_gets_a_suggestion(command: str) -> None:
    typo = command[:-2] + command[:-3:-1]
    assert f"Did you mean {command!r}" in CliRunner().invoke(app, [typo]).stderr
    names = re.findall(
        r"--[a-z-]+", CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "160"}).stdout
    )
    for name in sorted(set(names)):
        line = CliRunner().invoke(app, [command, f"{name}x"]).stderr
        assert repr(name) in line.partition("Did you mean")[2], line


def test_with_json_standard_output_holds_one_object_and_standard_error_nothing(
    tmp_path: Path, saved: str
) -> None:
    meta = write_chats(tmp_path / "data", 12)
    env = {**os.environ, "PYTHONPATH": python_path(tmp_path / "path")}
    for command in ("stats", "check", "count", "plan"):
        arguments = (command, meta, *options(command, saved), "--json")
        # The tests of the other commands have one that runs to its end in a new interpreter.
        result = run(*arguments, **env) if command == "count" else run_warm(PACKHORSE, *arguments, env=env)
        assert (result.returncode, result.stderr) == (0, ""), command
        assert json.loads(result.stdout)["version"] == (2 if command == "plan" else 1)


def on_a_terminal(arguments: list[str], **env: str) -> bytes:
    """What a command writes to a terminal on its standard error."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [PACKHORSE, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", **env},
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while piece := os.read(ours, 4096):
            shown += piece
    process.wait(timeout=60)
    os.close(ours)
    return shown


def test_a_terminal_has_bars_and_a_run_in_ci_has_none(tmp_path: Path) -> None:
    meta = str(write_chats(tmp_path / "data", 500))
    fix = ["check", meta, "--num-workers", "1", "--fix"]
    shown = on_a_terminal([*fix, str(tmp_path / "one")])
    assert b"checking" in shown
    assert b"writing" in shown
    assert shown.count(b"500/500") >= 2
    assert on_a_terminal([*fix, str(tmp_path / "two")], CI="true") == b""


@pytest.mark.parametrize("force", [{}, {"TERM": "xterm-256color", "COLUMNS": "80"}])
def test_output_that_is_piped_has_no_control_codes(tmp_path: Path, force: dict[str, str]) -> None:
    meta = write_chats(tmp_path / "data", 20)
    for arguments in (["stats", meta], ["check", meta], ["--help"], ["plan", "--help"], ["plan", meta]):
        result = run(*arguments, **force)
        assert not CONTROL.search(result.stdout + result.stderr), arguments


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    meta = write_chats(tmp_path, 1)
    write_rows(tmp_path / "chats.jsonl", [{"messages": []}] * 3000)
    script = f"{PACKHORSE} check {meta} --json --num-workers 1 | head -c 1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (1, "{", "")


def test_ctrl_c_in_a_count_is_exit_code_130_and_leaves_no_half_file(tmp_path: Path, saved: str) -> None:
    meta = write_chats(tmp_path / "data", 20_000)
    command = [PACKHORSE, "count", str(meta), "--processor", saved, "--num-workers", "2"]
    with subprocess.Popen(
        [*command, "--part-rows", "200", "--write-jsonl", str(tmp_path / "copies")],
        env={**os.environ, "PYTHONPATH": python_path(tmp_path / "path")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as started:
        while not list(meta.parent.glob("*.parts/*.arrow")) and started.poll() is None:
            time.sleep(0.02)
        os.killpg(started.pid, signal.SIGINT)  # as a terminal does: to all of its processes
        out, errors = started.communicate(timeout=60)
    assert started.returncode == 130, errors
    assert (out, errors) == ("", "packhorse count: stopped; the next run reuses the finished parts\n")
    assert sidecars(meta.parent) == []
    assert [name for name in stale_files(meta.parent) if name.startswith(".")] == []
    assert not (tmp_path / "copies").exists()


def test_the_tab_key_completes_commands_and_options_as_bash_asks_for_it() -> None:
    for words, expected in (("packhorse pl", "plan"), ("packhorse plan --pack-", "--pack-size")):
        place = str(len(words.split()) - 1)
        asked = {"_PACKHORSE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": place}
        result = run(**asked)
        assert (result.returncode, result.stdout.split()) == (0, [expected])


def test_completion_is_installed_for_bash_and_works_there(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    env = {**os.environ, "HOME": str(tmp_path), "PATH": f"{Path(PACKHORSE).parent}:{os.environ['PATH']}"}

    def output_of(script: str) -> str:
        # Two commands: bash would become the only one of a script, and no shell would be found above it.
        run = subprocess.run(
            [bash, "-c", f"{script}\ntrue"], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return run.stdout

    assert "_PACKHORSE_COMPLETE=complete_bash" in output_of("packhorse --show-completion")
    assert "bash completion installed" in output_of("packhorse --install-completion")
    (script,) = (tmp_path / ".bash_completions").iterdir()
    assert str(script) in (tmp_path / ".bashrc").read_text()
    keys = f"source {script}\nCOMP_WORDS=(packhorse pl)\nCOMP_CWORD=1\n_packhorse_completion packhorse\n"
    assert output_of(f"{keys}echo ${{COMPREPLY[@]}}") == "plan\n"
