"""A connecting node's offer: its GPUs bound to its owner, and the leases it should hold, in one operation.

A GPU bound to another owner is flagged on this node only; simulated GPUs are not bound. A site is a claim of its
owner, so it groups that owner's nodes only: a gang never mixes owners by a claim.

The agent states what it holds, the server answers with the difference: nothing is replayed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple

from gpool.core.errors import Forbidden, NotFound
from gpool.core.gangs import GangOrder
from gpool.core.ids import NodeId, SpecId, TaskId, UserId
from gpool.core.model import Gpu, InputFile, Instant, Offer, TaskSpec, TaskStatus
from gpool.core.quotas import NO_OWNER_QUOTA, OwnerQuota
from gpool.server.store.operations import gpus, nodes, replicas
from gpool.server.store.operations.identity.sealed_fields import data_keys, secrets_to_open
from gpool.server.store.operations.leases import grants, leases
from gpool.server.store.operations.leases.connections import NodeLink, still_connected
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


@dataclass(frozen=True, slots=True)
class OfferTerms:
    """Conditions under which a connected node's offer is stored.

    `proof`: its GPUs are verified; until then they are withheld and not bound.
    """

    quota: OwnerQuota = NO_OWNER_QUOTA
    proof: bool = False


DEFAULT_TERMS = OfferTerms()


@operation
def take(
    node: NodeId,
    offer: Offer,
    gpu_ids: Sequence[int],
    at: Instant,
    terms: OfferTerms = DEFAULT_TERMS,
) -> Operation[NodeRow]:
    """Store the offer of a connected node and bind its GPUs; return the node's row.

    Of a node that did not prove a key or is not connected call `store`: it must neither bind nor flag.
    """
    row = yield from store(node, offer, gpu_ids, at, terms)
    uuids = [gpu.uuid for gpu in offer.gpus if not gpu.simulated]
    if not uuids:
        return row
    wallet = yield from gpus.payout_wallet(row.node.owner)
    yield from gpus.bind(node, row.node.owner, wallet, uuids, at, proof=terms.proof)
    return (yield from _row(node))


@operation
def store(
    node: NodeId, offer: Offer, gpu_ids: Sequence[int], at: Instant, terms: OfferTerms
) -> Operation[NodeRow]:
    """Store an offer, withhold GPUs that must be verified, and return the node's row; bind and flag nothing."""
    before = (yield from nodes.node(node)) if terms.proof and offer.gpus else None
    yield from nodes.greet(node, offer, gpu_ids, at, terms.quota)
    if before is not None:
        known = frozenset(map(_claim, before.node.offer.gpus))
        changed = [gpu.uuid for gpu in offer.gpus if _claim(gpu) not in known]
        yield from gpus.withhold_changed(node, changed)
    return (yield from _row(node))


def _row(node: NodeId) -> Operation[NodeRow]:
    row = yield from nodes.node(node)
    if row is None:
        raise NotFound("this node was removed; join again with a new link")
    return row


class _GpuClaim(NamedTuple):
    """Claims about a GPU that its verification showed; any other claim needs a new one."""

    uuid: str
    model: str
    vendor: str
    memory_bytes: int
    simulated: bool
    guest: bool


def _claim(gpu: Gpu) -> _GpuClaim:
    return _GpuClaim(gpu.uuid, gpu.model, gpu.vendor, gpu.memory_bytes, gpu.simulated, gpu.guest)


def rows_with(uuids: Sequence[str]) -> Operation[tuple[NodeRow, ...]]:
    found = []
    for id_ in (yield from gpus.nodes_with(uuids)):
        row = yield from nodes.node(id_)
        if row is not None:
            found.append(row)
    return tuple(found)


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
    terms: OfferTerms = DEFAULT_TERMS,
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
    row = yield from take(node, offer, gpu_ids, at, terms)
    return (yield from _leases_of(node, row))


@operation
def change(
    node: NodeId,
    offer: Offer,
    gpu_ids: Sequence[int],
    at: Instant,
    terms: OfferTerms,
    link: NodeLink | None,
) -> Operation[NodeRow | NotRegistered]:
    """Record a new offer of a connected node, unless a newer connection of it was recorded (`link`: as in `register`)."""
    if link is not None and not (yield from still_connected({node: link})):
        return NotRegistered.OVERTAKEN
    return (yield from take(node, offer, gpu_ids, at, terms))


@operation
def connect(node: NodeId, link: NodeLink) -> Operation[StoredLeases | NotRegistered]:
    """Record that the replica has the node's connection, and read the node's leases.

    Leases granted since `register` are among them: they were not sent, since the connection was not open.
    """
    if not (yield from replicas.open_connection(node, link)):
        return NotRegistered.OVERTAKEN
    row = yield from nodes.node(node)
    return NotRegistered.REMOVED if row is None else (yield from _leases_of(node, row))


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
