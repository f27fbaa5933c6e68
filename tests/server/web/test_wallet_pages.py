"""Wallets in the page: sign-in and linking. A relayed, repeated or repurposed signature is refused; each has a control."""

from __future__ import annotations

import pytest

from gpool.wallet.signing import WalletKey
from tests.server.identity_routes.people_desk import PASSWORD, registered, signed, wallet
from tests.server.server_desk import Desk
from tests.server.web.browser import Browser

pytestmark = pytest.mark.anyio


async def proved(browser: Browser, key: WalletKey) -> dict[str, object]:
    """Message of the server, signed."""
    fields: dict[str, object] = {"address": key.address.lower()}
    answer = await browser.post("/sign-in/wallet/message", fields, accept="application/json")
    assert answer.status_code == 200, answer.text
    text = answer.json()["message"]
    return {"message": text, "signature": str(key.sign(text.encode()))}


async def test_a_wallet_signs_in_and_its_signature_works_once(desk: Desk) -> None:
    key, browser = wallet(1), Browser(desk)
    proof = await proved(browser, key)
    answer = await browser.post("/sign-in/wallet", {**proof, "next": "/account"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/account")
    assert key.address in (await browser.get("/account")).text
    thief = Browser(desk)
    again = await thief.post("/sign-in/wallet", proof)
    assert again.status_code == 401
    assert not thief.cookies


async def test_line_ends_of_a_browsers_form_do_not_change_the_message(desk: Desk) -> None:
    browser = Browser(desk)
    proof = await proved(browser, wallet(1))
    proof["message"] = str(proof["message"]).replace("\n", "\r\n")
    assert (await browser.post("/sign-in/wallet", proof)).status_code == 303


async def test_the_signature_of_another_key_is_refused(desk: Desk) -> None:
    browser = Browser(desk)
    proof = await proved(browser, wallet(1))
    proof["signature"] = str(wallet(2).sign(str(proof["message"]).encode()))
    assert (await browser.post("/sign-in/wallet", proof)).status_code == 401
    assert (await browser.post("/sign-in/wallet", await proved(browser, wallet(1)))).is_redirect


async def test_a_signature_that_another_pool_collected_is_refused(desk: Desk) -> None:
    """Finding 3: a hostile pool passes this pool's nonce on, and sends the signature with its own address as host."""
    evil = "10.0.0.7:8642"
    relay = Browser(desk, f"http://{evil}")
    proof = await signed(desk, wallet(1), domain=evil, uri=f"http://{evil}")
    fields: dict[str, object] = dict(proof)
    assert (await relay.post("/sign-in/wallet", fields)).status_code == 401
    assert not relay.cookies
    own: dict[str, object] = dict(await signed(desk, wallet(1)))
    assert (await Browser(desk).post("/sign-in/wallet", own)).status_code == 303


async def test_messages_are_written_at_the_public_origin_only(desk: Desk) -> None:
    fields: dict[str, object] = {"address": wallet(1).address}
    away = Browser(desk, "http://10.0.0.7:8642")
    answer = await away.post("/sign-in/wallet/message", fields, accept="application/json")
    assert answer.status_code == 400
    assert desk.server.settings.origin in answer.json()["detail"]
    assert f'href="{desk.server.settings.origin}/sign-in"' in (await away.get("/sign-in")).text
    assert "data-wallets" in (await Browser(desk).get("/sign-in")).text


async def test_other_sites_get_no_message_and_cannot_sign_in(desk: Desk) -> None:
    browser = Browser(desk)
    fields: dict[str, object] = {"address": wallet(1).address}
    evil = "https://evil.example"
    asked = await browser.post("/sign-in/wallet/message", fields, origin=evil)
    assert asked.status_code == 403
    proof = await proved(browser, wallet(1))
    assert (await browser.post("/sign-in/wallet", proof, origin=evil)).status_code == 403
    assert not browser.cookies
    assert (await browser.post("/sign-in/wallet", proof)).status_code == 303


async def test_text_that_is_no_address_is_refused(desk: Desk) -> None:
    address: dict[str, object] = {"address": "no address"}
    answer = await Browser(desk).post("/sign-in/wallet/message", address, accept="application/json")
    assert answer.status_code == 400
    assert "is not an address" in answer.json()["detail"]


async def test_a_wallet_is_linked_with_the_password_and_signs_in_to_that_account(
    desk: Desk,
) -> None:
    await registered(desk, "ada")
    browser, key = Browser(desk), wallet(3)
    await browser.sign_in("ada")
    message = await browser.post(
        "/account/wallets/message",
        {"csrf": await browser.token(), "address": key.address},
        accept="application/json",
    )
    text = message.json()["message"]
    assert "Link this wallet to gpool account ada." in text
    proof = {"message": text, "signature": str(key.sign(text.encode()))}
    done = await browser.submit("/account/wallets", **proof, password=PASSWORD)
    assert (done.status_code, done.headers["location"]) == (303, "/account?done=wallet")
    assert key.address in (await browser.get("/account")).text
    other = Browser(desk)
    assert (await other.post("/sign-in/wallet", await proved(other, key))).status_code == 303
    assert "<h1>ada</h1>" in (await other.get("/account")).text


async def test_a_sign_in_signature_or_a_wrong_password_links_nothing(desk: Desk) -> None:
    """Finding 18: a signature has one purpose."""
    await registered(desk, "mallory")
    browser, victim = Browser(desk), wallet(4)
    await browser.sign_in("mallory")
    stolen = await proved(Browser(desk), victim)
    refused = await browser.submit("/account/wallets", **stolen, password=PASSWORD)
    assert refused.status_code == 401
    link: dict[str, object] = dict(await signed(desk, victim, "link", "mallory"))
    wrong = await browser.submit("/account/wallets", **link, password="not the password")
    assert wrong.status_code == 403
    assert victim.address not in (await browser.get("/account")).text
    link = dict(await signed(desk, victim, "link", "mallory"))
    assert (await browser.submit("/account/wallets", **link, password=PASSWORD)).is_redirect
