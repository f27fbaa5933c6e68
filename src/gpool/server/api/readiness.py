"""Readiness of the server: whether its database answers. Shared by concurrent requests, which cost one query a second."""

from __future__ import annotations

import asyncio

from gpool.core.errors import GpoolError
from gpool.server.store.protocol import Operation, Store, operation
from gpool.server.store.rows import values

ANSWER_WITHIN_S = 2.0
KEEP_S = 1.0


class Readiness:
    def __init__(self, store: Store, within_s: float = ANSWER_WITHIN_S) -> None:
        self._store = store
        self._within_s = within_s
        self._asking: asyncio.Task[str] | None = None
        self._asked_s = 0.0  # time of the loop at which `_asking` began

    async def problem(self) -> str:
        """Reason why the server cannot take tasks, "" if it can; within `within_s`."""
        asking, now_s = self._asking, asyncio.get_running_loop().time()
        if asking is None or (asking.done() and now_s - self._asked_s >= KEEP_S):
            asking = self._asking = asyncio.create_task(self._ask(), name="gpool-readiness")
            self._asked_s = now_s
        done, _ = await asyncio.wait([asking], timeout=self._within_s)
        if not done:
            return f"the database did not answer within {self._within_s:g} s"
        return asking.result()

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask(self) -> str:
        """Through the writer: the server takes no task that it cannot store."""
        try:
            await self._store.write(_ping())
        except GpoolError as error:
            return error.detail
        return ""


@operation
def _ping() -> Operation[int]:
    [found] = yield from values(int, "SELECT 1")
    return found
