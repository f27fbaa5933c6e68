"""Grants of leases, the scheduler's term, and preemption requests. `leases` explains leases and fencing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from gpool.core.gpu_verification import UNPROVEN
from gpool.core.ids import NodeId, SpecId, TaskId
from gpool.core.lifecycle import Move, sources
from gpool.core.model import Allocation, InputFile, Instant, Offer, TaskStatus
from gpool.core.scheduler.state.events import Placement
from gpool.server.store.operations.identity.sealed_fields import secrets_to_open
from gpool.server.store.operations.leases.gang_members import (
    can_connect,
    is_whole,
    offers_for,
    preemptible,
    write_granted,
)
from gpool.server.store.operations.money.funding import FundedPlaces, Funding, fund
from gpool.server.store.operations.tasks.progress import add_notes, manifests
from gpool.server.store.operations.tasks.submissions import FirstLease, NewTask
from gpool.server.store.protocol import Operation, Relation, Row, operation
from gpool.server.store.rows import allocation_text, of_ids, select, values
from gpool.server.store.sealing import PAYLOAD, opened
from gpool.server.store.values import (
    PREEMPTING,
    UNFUNDED,
    AppliedPlan,
    GangMeeting,
    GrantedLine,
    Recording,
)
from gpool.wire.frames import Hold, Lease

HOLDS = (("id", "int"), ("epoch", "int"))
ACTIVE = ", ".join(repr(status.value) for status in (TaskStatus.LEASED, TaskStatus.RUNNING))


class _HeldLease(NamedTuple):
    id: TaskId
    epoch: int
    node_id: NodeId | None  # None: a gang


class _Preempting(NamedTuple):
    id: TaskId
    epoch: int


@operation
def preempt(ids: Sequence[TaskId], at: Instant, because: str | None = None) -> Operation[Recording]:
    """Ask the nodes that hold these tasks to stop them. Recorded, so that a node that reconnects is asked again.

    `because`: RECLAIMING or UNFUNDED; None: for other tasks.
    """
    rows = yield from select(
        _HeldLease,
        "SELECT t.id, t.epoch, t.node_id FROM {wanted} AS w JOIN tasks t ON t.id = w.id "  # noqa: S608
        f"WHERE t.holding = 1 AND t.status IN ({ACTIVE}) "
        "/*postgresql ORDER BY t.id FOR UPDATE OF t*/",
        {},
        {"wanted": of_ids(ids)},
    )
    return (yield from _ask_to_stop(rows, at, because))


@operation
def preempt_if_current(
    holds: Sequence[Hold], term: int, at: Instant, because: str | None = None
) -> Operation[Recording]:
    if not (yield from is_current_term(term)):
        return Recording()
    rows = yield from select(
        _HeldLease,
        "SELECT t.id, t.epoch, t.node_id FROM {wanted} AS w JOIN tasks t ON t.id = w.id AND t.epoch = w.epoch "  # noqa: S608
        f"WHERE t.holding = 1 AND t.status IN ({ACTIVE}) "
        "/*postgresql ORDER BY t.id FOR UPDATE OF t*/",
        {},
        {"wanted": Relation(HOLDS, [(hold.task, hold.epoch) for hold in holds])},
    )
    return (yield from _ask_to_stop(rows, at, because))


@operation
def stop_unfunded(holds: Sequence[Hold], term: int, at: Instant) -> Operation[Recording]:
    """Ask nodes to stop these leases, whose tasks then end; nothing, if another scheduler has taken over."""
    return (yield from preempt_if_current(holds, term, at, UNFUNDED))


def _ask_to_stop(
    rows: Sequence[_HeldLease], at: Instant, because: str | None
) -> Operation[Recording]:
    gangs = yield from preemptible(row.id for row in rows if row.node_id is None)
    asked: list[tuple[NodeId, Hold]] = []
    for row in rows:
        nodes = gangs.get(row.id, ()) if row.node_id is None else (row.node_id,)
        asked += [(node, Hold(row.id, row.epoch)) for node in nodes]
    holds = dict.fromkeys((hold.task, hold.epoch) for _, hold in asked)
    if not holds:
        return Recording()
    notes = (PREEMPTING,) if because is None else (PREEMPTING, because)
    yield from add_notes([(*hold, note) for hold in holds for note in notes], at)
    return Recording(to_preempt=tuple(asked), noted=tuple(TaskId(task) for task, _ in holds))


def preempting(node: NodeId) -> Operation[tuple[Hold, ...]]:
    rows = yield from select(
        _Preempting,
        "SELECT t.id, t.epoch FROM tasks t JOIN attempt_notes n ON n.task_id = t.id AND n.epoch = t.epoch "  # noqa: S608
        f"WHERE t.node_id = :node AND t.holding = 1 AND t.status IN ({ACTIVE}) "
        "AND n.note = :note ORDER BY t.id",
        {"node": node, "note": PREEMPTING},
    )
    return tuple(Hold(row.id, row.epoch) for row in rows)


GRANTS = (
    ("id", "int"),
    ("epoch", "int"),
    ("node", "int"),
    ("number", "int"),
    ("allocation", "text"),
    ("metered", "int"),
)
NO_GANGS: Mapping[TaskId, bytes] = MappingProxyType({})
GRANTABLE = ", ".join(f"'{status.value}'" for status in sources(Move.GRANTED))


class _GrantedTask(NamedTuple):
    id: TaskId
    spec_id: SpecId
    payload: bytes | None
    payload_sha256: str


class _GpuPosition(NamedTuple):
    node_id: NodeId
    position: int


DEPOSED = AppliedPlan((), (), deposed=True)
NO_PRICES = FundedPlaces()


class _Startable(NamedTuple):
    places: list[Placement]
    offers: Mapping[NodeId, Offer]  # of gangs' nodes


def startable(places: Sequence[Placement], term: int) -> Operation[_Startable | None]:
    """The places whose nodes, GPUs and links allow a lease now; None if another scheduler has taken over."""
    if not (yield from is_current_term(term)):
        return None
    wanted = [(place.node, place.allocation) for place in places]
    wanted += [(member.node, member.allocation) for place in places for member in place.members]
    available = yield from values(
        NodeId,
        "SELECT n.id FROM {nodes} AS i JOIN nodes n ON n.id = i.id WHERE n.availability = 'available' "
        "AND NOT EXISTS (SELECT 1 FROM users u WHERE u.id = n.owner_id AND u.disabled_at IS NOT NULL) "
        "/*postgresql FOR SHARE OF n*/",
        {},
        {"nodes": of_ids(node for node, _ in wanted)},
    )
    usable = set(available)
    flagged = yield from _flagged(wanted)
    offers = yield from offers_for(places)
    found = [
        place
        for place in places
        if _is_usable(place.node, place.allocation, usable, flagged)
        and is_whole(place)
        and all(_is_usable(each.node, each.allocation, usable, flagged) for each in place.members)
        and can_connect(place, offers)
    ]
    return _Startable(found, offers)


def first_leases(places: Iterable[Placement], at: Instant) -> dict[TaskId, FirstLease]:
    """Leases to insert with their tasks; no gangs, and no task twice."""
    found: dict[TaskId, FirstLease] = {}
    for place in places:
        allocation = place.allocation
        text = allocation_text(allocation)
        for grant in place.grants:
            assert grant.epoch == 1, f"task {grant.task} is not new"
            lease = FirstLease(grant.epoch, place.node, 1, allocation.number, text, at)
            assert found.setdefault(grant.task, lease) is lease, f"task {grant.task} twice"
    return found


def inserted(
    places: Iterable[Placement], submitted: Mapping[TaskId, tuple[SpecId, NewTask]]
) -> AppliedPlan:
    """The plan as applied by the insertion of its tasks with `first_leases`; refused: tasks that were not inserted."""
    lines: list[GrantedLine] = []
    refused: list[TaskId] = []
    for place in places:
        leases: list[tuple[SpecId, Lease]] = []
        for grant in place.grants:
            found = submitted.get(grant.task)
            if found is None:
                refused.append(grant.task)
            else:
                spec, task = found
                lease = Lease(task.id, grant.epoch, task.payload, task.payload_sha256)
                leases.append((spec, lease))
        if leases:
            lines.append(GrantedLine(place, tuple(leases)))
    return AppliedPlan(tuple(lines), tuple(refused))


@operation
def apply_plan(
    places: Sequence[Placement],
    term: int,
    at: Instant,
    with_secrets: Collection[SpecId] = (),
    with_checkpoints: Collection[SpecId] = (),
    gang_secrets: Mapping[TaskId, bytes] = NO_GANGS,
    funding: Funding | None = None,
) -> Operation[AppliedPlan]:
    """Grant the leases of a plan that are still possible.

    Tasks planned on a removed or draining node, a node of a disabled account or a flagged GPU stay queued. A gang is granted on all its nodes or none,
    and only where they reach each other. `with_secrets`: specs with secrets, returned sealed. `with_checkpoints`: specs
    that may have saved a checkpoint; others are not looked up. `gang_secrets`: a gang's sealed shared secret, by task.
    `funding`: prices of the allocations; tasks whose payer lacks the funds stay queued (`AppliedPlan.unfunded`).
    """
    allowed = yield from startable(places, term)
    if allowed is None:
        return DEPOSED
    open_places, offers = allowed
    funded = NO_PRICES if funding is None else (yield from fund(open_places, funding, at))
    grants: dict[TaskId, Row] = {}  # a task named twice goes to the first place that names it
    retried: set[TaskId] = set()
    for place in open_places:
        node: NodeId | None = place.node
        number: int | None = place.allocation.number
        text: str | None = allocation_text(place.allocation)
        if place.members:  # the members' rows have the nodes and allocations of a gang
            node = number = text = None
        for grant in place.grants:
            if grant.task not in grants and grant.task not in funded.refused:
                metered = int(grant.task in funded.metered)
                grants[grant.task] = (grant.task, grant.epoch, node, number, text, metered)
                if grant.epoch > 1:
                    retried.add(grant.task)
    if not grants:
        return AppliedPlan((), (), unfunded=funded.unfunded, warnings=funded.warnings)
    rows = yield from select(
        _GrantedTask,
        "UPDATE tasks SET status = 'leased', epoch = g.epoch, node_id = g.node, holding = 1, "  # noqa: S608
        "allocation_number = g.number, allocation = g.allocation, leased_at = :at, "
        "metered = CASE WHEN g.metered = 1 THEN 1 WHEN tasks.metered > 0 THEN 2 ELSE 0 END FROM {grants} AS g "
        f"WHERE tasks.id = g.id AND tasks.epoch = g.epoch - 1 AND tasks.status IN ({GRANTABLE}) "
        "RETURNING tasks.id, spec_id, payload, payload_sha256",
        {"at": at},
        {"grants": Relation(GRANTS, list(grants.values()))},
    )
    rows = yield from opened(rows, PAYLOAD)
    granted = {row.id: row for row in rows}
    saved: dict[TaskId, tuple[InputFile, ...]] = {}
    if with_checkpoints:
        saved = yield from manifests(
            row.id for row in rows if row.spec_id in with_checkpoints and row.id in retried
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
                task, spec, payload, sha256 = found
                lease = Lease(task, grant.epoch, bytes(payload or b""), sha256)
                if saved and task in saved:
                    lease = msgspec.structs.replace(lease, checkpoint=saved[task])
                leases.append((spec, lease))
        if leases:
            lines.append(GrantedLine(place, tuple(leases)))
    whole = [line.place for line in lines if line.place.members]
    if whole:
        meetings = yield from write_granted(whole, offers, gang_secrets)
        lines = [_with_meeting(line, meetings) if line.place.members else line for line in lines]
    secret = {spec for line in lines for spec, _ in line.leases if spec in with_secrets}
    return AppliedPlan(
        tuple(lines),
        tuple(refused),
        secrets=(yield from secrets_to_open(secret)),
        unfunded=funded.unfunded,
        warnings=funded.warnings,
    )


def is_current_term(term: int) -> Operation[bool]:
    """Whether no other scheduler has taken over; none can until the commit."""
    found = yield from values(
        int, "SELECT term FROM scheduler_term WHERE id = 1 /*postgresql FOR SHARE*/"
    )
    return found == [term]


def _is_usable(
    node: NodeId, allocation: Allocation, usable: set[NodeId], flagged: set[_GpuPosition]
) -> bool:
    return node in usable and not any(
        (node, part.gpu_index) in flagged for part in allocation.slices
    )


def _with_meeting(line: GrantedLine, meetings: Mapping[TaskId, GangMeeting]) -> GrantedLine:
    return replace(line, meeting=meetings[line.place.grants[0].task])


_UNPROVEN = ", ".join(f"'{verdict.value}'" for verdict in sorted(UNPROVEN))
"""Of the planner to decide: it lends these GPUs to some users."""


def _flagged(wanted: Sequence[tuple[NodeId, Allocation]]) -> Operation[set[_GpuPosition]]:
    on_gpus = {node for node, allocation in wanted if allocation.slices}
    if not on_gpus:
        return set()
    rows = yield from select(
        _GpuPosition,
        "SELECT g.node_id, g.position FROM {nodes} AS i JOIN gpus g ON g.node_id = i.id "  # noqa: S608
        "WHERE (g.flagged IS NOT NULL OR (g.unproven IS NOT NULL "
        f"AND COALESCE(g.verdict, '') NOT IN ({_UNPROVEN}))) AND g.gone = 0",
        {},
        {"nodes": of_ids(on_gpus)},
    )
    return set(rows)


@operation
def take_term(at: Instant) -> Operation[int]:
    """Make the caller the scheduler and return its term; plans of earlier terms are refused from then on."""
    [term] = yield from values(
        int,
        "INSERT INTO scheduler_term (id, term, taken_at) VALUES (1, 1, :at) ON CONFLICT (id) "
        "DO UPDATE SET term = scheduler_term.term + 1, taken_at = excluded.taken_at RETURNING term",
        {"at": at},
    )
    return term
