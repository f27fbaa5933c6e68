"""Leases a connecting node should hold, read in one operation with its new offer.

The agent states what it holds, the server answers with the difference: nothing is replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpool.core.gangs import GangOrder
from gpool.core.ids import NodeId, SpecId, TaskId
from gpool.core.model import InputFile, Instant, Offer, TaskSpec, TaskStatus
from gpool.server.nodes import offers
from gpool.server.store.operation import operation
from gpool.server.store.operations.identity.sealed_fields import data_keys, secrets_to_open
from gpool.server.store.operations.leases import leases, preemption
from gpool.server.store.operations.nodes import nodes
from gpool.server.store.operations.tasks import checkpoints
from gpool.server.store.protocol import Operation
from gpool.server.store.values import DataKey, HeldLease, NodeRow, SealedSecrets
from gpool.wire.frames import Hold, Lease, Line, Rendezvous

Checkpoints = Mapping[TaskId, tuple[InputFile, ...]]
"""By task: the files its next attempt starts with."""


@dataclass(frozen=True, slots=True)
class StoredLeases:
    row: NodeRow
    held: tuple[HeldLease, ...]
    specs: Mapping[int, TaskSpec]
    secrets: SealedSecrets
    checkpoints: Checkpoints
    preempting: tuple[Hold, ...]
    gang_keys: tuple[DataKey, ...]  # with which gangs' secrets may be encrypted


@operation
def register(
    node: NodeId, offer: Offer, gpu_ids: Sequence[int], at: Instant
) -> Operation[StoredLeases | None]:
    if (yield from nodes.node(node)) is None:
        return None
    row = yield from offers.take(node, offer, gpu_ids, at)
    return (yield from _leases_of(node, row))


@operation
def stored_leases(node: NodeId) -> Operation[StoredLeases | None]:
    row = yield from nodes.node(node)
    return None if row is None else (yield from _leases_of(node, row))


def _leases_of(node: NodeId, row: NodeRow) -> Operation[StoredLeases]:
    held = yield from leases.held(node)
    specs = {}
    for id_ in {lease.spec for lease in held}:
        found = yield from leases.spec(id_)
        if found is not None:
            specs[int(id_)] = found[1]
    secret = [SpecId(id_) for id_, spec in specs.items() if spec.secrets]
    secrets = yield from secrets_to_open(secret)
    saved = [lease.task for lease in held if lease.spec in specs and specs[lease.spec].checkpoint]
    begun = yield from checkpoints.manifests(saved)
    preempting = yield from preemption.preempting(node)
    members = [lease for lease in held if lease.gang is not None]
    preempting += tuple(
        Hold(each.task, each.epoch)
        for each in members
        if each.status is not TaskStatus.CANCELLED
        and each.gang
        and each.gang.call is GangOrder.BACK
    )
    keys = (yield from data_keys()) if members else ()
    return StoredLeases(row, held, specs, secrets, begun, preempting, keys)


def wire_lines(
    held: Iterable[HeldLease],
    owner: int,
    checkpoints: Checkpoints,
    meeting: Mapping[TaskId, Rendezvous],
) -> Iterable[Line]:
    """One wire line per allocation and spec; its leases are queued in the order of their tasks."""
    grouped: dict[tuple[int, int], list[HeldLease]] = {}
    for lease in sorted(held, key=lambda lease: (lease.allocation.number, lease.task)):
        grouped.setdefault((lease.allocation.number, lease.spec), []).append(lease)
    for members in grouped.values():
        first = members[0]
        yield Line(
            first.allocation,
            first.user,
            first.user == owner,
            first.spec,
            tuple(_wire_lease(lease, checkpoints) for lease in members),
            meeting.get(first.task),
        )


def _wire_lease(lease: HeldLease, checkpoints: Checkpoints) -> Lease:
    files = checkpoints.get(lease.task, ())
    return Lease(lease.task, lease.epoch, lease.payload, lease.payload_sha256, files)
