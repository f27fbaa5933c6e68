"""Many scripted nodes in one process, each on a WebSocket of its own: they take leases, hold them and end them. For measurements.

They run nothing. Each node does what an agent's connection does (proof, hello, beats, reports with its token); what ends at
about the same time on one node goes in one frame, as an agent's would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import Any
from urllib.parse import urlsplit

from websockets.client import ClientProtocol
from websockets.datastructures import Headers
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.uri import parse_uri

from gpool.agent.channel import AgentCredentials
from gpool.core.model import EndReason, Offer
from gpool.wire.frames import (
    CHANNEL_PATH,
    MAX_FRAME_BYTES,
    NODE_HEADER,
    PROTOCOL,
    AgentFrame,
    Beat,
    Challenge,
    Finished,
    Grants,
    Hello,
    Hold,
    Prove,
    Proven,
    Refused,
    Reports,
    Stop,
    Welcome,
    decode_any_from_server,
    encode,
)

TOGETHER_S = 0.02
"""Ends on one node within this time travel in one frame."""


@dataclass(slots=True)
class Script:
    """What every node of the crowd does with a lease: holds it for a while drawn from the dice, then says it went well."""

    hold_s: tuple[float, float]  # between these, evenly; both 0: at once
    dice: Random
    received: dict[int, float] = field(default_factory=dict)  # by task: when its lease came
    ended: int = 0
    refused: list[str] = field(default_factory=list)


class Crowd:
    """`run` it, and `connect` every node meanwhile: those that are connected have to beat."""

    def __init__(self, address: str, script: Script) -> None:
        self._address = address
        self._script = script
        self._due: list[tuple[float, int, CrowdNode, int, int, float]] = []
        self._count = 0
        self.nodes: list[CrowdNode] = []

    async def connect(
        self, members: Sequence[tuple[AgentCredentials, Offer]], at_once: int = 32
    ) -> None:
        """Returns once the server has welcomed all of them."""
        gate = asyncio.Semaphore(at_once)

        async def one(badge: AgentCredentials, offer: Offer) -> None:
            async with gate:
                self.nodes.append(await self._connected(badge, offer))

        await asyncio.gather(*(one(badge, offer) for badge, offer in members))

    async def _connected(self, badge: AgentCredentials, offer: Offer) -> CrowdNode:
        loop = asyncio.get_running_loop()
        place = urlsplit(self._address)
        url = self._address.replace("http", "ws", 1) + CHANNEL_PATH
        _, node = await loop.create_connection(
            lambda: CrowdNode(url, badge, offer, self.take), place.hostname or "", place.port or 80
        )
        await node.welcomed
        return node

    def take(self, node: CrowdNode, grants: Grants) -> None:
        script, now = self._script, asyncio.get_running_loop().time()
        low, high = script.hold_s
        for line in grants.lines:
            for lease in line.leases:
                script.received[lease.task] = now
                held = script.dice.uniform(low, high) if high else 0.0
                self._count += 1
                entry = (now + held, self._count, node, lease.task, lease.epoch, now)
                heappush(self._due, entry)

    async def run(self) -> None:
        """Ends what is due and beats, until cancelled."""
        loop = asyncio.get_running_loop()
        turn = 0
        while True:
            await asyncio.sleep(TOGETHER_S)
            now = loop.time()
            due: dict[CrowdNode, list[Finished]] = {}
            while self._due and self._due[0][0] <= now:
                _, _, node, task, epoch, since = heappop(self._due)
                took = round((now - since) * 1e6)
                end = Finished(task, epoch, EndReason.EXITED, 0, duration_us=took)
                due.setdefault(node, []).append(end)
            for node, items in due.items():
                node.report(items)
                self._script.ended += len(items)
            for node in self._to_beat(turn):
                node.beat()
            turn += 1
            self._script.refused += [node.refused for node in self.nodes if node.refused]

    def _to_beat(self, turn: int) -> Sequence[CrowdNode]:
        """Each once in its time, spread evenly."""
        if not self.nodes:
            return ()
        turns = max(1, round(self.nodes[0].beat_every_s / TOGETHER_S))
        return self.nodes[turn % turns :: turns]

    def close(self) -> None:
        for node in self.nodes:
            node.close()


class CrowdNode(asyncio.Protocol):
    """One node's connection."""

    def __init__(
        self,
        url: str,
        badge: AgentCredentials,
        offer: Offer,
        take: Callable[[CrowdNode, Grants], None],
    ) -> None:
        self._socket = ClientProtocol(parse_uri(url), max_size=MAX_FRAME_BYTES)
        self._badge = badge
        self._offer = offer
        self._take = take
        self._holds: dict[int, int] = {}
        self._beat = self._sequence = 0
        self._transport: asyncio.Transport | None = None
        self.beat_every_s = 8.0
        self.refused = ""
        self.welcomed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # ---- the transport's side

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        request = self._socket.connect()
        request.headers.update(Headers({NODE_HEADER: self._badge.identity.node}))
        self._socket.send_request(request)
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._socket.receive_data(data)
        for event in self._socket.events_received():
            if isinstance(event, Frame) and event.opcode is Opcode.BINARY:
                self._heard(bytes(event.data))
            elif isinstance(event, Response) and event.status_code != 101:
                self._fail(f"the server answers {event.status_code}")
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection is gone: {exc}")

    def _fail(self, why: str) -> None:
        self.refused = self.refused or why
        if not self.welcomed.done():
            self.welcomed.set_exception(ConnectionError(why))

    def _flush(self) -> None:
        assert self._transport is not None
        for data in self._socket.data_to_send():
            if data:
                self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self.refused = "closed"
            self._transport.close()

    # ---- the node's side

    def _heard(self, data: bytes) -> None:
        frame = decode_any_from_server(data)
        match frame:
            case Grants():
                self._holds |= {
                    each.task: each.epoch for line in frame.lines for each in line.leases
                }
                self._take(self, frame)
            case Challenge():
                proof = self._badge.answer(frame, is_open=self.welcomed.done())
                assert proof is not None, frame
                self._send(proof)
            case Proven():
                self._badge.take(frame)
                if not self.welcomed.done():
                    self._beat += 1
                    self._send(Hello(PROTOCOL, "crowd", self._offer, self._beat, ()))
            case Welcome():
                self.beat_every_s = frame.beat_every_us / 1e6
                self.welcomed.set_result(None)
            case Stop():
                known = [hold for hold in frame.holds if hold.task in self._holds]
                ends = [Finished(h.task, h.epoch, EndReason.CANCELLED) for h in known]
                if ends:
                    self.report(ends)
            case Refused():
                self._fail(f"refused: {frame.detail}")
            case _:
                pass  # answers to what was sent

    def _send(self, frame: AgentFrame | Prove) -> None:
        stamped = frame if isinstance(frame, Prove) else self._badge.stamped(frame)
        self._socket.send_binary(encode(stamped))
        self._flush()

    def report(self, items: Sequence[Finished]) -> None:
        if self.refused:
            return
        for item in items:
            self._holds.pop(item.task, None)
        self._sequence += 1
        self._send(Reports(self._sequence, tuple(items)))

    def beat(self) -> None:
        if not self.refused:
            self._beat += 1
            self._send(Beat(self._beat, tuple(Hold(*pair) for pair in self._holds.items())))
