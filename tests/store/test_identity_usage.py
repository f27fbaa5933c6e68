"""Quotas and what is in use: counted exactly, and read without walking through what is finished."""

from __future__ import annotations

from dataclasses import replace

from gpool.core.model import Instant, Slice
from gpool.core.quotas import QuotaUsage
from gpool.server.store.identity_values import GivenQuota
from gpool.server.store.operations.identity import teams
from gpool.server.store.operations.tasks import artifacts, deletion, progress
from gpool.server.store.protocol import Operation, operation
from gpool.wire.frames import Released
from tests.store.store_pool import Database, Pool, race, returned, submit_one

HALF, WHOLE = Slice(0, 40 << 30, 500), Slice(1, 80 << 30, 1000)


def used(pool: Pool, kind: str = "user", id: int | None = None) -> QuotaUsage:
    return pool.read(teams.usage_of(kind, pool.ann if id is None else id))


def without_storage(pool: Pool, kind: str = "user", id: int | None = None) -> QuotaUsage:
    return replace(used(pool, kind, id), storage_bytes=0)


def stored(pool: Pool, kind: str = "user", id: int | None = None) -> int:
    """Bytes of artifacts; the rows of tasks are charged too (test_storage)."""
    account = (kind, pool.ann if id is None else id)
    found = pool.read(deletion.artifacts_of(account, (1 << 62, ""), 100))
    return sum(artifact.size_bytes for artifact in found)


def test_what_was_given_is_read_back_and_nothing_given_is_the_default(pool: Pool) -> None:
    assert pool.read(teams.quota_of("user", pool.ann)) == GivenQuota()
    given = GivenQuota(2000, None, 1 << 40)
    pool.write(teams.set_quota("user", pool.ann, given))
    pool.write(teams.set_quota("team", pool.ann, GivenQuota(queued_tasks=0)))
    assert pool.read(teams.quota_of("user", pool.ann)) == given
    pool.write(teams.set_quota("user", pool.ann, GivenQuota(1)))
    assert pool.read(teams.quotas()) == {
        ("user", pool.ann): GivenQuota(1),
        ("team", pool.ann): GivenQuota(queued_tasks=0),
    }


def test_queued_tasks_and_held_gpus_are_counted_for_user_and_team(pool: Pool) -> None:
    lab, bob, node = pool.team("lab"), pool.user("bob"), pool.node("box", gpus=2)
    mine, ours, bobs = pool.submit(4), pool.submit(3, team=lab), pool.submit(5, user=bob)
    assert (used(pool).queued_tasks, used(pool, "team", lab).queued_tasks) == (7, 3)
    pool.grant(node, mine[:3], number=0, slices=(HALF, WHOLE))  # a line: one allocation
    pool.grant(node, ours[:1], number=1, slices=(HALF,))
    pool.grant(node, bobs[:1], number=2, slices=(WHOLE,))
    assert without_storage(pool) == QuotaUsage(2000, 3, 0)
    assert without_storage(pool, "team", lab) == QuotaUsage(500, 2, 0)
    assert without_storage(pool, id=bob) == QuotaUsage(1000, 4, 0)
    pool.record(node, returned(mine[0]))
    assert used(pool).running_gpu_milli == 2000
    pool.record(node, returned(mine[1]), Released(mine[2], 1))
    assert without_storage(pool) == QuotaUsage(500, 4, 0)
    pool.cancel(ours[0])
    assert without_storage(pool, "team", lab) == QuotaUsage(
        500, 2, 0
    )  # held until the node lets go
    pool.expire(node)
    assert without_storage(pool, "team", lab) == QuotaUsage(0, 2, 0)


def test_an_artifact_is_counted_once_for_each_who_stores_it(pool: Pool) -> None:
    lab, bob, node = pool.team("lab"), pool.user("bob"), pool.node("box")
    at = pool.now()
    for user in (pool.ann, pool.ann, bob):
        pool.write(artifacts.add_artifact("a" * 64, 100, user, None, None, at))
    assert (stored(pool), stored(pool, id=bob)) == (100, 100)
    (task,) = pool.submit(payload_sha256="a" * 64)
    assert stored(pool) == 100
    (ours,) = pool.submit(payload_sha256="a" * 64, team=lab)
    assert stored(pool, "team", lab) == 100
    pool.grant(node, [task])
    pool.grant(node, [ours], number=1)
    for number, which in enumerate((task, ours)):
        sha256 = str(number) * 64
        pool.write(artifacts.add_artifact(sha256, 1000, None, node, (which, 1), at))
        assert stored(pool) == (1100, 1110)[number]  # a lease's upload counts at once
        pool.record(node, returned(which, value=b"", value_sha256=sha256))
        pool.write(progress.seal_logs(which, f"{number}f" * 32, 10, at))
    assert stored(pool) == 1110
    assert stored(pool, "team", lab) == 1110


def test_what_is_forgotten_is_no_longer_counted(pool: Pool) -> None:
    lab, bob = pool.team("lab"), pool.user("bob")
    for letter, size in (("a", 100), ("b", 30)):
        for user in (pool.ann, bob):
            pool.write(artifacts.add_artifact(letter * 64, size, user, None, None, Instant(1)))
    pool.submit(payload_sha256="b" * 64, team=lab)
    gone = pool.write(artifacts.forget_artifacts(["a" * 64, "b" * 64]))
    assert gone == ("a" * 64,)
    assert [used(pool).storage_bytes, used(pool, id=bob).storage_bytes] == [30, 30]
    assert stored(pool, "team", lab) == 30
    pool.write(artifacts.add_artifact("a" * 64, 100, bob, None, None, Instant(2)))
    assert used(pool, id=bob).storage_bytes == 130


def test_storage_adds_up_whoever_writes_at_once(pool: Pool, database: Database) -> None:
    users = [pool.ann, pool.user("bob"), pool.user("eve")]
    uploads = [
        artifacts.add_artifact(f"{number % 20:064x}", number % 20 + 1, user, None, None, Instant(1))
        for number in range(60)
        for user in users
    ]
    race(database, uploads)
    assert [used(pool, id=user).storage_bytes for user in users] == [210, 210, 210]
    race(database, [artifacts.forget_artifacts([f"{number:064x}"]) for number in range(10)] * 2)
    assert [used(pool, id=user).storage_bytes for user in users] == [155, 155, 155]


def test_a_quota_checked_while_the_account_is_held_is_never_passed(
    pool: Pool, database: Database
) -> None:
    limit = 10

    @operation
    def careful(submission: object) -> Operation[bool]:
        yield from teams.hold_account("user", pool.ann)
        usage = yield from teams.usage_of("user", pool.ann)
        if usage.queued_tasks + 3 > limit:
            return False
        yield from submit_one(submission)
        return True

    answers = race(database, [careful(pool.submission(3)) for _ in range(12)])
    assert sum(answers) == 3
    assert used(pool).queued_tasks == 9
