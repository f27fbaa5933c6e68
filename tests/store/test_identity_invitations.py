"""Invitations to teams wait for consent; the limits of teams hold among concurrent requests."""

from __future__ import annotations

import pytest

from gpool.core.errors import NotFound, TooMany
from gpool.core.ids import UserId
from gpool.core.model import Instant
from gpool.core.permissions import Role, TeamId
from gpool.server.store.identity_values import Team, TeamInvitation
from gpool.server.store.operations.identity import invitations, teams
from gpool.server.store.operations.tasks import artifacts
from gpool.server.store.protocol import Operation, operation
from tests.store.store_pool import Database, Pool, race


@operation
def invite(
    pool: Pool, team: TeamId, user: UserId | None, name: str, role: Role = Role.MEMBER
) -> Operation[None]:
    at = pool.now()
    made = TeamInvitation(Team(team, "", at), name, role, "ann", at, Instant(at + 10**12))
    yield from invitations.put_invitation(made, user, pool.ann)


def test_an_invitation_is_accepted_once_with_its_role(pool: Pool) -> None:
    lab, bob = pool.team("lab"), pool.user("bob")
    pool.write(invite(pool, lab, bob, "bob"))
    pool.write(invite(pool, lab, bob, "bob", Role.VIEWER))
    pool.write(invite(pool, lab, None, "nobody"))
    [mine] = pool.read(invitations.invitations_of_user(bob, pool.now()))
    assert (mine.team.id, mine.team.name, mine.role) == (lab, "lab", Role.VIEWER)
    assert len(pool.read(invitations.invitations_of_team(lab, pool.now()))) == 2
    assert pool.write(invitations.accept(lab, bob, 1, pool.now())) is Role.VIEWER
    assert pool.read(teams.teams_of(bob)) == {lab: Role.VIEWER}
    with pytest.raises(NotFound):
        pool.write(invitations.accept(lab, bob, 1, pool.now()))
    assert pool.write(invitations.withdraw(lab, "nobody")) is True
    assert pool.write(invitations.decline(lab, bob)) is False


def test_a_deleted_team_takes_its_invitations_along(pool: Pool) -> None:
    lab, bob = pool.team("lab"), pool.user("bob")
    pool.write(invite(pool, lab, bob, "bob"))
    pool.write(teams.delete_team(lab))
    assert pool.read(invitations.invitations_of_user(bob, pool.now())) == ()


def test_of_many_teams_joined_at_once_no_more_than_allowed_are(
    pool: Pool, database: Database
) -> None:
    bob = pool.user("bob")
    made = [pool.team(f"team-{number}") for number in range(6)]
    for team in made:
        pool.write(invite(pool, team, bob, "bob"))
    answers = race(database, [invitations.accept(team, bob, 2, pool.now()) for team in made])
    assert sum(isinstance(answer, TooMany) for answer in answers) == 4
    assert len(pool.read(teams.teams_of(bob))) == 2


def test_a_key_for_a_team_sees_its_own_uploads_and_the_teams_references(pool: Pool) -> None:
    lab, key, other = pool.team("lab"), 7_000_001, 7_000_002
    own, by_key = "a" * 64, "b" * 64
    pool.write(artifacts.add_artifact(own, 3, pool.ann, None, None, pool.now()))
    pool.write(artifacts.add_artifact(by_key, 3, pool.ann, None, None, pool.now(), key))
    seen = [artifacts.visible(sha256, pool.ann, (lab,), key) for sha256 in (own, by_key)]
    assert [pool.read(each) for each in seen] == [None, 3]
    assert pool.read(artifacts.visible(by_key, pool.ann, (lab,), other)) is None
    assert pool.read(artifacts.visible(by_key, pool.ann)) == 3
