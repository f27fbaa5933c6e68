"""A desk with agents of one site, for tests of gangs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gpool.core.ids import BatchId, SpecId, TaskId, UserId, decode, encode
from gpool.core.model import EndReason, Requirements, TaskKind, TaskSpec
from gpool.server.identity.sealer import secret_place
from gpool.server.scheduling.loops import ExpireNodes
from gpool.server.store.operations.tasks import submissions
from gpool.server.store.operations.tasks.submissions import NewTask, Submission, SubmittedTasks
from gpool.wire.frames import Beat, Finished, Grants, Line, Started, Stop, StopReason
from tests.server.server_desk import Agent, Desk, an_offer

TTL_S = 31


def gang_spec(count: int = 2, **options: Any) -> TaskSpec:
    wanted = Requirements(nodes=count)
    return TaskSpec(TaskKind.COMMAND, "gang", wanted, ("true",), **options)


@dataclass
class Site:
    """Agents of one site, and gangs on them."""

    desk: Desk
    agents: dict[str, Agent]

    async def submit(self, spec: TaskSpec | None = None, **secrets: str) -> TaskId:
        server = self.desk.server
        me = (await self.desk.get("/v1/me")).json()["id"]
        spec_id, task = SpecId(server.ids.next()), TaskId(server.ids.next())
        spec = replace(spec or gang_spec(), secrets=tuple(secrets))
        sealed = [
            (name, await server.sealer.seal(secret_place(spec_id, name), value.encode()))
            for name, value in secrets.items()
        ]
        wanted = Submission(
            BatchId(server.ids.next()),
            True,
            True,
            spec_id,
            spec,
            UserId(decode("user", me)),
            [NewTask(task, 0)],
            server.now,
            secrets=sealed,
        )
        [done] = await server.write(submissions.submit([wanted]))
        assert isinstance(done, SubmittedTasks)
        server.picture.add_submission(done, wanted)
        return task

    async def leased(self, spec: TaskSpec | None = None) -> TaskId:
        task = await self.submit(spec)
        assert await self.desk.schedule() == 1
        return task

    async def running(self, spec: TaskSpec | None = None) -> TaskId:
        task = await self.leased(spec)
        for agent in self.members(task):
            await agent.report(Started(task, 1))
        return task

    def line(self, agent: Agent, task: TaskId) -> Line:
        """The last it was told of the gang."""
        *_, last = (
            line
            for frame in agent.frames(Grants)
            for line in frame.lines
            if line.leases[0].task == task
        )
        return last

    def members(self, task: TaskId) -> list[Agent]:
        """By rank, of those that were told."""
        told = {}
        for agent in self.agents.values():
            if any(lease.task == task for lease in agent.leases()):
                line = self.line(agent, task)
                assert line.gang is not None
                told[line.gang.rank] = agent
        return [told[rank] for rank in sorted(told)]

    async def document(self, task: TaskId) -> dict[str, Any]:
        answer = await self.desk.get(f"/v1/tasks/{encode('task', task)}")
        found: dict[str, Any] = answer.json()
        return found

    async def words(self, task: TaskId) -> tuple[str, list[str]]:
        found = await self.document(task)
        return found["status"], [member["status"] for member in found["members"]]

    async def lose(self, agent: Agent) -> None:
        """Its node falls silent for good; the others beat on."""
        await agent.channel.close()
        self.desk.clock.advance(TTL_S)
        for other in self.agents.values():
            if other is not agent and not other.channel.closed:
                other.beat += 1
                await other.channel.receive(Beat(other.beat, ()))
        await ExpireNodes(self.desk.server).run_once(self.desk.server.now)

    async def is_sound(self) -> None:
        """The state is what the store would give."""
        picture = self.desk.server.picture
        before = picture.state.truth()
        picture.invalidate()
        await picture.rebuild(self.desk.server.now)
        assert picture.state.truth() == before


def lab_offer(number: int, **options: Any) -> Any:
    return replace(an_offer(**options), site="lab", address=f"10.0.0.{number}", gang_port=47000)


async def open_site(desk: Desk, *names: str, connect: bool = True) -> Site:
    agents = {}
    for number, name in enumerate(names, 1):
        agents[name] = await desk.node(name, lab_offer(number))
        if connect:
            await agents[name].connect()
    return Site(desk, agents)


def ended(task: TaskId, code: int = 0, epoch: int = 1) -> Finished:
    return Finished(task, epoch, EndReason.EXITED, code, duration_us=1000)


def stops(agent: Agent) -> list[StopReason]:
    return [frame.reason for frame in agent.frames(Stop)]
