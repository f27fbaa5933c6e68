"""Consumers of a replicated pool: submissions through the load balancer, each repeated under its key until acknowledged."""

from __future__ import annotations

import asyncio
import ssl
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle

import httpx2

from gpool.core.ids import decode

TIMEOUT_S = 15.0
"""Of one attempt: a replica may be stopped while it has the request."""
AT_ONCE = 32
LONGEST_PAUSE_S = 2.0
GIVE_UP_S = 300.0


@dataclass(slots=True)
class Load:
    """`acknowledged`: tasks whose submission was answered with 202; `asked`: tasks of all submissions that were begun."""

    address: str
    context: ssl.SSLContext
    keys: Sequence[str]
    per_request: int
    asked: int = 0
    repeated: int = 0
    longest_s: float = 0.0  # until a submission was acknowledged
    acknowledged: set[int] = field(default_factory=set)
    refusals: dict[str, int] = field(default_factory=dict)

    async def submit(self, tasks: int, rate: float) -> None:
        """Submit so many tasks at an even rate (tasks/s); return once all are acknowledged."""
        loop = asyncio.get_running_loop()
        keys = cycle(self.keys)
        limits = httpx2.Limits(max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE)
        async with (
            httpx2.AsyncClient(
                verify=self.context, trust_env=False, timeout=TIMEOUT_S, limits=limits
            ) as client,
            asyncio.TaskGroup() as group,
        ):
            free = asyncio.Semaphore(AT_ONCE)
            due = loop.time()
            for first in range(0, tasks, self.per_request):
                count = min(self.per_request, tasks - first)
                await asyncio.sleep(max(0.0, due - loop.time()))
                due += count / rate
                await free.acquire()
                self.asked += count
                sending = group.create_task(self._until_acknowledged(client, next(keys), count))
                sending.add_done_callback(lambda _: free.release())

    async def _until_acknowledged(self, client: httpx2.AsyncClient, key: str, count: int) -> None:
        loop = asyncio.get_running_loop()
        headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": uuid.uuid4().hex}
        document = {"command": ["true"], "copies": count}
        began, pause_s = loop.time(), 0.1
        while True:
            try:
                answer = await client.post(
                    f"{self.address}/v1/tasks", json=document, headers=headers
                )
            except httpx2.TransportError as error:
                why = type(error).__name__
            else:
                if answer.status_code == 202:
                    break
                why = str(answer.status_code)
                if answer.status_code < 500 and answer.status_code not in {408, 409, 425, 429}:
                    raise AssertionError(f"a submission was refused: {answer.text[:500]}")
            self.repeated += 1
            self.refusals[why] = self.refusals.get(why, 0) + 1
            if loop.time() - began > GIVE_UP_S:
                raise AssertionError(f"not acknowledged within {GIVE_UP_S:g} s: {why}")
            await asyncio.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, pause_s * 2)
        ids = [decode("task", each) for each in answer.json()["ids"]]
        assert len(ids) == count
        assert self.acknowledged.isdisjoint(ids), (
            "two submissions were answered with the same tasks"
        )
        self.acknowledged.update(ids)
        self.longest_s = max(self.longest_s, loop.time() - began)
