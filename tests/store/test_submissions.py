"""Many submissions written together leave what each would have left alone; what takes more is left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpool.core.ids import BatchId, UserId
from gpool.core.model import InputFile, Instant, TaskKind, TaskSpec
from gpool.server.store.identity_values import GivenQuota
from gpool.server.store.operations.identity import teams
from gpool.server.store.operations.tasks import artifacts, idempotency, tasks
from gpool.server.store.operations.tasks.submissions import submit_together
from gpool.server.store.values import Submission, Submitted
from tests.store.store_pool import COMMAND, Database, Pool, race

FUNCTION = TaskSpec(TaskKind.FUNCTION, "f", function_sha256="a" * 64)
NAMED = replace(COMMAND, name="größe \u2603 'quoted' \"twice\" \\ \n", priority=3, retries=2)


def told(pool: Pool, submitted: Submitted) -> list[Any]:
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
    alone = [pool.write(tasks.submit(each)) for each in wanted]
    numbers = iter(range(900_000, 999_999))
    again = [
        replace(
            each,
            batch=BatchId(next(numbers)),
            tasks=[replace(task, id=next(numbers)) for task in each.tasks],
        )
        for each in wanted
    ]
    together = pool.write(submit_together(again))
    for one, other in zip(alone, together, strict=True):
        assert isinstance(one, Submitted)
        assert other is not None
        assert told(pool, one) == told(pool, other)
        assert one.spec_id == other.spec_id, "equal specs of one user are one"


def test_new_specs_are_kept_once_for_each_user_and_team(pool: Pool) -> None:
    done = pool.write(submit_together([each for _ in range(2) for each in kinds_of_spec(pool)]))
    ids = [each.spec_id for each in done if each is not None]
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


def test_what_takes_more_is_left_out_and_the_others_are_not(pool: Pool) -> None:
    (open_task,) = pool.submit(more=True)
    view = pool.read(tasks.task(open_task, None))
    left_out = [
        pool.submission(batch=view.row.batch),
        pool.submission(spec=FUNCTION, payload=b"x"),
        pool.submission(payload_sha256="b" * 64),
        pool.submission(spec=replace(COMMAND, inputs=(InputFile("in", "c" * 64, 1),))),
        pool.submission(spec=replace(COMMAND, secrets=("T",)), secrets=(("T", b"sealed"),)),
        pool.submission(spec=replace(COMMAND, env=(("A", "\ud800"),))),
    ]
    done = pool.write(submit_together([*left_out, pool.submission()]))
    assert done[:-1] == [None] * len(left_out)
    assert done[-1] is not None
    assert len(pool.read(tasks.tasks(None, None, 100))) == 2


def test_a_function_that_is_known_is_submitted_with_the_others(pool: Pool) -> None:
    """Its first submission made sure that the function is there."""
    pool.write(artifacts.add_artifact("a" * 64, 5, pool.ann, None, None, pool.now()))
    (first,) = pool.submit(spec=FUNCTION, payload=b"one")
    (done,) = pool.write(submit_together([pool.submission(spec=FUNCTION, payload=b"two")]))
    assert done is not None
    assert done.spec_id == pool.read(tasks.task(first, None)).row.spec


def test_replicas_that_meet_with_the_same_new_spec_agree_on_one(database: Database) -> None:
    pool = Pool(database)
    groups = [submit_together([pool.submission(), pool.submission(spec=NAMED)]) for _ in range(12)]
    answers = race(database, groups)
    assert len({each[0].spec_id for each in answers}) == 1
    assert len({each[1].spec_id for each in answers}) == 1
    assert len(pool.read(tasks.tasks(None, None, 100))) == 24


def test_keys_of_many_are_found_and_kept(pool: Pool) -> None:
    at, bob = pool.now(), pool.user("bob")
    pool.write(
        idempotency.keep([(pool.ann, "k", "f", b"\x00one", at), (bob, "k", "g", b"two", at)])
    )
    asked = {(pool.ann, "k"), (pool.ann, "other"), (bob, "k")}
    assert pool.write(idempotency.used(asked)) == {(pool.ann, "k"), (bob, "k")}
    assert pool.write(idempotency.used(set())) == set()
    once = idempotency.once(pool.ann, "k", "f", at, tasks.submit(pool.submission()), lambda _: b"")
    assert pool.write(once) == (None, b"\x00one")


def test_quotas_of_many_are_found_at_once(pool: Pool) -> None:
    bob = pool.user("bob")
    pool.write(teams.set_quota("user", bob, GivenQuota(queued_tasks=5)))
    found = pool.read(teams.quotas_of({("user", bob), ("user", pool.ann), ("team", bob)}))
    assert found == {("user", bob): GivenQuota(queued_tasks=5)}
