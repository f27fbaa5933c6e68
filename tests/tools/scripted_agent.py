"""An agent that says what it is told to say, over a real socket: for what no honest agent would send.

It runs nothing and believes nothing; who scripts it decides every frame and every upload.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar

import httpx2
from websockets.sync.client import ClientConnection, connect

from gpool.agent.channel import AgentCredentials
from gpool.core.model import GIB, Offer, Tier
from gpool.transfer.requests import LEASE_HEADER, LeaseRef, Request, path_of
from gpool.wire.frames import (
    CHANNEL_PATH,
    MAX_FRAME_BYTES,
    NODE_HEADER,
    PROTOCOL,
    AgentFrame,
    Beat,
    BeatSeen,
    Challenge,
    FromServer,
    Grants,
    Hello,
    Hold,
    Lease,
    Proven,
    Recorded,
    ReportItem,
    Reports,
    ServerFrame,
    Welcome,
    decode_any_from_server,
    encode,
)

F = TypeVar("F", bound=ServerFrame)
ANSWER_S = 120.0


def offer(cpus: int, site: str = "") -> Offer:
    return Offer(
        cpus * 1000,
        cpus * GIB,
        cpus * GIB,
        pythons=frozenset({"3.11"}),
        tiers=frozenset({Tier.CONTAINER}),
        hostname="scripted",
        agent_version="scripted",
        site=site,
        address="127.0.0.1" if site else "",
        gang_port=47100 if site else 0,
    )


@dataclass(slots=True)
class ScriptedAgent:
    """One node. Frames that come while it waits for another kind are kept in `heard`."""

    address: str
    badge: AgentCredentials
    cpus: int = 1
    site: str = ""  # named: it takes members of gangs
    heard: list[ServerFrame] = field(default_factory=list)
    _beat: int = 0
    _sequence: int = 0
    _open: ExitStack = field(default_factory=ExitStack)
    _socket: ClientConnection | None = None

    def connect(self, *holds: Hold) -> Welcome:
        """Says hello, on a new connection."""
        self.close()
        self._socket = self._open.enter_context(
            connect(
                self.address.replace("http", "ws", 1) + CHANNEL_PATH,
                additional_headers={NODE_HEADER: self.badge.identity.node},
                max_size=MAX_FRAME_BYTES,
                compression=None,
                ping_interval=None,
                open_timeout=ANSWER_S,
            )
        )
        self._answer(self._received(), is_open=False)
        proven = self._received()
        assert isinstance(proven, Proven), proven
        self.badge.take(proven)
        self._beat += 1
        self.send(Hello(PROTOCOL, "scripted", offer(self.cpus, self.site), self._beat, holds))
        return self.awaited(Welcome)

    def _answer(self, challenge: FromServer, *, is_open: bool) -> None:
        assert isinstance(challenge, Challenge), challenge
        proof = self.badge.answer(challenge, is_open=is_open)
        assert self._socket is not None
        assert proof is not None
        self._socket.send(encode(proof))

    def _received(self) -> FromServer:
        assert self._socket is not None, "connect first"
        data = self._socket.recv(timeout=ANSWER_S)
        assert isinstance(data, bytes)
        return decode_any_from_server(data)

    def close(self) -> None:
        self._socket = None
        self._open.close()

    def send(self, frame: AgentFrame) -> None:
        assert self._socket is not None, "connect first"
        self._socket.send(encode(self.badge.stamped(frame)))

    def awaited(self, kind: type[F]) -> F:
        """The next frame of this kind. A script that lives for long proves itself again meanwhile, as an agent does."""
        while True:
            frame = self._received()
            if isinstance(frame, Challenge):
                self._answer(frame, is_open=True)
                continue
            if isinstance(frame, Proven):
                self.badge.take(frame)
                continue
            self.heard.append(frame)
            if isinstance(frame, kind):
                return frame

    def beat(self, *holds: Hold) -> BeatSeen:
        self._beat += 1
        self.send(Beat(self._beat, holds))
        return self.awaited(BeatSeen)

    def report(self, *items: ReportItem) -> Recorded:
        self._sequence += 1
        self.send(Reports(self._sequence, items))
        return self.awaited(Recorded)

    def granted(self, count: int) -> list[Lease]:
        """Everything granted so far, once there are `count` leases."""
        while len(found := self._leases()) < count:
            self.awaited(Grants)
        return found

    def _leases(self) -> list[Lease]:
        return [
            lease
            for frame in self.heard
            if isinstance(frame, Grants)
            for line in frame.lines
            for lease in line.leases
        ]

    def upload(self, content: bytes, under: Hold) -> httpx2.Response:
        """PUTs an artifact under a lease."""
        path = path_of(hashlib.sha256(content).hexdigest())
        headers = {LEASE_HEADER: LeaseRef(under.task, under.epoch).header}
        headers |= self.badge.vouch(Request("PUT", path, headers))
        url = self.address + path
        with httpx2.Client(timeout=ANSWER_S, trust_env=False, verify=False) as http:
            return http.put(url, content=content, headers=headers)
