"""Browser sessions: sign-in, cookies, form tokens, one-time links, sign-out. Each attack has a control."""

from __future__ import annotations

import pytest

from gpool.core.model import Permission
from gpool.server.api.routing import endpoints
from tests.server.identity_routes.people_desk import PASSWORD, registered
from tests.server.server_desk import Desk
from tests.server.web.browser import Browser

pytestmark = pytest.mark.anyio
COOKIE = "gpool-8642"


async def visiting(desk: Desk, name: str = "ada") -> Browser:
    await registered(desk, name)
    browser = Browser(desk)
    answer = await browser.sign_in(name)
    assert (answer.status_code, answer.headers["location"]) == (303, "/"), answer.text
    return browser


async def test_a_sign_in_opens_a_session_that_rest_routes_do_not_accept(desk: Desk) -> None:
    browser = await visiting(desk)
    assert (await browser.get("/account")).status_code == 200
    assert (await browser.get("/v1/me", accept="application/json")).status_code == 401


async def test_the_cookie_is_unreadable_for_scripts_and_for_this_site_only(desk: Desk) -> None:
    await registered(desk, "ada")
    header = (await Browser(desk).sign_in("ada")).headers["set-cookie"].lower()
    assert "httponly" in header
    assert "samesite=strict" in header
    assert "path=/" in header
    assert "secure" not in header
    assert "domain" not in header
    secure = (await Browser(desk, "https://127.0.0.1:8642").sign_in("ada")).headers["set-cookie"]
    assert secure.startswith("__Host-gpool=")
    assert "secure" in secure.lower()
    assert "domain" not in secure.lower()


async def test_wrong_passwords_are_said_on_the_page(desk: Desk) -> None:
    await registered(desk, "ada")
    browser = Browser(desk)
    answer = await browser.sign_in("ada", "not the password")
    assert answer.status_code == 401
    assert "the name or the password is wrong" in answer.text
    assert not browser.cookies


async def test_pages_ask_for_a_sign_in_and_return_to_the_page(desk: Desk) -> None:
    answer = await Browser(desk).get("/account?tab=keys")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/sign-in?next=/account%3Ftab%3Dkeys"
    await registered(desk, "ada")
    browser = Browser(desk)
    answer = await browser.sign_in("ada", next="/account?tab=keys")
    assert answer.headers["location"] == "/account?tab=keys"


async def test_a_sign_in_never_redirects_to_another_site(desk: Desk) -> None:
    await registered(desk, "ada")
    for target in ("//evil.example", "https://evil.example", "/\\evil.example"):
        answer = await Browser(desk).sign_in("ada", next=target)
        assert answer.headers["location"] == "/"


async def test_a_signed_out_cookie_is_worthless(desk: Desk) -> None:
    browser = await visiting(desk)
    thief = Browser(desk, cookies=dict(browser.cookies))
    assert (await thief.get("/account")).status_code == 200
    assert (await browser.submit("/sign-out")).status_code == 303
    assert not browser.cookies
    assert (await thief.get("/account")).status_code == 303


async def test_signing_out_everywhere_ends_other_browsers(desk: Desk) -> None:
    browser = await visiting(desk)
    other = Browser(desk)
    await other.sign_in("ada")
    await browser.submit("/sign-out", everywhere="1")
    assert (await other.get("/account")).status_code == 303


async def test_sessions_expire_without_use_and_live_with_it(desk: Desk) -> None:
    browser = await visiting(desk)
    for _ in range(3):
        desk.clock.advance(20 * 86_400)
        assert (await browser.get("/account")).status_code == 200
    desk.clock.advance(31 * 86_400)
    assert (await browser.get("/account")).status_code == 303


# ---- forms of other sites


def forms() -> list[str]:
    """Forms of a session; those of the sign-in have no token yet."""
    open_forms = ("/sign-in", "/register", "/in", "/reset", "/reset/password")
    return sorted(
        each.path for each in endpoints() if each.is_page and each.method == "POST"
        and each.path not in open_forms and not each.path.startswith("/sign-in/")
    )  # fmt: skip


async def test_every_form_refuses_other_sites_and_missing_tokens(desk: Desk) -> None:
    browser = await visiting(desk)
    token = await browser.token()
    assert "/sign-out" in forms()
    for path in forms():
        url = path.format(id="t-0000000000000", gpu="g-0000000000000", sha256="0" * 64)
        for sent, headers in (
            ({}, {}),
            ({"csrf": "x" * 43}, {}),
            ({"csrf": token}, {"origin": "https://evil.example", "sec_fetch_site": "cross-site"}),
            ({"csrf": token}, {"origin": "null"}),
            ({"csrf": token}, {"sec_fetch_site": "same-site"}),
        ):
            answer = await browser.post(url, sent, **headers)
            assert answer.status_code == 403, (path, sent, headers)
            assert "not sent by a page of this pool" in answer.text
    # the control: with origin and token the same form is carried out
    assert (await browser.post("/sign-out", {"csrf": token})).status_code == 303


async def test_the_token_of_another_session_is_refused(desk: Desk) -> None:
    ada, eve = await visiting(desk), await visiting(desk, "eve")
    answer = await ada.post("/sign-out", {"csrf": await eve.token()})
    assert answer.status_code == 403


async def test_other_sites_cannot_sign_a_browser_in(desk: Desk) -> None:
    await registered(desk, "eve")
    fields: dict[str, object] = {"name": "eve", "password": PASSWORD}
    browser = Browser(desk)
    answer = await browser.post("/sign-in", fields, origin="https://evil.example")
    assert answer.status_code == 403
    assert not browser.cookies
    assert (await browser.post("/sign-in", fields)).status_code == 303


# ---- cookies of other services


async def test_a_planted_second_cookie_is_not_followed(desk: Desk) -> None:
    browser, eve = await visiting(desk), await visiting(desk, "eve")
    mine, planted = browser.cookies[COOKIE], eve.cookies[COOKIE]
    for pair in ((mine, planted), (planted, mine)):
        both = "; ".join(f"{COOKIE}={value}" for value in pair)
        assert (await browser.get("/account", cookie=both)).status_code == 303
    assert (await browser.get("/account", cookie=f"{COOKIE}={mine}")).status_code == 200


async def test_an_unprefixed_cookie_is_not_accepted_under_tls(desk: Desk) -> None:
    """A neighbour of the domain can set plain names; the prefix is reserved to the host itself."""
    eve = await visiting(desk, "eve")
    value = eve.cookies[COOKIE]
    secure = Browser(desk, "https://127.0.0.1:8642")
    assert (await secure.get("/account", cookie=f"{COOKIE}={value}")).status_code == 303
    assert (await secure.get("/account", cookie=f"gpool={value}")).status_code == 303
    assert (await secure.get("/account", cookie=f"__Host-gpool={value}")).status_code == 200


async def test_a_rebound_name_gets_no_session(desk: Desk) -> None:
    browser = await visiting(desk)
    evil = Browser(desk, "http://evil.example:8642", cookies=dict(browser.cookies))
    assert (await evil.get("/account")).status_code == 303
    assert (await evil.sign_in("ada")).status_code == 403


async def test_forged_cookies_are_refused(desk: Desk) -> None:
    browser = await visiting(desk)
    value = browser.cookies[COOKIE]
    for forged in (value[:-1] + ("A" if value[-1] != "A" else "B"), "gpb_x", "", value + "x"):
        assert (await browser.get("/account", cookie=f"{COOKIE}={forged}")).status_code == 303


# ---- one-time links


async def link(desk: Desk) -> str:
    answer = await desk.post("/v1/auth/links")
    assert answer.status_code == 201, answer.text
    return str(answer.json()["path"])


async def test_a_link_signs_its_operator_in_once(desk: Desk) -> None:
    path = await link(desk)
    browser = Browser(desk)
    shown = await browser.get(path)
    code = path.removeprefix("/in/")
    assert shown.status_code == 200
    assert code in shown.text
    assert not browser.cookies
    assert (await browser.post("/in", {"code": code})).status_code == 303
    assert "operator" in (await browser.get("/account")).text
    again = await Browser(desk).post("/in", {"code": code})
    assert again.status_code == 401
    assert "used before" in again.text


async def test_a_link_expires_and_opens_on_loopback_only(desk: Desk) -> None:
    code = (await link(desk)).removeprefix("/in/")
    far = Browser(desk, address="10.0.0.9")
    assert (await far.post("/in", {"code": code})).status_code == 403
    desk.clock.advance(601)
    assert (await Browser(desk).post("/in", {"code": code})).status_code == 401


async def test_only_operators_make_links(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    assert (await ada.ask("POST", "/v1/auth/links", {})).status_code == 403
    assert Permission.OPERATOR  # the control is `link`, with the operator's key


# ---- headers


async def test_pages_cannot_be_framed_and_run_no_foreign_script(desk: Desk) -> None:
    browser = await visiting(desk)
    for path in ("/sign-in", "/account", "/static/gpool.css", "/in/x"):
        headers = (await browser.get(path)).headers
        policy = headers["content-security-policy"]
        assert "frame-ancestors 'none'" in policy
        assert "'unsafe" not in policy
        assert "script-src 'self'" in policy
        assert "default-src 'none'" in policy
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"


async def test_registration_signs_in_where_it_is_open(desk: Desk) -> None:
    browser = Browser(desk)
    fields: dict[str, object] = {"name": "new", "password": PASSWORD, "again": "another"}
    answer = await browser.post("/register", fields)
    assert answer.status_code == 400
    assert "the two passwords differ" in answer.text
    answer = await browser.post("/register", {**fields, "again": PASSWORD})
    assert answer.status_code == 303
    assert "new" in (await browser.get("/account")).text
