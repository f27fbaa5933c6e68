"""Joining of nodes: by their owner's key, by invite, or as machines without an agent.

Registering by REST writes the same offer as an agent's hello frame.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpool.core.errors import Forbidden, Invalid
from gpool.core.ids import NodeId, UserId, encode
from gpool.core.model import SECOND, Gpu, Instant, Offer
from gpool.core.permissions import Action, ObjectKind, Thing
from gpool.core.quotas import OwnerQuota
from gpool.server.actions.audit import audited, entry
from gpool.server.identity import authorization
from gpool.server.identity.authorization import own, permit
from gpool.server.identity.node_proofs import CHALLENGE_LIFE as CHALLENGE_LIFE
from gpool.server.identity.node_proofs import NotProven, checked_public_key
from gpool.server.nodes import reconciliation
from gpool.server.server import Once, Server
from gpool.server.settings import span
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations import nodes
from gpool.server.store.protocol import Operation, operation
from gpool.server.store.values import NodeCredentials, NodeRow, User
from gpool.transfer.node_proofs import Purpose
from gpool.wire.documents import instant_to_datetime
from gpool.wire.nodes import InviteDocument, NodeChallenge, NodeJoined, NodeRequest


class _SavedNode(msgspec.Struct, frozen=True):
    id: str
    name: str


class _SavedNodeInvite(msgspec.Struct, frozen=True):
    expires_at: int


async def join(
    server: Server, who: Caller | None, request: NodeRequest, once: Once | None
) -> NodeJoined:
    if not request.token:
        assert who is not None, "checked by the route"
        permit(who, Action.NODE_JOIN, own(who))
    user = None if who is None else who.user
    if "\0" in request.name or "\0" in (request.token or ""):
        raise Invalid("'name' or 'token' contains a NUL character; remove it")
    public_key = _proved_key(server, request)
    offer = _offer(request, server.settings.max_gpus_per_node)
    create = _create(
        NodeId(server.ids.next()),
        request,
        user.id if user is not None and not request.token else None,
        public_key,
        offer,
        server.ids.take(len(offer.gpus)),
        server.now,
        server.settings.owner_quota,
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
    answer = msgspec.json.decode(saved, type=_SavedNode)
    return NodeJoined(id=answer.id, name=answer.name, server=server.gate.name)


async def register(server: Server, who: NodeCredentials, request: NodeRequest) -> NodeJoined:
    permit(who, Action.NODE_OFFER, Thing(ObjectKind.NODE, owner=who.owner, holder=who.node))
    offer = _offer(request, server.settings.max_gpus_per_node)
    gpu_ids, terms = server.ids.take(len(offer.gpus)), server.offer_terms
    keep = reconciliation.take if server.nodes.is_connected(who.node) else reconciliation.store
    row = await server.write(keep(who.node, offer, gpu_ids, server.now, terms))
    if server.examiner is not None:
        row = await server.examiner.admit(row)
    server.picture.node_changed(row.node)
    return NodeJoined(id=encode("node", who.node), name=who.name, server=server.gate.name)


def challenge(server: Server) -> NodeChallenge:
    return NodeChallenge(
        nonce=server.gate.challenge(Purpose.JOIN),
        server=server.gate.name,
        expires_in_s=CHALLENGE_LIFE // SECOND,
    )


def _proved_key(server: Server, request: NodeRequest) -> str | None:
    if request.public_key is None:
        if request.token:
            raise Invalid(
                "joining with an invite needs 'public_key' and 'proof'; install the server's gpool version"
            )
        return None
    key = checked_public_key(request.public_key)
    if request.proof is None:
        raise Invalid("'public_key' needs a 'proof': the signed nonce of POST /v1/nodes/challenges")
    found = server.gate.joins(key, request.proof.nonce, request.proof.signature)
    if isinstance(found, NotProven):
        raise Forbidden("the proof does not match this public key; request a new challenge")
    return key


async def invite(
    server: Server, who: Caller, expires_in_s: int, once: Once | None
) -> InviteDocument:
    permit(who, Action.NODE_INVITE, own(who))
    user = who.user
    token = _token(server, user, once)
    expires_at = Instant(server.now + span(expires_in_s))
    audit_entry = entry(server.now, who, "node.invite", expires_in_s=str(expires_in_s))
    answered = await server.write_once(
        user,
        once,
        audited(_invite(authorization.hashed(token), user, expires_at, server.now), [audit_entry]),
        lambda at: msgspec.json.encode(_SavedNodeInvite(at)),
    )
    expires_at = Instant(msgspec.json.decode(answered.body, type=_SavedNodeInvite).expires_at)
    return InviteDocument(
        token=token,
        link=f"gpool://{server.settings.address}/join/{token}/{server.gate.name}{_pin(server)}",
        expires_at=instant_to_datetime(expires_at),
    )


def _pin(server: Server) -> str:
    if server.pinned is not None:
        return f"#sha256={server.pinned}"
    return "#tls" if server.settings.is_reached_by_tls else ""


def _token(server: Server, user: User, once: Once | None) -> str:
    if once is None:
        return authorization.fresh(authorization.INVITE_PREFIX)
    parts = (str(user.id), once.key, once.fingerprint)
    return server.credentials.derived(authorization.INVITE_PREFIX, *parts)


def _offer(request: NodeRequest, max_gpus: int) -> Offer:
    if len(request.gpus) > max_gpus:
        raise Invalid(
            f"'gpus' names {len(request.gpus)} GPUs; a node of this pool offers at most {max_gpus}"
        )
    gpus = tuple(
        Gpu(gpu.index, gpu.uuid, gpu.model, gpu.vendor, gpu.memory_bytes, gpu.simulated)
        for gpu in request.gpus
    )
    if len({gpu.index for gpu in gpus}) < len(gpus) or len({gpu.uuid for gpu in gpus}) < len(gpus):
        raise Invalid("'gpus' names one index or one uuid twice")
    if any("\0" in gpu.uuid or "\0" in gpu.model for gpu in gpus):
        raise Invalid("'gpus': a uuid or model contains a NUL character; remove it")
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
    quota: OwnerQuota,
) -> Operation[NodeRow]:
    invite_hash = authorization.hashed(request.token) if request.token else None
    whose = UserId(owner) if owner is not None else None
    known = yield from _existing(request.name, whose, invite_hash, public_key)
    if known is not None and public_key is None:
        terms = reconciliation.OfferTerms(quota)
        return (yield from reconciliation.store(known, offer, gpu_ids, at, terms))
    if known is not None:
        row = yield from nodes.node(known)
        assert row is not None
        return row
    yield from nodes.create_node(
        id_,
        request.name,
        whose,
        invite_hash,
        # a machine without a key gets a secret that nobody knows, so that it cannot connect
        "" if public_key is not None else authorization.hashed(authorization.fresh("")),
        offer,
        gpu_ids,
        at,
        public_key,
        quota,
    )
    row = yield from nodes.node(id_)
    assert row is not None
    return row


def _existing(
    name: str, owner: UserId | None, invite_hash: str | None, public_key: str | None
) -> Operation[NodeId | None]:
    if public_key is not None:
        known = yield from nodes.node_by_key(public_key)
        if known is None:
            return None
        if invite_hash is not None:
            made = yield from nodes.node_of_invite(invite_hash)
            return known.node if made == known.node else None
        return known.node if known.owner == owner else None
    return None if owner is None else (yield from nodes.keyless_node(owner, name))


@operation
def _invite(hashed: str, user: User, expires_at: Instant, at: Instant) -> Operation[int]:
    yield from nodes.create_invite(hashed, user.id, expires_at, at)
    return expires_at


def _saved(row: NodeRow) -> bytes:
    return msgspec.json.encode(_SavedNode(encode("node", row.node.id), row.node.name))
