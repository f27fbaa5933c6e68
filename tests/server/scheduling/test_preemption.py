"""Phases, checkpoints and making room, over the real routes and the real channel."""

from __future__ import annotations

import hashlib

import pytest

from gpool.core.model import EndReason, InputFile, OutputFile, Permission, Phase
from gpool.server.actions.tasks.query import preempt_tasks
from gpool.server.nodes.reports import FILE_WIRE_BYTES
from gpool.server.scheduling.loops import PruneStore
from gpool.wire.frames import (
    MAX_FRAME_BYTES,
    MAX_SPEC_BYTES,
    Checkpointed,
    Finished,
    Hold,
    Lease,
    Reached,
    Recorded,
    Reports,
    Started,
    Stop,
    StopReason,
    encode,
)
from tests.server.server_desk import Agent, Desk, StoppedClock, exited, open_desk

pytestmark = pytest.mark.anyio
WEIGHTS = b"the weights after step 7"
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()


async def begun(desk: Desk, agent: Agent, **members: object) -> tuple[str, Lease]:
    """A task that runs on the agent's node."""
    task = await desk.command(**members)
    assert await desk.schedule() == 1
    lease = agent.leases()[-1]
    await agent.report(Started(lease.task, lease.epoch))
    return task, lease


async def saved(desk: Desk, agent: Agent, task: str, lease: Lease) -> None:
    """Its checkpoint, uploaded and told."""
    async with desk.http_of(agent, f"{task}:{lease.epoch}") as http:
        answer = await http.put(f"/v1/artifacts/{SHA256}", content=WEIGHTS)
        assert answer.status_code == 201, answer.text
    files = (OutputFile("state/weights", SHA256, len(WEIGHTS)),)
    done = await agent.report(Checkpointed(lease.task, lease.epoch, files))
    assert isinstance(done, Recorded)
    assert done.refused == ()


async def test_phases_are_shown_where_the_task_is_asked_about(desk: Desk) -> None:
    agent = await desk.agent()
    task = await desk.command()
    assert (await desk.get(f"/v1/tasks/{task}")).json()["phase"] is None
    await desk.schedule()
    [lease] = agent.leases()
    shown = []
    for report in (
        Reached(lease.task, 1, Phase.FETCH),
        Reached(lease.task, 1, Phase.BUILD),
        Started(lease.task, 1),
        Reached(lease.task, 1, Phase.COLLECT),
        exited(lease),
    ):
        desk.clock.advance(1)
        await agent.report(report)
        document = (await desk.get(f"/v1/tasks/{task}")).json()
        sentence = (await desk.get(f"/v1/tasks/{task}/explain")).json()["sentence"]
        shown.append((document["phase"], sentence))
    assert shown[:4] == [
        ("fetch", "It fetches its inputs on bench."),
        ("build", "It builds its environment on bench."),
        ("run", "It runs on bench."),
        ("collect", "It collects its outputs on bench."),
    ]
    assert shown[4][0] is None
    story = (await desk.get(f"/v1/tasks/{task}/events")).json()
    assert [event["event"] for event in story] == [
        "queued",
        "leased",
        "fetch",
        "build",
        "started",
        "collect",
        "succeeded",
    ]


async def test_a_preempted_task_goes_on_from_its_checkpoint_on_another_node(desk: Desk) -> None:
    agent = await desk.agent()
    task, lease = await begun(desk, agent, checkpoint="state/")
    answer = await desk.post(f"/v1/tasks/{task}/preempt")
    assert (answer.status_code, answer.json()["status"]) == (200, "running")
    assert agent.sent[-1] == Stop((Hold(lease.task, 1),), StopReason.PREEMPTED)
    await saved(desk, agent, task, lease)
    node = (await desk.get(f"/v1/tasks/{task}")).json()["node"]
    await desk.http.patch(f"/v1/nodes/{node}", json={"availability": "paused"})
    await agent.report(Finished(lease.task, 1, EndReason.PREEMPTED, 143))
    waiting = (await desk.get(f"/v1/tasks/{task}")).json()
    assert (waiting["status"], waiting["tries"], waiting["epoch"]) == ("queued", 0, 1)
    assert waiting["checkpoint"]["size_bytes"] == len(WEIGHTS)
    other = await desk.agent("other")
    assert await desk.schedule() == 1
    [again] = other.leases()
    file = InputFile("state/weights", SHA256, len(WEIGHTS))
    assert again == Lease(lease.task, 2, checkpoint=(file,))
    async with desk.http_of(other, f"{task}:2") as http:
        assert (await http.get(f"/v1/artifacts/{SHA256}")).content == WEIGHTS
    async with desk.http_of(agent, f"{task}:1") as http:
        assert (await http.get(f"/v1/artifacts/{SHA256}")).status_code == 404
    await other.report(exited(again))
    story = (await desk.get(f"/v1/tasks/{task}/events")).json()
    words = [(event["event"], event["epoch"]) for event in story]
    assert words[-1] == ("succeeded", 2)
    assert {("preempting", 1), ("checkpoint", 1), ("preempted", 1), ("leased", 2)} <= set(words)


async def test_a_node_that_reconnects_is_granted_the_checkpoint_again(desk: Desk) -> None:
    agent = await desk.agent()
    task, lease = await begun(desk, agent, checkpoint="state/")
    await saved(desk, agent, task, lease)
    await agent.report(Finished(lease.task, 1, EndReason.PREEMPTED))
    assert await desk.schedule() == 1
    anew = agent.again()
    await anew.connect()
    assert [one.checkpoint for one in anew.leases()] == [agent.leases()[-1].checkpoint]
    assert anew.leases()[0].checkpoint != ()


async def test_an_order_to_make_room_outlives_the_connection_and_the_server(desk: Desk) -> None:
    agent = await desk.agent()
    task, lease = await begun(desk, agent)
    await agent.channel.close()
    answer = await desk.post(f"/v1/tasks/{task}/preempt")
    assert answer.status_code == 200, answer.text
    hold = Hold(lease.task, 1)
    anew = agent.again()
    await anew.connect(hold)
    assert Stop((hold,), StopReason.PREEMPTED) in anew.sent
    second = await open_desk(desk.server.settings.data, StoppedClock())
    later = anew.again(second.server)
    await later.connect(hold)
    assert Stop((hold,), StopReason.PREEMPTED) in later.sent
    await second.server.store.close()


async def test_what_has_no_place_cannot_be_preempted(desk: Desk) -> None:
    task = await desk.command()
    answer = await desk.post(f"/v1/tasks/{task}/preempt")
    assert answer.status_code == 409
    assert "is waiting already" in answer.json()["detail"]
    agent = await desk.agent()
    await desk.schedule()
    await agent.report(exited(agent.leases()[0]))
    answer = await desk.post(f"/v1/tasks/{task}/preempt")
    assert answer.status_code == 409
    assert "has ended" in answer.json()["detail"]


async def test_only_operators_preempt_and_it_is_noted(desk: Desk) -> None:
    agent = await desk.agent()
    ada = await desk.person("ada", Permission.CONSUMER)
    made = await desk.post("/v1/tasks", {"command": ["true"]}, headers=ada)
    task = made.json()["ids"][0]
    await desk.schedule()
    refused = await desk.post(f"/v1/tasks/{task}/preempt", headers=ada)
    assert refused.status_code == 403
    assert agent.frames(Stop) == []
    assert (await desk.post(f"/v1/tasks/{task}/preempt")).status_code == 200
    noted = (await desk.get("/v1/audit")).json()["items"]
    assert [(one["action"], one["thing"]) for one in noted if one["thing"] == task] == [
        ("task.preempt", task)
    ]


async def test_a_scheduler_that_has_decided_makes_room_without_asking(desk: Desk) -> None:
    agent = await desk.agent()
    _, lease = await begun(desk, agent)
    done = await preempt_tasks(desk.server, [lease.task, 77])
    assert [hold for _, hold in done.to_preempt] == [Hold(lease.task, 1)]
    assert agent.sent[-1] == Stop((Hold(lease.task, 1),), StopReason.PREEMPTED)


@pytest.mark.parametrize(
    "paths",
    [
        ["../weights"],
        ["state/a", "state/A"],
        ["state/a", "state/a/b"],
        ["state/" + "x" * 300],
        ["weights"],
    ],
)
async def test_a_checkpoint_nobody_could_begin_with_is_left_out(
    desk: Desk, paths: list[str]
) -> None:
    agent = await desk.agent()
    task, lease = await begun(desk, agent, checkpoint="state/")
    await saved(desk, agent, task, lease)
    before = (await desk.get(f"/v1/tasks/{task}")).json()
    desk.clock.advance(1)
    files = tuple(OutputFile(path, SHA256, len(WEIGHTS)) for path in paths)
    done = await agent.report(Checkpointed(lease.task, 1, files))
    assert isinstance(done, Recorded)
    assert done.refused == ()
    assert (await desk.get(f"/v1/tasks/{task}")).json() == before


async def test_the_largest_checkpoint_that_is_taken_fits_into_a_grant(desk: Desk) -> None:
    agent = await desk.agent()
    members = {"checkpoint": "state/", "env": {"LONG": "x" * 100_000}}
    task, lease = await begun(desk, agent, **members)
    await saved(desk, agent, task, lease)
    name = "state/" + "é" * 60 + "/%d"
    most = MAX_SPEC_BYTES // (len((name % 10_000).encode()) + FILE_WIRE_BYTES)
    for count, taken in ((most + 100, False), (most, True)):
        files = tuple(OutputFile(name % n, SHA256, len(WEIGHTS)) for n in range(count))
        report = Reports(9, (Checkpointed(lease.task, 1, files),))
        assert len(encode(report)) < MAX_FRAME_BYTES
        await agent.channel.receive(report)
        shown = (await desk.get(f"/v1/tasks/{task}")).json()["checkpoint"]["files"]
        assert shown == (count if taken else 1)
    await agent.report(Finished(lease.task, 1, EndReason.PREEMPTED))
    anew = agent.again()
    await anew.connect()
    assert await desk.schedule() == 1
    [again] = anew.leases()
    assert len(again.checkpoint) == most
    assert all(len(encode(frame)) < MAX_FRAME_BYTES for frame in anew.sent)


async def test_a_checkpoint_is_kept_for_a_while_after_the_end(desk: Desk) -> None:
    agent = await desk.agent()
    task, lease = await begun(desk, agent, checkpoint="state/")
    await saved(desk, agent, task, lease)
    await agent.report(exited(lease))
    prune = PruneStore(desk.server)
    await prune.run_once(desk.server.now)
    assert (await desk.get(f"/v1/artifacts/{SHA256}")).status_code == 200
    desk.clock.advance(desk.server.settings.keep_checkpoints_s + 1)
    await prune.run_once(desk.server.now)
    assert (await desk.get(f"/v1/artifacts/{SHA256}")).status_code == 404
    assert (await desk.get(f"/v1/tasks/{task}")).json()["checkpoint"] is None


async def test_an_upload_is_not_spared_because_another_lease_shows_the_file(desk: Desk) -> None:
    agent = await desk.agent()
    first, lease = await begun(desk, agent, checkpoint="state/")
    await saved(desk, agent, first, lease)
    second, other = await begun(desk, agent, checkpoint="state/")
    async with desk.http_of(agent, f"{first}:1") as http:
        assert (await http.head(f"/v1/artifacts/{SHA256}")).status_code == 200
    async with desk.http_of(agent, f"{second}:1") as http:
        assert (await http.head(f"/v1/artifacts/{SHA256}")).status_code == 404
    await saved(desk, agent, second, other)
    assert (await desk.get(f"/v1/tasks/{second}")).json()["checkpoint"]["files"] == 1
