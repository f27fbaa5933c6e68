"""A member at work on its node: its lane, its variables, and whose outputs and checkpoint count."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from gpool.agent.daemon import boot_clock
from gpool.agent.network.policy import Egress, Gang
from gpool.agent.running.artifact_cache import ArtifactCache
from gpool.agent.running.command_executor import CommandExecutor
from gpool.agent.running.sandboxes import ExecutorContext, PolicyLimits, limits_of
from gpool.agent.runtime.protocol import CommandJob, CommandSandbox, SandboxNetwork
from gpool.agent.state_machine.instructions import (
    CommandCheckpointed,
    CommandEnded,
    Event,
    StartCommand,
)
from gpool.core.model import Allocation, EndReason, Network, Requirements, TaskKind, TaskSpec
from gpool.testing.fake_runtime import FakeRun, FakeRuntime
from gpool.transfer.requests import LeaseRef
from gpool.wire.frames import Rendezvous

PEERS = (("192.0.2.1", 47101), ("192.0.2.2", 47105))
SECRET = b"s" * 32


@dataclass
class Road:
    """Networks that remember what was asked of them."""

    asked: list[Egress | Gang] = field(default_factory=list)
    open_now: int = 0
    lane: SandboxNetwork = field(default_factory=lambda: SandboxNetwork((), "192.0.2.9"))
    dawdles: asyncio.Event | None = None
    closing: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> None: ...

    async def open(self, wants: Egress | Gang, /) -> Road:
        self.asked.append(wants)
        self.open_now += 1
        return self

    def report_to(self, say: Callable[[str], None], /) -> None: ...

    async def close(self) -> None:
        if self.dawdles is not None:
            self.closing.set()
            await self.dawdles.wait()
        self.open_now -= 1


class Seeing(FakeRuntime):
    networks = frozenset(Network)
    jobs: tuple[CommandJob, ...] = ()

    async def start_command(self, job: CommandJob) -> CommandSandbox:
        self.jobs = (*self.jobs, job)
        return await super().start_command(job)


@dataclass
class Shelf:
    uploads: list[str] = field(default_factory=list)

    async def upload(
        self, file: Path, sha256: str, size: int, lease: LeaseRef | None = None
    ) -> None:
        self.uploads.append(sha256)


SPEC = TaskSpec(
    TaskKind.COMMAND,
    "work",
    Requirements(nodes=2),
    command=("work",),
    env=(("MASTER_PORT", "7"),),
    outputs=("result",),
    checkpoint="state/",
)
FILES = {"result": b"42", "state/n": b"1"}


Meanwhile = Callable[[CommandExecutor], Awaitable[None]]


async def kept(
    folder: Path,
    rank: int,
    road: Road | None,
    *,
    allowed: PolicyLimits | None = None,
    exit_code: int = 0,
    meanwhile: Meanwhile | None = None,
) -> tuple[CommandEnded, Seeing, Shelf, Sequence[Event]]:
    for name in ("values", "scratch"):
        (folder / name).mkdir()
    runtime = Seeing(folder / "values", {("work",): FakeRun(exit_code=exit_code, files=FILES)})
    shelf, said = Shelf(), []

    async def nothing(sha256: str, target: Path, lease: LeaseRef) -> None:
        raise AssertionError("nothing is to be fetched")

    equipment = ExecutorContext(
        [runtime],
        ArtifactCache(folder / "artifacts", nothing),
        shelf,
        folder / "scratch",
        said.append,
        boot_clock,
        road,
        allowed=lambda: allowed or PolicyLimits(),
    )
    told = Rendezvous(rank, PEERS, SECRET)
    start = StartCommand(1, 1, SPEC, Allocation(0, 1000, 1 << 30), True, gang=told)
    keeper = CommandExecutor(equipment, start)
    if meanwhile is not None:
        await meanwhile(keeper)
    await asyncio.wait([keeper.task])
    if equipment.cleaning:
        await asyncio.wait(list(equipment.cleaning))
    await asyncio.sleep(0)
    [ended] = [event for event in said if isinstance(event, CommandEnded)]
    return ended, runtime, shelf, said


def test_a_member_runs_in_its_gangs_lane_and_the_lane_is_closed_after_it(tmp_path: Path) -> None:
    road = Road()
    ended, runtime, _, _ = asyncio.run(kept(tmp_path, 1, road))
    assert (ended.reason, ended.exit_code) == (EndReason.EXITED, 0)
    assert road.asked == [Gang(1, PEERS, SECRET)]
    assert road.open_now == 0
    [job] = runtime.jobs
    assert job.network is not None
    assert job.network.hosts == "10.211.0.1 rank0\n10.211.0.2 rank1 sandbox\n"
    told = dict(job.env)
    assert (told["GPOOL_RANK"], told["MASTER_ADDR"]) == ("1", "10.211.0.1")
    assert told["MASTER_PORT"] == "7"  # the task's own word
    assert job.limits.open_files == 65_536


def test_the_limit_of_processes_grows_with_the_processors() -> None:
    def processes(cpus: int, spec: TaskSpec = SPEC) -> int:
        return limits_of(spec, Allocation(0, cpus * 1000, 1 << 30)).processes

    alone = replace(SPEC, requirements=Requirements())
    assert processes(1) == processes(1, alone) == processes(4, alone)
    assert processes(64) == processes(64, alone) > 64 * 100


def test_outputs_are_the_first_members(tmp_path: Path) -> None:
    first, second = tmp_path / "0", tmp_path / "1"
    first.mkdir()
    second.mkdir()
    ended, _, shelf, _ = asyncio.run(kept(first, 0, Road()))
    assert [one.path for one in ended.outputs] == ["result"]
    assert len(shelf.uploads) == 1
    ended, _, shelf, _ = asyncio.run(kept(second, 1, Road()))
    assert (ended.outputs, shelf.uploads) == ((), [])


def test_the_checkpoint_is_the_first_members(tmp_path: Path) -> None:
    for rank, saves in ((0, 1), (1, 0)):
        folder = tmp_path / str(rank)
        folder.mkdir()
        _, _, _, said = asyncio.run(kept(folder, rank, Road(), exit_code=3))
        assert len([event for event in said if isinstance(event, CommandCheckpointed)]) == saves


@pytest.mark.parametrize(
    ("road", "allowed"), [(None, PolicyLimits()), (Road(), PolicyLimits(gangs=False))]
)
def test_a_node_that_takes_no_members_says_so_itself(
    tmp_path: Path, road: Road | None, allowed: PolicyLimits
) -> None:
    ended, runtime, _, _ = asyncio.run(kept(tmp_path, 0, road, allowed=allowed))
    assert ended.reason is EndReason.SANDBOX_FAILED
    assert "takes no members of gangs" in ended.error_text
    assert runtime.jobs == ()


def test_a_member_stopped_while_it_lets_go_always_closes_its_lane(tmp_path: Path) -> None:
    """It exits and is told to stop at the same time: its lane's port is the next gang's."""

    async def story() -> tuple[CommandEnded, Road]:
        road = Road(dawdles=asyncio.Event())

        async def stop_twice(keeper: CommandExecutor) -> None:
            await road.closing.wait()
            for reason in (EndReason.CANCELLED, EndReason.LOST):
                keeper.end(reason)
                await asyncio.wait([keeper.task], timeout=0.02)
            assert not keeper.task.done()
            assert road.dawdles is not None
            road.dawdles.set()

        ended, _, _, _ = await kept(tmp_path, 1, road, meanwhile=stop_twice)
        return ended, road

    ended, road = asyncio.run(story())
    assert ended.reason is EndReason.LOST
    assert road.open_now == 0
