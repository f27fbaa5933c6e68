"""Pages of operators: state of the pool, its users, queue policy and cordons.

Reservations, read-only mode, server keys and backups are changed with `gpool admin` only.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from gpool.core.errors import Conflict, GpoolError, Invalid
from gpool.core.ids import NodeId, UserId, decode
from gpool.core.model import SECOND, Permission
from gpool.core.permissions import POOL, Action, may
from gpool.server.actions import audit, listing, policy, replicas, users
from gpool.server.actions.accounts import password_resets
from gpool.server.actions.money import ledger, verification
from gpool.server.alerts.rules import RULES
from gpool.server.api.callers import server_of
from gpool.server.identity.authorization import actor_of
from gpool.server.store.identity_values import Caller
from gpool.server.store.operations.node_pages import NodeFilter
from gpool.server.web.parts import part
from gpool.server.web.rendering import page
from gpool.server.web.routing import PageRouter, see
from gpool.server.web.visitors import Form, form_of, validated, visitor
from gpool.wire.admin import CordonRequest, PolicyRequest
from gpool.wire.documents import instant_to_datetime
from gpool.wire.identity import (
    PasswordLinkDocument,
    UserInviteDocument,
    UserInviteRequest,
    UserPatch,
)

routes = PageRouter("pages")

MOST = 50


@routes.page("/admin", Action.USERS_LIST)
async def show_admin(request: Request) -> Response:
    """Show the state of the pool to its operators."""
    return await _admin_page(request, await visitor(request))


async def _admin_page(
    request: Request,
    who: Caller,
    *,
    invite: UserInviteDocument | None = None,
    tried: policy.PolicyState | None = None,
    error: GpoolError | None = None,
) -> Response:
    server, query = server_of(request), request.query_params
    after = UserId(decode("user", query["after"])) if query.get("after") else UserId(0)
    found = await part(users.list_users(server, after, MOST))
    nodes = await part(listing.nodes(server, who, NodeFilter(), None, MOST))
    active = server.monitor.alerts.active if _may(who, Action.METRICS_READ) else None
    return page(
        request,
        "admin.html",
        200 if error is None else error.status,
        users=found,
        next=found.value[-1].id if found.value and len(found.value) == MOST else "",
        nodes=nodes.value.items if nodes.value else [],
        policy=policy.policy(server) if _may(who, Action.POLICY_READ) else None,
        may_change=_may(who, Action.POLICY_CHANGE),
        tried=tried,
        waiting=server.picture.waiting,
        alerts=None
        if active is None
        else [(each.rule, each.is_firing, dict(each.labels)) for each in active],
        rules=len(RULES),
        evaluated=server.monitor.evaluated_at is not None,
        ledger=await part(ledger.pool_ledger(server)),
        check=await part(verification.verify(server.store, [])) if "verify" in query else None,
        audit=await part(audit.page(server, None, MOST)),
        replicas=await part(replicas.listed(server)),
        at=instant_to_datetime,
        second=SECOND,
        invite=invite,
        error=error,
    )


# ---- users


@routes.page("/admin/users/{id}", Action.USER_READ)
async def show_user(request: Request, id: str) -> Response:
    """Show one account with its permissions and quota."""
    return await _user_page(request, await visitor(request), id)


async def _user_page(
    request: Request,
    who: Caller,
    id_: str,
    *,
    link: PasswordLinkDocument | None = None,
    error: GpoolError | None = None,
) -> Response:
    return page(
        request,
        "user.html",
        200 if error is None else error.status,
        user=await users.get_user(server_of(request), who, UserId(decode("user", id_))),
        permissions=[each.value for each in Permission],
        is_self=decode("user", id_) == who.user.id,
        is_done="done" in request.query_params,
        link=link,
        error=error,
    )


async def _change_user(
    request: Request, id_: str, members: Callable[[Form], dict[str, object]]
) -> Response:
    who, form = await visitor(request), await form_of(request)
    try:
        wanted = validated(UserPatch, members(form))
        await users.change(server_of(request), who, UserId(decode("user", id_)), wanted, None)
    except (Invalid, Conflict) as error:
        return await _user_page(request, who, id_, error=error)
    return see(f"/admin/users/{id_}?done=1")


@routes.form("/admin/users/{id}/permissions", Action.USER_PERMISSIONS_SET)
async def set_permissions_on_page(request: Request, id: str) -> Response:
    """Set the permissions of an account; without `provider` its machines leave the pool."""
    return await _change_user(
        request, id, lambda form: {"permissions": list(form.all("permission"))}
    )


@routes.form("/admin/users/{id}/state", Action.USER_SUSPEND)
async def set_state_on_page(request: Request, id: str) -> Response:
    """Disable an account, or enable it again."""
    return await _change_user(request, id, lambda form: {"disabled": form.text("to") == "disabled"})


@routes.form("/admin/users/{id}/quota", Action.QUOTA_SET)
async def set_quota_on_page(request: Request, id: str) -> Response:
    """Set the quota of an account; an empty field is the pool's default."""
    return await _change_user(request, id, lambda form: {"quota": _quota(form)})


def _quota(form: Form) -> dict[str, float | None]:
    storage = _number(form, "storage_gb", "storage")
    queued = _number(form, "queued_tasks", "queued tasks")
    return {
        "running_gpus": _number(form, "running_gpus", "running GPUs"),
        "guaranteed_gpus": _number(form, "guaranteed_gpus", "guaranteed GPUs"),
        "queued_tasks": None if queued is None else int(queued),
        "storage_bytes": None if storage is None else int(storage * 1e9),
    }


def _number(form: Form, name: str, shown: str) -> float | None:
    text = form.text(name)
    if not text:
        return None
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise Invalid(f"{shown}: {text[:40]!r} is not a number")
    return found


@routes.form("/admin/users/{id}/password-link", Action.PASSWORD_LINK)
async def create_password_link_on_page(request: Request, id: str) -> Response:
    """Create a link that sets a new password, and show it once."""
    who = await visitor(request)
    user = UserId(decode("user", id))
    try:
        link = await password_resets.create(server_of(request), who, user)
    except Conflict as error:
        return await _user_page(request, who, id, error=error)
    return await _user_page(request, who, id, link=link)


@routes.form("/admin/invites", Action.USER_INVITE)
async def invite_user_on_page(request: Request) -> Response:
    """Create an invite with the default permissions, and show its token once."""
    who = await visitor(request)
    made = await users.invite(server_of(request), who, UserInviteRequest(), None)
    return await _admin_page(request, who, invite=made)


# ---- queue policy and cordons


@routes.form("/admin/policy", Action.POLICY_CHANGE)
async def change_policy_on_page(request: Request) -> Response:
    """Change the queue policy, or compare the starts of waiting tasks under it."""
    who, form, server = await visitor(request), await form_of(request), server_of(request)
    try:
        members = {
            "order": form.text("order") or None,
            "ageing_s": _number(form, "ageing_s", "ageing"),
            "patience_s": _number(form, "patience_s", "patience"),
        }
        changes = policy.changes_of(server, validated(PolicyRequest, members))
        if form.is_set("try"):
            return await _admin_page(request, who, tried=await policy.try_policy(server, changes))
        await policy.change_policy(server, who, changes, None)
    except Invalid as error:
        return await _admin_page(request, who, error=error)
    return see("/admin")


@routes.form("/admin/nodes/{id}/cordon", Action.POLICY_CHANGE)
async def cordon_node_on_page(request: Request, id: str) -> Response:
    """Cordon a machine, so that no new task starts there, or remove its cordon."""
    who, form = await visitor(request), await form_of(request)
    node = NodeId(decode("node", id))
    if form.is_set("remove"):
        await policy.uncordon(server_of(request), who, node, None)
    else:
        wanted = validated(CordonRequest, {"why": form.text("why")})
        await policy.cordon(
            server_of(request), who, policy.NewCordon(node, wanted.why, wanted.drain), None
        )
    return see("/admin")


def _may(who: Caller, action: Action) -> bool:
    """Sign-ins of operators may do all; an API key needs the action's scope."""
    return may(actor_of(who), action, POOL).allowed
