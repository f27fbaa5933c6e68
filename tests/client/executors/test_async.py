"""`await run`, `async for` over a map, display in notebooks, and types under `mypy --strict`."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

import gpool
from gpool import Client
from tests.tools.processes import PATIENCE_S


def test_runs_can_be_awaited_together(sdk: Client) -> None:
    async def main() -> list[float]:
        half = sdk.task(lambda x: x / 2)
        return await asyncio.gather(*(half.submit(x) for x in range(20)))

    assert asyncio.run(main()) == [x / 2 for x in range(20)]


def test_an_awaited_run_raises_the_exception_of_its_function(sdk: Client) -> None:
    async def main() -> object:
        return await sdk.task(divmod).submit(1, 0)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())


def test_a_cancelled_await_ends_the_event_loop_soon(sdk: Client) -> None:
    run = sdk.task(gpu="H100")(abs).submit(-1)

    async def main() -> None:
        async with asyncio.timeout(0.1):
            await run

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert run.status == "queued"
    run.cancel()


def test_a_map_can_be_iterated_asynchronously(sdk: Client) -> None:
    async def main() -> list[int]:
        return [value async for value in sdk.task(abs).map(range(-100, 0))]

    assert asyncio.run(main()) == list(range(100, 0, -1))


def test_a_cancelled_async_map_cancels_its_calls(sdk: Client) -> None:
    async def main() -> None:
        async with asyncio.timeout(0.2):
            async for _ in sdk.task(gpu="H100")(abs).map([-1, -2], progress=False):
                pass

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    [newest] = sdk.listing("tasks", limit=1)
    ended = list(sdk.ended(newest["batch"], timeout=PATIENCE_S))
    assert {result.status for result in ended} == {"cancelled"}


def test_an_async_map_that_fails_raises(sdk: Client) -> None:
    async def main() -> None:
        results = sdk.task(divmod).map([1, 1], [1, 0])
        assert await anext(results) == (1, 0)
        with pytest.raises(ZeroDivisionError):
            await anext(results)
        await results.aclose()

    asyncio.run(main())


def test_a_notebook_shows_a_run_with_escaped_texts(sdk: Client) -> None:
    run = sdk.task(name="<script>alert(1)</script>", gpu="H100")(abs).submit(-1)
    shown = run._repr_html_()
    assert "&lt;script&gt;" in shown
    assert "<script>" not in shown
    assert run.id in shown
    run.cancel()


USER_SCRIPT = """
import asyncio
from concurrent.futures import Executor, as_completed

import gpool


@gpool.task(gpu="H100", pip=["torch"])
def train(rate: float, *, epochs: int = 1) -> dict[str, float]:
    return {"loss": rate * epochs}


@gpool.task
async def crawl(url: str) -> bytes:
    return url.encode()


async def main() -> None:
    value: dict[str, float] = await train.submit(0.1)
    async for one in train.map([0.1, 0.2], progress=False):
        print(one["loss"], value)
    data: bytes = await crawl.submit("a")
    print(data)


def program(executor: Executor) -> int:
    futures = [executor.submit(pow, 2, number) for number in range(3)]
    return sum(future.result() for future in as_completed(futures))


loss: float = train.remote(0.1, epochs=2)["loss"]
page: bytes = crawl.remote("b")
run: gpool.Run[dict[str, float]] = train.submit(0.5)
kept: gpool.Run = run
done: gpool.Completed = gpool.run(["python", "train.py"], gpu=1, check=True)
with gpool.Executor(max_workers=4, gpu=1) as pool:
    total: int = program(pool)
    length: int = pool.submit(len, "abc").result()
asyncio.run(main())
"""

WRONG_LINES = """
train.remote("fast")
text: str = train.remote(0.1)
gpool.run(["ls"], gpus=1)
"""


def test_a_user_s_script_is_typed(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(USER_SCRIPT)
    bad.write_text(USER_SCRIPT + WRONG_LINES)
    cache = f"--cache-dir={Path(gpool.__file__).parents[2] / '.mypy_cache'}"
    words = [sys.executable, "-m", "mypy", "--strict", "--config-file=", cache]
    said = subprocess.run([*words, good], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout
    said = subprocess.run([*words, bad], capture_output=True, text=True, check=False)
    lines = [line for line in said.stdout.splitlines() if ": error:" in line]
    assert len(lines) == len(WRONG_LINES.split("\n")) - 2, said.stdout
