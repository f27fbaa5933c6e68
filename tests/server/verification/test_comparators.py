"""Tasks with a comparator: near answers, lying siblings and comparers, comparators that fail, values that are no data."""

from __future__ import annotations

import base64
import hashlib
import pickle
from collections.abc import AsyncIterator, Callable
from itertools import combinations
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
    Lender,
    Lenders,
    decimal,
    siblings_left,
    value,
)

pytestmark = pytest.mark.anyio
COMPARATOR = b"the pickled comparator"
COMPARATOR_SHA256 = hashlib.sha256(COMPARATOR).hexdigest()
Headers = dict[str, str]
Comparing = Callable[[Lease], Finished]


def is_comparison(lease: Lease) -> bool:
    """Siblings get the consumer's arguments, which are no pickle here."""
    return not lease.payload.startswith(b"args")


def returned(lease: Lease, letters: str) -> Finished:
    text = letters.encode()
    content = b"\x01s" + len(text).to_bytes(4, "little") + text
    return Finished(lease.task, lease.epoch, EndReason.RETURNED, value=content, duration_us=1000)


def compares(lease: Lease) -> Finished:
    """Compare as the consumer's function would, in the sandbox: numbers agree if they are near."""
    (values,), kwargs = pickle.loads(lease.payload)
    assert kwargs == {}
    near = (
        bool(one and other) and abs(one[0] - other[0]) < 1e-6
        for one, other in combinations(values, 2)
    )
    return returned(lease, "".join("T" if each else "F" for each in near))


def always(letter: str) -> Comparing:
    def compare(lease: Lease) -> Finished:
        (values,), _ = pickle.loads(lease.payload)
        return returned(lease, letter * len(list(combinations(values, 2))))

    return compare


def raises(lease: Lease) -> Finished:
    text = "Traceback:\n  line 1\nTypeError: not so"
    return Finished(lease.task, lease.epoch, EndReason.RAISED, error_text=text)


def owner(
    works: bytes, compare: Comparing = compares
) -> Callable[[Lender, Lease], Finished | None]:
    def answer(lender: Lender, lease: Lease) -> Finished | None:
        return compare(lease) if is_comparison(lease) else value(works)(lender, lease)

    return answer


def near(number: int) -> bytes:
    return decimal(1.0 + number * 1e-9)


@pytest.fixture
async def both(data: Path, database: dict[str, Any]) -> AsyncIterator[Desk]:
    made = await open_desk(data, StoppedClock(), **database)
    yield made
    await made.http.aclose()
    await close_server(made.server)


async def submit(pool: Lenders, who: Headers, count: int = 1, **members: Any) -> list[str]:
    await pool.desk.http.put(f"/v1/artifacts/{COMPARATOR_SHA256}", content=COMPARATOR, headers=who)
    return await pool.submit(who, count, comparator=COMPARATOR_SHA256, **members)


async def value_of(pool: Lenders, task: str, who: Headers) -> bytes:
    answer = await pool.desk.get(f"/v1/tasks/{task}/result", headers=who)
    return base64.b64decode(answer.json()["value"])


def comparisons(pool: Lenders) -> int:
    return sum(is_comparison(lease) for one in pool.everyone for lease in one.ran)


@pytest.mark.parametrize("verify", [2, 3])
async def test_a_comparator_accepts_numbers_whose_hashes_differ(both: Desk, verify: int) -> None:
    """The control: by hash the same answers have no quorum."""
    pool = Lenders(both)
    consumer = await both.person("consumer", *BOTH)
    for number in range(verify):
        await pool.join(f"near-{number}", owner(near(number)))
    [task] = await submit(pool, consumer, verify=verify)
    await pool.run(3)
    assert (await pool.task(task, consumer))["status"] == "queued"  # no further owner compares
    why = (await both.get(f"/v1/tasks/{task}/explain", headers=consumer)).json()
    assert why["code"] == "too_few_owners"
    assert f"nodes of at least {verify} further owners" in why["sentence"]
    for number in range(verify, 9):
        await pool.join(f"near-{number}", owner(near(number)))
    [exact] = await pool.submit(consumer, verify=verify)
    await pool.run(10)
    found = await pool.task(task, consumer)
    assert (found["status"], found["verification"]["outcome"]) == ("succeeded", "accepted")
    assert found["verification"]["agreed"] == 2 * verify  # siblings and comparers
    assert await value_of(pool, task, consumer) in {near(number) for number in range(verify)}
    assert comparisons(pool) == verify
    assert (await pool.task(exact, consumer))["reason"] == "no_quorum"
    for check in ROW_CHECKS:
        assert await both.server.store.read(violations(check, 9)) == []


async def test_equal_answers_are_accepted_without_a_comparison(desk: Desk) -> None:
    pool = Lenders(desk)
    consumer = await desk.person("consumer", *BOTH)
    await pool.join_all(["ada", "bob"])
    [task] = await submit(pool, consumer)
    await pool.run(3)
    assert (await pool.task(task, consumer))["status"] == "succeeded"
    assert comparisons(pool) == 0


async def test_a_comparator_refuses_a_liar_who_is_told_and_not_counted(desk: Desk) -> None:
    pool = Lenders(desk)
    consumer = await desk.person("consumer", *BOTH)
    liar = await pool.join("liar", owner(decimal(7.0)))
    await pool.join("near-0", owner(near(0)))
    [task] = await submit(pool, consumer)
    await pool.tick()
    assert len(liar.ran) == 1
    for number in range(1, 10):
        await pool.join(f"near-{number}", owner(near(number)))
    await pool.run(10)
    found = await pool.task(task, consumer)
    assert found["status"] == "succeeded", found
    assert await value_of(pool, task, consumer) != decimal(7.0)
    assert found["verification"]["differed"] == 1
    assert found["verification"]["agreed"] == 8  # four near answers, two comparers twice
    path = f"/v1/nodes/{liar.agent.badge.identity.node}/tasks"
    [told] = (await desk.get(path, headers=liar.headers)).json()["failed_checks"]
    assert told["found"] != told["wanted"]


async def test_a_comparer_that_lies_is_outvoted(desk: Desk) -> None:
    """Its report would make a wrong answer agree with the right one."""
    pool = Lenders(desk)
    consumer = await desk.person("consumer", *BOTH)
    for number, answer in enumerate((near(0), decimal(7.0))):
        await pool.join(f"first-{number}", owner(answer))
    [task] = await submit(pool, consumer)
    await pool.tick()
    liar = await pool.join("liar", owner(near(1), always("T")))
    await pool.join("ada", owner(near(2)))
    await pool.run(2)
    assert [is_comparison(lease) for lease in liar.ran] == [True]
    assert (await pool.task(task, consumer))["status"] == "queued"
    for number in range(9):
        await pool.join(f"near-{number}", owner(near(number)))
    await pool.run(12)
    found = await pool.task(task, consumer)
    assert found["status"] == "succeeded", found
    assert await value_of(pool, task, consumer) != decimal(7.0)
    path = f"/v1/nodes/{liar.agent.badge.identity.node}/tasks"
    [told] = (await desk.get(path, headers=liar.headers)).json()["failed_checks"]
    assert told["wanted"] == "the comparison returned (False,)"
    assert told["found"] == "the comparison returned (True,)"


async def test_a_comparator_that_raises_ends_the_task_with_its_error(both: Desk) -> None:
    pool = Lenders(both)
    consumer = await both.person("consumer", *BOTH)
    for number in range(4):
        await pool.join(f"n{number}", owner(near(number), raises))
    [task] = await submit(pool, consumer)
    await pool.run(5)
    found = await pool.task(task, consumer)
    assert (found["status"], found["reason"]) == ("failed", "no_quorum")
    assert found["verification"]["outcome"] == "not_compared"
    assert found["error_text"] == (
        "its 2 answers differ and could not be compared: the comparator failed (raised): TypeError: not so"
    )
    assert (found["verification"]["agreed"], found["verification"]["differed"]) == (0, 0)
    assert comparisons(pool) == 2


async def test_one_comparer_that_reports_a_failure_does_not_end_the_task(desk: Desk) -> None:
    pool = Lenders(desk)
    consumer = await desk.person("consumer", *BOTH)
    for number in range(2):
        await pool.join(f"near-{number}", owner(near(number)))
    [task] = await submit(pool, consumer)
    await pool.tick()
    await pool.join("liar", owner(near(2), raises))
    for number in range(3, 6):
        await pool.join(f"near-{number}", owner(near(number)))
    await pool.run(8)
    assert (await pool.task(task, consumer))["status"] == "succeeded"


async def test_a_comparator_that_no_node_can_run_ends_the_task(desk: Desk) -> None:
    def broken(lease: Lease) -> Finished:
        return Finished(lease.task, lease.epoch, EndReason.BAD_INPUT, error_text="no such module")

    pool = Lenders(desk)
    consumer = await desk.person("consumer", *BOTH)
    for number in range(12):
        await pool.join(f"n{number}", owner(near(number), broken))
    [task] = await submit(pool, consumer)
    await pool.run(12)
    found = await pool.task(task, consumer)
    assert found["verification"]["outcome"] == "not_compared", found
    assert "no node could run its comparator: bad input" in found["error_text"]


async def test_pickles_reach_no_comparator_and_the_reason_is_told(desk: Desk) -> None:
    pool = Lenders(desk)
    consumer = await desk.person("consumer", *BOTH)
    for number in range(4):
        await pool.join(f"n{number}", owner(pickle.dumps(number)))
    [task] = await submit(pool, consumer)
    await pool.run(4)
    found = await pool.task(task, consumer)
    assert found["verification"]["outcome"] == "not_compared"
    assert "the value was pickled" in found["error_text"]
    assert comparisons(pool) == 0


async def test_the_pickle_of_one_liar_only_differs(desk: Desk) -> None:
    pool = Lenders(desk)
    consumer = await desk.person("consumer", *BOTH)
    await pool.join("liar", owner(pickle.dumps(1)))
    await pool.join("near-0", owner(near(0)))
    [task] = await submit(pool, consumer)
    await pool.tick()
    for number in range(1, 6):
        await pool.join(f"near-{number}", owner(near(number)))
    await pool.run(8)
    found = await pool.task(task, consumer)
    assert found["status"] == "succeeded", found
    assert found["verification"]["differed"] == 1


async def test_comparers_are_hidden_and_deleted_with_the_task(both: Desk) -> None:
    pool = Lenders(both)
    consumer = await both.person("consumer", *BOTH)
    for number in range(4):
        await pool.join(f"near-{number}", owner(near(number)))
    [task] = await submit(pool, consumer)
    await pool.run(5)
    assert comparisons(pool) == 2
    listed = (await both.get("/v1/tasks", headers=consumer)).json()["items"]
    assert [each["id"] for each in listed] == [task]
    found = await pool.task(task, consumer)
    batch = (await both.get(f"/v1/batches/{found['batch']}", headers=consumer)).json()
    assert (batch["total"], batch["done"]) == (1, 1)
    gone = await both.http.delete(f"/v1/tasks/{task}/record", headers=consumer)
    assert gone.status_code == 204, gone.text
    assert await siblings_left(both) == 0
    await PruneStore(both.server).run_once(both.server.now)
    for check in ROW_CHECKS:
        assert await both.server.store.read(violations(check, 9)) == []


async def test_a_spot_check_uses_the_comparator(desk: Desk) -> None:
    """The first results of a new node are all checked."""
    pool = Lenders(desk)
    consumer = await desk.person("consumer", *BOTH)
    for number in range(4):
        await pool.join(f"near-{number}", owner(near(number)))
    [task] = await submit(pool, consumer, verify="spot")
    await pool.run(6)
    found = await pool.task(task, consumer)
    assert found["status"] == "succeeded", found
    assert found["verification"]["agreed"] == 4
    assert comparisons(pool) == 2


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"verify": None}, "add verify=2"),
        ({"verify": "check", "check": COMPARATOR_SHA256}, "several owners"),
        ({"verify": 2, "compare": 0.1}, "compared in one way"),
    ],
)
async def test_options_without_a_meaning_are_refused(
    desk: Desk, members: dict[str, Any], said: str
) -> None:
    answer = await desk.calls(1, comparator=COMPARATOR_SHA256, **members)
    assert answer.status_code == 400
    assert said in answer.json()["detail"]


async def test_commands_and_missing_comparators_are_refused(desk: Desk) -> None:
    asked = {"command": ["true"], "verify": 2, "comparator": COMPARATOR_SHA256}
    answer = await desk.post("/v1/tasks", asked)
    assert answer.status_code == 400
    assert "this is a command" in answer.json()["detail"]
    answer = await desk.calls(1, verify=2, comparator=COMPARATOR_SHA256)
    assert COMPARATOR_SHA256 in answer.text  # it must be uploaded first
