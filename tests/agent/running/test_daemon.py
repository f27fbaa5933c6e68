"""The whole agent against a server's end in this process: real sockets, real frames, a runtime without processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import cloudpickle
import pytest

from gpool.agent.app import run_agent
from gpool.agent.services import NodeServices
from gpool.agent.state_machine.instructions import OfferDetected, ReclaimAsked
from gpool.cli.main import FAILED, exit_code_of
from gpool.core.errors import Forbidden, GpoolError, Invalid, NotSignedIn
from gpool.core.model import (
    EndReason,
    Gpu,
    InputFile,
    Offer,
    OutputFile,
    Requirements,
    Span,
    TaskKind,
    TaskSpec,
    Tier,
)
from gpool.testing.fake_runtime import FakeRun, FakeRuntime
from gpool.transfer.node_proofs import NodeKey
from gpool.wire.frames import (
    Challenge,
    Finished,
    HandedBack,
    Hold,
    Lease,
    Refused,
    Released,
    Started,
    Stop,
    StopReason,
)
from tests.agent.desk import Desk, settings_for
from tests.tools.runtimes import PATIENCE_S

OWN_PYTHON = f"3.{sys.version_info.minor}"
OFFER = Offer(2000, 1 << 30, 1 << 30)
RUNS = {
    ("hello",): FakeRun(((1, b"hi\n"), (2, b"oh\n")), exit_code=3),
    ("wait",): FakeRun(waits=True),
    ("write",): FakeRun(files={"out.txt": b"result"}),
}


class Pool:
    def __init__(
        self, desk: Desk, runtime: FakeRuntime, folder: Path, bare: FakeRuntime | None = None
    ) -> None:
        self.desk, self.runtime, self.stop = desk, runtime, asyncio.Event()
        runtimes = [runtime, *([bare] if bare else [])]
        self.offer = OFFER
        self.reclaim: tuple[ReclaimAsked, ...] = ()
        self.agent = asyncio.create_task(
            run_agent(
                settings_for(desk, folder),
                NodeServices(runtimes),
                OFFER,
                stop=self.stop,
                random=Random(1),
                survey=lambda: (OfferDetected(self.offer), *self.reclaim),
                survey_every_s=0.05,
            )
        )


@contextlib.asynccontextmanager
async def pool(
    folder: Path, desk: Desk | None = None, bare: FakeRuntime | None = None
) -> AsyncIterator[Pool]:
    values = folder / "values"
    values.mkdir()
    async with desk or Desk() as desk:
        made = Pool(desk, FakeRuntime(values, RUNS), folder, bare)
        await desk.until(lambda: desk.hellos)
        yield made
        made.stop.set()
        async with asyncio.timeout(PATIENCE_S):
            await made.agent
        assert made.runtime.live == set(), "a sandbox outlived its agent"


def living(folder: Path, story: Callable[[Pool, Desk], Awaitable[None]]) -> None:
    async def live() -> None:
        async with pool(folder) as made:
            await story(made, made.desk)

    asyncio.run(live())


def command(name: str, **changes: object) -> TaskSpec:
    return TaskSpec(TaskKind.COMMAND, name, command=(name,), **changes)  # type: ignore[arg-type]


def function(sha256: str) -> TaskSpec:
    return TaskSpec(TaskKind.FUNCTION, "f", Requirements(python=OWN_PYTHON), function_sha256=sha256)


def call(task: int, *arguments: object) -> Lease:
    return Lease(task, 1, pickle.dumps((arguments, {})))


def test_a_command_s_output_and_end_reach_the_server(tmp_path: Path) -> None:
    async def story(pool: Pool, desk: Desk) -> None:
        await desk.grant(command("hello"), [Lease(1, 1)])
        await desk.until(lambda: 1 in desk.ends())
        end = desk.ends()[1]
        assert isinstance(end, Finished)
        assert (end.reason, end.exit_code) == (EndReason.EXITED, 3)
        assert desk.log_of(1) == b"hi\noh\n"

    living(tmp_path, story)


@pytest.mark.parametrize(
    ("owner", "tier", "code"),
    [
        (True, Tier.NONE, 40),  # the bare runtime's
        (True, Tier.CONTAINER, 3),
        (False, Tier.CONTAINER, 3),
        (False, Tier.NONE, None),  # whatever the server says
        (True, Tier.VM, None),
    ],
)
def test_only_the_owner_s_tasks_that_ask_for_it_run_without_isolation(
    tmp_path: Path, owner: bool, tier: Tier, code: int | None
) -> None:
    async def live() -> None:
        bare = FakeRuntime(tmp_path / "values", {("hello",): FakeRun(exit_code=40)}, Tier.NONE)
        async with pool(tmp_path, bare=bare) as made:
            spec = command("hello", requirements=Requirements(tier=tier))
            await made.desk.grant(spec, [Lease(1, 1)], owner=owner)
            await made.desk.until(lambda: 1 in made.desk.ends())
            end = made.desk.ends()[1]
            assert isinstance(end, Finished)
            if code is None:
                assert (end.reason, "tier" in end.error_text) == (EndReason.SANDBOX_FAILED, True)
            else:
                assert (end.reason, end.exit_code) == (EndReason.EXITED, code)

    asyncio.run(live())


def test_a_thousand_calls_come_back_in_a_few_batches(tmp_path: Path) -> None:
    async def story(pool: Pool, desk: Desk) -> None:
        double = desk.keep(cloudpickle.dumps(lambda x: 2 * x))
        for number in (0, 1):
            tasks = range(1 + number * 500, 501 + number * 500)
            await desk.grant(function(double), [call(t, t) for t in tasks], number)
        await desk.until(lambda: len(desk.ends()) == 1000)
        for task, end in desk.ends().items():
            assert isinstance(end, Finished)
            assert pickle.loads(end.value) == 2 * task
        assert desk.batches < 100

    living(tmp_path, story)


def test_whoever_comes_next_gets_a_sandbox_that_was_warm(tmp_path: Path) -> None:
    async def story(pool: Pool, desk: Desk) -> None:
        pool.offer = replace(OFFER, memory_bytes=8 << 30)
        await desk.until(lambda: desk.offers)
        spec = replace(function(desk.keep(cloudpickle.dumps(len))), preload=("wave",))
        await desk.grant(spec, [call(1, "a")])
        await desk.until(lambda: 1 in desk.ends())
        await desk.until(lambda: pool.runtime.warmed)
        (warmed,) = pool.runtime.warmed
        assert warmed.variables is None, "nobody's yet"
        await desk.grant(replace(spec, env=(("WHO", "me"),)), [call(2, "ab")], 1)
        await desk.until(lambda: 2 in desk.ends())
        assert warmed.variables == (("WHO", "me"),)
        end = desk.ends()[2]
        assert isinstance(end, Finished)
        assert pickle.loads(end.value) == 2

    living(tmp_path, story)


def test_a_missing_function_fails_its_call_with_a_reason(tmp_path: Path) -> None:
    async def story(pool: Pool, desk: Desk) -> None:
        await desk.grant(function("0" * 64), [call(1)])
        await desk.until(lambda: 1 in desk.ends())
        end = desk.ends()[1]
        assert isinstance(end, Finished)
        assert end.reason is EndReason.BAD_INPUT
        assert "could not be fetched" in end.error_text

    living(tmp_path, story)


def test_large_arguments_are_fetched_by_their_hash(tmp_path: Path) -> None:
    async def story(pool: Pool, desk: Desk) -> None:
        size = desk.keep(cloudpickle.dumps(len))
        arguments = desk.keep(pickle.dumps(((b"x" * 300_000,), {})))
        await desk.grant(function(size), [Lease(1, 1, b"", arguments)])
        await desk.until(lambda: 1 in desk.ends())
        end = desk.ends()[1]
        assert isinstance(end, Finished)
        assert pickle.loads(end.value) == 300_000

    living(tmp_path, story)


def test_a_large_value_travels_as_an_artifact(tmp_path: Path) -> None:
    async def story(pool: Pool, desk: Desk) -> None:
        repeat = desk.keep(cloudpickle.dumps(lambda count: b"v" * count))
        value = desk.keep(pickle.dumps(b"v" * 200_000))
        await desk.grant(function(repeat), [call(1, 200_000), call(2, 3)])
        await desk.until(lambda: len(desk.ends()) == 2)
        large, small = desk.ends()[1], desk.ends()[2]
        assert isinstance(large, Finished)
        assert isinstance(small, Finished)
        assert (large.value, large.value_sha256) == (b"", value)
        assert pickle.loads(small.value) == b"vvv"
        assert not list(os.scandir(pool.runtime.values))

    living(tmp_path, story)


def test_a_missing_input_fails_the_command_with_its_name(tmp_path: Path) -> None:
    async def story(pool: Pool, desk: Desk) -> None:
        spec = command("hello", inputs=(InputFile("data.csv", "1" * 64, 5),))
        await desk.grant(spec, [Lease(1, 1)])
        await desk.until(lambda: 1 in desk.ends())
        end = desk.ends()[1]
        assert isinstance(end, Finished)
        assert end.reason is EndReason.BAD_INPUT
        assert "data.csv" in end.error_text

    living(tmp_path, story)


def test_an_output_the_server_has_is_named_in_the_end(tmp_path: Path) -> None:
    async def story(pool: Pool, desk: Desk) -> None:
        sha256 = desk.keep(b"result")
        await desk.grant(command("write", outputs=("out.txt",)), [Lease(1, 1)])
        await desk.until(lambda: 1 in desk.ends())
        end = desk.ends()[1]
        assert isinstance(end, Finished)
        assert end.outputs == (OutputFile("out.txt", sha256, 6),)

    living(tmp_path, story)


def test_an_output_that_was_not_written_fails_the_command(tmp_path: Path) -> None:
    async def story(pool: Pool, desk: Desk) -> None:
        await desk.grant(command("write", outputs=("other.txt",)), [Lease(1, 1)])
        await desk.until(lambda: 1 in desk.ends())
        end = desk.ends()[1]
        assert isinstance(end, Finished)
        assert end.reason is EndReason.BAD_OUTPUT

    living(tmp_path, story)


def test_a_stopped_command_is_killed_and_released(tmp_path: Path) -> None:
    async def story(pool: Pool, desk: Desk) -> None:
        await desk.grant(command("wait"), [Lease(1, 1)])
        await desk.until(lambda: any(i.task == 1 for i in desk.items))
        assert len(pool.runtime.live) == 1
        await desk.say(Stop((Hold(1, 1),), StopReason.CANCELLED))
        await desk.until(lambda: desk.ends().get(1) == Released(1, 1))
        assert pool.runtime.live == set()

    living(tmp_path, story)


def test_a_command_stopped_at_once_is_released_too(tmp_path: Path) -> None:
    async def story(pool: Pool, desk: Desk) -> None:
        await desk.grant(command("wait"), [Lease(1, 1)])
        await desk.say(Stop((Hold(1, 1),), StopReason.CANCELLED))
        await desk.until(lambda: desk.ends().get(1) == Released(1, 1))

    living(tmp_path, story)


def test_after_a_reconnect_the_agent_states_what_it_holds(tmp_path: Path) -> None:
    async def story(pool: Pool, desk: Desk) -> None:
        await desk.grant(command("wait"), [Lease(1, 1), Lease(2, 1)])
        await desk.until(lambda: any(i.task == 1 for i in desk.items))
        assert desk.connection is not None
        await desk.connection.close()
        await desk.until(lambda: len(desk.hellos) > 1)
        assert set(desk.hellos[1].holds) == {Hold(1, 1), Hold(2, 1)}

    living(tmp_path, story)


def test_a_silent_server_s_leases_are_let_go_in_time(tmp_path: Path) -> None:
    async def live() -> None:
        async with pool(tmp_path) as made:
            desk = made.desk
            await desk.grant(command("wait"), [Lease(1, 1)])
            await desk.until(lambda: any(i.task == 1 for i in desk.items))
            (sandbox,) = made.runtime.live
            desk.mute = True
            desk.ttl_us, desk.margin_us = 3_000_000, 500_000  # only now: before, nothing is lost
            assert desk.connection is not None
            await desk.connection.close()
            await desk.until(lambda: len(desk.hellos) > 1)
            assert set(desk.hellos[1].holds) == {Hold(1, 1)}
            async with asyncio.timeout(PATIENCE_S):
                await sandbox.ended()
            assert 1 not in desk.ends()

    asyncio.run(live())


def test_a_stopping_agent_hands_back_its_line(tmp_path: Path) -> None:
    async def story(pool: Pool, desk: Desk) -> None:
        await desk.grant(command("wait"), [Lease(1, 1), Lease(2, 1)])
        await desk.until(lambda: any(i.task == 1 for i in desk.items))
        pool.stop.set()
        await pool.agent
        assert desk.ends()[2] == HandedBack(2, 1)
        end = desk.ends()[1]
        assert isinstance(end, Finished)
        assert end.reason is EndReason.PREEMPTED

    living(tmp_path, story)


def test_a_refusal_for_good_ends_the_agent_with_its_reason(tmp_path: Path) -> None:
    async def live() -> None:
        async with Desk() as desk:
            desk.refuse = Refused("forbidden", "this node was removed", retry=False)
            (tmp_path / "values").mkdir()
            made = Pool(desk, FakeRuntime(tmp_path / "values"), tmp_path)
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(Forbidden, match="this node was removed"):
                    await made.agent

    asyncio.run(live())


@pytest.mark.parametrize("code", ["invalid", "too_large"])
def test_what_a_machine_said_of_itself_is_no_mistake_in_how_it_was_started(
    tmp_path: Path, code: str
) -> None:
    """As of a GPU without memory while its driver is loading: `gpool up` starts the agent again, and ends for a mistake."""

    async def live() -> None:
        async with Desk() as desk:
            desk.refuse = Refused(code, "a GPU with 0 bytes of memory", retry=False)
            (tmp_path / "values").mkdir()
            made = Pool(desk, FakeRuntime(tmp_path / "values"), tmp_path)
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(GpoolError, match="0 bytes of memory") as refused:
                    await made.agent
            assert exit_code_of(refused.value) == FAILED

    asyncio.run(live())


def test_an_unknown_node_ends_the_agent_and_says_what_to_do(tmp_path: Path) -> None:
    async def live() -> None:
        async with Desk() as desk:
            told = settings_for(desk, tmp_path).model_copy(update={"node": "n-0000000000002"})
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(NotSignedIn, match="join again"):
                    await run_agent(told, NodeServices([]), OFFER, stop=asyncio.Event())

    asyncio.run(live())


def test_a_wrong_key_ends_the_agent_and_a_missing_one_does_not_start_it(tmp_path: Path) -> None:
    async def live() -> None:
        async with Desk() as desk:
            told = settings_for(desk, tmp_path)
            other = told.model_copy(update={"key_file": tmp_path / "other.key"})
            with pytest.raises(Invalid, match="join again"):
                await run_agent(other, NodeServices([]), OFFER, stop=asyncio.Event())
            NodeKey.from_file(other.key_file)
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(NotSignedIn, match="join again"):
                    await run_agent(other, NodeServices([]), OFFER, stop=asyncio.Event())

    asyncio.run(live())


def test_a_token_is_renewed_on_the_channel_and_nothing_else_is_signed(tmp_path: Path) -> None:
    async def live() -> None:
        async with pool(tmp_path) as made:
            desk = made.desk
            await desk.say(Challenge("nonce-2", "token"))
            await desk.until(lambda: len(desk.proofs) == 2)
            await desk.say(Challenge("nonce-3", "join"))
            await desk.until(lambda: len(desk.hellos) > 1)  # it hung up, and came again
            assert [proof.nonce for proof in desk.proofs[:2]] == ["nonce-1", "nonce-2"]
            assert "nonce-3" not in {proof.nonce for proof in desk.proofs}

    asyncio.run(live())


def test_a_changed_offer_is_told_once(tmp_path: Path) -> None:
    async def live() -> None:
        async with pool(tmp_path) as made:
            grown = replace(OFFER, gpus=(Gpu(0, "GPU-1", "A100", "nvidia", 1 << 36),))
            made.offer = grown
            await made.desk.until(lambda: made.desk.offers)
            made.offer = OFFER
            await made.desk.until(lambda: len(made.desk.offers) == 2)
            assert made.desk.offers == [grown, OFFER]

    asyncio.run(live())


def test_a_signal_stops_the_agent_in_good_order(tmp_path: Path) -> None:
    async def live() -> None:
        async with Desk() as desk:
            (tmp_path / "values").mkdir()
            runtime = FakeRuntime(tmp_path / "values", RUNS)
            settings = settings_for(desk, tmp_path)
            agent = asyncio.create_task(run_agent(settings, NodeServices([runtime]), OFFER))
            await desk.until(lambda: desk.hellos)
            await desk.grant(command("wait"), [Lease(1, 1)])
            await desk.until(lambda: any(i.task == 1 for i in desk.items))
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(PATIENCE_S):
                await agent
            assert isinstance(desk.ends()[1], Finished)
            assert runtime.live == set()

    asyncio.run(live())


def test_a_preempted_command_is_warned_and_reported_as_such(tmp_path: Path) -> None:
    async def story(pool: Pool, desk: Desk) -> None:
        await desk.grant(command("wait", grace=Span(60_000_000)), [Lease(1, 1), Lease(2, 1)])
        await desk.until(lambda: any(isinstance(item, Started) for item in desk.items))
        await desk.say(Stop((Hold(1, 1), Hold(2, 1)), StopReason.PREEMPTED))
        await desk.until(lambda: {1, 2} <= desk.ends().keys())
        ended = desk.ends()[1]
        assert isinstance(ended, Finished)
        assert ended.reason is EndReason.PREEMPTED
        assert desk.ends()[2] == HandedBack(2, 1)

    living(tmp_path, story)


def test_an_owner_who_wants_the_machine_back_gets_it(tmp_path: Path) -> None:
    async def story(pool: Pool, desk: Desk) -> None:
        await desk.grant(command("wait"), [Lease(1, 1)])
        await desk.until(lambda: any(isinstance(item, Started) for item in desk.items))
        pool.offer = replace(OFFER, closed="its owner is using it")
        pool.reclaim = (ReclaimAsked(None, "its owner took the machine back"),)
        await desk.until(lambda: 1 in desk.ends())
        ended = desk.ends()[1]
        assert isinstance(ended, Finished)
        assert (ended.reason, ended.error_text) == (
            EndReason.PREEMPTED,
            "its owner took the machine back",
        )
        assert desk.offers[-1].closed == "its owner is using it"
        await desk.grant(command("hello"), [Lease(2, 1)])
        await desk.until(lambda: 2 in desk.ends())
        assert desk.ends()[2] == HandedBack(2, 1)

    living(tmp_path, story)
