"""A sandbox with a prepared environment: its interpreter, its packages, and nothing of the agent's."""

from __future__ import annotations

import importlib.util
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest

from gpool.agent.runtime.bubblewrap import layout
from gpool.agent.runtime.protocol import (
    ENVIRONMENT_AT,
    BadOutput,
    CommandJob,
    PreparedEnvironment,
    RunnerJob,
    SandboxFailed,
)
from gpool.agent.runtime.runner_calls import PYTHON
from tests.tools.runtimes import LIMITS, Caller, using

MINOR = f"python{PYTHON}"


def environment(folder: Path, word: str) -> PreparedEnvironment:
    """A virtual environment as a builder leaves it: links that are right inside, one package."""
    base = Path(sys.base_prefix).resolve()
    inside = str(base) if base.is_relative_to("/usr") else f"{layout.HOME}/python"
    site = folder / "lib" / MINOR / "site-packages"
    site.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(f"{inside}/bin/{MINOR}")
    (folder / "pyvenv.cfg").write_text(
        f"home = {inside}/bin\ninclude-system-site-packages = false\n"
    )
    (site / "special.py").write_text(f"WORD = {word!r}\n")
    return PreparedEnvironment("pip:test", folder, f"{ENVIRONMENT_AT}/bin/python")


async def said(runtime: Any, prepared: PreparedEnvironment | None, *argv: str) -> str:
    job = CommandJob(argv, (), (), (), LIMITS, environment=prepared)
    sandbox = await runtime.start_command(job)
    text = b"".join([data async for _, data in sandbox.output()])
    await sandbox.remove()
    return text.decode()


def in_python(runtime: Any, prepared: PreparedEnvironment | None, code: str) -> Any:
    return said(runtime, prepared, "python", "-c", code)


def test_a_command_finds_the_environments_packages_first_on_its_path(tmp_path: Path) -> None:
    prepared = environment(tmp_path / "closed" / "env", "it is")
    (tmp_path / "closed").chmod(0o700)
    code = (
        "import os, special, sys; print(special.WORD, sys.prefix, os.environ['VIRTUAL_ENV'])\n"
        "print(os.environ['PATH'].split(':')[0])"
    )
    found = using("bubblewrap", tmp_path / "data", lambda r: in_python(r, prepared, code))
    assert found == f"it is {ENVIRONMENT_AT} {ENVIRONMENT_AT}\n{ENVIRONMENT_AT}/bin\n"


@pytest.mark.parametrize("module", ["gpool", "msgspec", "cloudpickle"])
def test_an_environment_has_none_of_the_agents_packages(module: str, tmp_path: Path) -> None:
    """The control is the agent's own Python, which has them all."""
    prepared = environment(tmp_path / "env", "x")
    code = f"import importlib.util; print(importlib.util.find_spec({module!r}) is not None)"
    data = tmp_path / "data"
    assert using("bubblewrap", data, lambda r: in_python(r, prepared, code)) == "False\n"
    assert using("bubblewrap", data, lambda r: in_python(r, None, code)) == "True\n"


def test_an_environment_cannot_be_written(tmp_path: Path) -> None:
    prepared = environment(tmp_path / "env", "x")
    told = using(
        "bubblewrap",
        tmp_path / "data",
        lambda r: said(r, prepared, "touch", f"{ENVIRONMENT_AT}/bin/python3"),
    )
    assert "Read-only file system" in told


def test_an_environment_built_anew_at_the_same_place_is_seen(tmp_path: Path) -> None:
    async def work(runtime: Any) -> list[str]:
        found = []
        for word in ("old", "new"):
            prepared = environment(tmp_path / "env", word)
            found.append(await in_python(runtime, prepared, "import special; print(special.WORD)"))
            (tmp_path / "env").rename(tmp_path / f"gone-{word}")
        shutil.rmtree(tmp_path / "gone-old")
        return found

    assert using("bubblewrap", tmp_path / "data", work) == ["old\n", "new\n"]


def test_more_environments_than_are_kept_in_reach_all_work(tmp_path: Path) -> None:
    async def work(runtime: Any) -> list[str]:
        made = [environment(tmp_path / f"env{n}", str(n)) for n in range(70)]
        return [
            (
                await said(
                    runtime, each, "cat", f"{ENVIRONMENT_AT}/lib/{MINOR}/site-packages/special.py"
                )
            )
            for each in (*made, made[0])
        ]

    found = using("bubblewrap", tmp_path / "data", work)
    assert found == [f"WORD = '{n}'\n" for n in (*range(70), 0)]


def test_what_an_environment_brings_besides_lies_where_it_says(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "note").write_text("seen")
    plain = environment(tmp_path / "env", "x")
    prepared = PreparedEnvironment(
        plain.name, plain.root, plain.python, {"/opt/gpool/other": other}
    )
    found = using(
        "bubblewrap", tmp_path / "data", lambda r: said(r, prepared, "cat", "/opt/gpool/other/note")
    )
    assert found == "seen"


def test_an_environment_that_is_gone_is_the_nodes_fault(tmp_path: Path) -> None:
    prepared = PreparedEnvironment("pip:gone", tmp_path / "gone", f"{ENVIRONMENT_AT}/bin/python")

    async def work(runtime: Any) -> str:
        job = CommandJob(("true",), (), (), (), LIMITS, environment=prepared)
        sandbox = await runtime.start_command(job)
        assert [data async for _, data in sandbox.output()]
        ended = await sandbox.ended()
        await sandbox.remove()
        return str(ended.reason)

    assert using("bubblewrap", tmp_path / "data", work) == "sandbox_failed"


@pytest.mark.parametrize("python", [PYTHON, "3.99"])
def test_a_runner_is_run_by_the_environments_interpreter(python: str, tmp_path: Path) -> None:
    """Which Python that is, the environment says."""
    prepared = environment(tmp_path / "env", "there")

    def look() -> tuple[str, str, bool]:
        word = str(importlib.import_module("special").WORD)
        return word, sys.prefix, importlib.util.find_spec("msgspec") is not None

    async def work(runtime: Any) -> Any:
        runner = await runtime.start_runner(RunnerJob(python, (), (), LIMITS, environment=prepared))
        answer = await Caller(runner).call(look)
        await runner.remove()
        return answer

    answer = using("bubblewrap", tmp_path / "data", work)
    assert not answer.raised, answer.error_text
    assert pickle.loads(answer.value) == ("there", ENVIRONMENT_AT, False)


def test_an_environments_own_cloudpickle_wins_over_ours(tmp_path: Path) -> None:
    prepared = environment(tmp_path / "env", "x")
    own = tmp_path / "env" / "lib" / MINOR / "site-packages" / "cloudpickle"
    shutil.copytree(Path(cloudpickle.__file__).parent, own)

    def where() -> str:
        return str(importlib.import_module("cloudpickle").__file__)

    async def work(runtime: Any) -> Any:
        runner = await runtime.start_runner(RunnerJob(PYTHON, (), (), LIMITS, environment=prepared))
        answer = await Caller(runner).call(where)
        await runner.remove()
        return pickle.loads(answer.value)

    assert using("bubblewrap", tmp_path / "data", work).startswith(ENVIRONMENT_AT)


def test_without_isolation_an_environment_is_refused(tmp_path: Path) -> None:
    prepared = environment(tmp_path / "env", "x")
    with pytest.raises(SandboxFailed):
        using("process", tmp_path / "data", lambda r: said(r, prepared, "true"))


# ---- taking a directory out


async def taken(runtime: Any, script: str, directory: str, to: Path) -> Path:
    sandbox = await runtime.start_command(CommandJob(("sh", "-c", script), (), (), (), LIMITS))
    try:
        assert b"".join([data async for _, data in sandbox.output()]) == b""
        await sandbox.take(directory, to)
    finally:
        await sandbox.remove()
    return to


BUILD = """
mkdir -p out/env/deep && cd out/env
echo 1 > plain; echo 2 > tool; chmod 4755 tool; ln plain twin; ln -s /etc/shadow link; ln -s deep around
echo 3 > deep/secret; chmod 000 deep/secret; chmod 2777 deep; chmod 500 .
"""


@pytest.mark.parametrize("kind", ["bubblewrap", "process"])
def test_a_taken_directory_is_the_agents_own_and_nobodys_to_write(
    kind: str, tmp_path: Path
) -> None:
    to = tmp_path / "data" / "taken"
    using(kind, tmp_path / "data", lambda r: taken(r, BUILD, "out/env", to))
    modes = {}
    for folder, folders, names in os.walk(to):
        for name in (*folders, *names):
            facts = os.stat(os.path.join(folder, name), follow_symlinks=False)
            assert facts.st_uid == os.geteuid()
            modes[name] = facts.st_mode & 0o7777
    links = {"link": 0o777, "around": 0o777}
    files = {"plain": 0o444, "twin": 0o444, "tool": 0o555, "secret": 0o444, "deep": 0o755}
    assert modes == files | links
    assert os.readlink(to / "link") == "/etc/shadow"


@pytest.mark.parametrize(
    ("script", "directory", "told"),
    [
        ("mkdir env; mkfifo env/pipe", "env", "a FIFO"),
        ("mkdir real; ln -s real env", "env", "no directory"),
        ("mkdir -p real/env; ln -s real up", "up/env", "no directory"),
        ("ln -s /etc env", "env", "no directory"),
        ("echo > env", "env", "no directory"),
        ("true", "env", "no directory"),
        ("true", "../env", "env"),
        ("mkdir env; cd env; for n in $(seq 220); do mkdir d; cd d; done", "env", "deeper"),
    ],
)
def test_what_cannot_be_taken_is_refused_and_leaves_nothing(
    script: str, directory: str, told: str, tmp_path: Path
) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    with pytest.raises(BadOutput, match=told):
        using(
            "bubblewrap",
            tmp_path / "data",
            lambda r: taken(r, script, directory, shelf / "taken"),
        )
    assert list(shelf.iterdir()) == []
