"""Environment, network and runtime of a command: there before it starts, gone after it, refused with a reason."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gpool.agent.network.policy import Egress
from gpool.agent.running.sandboxes import PolicyLimits
from gpool.agent.runtime.protocol import (
    CommandJob,
    CommandSandbox,
    PreparedEnvironment,
    Runtime,
    RuntimeAbility,
    SandboxFailed,
    SandboxLimits,
    SandboxNetwork,
)
from gpool.agent.state_machine.instructions import (
    CommandReached,
    CommandStarted,
)
from gpool.core.model import (
    EndReason,
    Network,
    Phase,
    Recipe,
    Requirements,
    Tier,
)
from gpool.testing.fake_runtime import FakeRun, FakeRuntime
from tests.agent.running.test_checkpoints import bench, spec


class Maker:
    """Environments that take their time, and tell of it."""

    def __init__(self, root: Path) -> None:
        self.root, self.live = root, 0

    @contextlib.asynccontextmanager
    async def prepare(
        self,
        name: str,
        recipe: Recipe | None,
        said: Callable[[str], None],
        limits: SandboxLimits | None,
    ) -> AsyncIterator[PreparedEnvironment]:
        assert recipe is not None
        said(f"building {name}")
        self.live += 1
        try:
            yield PreparedEnvironment(name, self.root, "/opt/gpool/env/bin/python")
        finally:
            self.live -= 1

    def ready(self) -> frozenset[str]:
        return frozenset()

    async def sweep(self) -> None: ...

    async def close(self) -> None: ...


class Road:
    """Networks that count the lanes that are open."""

    def __init__(self) -> None:
        self.open_now = 0
        self.lane = SandboxNetwork((), "192.0.2.1")

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def open(self, wants: Egress, /) -> Opened:
        assert wants == Egress()
        self.open_now += 1
        return Opened(self)


@dataclass(frozen=True)
class Opened:
    road: Road

    @property
    def lane(self) -> SandboxNetwork:
        return self.road.lane

    def report_to(self, say: Callable[[str], None], /) -> None:
        say("the name 'a.example' was not resolved")

    async def close(self) -> None:
        self.road.open_now -= 1


class Seeing(FakeRuntime):
    networks = frozenset(Network)
    jobs: tuple[CommandJob, ...] = ()

    async def start_command(self, job: CommandJob) -> CommandSandbox:
        self.jobs = (*self.jobs, job)
        return await super().start_command(job)


PIP = Recipe("3.11", ("numpy",))


def test_environment_and_network_are_there_for_the_sandbox_and_gone_after_it(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        maker, road = Maker(tmp_path), Road()
        seeing = Seeing(tmp_path / "values", {("work",): FakeRun(waits=True)})
        async with bench(tmp_path, runtime=seeing, networks=road, environments=maker) as at:
            wants = spec(
                environment="pip:1",
                recipe=PIP,
                requirements=Requirements(network=Network.EGRESS),
                checkpoint="",
            )
            keeper = at.start(wants)
            await at.until(lambda: at.of(CommandStarted))
            assert (maker.live, road.open_now) == (1, 1)
            (job,) = seeing.jobs
            assert (job.network, job.environment and job.environment.name) == (road.lane, "pip:1")
            assert "building pip:1" in at.printed()
            assert "[gpool: the name 'a.example' was not resolved]" in at.printed()
            told = [e.phase for e in at.said if isinstance(e, CommandReached)]
            assert told == [Phase.BUILD, Phase.START]
            keeper.end(EndReason.CANCELLED)
            await at.end()
            assert (maker.live, road.open_now) == (0, 0)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"environment": "pip:1", "recipe": PIP}, "pip:1"),
        ({"requirements": Requirements(network=Network.EGRESS)}, "network 'egress'"),
        ({"environment": "image:a", "recipe": Recipe(image="a")}, "image 'a'"),
        ({"requirements": Requirements(tier=Tier.VM)}, "tier 'vm'"),
    ],
)
def test_a_node_that_lacks_something_says_what(
    tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    async def story() -> None:
        async with bench(tmp_path, {("work",): FakeRun()}) as at:
            at.start(spec(**changes))
            ended = await at.end()
            assert ended.reason is EndReason.SANDBOX_FAILED
            assert says in ended.error_text

    asyncio.run(story())


def test_the_weakest_runtime_that_fits_is_taken_and_the_first_of_equals(tmp_path: Path) -> None:
    class Dockerlike(FakeRuntime):
        abilities = frozenset({RuntimeAbility.IMAGES})

    async def story() -> None:
        async with bench(tmp_path) as at:
            vm = FakeRuntime(tmp_path, tier=Tier.VM)
            first, second = FakeRuntime(tmp_path), FakeRuntime(tmp_path)
            images, bare = Dockerlike(tmp_path), FakeRuntime(tmp_path, tier=Tier.NONE)
            wired = Seeing(tmp_path)
            equipment = replace(at.equipment, runtimes=[vm, images, first, second, bare, wired])

            def chosen(owner: bool = False, **changes: object) -> Runtime:
                return equipment.runtime_for(spec(**changes), owner)

            assert chosen() is first
            assert chosen(requirements=Requirements(tier=Tier.VM)) is vm
            assert chosen(recipe=Recipe(image="a")) is images
            assert chosen(requirements=Requirements(network=Network.EGRESS)) is wired
            assert chosen(owner=True, requirements=Requirements(tier=Tier.NONE)) is bare
            with pytest.raises(SandboxFailed, match="owner"):
                chosen(requirements=Requirements(tier=Tier.NONE))
            with pytest.raises(SandboxFailed, match="image"):
                chosen(requirements=Requirements(tier=Tier.VM), recipe=Recipe(image="a"))
            # granted before the owner raised the floor
            equipment = replace(equipment, allowed=lambda: PolicyLimits(frozenset({Tier.VM})))
            assert chosen() is vm

    asyncio.run(story())


def test_egress_that_is_no_longer_given_is_refused_by_the_node_itself(tmp_path: Path) -> None:
    async def story() -> None:
        asks = spec(requirements=Requirements(network=Network.EGRESS))
        doors = {"networks": Road(), "allowed": lambda: PolicyLimits(egress=False)}
        async with bench(tmp_path, runtime=Seeing(tmp_path), **doors) as at:
            at.start(asks)
            assert "no network 'egress'" in (await at.end()).error_text

    asyncio.run(story())


def test_a_start_that_would_take_for_ever_ends_with_its_time(tmp_path: Path) -> None:
    class Pulling(FakeRuntime):
        abilities = frozenset({RuntimeAbility.CANCELLABLE_START})

        async def start_command(self, _job: CommandJob) -> CommandSandbox:
            await asyncio.Event().wait()
            raise AssertionError("nobody sets it")

    async def story() -> None:
        async with bench(tmp_path, runtime=Pulling(tmp_path / "values")) as at:
            keeper = at.start(spec())
            await asyncio.wait([keeper.task], timeout=0.05)
            keeper.end(EndReason.TIMED_OUT)
            assert (await at.end()).reason is EndReason.TIMED_OUT

    asyncio.run(story())
