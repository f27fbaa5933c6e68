"""Cached reads with two servers on one PostgreSQL database: a change at the other one is seen within a second."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import pytest

from gpool.server.replicas.follow import EVERY_S
from gpool.wire.frames import Started
from tests.server.replicas.replica_desks import ReplicaDesk, replica_desks
from tests.server.server_desk import an_offer
from tests.tools.processes import PATIENCE_S

pytestmark = pytest.mark.anyio
MINUTES = 600.0


def reads(replica: ReplicaDesk) -> int:
    return sum(replica.desk.server.metrics.signals.store.reads.counts)


def confirm(replica: ReplicaDesk, seconds: float = MINUTES) -> None:
    """Take what is cached for followed, so that a slow host does not end it: the test calls the loop itself."""
    replica.desk.server.reads.confirmed_s = monotonic() + seconds


async def followed(replica: ReplicaDesk) -> None:
    await replica.follow()
    confirm(replica)


async def test_a_change_at_the_other_server_is_seen_when_the_feed_has_been_read(
    url: str, tmp_path: Path
) -> None:
    async with replica_desks(url, tmp_path) as (_, (leader, follower)):
        agent = await leader.desk.agent(offer=an_offer(cpus=1, gpus=1))
        task = await leader.desk.command()
        await leader.schedule()
        await followed(follower)
        path = f"/v1/tasks/{task}"
        first = await follower.desk.get(path)
        before = reads(follower)
        again = await follower.desk.http.get(path, headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, reads(follower) - before) == (304, 0)
        queue = (await follower.desk.get("/v1/queue")).json()
        assert [entry["status"] for entry in queue["running"]] == ["leased"]
        assert (await follower.desk.get("/v1/resources")).json()["items"][0]["available"]

        [lease] = agent.leases()
        await agent.report(Started(lease.task, lease.epoch))
        node = (await leader.desk.get("/v1/nodes")).json()["items"][0]["id"]
        await leader.desk.http.patch(f"/v1/nodes/{node}", json={"availability": "paused"})
        waiting = await leader.desk.command()
        confirm(follower)
        stale = (await follower.desk.get(path)).json()["status"]
        assert stale == "leased", "control: the feed has not been read"
        await followed(follower)
        assert (await follower.desk.get(path)).json()["status"] == "running"
        queue = (await follower.desk.get("/v1/queue")).json()
        assert [entry["task"]["id"] for entry in queue["items"]] == [waiting]
        assert [entry["status"] for entry in queue["running"]] == ["running"]
        assert not (await follower.desk.get("/v1/resources")).json()["items"][0]["available"]


async def test_a_server_that_does_not_read_the_feed_stops_using_its_cache(
    url: str, tmp_path: Path
) -> None:
    async with replica_desks(url, tmp_path) as (_, (leader, follower)):
        task = await leader.desk.command()
        began = monotonic()
        await follower.follow()
        assert began + EVERY_S <= follower.desk.server.reads.confirmed_s <= monotonic() + EVERY_S
        confirm(follower)
        assert await follower.status(task) == "queued"
        await leader.desk.http.delete(f"/v1/tasks/{task}")
        follower.desk.server.reads.confirmed_s = monotonic()  # the second is over
        assert await follower.status(task) == "cancelled"


async def test_a_change_of_the_account_outside_the_feed_is_seen_within_a_second(
    url: str, tmp_path: Path
) -> None:
    async with replica_desks(url, tmp_path) as (_, (leader, follower)):
        await followed(follower)
        assert not (await follower.desk.get("/v1/me")).json()["has_password"]
        changed = await leader.desk.http.put("/v1/me/password", json={"new": "correct horse 12"})
        assert changed.status_code == 204, changed.text
        seen, ends = False, monotonic() + PATIENCE_S
        while not seen and monotonic() < ends:
            confirm(follower)
            seen = (await follower.desk.get("/v1/me")).json()["has_password"]
        assert seen
