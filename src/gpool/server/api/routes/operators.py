"""Routes for operators: the policy, cordons and reservations."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from gpool.core.ids import NodeId, UserId, decode, encode
from gpool.core.model import SECOND, Instant, Span
from gpool.core.permissions import Action, TeamId
from gpool.core.scheduler.order.limits import Holder
from gpool.core.scheduler.place.portfolio import PLAIN, Learnt
from gpool.core.scheduler.predict.dry_run import DryRun
from gpool.core.scheduler.state.operator_rules import Reservation
from gpool.server.actions.operators import policy
from gpool.server.api.openapi import body, ok
from gpool.server.api.requests import body_of, once_of, parsed, server_of, user_of
from gpool.server.api.responses import answer
from gpool.server.scheduling.pricing_training import sentence
from gpool.server.settings import span
from gpool.wire.admin import (
    CordonDocument,
    CordonRequest,
    DryRunDocument,
    LearntDocument,
    PolicyDocument,
    PolicyRequest,
    ReservationDocument,
    ReservationPage,
    ReservationRequest,
    ShiftDocument,
)
from gpool.wire.documents import instant_to_datetime

router = APIRouter(tags=["operators"])

NODE = Annotated[str, Path(description="A node's id, n-…")]
RESERVATION = Annotated[str, Path(description="A reservation's id, rs-…")]
ASKED: dict[int | str, dict[str, Any]] = {202: {"description": "It begins"}}
GONE: dict[int | str, dict[str, Any]] = {204: {"description": "Done"}}


@router.get("/v1/admin/policy", responses=ok(PolicyDocument), response_class=Response)
async def get_policy(request: Request) -> Response:
    """By which rules tasks are started."""
    await user_of(request, Action.POLICY_READ)
    return answer(_policy(policy.policy(server_of(request))))


@router.patch(
    "/v1/admin/policy",
    openapi_extra=body(PolicyRequest),
    responses=ok(PolicyDocument),
    response_class=Response,
)
async def patch_policy(request: Request) -> Response:
    """From the next pass on; with `dry_run` it only says what it would do to those who wait."""
    who = await user_of(request, Action.POLICY_CHANGE)
    content = await body_of(request)
    wanted = parsed(PolicyRequest, content)
    named = wanted.model_fields_set
    changes: dict[str, object] = {}
    if "order" in named:
        changes["order"] = wanted.order
    for field, name in (("ageing_s", "ageing"), ("patience_s", "patience")):
        if field in named:
            value = getattr(wanted, field)
            changes[name] = None if value is None else span(value)
    server = server_of(request)
    if wanted.weights:
        given = {_holder(text): value for text, value in wanted.weights.items()}
        changes["weights"] = policy.weights_with(server, given)
    if wanted.dry_run:
        return answer(_policy(await policy.try_policy(server, changes)))
    once = once_of(request, content)
    return answer(_policy(await policy.change_policy(server, who, changes, once)))


@router.post("/v1/admin/policy/learn", status_code=202, responses=ASKED, response_class=Response)
async def learn_policy(request: Request) -> Response:
    """Learn anew, from what was submitted lately, what free room is worth; it takes minutes and holds nobody up."""
    who = await user_of(request, Action.POLICY_CHANGE)
    await policy.learn(server_of(request), who, once_of(request))
    return Response(status_code=202)


@router.put(
    "/v1/admin/cordons/{id}",
    openapi_extra=body(CordonRequest, required=False),
    responses=ok(CordonDocument),
    response_class=Response,
)
async def put_cordon(request: Request, id: NODE) -> Response:
    """Nothing new starts on this node; with `drain`, what may be preempted goes at once. Repeating it is safe."""
    who = await user_of(request, Action.POLICY_CHANGE)
    content = await body_of(request)
    told = parsed(CordonRequest, content)
    wanted = policy.NewCordon(NodeId(decode("node", id)), told.why, told.drain)
    done = await policy.cordon(server_of(request), who, wanted, once_of(request, content))
    return answer(
        CordonDocument(
            node=encode("node", done.node),
            cordoned=done.is_cordoned,
            why=done.why,
            running=done.running,
            preempted=done.preempted,
        )
    )


@router.delete("/v1/admin/cordons/{id}", status_code=204, responses=GONE, response_class=Response)
async def delete_cordon(request: Request, id: NODE) -> Response:
    """The node takes tasks again, if its owner lends it."""
    who = await user_of(request, Action.POLICY_CHANGE)
    await policy.uncordon(server_of(request), who, NodeId(decode("node", id)), once_of(request))
    return Response(status_code=204)


@router.get("/v1/admin/reservations", responses=ok(ReservationPage), response_class=Response)
async def list_reservations(request: Request) -> Response:
    """Which nodes are kept for whom, and when."""
    await user_of(request, Action.POLICY_READ)
    server = server_of(request)
    now = server.now
    items = [_reservation(one, now) for one in policy.reservations(server)]
    return answer(ReservationPage(items=items))


@router.post(
    "/v1/admin/reservations",
    status_code=201,
    openapi_extra=body(ReservationRequest),
    responses={201: {"model": ReservationDocument, "description": "Made"}},
    response_class=Response,
)
async def make_reservation(request: Request) -> Response:
    """Between the two times these nodes start only those people's tasks; what runs there goes on."""
    who = await user_of(request, Action.POLICY_CHANGE)
    content = await body_of(request)
    told = parsed(ReservationRequest, content)
    wanted = policy.Wanted(
        [NodeId(decode("node", node)) for node in told.nodes],
        [UserId(decode("user", user)) for user in told.users],
        [TeamId(decode("team", team)) for team in told.teams],
        _instant(told.first),
        _instant(told.last),
        told.why,
    )
    server = server_of(request)
    made = await policy.reserve(server, who, wanted, once_of(request, content))
    return answer(_reservation(made, server.now), 201)


@router.delete(
    "/v1/admin/reservations/{id}", status_code=204, responses=GONE, response_class=Response
)
async def end_reservation(request: Request, id: RESERVATION) -> Response:
    who = await user_of(request, Action.POLICY_CHANGE)
    await policy.unreserve(server_of(request), who, decode("reservation", id), once_of(request))
    return Response(status_code=204)


def _policy(told: policy.Operated) -> PolicyDocument:
    change = told.change
    by_name = {
        "order": change.order,
        "ageing_s": change.ageing,
        "patience_s": change.patience,
        "weights": change.weights,
    }
    return PolicyDocument(
        order=told.policy.order,
        ageing_s=told.policy.ageing / SECOND,
        patience_s=told.policy.patience / SECOND,
        weights={
            encode(kind, id_): weight / 1000 for (kind, id_), weight in told.policy.weights.items()
        },
        orders=list(told.orders),
        changed=[name for name, value in by_name.items() if value],
        dry_run=None if told.dry_run is None else _dry_run(told.dry_run),
        learnt=None if told.learnt is None else _learnt(told.learnt),
    )


def _learnt(found: Learnt) -> LearntDocument:
    return LearntDocument(
        at=instant_to_datetime(found.at),
        sentence=sentence(found),
        arrivals=found.arrivals,
        idle_percent=found.of(found.pricing.weights) or 0.0,
        plain_idle_percent=found.of(PLAIN),
    )


def _holder(text: str) -> Holder:
    """A user or a team, by its id."""
    if text.startswith("tm-"):
        return "team", decode("team", text)
    return "user", decode("user", text)


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
