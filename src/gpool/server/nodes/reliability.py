"""Keeps what experience says of each node: how long it was there, how often it went away with leases, what its GPUs proved. It places nothing.

A loop of its own, off every hot path: the scheduler only notes that a node was lost. Records are written when one was, else
every ten minutes; a server that stops in between forgets so much.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gpool.core.ids import NodeId
from gpool.core.model import SECOND, Instant, Merit, Node, Span
from gpool.core.trust.gpu_verification import GpuVerdict, MeasuredSpeed
from gpool.core.trust.reliability import ReliabilityRecord, gigaflops_of
from gpool.server.server import Server
from gpool.server.store.operations.nodes import gpu_verification, reliability
from gpool.server.wakeups import Wake

EVERY_S = 60.0
WRITE_EVERY = Span(600 * SECOND)
LOOK_EVERY = Span(300 * SECOND)
"""At what GPUs measured and proved: that is seldom other than before."""
MOST_GIGAFLOPS = 10_000_000
"""Of one GPU, several times the fastest there is: who claims more is believed nothing."""
MOST_ROWS = 500  # of one write, so that others get their turn


class Merits:
    name = "merits"

    def __init__(self, server: Server) -> None:
        self.wake = Wake()
        self.every_s = EVERY_S
        self._server = server
        self._records: dict[NodeId, ReliabilityRecord] | None = None  # None: not yet read
        self._unwritten: set[NodeId] = set()
        self._ran_at = self._wrote_at = self._looked_at = Instant(0)
        self._proven: dict[NodeId, tuple[bool, int]] = {}

    async def run_once(self, now: Instant) -> None:
        if self._records is None:
            self._records = dict(await self._server.store.read(reliability.records()))
            self._ran_at = self._wrote_at = now
        if now - self._looked_at >= LOOK_EVERY or not self._looked_at:
            self._proven = _proven(await self._server.store.read(gpu_verification.records()))
            self._looked_at = now
        passed, self._ran_at = Span(max(0, now - self._ran_at)), now
        if passed > 10 * EVERY_S * SECOND:  # nobody looked: who knows who was there
            passed = Span(0)
        is_urgent = self._count(self._records, passed, now)
        if is_urgent or now - self._wrote_at >= WRITE_EVERY:
            self._wrote_at = now
            await self._write(self._records)

    def _count(self, records: dict[NodeId, ReliabilityRecord], passed: Span, now: Instant) -> bool:
        """Takes in what was seen since the last time; whether a node was lost."""
        scheduler = self._server.scheduler
        lost, scheduler.lost = scheduler.lost, {}
        merits: dict[NodeId, Merit] = {}
        for id_, entry in scheduler.state.nodes.items():
            node, losses = entry.node, lost.get(id_, 0)
            if node is None:
                continue
            if (node.connected and passed) or losses:
                up = passed if node.connected else Span(0)
                records[id_] = records.get(id_, ReliabilityRecord(at=now)).later(now, up, losses)
                self._unwritten.add(id_)
            merits[id_] = self._merit(records.get(id_, ReliabilityRecord()), node)
        scheduler.use_merits(merits)
        return bool(lost)

    def _merit(self, record: ReliabilityRecord, node: Node) -> Merit:
        is_proven, gigaflops = self._proven.get(node.id, (False, 0))
        return Merit(record.mtbf, is_proven, gigaflops)

    async def _write(self, records: dict[NodeId, ReliabilityRecord]) -> None:
        unwritten, self._unwritten = sorted(self._unwritten), set()
        for first in range(0, len(unwritten), MOST_ROWS):
            some = unwritten[first : first + MOST_ROWS]
            await self._server.write(reliability.put_records({id_: records[id_] for id_ in some}))
        for id_ in records.keys() - self._server.scheduler.state.nodes.keys():
            del records[id_]
        await self._server.write(reliability.forget_records())


def _proven(found: Iterable[gpu_verification.Record]) -> dict[NodeId, tuple[bool, int]]:
    """Of each node: whether all its GPUs passed, and then how fast the slowest is. Of others that is but their word."""
    by_node: dict[NodeId, list[gpu_verification.Record]] = {}
    for each in found:
        by_node.setdefault(each.node, []).append(each)
    proven: dict[NodeId, tuple[bool, int]] = {}
    for node, gpus in by_node.items():
        passed = all(each.verdict is GpuVerdict.PASSED for each in gpus)
        speed = gigaflops_of(_gigaflops(each.measured) for each in gpus) if passed else 0
        proven[node] = (passed, speed)
    return proven


def _gigaflops(measured: str | None) -> int:
    """What most tasks live by: half precision where the card has it."""
    if measured is None:
        return 0
    try:
        told = msgspec.json.decode(measured, type=MeasuredSpeed)
    except msgspec.MsgspecError:
        return 0
    found = told.bf16_gigaflops or told.fp32_gigaflops
    return found if found <= MOST_GIGAFLOPS else 0
