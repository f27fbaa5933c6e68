"""The files of a release: wheel and sdist, installed into empty environments, and a first task run from them.

`make release` passes its own files in GPOOL_DIST; otherwise they are built here, from the working tree.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.parser import Parser
from pathlib import Path

import pytest

from tests.tools.processes import PATIENCE_S, eventually, free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
EXTRAS = {"base": "", "agent": "[agent]", "server": "[server]", "all": "[all]"}


def checked(*argv: str | Path, **options: object) -> str:
    done = subprocess.run(
        list(map(str, argv)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **options,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, done.stdout
    return str(done.stdout)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if given := os.environ.get("GPOOL_DIST"):
        return Path(given)
    folder = tmp_path_factory.mktemp("dist")
    checked(BIN / "python", "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    [found] = dist.glob("gpool-*-py3-none-any.whl")
    return found


@pytest.fixture(scope="module")
def sdist(dist: Path) -> Path:
    [found] = dist.glob("gpool-*.tar.gz")
    return found


@pytest.fixture(scope="module")
def environments(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The `bin` of an empty environment with gpool and one extra, for each extra."""
    found = {}
    for name, extra in EXTRAS.items():
        place = tmp_path_factory.mktemp(name) / "venv"
        checked(BIN / "uv", "venv", "--quiet", "--python", sys.executable, place)
        python = place / "bin" / "python"
        checked(BIN / "uv", "pip", "install", "--quiet", "--python", python, f"{wheel}{extra}")
        found[name] = place / "bin"
    return found


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_and_sdist_hold_the_shipped_tasks(wheel: Path, sdist: Path) -> None:
    shipped = {path.name for path in (ROOT / "examples" / "catalogue").iterdir() if path.is_file()}
    with zipfile.ZipFile(wheel) as files:
        held = set(files.namelist())
    assert {f"gpool/cli/project/examples/{name}" for name in shipped} <= held
    with tarfile.open(sdist) as archive:
        kept = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"examples/catalogue/{name}" for name in shipped} <= kept


def test_twine_accepts_both_files(wheel: Path, sdist: Path) -> None:
    assert checked(BIN / "twine", "check", "--strict", wheel, sdist).count("PASSED") == 2


def test_the_wheel_has_every_tracked_file_of_the_package_and_no_other(wheel: Path) -> None:
    folders = {"src/gpool/": "gpool/", "examples/catalogue/": "gpool/cli/project/examples/"}
    listing = checked("git", "ls-files", "-co", "--exclude-standard", *folders, cwd=ROOT)
    tracked = {
        place + line.removeprefix(folder)
        for line in listing.splitlines()
        for folder, place in folders.items()
        if line.startswith(folder)
    }
    packed = {name for name in contents(wheel) if not name.split("/")[0].endswith(".dist-info")}
    assert packed == tracked
    assert "gpool/server/nodes/gpu_models.toml" in packed
    assert "gpool/py.typed" in packed


def test_the_wheel_names_its_licence_and_holds_the_text(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [about] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(about).decode())
        licence = archive.read(about.replace("METADATA", "licenses/LICENSE"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert metadata["Version"] == wheel.name.split("-")[1]


def test_a_wheel_built_from_the_sdist_is_the_same(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    """Without git, version included: PKG-INFO has it."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    [tree] = tmp_path.iterdir()
    checked(BIN / "python", "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=tree)
    [again] = tmp_path.glob("*.whl")
    assert again.name == wheel.name
    assert contents(again) == contents(wheel)


def test_a_tree_without_git_gets_the_fallback_version(sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    [tree] = tmp_path.iterdir()
    (tree / "PKG-INFO").unlink()
    checked(BIN / "python", "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=tree)
    [built] = tmp_path.glob("*.whl")
    assert built.name == "gpool-0.1.0.dev0-py3-none-any.whl"


def test_the_version_of_a_tagged_commit_is_the_tag(tmp_path: Path, sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    [tree] = tmp_path.iterdir()
    (tree / "PKG-INFO").unlink()
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=no")
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "one"), ("tag", "v1.2.3")):
        checked(*git, *words, cwd=tree)
    assert checked(BIN / "python", "-m", "hatchling", "version", cwd=tree).strip() == "1.2.3"
    (tree / "README.md").write_text("changed\n")
    checked(*git, "commit", "-qam", "two", cwd=tree)
    after = checked(BIN / "python", "-m", "hatchling", "version", cwd=tree).strip()
    assert re.fullmatch(r"1\.2\.4\.dev1\+g[0-9a-f]+", after)


def test_every_extra_installs_and_has_the_version_of_the_wheel(
    environments: Mapping[str, Path], wheel: Path
) -> None:
    version = wheel.name.split("-")[1]
    for name, place in environments.items():
        assert version in checked(place / "gpool", "--version"), name
        code = "import gpool; print(gpool.__version__)"
        assert checked(place / "python", "-I", "-c", code).strip() == version


@contextmanager
def started(
    argv: list[str | Path], environment: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(argv, env=environment, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def variables(home: Path, **more: str) -> dict[str, str]:
    return {"HOME": str(home), "GPOOL_HOME": str(home), "PATH": "/usr/sbin:/usr/bin:/bin", **more}


def first_task(gpool: Path, environment: Mapping[str, str]) -> str:
    argv = [gpool, "run", "--", "python", "-c", "print(6*7)"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_first_task_runs_from_the_installed_wheel(
    environments: Mapping[str, Path], tmp_path: Path
) -> None:
    gpool, log, env = environments["all"] / "gpool", tmp_path / "up.log", variables(tmp_path)
    argv = [gpool, "up", "--data", tmp_path / "data", "--port", str(free_port())]
    with started(argv, env, log) as up:

        def is_ready() -> bool:
            assert up.poll() is None, log.read_text()
            return b"gpool://" in log.read_bytes()

        eventually("gpool up is ready", is_ready, PATIENCE_S)
        assert first_task(gpool, env) == "42\n", log.read_text()


def test_server_agent_and_client_run_from_their_own_extras(
    environments: Mapping[str, Path], tmp_path: Path
) -> None:
    homes = {name: tmp_path / name for name in ("server", "agent", "base")}
    for home in homes.values():
        home.mkdir()
    port, data = free_port(), tmp_path / "data"
    url = f"http://127.0.0.1:{port}"
    server = [environments["server"] / "gpool", "server", "--data", data, "--port", str(port)]
    with started(server, variables(homes["server"]), tmp_path / "server.log") as process:
        key = data / "operator.key"

        def has_operator() -> bool:
            assert process.poll() is None, (tmp_path / "server.log").read_text()
            return key.exists()

        eventually("the server has an operator", has_operator, PATIENCE_S)
        known = {"GPOOL_URL": url, "GPOOL_KEY": key.read_text().strip()}
        client, mine = environments["base"] / "gpool", variables(homes["base"], **known)
        eventually(
            "the server answers",
            lambda: subprocess.run([client, "ps"], env=mine, capture_output=True).returncode == 0,
            PATIENCE_S,
        )
        link = re.search(r"gpool://\S+", checked(client, "node", "invite", env=mine))
        assert link is not None
        agent = [environments["agent"] / "gpool", "join", link.group()]
        with started(agent, variables(homes["agent"]), tmp_path / "agent.log"):
            assert first_task(client, mine) == "42\n", (tmp_path / "agent.log").read_text()
