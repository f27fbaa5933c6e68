"""Leadership of one replica: tries to have the database's lock, keeps it, and tries again after its session was lost.

Decides by answers of the lock's session alone; knows no driver. Plans of a deposed leader are refused by their term.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from gpool.core.errors import Unreachable
from gpool.observability.logs import get_logger
from gpool.server.store.drivers.replica_sessions import LockSession, ReplicaDatabase

log = get_logger(__name__)

TRY_EVERY_S = 1.0
"""Interval of a follower's attempts at the lock, and of the check whether a leader's session still answers."""


class LeaderLock:
    def __init__(
        self,
        database: ReplicaDatabase,
        dead_after_us: int,
        took: Callable[[], None],
        lost: Callable[[], None],
    ) -> None:
        self.is_held = False
        self._database, self._dead_after_us = database, dead_after_us
        self._took, self._lost = took, lost
        self._session: LockSession | None = None
        self._pid: int | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._pid

    async def start(self) -> None:
        """Try once, then go on in the background. `Unreachable` if the database does not answer."""
        await self._try()
        self._task = asyncio.create_task(self._run(), name="gpool-leader-lock")

    async def resign(self) -> None:
        """Give up the lock and try no more; the session stays open, as a sign that the process runs."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.is_held:
            self.is_held = False
            assert self._session is not None, "the lock is a session's"
            try:
                await self._session.unlock()
            except Unreachable:
                self._session.terminate()

    async def stop(self) -> None:
        await self.resign()
        if self._session is not None:
            with suppress(Unreachable):
                await self._session.close()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TRY_EVERY_S)
            try:
                await self._try()
            except Unreachable as exc:
                self._broken(exc.detail)

    async def _try(self) -> None:
        if self._session is None or self._session.is_closed():
            self._session = await self._connected()
        session = self._session
        if self.is_held:
            await session.check()
        elif await session.try_lock():
            self.is_held = True
            self._took()
        elif await session.end_silent(self._dead_after_us):
            log.warning("the leader is silent; its database session was ended")

    async def _connected(self) -> LockSession:
        opened: list[LockSession] = []

        def ended() -> None:
            if opened and opened[0] is self._session:
                self._step_down("the session ended")

        session = await self._database.lock_session(self._pid, ended)
        opened.append(session)
        self._pid = session.pid
        return session

    def _broken(self, why: str) -> None:
        if self._session is not None:
            self._session.terminate()
        self._step_down(why)

    def _step_down(self, why: str) -> None:
        if self.is_held:
            log.warning("lost the leadership lock", reason=why)
            self.is_held = False
            self._lost()
