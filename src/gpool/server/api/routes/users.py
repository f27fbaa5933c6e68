"""Routes with which operators manage users and invites to the pool."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gpool.core.ids import UserId, decode
from gpool.core.permissions import Action
from gpool.server.actions.operators import users
from gpool.server.api.callers import server_of, user_of
from gpool.server.api.endpoints import EndpointRouter, created
from gpool.server.api.messages import USER, Cursor, Limit, answer, document_of
from gpool.wire.identity import (
    UserDocument,
    UserInviteDocument,
    UserInviteRequest,
    UserPage,
    UserPatch,
)

routes = EndpointRouter("operators")


@routes.get("/v1/users", Action.USERS_LIST, returns=UserPage, problems=(400,))
async def list_users(request: Request, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """List all users, the oldest account first."""
    await user_of(request)
    after = UserId(decode("user", cursor)) if cursor else UserId(0)
    found = await users.list_users(server_of(request), after, limit)
    return answer(UserPage(items=found, next=found[-1].id if len(found) == limit else None))


@routes.post(
    "/v1/users/invites",
    Action.USER_INVITE,
    body=UserInviteRequest,
    is_body_required=False,
    returns=created(UserInviteDocument),
)
async def create_user_invite(request: Request) -> Response:
    """Create a token with which one person may register."""
    who = await user_of(request)
    wanted, once = await document_of(request, UserInviteRequest)
    return answer(await users.invite(server_of(request), who, wanted, once), 201)


@routes.get("/v1/users/{id}", Action.USER_READ, returns=UserDocument)
async def get_user(request: Request, id: USER) -> Response:
    """Read your own account; operators read any account."""
    who = await user_of(request)
    return answer(await users.get_user(server_of(request), who, UserId(decode("user", id))))


@routes.patch(
    "/v1/users/{id}",
    Action.USER_SUSPEND,
    Action.USER_PERMISSIONS_SET,
    Action.QUOTA_SET,
    body=UserPatch,
    returns=UserDocument,
)
async def change_user(request: Request, id: USER) -> Response:
    """Change a user's permissions, disabled state or quota. Disabling ends all the user's sessions."""
    who = await user_of(request, Action.USER_SUSPEND)
    wanted, once = await document_of(request, UserPatch)
    user = UserId(decode("user", id))
    return answer(await users.change(server_of(request), who, user, wanted, once))
