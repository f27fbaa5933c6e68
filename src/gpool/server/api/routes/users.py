"""Routes of operators: users and invites."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from gpool.core.ids import UserId, decode
from gpool.core.permissions import Action
from gpool.server.actions.operators import users
from gpool.server.api.openapi import body, ok
from gpool.server.api.requests import Limit, body_of, once_of, parsed, server_of, user_of
from gpool.server.api.responses import answer
from gpool.wire.identity import (
    UserDocument,
    UserInviteDocument,
    UserInviteRequest,
    UserPage,
    UserPatch,
)

router = APIRouter(tags=["operators"])

USER = Annotated[str, Path(description="A user's id, u-…")]


@router.get("/v1/users", responses=ok(UserPage), response_class=Response)
async def list_users(request: Request, limit: Limit = 50, cursor: str | None = None) -> Response:
    """Everybody, the oldest account first."""
    who = await user_of(request, Action.USERS_LIST)
    after = UserId(decode("user", cursor)) if cursor else UserId(0)
    found = await users.listed(server_of(request), who, after, limit)
    return answer(UserPage(items=found, next=found[-1].id if len(found) == limit else None))


@router.post(
    "/v1/users/invites",
    status_code=201,
    openapi_extra=body(UserInviteRequest, required=False),
    responses={201: {"model": UserInviteDocument, "description": "Made"}},
    response_class=Response,
)
async def invite_user(request: Request) -> Response:
    """A token with which one person may register."""
    who = await user_of(request, Action.USER_INVITE)
    content = await body_of(request)
    wanted = parsed(UserInviteRequest, content)
    return answer(
        await users.invite(server_of(request), who, wanted, once_of(request, content)), 201
    )


@router.get("/v1/users/{id}", responses=ok(UserDocument), response_class=Response)
async def get_user(request: Request, id: USER) -> Response:
    """Yourself, or for operators anybody."""
    who = await user_of(request, Action.USER_READ)
    return answer(await users.one(server_of(request), who, UserId(decode("user", id))))


@router.patch(
    "/v1/users/{id}",
    openapi_extra=body(UserPatch),
    responses=ok(UserDocument),
    response_class=Response,
)
async def change_user(request: Request, id: USER) -> Response:
    """Permissions, disabled, quota. Who is disabled is signed out everywhere."""
    who = await user_of(request, Action.USER_SUSPEND)
    content = await body_of(request)
    wanted = parsed(UserPatch, content)
    changed = await users.change(
        server_of(request), who, UserId(decode("user", id)), wanted, once_of(request, content)
    )
    return answer(changed)
