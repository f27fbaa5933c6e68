"""Webhooks on real sockets: signatures, order, outages, retries, replay, rotation; two oracles verify them."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from gpool.core.ids import encode
from gpool.server.clock import SystemClock
from gpool.wire.frames import Started
from tests.server.events.events_desk import (
    LOOPBACK,
    Post,
    leased,
    receiving,
    submitted,
)
from tests.server.identity_routes.people_desk import registered
from tests.server.server_desk import Desk, StoppedClock, an_offer, open_desk, returned

pytestmark = pytest.mark.anyio
GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "events.md"


@pytest.fixture
async def hooked(data: Path) -> AsyncIterator[Desk]:
    """A desk whose webhooks may reach loopback."""
    desk = await open_desk(data, StoppedClock(), **LOOPBACK)
    async with desk.http, desk.bare:
        yield desk
    await desk.server.store.close()


async def added(desk: Desk, url: str, query: str = "", **members: Any) -> dict[str, Any]:
    answer = await desk.post(f"/v1/webhooks{query}", {"url": url, **members})
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def cancelled(desk: Desk) -> str:
    made = await submitted(desk)
    await desk.http.delete(f"/v1/tasks/{made['ids'][0]}")
    task: str = made["ids"][0]
    return task


def recipe() -> Any:
    """The function of the guide."""
    code = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code[1], names)
    return names["verified"]


async def test_a_delivery_verifies_with_the_library_the_recipe_and_the_public_key(
    hooked: Desk,
) -> None:
    async with receiving() as receiver:
        hook = await added(hooked, receiver.url, kinds=["task.*"])
        task = await cancelled(hooked)
        await Post(hooked).send()
    [got] = receiver.got
    assert got.path == "/hook?key=1"
    assert got.headers["host"] == f"127.0.0.1:{receiver.port}"
    document = json.loads(got.body)
    assert (document["type"], document["data"]["task"]) == ("task.cancelled", task)
    assert got.headers["webhook-id"] == document["id"]
    now = int(got.headers["webhook-timestamp"])
    seen: set[str] = set()
    verified = recipe()
    assert verified(hook["secret"], got.headers, got.body, seen, now)
    assert not verified(hook["secret"], got.headers, got.body, seen, now), "replayed"
    assert not verified(hook["secret"], got.headers, got.body, set(), now + 301), "old"
    assert not verified(hook["secret"], got.headers, got.body + b" ", set(), now), "forged"
    other = {**got.headers, "webhook-id": "ev-0000000000001"}
    assert not verified(hook["secret"], other, got.body, set(), now), "forged"
    text = f"{got.headers['webhook-id']}.{now}.".encode() + got.body
    given = got.headers["webhook-signature"].split(" ")
    v1a = next(each for each in given if each.startswith("v1a,")).removeprefix("v1a,")
    public = Ed25519PublicKey.from_public_bytes(
        base64.b64decode(hook["public_key"].removeprefix("whpk_"))
    )
    public.verify(base64.b64decode(v1a), text)
    with pytest.raises(InvalidSignature):
        public.verify(base64.b64decode(v1a), text + b" ")


async def test_the_library_of_standard_webhooks_accepts_and_refuses(data: Path) -> None:
    """It compares timestamps with the time of day, so the server has it too."""
    clock = StoppedClock()
    clock.instant = SystemClock().now()
    desk = await open_desk(data, clock, **LOOPBACK)
    async with desk.http, receiving() as receiver:
        hook = await added(desk, receiver.url)
        answer = await desk.post(f"/v1/webhooks/{hook['id']}/test")
        assert answer.json()["status"] == "sent", answer.text
    await desk.server.store.close()
    [got] = receiver.got
    library = Webhook(hook["secret"])
    assert library.verify(got.body, got.headers)["type"] == "ping"
    with pytest.raises(WebhookVerificationError):
        library.verify(got.body + b" ", got.headers)
    with pytest.raises(WebhookVerificationError):
        Webhook("whsec_" + base64.b64encode(b"x" * 32).decode()).verify(got.body, got.headers)


async def test_a_receiver_that_was_down_for_an_hour_gets_every_event_once_and_in_order(
    hooked: Desk,
) -> None:
    post = Post(hooked)
    async with receiving(status=503) as receiver:
        await added(hooked, receiver.url)
        agent = await hooked.agent(offer=an_offer(8))
        for _ in range(5):
            await submitted(hooked)
        leases = await leased(hooked, agent, 5)
        for lease in leases:
            await agent.report(Started(lease.task, lease.epoch))
            await post.send()
        for minute in range(60):
            if minute == 20:
                for lease in leases:
                    await agent.report(returned(lease))
            hooked.clock.advance(60)
            await post.send()
        assert {json.loads(each.body)["type"] for each in receiver.got} == {"task.started"}
        receiver.got.clear()
        receiver.status = 200
        for _ in range(6 * 60):
            hooked.clock.advance(60)
            await post.send()
    found = [json.loads(each.body) for each in receiver.got]
    assert len({each["id"] for each in found}) == len(found) == 10
    for lease in leases:
        names = [each["type"] for each in found if _is(each, lease)]
        assert names == ["task.started", "task.succeeded"]


def _is(event: dict[str, Any], lease: Any) -> bool:
    return bool(event["data"]["task"] == encode("task", lease.task))


async def test_a_delivery_is_given_up_after_75_hours_and_can_be_replayed(hooked: Desk) -> None:
    post = Post(hooked)
    async with receiving(status=500) as receiver:
        hook = await added(hooked, receiver.url)
        await cancelled(hooked)
        times = []
        for _ in range(90 * 12):
            before = len(receiver.got)
            await post.send()
            if len(receiver.got) > before:
                times.append(hooked.clock.now())
            hooked.clock.advance(300)
        assert len(receiver.got) == 10
        hours = (times[-1] - times[0]) / 3600e6
        assert 75 <= hours < 85
        log = (await hooked.get(f"/v1/webhooks/{hook['id']}/deliveries")).json()["items"]
        assert [(each["status"], each["attempts"], each["response"]) for each in log] == [
            ("failed", 10, 500)
        ]
        receiver.status = 204
        answer = await hooked.post(f"/v1/webhooks/{hook['id']}/replay", {})
        assert answer.json() == {"deliveries": 1}
        await post.send()
        assert len(receiver.got) == 11
        ids = {each.headers["webhook-id"] for each in receiver.got}
        assert len(ids) == 1
        one = {"event": ids.pop()}
        assert (await hooked.post(f"/v1/webhooks/{hook['id']}/replay", one)).status_code == 200
        await post.send()
        assert len(receiver.got) == 12
        none = {"event": "ev-0000000000001"}
        assert (await hooked.post(f"/v1/webhooks/{hook['id']}/replay", none)).status_code == 404


async def test_a_pause_that_the_receiver_asks_for_is_kept(hooked: Desk) -> None:
    post = Post(hooked)
    async with receiving(status=429, extra="retry-after: 600\r\n") as receiver:
        await added(hooked, receiver.url)
        await cancelled(hooked)
        await post.send()
        hooked.clock.advance(599)
        await post.send()
        assert len(receiver.got) == 1
        hooked.clock.advance(1)
        await post.send()
        assert len(receiver.got) == 2


async def test_410_switches_the_webhook_off_until_it_is_switched_on(hooked: Desk) -> None:
    post = Post(hooked)
    async with receiving(status=410) as receiver:
        hook = await added(hooked, receiver.url)
        await cancelled(hooked)
        await post.send()
        [found] = (await hooked.get("/v1/webhooks")).json()["items"]
        assert found["enabled"] is False
        assert "410" in found["why"]
        assert not hooked.server.events.subscribers.holders
        receiver.status = 200
        await hooked.http.patch(f"/v1/webhooks/{hook['id']}", json={"enabled": True})
        await cancelled(hooked)
        await post.send()
        assert len(receiver.got) == 2


async def test_a_redirect_is_a_failure_and_is_not_followed(hooked: Desk) -> None:
    async with receiving() as sink, receiving(status=302) as receiver:
        receiver.extra = f"location: {sink.url}\r\n"
        hook = await added(hooked, receiver.url)
        answer = (await hooked.post(f"/v1/webhooks/{hook['id']}/test")).json()
        assert (answer["status"], answer["response"]) == ("failed", 302)
        assert not sink.got


async def test_both_secrets_sign_during_a_rotation(hooked: Desk) -> None:
    post, verified = Post(hooked), recipe()
    async with receiving() as receiver:
        old = await added(hooked, receiver.url)
        path = f"/v1/webhooks/{old['id']}/rotate"
        new = (await hooked.post(path, {"overlap_s": 3600})).json()
        assert new["secret"] != old["secret"]
        for advance, expected in ((0, (True, True)), (3600, (False, True))):
            hooked.clock.advance(advance)
            await cancelled(hooked)
            await post.send()
            got = receiver.got[-1]
            now = int(got.headers["webhook-timestamp"])
            found = tuple(
                verified(each["secret"], got.headers, got.body, set(), now) for each in (old, new)
            )
            assert found == expected


@pytest.mark.parametrize(
    ("form", "member"), [("slack", "text"), ("discord", "content"), ("ntfy", None)]
)
async def test_chat_services_get_a_line_of_text(
    hooked: Desk, form: str, member: str | None
) -> None:
    async with receiving() as receiver:
        await added(hooked, receiver.url, form=form)
        task = await cancelled(hooked)
        await Post(hooked).send()
    [got] = receiver.got
    text = got.body.decode() if member is None else json.loads(got.body)[member]
    assert text.startswith("task cancelled: ")
    assert task in text


async def test_only_chosen_kinds_are_sent_and_a_stranger_sees_nothing(hooked: Desk) -> None:
    bea = await registered(hooked, "bea")
    async with receiving() as receiver:
        hook = await added(hooked, receiver.url, kinds=["task.failed"])
        await cancelled(hooked)
        await Post(hooked).send()
        assert not receiver.got
    for method, path in (
        ("GET", f"/v1/webhooks/{hook['id']}/deliveries"),
        ("POST", f"/v1/webhooks/{hook['id']}/test"),
        ("DELETE", f"/v1/webhooks/{hook['id']}"),
    ):
        assert (await bea.ask(method, path)).status_code == 404
    assert (await hooked.post("/v1/webhooks", {"url": "x" * 9})).status_code == 400
    wrong = {"url": hook["url"], "kinds": ["task.exploded"]}
    assert "no kind of event" in (await hooked.post("/v1/webhooks", wrong)).json()["detail"]


async def test_a_repeated_creation_makes_one_webhook_with_one_secret(hooked: Desk) -> None:
    async with receiving() as receiver:
        headers = {"idempotency-key": "once"}
        made = [
            (await hooked.post("/v1/webhooks", {"url": receiver.url}, headers=headers)).json()
            for _ in range(2)
        ]
    assert made[0] == made[1]
    assert len((await hooked.get("/v1/webhooks")).json()["items"]) == 1


async def test_a_dead_receiver_delays_no_other_one(hooked: Desk) -> None:
    async with receiving() as receiver:
        await added(hooked, "http://127.0.0.1:9/nobody-listens")
        await added(hooked, receiver.url)
        await cancelled(hooked)
        await Post(hooked).send()
        assert len(receiver.got) == 1


async def test_url_and_secret_are_encrypted_in_the_store(hooked: Desk) -> None:
    async with receiving() as receiver:
        hook = await added(hooked, receiver.url)
    secret = base64.b64decode(hook["secret"].removeprefix("whsec_"))
    stored = b"".join(path.read_bytes() for path in hooked.server.settings.data.glob("gpool.db*"))
    assert b"hook?key=1" not in stored
    assert hook["secret"].encode() not in stored
    assert secret not in stored
