"""Tasks on one node, for its owner: held leases, and the newest ended ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gpool.core.ids import NodeId, SpecId, TaskId, UserId
from gpool.core.model import Instant
from gpool.core.permissions import TeamId
from gpool.server.store.protocol import Operation, operation
from gpool.server.store.rows import select, values
from gpool.server.store.sealing import BODY_OF_TASK, opened

SCANNED = 20_000
"""Tasks of the pool that one statement examines: there is no index by node, which every lease would have to write."""

LAST = (1 << 63) - 1


class NodeTask(NamedTuple):
    id: TaskId
    spec_id: SpecId
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


@dataclass(frozen=True, slots=True)
class EndedPage:
    tasks: list[NodeTask]
    last: TaskId | None  # the oldest examined task; None: no older one exists


_COLUMNS = (
    "SELECT t.id, t.spec_id, t.status, t.holding, t.user_id, u.name, t.team_id, t.leased_at, t.started_at, t.finished_at, "
    "t.reason, s.body, t.allocation FROM tasks t JOIN specs s ON s.id = t.spec_id JOIN users u ON u.id = t.user_id "
)


_HELD = (
    "WHERE t.id IN (SELECT h.id FROM tasks h WHERE h.node_id = :node AND h.holding = 1 "
    "UNION ALL SELECT m.task_id FROM members m WHERE m.node_id = :node AND m.holding = 1) ORDER BY t.id"
)
_PAGE = "SELECT p.id, p.node_id, p.holding FROM tasks p WHERE p.id < :before ORDER BY p.id DESC LIMIT :scanned"
_ENDED = (
    f"WHERE t.id IN (SELECT n.id FROM ({_PAGE}) AS n WHERE n.node_id = :node AND n.holding = 0 "  # noqa: S608
    "ORDER BY n.id DESC LIMIT :limit) AND t.finished_at IS NOT NULL ORDER BY t.id DESC"
)


@operation
def held_by(node: NodeId) -> Operation[list[NodeTask]]:
    """Leases of the node, members of gangs among them, oldest first."""
    rows = yield from select(NodeTask, _COLUMNS + _HELD, {"node": node})
    return (yield from opened(rows, BODY_OF_TASK))


@operation
def ended_on(
    node: NodeId, limit: int, before: TaskId | None = None, scanned: int = SCANNED
) -> Operation[EndedPage]:
    """Ended tasks whose last lease was the node's, newest first, among the `scanned` tasks before `before`."""
    page: dict[str, int] = {"before": LAST if before is None else before, "scanned": scanned}
    found = yield from select(NodeTask, _COLUMNS + _ENDED, {**page, "node": node, "limit": limit})
    examined = yield from values(
        TaskId,
        "SELECT p.id FROM tasks p WHERE p.id < :before ORDER BY p.id DESC LIMIT 1 OFFSET :scanned - 1",
        page,
    )
    found = yield from opened(found, BODY_OF_TASK)
    return EndedPage(found, examined[0] if examined else None)
