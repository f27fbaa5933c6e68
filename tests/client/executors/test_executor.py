"""`gpool.Executor`: what the standard library's tests do not ask."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import CancelledError

import pytest

import gpool
from gpool import Client, Executor
from gpool.client.executors.executor import PoolFuture
from tests.tools.processes import PATIENCE_S


def test_a_future_names_its_task(sdk: Client) -> None:
    with Executor(client=sdk, name="squares") as executor:
        future = executor.submit(pow, 3, 2)
        assert future.result(PATIENCE_S) == 9
    assert future.run is not None
    assert future.run.document()["name"] == "squares"


def test_calls_of_one_executor_share_a_batch(sdk: Client) -> None:
    with Executor(client=sdk) as executor:
        futures = [executor.submit(abs, -number) for number in range(300)]
        assert [future.result(PATIENCE_S) for future in futures] == list(range(300))
    batches = {future.run.document()["batch"] for future in futures[::50] if future.run}
    assert len(batches) == 1
    assert sdk.batch(batches.pop())["closed"]


def test_many_large_calls_go_in_several_requests(sdk: Client) -> None:
    with Executor(client=sdk) as executor:
        futures = [executor.submit(len, bytes(40_000)) for _ in range(400)]
        assert {future.result(PATIENCE_S) for future in futures} == {40_000}


def test_a_call_behind_waiting_ones_gets_no_worker_before_them(sdk: Client) -> None:
    with Executor(1, client=sdk) as executor:
        first = executor.submit(abs, -1)
        rest = []
        first.add_done_callback(lambda _: rest.append(executor.submit(abs, -3)))
        second = executor.submit(abs, -2)
        assert [first.result(PATIENCE_S), second.result(PATIENCE_S)] == [1, 2]
        assert rest[0].result(PATIENCE_S) == 3


def test_a_call_that_waits_in_the_pool_can_be_cancelled(sdk: Client) -> None:
    with Executor(client=sdk, gpu="H100") as executor:
        future = executor.submit(abs, -1)
        _submitted(future)
        assert not future.running()
        assert future.cancel()
        assert future.cancel()
        with pytest.raises(CancelledError):
            future.result()
    assert future.run is not None
    assert future.run.status == "cancelled"


def test_shutdown_cancels_calls_that_wait_in_the_pool(sdk: Client) -> None:
    executor = Executor(client=sdk, gpu="H100")
    futures = [executor.submit(abs, -1) for _ in range(5)]
    _submitted(futures[-1])
    executor.shutdown(cancel_futures=True)
    assert all(future.cancelled() for future in futures)


def test_a_running_call_is_not_cancelled_but_its_run_can_be(sdk: Client) -> None:
    release, started = threading.Event(), threading.Event()
    _EVENTS[:] = [started, release]
    with Executor(client=sdk) as executor:
        future = executor.submit(_hold)
        assert started.wait(PATIENCE_S)
        assert future.running()
        assert not future.cancel()
        assert future.run is not None
        future.run.cancel()
        release.set()
        with pytest.raises(gpool.Cancelled):
            future.result(PATIENCE_S)


def test_an_argument_that_cannot_be_sent_fails_its_future(sdk: Client) -> None:
    with Executor(client=sdk) as executor:
        future = executor.submit(id, threading.Lock())
        with pytest.raises(gpool.Invalid, match="cannot be sent"):
            future.result(PATIENCE_S)
        assert executor.submit(abs, -1).result(PATIENCE_S) == 1


def test_a_refused_submission_fails_its_futures(sdk: Client) -> None:
    with Executor(client=sdk, team="nobody's") as executor:
        future = executor.submit(abs, -1)
        with pytest.raises(gpool.NotFound):
            future.result(PATIENCE_S)


def test_an_abandoned_executor_finishes_its_calls_and_its_thread(sdk: Client) -> None:
    executor = Executor(client=sdk)
    future = executor.submit(abs, -1)
    thread = executor._dispatcher.thread
    del executor
    gc.collect()
    assert future.result(PATIENCE_S) == 1
    assert thread is not None
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_tasks_and_async_functions_are_calls_too(sdk: Client) -> None:
    async def double(x: int) -> int:
        await asyncio.sleep(0)
        return 2 * x

    with Executor(client=sdk) as executor:
        assert executor.submit(double, 4).result(PATIENCE_S) == 8
        assert executor.submit(sdk.task(abs), -4).result(PATIENCE_S) == 4
        assert list(executor.map(double, range(5), chunksize=2)) == [0, 2, 4, 6, 8]


def test_an_event_loop_can_run_calls_in_the_pool(sdk: Client) -> None:
    async def main(executor: Executor) -> int:
        return await asyncio.get_running_loop().run_in_executor(executor, pow, 2, 10)

    with Executor(client=sdk) as executor:
        assert asyncio.run(main(executor)) == 1024


def test_malformed_options_are_refused_where_they_are_written(sdk: Client) -> None:
    with pytest.raises(TypeError, match="unknown option"):
        Executor(client=sdk, gpus=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="chunksize"):
        Executor(client=sdk).map(abs, [1], chunksize=0)


_EVENTS: list[threading.Event] = []


def _hold() -> None:
    from tests.client.executors import test_executor  # noqa: PLC0415 - the copy that was sent has its own globals

    started, release = test_executor._EVENTS
    started.set()
    release.wait(PATIENCE_S)


def _submitted(future: PoolFuture[int]) -> None:
    waited = threading.Event()
    for _ in range(int(PATIENCE_S * 100)):
        if future.run is not None or waited.wait(0.01):
            return
