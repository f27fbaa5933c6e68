"""A descriptor that stays registered with the event loop: no missed data, no idle iterations."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from gpool.agent.runtime.descriptors import ReadWatch
from tests.tools.processes import PATIENCE_S

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            assert end == ends[1], "closed by the test"


async def test_each_wait_sees_its_data_and_the_end(pipe: tuple[int, int]) -> None:
    watch = ReadWatch(pipe[0])
    for number in range(3):
        waiting = asyncio.ensure_future(watch.wait(PATIENCE_S))
        await asyncio.sleep(0)
        os.write(pipe[1], b"%d" % number)
        assert await waiting
        assert os.read(pipe[0], 10) == b"%d" % number
    os.close(pipe[1])
    assert await watch.wait(PATIENCE_S)
    assert await watch.wait(PATIENCE_S), "the end is seen again"
    watch.close()


async def test_without_data_it_waits_as_long_as_asked(pipe: tuple[int, int]) -> None:
    watch = ReadWatch(pipe[0])
    assert not await watch.wait(0.001)
    os.write(pipe[1], b"x")
    assert await watch.wait(PATIENCE_S)
    watch.close()


async def test_data_between_two_waits_does_not_keep_the_loop_busy(pipe: tuple[int, int]) -> None:
    watch = ReadWatch(pipe[0])
    assert not await watch.wait(0.001)
    calls = 0
    tell = watch._tell

    def counted() -> None:
        nonlocal calls
        calls += 1
        tell()

    asyncio.get_running_loop().add_reader(pipe[0], counted)  # replaces the registration
    os.write(pipe[1], b"x")
    for _ in range(20):
        await asyncio.sleep(0)
    assert calls == 1
    assert await watch.wait(PATIENCE_S), "the data is still there"
    watch.close()


async def test_a_cancelled_wait_leaves_the_watch_usable(pipe: tuple[int, int]) -> None:
    watch = ReadWatch(pipe[0])
    waiting = asyncio.ensure_future(watch.wait(PATIENCE_S))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    os.write(pipe[1], b"x")
    assert await watch.wait(PATIENCE_S)
    watch.close()
