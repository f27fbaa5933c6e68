"""Known bugs of charging, planted by replacing a component of the World."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, TypeVar

from gpool.core.model import Instant
from gpool.server.nodes.connection import NodeChannel
from gpool.server.store.protocol import Operation, Row, Statement
from gpool.testing.world.database import SimulatedDisk
from gpool.testing.world.flaws import replaced_rows, rewritten
from gpool.wire.frames import Finished, Reports

T = TypeVar("T")
MOST = 1 << 40
CHARGED_US, MICROCREDITS, RATE = 7, 8, 10
"""Places in a row of `charges`."""


class ChargingFlaw(StrEnum):
    AGENTS_TIMES = "agents_times"
    CHARGED_TWICE = "charged_twice"
    NOTHING_RESERVED = "nothing_reserved"
    MAX_COST_OF_ONE_ATTEMPT = "max_cost_of_one_attempt"


def agents_times() -> dict[str, Any]:
    """Charges the run time that the node claims."""
    claimed: dict[tuple[int, int], int] = {}

    class NotingChannel(NodeChannel):
        async def _record(self, frame: Reports) -> None:
            for item in frame.items:
                if isinstance(item, Finished):
                    claimed[item.task, item.epoch] = min(item.duration_us, MOST)
            await super()._record(frame)

    def charged(rows: Sequence[Row]) -> Sequence[Row]:
        found = []
        for row in rows:
            time = claimed.get((row[0], row[1]), row[CHARGED_US])
            amount = row[RATE] * time // 3_600_000_000
            before, after = row[:CHARGED_US], row[MICROCREDITS + 1 :]
            found.append((*before, time, amount, *after))
        return found

    class ClaimedTimes(SimulatedDisk):
        async def write(self, operation: Operation[T]) -> T:
            return await super().write(replaced_rows(operation, "INSERT INTO charges", charged))

    return {"channel": NotingChannel, "disk": ClaimedTimes}


class DoublingChannel(NodeChannel):
    """Charges a lease again when its end is reported again."""

    async def _record(self, frame: Reports) -> None:
        await super()._record(frame)
        ended = [(item.task, item.epoch) for item in frame.items if isinstance(item, Finished)]
        if ended:
            await self._server.write(_doubled(ended, self._server.now))


def _doubled(ended: Sequence[tuple[int, int]], at: Instant) -> Operation[None]:
    for task, epoch in ended:
        yield Statement(
            "UPDATE charges SET microcredits = 2 * microcredits, charged_us = 2 * charged_us "
            "WHERE task_id = :task AND epoch = :epoch AND ended_at < :at",
            {"task": task, "epoch": epoch, "at": at},
        )


class NothingReserved(SimulatedDisk):
    """Opens meters without a pending transfer."""

    async def write(self, operation: Operation[T]) -> T:
        nothing: Callable[[Sequence[Row]], Sequence[Row]] = lambda _: ()  # noqa: E731
        return await super().write(
            replaced_rows(operation, "INSERT INTO pending_transfers", nothing)
        )


class ForgetsEarlierAttempts(SimulatedDisk):
    """Compares max_cost with the attempt that ends, not with all of the task."""

    async def write(self, operation: Operation[T]) -> T:
        return await super().write(rewritten(operation, _of_no_attempt))


def _of_no_attempt(sql: str) -> str:
    return sql.replace("WHERE c.state <> 'void' GROUP BY", "WHERE c.task_id < 0 GROUP BY")


FLAWED_PARTS: dict[ChargingFlaw, Callable[[], dict[str, Any]]] = {
    ChargingFlaw.AGENTS_TIMES: agents_times,
    ChargingFlaw.CHARGED_TWICE: lambda: {"channel": DoublingChannel},
    ChargingFlaw.NOTHING_RESERVED: lambda: {"disk": NothingReserved},
    ChargingFlaw.MAX_COST_OF_ONE_ATTEMPT: lambda: {"disk": ForgetsEarlierAttempts},
}
"""Replaced components of each flaw."""
