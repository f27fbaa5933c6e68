"""Events of several servers on one database: recorded by any, numbered and delivered by the leader, once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from gpool.server.events.loops import TailEvents
from gpool.server.store.operations.events import outbox
from tests.server.events.events_desk import LOOPBACK, Post, receiving, submitted, types
from tests.server.replicas.replica_desks import replica_desks

pytestmark = pytest.mark.anyio


async def test_events_of_a_follower_are_delivered_once_by_the_leader(
    url: str, tmp_path: Path
) -> None:
    async with (
        receiving() as receiver,
        replica_desks(url, tmp_path, **LOOPBACK) as (clock, (first, second)),
    ):
        made = await first.desk.post("/v1/webhooks", {"url": receiver.url})
        assert made.status_code == 201, made.text
        assert not second.desk.server.events.subscribers.holders
        await second.follow()  # the feed names the new subscriber
        assert second.desk.server.events.subscribers.holders
        task = (await submitted(second.desk))["ids"][0]
        await second.desk.http.delete(f"/v1/tasks/{task}")
        posts = [Post(each.desk) for each in (first, second)]
        await asyncio.gather(*(each.send() for each in posts))
        clock.advance(1)
        await asyncio.gather(*(each.send() for each in posts))
        assert [json.loads(each.body)["data"]["task"] for each in receiver.got] == [task]
        assert await types(second.desk) == ["task.cancelled"]


async def test_a_stream_of_a_follower_is_woken_by_its_tail(url: str, tmp_path: Path) -> None:
    async with replica_desks(url, tmp_path) as (_, (first, second)):
        assert await types(second.desk) == []
        await first.follow()
        server = second.desk.server
        tail, [holder] = TailEvents(server), list(server.events.readers)
        with server.hub.subscription(holder[1]) as woken, server.events.stream():
            await tail.run_once(server.now)
            assert await woken.wait(0)
            task = (await submitted(first.desk))["ids"][0]
            await first.desk.http.delete(f"/v1/tasks/{task}")
            await tail.run_once(server.now)
            assert not await woken.wait(0)
            await Post(first.desk).number()
            await tail.run_once(server.now)
            assert await woken.wait(0)


async def test_a_deposed_leader_numbers_and_claims_nothing(url: str, tmp_path: Path) -> None:
    async with replica_desks(url, tmp_path) as (clock, (first, _)):
        assert await types(first.desk) == []
        task = (await submitted(first.desk))["ids"][0]
        await first.desk.http.delete(f"/v1/tasks/{task}")
        store, term = first.desk.server.store, first.desk.server.picture.term
        assert (await store.write(outbox.number_events(term - 1, clock.now(), 10))).deposed
        assert await store.read(outbox.has_outbox())
        found = await store.write(outbox.number_events(term, clock.now(), 10))
        assert [row.kind for row in found.events] == ["task.cancelled"]
