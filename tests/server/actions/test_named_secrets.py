"""Stored secrets: copied into tasks by name, set by owners, sealed where they lie, shown nowhere."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from gpool.server.scheduling.loops import RotateKeys
from gpool.server.store.operations.identity import named_secrets, sealed_fields
from gpool.wire.frames import Grants
from gpool.wire.identity import MAX_SECRET_BYTES
from tests.server.identity_routes.people_desk import Somebody, bearer, joins, registered
from tests.server.server_desk import Agent, Desk, exited

pytestmark = pytest.mark.anyio
SECRET = "tok-5e55ed-0f-a-secret"


async def stored(who: Somebody, name: str = "TOKEN", value: str = SECRET, team: str = "") -> None:
    query = f"?team={team}" if team else ""
    kept = await who.ask("PUT", f"/v1/secrets/{name}{query}", {"value": value})
    assert kept.status_code == 200, kept.text


async def submitted(who: Somebody, *names: str, **members: Any) -> Any:
    """The answer to a task that uses these stored secrets."""
    wanted = {"command": ["true"], "on": "anyone", "secrets": dict.fromkeys(names), **members}
    return await who.ask("POST", "/v1/tasks", wanted)


async def received(desk: Desk, agent: Agent) -> list[dict[str, str]]:
    """Secrets of each task that starts now, in the order of the tasks."""
    before = len(agent.frames(Grants))
    await desk.schedule()
    frames = agent.frames(Grants)[before:]
    specs = sorted({secret.spec for frame in frames for secret in frame.secrets})
    found = [
        {one.name: one.value for frame in frames for one in frame.secrets if one.spec == spec}
        for spec in specs
    ]
    await agent.report(*(exited(lease) for lease in agent.leases()))
    return found


async def a_team(desk: Desk) -> tuple[str, Somebody, Somebody, Somebody]:
    """A team's id, its owner, a member and a viewer."""
    owner, member, viewer = [await registered(desk, name) for name in ("olga", "mel", "vic")]
    team = (await owner.ask("POST", "/v1/teams", {"name": "lab"})).json()["id"]
    await joins(owner, team, member)
    await joins(owner, team, viewer, "viewer")
    return team, owner, member, viewer


async def test_a_task_gets_the_stored_value_by_its_name(desk: Desk) -> None:
    agent, ada = await desk.agent(), await registered(desk, "ada")
    await stored(ada)
    await stored(ada, "OTHER", "söme\nthing")
    assert (await submitted(ada, "TOKEN", "OTHER")).status_code == 202
    assert await received(desk, agent) == [{"TOKEN": SECRET, "OTHER": "söme\nthing"}]
    # The control: a value that is given counts, and no stored one is added.
    given = await submitted(ada, secrets={"TOKEN": "given", "OTHER": None})
    assert given.status_code == 202, given.text
    assert await received(desk, agent) == [{"TOKEN": "given", "OTHER": "söme\nthing"}]


async def test_a_task_keeps_the_value_of_its_submission(desk: Desk) -> None:
    agent, ada = await desk.agent(), await registered(desk, "ada")
    await stored(ada, value="first")
    await submitted(ada, "TOKEN")
    await stored(ada, value="second")
    await submitted(ada, "TOKEN")
    assert (await ada.ask("DELETE", "/v1/secrets/TOKEN")).status_code == 204
    assert await received(desk, agent) == [{"TOKEN": "first"}, {"TOKEN": "second"}]
    assert (await ada.ask("DELETE", "/v1/secrets/TOKEN")).status_code == 404
    assert (await submitted(ada, "TOKEN")).status_code == 422


async def test_calls_of_one_batch_take_the_value_of_their_time(desk: Desk) -> None:
    agent, ada = await desk.agent(), await registered(desk, "ada")
    await stored(ada, value="first")
    batch = (await submitted(ada, "TOKEN", more=True)).json()["batch"]
    await submitted(ada, "TOKEN", more=True, batch=batch)
    await stored(ada, value="second")
    last = await submitted(ada, "TOKEN", batch=batch)
    assert last.status_code == 202, last.text
    # equal values share a spec; the third call has another, and waits for the first two
    assert await received(desk, agent) == [{"TOKEN": "first"}]
    assert await received(desk, agent) == [{"TOKEN": "second"}]


async def test_an_unknown_name_is_answered_with_the_command_that_stores_it(desk: Desk) -> None:
    ada, eve = await registered(desk, "ada"), await registered(desk, "eve")
    await stored(ada)
    assert (await submitted(ada, "TOKEN")).status_code == 202  # the control: her own
    for name in ("TOKEN", "MISSING"):
        refused = await submitted(eve, name)
        assert refused.status_code == 422
        assert f"gpool secret set {name}" in refused.json()["detail"]
    listed = await eve.ask("GET", "/v1/secrets")
    assert listed.json()["items"] == []


async def test_members_use_the_secrets_that_owners_of_a_team_set(desk: Desk) -> None:
    agent = await desk.agent()
    team, owner, member, viewer = await a_team(desk)
    stranger = await registered(desk, "stranger")
    for who, status in ((member, 403), (viewer, 403), (stranger, 404)):
        path = f"/v1/secrets/TOKEN?team={team}"
        assert (await who.ask("PUT", path, {"value": "planted"})).status_code == status
        assert (await who.ask("DELETE", path)).status_code == status
    await stored(owner, team=team)  # the control
    listed = await member.ask("GET", f"/v1/secrets?team={team}")
    assert [(one["name"], one["team"]) for one in listed.json()["items"]] == [("TOKEN", team)]
    for who, status in ((viewer, 403), (stranger, 404)):
        assert (await who.ask("GET", f"/v1/secrets?team={team}")).status_code == status
        assert (await submitted(who, "TOKEN", team=team)).status_code == status
    assert (await submitted(member, "TOKEN")).status_code == 422  # not a task of the team
    assert (await submitted(member, "TOKEN", team=team)).status_code == 202
    assert await received(desk, agent) == [{"TOKEN": SECRET}]
    gone = await owner.ask("DELETE", f"/v1/teams/{team}/members/{member.id}")
    assert gone.status_code == 204
    assert (await submitted(member, "TOKEN", team=team)).status_code == 404


async def test_a_team_secret_comes_before_the_members_own(desk: Desk) -> None:
    agent = await desk.agent()
    team, owner, member, _ = await a_team(desk)
    await stored(member, value="of mel")
    await stored(member, "OWN", "of mel too")
    await stored(owner, value="of the team", team=team)
    await submitted(member, "TOKEN", "OWN", team=team)
    assert await received(desk, agent) == [{"TOKEN": "of the team", "OWN": "of mel too"}]
    await submitted(member, "TOKEN")
    assert await received(desk, agent) == [{"TOKEN": "of mel"}]


async def test_an_api_key_of_a_team_never_gets_its_users_own_secrets(desk: Desk) -> None:
    team, owner, member, _ = await a_team(desk)
    await stored(member, "OWN")
    await stored(owner, "OF_TEAM", team=team)
    made = await member.ask("POST", "/v1/keys", {"name": "ci", "team": team})
    headers = bearer(made.json()["key"])
    for name, status in (("OWN", 422), ("OF_TEAM", 202)):
        wanted = {"command": ["true"], "secrets": {name: None}, "team": team}
        answer = await desk.bare.post("/v1/tasks", json=wanted, headers=headers)
        assert answer.status_code == status, answer.text
    assert (await submitted(member, "OWN", team=team)).status_code == 202  # the control
    assert (await desk.bare.get("/v1/secrets", headers=headers)).status_code == 404


async def test_no_answer_row_or_record_shows_a_stored_value(desk: Desk, data: Path) -> None:
    ada = await registered(desk, "ada")
    path = "/v1/secrets/A_VISIBLE_NAME"
    answers = [await ada.ask("PUT", path, {"value": SECRET})]
    answers.append(await submitted(ada, "A_VISIBLE_NAME", env={"PLAIN": "a visible value"}))
    task = answers[1].json()["ids"][0]
    for page in ("/v1/secrets", "/v1/me/export", "/v1/me", f"/v1/tasks/{task}", "/v1/tasks"):
        answers.append(await ada.ask("GET", page))
    answers.append(await desk.get("/v1/audit"))
    facts = [one["facts"] for one in answers[-1].json()["items"] if one["action"] == "secret.set"]
    assert facts == [{"name": "A_VISIBLE_NAME"}]
    answers.append(await desk.get("/metrics"))
    for answer in answers:
        assert answer.status_code in (200, 202), answer.text
        assert SECRET not in answer.text
    with sqlite3.connect(data / "gpool.db") as raw:
        dump = "\n".join(raw.iterdump())
    assert "A_VISIBLE_NAME" in dump  # the control: the dump shows what is not sealed
    assert SECRET not in dump
    assert SECRET.encode().hex() not in dump.lower()


async def test_no_error_repeats_a_value(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    for name, value, status in (
        ("TOKEN", [SECRET], 400),
        ("TOKEN", SECRET + "\0", 400),
        ("TOKEN", "", 400),
        ("TOKEN", SECRET * 4000, 400),
        ("TOKEN", "ü" * (MAX_SECRET_BYTES - 10) + SECRET, 400),
        ("TOKEN", "ü" * (MAX_SECRET_BYTES // 2) + SECRET, 413),
        ("A=B", SECRET, 400),
        ("1TOKEN", SECRET, 400),
        ("A-B", SECRET, 400),
        ("T" * 200, SECRET, 400),
    ):
        answer = await ada.ask("PUT", f"/v1/secrets/{name}", {"value": value})
        assert answer.status_code == status, answer.text
        assert SECRET not in answer.text
    await stored(ada, value="x" * MAX_SECRET_BYTES)  # the control: the largest one
    assert (await submitted(ada, "TOKEN")).status_code == 202


async def test_stored_values_count_for_the_limit_of_a_task(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    names = [f"T{number}" for number in range(4)]
    for name in names:
        await stored(ada, name, "x" * MAX_SECRET_BYTES)
    assert (await submitted(ada, *names[:3])).status_code == 202
    refused = await submitted(ada, *names)
    assert (refused.status_code, "'secrets' has" in refused.json()["detail"]) == (400, True)


async def test_an_account_has_a_bounded_number_of_secrets(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    for number in range(named_secrets.MOST):
        await stored(ada, f"T{number}")
    refused = await ada.ask("PUT", "/v1/secrets/ONE_MORE", {"value": SECRET})
    assert (refused.status_code, "gpool secret rm" in refused.json()["detail"]) == (409, True)
    await stored(ada, "T0", "another")  # the control: a replacement
    assert len((await ada.ask("GET", "/v1/secrets")).json()["items"]) == named_secrets.MOST


async def test_a_repeated_request_gets_the_same_answer(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    once = {"idempotency-key": "set"}
    for _ in range(2):
        kept = await ada.ask("PUT", "/v1/secrets/TOKEN", {"value": SECRET}, headers=once)
        assert kept.status_code == 200, kept.text
    changed = await ada.ask("PUT", "/v1/secrets/TOKEN", {"value": "other"}, headers=once)
    assert changed.status_code == 409, changed.text
    once = {"idempotency-key": "task"}
    wanted = {"command": ["true"], "secrets": {"TOKEN": None}}
    first = await ada.ask("POST", "/v1/tasks", wanted, headers=once)
    assert first.status_code == 202, first.text
    assert (await ada.ask("DELETE", "/v1/secrets/TOKEN")).status_code == 204
    again = await ada.ask("POST", "/v1/tasks", wanted, headers=once)
    assert (again.status_code, again.json()) == (202, first.json())
    wanted["command"] = ["false"]
    assert (await ada.ask("POST", "/v1/tasks", wanted, headers=once)).status_code == 409
    # The control: a new request finds no stored secret.
    assert (await ada.ask("POST", "/v1/tasks", wanted)).status_code == 422


async def test_a_key_rotation_reseals_stored_secrets(desk: Desk) -> None:
    agent, ada = await desk.agent(), await registered(desk, "ada")
    await stored(ada)

    async def sealed() -> bytes:
        fields = await desk.server.store.read(sealed_fields.sealed_fields(None, 100))
        [found] = [field.sealed for field in fields if field.table == "named_secrets"]
        return found

    before = await sealed()
    assert (await desk.post("/v1/admin/keys/rotate", {})).status_code == 202
    await RotateKeys(desk.server).run_once(desk.server.now)
    assert (await sealed())[1:9] != before[1:9]  # the id of its data key
    assert (await submitted(ada, "TOKEN")).status_code == 202
    assert await received(desk, agent) == [{"TOKEN": SECRET}]


async def test_a_value_that_was_moved_in_the_store_opens_for_nobody(desk: Desk, data: Path) -> None:
    """The seal names its row: somebody who writes to the database cannot use another user's value."""
    ada, eve = await registered(desk, "ada"), await registered(desk, "eve")
    await stored(ada)
    await stored(eve, value="of eve")
    with sqlite3.connect(data / "gpool.db") as raw:
        [(value,)] = raw.execute(
            "SELECT sealed FROM named_secrets WHERE holder_id = ?", (ada.user,)
        ).fetchall()
        raw.execute("UPDATE named_secrets SET sealed = ? WHERE holder_id = ?", (value, eve.user))
    refused = await submitted(eve, "TOKEN")
    assert (refused.status_code, "gpool secret set TOKEN" in refused.json()["detail"]) == (
        409,
        True,
    )
    assert SECRET not in refused.text
    assert (await submitted(ada, "TOKEN")).status_code == 202  # the control


async def test_stored_secrets_count_as_secrets_everywhere_else(desk: Desk) -> None:
    ada = await registered(desk, "ada")
    await stored(ada)
    verified = await submitted(ada, "TOKEN", verify=2)
    assert (verified.status_code, "secrets" in verified.json()["detail"]) == (400, True)
    twice = await submitted(ada, "TOKEN", env={"TOKEN": "x"})
    assert (twice.status_code, "in 'env' and in 'secrets'" in twice.json()["detail"]) == (400, True)
    known = len(desk.server.repeated)
    assert (await submitted(ada, "TOKEN")).status_code == 202
    assert len(desk.server.repeated) == known  # its stored value may change: never remembered
    where = await ada.ask("POST", "/v1/tasks", {"command": ["true"], "secrets": {"TOKEN": None}})
    assert where.json()["on"] == "team"  # not anyone's nodes, unless it says so
    quote = {"command": ["true"], "secrets": {"NOT_STORED_YET": None}}
    assert (await ada.ask("POST", "/v1/quotes", quote)).status_code == 200


async def test_secrets_go_with_their_team_and_their_user(desk: Desk, data: Path) -> None:
    team, owner, member, _ = await a_team(desk)
    await stored(owner, team=team)
    await stored(member)

    def left() -> list[str]:
        with sqlite3.connect(data / "gpool.db") as raw:
            rows = raw.execute("SELECT holder_kind FROM named_secrets ORDER BY 1").fetchall()
        return [kind for (kind,) in rows]

    assert left() == ["team", "user"]
    assert (await owner.ask("DELETE", f"/v1/teams/{team}")).status_code == 204
    assert left() == ["user"]
    gone = await member.ask("DELETE", "/v1/me", {"password": "a long enough password"})
    assert gone.status_code == 204, gone.text
    assert left() == []
