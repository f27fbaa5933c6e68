"""Leases: granted by a plan, held by nodes, ended by reports or expiry. A grant is written only on a queued task."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import msgspec

from gpool.core.ids import NodeId, SpecId, TaskId, UserId
from gpool.core.lifecycle import Move, sources
from gpool.core.model import Allocation, InputFile, Instant, Span, TaskSpec
from gpool.core.scheduler.state.events import GangPart, Placement
from gpool.server.store.operation import operation
from gpool.server.store.operations.gangs import members
from gpool.server.store.operations.gangs.grants import can_meet, is_whole, offers_for, write_granted
from gpool.server.store.operations.identity.sealed_fields import secrets_to_open
from gpool.server.store.operations.leases.reports import expire, record, record_together
from gpool.server.store.operations.nodes.nodes import load_nodes
from gpool.server.store.operations.tasks.checkpoints import manifests
from gpool.server.store.protocol import Operation, Relation, Row, Statement
from gpool.server.store.rows import HELD_COLUMNS, allocation_text, held_lease, of_ids, spec_from
from gpool.server.store.values import (
    PREEMPTING,
    AppliedPlan,
    GrantedLine,
    HeldLease,
    Peers,
    Picture,
    QueuedRow,
)
from gpool.wire.frames import Lease

GRANTS = (
    ("id", "int"),
    ("epoch", "int"),
    ("node", "int"),
    ("number", "int"),
    ("allocation", "text"),
)
NO_GANGS: Mapping[TaskId, bytes] = MappingProxyType({})
GRANTABLE = ", ".join(f"'{status.value}'" for status in sources(Move.GRANTED))


@operation
def apply_plan(
    places: Sequence[Placement],
    term: int,
    at: Instant,
    with_secrets: Collection[SpecId] = (),
    with_checkpoints: Collection[SpecId] = (),
    gang_secrets: Mapping[TaskId, bytes] = NO_GANGS,
) -> Operation[AppliedPlan]:
    """Writes what is still so.

    Grants on a node that is gone or takes nothing new, or on a flagged GPU, are left out; their tasks stay queued. A gang is
    granted on all of its nodes or on none, and only where they reach each other. `gang_secrets`: what its members will share, sealed.
    `with_secrets`: the specs that have some; those of what is granted come along, still sealed.
    `with_checkpoints`: the specs that may have left one; nothing is looked up for the others.
    """
    current = yield Statement(
        "SELECT term FROM scheduler_term WHERE id = 1 /*postgresql FOR SHARE*/"
    )
    if not current or current[0][0] != term:
        return AppliedPlan((), (), deposed=True)
    wanted = [(place.node, place.allocation) for place in places]
    wanted += [(part.node, part.allocation) for place in places for part in place.members]
    rows = yield Statement(
        "SELECT n.id FROM {nodes} AS i JOIN nodes n ON n.id = i.id WHERE n.availability = 'available' "
        "/*postgresql FOR SHARE OF n*/",
        {},
        {"nodes": of_ids(node for node, _ in wanted)},
    )
    takes = {row[0] for row in rows}
    flagged = yield from _flagged(wanted)
    offers = yield from offers_for(places)
    open_places = [
        place
        for place in places
        if place.node in takes
        and not any((place.node, part.gpu_index) in flagged for part in place.allocation.slices)
        and is_whole(place)
        and all(_takes(part, takes, flagged) for part in place.members)
        and can_meet(place, offers)
    ]
    grants: dict[int, Row] = {}  # a task named twice goes to the first place that names it
    for place in open_places:
        node: NodeId | None = place.node
        number: int | None = place.allocation.number
        text: str | None = allocation_text(place.allocation)
        if place.members:  # its members have what it holds
            node = number = text = None
        for grant in place.grants:
            if grant.task not in grants:
                grants[grant.task] = (grant.task, grant.epoch, node, number, text)
    if not grants:
        return AppliedPlan((), ())
    granted: dict[int, Row] = {}
    rows = yield Statement(
        "UPDATE tasks SET status = 'leased', epoch = g.epoch, node_id = g.node, holding = 1, "  # noqa: S608
        "allocation_number = g.number, allocation = g.allocation, leased_at = :at FROM {grants} AS g "
        f"WHERE tasks.id = g.id AND tasks.epoch = g.epoch - 1 AND tasks.status IN ({GRANTABLE}) "
        "RETURNING tasks.id, spec_id, payload, payload_sha256",
        {"at": at},
        {"grants": Relation(GRANTS, list(grants.values()))},
    )
    for row in rows:
        granted[row[0]] = row
    begun: dict[int, tuple[InputFile, ...]] = {}
    if with_checkpoints:
        begun = yield from manifests(
            row[0] for row in rows if row[1] in with_checkpoints and grants[row[0]][1] > 1
        )
    lines: list[GrantedLine] = []
    refused: list[TaskId] = []
    for place in open_places:
        leases: list[tuple[SpecId, Lease]] = []
        for grant in place.grants:
            found = granted.pop(grant.task, None)
            if found is None:
                refused.append(grant.task)
            else:
                lease = Lease(grant.task, grant.epoch, bytes(found[2] or b""), found[3])
                if begun and grant.task in begun:
                    lease = msgspec.structs.replace(lease, checkpoint=begun[grant.task])
                leases.append((found[1], lease))
        if leases:
            lines.append(GrantedLine(place, tuple(leases)))
    whole = [line.place for line in lines if line.place.members]
    if whole:
        peers = yield from write_granted(whole, offers, gang_secrets)
        lines = [_met(line, peers) if line.place.members else line for line in lines]
    secret = {spec for line in lines for spec, _ in line.leases if spec in with_secrets}
    return AppliedPlan(tuple(lines), tuple(refused), secrets=(yield from secrets_to_open(secret)))


def _takes(part: GangPart, takes: set[int], flagged: set[tuple[int, int]]) -> bool:
    disputed = any((part.node, each.gpu_index) in flagged for each in part.allocation.slices)
    return part.node in takes and not disputed


def _met(line: GrantedLine, peers: Mapping[TaskId, Peers]) -> GrantedLine:
    return replace(line, peers=peers[line.place.grants[0].task])


def _flagged(wanted: Sequence[tuple[NodeId, Allocation]]) -> Operation[set[tuple[int, int]]]:
    """(node, index) of GPUs that nobody may have: disputed, or not proven."""
    on_gpus = {node for node, allocation in wanted if allocation.slices}
    if not on_gpus:
        return set()
    rows = yield Statement(
        "SELECT g.node_id, g.position FROM {nodes} AS i JOIN gpus g ON g.node_id = i.id "
        "WHERE (g.flagged IS NOT NULL OR g.unproven IS NOT NULL) AND g.gone = 0",
        {},
        {"nodes": of_ids(on_gpus)},
    )
    return {(row[0], row[1]) for row in rows}


@operation
def held(node: NodeId) -> Operation[tuple[HeldLease, ...]]:
    """Everything that holds something there, cancelled tasks too; line by line."""
    rows = yield Statement(
        f"SELECT {HELD_COLUMNS}, t.payload, t.payload_sha256 FROM tasks t "  # noqa: S608
        "WHERE t.node_id = :node AND t.holding = 1 ORDER BY t.allocation_number, t.leased_at, t.id",
        {"node": node},
    )
    ordinary = tuple(held_lease(row, row[7], row[8]) for row in rows)
    return ordinary + (yield from members.held_by(node))


@operation
def picture() -> Operation[Picture]:
    """All that is open. Held leases come without their payloads: the scheduler has no use for them."""
    specs = yield Statement(
        "SELECT s.id, s.user_id, s.body, o.team_id FROM ("  # a spec is one team's, or nobody's
        "SELECT t.spec_id, t.team_id FROM tasks t WHERE t.status = 'queued' UNION "
        "SELECT t.spec_id, t.team_id FROM tasks t WHERE t.holding = 1) AS o "
        "JOIN specs s ON s.id = o.spec_id ORDER BY s.id"
    )
    queued = yield Statement(
        "SELECT id, epoch, spec_id, user_id, queued_at FROM tasks WHERE status = 'queued' ORDER BY queued_at, id"
    )
    holding = yield Statement(
        f"SELECT {HELD_COLUMNS}, t.node_id, t.leased_at, t.queued_at FROM tasks t "  # noqa: S608
        "WHERE t.holding = 1 AND t.node_id IS NOT NULL ORDER BY t.node_id, t.allocation_number, t.leased_at, t.id"
    )
    ran = yield Statement(
        "SELECT a.task_id, SUM(a.ended_at - a.started_at) FROM attempts a JOIN tasks t ON t.id = a.task_id "
        "WHERE a.started_at IS NOT NULL AND (t.status = 'queued' OR t.holding = 1) GROUP BY a.task_id"
    )
    unstarted = yield Statement(
        "SELECT DISTINCT a.task_id, a.node_id FROM attempts a JOIN tasks t ON t.id = a.task_id "
        "WHERE a.started_at IS NULL AND a.reason IN ('sandbox_failed', 'node_failed') "
        "AND (t.status = 'queued' OR t.holding = 1) ORDER BY a.task_id, a.node_id"
    )
    preempting = yield Statement(
        "SELECT t.id FROM tasks t JOIN attempt_notes n ON n.task_id = t.id AND n.epoch = t.epoch "
        "WHERE t.holding = 1 AND t.node_id IS NOT NULL AND n.note = :note",
        {"note": PREEMPTING},
    )
    gangs = yield from members.pictured()
    nodes = yield from load_nodes("true", {})
    since = [(row[0], row[8], row[9]) for row in holding]
    since += [(gang.lease.task, facts[0], facts[1]) for gang, facts in gangs]
    stopping = [row[0] for row in preempting]
    stopping += [gang.lease.task for gang, facts in gangs if facts[2]]
    return Picture(
        specs=tuple((SpecId(row[0]), UserId(row[1]), spec_from(row[2])) for row in specs),
        teams={SpecId(row[0]): row[3] for row in specs if row[3] is not None},
        queued=tuple(QueuedRow(*row) for row in queued),
        held=tuple((NodeId(row[7]), held_lease(row)) for row in holding),
        nodes=nodes,
        since={
            TaskId(task): (Instant(leased), Instant(queued))
            for task, leased, queued in since
            if leased is not None and queued is not None
        },
        ran={TaskId(row[0]): Span(max(0, int(row[1]))) for row in ran},
        unstarted=tuple((TaskId(row[0]), NodeId(row[1])) for row in unstarted),
        preempting=tuple(TaskId(task) for task in stopping),
        gangs=tuple(gang for gang, _ in gangs),
    )


@operation
def spec(id: SpecId) -> Operation[tuple[UserId, TaskSpec] | None]:
    rows = yield Statement("SELECT user_id, body FROM specs WHERE id = :id", {"id": id})
    for user, body in rows:
        return UserId(user), spec_from(body)
    return None


@operation
def take_term(at: Instant) -> Operation[int]:
    """Who takes it schedules; every plan of an earlier term is refused from now on."""
    rows = yield Statement(
        "INSERT INTO scheduler_term (id, term, taken_at) VALUES (1, 1, :at) ON CONFLICT (id) "
        "DO UPDATE SET term = scheduler_term.term + 1, taken_at = excluded.taken_at RETURNING term",
        {"at": at},
    )
    term: int = rows[0][0]
    return term


__all__ = [
    "apply_plan",
    "expire",
    "held",
    "picture",
    "record",
    "record_together",
    "spec",
    "take_term",
]
