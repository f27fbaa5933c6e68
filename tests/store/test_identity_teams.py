"""Teams, their members, and tasks that are a team's."""

from __future__ import annotations

import pytest

from gpool.core.errors import Conflict, Invalid, NotFound
from gpool.core.ids import UserId
from gpool.core.model import InputFile, TaskKind, TaskSpec, TaskStatus
from gpool.core.permissions import Role, TeamId
from gpool.server.store.identity_values import Team
from gpool.server.store.operations.identity import teams
from gpool.server.store.operations.leases import leases
from gpool.server.store.operations.tasks import artifacts, progress, tasks
from gpool.server.store.operations.tasks.submissions import MissingArtifacts, SubmittedTasks
from tests.store.store_pool import COMMAND, Database, Pool, race, returned

FUNCTION = TaskSpec(
    TaskKind.FUNCTION, "f", function_sha256="a" * 64, inputs=(InputFile("in", "b" * 64, 3),)
)


def test_who_makes_a_team_owns_it(pool: Pool) -> None:
    lab = pool.team("lab")
    assert pool.read(teams.team(lab)).name == "lab"
    assert pool.read(teams.team_by_name("lab")).id == lab
    assert pool.read(teams.teams_of(pool.ann)) == {lab: Role.OWNER}
    (member,) = pool.read(teams.members(lab))
    assert (member.user, member.name, member.role) == (pool.ann, "ann", Role.OWNER)
    assert pool.read(teams.team(TeamId(1))) is None
    assert pool.read(teams.team_by_name("x")) is None


def test_a_teams_name_is_its_own(pool: Pool) -> None:
    lab, other = pool.team("lab"), pool.team("other")
    with pytest.raises(Conflict, match="already"):
        pool.team("lab")
    with pytest.raises(Conflict, match="already"):
        pool.write(teams.rename_team(other, "lab"))
    assert pool.write(teams.rename_team(lab, "lab")) is True
    assert pool.write(teams.rename_team(other, "works")) is True
    assert pool.write(teams.rename_team(TeamId(1), "x")) is False
    assert [team.name for team in pool.read(teams.teams(0, 10))] == ["lab", "works"]
    assert [team.name for team in pool.read(teams.teams(lab, 10))] == ["works"]


def test_a_name_that_a_team_had_is_given_to_no_other_team(pool: Pool) -> None:
    lab, other, gone = pool.team("lab"), pool.team("other"), pool.team("gone")
    assert pool.write(teams.rename_team(lab, "works")) is True
    assert pool.write(teams.delete_team(gone)) is True
    for name in ("lab", "gone"):
        with pytest.raises(Conflict, match="another team had the name"):
            pool.team(name)
        with pytest.raises(Conflict, match="another team had the name"):
            pool.write(teams.rename_team(other, name))
    assert pool.write(teams.rename_team(lab, "lab")) is True


def test_of_many_who_make_one_team_at_once_one_does(pool: Pool, database: Database) -> None:
    made = [teams.create_team(Team(TeamId(i), "lab", pool.now()), pool.ann) for i in range(10)]
    answers = race(database, made)
    assert sum(answer is None for answer in answers) == 1
    assert len(pool.read(teams.teams_of(pool.ann))) == 1


def test_a_team_never_loses_its_last_owner(pool: Pool) -> None:
    lab, bob = pool.team("lab"), pool.user("bob")
    with pytest.raises(Conflict, match="last owner"):
        pool.write(teams.set_role(lab, pool.ann, Role.VIEWER, pool.now()))
    with pytest.raises(Conflict, match="last owner"):
        pool.write(teams.remove_member(lab, pool.ann))
    pool.write(teams.set_role(lab, bob, Role.OWNER, pool.now()))
    pool.write(teams.set_role(lab, pool.ann, Role.VIEWER, pool.now()))
    assert [member.role for member in pool.read(teams.members(lab))] == [Role.VIEWER, Role.OWNER]
    assert pool.write(teams.remove_member(lab, pool.ann)) is True
    assert pool.write(teams.remove_member(lab, pool.ann)) is False
    assert pool.write(teams.remove_member(TeamId(1), bob)) is False
    with pytest.raises(Conflict, match="last owner"):
        pool.write(teams.remove_member(lab, bob))


def test_a_role_is_given_to_users_in_teams_that_are_there(pool: Pool) -> None:
    lab = pool.team("lab")
    with pytest.raises(NotFound, match="user"):
        pool.write(teams.set_role(lab, UserId(1), Role.MEMBER, pool.now()))
    with pytest.raises(NotFound, match="team"):
        pool.write(teams.set_role(TeamId(1), pool.ann, Role.MEMBER, pool.now()))


def test_two_owners_who_leave_at_once_do_not_both_go(pool: Pool, database: Database) -> None:
    bob = pool.user("bob")
    for turn in range(5):
        lab = pool.team(f"lab{turn}")
        pool.write(teams.set_role(lab, bob, Role.OWNER, pool.now()))
        answers = race(
            database, [teams.remove_member(lab, user) for user in (pool.ann, bob)], stores=2
        )
        assert sorted(map(type, answers), key=str) == [bool, Conflict]
        assert len(pool.read(teams.members(lab))) == 1


def test_a_team_goes_only_once_its_tasks_have_ended(pool: Pool) -> None:
    lab, node = pool.team("lab"), pool.node("box")
    (queued,) = pool.submit(team=lab)
    with pytest.raises(Conflict, match="not finished"):
        pool.write(teams.delete_team(lab))
    pool.grant(node, [queued])
    with pytest.raises(Conflict, match="not finished"):
        pool.write(teams.delete_team(lab))
    pool.record(node, returned(queued))
    assert pool.write(teams.delete_team(lab)) is True
    assert pool.write(teams.delete_team(lab)) is False
    assert pool.read(teams.teams_of(pool.ann)) == {}
    assert pool.view(queued).row.team == lab


# ---- a team's tasks


def test_a_teams_task_is_seen_through_the_team_only(pool: Pool) -> None:
    lab, other = pool.team("lab"), pool.team("other")
    bob = pool.user("bob")
    ours = pool.try_submit(team=lab)
    task = ours.tasks[0].id
    assert pool.view(task).row.team == lab
    for user, through, sees in (
        (pool.ann, (), False),  # who submitted it may have left
        (pool.ann, (lab,), True),
        (bob, (other, lab), True),
        (bob, (other,), False),
        (bob, (), False),
        (None, (), True),
    ):
        assert bool(pool.read(tasks.task(task, user, through))) is sees
        assert bool(pool.read(tasks.story(task, user, through))) is sees
        assert bool(pool.read(tasks.batch(ours.batch, user, through))) is sees
    assert pool.read(tasks.batch(ours.batch, None)).team == lab
    (mine,) = pool.submit()
    assert pool.read(tasks.task(mine, bob, (lab,))) is None
    assert pool.read(tasks.task(mine, pool.ann)).row.team is None


def test_listings_are_ones_own_and_the_named_teams(pool: Pool) -> None:
    lab, other = pool.team("lab"), pool.team("other")
    bob = pool.user("bob")
    node = pool.node("box")
    mine, ours, theirs, bobs = (
        pool.submit(3),
        pool.submit(3, team=lab),
        pool.submit(3, team=other, user=bob),
        pool.submit(3, user=bob),
    )
    for number, made in enumerate((mine, ours, theirs, bobs)):
        pool.grant(node, made[:2], number=number)
        pool.record(node, returned(made[0]))

    def listed(user: UserId | None, *through: TeamId, **options: object) -> list[int]:
        found = pool.read(tasks.tasks(user, None, 100, teams=through, **options))
        return [view.row.id for view in found]

    everything = [*mine, *ours, *theirs, *bobs]
    for statuses, nth in (
        ((), (0, 1, 2)),
        ((TaskStatus.QUEUED,), (2,)),
        ((TaskStatus.LEASED, TaskStatus.RUNNING), (1,)),
        ((TaskStatus.QUEUED, TaskStatus.LEASED), (1, 2)),
        ((TaskStatus.SUCCEEDED,), (0,)),
    ):

        def picked(*made: list, nth: tuple = nth) -> list[int]:
            return sorted((each[i] for each in made for i in nth), reverse=True)

        assert listed(pool.ann, statuses=statuses) == picked(mine)
        assert listed(pool.ann, lab, statuses=statuses) == picked(mine, ours)
        assert listed(bob, lab, other, statuses=statuses) == picked(ours, theirs, bobs)
        assert listed(None, other, statuses=statuses) == picked(theirs)
        assert listed(None, lab, other, statuses=statuses) == picked(ours, theirs)
        assert listed(None, statuses=statuses) == picked(mine, ours, theirs, bobs)
    assert listed(None) == sorted(everything, reverse=True)
    page = pool.read(tasks.tasks(pool.ann, None, 4, teams=(lab,)))
    rest = pool.read(tasks.tasks(pool.ann, page[-1].row.id, 4, teams=(lab,)))
    assert [view.row.id for view in (*page, *rest)] == listed(pool.ann, lab)
    with pytest.raises(Invalid, match="teams"):
        pool.read(tasks.tasks(pool.ann, None, 4, teams=range(101)))


def test_a_teams_task_is_cancelled_through_the_team_only(pool: Pool) -> None:
    lab, bob = pool.team("lab"), pool.user("bob")
    (task,) = pool.submit(team=lab)
    assert pool.write(tasks.cancel([task], pool.ann, pool.now())).ended == ()
    assert pool.write(tasks.cancel([task], bob, pool.now(), (lab,))).withdrawn == (task,)


def test_a_batch_is_extended_for_its_own_team(pool: Pool) -> None:
    lab, other = pool.team("lab"), pool.team("other")
    batch = pool.try_submit(team=lab, more=True).batch
    for wrong in (None, other):
        with pytest.raises(Conflict, match="team"):
            pool.try_submit(batch=batch, team=wrong)
    assert isinstance(pool.try_submit(batch=batch, team=lab), SubmittedTasks)


def test_equal_specs_are_one_within_a_team_only(pool: Pool) -> None:
    lab, other = pool.team("lab"), pool.team("other")
    made = [pool.try_submit(team=team) for team in (None, lab, lab, other)]
    assert made[1].spec_id == made[2].spec_id
    assert len({each.spec_id for each in made}) == 3
    assert pool.read(leases.spec(made[1].spec_id)) == (pool.ann, COMMAND)


def test_a_teams_artifacts_are_seen_through_the_team(pool: Pool) -> None:
    lab, bob, node = pool.team("lab"), pool.user("bob"), pool.node("box")
    for letter in "ab":
        pool.write(artifacts.add_artifact(letter * 64, 3, pool.ann, None, None, pool.now()))
    (task,) = pool.submit(spec=FUNCTION, team=lab)
    for letter in "ab":
        assert pool.read(artifacts.visible(letter * 64, pool.ann)) == 3  # her upload
        assert pool.read(artifacts.visible(letter * 64, bob)) is None
        assert pool.read(artifacts.visible(letter * 64, bob, (lab,))) == 3
    assert isinstance(pool.try_submit(spec=FUNCTION, user=bob), MissingArtifacts)
    assert isinstance(pool.try_submit(spec=FUNCTION, user=bob, team=lab), SubmittedTasks)
    pool.grant(node, [task])
    value, log = "c" * 64, "d" * 64
    pool.write(artifacts.add_artifact(value, 5, None, node, (task, 1), pool.now()))
    pool.record(node, returned(task, value=b"", value_sha256=value))
    pool.write(progress.seal_logs(task, log, 7, pool.now()))
    for sha256 in (value, log):
        assert pool.read(artifacts.visible(sha256, pool.ann)) is None
        assert pool.read(artifacts.visible(sha256, bob, (lab,))) is not None
