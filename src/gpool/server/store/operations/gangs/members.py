"""Gangs that hold something, and how their members stand: read for reports, for nodes that connect, for people. Writes nothing.

The task's own row has no node while a gang holds it; each member's row has one, and holds on until that node has let go.
A member is known by (task, epoch, node): a node has at most one of a gang.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpool.core.gangs import GangOrder, GangStanding, MemberEnd, call
from gpool.core.ids import NodeId
from gpool.core.model import Instant, TaskSpec, TaskStatus
from gpool.core.scheduler.state.events import Member
from gpool.server.store.operation import operation
from gpool.server.store.protocol import Operation, Row, Statement
from gpool.server.store.rows import REASON, allocation_from, held_lease, of_ids, spec_from
from gpool.server.store.values import PREEMPTING, HeldGang, HeldLease, HeldMember, MemberView, Peers
from gpool.wire.frames import Hold

PART = (
    "m.task_id, m.rank, m.node_id, m.holding, m.started_at, m.place, m.reason, m.exit_code, m.detail, "
    "m.duration_us, m.outputs, m.host, m.port"
)

OPEN = "t.id, t.epoch, t.user_id, t.status, t.spec_id, m.allocation_number, m.allocation"
"""As `rows.held_lease` reads it."""


@dataclass(frozen=True, slots=True)
class Part:
    """One member's row, as far as the gang's fate depends on it. `place` is None while it holds on."""

    rank: int
    node: NodeId
    started_at: int | None
    place: int | None
    reason: str | None
    exit_code: int | None
    detail: str
    duration_us: int
    outputs: str | None
    peer: tuple[str, int]

    @property
    def end(self) -> MemberEnd | None:
        if self.place is None or self.reason is None:
            return None
        return MemberEnd(self.rank, self.place, REASON[self.reason], self.exit_code)


@dataclass(frozen=True, slots=True)
class Gang:
    """A gang as it stands, its parts by rank."""

    spec: TaskSpec
    parts: tuple[Part, ...]
    making_room: bool

    @property
    def standing(self) -> GangStanding:
        return GangStanding(
            len(self.parts),
            self.spec.engine,
            self.spec.on_loss,
            tuple(end for part in self.parts if (end := part.end) is not None),
            self.making_room,
        )

    @property
    def holding(self) -> list[NodeId]:
        """Who has not let go."""
        return [part.node for part in self.parts if part.place is None]

    @property
    def peers(self) -> Peers:
        return tuple(part.peer for part in self.parts)

    def with_part(self, part: Part) -> Gang:
        parts = (*self.parts[: part.rank], part, *self.parts[part.rank + 1 :])
        return replace(self, parts=parts)


def gangs(tasks: Iterable[int]) -> Operation[dict[int, Gang]]:
    """By task. Their task rows are locked before, where something depends on it."""
    wanted = of_ids(tasks)
    if not wanted.rows:
        return {}
    rows = yield Statement(
        f"SELECT {PART} FROM {{tasks}} AS i JOIN members m ON m.task_id = i.id ORDER BY m.task_id, m.rank",  # noqa: S608
        {},
        {"tasks": wanted},
    )
    parts: dict[int, list[Part]] = {}
    for row in rows:
        parts.setdefault(row[0], []).append(_part(row))
    facts = yield Statement(
        "SELECT t.id, s.body, EXISTS (SELECT 1 FROM attempt_notes n WHERE n.task_id = t.id AND n.epoch = t.epoch "
        "AND n.note = :note) FROM {tasks} AS i JOIN tasks t ON t.id = i.id JOIN specs s ON s.id = t.spec_id",
        {"note": PREEMPTING},
        {"tasks": wanted},
    )
    return {
        task: Gang(spec_from(body), tuple(parts[task]), bool(asked))
        for task, body, asked in facts
        if task in parts
    }


def _part(row: Row) -> Part:
    return Part(
        row[1],
        NodeId(row[2]),
        row[4],
        None if row[3] else row[5],
        row[6],
        row[7],
        row[8],
        row[9],
        row[10],
        (row[11], row[12]),
    )


def holders(tasks: Iterable[int]) -> Operation[tuple[tuple[NodeId, Hold], ...]]:
    """The nodes that have not let go of these gangs."""
    wanted = of_ids(tasks)
    if not wanted.rows:
        return ()
    rows = yield Statement(
        "SELECT m.node_id, m.task_id, m.epoch FROM {tasks} AS i JOIN members m ON m.task_id = i.id "
        "WHERE m.holding = 1 ORDER BY m.task_id, m.rank",
        {},
        {"tasks": wanted},
    )
    return tuple((NodeId(node), Hold(task, epoch)) for node, task, epoch in rows)


def can_make_room(tasks: Iterable[int]) -> Operation[dict[int, list[NodeId]]]:
    """Of these gangs, who is to be asked; those that stop already are left alone."""
    found = yield from gangs(tasks)
    return {
        task: gang.holding
        for task, gang in found.items()
        if gang.making_room or call(gang.standing) is None
    }


def held_by(node: NodeId) -> Operation[tuple[HeldLease, ...]]:
    """The node's parts of gangs; where the gang is over, as cancelled."""
    rows = yield Statement(
        f"SELECT {OPEN}, m.rank, m.started_at, t.payload, t.payload_sha256, g.secret_sealed "  # noqa: S608
        "FROM members m JOIN tasks t ON t.id = m.task_id JOIN gangs g ON g.task_id = t.id "
        "WHERE m.node_id = :node AND m.holding = 1 ORDER BY t.id",
        {"node": node},
    )
    found = yield from gangs(row[0] for row in rows)
    return tuple(_held(row, found[row[0]]) for row in rows)


def _held(row: Row, gang: Gang) -> HeldLease:
    lease = held_lease(row, row[9], row[10])
    told = call(gang.standing)
    if told is None and gang.making_room:
        told = GangOrder.BACK
    if lease.status is TaskStatus.CANCELLED or told is GangOrder.END:
        status = TaskStatus.CANCELLED
    else:
        status = TaskStatus.LEASED if row[8] is None else TaskStatus.RUNNING
    return replace(lease, status=status, gang=HeldMember(row[7], gang.peers, bytes(row[11]), told))


@operation
def overdue(before: Instant) -> Operation[tuple[NodeId, ...]]:
    """Nodes that still hold on to a gang that was over before then: cancelled, or failed and called off."""
    rows = yield Statement(
        "SELECT m.task_id, m.node_id, t.finished_at IS NOT NULL FROM members m JOIN tasks t ON t.id = m.task_id "
        "WHERE m.holding = 1 AND (t.finished_at < :before OR t.finished_at IS NULL AND EXISTS ("
        "SELECT 1 FROM members e WHERE e.task_id = m.task_id AND e.ended_at < :before)) ORDER BY m.node_id",
        {"before": before},
    )
    doubtful = {task for task, _, is_over in rows if not is_over}
    found = yield from gangs(doubtful)
    ended = yield Statement(
        "SELECT m.task_id, m.rank FROM {tasks} AS i JOIN members m ON m.task_id = i.id WHERE m.ended_at < :before",
        {"before": before},
        {"tasks": of_ids(doubtful)},
    )
    by_then = {(task, rank) for task, rank in ended}
    over = {task for task, gang in found.items() if _is_over(task, gang.standing, by_then)}
    return tuple(
        dict.fromkeys(NodeId(node) for task, node, is_over in rows if is_over or task in over)
    )


def _is_over(task: int, gang: GangStanding, by_then: set[tuple[int, int]]) -> bool:
    ends = tuple(end for end in gang.ends if (task, end.rank) in by_then)
    return call(replace(gang, ends=ends)) is GangOrder.END


def pictured() -> Operation[tuple[tuple[HeldGang, Row], ...]]:
    """All that hold something, each with (leased_at, queued_at, whether it was asked to make room)."""
    rows = yield Statement(
        f"SELECT {OPEN}, m.node_id, m.rank, t.leased_at, t.queued_at, EXISTS (SELECT 1 FROM attempt_notes n "  # noqa: S608
        "WHERE n.task_id = t.id AND n.epoch = t.epoch AND n.note = :note) "
        "FROM tasks t JOIN members m ON m.task_id = t.id WHERE t.holding = 1 AND t.node_id IS NULL "
        "ORDER BY t.id, m.rank",
        {"note": PREEMPTING},
    )
    by_task: dict[int, list[Row]] = {}
    for row in rows:
        by_task.setdefault(row[0], []).append(row)
    found = []
    for first, *others in by_task.values():
        members = tuple(Member(NodeId(row[7]), allocation_from(row[5], row[6])) for row in others)
        found.append((HeldGang(NodeId(first[7]), held_lease(first), members), first[9:]))
    return tuple(found)


def views(tasks: Iterable[int]) -> Operation[dict[int, tuple[MemberView, ...]]]:
    """The members of these tasks' last leases, by rank."""
    wanted = of_ids(tasks)
    if not wanted.rows:
        return {}
    rows = yield Statement(
        "SELECT m.task_id, m.rank, m.node_id, n.name, m.allocation_number, m.allocation, m.holding, m.started_at, "
        "m.reason, m.exit_code FROM {tasks} AS i JOIN members m ON m.task_id = i.id "
        "JOIN tasks t ON t.id = m.task_id AND t.epoch = m.epoch LEFT JOIN nodes n ON n.id = m.node_id "
        "WHERE t.status <> 'queued' ORDER BY m.task_id, m.rank",
        {},
        {"tasks": wanted},
    )
    found: dict[int, list[MemberView]] = {}
    for task, rank, node, name, number, text, holding, started, reason, code in rows:
        status = ("leased" if started is None else "running") if holding else reason or "ended"
        made = MemberView(rank, NodeId(node), name, allocation_from(number, text), status, code)
        found.setdefault(task, []).append(made)
    return {task: tuple(members) for task, members in found.items()}
