"""A real server in process: real SQLite, real routes, real channel; only the sockets are left out."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import queue
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any

import httpx2
import uvicorn
import uvloop
from fastapi import FastAPI

from gpool.agent.channel import AgentCredentials, NodeIdentity
from gpool.core.ids import NodeId, UserId, decode
from gpool.core.model import EndReason, Gpu, Instant, Offer, Permission, Tier
from gpool.server.app import make_app, open_server
from gpool.server.first_start import ensure_operator
from gpool.server.http import LimitedServer
from gpool.server.identity import authorization
from gpool.server.main import configuration
from gpool.server.nodes.connection import NodeChannel
from gpool.server.outbound import Outbound
from gpool.server.server import Server
from gpool.server.settings import Settings
from gpool.server.store.operations.identity import users
from gpool.server.store.values import NodeCredentials, User
from gpool.transfer.node_proofs import NodeKey
from gpool.transfer.requests import Request
from gpool.wire.frames import (
    PROTOCOL,
    Beat,
    Finished,
    Grants,
    Hello,
    Hold,
    Lease,
    Proven,
    Reports,
    ServerFrame,
)
from tests.tools.nodes import join_request
from tests.tools.processes import PATIENCE_S

GIB = 1024**3
FUNCTION = b"the pickled function"
FUNCTION_SHA256 = hashlib.sha256(FUNCTION).hexdigest()


QUICK: dict[str, Any] = {
    "seal_logs_after_s": 0,
    "max_wait_s": 600,
    "password_passes": 1,
    "password_memory_kib": 64,
}
"""Settings of desks: nothing waits long, and a password costs next to nothing."""


class StoppedClock:
    """Moves only when told to."""

    def __init__(self) -> None:
        self.instant = 1_790_000_000_000_000

    def now(self) -> Instant:
        return Instant(self.instant)

    def advance(self, seconds: float) -> Instant:
        self.instant += round(seconds * 1_000_000)
        return self.now()


def an_offer(cpus: int = 2, gpus: int = 0, python: str = "3.11") -> Offer:
    return Offer(
        cpu_milli=cpus * 1000,
        memory_bytes=8 * GIB,
        disk_bytes=100 * GIB,
        gpus=tuple(
            Gpu(index, f"GPU-{index}", "NVIDIA A100-SXM4-80GB", "nvidia", 80 * GIB, True)
            for index in range(gpus)
        ),
        pythons=frozenset({python}),
        tiers=frozenset({Tier.CONTAINER}),
        hostname="bench",
        agent_version="test",
    )


@dataclass
class Agent:
    """Speaks frames as an agent does, and does what it is told at once."""

    server: Server
    credentials: NodeCredentials
    offer: Offer
    badge: AgentCredentials
    sent: list[ServerFrame] = field(default_factory=list)
    beat: int = 1
    sequence: int = 0

    def __post_init__(self) -> None:
        self.channel = NodeChannel(self.server, self.credentials, self._take)
        self._news = asyncio.Event()

    def _take(self, frame: ServerFrame) -> None:
        self.sent.append(frame)
        self._news.set()

    def again(self, server: Server | None = None) -> Agent:
        """The same node on a new connection."""
        server = server or self.server
        return Agent(server, self.credentials, self.offer, self.badge, beat=self.beat + 1)

    async def connect(self, *holds: Hold) -> None:
        await self.channel.receive(Hello(PROTOCOL, "boot", self.offer, self.beat, holds))

    async def report(self, *items: Any) -> ServerFrame:
        self.sequence += 1
        await self.channel.receive(Reports(self.sequence, items))
        return self.sent[-1]

    async def send_beat(self, *holds: Hold) -> ServerFrame:
        self.beat += 1
        await self.channel.receive(Beat(self.beat, holds))
        return self.sent[-1]

    async def granted(self, count: int) -> list[Lease]:
        """Everything granted, once there are `count` of them."""
        while len(self.leases()) < count:
            self._news.clear()
            async with asyncio.timeout(PATIENCE_S):
                await self._news.wait()
        return self.leases()

    async def finish(self, count: int) -> None:
        """Ends what it is given, with success, until `count` tasks have ended."""
        done = 0
        while done < count:
            leases = await self.granted(done + 1)
            await self.report(*(returned(lease) for lease in leases[done:]))
            done = len(leases)

    def leases(self) -> list[Lease]:
        """Everything granted so far, in order."""
        return [
            lease
            for frame in self.sent
            if isinstance(frame, Grants)
            for line in frame.lines
            for lease in line.leases
        ]

    def frames(self, kind: type) -> list[Any]:
        return [frame for frame in self.sent if isinstance(frame, kind)]


def returned(lease: Lease, value: bytes = b"value") -> Finished:
    return Finished(lease.task, lease.epoch, EndReason.RETURNED, value=value, duration_us=1000)


def exited(lease: Lease, code: int = 0) -> Finished:
    return Finished(lease.task, lease.epoch, EndReason.EXITED, exit_code=code, duration_us=1000)


@dataclass
class Desk:
    """The server, its application, and people at it."""

    server: Server
    app: FastAPI
    clock: StoppedClock
    key: str
    http: httpx2.AsyncClient
    bare: httpx2.AsyncClient  # without a key

    def files_of(self, sha256: str) -> list[Path]:
        """Files of the artifact in the folder."""
        return list((self.server.settings.data / "artifacts" / sha256[:2]).rglob(f"{sha256}*"))

    async def get(self, path: str, **options: Any) -> httpx2.Response:
        return await self.http.get(path, **options)

    async def post(self, path: str, document: Any = None, **options: Any) -> httpx2.Response:
        return await self.http.post(path, json=document, **options)

    async def schedule(self) -> int:
        """Run a pass. Between passes the desk holds the planner, so that submissions start nothing by themselves."""
        planning = self.server.scheduler.planning
        if planning.locked():
            planning.release()
        granted = await self.server.scheduler.run_once(self.server.now)
        await planning.acquire()
        return granted

    def plan_submissions(self) -> None:
        """From now on until the next pass, submissions may start in their own commit, as in a running server."""
        self.server.scheduler.planning.release()

    async def person(self, name: str, *permissions: Permission) -> dict[str, str]:
        """Headers of a new account."""
        user = User(UserId(self.server.ids.next()), name, frozenset(permissions), self.server.now)
        key = authorization.fresh(authorization.USER_PREFIX)
        await self.server.store.write(users.create_user(user))
        await self.server.store.write(
            users.add_key(
                self.server.ids.next(), user.id, "test", authorization.hashed(key), self.server.now
            )
        )
        return {"authorization": f"Bearer {key}"}

    async def node(self, name: str = "bench", offer: Offer | None = None) -> Agent:
        """A node that has joined; not yet connected."""
        key = NodeKey(hashlib.sha256(name.encode()).digest())
        return await self.join(key, offer or an_offer(), {}, name=name)

    async def join(
        self, key: NodeKey, offer: Offer, headers: dict[str, str], **members: Any
    ) -> Agent:
        """The same in somebody's name, or by a token."""
        challenge = (await self.bare.post("/v1/nodes/challenges", json={})).json()
        wanted = join_request(key, challenge, **members)
        answer = await self.post("/v1/nodes", wanted, headers=headers)
        assert answer.status_code == 201, answer.text
        who = await self.server.gate.node(NodeId(decode("node", answer.json()["id"])))
        assert who is not None
        told = NodeIdentity(answer.json()["id"], answer.json()["server"])
        return Agent(self.server, who, offer, AgentCredentials(key, told, self.clock.now))

    def http_of(self, agent: Agent, lease: str = "") -> httpx2.AsyncClient:
        """Sends requests as the agent does: each with its own proof, over a token it has proved itself for."""
        issued = self.server.gate.token(agent.credentials)
        agent.badge.take(Proven(issued.token, issued.at, issued.lives))

        async def vouch(request: httpx2.Request) -> None:
            if lease:
                request.headers["Gpool-Lease"] = lease
            path = request.url.raw_path.decode()
            headers = {"Gpool-Lease": lease} if lease else {}
            request.headers.update(agent.badge.vouch(Request(request.method, path, headers)))

        transport = httpx2.ASGITransport(app=self.app, raise_app_exceptions=False)
        hooks: Any = {"request": [vouch]}
        return httpx2.AsyncClient(transport=transport, base_url="http://desk", event_hooks=hooks)

    async def agent(self, name: str = "bench", offer: Offer | None = None) -> Agent:
        """A node that has joined and is connected."""
        agent = await self.node(name, offer)
        await agent.connect()
        return agent

    async def command(self, headers: dict[str, str] | None = None, **members: Any) -> str:
        answer = await self.post("/v1/tasks", {"command": ["true"], **members}, headers=headers)
        assert answer.status_code == 202, answer.text
        task: str = answer.json()["ids"][0]
        return task

    async def calls(self, count: int, **members: Any) -> httpx2.Response:
        await self.http.put(f"/v1/artifacts/{FUNCTION_SHA256}", content=FUNCTION)
        return await self.post("/v1/tasks", calls_document(count, **members))


def calls_document(count: int, **members: Any) -> dict[str, Any]:
    payloads = [base64.b64encode(b"args %d" % number).decode() for number in range(count)]
    function = {"sha256": FUNCTION_SHA256, "python": "3.11"}
    return {"function": function, "calls": payloads, **members}


async def open_desk(data: Path, clock: StoppedClock, **settings: Any) -> Desk:
    settings = Settings(data=data, **{**QUICK, **settings})
    server = await open_server(settings, clock)
    patient = replace(server.identity, outbound=Outbound(timeout_s=PATIENCE_S))
    server = replace(server, sign_ins=patient)
    key = await ensure_operator(server)
    app = make_app(server)
    app.state.ready = True
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    http = httpx2.AsyncClient(
        transport=transport,
        base_url="http://desk",
        headers={"authorization": f"Bearer {key}"},
    )
    bare = httpx2.AsyncClient(transport=transport, base_url="http://desk")
    await server.scheduler.planning.acquire()
    return Desk(server, app, clock, key, http, bare)


@dataclass(frozen=True)
class Live:
    url: str
    key: str
    fingerprint: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}


@contextmanager
def serving(data: Path, *, keep_alive_s: float | None = None, **settings: Any) -> Iterator[Live]:
    """The server as `gpool server` runs it, on a free port, in a thread. `keep_alive_s`: of idle connections.

    Its nodes are heard from when a test has its turn, and none is to be lost.
    """
    listening = socket.create_server(("127.0.0.1", 0))
    opened: queue.SimpleQueue[tuple[str, uvicorn.Server, Server] | None] = queue.SimpleQueue()

    async def run() -> None:
        usual: dict[str, Any] = {"password_passes": 1, "password_memory_kib": 64, "ttl_s": 900}
        usual["port"] = listening.getsockname()[1]
        server = await open_server(Settings(data=data, **{**usual, **settings}))
        config: Any = configuration(server)
        if keep_alive_s is not None:
            config.timeout_keep_alive = keep_alive_s
        runner = LimitedServer(config)
        opened.put((await ensure_operator(server), runner, server))
        await runner.serve([listening])

    def thread() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(run())
        finally:
            opened.put(None)

    worker = Thread(target=thread, name="live-server")
    worker.start()
    try:
        told = opened.get()
        assert told is not None, "the server could not be opened"
        key, runner, server = told
        shown = server.certificate
        scheme = "http" if shown is None else "https"
        try:
            yield Live(
                f"{scheme}://127.0.0.1:{listening.getsockname()[1]}",
                key,
                None if shown is None else shown.fingerprint,
            )
        finally:
            runner.should_exit = True
    finally:
        worker.join(PATIENCE_S)
        listening.close()
