"""Routes with which operators manage the pool: policy, cordons, reservations, server keys, audit log."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import Path, Query
from starlette.requests import Request
from starlette.responses import Response

from gpool.core.errors import Invalid
from gpool.core.ids import NodeId, UserId, decode, encode
from gpool.core.model import SECOND, Instant, Span
from gpool.core.permissions import Action, TeamId
from gpool.core.scheduler.place.portfolio import PLAIN, Learnt
from gpool.core.scheduler.predict.simulation import DryRun
from gpool.core.scheduler.state.operator_rules import Reservation
from gpool.server.actions import audit, policy, replicas
from gpool.server.actions.replicas import ListedReplica
from gpool.server.api.callers import address_of, server_of, user_of
from gpool.server.api.endpoints import NO_CONTENT, EndpointRouter, SuccessReply, created
from gpool.server.api.messages import (
    NODE,
    Limit,
    answer,
    document_of,
    no_content,
    once_of,
)
from gpool.server.identity.audit import AuditAnchor, AuditLink, ChainIntact
from gpool.server.identity.sealer import KeyStatus
from gpool.server.overload.admission import LoadClass
from gpool.server.scheduling.learning import sentence
from gpool.wire.admin import (
    AuditCheck,
    AuditDocument,
    AuditPage,
    CertifiedDocument,
    CertifiedRequest,
    CordonDocument,
    CordonRequest,
    DryRunDocument,
    KeysDocument,
    LearntDocument,
    PolicyDocument,
    PolicyRequest,
    ReplicaDocument,
    ReplicaPage,
    ReservationDocument,
    ReservationPage,
    ReservationRequest,
    RotateRequest,
    ShiftDocument,
)
from gpool.wire.documents import instant_to_datetime

routes = EndpointRouter("operators")

RESERVATION = Annotated[str, Path(description="Reservation id, rs-…")]


# ---- the policy


@routes.get("/v1/admin/policy", Action.POLICY_READ, returns=PolicyDocument)
async def get_policy(request: Request) -> Response:
    """Read the scheduling policy."""
    await user_of(request)
    return answer(_policy(policy.policy(server_of(request))))


@routes.patch("/v1/admin/policy", Action.POLICY_CHANGE, body=PolicyRequest, returns=PolicyDocument)
async def change_policy(request: Request) -> Response:
    """Change the scheduling policy from the next pass on; with `dry_run`, only compare the waiting tasks' starts."""
    who = await user_of(request)
    wanted, once = await document_of(request, PolicyRequest)
    server = server_of(request)
    changes = policy.changes_of(server, wanted)
    if wanted.dry_run:
        return answer(_policy(await policy.try_policy(server, changes)))
    return answer(_policy(await policy.change_policy(server, who, changes, once)))


@routes.post(
    "/v1/admin/policy/learn",
    Action.POLICY_CHANGE,
    returns=SuccessReply(status=202, description="Training begins"),
)
async def learn_policy(request: Request) -> Response:
    """Train the placement's prices again on recent submissions; runs for minutes in the background."""
    who = await user_of(request)
    await policy.learn(server_of(request), who, once_of(request))
    return Response(status_code=202)


# ---- cordons and reservations


@routes.put(
    "/v1/admin/cordons/{id}",
    Action.POLICY_CHANGE,
    body=CordonRequest,
    is_body_required=False,
    returns=CordonDocument,
    problems=(404,),
)
async def cordon_node(request: Request, id: NODE) -> Response:
    """Cordon a node: no new task starts there; with `drain`, preemptible tasks are preempted now. Idempotent."""
    who = await user_of(request)
    wanted, once = await document_of(request, CordonRequest)
    cordon = policy.NewCordon(NodeId(decode("node", id)), wanted.why, wanted.drain)
    done = await policy.cordon(server_of(request), who, cordon, once)
    return answer(
        CordonDocument(
            node=encode("node", done.node),
            cordoned=done.is_cordoned,
            why=done.why,
            running=done.running,
            preempted=done.preempted,
        )
    )


@routes.delete("/v1/admin/cordons/{id}", Action.POLICY_CHANGE, returns=NO_CONTENT, problems=(404,))
async def uncordon_node(request: Request, id: NODE) -> Response:
    """Remove the cordon of a node."""
    who = await user_of(request)
    await policy.uncordon(server_of(request), who, NodeId(decode("node", id)), once_of(request))
    return no_content()


@routes.put(
    "/v1/admin/certified/{id}",
    Action.POLICY_CHANGE,
    body=CertifiedRequest,
    returns=CertifiedDocument,
    problems=(404,),
)
async def certify_node(request: Request, id: NODE) -> Response:
    """Vouch for labels of a node: tasks ask for them as `certified:LABEL`. Replaces earlier ones; none removes them."""
    who = await user_of(request)
    wanted, once = await document_of(request, CertifiedRequest)
    node = NodeId(decode("node", id))
    labels = await policy.certify(server_of(request), who, node, wanted.labels, once)
    return answer(CertifiedDocument(node=encode("node", node), labels=list(labels)))


@routes.get("/v1/admin/reservations", Action.POLICY_READ, returns=ReservationPage)
async def list_reservations(request: Request) -> Response:
    """List reservations of nodes."""
    await user_of(request)
    server = server_of(request)
    now = server.now
    items = [_reservation(one, now) for one in policy.reservations(server)]
    return answer(ReservationPage(items=items))


@routes.post(
    "/v1/admin/reservations",
    Action.POLICY_CHANGE,
    body=ReservationRequest,
    returns=created(ReservationDocument),
    problems=(404,),
)
async def create_reservation(request: Request) -> Response:
    """Reserve nodes for users and teams for a time; running tasks of others finish."""
    who = await user_of(request)
    wanted, once = await document_of(request, ReservationRequest)
    asked = policy.NewReservation(
        [NodeId(decode("node", node)) for node in wanted.nodes],
        [UserId(decode("user", user)) for user in wanted.users],
        [TeamId(decode("team", team)) for team in wanted.teams],
        _instant(wanted.first),
        _instant(wanted.last),
        wanted.why,
    )
    server = server_of(request)
    made = await policy.reserve(server, who, asked, once)
    return answer(_reservation(made, server.now), 201)


@routes.delete(
    "/v1/admin/reservations/{id}", Action.POLICY_CHANGE, returns=NO_CONTENT, problems=(404,)
)
async def delete_reservation(request: Request, id: RESERVATION) -> Response:
    """Delete a reservation."""
    who = await user_of(request)
    await policy.unreserve(server_of(request), who, decode("reservation", id), once_of(request))
    return no_content()


# ---- server keys and audit log


@routes.get("/v1/admin/keys", Action.POLICY_READ, returns=KeysDocument)
async def get_server_keys(request: Request) -> Response:
    """Read the state of the encryption keys and of a running rotation."""
    await user_of(request)
    return answer(_keys(await server_of(request).sealer.status()))


@routes.post(
    "/v1/admin/keys/rotate",
    Action.KEYS_ROTATE,
    body=RotateRequest,
    is_body_required=False,
    returns=SuccessReply(KeysDocument, 202, "Rotation begun; it continues in the background"),
)
async def rotate_server_keys(request: Request) -> Response:
    """Create a new data key and re-encrypt all sealed fields with it. Each request begins another rotation."""
    user = await user_of(request)
    wanted, _ = await document_of(request, RotateRequest)
    server, address = server_of(request), address_of(request)
    status = await policy.rotate_keys(server, user, master=wanted.master, address=address)
    return answer(_keys(status), 202)


@routes.get("/v1/admin/replicas", Action.REPLICAS_READ, load=LoadClass.VITAL, returns=ReplicaPage)
async def list_replicas(request: Request) -> Response:
    """List the servers of this pool, oldest first, and which one leads."""
    await user_of(request)
    found = await replicas.listed(server_of(request))
    return answer(ReplicaPage(items=[_replica(each) for each in found]))


@routes.get(
    "/v1/audit",
    Action.AUDIT_READ,
    returns=SuccessReply(
        AuditPage | AuditCheck,
        description="A page, newest first; with `verify`, the result of the verification",
    ),
    problems=(400,),
)
async def get_audit(
    request: Request,
    limit: Limit = 50,
    cursor: Annotated[int | None, Query(ge=1, le=(1 << 63) - 1)] = None,
    verify: Annotated[bool, Query(description="Verify the hash chain instead")] = False,
    anchor: Annotated[
        list[str] | None,
        Query(max_length=100, description="NUMBER:HASH of heads kept earlier, to verify against"),
    ] = None,
) -> Response:
    """Read or verify the audit log."""
    await user_of(request)
    server = server_of(request)
    if verify:
        return answer(await _checked(request, [_anchor(text) for text in anchor or []]))
    links = await audit.page(server, cursor, limit)
    more = str(links[-1].entry.sequence) if len(links) == limit else None
    return answer(AuditPage(items=[_entry(link) for link in links], next=more))


def _replica(listed: ListedReplica) -> ReplicaDocument:
    row = listed.row
    return ReplicaDocument(
        id=str(row.id),
        address=row.address,
        version=row.version,
        leader=listed.leads,
        alive=listed.is_alive,
        term=row.term,
        nodes=listed.nodes,
        started_at=instant_to_datetime(Instant(row.started_at)) if row.started_at else None,
        heard_at=instant_to_datetime(Instant(row.heard_at)) if row.heard_at else None,
    )


async def _checked(request: Request, anchors: list[AuditAnchor]) -> AuditCheck:
    found = await audit.verify(server_of(request).store, anchors)
    if isinstance(found, ChainIntact):
        head = f"{found.head.sequence}:{found.head.hash.hex()}"
        return AuditCheck(whole=True, entries=found.head.sequence, head=head)
    return AuditCheck(whole=False, entries=found.sequence - 1, why=found.why)


def _anchor(text: str) -> AuditAnchor:
    number, _, digest = text.partition(":")
    try:
        return AuditAnchor(int(number), bytes.fromhex(digest))
    except ValueError:
        raise Invalid(
            f"{text[:80]!r} is not an anchor; give NUMBER:HASH, as `verify` returns it"
        ) from None


def _keys(status: KeyStatus) -> KeysDocument:
    return KeysDocument(
        data_keys=status.data_keys,
        retired=status.retired,
        fields=status.fields,
        left=status.left,
        masters=status.masters,
    )


def _entry(link: AuditLink) -> AuditDocument:
    entry = link.entry
    return AuditDocument(
        number=entry.sequence,
        at=instant_to_datetime(entry.at),
        actor=entry.actor,
        action=entry.action,
        thing=entry.thing,
        outcome=entry.outcome,
        address=entry.address,
        facts=dict(entry.facts),
        hash=link.hash.hex(),
    )


def _policy(state: policy.PolicyState) -> PolicyDocument:
    change = state.change
    by_name = {
        "order": change.order,
        "ageing_s": change.ageing,
        "patience_s": change.patience,
        "weights": change.weights,
    }
    return PolicyDocument(
        order=state.policy.order,
        ageing_s=state.policy.ageing / SECOND,
        patience_s=state.policy.patience / SECOND,
        weights={
            encode(kind, id_): weight / 1000 for (kind, id_), weight in state.policy.weights.items()
        },
        orders=list(state.orders),
        changed=[name for name, value in by_name.items() if value],
        dry_run=None if state.dry_run is None else _dry_run(state.dry_run),
        learnt=None if state.learnt is None else _learnt(state.learnt),
    )


def _learnt(found: Learnt) -> LearntDocument:
    return LearntDocument(
        at=instant_to_datetime(found.at),
        sentence=sentence(found),
        arrivals=found.arrivals,
        idle_percent=found.of(found.pricing.weights) or 0.0,
        plain_idle_percent=found.of(PLAIN),
    )


def _dry_run(found: DryRun) -> DryRunDocument:
    return DryRunDocument(
        sentence=found.sentence,
        waiting=found.waiting,
        sooner=found.sooner,
        later=found.later,
        same=found.same,
        moved=[
            ShiftDocument(
                task=encode("task", one.task),
                before_s=_seconds(one.before),
                after_s=_seconds(one.after),
            )
            for one in found.moved
        ],
    )


def _seconds(value: Span | None) -> float | None:
    return None if value is None else value / SECOND


def _reservation(one: Reservation, now: Instant) -> ReservationDocument:
    return ReservationDocument(
        id=encode("reservation", one.id),
        nodes=[encode("node", node) for node in sorted(one.nodes)],
        users=[encode("user", user) for user in sorted(one.audience.users)],
        teams=[encode("team", team) for team in sorted(one.audience.teams)],
        first=instant_to_datetime(one.first),
        last=instant_to_datetime(one.last),
        why=one.why,
        holds=one.holds(now),
    )


def _instant(at: datetime) -> Instant:
    return Instant(round(at.timestamp() * SECOND))
