"""Password reset by an operator's link and by mail. Each refused link has a control that works."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.server.events.test_mail import _code, _text
from tests.server.identity_routes.people_desk import Somebody, registered
from tests.server.server_desk import Desk, StoppedClock, open_desk
from tests.server.web.browser import ORIGIN, Browser
from tests.tools.mail_server import Mailbox, mail_server

pytestmark = pytest.mark.anyio
NEW = "quite another password"


@pytest.fixture
async def mailing(data: Path, tmp_path: Path) -> AsyncIterator[tuple[Desk, Mailbox]]:
    password = tmp_path / "password"
    password.write_text("mail password\n")
    async with mail_server("gpool", "mail password") as box:
        desk = await open_desk(
            data,
            StoppedClock(),
            smtp_host="127.0.0.1",
            smtp_port=box.port,
            smtp_security="none",
            smtp_user="gpool",
            smtp_password_file=password,
            mail_from="gpool <pool@example.org>",
        )
        async with desk.http, desk.bare:
            yield desk, box
        await desk.server.store.close()


async def link(desk: Desk, person: Somebody) -> str:
    """Code of an operator's link."""
    answer = await desk.post(f"/v1/users/{person.id}/password-link")
    assert answer.status_code == 201, answer.text
    assert answer.headers["cache-control"] == "no-store"
    url = str(answer.json()["url"])
    assert url.startswith(f"{ORIGIN}/reset/{person.id}.")
    return url.rpartition("/")[2]


async def reset(desk: Desk, code: str, new: str = NEW, again: str = "") -> tuple[int, str]:
    fields: dict[str, object] = {"code": code, "password": new, "again": again or new}
    answer = await Browser(desk).post("/reset/password", fields)
    return answer.status_code, answer.text


async def opens(desk: Desk, name: str, password: str) -> bool:
    return (await Browser(desk).sign_in(name, password)).status_code == 303


async def with_address(desk: Desk, box: Mailbox, name: str, *, confirmed: bool = True) -> Somebody:
    person = await registered(desk, name)
    made = await person.ask("POST", "/v1/me/notices", {"address": f"{name}@example.org"})
    assert made.status_code == 201, made.text
    if confirmed:
        path = f"/v1/me/notices/{made.json()['id']}/confirm"
        assert (await person.ask("POST", path, {"code": _code(box)})).status_code == 200
    box.mails.clear()
    box.to.clear()
    return person


def mailed(box: Mailbox) -> str:
    """Code of the mail's link."""
    found = re.search(rf"{re.escape(ORIGIN)}/reset/(\S+)", _text(box.mails[-1]))
    assert found is not None
    return found[1]


async def test_an_operators_link_sets_the_password_and_ends_every_session(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    browser = Browser(desk)
    await browser.sign_in("ada")
    code = await link(desk, ada)
    shown = await browser.get(f"/reset/{code}")
    assert (shown.status_code, code in shown.text) == (200, True)
    assert (await browser.get("/account")).status_code == 200
    assert (await reset(desk, code))[0] == 200
    assert (await browser.get("/account")).status_code == 303
    assert (await ada.ask("GET", "/v1/me")).status_code == 401
    assert (await ada.refresh()).status_code == 401
    assert await opens(desk, "ada", NEW)
    assert not await opens(desk, "ada", "a long enough password")


async def test_a_used_an_expired_and_a_superseded_link_are_refused(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    first, second = await link(desk, ada), await link(desk, ada)
    assert (await reset(desk, first))[0] == 200
    for code in (first, second):  # the second one is older than the password
        status, text = await reset(desk, code, "a third long password")
        assert (status, "ask for a new one" in text) == (401, True)
        assert (await Browser(desk).get(f"/reset/{code}")).status_code == 401
    late = await link(desk, ada)
    desk.clock.advance(1801)
    assert (await reset(desk, late, "a third long password"))[0] == 401
    in_time = await link(desk, ada)
    desk.clock.advance(1790)
    assert (await reset(desk, in_time, "a third long password"))[0] == 200


async def test_a_link_of_another_account_or_purpose_is_refused(desk: Desk) -> None:
    ada, eve = await registered(desk, "ada"), await registered(desk, "eve")
    code = await link(desk, eve)
    secret = code.partition(".")[2]
    page = (await desk.post("/v1/auth/links")).json()["path"].removeprefix("/in/")
    for foreign in (f"{ada.id}.{secret}", page, secret, "", f"{ada.id}."):
        assert (await reset(desk, foreign))[0] == 401
    assert await opens(desk, "ada", "a long enough password")
    assert (await Browser(desk).post("/in", {"code": code})).status_code == 401
    assert (await reset(desk, code))[0] == 200
    assert await opens(desk, "eve", NEW)


async def test_a_refused_password_leaves_the_link_usable(desk: Desk) -> None:
    code = await link(desk, await registered(desk, "ada"))
    for new, again in (("password123", ""), ("short", ""), (NEW, "different password")):
        assert (await reset(desk, code, new, again))[0] == 400
    assert (await reset(desk, code))[0] == 200


async def test_other_sites_cannot_send_the_forms(desk: Desk) -> None:
    code = await link(desk, await registered(desk, "ada"))
    fields: dict[str, object] = {"name": "ada", "code": code, "password": NEW, "again": NEW}
    for path in ("/reset", "/reset/password"):
        answer = await Browser(desk).post(path, fields, origin="https://evil.example")
        assert answer.status_code == 403
        assert (await Browser(desk).post(path, fields)).status_code == 200


async def test_only_a_signed_in_operator_makes_links_and_never_for_disabled_accounts(
    desk: Desk,
) -> None:
    ada, eve = await registered(desk, "ada"), await registered(desk, "eve")
    path = f"/v1/users/{ada.id}/password-link"
    assert (await eve.ask("POST", path)).status_code in (403, 404)
    code = await link(desk, ada)
    disabled = await desk.http.patch(f"/v1/users/{ada.id}", json={"disabled": True})
    assert disabled.status_code == 200
    assert (await desk.post(path)).status_code == 409
    assert (await reset(desk, code))[0] == 401


async def test_links_and_resets_are_recorded_without_the_code(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    code = await link(desk, ada)
    assert (await reset(desk, code))[0] == 200
    newest = (await desk.get("/v1/audit?limit=2")).json()["items"]
    assert [(one["action"], one["thing"]) for one in newest] == [
        ("password.reset", ada.id),
        ("password.link", ada.id),
    ]
    assert code.partition(".")[2] not in str(newest)


async def test_a_mail_goes_to_the_confirmed_address_and_its_link_works(
    mailing: tuple[Desk, Mailbox],
) -> None:
    desk, box = mailing
    await with_address(desk, box, "ada")
    assert (await Browser(desk).post("/reset", {"name": "ada"})).status_code == 200
    assert box.to == ["ada@example.org"]
    assert (await reset(desk, mailed(box)))[0] == 200
    assert await opens(desk, "ada", NEW)


async def test_the_answer_is_the_same_for_every_name(mailing: tuple[Desk, Mailbox]) -> None:
    desk, box = mailing
    await with_address(desk, box, "ada")
    await with_address(desk, box, "bob", confirmed=False)
    await registered(desk, "eve")
    answers = set()
    for name in ("bob", "eve", "nobody", "", "x" * 300, "ada"):
        answer = await Browser(desk).post("/reset", {"name": name})
        lengths = tuple(sorted(answer.headers))
        answers.add((answer.status_code, answer.text, lengths))
        assert len(box.mails) == (name == "ada")  # the control: only this one is sent
    assert len(answers) == 1


async def test_an_account_gets_one_mail_in_ten_minutes_unless_none_was_taken(
    mailing: tuple[Desk, Mailbox],
) -> None:
    desk, box = mailing
    await with_address(desk, box, "ada")
    box.refusing = "451 later"
    await Browser(desk).post("/reset", {"name": "ada"})
    box.refusing = ""
    assert not box.mails
    for _ in range(5):
        await Browser(desk).post("/reset", {"name": "ada"})
    assert len(box.mails) == 1
    desk.clock.advance(601)
    await Browser(desk).post("/reset", {"name": "ada"})
    assert len(box.mails) == 2


async def test_without_a_mail_server_the_page_names_the_operator(desk: Desk) -> None:
    for answer in (
        await Browser(desk).get("/reset"),
        await Browser(desk).post("/reset", {"name": "ada"}),
    ):
        assert (answer.status_code, "Ask an operator" in answer.text) == (200, True)
