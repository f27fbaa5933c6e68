"""Journeys of API keys, teams and operators."""

from __future__ import annotations

import hashlib

import pytest

from gpool.server.scheduling.loops import MaintainIdentity
from tests.server.identity_routes.people_desk import (
    PASSWORD,
    Somebody,
    bearer,
    joins,
    registered,
    signed_in,
)
from tests.server.server_desk import Desk

pytestmark = pytest.mark.anyio


async def a_team(owner: Somebody, name: str = "lab") -> str:
    made = await owner.ask("POST", "/v1/teams", {"name": name})
    assert made.status_code == 201, made.text
    team: str = made.json()["id"]
    return team


# ---- API keys


async def test_a_key_works_until_it_is_ended(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    made = (await ada.ask("POST", "/v1/keys", {"name": "laptop"})).json()
    key = bearer(made["key"])
    assert (await desk.bare.get("/v1/me", headers=key)).json()["id"] == ada.id
    await MaintainIdentity(desk.server).run_once(desk.server.now)
    listed = (await ada.ask("GET", "/v1/keys")).json()["items"]
    assert [one["name"] for one in listed] == ["laptop"]
    assert listed[0]["last_used_at"] is not None
    assert "key" not in listed[0]
    assert (await ada.ask("DELETE", f"/v1/keys/{made['id']}")).status_code == 204
    assert (await desk.bare.get("/v1/me", headers=key)).status_code == 401


async def test_a_key_expires(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    made = (await ada.ask("POST", "/v1/keys", {"name": "short", "expires_in_s": 60})).json()
    assert (await desk.bare.get("/v1/me", headers=bearer(made["key"]))).status_code == 200
    desk.clock.advance(66)
    assert (await desk.bare.get("/v1/me", headers=bearer(made["key"]))).status_code == 401


async def test_a_key_does_no_more_than_its_scopes(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    wanted = {"name": "watcher", "scopes": ["tasks:read"]}
    key = bearer((await ada.ask("POST", "/v1/keys", wanted)).json()["key"])
    assert (await desk.bare.get("/v1/tasks", headers=key)).status_code == 200
    submitted = await desk.bare.post("/v1/tasks", json={"command": ["true"]}, headers=key)
    assert submitted.status_code == 403
    assert (await desk.bare.get("/v1/me", headers=key)).status_code == 403


async def test_no_key_makes_a_key_or_changes_a_password(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    key = bearer((await ada.ask("POST", "/v1/keys", {"name": "all"})).json()["key"])
    for method, path, document in (
        ("POST", "/v1/keys", {"name": "more"}),
        ("PUT", "/v1/me/password", {"old": PASSWORD, "new": "another one 22"}),
        ("GET", "/v1/sessions", None),
        ("POST", "/v1/auth/logout", {"everywhere": True}),
    ):
        answer = await desk.bare.request(method, path, json=document, headers=key)
        assert answer.status_code == 403, (path, answer.text)


async def test_only_operators_make_admin_keys(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    wanted = {"name": "root", "scopes": ["admin"]}
    assert (await ada.ask("POST", "/v1/keys", wanted)).status_code == 403
    assert (await desk.post("/v1/keys", wanted)).status_code == 201


async def test_the_same_idempotency_key_gives_the_same_api_key(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    once = {"headers": {"idempotency-key": "once"}}
    first = (await ada.ask("POST", "/v1/keys", {"name": "laptop"}, **once)).json()
    once = {"headers": {"idempotency-key": "once"}}
    again = (await ada.ask("POST", "/v1/keys", {"name": "laptop"}, **once)).json()
    assert first == again
    assert len((await ada.ask("GET", "/v1/keys")).json()["items"]) == 1


async def test_a_key_for_a_team_opens_nothing_else(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    team = await a_team(ada)
    own = (await ada.ask("POST", "/v1/tasks", {"command": ["own"]})).json()["ids"][0]
    made = await ada.ask("POST", "/v1/keys", {"name": "ci", "team": team})
    key = bearer(made.json()["key"])
    joint = await desk.bare.post("/v1/tasks", json={"command": ["x"], "team": team}, headers=key)
    assert joint.status_code == 202
    task = joint.json()["ids"][0]
    assert (await desk.bare.get(f"/v1/tasks/{task}", headers=key)).status_code == 200
    assert (await desk.bare.get(f"/v1/tasks/{own}", headers=key)).status_code == 404
    alone = await desk.bare.post("/v1/tasks", json={"command": ["x"]}, headers=key)
    assert alone.status_code == 404


async def test_a_key_for_a_team_reads_and_names_the_teams_artifacts_and_its_own_uploads(
    desk: Desk,
) -> None:
    """Finding 21: such a key read the uploads and outputs of the account behind it."""
    ada = await registered(desk, "ada")
    team = await a_team(ada)
    made = await ada.ask("POST", "/v1/keys", {"name": "ci", "team": team})
    key = bearer(made.json()["key"])
    of_ada = await uploaded(desk, ada.headers, b"ada's own")
    of_team = await uploaded(desk, ada.headers, b"the team's input")
    await naming(desk, ada.headers, of_team, team)
    of_key = await uploaded(desk, key, b"uploaded by the key")

    async def seen(sha256: str, headers: dict[str, str]) -> list[int]:
        path = f"/v1/artifacts/{sha256}"
        asked = [await desk.bare.request(way, path, headers=headers) for way in ("GET", "HEAD")]
        return [each.status_code for each in asked]

    assert await seen(of_ada, ada.headers) == [200, 200]  # the control: without the restriction
    assert await seen(of_ada, key) == [404, 404]
    assert await seen(of_team, key) == [200, 200]
    assert await seen(of_key, key) == [200, 200]
    assert await seen(of_key, ada.headers) == [200, 200]
    second = await ada.ask("POST", "/v1/keys", {"name": "other", "team": team})
    assert await seen(of_key, bearer(second.json()["key"])) == [404, 404]
    # Nor may a task of the team name it, after which it would be the team's.
    assert await naming(desk, key, of_ada, team) == 422
    assert await naming(desk, key, of_key, team) == 202
    assert await naming(desk, ada.headers, of_ada, team) == 202  # the control
    assert await seen(of_ada, key) == [200, 200]


async def test_a_key_for_a_team_does_not_see_how_far_an_upload_of_its_user_came(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    made = await ada.ask("POST", "/v1/keys", {"name": "ci", "team": await a_team(ada)})
    content = b"in two parts"
    path = f"/v1/artifacts/{hashlib.sha256(content).hexdigest()}"
    part = {"content-range": f"bytes 0-5/{len(content)}"}
    await desk.bare.put(path, content=content[:6], headers={**ada.headers, **part})
    begun = await desk.bare.head(path, headers=ada.headers)
    assert begun.headers["upload-offset"] == "6"
    hidden = await desk.bare.head(path, headers=bearer(made.json()["key"]))
    assert (hidden.status_code, hidden.headers.get("upload-offset")) == (404, None)


async def test_a_key_for_a_team_deletes_only_its_own_uploads(desk: Desk) -> None:
    """Finding 21, with DELETE: such a key deleted the finished and unfinished uploads of the account behind it."""
    ada = await registered(desk, "ada")
    team = await a_team(ada)
    key = bearer((await ada.ask("POST", "/v1/keys", {"name": "ci", "team": team})).json()["key"])
    of_ada = await uploaded(desk, ada.headers, b"ada's own")
    of_key = await uploaded(desk, key, b"uploaded by the key")

    async def delete(sha256: str, headers: dict[str, str]) -> int:
        return (await desk.bare.delete(f"/v1/artifacts/{sha256}", headers=headers)).status_code

    assert await delete(of_ada, key) == 404
    assert await delete(of_key, key) == 204
    content = b"in two parts"
    sha256 = hashlib.sha256(content).hexdigest()
    part = {"content-range": f"bytes 0-5/{len(content)}"}
    for headers in (ada.headers, key):
        begun = {**headers, **part}
        await desk.bare.put(f"/v1/artifacts/{sha256}", content=content[:6], headers=begun)
    assert await delete(sha256, key) == 204
    assert await delete(sha256, key) == 404
    begun = await desk.bare.head(f"/v1/artifacts/{sha256}", headers=ada.headers)
    assert begun.headers["upload-offset"] == "6"
    assert await delete(sha256, ada.headers) == 204  # the control
    # The account itself deletes what its keys uploaded, and is not told of other accounts' tasks.
    own_task = {"command": ["true"], "inputs": [{"path": "in", "sha256": of_ada, "size_bytes": 9}]}
    assert (await ada.ask("POST", "/v1/tasks", own_task)).status_code == 202
    assert await uploaded(desk, key, b"ada's own") == of_ada
    assert await delete(of_ada, key) == 204, "used by a task that the key does not see"
    assert await delete(of_ada, ada.headers) == 409
    of_key = await uploaded(desk, key, b"uploaded by the key")
    assert await delete(of_key, ada.headers) == 204


async def uploaded(desk: Desk, headers: dict[str, str], content: bytes) -> str:
    sha256 = hashlib.sha256(content).hexdigest()
    put = await desk.bare.put(f"/v1/artifacts/{sha256}", content=content, headers=headers)
    assert put.status_code == 201
    return sha256


async def naming(desk: Desk, headers: dict[str, str], sha256: str, team: str) -> int:
    """Submit a task of the team with this input; the status."""
    size = int((await desk.http.get(f"/v1/artifacts/{sha256}")).headers["content-length"])
    one = {"path": "in", "sha256": sha256, "size_bytes": size}
    body = {"command": ["true"], "team": team, "inputs": [one]}
    return (await desk.bare.post("/v1/tasks", json=body, headers=headers)).status_code


# ---- teams


async def test_a_team_shares_its_tasks_by_role(desk: Desk) -> None:
    ada, bob, cy = [await registered(desk, name) for name in ("ada", "bob", "cy-viewer")]
    eve = await registered(desk, "eve")
    team = await a_team(ada)
    await joins(ada, team, bob)
    await joins(ada, team, cy, "viewer")
    submitted = await bob.ask("POST", "/v1/tasks", {"command": ["true"], "team": team})
    assert submitted.status_code == 202
    task = submitted.json()["ids"][0]
    for one in (ada, bob, cy):
        assert (await one.ask("GET", f"/v1/tasks/{task}")).json()["team"] == team
        listed = (await one.ask("GET", f"/v1/tasks?team={team}")).json()["items"]
        assert [each["id"] for each in listed] == [task]
        assert (await one.ask("GET", "/v1/tasks")).json()["items"] == []
    assert (await eve.ask("GET", f"/v1/tasks/{task}")).status_code == 404
    assert (await eve.ask("GET", f"/v1/tasks?team={team}")).status_code == 404
    refused = await cy.ask("POST", "/v1/tasks", {"command": ["true"], "team": team})
    assert refused.status_code == 403
    unseen = await eve.ask("POST", "/v1/tasks", {"command": ["true"], "team": team})
    assert unseen.status_code == 404
    assert (await cy.ask("DELETE", f"/v1/tasks/{task}")).status_code == 403
    assert (await ada.ask("DELETE", f"/v1/tasks/{task}")).status_code == 200


async def test_who_leaves_a_team_leaves_its_tasks(desk: Desk) -> None:
    ada, bob = await registered(desk, "ada"), await registered(desk, "bob")
    team = await a_team(ada)
    await joins(ada, team, bob)
    task = (await bob.ask("POST", "/v1/tasks", {"command": ["x"], "team": team})).json()["ids"][0]
    assert (await bob.ask("DELETE", f"/v1/teams/{team}/members/{bob.id}")).status_code == 204
    assert (await bob.ask("GET", f"/v1/tasks/{task}")).status_code == 404
    assert (await ada.ask("GET", f"/v1/tasks/{task}")).status_code == 200


async def test_a_team_keeps_an_owner(desk: Desk) -> None:
    ada, bob = await registered(desk, "ada"), await registered(desk, "bob")
    team = await a_team(ada)
    path = f"/v1/teams/{team}/members"
    assert (await ada.ask("DELETE", f"{path}/{ada.id}")).status_code == 409
    assert (await ada.ask("PATCH", f"{path}/{ada.id}", {"role": "viewer"})).status_code == 409
    await joins(ada, team, bob)
    raised = await ada.ask("POST", path, {"user": "bob", "role": "owner"})  # consented already
    assert (raised.status_code, raised.json()["role"]) == (201, "owner")
    assert (await bob.ask("PATCH", f"{path}/{ada.id}", {"role": "viewer"})).status_code == 200
    names = {one["name"]: one["role"] for one in (await ada.ask("GET", path)).json()["items"]}
    assert names == {"ada": "viewer", "bob": "owner"}


async def test_an_invite_lets_one_person_into_a_team(desk: Desk) -> None:
    ada, bob, eve = [await registered(desk, name) for name in ("ada", "bob", "eve")]
    team = await a_team(ada)
    made = (await ada.ask("POST", f"/v1/teams/{team}/invites", {"role": "viewer"})).json()
    joined = await bob.ask("POST", "/v1/teams/join", {"token": made["token"]})
    assert (joined.status_code, joined.json()["role"]) == (200, "viewer")
    again = await eve.ask("POST", "/v1/teams/join", {"token": made["token"]})
    assert again.status_code == 403
    assert (await bob.ask("POST", f"/v1/teams/{team}/invites")).status_code == 403


async def test_a_teams_invite_makes_no_account(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    team = await a_team(ada)
    made = (await ada.ask("POST", f"/v1/teams/{team}/invites")).json()
    answer = await desk.bare.post(
        "/v1/users", json={"name": "eve", "password": PASSWORD, "invite": made["token"]}
    )
    assert answer.status_code == 403


async def test_a_team_is_renamed_and_deleted(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    team = await a_team(ada)
    renamed = await ada.ask("PATCH", f"/v1/teams/{team}", {"name": "office"})
    assert renamed.json()["name"] == "office"
    assert (await ada.ask("DELETE", f"/v1/teams/{team}")).status_code == 204
    assert (await ada.ask("GET", f"/v1/teams/{team}")).status_code == 404
    assert (await ada.ask("GET", "/v1/teams")).json()["items"] == []


# ---- operators


async def test_operators_see_and_change_users(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    listed = (await desk.get("/v1/users")).json()["items"]
    assert [one["name"] for one in listed] == ["operator", "ada"]
    quota = {"running_gpus": 1.5, "queued_tasks": 10, "storage_bytes": None}
    changed = await desk.http.patch(
        f"/v1/users/{ada.id}", json={"permissions": ["provider"], "quota": quota}
    )
    assert changed.json()["permissions"] == ["provider"]
    kept = {**quota, "guaranteed_gpus": None}
    assert changed.json()["quota"] == kept
    assert (await ada.ask("POST", "/v1/tasks", {"command": ["x"]})).status_code == 403
    assert (await ada.ask("GET", f"/v1/users/{ada.id}")).json()["quota"] == kept


async def test_who_is_disabled_is_out_at_once(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    key = bearer((await ada.ask("POST", "/v1/keys", {"name": "k"})).json()["key"])
    await desk.http.patch(f"/v1/users/{ada.id}", json={"disabled": True})
    assert (await ada.ask("GET", "/v1/me")).status_code == 401
    assert (await ada.refresh()).status_code == 401
    assert (await desk.bare.get("/v1/me", headers=key)).status_code == 401
    refused = await desk.bare.post("/v1/auth/password", json={"name": "ada", "password": PASSWORD})
    assert refused.status_code == 403
    await desk.http.patch(f"/v1/users/{ada.id}", json={"disabled": False})
    assert (await signed_in(desk, "ada")).id == ada.id


async def test_the_last_operator_stays_one(desk: Desk) -> None:
    me = (await desk.get("/v1/me")).json()["id"]
    for change in ({"disabled": True}, {"permissions": ["consumer"]}):
        answer = await desk.http.patch(f"/v1/users/{me}", json=change)
        assert answer.status_code == 409


async def test_users_are_listed_in_pages(desk: Desk) -> None:
    for number in range(3):
        await registered(desk, f"user-{number}")
    first = (await desk.get("/v1/users?limit=2")).json()
    rest = (await desk.get(f"/v1/users?limit=2&cursor={first['next']}")).json()
    names = [one["name"] for one in first["items"] + rest["items"]]
    assert names == ["operator", "user-0", "user-1", "user-2"]


async def test_a_change_that_is_refused_changes_nothing(desk: Desk) -> None:
    me = (await desk.get("/v1/me")).json()
    both = {"permissions": ["operator"], "disabled": True}
    assert (await desk.http.patch(f"/v1/users/{me['id']}", json=both)).status_code == 409
    desk.server.credentials.forget()
    assert (await desk.get("/v1/me")).json()["permissions"] == me["permissions"]
    for name in ("lab", "office"):
        team = (await desk.post("/v1/teams", {"name": name})).json()["id"]
    both = {"name": "lab", "quota": {"queued_tasks": 1}}
    assert (await desk.http.patch(f"/v1/teams/{team}", json=both)).status_code == 409
    assert (await desk.get(f"/v1/teams/{team}")).json()["quota"]["queued_tasks"] is None
