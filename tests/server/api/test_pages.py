"""Pages of nodes, resources and the queue, through the real application."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpool.server.actions.tasks.explain import MOST_RUNNING
from gpool.server.api.callers import RateClasses
from gpool.server.api.routing import endpoints
from gpool.server.identity.throttle import RouteClass
from tests.server.server_desk import Desk, an_offer
from tests.tools.nodes import a_key

pytestmark = pytest.mark.anyio


async def pages(desk: Desk, path: str, limit: int) -> list[list[dict[str, Any]]]:
    """Every page of a listing, by its cursors."""
    found, mark = [], ""
    while True:
        answer = await desk.get(f"{path}limit={limit}{mark}")
        assert answer.status_code == 200, answer.text
        page = answer.json()
        found.append(page["items"])
        if page["next"] is None:
            return found
        mark = f"&cursor={page['next']}"


async def pool_of(desk: Desk) -> None:
    """Three nodes with two GPUs each, and the processors of each."""
    for number, model in enumerate(("H100", "A100", "L4"), 1):
        gpus = [
            {
                "index": place,
                "uuid": f"GPU-{number}-{place}",
                "model": model,
                "memory_bytes": 1 << 34,
            }
            for place in range(2)
        ]
        lends = {"name": f"node-{number}", "cpu_milli": 4000, "gpus": gpus}
        await desk.join(a_key(number), an_offer(), {}, **lends)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 9, 1000])
async def test_pages_of_any_size_list_every_resource_once_in_the_same_order(
    desk: Desk, limit: int
) -> None:
    await pool_of(desk)
    whole = (await desk.get("/v1/resources")).json()["items"]
    assert [(each["kind"], each["node_name"]) for each in whole] == [
        (kind, f"node-{number}") for number in (1, 2, 3) for kind in ("gpu", "gpu", "cpu")
    ]
    found = await pages(desk, "/v1/resources?", limit)
    assert [each["id"] for page in found for each in page] == [each["id"] for each in whole]
    assert all(len(page) <= limit for page in found)


@pytest.mark.parametrize("limit", [1, 2, 3, 1000])
async def test_pages_of_any_size_list_every_node_once(desk: Desk, limit: int) -> None:
    await pool_of(desk)
    found = await pages(desk, "/v1/nodes?", limit)
    names = [each["name"] for page in found for each in page]
    assert names == ["node-1", "node-2", "node-3"]


async def test_nodes_and_resources_are_filtered_and_searched(desk: Desk) -> None:
    await pool_of(desk)

    async def names(path: str, member: str = "name") -> list[str]:
        return [each[member] for each in (await desk.get(path)).json()["items"]]

    me = (await desk.get("/v1/me")).json()["id"]
    assert await names("/v1/nodes?search=h100") == ["node-1"]
    assert await names("/v1/nodes?search=NODE-2") == ["node-2"]
    assert await names("/v1/nodes?search=nvidia-nothing") == []
    assert await names("/v1/nodes?search=cpu_milli") == []  # a member of the offer, not a model
    assert len(await names(f"/v1/nodes?owner={me}")) == 3
    assert await names("/v1/nodes?owner=u-0000000000009") == []
    assert await names("/v1/nodes?availability=paused") == []
    assert await names("/v1/resources?search=a100", "model") == ["A100", "A100"]
    assert await names("/v1/resources?kind=cpu", "kind") == ["cpu"] * 3
    assert await names("/v1/resources?search=node-3&kind=gpu", "model") == ["L4", "L4"]
    node = (await desk.get("/v1/nodes?search=node-2")).json()["items"][0]["id"]
    assert await names(f"/v1/resources?node={node}", "node_name") == ["node-2"] * 3
    for wrong in ("n-0000000000001.x", "g-0000000000001", "x"):
        assert (await desk.get(f"/v1/resources?cursor={wrong}")).status_code == 400


async def test_one_gpu_is_read_as_the_listing_shows_it(desk: Desk) -> None:
    await pool_of(desk)
    for each in (await desk.get("/v1/resources")).json()["items"]:
        assert (await desk.get(f"/v1/resources/{each['id']}")).json() == each


async def test_the_queue_lists_waiting_tasks_with_position_and_reason(desk: Desk) -> None:
    agent = await desk.agent()  # two CPUs
    held = [await desk.command(cpus=1) for _ in range(2)]
    await desk.schedule()
    assert len(agent.leases()) == 2
    waiting = [await desk.command(cpus=1) for _ in range(5)]
    never = await desk.command(gpu="H100")
    page = (await desk.get("/v1/queue?limit=4")).json()
    assert [each["id"] for each in page["running"]] == held
    assert page["waiting"] == 6
    assert [each["task"]["id"] for each in page["items"]] == waiting[:4]
    rest = (await desk.get(f"/v1/queue?limit=4&cursor={page['next']}")).json()
    assert [each["task"]["id"] for each in rest["items"]] == [waiting[4], never]
    assert (rest["next"], rest["running"]) == (None, [])
    shown = [*page["items"], *rest["items"]]
    assert [each["explain"]["position"] for each in shown] == [1, 2, 3, 4, 5, None]
    for each in shown:  # as its own explanation tells it
        alone = (await desk.get(f"/v1/tasks/{each['task']['id']}/explain")).json()
        assert each["explain"]["position"] == alone["position"]
        assert each["explain"]["code"] == alone["code"]
        assert each["explain"]["sentence"] == alone["sentence"]
    assert "H100" in shown[-1]["explain"]["sentence"]


async def test_the_queue_says_that_running_tasks_are_left_out(desk: Desk) -> None:
    offer = replace(an_offer(cpus=MOST_RUNNING + 1), memory_bytes=1 << 50)
    agent = await desk.agent(offer=offer)
    await desk.calls(MOST_RUNNING)
    while await desk.schedule():
        continue
    assert len(agent.leases()) == MOST_RUNNING
    page = (await desk.get("/v1/queue")).json()
    assert (len(page["running"]), page["more_running"]) == (MOST_RUNNING, False)
    newest = await desk.command()
    await desk.schedule()
    page = (await desk.get("/v1/queue")).json()
    assert (len(page["running"]), page["more_running"]) == (MOST_RUNNING, True)
    assert page["running"][-1]["id"] == newest


async def test_a_key_that_may_only_write_tasks_cancels_without_reading_them(desk: Desk) -> None:
    """The permission is asked once: to cancel, not again to read the task that was cancelled."""
    task = await desk.command()
    account = {"name": "ada", "password": "long enough 1"}
    assert (await desk.bare.post("/v1/users", json=account)).status_code == 201
    tokens = (await desk.bare.post("/v1/auth/password", json=account)).json()
    signed_in = {"authorization": f"Bearer {tokens['access_token']}"}
    key = {"name": "writer", "scopes": ["tasks:write"]}
    made = await desk.bare.post("/v1/keys", json=key, headers=signed_in)
    headers = {"authorization": f"Bearer {made.json()['key']}", "idempotency-key": "once"}
    other = await desk.bare.post("/v1/tasks", json={"command": ["true"]}, headers=headers)
    mine = other.json()["ids"][0]
    path = f"/v1/tasks/{mine}"
    assert (await desk.bare.get(path, headers=headers)).status_code == 403
    headers["idempotency-key"] = "again"
    for _ in range(2):
        done = await desk.bare.delete(path, headers=headers)
        assert (done.status_code, done.json()["status"]) == (200, "cancelled")
    headers["idempotency-key"] = "of another"
    assert (await desk.bare.delete(f"/v1/tasks/{task}", headers=headers)).status_code == 404


def test_the_rate_class_of_a_path_is_that_of_its_declaration() -> None:
    classes = RateClasses(endpoints())
    assert classes.of("POST", "/v1/tasks")[:2] == (RouteClass.SUBMIT, False)
    assert classes.of("GET", "/v1/tasks/t-1/logs")[:2] == (RouteClass.STREAM, False)
    assert classes.of("DELETE", "/v1/tasks/t-1")[:2] == (RouteClass.CHANGE, False)
    assert classes.of("GET", "/openapi.json")[:2] == (RouteClass.READ, True)
    assert classes.of("PUT", "/v1/me/password")[:2] == (RouteClass.SIGN_IN, True)
    assert classes.of("GET", "/nowhere")[:2] == (RouteClass.READ, True)
