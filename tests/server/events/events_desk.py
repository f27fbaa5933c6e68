"""A receiver of webhooks on loopback, and short words for what happens to events at a desk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from gpool.server.events.delivery import DeliverNotices
from gpool.server.events.loops import NumberEvents, WatchConditions
from tests.server.server_desk import Agent, Desk

LOOPBACK: dict[str, Any] = {"webhook_networks": "127.0.0.0/8"}


@dataclass
class Received:
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    """An HTTP server that answers each request with `status` and `extra` header lines."""

    port: int = 0
    status: int = 200
    extra: str = ""
    got: list[Received] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?key=1"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head[1:] if line)
        }
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        self.got.append(Received(head[0].split(" ")[1], headers, body))
        writer.write(
            f"HTTP/1.1 {self.status} x\r\ncontent-length: 0\r\n{self.extra}connection: close\r\n\r\n".encode()
        )
        await writer.drain()
        writer.close()


@asynccontextmanager
async def receiving(**members: Any) -> AsyncIterator[Receiver]:
    receiver = Receiver(**members)
    listening = await asyncio.start_server(receiver.serve, "127.0.0.1", receiver.port)
    receiver.port = listening.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        listening.close()
        await listening.wait_closed()


@dataclass
class Post:
    """The loops of the leader, called by hand."""

    desk: Desk

    def __post_init__(self) -> None:
        server = self.desk.server
        self.numbering, self.sending = NumberEvents(server), DeliverNotices(server)
        self.watching = WatchConditions(server)

    async def number(self) -> None:
        await self.numbering.run_once(self.desk.server.now)

    async def send(self) -> None:
        """Number events and carry out every delivery that is due now."""
        await self.number()
        await self.sending.run_once(self.desk.server.now)
        while workers := tuple(self.desk.server.events.workers):
            await asyncio.gather(*workers)

    async def watch(self) -> None:
        await self.watching.run_once(self.desk.server.now)
        await self.number()


async def submitted(
    desk: Desk, headers: dict[str, str] | None = None, **members: Any
) -> dict[str, Any]:
    document = {"command": ["true"], **members}
    answer = await desk.post("/v1/tasks", document, **({"headers": headers} if headers else {}))
    assert answer.status_code == 202, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def leased(desk: Desk, agent: Agent, count: int) -> list[Any]:
    await desk.schedule()
    return (await agent.granted(count))[-count:]


async def types(desk: Desk, query: str = "", headers: dict[str, str] | None = None) -> list[str]:
    page = await desk.get(f"/v1/events{query}", **({"headers": headers} if headers else {}))
    assert page.status_code == 200, page.text
    return [each["type"] for each in page.json()["items"]]
