"""Polled reads: a repeated one costs no statement, a change is seen at once, and no account sees another one's."""

from __future__ import annotations

import pytest

from gpool.core.model import Permission
from gpool.wire.frames import Hold, Started
from tests.server.server_desk import Desk, an_offer, exited

pytestmark = pytest.mark.anyio


def statements(desk: Desk) -> int:
    """Reads and writes of the store so far; the server has no other way to its database."""
    store = desk.server.metrics.signals.store
    return sum(store.reads.counts) + sum(store.commits.counts)


async def polled(desk: Desk, path: str) -> tuple[int, int]:
    """Status of a repeated request with the tag of the first, and its reads and writes."""
    first = await desk.get(path)
    assert first.status_code == 200, first.text
    assert first.headers["cache-control"] == "private, no-cache"
    before = statements(desk)
    again = await desk.http.get(path, headers={"if-none-match": first.headers["etag"]})
    if again.status_code == 304:
        assert again.content == b""
    return again.status_code, statements(desk) - before


async def test_a_repeated_read_is_answered_with_304_and_without_a_statement(desk: Desk) -> None:
    agent = await desk.agent(offer=an_offer(cpus=2, gpus=2))
    running = await desk.command()
    await desk.schedule()
    [lease] = agent.leases()
    await agent.report(Started(lease.task, lease.epoch))
    waiting = await desk.command(gpu="H100:8")
    paths = [
        "/v1/me",
        "/v1/resources",
        "/resources",
        "/v1/queue",
        f"/v1/tasks/{running}",
        f"/v1/tasks/{waiting}",
        f"/task_status?id={running}",
    ]
    found = {path: await polled(desk, path) for path in paths}
    assert found == dict.fromkeys(paths, (304, 0))


async def test_heartbeats_and_other_tasks_leave_a_task_in_the_cache(desk: Desk) -> None:
    agent = await desk.agent(offer=an_offer(cpus=2))
    task = await desk.command()
    await desk.schedule()
    tag = (await desk.get(f"/v1/tasks/{task}")).headers["etag"]
    (await desk.get("/v1/resources")).raise_for_status()
    await agent.send_beat(*(Hold(lease.task, lease.epoch) for lease in agent.leases()))
    other = await desk.command()
    await desk.http.delete(f"/v1/tasks/{other}")
    before = statements(desk)
    again = await desk.http.get(f"/v1/tasks/{task}", headers={"if-none-match": tag})
    assert (again.status_code, statements(desk) - before) == (304, 0)


async def test_each_change_of_a_task_is_seen_by_the_next_read(desk: Desk) -> None:
    agent = await desk.agent(offer=an_offer(cpus=2))
    task = await desk.command()

    async def status() -> str:
        await desk.get(f"/v1/tasks/{task}")
        return str((await desk.get(f"/v1/tasks/{task}")).json()["status"])

    assert await status() == "queued"
    await desk.schedule()
    assert await status() == "leased"
    [lease] = agent.leases()
    await agent.report(Started(lease.task, lease.epoch))
    assert await status() == "running"
    await agent.report(exited(lease))
    assert await status() == "succeeded"
    assert (await desk.http.delete(f"/v1/tasks/{task}/record")).status_code == 204
    assert (await desk.get(f"/v1/tasks/{task}")).status_code == 404


async def test_each_change_of_the_queue_is_seen_by_the_next_read(desk: Desk) -> None:
    async def counted() -> tuple[int, int]:
        await desk.get("/v1/queue?limit=2")
        page = (await desk.get("/v1/queue?limit=2")).json()
        return page["waiting"], len(page["running"])

    assert await counted() == (0, 0)
    tasks = [await desk.command() for _ in range(4)]
    assert await counted() == (4, 0)  # more than the page: depends on all tasks
    await desk.http.delete(f"/v1/tasks/{tasks[3]}")
    assert await counted() == (3, 0)
    await desk.http.delete(f"/v1/tasks/{tasks[2]}")
    assert await counted() == (2, 0)  # the page has all: depends on these
    await desk.http.delete(f"/v1/tasks/{tasks[0]}")
    assert await counted() == (1, 0)
    await desk.agent(offer=an_offer(cpus=1))
    await desk.schedule()
    assert await counted() == (0, 1)
    await desk.command()
    assert await counted() == (1, 1)


async def test_each_change_of_the_resources_is_seen_by_the_next_read(desk: Desk) -> None:
    agent = await desk.agent(offer=an_offer(cpus=2, gpus=1))

    async def shown() -> list[tuple[str, str]]:
        await desk.get("/v1/resources")
        items = (await desk.get("/v1/resources")).json()["items"]
        return [(item["kind"], item["status"]) for item in items]

    assert await shown() == [("gpu", "free"), ("cpu", "free")]
    await desk.command(gpu="A100")
    await desk.schedule()
    assert (await shown())[0] == ("gpu", "busy")  # of the memory, not of rows
    node = (await desk.get("/v1/nodes")).json()["items"][0]["id"]
    await desk.http.patch(f"/v1/nodes/{node}", json={"availability": "paused"})
    assert await shown() == [("gpu", "paused"), ("cpu", "paused")]
    await agent.channel.close()
    assert await shown() == [("gpu", "offline"), ("cpu", "offline")]
    await desk.agent("second", offer=an_offer(cpus=1))
    assert len(await shown()) == 3


async def test_each_change_of_the_account_is_seen_by_the_next_read(desk: Desk) -> None:
    assert (await desk.get("/v1/me")).json()["teams"] == []
    made = await desk.post("/v1/teams", {"name": "lab"})
    assert made.status_code == 201, made.text
    desk.server.credentials.forget()
    assert [team["name"] for team in (await desk.get("/v1/me")).json()["teams"]] == ["lab"]


async def test_no_account_gets_what_another_one_has_cached(desk: Desk) -> None:
    ann = await desk.person("ann", Permission.CONSUMER)
    bob = await desk.person("bob", Permission.CONSUMER)
    await desk.agent(offer=an_offer(cpus=1, gpus=1))
    made = await desk.bare.post("/v1/tasks", json={"command": ["true"]}, headers=ann)
    [task] = made.json()["ids"]
    tags = {}
    for path in (f"/v1/tasks/{task}", "/v1/queue", "/v1/me", "/v1/resources"):
        for _ in range(2):
            seen = await desk.bare.get(path, headers=ann)
            assert seen.status_code == 200
        tags[path] = seen.headers["etag"]
    hidden = {**bob, "if-none-match": tags[f"/v1/tasks/{task}"]}
    assert (await desk.bare.get(f"/v1/tasks/{task}", headers=hidden)).status_code == 404
    empty = await desk.bare.get("/v1/queue", headers={**bob, "if-none-match": tags["/v1/queue"]})
    assert (empty.status_code, empty.json()["waiting"], empty.json()["items"]) == (200, 0, [])
    me = await desk.bare.get("/v1/me", headers={**bob, "if-none-match": tags["/v1/me"]})
    assert (me.status_code, me.json()["name"]) == (200, "bob")
    of_owner = (await desk.get("/v1/resources")).json()["items"][0]
    of_bob = (await desk.bare.get("/v1/resources", headers=bob)).json()["items"][0]
    assert (of_owner["uuid"], of_bob["uuid"]) == ("GPU-0", "")


async def test_a_revoked_key_gets_nothing_from_the_cache(desk: Desk) -> None:
    ann = await desk.person("ann", Permission.CONSUMER)
    assert (await desk.bare.get("/v1/me", headers=ann)).status_code == 200
    tag = (await desk.bare.get("/v1/me", headers=ann)).headers["etag"]
    [key] = (await desk.bare.get("/v1/keys", headers=ann)).json()["items"]
    revoked = await desk.bare.delete(f"/v1/keys/{key['id']}", headers=ann)
    assert revoked.status_code < 300, revoked.text
    asked = await desk.bare.get("/v1/me", headers={**ann, "if-none-match": tag})
    assert asked.status_code == 401
