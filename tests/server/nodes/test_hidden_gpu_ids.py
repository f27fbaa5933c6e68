"""Hardware ids of a GPU are in no answer to anybody but its owner and operators: every GET route is asked as each caller.

The routes come from the server's own OpenAPI document, so a new one is crawled too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from gpool.core.ids import encode
from gpool.core.model import EndReason, Fault, Gpu, GpuDetails, Offer, Permission
from gpool.server.nodes.reports import hide_ids
from gpool.wire.frames import Finished, OfferChanged, Started
from tests.server.identity_routes.people_desk import Somebody, bearer, registered
from tests.server.nodes.test_gpu_owners import new_key
from tests.server.server_desk import Agent, Desk, an_offer, exited
from tests.tools.nodes import a_key

pytestmark = pytest.mark.anyio
UUID = "GPU-5f1c9b1e-7d3a-4f00-8a21-0c6d2b9e4f17"
BUS = "0000:b7:00.0"
SECRETS = (UUID, UUID.removeprefix("GPU-"), BUS)
WAITS = {"follow", "wait"}
"""Parameters with which a route answers later; the same answer comes without them."""


def lent() -> Offer:
    """A GPU whose agent names it in every text that an agent can send with an offer."""
    details = GpuDetails(source="nvml", driver="550", bus=BUS, pcie="gen5 x16")
    gpus = (
        Gpu(0, UUID, "NVIDIA H200", "nvidia", 141 << 30, details=details),
        Gpu(1, "GPU-other", "NVIDIA H200", "nvidia", 141 << 30),
    )
    return replace(an_offer(cpus=8), gpus=gpus)


def closed(offer: Offer) -> Offer:
    said = f"NVML, {UUID} at {BUS}: not well"
    sick = replace(offer.gpus[0], closed=said, ails=said)
    return replace(offer, gpus=(sick, *offer.gpus[1:]), closed="")


@dataclass
class Town:
    """A lender, a member of the lender's team, a consumer whose tasks ran on the GPU, and a stranger."""

    desk: Desk
    lender: Somebody
    member: Somebody
    consumer: Somebody
    stranger: Somebody
    node: Agent
    ids: list[str]

    async def keys_of(self, *people: Somebody) -> dict[str, dict[str, str]]:
        """Headers with API keys, which outlast a long crawl."""
        keys = [await new_key(self.desk, each.user) for each in people]
        return {each.name: bearer(key) for each, key in zip(people, keys, strict=True)}


@pytest.fixture
async def town(desk: Desk) -> Town:
    people = []
    for name in ("lender", "member", "consumer", "stranger"):
        desk.clock.advance(60)
        people.append(await registered(desk, name))
    lender, member, consumer, stranger = people
    made = await lender.ask("POST", "/v1/teams", {"name": "lab"})
    assert made.status_code == 201, made.text
    team = made.json()["id"]
    invite = (await lender.ask("POST", f"/v1/teams/{team}/invites", {})).json()
    joined = await member.ask("POST", "/v1/teams/join", {"token": invite["token"]})
    assert joined.status_code == 200, joined.text
    node = await desk.join(a_key(7), lent(), lender.headers, name="box")
    await node.connect()
    tasks = []
    for number in range(3):
        task = await desk.command(headers=consumer.headers, gpu="H200")
        tasks.append(task)
        await desk.schedule()
        lease = node.leases()[number]
        if number == 0:  # a start that failed because of the GPU, named by its agent
            said = f"could not inject nvidia.com/gpu={UUID} at {BUS}"
            end = Finished(
                lease.task,
                lease.epoch,
                EndReason.SANDBOX_FAILED,
                error_text=said,
                fault=Fault.PART,
            )
            await node.report(end)
            await desk.http.request("DELETE", f"/v1/tasks/{task}", headers=consumer.headers)
        else:
            await node.report(Started(lease.task, lease.epoch))
    await node.report(exited(node.leases()[1]))  # results of a batch are sent until all have ended
    await node.channel.receive(OfferChanged(closed(lent())))
    waiting = await desk.command(headers=stranger.headers, gpu="H200")
    batch = (await desk.get(f"/v1/tasks/{tasks[1]}")).json()["batch"]
    listed = (await desk.get("/v1/resources?kind=gpu")).json()["items"]
    ids = [*tasks, waiting, batch, node.badge.identity.node, team, lender.id]
    ids += [each["id"] for each in listed]
    return Town(desk, lender, member, consumer, stranger, node, ids)


def requests_of(paths: dict[str, Any], ids: list[str]) -> Iterator[str]:
    """Every GET route with every id, plain and with each of its switches on."""
    for path, methods in paths.items():
        operation = methods.get("get")
        if operation is None:
            continue
        given = operation.get("parameters", ())
        named = [each["name"] for each in given if each["in"] == "path"]
        must = [each["name"] for each in given if each["in"] == "query" and each.get("required")]
        switches = [
            each["name"]
            for each in given
            if each["in"] == "query" and each["name"] not in WAITS and _is_switch(each["schema"])
        ]
        for chosen in itertools.product(ids, repeat=len(named)):
            filled = path
            for name, value in zip(named, chosen, strict=True):
                filled = filled.replace(f"{{{name}}}", value)
            queries = [""] if not must else [f"{name}={value}" for name in must for value in ids]
            for query in (*queries, *(f"{name}=true" for name in switches)):
                yield f"{filled}?{query}" if query else filled


def _is_switch(schema: dict[str, Any]) -> bool:
    kinds = [schema, *schema.get("anyOf", ())]
    return any(each.get("type") == "boolean" for each in kinds)


async def crawl(town: Town, headers: dict[str, str]) -> tuple[list[str], int]:
    """Requests whose answer holds a hardware id, and the number of requests that were answered with 200."""
    document = (await town.desk.get("/openapi.json")).json()
    found, answered = [], 0
    for path in requests_of(document["paths"], town.ids):
        town.desk.clock.advance(1)  # under the rate limits
        answer = await town.desk.bare.get(path, headers=headers)
        answered += answer.status_code == 200
        if any(secret in answer.text or secret.upper() in answer.text for secret in SECRETS):
            found.append(path)
    return found, answered


async def test_no_route_shows_hardware_ids_to_anybody_but_owner_and_operators(town: Town) -> None:
    callers = await town.keys_of(town.member, town.consumer, town.stranger)
    for name, headers in {"nobody": {}, **callers}.items():
        found, answered = await crawl(town, headers)
        assert found == [], name
        assert answered >= (3 if name == "nobody" else 20), name
    control = {**await town.keys_of(town.lender), "operator": bearer(town.desk.key)}
    for name, headers in control.items():
        found, _ = await crawl(town, headers)  # the control
        assert {path.partition("?")[0] for path in found} >= {"/v1/nodes", "/v1/resources"}, name


async def test_the_owner_reads_which_gpu_a_text_means(town: Town) -> None:
    path = f"/v1/nodes/{town.node.badge.identity.node}"
    gpus = (await town.lender.ask("GET", path)).json()["gpus"]
    assert gpus[0]["closed"] == gpus[0]["ails"] == "NVML, gpu0 at gpu0: not well"
    assert (gpus[0]["uuid"], gpus[0]["details"]["bus"]) == (UUID, BUS)
    seen = (await town.stranger.ask("GET", path)).json()["gpus"]
    assert (seen[0]["uuid"], seen[0]["details"]["bus"]) == ("", "")


async def test_a_failed_start_names_the_gpu_by_its_index(town: Town) -> None:
    told = (await town.consumer.ask("GET", f"/v1/tasks/{town.ids[0]}/events")).text
    shown = (await town.consumer.ask("GET", f"/v1/tasks/{town.ids[0]}")).text
    assert "nvidia.com/gpu=gpu0 at gpu0" in told + shown


async def test_the_words_of_a_task_are_left_as_they_are(town: Town) -> None:
    """A task sees its own GPU; only what the agent says is changed."""
    lease = town.node.leases()[-1]
    end = Finished(lease.task, lease.epoch, EndReason.EXITED, 1, error_text=f"no room on {UUID}")
    await town.node.report(end)
    task = encode("task", lease.task)
    assert UUID in (await town.consumer.ask("GET", f"/v1/tasks/{task}")).text


def test_short_ids_are_no_hardware_ids() -> None:
    gpus = (Gpu(0, "a", "H200", "nvidia", 1), Gpu(3, UUID, "H200", "nvidia", 1))
    assert hide_ids(f"a card, {UUID}", gpus) == "a card, gpu3"
    assert hide_ids("", gpus) == ""


async def test_a_provider_of_other_gpus_is_a_stranger_too(town: Town) -> None:
    headers = await town.desk.person("provider", Permission.PROVIDER, Permission.CONSUMER)
    found, _ = await crawl(town, headers)
    assert found == []
