"""OpenID Connect in the page, with a real provider: bound to its browser, and back to paths of this server only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest

from tests.server.identity_routes.test_oidc import a_desk
from tests.server.web.browser import ORIGIN, Browser
from tests.tools.oidc_provider import oidc_provider
from tests.tools.processes import PATIENCE_S

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def issuer() -> Iterator[str]:
    with oidc_provider() as url:
        yield url


async def begun(browser: Browser, **fields: object) -> str:
    """Begin in the page; returns the provider's address."""
    answer = await browser.post("/sign-in/oidc", {"provider": "mock", **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.headers["refresh"].partition("url=")[2])


async def consented(url: str, subject: str) -> str:
    """Consent at the provider; returns path and query of the pool's page."""
    async with httpx2.AsyncClient(timeout=PATIENCE_S) as client:
        answer = await client.post(url, data={"sub": subject, "action": "authorize"})
    back = str(answer.headers["location"])
    assert back.startswith(f"{ORIGIN}/sign-in/oidc/back?")
    return back.removeprefix(ORIGIN)


async def finished(browser: Browser, path: str, **headers: str) -> httpx2.Response:
    shown = await browser.get(path, sec_fetch_site="cross-site")
    assert shown.status_code == 200
    query = {name: values[0] for name, values in parse_qs(urlsplit(path).query).items()}
    fields: dict[str, object] = {"code": query["code"], "state": query["state"]}
    return await browser.post("/sign-in/oidc/finish", fields, **headers)


async def test_a_providers_account_signs_in_and_returns_to_the_page(
    data: Path, issuer: str
) -> None:
    async with a_desk(data, issuer) as desk:
        browser = Browser(desk)
        assert "Sign in with mock" in (await browser.get("/sign-in?next=/account")).text
        url = await begun(browser, next="/account")
        sent = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
        assert sent["redirect_uri"] == f"{ORIGIN}/sign-in/oidc/back"
        assert sent["code_challenge_method"] == "S256"
        assert len(sent["nonce"]) >= 32
        answer = await finished(browser, await consented(url, "ada"))
        assert (answer.status_code, answer.headers["location"]) == (303, "/account")
        assert "mock-" in (await browser.get("/account")).text
        assert len(browser.cookies) == 1  # the cookie of the begun sign-in is gone


async def test_a_sign_in_is_finished_only_in_the_browser_that_began_it(
    data: Path, issuer: str
) -> None:
    """An attacker could else sign a victim in to the attacker's account by a link."""
    async with a_desk(data, issuer) as desk:
        mallory, victim = Browser(desk), Browser(desk)
        path = await consented(await begun(mallory), "mallory")
        assert (await finished(victim, path)).status_code == 401
        await begun(victim)  # a sign-in of the victim's own does not help
        assert (await finished(victim, path)).status_code == 401
        query = {name: values[0] for name, values in parse_qs(urlsplit(path).query).items()}
        rest = await desk.bare.post(
            "/v1/auth/oidc/finish", json={"code": query["code"], "state": query["state"]}
        )
        assert rest.status_code == 401
        away = await finished(mallory, path, origin="https://evil.example")
        assert away.status_code == 403
        assert (await finished(mallory, path)).status_code == 303  # the control


async def test_a_provider_sign_in_never_redirects_to_another_site(data: Path, issuer: str) -> None:
    async with a_desk(data, issuer) as desk:
        for target in ("//evil.example", "https://evil.example", "/\\evil.example"):
            browser = Browser(desk)
            path = await consented(await begun(browser, next=target), "ada")
            assert (await finished(browser, path)).headers["location"] == "/"
        browser = Browser(desk)
        path = await consented(await begun(browser, next="/tasks"), "ada")
        assert (await finished(browser, path)).headers["location"] == "/tasks"


async def test_a_refusal_of_the_provider_is_shown(data: Path, issuer: str) -> None:
    async with a_desk(data, issuer) as desk:
        answer = await Browser(desk).get("/sign-in/oidc/back?error=access_denied&state=x")
        assert answer.status_code == 401
        assert "access_denied" in answer.text


async def test_a_first_sign_in_takes_its_invite_along(data: Path, issuer: str) -> None:
    async with a_desk(data, issuer, registration="invite") as desk:
        browser = Browser(desk)
        path = await consented(await begun(browser), "ada")
        refused = await finished(browser, path)
        assert (refused.status_code, "needs an invite" in refused.text) == (403, True)
        invite = (await desk.post("/v1/users/invites", {})).json()["token"]
        path = await consented(await begun(browser, invite=invite), "ada")
        assert (await finished(browser, path)).status_code == 303


async def test_other_sites_cannot_begin_a_sign_in(data: Path, issuer: str) -> None:
    async with a_desk(data, issuer) as desk:
        browser, fields = Browser(desk), {"provider": "mock"}
        answer = await browser.post("/sign-in/oidc", dict(fields), origin="https://evil.example")
        assert answer.status_code == 403
        assert not browser.cookies
        assert (await browser.post("/sign-in/oidc", dict(fields))).status_code == 200
