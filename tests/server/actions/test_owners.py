"""Owners of the nodes that run a task: names are resolved at submission, ids are enforced, membership counts when a pass is planned."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpool.core.ids import TaskId, decode
from gpool.core.model import Permission
from gpool.transfer.node_proofs import NodeKey
from gpool.wire.frames import Grants
from tests.server.server_desk import Agent, Desk, StoppedClock, an_offer, exited, open_desk

pytestmark = pytest.mark.anyio
BOTH = (Permission.CONSUMER, Permission.PROVIDER)
Headers = dict[str, str]


async def lend(desk: Desk, owner: Headers, name: str, **offered: Any) -> Agent:
    """A connected node of this person."""
    key = NodeKey(hashlib.sha256(name.encode()).digest())
    agent = await desk.join(key, replace(an_offer(), **offered), owner, name=name)
    await agent.connect()
    return agent


async def submitted(desk: Desk, who: Headers, **members: object) -> str:
    answer = await desk.post("/v1/tasks", {"command": ["true"], **members}, headers=who)
    assert answer.status_code == 202, answer.text
    task: str = answer.json()["ids"][0]
    return task


def has(agent: Agent, task: str) -> bool:
    return TaskId(decode("task", task)) in {lease.task for lease in agent.leases()}


def secrets_of(agent: Agent) -> dict[str, str]:
    frames = agent.frames(Grants)
    return {secret.name: secret.value for frame in frames for secret in frame.secrets}


async def join(desk: Desk, team: str, inviter: Headers, who: Headers) -> None:
    invited = await desk.post(f"/v1/teams/{team}/invites", {"role": "member"}, headers=inviter)
    assert invited.status_code == 201, invited.text
    token = invited.json()["token"]
    answer = await desk.post("/v1/teams/join", {"token": token}, headers=who)
    assert answer.status_code in (200, 201), answer.text


async def test_a_stranger_who_invents_labels_tier_and_gpus_does_not_get_secrets(desk: Desk) -> None:
    """The control: the same task for anyone is granted to the stranger, with the secret."""
    ada, eve = await desk.person("ada", *BOTH), await desk.person("eve", *BOTH)
    invented = frozenset({"our-datacentre", "hipaa"})
    stranger = await lend(desk, eve, "trap", labels=invented)
    wanted = {"labels": sorted(invented), "secrets": {"HF_TOKEN": "hf_secret"}}
    kept = await submitted(desk, ada, **wanted)
    assert await desk.schedule() == 0
    assert secrets_of(stranger) == {}
    given = await submitted(desk, ada, **wanted, on="anyone")
    assert await desk.schedule() == 1
    assert has(stranger, given)
    assert not has(stranger, kept)
    assert secrets_of(stranger) == {"HF_TOKEN": "hf_secret"}


async def test_me_and_a_user_by_name_are_enforced_by_the_owners_id(desk: Desk) -> None:
    ada, bob = await desk.person("ada", *BOTH), await desk.person("bob", *BOTH)
    eve = await desk.person("eve", *BOTH)
    hers, his = await lend(desk, ada, "hers"), await lend(desk, bob, "his")
    strange = await lend(desk, eve, "ada-hers")  # names of nodes count for nothing
    mine = [await submitted(desk, ada, on="me") for _ in range(3)]
    bobs = await submitted(desk, ada, on="user:bob")
    await desk.schedule()
    assert sum(has(hers, task) for task in mine) == 2  # it has two CPUs
    assert has(his, bobs)
    assert strange.leases() == []


async def test_a_teams_members_count_when_the_pass_is_planned(desk: Desk) -> None:
    ada, bob = await desk.person("ada", *BOTH), await desk.person("bob", *BOTH)
    team = (await desk.post("/v1/teams", {"name": "lab"}, headers=ada)).json()["id"]
    his = await lend(desk, bob, "his")
    early = await submitted(desk, ada, on="team:lab")
    assert await desk.schedule() == 0
    said = (await desk.get(f"/v1/tasks/{early}/explain", headers=ada)).json()
    assert said["sentence"] == (
        "No node of team lab can run it; with --on anyone it could run on his."
    )
    assert [one["change"] for one in said["suggestions"] if one["kind"] == "on"] == ["--on anyone"]
    await join(desk, team, ada, bob)
    assert await desk.schedule() == 1
    assert has(his, early)
    await his.report(*(exited(lease) for lease in his.leases()))
    member = (await desk.get("/v1/me", headers=bob)).json()["id"]
    left = await desk.http.delete(f"/v1/teams/{team}/members/{member}", headers=ada)
    assert left.status_code == 204, left.text
    late = await submitted(desk, ada, on="team:lab")
    assert await desk.schedule() == 0
    assert not has(his, late)


async def test_a_deleted_teams_members_are_strangers_again(desk: Desk) -> None:
    ada, bob = await desk.person("ada", *BOTH), await desk.person("bob", *BOTH)
    team = (await desk.post("/v1/teams", {"name": "lab"}, headers=ada)).json()["id"]
    await join(desk, team, ada, bob)
    his = await lend(desk, bob, "his")
    await submitted(desk, ada, on="team:lab")
    assert (await desk.http.delete(f"/v1/teams/{team}", headers=ada)).status_code == 204
    assert await desk.schedule() == 0
    assert his.leases() == []


async def test_secrets_go_to_own_and_team_nodes_without_a_word(desk: Desk) -> None:
    ada, bob = await desk.person("ada", *BOTH), await desk.person("bob", *BOTH)
    team = (await desk.post("/v1/teams", {"name": "lab"}, headers=ada)).json()["id"]
    await join(desk, team, ada, bob)
    his = await lend(desk, bob, "his")
    task = await submitted(desk, ada, secrets={"TOKEN": "s"})
    assert await desk.schedule() == 1
    assert secrets_of(his) == {"TOKEN": "s"}
    shown = (await desk.get(f"/v1/tasks/{task}", headers=ada)).json()
    assert shown["on"] == "team"
    await his.report(*(exited(lease) for lease in his.leases()))
    assert (await desk.get(f"/v1/tasks/{task}/result", headers=ada)).json()["on"] == "team"


async def test_names_that_mean_nothing_are_refused(desk: Desk) -> None:
    ada, eve = await desk.person("ada", *BOTH), await desk.person("eve", *BOTH)
    await desk.post("/v1/teams", {"name": "theirs"}, headers=eve)
    for on, status, words in (
        ("team:none", 404, "not in a team"),
        ("team:theirs", 404, "not in a team"),
        ("everyone", 400, "write me, team, team:NAME, user:NAME or anyone"),
        ("me,anyone", 400, "'anyone' alone"),
    ):
        answer = await desk.post("/v1/tasks", {"command": ["true"], "on": on}, headers=ada)
        assert (answer.status_code, words in answer.json()["detail"]) == (status, True), answer.text


async def test_a_name_that_nobody_has_is_answered_like_that_of_a_user_without_nodes(
    desk: Desk,
) -> None:
    ada, eve = await desk.person("ada", *BOTH), await desk.person("eve", *BOTH)
    await desk.person("bob", *BOTH)  # lends nothing
    hers = await lend(desk, eve, "hers")
    said = {}
    for name in ("bob", "nobody"):
        task = await submitted(desk, ada, on=f"user:{name}")
        assert await desk.schedule() == 0
        shown = (await desk.get(f"/v1/tasks/{task}", headers=ada)).text
        why = (await desk.get(f"/v1/tasks/{task}/explain", headers=ada)).json()
        assert why["sentence"] == (
            f"No node of user {name} can run it; with --on anyone it could run on hers."
        )
        said[name] = [
            text.replace(task, "TASK").replace(name, "NAME") for text in (shown, str(why))
        ]
        ended = await desk.http.delete(f"/v1/tasks/{task}", headers=ada)
        assert ended.is_success, ended.text
    assert differing(*(text for text, _ in said.values())) <= {"batch", "created_at", "queued_at"}
    assert said["bob"][1] == said["nobody"][1]
    assert hers.leases() == []


def differing(one: str, other: str) -> set[str]:
    """Names of the members in which two documents differ."""
    first, second = json.loads(one), json.loads(other)
    assert first.keys() == second.keys()
    return {name for name in first if first[name] != second[name]}


async def test_the_answer_of_a_submission_says_who_may_run_it(desk: Desk) -> None:
    ada = await desk.person("ada", *BOTH)
    for members, on in (({}, None), ({"on": "anyone"}, None), ({"on": "me"}, "me")):
        key = {**ada, "idempotency-key": f"k{on}{len(members)}"}
        body = {"command": ["true"], **members}
        first = await desk.post("/v1/tasks", body, headers=key)
        again = await desk.post("/v1/tasks", body, headers=key)
        assert first.json().get("on") == on
        assert again.content == first.content


@pytest.mark.parametrize(
    ("default", "secrets", "on"),
    [
        ("anyone", {}, "anyone"),
        ("team", {}, "team"),
        ("me", {}, "me"),
        ("me", {"TOKEN": "s"}, "me"),
        ("team", {"TOKEN": "s"}, "team"),
    ],
)
async def test_the_pools_default_counts_for_tasks_that_do_not_say(
    data: Path, default: str, secrets: dict[str, str], on: str
) -> None:
    desk = await open_desk(data, StoppedClock(), default_on=default)
    ada, eve = await desk.person("ada", *BOTH), await desk.person("eve", *BOTH)
    stranger = await lend(desk, eve, "trap")
    task = await submitted(desk, ada, secrets=secrets)
    asked = await submitted(desk, ada, secrets=secrets, on="anyone")
    await desk.schedule()
    assert (await desk.get(f"/v1/tasks/{task}", headers=ada)).json()["on"] == on
    assert (has(stranger, task), has(stranger, asked)) == (on == "anyone", True)
    await desk.http.aclose()
    await desk.server.store.close()


async def test_owners_outlive_a_restart(desk: Desk, data: Path) -> None:
    ada, eve = await desk.person("ada", *BOTH), await desk.person("eve", *BOTH)
    agent = await lend(desk, eve, "trap")
    await submitted(desk, ada, on="me")
    anyones = await submitted(desk, ada)
    desk.server.picture.invalidate()
    await desk.schedule()
    assert [lease.task for lease in agent.leases()] == [TaskId(decode("task", anyones))]


# ---- names in owners' policies


async def _renamed_lab(desk: Desk) -> tuple[Headers, Headers, Agent]:
    """A node lends to team lab, which is renamed afterwards."""
    ada, mallory = await desk.person("ada", *BOTH), await desk.person("mallory", *BOTH)
    team = (await desk.post("/v1/teams", {"name": "lab"}, headers=ada)).json()["id"]
    agent = await lend(desk, ada, "lab-node", audience=("team:lab",))
    renamed = await desk.http.patch(f"/v1/teams/{team}", json={"name": "lab2"}, headers=ada)
    assert renamed.status_code == 200, renamed.text
    ours = await submitted(desk, ada, team=team)
    await desk.schedule()
    assert has(agent, ours), "a renamed team is the team that the owner named"
    return ada, mallory, agent


async def test_a_name_that_a_team_gave_up_is_nobody_elses(desk: Desk) -> None:
    ada, mallory, agent = await _renamed_lab(desk)
    refused = await desk.post("/v1/teams", {"name": "lab"}, headers=mallory)
    assert refused.status_code == 409
    assert "another team had the name" in refused.json()["detail"]
    theirs = (await desk.post("/v1/teams", {"name": "other"}, headers=mallory)).json()["id"]
    taken = await desk.http.patch(f"/v1/teams/{theirs}", json={"name": "lab"}, headers=mallory)
    assert taken.status_code == 409
    await submitted(desk, mallory, team=theirs)
    again = agent.again()
    await again.connect()
    assert await desk.schedule() == 0
    [team] = (await desk.get("/v1/teams", headers=ada)).json()["items"]
    back = await desk.http.patch(f"/v1/teams/{team['id']}", json={"name": "lab"}, headers=ada)
    assert back.status_code == 200, "its own former name is free for the team itself"


async def test_without_the_record_of_names_the_attack_works(desk: Desk, data: Path) -> None:
    """The control: names free again after a rename lend the node to the attacker."""
    _, mallory, agent = await _renamed_lab(desk)
    with sqlite3.connect(data / "gpool.db") as raw:
        raw.execute("DELETE FROM team_names WHERE name = 'lab'")
    made = await desk.post("/v1/teams", {"name": "lab"}, headers=mallory)
    assert made.status_code == 201
    theirs = await submitted(desk, mallory, team=made.json()["id"])
    again = agent.again()
    await again.connect()
    await desk.schedule()
    assert has(again, theirs)


async def test_a_deleted_team_leaves_no_name_and_its_node_lends_to_nobody(desk: Desk) -> None:
    ada, mallory = await desk.person("ada", *BOTH), await desk.person("mallory", *BOTH)
    team = (await desk.post("/v1/teams", {"name": "lab"}, headers=ada)).json()["id"]
    agent = await lend(desk, ada, "lab-node", audience=("team:lab",))
    assert (await desk.http.delete(f"/v1/teams/{team}", headers=ada)).status_code == 204
    assert (await desk.post("/v1/teams", {"name": "lab"}, headers=mallory)).status_code == 409
    again = agent.again()
    await again.connect()
    [node] = (await desk.get("/v1/nodes", headers=ada)).json()["items"]
    assert node["problems"] == ["its audience names team:lab, which is not known here"]
