"""A connecting node's offer: its GPUs bound to its owner, and the leases it should hold, in one operation.

A GPU bound to another owner is flagged on this node only; simulated GPUs are not bound. A site is a claim of its
owner, so it groups that owner's nodes only: a gang never mixes owners by a claim.

The agent states what it holds, the server answers with the difference: nothing is replayed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from gpool.core.errors import Forbidden, NotFound
from gpool.core.gangs import GangOrder
from gpool.core.ids import NodeId, SpecId, TaskId, UserId
from gpool.core.model import InputFile, Instant, Offer, TaskSpec, TaskStatus
from gpool.core.quotas import NO_OWNER_QUOTA, OwnerQuota
from gpool.server.store.operations import gpus, nodes, replicas
from gpool.server.store.operations.identity import accounts
from gpool.server.store.operations.identity.sealed_fields import data_keys, secrets_to_open
from gpool.server.store.operations.leases import grants, leases
from gpool.server.store.operations.replicas import NodeLink
from gpool.server.store.operations.tasks import progress
from gpool.server.store.protocol import Operation, operation
from gpool.server.store.values import DataKey, HeldLease, NodeRow, SealedSecrets
from gpool.wire.frames import Hold, Lease, Line, Rendezvous


def at_own_site(offer: Offer, owner: UserId, shared: Collection[str]) -> Offer:
    """Prefix the site with the owner, unless the operator shares a site of that name (`shared`)."""
    if not offer.site or offer.site in shared:
        return offer
    return replace(offer, site=f"{owner}/{offer.site}")


def site_name(site: str) -> str | None:
    return site.rpartition("/")[2] or None


@operation
def take(
    node: NodeId,
    offer: Offer,
    gpu_ids: Sequence[int],
    at: Instant,
    quota: OwnerQuota = NO_OWNER_QUOTA,
) -> Operation[NodeRow]:
    yield from nodes.greet(node, offer, gpu_ids, at, quota)
    return (yield from bind(node, offer, at))


@operation
def bind(node: NodeId, offer: Offer, at: Instant) -> Operation[NodeRow]:
    """Bind the GPUs of a written offer; return the node's row.

    A node without a key is a listing that anybody can create, so it neither binds nor flags anything.
    """
    row = yield from nodes.node(node)
    if row is None:
        raise NotFound("this node was removed; join again with a new link")
    uuids = [gpu.uuid for gpu in offer.gpus if not gpu.simulated]
    who = yield from nodes.credentials_of(node)
    if not uuids or who is None or who.public_key is None:
        return row
    wallet = yield from _payout_wallet(row.node.owner)
    flagged = yield from gpus.bind(node, row.node.owner, wallet, uuids, at)
    if flagged:
        row = yield from nodes.node(node)
        assert row is not None
    return row


def rows_with(uuids: Sequence[str]) -> Operation[tuple[NodeRow, ...]]:
    found = []
    for id_ in (yield from gpus.nodes_with(uuids)):
        row = yield from nodes.node(id_)
        if row is not None:
            found.append(row)
    return tuple(found)


def _payout_wallet(owner: UserId) -> Operation[str | None]:
    for wallet in (yield from accounts.wallets_of(owner)):
        if wallet.payout:
            return wallet.address
    return None


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


class NotRegistered(Enum):
    REMOVED = auto()
    OVERTAKEN = auto()  # another replica has recorded a newer `Hello` of the node


@operation
def register(
    node: NodeId,
    offer: Offer,
    gpu_ids: Sequence[int],
    at: Instant,
    quota: OwnerQuota = NO_OWNER_QUOTA,
    link: NodeLink | None = None,
) -> Operation[StoredLeases | NotRegistered]:
    """Record the offer of a node that connects, and read its leases. `link`: the connection, where replicas exist."""
    who = yield from nodes.credentials_of(node)
    if who is None:
        return NotRegistered.REMOVED
    if not who.may_lend:  # since the connection was accepted
        raise Forbidden(nodes.MAY_NOT_LEND)
    if link is not None and not (yield from replicas.begin_connection(node, link, at)):
        return NotRegistered.OVERTAKEN
    row = yield from take(node, offer, gpu_ids, at, quota)
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
    begun = yield from progress.manifests(saved)
    preempting = yield from grants.preempting(node)
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
