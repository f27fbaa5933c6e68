"""The real application in this process: a transport that carries the SDK's requests to it, and a node that obeys a script.

The node speaks the real channel and runs functions in its own thread; it stands for an agent, not for a sandbox.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import pickle
import queue
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import httpx2

from gpool.agent.runner import encoding
from gpool.client.values import RESULTS_AS_DATA
from gpool.core.ids import decode, encode
from gpool.core.model import EndReason, Network, Offer, OutputFile, Phase, TaskSpec, Tier
from gpool.server.app import make_app, open_server
from gpool.server.first_start import ensure_operator
from gpool.server.nodes.connection import NodeChannel
from gpool.server.server import Server
from gpool.server.settings import Settings
from gpool.transfer.requests import Request
from gpool.wire.frames import (
    PROTOCOL,
    Finished,
    Grants,
    Hello,
    LogChunk,
    Proven,
    Reached,
    Reports,
    Started,
)
from tests.tools.nodes import a_key, joined

Command = Callable[[TaskSpec], tuple[int, list[tuple[int, bytes]], dict[str, bytes]]]
_SILENCE_S = 240.0
_NEVER_S = 36_000.0  # the node beats once; nobody is to miss it


class _Body(httpx2.SyncByteStream):
    def __init__(self, pieces: queue.SimpleQueue[Any], cancel: Callable[[], object]) -> None:
        self._pieces, self._cancel = pieces, cancel

    def __iter__(self) -> Iterator[bytes]:
        while (message := self._pieces.get(timeout=_SILENCE_S)) is not None:
            yield message.get("body", b"")
            if not message.get("more_body"):
                return

    def close(self) -> None:
        self._cancel()


class AppTransport(httpx2.BaseTransport):
    """Requests from any thread into an ASGI application on its own loop; answers stream."""

    def __init__(self, app: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._app, self._loop = app, loop

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        body = request.read()
        sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": request.url.scheme,
            "path": request.url.path,
            "raw_path": request.url.raw_path.partition(b"?")[0],
            "query_string": request.url.query,
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "client": ("in-process", 1),
            "server": ("pool.test", 80),
        }

        async def serve() -> None:
            inbox: list[dict[str, Any]] = [
                {"type": "http.request", "body": body, "more_body": False}
            ]
            gone = asyncio.Event()

            async def receive() -> dict[str, Any]:
                if inbox:
                    return inbox.pop()
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message: dict[str, Any]) -> None:
                sent.put(message)

            try:
                await self._app(scope, receive, send)
            finally:
                sent.put(None)

        answering = asyncio.run_coroutine_threadsafe(serve(), self._loop)
        start = sent.get(timeout=_SILENCE_S)
        if start is None:
            answering.result(_SILENCE_S)
            raise httpx2.ReadError("the application gave no answer")
        return httpx2.Response(
            start["status"], headers=start["headers"], stream=_Body(sent, answering.cancel)
        )

    def close(self) -> None:
        return


class RealPool:
    """A server with its store on disk, its loops running, and one scripted node."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="the server", daemon=True
        )
        self._thread.start()
        self.command: Command = lambda _: (0, [], {})
        self.start()

    def wait(self, coroutine: Awaitable[Any]) -> Any:
        async def waited() -> Any:
            return await coroutine

        return asyncio.run_coroutine_threadsafe(waited(), self._loop).result(_SILENCE_S)

    def start(self) -> None:
        self.wait(self._open())

    async def _open(self) -> None:
        self.server: Server = await open_server(
            Settings(data=self._data, tick_s=0.1, ttl_s=_NEVER_S)
        )
        self.app = make_app(self.server)
        self.key = await ensure_operator(self.server)
        self._lifespan = self.app.router.lifespan_context(self.app)
        await self._lifespan.__aenter__()
        self.transport = AppTransport(self.app, self._loop)

    def join(self, cpus: int = 2) -> Node:
        """A node of two processors runs its leases one after another; a larger one all at once."""
        return Node(self, cpus)

    def close(self) -> None:
        self.wait(self._lifespan.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Node:
    """Connects, offers processors, and does what it is granted."""

    def __init__(self, pool: RealPool, cpus: int = 2) -> None:
        self._pool = pool
        self._workers = None if cpus <= 2 else ThreadPoolExecutor(cpus)
        self._reporting = threading.Lock()
        self._frames: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._badge = joined(self._ask, a_key(), name="node")
        self.id = decode("node", self._badge.identity.node)
        who = pool.wait(pool.server.gate.node(self.id))
        issued = pool.server.gate.token(who)
        self._badge.take(Proven(issued.token, issued.at, issued.lives))
        self._channel = NodeChannel(pool.server, who, self._frames.put)
        offer = Offer(
            1000 * cpus,
            cpus << 30,
            cpus << 30,
            pythons=frozenset({_python()}),
            tiers=frozenset({Tier.CONTAINER}),
            builds=frozenset({"pip"}),
            networks=frozenset({Network.NONE, Network.EGRESS}),
        )
        pool.wait(self._channel.receive(Hello(PROTOCOL, "boot", offer, 1, ())))
        self._specs: dict[int, TaskSpec] = {}
        self._functions: dict[str, Any] = {}
        self._sequence = 0
        self._thread = threading.Thread(target=self._obey, name="the node", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._frames.put(None)
        self._thread.join()
        if self._workers is not None:
            self._workers.shutdown()
        self._pool.wait(self._channel.close())

    def _ask(self, path: str, document: dict[str, Any]) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {self._pool.key}"}
        sent = Request("POST", path, headers, json.dumps(document).encode())
        answer: dict[str, Any] = self._send(sent).json()
        return answer

    def _send_proven(self, request: Request) -> httpx2.Response:
        headers = {**request.headers, **self._badge.vouch(request)}
        return self._send(Request(request.method, request.path, headers, request.body))

    def _send(self, sent: Request) -> httpx2.Response:
        assert isinstance(sent.body, bytes)
        request = httpx2.Request(
            sent.method,
            f"http://pool.test{sent.path}",
            headers=dict(sent.headers),
            content=sent.body,
        )
        response = self._pool.transport.handle_request(request)
        response.read()
        assert response.status_code < 300, response.text
        return response

    def _obey(self) -> None:
        while (frame := self._frames.get()) is not None:
            if isinstance(frame, Grants):
                self._specs.update(frame.specs)
                for line in frame.lines:
                    if self._workers is not None:
                        self._workers.submit(self._run_beside, self._specs[line.spec], line.leases)
                        continue
                    items = [
                        item
                        for lease in line.leases
                        for item in self._run(self._specs[line.spec], lease)
                    ]
                    self._report(items)

    def _run_beside(self, spec: TaskSpec, leases: tuple[Any, ...]) -> None:
        """Run the leases of one allocation; other allocations run meanwhile."""
        for lease in leases:
            self._report([Started(lease.task, lease.epoch)])
            self._report(self._run(spec, lease))

    def _report(self, items: list[Any]) -> None:
        with self._reporting:
            self._sequence += 1
            self._pool.wait(self._channel.receive(Reports(self._sequence, tuple(items))))

    def _run(self, spec: TaskSpec, lease: Any) -> list[Any]:
        if spec.command:
            return self._command(spec, lease)
        payload = lease.payload or self._get(lease.payload_sha256)
        if spec.function_sha256 not in self._functions:
            sent = self._get(spec.function_sha256)
            self._functions[spec.function_sha256] = (
                pickle.loads(sent),
                sent.endswith(RESULTS_AS_DATA),
            )
        function, as_data = self._functions[spec.function_sha256]
        args, kwargs = pickle.loads(payload)
        reason, text, dumps = EndReason.RETURNED, "", cloudpickle.dumps
        try:
            returned = function(*args, **kwargs)
            value = encoding.encode(returned, dumps) if as_data else dumps(returned)
        except Exception as exc:  # noqa: BLE001 - any exception is the answer
            reason, text = EndReason.RAISED, traceback.format_exc()
            value = encoding.encode_exception(exc) if as_data else dumps(exc)
        sha256 = ""
        if len(value) > 64 * 1024:
            sha256, value = self._put(lease, value), b""
        return [Finished(lease.task, lease.epoch, reason, None, value, sha256, text, 10)]

    def _command(self, spec: TaskSpec, lease: Any) -> list[Any]:
        if spec.recipe is not None:
            self._report([Reached(lease.task, lease.epoch, Phase.BUILD)])
        code, printed, left = self._pool.command(spec)
        self._report([Started(lease.task, lease.epoch)])
        outputs = tuple(
            OutputFile(path, self._put(lease, content), len(content))
            for path, content in left.items()
        )
        chunks = [
            LogChunk(lease.task, lease.epoch, number, stream, data)
            for number, (stream, data) in enumerate(printed)
        ]
        end = Finished(lease.task, lease.epoch, EndReason.EXITED, code, outputs=outputs)
        return [*chunks, end]

    def _get(self, sha256: str) -> bytes:
        return self._send_proven(Request("GET", f"/v1/artifacts/{sha256}")).content

    def _put(self, lease: Any, content: bytes) -> str:
        sha256 = hashlib.sha256(content).hexdigest()
        fence = f"{encode('task', lease.task)}:{lease.epoch}"
        headers = {"Gpool-Lease": fence}
        self._send_proven(Request("PUT", f"/v1/artifacts/{sha256}", headers, content))
        return sha256


def _python() -> str:

    return f"{sys.version_info.major}.{sys.version_info.minor}"
