"""A task that could not be started goes to another node; nodes rest for it by their own word or by several users' tasks, never by one's."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from gpool.core.ids import TaskId
from gpool.core.model import SECOND, EndReason, Fault, Permission
from gpool.core.reliability import FREE, MAX_BY_NODE, MAX_UNSTARTED
from gpool.server.scheduling.backoff import STARTED_AFTER
from gpool.server.store.operations.tasks import tasks
from gpool.wire.frames import (
    Finished,
    HandedBack,
    Lease,
    Released,
    Reports,
    Started,
    decode_from_agent,
    encode,
)
from tests.server.scheduling.gang_site import gang_spec, open_site
from tests.server.server_desk import Agent, Desk, an_offer, exited, returned

pytestmark = pytest.mark.anyio

WHY = "the sandbox did not start: no such thing"


def failed(lease: Lease, fault: Fault | None = None) -> Finished:
    """As an agent says it; without a fault, as one of an earlier version does."""
    return Finished(
        lease.task, lease.epoch, EndReason.SANDBOX_FAILED, 125, error_text=WHY, fault=fault
    )


class Crew:
    """Agents that answer what they are given: black holes fail all of it, the others carry it to its end."""

    def __init__(self, desk: Desk, fault: Fault | None = None) -> None:
        self.desk, self.fault = desk, fault
        self.holes: list[Agent] = []
        self.good: list[Agent] = []
        self.answered: dict[int, int] = {}

    def _new(self, agent: Agent) -> list[Lease]:
        before = self.answered.get(id(agent), 0)
        leases = agent.leases()
        self.answered[id(agent)] = len(leases)
        return leases[before:]

    async def turn(self) -> int:
        """A pass, and the answers to it; how many leases there were."""
        await self.desk.schedule()
        count = 0
        for agent in self.holes:
            for lease in self._new(agent):
                count += 1
                await agent.report(failed(lease, self.fault))
        for agent in self.good:
            for lease in self._new(agent):
                count += 1
                await agent.report(Started(lease.task, lease.epoch), exited(lease))
        return count

    async def until_idle(self, most: int = 500) -> None:
        for _ in range(most):
            if not await self.turn():
                return
        raise AssertionError(f"still busy after {most} turns")


async def document(desk: Desk, name: str, **headers: Any) -> dict[str, Any]:
    answer = await desk.get(f"/v1/tasks/{name}", **headers)
    found: dict[str, Any] = answer.json()
    return found


async def commands_of(
    desk: Desk, headers: dict[str, str], count: int = 1, **members: Any
) -> list[str]:
    wanted = {"command": ["true"], **members}
    found = []
    for _ in range(count):
        answer = await desk.post("/v1/tasks", wanted, headers=headers)
        assert answer.status_code == 202, answer.text
        found += answer.json()["ids"]
    return found


def rests(desk: Desk, agent: Agent) -> bool:
    return agent.credentials.node in desk.server.nodes.backoff


@pytest.mark.parametrize("fault", [None, Fault.UNCLEAR, Fault.NODE, Fault.PART])
async def test_all_tasks_succeed_beside_a_black_hole(desk: Desk, fault: Fault | None) -> None:
    crew = Crew(desk, fault)
    crew.holes.append(await desk.agent("hole", an_offer(1)))  # where it fits best
    crew.good.append(await desk.agent("good", an_offer(8)))
    names = [await desk.command() for _ in range(30)]
    await crew.until_idle()
    told = [await document(desk, name) for name in names]
    assert [each["status"] for each in told] == ["succeeded"] * 30
    assert all(each["tries"] == 0 for each in told)


async def test_a_task_that_starts_nowhere_ends_with_the_real_reason(desk: Desk) -> None:
    crew = Crew(desk, Fault.UNCLEAR)
    crew.holes += [await desk.agent(f"n{number}", an_offer()) for number in range(5)]
    name = await desk.command()
    await crew.until_idle()
    told = await document(desk, name)
    assert (told["status"], told["reason"]) == ("failed", "sandbox_failed")
    assert WHY in told["error_text"]
    tried = [len(agent.leases()) for agent in crew.holes]
    assert sorted(tried) == [0, 0, 1, 1, 1]  # three nodes, each once
    assert not any(rests(desk, agent) for agent in crew.holes)


async def test_alone_a_node_is_tried_a_bounded_number_of_times(desk: Desk) -> None:
    crew = Crew(desk, Fault.UNCLEAR)
    crew.holes.append(await desk.agent("only", an_offer()))
    name = await desk.command()
    await crew.until_idle()
    told = await document(desk, name)
    assert (told["status"], told["reason"]) == ("failed", "sandbox_failed")
    assert len(crew.holes[0].leases()) == MAX_UNSTARTED


async def test_retries_are_further_tries(desk: Desk) -> None:
    crew = Crew(desk, Fault.UNCLEAR)
    crew.holes.append(await desk.agent("only", an_offer()))
    await desk.command(retries=2)
    await crew.until_idle()
    assert len(crew.holes[0].leases()) == MAX_UNSTARTED + 2


async def test_a_node_that_fails_by_its_own_word_rests_ever_longer(desk: Desk) -> None:
    crew = Crew(desk, Fault.NODE)
    hole = await desk.agent("only", an_offer())
    crew.holes.append(hole)
    name = await desk.command()
    given = []
    for _ in range(200):
        if (await document(desk, name))["status"] == "failed":
            break
        if await crew.turn():
            given.append(desk.clock.instant)
        desk.clock.advance(0.5)
    assert len(given) == MAX_BY_NODE
    pauses = [later - sooner for sooner, later in pairwise(given)]
    assert pauses == sorted(pauses)
    assert pauses[-1] > pauses[0] > 0
    told = await document(desk, name)
    assert told["reason"] == "sandbox_failed"
    assert WHY in told["error_text"]


async def test_no_single_consumer_makes_a_node_rest(desk: Desk) -> None:
    """However it does so: tasks that start nowhere, and tasks that start on some nodes and not on others."""
    crew = Crew(desk, Fault.UNCLEAR)
    victim = await desk.agent("victim", an_offer(1))
    other = await desk.agent("other", an_offer(8))
    crew.holes.append(victim)
    crew.good.append(other)
    mallory = await desk.person("mallory", Permission.CONSUMER)
    await commands_of(desk, mallory, 40)
    for _ in range(200):
        if not await crew.turn():
            break
        assert not rests(desk, victim)
    crew.holes, crew.good = [victim, other], []
    await commands_of(desk, mallory, 10)
    for _ in range(200):
        if not await crew.turn():
            break
        assert not rests(desk, victim)
        assert not rests(desk, other)


async def test_several_users_whose_bad_tasks_start_nowhere_make_no_node_rest(desk: Desk) -> None:
    crew = Crew(desk, Fault.UNCLEAR)
    crew.holes += [await desk.agent(f"n{number}", an_offer()) for number in range(4)]
    for number in range(4):
        await commands_of(desk, await desk.person(f"user{number}", Permission.CONSUMER), 3)
    for _ in range(200):
        if not await crew.turn():
            break
        assert not any(rests(desk, agent) for agent in crew.holes)


async def test_what_is_said_to_start_and_then_was_not_speaks_against_nobody(desk: Desk) -> None:
    """A sandbox may fail a moment after it was said to run: such a task starts nowhere, however it looks meanwhile."""
    agents = [await desk.agent(f"n{number}", an_offer()) for number in range(4)]
    for number in range(4):
        await commands_of(desk, await desk.person(f"user{number}", Permission.CONSUMER), 2)
    answered: dict[int, int] = {}
    for _ in range(100):
        await desk.schedule()
        fresh = [
            (agent, lease)
            for place, agent in enumerate(agents)
            for lease in agent.leases()[answered.get(place, 0) :]
        ]
        answered = {place: len(agent.leases()) for place, agent in enumerate(agents)}
        for agent, lease in fresh:
            await agent.report(Started(lease.task, lease.epoch))
            await agent.report(failed(lease, Fault.UNCLEAR))
            assert not any(rests(desk, each) for each in agents)
        if not fresh:
            break


async def test_what_runs_for_a_while_elsewhere_speaks_against_where_it_did_not_start(
    desk: Desk,
) -> None:
    """Long before it ends."""
    hole, good = await desk.agent("hole", an_offer(1)), await desk.agent("good", an_offer(8))
    for number, person in enumerate(("ann", "bob"), 1):
        await commands_of(desk, await desk.person(person, Permission.CONSUMER))
        await desk.schedule()
        await hole.report(failed(hole.leases()[-1], Fault.UNCLEAR))
        await desk.schedule()
        lease = good.leases()[number - 1]
        await good.report(Started(lease.task, lease.epoch))
    assert not rests(desk, hole)
    desk.clock.advance(STARTED_AFTER / SECOND)
    await desk.command()
    await desk.schedule()
    await good.report(exited(good.leases()[0]))
    assert rests(desk, hole)


async def test_a_node_where_two_users_tasks_fail_that_start_elsewhere_rests(desk: Desk) -> None:
    crew = Crew(desk, Fault.UNCLEAR)
    hole, good = await desk.agent("hole", an_offer(1)), await desk.agent("good", an_offer(8))
    crew.holes.append(hole)
    crew.good.append(good)
    for person in ("ann", "bob"):
        assert not rests(desk, hole)
        await commands_of(desk, await desk.person(person, Permission.CONSUMER))
        await crew.until_idle()
    assert rests(desk, hole)
    assert not rests(desk, good)
    told = (await desk.get("/v1/nodes")).json()
    (text,) = {node["name"]: node for node in told["items"]}["hole"]["problems"]
    assert "failed to start tasks" in text


async def test_what_carries_a_task_to_its_end_is_asked_again_sooner(desk: Desk) -> None:
    """One that was mended is used again, and its next rest is short."""
    crew = Crew(desk, Fault.NODE)
    hole = await desk.agent("hole", an_offer())
    crew.holes.append(hole)
    await desk.command()
    assert await crew.turn() == 1
    assert rests(desk, hole)
    crew.holes, crew.good = [], [hole]
    desk.clock.advance(600)
    assert await crew.turn() == 1
    assert not rests(desk, hole)
    assert not desk.server.nodes.backoff.is_any


async def test_a_part_that_is_out_of_order_costs_its_node_nothing_else(desk: Desk) -> None:
    """Such as a GPU that is not clean: the task goes elsewhere, and tasks that need no GPU still go there."""
    crew = Crew(desk, Fault.PART)
    crew.holes.append(await desk.agent("unclean", an_offer(2, gpus=1)))
    crew.good.append(await desk.agent("clean", an_offer(8, gpus=2)))
    name = await desk.command(gpu="1")
    await crew.until_idle()
    assert (await document(desk, name))["status"] == "succeeded"
    assert not rests(desk, crew.holes[0])


async def test_a_task_waits_for_another_node_rather_than_go_where_it_failed(desk: Desk) -> None:
    hole, good = await desk.agent("hole", an_offer(1)), await desk.agent("good", an_offer(2))
    blocker = await desk.command(cpus=2)
    await desk.schedule()
    assert len(good.leases()) == 1
    name = await desk.command()
    await desk.schedule()
    await hole.report(failed(hole.leases()[0], Fault.UNCLEAR))
    assert await desk.schedule() == 0  # good is busy, and does
    told = (await desk.get(f"/v1/tasks/{name}/explain")).json()
    assert "could not be started on hole" in told["sentence"]
    assert "another node" in told["sentence"]
    await good.report(exited(good.leases()[0]))
    assert (await document(desk, blocker))["status"] == "succeeded"
    assert await desk.schedule() == 1
    assert len(good.leases()) == 2


async def test_where_a_task_failed_is_known_after_a_new_picture(desk: Desk) -> None:
    hole = await desk.agent("hole", an_offer(1))
    await desk.command()
    await desk.schedule()
    await hole.report(failed(hole.leases()[0], Fault.UNCLEAR))
    good = await desk.agent("good", an_offer(8))
    desk.server.picture.invalidate()
    assert await desk.schedule() == 1
    assert len(good.leases()) == 1


async def test_what_ended_unseen_is_forgotten_with_the_next_picture(desk: Desk) -> None:
    """By another server, or by a caller that went away between commit and fold."""
    hole = await desk.agent("hole", an_offer(1))
    await desk.command()
    await desk.schedule()
    lease = hole.leases()[0]
    await hole.report(failed(lease, Fault.UNCLEAR))
    picture = desk.server.picture
    assert picture.nodes.failed_starts.is_any
    await desk.server.store.write(tasks.cancel([TaskId(lease.task)], None, desk.server.now))
    picture.invalidate()
    assert await desk.schedule() == 0
    assert not picture.nodes.failed_starts.is_any


async def test_a_task_lost_elsewhere_still_does_not_go_where_it_could_not_be_started(
    desk: Desk,
) -> None:
    hole = await desk.agent("hole", an_offer(1))
    good = await desk.agent("good", an_offer(8))
    await desk.command()
    await desk.schedule()
    await hole.report(failed(hole.leases()[0], Fault.UNCLEAR))
    await desk.schedule()
    lease = good.leases()[0]
    await good.report(
        Started(lease.task, lease.epoch), Finished(lease.task, lease.epoch, EndReason.LOST)
    )
    assert await desk.schedule() == 1
    assert len(good.leases()) == 2


async def test_a_sandbox_that_fails_while_the_task_runs_ends_it(desk: Desk) -> None:
    agent = await desk.agent("one", an_offer())
    name = await desk.command()
    await desk.schedule()
    lease = agent.leases()[0]
    await agent.report(Started(lease.task, lease.epoch))
    await agent.report(failed(lease))
    assert (await document(desk, name))["status"] == "failed"


async def test_a_report_said_again_counts_once(desk: Desk) -> None:
    hole = await desk.agent("hole", an_offer())
    name = await desk.command()
    await desk.schedule()
    said = failed(hole.leases()[0], Fault.UNCLEAR)
    for _ in range(2 * MAX_UNSTARTED):
        await hole.report(said)
    assert (await document(desk, name))["status"] == "queued"


async def test_a_gang_of_which_one_cannot_be_started_goes_to_other_nodes(desk: Desk) -> None:
    site = await open_site(desk, "a", "b", "c")
    task = await site.submit(gang_spec(2))
    assert await desk.schedule() == 1
    there = [agent for agent in site.agents.values() if agent.leases()]
    hole, other = there
    await hole.report(failed(hole.leases()[0], Fault.NODE))
    await other.report(Released(task, 1))
    desk.clock.advance(600)  # rested
    assert await desk.schedule() == 1
    assert len(hole.leases()) == 1
    held = desk.server.picture.state.held[TaskId(task)]
    assert hole.credentials.node not in {part.node for part in (held, *held.members)}
    await site.is_sound()


@pytest.mark.parametrize("fault", list(Fault))
async def test_a_member_said_to_run_that_was_not_started_after_all_fails_no_gang(
    desk: Desk, fault: Fault
) -> None:
    site = await open_site(desk, "a", "b", "c")
    task = await site.submit(gang_spec(2))
    assert await desk.schedule() == 1
    hole, other = [agent for agent in site.agents.values() if agent.leases()]
    await hole.report(Started(task, 1))
    await hole.report(failed(hole.leases()[0], fault))
    await other.report(Released(task, 1))
    desk.clock.advance(600)  # rested
    assert await desk.schedule() == 1
    assert len(hole.leases()) == 1
    await site.is_sound()


async def test_the_story_of_a_task_names_what_failed(desk: Desk) -> None:
    hole = await desk.agent("hole", an_offer())
    name = await desk.command()
    await desk.schedule()
    await hole.report(failed(hole.leases()[0], Fault.NODE))
    told = (await desk.get(f"/v1/tasks/{name}/explain")).json()
    assert told["code"] == "resting"
    assert "could not be started on hole" in told["sentence"]
    story = await desk.get(f"/v1/tasks/{name}/events")
    assert story.status_code == 200
    assert "node_failed" in story.text


def test_an_older_agent_s_report_is_read_and_a_newer_one_s_is_by_an_older_server() -> None:
    lease = Lease(1, 1)
    frame = Reports(1, (failed(lease, Fault.NODE),))
    words = msgspec.msgpack.decode(encode(frame))
    (item,) = words[2]
    place = item.index("node")  # of the fault; later fields follow
    words[2] = [item[:place]]
    assert decode_from_agent(msgspec.msgpack.encode(words)) == Reports(1, (failed(lease),))
    words[2] = [[*item, "what comes next"]]
    assert decode_from_agent(msgspec.msgpack.encode(words)) == frame


async def test_calls_that_do_not_start_are_no_reason_for_a_node_to_rest(desk: Desk) -> None:
    """The first in line says so and the agent hands back the others: whoever sent them brought that about."""
    lent = await desk.agent("lent", an_offer(1))
    for number in range(3):  # such calls were short so far, so several stand in line
        await desk.calls(1)
        assert await desk.schedule() == 1
        desk.clock.advance(0.01)
        await lent.report(returned(lent.leases()[number]))
    for _ in range(2 * FREE):
        names = (await desk.calls(4)).json()["ids"]
        before = len(lent.leases())
        assert await desk.schedule() == 4
        head, *others = lent.leases()[before:]
        back = (HandedBack(each.task, each.epoch) for each in others)
        await lent.report(failed(head, Fault.UNCLEAR), *back)
        for name in names:
            assert (await desk.http.delete(f"/v1/tasks/{name}")).status_code < 300
    assert not rests(desk, lent)
    assert not desk.server.nodes.backoff.is_any
