"""Updates each node's reliability: time connected, losses while it held leases, verified GPU speed. It places nothing.

Records are written when a node was lost, else every ten minutes, which a stopping server may lose.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec

from gpool.core.gpu_verification import GpuVerdict, MeasuredSpeed
from gpool.core.ids import NodeId
from gpool.core.model import SECOND, Instant, Merit, Span
from gpool.core.reliability import ReliabilityRecord, least_rate
from gpool.server.server import Server
from gpool.server.store.operations import gpus as gpu_verification
from gpool.server.store.operations import node_pages
from gpool.server.wakeups import Wake

EVERY_S = 60.0
WRITE_EVERY = Span(600 * SECOND)
READ_ROUNDS = 5
"""Rounds in which the GPU measurements and verdicts of all nodes are read once: they seldom change."""
MAX_GIGAFLOPS = 10_000_000
"""Of one GPU, several times the fastest there is; a higher claim counts as 0."""
MAX_GB_PER_S = 100_000
MAX_ROWS = 500  # nodes of one read or write, so that others are not delayed


class UpdateReliability:
    name = "merits"

    def __init__(self, server: Server) -> None:
        self.wake = Wake()
        self.every_s = EVERY_S
        self._server = server
        self._records: dict[NodeId, ReliabilityRecord] | None = None  # None: not yet read
        self._reign = 0  # of this server, in which they were read
        self._unwritten: set[NodeId] = set()
        self._ran_at = self._wrote_at = Instant(0)
        self._unread: list[NodeId] | None = None  # nodes of this turn; None: nothing was read yet
        self._verified: dict[NodeId, Merit] = {}

    async def run_once(self, now: Instant) -> None:
        if self._records is None or self._reign != self._server.replica.reign:
            self._reign, self._unwritten = self._server.replica.reign, set()
            self._records = dict(await self._server.store.read(node_pages.reliability_records()))
            self._ran_at = self._wrote_at = now
        await self._read_some()
        passed, self._ran_at = Span(max(0, now - self._ran_at)), now
        if passed > 10 * EVERY_S * SECOND:  # the loop did not run: nobody knows which nodes were up
            passed = Span(0)
        is_urgent = self._count(self._records, passed, now)
        if is_urgent or now - self._wrote_at >= WRITE_EVERY:
            self._wrote_at = now
            await self._write(self._records)

    async def _read_some(self) -> None:
        """Read the GPUs of the next nodes; of all nodes at the first time."""
        known = self._server.picture.state.nodes
        share = len(known) if self._unread is None else -(-len(known) // READ_ROUNDS)
        if not self._unread:
            self._unread = sorted(known, reverse=True)
            self._verified = {id_: each for id_, each in self._verified.items() if id_ in known}
        while share > 0 and self._unread:
            some = self._unread[-min(share, MAX_ROWS) :]
            del self._unread[-len(some) :]
            share -= len(some)
            found = _verified(await self._server.store.read(gpu_verification.records(some)))
            for id_ in some:
                self._verified.pop(id_, None)
            self._verified |= found

    def _count(self, records: dict[NodeId, ReliabilityRecord], passed: Span, now: Instant) -> bool:
        server = self._server
        lost = server.nodes.take_losses()
        found: dict[NodeId, Merit] = {}
        for id_, entry in server.picture.state.nodes.items():
            node, losses = entry.node, lost.get(id_, 0)
            if node is None:
                continue
            if (node.connected and passed) or losses:
                up = passed if node.connected else Span(0)
                records[id_] = records.get(id_, ReliabilityRecord(at=now)).later(now, up, losses)
                self._unwritten.add(id_)
            known = self._verified.get(node.id, UNVERIFIED)
            found[id_] = replace(known, mtbf=records.get(id_, ReliabilityRecord()).mtbf)
        server.picture.use_reliability(found)
        return bool(lost)

    async def _write(self, records: dict[NodeId, ReliabilityRecord]) -> None:
        unwritten, self._unwritten = sorted(self._unwritten), set()
        for first in range(0, len(unwritten), MAX_ROWS):
            some = unwritten[first : first + MAX_ROWS]
            await self._server.write(
                node_pages.put_reliability_records({id_: records[id_] for id_ in some})
            )
        for id_ in records.keys() - self._server.picture.state.nodes.keys():
            del records[id_]
        await self._server.write(node_pages.forget_reliability_records())


UNVERIFIED = Merit()


def _verified(
    found: Iterable[gpu_verification.GpuVerificationRecord],
) -> dict[NodeId, Merit]:
    """Results of verification and measurement of each node's GPUs."""
    by_node: dict[NodeId, list[gpu_verification.GpuVerificationRecord]] = {}
    for each in found:
        by_node.setdefault(each.node, []).append(each)
    verified: dict[NodeId, Merit] = {}
    for node, gpus in by_node.items():
        passed = all(each.verdict is GpuVerdict.PASSED for each in gpus)
        speeds = [_measured(each.measured) for each in gpus] if passed else []
        verified[node] = Merit(
            is_proven=passed,
            gigaflops=least_rate(map(_gigaflops, speeds)),
            memory_gb_per_s=least_rate(map(_gb_per_s, speeds)),
        )
    return verified


_UNMEASURED = MeasuredSpeed(0, 0, 0, 0, 0, 0)


def _measured(text: str | None) -> MeasuredSpeed:
    if text is None:
        return _UNMEASURED
    try:
        return msgspec.json.decode(text, type=MeasuredSpeed)
    except msgspec.MsgspecError:
        return _UNMEASURED


def _gigaflops(read: MeasuredSpeed) -> int:
    """Half-precision speed, which most tasks depend on; single precision where the GPU has no other."""
    found = read.bf16_gigaflops or read.fp32_gigaflops
    return found if found <= MAX_GIGAFLOPS else 0


def _gb_per_s(read: MeasuredSpeed) -> int:
    found = read.memory_bytes_per_s // 10**9
    return found if found <= MAX_GB_PER_S else 0
