"""The operator's page: users, machines, queue policy, alerts, ledger, audit record, replicas. Reads; verbs are in the CLI."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gpool.core.ids import UserId
from gpool.core.permissions import POOL, Action, may
from gpool.server.actions import audit, listing, policy, replicas, users
from gpool.server.actions.money import ledger, verification
from gpool.server.alerts.rules import RULES
from gpool.server.api.callers import server_of
from gpool.server.identity.authorization import actor_of
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations.node_pages import NodeFilter
from gpool.server.web.parts import part
from gpool.server.web.rendering import page
from gpool.server.web.routing import PageRouter
from gpool.server.web.visitors import visitor
from gpool.wire.documents import instant_to_datetime

routes = PageRouter("pages")

MOST = 50


@routes.page("/admin", Action.USERS_LIST)
async def show_admin(request: Request) -> Response:
    """Show the state of the pool to its operators."""
    who, server = await visitor(request), server_of(request)
    nodes = await part(listing.nodes(server, who, NodeFilter(), None, MOST))
    active = server.monitor.alerts.active if _may(who, Action.METRICS_READ) else None
    return page(
        request,
        "admin.html",
        users=await part(users.list_users(server, UserId(0), MOST)),
        nodes=nodes.value.items if nodes.value else [],
        policy=policy.policy(server) if _may(who, Action.POLICY_READ) else None,
        waiting=server.picture.waiting,
        alerts=None
        if active is None
        else [(each.rule, each.is_firing, dict(each.labels)) for each in active],
        rules=len(RULES),
        evaluated=server.monitor.evaluated_at is not None,
        ledger=await part(ledger.pool_ledger(server)),
        check=await part(verification.verify(server.store, []))
        if "verify" in request.query_params
        else None,
        audit=await part(audit.page(server, None, MOST)),
        replicas=await part(replicas.listed(server)),
        at=instant_to_datetime,
    )


def _may(who: Caller, action: Action) -> bool:
    """Sign-ins of operators may do all; an API key needs the action's scope."""
    return may(actor_of(who), action, POOL).allowed
