"""Pages in process: what they show, what their forms do, and that shared views show nobody another user's tasks."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from gpool.server.app import running
from gpool.server.web.live import EVENT_STREAM
from gpool.wire.frames import LogChunk, Progressed, Started
from tests.server.identity_routes.people_desk import Somebody, joins, registered
from tests.server.server_desk import Desk, an_offer
from tests.server.web.browser import Browser
from tests.tools.processes import PATIENCE_S

pytestmark = pytest.mark.anyio
BAD = "<img src=x onerror=alert(1)>\u202e\x1b[2J"


async def visiting(desk: Desk, name: str = "ada") -> tuple[Browser, Somebody]:
    person = await registered(desk, name)
    browser = Browser(desk)
    await browser.sign_in(name)
    return browser, person


async def submitted(person: Somebody, **members: Any) -> str:
    answer = await person.ask("POST", "/v1/tasks", {"command": ["true"], **members})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["ids"][0])


async def test_an_empty_pool_shows_how_to_join(desk: Desk) -> None:
    browser, _ = await visiting(desk)
    page = (await browser.get("/")).text
    assert "gpool join LINK" in page
    assert "None of your tasks waits." in page


async def test_every_gpu_is_a_bar_and_the_filter_finds_it(desk: Desk) -> None:
    await desk.agent("vega", an_offer(8, 3))
    browser, _ = await visiting(desk)
    page = (await browser.get("/")).text
    assert page.count('class="bar"') == 3
    assert "A100" in page
    assert "vega" in page
    assert ">operator<" not in page.partition("<main")[2]  # owners are ids to other users
    assert (await browser.get("/?q=nothing")).text.count('class="bar"') == 0
    assert (await browser.get("/?state=busy")).text.count('class="bar"') == 0
    assert (await browser.get("/?state=free&tier=container&q=VEGA")).text.count('class="bar"') == 3


async def test_a_visitor_sees_their_own_queue_only(desk: Desk) -> None:
    ada, person = await visiting(desk)
    eve, _ = await visiting(desk, "eve")
    await submitted(person, name="private-name", gpu=1)
    assert "private-name" in (await ada.get("/")).text
    assert "private-name" not in (await eve.get("/")).text
    assert (await eve.get("/?all=1")).status_code == 403


async def test_a_shared_task_view_is_not_shown_to_others(desk: Desk) -> None:
    ada, person = await visiting(desk)
    eve, _ = await visiting(desk, "eve")
    task = await submitted(person, name="private-name")
    assert (await ada.get(f"/tasks/{task}")).status_code == 200  # rendered and kept
    for path in (f"/tasks/{task}", f"/live/tasks/{task}", f"/tasks/{task}/log.txt"):
        answer = await eve.get(path)
        assert answer.status_code == 404
        assert "private-name" not in answer.text


async def test_hostile_names_are_text_everywhere(desk: Desk) -> None:
    browser, person = await visiting(desk)
    task = await submitted(person, name=BAD, command=["echo", BAD])
    for path in ("/", "/tasks", f"/tasks/{task}", f"/tasks/new?like={task}"):
        page = (await browser.get(path)).text
        assert "<img" not in page
        assert not {"\u202e", "\x1b"} & set(page)
        assert "&lt;img" in page


async def test_tasks_are_paged_filtered_and_cancelled_together(desk: Desk) -> None:
    browser, person = await visiting(desk)
    for number in range(60):
        await submitted(person, name=f"job-{number}")
    first = (await browser.get("/tasks")).text
    assert "job-59" in first
    assert "job-9<" not in first
    older = re.search(r'href="([^"]+)" rel="next"', first)
    assert older is not None
    assert "job-9<" in (await browser.get(older[1].replace("&amp;", "&"))).text
    chosen = re.findall(r'name="id" value="(t-[^"]+)"', first)[:3]
    assert (await browser.submit("/tasks/cancel", id=chosen)).status_code == 303
    cancelled = (await browser.get("/tasks?status=cancelled")).text
    assert all(id_ in cancelled for id_ in chosen)
    assert (await browser.get("/tasks?status=nonsense")).status_code == 400


async def test_the_form_submits_a_command_and_a_script(desk: Desk) -> None:
    browser, person = await visiting(desk)
    quote = await browser.submit("/tasks/new/quote", command="echo 'a b'", gpu="H100:2")
    assert "gpool run --gpu H100:2 -- echo" in quote.text
    answer = await browser.submit("/tasks/new", script="print(6*7)\r\n", name="answer")
    assert answer.status_code == 303, answer.text
    task = (await person.ask("GET", f"/v1{answer.headers['location']}")).json()
    assert (task["command"], task["name"]) == (["python", "script.py"], "answer")
    for fields, why in (
        ({}, "type a command"),
        ({"command": "'"}, "close its quotes"),
        ({"command": "x", "gpu_other": "??"}, "??"),
        ({"command": "x", "hours": "soon"}, "not a number"),
    ):
        refused = await browser.submit("/tasks/new", **fields)
        assert refused.status_code == 400
        assert why in refused.text


async def test_an_owner_pauses_drains_and_invites(desk: Desk) -> None:
    browser = Browser(desk)
    code = (await desk.post("/v1/auth/links")).json()["path"].removeprefix("/in/")
    await browser.post("/in", {"code": code})
    await desk.agent("vega", an_offer(8, 2))
    page = (await browser.get("/nodes")).text
    node = re.search(r"/nodes/(n-[^/]+)/availability", page)
    gpu = re.search(r"/gpus/(g-[^/]+)/availability", page)
    assert node is not None
    assert gpu is not None
    for to in ("draining", "paused", "available"):
        await browser.submit(f"/nodes/{node[1]}/availability", to=to)
        found = (await desk.get(f"/v1/nodes/{node[1]}")).json()
        assert found["availability"] == to
    await browser.submit(f"/gpus/{gpu[1]}/availability", to="paused")
    assert (await desk.get(f"/v1/resources/{gpu[1]}")).json()["available"] is False
    link = (await browser.submit("/nodes/invite")).text
    assert "gpool join gpool://" in link
    assert "<svg" in link
    assert "style=" not in link


async def test_keys_are_made_shown_once_and_revoked(desk: Desk) -> None:
    browser, _ = await visiting(desk)
    made = (await browser.submit("/account/keys", name="laptop", scope="tasks:read")).text
    key = re.search(r"gpk_[\w-]+", made)
    assert key is not None
    asked = {"authorization": f"Bearer {key[0]}"}
    assert (await desk.bare.get("/v1/tasks", headers=asked)).status_code == 200
    assert key[0] not in (await browser.get("/account")).text
    id_ = re.search(r'name="id" value="(k-[^"]+)"', made)
    assert id_ is not None
    await browser.submit("/account/keys/revoke", id=id_[1])
    assert (await desk.bare.get("/v1/tasks", headers=asked)).status_code == 401


async def test_secrets_are_stored_and_deleted_on_the_account_page(desk: Desk) -> None:
    browser, person = await visiting(desk)
    bob, member = await visiting(desk, "bob")
    team = (await person.ask("POST", "/v1/teams", {"name": "lab"})).json()["id"]
    await joins(person, team, member)
    stored = await browser.submit("/account/secrets", name="HF_TOKEN", value=" typed value ")
    assert (stored.status_code, stored.headers["location"]) == (303, "/account?done=secret")
    stored = await browser.submit("/account/secrets", name="OURS", value="typed", team=team)
    assert stored.status_code == 303
    page = (await browser.get("/account?done=secret")).text
    assert page.count('action="/account/secrets/delete"') == 2
    assert ">HF_TOKEN<" in page
    assert "typed" not in page
    seen = (await bob.get("/account")).text
    assert ">OURS<" in seen  # a member uses it and cannot change it
    assert ">HF_TOKEN<" not in seen
    assert 'action="/account/secrets/delete"' not in seen
    assert (await bob.submit("/account/secrets/delete", name="OURS", team=team)).status_code == 403
    planted = await bob.submit("/account/secrets", name="OURS", value="planted", team=team)
    assert planted.status_code == 403
    wrong = await browser.submit("/account/secrets", name="A B", value="typed")
    assert (wrong.status_code, "cannot name" in wrong.text, "typed" in wrong.text) == (
        400,
        True,
        False,
    )
    for fields in ({"name": "HF_TOKEN"}, {"name": "OURS", "team": team}):
        gone = await browser.submit("/account/secrets/delete", **fields)
        assert gone.headers["location"] == "/account?done=no-secret"
    assert (await person.ask("GET", "/v1/secrets")).json()["items"] == []


async def test_the_operator_page_is_for_operators(desk: Desk) -> None:
    ada, _ = await visiting(desk)
    assert (await ada.get("/admin")).status_code == 403
    shown = await desk.get("/admin?verify=1", headers={"accept": "text/html"})
    assert shown.status_code == 200
    assert "sound" in shown.text


async def test_the_page_of_an_ended_task_is_never_an_older_view(desk: Desk) -> None:
    browser, person = await visiting(desk)
    task = await submitted(person)
    assert ">queued<" in (await browser.get(f"/tasks/{task}")).text
    await person.ask("DELETE", f"/v1/tasks/{task}")
    assert ">cancelled<" in (await browser.get(f"/tasks/{task}")).text


async def test_a_stream_goes_on_after_the_last_event(desk: Desk) -> None:
    """A hidden tab closes its stream and connects again: no output comes twice."""
    async with running(desk.server):
        desk.plan_submissions()
        agent = await desk.agent("vega", an_offer(2))
        task = await desk.command(name="talks")
        (lease,) = await agent.granted(1)
        await agent.report(Started(lease.task, lease.epoch))
        await agent.report(LogChunk(lease.task, lease.epoch, 0, 1, b"first line\n"))
        await agent.report(LogChunk(lease.task, lease.epoch, 1, 1, b"second line\n"))
        await agent.finish(1)
        headers = {"accept": f"text/html, {EVENT_STREAM}"}
        async with asyncio.timeout(PATIENCE_S):
            whole = (await desk.get(f"/live/tasks/{task}", headers=headers)).text
            (last,) = re.findall(r"^id: (\d+)$", whole, re.MULTILINE)[-1:]
            assert "first line" in whole
            assert "event: ended" in whole
            headers["last-event-id"] = last
            rest = (await desk.get(f"/live/tasks/{task}", headers=headers)).text
        assert "first line" not in rest
        assert "event: ended" in rest


async def test_progress_is_a_bar_with_an_escaped_text(desk: Desk) -> None:
    agent = await desk.agent("vega", an_offer(8, 0))
    browser, person = await visiting(desk)
    task = await submitted(person)
    await desk.schedule()
    [lease] = agent.leases()
    await agent.report(Started(lease.task, lease.epoch))
    await agent.report(Progressed(lease.task, lease.epoch, 405_000, BAD))
    document = (await person.ask("GET", f"/v1/tasks/{task}")).json()["progress"]
    assert document["fraction"] == 0.405
    listed = (await person.ask("GET", "/v1/tasks")).json()["items"]
    assert [each["progress"] for each in listed] == [document]
    other = await submitted(person)
    assert 'class="progress"' not in (await browser.get(f"/tasks/{other}")).text
    page = (await browser.get(f"/tasks/{task}")).text
    assert 'aria-label="40.5 % done"' in page
    assert "&lt;img src=x" in page
    assert not {"<img", "\u202e", "\x1b"} & set(re.findall("<img|\u202e|\x1b", page))
