"""One task from submission to result, over the real routes and the real channel.

Past 400 lines because the journey is one: its stories share the desk, and are read in its order.
"""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path

import msgspec
import pytest

from gpool.core.ids import TaskId, decode
from gpool.core.model import EndReason, Gpu, Offer, OutputFile
from gpool.server.scheduling.loops import ExpireNodes, PruneStore
from gpool.server.store.operations.tasks import tasks
from gpool.wire.frames import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    BeatSeen,
    Finished,
    Grants,
    HandedBack,
    Hello,
    Hold,
    LogChunk,
    Recorded,
    Refused,
    Released,
    Started,
    Stop,
    Welcome,
    encode,
)
from tests.server.server_desk import Desk, an_offer, calls_document, exited, open_desk, returned

pytestmark = pytest.mark.anyio
WAIT_S, WITHIN_S = 600, 240
"""A wait that is over by itself is no answer: what is waited for comes sooner, however busy the machine is."""


async def test_a_command_runs_from_submission_to_result(desk: Desk) -> None:
    agent = await desk.agent()
    task = await desk.command(name="hello")
    assert await desk.schedule() == 1
    [lease] = agent.leases()
    assert lease.task == decode("task", task)
    await agent.report(
        Started(lease.task, lease.epoch), LogChunk(lease.task, lease.epoch, 0, 1, b"42\n")
    )
    running = (await desk.get(f"/v1/tasks/{task}")).json()
    assert (running["status"], running["status_text"]) == ("running", "processing")
    recorded = await agent.report(exited(lease, 7))
    assert recorded == Recorded(2)
    ended = (await desk.get(f"/v1/tasks/{task}")).json()
    assert (ended["status"], ended["exit_code"], ended["node_name"]) == ("failed", 7, "bench")
    result = (await desk.get(f"/v1/tasks/{task}/result")).json()
    assert (result["reason"], result["exit_code"]) == ("exited", 7)
    logs = (await desk.get(f"/v1/tasks/{task}/logs")).json()
    assert [item["text"] for item in logs["items"]] == ["42\n"]
    assert logs["ended"] is True
    assert (await desk.get(f"/v1/tasks/{task}/result")).json()["sequence"] == 1
    events = [event["event"] for event in (await desk.get(f"/v1/tasks/{task}/events")).json()]
    assert events == ["queued", "leased", "started", "failed"]


async def test_results_of_a_batch_come_in_the_order_of_ending(desk: Desk) -> None:
    agent = await desk.agent()
    submitted = (await desk.calls(3)).json()
    while await desk.schedule():
        for lease in reversed(agent.leases()):
            await agent.report(returned(lease, b"of %d" % lease.task))
    answer = await desk.get(f"/v1/batches/{submitted['batch']}/results")
    lines = [json.loads(line) for line in answer.text.splitlines() if line]
    assert [line["sequence"] for line in lines] == [1, 2, 3]
    assert {line["id"] for line in lines} == set(submitted["ids"])
    assert {line["status"] for line in lines} == {"succeeded"}
    rest = await desk.get(f"/v1/batches/{submitted['batch']}/results?after=2")
    assert [json.loads(line)["sequence"] for line in rest.text.splitlines()] == [3]


async def test_a_stream_of_results_goes_on_while_the_batch_is_open(busy_desk: Desk) -> None:
    desk = busy_desk
    agent = await desk.agent(offer=an_offer(cpus=8))
    first = (await desk.calls(2, more=True)).json()
    reading = asyncio.create_task(desk.get(f"/v1/batches/{first['batch']}/results"))
    await agent.finish(2)
    await desk.calls(2, batch=first["batch"], more=True)
    await agent.finish(4)
    assert not reading.done()
    closing = await desk.post("/v1/tasks", calls_document(0, batch=first["batch"]))
    assert closing.json()["ids"] == []
    lines = [json.loads(line) for line in (await reading).text.splitlines() if line]
    assert [line["sequence"] for line in lines] == [1, 2, 3, 4]
    assert sorted(line["position"] for line in lines) == [0, 1, 2, 3]


async def test_a_submission_that_waits_answers_with_the_results(busy_desk: Desk) -> None:
    desk = busy_desk
    agent = await desk.agent()
    await desk.calls(1)
    asking = asyncio.create_task(desk.post(f"/v1/tasks?wait={WAIT_S}", calls_document(2)))
    await agent.finish(3)
    async with asyncio.timeout(WITHIN_S):
        answer = await asking
    assert answer.status_code == 200
    assert [item["position"] for item in answer.json()] == [0, 1]
    assert {item["value"] for item in answer.json()} == {"dmFsdWU="}


async def test_a_submission_whose_wait_is_over_answers_with_ids(desk: Desk) -> None:
    answer = await desk.post("/v1/tasks?wait=0.01", {"command": ["true"]})
    assert answer.status_code == 202
    assert len(answer.json()["ids"]) == 1


async def test_waiting_for_a_task_ends_when_it_does(busy_desk: Desk) -> None:
    desk = busy_desk
    agent = await desk.agent()
    task = await desk.command()
    waiting = asyncio.create_task(desk.get(f"/v1/tasks/{task}/result?wait={WAIT_S}"))
    await agent.finish(1)
    async with asyncio.timeout(WITHIN_S):
        assert (await waiting).json()["status"] == "succeeded"
        again = await desk.get(f"/v1/tasks/{task}?wait={WAIT_S}")
    assert again.json()["status"] == "succeeded"


async def test_logs_are_followed_to_the_end(busy_desk: Desk) -> None:
    desk = busy_desk
    agent = await desk.agent()
    task = await desk.command()
    [lease] = await agent.granted(1)
    headers = {"accept": "text/event-stream"}
    following = asyncio.create_task(desk.get(f"/v1/tasks/{task}/logs", headers=headers))
    halves = "é".encode()
    await agent.report(
        Started(lease.task, lease.epoch), LogChunk(lease.task, lease.epoch, 0, 1, halves[:1])
    )
    await agent.report(LogChunk(lease.task, lease.epoch, 1, 1, halves[1:] + b"\n"))
    await agent.report(exited(lease))
    answer = await following
    assert answer.headers["content-type"].startswith("text/event-stream")
    every = answer.text.strip().split("\n\n")
    silent = ("event: progress", ": still here")
    events = [event for event in every if not event.startswith(silent)]
    assert events[-1].startswith("event: end")
    told = [json.loads(event.partition("data: ")[2]) for event in events[:-1]]
    assert "".join(item["text"] for item in told) == "é\n"
    last = events[-2].partition("\n")[0].removeprefix("id: ")
    again = await desk.get(f"/v1/tasks/{task}/logs", headers={**headers, "last-event-id": last})
    assert again.text.split("\n\n")[-2].startswith("event: end")
    assert '"text"' not in again.text


async def test_sealed_logs_read_as_before(desk: Desk) -> None:
    agent = await desk.agent()
    task = await desk.command()
    await desk.schedule()
    [lease] = agent.leases()
    await agent.report(
        Started(lease.task, lease.epoch),
        LogChunk(lease.task, lease.epoch, 0, 1, b"out\n"),
        LogChunk(lease.task, lease.epoch, 1, 2, b"err\n"),
        exited(lease),
    )
    before = (await desk.get(f"/v1/tasks/{task}/logs")).json()
    await PruneStore(desk.server).run_once(desk.clock.advance(10))
    view = await desk.server.store.read(tasks.task(TaskId(lease.task), None))
    assert view is not None
    assert view.log_sha256
    assert (await desk.get(f"/v1/tasks/{task}/logs")).json() == before
    later = (await desk.get(f"/v1/tasks/{task}/logs?after={before['items'][0]['cursor']}")).json()
    assert [item["stream"] for item in later["items"]] == ["stderr"]


# ---- leases and fences


async def test_a_report_from_an_old_lease_is_refused(desk: Desk) -> None:
    agent = await desk.agent()
    task = await desk.command()
    await desk.schedule()
    [old] = agent.leases()
    await ExpireNodes(desk.server).run_once(desk.clock.advance(31))
    other = await desk.agent("other")
    await desk.schedule()
    [new] = other.leases()
    assert (new.task, new.epoch) == (old.task, old.epoch + 1)
    thawed = agent.again()
    await thawed.connect(Hold(old.task, old.epoch))
    [welcome] = thawed.frames(Welcome)
    assert welcome.drop == (Hold(old.task, old.epoch),)
    answer = await thawed.report(LogChunk(old.task, old.epoch, 0, 1, b"stale"), exited(old))
    assert isinstance(answer, Recorded)
    assert set(answer.refused) == {Hold(old.task, old.epoch)}
    assert (await desk.get(f"/v1/tasks/{task}")).json()["status"] == "leased"
    seen = await thawed.send_beat(Hold(old.task, old.epoch))
    assert isinstance(seen, BeatSeen)
    assert seen.drop == (Hold(old.task, old.epoch),)
    await other.report(exited(new))
    assert (await desk.get(f"/v1/tasks/{task}")).json()["status"] == "succeeded"


async def test_a_report_sent_twice_is_recorded_once_and_acknowledged_twice(desk: Desk) -> None:
    agent = await desk.agent()
    await desk.command()
    await desk.schedule()
    [lease] = agent.leases()
    assert await agent.report(exited(lease)) == Recorded(1)
    assert await agent.report(exited(lease)) == Recorded(2)


async def test_a_node_that_reconnects_gets_what_it_did_not_state(desk: Desk) -> None:
    agent = await desk.agent()
    await desk.command(copies=2)
    await desk.schedule()
    kept, lost = agent.leases()
    await agent.channel.close()
    again = agent.again()
    await again.connect(Hold(kept.task, kept.epoch), Hold(12345, 1))
    assert [type(frame) for frame in again.sent] == [Welcome, Grants]
    assert again.sent[0].drop == (Hold(12345, 1),)  # type: ignore[union-attr]
    assert again.leases() == [lost]
    assert len(again.frames(Grants)[0].specs) == 1


async def test_an_attempt_its_restarted_agent_forgot_never_runs_again_under_its_epoch(
    desk: Desk,
) -> None:
    agent = await desk.agent()
    task = await desk.command()
    await desk.schedule()
    [lease] = agent.leases()
    await agent.report(Started(lease.task, lease.epoch))
    await agent.channel.close()
    again = agent.again()
    await again.connect()
    assert again.leases() == []
    events = [event["event"] for event in (await desk.get(f"/v1/tasks/{task}/events")).json()]
    assert events == ["queued", "leased", "started", "lost"]
    await desk.schedule()
    [fresh] = again.leases()
    assert (fresh.task, fresh.epoch) == (lease.task, lease.epoch + 1)


async def test_a_hello_from_before_a_restart_never_ends_what_runs_now(desk: Desk) -> None:
    """World, seed 2829: it was seconds on its way, and the agent had been killed and started meanwhile."""
    agent = await desk.agent()
    await agent.channel.close()
    now = agent.again()
    await now.channel.receive(Hello(PROTOCOL, "boot-2", now.offer, 1, ()))
    task = await desk.command()
    await desk.schedule()
    [lease] = now.leases()
    await now.report(Started(lease.task, lease.epoch))
    late = agent.again()
    await late.channel.receive(Hello(PROTOCOL, "boot-1", late.offer, 9, ()))
    assert isinstance(late.sent[-1], Refused)
    assert not now.channel.closed
    assert (await desk.get(f"/v1/tasks/{task}")).json()["status"] == "running"


async def test_a_late_hello_is_refused_even_when_the_newer_connection_is_gone(desk: Desk) -> None:
    """World, seed 2570: the server had just closed the newer one."""
    agent = await desk.agent()
    late = agent.again()
    newer = late.again()
    await newer.connect()
    await newer.send_beat()
    await newer.channel.close()
    await late.connect()
    assert isinstance(late.sent[-1], Refused)
    again = newer.again()
    await again.connect()
    assert isinstance(again.sent[0], Welcome)


async def test_a_newer_connection_replaces_the_older(desk: Desk) -> None:
    agent = await desk.agent()
    newer = agent.again()
    await newer.connect()
    assert isinstance(agent.sent[-1], Refused)
    assert agent.channel.closed
    await agent.channel.close()
    await desk.command()
    assert await desk.schedule() == 1
    assert len(newer.leases()) == 1
    assert agent.leases() == []


async def test_a_beat_keeps_the_leases_of_a_node(desk: Desk) -> None:
    agent = await desk.agent()
    task = await desk.command()
    await desk.schedule()
    [lease] = agent.leases()
    expire = ExpireNodes(desk.server)
    for _ in range(5):
        await expire.run_once(desk.clock.advance(20))
        seen = await agent.send_beat(Hold(lease.task, lease.epoch))
        assert seen == BeatSeen(agent.beat)
    await expire.run_once(desk.clock.advance(29))
    assert (await desk.get(f"/v1/tasks/{task}")).json()["status"] == "leased"
    await expire.run_once(desk.clock.advance(2))
    assert (await desk.get(f"/v1/tasks/{task}")).json()["status"] == "queued"
    events = [event["event"] for event in (await desk.get(f"/v1/tasks/{task}/events")).json()]
    assert events == ["queued", "leased", "lost"]


async def test_a_node_that_knows_nothing_of_its_lease_is_made_to_say_hello_again(
    desk: Desk,
) -> None:
    agent = await desk.agent()
    await desk.command()
    await desk.schedule()
    assert isinstance(await agent.send_beat(), BeatSeen)  # the grant may be under way
    assert isinstance(await agent.send_beat(), BeatSeen)  # so soon: this one has waited for us
    desk.clock.advance(8)
    assert isinstance(await agent.send_beat(), Refused)
    again = agent.again()
    await again.connect()
    assert again.leases() == agent.leases()


async def test_after_a_restart_a_silent_node_has_a_whole_lease_time_again(
    desk: Desk, tmp_path: Path
) -> None:
    await desk.agent()
    task = await desk.command()
    await desk.schedule()
    await desk.server.store.close()
    desk.clock.advance(1000)
    twin = await open_desk(tmp_path / "data", desk.clock)
    try:
        expire = ExpireNodes(twin.server)
        await expire.run_once(desk.clock.advance(29))
        assert (await twin.get(f"/v1/tasks/{task}")).json()["status"] == "leased"
        await expire.run_once(desk.clock.advance(2))
        assert (await twin.get(f"/v1/tasks/{task}")).json()["status"] == "queued"
    finally:
        await twin.http.aclose()
        await twin.server.store.close()


async def test_a_restarted_server_takes_up_where_it_stopped(desk: Desk, tmp_path: Path) -> None:
    agent = await desk.agent()
    await desk.command(copies=5)
    await desk.schedule()
    truth = desk.server.picture.state
    await desk.server.store.close()
    twin = await open_desk(tmp_path / "data", desk.clock)
    try:
        await agent.again(twin.server).connect(*(Hold(x.task, x.epoch) for x in agent.leases()))
        assert twin.server.picture.state == truth
    finally:
        await twin.http.aclose()
        await twin.server.store.close()


async def test_the_folded_state_equals_one_built_from_the_store(desk: Desk) -> None:
    agent = await desk.agent(offer=an_offer(cpus=3, gpus=2))
    await desk.calls(20)
    await desk.command(copies=3, gpu=1)
    doomed = await desk.command(copies=2, priority=5)
    for _ in range(4):
        await desk.schedule()
        for lease in agent.leases()[:3]:
            await agent.report(returned(lease))
    await desk.http.delete(f"/v1/tasks/{doomed}")
    picture = desk.server.picture
    folded = picture.state
    assert not picture.is_stale
    await picture.rebuild(desk.server.now)
    assert picture.state == folded


# ---- cancelling


async def test_a_waiting_task_is_cancelled_at_once(desk: Desk) -> None:
    task = await desk.command()
    answer = await desk.http.delete(f"/v1/tasks/{task}")
    assert answer.json()["status"] == "cancelled"
    assert (await desk.http.delete(f"/v1/tasks/{task}")).json()["status"] == "cancelled"
    await desk.agent()
    assert await desk.schedule() == 0


async def test_a_cancelled_task_keeps_its_room_until_its_node_lets_go(desk: Desk) -> None:
    agent = await desk.agent(offer=an_offer(cpus=1))
    task = await desk.command()
    await desk.schedule()
    [lease] = agent.leases()
    await desk.http.delete(f"/v1/tasks/{task}")
    [stop] = agent.frames(Stop)
    assert stop.holds == (Hold(lease.task, lease.epoch),)
    await desk.command()
    assert await desk.schedule() == 0
    await agent.report(Released(lease.task, lease.epoch))
    assert await desk.schedule() == 1


async def test_a_cancelled_lease_is_only_released_by_the_agent_s_own_word(desk: Desk) -> None:
    agent = await desk.agent(offer=an_offer(cpus=1))
    task = await desk.command()
    await desk.schedule()
    await agent.channel.close()
    await desk.http.delete(f"/v1/tasks/{task}")
    again = agent.again()
    await again.connect()  # states nothing: it may be an old hello, long on its way
    assert again.leases() == []
    [stop] = again.frames(Stop)
    await desk.command()
    assert await desk.schedule() == 0
    [hold] = stop.holds
    await again.report(Released(hold.task, hold.epoch))
    assert await desk.schedule() == 1


async def test_a_hello_that_was_overtaken_by_a_newer_one_is_turned_away(desk: Desk) -> None:
    agent = await desk.agent()
    late, newer = agent.again(), agent.again()
    hello = Hello(PROTOCOL, "boot", an_offer(), 7, ())
    await newer.channel.receive(hello)
    await late.channel.receive(msgspec.structs.replace(hello, beat=6))
    assert [frame.retry for frame in late.frames(Refused)] == [True]
    assert newer.frames(Refused) == []
    assert desk.server.nodes.connection(newer.channel.node) is newer.channel


async def test_a_cancelled_lease_its_agent_states_is_stopped_on_connect(desk: Desk) -> None:
    agent = await desk.agent()
    task = await desk.command()
    await desk.schedule()
    [lease] = agent.leases()
    await agent.channel.close()
    await desk.http.delete(f"/v1/tasks/{task}")
    again = agent.again()
    await again.connect(Hold(lease.task, lease.epoch))
    assert again.frames(Welcome)[0].drop == ()
    assert again.frames(Stop)[0].holds == (Hold(lease.task, lease.epoch),)


async def test_cancelling_a_batch_ends_and_closes_it(desk: Desk) -> None:
    batch = (await desk.calls(3, more=True)).json()["batch"]
    answer = (await desk.http.delete(f"/v1/batches/{batch}")).json()
    assert (answer["done"], answer["total"], answer["closed"]) == (3, 3, True)
    more = await desk.post("/v1/tasks", calls_document(1, batch=batch))
    assert (more.status_code, more.json()["code"]) == (409, "conflict")
    lines = (await desk.get(f"/v1/batches/{batch}/results")).text.splitlines()
    assert [json.loads(line)["status"] for line in lines] == ["cancelled"] * 3


async def test_a_lease_handed_back_goes_to_the_next_in_line(desk: Desk) -> None:
    agent = await desk.agent()
    await desk.command()
    await desk.schedule()
    [lease] = agent.leases()
    await agent.report(HandedBack(lease.task, lease.epoch))
    assert await desk.schedule() == 1
    assert agent.leases()[-1].epoch == lease.epoch + 1


# ---- what the server does not take from an agent


@pytest.mark.parametrize(
    "offer",
    [
        an_offer(cpus=-1),
        Offer(1000, 1 << 61, 0),
        Offer(1000, 0, 0, (Gpu(0, "a", "m", "v", 1), Gpu(0, "b", "m", "v", 1))),
        Offer(1000, 0, 0, (Gpu(0, "a", "m", "v", 1), Gpu(1, "a", "m", "v", 1))),
        Offer(1000, 0, 0, (Gpu(0, "a\0", "m", "v", 1),)),
        Offer(1000, 0, 0, hostname="x" * 1000),
    ],
)
async def test_an_offer_no_machine_makes_is_refused(desk: Desk, offer: Offer) -> None:
    agent = await desk.node(offer=offer)
    await agent.connect()
    assert isinstance(agent.sent[-1], Refused)
    assert agent.channel.closed


async def test_the_first_frame_must_be_hello(desk: Desk) -> None:
    agent = await desk.node()
    await agent.report()
    assert isinstance(agent.sent[-1], Refused)


@pytest.mark.parametrize("name", ["\0", "../" * 20, "A" * 64])
async def test_an_end_that_names_no_artifact_fails_its_task(desk: Desk, name: str) -> None:
    """PostgreSQL keeps no NUL: what cannot be written makes the scheduler doubt its whole picture, each time it comes."""
    agent = await desk.agent()
    for more in ({"value_sha256": name}, {"outputs": (OutputFile("out", name, 1),)}):
        task = await desk.command()
        await desk.schedule()
        lease = agent.leases()[-1]
        await agent.report(Finished(lease.task, lease.epoch, EndReason.EXITED, 0, **more))
        ended = (await desk.get(f"/v1/tasks/{task}")).json()
        assert (ended["status"], ended["reason"]) == ("failed", EndReason.BAD_OUTPUT)


async def test_a_value_too_large_to_be_inline_fails_its_task(desk: Desk) -> None:
    agent = await desk.agent()
    task = await desk.command()
    await desk.schedule()
    [lease] = agent.leases()
    await agent.report(returned(lease, b"x" * 100_000))
    ended = (await desk.get(f"/v1/tasks/{task}")).json()
    assert (ended["status"], ended["reason"]) == ("failed", EndReason.BAD_OUTPUT)


async def test_grants_with_large_payloads_are_spread_over_frames(desk: Desk) -> None:
    agent = await desk.agent(offer=an_offer(cpus=100))
    await desk.calls(1)
    big = base64.b64encode(b"x" * 65536).decode()
    document = {**calls_document(0), "calls": [big] * 90}
    assert (await desk.post("/v1/tasks", document)).status_code == 202
    await desk.schedule()
    assert len(agent.leases()) == 91
    assert len(agent.frames(Grants)) > 1
    assert all(len(encode(frame)) < MAX_FRAME_BYTES for frame in agent.frames(Grants))
