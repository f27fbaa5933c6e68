"""Gangs at the desk: every member is told the same, whenever it comes, and the task ends once."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from gpool.core.ids import TaskId, decode, encode
from gpool.core.model import EndReason, OnLoss, TaskStatus
from gpool.server.scheduling.loops import ExpireNodes
from gpool.server.store.operations.tasks import tasks
from gpool.wire.frames import (
    Finished,
    Grants,
    HandedBack,
    Hold,
    LogChunk,
    OfferChanged,
    Recorded,
    Refused,
    Released,
    Started,
    StopReason,
    Welcome,
)
from tests.server.scheduling.gang_site import Site, ended, gang_spec, open_site, stops
from tests.server.server_desk import Desk, StoppedClock, open_desk

pytestmark = pytest.mark.anyio


@pytest.fixture
async def site(desk: Desk) -> Site:
    return await open_site(desk, "a", "b", "c")


async def test_every_member_is_told_its_rank_its_peers_and_one_secret(site: Site) -> None:
    task = await site.leased(gang_spec(3))
    members = site.members(task)
    assert len(members) == 3
    told = [site.line(agent, task).gang for agent in members]
    secrets = {each.secret for each in told if each is not None}
    assert len(secrets) == 1
    assert len(secrets.pop()) == 32
    peers = {each.peers for each in told if each is not None}
    assert peers == {tuple((agent.offer.address, 47000) for agent in members)}
    document = await site.document(task)
    assert (document["nodes"], document["status"]) == (3, "leased")
    assert [member["node_name"] for member in document["members"]] == [
        agent.credentials.name for agent in members
    ]
    assert document["node"] == document["members"][0]["node"]
    assert all(
        repr(each.secret)[2:12] not in repr(agent.sent)
        for each in told
        if each
        for agent in members
    )
    await site.is_sound()


async def test_a_gang_asked_for_by_the_route_is_told_of_by_the_route(site: Site) -> None:
    name = await site.desk.command(nodes=2, engine="torchrun", on_loss="end")
    assert (await site.desk.get(f"/v1/tasks/{name}")).json()["members"] == []
    assert await site.desk.schedule() == 1
    task = TaskId(decode("task", name))
    for agent in site.members(task):
        await agent.report(Started(task, 1))
    [listed] = (await site.desk.get("/v1/tasks")).json()["items"]
    assert [(member["rank"], member["status"]) for member in listed["members"]] == [
        (0, "running"),
        (1, "running"),
    ]
    assert listed["nodes"] == 2
    sentence = (await site.desk.get(f"/v1/tasks/{name}/explain")).json()["sentence"]
    first, second = (member["node_name"] for member in listed["members"])
    assert sentence == f"It runs on {first} (rank 0), {second} (rank 1)."
    for agent in site.members(task):
        await agent.report(Finished(task, 1, EndReason.EXITED, 0))
    sentence = (await site.desk.get(f"/v1/tasks/{name}/explain")).json()["sentence"]
    assert sentence == f"It completed on {first} (rank 0), {second} (rank 1): exited with code 0."


async def test_two_gangs_never_share_a_secret_or_a_port(site: Site) -> None:
    first, second = await site.leased(), await site.leased()
    shared = [a for a in site.members(first) if a in site.members(second)]
    assert shared
    one, other = (site.line(shared[0], task).gang for task in (first, second))
    assert one is not None
    assert other is not None
    assert one.secret != other.secret
    assert not set(one.peers) & set(other.peers)


async def test_the_secret_lies_sealed(site: Site, data: Path) -> None:
    task = await site.leased()
    gang = site.line(site.members(task)[0], task).gang
    assert gang is not None
    with closing(sqlite3.connect(data / "gpool.db")) as connection:
        [(kept,)] = connection.execute("SELECT secret_sealed FROM gangs").fetchall()
    assert gang.secret not in kept


async def test_a_member_that_comes_late_or_after_a_restart_is_told_the_same(
    site: Site, data: Path
) -> None:
    task = await site.submit()
    away = site.agents["b"]
    assert await site.desk.schedule() == 1
    first, second = site.members(task)
    told = site.line(second, task)
    await second.channel.close()
    again = second.again()
    await again.connect()
    assert [line for frame in again.frames(Grants) for line in frame.lines] == [told]
    other = await open_desk(data, site.desk.clock)
    anew = again.again(other.server)
    await anew.connect(Hold(12345, 1))
    assert [line for frame in anew.frames(Grants) for line in frame.lines] == [told]
    assert anew.frames(Welcome)[0].drop == (Hold(12345, 1),)
    assert away is not None
    await other.http.aclose()
    await other.server.store.close()
    assert first is not second


async def test_a_gang_whose_offers_changed_meanwhile_still_meets_at_one_place(site: Site) -> None:
    task = await site.leased()
    first, second = site.members(task)
    told = site.line(second, task).gang
    await first.channel.close()
    moved = first.again()
    moved.offer = replace(first.offer, address="10.9.9.9")
    await moved.connect()
    gang = site.line(moved, task).gang
    assert gang is not None
    assert told is not None
    assert gang.peers == told.peers


@pytest.mark.parametrize(
    ("offered", "link"),
    [(("direct", "wireguard"), "direct"), (("wireguard",), "wireguard"), ((), "relay")],
)
async def test_members_are_told_one_link_that_both_offered_when_they_were_leased(
    desk: Desk, offered: tuple[str, ...], link: str
) -> None:
    site = await open_site(desk, "a", "b")
    first, second = site.agents.values()
    for agent, links in ((first, {"direct", "wireguard"}), (second, offered)):
        await agent.channel.receive(OfferChanged(replace(agent.offer, gang_links=frozenset(links))))
    task = await site.leased()
    told = [site.line(agent, task).gang for agent in (first, second)]
    assert [each.link for each in told if each is not None] == [link, link]
    await first.channel.close()
    again = first.again()
    again.offer = replace(first.offer, gang_links=frozenset())  # meanwhile its owner changed it
    await again.connect()
    gang = site.line(again, task).gang
    assert gang is not None
    assert gang.link == link


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_two_members_run_and_end(site: Site, order: tuple[int, int]) -> None:
    task = await site.running()
    assert await site.words(task) == ("running", ["running", "running"])
    await site.is_sound()
    members = site.members(task)
    await members[order[0]].report(ended(task))
    assert (await site.words(task))[0] == "running"
    await site.is_sound()
    for _ in range(3):  # who has let go does not name it any more, and is left in peace
        assert not isinstance(await members[order[0]].send_beat(), Refused)
    await members[order[1]].report(ended(task))
    assert await site.words(task) == ("succeeded", ["exited", "exited"])
    assert all(stops(agent) == [] for agent in members)
    await site.is_sound()
    assert not site.desk.server.picture.state.held


async def test_one_fails_and_the_others_are_stopped(site: Site) -> None:
    task = await site.running(gang_spec(3))
    first, second, third = site.members(task)
    await second.report(LogChunk(task, 1, 0, 2, b"no such file\n"), ended(task, 3))
    assert stops(first) == stops(third) == [StopReason.CANCELLED]
    assert stops(second) == []
    assert (await site.words(task))[0] == "running"
    await first.report(Released(task, 1))
    await third.report(Released(task, 1))
    document = await site.document(task)
    assert (document["status"], document["exit_code"]) == ("failed", 3)
    assert document["error_text"] == "rank 1: exited with code 3"
    log = await site.desk.get(f"/v1/tasks/{encode('task', task)}/logs")
    assert [item["text"] for item in log.json()["items"]] == ["[1] no such file\n"]
    await site.is_sound()


async def test_one_is_lost_the_gang_forms_anew_and_ends(site: Site) -> None:
    task = await site.running()
    first, second = site.members(task)
    await site.lose(second)
    assert stops(first) == [StopReason.PREEMPTED]
    assert (await site.words(task))[0] == "running"
    await site.is_sound()
    await first.report(Finished(task, 1, EndReason.PREEMPTED))
    assert (await site.words(task)) == ("queued", [])
    assert await site.desk.schedule() == 1
    document = await site.document(task)
    assert (document["epoch"], document["losses"]) == (2, 1)
    again = [agent for agent in site.members(task) if agent is not second]
    assert len(again) == 2
    old = second.again()
    await old.connect(Hold(task, 1))
    assert old.frames(Welcome)[0].drop == (Hold(task, 1),)
    assert await old.report(ended(task)) == Recorded(1, (Hold(task, 1),))
    for agent in again:
        await agent.report(ended(task, epoch=2))
    assert (await site.words(task))[0] == "succeeded"
    story = (await site.desk.get(f"/v1/tasks/{encode('task', task)}/events")).json()
    assert [(event["event"], event["epoch"]) for event in story] == [
        ("queued", 0),
        ("leased", 1),
        ("started", 1),
        ("lost", 1),
        ("leased", 2),
        ("started", 2),
        ("succeeded", 2),
    ]
    assert "rank 1 was lost with its node" in story[3]["text"]
    await site.is_sound()


async def test_an_agent_started_anew_has_lost_its_member(site: Site) -> None:
    task = await site.running()
    first, second = site.members(task)
    await second.channel.close()
    await second.again().connect()
    assert stops(first) == [StopReason.PREEMPTED]
    await first.report(Finished(task, 1, EndReason.PREEMPTED))
    assert (await site.document(task))["losses"] == 1


async def test_a_gang_that_asks_to_end_then_does(site: Site) -> None:
    task = await site.running(gang_spec(on_loss=OnLoss.END))
    first, second = site.members(task)
    await site.lose(second)
    assert stops(first) == [StopReason.CANCELLED]
    await first.report(Released(task, 1))
    document = await site.document(task)
    assert (document["status"], document["reason"]) == ("failed", "lost")
    assert "on_loss=end" in document["error_text"]


async def test_a_member_that_is_handed_back_takes_the_gang_back(site: Site) -> None:
    task = await site.leased()
    first, second = site.members(task)
    await second.report(HandedBack(task, 1))
    assert stops(first) == [StopReason.PREEMPTED]
    await first.report(HandedBack(task, 1))
    assert (await site.words(task))[0] == "queued"
    assert await site.desk.schedule() == 1
    await site.is_sound()


# ---- cancel, preempt


async def test_a_cancel_waits_for_the_member_that_has_not_confirmed(site: Site) -> None:
    task = await site.running()
    first, second = site.members(task)
    await second.channel.close()
    answer = await site.desk.http.delete(f"/v1/tasks/{encode('task', task)}")
    assert answer.status_code < 300
    assert stops(first) == [StopReason.CANCELLED]
    await first.report(Released(task, 1))
    assert len(site.desk.server.picture.state.held) == 1
    await site.is_sound()
    again = second.again()
    await again.connect(Hold(task, 1))
    assert stops(again) == [StopReason.CANCELLED]
    await again.report(Released(task, 1))
    assert not site.desk.server.picture.state.held
    assert (await site.words(task))[0] == "cancelled"
    await site.is_sound()


async def test_all_members_are_asked_to_make_room_even_one_that_is_away(site: Site) -> None:
    task = await site.running(gang_spec(checkpoint="state/"))
    first, second = site.members(task)
    await second.channel.close()
    path = f"/v1/tasks/{encode('task', task)}/preempt"
    assert (await site.desk.post(path)).status_code == 200
    assert stops(first) == [StopReason.PREEMPTED]
    await first.report(ended(task, 1))  # its peer does not answer any more
    again = second.again()
    await again.connect(Hold(task, 1))
    assert stops(again) == [StopReason.PREEMPTED]
    await again.report(Finished(task, 1, EndReason.PREEMPTED))
    document = await site.document(task)
    assert (document["status"], document["tries"]) == ("queued", 0)
    assert (await site.desk.post(path)).status_code == 409
    await site.is_sound()


async def test_a_member_that_was_away_is_told_that_it_is_over(site: Site) -> None:
    task = await site.running()
    first, second = site.members(task)
    await second.channel.close()
    await first.report(ended(task, 4))
    again = second.again()
    await again.connect(Hold(task, 1))
    assert stops(again) == [StopReason.CANCELLED]
    await again.report(Released(task, 1))
    assert (await site.document(task))["exit_code"] == 4


async def test_draining_one_node_asks_the_whole_gang(site: Site) -> None:
    task = await site.running(gang_spec(preemptible=True))
    first, second = site.members(task)
    node = encode("node", second.credentials.node)
    answer = await site.desk.http.put(f"/v1/admin/cordons/{node}", json={"drain": True})
    assert (answer.status_code, answer.json()["preempted"]) == (200, 1), answer.text
    assert stops(first) == stops(second) == [StopReason.PREEMPTED]


# ---- secrets that do not open


async def test_a_gang_whose_secrets_do_not_open_fails_at_once(site: Site, data: Path) -> None:
    task = await site.submit(None, TOKEN="x")
    with closing(sqlite3.connect(data / "gpool.db")) as connection, connection:
        connection.execute("UPDATE task_secrets SET sealed = x'00'")
    await site.desk.schedule()
    document = await site.document(task)
    assert (document["status"], document["reason"]) == ("failed", "bad_input")
    assert not site.desk.server.picture.state.held
    await site.is_sound()


async def test_a_member_that_cannot_be_told_the_gangs_secret_ends_it(
    site: Site, data: Path
) -> None:
    task = await site.leased()
    first, second = site.members(task)
    with closing(sqlite3.connect(data / "gpool.db")) as connection, connection:
        connection.execute("UPDATE gangs SET secret_sealed = x'00'")
    again = second.again()
    await again.connect()
    assert again.leases() == []
    assert stops(first) == [StopReason.CANCELLED]
    await first.report(Released(task, 1))
    assert (await site.document(task))["reason"] == "bad_input"


async def test_keys_are_changed_under_a_gang(site: Site) -> None:
    task = await site.leased()
    second = site.members(task)[1]
    told = site.line(second, task)
    server = site.desk.server
    await server.write(server.sealer.rotation(server.now))

    async def pause() -> None: ...

    assert await server.sealer.rekey(pause) >= 1
    again = second.again()
    await again.connect()
    assert [line for frame in again.frames(Grants) for line in frame.lines] == [told]


# ---- the server goes and comes


async def test_a_server_that_comes_back_goes_on_with_a_gang(desk: Desk, data: Path) -> None:
    site = await open_site(desk, "a", "b")
    task = await site.running()
    first, second = site.members(task)
    await first.report(ended(task))
    later = await open_desk(data, StoppedClock())
    later.clock.instant = desk.clock.instant
    site = Site(later, {})
    await later.schedule()
    assert len(later.server.picture.state.held) == 1
    anew = second.again(later.server)
    await anew.connect(Hold(task, 1))
    assert anew.frames(Welcome)[0].drop == ()
    await anew.report(ended(task))
    assert (await site.words(task))[0] == "succeeded"
    assert not later.server.picture.state.held
    await later.http.aclose()
    await later.server.store.close()


async def test_a_node_that_never_comes_back_after_a_restart_is_given_up(
    desk: Desk, data: Path
) -> None:
    site = await open_site(desk, "a", "b")
    task = await site.running()
    first, _ = site.members(task)
    later = await open_desk(data, StoppedClock())
    later.clock.instant = desk.clock.instant
    await later.schedule()
    anew = first.again(later.server)
    await anew.connect(Hold(task, 1))
    later.clock.advance(20)
    await anew.send_beat(Hold(task, 1))
    later.clock.advance(20)
    await ExpireNodes(later.server).run_once(later.server.now)
    assert stops(anew) == [StopReason.PREEMPTED]
    await anew.report(Finished(task, 1, EndReason.PREEMPTED))
    found = await later.server.store.read(tasks.task(task, None))
    assert found is not None
    assert (found.row.status, found.row.losses) == (TaskStatus.QUEUED, 1)
    await later.http.aclose()
    await later.server.store.close()


async def test_what_is_granted_to_a_node_just_given_up_is_given_up_in_time(site: Site) -> None:
    """The plan is made, then a node expires, then the plan is written: nobody waits for that node for ever."""
    server, clock = site.desk.server, site.desk.clock
    task, expire = await site.submit(gang_spec(3)), ExpireNodes(server)
    clock.advance(31 * 86_400)  # the sealer's key is worn: the plan waits for a new one
    granted, _ = await asyncio.gather(site.desk.schedule(), expire.run_once(server.now))
    assert granted == 1
    assert "leased" in (await site.words(task))[1], "one expired before it was written"
    clock.advance(server.settings.ttl_s + 1)
    await expire.run_once(server.now)
    assert await site.words(task) == ("queued", [])
