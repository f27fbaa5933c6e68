"""Verified tasks end to end in one process: siblings on other owners' nodes, quorum, losers, replacements."""

from __future__ import annotations

import base64

import pytest

from gpool.core.ids import encode
from gpool.core.model import EndReason
from gpool.server.store.operations.invariants import ROW_CHECKS, violations
from gpool.wire.frames import Finished, Lease, LogChunk
from tests.server.server_desk import Desk
from tests.server.verification.lenders import (
    BOTH,
    TRUTH,
    Lender,
    Lenders,
    data,
    decimal,
    open_siblings,
    siblings_left,
    silence,
    value,
)

pytestmark = pytest.mark.anyio


async def test_a_verified_task_runs_on_two_other_owners_and_returns_their_value(desk: Desk) -> None:
    pool = Lenders(desk)
    await pool.join_all(["ada", "bob", "cyd"])
    consumer = pool.everyone[0]
    [task] = await pool.submit(consumer.headers)
    await pool.run(3)
    found = await pool.task(task, consumer.headers)
    assert found["status"] == "succeeded", found
    assert found["verification"]["agreed"] == 2
    assert found["verification"]["outcome"] == "accepted"
    result = await desk.get(f"/v1/tasks/{task}/result", headers=consumer.headers)
    assert base64.b64decode(result.json()["value"]) == TRUTH
    assert [len(lender.ran) for lender in pool.everyone] == [0, 1, 1]  # not on the consumer's own


async def test_siblings_count_for_the_project_of_their_parent(desk: Desk) -> None:
    pool = Lenders(desk)
    consumer = await desk.person("consumer", *BOTH)
    await pool.join_all(["ada", "bob"])
    await pool.submit(consumer, project="thesis")
    await pool.run(3)
    used = (await desk.get("/v1/usage/totals?by=project", headers=consumer)).json()["items"]
    assert [(one["group"], one["attempts"]) for one in used] == [("thesis", 2)]


async def test_a_lie_costs_further_siblings_and_is_never_the_result(desk: Desk) -> None:
    pool = Lenders(desk)
    consumer = await desk.person("consumer", *BOTH)
    liar = await pool.join("liar", value(data(1)))
    await pool.join_all([f"honest-{number}" for number in range(6)])
    tasks = await pool.submit(consumer, 12)
    await pool.run(8)
    found = [await pool.task(task, consumer) for task in tasks]
    assert {each["status"] for each in found} == {"succeeded"}
    answers = [await desk.get(f"/v1/tasks/{task}/result", headers=consumer) for task in tasks]
    assert {base64.b64decode(each.json()["value"]) for each in answers} == {TRUTH}
    assert sum(each["verification"]["differed"] for each in found) == len(liar.ran)


async def test_three_owners_of_one_pool_are_told_when_they_are_too_few(desk: Desk) -> None:
    pool = Lenders(desk)
    await pool.join_all(["ada", "bob", "cyd"])
    consumer = pool.everyone[0].headers
    [task] = await pool.submit(consumer, verify=3)
    await pool.run(2)
    why = (await desk.get(f"/v1/tasks/{task}/explain", headers=consumer)).json()
    assert why["code"] == "too_few_owners"
    assert "needs nodes of 3 owners other than you" in why["sentence"]
    assert "2 such owners have one" in why["sentence"]
    await pool.join("dee")
    await pool.run(3)
    assert (await pool.task(task, consumer))["status"] == "succeeded"


async def test_without_a_quorum_the_task_fails_and_nobody_is_blamed(desk: Desk) -> None:
    pool = Lenders(desk)
    consumer = await desk.person("consumer", *BOTH)
    for number in range(8):
        await pool.join(f"odd-{number}", value(data(number)))
    [task] = await pool.submit(consumer)
    await pool.run(10)
    found = await pool.task(task, consumer)
    assert (found["status"], found["reason"]) == ("failed", "no_quorum")
    assert "different answers" in found["error_text"]
    assert found["verification"]["outcome"] == "no_quorum"
    assert found["verification"]["differed"] == 0


async def test_numbers_within_the_tolerance_agree(desk: Desk) -> None:
    """The control: by hash they differ."""
    pool = Lenders(desk)
    consumer = await desk.person("consumer", *BOTH)
    for number in range(8):
        await pool.join(f"near-{number}", value(decimal(1.0 + number * 1e-9)))
    [near] = await pool.submit(consumer, compare=1e-6)
    [exact] = await pool.submit(consumer)
    await pool.run(10)
    assert (await pool.task(near, consumer))["status"] == "succeeded"
    assert (await pool.task(exact, consumer))["reason"] == "no_quorum"


async def test_a_task_that_fails_everywhere_fails_with_its_own_error(desk: Desk) -> None:
    def raised(_: Lender, lease: Lease) -> Finished:
        return Finished(
            *(lease.task, lease.epoch, EndReason.RAISED), value=data(0), error_text="ValueError: no"
        )

    pool = Lenders(desk)
    consumer = await desk.person("consumer", *BOTH)
    for name in ("ada", "bob"):
        await pool.join(name, raised)
    [task] = await pool.submit(consumer)
    await pool.run(3)
    found = await pool.task(task, consumer)
    assert (found["status"], found["reason"]) == ("failed", "raised")
    assert found["error_text"] == "ValueError: no"


async def test_the_output_of_commands_is_compared_and_shown_once(desk: Desk) -> None:
    pool = Lenders(desk)
    consumer = await desk.person("consumer", *BOTH)
    for name in ("ada", "bob"):
        await pool.join(name, silence)
    task = await desk.command(consumer, verify=2)
    await pool.tick()
    for lender in pool.everyone:
        [lease] = lender.ran
        logged = LogChunk(lease.task, lease.epoch, 1, 1, b"42\n")
        note = LogChunk(lease.task, lease.epoch, 2, 2, lender.name.encode())  # not compared
        ended = Finished(lease.task, lease.epoch, EndReason.EXITED, exit_code=0)
        await lender.agent.report(logged, note, ended)
        shown = await desk.get(f"/v1/tasks/{task}/logs", headers=consumer)
        assert "42" not in shown.text  # not before the round is closed
    await pool.tick()
    found = await pool.task(task, consumer)
    assert (found["status"], found["exit_code"]) == ("succeeded", 0)
    shown = await desk.get(f"/v1/tasks/{task}/logs", headers=consumer)
    assert shown.text.count("42\\n") == 1


async def test_a_silent_sibling_is_replaced_and_a_cancel_reaches_all(desk: Desk) -> None:
    pool = Lenders(desk)
    consumer = await desk.person("consumer", *BOTH)
    mute = await pool.join("mute", silence)
    await pool.join("ada")
    [task] = await pool.submit(consumer)
    await pool.tick()
    await pool.join("bob")
    assert len(mute.ran) == 1
    desk.clock.advance(599)
    await pool.tick()
    assert (await pool.task(task, consumer))["verification"]["running"] == 1
    desk.clock.advance(2)
    await pool.run(3)
    found = await pool.task(task, consumer)
    assert found["status"] == "succeeded"
    assert found["verification"]["no_answer"] == 1
    late = await mute.agent.report(value(data(7))(mute, mute.ran[0]))
    assert late is not None
    [other] = await pool.submit(consumer)
    for lender in pool.everyone:
        lender.answer = silence
    await pool.tick()
    answer = await desk.http.delete(f"/v1/tasks/{other}", headers=consumer)
    assert answer.json()["status"] == "cancelled"
    await pool.tick()
    assert (await pool.task(other, consumer))["verification"]["outcome"] == "cancelled"
    assert not await open_siblings(desk)


async def test_siblings_are_in_no_listing_count_or_route(desk: Desk) -> None:
    pool = Lenders(desk)
    consumer = await desk.person("consumer", *BOTH)
    for name in ("ada", "bob"):
        await pool.join(name, silence)
    [task] = await pool.submit(consumer)
    await pool.tick()
    listed = (await desk.get("/v1/tasks", headers=consumer)).json()["items"]
    assert [each["id"] for each in listed] == [task]
    everything = (await desk.get("/v1/tasks?all=true")).json()["items"]
    assert [each["id"] for each in everything] == [task]
    queue = (await desk.get("/v1/queue", headers=consumer)).json()
    assert queue["waiting"] == 1
    assert queue["running"] == []
    found = await pool.task(task, consumer)
    batch = (await desk.get(f"/v1/batches/{found['batch']}", headers=consumer)).json()
    assert (batch["total"], batch["done"]) == (1, 0)
    for sibling in await open_siblings(desk):
        hidden = encode("task", sibling)
        for path in ("", "/result", "/logs", "/events", "/explain"):
            answer = await desk.get(f"/v1/tasks/{hidden}{path}", headers=consumer)
            assert answer.status_code == 404, (path, answer.text)


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"nodes": 2}, "a gang runs at one site"),
        ({"secrets": {"TOKEN": "x"}}, "could read them"),
        ({"checkpoint": "state/"}, "siblings share no state"),
        ({"max_cost": "1"}, "it bounds one run"),
        ({"tier": "none"}, "on your own nodes only"),
        ({"compare": 0.1}, "compared by hash"),
        ({"verify": None, "compare": 0.1}, "add verify=2"),
    ],
)
async def test_options_that_exclude_verification_are_refused_with_the_reason(
    desk: Desk, members: dict[str, object], said: str
) -> None:
    wanted = {"command": ["true"], "verify": 2, **members}
    answer = await desk.post("/v1/tasks", wanted)
    assert answer.status_code in (400, 422), answer.text
    assert said in answer.json()["detail"]


async def test_a_deleted_task_takes_its_siblings_along(desk: Desk) -> None:
    pool = Lenders(desk)
    consumer = await desk.person("consumer", *BOTH)
    await pool.join_all(["ada", "bob"])
    [task] = await pool.submit(consumer)
    await pool.run(3)
    gone = await desk.http.delete(f"/v1/tasks/{task}/record", headers=consumer)
    assert gone.status_code == 204, gone.text
    for check in ROW_CHECKS:
        assert await desk.server.store.read(violations(check, 9)) == []
    assert await siblings_left(desk) == 0
