"""Every invariant finds the corruption that is planted for it, and nothing in a store that operations have written."""

from __future__ import annotations

from typing import Any

import pytest

from gpool.core.errors import GpoolError
from gpool.core.model import EndReason
from gpool.server.recovery.check import allocation_problems
from gpool.server.store.operations import invariants
from gpool.server.store.operations.invariants import ROW_CHECKS
from gpool.server.store.operations.tasks import artifacts
from gpool.server.store.protocol import Operation, Statement, operation
from gpool.server.store.rows import offer_from
from gpool.wire.frames import Finished, LogChunk, Released
from tests.store.gang_pool import site_of
from tests.store.store_pool import Pool
from tests.store.test_storage import a_full_life

PLANTED = {
    "task_status": ["UPDATE tasks SET status = 'lost' WHERE id = {queued}"],
    "queued_task": ["UPDATE tasks SET holding = 1 WHERE id = {queued}",
                    "UPDATE tasks SET sequence = 9 WHERE id = {queued}"],
    "leased_task": ["UPDATE tasks SET holding = 0 WHERE id = {running}",
                    "UPDATE tasks SET finished_at = 1 WHERE id = {running}"],
    "ended_task": ["UPDATE tasks SET holding = 1 WHERE id = {ended}",
                   "UPDATE tasks SET sequence = NULL WHERE id = {ended}"],
    "lease_place": ["UPDATE tasks SET node_id = 5 WHERE id = {running}",
                    "UPDATE tasks SET allocation = NULL WHERE id = {running}",
                    "UPDATE members SET holding = 0 WHERE task_id = {gang}"],
    "attempt_epoch": ["UPDATE tasks SET epoch = 0 WHERE id = {retried}",
                      "INSERT INTO attempts (task_id, epoch, node_id, leased_at, ended_at, reason) "
                      "VALUES ({running}, 1, 1, 1, 1, 'lost')"],
    "batch_counts": ["UPDATE batches SET done = done + 1 WHERE id = (SELECT batch_id FROM tasks WHERE id = {queued})",
                     "DELETE FROM tasks WHERE id = {queued}",
                     "UPDATE tasks SET sequence = 99 WHERE id = {ended}"],
    "batch_sequences": ["UPDATE tasks SET batch_id = (SELECT batch_id FROM tasks WHERE id = {ended}) "
                        "WHERE id = {cancelled}"],
    "gang_members": ["DELETE FROM members WHERE task_id = {gang} AND rank = 0",
                     "UPDATE tasks SET holding = 0 WHERE id = {gang}",
                     "UPDATE members SET epoch = 7 WHERE task_id = {gang} AND rank = 1"],
    "tasks.spec_id": ["DELETE FROM specs"],
    "tasks.batch_id": ["DELETE FROM batches"],
    "tasks.user_id": ["DELETE FROM users"],
    "attempts.task_id": ["DELETE FROM tasks WHERE id = {retried}"],
    "checkpoints.task_id": ["DELETE FROM tasks WHERE id = {retried}"],
    "log_heads.task_id": ["DELETE FROM tasks WHERE id = {running}"],
    "log_chunks.task_id": ["DELETE FROM tasks WHERE id = {running}"],
    "gangs.task_id": ["DELETE FROM tasks WHERE id = {gang}"],
    "task_secrets.spec_id": ["INSERT INTO task_secrets VALUES (5, 'TOKEN', '')"],
    "gpus.node_id": ["UPDATE gpus SET node_id = 5"],
    "nodes.owner_id": ["DELETE FROM users"],
    "api_keys.user_id": ["INSERT INTO api_keys (id, user_id, name, hashed, created_at) VALUES (1, 5, 'k', 'h', 1)"],
    "memberships.team_id": ["INSERT INTO memberships VALUES (5, 6, 'member', 1)"],
    "artifact_refs.sha256": ["DELETE FROM artifacts"],
    "stored.sha256": ["DELETE FROM artifacts"],
    "tasks.payload_sha256": ["UPDATE tasks SET payload_sha256 = 'x' WHERE id = {queued}"],
    "tasks.value_sha256": ["UPDATE tasks SET value_sha256 = 'x' WHERE id = {ended}"],
    "tasks.log_sha256": ["UPDATE tasks SET log_sha256 = 'x' WHERE id = {ended}"],
    "storage": ["UPDATE storage SET size_bytes = size_bytes + 1"],
}  # fmt: skip


def lived_in(pool: Pool) -> dict[str, int]:
    """A store with tasks in every state, a gang, an attempt, a checkpoint, logs and artifacts; the ids by their word."""
    site = site_of(pool, 3, gpus=1)
    box = pool.node("box")
    found = {"retried": int(a_full_life(pool, box)), "gang": int(site.running())}
    running = pool.running(box)
    pool.record(box, LogChunk(running, 1, 0, 1, b"hello"))
    ended = pool.running(site.nodes[2])
    pool.record(site.nodes[2], Finished(ended, 1, EndReason.EXITED, 0))
    cancelled = pool.running(site.nodes[2])
    pool.cancel(cancelled)
    returned = pool.leased(site.nodes[2])
    pool.record(site.nodes[2], Released(returned, 1))
    [queued] = pool.submit()
    pool.write(artifacts.add_artifact("e" * 64, 10, pool.ann, None, None, pool.now()))
    return found | {"running": running, "ended": ended, "cancelled": cancelled, "queued": queued}


class UndoneError(GpoolError):
    """Rolls back the planted corruption; has what was found in it."""


@operation
def found_in(statement: str) -> Operation[None]:
    """Names of the checks that fail after the statement, and the first violation of each."""
    yield Statement(statement)
    found = {}
    for check in ROW_CHECKS:
        rows = yield from invariants.violations(check, 5)
        if rows:
            found[check.name] = rows
    raise UndoneError("undone", found=found)


def corrupted(pool: Pool, statement: str) -> dict[str, list[invariants.ViolatingRow]]:
    with pytest.raises(UndoneError) as undone:
        pool.write(found_in(statement))
    found: Any = undone.value.members["found"]
    return dict(found)


@operation
def changed(statement: str) -> Operation[None]:
    yield Statement(statement)


def failing(pool: Pool) -> dict[str, list[invariants.ViolatingRow]]:
    found = {check.name: pool.read(invariants.violations(check, 5)) for check in ROW_CHECKS}
    return {name: rows for name, rows in found.items() if rows}


def test_each_invariant_finds_its_planted_corruption_and_nothing_in_a_sound_store(
    pool: Pool,
) -> None:
    ids = lived_in(pool)
    assert failing(pool) == {}  # control
    assert [check.name for check in ROW_CHECKS] == list(PLANTED)
    for name, statements in PLANTED.items():
        for statement in statements:
            assert name in corrupted(pool, statement.format(**ids)), statement
    assert failing(pool) == {}


def test_violations_name_the_objects(pool: Pool) -> None:
    ids = lived_in(pool)
    [row] = corrupted(pool, PLANTED["queued_task"][0].format(**ids))["queued_task"]
    assert row.id == str(ids["queued"])


def problems(pool: Pool) -> list[str]:
    found: list[str] = []
    for node in pool.read(invariants.holding_nodes(0, 100)):
        held = pool.read(invariants.held_allocations(node.id))
        found += allocation_problems(offer_from(node.offer), held)
    return found


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("UPDATE tasks SET allocation = '[1000,2000000000,[]]' WHERE id = {second}", "two different allocations"),
        ("UPDATE tasks SET allocation_number = 1, allocation = '[4001,1,[]]' WHERE id = {second}", "more processors"),
        ("UPDATE tasks SET allocation_number = 1, allocation = '[1,99999999999,[]]' WHERE id = {second}", "more memory"),
        ("UPDATE tasks SET allocation_number = 1, allocation = '[1,1,[[0,1,600]]]' WHERE id = {second}", "GPU 0"),
        ("UPDATE tasks SET node_id = {member}, allocation_number = 0 WHERE id = {second}", "of a gang is another"),
    ],
)  # fmt: skip
def test_leases_that_contradict_each_other_are_found(
    pool: Pool, statement: str, problem: str
) -> None:
    site = site_of(pool, 2)
    site.running()
    node = pool.node("box", gpus=1)
    first, second = pool.submit(2)
    assert pool.grant(node, [first, second]).refused == ()
    alike = f"UPDATE tasks SET allocation = '[1,1,[[0,1,600]]]' WHERE id IN ({first}, {second})"  # noqa: S608
    pool.write(changed(alike))
    assert problems(pool) == []  # control: two leases of one queue
    pool.write(changed(statement.format(second=second, member=site.nodes[0])))
    assert any(problem in each for each in problems(pool)), problems(pool)


def test_a_limit_bounds_what_is_listed(pool: Pool) -> None:
    pool.submit(10)
    pool.write(changed("UPDATE tasks SET holding = 1"))
    assert len(pool.read(invariants.violations(ROW_CHECKS[1], 3))) == 3
