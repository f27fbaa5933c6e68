"""Warm sandboxes at work: prepared for nobody, handed out once, with the promises of one that was started for its user."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import pickle
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from gpool.agent.running.artifact_cache import ArtifactCache
from gpool.agent.running.runner_executor import RunnerExecutor
from gpool.agent.running.sandboxes import ExecutorContext, warm_key_of
from gpool.agent.running.warm_sandboxes import WarmPoolManager, available_memory
from gpool.agent.runtime.protocol import (
    PreparedEnvironment,
    RunnerJob,
    SandboxFailed,
    SandboxLimits,
)
from gpool.agent.runtime.runner_calls import PYTHON
from gpool.agent.state_machine.instructions import (
    CallAnswered,
    CallsAnswered,
    Event,
    RunnerCall,
    RunnerEnded,
    StartRunner,
)
from gpool.core.model import (
    GIB,
    Allocation,
    EndReason,
    Network,
    Offer,
    Recipe,
    Requirements,
    TaskKind,
    TaskSpec,
    Tier,
)
from tests.agent.runtime.test_runtime_environments import environment
from tests.tools.runtimes import PATIENCE_S, Caller, using

cloudpickle.register_pickle_by_value(sys.modules[__name__])
both = pytest.mark.parametrize("kind", ["bubblewrap", "fake"])
EARLY = "wave"
OFFER = Offer(2000, 8 * GIB, GIB)
ALLOCATION = Allocation(0, 1000, 256 << 20)
SPEC = TaskSpec(
    TaskKind.FUNCTION,
    "f",
    Requirements(python=PYTHON, disk_bytes=64 << 20),
    function_sha256="0" * 64,
    preload=(EARLY,),
)


class Stage:
    """An agent's sandboxes without the agent: runners are started by hand, what they report is kept."""

    def __init__(self, runtime: Any, folder: Path, environments: Any = None) -> None:
        self.runtime = runtime
        self.functions: dict[str, bytes] = {}
        self.events: list[Event] = []
        self.numbers = 0
        self.warm = WarmPoolManager([runtime], environments, self.clock, lambda: 64 * GIB)
        self.warm.offered(OFFER)
        self.equipment = ExecutorContext(
            [runtime],
            ArtifactCache(folder / "cache", self.download, GIB),
            None,  # type: ignore[arg-type]  # nothing large comes back
            folder,
            self.events.append,
            self.clock,
            environments=environments,
            warm=self.warm,
        )
        self.runners: dict[int, RunnerExecutor] = {}

    def clock(self) -> int:
        return 1_000_000

    async def download(self, sha256: str, into: Path, *_: object, **__: object) -> None:
        await asyncio.to_thread(into.write_bytes, self.functions[sha256])

    def start(
        self, user: int, spec: TaskSpec = SPEC, secrets: tuple[tuple[str, str], ...] = ()
    ) -> int:
        self.numbers += 1
        start = StartRunner(self.numbers, user, False, spec, ALLOCATION, secrets)
        self.runners[self.numbers] = RunnerExecutor(self.equipment, start)
        return self.numbers

    async def call(
        self, runner: int, function: Callable[..., object], *args: object
    ) -> CallAnswered:
        pickled = cloudpickle.dumps(function)
        sha256 = hashlib.sha256(pickled).hexdigest()
        self.functions[sha256] = pickled
        self.numbers += 1
        task = self.numbers
        self.runners[runner].send((RunnerCall(task, 1, sha256, pickle.dumps((args, {})), ""),))

        def answered() -> list[CallAnswered]:
            batches = [e.answers for e in self.events if isinstance(e, CallsAnswered)]
            return [answer for batch in batches for answer in batch if answer.task == task]

        await self.until(answered)
        return answered()[0]

    async def ready(self, count: int = 1) -> list[Any]:
        """Until that many sandboxes are warm; which they are."""
        kept = self.warm._ready
        await self.until(lambda: len(kept) == count)
        return [warmed.sandbox for warmed in kept.values()]

    async def end(self, runner: int) -> RunnerEnded:
        self.runners[runner].end()
        await asyncio.wait([self.runners[runner].task])
        await self.until(lambda: not self.equipment.cleaning)
        return next(e for e in self.events if isinstance(e, RunnerEnded) and e.runner == runner)

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():  # noqa: ASYNC110 - a keeper tells nobody
                await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def stage_of(runtime: Any, folder: Path, environments: Any = None) -> AsyncIterator[Stage]:
    stage = Stage(runtime, folder, environments)
    keeping = asyncio.create_task(stage.warm.run())
    try:
        yield stage
    finally:
        for runner in stage.runners:
            if not stage.runners[runner].task.done():
                await stage.end(runner)
        keeping.cancel()
        await asyncio.wait([keeping])
        assert stage.warm._ready == {}
        assert stage.warm._pool.entries == {}, "what the keeper ended, the pool has forgotten"


def staged(
    kind: str, folder: Path, story: Callable[[Stage], Any], environments: Any = None
) -> None:
    async def whole(runtime: Any) -> None:
        async with stage_of(runtime, folder, environments) as stage:
            await story(stage)
        if kind == "fake":
            assert runtime.live == set(), "a sandbox outlived its keeper"

    (folder / "data").mkdir()
    using(kind, folder / "data", whole)


def whoami(name: str) -> tuple[str | None, int, str]:
    mark = Path("/tmp/mark")
    found = mark.read_text() if mark.exists() else ""
    return os.environ.get(name), os.getppid(), found


def value(answer: CallAnswered) -> Any:
    assert not answer.raised, answer.error_text
    return pickle.loads(answer.value)


@both
def test_the_second_user_gets_a_sandbox_that_was_ready(kind: str, tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        first = stage.start(1)
        assert value(await stage.call(first, len, "ab")) == 2
        (warmed,) = await stage.ready()
        second = stage.start(2)
        assert value(await stage.call(second, len, "abc")) == 3
        assert warmed._assigned if kind == "bubblewrap" else warmed.variables == ()
        (another,) = await stage.ready()
        assert another is not warmed, "the next one is another sandbox"

    staged(kind, tmp_path, story)


def test_secrets_arrive_with_their_user_and_stay_with_it(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.call(stage.start(1), len, "")
        await stage.ready()
        ana = stage.start(2, secrets=(("KEY", "ana's"),))
        said, parent, _ = value(await stage.call(ana, whoami, "KEY"))
        assert said == "ana's"
        await stage.ready()
        bob = stage.start(3)
        said, others, _ = value(await stage.call(bob, whoami, "KEY"))
        assert said is None
        assert (parent, others) == (2, 2), "each the first of its own namespace"

    staged("bubblewrap", tmp_path, story)


@both
def test_one_that_was_used_is_destroyed(kind: str, tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.call(stage.start(1), len, "")
        (warmed,) = await stage.ready()
        user = stage.start(2)
        await stage.call(user, len, "")
        ended = await stage.end(user)
        assert ended.reason is EndReason.EXITED
        assert (await warmed.ended()).exit_code == 137
        assert all(other is not warmed for other in await stage.ready())

    staged(kind, tmp_path, story)


@both
def test_memory_is_given_back_when_a_lease_needs_it(kind: str, tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.call(stage.start(1), len, "")
        (warmed,) = await stage.ready()
        stage.warm.lease_began("somebody", OFFER.memory_bytes)
        await stage.ready(0)
        await stage.until(lambda: not stage.warm._pool.entries)
        assert (await warmed.ended()).exit_code == 137
        stage.warm.lease_ended("somebody")
        await stage.ready(1)

    staged(kind, tmp_path, story)


@both
def test_a_closed_machine_keeps_none(kind: str, tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.call(stage.start(1), len, "")
        await stage.ready()
        stage.warm.offered(replace(OFFER, closed="its owner is using it"))
        await stage.ready(0)
        await stage.until(lambda: not stage.warm._pool.entries)

    staged(kind, tmp_path, story)


@both
def test_one_that_died_is_noticed_and_replaced(kind: str, tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        await stage.call(stage.start(1), len, "")
        (warmed,) = await stage.ready()
        await warmed.kill()
        await stage.until(lambda: warmed not in [w.sandbox for w in stage.warm._ready.values()])
        (other,) = await stage.ready()
        assert other is not warmed
        assert value(await stage.call(stage.start(2), len, "abc")) == 3

    staged(kind, tmp_path, story)


class OneEnvironment:
    """An environment that lies ready, and how many stand on it."""

    def __init__(self, prepared: PreparedEnvironment) -> None:
        self.prepared = prepared
        self.held = 0

    @contextlib.asynccontextmanager
    async def prepare(
        self,
        name: str,
        recipe: Recipe | None,
        said: Callable[[str], None],
        limits: SandboxLimits | None,
        /,
    ) -> AsyncIterator[PreparedEnvironment]:
        assert (name, recipe) == (SPECIAL.environment, SPECIAL.recipe)
        said("ready")
        self.held += 1
        try:
            yield self.prepared
        finally:
            self.held -= 1


SPECIAL = replace(
    SPEC, environment="pip:test", recipe=Recipe(packages=("special",)), preload=("special",)
)


def special() -> tuple[str, bool]:
    was_there = "special" in sys.modules
    import special as found  # type: ignore[import-not-found]  # noqa: PLC0415

    return found.WORD, was_there


def test_an_environment_stays_for_as_long_as_a_sandbox_stands_on_it(tmp_path: Path) -> None:
    made = OneEnvironment(environment(tmp_path / "env", "it is"))

    async def story(stage: Stage) -> None:
        first = stage.start(1, SPECIAL)
        assert value(await stage.call(first, special)) == ("it is", True)
        (warmed,) = await stage.ready()
        assert made.held == 2
        second = stage.start(2, SPECIAL)
        assert value(await stage.call(second, special)) == ("it is", True)
        assert warmed._assigned
        await stage.end(first)
        await stage.ready()
        assert made.held == 2, "the second user's and the next one's"
        await stage.end(second)
        assert made.held == 1

    staged("bubblewrap", tmp_path, story, made)
    assert made.held == 0


def test_one_that_cannot_be_prepared_costs_nobody_anything(tmp_path: Path) -> None:
    class Broken(OneEnvironment):
        @contextlib.asynccontextmanager
        async def prepare(self, *_: Any) -> AsyncIterator[PreparedEnvironment]:
            self.held += 1
            if self.held > 1:
                raise SandboxFailed("the disk is full")
            yield self.prepared

    made = Broken(environment(tmp_path / "env", "x"))

    async def story(stage: Stage) -> None:
        runner = stage.start(1, SPECIAL)
        await stage.until(lambda: made.held == 2 and not stage.warm._pool.entries)
        assert value(await stage.call(runner, special)) == ("x", True)
        assert made.held == 2, "it is not tried again at once"

    staged("bubblewrap", tmp_path, story, made)


@pytest.mark.parametrize(
    "spec",
    [
        replace(SPEC, preload=()),
        replace(SPEC, requirements=Requirements(network=Network.EGRESS)),
        replace(SPEC, recipe=Recipe(image="debian"), environment="image:debian"),
    ],
)
def test_what_cannot_be_prepared_for_nobody_is_started(spec: TaskSpec, tmp_path: Path) -> None:
    async def story(runtime: Any) -> None:
        assert warm_key_of(runtime, SPEC, ALLOCATION) is not None
        assert warm_key_of(runtime, spec, ALLOCATION) is None

    using("fake", tmp_path, story)


def test_a_runtime_that_prepares_nothing_starts_every_one(tmp_path: Path) -> None:
    async def story(runtime: Any) -> None:
        assert warm_key_of(runtime, SPEC, ALLOCATION) is None
        assert runtime.tier is Tier.NONE

    using("process", tmp_path, story)


def swell(size: int) -> int:
    return len(bytearray(size).replace(b"\0", b"x"))


def test_the_job_s_own_limits_hold_once_it_is_assigned(tmp_path: Path) -> None:
    """Under the pool's limit the call would be killed, under the job's it is not, and past the job's it is again."""

    async def work(runtime: Any) -> None:
        if not runtime.groups.hierarchy.controllers >= {"memory"}:
            pytest.skip("no control group for memory here: the limit is set at the start")
        limits = SandboxLimits(2000, 400 << 20, disk_bytes=64 << 20)
        job = RunnerJob(PYTHON, (), (), limits, preload=(EARLY,))
        for assigned in (True, False):
            runner = await runtime.warm_runner(job, replace(limits, memory_bytes=64 << 20))
            assert 0 < runner.memory_used() <= 64 << 20
            if assigned:
                await runner.assign(())
            calling = Caller(runner)
            fits = await calling.call(swell, 100 << 20)
            assert (fits.ended is None) is assigned
            too_much = await calling.call(swell, 300 << 20)
            assert too_much.ended is not None
            assert too_much.ended.reason is EndReason.OUT_OF_MEMORY
            await runner.remove()

    using("bubblewrap", tmp_path, work)


def test_the_machine_s_own_memory_is_read() -> None:
    assert 0 < available_memory() < 1 << 50
