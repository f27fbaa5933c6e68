"""Gangs on their way to their members: the secret they share, and what each is told. It decides nothing and keeps nothing.

The secret is made with the grant and lies sealed beside it: a member that connects later, to this server or the next, is
told the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.scheduler.state.events import Place as Placed
from gpool.core.scheduler.state.state import Line as StateLine
from gpool.core.scheduler.state.state import State
from gpool.server.identity.secrets.envelope import Place
from gpool.server.identity.secrets.sealer import Sealer
from gpool.server.store.operations.gangs.grants import members_of
from gpool.server.store.values import DataKey, GrantedLine, HeldLease
from gpool.wire.frames import Line, Rendezvous

SECRET_BYTES = 32

Shared = Mapping[TaskId, bytes]
"""By task: what its members share."""


def secret_place(task: int) -> Place:
    """Where a gang's secret lies."""
    return Place("gangs", str(task), "secret_sealed")


async def new_secrets(sealer: Sealer, places: Iterable[Placed]) -> tuple[Shared, Shared]:
    """One for each gang of a plan: plain, and sealed."""
    tasks = [grant.task for place in places if place.members for grant in place.grants]
    if not tasks:
        return {}, {}
    await sealer.prepare()
    plain = {task: secrets.token_bytes(SECRET_BYTES) for task in tasks}
    return plain, {task: sealer.seal_now(secret_place(task), plain[task]) for task in tasks}


def nodes_of(line: GrantedLine) -> Iterator[NodeId]:
    """Where it was granted."""
    return (part.node for part in members_of(line.place))


def line_of(line: GrantedLine, node: NodeId, owner: UserId | None, shared: Shared) -> Line:
    """A gang's line as this one of its nodes is told."""
    ((spec, lease),) = line.leases
    parts = members_of(line.place)
    rank = next(rank for rank, part in enumerate(parts) if part.node == node)
    user = line.place.shape.user
    told = Rendezvous(rank, line.peers, shared[TaskId(lease.task)])
    return Line(parts[rank].allocation, user, user == owner, spec, (lease,), told)


def opened(
    sealer: Sealer, held: Sequence[HeldLease], keys: Sequence[DataKey]
) -> tuple[Mapping[TaskId, Rendezvous], set[TaskId]]:
    """What a node's members are told, and those whose secret does not open."""
    told: dict[TaskId, Rendezvous] = {}
    shut: set[TaskId] = set()
    members = [lease for lease in held if lease.gang is not None]
    fields = [
        (secret_place(lease.task), lease.gang.secret_sealed) for lease in members if lease.gang
    ]
    for lease, secret in zip(members, sealer.opened_fields(fields, keys), strict=True):
        if secret is None or lease.gang is None:
            shut.add(lease.task)
        else:
            told[lease.task] = Rendezvous(lease.gang.rank, lease.gang.peers, secret)
    return told, shut


def lines_on(state: State, node: NodeId) -> Iterator[tuple[TaskId, StateLine]]:
    """What is held there, of gangs too; each with its line on this node."""
    for task, line in state.held.items():
        for part in (line, *line.members):
            if part.node == node:
                yield task, part
