"""Same key, same answer."""

from __future__ import annotations

import asyncio

import pytest

from gpool.core.errors import KeyReused, NotFound
from gpool.core.ids import BatchId
from gpool.core.model import Instant, TaskKind, TaskSpec
from gpool.server.store.operations.tasks import idempotency, tasks
from gpool.server.store.operations.tasks.submissions import MissingArtifacts, SubmittedTasks
from gpool.server.store.protocol import Operation
from tests.store.store_pool import Database, Pool, replicas, submit_one

FUNCTION = TaskSpec(TaskKind.FUNCTION, "f", function_sha256="a" * 64)


def encode(done: SubmittedTasks | MissingArtifacts) -> bytes:
    assert isinstance(done, SubmittedTasks)
    return str(done.batch).encode()


def keyed(pool: Pool, key: str = "k", fingerprint: str = "f", **options: object) -> Operation:
    submit = submit_one(pool.submission(**options))
    return idempotency.once(pool.ann, key, fingerprint, pool.now(), submit, encode)


def test_a_key_used_again_gives_the_first_answer_and_no_second_effect(pool: Pool) -> None:
    value, answer = pool.write(keyed(pool))
    assert str(value.batch).encode() == answer
    assert pool.write(keyed(pool)) == (None, answer)
    assert len(pool.read(tasks.tasks(None, None, 10))) == 1


def test_a_key_used_for_another_request_is_refused(pool: Pool) -> None:
    pool.write(keyed(pool))
    with pytest.raises(KeyReused):
        pool.write(keyed(pool, fingerprint="other"))
    assert len(pool.read(tasks.tasks(None, None, 10))) == 1


def test_two_users_may_use_the_same_key(pool: Pool) -> None:
    bob = pool.user("bob")
    pool.write(keyed(pool))
    submit = submit_one(pool.submission(user=bob))
    value, _ = pool.write(idempotency.once(bob, "k", "g", pool.now(), submit, encode))
    assert value is not None


def test_a_refused_request_leaves_its_key_free(pool: Pool) -> None:
    with pytest.raises(NotFound):
        pool.write(keyed(pool, batch=BatchId(1)))
    value, _ = pool.write(keyed(pool, fingerprint="other"))
    assert value is not None


def test_one_key_used_at_once_by_many_has_one_effect(pool: Pool, database: Database) -> None:
    async def race() -> list[tuple[object, bytes]]:
        async with replicas(database.url, 3) as stores:
            writes = (store.write(keyed(pool)) for store in stores for _ in range(5))
            return list(await asyncio.gather(*writes))

    answers = database.run(race())
    assert len({answer for _, answer in answers}) == 1
    assert sum(value is not None for value, _ in answers) == 1
    assert len(pool.read(tasks.tasks(None, None, 100))) == 1


def test_old_keys_are_forgotten(pool: Pool) -> None:
    pool.write(keyed(pool, key="old"))
    pool.write(keyed(pool, key="older"))
    before = pool.now()
    pool.write(keyed(pool, key="new"))
    assert pool.write(idempotency.forget_keys(before, 1)) == 1
    assert pool.write(idempotency.forget_keys(before, 10)) == 1
    assert pool.write(idempotency.forget_keys(before, 10)) == 0
    assert pool.write(keyed(pool, key="new"))[0] is None
    assert pool.write(idempotency.forget_keys(Instant(1 << 62), 10)) == 1
