"""Journeys of coming in and going out: passwords, wallets, refresh tokens, sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpool.server.app import open_server
from gpool.server.settings import Settings
from gpool.wallet import signin
from gpool.wallet.signing import WalletKey
from tests.server.identity_routes.people_desk import (
    PASSWORD,
    Somebody,
    bearer,
    registered,
    signed,
    signed_in,
    signed_in_by,
    wallet,
)
from tests.server.server_desk import Desk, StoppedClock, open_desk

pytestmark = pytest.mark.anyio


async def test_somebody_registers_signs_in_and_runs_a_task(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    me = (await ada.ask("GET", "/v1/me")).json()
    assert (me["name"], me["has_password"], me["wallets"]) == ("ada", True, [])
    assert me["permissions"] == ["consumer", "provider"]
    submitted = await ada.ask("POST", "/v1/tasks", {"command": ["true"]})
    assert submitted.status_code == 202
    task = submitted.json()["ids"][0]
    assert (await ada.ask("GET", f"/v1/tasks/{task}")).json()["user"] == ada.id


async def test_a_wrong_password_and_an_unknown_name_are_answered_alike(desk: Desk) -> None:
    await registered(desk, "ada")
    answers = [
        await desk.bare.post("/v1/auth/password", json={"name": name, "password": "not this one"})
        for name in ("ada", "nobody", "operator")  # the operator has no password
    ]
    assert {answer.status_code for answer in answers} == {401}
    assert len({answer.text for answer in answers}) == 1


@pytest.mark.parametrize(
    ("name", "password"),
    [
        ("ada", "short"),
        ("ada", "x" * 2000),
        ("Ada", PASSWORD),
        ("0xada", PASSWORD),
        ("ada lovelace", PASSWORD),
        ("a", PASSWORD),
        ("ada-lovelace", "ada-lovelace"),
    ],
)
async def test_bad_names_and_passwords_are_refused(desk: Desk, name: str, password: str) -> None:
    answer = await desk.bare.post("/v1/users", json={"name": name, "password": password})
    assert answer.status_code == 400
    assert PASSWORD not in answer.text


async def test_a_name_is_given_once(desk: Desk) -> None:
    await registered(desk, "ada")
    again = await desk.bare.post("/v1/users", json={"name": "ada", "password": PASSWORD})
    assert again.status_code == 409


async def test_tokens_are_not_kept_by_caches(desk: Desk) -> None:
    await registered(desk, "ada")
    answer = await desk.bare.post("/v1/auth/password", json={"name": "ada", "password": PASSWORD})
    assert answer.headers["cache-control"] == "no-store"
    assert answer.json()["token_type"] == "Bearer"


# ---- refresh tokens


async def test_each_refresh_gives_the_next_token(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    seen = {ada.tokens["refresh_token"]}
    for _ in range(5):
        desk.clock.advance(60)
        assert (await ada.refresh()).status_code == 200
        seen.add(ada.tokens["refresh_token"])
        assert (await ada.ask("GET", "/v1/me")).status_code == 200
    assert len(seen) == 6


async def test_a_lost_answer_signs_nobody_out(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    old = {"refresh_token": ada.tokens["refresh_token"]}
    first = await desk.bare.post("/v1/auth/refresh", json=old)  # lost on the way
    desk.clock.advance(29)
    again = await desk.bare.post("/v1/auth/refresh", json=old)
    assert again.status_code == 200
    assert again.json()["refresh_token"] == first.json()["refresh_token"]


async def test_a_reused_token_ends_the_sign_in_for_both(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    stolen = {"refresh_token": ada.tokens["refresh_token"]}
    await ada.refresh()
    await ada.refresh()
    assert (await desk.bare.post("/v1/auth/refresh", json=stolen)).status_code == 401
    assert (await ada.refresh()).status_code == 401
    assert (await ada.ask("GET", "/v1/me")).status_code == 401
    assert (await signed_in(desk, "ada")).id == ada.id


async def test_an_access_token_expires(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    desk.clock.advance(ada.tokens["expires_in"] + 1)
    assert (await ada.ask("GET", "/v1/me")).status_code == 401
    assert (await ada.refresh()).status_code == 200
    assert (await ada.ask("GET", "/v1/me")).status_code == 200


@pytest.mark.parametrize(
    "token", ["", "gpr_x", "gpk_x", "gpr_" + "0" * 26 + ".0." + "A" * 43, "x" * 150]
)
async def test_made_up_refresh_tokens_are_refused(desk: Desk, token: str) -> None:
    answer = await desk.bare.post("/v1/auth/refresh", json={"refresh_token": token})
    assert answer.status_code == 401


async def test_a_restarted_server_knows_its_tokens(data: Path) -> None:
    clock = StoppedClock()
    desk = await open_desk(data, clock)
    ada = await registered(desk, "ada")
    await desk.server.store.close()
    desk = await open_desk(data, clock)
    ada.desk = desk
    assert (await ada.ask("GET", "/v1/me")).status_code == 200
    assert (await ada.refresh()).status_code == 200
    await desk.server.store.close()


# ---- signing out


async def test_signing_out_ends_the_tokens_at_once(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    assert (await ada.ask("POST", "/v1/auth/logout")).status_code == 204
    assert (await ada.ask("GET", "/v1/me")).status_code == 401
    assert (await ada.refresh()).status_code == 401


async def test_a_refresh_token_alone_signs_out(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    token = {"refresh_token": ada.tokens["refresh_token"]}
    assert (await desk.bare.post("/v1/auth/logout", json=token)).status_code == 204
    assert (await ada.ask("GET", "/v1/me")).status_code == 401
    assert (await desk.bare.post("/v1/auth/logout", json=token)).status_code == 204


async def test_a_refresh_token_signs_out_beside_an_api_key_and_an_unknown_one_is_answered_alike(
    desk: Desk,
) -> None:
    ada = await registered(desk, "ada")
    key = bearer((await ada.ask("POST", "/v1/keys", {"name": "all"})).json()["key"])
    for token in ("not a token", ada.tokens["refresh_token"], ada.tokens["refresh_token"]):
        answer = await desk.bare.post("/v1/auth/logout", json={"refresh_token": token}, headers=key)
        assert (answer.status_code, answer.content) == (204, b""), answer.text
    assert (await ada.ask("GET", "/v1/me")).status_code == 401
    assert (await desk.bare.get("/v1/me", headers=key)).status_code == 200  # the key stays


async def test_nobody_signs_somebody_else_out(desk: Desk) -> None:
    ada, eve = await registered(desk, "ada"), await registered(desk, "eve")
    token = {"refresh_token": ada.tokens["refresh_token"]}
    answer = await eve.ask("POST", "/v1/auth/logout", token)
    assert answer.status_code == 404
    assert (await ada.ask("GET", "/v1/me")).status_code == 200


async def test_signing_out_everywhere_ends_every_session(desk: Desk) -> None:
    here = await registered(desk, "ada")
    there = await signed_in(desk, "ada")
    assert len((await here.ask("GET", "/v1/sessions")).json()["items"]) == 2
    await here.ask("POST", "/v1/auth/logout", {"everywhere": True})
    assert (await there.ask("GET", "/v1/me")).status_code == 401


async def test_a_session_is_ended_from_another_one(desk: Desk) -> None:
    here = await registered(desk, "ada")
    there = await signed_in(desk, "ada")
    listed = (await here.ask("GET", "/v1/sessions")).json()["items"]
    other = next(session["id"] for session in listed if not session["current"])
    assert (await here.ask("DELETE", f"/v1/sessions/{other}")).status_code == 204
    assert (await there.ask("GET", "/v1/me")).status_code == 401
    assert (await here.ask("GET", "/v1/me")).status_code == 200


async def test_another_replica_hears_of_a_sign_out_within_five_seconds(data: Path) -> None:
    clock = StoppedClock()
    one = await open_desk(data, clock)
    other = await open_desk(data, clock)
    ada = await registered(one, "ada")
    assert (await other.bare.get("/v1/me", headers=ada.headers)).status_code == 200
    await ada.ask("POST", "/v1/auth/logout")
    assert (await other.bare.get("/v1/me", headers=ada.headers)).status_code == 200  # remembered
    clock.advance(5)
    assert (await other.bare.get("/v1/me", headers=ada.headers)).status_code == 401
    await one.server.store.close()
    await other.server.store.close()


# ---- passwords


async def test_a_changed_password_ends_the_other_sign_ins(desk: Desk) -> None:
    here = await registered(desk, "ada")
    there = await signed_in(desk, "ada")
    wrong = await here.ask(
        "PUT", "/v1/me/password", {"old": "not it at all", "new": "another one 22"}
    )
    assert wrong.status_code == 403
    right = await here.ask("PUT", "/v1/me/password", {"old": PASSWORD, "new": "another one 22"})
    assert right.status_code == 204
    assert (await there.ask("GET", "/v1/me")).status_code == 401
    assert (await here.ask("GET", "/v1/me")).status_code == 200
    assert (await signed_in(desk, "ada", "another one 22")).id == here.id


# ---- registration


@pytest.mark.parametrize(
    ("host", "policy"), [("127.0.0.1", "open"), ("::1", "open"), ("0.0.0.0", "invite")]
)
def test_registration_is_by_invite_off_loopback(host: str, policy: str) -> None:
    assert Settings(host=host).registers == policy


@pytest.mark.parametrize("policy", ["invite", "closed"])
async def test_without_an_invite_nobody_registers_where_it_is_not_open(
    data: Path, policy: str
) -> None:
    desk = await open_desk(data, StoppedClock(), registration=policy)
    refused = await desk.bare.post("/v1/users", json={"name": "ada", "password": PASSWORD})
    assert refused.status_code == 403
    by_wallet = await desk.bare.post("/v1/auth/wallet", json=await signed(desk, wallet(1)))
    assert by_wallet.status_code == 403
    made = (await desk.post("/v1/users/invites", {"permissions": ["consumer"]})).json()
    ada = await registered(desk, "ada", invite=made["token"])
    assert (await ada.ask("GET", "/v1/me")).json()["permissions"] == ["consumer"]
    again = await desk.bare.post(
        "/v1/users", json={"name": "eve", "password": PASSWORD, "invite": made["token"]}
    )
    assert again.status_code == 403
    await desk.server.store.close()


async def test_an_invite_expires(data: Path) -> None:
    desk = await open_desk(data, StoppedClock(), registration="invite")
    made = (await desk.post("/v1/users/invites", {"expires_in_s": 60})).json()
    desk.clock.advance(61)
    answer = await desk.bare.post(
        "/v1/users", json={"name": "eve", "password": PASSWORD, "invite": made["token"]}
    )
    assert answer.status_code == 403
    await desk.server.store.close()


# ---- wallets


async def test_the_first_wallet_sign_in_makes_the_account(desk: Desk) -> None:
    one = await signed_in_by(desk, wallet(1))
    assert one.name == wallet(1).address.lower()
    me = (await one.ask("GET", "/v1/me")).json()
    assert me["wallets"] == [wallet(1).address]
    assert me["payout_wallet"] == wallet(1).address
    assert (await signed_in_by(desk, wallet(1))).id == one.id


async def test_a_signed_message_works_once(desk: Desk) -> None:
    message = await signed(desk, wallet(1))
    assert (await desk.bare.post("/v1/auth/wallet", json=message)).status_code == 200
    assert (await desk.bare.post("/v1/auth/wallet", json=message)).status_code == 401


async def test_a_nonce_expires(desk: Desk) -> None:
    message = await signed(desk, wallet(1))
    desk.clock.advance(desk.server.settings.nonce_s + 1)
    assert (await desk.bare.post("/v1/auth/wallet", json=message)).status_code == 401


@pytest.mark.parametrize(
    "changes",
    [
        {"domain": "elsewhere.example"},
        {"uri": "http://elsewhere.example"},
        {"chain_id": 5},
        {"nonce": "madeUpByMyself12345"},
        {"statement": "Link this wallet to gpool account mallory."},
        {"statement": None},
    ],
)
async def test_a_message_for_somewhere_else_is_refused(
    desk: Desk, changes: dict[str, object]
) -> None:
    message = await signed(desk, wallet(1), **changes)
    assert (await desk.bare.post("/v1/auth/wallet", json=message)).status_code == 401


async def test_anothers_signature_is_refused(desk: Desk) -> None:
    message = await signed(desk, wallet(1))
    message["signature"] = str(wallet(2).sign(message["message"].encode()))
    assert (await desk.bare.post("/v1/auth/wallet", json=message)).status_code == 401


async def test_linking_needs_proof_of_both(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    bare = await ada.ask("POST", "/v1/wallets", await signed(desk, wallet(1), "link", "ada"))
    assert bare.status_code == 400
    wrong = {**await signed(desk, wallet(1), "link", "ada"), "password": "not the password"}
    assert (await ada.ask("POST", "/v1/wallets", wrong)).status_code == 403
    right = {**await signed(desk, wallet(1), "link", "ada"), "password": PASSWORD}
    linked = await ada.ask("POST", "/v1/wallets", right)
    assert linked.status_code == 201
    assert linked.json()["address"] == wallet(1).address
    assert (await signed_in_by(desk, wallet(1))).id == ada.id


async def linking(one: Somebody, by: WalletKey) -> dict[str, Any]:
    """Request to link the second wallet, approved by another one."""
    message = await signed(one.desk, wallet(2), "link", one.name)
    return {**message, "proof": await signed(one.desk, by, "approve", one.name)}


async def test_a_signature_is_good_for_its_purpose_and_account_only(desk: Desk) -> None:
    """Finding 18: a sign-in signature linked the victim's wallet to the account of whoever passed it on."""
    mallory = await registered(desk, "mallory")
    victim = wallet(3)
    for purpose, account in (
        ("sign_in", ""),
        ("unlink", "mallory"),
        ("approve", "mallory"),
        ("link", "victor"),
    ):
        taken = await signed(desk, victim, purpose, account)
        answer = await mallory.ask("POST", "/v1/wallets", {**taken, "password": PASSWORD})
        assert answer.status_code == 401, purpose
        assert "here it must say" in answer.json()["detail"]
    for purpose in ("link", "unlink", "approve"):
        taken = await signed(desk, victim, purpose, "mallory")
        assert (await desk.bare.post("/v1/auth/wallet", json=taken)).status_code == 401
    # A nonce of one purpose under the statement of another.
    statement = signin.statement_of(signin.WalletPurpose.LINK, "mallory")
    mixed = await signed(desk, victim, "sign_in", statement=statement)
    answer = await mallory.ask("POST", "/v1/wallets", {**mixed, "password": PASSWORD})
    assert (answer.status_code, "not for 'link'" in answer.json()["detail"]) == (401, True)
    # The control: the message that names purpose and account is accepted.
    consent = {**await signed(desk, victim, "link", "mallory"), "password": PASSWORD}
    assert (await mallory.ask("POST", "/v1/wallets", consent)).status_code == 201


async def test_a_second_wallet_is_linked_with_the_first(desk: Desk) -> None:
    one = await signed_in_by(desk, wallet(1))
    by_itself = await linking(one, by=wallet(2))
    assert (await one.ask("POST", "/v1/wallets", by_itself)).status_code == 403
    both = await linking(one, by=wallet(1))
    assert (await one.ask("POST", "/v1/wallets", both)).status_code == 201
    assert (await signed_in_by(desk, wallet(2))).id == one.id


async def test_a_wallet_belongs_to_one_account(desk: Desk) -> None:
    await signed_in_by(desk, wallet(1))
    ada = await registered(desk, "ada")
    taken = {**await signed(desk, wallet(1), "link", "ada"), "password": PASSWORD}
    assert (await ada.ask("POST", "/v1/wallets", taken)).status_code == 409


async def test_unlinking_needs_proof_of_both_and_leaves_a_way_in(desk: Desk) -> None:
    one = await signed_in_by(desk, wallet(1))
    path = f"/v1/wallets/{wallet(1).address}"
    last = {
        **await signed(desk, wallet(1), "unlink", one.name),
        "proof": await signed(desk, wallet(1), "approve", one.name),
    }
    assert (await one.ask("DELETE", path, last)).status_code == 403
    set_password = await one.ask("PUT", "/v1/me/password", {"new": PASSWORD})
    assert set_password.status_code == 204
    only_password = {"message": "x", "signature": "0x", "password": PASSWORD}
    assert (await one.ask("DELETE", path, only_password)).status_code == 400
    both = {**await signed(desk, wallet(1), "unlink", one.name), "password": PASSWORD}
    assert (await one.ask("DELETE", path, both)).status_code == 204
    again = await signed_in_by(desk, wallet(1))
    assert again.id != one.id  # the wallet is nobody's now: its next sign-in makes an account


async def test_the_payout_wallet_is_chosen(desk: Desk) -> None:
    one = await signed_in_by(desk, wallet(1))
    both = await linking(one, by=wallet(1))
    await one.ask("POST", "/v1/wallets", both)
    path = f"/v1/wallets/{wallet(2).address}"
    assert (await one.ask("PATCH", path, {"payout": True})).json()["payout"] is True
    assert (await one.ask("GET", "/v1/me")).json()["payout_wallet"] == wallet(2).address
    assert (await one.ask("PATCH", path, {"payout": False})).json()["payout"] is False
    assert (await one.ask("GET", "/v1/me")).json()["payout_wallet"] is None


# ---- signing keys


async def test_the_public_keys_are_published(desk: Desk) -> None:
    keys = (await desk.bare.get("/.well-known/jwks.json")).json()["keys"]
    assert [key["crv"] for key in keys] == ["Ed25519"]
    assert "d" not in keys[0]


async def test_tokens_outlive_a_rotation_of_the_keys(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    signing = desk.server.identity.signing
    assert await signing.rotate(desk.server.now)
    desk.clock.advance(desk.server.settings.signing_key_lead_s)
    assert (await ada.ask("GET", "/v1/me")).status_code == 200  # by the old key
    new = await signed_in(desk, "ada")
    assert new.tokens["access_token"].split(".")[0] != ada.tokens["access_token"].split(".")[0]
    assert (await new.ask("GET", "/v1/me")).status_code == 200
    desk.clock.advance(2000)
    await signing.look(desk.server.now)
    assert len((await desk.bare.get("/.well-known/jwks.json")).json()["keys"]) == 1


async def test_keys_rotate_by_themselves(data: Path) -> None:
    clock = StoppedClock()
    server = await open_server(
        Settings(data=data, rotate_signing_keys_s=1000, signing_key_lead_s=10), clock
    )
    before = server.identity.signing.keys
    clock.advance(1001)
    await server.identity.signing.look(server.now)
    assert len(server.identity.signing.keys.keys) == 2
    assert before.keys[0].kid == server.identity.signing.keys.signer(server.now).kid
    clock.advance(10)
    assert before.keys[0].kid != server.identity.signing.keys.signer(server.now).kid
    await server.store.close()


async def test_a_token_is_not_a_key_and_a_key_is_not_a_token(desk: Desk) -> None:
    for wrong in ("", "gpk_", "x", "a.b.c", "gpr_x", "gpk_" + "x" * 43):
        assert (await desk.bare.get("/v1/me", headers=bearer(wrong))).status_code == 401
