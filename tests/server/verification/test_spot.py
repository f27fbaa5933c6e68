"""Spot checks: probation, unchecked results, a caught node, withdrawn results."""

from __future__ import annotations

import base64

import pytest

from gpool.core.ids import NodeId, decode
from gpool.core.model import Instant
from gpool.core.trust.spot import DEFAULT_SPOT
from gpool.server.store.operations.verification import standings
from gpool.server.store.operations.verification.standings import ComparedSibling
from gpool.server.store.protocol import Operation, operation
from tests.server.server_desk import Desk
from tests.server.verification.lenders import BOTH, TRUTH, Lender, Lenders, data, value

pytestmark = pytest.mark.anyio
SPACING_S = DEFAULT_SPOT.spacing / 1e6


def node_of(lender: Lender) -> NodeId:
    return lender.agent.credentials.node


@operation
def _passed(node: NodeId, count: int, at: Instant) -> Operation[None]:
    outcome = ComparedSibling(*(0, node, True, "", ""), "", "default", True)  # type: ignore[arg-type]
    for _ in range(count):
        yield from standings.record_comparisons([outcome], at)


async def prove(desk: Desk, lender: Lender, count: int = 200) -> None:
    """Give the node a record of passed checks."""
    await desk.server.store.write(_passed(node_of(lender), count, desk.server.now))


async def test_results_of_a_new_node_are_checked_and_its_tasks_spaced(desk: Desk) -> None:
    pool = Lenders(desk)
    consumer = await desk.person("consumer", *BOTH)
    await pool.join_all(["ada", "bob"])
    tasks = await pool.submit(consumer, 3, verify="spot")
    await pool.run(4)
    found = [await pool.task(task, consumer) for task in tasks]
    assert sorted(each["status"] for each in found) == ["queued", "succeeded", "succeeded"]
    ended = [each for each in found if each["status"] == "succeeded"]
    assert {each["verification"]["agreed"] for each in ended} == {2}
    [waiting] = [each["id"] for each in found if each["status"] == "queued"]
    why = (await desk.get(f"/v1/tasks/{waiting}/explain", headers=consumer)).json()
    assert why["code"] == "probation", why
    desk.clock.advance(SPACING_S)
    await pool.run(4)
    assert (await pool.task(waiting, consumer))["status"] == "succeeded"


async def test_a_reliable_node_delivers_mostly_unchecked(desk: Desk) -> None:
    pool = Lenders(desk)
    consumer = await desk.person("consumer", *BOTH)
    await pool.join_all(["ada", "bob"])
    for lender in pool.everyone:
        await prove(desk, lender)
    tasks = await pool.submit(consumer, 40, verify="spot")
    await pool.run(30)
    found = [await pool.task(task, consumer) for task in tasks]
    assert {each["status"] for each in found} == {"succeeded"}
    runs = sum(len(lender.ran) for lender in pool.everyone)
    assert 40 <= runs <= 46  # about 1 % are checked


async def test_a_caught_node_is_banned_and_its_results_are_run_again(desk: Desk) -> None:
    pool = Lenders(desk)
    consumer = await desk.person("consumer", *BOTH)
    liar = await pool.join("liar", value(data(1)))
    await prove(desk, liar)
    tasks = await pool.submit(consumer, 6, verify="spot")
    await pool.run(12)
    lies = [task for task in tasks if (await pool.task(task, consumer))["status"] == "succeeded"]
    assert lies  # delivered, no check was drawn
    await pool.join_all([f"honest-{number}" for number in range(8)])
    await pool.submit(consumer, 60, verify=2)
    await pool.run(24)
    shown = (
        await desk.get(f"/v1/nodes/{liar.agent.badge.identity.node}/tasks", headers=liar.headers)
    ).json()
    assert len(shown["failed_checks"]) >= 2
    assert shown["failed_checks"][0]["wanted"].startswith("a value of 10 bytes, hash ")
    assert shown["failed_checks"][0]["wanted"] != shown["failed_checks"][0]["found"]
    assert shown["banned_until"] is not None
    ran = len(liar.ran)
    for lie in lies:
        told = (await pool.task(lie, consumer))["verification"]
        assert told["outcome"] == "withdrawn"
        again = await pool.task(told["rerun"], consumer)
        assert again["status"] == "succeeded"
        result = await desk.get(f"/v1/tasks/{told['rerun']}/result", headers=consumer)
        assert base64.b64decode(result.json()["value"]) == TRUTH
    await pool.submit(consumer, 4, verify=2)
    await pool.run(4)
    assert len(liar.ran) == ran  # banned
    assert decode("node", liar.agent.badge.identity.node) == node_of(liar)
