"""Operator's page: users, quotas, invites, queue policy, cordons. Every form of somebody else has a control."""

from __future__ import annotations

import re

import pytest

from tests.server.identity_routes.people_desk import PASSWORD, Somebody, registered
from tests.server.server_desk import Desk
from tests.server.web.browser import Browser

pytestmark = pytest.mark.anyio


async def operator(desk: Desk) -> Browser:
    boss = await registered(desk, "boss")
    words = {"permissions": ["consumer", "operator", "provider"]}
    assert (await desk.http.patch(f"/v1/users/{boss.id}", json=words)).status_code == 200
    browser = Browser(desk)
    assert (await browser.sign_in("boss")).status_code == 303
    return browser


async def document(desk: Desk, person: Somebody) -> dict[str, object]:
    answer = await desk.get(f"/v1/users/{person.id}")
    assert answer.status_code == 200
    return dict(answer.json())


async def test_an_operator_changes_permissions_and_quota_on_the_users_page(desk: Desk) -> None:
    boss, ada = await operator(desk), await registered(desk, "ada")
    listed = await boss.get("/admin")
    assert f'href="/admin/users/{ada.id}"' in listed.text
    done = await boss.submit(f"/admin/users/{ada.id}/permissions", permission=["provider"])
    assert done.status_code == 303
    assert (await document(desk, ada))["permissions"] == ["provider"]
    quota = {"running_gpus": "2.5", "queued_tasks": "70", "storage_gb": "1.5"}
    assert (await boss.submit(f"/admin/users/{ada.id}/quota", **quota)).status_code == 303
    assert (await document(desk, ada))["quota"] == {
        "running_gpus": 2.5,
        "queued_tasks": 70,
        "storage_bytes": 1_500_000_000,
        "guaranteed_gpus": None,
    }
    shown = (await boss.get(f"/admin/users/{ada.id}?done=1")).text
    assert 'value="2.5"' in shown
    assert "changed" in shown


@pytest.mark.parametrize("wrong", ["many", "nan", "-1", "1e400"])
async def test_a_wrong_quota_is_explained_and_changes_nothing(desk: Desk, wrong: str) -> None:
    boss, ada = await operator(desk), await registered(desk, "ada")
    before = await document(desk, ada)
    answer = await boss.submit(f"/admin/users/{ada.id}/quota", running_gpus=wrong)
    assert answer.status_code == 400
    assert 'role="alert"' in answer.text
    assert await document(desk, ada) == before


async def test_a_disabled_account_is_signed_out_and_can_be_enabled_again(desk: Desk) -> None:
    boss, ada = await operator(desk), await registered(desk, "ada")
    assert (await boss.submit(f"/admin/users/{ada.id}/state", to="disabled")).status_code == 303
    assert (await ada.ask("GET", "/v1/me")).status_code == 401
    assert (await boss.submit(f"/admin/users/{ada.id}/state", to="enabled")).status_code == 303
    assert (await Browser(desk).sign_in("ada")).status_code == 303


async def test_an_invite_and_a_password_link_are_shown_and_work(desk: Desk) -> None:
    boss, ada = await operator(desk), await registered(desk, "ada")
    token = re.search(r"<code>(gpu?[\w-]+)</code>", (await boss.submit("/admin/invites")).text)
    assert token is not None
    wanted = {"name": "eve", "password": PASSWORD, "invite": token[1]}
    assert (await desk.bare.post("/v1/users", json=wanted)).status_code == 201
    page = (await boss.submit(f"/admin/users/{ada.id}/password-link")).text
    code = re.search(r"/reset/([\w.-]+)</code>", page)
    assert code is not None
    fields: dict[str, object] = {"code": code[1], "password": "a new pass phrase"}
    answer = await Browser(desk).post("/reset/password", {**fields, "again": "a new pass phrase"})
    assert answer.status_code == 200
    assert (await Browser(desk).sign_in("ada", "a new pass phrase")).status_code == 303


async def test_a_tried_policy_changes_nothing_and_a_changed_one_holds(desk: Desk) -> None:
    boss = await operator(desk)
    before = (await desk.get("/v1/admin/policy")).json()
    other = next(name for name in before["orders"] if name != before["order"])
    tried = await boss.submit("/admin/policy", order=other, **{"try": "1"})
    assert (tried.status_code, "would change nothing" in tried.text) == (200, True)
    assert (await desk.get("/v1/admin/policy")).json() == before
    assert (await boss.submit("/admin/policy", order=other, patience_s="90")).status_code == 303
    after = (await desk.get("/v1/admin/policy")).json()
    assert (after["order"], after["patience_s"]) == (other, 90)
    assert (await boss.submit("/admin/policy")).status_code == 303
    assert (await desk.get("/v1/admin/policy")).json() == before
    wrong = await boss.submit("/admin/policy", patience_s="soon")
    assert (wrong.status_code, "not a number" in wrong.text) == (400, True)


async def test_the_forms_are_for_operators_only(desk: Desk) -> None:
    boss, ada = await operator(desk), await registered(desk, "ada")
    eve = Browser(desk)
    await registered(desk, "eve")
    assert (await eve.sign_in("eve")).status_code == 303
    paths = ("permissions", "state", "quota", "password-link")
    for path in (*(f"/admin/users/{ada.id}/{word}" for word in paths), "/admin/invites"):
        assert (await eve.submit(path, to="disabled")).status_code in (403, 404), path
        assert (await boss.post(path, {}, origin="https://evil.example")).status_code == 403, path
    assert (await eve.submit("/admin/policy")).status_code == 403
    assert (await ada.ask("GET", "/v1/me")).status_code == 200
    assert (await boss.get(f"/admin/users/{ada.id}")).status_code == 200
