"""Mails over a real SMTP server in process: confirmation, digests, rate, failures that are tried again."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from tests.server.events.events_desk import Post, submitted
from tests.server.identity_routes.people_desk import registered
from tests.server.server_desk import Desk, StoppedClock, open_desk
from tests.tools.mail_server import Mailbox, mail_server

pytestmark = pytest.mark.anyio
PASSWORD = "mail password"


@pytest.fixture
async def mailing(data: Path, tmp_path: Path) -> AsyncIterator[tuple[Desk, Mailbox]]:
    password = tmp_path / "password"
    password.write_text(f"{PASSWORD}\n")
    async with mail_server("gpool", PASSWORD) as box:
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


async def confirmed(desk: Desk, box: Mailbox, **members: Any) -> str:
    made = await desk.post("/v1/me/notices", {"address": "ada@example.org", **members})
    assert made.status_code == 201, made.text
    assert made.json()["confirmed"] is False
    code = _code(box)
    path = f"/v1/me/notices/{made.json()['id']}/confirm"
    assert (await desk.post(path, {"code": code})).json()["confirmed"] is True
    box.mails.clear()
    id_: str = made.json()["id"]
    return id_


def _code(box: Mailbox) -> str:
    found = re.search(r"Code: (\d{8})", _text(box.mails[-1]))
    assert found is not None
    return found[1]


def _text(mail: Message) -> str:
    payload = mail.get_payload(decode=True)
    assert isinstance(payload, bytes)
    return payload.decode()


async def cancelled(desk: Desk) -> str:
    made = await submitted(desk)
    await desk.http.delete(f"/v1/tasks/{made['ids'][0]}")
    task: str = made["ids"][0]
    return task


async def test_events_due_together_are_one_mail_and_a_minute_lies_between_two(
    mailing: tuple[Desk, Mailbox],
) -> None:
    desk, box = mailing
    await confirmed(desk, box, kinds=["task.cancelled"])
    post = Post(desk)
    tasks = [await cancelled(desk) for _ in range(3)]
    await post.send()
    [mail] = box.mails
    assert mail["From"] == "gpool <pool@example.org>"
    assert mail["Subject"].startswith("gpool: task cancelled: ")
    assert mail["Subject"].endswith("and 2 more")
    assert all(task in _text(mail) for task in tasks)
    late = await cancelled(desk)
    await post.send()
    desk.clock.advance(59)
    await post.send()
    assert len(box.mails) == 1
    desk.clock.advance(1)
    await post.send()
    assert late in _text(box.mails[1])
    assert set(box.to) == {"ada@example.org"}


async def test_nothing_but_the_code_is_sent_before_it_is_confirmed(
    mailing: tuple[Desk, Mailbox],
) -> None:
    desk, box = mailing
    made = (await desk.post("/v1/me/notices", {"address": "eve@example.org"})).json()
    await cancelled(desk)
    await Post(desk).send()
    assert len(box.mails) == 1
    right = _code(box)
    path = f"/v1/me/notices/{made['id']}/confirm"
    wrong = f"{(int(right) + 1) % 10**8:08d}"
    for _ in range(5):
        assert (await desk.post(path, {"code": wrong})).status_code == 400
    assert (await desk.post(path, {"code": right})).status_code == 404  # deleted
    assert (await desk.get("/v1/me/notices")).json()["items"] == []


async def test_a_mail_that_the_server_refuses_is_sent_later(
    mailing: tuple[Desk, Mailbox],
) -> None:
    desk, box = mailing
    await confirmed(desk, box)
    post = Post(desk)
    box.refusing = "451 try again later"
    task = await cancelled(desk)
    await post.send()
    box.refusing = ""
    assert not box.mails
    desk.clock.advance(6)
    await post.send()
    [mail] = box.mails
    assert task in _text(mail)


async def test_an_address_with_a_line_break_is_refused_and_names_cannot_add_headers(
    mailing: tuple[Desk, Mailbox],
) -> None:
    desk, box = mailing
    bad = {"address": "a@example.org\r\nBcc: all@example.org"}
    assert (await desk.post("/v1/me/notices", bad)).status_code == 400
    await confirmed(desk, box)
    made = await submitted(desk, name="x\r\nBcc: all@example.org\x1b[2J")
    await desk.http.delete(f"/v1/tasks/{made['ids'][0]}")
    await Post(desk).send()
    [mail] = box.mails
    assert mail["Bcc"] is None
    assert "\x1b" not in _text(mail)
    assert set(box.to) == {"ada@example.org"}


async def test_without_a_mail_server_an_address_is_refused(desk: Desk) -> None:
    answer = await desk.post("/v1/me/notices", {"address": "ada@example.org"})
    assert answer.status_code == 409
    assert "GPOOL_SERVER_SMTP_HOST" in answer.json()["detail"]


async def test_an_address_whose_code_cannot_be_sent_is_not_kept(
    mailing: tuple[Desk, Mailbox],
) -> None:
    desk, box = mailing
    box.refusing = "550 no"
    answer = await desk.post("/v1/me/notices", {"address": "ada@example.org"})
    assert answer.status_code == 503
    assert (await desk.get("/v1/me/notices")).json()["items"] == []


async def test_an_export_has_webhooks_and_notices_without_what_lets_others_use_them(
    mailing: tuple[Desk, Mailbox],
) -> None:
    desk, box = mailing
    url = "https://93.184.216.34/hooks/T00/a-password?key=another"
    made = await desk.post("/v1/webhooks", {"url": url, "kinds": ["task.*"]})
    assert made.status_code == 201, made.text
    notice = await confirmed(desk, box, kinds=["budget.*"])
    eve = await registered(desk, "eve")
    answer = await desk.http.get("/v1/me/export")
    lines = {line["kind"]: line for line in map(json.loads, answer.text.splitlines())}
    hook = lines["webhook"]
    assert (hook["id"], hook["host"]) == (made.json()["id"], "93.184.216.34")
    assert hook["kinds"] == made.json()["kinds"] != []
    assert (lines["notice"]["id"], lines["notice"]["address"]) == (notice, "ada@example.org")
    for secret in (made.json()["secret"], "a-password", "another"):
        assert secret in made.text  # control: the answer that created it has them
        assert secret not in answer.text
    others = (await eve.ask("GET", "/v1/me/export")).text
    assert not {"webhook", "notice"} & {json.loads(line)["kind"] for line in others.splitlines()}
