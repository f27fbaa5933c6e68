"""`gpool catalogue`: shipped tasks without a project; hostile names and parameters stay words of the command."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpool import Client
from gpool.cli.main import cli
from gpool.cli.project.project_tasks import builtin_templates
from tests.cli.test_project_tasks import Execution
from tests.client.inprocess import RealPool

SHIPPED = ["batch-inference", "finetune", "sweep", "render", "monte-carlo"]
HOSTILE = "x'; touch owned; $(touch owned) `touch owned` #"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPool]:
    pool = RealPool(tmp_path_factory.mktemp("data"))
    node = pool.join()
    yield pool
    node.close()
    pool.close()


@pytest.fixture
def sdk(pool: RealPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.chdir(tmp_path)  # no gpool.toml here
    with Client("http://pool.test", pool.key, transport=pool.transport) as client:
        yield client


def typed(sdk: Client | None, *words: str) -> Result:
    return CliRunner().invoke(cli, list(words), obj=sdk)


def test_shipped_tasks_are_listed_and_shown_without_a_pool() -> None:
    listed = typed(None, "catalogue", "ls", "--json")
    assert [one["name"] for one in json.loads(listed.stdout)] == SHIPPED
    assert "monte-carlo" in typed(None, "catalogue", "ls").stdout
    assert "from 16, to 8192, default 160" in typed(None, "catalogue", "show", "render").stdout


def test_a_shipped_task_runs_with_its_script_and_parameters(
    pool: RealPool, sdk: Client, tmp_path: Path
) -> None:
    execution = Execution(pool, sdk, tmp_path / "work")
    ran = typed(sdk, "catalogue", "run", "monte-carlo", "--samples", "200", "--seed", "7")
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["samples"] == 200
    [spec] = execution.specs
    assert list(spec.command[:4]) == ["python", "monte_carlo.py", "--samples", "200"]
    assert [file.path for file in spec.inputs] == ["monte_carlo.py"]


def test_options_of_run_stand_before_the_name_of_a_shipped_task(
    pool: RealPool, sdk: Client, tmp_path: Path
) -> None:
    execution = Execution(pool, sdk, tmp_path / "work")
    ran = typed(sdk, "run", "--timeout", "2m", ":builtin/monte-carlo", "--samples", "100")
    assert ran.exit_code == 0, ran.output
    assert execution.specs[0].timeout == 120_000_000


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["../../secret"], "has no task"),
        (["builtin/monte-carlo"], "has no task"),
        ([HOSTILE], "has no task"),
        (["monte-carlo", "--samples", "1; touch owned"], "of type int"),
        (["monte-carlo", "--samples", "99"], "at least 100"),
        (["monte-carlo", "--strike", "nan"], "finite"),
        (["monte-carlo", "--gpu", "8"], "no parameter"),
        (["monte-carlo", "--", "sh"], "no parameter"),
    ],
)
def test_hostile_names_and_parameters_are_refused_before_anything_is_sent(
    pool: RealPool, sdk: Client, tmp_path: Path, words: list[str], part: str
) -> None:
    execution = Execution(pool, sdk, tmp_path / "work")
    said = typed(sdk, "catalogue", "run", *words)
    assert said.exit_code != 0
    assert part in said.output + str(getattr(said.exception, "detail", ""))
    assert not execution.specs


def test_a_text_parameter_is_one_word_of_the_command_and_never_shell_text(
    pool: RealPool, sdk: Client, tmp_path: Path
) -> None:
    (tmp_path / "gpool.toml").write_text(
        '[tasks.say]\ncommand = ["printf", "%s\\n"]\n[tasks.say.parameters]\nword = {}\n'
    )
    execution = Execution(pool, sdk, tmp_path / "work")
    ran = typed(sdk, "run", ":say", "--word", HOSTILE)
    assert ran.exit_code == 0, ran.output
    assert HOSTILE in ran.stdout
    assert execution.specs[0].command == ("printf", "%s\n", "--word", HOSTILE)
    assert not (tmp_path / "work" / "owned").exists()
    # control: the same value in the text of a shell line runs its commands
    line = f"printf '%s' '{HOSTILE}'"
    assert shlex.quote(HOSTILE) not in line
    subprocess.run(["sh", "-c", line], cwd=tmp_path / "work", check=False, capture_output=True)
    assert (tmp_path / "work" / "owned").exists()


def test_every_shipped_task_has_its_files() -> None:
    folder, templates = builtin_templates()
    for one in templates.values():
        assert all((folder / path).is_file() for path in (one.script, *one.inputs)), one.name
