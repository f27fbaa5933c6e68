"""Membership by consent (finding 24): nobody is put into a team, and names cannot be found out by inviting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpool.core.errors import TooMany
from gpool.core.model import Instant
from gpool.core.permissions import Role, TeamId
from gpool.server.store.identity_values import Team, TeamInvitation
from gpool.server.store.operations.identity import invitations, teams
from gpool.server.store.protocol import Operation, operation
from tests.server.identity_routes.people_desk import Somebody, joins, registered
from tests.server.server_desk import Desk, StoppedClock, open_desk

pytestmark = pytest.mark.anyio


async def a_team(owner: Somebody, name: str = "lab") -> str:
    made = await owner.ask("POST", "/v1/teams", {"name": name})
    assert made.status_code == 201, made.text
    team: str = made.json()["id"]
    return team


async def invite(owner: Somebody, team: str, user: str, role: str = "member") -> Any:
    return await owner.ask("POST", f"/v1/teams/{team}/members", {"user": user, "role": role})


async def listed(one: Somebody, path: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await one.ask("GET", path)).json()["items"]
    return found


async def test_nobody_is_in_a_team_before_accepting(desk: Desk) -> None:
    ada, bob = await registered(desk, "ada"), await registered(desk, "bob")
    team = await a_team(ada)
    assert (await invite(ada, team, "bob", "viewer")).status_code == 202
    assert await listed(bob, "/v1/teams") == []
    assert (await bob.ask("GET", f"/v1/teams/{team}")).status_code == 404
    assert [one["name"] for one in await listed(ada, f"/v1/teams/{team}/members")] == ["ada"]
    [mine] = await listed(bob, "/v1/invitations")
    assert (mine["team"], mine["team_name"], mine["role"]) == (team, "lab", "viewer")
    assert mine["invited_by"] == "ada"
    joined = await bob.ask("POST", "/v1/teams/join", {"team": team})
    assert (joined.status_code, joined.json()["role"]) == (200, "viewer")
    assert await listed(bob, "/v1/invitations") == []
    assert (await bob.ask("POST", "/v1/teams/join", {"team": team})).status_code == 404


async def test_a_name_that_exists_and_one_that_does_not_are_answered_alike(desk: Desk) -> None:
    ada, bob = await registered(desk, "ada"), await registered(desk, "bob")
    team = await a_team(ada)
    answers = []
    for user in ("bob", "nobody-here", bob.id, "u-0000000000000"):
        answer = await invite(ada, team, user)
        told = {**answer.json(), "user": ""}
        answers.append((answer.status_code, told, sorted(answer.headers)))
    assert all(each == answers[0] for each in answers)
    pending = await listed(ada, f"/v1/teams/{team}/invitations")
    assert [one["user"] for one in pending] == sorted(
        ["bob", "nobody-here", bob.id, "u-" + "0" * 13]
    )
    for user in ("bob", "nobody-here"):
        path = f"/v1/teams/{team}/invitations/{user}"
        assert (await ada.ask("DELETE", path)).status_code == 204
        assert (await ada.ask("DELETE", path)).status_code == 404
    # Whoever registers the name later was not meant.
    assert (await invite(ada, team, "later")).status_code == 202
    later = await registered(desk, "later")
    assert await listed(later, "/v1/invitations") == []


async def test_an_invitation_is_declined_withdrawn_or_expires(desk: Desk) -> None:
    ada, bob, eve = [await registered(desk, name) for name in ("ada", "bob", "eve")]
    team = await a_team(ada)
    await invite(ada, team, "bob")
    assert (await eve.ask("POST", "/v1/teams/join", {"team": team})).status_code == 404
    assert (await eve.ask("DELETE", f"/v1/invitations/{team}")).status_code == 404
    assert (await bob.ask("DELETE", f"/v1/invitations/{team}")).status_code == 204
    assert (await bob.ask("POST", "/v1/teams/join", {"team": team})).status_code == 404
    await invite(ada, team, "bob")
    await ada.ask("DELETE", f"/v1/teams/{team}/invitations/bob")
    assert (await bob.ask("POST", "/v1/teams/join", {"team": team})).status_code == 404
    await invite(ada, team, "bob")
    found = await desk.server.store.read(invitations.invitations_of_user(bob.user, desk.server.now))
    assert len(found) == 1
    desk.clock.advance(15 * 86_400)
    found = await desk.server.store.read(invitations.invitations_of_user(bob.user, desk.server.now))
    assert found == ()


async def test_teams_made_and_joined_are_limited(data: Path) -> None:
    desk = await open_desk(data, StoppedClock(), user_teams=2, user_own_teams=2)
    ada, bob, cy = [await registered(desk, name) for name in ("ada", "bob", "cy-1")]
    mine = [await a_team(ada, name) for name in ("one", "two")]
    third = await ada.ask("POST", "/v1/teams", {"name": "three"})
    assert (third.status_code, "owns 2 teams" in third.json()["detail"]) == (429, True)
    other = await a_team(cy, "other")
    for team in mine:
        await joins(ada, team, bob)
    await invite(cy, other, "bob")
    refused = await bob.ask("POST", "/v1/teams/join", {"team": other})
    assert (refused.status_code, "is in 2 teams" in refused.json()["detail"]) == (429, True)
    token = (await cy.ask("POST", f"/v1/teams/{other}/invites", {})).json()["token"]
    assert (await bob.ask("POST", "/v1/teams/join", {"token": token})).status_code == 429
    await bob.ask("DELETE", f"/v1/teams/{mine[0]}/members/{bob.id}")
    assert (await bob.ask("POST", "/v1/teams/join", {"token": token})).status_code == 200
    await desk.server.identity.close()
    await desk.server.store.close()


async def test_invitations_of_a_team_are_limited_and_weigh_nothing_on_the_invited(
    desk: Desk,
) -> None:
    """Finding 24: 2847 teams that somebody else had put the victim into made each of its requests slow."""
    victim = await registered(desk, "victim")
    mallory = await registered(desk, "mallory")
    now = desk.server.now
    for number in range(300):
        team = Team(TeamId(desk.server.ids.next()), f"ballast-{number}", now)
        await desk.server.write(teams.create_team(team, mallory.user))
        made = TeamInvitation(team, "victim", Role.MEMBER, "mallory", now, Instant(now + 1))
        await desk.server.write(_inviting(made, victim, mallory))
    me = (await victim.ask("GET", "/v1/me")).json()
    assert me["teams"] == []
    who = await desk.server.credentials.who(victim.tokens["access_token"])
    assert who is not None
    assert who.teams == {}
    assert len(await listed(victim, "/v1/invitations")) <= invitations.MAX_LISTED


@pytest.mark.parametrize("more", [0, 1])
async def test_a_team_has_so_many_open_invitations(desk: Desk, more: int) -> None:
    ada = await registered(desk, "ada")
    now = desk.server.now
    team = Team(TeamId(desk.server.ids.next()), "lab", now)
    await desk.server.write(teams.create_team(team, ada.user))

    async def fill() -> None:
        for number in range(invitations.MAX_PENDING + more):
            made = TeamInvitation(team, f"n{number}", Role.MEMBER, "ada", now, Instant(now + 1))
            await desk.server.write(_inviting(made, None, ada))

    if not more:
        await fill()
        return
    with pytest.raises(TooMany, match="withdraw some"):
        await fill()


@operation
def _inviting(made: TeamInvitation, user: Somebody | None, maker: Somebody) -> Operation[None]:
    yield from invitations.put_invitation(made, None if user is None else user.user, maker.user)
