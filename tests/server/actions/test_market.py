"""Offers and quotes, over the real routes and the real channel: whom a GPU costs what, and what is said before a submission."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpool.core.model import SECOND, EndReason, Gpu, Merit, Offer, Permission, Span
from gpool.server.nodes.reports import offer_problem
from gpool.wire.frames import Finished, OfferChanged, Started
from tests.server.server_desk import Agent, Desk, an_offer

pytestmark = pytest.mark.anyio

HOUR = 3600 * SECOND
Headers = dict[str, str]


def lent(price: int, gpus: int = 2, **more: Any) -> Offer:
    return replace(an_offer(cpus=8, gpus=gpus), price_microcredits=price, **more)


def of_model(offer: Offer, model: str, *prices: int | None) -> Offer:
    gpus = zip(offer.gpus, prices, strict=True)
    return replace(
        offer,
        gpus=tuple(
            replace(gpu, model=model, uuid=f"{model}-{gpu.index}", price_microcredits=price)
            for gpu, price in gpus
        ),
    )


async def offers(desk: Desk, who: Headers, **query: Any) -> list[dict[str, Any]]:
    answer = await desk.get("/v1/offers", headers=who, params=query)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["items"]
    return found


async def quoted(desk: Desk, who: Headers, **members: Any) -> dict[str, Any]:
    answer = await desk.post("/v1/quotes", {"command": ["true"], **members}, headers=who)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def prices(found: list[dict[str, Any]]) -> list[tuple[str, int, int, int]]:
    return [(one["model"], one["price_microcredits"], one["gpus"], one["nodes"]) for one in found]


# ---- offers


async def test_offers_are_grouped_by_model_and_price_the_cheapest_first(desk: Desk) -> None:
    bob = await desk.person("bob", Permission.CONSUMER)
    a, b = "NVIDIA A", "NVIDIA B"
    await desk.agent("n1", of_model(lent(300_000), a, None, None))
    await desk.agent("n2", of_model(lent(300_000), a, 900_000, None))
    await desk.agent("n3", of_model(lent(200_000), b, 0, None))
    found = await offers(desk, bob)
    assert prices(found) == [
        (b, 0, 1, 1),
        (b, 200_000, 1, 1),
        (a, 300_000, 3, 2),
        (a, 900_000, 1, 1),
    ]
    assert found[0]["simulated"]
    own = await offers(desk, {})  # the owner's
    assert {one["price_microcredits"] for one in own} == {0}
    gpus = (await desk.get("/v1/resources", headers=bob)).json()["items"]
    listed = sorted(one["price_microcredits"] for one in gpus if one["kind"] == "gpu")
    assert listed == [0, 200_000, 300_000, 300_000, 300_000, 900_000]


async def test_offers_come_in_pages_that_miss_nothing_and_repeat_nothing(desk: Desk) -> None:
    bob = await desk.person("bob", Permission.CONSUMER)
    for number in range(5):
        name = f"NVIDIA X{number}.5"  # a dot in the cursor
        await desk.agent(f"n{number}", of_model(lent(1000 * (number % 3)), name, None, None))
    whole, found, cursor = await offers(desk, bob), [], ""
    while cursor is not None:
        query = {"limit": 2, **({"cursor": cursor} if cursor else {})}
        page = (await desk.get("/v1/offers", headers=bob, params=query)).json()
        assert len(page["items"]) <= 2
        found += page["items"]
        cursor = page["next"]
    assert found == whole
    assert len(whole) == 5
    for bad in ("x", "1.2.3", "1.2.x.nvidia.A", f"{10**30}.1.0.nvidia.A"):
        answer = await desk.get("/v1/offers", headers=bob, params={"cursor": bad})
        assert answer.status_code == 400, bad


async def test_offers_are_filtered_by_what_is_known_of_them(desk: Desk) -> None:
    bob = await desk.person("bob", Permission.CONSUMER)
    agents = [
        await desk.agent(
            f"n{number}", of_model(lent(500_000, notice_s=60), f"M{number}", None, None)
        )
        for number in range(3)
    ]
    merits = (
        Merit(),
        Merit(Span(100 * HOUR), is_proven=True, gigaflops=100_000, memory_gb_per_s=2000),
        Merit(Span(400 * HOUR), is_proven=True, gigaflops=400_000, memory_gb_per_s=4000),
    )
    nodes = [agent.credentials.node for agent in agents]
    desk.server.picture.use_reliability(dict(zip(nodes, merits, strict=True)))

    async def models(**query: Any) -> list[str]:
        return [one["model"] for one in await offers(desk, bob, **query)]

    assert await models() == ["M0", "M1", "M2"]
    assert await models(min_mtbf_hours=101) == ["M2"]
    assert await models(min_tflops_per_credit=200) == ["M1", "M2"]
    assert await models(min_tflops_per_credit=201) == ["M2"]
    assert await models(min_memory_gb_per_s=3000) == ["M2"]
    assert await models(gpu="M1:2") == ["M1"]
    assert await models(gpu="M1:3") == []
    assert await models(max_price="0.5/h") == ["M0", "M1", "M2"]
    assert await models(max_price="0.49/h") == []
    assert await models(max_price="0.9/h", gpu="2") == []  # the price of both
    assert await models(tier="vm") == []
    [_, second, _] = await offers(desk, bob)
    assert (second["tflops_per_credit"], second["verified"], second["notice_s"]) == (200.0, 2, 60)
    assert (second["mtbf_hours"], second["memory_gb_per_s"]) == (100.0, 2000)
    await desk.command(gpu="M1:2")
    assert await desk.schedule() == 1
    assert await models(free=True) == ["M0", "M2"]
    assert [(one["gpus"], one["free"]) for one in await offers(desk, bob, gpu="M1")] == [(2, 0)]


async def test_only_nodes_that_take_the_callers_tasks_are_offered(desk: Desk) -> None:
    ada = await desk.person("ada", Permission.CONSUMER)
    bob = await desk.person("bob", Permission.CONSUMER)
    await desk.post("/v1/teams", {"name": "lab"}, headers=ada)
    agent = await desk.agent("n1", lent(1000, audience=("team:lab",)))
    assert await offers(desk, bob) == []
    assert prices(await offers(desk, ada)) == [("NVIDIA A100-SXM4-80GB", 1000, 2, 1)]
    await agent.channel.receive(OfferChanged(lent(1000, closed="outside its owner's hours")))
    assert await offers(desk, bob) == []


async def test_whom_an_owner_named_pays_nothing_and_a_name_nobody_has_is_told(desk: Desk) -> None:
    ada = await desk.person("ada", Permission.CONSUMER)
    bob = await desk.person("bob", Permission.CONSUMER)
    team = (await desk.post("/v1/teams", {"name": "lab"}, headers=ada)).json()["id"]
    terms = {"free_for": ("team:lab", "user:nobody"), "min_charge_microcredits": 500}
    await desk.agent("n1", lent(400_000, **terms))
    [shown] = await offers(desk, ada)
    assert shown["price_microcredits"] == 0
    own = await quoted(desk, ada, gpu="1")
    assert (own["rate_microcredits"], own["min_charge_microcredits"]) == (400_000, 500)
    ours = await quoted(desk, ada, gpu="1", team=team)
    assert (ours["rate_microcredits"], ours["min_charge_microcredits"]) == (0, 0)
    theirs = await quoted(desk, bob, gpu="1", max_price=0)
    assert theirs["code"] == "nothing_matches"
    assert "0.40/h" in theirs["sentence"]
    [node] = (await desk.get("/v1/nodes")).json()["items"]
    assert "user:nobody" in node["problems"][0]
    assert node["free_for"] == ["team:lab", "user:nobody"]
    assert (node["min_charge_microcredits"], node["notice_s"]) == (500, 0)
    [node] = (await desk.get("/v1/nodes", headers=bob)).json()["items"]
    assert node["free_for"] is None


# ---- quotes


async def ran(desk: Desk, agent: Agent, seconds: float, who: Headers, **members: Any) -> None:
    answer = await desk.post("/v1/tasks", {"command": ["true"], **members}, headers=who)
    assert answer.status_code == 202, answer.text
    assert await desk.schedule() == 1
    lease = agent.leases()[-1]
    await agent.report(Started(lease.task, lease.epoch))
    desk.clock.advance(seconds)
    span = round(seconds * SECOND)
    await agent.report(
        Finished(lease.task, lease.epoch, EndReason.EXITED, exit_code=0, duration_us=span)
    )


async def test_a_quote_is_gpus_times_price_times_expected_run_time(desk: Desk) -> None:
    bob = await desk.person("bob", Permission.CONSUMER)
    agent = await desk.agent("n1", lent(360_000, min_charge_microcredits=700))
    first = await quoted(desk, bob, gpu="2", timeout_s=3600)
    assert (first["code"], first["known_from"], first["cost"]) == ("starts", None, None)
    assert first["rate_microcredits"] == 720_000
    assert first["cost_at_timeout_microcredits"] == 720_000
    for seconds in (10, 20, 30, 40, 50):
        await ran(desk, agent, seconds, bob, gpu="2")
    found = await quoted(desk, bob, gpu="2", timeout_s=3600, copies=3)
    assert (found["tasks"], found["known_from"]) == (3, "own")
    assert found["run_s"] == {"low": 10, "expected": 30, "high": 50}
    assert found["cost"] == {"low": 3 * 2000, "expected": 3 * 6000, "high": 3 * 10_000}
    assert found["starts"]["from"] == found["starts"]["to"]
    assert [one["price_microcredits"] for one in found["offers"]] == [360_000]
    brief = await quoted(desk, bob, gpu="0.05", timeout_s=20)
    assert brief["known_from"] == "others"
    assert brief["cost"]["low"] == 700  # the minimum
    assert brief["run_s"]["high"] <= 20
    assert (
        len((await desk.get("/v1/tasks", headers=bob)).json()["items"]) == 5
    )  # nothing was submitted
    assert desk.server.picture.state.queued_count == 0


async def test_a_quote_for_a_busy_pool_says_when_it_would_start(desk: Desk) -> None:
    bob = await desk.person("bob", Permission.CONSUMER)
    agent = await desk.agent("n1", lent(100_000))
    await desk.agent("n2", of_model(lent(300_000, 1), "NVIDIA T4", None))
    for _ in range(4):
        await ran(desk, agent, 100, bob, gpu="A100:2")
    await desk.post("/v1/tasks", {"command": ["true"], "gpu": "A100:2"}, headers=bob)
    assert await desk.schedule() == 1
    found = await quoted(desk, bob, gpu="A100:2")
    assert (found["code"], found["rates"]) == ("waits", [200_000])
    assert found["starts"]["from"] <= found["starts"]["at"] <= found["starts"]["to"]
    either = await quoted(desk, bob, gpu="A100,T4")
    assert (either["code"], either["rates"]) == ("starts", [100_000, 300_000])
    assert either["rate_microcredits"] == 300_000


async def test_a_quote_of_a_gang_is_for_all_its_nodes(desk: Desk) -> None:
    bob = await desk.person("bob", Permission.CONSUMER)
    reach = {"site": "s", "gang_port": 47_100}
    for number in (1, 2):
        offer = lent(100_000, min_charge_microcredits=5, address=f"10.0.0.{number}", **reach)
        uuids = tuple(replace(gpu, uuid=f"{number}-{gpu.index}") for gpu in offer.gpus)
        await desk.agent(f"n{number}", replace(offer, gpus=uuids))
    found = await quoted(desk, bob, gpu="2", nodes=2)
    assert (found["code"], found["rate_microcredits"]) == ("starts", 400_000)
    assert found["min_charge_microcredits"] == 10
    too_many = await quoted(desk, bob, gpu="2", nodes=3)
    assert too_many["code"] == "nothing_matches"


async def test_a_quote_refuses_what_a_submission_refuses(desk: Desk) -> None:
    await desk.agent("n1", lent(1))
    for members in ({"gpu": "H100:x"}, {"memory": "0"}, {"max_price": "cheap"}, {"on": "x"}):
        body = {"command": ["true"], **members}
        wanted = await desk.post("/v1/tasks", body)
        asked = await desk.post("/v1/quotes", body)
        assert wanted.status_code in (400, 422), members
        assert (asked.status_code, asked.json()["detail"]) == (
            wanted.status_code,
            wanted.json()["detail"],
        )
    empty = await quoted(desk, {}, gpu="H100")
    assert (empty["code"], empty["rates"], empty["offers"]) == ("nothing_matches", [], [])


async def test_a_quote_takes_names_of_secrets_without_values(desk: Desk) -> None:
    await desk.agent("n1", lent(1))
    found = await quoted(desk, {}, secrets={"TOKEN": ""})
    assert found["code"] == "starts"


# ---- lying nodes


@pytest.mark.parametrize(
    "lie",
    [
        {"price_microcredits": -1},
        {"min_charge_microcredits": -1},
        {"min_charge_microcredits": 10**12},
        {"notice_s": -1},
        {"notice_s": 10**9},
        {"free_for": ("x" * 301,)},
        {"gpus": (Gpu(0, "g", "M", "nvidia", 1, price_microcredits=-5),)},
        {"gpus": (Gpu(0, "g", "M", "nvidia", 1, price_microcredits=10**18),)},
    ],
)
async def test_terms_that_cannot_be_are_refused(lie: dict[str, Any]) -> None:
    assert offer_problem(lent(5, 0, notice_s=60, min_charge_microcredits=1)) is None  # the control
    assert offer_problem(replace(lent(5, 0), **lie)) is not None
