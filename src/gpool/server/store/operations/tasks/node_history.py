"""Tasks on one node, for its owner: held leases, and the newest ended ones."""

from __future__ import annotations

from typing import NamedTuple

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import Instant
from gpool.core.permissions import TeamId
from gpool.server.store.protocol import Operation, operation
from gpool.server.store.rows import select

SCANNED = 20_000
"""Newest tasks of the pool among which a node's ended ones are looked for: there is no index by node."""


class NodeTask(NamedTuple):
    id: TaskId
    status: str
    holding: int
    user_id: UserId
    user_name: str
    team_id: TeamId | None
    leased_at: Instant | None
    started_at: Instant | None
    finished_at: Instant | None
    reason: str | None
    body: str  # of its spec
    allocation: str | None  # of its last lease; None of a gang, whose members have theirs


_COLUMNS = (
    "SELECT t.id, t.status, t.holding, t.user_id, u.name, t.team_id, t.leased_at, t.started_at, t.finished_at, "
    "t.reason, s.body, t.allocation FROM tasks t JOIN specs s ON s.id = t.spec_id JOIN users u ON u.id = t.user_id "
)


_HELD = (
    "WHERE t.id IN (SELECT h.id FROM tasks h WHERE h.node_id = :node AND h.holding = 1 "
    "UNION ALL SELECT m.task_id FROM members m WHERE m.node_id = :node AND m.holding = 1) ORDER BY t.id"
)
_ENDED = (
    "WHERE t.id IN (SELECT n.id FROM (SELECT t.id, t.node_id, t.holding FROM tasks t "
    "ORDER BY t.id DESC LIMIT :scanned) AS n WHERE n.node_id = :node AND n.holding = 0 "
    "ORDER BY n.id DESC LIMIT :limit) AND t.finished_at IS NOT NULL ORDER BY t.id DESC"
)


@operation
def held_by(node: NodeId) -> Operation[list[NodeTask]]:
    """Leases of the node, members of gangs among them, oldest first."""
    return (yield from select(NodeTask, _COLUMNS + _HELD, {"node": node}))


@operation
def ended_on(node: NodeId, limit: int) -> Operation[list[NodeTask]]:
    """Ended tasks whose last lease was the node's, newest first, among the pool's newest `SCANNED` tasks."""
    parameters = {"node": node, "limit": limit, "scanned": SCANNED}
    return (yield from select(NodeTask, _COLUMNS + _ENDED, parameters))
