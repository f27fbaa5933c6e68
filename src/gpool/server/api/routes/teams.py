"""Routes of teams and their members."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from gpool.core.ids import UserId, decode, encode
from gpool.core.permissions import Action, Role, TeamId
from gpool.server.actions.accounts import teams
from gpool.server.api.openapi import Responses, body, ok
from gpool.server.api.requests import Limit, body_of, once_of, parsed, server_of, user_of
from gpool.server.api.responses import answer
from gpool.wire.identity import (
    MemberDocument,
    MemberPage,
    MemberPatch,
    MemberRequest,
    TeamDocument,
    TeamInviteRequest,
    TeamJoin,
    TeamPage,
    TeamPatch,
    TeamRequest,
    UserInviteDocument,
)

router = APIRouter(tags=["teams"])

TEAM = Annotated[str, Path(description="A team's id, tm-…")]
USER = Annotated[str, Path(description="A user's id, u-…")]
_MADE: Responses = {201: {"model": TeamDocument, "description": "Made"}}


@router.get("/v1/teams", responses=ok(TeamPage), response_class=Response)
async def list_teams(
    request: Request,
    all: bool = False,
    limit: Limit = 50,
    cursor: str | None = None,
) -> Response:
    """Those you are in; `all`, for operators: all there are, the oldest first."""
    who = await user_of(request, Action.TEAMS_LIST)
    if not all:
        return answer(TeamPage(items=await teams.listed(server_of(request), who)))
    after = TeamId(decode("team", cursor)) if cursor else TeamId(0)
    found = await teams.all_of_them(server_of(request), who, after, limit)
    return answer(TeamPage(items=found, next=found[-1].id if len(found) == limit else None))


@router.post(
    "/v1/teams",
    status_code=201,
    openapi_extra=body(TeamRequest),
    responses=_MADE,
    response_class=Response,
)
async def make_team(request: Request) -> Response:
    """A new team; you own it."""
    who = await user_of(request, Action.TEAM_MAKE)
    content = await body_of(request)
    name = parsed(TeamRequest, content).name
    made = await teams.make(server_of(request), who, name, once_of(request, content))
    return answer(made, 201)


@router.post(
    "/v1/teams/join",
    openapi_extra=body(TeamJoin),
    responses=ok(TeamDocument),
    response_class=Response,
)
async def join_team(request: Request) -> Response:
    """Join with an invite's token."""
    who = await user_of(request, Action.TEAM_JOIN)
    content = await body_of(request)
    token = parsed(TeamJoin, content).token
    return answer(await teams.join(server_of(request), who, token, once_of(request, content)))


@router.get("/v1/teams/{id}", responses=ok(TeamDocument), response_class=Response)
async def get_team(request: Request, id: TEAM) -> Response:
    who = await user_of(request, Action.TEAM_READ)
    return answer(await teams.one(server_of(request), who, _team(id)))


@router.patch(
    "/v1/teams/{id}",
    openapi_extra=body(TeamPatch),
    responses=ok(TeamDocument),
    response_class=Response,
)
async def change_team(request: Request, id: TEAM) -> Response:
    """Owners change the name, operators the quota."""
    who = await user_of(request, Action.TEAM_CHANGE)
    content = await body_of(request)
    wanted = parsed(TeamPatch, content)
    changed = await teams.change(
        server_of(request), who, _team(id), wanted, once_of(request, content)
    )
    return answer(changed)


@router.delete("/v1/teams/{id}", status_code=204, response_class=Response)
async def delete_team(request: Request, id: TEAM) -> Response:
    """Only when nothing of it is open."""
    who = await user_of(request, Action.TEAM_DELETE)
    await teams.delete(server_of(request), who, _team(id), once_of(request))
    return Response(status_code=204)


@router.post(
    "/v1/teams/{id}/invites",
    status_code=201,
    openapi_extra=body(TeamInviteRequest, required=False),
    responses={201: {"model": UserInviteDocument, "description": "Made"}},
    response_class=Response,
)
async def invite_to_team(request: Request, id: TEAM) -> Response:
    """A token with which one person who has an account may join."""
    who = await user_of(request, Action.TEAM_INVITE)
    content = await body_of(request)
    wanted = parsed(TeamInviteRequest, content)
    made = await teams.invite(server_of(request), who, _team(id), wanted, once_of(request, content))
    return answer(made, 201)


@router.get("/v1/teams/{id}/members", responses=ok(MemberPage), response_class=Response)
async def list_members(request: Request, id: TEAM) -> Response:
    who = await user_of(request, Action.TEAM_READ)
    return answer(MemberPage(items=await teams.members(server_of(request), who, _team(id))))


@router.post(
    "/v1/teams/{id}/members",
    status_code=201,
    openapi_extra=body(MemberRequest),
    responses={201: {"model": MemberDocument, "description": "A member"}},
    response_class=Response,
)
async def add_member(request: Request, id: TEAM) -> Response:
    """Take somebody in, by name or id; or change their role."""
    who = await user_of(request, Action.TEAM_ROLE_SET)
    content = await body_of(request)
    wanted = parsed(MemberRequest, content)
    made = await teams.set_member(
        server_of(request),
        who,
        _team(id),
        wanted.user,
        Role(wanted.role),
        once_of(request, content),
    )
    return answer(made, 201)


@router.patch(
    "/v1/teams/{id}/members/{user}",
    openapi_extra=body(MemberPatch),
    responses=ok(MemberDocument),
    response_class=Response,
)
async def change_member(request: Request, id: TEAM, user: USER) -> Response:
    who = await user_of(request, Action.TEAM_ROLE_SET)
    content = await body_of(request)
    role = Role(parsed(MemberPatch, content).role)
    changed = await teams.change_role(
        server_of(request), who, _team(id), _user(user), role, once_of(request, content)
    )
    return answer(changed)


@router.delete("/v1/teams/{id}/members/{user}", status_code=204, response_class=Response)
async def remove_member(request: Request, id: TEAM, user: USER) -> Response:
    """Send somebody away, or leave."""
    who = await user_of(request, Action.TEAM_LEAVE)
    if encode("user", who.user.id) != user:
        who = await user_of(request, Action.TEAM_ROLE_SET)
    await teams.remove_member(server_of(request), who, _team(id), _user(user), once_of(request))
    return Response(status_code=204)


def _team(text: str) -> TeamId:
    return TeamId(decode("team", text))


def _user(text: str) -> UserId:
    return UserId(decode("user", text))
