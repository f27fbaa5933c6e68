"""Rates: who asks too fast is told when to come back; who is signed in is not slowed by neighbours, nor locked out."""

from __future__ import annotations

import socket

import httpx2
import pytest

from gpool.core.errors import TooMany
from gpool.core.ids import decode
from gpool.core.model import SECOND, Permission
from gpool.server.identity.throttle import CLASS_RATES, RATES, UNKNOWN_KEYS, RouteClass
from tests.server.identity_routes.people_desk import PASSWORD, registered, signed_in
from tests.server.server_desk import Desk, Live
from tests.tools.processes import PATIENCE_S

pytestmark = pytest.mark.anyio


async def test_an_account_that_asks_too_fast_is_told_when_to_come_back(desk: Desk) -> None:
    rate = CLASS_RATES[RouteClass.CHANGE].account
    headers = await desk.person("erin", Permission.CONSUMER)
    gone = "/v1/tasks/t-0000000000007"
    me = (await desk.bare.get("/v1/me", headers=headers)).json()["id"]
    for _ in range(rate.burst - 1):
        desk.server.guard.count_account(RouteClass.CHANGE, decode("user", me))
    assert (await desk.bare.delete(gone, headers=headers)).status_code == 404
    refused = await desk.bare.delete(gone, headers=headers)
    assert refused.status_code == 429
    assert refused.json()["code"] == "too_many"
    assert "from your account" in refused.json()["detail"]
    assert refused.headers["retry-after"] == "1"
    assert (await desk.bare.get("/v1/me", headers=headers)).status_code == 200  # another class
    assert (await desk.http.delete(gone)).status_code == 404  # another account, the same address
    desk.clock.advance(1)
    assert (await desk.bare.delete(gone, headers=headers)).status_code == 404


async def test_nobody_in_particular_counts_for_the_address(desk: Desk) -> None:
    burst = CLASS_RATES[RouteClass.READ].address.burst
    for _ in range(burst):
        assert (await desk.bare.get("/openapi.json")).status_code == 200
    refused = await desk.bare.get("/openapi.json")
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert (await desk.get("/v1/me")).status_code == 200
    assert (await desk.bare.get("/healthz")).status_code == 200


async def test_unknown_keys_are_not_tried_at_any_speed_and_known_ones_go_on(desk: Desk) -> None:
    assert (await desk.get("/v1/me")).status_code == 200
    for number in range(UNKNOWN_KEYS.burst):
        headers = {"authorization": f"Bearer gpk_{number}"}
        assert (await desk.bare.get("/v1/me", headers=headers)).status_code == 401
    refused = await desk.bare.get("/v1/me", headers={"authorization": "Bearer gpk_x"})
    assert refused.status_code == 429
    assert (await desk.get("/v1/me")).status_code == 200


@pytest.mark.parametrize("authorization", ["x", "Bearer gpk_x", "Basic eDp4"])
@pytest.mark.parametrize(
    ("method", "path", "rate"),
    [
        ("POST", "/v1/auth/wallet/nonce", RouteClass.SIGN_IN),
        ("POST", "/v1/users", RouteClass.REGISTER),
        ("GET", "/openapi.json", RouteClass.READ),
        ("GET", "/no/such/route", RouteClass.READ),
    ],
)
async def test_no_header_takes_an_anonymous_request_out_of_the_limit(
    desk: Desk, method: str, path: str, rate: RouteClass, authorization: str
) -> None:
    for _ in range(CLASS_RATES[rate].address.burst - 1):
        desk.server.guard.count_address(rate, "127.0.0.1")
    headers = {"authorization": authorization}
    assert (await desk.bare.request(method, path, headers=headers)).status_code != 429
    assert (await desk.bare.request(method, path, headers=headers)).status_code == 429


async def test_a_route_that_asks_for_a_credential_counts_for_the_account_instead(
    desk: Desk,
) -> None:
    """The control: with the address at its limit a valid key still passes, an unknown one is counted as such."""
    rate = CLASS_RATES[RouteClass.READ].address
    for _ in range(rate.burst):
        desk.server.guard.count_address(RouteClass.READ, "127.0.0.1")
    assert (await desk.get("/v1/me")).status_code == 200
    assert (await desk.bare.get("/v1/me")).status_code == 429


async def test_sign_ins_and_refreshes_that_succeed_do_not_count(desk: Desk) -> None:
    ann = await registered(desk, "ann")
    burst = CLASS_RATES[RouteClass.SIGN_IN].address.burst
    for _ in range(burst - 1):
        desk.server.guard.count_address(RouteClass.SIGN_IN, "127.0.0.1")
    for _ in range(5):
        await signed_in(desk, "ann")
        assert (await ann.refresh()).status_code == 200
    wrong = {"name": "ann", "password": "not this one"}
    assert (await desk.bare.post("/v1/auth/password", json=wrong)).status_code == 401
    assert (await desk.bare.post("/v1/auth/password", json=wrong)).status_code == 429


async def test_an_account_that_signs_in_in_a_loop_does_not_keep_others_from_it(desk: Desk) -> None:
    """Finding 9, with right passwords: each costs a hash of the few that are done at once, and a session."""
    await registered(desk, "mallory")
    await registered(desk, "ann")
    right = {"name": "mallory", "password": PASSWORD}
    statuses = [
        (await desk.bare.post("/v1/auth/password", json=right)).status_code
        for _ in range(RATES.right.burst + 5)
    ]
    assert statuses.count(200) == RATES.right.burst - 1  # one of them when she registered
    assert set(statuses[-5:]) == {429}
    await signed_in(desk, "ann")  # the control: the same address, another account
    desk.clock.advance(RATES.right.every / SECOND)
    await signed_in(desk, "mallory")


async def test_a_guesser_does_not_use_up_the_owner_s_right_passwords(desk: Desk) -> None:
    await registered(desk, "ann")
    guard = desk.server.guard
    for number in range(RATES.right.burst + 5):
        async with guard.sign_in("ann", f"10.6.{number}.1"):
            pass
    await signed_in(desk, "ann")


async def test_a_made_up_invite_is_refused_before_the_password_is_hashed(desk: Desk) -> None:
    wanted = {"name": "bob", "password": PASSWORD, "invite": "gpv_made_up"}
    answer = await desk.bare.post("/v1/users", json=wanted)
    assert answer.status_code == 403
    assert "passwords" not in vars(desk.server.identity)  # created by the first hash
    await registered(desk, "ann")  # the control
    assert "passwords" in vars(desk.server.identity)


async def test_a_batch_of_ten_thousand_counts_once(desk: Desk) -> None:
    for _ in range(3):
        document = {"command": ["true"], "copies": 10_000}
        assert (await desk.post("/v1/tasks", document)).status_code == 202


async def test_guessing_slows_the_guesser_and_not_the_owner(desk: Desk) -> None:
    guard = desk.server.guard
    async with guard.sign_in("ann", "10.0.0.1") as guess:
        guess.succeeded()
    slowed = 0
    for _ in range(200):
        try:
            async with guard.sign_in("ann", "66.6.6.6"):
                pass
        except TooMany as error:
            slowed += error.members["retry_after"] is not None
    assert slowed >= 190
    async with guard.sign_in("ann", "10.0.0.1") as guess:
        guess.succeeded()


async def test_a_check_that_had_no_room_costs_nothing(desk: Desk) -> None:
    for _ in range(100):
        with pytest.raises(TooMany, match="busy"):
            async with desk.server.guard.sign_in("ann", "10.0.0.1"):
                raise TooMany("busy")


async def test_large_headers_are_refused(desk: Desk) -> None:
    answer = await desk.get("/v1/me", headers={"x-large": "x" * 70_000})
    assert answer.status_code == 413


def test_a_head_without_an_end_is_cut_off(live: Live) -> None:
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as raw:
        raw.sendall(b"GET /healthz HTTP/1.1\r\nx-endless: ")
        with pytest.raises(ConnectionError):
            raw.sendall(b"x" * 20_000_000)
    assert httpx2.get(f"{live.url}/healthz", timeout=PATIENCE_S).status_code == 200
