"""Spot checks: nodes that may get the next spot-checked task, and what a node has to lose."""

from __future__ import annotations

from gpool.core.ids import NodeId, TaskId
from gpool.core.model import Instant
from gpool.core.trust.siblings import SiblingNode
from gpool.core.trust.spot import DEFAULT_SPOT, ReliabilityKey, may_start, passed_checks
from gpool.server.server import Server
from gpool.server.store.operations.verification import standings, withdrawals
from gpool.server.store.operations.verification.withdrawals import Stake
from gpool.server.verification.draws import SiblingCandidates


async def ready_for_spot(
    server: Server, found: SiblingCandidates, environment: str, now: Instant
) -> SiblingCandidates:
    """Leave out nodes on their first probation that had a spot-checked task in the last hours."""
    records = await server.store.read(standings.node_records({one.node for one in found.capable}))

    def is_ready(one: SiblingNode) -> bool:
        record = records[one.node]
        passed = passed_checks(record.passed, ReliabilityKey(one.node, one.model, environment))
        return may_start(DEFAULT_SPOT, record.standing, passed, now)

    return SiblingCandidates(
        tuple(filter(is_ready, found.capable)), tuple(filter(is_ready, found.free))
    )


async def stakes(server: Server, task: TaskId, node: NodeId) -> Stake:
    """Return what deters a node from a false result; without a price nothing does but its reliability."""
    found = await server.store.read(withdrawals.stake_of(task, node))
    return found if found.price else Stake(0, 1)
