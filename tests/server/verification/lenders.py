"""A pool of lenders, one node each, that answer verified tasks honestly or not. The loops stand still: tests call them."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from gpool.core.ids import TaskId
from gpool.core.model import EndReason, Permission
from gpool.server.store.protocol import Operation, operation
from gpool.server.store.rows import values
from gpool.server.verification.loop import VerifyResults
from gpool.transfer.node_proofs import NodeKey
from gpool.wire.frames import Finished, Lease
from tests.server.server_desk import (
    FUNCTION,
    FUNCTION_SHA256,
    Agent,
    Desk,
    an_offer,
    calls_document,
)

BOTH = (Permission.CONSUMER, Permission.PROVIDER)
Headers = dict[str, str]
Answering = Callable[["Lender", Lease], Finished | None]


def data(number: int) -> bytes:
    """A small integer as a node sends it."""
    return b"\x01i" + number.to_bytes(8, "little", signed=True)


def decimal(number: float) -> bytes:
    return b"\x01f" + struct.pack("<d", number)


def value(content: bytes) -> Answering:
    def answer(_: Lender, lease: Lease) -> Finished:
        return Finished(
            lease.task, lease.epoch, EndReason.RETURNED, value=content, duration_us=1000
        )

    return answer


def silence(_: Lender, __: Lease) -> None:
    return None


TRUTH = data(42)


@dataclass
class Lender:
    name: str
    headers: Headers
    agent: Agent
    answer: Answering
    seen: int = 0
    ran: list[Lease] = field(default_factory=list)


@dataclass
class Lenders:
    desk: Desk
    everyone: list[Lender] = field(default_factory=list)

    async def join(self, name: str, answer: Answering | None = None, **offered: Any) -> Lender:
        headers = await self.desk.person(name, *BOTH)
        key = NodeKey(hashlib.sha256(name.encode()).digest())
        offer = replace(an_offer(), **offered)
        agent = await self.desk.join(key, offer, headers, name=f"node-{name}")
        await agent.connect()
        lender = Lender(name, headers, agent, answer or value(TRUTH))
        self.everyone.append(lender)
        return lender

    async def join_all(self, names: Iterable[str]) -> None:
        for name in names:
            await self.join(name)

    async def tick(self) -> None:
        """Draw, plan, and let every lender answer what it was given."""
        await VerifyResults(self.desk.server).run_once(self.desk.server.now)
        await self.desk.schedule()
        for lender in self.everyone:
            await self.answer(lender)

    async def answer(self, lender: Lender) -> None:
        leases = lender.agent.leases()
        for lease in leases[lender.seen :]:
            lender.ran.append(lease)
            ended = lender.answer(lender, lease)
            if ended is not None:
                await lender.agent.report(ended)
        lender.seen = len(leases)

    async def run(self, ticks: int = 8) -> None:
        for _ in range(ticks):
            await self.tick()

    async def submit(self, who: Headers, count: int = 1, **members: Any) -> list[str]:
        await self.desk.http.put(f"/v1/artifacts/{FUNCTION_SHA256}", content=FUNCTION, headers=who)
        wanted = calls_document(count, **{"verify": 2, **members})
        answer = await self.desk.post("/v1/tasks", wanted, headers=who)
        assert answer.status_code == 202, answer.text
        ids: list[str] = answer.json()["ids"]
        return ids

    async def task(self, id_: str, who: Headers) -> dict[str, Any]:
        answer = await self.desk.get(f"/v1/tasks/{id_}", headers=who)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


@operation
def _open_siblings() -> Operation[list[TaskId]]:
    return (
        yield from values(
            TaskId,
            "SELECT id FROM tasks WHERE parent_id IS NOT NULL AND status IN ('queued', 'leased', 'running')",
        )
    )


async def open_siblings(desk: Desk) -> list[TaskId]:
    return await desk.server.store.read(_open_siblings())


@operation
def _siblings_left() -> Operation[int]:
    found = yield from values(
        int,
        "SELECT (SELECT COUNT(*) FROM siblings) + (SELECT COUNT(*) FROM verifications) "
        "+ (SELECT COUNT(*) FROM tasks) + (SELECT COUNT(*) FROM batches)",
    )
    return found[0]


async def siblings_left(desk: Desk) -> int:
    """Rows of tasks, batches, siblings and verifications."""
    return await desk.server.store.read(_siblings_left())
