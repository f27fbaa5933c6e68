"""Leases: granted by the scheduler, held by nodes, renewed by heartbeats, ended by reports or by expiry.

A lease gives one task to one node, with an allocation of that node. Its epoch is the number of the task's leases so
far. Nothing can stop a node that is cut off from the network: it goes on running a task whose lease has expired and
been granted to another node. So the store fences every write about a lease with (task, epoch, node): the statement
changes the row only if the task is held at that epoch by that node.

    time   task 7                      epoch  node   status
    0 s    submitted                   0      -      queued
    1 s    granted to node A           1      A      leased      the UPDATE requires epoch = 1 - 1 and 'queued'
    2 s    A reports Started(7, 1)     1      A      running
    20 s   A's last heartbeat was at 5 s; with a lease time of 15 s A is lost and all its leases expire
                                       1      -      queued      attempt 1 is archived as lost
    21 s   granted to node B           2      B      leased
    25 s   A is back and reports Finished(7, 1): refused, epoch 1 of A was archived as lost; A drops the lease
    30 s   B reports Finished(7, 2)    2      B      succeeded

The result is B's. Nor can two schedulers both grant: each takes a term (`grants.take_term`), and a plan, an expiry or
a loss of an earlier term is not applied. An expiry also requires that no newer heartbeat of the node is stored. The lease time limits how long a lost node delays a task; fencing, not time, makes the result
unique, so clocks of nodes need not agree.

`grants` applies plans, `reports` writes reports and expiry, `ends` the ends of leases, `gangs` leases of several nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpool.core.ids import NodeId, SpecId, TaskId, UserId
from gpool.core.model import Instant, Span, TaskSpec
from gpool.core.permissions import TeamId
from gpool.server.store.operations.leases import gang_members
from gpool.server.store.operations.leases.grants import apply_plan, is_current_term, take_term
from gpool.server.store.operations.leases.reports import (
    NotExpired,
    expire,
    expire_silent,
    record,
    record_if_current,
)
from gpool.server.store.operations.nodes import load_nodes
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import (
    OPEN_LEASE,
    OpenLease,
    held_lease,
    of_ids,
    select,
    select_pairs,
    spec_from,
    values,
)
from gpool.server.store.sealing import PAYLOAD, SPEC_BODY, opened
from gpool.server.store.values import (
    PREEMPTING,
    HeldLease,
    Picture,
    QueuedRow,
)
from gpool.wire.frames import Hold

HEARTBEATS = (("id", "int"), ("at", "int"))
Heartbeat = tuple[NodeId, Sequence[Hold], Instant]
"""The node, the leases it says it holds, and the time of arrival."""


class _Payload(NamedTuple):
    id: TaskId
    payload: bytes | None
    payload_sha256: str


class _OpenSpec(NamedTuple):
    id: SpecId
    user_id: UserId
    body: str
    team_id: TeamId | None


class _QueuedTask(NamedTuple):
    id: TaskId
    epoch: int
    spec_id: SpecId
    user_id: UserId
    queued_at: Instant


class _LeaseTimes(NamedTuple):
    node_id: NodeId
    leased_at: Instant
    queued_at: Instant | None


class _RunTime(NamedTuple):
    task_id: TaskId
    duration_us: int


class _FailedNode(NamedTuple):
    task_id: TaskId
    node_id: NodeId


class _Spec(NamedTuple):
    id: SpecId
    user_id: UserId
    body: str


class _CurrentLease(NamedTuple):
    node_id: NodeId
    task_id: TaskId
    epoch: int


@operation
def held(node: NodeId) -> Operation[tuple[HeldLease, ...]]:
    """All leases on the node, cancelled tasks included, in the order of its lease queues."""
    rows = yield from select_pairs(
        OpenLease,
        _Payload,
        f"SELECT {OPEN_LEASE}, t.id, t.payload, t.payload_sha256 FROM tasks t "  # noqa: S608
        "WHERE t.node_id = :node AND t.holding = 1 ORDER BY t.allocation_number, t.leased_at, t.id",
        {"node": node},
    )
    payloads = yield from opened([each for _, each in rows], PAYLOAD)
    single = tuple(
        held_lease(row, each.payload, each.payload_sha256)
        for (row, _), each in zip(rows, payloads, strict=True)
    )
    return single + (yield from gang_members.held_by(node))


@operation
def picture() -> Operation[Picture]:
    """All open tasks and nodes, for the scheduler's state. Held leases come without payloads."""
    specs = yield from select(
        _OpenSpec,
        "SELECT s.id, s.user_id, s.body, o.team_id FROM ("  # the tasks of a spec have one team, or none
        "SELECT t.spec_id, t.team_id FROM tasks t WHERE t.status = 'queued' UNION "
        "SELECT t.spec_id, t.team_id FROM tasks t WHERE t.holding = 1) AS o "
        "JOIN specs s ON s.id = o.spec_id ORDER BY s.id",
    )
    specs = yield from opened(specs, SPEC_BODY)
    queued = yield from select(
        _QueuedTask,
        "SELECT id, epoch, spec_id, user_id, queued_at FROM tasks WHERE status = 'queued' ORDER BY queued_at, id",
    )
    holding = yield from select_pairs(
        OpenLease,
        _LeaseTimes,
        f"SELECT {OPEN_LEASE}, t.node_id, t.leased_at, t.queued_at FROM tasks t "  # noqa: S608
        "WHERE t.holding = 1 AND t.node_id IS NOT NULL ORDER BY t.node_id, t.allocation_number, t.leased_at, t.id",
    )
    ran = yield from select(
        _RunTime,
        "SELECT a.task_id, SUM(a.ended_at - a.started_at) FROM attempts a JOIN tasks t ON t.id = a.task_id "
        "WHERE a.started_at IS NOT NULL AND (t.status = 'queued' OR t.holding = 1) GROUP BY a.task_id",
    )
    unstarted = yield from select(
        _FailedNode,
        "SELECT DISTINCT a.task_id, a.node_id FROM attempts a JOIN tasks t ON t.id = a.task_id "
        "WHERE a.started_at IS NULL AND a.reason IN ('sandbox_failed', 'node_failed') "
        "AND (t.status = 'queued' OR t.holding = 1) ORDER BY a.task_id, a.node_id",
    )
    preempting = yield from values(
        TaskId,
        "SELECT t.id FROM tasks t JOIN attempt_notes n ON n.task_id = t.id AND n.epoch = t.epoch "
        "WHERE t.holding = 1 AND t.node_id IS NOT NULL AND n.note = :note",
        {"note": PREEMPTING},
    )
    gangs = yield from gang_members.pictured()
    nodes = yield from load_nodes("true", {})
    since = [(row.id, times.leased_at, times.queued_at) for row, times in holding]
    since += [
        (gang.lease.task, times.leased_at, times.queued_at)
        for gang, times in gangs
        if times.leased_at is not None
    ]
    preempting += [gang.lease.task for gang, times in gangs if times.preempting]
    return Picture(
        specs=tuple((row.id, row.user_id, spec_from(row.body)) for row in specs),
        teams={row.id: row.team_id for row in specs if row.team_id is not None},
        queued=tuple(QueuedRow(*row) for row in queued),
        held=tuple((times.node_id, held_lease(row)) for row, times in holding),
        nodes=nodes,
        since={
            task: (leased_at, queued_at)
            for task, leased_at, queued_at in since
            if queued_at is not None
        },
        ran={row.task_id: Span(max(0, int(row.duration_us))) for row in ran},
        unstarted=tuple((row.task_id, row.node_id) for row in unstarted),
        preempting=tuple(preempting),
        gangs=tuple(gang for gang, _ in gangs),
    )


@operation
def spec(id: SpecId) -> Operation[tuple[UserId, TaskSpec] | None]:
    rows = yield from select(
        _Spec, "SELECT id, user_id, body FROM specs WHERE id = :id", {"id": id}
    )
    for row in (yield from opened(rows, SPEC_BODY)):
        return row.user_id, spec_from(row.body)
    return None


@operation
def record_heartbeats(heartbeats: Sequence[Heartbeat]) -> Operation[list[tuple[Hold, ...]]]:
    """Record heartbeats; return, for each, the leases that the node does not hold any more.

    A cancelled task's lease is held until the node releases it. Leases are read in the transaction that renews them, so
    none can expire in between.
    """
    latest: dict[NodeId, Instant] = {}
    for node, _, at in heartbeats:
        latest[node] = max(at, latest.get(node, at))
    yield Statement(
        "UPDATE nodes SET last_beat_at = b.at FROM {heartbeats} AS b WHERE nodes.id = b.id",
        {},
        {"heartbeats": Relation(HEARTBEATS, sorted(latest.items()))},
    )
    holding = {node for node, holds, _ in heartbeats if holds}
    if not holding:
        return [() for _ in heartbeats]
    rows = yield from select(
        _CurrentLease,
        "SELECT t.node_id, t.id, t.epoch FROM {nodes} AS n JOIN tasks t ON t.node_id = n.id WHERE t.holding = 1 UNION ALL "
        "SELECT m.node_id, m.task_id, m.epoch FROM {nodes} AS n JOIN members m ON m.node_id = n.id WHERE m.holding = 1",
        {},
        {"nodes": of_ids(holding)},
    )
    current: set[tuple[int, ...]] = set(rows)
    return [
        tuple(hold for hold in holds if (node, hold.task, hold.epoch) not in current)
        for node, holds, _ in heartbeats
    ]


__all__ = [
    "Heartbeat",
    "NotExpired",
    "apply_plan",
    "expire",
    "expire_silent",
    "held",
    "is_current_term",
    "picture",
    "record",
    "record_heartbeats",
    "record_if_current",
    "spec",
    "take_term",
]
