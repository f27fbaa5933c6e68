"""What a node finds out about itself when it could not start something, and what it then says of it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import cloudpickle
import pytest

from gpool.agent.app import MonitorLoop, run_agent
from gpool.agent.runtime.bubblewrap.runtime import BubblewrapRuntime
from gpool.agent.runtime.protocol import (
    CommandJob,
    CommandSandbox,
    GpuShare,
    PartFailed,
    RunnerJob,
    RunnerSandbox,
    SandboxFailed,
)
from gpool.agent.runtime.registry import AGAIN_AFTER_US, RuntimeSelfCheck
from gpool.agent.services import NodeServices
from gpool.agent.state_machine.instructions import (
    CommandEnded,
    OfferDetected,
    RunnerEnded,
    StartRunner,
)
from gpool.core.model import EndReason, Fault, Gpu, Offer, Requirements, Slice, TaskKind, TaskSpec
from gpool.testing.fake_runtime import FakeRun, FakeRuntime
from gpool.wire.frames import Finished, HandedBack, Lease
from tests.agent.desk import Desk, settings_for
from tests.agent.state_machine.state_case import Case, function, of
from tests.tools.runtimes import PATIENCE_S, using

OWN_PYTHON = f"3.{sys.version_info.minor}"
OFFER = Offer(2000, 1 << 30, 1 << 30)
RUNS = {("hello",): FakeRun(), ("/bin/true",): FakeRun()}


def values_in(folder: Path) -> Path:
    values = folder / "values"
    values.mkdir()
    return values


class Frail(FakeRuntime):
    """Does not start what `refuses`; `broken`, it starts nothing at all."""

    def __init__(self, folder: Path, refuses: str = "", *, broken: bool = False) -> None:
        super().__init__(values_in(folder), RUNS)
        self.refuses, self.broken = refuses, broken
        self.trials = 0

    async def start_command(self, job: CommandJob) -> CommandSandbox:
        self.trials += job.argv == ("/bin/true",)
        if self.broken or job.argv[0] == self.refuses:
            raise SandboxFailed("no namespaces left")
        return await super().start_command(job)

    async def start_runner(self, job: RunnerJob) -> RunnerSandbox:
        if self.broken or self.refuses:
            raise SandboxFailed("no namespaces left")
        return await super().start_runner(job)


class Unclean:
    """Seats on a GPU that is not clean."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    @contextlib.asynccontextmanager
    async def seat(self, _user: int, _slices: Sequence[Slice], /) -> AsyncIterator[GpuShare | None]:
        raise PartFailed("GPU 0 is not clean: another's memory is on it")
        yield


def said(
    tmp_path: Path, runtime: FakeRuntime, spec: TaskSpec, seats: Unclean | None = None
) -> Finished:
    """What becomes of one task of this spec on a whole agent."""

    async def live() -> Finished:
        stop = asyncio.Event()
        async with Desk() as desk:
            settings = settings_for(desk, tmp_path)
            means = NodeServices([runtime], gpu_shares=seats)
            agent = asyncio.create_task(
                run_agent(settings, means, OFFER, stop=stop, random=Random(1))
            )
            await desk.until(lambda: desk.hellos)
            if spec.kind is TaskKind.FUNCTION:
                desk.keep(cloudpickle.dumps(len))
            await desk.grant(spec, [Lease(1, 1)], slices=(Slice(0, 1, 1000),) if seats else ())
            await desk.until(lambda: 1 in desk.ends())
            stop.set()
            async with asyncio.timeout(PATIENCE_S):
                await agent
            end = desk.ends()[1]
            assert isinstance(end, Finished)
            return end

    return asyncio.run(live())


def a_command() -> TaskSpec:
    return TaskSpec(TaskKind.COMMAND, "hello", command=("hello",))


def a_function() -> TaskSpec:
    return TaskSpec(
        TaskKind.FUNCTION, "f", Requirements(python=OWN_PYTHON), function_sha256="a" * 64
    )


@pytest.mark.parametrize("spec", [a_command(), a_function()])
def test_a_node_that_can_start_nothing_says_that_it_is_its_own_fault(
    tmp_path: Path, spec: TaskSpec
) -> None:
    end = said(tmp_path, Frail(tmp_path, broken=True), spec)
    assert (end.reason, end.fault) == (EndReason.SANDBOX_FAILED, Fault.NODE)
    assert "no namespaces left" in end.error_text


@pytest.mark.parametrize("spec", [a_command(), a_function()])
def test_a_node_that_can_start_other_things_says_that_it_is_unclear(
    tmp_path: Path, spec: TaskSpec
) -> None:
    end = said(tmp_path, Frail(tmp_path, refuses="hello"), spec)
    assert (end.reason, end.fault) == (EndReason.SANDBOX_FAILED, Fault.UNCLEAR)


def test_a_gpu_that_is_not_clean_is_a_part_out_of_order_and_nothing_else_is_looked_at(
    tmp_path: Path,
) -> None:
    runtime = Frail(tmp_path)
    end = said(tmp_path, runtime, a_command(), Unclean())
    assert (end.reason, end.fault) == (EndReason.SANDBOX_FAILED, Fault.PART)
    assert "not clean" in end.error_text
    assert runtime.trials == 0


def test_what_a_node_lends_no_more_is_said_before_the_task_that_failed_for_it(
    tmp_path: Path,
) -> None:
    """Or the server would give it the same again."""
    closed = replace(OFFER, gpus=(Gpu(0, "GPU-0", "A10G", "nvidia", 1, closed="not clean"),))

    async def live() -> None:
        stop = asyncio.Event()
        looks: list[Offer] = []  # one at the start, and none by the clock

        def look() -> tuple[OfferDetected, ...]:
            looks.append(OFFER if not looks else closed)
            return (OfferDetected(looks[-1]),)

        async with Desk() as desk:
            agent = asyncio.create_task(
                run_agent(
                    settings_for(desk, tmp_path),
                    NodeServices([Frail(tmp_path)], gpu_shares=Unclean()),
                    OFFER,
                    stop=stop,
                    random=Random(1),
                    survey=look,
                    survey_every_s=3600,
                )
            )
            await desk.until(lambda: desk.hellos)
            await desk.grant(a_command(), [Lease(1, 1)], slices=(Slice(0, 1, 1000),))
            told = []

            def has_ended() -> bool:
                if 1 in desk.ends() and not told:
                    told.extend(desk.offers)
                return bool(told) or 1 in desk.ends()

            await desk.until(has_ended)
            assert [offer.gpus[0].closed for offer in told] == ["not clean"]
            stop.set()
            async with asyncio.timeout(PATIENCE_S):
                await agent

    asyncio.run(live())


def test_all_that_ask_at_once_for_another_look_share_one() -> None:
    """Or whatever else is to be noticed about the machine would wait behind one for each task that failed."""
    looks: list[int] = []

    def look() -> tuple[()]:
        looks.append(1)
        return ()

    async def live() -> None:
        looking = MonitorLoop(look, None)
        await asyncio.gather(*(looking.survey_now() for _ in range(20)))
        assert len(looks) == 1
        await looking.survey_now()
        assert len(looks) == 2

    asyncio.run(live())


def test_a_command_that_runs_and_fails_has_no_fault(tmp_path: Path) -> None:
    end = said(tmp_path, FakeRuntime(values_in(tmp_path)), a_command())
    assert (end.reason, end.exit_code, end.fault) == (EndReason.EXITED, 127, None)


def test_it_looks_seldom_and_once_for_all_that_ask_at_once(tmp_path: Path) -> None:
    now = [0]
    runtime = Frail(tmp_path)
    checkup = RuntimeSelfCheck(lambda: now[0])

    async def ask(count: int) -> set[Fault]:
        return set(await asyncio.gather(*(checkup.fault(runtime) for _ in range(count))))

    async def live() -> None:
        assert await ask(5) == {Fault.UNCLEAR}
        assert runtime.trials == 1
        runtime.broken = True
        now[0] = AGAIN_AFTER_US - 1
        assert await ask(5) == {Fault.UNCLEAR}
        now[0] = AGAIN_AFTER_US
        assert await ask(5) == {Fault.NODE}
        assert runtime.trials == checkup.checks == 2

    asyncio.run(live())
    assert runtime.live == set()


def test_a_trial_that_takes_long_is_made_once_for_all_that_wait_for_it(tmp_path: Path) -> None:
    """One after the other they would wait for half an hour, and their tasks with them."""
    now = [0]

    class Slow(Frail):
        async def start_command(self, job: CommandJob) -> CommandSandbox:
            await asyncio.sleep(0)  # the others ask meanwhile
            now[0] += 3 * AGAIN_AFTER_US
            return await super().start_command(job)

    checkup, runtime = RuntimeSelfCheck(lambda: now[0]), Slow(tmp_path)

    async def live() -> None:
        await asyncio.gather(*(checkup.fault(runtime) for _ in range(5)))

    asyncio.run(live())
    assert checkup.checks == 1


def test_a_trial_that_takes_too_long_says_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    runtime = FakeRuntime(values_in(tmp_path), {("/bin/true",): FakeRun(waits=True)})
    checkup = RuntimeSelfCheck(lambda: 0, within_s=0.01)
    assert asyncio.run(checkup.fault(runtime)) is Fault.UNCLEAR
    assert runtime.live == set()


def test_a_start_that_was_given_up_for_taking_too_long_says_nothing_either(tmp_path: Path) -> None:
    """Runtimes have a patience of their own; a machine that is busy is not broken for that."""

    class Busy(FakeRuntime):
        async def start_command(self, job: CommandJob) -> CommandSandbox:
            try:
                raise TimeoutError
            except TimeoutError as silent:
                raise SandboxFailed("the launcher did not start within 20 s") from silent

    assert asyncio.run(RuntimeSelfCheck(lambda: 0).fault(Busy(tmp_path))) is Fault.UNCLEAR


def test_a_real_bwrap_is_well_and_one_that_starts_nothing_is_not(tmp_path: Path) -> None:
    async def look(runtime: BubblewrapRuntime) -> Fault:
        return await RuntimeSelfCheck(lambda: 0, within_s=PATIENCE_S).fault(runtime)

    assert using("bubblewrap", tmp_path / "well", look) is Fault.UNCLEAR
    broken = tmp_path / "bwrap"
    broken.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1\n"
    )
    broken.chmod(0o755)

    async def live() -> Fault:
        runtime = BubblewrapRuntime(tmp_path / "broken", bwrap=str(broken))
        try:
            return await look(runtime)
        finally:
            await runtime.close()

    assert asyncio.run(live()) is Fault.NODE


# ---- the session


@pytest.fixture
def case() -> Iterator[Case]:
    case = Case()
    case.welcome()
    yield case
    assert case.state.violations() == []


@pytest.mark.parametrize("fault", [Fault.NODE, Fault.PART])
def test_a_runner_that_cannot_start_here_is_not_tried_again_here(case: Case, fault: Fault) -> None:
    case.grant(function(), 1, 2)
    out = case.feed(RunnerEnded(1, EndReason.SANDBOX_FAILED, 125, "broken", fault=fault))
    assert of(StartRunner, out) == []
    first, second = case.take_reports()
    assert isinstance(first, Finished)
    assert (first.task, first.fault) == (1, fault)
    assert isinstance(second, HandedBack)


def test_an_environment_that_cannot_be_made_is_the_function_s_own_fault(case: Case) -> None:
    case.grant(function(), 1)
    out = case.feed(RunnerEnded(1, EndReason.BAD_INPUT, 125, "no such package"))
    assert of(StartRunner, out) == []
    (end,) = case.take_reports()
    assert isinstance(end, Finished)
    assert (end.reason, end.fault) == (EndReason.BAD_INPUT, None)
    assert "no such package" in end.error_text


def test_a_runner_that_never_starts_says_at_last_that_it_did_not(case: Case) -> None:
    case.grant(function(), 1)
    for runner in (1, 2, 3):
        case.feed(RunnerEnded(runner, EndReason.SANDBOX_FAILED, 125, "odd", fault=Fault.UNCLEAR))
    (end,) = case.take_reports()
    assert isinstance(end, Finished)
    assert (end.reason, end.fault) == (EndReason.SANDBOX_FAILED, Fault.UNCLEAR)


def test_what_a_command_s_keeper_found_out_is_reported(case: Case) -> None:
    case.grant(TaskSpec(TaskKind.COMMAND, "c", command=("c",)), 1)
    case.feed(CommandEnded(1, 1, EndReason.SANDBOX_FAILED, 125, "odd", 5, fault=Fault.NODE))
    (end,) = case.take_reports()
    assert isinstance(end, Finished)
    assert end.fault is Fault.NODE
