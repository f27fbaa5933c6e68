"""State of gangs and members, read for reports, connecting nodes and users. Writes nothing.

While a gang holds allocations, its task's row has no node; each member's row has one, and `holding` until that node
has released it. (task, epoch, node) identifies a member: a node has at most one of a gang.
One file because all of it reads the same two tables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpool.core.gangs import GangOrder, GangStanding, MemberEnd, call, common_link
from gpool.core.ids import NodeId, SpecId, TaskId
from gpool.core.model import Instant, Offer, TaskSpec, TaskStatus
from gpool.core.scheduler.state.events import GangPart, Placement
from gpool.server.store.generated_rows import MembersRecord
from gpool.server.store.protocol import Operation, Relation, Row, Statement, operation
from gpool.server.store.rows import (
    REASON,
    OpenLease,
    allocation_from,
    allocation_text,
    columns,
    held_lease,
    of_ids,
    offer_from,
    select,
    select_pairs,
    spec_from,
)
from gpool.server.store.sealing import BODY_OF_TASK, MEMBER_DETAIL, PAYLOAD_OF_TASK, opened
from gpool.server.store.values import (
    PREEMPTING,
    GangMeeting,
    HeldGang,
    HeldLease,
    HeldMember,
    MemberView,
)
from gpool.wire.frames import Hold

GANGS = (("task", "int"), ("epoch", "int"), ("secret", "blob"), ("link", "text"))
GRANTED = (
    ("task", "int"),
    ("rank", "int"),
    ("epoch", "int"),
    ("node", "int"),
    ("number", "int"),
    ("allocation", "text"),
    ("host", "text"),
    ("port", "int"),
)


class _NodeOffer(NamedTuple):
    id: NodeId
    offer: str


def members_of(place: Placement) -> tuple[GangPart, ...]:
    return (GangPart(place.node, place.allocation), *place.members)


def is_whole(place: Placement) -> bool:
    """Whether a place has as many different nodes as its task asks for; of a gang, for one task only."""
    if not place.members:
        return place.shape.requirements.nodes <= 1
    nodes = {member.node for member in members_of(place)}
    return (
        len(place.grants) == 1
        and len(nodes) == len(place.members) + 1 == place.shape.requirements.nodes
    )


def offers_for(places: Sequence[Placement]) -> Operation[dict[NodeId, Offer]]:
    nodes = of_ids(member.node for place in places if place.members for member in members_of(place))
    if not nodes.rows:
        return {}
    asked = "SELECT n.id, n.offer FROM {nodes} AS i JOIN nodes n ON n.id = i.id"
    rows = yield from select(_NodeOffer, asked, {}, {"nodes": nodes})
    return {row.id: offer_from(row.offer) for row in rows}


def can_connect(place: Placement, offers: Mapping[NodeId, Offer]) -> bool:
    if not place.members:
        return True
    found = [offers[member.node] for member in members_of(place)]
    site = found[0].site
    return bool(site) and all(
        offer.site == site and offer.address and offer.gang_port for offer in found
    )


def write_granted(
    granted: Sequence[Placement], offers: Mapping[NodeId, Offer], secrets: Mapping[TaskId, bytes]
) -> Operation[dict[TaskId, GangMeeting]]:
    meetings: dict[TaskId, GangMeeting] = {}
    rows: list[Row] = []
    shared: list[Row] = []
    for place in granted:
        (grant,) = place.grants
        found = []
        for rank, member in enumerate(members_of(place)):
            offer, number = offers[member.node], member.allocation.number
            peer = (offer.address, offer.gang_port + number)
            found.append(peer)
            text = allocation_text(member.allocation)
            rows.append((grant.task, rank, grant.epoch, member.node, number, text, *peer))
        link = common_link(offers[member.node].gang_links for member in members_of(place))
        meetings[grant.task] = GangMeeting(tuple(found), link)
        shared.append((grant.task, grant.epoch, secrets.get(grant.task, b""), link.value))
    yield from delete_rows("members", meetings)
    yield from delete_rows("gangs", meetings)
    yield Statement(
        "INSERT INTO gangs (task_id, epoch, secret_sealed, link) SELECT g.task, g.epoch, g.secret, g.link "
        "FROM {shared} AS g",
        {},
        {"shared": Relation(GANGS, shared)},
    )
    yield Statement(
        "INSERT INTO members (task_id, rank, epoch, node_id, allocation_number, allocation, host, port, holding) "
        "SELECT m.task, m.rank, m.epoch, m.node, m.number, m.allocation, m.host, m.port, 1 FROM {members} AS m",
        {},
        {"members": Relation(GRANTED, rows)},
    )
    return meetings


def delete_rows(table: str, tasks: Iterable[TaskId]) -> Operation[None]:
    yield Statement(
        f"DELETE FROM {table} WHERE task_id IN (SELECT id FROM {{tasks}} AS i)",  # noqa: S608
        {},
        {"tasks": of_ids(tasks)},
    )


OPEN_MEMBER = "t.id, t.epoch, t.user_id, t.status, t.spec_id, m.allocation_number, m.allocation"
"""The columns of `OpenLease`, with the member's allocation."""


class MemberStatus(NamedTuple):
    """Columns of a member that decide on the gang. `place`: order of its end among the members."""

    task_id: TaskId
    rank: int
    node_id: NodeId
    holding: int
    started_at: Instant | None
    place: int | None
    reason: str | None
    exit_code: int | None
    detail: str
    duration_us: int
    outputs: str | None
    host: str
    port: int
    allocation: str

    @property
    def end(self) -> MemberEnd | None:
        if self.holding or self.place is None or self.reason is None:
            return None
        return MemberEnd(self.rank, self.place, REASON[self.reason], self.exit_code)


MEMBER_STATUS = columns(MemberStatus, MembersRecord, "m")


@dataclass(frozen=True, slots=True)
class GangStatus:
    spec: TaskSpec
    members: tuple[MemberStatus, ...]
    preempting: bool

    @property
    def standing(self) -> GangStanding:
        return GangStanding(
            len(self.members),
            self.spec.engine,
            self.spec.on_loss,
            tuple(end for member in self.members if (end := member.end) is not None),
            self.preempting,
        )

    @property
    def holding(self) -> list[NodeId]:
        return [member.node_id for member in self.members if member.holding or member.place is None]

    def with_member(self, member: MemberStatus) -> GangStatus:
        members = (*self.members[: member.rank], member, *self.members[member.rank + 1 :])
        return replace(self, members=members)


class _GangTask(NamedTuple):
    id: TaskId
    spec_id: SpecId
    body: str
    preempting: int


class _MemberHold(NamedTuple):
    node_id: NodeId
    task_id: TaskId
    epoch: int


class _MemberLease(NamedTuple):
    task_id: TaskId
    rank: int
    started_at: Instant | None
    payload: bytes | None
    payload_sha256: str
    secret_sealed: bytes
    link: str


class _HeldByNode(NamedTuple):
    task_id: TaskId
    node_id: NodeId
    is_over: int


class _MemberKey(NamedTuple):
    task_id: TaskId
    rank: int


class LeaseTimes(NamedTuple):
    node_id: NodeId
    rank: int
    leased_at: Instant | None
    queued_at: Instant | None
    preempting: int


class _MemberOfView(NamedTuple):
    task_id: TaskId
    rank: int
    node_id: NodeId
    name: str | None
    allocation_number: int
    allocation: str
    holding: int
    started_at: Instant | None
    reason: str | None
    exit_code: int | None


def gangs(tasks: Iterable[TaskId]) -> Operation[dict[TaskId, GangStatus]]:
    """Read gangs by task. A caller that decides on them has locked their tasks' rows."""
    wanted = of_ids(tasks)
    if not wanted.rows:
        return {}
    rows = yield from select(
        MemberStatus,
        f"SELECT {MEMBER_STATUS} FROM {{tasks}} AS i JOIN members m ON m.task_id = i.id "  # noqa: S608
        "ORDER BY m.task_id, m.rank",
        {},
        {"tasks": wanted},
    )
    rows = yield from opened(rows, MEMBER_DETAIL)
    members: dict[TaskId, list[MemberStatus]] = {}
    for row in rows:
        members.setdefault(row.task_id, []).append(row)
    facts = yield from select(
        _GangTask,
        "SELECT t.id, t.spec_id, s.body, EXISTS (SELECT 1 FROM attempt_notes n WHERE n.task_id = t.id AND n.epoch = t.epoch "
        "AND n.note = :note) FROM {tasks} AS i JOIN tasks t ON t.id = i.id JOIN specs s ON s.id = t.spec_id",
        {"note": PREEMPTING},
        {"tasks": wanted},
    )
    facts = yield from opened(facts, BODY_OF_TASK)
    return {
        task.id: GangStatus(spec_from(task.body), tuple(members[task.id]), bool(task.preempting))
        for task in facts
        if task.id in members
    }


def holders(tasks: Iterable[TaskId]) -> Operation[tuple[tuple[NodeId, Hold], ...]]:
    wanted = of_ids(tasks)
    if not wanted.rows:
        return ()
    rows = yield from select(
        _MemberHold,
        "SELECT m.node_id, m.task_id, m.epoch FROM {tasks} AS i JOIN members m ON m.task_id = i.id "
        "WHERE m.holding = 1 ORDER BY m.task_id, m.rank",
        {},
        {"tasks": wanted},
    )
    return tuple((row.node_id, Hold(row.task_id, row.epoch)) for row in rows)


def preemptible(tasks: Iterable[TaskId]) -> Operation[dict[TaskId, list[NodeId]]]:
    found = yield from gangs(tasks)
    return {
        task: gang.holding
        for task, gang in found.items()
        if gang.preempting or call(gang.standing) is None
    }


def held_by(node: NodeId) -> Operation[tuple[HeldLease, ...]]:
    """The node's members of gangs; those of a gang that is over are cancelled."""
    rows = yield from select_pairs(
        OpenLease,
        _MemberLease,
        f"SELECT {OPEN_MEMBER}, m.task_id, m.rank, m.started_at, t.payload, t.payload_sha256, g.secret_sealed, g.link "  # noqa: S608
        "FROM members m JOIN tasks t ON t.id = m.task_id JOIN gangs g ON g.task_id = t.id "
        "WHERE m.node_id = :node AND m.holding = 1 ORDER BY t.id",
        {"node": node},
    )
    found = yield from gangs(row.id for row, _ in rows)
    members = yield from opened([member for _, member in rows], PAYLOAD_OF_TASK)
    return tuple(
        _held(row, member, found[row.id]) for (row, _), member in zip(rows, members, strict=True)
    )


def _held(row: OpenLease, member: _MemberLease, gang: GangStatus) -> HeldLease:
    lease = held_lease(row, member.payload, member.payload_sha256)
    instruction = call(gang.standing)
    if instruction is None and gang.preempting:
        instruction = GangOrder.BACK
    if lease.status is TaskStatus.CANCELLED or instruction is GangOrder.END:
        status = TaskStatus.CANCELLED
    else:
        status = TaskStatus.LEASED if member.started_at is None else TaskStatus.RUNNING
    peers = tuple((each.host, each.port) for each in gang.members)
    meeting = GangMeeting(peers, member.link)
    shown = HeldMember(member.rank, meeting, bytes(member.secret_sealed), instruction)
    return replace(lease, status=status, gang=shown)


@operation
def overdue(before: Instant) -> Operation[tuple[NodeId, ...]]:
    """Nodes that still hold a member of a gang that was cancelled, or called off after a failure, before then."""
    rows = yield from select(
        _HeldByNode,
        "SELECT m.task_id, m.node_id, t.finished_at IS NOT NULL FROM members m JOIN tasks t ON t.id = m.task_id "
        "WHERE m.holding = 1 AND (t.finished_at < :before OR t.finished_at IS NULL AND EXISTS ("
        "SELECT 1 FROM members e WHERE e.task_id = m.task_id AND e.ended_at < :before)) ORDER BY m.node_id",
        {"before": before},
    )
    undecided = {row.task_id for row in rows if not row.is_over}
    found = yield from gangs(undecided)
    ended = yield from select(
        _MemberKey,
        "SELECT m.task_id, m.rank FROM {tasks} AS i JOIN members m ON m.task_id = i.id WHERE m.ended_at < :before",
        {"before": before},
        {"tasks": of_ids(undecided)},
    )
    by_then = set(ended)
    over = {task for task, gang in found.items() if _is_over(task, gang.standing, by_then)}
    return tuple(dict.fromkeys(row.node_id for row in rows if row.is_over or row.task_id in over))


def _is_over(task: TaskId, gang: GangStanding, by_then: set[_MemberKey]) -> bool:
    ends = tuple(end for end in gang.ends if (task, end.rank) in by_then)
    return call(replace(gang, ends=ends)) is GangOrder.END


def pictured(
    tasks: Collection[TaskId] | None = None,
) -> Operation[tuple[tuple[HeldGang, LeaseTimes], ...]]:
    """Gangs that hold allocations: all, or those of `tasks`."""
    if tasks is not None and not tasks:
        return ()
    of_these = "" if tasks is None else "AND t.id IN (SELECT id FROM {tasks} AS i) "
    rows = yield from select_pairs(
        OpenLease,
        LeaseTimes,
        f"SELECT {OPEN_MEMBER}, m.node_id, m.rank, t.leased_at, t.queued_at, EXISTS (SELECT 1 FROM attempt_notes n "  # noqa: S608
        "WHERE n.task_id = t.id AND n.epoch = t.epoch AND n.note = :note) "
        f"FROM tasks t JOIN members m ON m.task_id = t.id WHERE t.holding = 1 AND t.node_id IS NULL {of_these}"
        "ORDER BY t.id, m.rank",
        {"note": PREEMPTING},
        {} if tasks is None else {"tasks": of_ids(tasks)},
    )
    by_task: dict[TaskId, list[tuple[OpenLease, LeaseTimes]]] = {}
    for row, times in rows:
        by_task.setdefault(row.id, []).append((row, times))
    found = []
    for (lease, first), *others in by_task.values():
        members = tuple(
            GangPart(times.node_id, allocation_from(row.allocation_number, row.allocation))
            for row, times in others
        )
        found.append((HeldGang(first.node_id, held_lease(lease), members), first))
    return tuple(found)


def views(tasks: Iterable[TaskId]) -> Operation[dict[TaskId, tuple[MemberView, ...]]]:
    wanted = of_ids(tasks)
    if not wanted.rows:
        return {}
    rows = yield from select(
        _MemberOfView,
        "SELECT m.task_id, m.rank, m.node_id, n.name, m.allocation_number, m.allocation, m.holding, m.started_at, "
        "m.reason, m.exit_code FROM {tasks} AS i JOIN members m ON m.task_id = i.id "
        "JOIN tasks t ON t.id = m.task_id AND t.epoch = m.epoch LEFT JOIN nodes n ON n.id = m.node_id "
        "WHERE t.status <> 'queued' ORDER BY m.task_id, m.rank",
        {},
        {"tasks": wanted},
    )
    found: dict[TaskId, list[MemberView]] = {}
    for row in rows:
        if row.holding:
            status = "leased" if row.started_at is None else "running"
        else:
            status = row.reason or "ended"
        allocation = allocation_from(row.allocation_number, row.allocation)
        view = MemberView(row.rank, row.node_id, row.name, allocation, status, row.exit_code)
        found.setdefault(row.task_id, []).append(view)
    return {task: tuple(members) for task, members in found.items()}
