"""Many submissions written together leave what each would have left alone; one that is refused stops no other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from gpool.core.errors import Conflict, Invalid, NotFound
from gpool.core.ids import BatchId, NodeId, UserId
from gpool.core.model import InputFile, Instant, TaskKind, TaskSpec, TaskStatus
from gpool.core.scheduler.state.events import LeaseGrant, Placement
from gpool.server.store.identity_values import GivenQuota
from gpool.server.store.operations.identity import sealed_fields, teams
from gpool.server.store.operations.leases import grants, leases
from gpool.server.store.operations.tasks import artifacts, idempotency, tasks
from gpool.server.store.operations.tasks.projects import MOST_PROJECTS, labels
from gpool.server.store.operations.tasks.submissions import (
    MissingArtifacts,
    Submission,
    SubmittedTasks,
    submit,
)
from gpool.server.store.protocol import Operation, operation
from gpool.server.store.values import AppliedPlan
from tests.store.store_pool import COMMAND, CPU, Database, Pool, race, submit_one

FUNCTION = TaskSpec(TaskKind.FUNCTION, "f", function_sha256="a" * 64)
NAMED = replace(COMMAND, name="größe \u2603 'quoted' \"twice\" \\ \n", priority=3, retries=2)


def told(pool: Pool, submitted: SubmittedTasks) -> list[Any]:
    """All that can be seen of it, without its ids."""
    batch = pool.read(tasks.batch(submitted.batch, None))
    assert batch is not None
    views = [pool.read(tasks.task(task.id, None)) for task in submitted.tasks]
    seen: list[Any] = [replace(batch, id=BatchId(0), created_at=Instant(0))]
    for view in views:
        assert view is not None
        row = view.row
        assert row.batch == submitted.batch
        assert row.spec == submitted.spec_id
        seen.append(
            replace(
                view,
                record=None,
                row=replace(
                    row,
                    id=0,
                    batch=0,
                    spec=0,
                    created_at=Instant(0),
                    queued_at=Instant(row.queued_at - row.created_at),
                ),
            )
        )
    return seen


def kinds(pool: Pool) -> list[Submission]:
    bob = pool.user("bob")
    team = pool.team("red")
    return [
        pool.submission(),
        pool.submission(3),
        pool.submission(user=bob),
        pool.submission(2, spec=NAMED, more=True),
        pool.submission(spec=NAMED, team=team),
        pool.submission(2, payload=b"\x00\xffbytes"),
        pool.submission(2, spec=replace(NAMED, name="nul \x00 within")),
    ]


def test_together_they_leave_what_each_leaves_alone(pool: Pool) -> None:
    wanted = kinds(pool)
    alone = [pool.write(submit_one(each)) for each in wanted]
    numbers = iter(range(900_000, 999_999))
    again = [
        replace(
            each,
            batch=BatchId(next(numbers)),
            tasks=[replace(task, id=next(numbers)) for task in each.tasks],
        )
        for each in wanted
    ]
    together = pool.write(submit(again))
    for one, other in zip(alone, together, strict=True):
        assert isinstance(one, SubmittedTasks)
        assert isinstance(other, SubmittedTasks)
        assert told(pool, one) == told(pool, other)
        assert one.spec_id == other.spec_id, "equal specs of one user are one"


@operation
def submitted_as_leased(
    wanted: list[Submission], places: list[Placement], term: int, at: Instant
) -> Operation[tuple[list[Any], AppliedPlan]]:
    """Submit a task that was planned before its commit."""
    found = yield from grants.startable(places, term)
    allowed = [] if found is None else found.places
    done = yield from submit(wanted, leases=grants.first_leases(allowed, at))
    known = {task.id: (each.spec_id, task) for each in done for task in each.tasks}
    return done, grants.DEPOSED if found is None else grants.inserted(allowed, known)


def test_a_task_inserted_as_leased_is_as_one_that_is_leased_later(pool: Pool) -> None:
    node, gone = pool.node("n1"), NodeId(4711)
    wanted = [
        pool.submission(2, payload=b"\x00\xffbytes"),
        pool.submission(),
        pool.submission(2),
        pool.submission(),
    ]
    for group in (wanted[:1], wanted[1:]):  # one submission, and several
        ids = [task.id for each in group for task in each.tasks]
        *leased, kept = ids  # the last one is planned on a node that is not there
        places = [
            pool.place(node, [id_], allocation=replace(CPU, number=number))
            for number, id_ in enumerate(leased)
        ]
        at = pool.now()
        done, applied = pool.write(
            submitted_as_leased(group, [*places, pool.place(gone, [kept])], pool.term, at)
        )
        assert applied.refused == ()
        assert pool.read(tasks.task(kept, None)).row.status is TaskStatus.QUEUED
        later = [pool.submission(len(each.tasks), payload=each.tasks[0].payload) for each in group]
        others = [task.id for each in pool.write(submit(later)) for task in each.tasks]
        again = [
            replace(place, grants=(LeaseGrant(other, 1),))
            for place, other in zip(places, others, strict=False)
        ]
        usual = pool.write(leases.apply_plan(again, pool.term, at))
        for one, other in zip(applied.lines, usual.lines, strict=True):
            ((_, mine),), ((_, theirs),) = one.leases, other.leases
            assert msgspec.structs.replace(mine, task=0) == msgspec.structs.replace(theirs, task=0)
        for one, other in zip(leased, others, strict=False):
            mine, theirs = (pool.read(tasks.task(id_, None)).row for id_ in (one, other))
            same = {"id": 0, "batch": 0, "created_at": 0, "queued_at": 0, "position": 0}
            assert replace(mine, **same) == replace(theirs, **same)
            assert mine.queued_at == mine.created_at
        assert {each.task for each in pool.read(leases.held(node))} == {
            *leased,
            *others[: len(leased)],
        }
        assert [isinstance(each, SubmittedTasks) for each in done] == [True] * len(group)
        pool.write(leases.expire(node, at))


def test_no_task_is_inserted_as_leased_under_an_earlier_term(pool: Pool) -> None:
    wanted, node, old = pool.submission(), pool.node("n1"), pool.term
    pool.write(leases.take_term(pool.now()))
    (id_,) = [task.id for task in wanted.tasks]
    doing = submitted_as_leased([wanted], [pool.place(node, [id_])], old, pool.now())
    _, applied = pool.write(doing)
    assert applied.deposed
    assert pool.read(tasks.task(id_, None)).row.status is TaskStatus.QUEUED


def test_new_specs_are_kept_once_for_each_user_and_team(pool: Pool) -> None:
    done = pool.write(submit([each for _ in range(2) for each in kinds_of_spec(pool)]))
    ids = [each.spec_id for each in done]
    assert len(ids) == 8
    assert ids[:4] == ids[4:]
    assert len(set(ids)) == 4
    view = pool.read(tasks.task(done[1].tasks[0].id, None))
    assert view.spec == NAMED


def kinds_of_spec(pool: Pool) -> list[Submission]:
    bob, team = UserId(77), 78
    return [
        pool.submission(),
        pool.submission(spec=NAMED),
        pool.submission(spec=NAMED, user=bob),
        pool.submission(spec=NAMED, team=team),
    ]


def test_one_that_is_refused_is_told_why_and_the_others_are_submitted(pool: Pool) -> None:
    refused = [
        pool.submission(batch=BatchId(1)),
        pool.submission(spec=FUNCTION, payload=b"x"),
        pool.submission(payload_sha256="b" * 64),
        pool.submission(spec=replace(COMMAND, inputs=(InputFile("in", "c" * 64, 1),))),
        pool.submission(spec=replace(COMMAND, env=(("A", "\ud800"),))),
    ]
    done = pool.write(submit([*refused, pool.submission()]))
    assert isinstance(done[0], NotFound)
    assert done[1:4] == [MissingArtifacts((letter * 64,)) for letter in "abc"]
    assert isinstance(done[4], Invalid)
    assert isinstance(done[5], SubmittedTasks)
    assert len(pool.read(tasks.tasks(None, None, 100))) == 1


def test_those_that_extend_one_batch_follow_each_other_until_one_closes_it(pool: Pool) -> None:
    (first,) = pool.submit(more=True)
    batch = pool.view(first).row.batch
    more = [pool.submission(2, batch=batch, more=True), pool.submission(1, batch=batch)]
    done = pool.write(submit([*more, pool.submission(1, batch=batch)]))
    assert [each.first_position for each in done[:2]] == [1, 3]
    assert isinstance(done[2], Conflict)
    assert [task.position for each in done[:2] for task in each.tasks] == [1, 2, 3]
    assert pool.read(tasks.batch(batch, None)).total == 4


def test_secrets_of_a_new_spec_are_kept_with_it(pool: Pool) -> None:
    spec = replace(COMMAND, secrets=("T",))
    (done,) = pool.write(submit([pool.submission(spec=spec, secrets=(("T", b"sealed"),))]))
    found = pool.read(sealed_fields.secrets_of([done.spec_id]))
    assert found == {done.spec_id: (("T", b"sealed"),)}


def test_a_function_that_is_known_is_submitted_with_the_others(pool: Pool) -> None:
    """Its first submission made sure that the function is there."""
    pool.write(artifacts.add_artifact("a" * 64, 5, pool.ann, None, None, pool.now()))
    (first,) = pool.submit(spec=FUNCTION, payload=b"one")
    (done,) = pool.write(submit([pool.submission(spec=FUNCTION, payload=b"two")]))
    assert done.spec_id == pool.read(tasks.task(first, None)).row.spec


def test_replicas_that_meet_with_the_same_new_spec_agree_on_one(database: Database) -> None:
    pool = Pool(database)
    groups = [submit([pool.submission(), pool.submission(spec=NAMED)]) for _ in range(12)]
    answers = race(database, groups)
    assert len({each[0].spec_id for each in answers}) == 1
    assert len({each[1].spec_id for each in answers}) == 1
    assert len(pool.read(tasks.tasks(None, None, 100))) == 24


def test_keys_of_many_are_found_and_kept(pool: Pool) -> None:
    at, bob = pool.now(), pool.user("bob")
    pool.write(
        idempotency.keep(
            [
                idempotency.NewAnswer(pool.ann, "k", "f", b"\x00one", at),
                idempotency.NewAnswer(bob, "k", "g", b"two", at),
            ]
        )
    )
    asked = {(pool.ann, "k"), (pool.ann, "other"), (bob, "k")}
    found = pool.write(idempotency.saved(asked))
    assert {key: bytes(each.answer) for key, each in found.items()} == {
        (pool.ann, "k"): b"\x00one",
        (bob, "k"): b"two",
    }
    assert pool.write(idempotency.saved(set())) == {}
    once = idempotency.once(pool.ann, "k", "f", at, submit_one(pool.submission()), lambda _: b"")
    assert pool.write(once) == (None, b"\x00one")


def test_quotas_of_many_are_found_at_once(pool: Pool) -> None:
    bob = pool.user("bob")
    pool.write(teams.set_quota("user", bob, GivenQuota(queued_tasks=5)))
    found = pool.read(teams.quotas_of({("user", bob), ("user", pool.ann), ("team", bob)}))
    assert found == {("user", bob): GivenQuota(queued_tasks=5)}


def test_an_account_has_a_limited_number_of_project_labels(pool: Pool) -> None:
    for number in range(MOST_PROJECTS):
        pool.submit(1, project=f"p{number}")
    with pytest.raises(Conflict, match="project labels"):
        pool.submit(1, project="one-more")
    pool.submit(1, project="p0")  # known labels stay usable
    pool.submit(1, project="p1", spec=TaskSpec(TaskKind.COMMAND, "other", command=("false",)))
    pool.submit(1)
    assert len(pool.read(labels(("user", pool.ann)))) == MOST_PROJECTS


def test_equal_specs_of_two_projects_are_two_specs(pool: Pool) -> None:
    done = [pool.try_submit(project=project) for project in ("a", "b", "a")]
    found = [one.spec_id for one in done if isinstance(one, SubmittedTasks)]
    assert found[0] == found[2] != found[1]
