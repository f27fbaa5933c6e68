"""`max_queued` holds for the whole pool, however many servers take submissions at the same time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gpool.server.actions import quotas
from gpool.server.server import Server
from gpool.server.store.protocol import Operation, operation
from tests.server.replicas.replica_desks import executed, replica_desks

pytestmark = pytest.mark.anyio
LIMIT = 40
QUEUED = "SELECT count(*) FROM tasks WHERE status = 'queued'"


@operation
def _room(server: Server) -> Operation[quotas.QueueRoom]:
    return (yield from quotas.queue_room(server))


async def test_servers_that_submit_at_once_never_exceed_the_pool_s_queue(
    url: str, tmp_path: Path
) -> None:
    """No server reads the feed meanwhile: each knows its own submissions only."""
    async with replica_desks(url, tmp_path, 3, max_queued=LIMIT) as (_, replicas):
        wanted = {"command": ["true"], "copies": 3}
        answers = await asyncio.gather(
            *(each.desk.post("/v1/tasks", wanted) for _ in range(10) for each in replicas)
        )
        codes = [answer.status_code for answer in answers]
        assert codes.count(202) == LIMIT // 3
        assert set(codes) == {202, 429}
        [[queued]] = await executed(url, QUEUED)
        assert queued == LIMIT // 3 * 3
        seen = [each.desk.server.picture.waiting for each in replicas]
        assert max(seen) < queued, "control: no server alone knew that the queue is full"


async def test_a_queue_far_from_full_is_not_counted(url: str, tmp_path: Path) -> None:
    """It would cost time in proportion to the queue, and make submissions of all servers take turns."""
    limit = 10 * quotas.LEAST_HEADROOM
    async with replica_desks(url, tmp_path, 1, max_queued=limit) as (_, (only,)):
        room = await only.desk.server.store.read(_room(only.desk.server))
        assert room.waiting is None
        near = only.desk.server
        near.picture.add_arriving(limit - quotas.LEAST_HEADROOM + 1)
        assert (await near.store.write(_room(near))).waiting == 0
        near.picture.add_arriving(-(limit - quotas.LEAST_HEADROOM + 1))


async def test_a_queue_that_emptied_takes_tasks_again(url: str, tmp_path: Path) -> None:
    async with replica_desks(url, tmp_path, max_queued=1) as (_, (leader, follower)):
        await follower.desk.agent()
        await leader.desk.command()
        answer = await follower.desk.post("/v1/tasks", {"command": ["true"]})
        assert answer.status_code == 429
        assert "1 waiting" in answer.json()["detail"]
        assert await leader.schedule() == 1
        await follower.follow()
        await follower.desk.command()
