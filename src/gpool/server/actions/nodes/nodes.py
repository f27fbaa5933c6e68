"""Nodes and their GPUs: joining, listing, and what their owners allow. Registering by REST is what an agent's hello does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from gpool.core.errors import Forbidden, Invalid, NotFound
from gpool.core.ids import GpuId, NodeId, UserId, encode
from gpool.core.model import (
    SECOND,
    Availability,
    Gpu,
    Health,
    Instant,
    Node,
    Offer,
    Permission,
    Tier,
)
from gpool.core.permissions import POOL, Action, ObjectKind, Thing, missing
from gpool.core.scheduler.place.fit import cpu_price
from gpool.core.scheduler.state.held import NodeState
from gpool.server.actions.nodes.gpu_documents import gpu_details, reading, sick
from gpool.server.actions.operators.audit import audited, entry
from gpool.server.identity import credentials
from gpool.server.identity.authorization import node_thing, own, permit
from gpool.server.identity.node_proofs.proofs import LIFE as CHALLENGE_LIFE
from gpool.server.identity.node_proofs.proofs import NotProven
from gpool.server.identity.node_proofs.verifier import checked_public_key
from gpool.server.nodes import offers
from gpool.server.server import Once, Server
from gpool.server.settings import span
from gpool.server.store.identity_values import Caller, GpuRow
from gpool.server.store.operation import operation
from gpool.server.store.operations.nodes import gpu_bindings
from gpool.server.store.operations.nodes import nodes as operations
from gpool.server.store.protocol import Operation
from gpool.server.store.values import NodeCredentials, NodeRow, User
from gpool.transfer.node_proofs import Purpose
from gpool.wire.documents import (
    GpuDocument,
    InviteDocument,
    MeasuredDocument,
    NodeChallenge,
    NodeDocument,
    NodeJoined,
    NodeRequest,
    instant_to_datetime,
)

MOST_SHOWN = 100
"""Environments in a node's document: a listing is for people."""

_Status = Literal["free", "shared", "busy", "paused", "quarantined", "offline"]


class _Saved(msgspec.Struct, frozen=True):
    """A joining's answer as it is kept under its key."""

    id: str
    name: str


class _SavedInvite(msgspec.Struct, frozen=True):
    expires_at: int


@dataclass(frozen=True, slots=True)
class Pool:
    """Every node, with the rows of its GPUs."""

    rows: tuple[NodeRow, ...]
    gpus: dict[tuple[NodeId, int], GpuRow]


# ---- joining


async def join(
    server: Server, who: Caller | None, request: NodeRequest, once: Once | None
) -> NodeJoined:
    """A node, by its owner's key or by an invite's token; an agent proves the key it brings."""
    if request.token:
        permit(who, Action.NODE_JOIN_BY_INVITE, POOL)
    else:
        permit(who, Action.NODE_JOIN, missing(ObjectKind.ACCOUNT) if who is None else own(who))
    user = None if who is None else who.user
    if "\0" in request.name or "\0" in (request.token or ""):
        raise Invalid("'name' and 'token' hold no NUL character")
    public_key = _proved_key(server, request)
    offer = _offer(request)
    create = _create(
        NodeId(server.ids.next()),
        request,
        user.id if user is not None and not request.token else None,
        public_key,
        offer,
        server.ids.take(len(offer.gpus)),
        server.now,
    )
    now = server.now
    create = audited(
        create,
        lambda row: [
            entry(
                now,
                who,
                "node.join",
                encode("node", row.node.id),
                name=row.node.name,
                owner=encode("user", row.node.owner),
            )
        ],
    )
    if user is None:
        value: NodeRow | None = await server.write(create)
        assert value is not None
        saved = _saved(value)
    else:
        answered = await server.write_once(user, once, create, _saved)
        value, saved = answered.value, answered.body
    if value is not None:
        server.picture.node_changed(value.node)
    answer = msgspec.json.decode(saved, type=_Saved)
    return NodeJoined(id=answer.id, name=answer.name, server=server.gate.name)


async def register(server: Server, who: NodeCredentials, request: NodeRequest) -> NodeJoined:
    """A node that is known says what it lends: its offer replaces the earlier one."""
    permit(who, Action.NODE_OFFER, Thing(ObjectKind.NODE, owner=who.owner, holder=who.node))
    offer = _offer(request)
    row = await server.write(
        offers.take(who.node, offer, server.ids.take(len(offer.gpus)), server.now)
    )
    server.picture.node_changed(row.node)
    return NodeJoined(id=encode("node", who.node), name=who.name, server=server.gate.name)


def challenge(server: Server) -> NodeChallenge:
    """What a node about to join signs."""
    return NodeChallenge(
        nonce=server.gate.challenge(Purpose.JOIN),
        server=server.gate.name,
        expires_in_s=CHALLENGE_LIFE // SECOND,
    )


def _proved_key(server: Server, request: NodeRequest) -> str | None:
    """The key of the node, whose other half it has shown to hold; None: it brings none."""
    if request.public_key is None:
        if request.token:
            raise Invalid(
                "joining with an invite takes 'public_key' and 'proof'; install the same gpool version"
            )
        return None
    key = checked_public_key(request.public_key)
    if request.proof is None:
        raise Invalid("'public_key' needs a 'proof': the answer to POST /v1/nodes/challenges")
    found = server.gate.joins(key, request.proof.nonce, request.proof.signature)
    if isinstance(found, NotProven):
        raise Forbidden("the proof does not show that you hold this key; ask for a new challenge")
    return key


async def invite(
    server: Server, who: Caller, expires_in_s: int, once: Once | None
) -> InviteDocument:
    """A token with which one node may join in the user's name."""
    permit(who, Action.NODE_INVITE, own(who))
    user = who.user
    token = _secret(server, credentials.INVITE_PREFIX, user, once)
    expires_at = Instant(server.now + span(expires_in_s))
    answered = await server.write_once(
        user,
        once,
        _invite(credentials.hashed(token), user, expires_at, server.now),
        lambda at: msgspec.json.encode(_SavedInvite(at)),
    )
    expires_at = Instant(msgspec.json.decode(answered.body, type=_SavedInvite).expires_at)
    return InviteDocument(
        token=token,
        link=f"gpool://{server.settings.address}/join/{token}{_pin(server)}",
        expires_at=instant_to_datetime(expires_at),
    )


def _pin(server: Server) -> str:
    """How the link says to know the server: by its own certificate, or by one an authority vouches for."""
    if server.certificate is not None and server.certificate.own:
        return f"#sha256={server.certificate.fingerprint}"
    return "#tls" if server.settings.is_reached_by_tls else ""


def _secret(server: Server, prefix: str, user: User | None, once: Once | None) -> str:
    if user is None or once is None:
        return credentials.fresh(prefix)
    return server.credentials.derived(prefix, str(user.id), once.key, once.fingerprint)


def _offer(request: NodeRequest) -> Offer:
    gpus = tuple(
        Gpu(gpu.index, gpu.uuid, gpu.model, gpu.vendor, gpu.memory_bytes, gpu.simulated)
        for gpu in request.gpus
    )
    if len({gpu.index for gpu in gpus}) < len(gpus) or len({gpu.uuid for gpu in gpus}) < len(gpus):
        raise Invalid("'gpus' names one index or one uuid twice")
    if any("\0" in gpu.uuid or "\0" in gpu.model for gpu in gpus):
        raise Invalid("'gpus': a uuid or model holds a NUL character")
    return Offer(request.cpu_milli, request.memory_bytes, 0, gpus)


@operation
def _create(
    id_: NodeId,
    request: NodeRequest,
    owner: int | None,
    public_key: str | None,
    offer: Offer,
    gpu_ids: Sequence[int],
    at: Instant,
) -> Operation[NodeRow]:
    invite_hash = credentials.hashed(request.token) if request.token else None
    whose = UserId(owner) if owner is not None else None
    known = yield from _again(request.name, whose, invite_hash, public_key)
    if known is not None and public_key is None:
        return (yield from offers.take(known, offer, gpu_ids, at))
    if known is not None:
        row = yield from operations.node(known)
        assert row is not None
        return row
    yield from operations.create_node(
        id_,
        request.name,
        whose,
        invite_hash,
        "" if public_key is not None else credentials.hashed(credentials.fresh("")),  # told nobody
        offer,
        gpu_ids,
        at,
        public_key,
    )
    return (yield from offers.bind(id_, offer, at))


def _again(
    name: str, owner: UserId | None, invite_hash: str | None, public_key: str | None
) -> Operation[NodeId | None]:
    """The node this is, when its joining succeeded before and only the answer was lost; or, without a key, an update."""
    if public_key is not None:
        known = yield from operations.node_by_key(public_key)
        if known is None:
            return None
        if invite_hash is not None:
            made = yield from operations.node_of_invite(invite_hash)
            return known.node if made == known.node else None
        return known.node if known.owner == owner else None
    for row in (yield from operations.nodes(owner)) if owner is not None else ():
        if row.node.name == name:
            found = yield from operations.credentials_of(row.node.id)
            return row.node.id if found is not None and found.public_key is None else None
    return None


@operation
def _invite(hashed: str, user: User, expires_at: Instant, at: Instant) -> Operation[int]:
    yield from operations.create_invite(hashed, user.id, expires_at, at)
    return expires_at


def _saved(row: NodeRow) -> bytes:
    return msgspec.json.encode(_Saved(encode("node", row.node.id), row.node.name))


# ---- reading


async def pool(server: Server) -> Pool:
    rows, gpus = await server.store.read(_everything())
    return Pool(rows, {(row.node, row.position): row for row in gpus})


async def node(server: Server, who: Caller, id_: NodeId) -> NodeDocument:
    found = await pool(server)
    for row in found.rows:
        if row.node.id == id_:
            return node_document(server, who, found, row)
    raise _no_node(id_)


async def gpu(server: Server, id_: GpuId) -> GpuDocument:
    found, wanted = await pool(server), encode("gpu", id_)
    for row in found.rows:
        for _, document in gpu_documents(server, found, row):
            if document.id == wanted:
                return document
    raise NotFound(f"no GPU {encode('gpu', id_)}; `gpool gpus` lists them")


async def processors(server: Server, id_: NodeId) -> GpuDocument:
    row = await server.store.read(operations.node(id_))
    if row is None:
        raise _no_node(id_)
    return cpu_document(server, row)


@operation
def _everything() -> Operation[tuple[tuple[NodeRow, ...], tuple[GpuRow, ...]]]:
    rows = yield from operations.nodes()
    gpus = yield from gpu_bindings.gpu_rows()
    return rows, gpus


# ---- what owners allow


async def set_availability(
    server: Server, who: Caller, id_: NodeId, availability: Availability, once: Once | None
) -> NodeDocument:
    answered = await server.write_once(
        who.user, once, _allow(id_, who, availability, server.now), _nothing
    )
    if answered.value is not None:
        server.picture.node_changed(answered.value.node)
    return await node(server, who, id_)


async def set_gpu_available(
    server: Server, who: Caller, id_: GpuId, available: bool, once: Once | None
) -> GpuDocument:
    answered = await server.write_once(who.user, once, _allow_gpu(id_, who, available), _nothing)
    if answered.value is not None:
        server.picture.node_changed(answered.value.node)
    return await gpu(server, id_)


async def unflag(server: Server, who: Caller, id_: GpuId, once: Once | None) -> GpuDocument:
    """Bind a GPU to its node's owner, by an operator's decision, and clear its flag."""
    operation = _unflag(id_, who, server.now)
    answered = await server.write_once(who.user, once, operation, lambda _: b"")
    for row in answered.value or ():
        server.picture.node_changed(row.node)
    return await gpu(server, id_)


async def remove(server: Server, who: Caller, id_: NodeId, once: Once | None) -> None:
    noted = entry(server.now, who, "node.remove", encode("node", id_))
    removing = audited(_remove(id_, who), [noted])
    answered = await server.write_once(who.user, once, removing, lambda _: b"")
    if answered.value:
        server.gate.forget()
        server.picture.node_removed(id_)


@operation
def _allow(id_: NodeId, who: Caller, availability: Availability, at: Instant) -> Operation[NodeRow]:
    found = yield from operations.node(id_)
    permit(who, Action.NODE_CHANGE, node_thing(found), _named(id_))
    row = yield from operations.set_availability(id_, None, availability, at)
    if row is None:
        raise _no_node(id_)
    return row


@operation
def _allow_gpu(id_: GpuId, who: Caller, available: bool) -> Operation[NodeRow]:
    found = yield from gpu_bindings.gpu(id_)
    permit(who, Action.GPU_CHANGE, gpu_thing(found), f"GPU {encode('gpu', id_)}")
    row = yield from operations.set_gpu_available(id_, None, available)
    if row is None:
        raise NotFound(f"no GPU {encode('gpu', id_)} of yours")
    return row


def gpu_thing(row: GpuRow | None) -> Thing:
    if row is None or row.gone:
        return missing(ObjectKind.GPU)
    return Thing(ObjectKind.GPU, owner=row.owner, holder=row.node)


@operation
def _unflag(id_: GpuId, who: Caller, at: Instant) -> Operation[tuple[NodeRow, ...]]:
    found = yield from gpu_bindings.gpu(id_)
    permit(who, Action.GPU_UNFLAG, gpu_thing(found), f"GPU {encode('gpu', id_)}")
    settled = yield from gpu_bindings.unflag(id_, at)
    if settled is None:
        raise NotFound(f"no GPU {encode('gpu', id_)}; `gpool gpus` lists them")
    return (yield from offers.rows_with((settled.uuid,)))


@operation
def _remove(id_: NodeId, who: Caller) -> Operation[bool]:
    found = yield from operations.node(id_)
    permit(who, Action.NODE_REMOVE, node_thing(found), _named(id_))
    if not (yield from operations.remove_node(id_, None)):
        raise _no_node(id_)
    return True


def _nothing(_: NodeRow) -> bytes:
    return b""


def _named(id_: NodeId) -> str:
    return f"node {encode('node', id_)}"


def _no_node(id_: NodeId) -> NotFound:
    return NotFound(f"no node {encode('node', id_)} of yours")


# ---- documents


def node_document(server: Server, who: Caller, pool: Pool, row: NodeRow) -> NodeDocument:
    """Whom an owner takes tasks of, by name, is for the owner and for operators to see."""
    here = row.node
    inside = who.user.id == here.owner or Permission.OPERATOR in who.user.permissions
    entry = _entry(server, here.id)
    return NodeDocument(
        id=encode("node", here.id),
        name=here.name,
        owner=encode("user", here.owner),
        status="online" if server.nodes.is_connected(here.id) else "offline",
        availability=here.availability.value,
        created_at=instant_to_datetime(row.created_at),
        last_beat_at=instant_to_datetime(row.last_beat_at) if row.last_beat_at else None,
        cpu_milli=here.offer.cpu_milli,
        cpu_free_milli=max(0, entry.room.free_cpu) if entry else here.offer.cpu_milli,
        memory_bytes=here.offer.memory_bytes,
        pythons=sorted(here.offer.pythons),
        tiers=_tiers(here.offer.tiers),
        gpus=[document for _, document in gpu_documents(server, pool, row)],
        running=len(entry.lines) if entry else 0,
        networks=sorted(network.value for network in here.offer.networks),
        audience=list(here.offer.audience) if inside or not here.offer.audience else None,
        closed=here.offer.closed or None,
        environments=sorted(here.offer.environments)[:MOST_SHOWN],
        builds=sorted(here.offer.builds),
        problems=[*row.problems, *_rest_of(server, here.id), *sick(here, pool.gpus)]
        if inside
        else [],
        labels=sorted(here.offer.labels),
        price_microcredits=here.offer.price_microcredits,
        site=offers.site_name(here.offer.site),
        cordoned=server.picture.policy.rules.cordons.get(here.id),
    )


def _rest_of(server: Server, node: NodeId) -> tuple[str, ...]:
    """Why it is given nothing for a while, where that is so."""
    why = server.nodes.backoff.reason(node)
    return (f"it {why}: nothing new is given to it for a while",) if why else ()


def gpu_documents(server: Server, pool: Pool, row: NodeRow) -> list[tuple[int, GpuDocument]]:
    """The node's GPUs, by index."""
    here = row.node
    entry = _entry(server, here.id)
    told = []
    for device in here.offer.gpus:
        stored = pool.gpus.get((here.id, device.index))
        if stored is None:
            continue
        room = entry.room.gpus.get(device.index) if entry else None
        free_share = max(0, room.free_share) if room else 1000
        free_memory = max(0, room.free_memory) if room else device.memory_bytes
        allowed = device.index not in here.gpus_withheld
        told.append(
            (
                device.index,
                GpuDocument(
                    id=encode("gpu", stored.id),
                    kind="gpu",
                    node=encode("node", here.id),
                    node_name=here.name,
                    index=device.index,
                    model=device.model,
                    vendor=device.vendor,
                    uuid=device.uuid,
                    memory_bytes=device.memory_bytes,
                    memory_free_bytes=free_memory,
                    share_free=free_share / 1000,
                    simulated=device.simulated,
                    status=_gpu_status(server, here, device, stored, free_share, free_memory),
                    available=allowed and here.availability is Availability.AVAILABLE,
                    tiers=_tiers(here.offer.tiers),
                    flagged=stored.flagged or stored.unproven,
                    measured=measured_document(stored.measured),
                    closed=device.closed or None,
                    health=device.health.value,
                    ails=device.ails or None,
                    quarantined=stored.quarantined,
                    details=None if device.details is None else gpu_details(device.details),
                    reading=reading(server.telemetry.now_of(here.id, device.index, server.now)),
                    price_microcredits=here.offer.price_microcredits,
                    labels=sorted(here.offer.labels),
                ),
            )
        )
    return told


def measured_document(text: str | None) -> MeasuredDocument | None:
    return None if text is None else MeasuredDocument.model_validate_json(text)


def cpu_document(server: Server, row: NodeRow) -> GpuDocument:
    """What a node lends of its processors, as a resource under the node's own id."""
    here = row.node
    entry = _entry(server, here.id)
    whole = here.offer.cpu_milli
    free = max(0, entry.room.free_cpu) if entry else whole
    share = round(1000 * free / whole) if whole else 0
    return GpuDocument(
        id=encode("node", here.id),
        kind="cpu",
        node=encode("node", here.id),
        node_name=here.name,
        index=0,
        model=f"{whole / 1000:g} CPUs",
        vendor="cpu",
        uuid="",
        memory_bytes=here.offer.memory_bytes,
        memory_free_bytes=max(0, entry.room.free_memory) if entry else here.offer.memory_bytes,
        share_free=share / 1000,
        simulated=False,
        status=_status(server, here, True, share, 1),
        available=here.availability is Availability.AVAILABLE,
        tiers=_tiers(here.offer.tiers),
        price_microcredits=cpu_price(here, whole),
        labels=sorted(here.offer.labels),
    )


def _status(server: Server, here: Node, allowed: bool, share: int, memory: int) -> _Status:
    if not server.nodes.is_connected(here.id):
        return "offline"
    if not allowed or here.availability is not Availability.AVAILABLE or here.offer.closed:
        return "paused"
    if share <= 0 or memory <= 0:
        return "busy"
    return "free" if share >= 1000 else "shared"


def _gpu_status(
    server: Server, here: Node, device: Gpu, stored: GpuRow, share: int, memory: int
) -> _Status:
    allowed = device.index not in here.gpus_withheld
    told = _status(server, here, allowed and not device.closed, share, memory)
    sick = stored.quarantined is not None or device.health is Health.QUARANTINED
    return "quarantined" if sick and told != "offline" else told


def _tiers(tiers: frozenset[Tier]) -> list[str]:
    return [tier.value for tier in sorted(tiers, key=lambda tier: tier.strength)]


def _entry(server: Server, id_: NodeId) -> NodeState | None:
    return server.picture.state.nodes.get(id_)
