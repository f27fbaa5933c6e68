"""Routes of teams and their members, of stored secrets, and of users for operators."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query
from starlette.requests import Request
from starlette.responses import Response

from gpool.core.errors import Invalid
from gpool.core.ids import UserId, decode, encode
from gpool.core.permissions import Action, Role, TeamId
from gpool.server.actions import users
from gpool.server.actions.accounts import invitations, named_secrets, password_resets, teams
from gpool.server.api.callers import caller, check, server_of, user_of
from gpool.server.api.endpoints import NO_CONTENT, EndpointRouter, SuccessReply, created
from gpool.server.api.messages import (
    TEAM,
    USER,
    Cursor,
    Limit,
    answer,
    document_of,
    no_content,
    once_of,
    uncached,
)
from gpool.server.identity.throttle import RouteClass
from gpool.server.store.identity_values import Caller
from gpool.wire.identity import (
    InvitationDocument,
    InvitationPage,
    MemberPage,
    MemberPatch,
    MemberRequest,
    NamedSecretDocument,
    NamedSecretPage,
    NamedSecretRequest,
    PasswordLinkDocument,
    TeamDocument,
    TeamInviteRequest,
    TeamJoin,
    TeamMemberDocument,
    TeamPage,
    TeamPatch,
    TeamRequest,
    UserDocument,
    UserInviteDocument,
    UserInviteRequest,
    UserPage,
    UserPatch,
)

routes = EndpointRouter("teams")

INVITEE = Annotated[str, Path(description="User name or id, as in the invitation", max_length=64)]


@routes.get("/v1/teams", Action.TEAMS_LIST, Action.USERS_LIST, returns=TeamPage)
async def list_teams(
    request: Request,
    all: Annotated[bool, Query(description="All teams, the oldest first; operators only")] = False,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Response:
    """List the teams you belong to."""
    server = server_of(request)
    if not all:
        who = await user_of(request, Action.TEAMS_LIST)
        return answer(TeamPage(items=await teams.list_teams(server, who)))
    who = await user_of(request, Action.USERS_LIST)
    after = TeamId(decode("team", cursor)) if cursor else TeamId(0)
    found = await teams.list_all_teams(server, who, after, limit)
    return answer(TeamPage(items=found, next=found[-1].id if len(found) == limit else None))


@routes.post("/v1/teams", Action.TEAM_MAKE, body=TeamRequest, returns=created(TeamDocument))
async def create_team(request: Request) -> Response:
    """Create a team; you become its owner."""
    who = await user_of(request)
    wanted, once = await document_of(request, TeamRequest)
    return answer(await teams.create_team(server_of(request), who, wanted.name, once), 201)


@routes.post(
    "/v1/teams/join",
    Action.TEAM_JOIN,
    rate=RouteClass.SIGN_IN,
    body=TeamJoin,
    returns=TeamDocument,
    problems=(404,),
)
async def join_team(request: Request) -> Response:
    """Join a team: with the token of an invite, or by accepting an invitation of your account."""
    who = await user_of(request)
    wanted, once = await document_of(request, TeamJoin)
    server = server_of(request)
    if wanted.token is not None and wanted.team is None:
        return answer(await teams.join(server, who, wanted.token, once))
    if wanted.team is not None and wanted.token is None:
        return answer(await invitations.accept(server, who, _team(wanted.team), once))
    raise Invalid("send either 'token' or 'team'")


@routes.get("/v1/invitations", Action.TEAMS_LIST, returns=InvitationPage)
async def list_invitations(request: Request) -> Response:
    """List the teams that have invited you, the newest invitation first."""
    who = await user_of(request)
    return answer(InvitationPage(items=await invitations.list_own(server_of(request), who)))


@routes.delete("/v1/invitations/{id}", Action.TEAM_JOIN, returns=NO_CONTENT, problems=(404,))
async def decline_invitation(request: Request, id: TEAM) -> Response:
    """Decline the invitation to a team."""
    who = await user_of(request)
    await invitations.decline(server_of(request), who, _team(id), once_of(request))
    return no_content()


@routes.get("/v1/teams/{id}", Action.TEAM_READ, returns=TeamDocument)
async def get_team(request: Request, id: TEAM) -> Response:
    """Read one team."""
    who = await user_of(request)
    return answer(await teams.get_team(server_of(request), who, _team(id)))


@routes.patch(
    "/v1/teams/{id}", Action.TEAM_CHANGE, Action.QUOTA_SET, body=TeamPatch, returns=TeamDocument
)
async def change_team(request: Request, id: TEAM) -> Response:
    """Change a team: its name (owners) or its quota (operators)."""
    who = await user_of(request, Action.TEAM_CHANGE)
    wanted, once = await document_of(request, TeamPatch)
    return answer(await teams.change(server_of(request), who, _team(id), wanted, once))


@routes.delete("/v1/teams/{id}", Action.TEAM_DELETE, returns=NO_CONTENT)
async def delete_team(request: Request, id: TEAM) -> Response:
    """Delete a team. 409 while it has tasks that have not ended."""
    who = await user_of(request)
    await teams.delete(server_of(request), who, _team(id), once_of(request))
    return no_content()


@routes.post(
    "/v1/teams/{id}/invites",
    Action.TEAM_INVITE,
    body=TeamInviteRequest,
    is_body_required=False,
    returns=created(UserInviteDocument),
)
async def create_team_invite(request: Request, id: TEAM) -> Response:
    """Create a token with which one existing user may join the team."""
    who = await user_of(request)
    wanted, once = await document_of(request, TeamInviteRequest)
    return answer(await teams.invite(server_of(request), who, _team(id), wanted, once), 201)


@routes.get("/v1/teams/{id}/members", Action.TEAM_READ, returns=MemberPage)
async def list_team_members(request: Request, id: TEAM) -> Response:
    """List the members of a team."""
    who = await user_of(request)
    return answer(MemberPage(items=await teams.members(server_of(request), who, _team(id))))


@routes.post(
    "/v1/teams/{id}/members",
    Action.TEAM_ROLE_SET,
    body=MemberRequest,
    returns=(
        created(TeamMemberDocument, "The member, with the new role"),
        SuccessReply(InvitationDocument, 202, "Invited, if there is such an account"),
    ),
)
async def add_team_member(request: Request, id: TEAM) -> Response:
    """Invite a user to a team by name or id, or change a member's role. The user joins by accepting."""
    who = await user_of(request)
    wanted, once = await document_of(request, MemberRequest)
    role = Role(wanted.role)
    made = await invitations.set_member(server_of(request), who, _team(id), wanted.user, role, once)
    return answer(made, 201 if isinstance(made, TeamMemberDocument) else 202)


@routes.get("/v1/teams/{id}/invitations", Action.TEAM_READ, returns=InvitationPage)
async def list_team_invitations(request: Request, id: TEAM) -> Response:
    """List the invitations of a team that nobody has accepted yet."""
    who = await user_of(request)
    found = await invitations.list_of_team(server_of(request), who, _team(id))
    return answer(InvitationPage(items=found))


@routes.delete("/v1/teams/{id}/invitations/{user}", Action.TEAM_INVITE, returns=NO_CONTENT)
async def withdraw_invitation(request: Request, id: TEAM, user: INVITEE) -> Response:
    """Withdraw an invitation, named as it was made."""
    who = await user_of(request)
    await invitations.withdraw(server_of(request), who, _team(id), user, once_of(request))
    return no_content()


@routes.patch(
    "/v1/teams/{id}/members/{user}",
    Action.TEAM_ROLE_SET,
    body=MemberPatch,
    returns=TeamMemberDocument,
)
async def change_team_member(request: Request, id: TEAM, user: USER) -> Response:
    """Change the role of a member."""
    who = await user_of(request)
    wanted, once = await document_of(request, MemberPatch)
    role = Role(wanted.role)
    changed = await teams.change_role(server_of(request), who, _team(id), _user(user), role, once)
    return answer(changed)


@routes.delete(
    "/v1/teams/{id}/members/{user}",
    Action.TEAM_LEAVE,
    Action.TEAM_ROLE_SET,
    returns=NO_CONTENT,
)
async def remove_team_member(request: Request, id: TEAM, user: USER) -> Response:
    """Remove a member, or leave the team yourself."""
    who = await caller(request)
    is_self = isinstance(who, Caller) and encode("user", who.user.id) == user
    check(request, who, Action.TEAM_LEAVE if is_self else Action.TEAM_ROLE_SET)
    assert isinstance(who, Caller), "no node may do this"
    await teams.remove_member(server_of(request), who, _team(id), _user(user), once_of(request))
    return no_content()


# ---- stored secrets

SECRET_NAME = Annotated[str, Path(description="Name of the secret", max_length=128)]
OF_TEAM = Annotated[str | None, Query(description="Team id: of this team instead")]


@routes.get("/v1/secrets", Action.SECRETS_LIST, returns=NamedSecretPage, problems=(400, 404))
async def list_secrets(request: Request, team: OF_TEAM = None) -> Response:
    """List the names of stored secrets. No route shows a value."""
    who = await user_of(request)
    return answer(await named_secrets.list_secrets(server_of(request), who, _maybe_team(team)))


@routes.put(
    "/v1/secrets/{name}",
    Action.SECRET_CHANGE,
    body=NamedSecretRequest,
    returns=NamedSecretDocument,
    problems=(404, 409),
)
async def put_secret(request: Request, name: SECRET_NAME, team: OF_TEAM = None) -> Response:
    """Store a secret of your account, or of a team that you own, or replace its value."""
    who = await user_of(request)
    wanted, once = await document_of(request, NamedSecretRequest)
    server, value = server_of(request), wanted.value.get_secret_value()
    return answer(await named_secrets.put(server, who, _maybe_team(team), name, value, once))


@routes.delete("/v1/secrets/{name}", Action.SECRET_CHANGE, returns=NO_CONTENT, problems=(400, 404))
async def delete_secret(request: Request, name: SECRET_NAME, team: OF_TEAM = None) -> Response:
    """Delete a stored secret. Tasks that were submitted keep their copy."""
    who, once = await user_of(request), once_of(request)
    await named_secrets.delete(server_of(request), who, _maybe_team(team), name, once)
    return no_content()


def _maybe_team(text: str | None) -> TeamId | None:
    return None if text is None else _team(text)


def _team(text: str) -> TeamId:
    return TeamId(decode("team", text))


def _user(text: str) -> UserId:
    return UserId(decode("user", text))


user_routes = EndpointRouter("operators")


@user_routes.get("/v1/users", Action.USERS_LIST, returns=UserPage, problems=(400,))
async def list_users(request: Request, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """List all users, the oldest account first."""
    await user_of(request)
    after = UserId(decode("user", cursor)) if cursor else UserId(0)
    found = await users.list_users(server_of(request), after, limit)
    return answer(UserPage(items=found, next=found[-1].id if len(found) == limit else None))


@user_routes.post(
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


@user_routes.get("/v1/users/{id}", Action.USER_READ, returns=UserDocument)
async def get_user(request: Request, id: USER) -> Response:
    """Read your own account; operators read any account."""
    who = await user_of(request)
    return answer(await users.get_user(server_of(request), who, UserId(decode("user", id))))


@user_routes.patch(
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


@user_routes.post(
    "/v1/users/{id}/password-link",
    Action.PASSWORD_LINK,
    returns=created(PasswordLinkDocument),
    problems=(409,),
)
async def create_password_link(request: Request, id: USER) -> Response:
    """Create a link with which the user sets a new password, once, within 30 minutes. It ends all their sessions."""
    who = await user_of(request)
    user = UserId(decode("user", id))
    return uncached(await password_resets.create(server_of(request), who, user), 201)
