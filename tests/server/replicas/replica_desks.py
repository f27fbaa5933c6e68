"""Two servers of one PostgreSQL database in this process, whose loops the test calls: the first leads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from gpool.core.scheduler.state.state import State
from gpool.server.replicas.follow import FollowChanges
from gpool.server.replicas.membership import Membership
from gpool.server.scheduling.loops import ExpireNodes
from tests.server.server_desk import Desk, StoppedClock, open_desk
from tests.tools.processes import PATIENCE_S

LEASE_S = 30.0


@dataclass
class ReplicaDesk:
    desk: Desk
    membership: Membership
    loop: FollowChanges

    async def follow(self) -> None:
        await self.loop.run_once(self.desk.server.now)

    async def expire(self) -> None:
        await ExpireNodes(self.desk.server).run_once(self.desk.server.now)

    async def schedule(self) -> int:
        """Read the feed, then plan."""
        await self.follow()
        return await self.desk.schedule()

    @property
    def state(self) -> State:
        return self.desk.server.picture.state

    async def status(self, task: str) -> str:
        return str((await self.desk.get(f"/v1/tasks/{task}")).json()["status"])


@asynccontextmanager
async def replica_desks(
    url: str, data: Path, count: int = 2, **settings: Any
) -> AsyncIterator[tuple[StoppedClock, list[ReplicaDesk]]]:
    """`settings` may contain `folders`: a data directory for each server, instead of one for all."""
    clock = StoppedClock()
    made: list[ReplicaDesk] = []
    settings = {"replica_timeout_s": PATIENCE_S, **settings}  # the test beats by the stopped clock
    folders: list[Path] = settings.pop("folders", [data] * count)
    try:
        for folder in folders:
            desk = await open_desk(folder, clock, database_url=url, **settings)
            membership = desk.server.replica
            assert isinstance(membership, Membership)
            made.append(ReplicaDesk(desk, membership, FollowChanges(desk.server, membership)))
        for each in made:
            await each.follow()
        if made[0].desk.server.picture.is_stale:
            await made[0].desk.server.picture.rebuild(clock.now())
        yield clock, made
    finally:
        for each in made:
            await each.desk.http.aclose()
            await each.membership.stop()
            await each.desk.server.store.close()


async def executed(url: str, *statements: str) -> list[Sequence[Any]]:
    """Rows of the last statement."""
    connection = await import_module("asyncpg").connect(url)
    try:
        rows: list[Sequence[Any]] = []
        for statement in statements:
            rows = await connection.fetch(statement)
        return rows
    finally:
        await connection.close()
