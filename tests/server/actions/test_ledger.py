"""The ledger on a real server: the loop that seals and expires, refunds, metrics, export and deletion."""

from __future__ import annotations

import json

import pytest

from gpool.server.actions.money.sealing import SealLedger
from tests.server.identity_routes.people_desk import PASSWORD, registered
from tests.server.server_desk import Desk
from tests.tools.ledger_charges import charged, set_aside

pytestmark = pytest.mark.anyio


async def checked(desk: Desk, query: str = "") -> dict[str, object]:
    found: dict[str, object] = (await desk.get(f"/v1/admin/ledger/check{query}")).json()
    return found


async def test_the_loop_seals_transfers_and_the_books_verify_against_an_anchor(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    await charged(desk.server, ada.id, 100)
    assert (await checked(desk))["unsealed"] == 3
    await SealLedger(desk.server).run_once(desk.server.now)
    found = await checked(desk)
    assert (found["sound"], found["transfers"], found["unsealed"]) == (True, 3, 0)
    head = found["head"]
    await charged(desk.server, ada.id, 100, "second")
    await SealLedger(desk.server).run_once(desk.server.now)
    assert (await checked(desk, f"?anchor={head}"))["sound"] is True
    wrong = await checked(desk, f"?anchor=1:{'0' * 64}")
    assert wrong["findings"] == [{"thing": "block 1", "why": "it differs from its anchor"}]
    assert (await desk.get("/v1/admin/ledger/check?anchor=x")).status_code == 400


async def test_a_charge_is_refunded_up_to_its_amount_and_recorded(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    charge = await charged(desk.server, ada.id, 100)
    wanted = {"charge": charge, "amount_microcredits": 60, "note": "a fault"}
    assert (await desk.post("/v1/admin/ledger/refunds", wanted)).status_code == 201
    refused = await desk.post("/v1/admin/ledger/refunds", wanted)
    assert refused.status_code == 409
    assert "left of the charge" in refused.json()["detail"]
    found = (await ada.ask("GET", "/v1/ledger")).json()
    assert (found["balance_microcredits"], found["earned_microcredits"]) == (160, 100)
    newest = (await desk.get("/v1/audit?limit=1")).json()["items"][0]
    assert (newest["action"], newest["thing"]) == ("ledger.refund", charge)
    assert newest["facts"]["note"] == "a fault"


async def test_uncleared_funds_are_measured_and_expire(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    await set_aside(desk.server, ada.id, 70, for_s=120)
    loop = SealLedger(desk.server)
    desk.clock.advance(60)
    await loop.run_once(desk.server.now)
    page = (await desk.get("/metrics")).text
    assert "gpool_ledger_uncleared_microcredits 70.0" in page
    assert "gpool_ledger_uncleared_oldest_seconds 60.0" in page
    desk.clock.advance(120)
    await loop.run_once(desk.server.now)
    page = (await desk.get("/metrics")).text
    assert "gpool_ledger_uncleared_microcredits 0.0" in page
    assert "gpool_ledger_uncleared_oldest_seconds 0.0" in page
    found = (await ada.ask("GET", "/v1/ledger")).json()
    assert (found["balance_microcredits"], found["pending_microcredits"]) == (70, 0)
    assert [one["kind"] for one in found["entries"]] == ["expire", "reserve", "grant"]


async def test_entries_are_paged_newest_first(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    for number in range(5):
        body = {"to": ada.id, "amount_microcredits": 1, "id": f"g{number}"}
        assert (await desk.post("/v1/admin/ledger/grants", body)).json()["outcome"] == "moved"
    page = (await ada.ask("GET", "/v1/ledger?limit=3")).json()
    assert [one["transfer"] for one in page["entries"]] == ["g4", "g3", "g2"]
    page = (await ada.ask("GET", f"/v1/ledger?limit=3&cursor={page['next']}")).json()
    assert [one["transfer"] for one in page["entries"]] == ["g1", "g0"]
    assert page["next"] is None


async def test_an_account_exports_its_entries_and_its_deletion_keeps_the_books(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    await charged(desk.server, ada.id, 100)
    lines = (await ada.ask("GET", "/v1/me/export")).text.splitlines()
    entries = [one for one in map(json.loads, lines) if one["kind"] == "ledger_entry"]
    assert sum(one["amount_microcredits"] for one in entries if one["account"] == "user") == 100
    assert {one["account"] for one in entries} == {"user", "pending", "owner"}
    assert (await ada.ask("DELETE", "/v1/me", {"password": PASSWORD})).status_code < 300
    gone = await desk.get(f"/v1/ledger?user={ada.id}")
    assert gone.status_code == 404
    found = await checked(desk)
    assert (found["sound"], found["transfers"]) == (True, 3)


async def test_amounts_that_are_no_integers_are_refused(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    for amount in (1.5, 1.0, "1", 0, -1, 10**16, True):
        body = {"to": ada.id, "amount_microcredits": amount}
        assert (await desk.post("/v1/admin/ledger/grants", body)).status_code == 400
    assert (await checked(desk))["transfers"] == 0
