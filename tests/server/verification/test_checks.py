"""Tasks with `verify="check"`: lying workers, lying checkers, values that cannot be checked, large values."""

from __future__ import annotations

import base64
import hashlib
import pickle
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gpool.core.model import EndReason
from gpool.server.app import close_server
from gpool.server.scheduling.loops import PruneStore
from gpool.server.store.operations.invariants import ROW_CHECKS, violations
from gpool.wire.frames import Finished, Lease
from tests.server.server_desk import Desk, StoppedClock, open_desk
from tests.server.verification.lenders import (
    BOTH,
    TRUTH,
    Lender,
    Lenders,
    data,
    decimal,
    siblings_left,
)

pytestmark = pytest.mark.anyio
CHECK = b"the pickled check function"
CHECK_SHA256 = hashlib.sha256(CHECK).hexdigest()
TRUE, FALSE = b"\x01T", b"\x01F"
Headers = dict[str, str]


def is_check(lease: Lease) -> bool:
    """Workers get the consumer's arguments, which are no pickle here."""
    return not lease.payload.startswith(b"args")


def verdict(lease: Lease) -> bytes:
    """Check as the consumer's function would, in the sandbox: the result must be 42."""
    (result, arguments), kwargs = pickle.loads(lease.payload)
    assert arguments.startswith(b"args")
    assert kwargs == {}
    return TRUE if result == 42 else FALSE


def owner(
    works: bytes = TRUTH, checks: Callable[[Lease], bytes] = verdict
) -> Callable[[Lender, Lease], Finished]:
    def answer(_: Lender, lease: Lease) -> Finished:
        content = checks(lease) if is_check(lease) else works
        return Finished(
            lease.task, lease.epoch, EndReason.RETURNED, value=content, duration_us=1000
        )

    return answer


def failing(reason: EndReason) -> Callable[[Lender, Lease], Finished]:
    def answer(_: Lender, lease: Lease) -> Finished:
        if is_check(lease):
            content = verdict(lease)
            return Finished(lease.task, lease.epoch, EndReason.RETURNED, value=content)
        return Finished(lease.task, lease.epoch, reason, error_text="ValueError")

    return answer


@pytest.fixture
async def both(data: Path, database: dict[str, Any]) -> AsyncIterator[Desk]:
    made = await open_desk(data, StoppedClock(), **database)
    yield made
    await made.http.aclose()
    await close_server(made.server)


async def submit(pool: Lenders, who: Headers, count: int = 1, **members: Any) -> list[str]:
    await pool.desk.http.put(f"/v1/artifacts/{CHECK_SHA256}", content=CHECK, headers=who)
    return await pool.submit(who, count, verify="check", check=CHECK_SHA256, **members)


async def value_of(pool: Lenders, task: str, who: Headers) -> bytes:
    answer = await pool.desk.get(f"/v1/tasks/{task}/result", headers=who)
    return base64.b64decode(answer.json()["value"])


async def test_a_result_is_held_until_another_owner_has_checked_it(both: Desk) -> None:
    pool = Lenders(both)
    await pool.join("ada", owner())
    consumer = pool.everyone[0].headers
    await pool.join("bob", owner())
    [task] = await submit(pool, consumer)
    await pool.run(4)
    found = await pool.task(task, consumer)
    assert (found["status"], found["verify"]) == ("queued", "check")  # only the consumer is left
    assert (await both.get(f"/v1/tasks/{task}/explain", headers=consumer)).json()["code"] == (
        "too_few_owners"
    )
    await pool.join("cyd", owner())
    await pool.run(4)
    found = await pool.task(task, consumer)
    assert found["status"] == "succeeded", found
    assert found["verification"]["agreed"] == 2
    assert await value_of(pool, task, consumer) == TRUTH
    parts = [[is_check(lease) for lease in lender.ran] for lender in pool.everyone[1:]]
    assert sorted(parts) == [[False], [True]]
    for check in ROW_CHECKS:
        assert await both.server.store.read(violations(check, 9)) == []


async def test_no_lie_of_workers_or_checkers_is_accepted(both: Desk) -> None:
    """Two workers lie about results, two checkers refuse right ones; none accepts a wrong one."""
    pool = Lenders(both)
    consumer = await both.person("consumer", *BOTH)
    liars = [await pool.join(f"liar-{number}", owner(works=data(number))) for number in range(2)]
    tasks = await submit(pool, consumer, 4)
    await pool.tick()
    assert any(liar.ran for liar in liars)  # nobody else could be drawn
    for number in range(2):
        await pool.join(f"refuser-{number}", owner(checks=lambda _: FALSE))
    for number in range(12):
        await pool.join(f"honest-{number}", owner())
    tasks += await submit(pool, consumer, 26)
    await pool.run(30)
    found = [await pool.task(task, consumer) for task in tasks]
    right = [each["id"] for each in found if each["status"] == "succeeded"]
    assert {await value_of(pool, task, consumer) for task in right} == {TRUTH}
    assert len(right) >= 26
    assert {each["status"] for each in found} <= {"succeeded", "failed"}
    assert sum(each["verification"]["differed"] for each in found) >= 2


async def test_a_worker_whose_result_fails_is_told_and_another_owner_runs_it(desk: Desk) -> None:
    pool = Lenders(desk)
    consumer = await desk.person("consumer", *BOTH)
    liar = await pool.join("liar", owner(works=data(7)))
    [task] = await submit(pool, consumer)
    await pool.tick()
    for number in range(5):
        await pool.join(f"honest-{number}", owner())
    await pool.run(8)
    found = await pool.task(task, consumer)
    assert found["status"] == "succeeded", found
    assert await value_of(pool, task, consumer) == TRUTH
    assert found["verification"]["differed"] == 1
    assert found["verification"]["agreed"] == 4  # two checks refused, a worker, a check
    path = f"/v1/nodes/{liar.agent.badge.identity.node}/tasks"
    [told] = (await desk.get(path, headers=liar.headers)).json()["failed_checks"]
    assert told["wanted"] == "a value that passes the consumer's check"


async def test_three_refused_results_end_the_task_without_a_quorum(desk: Desk) -> None:
    pool = Lenders(desk)
    consumer = await desk.person("consumer", *BOTH)
    for number in range(10):
        await pool.join(f"n{number}", owner(works=data(number)))
    [task] = await submit(pool, consumer)
    await pool.run(12)
    found = await pool.task(task, consumer)
    assert (found["status"], found["reason"]) == ("failed", "no_quorum")
    assert sum(not is_check(lease) for one in pool.everyone for lease in one.ran) == 3
    assert sum(is_check(lease) for one in pool.everyone for lease in one.ran) == 6


async def test_a_check_that_raises_refuses_the_result(desk: Desk) -> None:
    def answer(_: Lender, lease: Lease) -> Finished:
        if is_check(lease) and verdict(lease) == FALSE:
            return Finished(lease.task, lease.epoch, EndReason.RAISED, error_text="IndexError")
        return owner()(_, lease)

    pool = Lenders(desk)
    consumer = await desk.person("consumer", *BOTH)
    await pool.join("liar", owner(works=decimal(0.5)))
    [task] = await submit(pool, consumer)
    await pool.tick()
    for number in range(5):
        await pool.join(f"n{number}", answer)
    await pool.run(8)
    assert await value_of(pool, task, consumer) == TRUTH


async def test_a_failure_needs_a_second_owner_that_reports_it(desk: Desk) -> None:
    pool = Lenders(desk)
    consumer = await desk.person("consumer", *BOTH)
    await pool.join("liar", failing(EndReason.RAISED))
    [lone] = await submit(pool, consumer)
    await pool.tick()
    for number in range(4):
        await pool.join(f"n{number}", owner())
    await pool.run(4)
    assert await value_of(pool, lone, consumer) == TRUTH
    for lender in pool.everyone:
        lender.answer = failing(EndReason.RAISED)
    [task] = await submit(pool, consumer)
    await pool.run(4)
    found = await pool.task(task, consumer)
    assert (found["status"], found["reason"]) == ("failed", "raised")
    assert found["verification"]["agreed"] == 2


async def test_a_pickle_is_never_loaded_and_never_reaches_a_check(desk: Desk) -> None:
    pool = Lenders(desk)
    consumer = await desk.person("consumer", *BOTH)
    for number in range(5):
        await pool.join(f"n{number}", owner(works=pickle.dumps(42)))
    [task] = await submit(pool, consumer)
    await pool.run(8)
    found = await pool.task(task, consumer)
    assert found["reason"] == "no_quorum"
    assert not any(is_check(lease) for one in pool.everyone for lease in one.ran)
    assert not found["verification"]["differed"]  # nobody is blamed


async def test_a_large_value_reaches_the_check_as_an_artifact(both: Desk) -> None:
    text = b"x" * 60_000
    large = b"\x01s" + len(text).to_bytes(4, "little") + text
    seen: list[bytes] = []

    pool = Lenders(both)
    consumer = await both.person("consumer", *BOTH)

    def answer(_: Lender, lease: Lease) -> Finished:
        is_large = bool(lease.payload_sha256)
        seen.extend([lease.payload_sha256.encode()] * is_large)
        content = TRUE if is_large else large
        return Finished(lease.task, lease.epoch, EndReason.RETURNED, value=content)

    for name in ("ada", "bob"):
        await pool.join(name, answer)
    payload = base64.b64encode(b"args" + bytes(20_000)).decode()
    [task] = await submit(pool, consumer, calls=[payload])
    await pool.run(2)
    lender = next(one for one in pool.everyone if one.ran and one.ran[0].payload_sha256)
    got = await both.get(f"/v1/artifacts/{seen[0].decode()}", headers=consumer)
    (result, arguments), _ = pickle.loads(got.content)
    assert result == text.decode()
    assert len(arguments) == 20_004
    assert lender.ran[0].payload == b""
    await pool.run(2)
    assert (await pool.task(task, consumer))["status"] == "succeeded"
    gone = await both.http.delete(f"/v1/tasks/{task}/record", headers=consumer)
    assert gone.status_code == 204, gone.text
    assert await siblings_left(both) == 0
    await PruneStore(both.server).run_once(both.server.now)
    for check in ROW_CHECKS:
        assert await both.server.store.read(violations(check, 9)) == []


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"verify": "check"}, "'check' is not given"),
        ({"verify": 2, "check": CHECK_SHA256}, "add verify="),
        ({"verify": "check", "check": CHECK_SHA256, "compare": 0.1}, "compares no answers"),
        ({"verify": "check", "check": CHECK_SHA256, "max_cost": "1"}, "max_cost"),
        ({"verify": "check", "check": CHECK_SHA256, "secrets": {"KEY": "1"}}, "secrets"),
        ({"verify": "check", "check": CHECK_SHA256, "nodes": 2}, "this is a function"),
    ],
)
async def test_options_without_a_meaning_are_refused(
    desk: Desk, members: dict[str, Any], said: str
) -> None:
    answer = await desk.calls(1, **members)
    assert answer.status_code == 400
    assert said in answer.json()["detail"]


async def test_commands_and_missing_check_functions_are_refused(desk: Desk) -> None:
    asked = {"command": ["true"], "verify": "check", "check": CHECK_SHA256}
    answer = await desk.post("/v1/tasks", asked)
    assert answer.status_code == 400
    assert "this is a command" in answer.json()["detail"]
    answer = await desk.calls(1, verify="check", check=CHECK_SHA256)
    assert CHECK_SHA256 in answer.text  # it must be uploaded first
