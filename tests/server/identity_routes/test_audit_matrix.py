"""The audit record is complete: derived from the route table, as permissions are (finding 19)."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from gpool.core.permissions import RULES, Action, AuditRule
from gpool.server.api.routing import endpoints
from gpool.server.identity.throttle import RouteClass
from tests.server.identity_routes.matrix import TABLE, action_of
from tests.server.identity_routes.matrix_world import a_pool
from tests.server.identity_routes.people_desk import PASSWORD, registered, signed, wallet
from tests.server.server_desk import Desk
from tests.tools.nodes import a_key, join_request

pytestmark = pytest.mark.anyio

BY_HAND = {
    Action.WALLET_LINK,
    Action.WALLET_UNLINK,
    Action.PASSWORD_CHANGE,
    Action.PASSWORD_RESET,  # in tests/server/web/test_password_reset.py
    Action.TEAM_DELETE,
    Action.TASK_PREEMPT,
    Action.TASK_DELETE,
    Action.BATCH_DELETE,
    Action.ACCOUNT_DELETE,
}
"""Changes whose request in the matrix is refused: done in `test_what_the_matrix_cannot_do_is_recorded`."""


def declared() -> set[Action]:
    return {action for endpoint in endpoints() for action in endpoint.actions}


async def test_every_change_of_the_route_table_leaves_a_row_in_its_own_transaction(
    desk: Desk,
) -> None:
    """Counts of the address are returned: all requests come from one address in one moment."""
    pool = await a_pool(desk)
    wrong, seen = [], set()
    for key, row in TABLE.items():
        action = action_of(key)
        rule = RULES[action].audit
        desk.clock.advance(0.5)  # an address may send 500 unknown keys, and 50 more a second
        for thing in row.objects:
            for name, (asker, _) in pool.askers.items():
                if asker.kind == "machine":
                    continue  # does another action of the route
                ended = pool.store.ended
                pool.store.audited.clear()
                await pool.ask(name, key[:2], row, thing)
                for rate in RouteClass:  # two thousand requests in one moment
                    desk.server.guard.return_address(rate, "127.0.0.1")
                rows = list(pool.store.audited)
                if pool.store.ended > ended and rule is AuditRule.ALWAYS and not rows:
                    wrong.append((*key, thing, name, "no row"))
                if (
                    rows
                    and (rule is AuditRule.NEVER or rule is AuditRule.OTHERS)
                    and not (rule is AuditRule.OTHERS and asker.is_operator)
                ):
                    wrong.append((*key, thing, name, rows))
                if rows:
                    seen.add(action)
    assert not wrong, "\n".join(map(str, wrong))
    always = {each for each in declared() if RULES[each].audit is AuditRule.ALWAYS}
    others = {each for each in declared() if RULES[each].audit is AuditRule.OTHERS}
    # actions that a route declares after its first one share the rows of that route's other variants
    first = {action_of(key) for key in TABLE}
    assert always & first - seen == BY_HAND
    assert others <= seen


async def test_every_route_by_which_an_operator_reads_others_objects_leaves_a_row(
    desk: Desk,
) -> None:
    """By route, not by action: several routes share an action."""
    pool = await a_pool(desk)
    silent, recorded = [], 0
    for key, row in TABLE.items():
        own = row.objects == ("-",) and not key[2]  # a list of the caller's own objects
        if RULES[action_of(key)].audit is not AuditRule.OTHERS or own:
            continue
        for thing in row.objects:
            desk.clock.advance(3601)  # a repeated read is recorded once an hour
            pool.store.audited.clear()
            status = await pool.ask("operator", key[:2], row, thing)
            recorded += len(pool.store.audited)
            if status == "ok" and not pool.store.audited:
                silent.append((*key, thing, status))
    assert not silent, "\n".join(map(str, silent))
    assert recorded > 20


async def test_what_the_matrix_cannot_do_is_recorded(desk: Desk) -> None:
    ada, bob = await registered(desk, "ada"), await registered(desk, "bob")

    async def recorded(action: str, answer: Any) -> dict[str, Any]:
        assert answer.status_code < 300, answer.text
        newest = (await desk.get("/v1/audit?limit=1")).json()["items"][0]
        assert (newest["action"], newest["outcome"]) == (action, "ok")
        found: dict[str, Any] = newest
        return found

    link = {**await signed(desk, wallet(1), "link", "ada"), "password": PASSWORD}
    await recorded("wallet.link", await ada.ask("POST", "/v1/wallets", link))
    unlink = {**await signed(desk, wallet(1), "unlink", "ada"), "password": PASSWORD}
    path = f"/v1/wallets/{wallet(1).address}"
    await recorded("wallet.unlink", await ada.ask("DELETE", path, unlink))
    change = {"old": PASSWORD, "new": "another long password"}
    await recorded("password.set", await ada.ask("PUT", "/v1/me/password", change))
    made = await ada.ask("POST", "/v1/teams", {"name": "lab"})
    team = (await recorded("team.make", made))["thing"]
    invite = await ada.ask("POST", f"/v1/teams/{team}/invites", {"role": "viewer"})
    assert (await recorded("team.invite", invite))["facts"] == {"role": "viewer"}
    joined = await bob.ask("POST", "/v1/teams/join", {"token": invite.json()["token"]})
    assert (await recorded("team.join", joined))["actor"] == bob.id
    linked = await ada.ask("POST", "/v1/nodes/invites", {})
    await recorded("node.invite", linked)
    challenge = (await desk.bare.post("/v1/nodes/challenges", json={})).json()
    request = join_request(a_key(9), challenge, name="m", token=linked.json()["token"])
    enrolled = await recorded("node.join", await desk.bare.post("/v1/nodes", json=request))
    assert enrolled["facts"]["owner"] == ada.id
    await recorded("team.delete", await ada.ask("DELETE", f"/v1/teams/{team}"))
    await desk.agent()
    task = await desk.command()
    assert await desk.schedule() == 1
    await recorded("task.preempt", await desk.post(f"/v1/tasks/{task}/preempt", {}))
    policy = await desk.http.patch("/v1/admin/policy", json={"order": "fcfs"})
    await recorded("policy.change", policy)
    batch = (await bob.ask("POST", "/v1/tasks", {"command": ["true"], "copies": 2})).json()["batch"]
    assert (await bob.ask("DELETE", f"/v1/batches/{batch}")).status_code < 300
    await recorded("batch.delete", await bob.ask("DELETE", f"/v1/batches/{batch}/record"))
    task = (await bob.ask("POST", "/v1/tasks", {"command": ["true"]})).json()["ids"][0]
    assert (await bob.ask("DELETE", f"/v1/tasks/{task}")).status_code < 300
    await recorded("task.delete", await bob.ask("DELETE", f"/v1/tasks/{task}/record"))
    await recorded("account.delete", await bob.ask("DELETE", "/v1/me", {"password": PASSWORD}))


async def test_an_invite_of_an_operator_is_recorded_from_its_maker_to_its_user(desk: Desk) -> None:
    boss = await registered(desk, "boss")
    everything = {"permissions": ["consumer", "operator"]}
    assert (await desk.http.patch(f"/v1/users/{boss.id}", json=everything)).status_code == 200
    desk.server.credentials.forget()
    invite = await boss.ask("POST", "/v1/users/invites", {"permissions": ["operator"]})
    assert invite.status_code == 201, invite.text
    await registered(desk, "new-operator", invite=invite.json()["token"])
    rows = (await desk.get("/v1/audit?limit=50")).json()["items"][::-1]
    [invited] = [row for row in rows if row["action"] == "user.invite"]
    assert (invited["actor"], invited["facts"]) == (boss.id, {"permissions": "operator"})
    [registering] = [row for row in rows if row["facts"].get("name") == "new-operator"]
    assert registering["facts"]["permissions"] == "operator"
    assert registering["facts"]["invited_by"] == boss.id


async def test_operators_reading_and_cancelling_others_work_is_recorded(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    task = (await ada.ask("POST", "/v1/tasks", {"command": ["true"]})).json()["ids"][0]
    content = b"ada's data"
    sha256 = hashlib.sha256(content).hexdigest()
    await desk.bare.put(f"/v1/artifacts/{sha256}", content=content, headers=ada.headers)
    own = (await desk.post("/v1/tasks", {"command": ["true"]})).json()["ids"][0]

    async def rows() -> list[tuple[str, str]]:
        items = (await desk.get("/v1/audit?limit=50")).json()["items"][::-1]
        return [(row["action"], row["thing"]) for row in items if row["action"] not in USUAL]

    for path in (f"/v1/tasks/{task}", f"/v1/tasks/{task}/logs", f"/v1/tasks/{task}/events"):
        assert (await desk.get(path)).status_code == 200
    assert (await desk.get(f"/v1/artifacts/{sha256}")).status_code == 200
    assert (await desk.get("/v1/tasks?all=true")).status_code == 200
    # The control: the operator's own objects, and ada's reads of her own, leave nothing.
    assert (await desk.get(f"/v1/tasks/{own}")).status_code == 200
    assert (await ada.ask("GET", f"/v1/tasks/{task}")).status_code == 200
    assert (await desk.http.delete(f"/v1/tasks/{own}")).status_code < 300
    read = [("task.read", task), ("artifact.read", sha256), ("task.list_all", "")]
    assert await rows() == read
    assert (await desk.http.delete(f"/v1/tasks/{task}")).status_code < 300
    assert await rows() == [*read, ("task.cancel", task)]
    desk.clock.advance(3601)
    assert (await desk.get(f"/v1/tasks/{task}")).status_code == 200
    assert (await rows())[-1] == ("task.read", task)


USUAL = ("register", "sign_in", "key.make", "key.used")
