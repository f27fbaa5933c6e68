"""Executors, async functions and tasks of a project in real sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpool import Client, Executor
from gpool.cli.main import cli
from tests.tools.processes import PATIENCE_S, Pool

CATALOGUE = Path(__file__).parents[2] / "examples" / "catalogue"


@pytest.fixture
def sdk(pool: Pool) -> Iterator[Client]:
    with Client(pool.address, pool.key) as client:
        yield client


def test_an_executor_runs_calls_in_sandboxes(sdk: Client) -> None:
    with Executor(client=sdk) as executor:
        assert executor.submit(pow, 2, 8).result(PATIENCE_S) == 256
        assert list(executor.map(abs, range(-20, 0))) == list(range(20, 0, -1))
        assert list(executor.map(pow, range(7), [2] * 7, chunksize=3)) == [x * x for x in range(7)]
        with pytest.raises(ZeroDivisionError):
            executor.submit(divmod, 1, 0).result(PATIENCE_S)


def test_an_async_function_runs_in_a_sandbox(sdk: Client) -> None:
    async def add(x: int, y: int) -> int:
        await asyncio.sleep(0)
        return x + y

    async def main() -> list[int]:
        task = sdk.task(add)
        awaited = await task.submit(1, 2)
        return [awaited, *[value async for value in task.map(range(3), range(3))]]

    assert asyncio.run(main()) == [3, 0, 2, 4]


def test_a_task_of_a_project_brings_its_outputs(
    sdk: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CATALOGUE)
    words = ["run", "--into", str(tmp_path), ":render", "--width", "32", "--height", "18"]
    said = CliRunner().invoke(cli, words, obj=sdk)
    assert said.exit_code == 0, said.output
    assert (tmp_path / "image.ppm").read_bytes().startswith(b"P6 32 18 255\n")
