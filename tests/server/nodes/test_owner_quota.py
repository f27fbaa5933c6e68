"""Quotas of nodes and GPUs per owner, machines without a key, and offers that change all the time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpool.core.ids import encode
from gpool.core.model import SECOND, Permission
from gpool.server.store.operations import gpus as gpu_operations
from gpool.server.store.operations.nodes import KEPT_AFTER, MAX_GONE, MAX_PAGE_GPUS
from gpool.server.store.protocol import Operation, operation
from gpool.server.store.rows import values
from gpool.wire.frames import OfferChanged, Refused, Welcome
from tests.server.nodes.test_gpu_owners import offering, owned
from tests.server.server_desk import Agent, Desk, StoppedClock, an_offer, open_desk
from tests.tools.nodes import a_key

pytestmark = pytest.mark.anyio


def machine(name: str, gpus: int) -> dict[str, Any]:
    return {
        "name": name,
        "cpu_milli": 1000,
        "gpus": [
            {"index": n, "uuid": f"GPU-{name}-{n}", "model": "H100", "memory_bytes": 1 << 30}
            for n in range(gpus)
        ],
    }


@operation
def _count(table: str) -> Operation[int]:
    [found] = yield from values(int, f"SELECT COUNT(*) FROM {table}")  # noqa: S608
    return found


async def counted(desk: Desk) -> tuple[int, int]:
    """Rows of GPUs and of bindings."""
    store = desk.server.store
    return await store.read(_count("gpus")), await store.read(_count("gpu_bindings"))


async def test_an_owner_registers_nodes_and_gpus_up_to_the_quota(data: Path) -> None:
    desk = await open_desk(data, StoppedClock(), owner_nodes=3, owner_gpus=100)
    mallory = await desk.person("mallory", Permission.PROVIDER)
    for name, gpus, status, why in (
        ("one", 60, 201, ""),
        ("two", 41, 403, "60 of 100 GPUs; 41 more"),
        ("two", 40, 201, ""),
        ("one", 61, 403, "40 of 100 GPUs"),
        ("one", 50, 201, ""),  # replaces its own
        ("three", 0, 201, ""),
        ("four", 0, 403, "3 of 3 nodes"),
    ):
        answer = await desk.bare.post("/register_gpu", json=machine(name, gpus), headers=mallory)
        assert answer.status_code == status, answer.text
        assert why in answer.text
    for name in ("a", "b", "c", "d"):  # the control: operators have no quota
        assert (await desk.post("/register_gpu", machine(name, 60))).status_code == 201
    await desk.server.store.close()


async def test_an_agent_past_the_quota_is_told_so_and_the_node_keeps_its_offer(data: Path) -> None:
    desk = await open_desk(data, StoppedClock(), owner_gpus=4)
    agent = await owned(desk, "mallory", offering("GPU-1", "GPU-2"))
    assert agent.frames(Welcome)
    await agent.channel.receive(OfferChanged(offering(*(f"GPU-{n}" for n in range(5)))))
    [refused] = agent.frames(Refused)
    assert (refused.code, refused.retry) == ("forbidden", True)
    assert "0 of 4 GPUs; 5 more" in refused.detail
    again = agent.again()
    again.offer = offering(*(f"GPU-{n}" for n in range(5)))
    await again.connect()
    assert again.frames(Refused)
    assert not again.frames(Welcome)
    assert (await counted(desk))[0] == 2
    await desk.server.store.close()


async def test_a_machine_without_a_key_is_listed_for_its_owner_and_operators_only(
    desk: Desk,
) -> None:
    mallory = await desk.person("mallory", Permission.PROVIDER)
    ann = await desk.person("ann", Permission.CONSUMER)
    await desk.join(a_key(1), an_offer(), mallory, **machine("keyed", 1))
    made = await desk.bare.post("/register_gpu", json=machine("made-up", 1), headers=mallory)
    node = made.json()["id"]

    async def seen(headers: dict[str, str], path: str) -> set[str]:
        items = (await desk.bare.get(path, headers=headers)).json()["items"]
        return {each["name"] if "name" in each else each["node_name"] for each in items}

    for path in ("/v1/nodes", "/v1/resources", "/resources"):
        assert await seen(ann, path) == {"keyed"}
        for who in (mallory, {"authorization": f"Bearer {desk.key}"}):
            assert await seen(who, path) == {"keyed", "made-up"}
    [gpu] = [
        each["id"]
        for each in (await desk.get(f"/v1/resources?node={node}&kind=gpu")).json()["items"]
    ]
    for path in (f"/v1/nodes/{node}", f"/v1/resources/{node}", f"/v1/resources/{gpu}"):
        assert (await desk.bare.get(path, headers=ann)).status_code == 404
        assert (await desk.bare.get(path, headers=mallory)).status_code == 200


async def test_a_page_holds_a_bounded_number_of_gpus_and_pages_hold_all(desk: Desk) -> None:
    for number in range(20):
        answer = await desk.post("/register_gpu", machine(f"machine{number:02}", 64))
        assert answer.status_code == 201
        desk.clock.advance(10)  # the rate limit of joining
    names: list[str] = []
    cursor, sizes = "", []
    while True:
        page = (await desk.get(f"/v1/nodes?limit=1000{cursor}")).json()
        names += [each["name"] for each in page["items"]]
        sizes.append(sum(len(each["gpus"]) for each in page["items"]))
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"
    assert names == [f"machine{number:02}" for number in range(20)]
    assert max(sizes) <= MAX_PAGE_GPUS
    assert len(sizes) == 2


# ---- offers that change


async def change(agent: Agent, *uuids: str) -> None:
    await agent.channel.receive(OfferChanged(offering(*uuids)))


async def test_gpus_that_leave_the_offer_at_once_leave_no_rows(desk: Desk) -> None:
    agent = await owned(desk, "mallory", offering("GPU-1"))
    for number in range(20):
        await change(agent, *(f"GPU-{number}-{each}" for each in range(50)))
    assert await counted(desk) == (50, 50)


async def test_a_gpu_that_was_lent_for_long_withdrawn_or_sick_is_remembered(desk: Desk) -> None:
    """The control."""
    agent = await owned(desk, "ann", offering("GPU-old", "GPU-withdrawn", "GPU-sick", "GPU-new"))
    rows = {row.uuid: row for row in await desk.server.store.read(gpu_operations.gpu_rows())}
    for uuid, body in (
        ("GPU-withdrawn", {"available": False}),
        ("GPU-sick", {"quarantined": "it is hot"}),
    ):
        path = f"/v1/resources/{encode('gpu', rows[uuid].id)}"
        assert (await desk.http.patch(path, json=body)).status_code == 200
    await change(agent, "GPU-old")
    assert await counted(desk) == (3, 3)
    desk.clock.advance(KEPT_AFTER / SECOND)
    await change(agent, "GPU-later")
    await change(agent, "GPU-old", "GPU-withdrawn", "GPU-sick")
    found = {row.uuid: row for row in await desk.server.store.read(gpu_operations.gpu_rows())}
    assert {uuid: row.id for uuid, row in found.items()} == {
        uuid: rows[uuid].id for uuid in ("GPU-old", "GPU-withdrawn", "GPU-sick")
    }
    assert not found["GPU-withdrawn"].available
    assert found["GPU-sick"].quarantined == "it is hot"


async def test_a_node_remembers_so_many_gpus_that_left(desk: Desk) -> None:
    agent = await owned(desk, "mallory", offering("GPU-1"))
    for number in range(20):
        await change(agent, *(f"GPU-{number}-{each}" for each in range(60)))
        desk.clock.advance(KEPT_AFTER / SECOND)
    await change(agent, "GPU-last")
    assert await counted(desk) == (MAX_GONE + 1, MAX_GONE + 1)


async def test_the_channel_counts_the_gpus_that_an_offer_changes(desk: Desk) -> None:
    agent = await owned(desk, "ann", offering("GPU-1", "GPU-2"))
    for changed, uuids in ((0, ("GPU-1", "GPU-2")), (1, ("GPU-1",)), (3, ("GPU-1", "b", "c"))):
        assert agent.channel.changed_gpus(OfferChanged(offering(*uuids))) == changed
    sick = replace(offering("GPU-1", "GPU-2").gpus[0], ails="hot")
    offer = replace(agent.offer, gpus=(sick, agent.offer.gpus[1]))
    assert agent.channel.changed_gpus(OfferChanged(offer)) == 1
