"""Users delete their ended tasks, batches, uploads and accounts; nothing of theirs stays in database or folders."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest

from gpool.core.ids import UserId, decode, encode
from gpool.core.model import Permission
from gpool.server.scheduling.loops import RetainTasks
from gpool.server.store.operations import nodes
from gpool.server.store.operations.identity import accounts, teams
from gpool.server.store.protocol import Operation, Statement, operation
from gpool.wire.frames import LogChunk, Released
from tests.server.identity_routes.people_desk import PASSWORD, Somebody, registered
from tests.server.server_desk import Agent, Desk, an_offer, exited
from tests.tools.nodes import a_key

pytestmark = pytest.mark.anyio


def files(desk: Desk) -> set[str]:
    """SHA-256 of the artifacts in the folder."""
    folder = desk.server.settings.data / "artifacts"
    return {path.name.partition("-")[0] for path in folder.rglob("*") if path.is_file()}


async def put(who: Somebody, content: bytes, **headers: str) -> str:
    sha256 = hashlib.sha256(content).hexdigest()
    path = f"/v1/artifacts/{sha256}"
    headers = {**who.headers, **headers}
    answer = await who.desk.bare.put(path, content=content, headers=headers)
    assert answer.status_code in (201, 202), answer.text
    return sha256


async def submitted(who: Somebody, **members: Any) -> tuple[str, str]:
    answer = await who.ask("POST", "/v1/tasks", {"command": ["true"], **members})
    assert answer.status_code == 202, answer.text
    return answer.json()["ids"][0], answer.json()["batch"]


async def ended(who: Somebody, agent: Agent, **members: Any) -> tuple[str, str]:
    """A task that printed something and exited."""
    task, batch = await submitted(who, **members)
    await who.desk.schedule()
    lease = agent.leases()[-1]
    await agent.report(LogChunk(lease.task, lease.epoch, 0, 1, b"hello"), exited(lease))
    return task, batch


async def used(desk: Desk, user: UserId) -> int:
    return (await desk.server.store.read(teams.usage_of("user", user))).storage_bytes


@operation
def _mentions(number: int) -> Operation[dict[str, int]]:
    """Rows that belong to this user, by table; the audit log keeps ids."""
    found = {}
    for table, column in (
        ("users", "id"),
        ("api_keys", "user_id"),
        ("sessions", "user_id"),
        ("wallets", "user_id"),
        ("oidc_identities", "user_id"),
        ("memberships", "user_id"),
        ("tasks", "user_id"),
        ("specs", "user_id"),
        ("batches", "user_id"),
        ("artifact_refs", "user_id"),
        ("stored", "id"),
        ("storage", "id"),
        ("nodes", "owner_id"),
        ("gpu_bindings", "owner_id"),
        ("invites", "owner_id"),
        ("idempotency", "user_id"),
        ("quotas", "id"),
        ("uploads", "account"),
    ):
        rows = yield Statement(f"SELECT COUNT(*) FROM {table} WHERE {column} = :id", {"id": number})  # noqa: S608
        [(count,)] = rows
        if count:
            found[table] = count
    return found


async def test_a_deleted_task_is_gone_with_its_files_and_its_charge(desk: Desk) -> None:
    agent, ada = await desk.agent(), await registered(desk, "ada")
    sha256 = await put(ada, b"an input")
    one = {"path": "in", "sha256": sha256, "size_bytes": 8}
    task, batch = await ended(ada, agent, inputs=[one])
    assert await used(desk, ada.user) > 8
    assert (await ada.ask("DELETE", f"/v1/tasks/{task}/record")).status_code == 204
    for path in (f"/v1/tasks/{task}", f"/v1/tasks/{task}/logs", f"/v1/batches/{batch}"):
        assert (await ada.ask("GET", path)).status_code == 404
    assert (await ada.ask("DELETE", f"/v1/tasks/{task}/record")).status_code == 404
    assert files(desk) == set()
    assert await used(desk, ada.user) == 0
    again = await ada.ask("POST", "/v1/tasks", {"command": ["true"], "inputs": [one]})
    assert again.status_code == 422


async def test_a_task_that_has_not_ended_is_not_deleted(desk: Desk) -> None:
    agent, ada = await desk.agent(), await registered(desk, "ada")
    task, batch = await submitted(ada)
    for path in (f"/v1/tasks/{task}/record", f"/v1/batches/{batch}/record"):
        refused = await ada.ask("DELETE", path)
        assert refused.status_code == 409
        assert "cancel" in refused.json()["detail"]
    await desk.schedule()
    await ada.ask("DELETE", f"/v1/tasks/{task}")
    refused = await ada.ask("DELETE", f"/v1/tasks/{task}/record")
    assert (refused.status_code, "still stops" in refused.json()["detail"]) == (409, True)
    [lease] = agent.leases()
    await agent.report(Released(lease.task, lease.epoch))
    assert (await ada.ask("DELETE", f"/v1/tasks/{task}/record")).status_code == 204


async def test_a_stranger_deletes_nothing(desk: Desk) -> None:
    agent, ada, eve = (
        await desk.agent(),
        await registered(desk, "ada"),
        await registered(desk, "eve"),
    )
    sha256 = await put(ada, b"mine")
    task, batch = await ended(ada, agent)
    paths = (f"/v1/tasks/{task}/record", f"/v1/batches/{batch}/record", f"/v1/artifacts/{sha256}")
    for path in paths:
        assert (await eve.ask("DELETE", path)).status_code == 404
    for path in paths:
        assert (await ada.ask("DELETE", path)).status_code in (204, 404)


async def test_a_batch_is_deleted_with_all_its_tasks_and_its_stream_ends(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    task, batch = await submitted(ada, copies=5)
    await ada.ask("DELETE", f"/v1/batches/{batch}")
    assert (await ada.ask("DELETE", f"/v1/tasks/{task}/record")).status_code == 204
    results = await ada.ask("GET", f"/v1/batches/{batch}/results")
    assert len(results.text.split("\n")) == 5  # four of five, and the stream ended
    assert (await ada.ask("DELETE", f"/v1/batches/{batch}/record")).status_code == 204
    assert (await ada.ask("GET", "/v1/tasks")).json()["items"] == []
    assert (await ada.ask("GET", f"/v1/batches/{batch}")).status_code == 404
    assert await used(desk, ada.user) == 0


async def test_uploads_are_listed_largest_first_and_deleted(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    small, large = await put(ada, b"s" * 10), await put(ada, b"l" * 100)
    page = (await ada.ask("GET", "/v1/artifacts?limit=1")).json()
    assert [(one["sha256"], one["used_as"]) for one in page["items"]] == [(large, "upload")]
    rest = (await ada.ask("GET", f"/v1/artifacts?limit=1&cursor={page['next']}")).json()
    assert [one["sha256"] for one in rest["items"]] == [small]
    assert page["used_bytes"] == 110
    one = {"path": "in", "sha256": small, "size_bytes": 10}
    task, _ = await submitted(ada, inputs=[one])
    refused = await ada.ask("DELETE", f"/v1/artifacts/{small}")
    assert (refused.status_code, task in refused.json()["detail"]) == (409, True)
    assert (await ada.ask("DELETE", f"/v1/artifacts/{large}")).status_code == 204
    assert (await ada.ask("GET", f"/v1/artifacts/{large}")).status_code == 404
    assert files(desk) == {small}


async def test_an_unfinished_upload_is_deleted_with_its_reservation(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    content = b"x" * 100
    sha256 = hashlib.sha256(content).hexdigest()
    headers = {**ada.headers, "content-range": "bytes 0-49/100"}
    part = await desk.bare.put(f"/v1/artifacts/{sha256}", content=content[:50], headers=headers)
    assert part.status_code == 202
    assert await used(desk, ada.user) == 100
    assert (await ada.ask("DELETE", f"/v1/artifacts/{sha256}")).status_code == 204
    assert (await used(desk, ada.user), files(desk)) == (0, set())


# ---- accounts


async def test_a_deleted_account_leaves_nothing_behind(desk: Desk) -> None:
    agent, ada = await desk.agent(), await registered(desk, "ada")
    sha256 = await put(ada, b"an input")
    await put(ada, b"half", **{"content-range": "bytes 0-3/8"})
    one = {"path": "in", "sha256": sha256, "size_bytes": 8}
    await ended(ada, agent, inputs=[one])
    await submitted(ada, copies=3)
    await desk.schedule()
    running = agent.leases()[-1]
    team = (await ada.ask("POST", "/v1/teams", {"name": "alone"})).json()["id"]
    await submitted(ada, team=team)
    for query in ("", f"?team={team}"):
        await ada.ask("PUT", f"/v1/secrets/TOKEN{query}", {"value": "hush"})
    lent = await desk.join(a_key(9), an_offer(), ada.headers, name="hers", cpu_milli=2000)
    await lent.connect()
    key = (await ada.ask("POST", "/v1/keys", {"name": "ci"})).json()["key"]
    done = await ada.ask("DELETE", "/v1/me", {"password": PASSWORD})
    assert done.status_code == 204, done.text
    for headers in (ada.headers, {"authorization": f"Bearer {key}"}):
        assert (await desk.bare.get("/v1/me", headers=headers)).status_code == 401
    assert await desk.server.store.read(accounts.account_by_name("ada")) is None
    assert await desk.server.store.read(nodes.nodes(ada.user)) == ()
    # one task is still stopped by its node; the loop deletes it afterwards
    await agent.report(Released(running.task, running.epoch))
    for lease in agent.leases():
        await agent.report(Released(lease.task, lease.epoch))
    await RetainTasks(desk.server).run_once(desk.server.now)
    assert await desk.server.store.read(_mentions(ada.user)) == {}
    assert await desk.server.store.read(_mentions(decode("team", team))) == {}
    assert files(desk) == set()
    audit = (await desk.get("/v1/audit")).json()["items"]
    [noted] = [one for one in audit if one["action"] == "account.delete"]
    assert (noted["actor"], noted["thing"], noted["facts"]) == (ada.id, ada.id, {})


async def test_nobody_takes_the_name_of_a_deleted_account_and_the_nodes_lent_to_it(
    desk: Desk,
) -> None:
    """Finding 22, with a user instead of a team."""
    lent = replace(an_offer(), audience=("user:ada",))
    agent = await desk.agent(offer=lent)
    ada = await registered(desk, "ada")
    await agent.again().connect()
    await submitted(ada)
    assert await desk.schedule() == 1  # the control: the node is lent to her
    assert (await ada.ask("DELETE", "/v1/me", {"password": PASSWORD})).status_code == 204
    await RetainTasks(desk.server).run_once(desk.server.now)
    wanted = {"name": "ada", "password": PASSWORD}
    refused = await desk.bare.post("/v1/users", json=wanted)
    assert refused.status_code == 409, refused.text
    assert "deleted account" in refused.json()["detail"]
    assert (await registered(desk, "ada-2")).name == "ada-2"


async def test_an_account_is_deleted_only_with_its_password(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    assert (await ada.ask("DELETE", "/v1/me", {})).status_code == 400
    wrong = await ada.ask("DELETE", "/v1/me", {"password": "not the right one"})
    assert (wrong.status_code, "nothing was deleted" in wrong.json()["detail"]) == (403, True)
    assert (await ada.ask("DELETE", "/v1/me", {"name": "ada"})).status_code == 400
    made = await ada.ask("POST", "/v1/keys", {"name": "ci", "scopes": ["account:read"]})
    headers = {"authorization": f"Bearer {made.json()['key']}"}
    by_key = await desk.bare.request(
        "DELETE", "/v1/me", json={"password": PASSWORD}, headers=headers
    )
    assert by_key.status_code == 403
    assert (await ada.ask("GET", "/v1/me")).status_code == 200


async def test_the_last_operator_stays(desk: Desk) -> None:
    refused = await desk.http.request("DELETE", "/v1/me", json={"name": "operator"})
    assert (refused.status_code, "last operator" in refused.json()["detail"]) == (409, True)


async def test_a_team_with_other_members_needs_another_owner_first(desk: Desk) -> None:
    ada, bob = await registered(desk, "ada"), await registered(desk, "bob")
    team = (await ada.ask("POST", "/v1/teams", {"name": "lab"})).json()["id"]
    path = f"/v1/teams/{team}/members"
    await ada.ask("POST", path, {"user": "bob", "role": "member"})
    assert (await bob.ask("POST", "/v1/teams/join", {"team": team})).status_code < 300
    task, _ = await submitted(ada, team=team)
    refused = await ada.ask("DELETE", "/v1/me", {"password": PASSWORD})
    assert (refused.status_code, "'lab'" in refused.json()["detail"]) == (409, True)
    await ada.ask("PATCH", f"{path}/{bob.id}", {"role": "owner"})
    assert (await ada.ask("DELETE", "/v1/me", {"password": PASSWORD})).status_code == 204
    assert (await bob.ask("GET", f"/v1/tasks/{task}")).json()["user"] == ada.id
    [left] = (await bob.ask("GET", path)).json()["items"]
    assert left["user"] == bob.id


async def test_an_export_holds_the_users_own_data_and_nobody_elses(desk: Desk) -> None:
    agent, ada, eve = (
        await desk.agent(),
        await registered(desk, "ada"),
        await registered(desk, "eve"),
    )
    sha256 = await put(ada, b"an input")
    one = {"path": "in", "sha256": sha256, "size_bytes": 8}
    task, _ = await ended(ada, agent, inputs=[one], env={"MINE": "yes"})
    other, _ = await ended(eve, agent)
    for person, name in ((ada, "HF_TOKEN"), (eve, "HER_TOKEN")):
        kept = await person.ask("PUT", f"/v1/secrets/{name}", {"value": "a stored value"})
        assert kept.status_code == 200, kept.text
    answer = await ada.ask("GET", "/v1/me/export")
    assert answer.status_code == 200
    lines = [json.loads(line) for line in answer.text.splitlines()]
    found = {line["kind"]: line for line in lines}
    assert set(found) == {"account", "session", "secret", "artifact", "task", "log"}
    assert found["secret"]["name"] == "HF_TOKEN"
    assert "a stored value" not in answer.text
    assert "HER_TOKEN" not in answer.text
    assert (found["account"]["name"], found["artifact"]["sha256"]) == ("ada", sha256)
    assert (found["task"]["id"], found["task"]["env"]) == (task, {"MINE": "yes"})
    assert found["log"]["items"][0]["text"] == "hello"
    assert other not in answer.text
    key = await desk.person("dave", Permission.CONSUMER)
    assert (await desk.bare.get("/v1/me/export", headers=key)).status_code == 200
    assert (await desk.bare.get("/v1/me/export")).status_code == 401
    assert encode("user", eve.user) not in answer.text
