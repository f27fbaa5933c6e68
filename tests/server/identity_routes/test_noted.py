"""What people do is noted, in the transaction of its effect: who, what, from where, and whether it went well."""

from __future__ import annotations

import pytest

from gpool.core.ids import encode
from gpool.server.scheduling.loops import MaintainIdentity
from tests.server.identity_routes.people_desk import (
    PASSWORD,
    registered,
    signed,
    signed_in_by,
    wallet,
)
from tests.server.server_desk import Desk

pytestmark = pytest.mark.anyio


async def noted(desk: Desk) -> list[dict[str, object]]:
    """Oldest first."""
    items: list[dict[str, object]] = (await desk.get("/v1/audit?limit=200")).json()["items"]
    return items[::-1]


async def actions(desk: Desk) -> list[tuple[object, object]]:
    return [(item["action"], item["outcome"]) for item in await noted(desk)]


async def test_sign_ins_good_and_bad_are_noted_with_their_address(desk: Desk) -> None:
    ann = await registered(desk, "ann")
    wrong = {"name": "ann", "password": "not the right one"}
    assert (await desk.bare.post("/v1/auth/password", json=wrong)).status_code == 401
    nobody = {"name": "nobody", "password": PASSWORD}
    assert (await desk.bare.post("/v1/auth/password", json=nobody)).status_code == 401
    found = await noted(desk)
    assert [(item["action"], item["outcome"]) for item in found] == [
        ("register", "ok"),
        ("sign_in", "ok"),
        ("sign_in", "refused"),
        ("sign_in", "refused"),
    ]
    assert found[1]["actor"] == encode("user", ann.user)
    assert found[1]["address"] == "127.0.0.1"
    assert found[2]["thing"] == "name ann"
    assert "not the right one" not in str(found)


async def test_further_refusals_of_a_minute_are_noted_as_a_count(desk: Desk) -> None:
    for number in range(20):
        wrong = {"name": f"nobody{number}", "password": PASSWORD}
        assert (await desk.bare.post("/v1/auth/password", json=wrong)).status_code == 401
    assert await actions(desk) == [("sign_in", "refused")] * 3
    desk.clock.advance(61)
    await MaintainIdentity(desk.server).run_once(desk.server.now)
    found = [item for item in await noted(desk) if item["action"] == "sign_in"]
    assert len(found) == 4
    assert (found[3]["address"], found[3]["facts"]) == ("127.0.0.1", {"count": "17"})
    assert (await desk.get("/v1/audit?verify=true")).json()["whole"] is True


async def test_a_wallet_s_story_is_noted(desk: Desk) -> None:
    bob = await signed_in_by(desk, wallet(1))
    second = await signed(desk, wallet(2), "link", bob.name)
    proof = await signed(desk, wallet(1), "approve", bob.name)
    body = {**second, "proof": proof}
    await bob.ask("POST", "/v1/wallets", body)
    told = await actions(desk)
    assert told[:2] == [("register", "ok"), ("sign_in", "ok")]
    bad = {"message": proof["message"], "signature": "0x" + "11" * 65}
    await desk.bare.post("/v1/auth/wallet", json=bad)
    assert (await desk.get("/v1/audit?verify=true")).json()["whole"] is True


async def test_keys_are_noted_when_made_first_used_in_a_day_and_ended(desk: Desk) -> None:
    ann = await registered(desk, "ann")
    made = (await ann.ask("POST", "/v1/keys", {"name": "ci", "scopes": ["tasks:read"]})).json()
    headers = {"authorization": f"Bearer {made['key']}"}
    for _ in range(3):
        assert (await desk.bare.get("/v1/tasks", headers=headers)).status_code == 200
        await MaintainIdentity(desk.server).run_once(desk.server.now)
    desk.clock.advance(86_400)
    assert (await desk.bare.get("/v1/tasks", headers=headers)).status_code == 200
    await MaintainIdentity(desk.server).run_once(desk.server.now)
    told = [item for item in await noted(desk) if item["thing"] == made["id"]]
    assert [item["action"] for item in told] == ["key.make", "key.used", "key.used"]
    assert told[0]["facts"] == {"name": "ci", "scopes": "tasks:read"}
    assert made["key"] not in str(told)


async def test_permissions_quotas_nodes_and_rotations_are_noted(desk: Desk) -> None:
    ann = await registered(desk, "ann")
    change = {"permissions": ["consumer"], "quota": {"queued_tasks": 2}}
    user = encode("user", ann.user)
    assert (await desk.http.patch(f"/v1/users/{user}", json=change)).status_code == 200
    node = (await desk.post("/v1/nodes", {"name": "first"})).json()["id"]
    assert (await desk.http.delete(f"/v1/nodes/{node}")).status_code < 300
    assert (await desk.post("/v1/admin/keys/rotate", {})).status_code == 202
    found = await noted(desk)
    assert [item["action"] for item in found[2:]] == [
        "user.change",
        "node.join",
        "node.remove",
        "keys.rotate",
    ]
    assert found[2]["thing"] == user
    assert "consumer" in str(found[2]["facts"])
    # The quota holds at once.
    body = {"command": ["true"], "copies": 3}
    assert (await ann.ask("POST", "/v1/tasks", body)).status_code == 429


async def test_guessing_is_slowed_for_the_guesser(desk: Desk) -> None:
    await registered(desk, "ann")
    wrong = {"name": "zoe", "password": "not the right one"}
    codes = [(await desk.bare.post("/v1/auth/password", json=wrong)).status_code for _ in range(12)]
    assert set(codes) == {401, 429}
    refused = await desk.bare.post("/v1/auth/password", json=wrong)
    assert int(refused.headers["retry-after"]) >= 1
    right = {"name": "ann", "password": PASSWORD}
    assert (await desk.bare.post("/v1/auth/password", json=right)).status_code == 200
