"""A task's secrets: sealed where they lie, opened for the node that runs the task, shown nowhere."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from gpool.server.store.operations.identity import sealed_fields
from gpool.wire.frames import Grants
from tests.server.server_desk import Desk, exited, open_desk

pytestmark = pytest.mark.anyio
SECRET = "tok-5e55ed-0f-a-secret"


def secrets_sent(frames: list[Grants]) -> dict[str, str]:
    return {secret.name: secret.value for frame in frames for secret in frame.secrets}


async def test_a_secret_reaches_the_node_that_has_the_lease(desk: Desk) -> None:
    agent = await desk.agent()
    await desk.command(secrets={"TOKEN": SECRET, "OTHER": "söme\nthing"}, env={"PLAIN": "p"})
    await desk.schedule()
    [grants] = agent.frames(Grants)
    assert secrets_sent([grants]) == {"TOKEN": SECRET, "OTHER": "söme\nthing"}
    assert grants.specs[0][1].secrets == ("OTHER", "TOKEN")
    assert SECRET not in repr(grants)


async def test_a_node_that_comes_back_is_told_the_secret_again(desk: Desk) -> None:
    agent = await desk.agent()
    await desk.command(secrets={"TOKEN": SECRET})
    await desk.schedule()
    again = agent.again()
    await again.connect()
    assert secrets_sent(again.frames(Grants)) == {"TOKEN": SECRET}


async def test_another_server_over_the_same_store_opens_it(desk: Desk, data: Path) -> None:
    await desk.command(secrets={"TOKEN": SECRET})
    other = await open_desk(data, desk.clock)
    agent = await other.agent()
    await other.schedule()
    assert secrets_sent(agent.frames(Grants)) == {"TOKEN": SECRET}
    await other.http.aclose()
    await other.server.store.close()


async def test_no_answer_ever_shows_a_secret(desk: Desk) -> None:
    agent = await desk.agent()
    document = {"command": ["true"], "secrets": {"TOKEN": SECRET}}
    first = await desk.post("/v1/tasks", document, headers={"idempotency-key": "one"})
    again = await desk.post("/v1/tasks", document, headers={"idempotency-key": "one"})
    assert again.content == first.content
    task = first.json()["ids"][0]
    await desk.schedule()
    await agent.report(*(exited(lease) for lease in agent.leases()))
    pages = [first]
    for path in ("", "/result", "/explain", "/events", "/logs"):
        pages.append(await desk.get(f"/v1/tasks/{task}{path}"))
    pages.append(await desk.get("/v1/tasks"))
    pages.append(await desk.get("/metrics"))
    for page in pages:
        assert page.status_code in (200, 202), page.text
        assert SECRET not in page.text


async def test_no_error_repeats_a_secret(desk: Desk) -> None:
    wrong = [
        {"command": ["true"], "secrets": {"TOKEN": [SECRET]}},
        {"command": ["true"], "secrets": {"A=B": SECRET}},
        {"command": ["true"], "secrets": {"TOKEN": SECRET + "\0"}},
        {"command": ["true"], "secrets": {"TOKEN": SECRET * 9999}},
        {"command": ["true"], "secrets": {"TOKEN": SECRET}, "env": {"TOKEN": "x"}},
        {"command": ["true"], "secrets": SECRET},
        {"command": ["true"], "secrets": {"TOKEN": SECRET}, "batch": "b-nothing"},
    ]
    for document in wrong:
        answer = await desk.post("/v1/tasks", document)
        assert answer.status_code == 400, answer.text
        assert SECRET not in answer.text
    cut = await desk.http.post("/v1/tasks", content=json.dumps(wrong[1])[:-2])
    assert cut.status_code == 400
    assert SECRET not in cut.text


async def test_equal_secrets_share_a_spec_and_others_do_not(desk: Desk) -> None:
    for value in (SECRET, SECRET, "another"):
        await desk.command(secrets={"TOKEN": value})
    fields = await desk.server.store.read(sealed_fields.sealed_fields(None, 100))
    assert len([field for field in fields if field.table == "task_secrets"]) == 2


async def test_a_task_whose_secret_was_changed_in_the_store_ends_and_says_so(
    desk: Desk, data: Path
) -> None:
    agent = await desk.agent()
    task = await desk.command(secrets={"TOKEN": SECRET})
    fine = await desk.command(secrets={"TOKEN": "fine"})
    with sqlite3.connect(data / "gpool.db") as raw:
        rows = raw.execute("SELECT spec_id, sealed FROM task_secrets ORDER BY spec_id").fetchall()
        raw.execute(
            "UPDATE task_secrets SET sealed = ? WHERE spec_id = ?", (rows[1][1], rows[0][0])
        )
    await desk.schedule()
    ended = (await desk.get(f"/v1/tasks/{task}")).json()
    assert ended["status"] == "failed"
    assert "cannot be decrypted" in ended["error_text"]
    assert (await desk.get(f"/v1/tasks/{fine}")).json()["status"] == "leased"
    assert secrets_sent(agent.frames(Grants)) == {"TOKEN": "fine"}
