"""What may wait of one user's: never passed by a task, however many submissions and servers there are at once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpool.core.errors import TooMany
from gpool.core.ids import UserId, encode
from gpool.core.model import Permission
from gpool.core.permissions import Role, TeamId
from gpool.server.actions.quotas import set_quota
from gpool.server.actions.tasks.repeated import WantedTasks
from gpool.server.actions.tasks.submit import submit
from gpool.server.app import close_server, open_server
from gpool.server.identity import authorization
from gpool.server.server import Server
from gpool.server.settings import Settings
from gpool.server.store.identity_values import Caller, GivenQuota, Team
from gpool.server.store.operations.identity import teams, users
from gpool.server.store.protocol import Operation, Statement
from gpool.server.store.values import User
from gpool.wire.documents import TaskRequest

LIMIT = 25


class Crowd:
    """Servers on one database, and a user with a quota who knows all of them."""

    def __init__(self, servers: list[Server], who: Caller) -> None:
        self.servers, self.who = servers, who

    @classmethod
    async def gathered(cls, url: str, data: Path) -> Crowd:
        count = 1 if url.startswith("sqlite") else 3
        settings = Settings(data=data, database_url=url, password_passes=1, password_memory_kib=64)
        servers = [await open_server(settings) for _ in range(count)]
        first = servers[0]
        user = User(UserId(first.ids.next()), "dave", frozenset({Permission.CONSUMER}), first.now)
        await first.store.write(users.create_user(user))
        key = authorization.fresh(authorization.USER_PREFIX)
        hashed = authorization.hashed(key)
        await first.store.write(users.add_key(first.ids.next(), user.id, "test", hashed, first.now))
        who = await first.credentials.who(key)
        assert isinstance(who, Caller)
        return cls(servers, who)

    async def close(self) -> None:
        for server in self.servers:
            await close_server(server)

    async def ask(self, asked: list[TaskRequest]) -> list[bool]:
        """Dealt out to the servers, all at once: which were taken."""
        given = [
            submit(self.servers[number % len(self.servers)], self.who, WantedTasks(each), None)
            for number, each in enumerate(asked)
        ]
        told = await asyncio.gather(*given, return_exceptions=True)
        for each in told:
            if isinstance(each, BaseException) and not isinstance(each, TooMany):
                raise each
        return [not isinstance(each, TooMany) for each in told]

    async def queued(self) -> int:
        return await self.servers[0].store.read(_queued())


def _queued() -> Operation[int]:
    rows = yield Statement("SELECT COUNT(*) FROM tasks WHERE status = 'queued'")
    return int(rows[0][0])


def _asked(count: int, **members: Any) -> list[TaskRequest]:
    return [
        TaskRequest.model_validate({"command": ["echo", str(number % 3)]} | members)
        for number in range(count)
    ]


def test_submissions_to_several_servers_never_pass_the_quota_together(
    url: str, tmp_path: Path
) -> None:
    async def run() -> None:
        crowd = await Crowd.gathered(url, tmp_path / "data")
        try:
            first, user = crowd.servers[0], crowd.who.user
            await set_quota(first, user, ("user", user.id), GivenQuota(queued_tasks=LIMIT))
            singles = _asked(40)
            more = {"command": ["echo", "x" * 90_000], "env": {"MORE": "y" * 90_000}}
            heavy = _asked(3, **more)  # each has a write of its own
            many = _asked(3, copies=20)
            taken = await crowd.ask([*singles[:20], *heavy, *many, *singles[20:]])
            waiting = await crowd.queued()
            assert waiting <= LIMIT
            fits = LIMIT - waiting  # a batch that did not fit leaves room that is there still
            assert sum(await crowd.ask(_asked(LIMIT))) == fits
            assert await crowd.queued() == LIMIT
            assert sum(taken) > 0
        finally:
            await crowd.close()

    asyncio.run(run())


def test_a_team_s_quota_is_kept_by_all_its_servers(url: str, tmp_path: Path) -> None:
    async def run() -> None:
        crowd = await Crowd.gathered(url, tmp_path / "data")
        try:
            first, user = crowd.servers[0], crowd.who.user
            team = TeamId(first.ids.next())
            await first.store.write(teams.create_team(Team(team, "lab", first.now), user.id))
            crowd.who = replace(crowd.who, teams={team: Role.OWNER})
            await set_quota(first, user, ("team", team), GivenQuota(queued_tasks=LIMIT))
            asked = _asked(60, team=encode("team", team))
            assert sum(await crowd.ask(asked)) == LIMIT
            assert await crowd.queued() == LIMIT
            assert all(await crowd.ask(_asked(5))), "what is not the team's has room"
        finally:
            await crowd.close()

    asyncio.run(run())


def test_counting_stops_past_the_quota(url: str, tmp_path: Path) -> None:
    async def run() -> None:
        crowd = await Crowd.gathered(url, tmp_path / "data")
        try:
            first, user = crowd.servers[0], crowd.who.user
            await crowd.ask(_asked(1, copies=9))
            counted = await first.store.write(teams.queued_of({("user", user.id): 4}))
            assert counted == {("user", user.id): 5}
            counted = await first.store.write(teams.queued_of({("user", user.id): 90}))
            assert counted == {("user", user.id): 9}
            assert await first.store.write(teams.queued_of({("team", 7): 1})) == {("team", 7): 0}
        finally:
            await crowd.close()

    asyncio.run(run())
