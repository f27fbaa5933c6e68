"""Events on a real server: recorded for subscribers only, numbered, read by cursor and as a stream."""

from __future__ import annotations

import httpx2
import pytest

from gpool.server.store.operations.events import outbox
from gpool.wire.frames import Released, Started
from tests.server.events.events_desk import Post, leased, submitted, types
from tests.server.identity_routes.people_desk import joins, registered
from tests.server.server_desk import Desk, Live, an_offer, exited, returned
from tests.tools.processes import PATIENCE_S

pytestmark = pytest.mark.anyio


async def test_without_a_subscriber_nothing_is_recorded(desk: Desk) -> None:
    agent = await desk.agent()
    await submitted(desk)
    [lease] = await leased(desk, agent, 1)
    await agent.report(Started(lease.task, lease.epoch))
    await agent.report(returned(lease))
    assert not await desk.server.store.read(outbox.has_outbox())
    assert await types(desk) == []  # and this read subscribes
    assert desk.server.events.subscribers.holders


async def test_the_life_of_tasks_is_read_in_order(desk: Desk) -> None:
    await types(desk)
    agent, post = await desk.agent(), Post(desk)
    first = await submitted(desk)
    [lease] = await leased(desk, agent, 1)
    await agent.report(Started(lease.task, lease.epoch))
    await agent.report(Released(lease.task, lease.epoch))  # preempted
    [lease] = await leased(desk, agent, 1)
    await agent.report(Started(lease.task, lease.epoch))
    await agent.report(exited(lease, 3))
    second = await submitted(desk)
    assert (await desk.http.delete(f"/v1/tasks/{second['ids'][0]}")).status_code == 200
    await post.number()
    page = (await desk.get("/v1/events")).json()["items"]
    assert [(each["type"], each["data"]["task"]) for each in page] == [
        ("task.started", first["ids"][0]),
        ("task.preempted", first["ids"][0]),
        ("task.started", first["ids"][0]),
        ("task.failed", first["ids"][0]),
        ("task.cancelled", second["ids"][0]),
    ]
    failed = page[3]["data"]
    assert (failed["reason"], failed["exit_code"], failed["attempt"]) == ("exited", 3, 2)
    assert failed["node_name"]
    rest = (await desk.get(f"/v1/events?after={page[2]['id']}&limit=1")).json()
    assert [each["id"] for each in rest["items"]] == [page[3]["id"]]
    assert rest["next"] == page[3]["id"]
    wrong = await desk.get("/v1/events?after=7")
    assert wrong.status_code == 400


async def test_a_batch_is_done_once_when_it_is_closed(desk: Desk) -> None:
    await types(desk)
    agent, post = await desk.agent(offer=an_offer(4)), Post(desk)
    made = await submitted(desk, more=True)
    more = {"command": ["true"], "batch": made["batch"], "more": True}
    assert (await desk.post("/v1/tasks", more)).status_code == 202
    leases = await leased(desk, agent, 2)
    for lease in leases:
        await agent.report(returned(lease))
    await post.watch()
    await post.watch()
    assert await types(desk) == ["task.succeeded"] * 2  # more may be added
    assert (await desk.http.delete(f"/v1/batches/{made['batch']}")).status_code == 200
    await post.watch()
    await post.watch()
    found = (await desk.get("/v1/events")).json()["items"][-1]
    assert (found["type"], found["data"]["total"]) == ("batch.done", 2)
    assert len(await types(desk)) == 3


async def test_each_account_reads_its_own_events(desk: Desk) -> None:
    ada, bea = await registered(desk, "ada"), await registered(desk, "bea")
    made = await ada.ask("POST", "/v1/teams", {"name": "lab"})
    team = made.json()["id"]
    await joins(ada, team, bea, "viewer")
    for who, query in ((ada, ""), (bea, ""), (bea, f"?team={team}")):
        assert await types(desk, query, who.headers) == []
    own = await submitted(desk, headers=ada.headers)
    teams = await submitted(desk, headers=ada.headers, team=team)
    for made in (own, teams):
        await ada.ask("DELETE", f"/v1/tasks/{made['ids'][0]}")
    await Post(desk).number()
    page = (await ada.ask("GET", "/v1/events")).json()["items"]
    assert [each["data"]["task"] for each in page] == own["ids"]
    page = (await bea.ask("GET", f"/v1/events?team={team}")).json()["items"]
    assert [each["data"]["task"] for each in page] == teams["ids"]
    assert page[0]["account"] == team
    assert await types(desk, "", bea.headers) == []
    assert (await bea.ask("GET", "/v1/events?pool=true")).status_code == 403


def test_a_stream_goes_on_from_its_cursor(live: Live) -> None:
    stream = {"accept": "text/event-stream"}
    with httpx2.Client(base_url=live.url, headers=live.headers, timeout=PATIENCE_S) as http:

        def cancelled() -> str:
            task: str = http.post("/v1/tasks", json={"command": ["true"]}).json()["ids"][0]
            assert http.delete(f"/v1/tasks/{task}").status_code == 200
            return task

        with http.stream("GET", "/v1/events", headers=stream) as opened:
            lines = opened.iter_lines()
            assert next(lines) == ": connected"
            first = cancelled()
            id_ = next(line for line in lines if line.startswith("id: ")).removeprefix("id: ")
            assert next(lines) == "event: task.cancelled"
            assert first in next(lines)
        second = cancelled()  # nobody reads
        headers = {**stream, "last-event-id": id_}
        with http.stream("GET", "/v1/events", headers=headers) as opened:
            lines = opened.iter_lines()
            assert second in next(line for line in lines if line.startswith("data: "))
