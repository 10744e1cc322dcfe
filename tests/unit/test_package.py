"""Wheel and sdist: built as for a release, and installed with nothing but the declared dependencies.

The wheel is installed into a virtual environment without pip and without other packages. Its dependencies
are links to packages of the environment that runs the tests: those that the wheel's metadata declares and
what these require. So a package that only an extra declares is really absent, nothing is downloaded, and a
dependency that is used without being declared fails here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import wave
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import packhorse
from contract.media_files import write_video

ROOT = Path(__file__).parents[2]
EXTRAS = ("video", "audio", "hub", "lmdb", "ray", "view", "train", "trainer", "lightning", "trl")


def run(
    command: Iterable[object], cwd: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command without the variables that change what Python imports."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    words = list(map(str, command))
    return subprocess.run(
        words, cwd=cwd, env={**clean, **(environment or {})}, capture_output=True, text=True, check=False
    )


def output_of(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, f"{result.args}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@dataclass(frozen=True)
class Built:
    """The files of a release."""

    wheel: Path
    sdist: Path

    @property
    def metadata(self) -> Metadata:
        with zipfile.ZipFile(self.wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            return Metadata.from_email(archive.read(name))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """``python -m build``: the sdist, and the wheel from the sdist; the dev extra has the back end."""
    out = tmp_path_factory.mktemp("dist")
    # Not in the project's folder, where a folder named build would be imported.
    output_of(run([sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT], out))
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return Built(wheel, sdist)


def find_distributions(requirements: Iterable[Requirement]) -> dict[str, Distribution]:
    """Return the installed distributions that meet the requirements, and those that they require."""
    found: dict[str, Distribution] = {}
    todo = [(requirement.name, frozenset(requirement.extras)) for requirement in requirements]
    seen = set()
    while todo:
        name, extras = todo.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        dist = found[canonicalize_name(name)] = distribution(name)
        todo += [(required.name, frozenset(required.extras)) for required in required_by(dist, extras)]
    return found


def required_by(dist: Distribution, extras: Iterable[str]) -> Iterator[Requirement]:
    for line in dist.requires or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def link(distributions: Iterable[Distribution], folder: Path) -> None:
    """Link the modules and the metadata of distributions into ``folder``."""
    folder.mkdir()
    for dist in distributions:
        for name in {path.parts[0] for path in dist.files or ()} - {"..", "__pycache__"}:
            if not name.endswith(".pth") and not (folder / name).exists():
                (folder / name).symlink_to(str(dist.locate_file(name)))


@dataclass(frozen=True)
class Installed:
    """The wheel in an environment of its own, and the metadata of what is installed there."""

    folder: Path
    dist: Distribution
    dependencies: dict[str, Distribution]

    def python(self, code: str, cwd: Path, *extras: str) -> subprocess.CompletedProcess[str]:
        """Run code, with the packages of these extras."""
        environment = {"PYTHONPATH": os.pathsep.join(str(self.link_extra(extra)) for extra in extras)}
        return run([self.folder / "bin" / "python", "-c", code], cwd, environment if extras else None)

    def command(self, *words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run the installed command."""
        return run([self.folder / "bin" / "packhorse", *words], cwd, {"COLUMNS": "120"})

    def link_extra(self, extra: str) -> Path:
        folder = self.folder / f"extra-{extra}"
        if not folder.exists():
            wanted = [one for one in required_by(self.dist, [extra]) if one.name != "packhorse"]
            found = find_distributions(wanted)
            link((found[name] for name in found.keys() - self.dependencies.keys()), folder)
        return folder


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("installed") / "environment"
    output_of(run([sys.executable, "-m", "venv", "--without-pip", folder], ROOT))
    install = ["install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", built.wheel]
    output_of(run([sys.executable, "-m", "pip", "--python", folder / "bin" / "python", *install], ROOT))
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    (dist,) = Distribution.discover(path=[str(site)])
    dependencies = find_distributions(required_by(dist, ()))
    link(dependencies.values(), folder / "dependencies")
    (site / "dependencies.pth").write_text(f"{folder / 'dependencies'}\n")
    return Installed(folder, dist, dependencies)


def test_the_wheel_has_every_file_of_the_package_and_no_other(built: Built) -> None:
    package = ROOT / "src" / "packhorse"
    files = {path.relative_to(package.parent).as_posix() for path in package.rglob("*") if path.is_file()}
    expected = {name for name in files if "__pycache__" not in name}
    assert {"packhorse/py.typed", "packhorse/cli/demo/data.py"} <= expected
    assert {Path(name).suffix for name in expected} >= {".html", ".css", ".js", ".svg"}
    with zipfile.ZipFile(built.wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = {Path(name).name for name in archive.namelist() if ".dist-info/" in name}
    assert names == expected
    assert metadata >= {"METADATA", "RECORD", "WHEEL", "LICENSE", "entry_points.txt"}


def test_the_sdist_has_what_the_tests_need(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt"} <= names
    assert {"tests/conftest.py", "examples/train_torchrun.py", "scripts/check_words.py"} <= names
    unwanted = [name for name in names if re.search(r"(^|/)(__pycache__|\.git|\.venv|demo/model)(/|$)", name)]
    assert not unwanted


def test_the_metadata_are_complete(built: Built) -> None:
    metadata = built.metadata
    metadata_of_python = {name for name in metadata.classifiers or () if "Python :: 3." in name}
    assert (metadata.name, str(metadata.version)) == ("packhorse", packhorse.__version__)
    assert metadata.summary
    assert metadata.summary.startswith("Training batches for vision-language models")
    assert metadata.license_expression == "Apache-2.0"
    assert str(metadata.requires_python) == ">=3.10"
    assert "Programming Language :: Python :: 3.10" in metadata_of_python
    assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= set(metadata.classifiers or ())
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (ROOT / "README.md").read_text()
    assert {*EXTRAS, "all", "dev"} <= set(metadata.provides_extra or ())


def test_every_dependency_is_pinned_for_the_tests_and_has_a_reason(built: Built) -> None:
    pinned = {
        canonicalize_name(line.partition("==")[0])
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Dependencies")[2]
    for requirement in built.metadata.requires_dist or ():
        if requirement.name != "packhorse":
            assert canonicalize_name(requirement.name) in pinned, "constraints.txt"
            assert re.search(rf"\b{requirement.name}\b", table), f"{requirement.name} in CONTRIBUTING.md"


def test_every_module_imports_with_the_declared_dependencies_or_names_the_extra(
    installed: Installed, tmp_path: Path
) -> None:
    code = """
import importlib, json, pkgutil
import packhorse
from packhorse.errors import MissingDependency
missing = {}
for module in pkgutil.walk_packages(packhorse.__path__, "packhorse."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except MissingDependency as error:
            missing[module.name] = str(error)
print(json.dumps([packhorse.__file__, packhorse.__version__, missing]))
"""
    file, version, missing = json.loads(output_of(installed.python(code, tmp_path)))
    assert Path(file).is_relative_to(installed.folder)
    assert version == packhorse.__version__
    assert missing.keys() == {"packhorse.integrations.lightning", "packhorse.integrations.trl"}
    for module, message in missing.items():
        assert f"pip install -e '.[{module.rpartition('.')[2]}]'" in message


def test_the_installed_command_has_a_help_and_a_version(installed: Installed, tmp_path: Path) -> None:
    assert output_of(installed.command("--version", cwd=tmp_path)) == f"packhorse {packhorse.__version__}\n"
    shown = output_of(installed.command("--help", cwd=tmp_path))
    for name in ("demo", "stats", "count", "plan", "check", "view", "parity", "calibrate", "ledger"):
        assert re.search(rf"\b{name}\b", shown)


def test_the_viewers_files_are_installed(installed: Installed, tmp_path: Path) -> None:
    code = """
import json
from importlib.resources import files
from jinja2 import PackageLoader
import starlette, uvicorn
from packhorse.tools.view.server import _STATIC, make_renderer
make_renderer()
static = {name: len(files("packhorse.tools.view").joinpath("static", name).read_bytes()) for name in _STATIC}
print(json.dumps([PackageLoader("packhorse.tools.view").list_templates(), static]))
"""
    templates, static = json.loads(output_of(installed.python(code, tmp_path, "view")))
    assert set(templates) == {
        path.name for path in (ROOT / "src/packhorse/tools/view/templates").iterdir() if path.is_file()
    }
    assert static
    assert all(static.values())


# What a user does first with each extra that is not a command.
CALLS = {
    "video": "packhorse.media.load_video('clip.mp4')",
    "audio": "packhorse.media.load_audio('clip.wav')",
    "hub": "packhorse.datasets.make_cord_v2_dataset('.')",
    "lmdb": "packhorse.media.lmdb.read_lmdb('images.lmdb', 'key')",
    "ray": "list(packhorse.count.engines.make_engine('ray').run(str, [1]))",
    "train": "packhorse.load('meta.json', 'model', model='model')",
    "lightning": "importlib.import_module('packhorse.integrations.lightning')",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a clip, a recording, an empty database, and a meta file."""
    folder = tmp_path_factory.mktemp("data")
    write_video(folder / "clip.mp4", frames=8, fps=4)
    with wave.open(str(folder / "clip.wav"), "wb") as clip:
        clip.setnchannels(1)
        clip.setsampwidth(2)
        clip.setframerate(16_000)
        clip.writeframes(bytes(3_200))
    for name in ("images.lmdb", "model"):
        (folder / name).mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "qwen2_vl"}')
    turns = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A bar chart."}]
    (folder / "train.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    (folder / "meta.json").write_text('{"charts": {"file_name": "train.jsonl"}}')
    return folder


CALL = """
import importlib, json
import packhorse, packhorse.count.engines, packhorse.datasets, packhorse.media, packhorse.media.lmdb
from packhorse.errors import MissingDependency, PackhorseError
found = {{}}
for extra, call in {calls!r}.items():
    try:
        eval(call)
    except MissingDependency as error:
        found[extra] = str(error)
    except PackhorseError as error:
        print(error)  # the call got further than the import
print(json.dumps(found))
"""


def test_a_call_that_lacks_its_extra_names_the_line_that_installs_it(
    installed: Installed, data: Path
) -> None:
    found = json.loads(output_of(installed.python(CALL.format(calls=CALLS), data)).splitlines()[-1])
    assert found.keys() == CALLS.keys()
    for extra, message in found.items():
        assert f"pip install -e '.[{extra}]'" in message


def test_with_its_extra_the_same_call_gets_further(installed: Installed, data: Path) -> None:
    calls = {extra: CALLS[extra] for extra in ("video", "audio", "lmdb")}
    result = output_of(installed.python(CALL.format(calls=calls), data, *calls))
    assert json.loads(result.splitlines()[-1]) == {}


@pytest.mark.parametrize(
    ("extra", "words"),
    [("view", ["view", "meta.phplan"]), ("train", ["count", "meta.json", "--processor", "./model"])],
)
def test_a_command_that_lacks_its_extra_says_so_in_one_line(
    installed: Installed, data: Path, extra: str, words: list[str]
) -> None:
    result = installed.command(*words, cwd=data)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"packhorse {words[0]}: ")
    assert f"pip install -e '.[{extra}]'" in line


def test_the_install_line_works_from_a_clone() -> None:
    """pip finds all extras in the project, and all that they require is installed for the tests."""
    options = ["--dry-run", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    extras = ",".join((*EXTRAS, "all", "no-such-extra"))
    result = run([sys.executable, "-m", "pip", "install", *options, "-e", f".[{extras}]"], ROOT)
    assert f"Would install packhorse-{packhorse.__version__}\n" in output_of(result)
    unknown = re.findall(r"does not provide the extra '(.*)'", result.stdout + result.stderr)
    assert unknown == ["no-such-extra"]
