"""One client floods the server: delay of an honest node's heartbeats and of another user's requests, and memory.

    python -m bench.floods [--requests 2000] [--seconds 20] [--shape NAME ...] [--json FILE]

A real server on loopback, a process with the flooding client, and here an honest node and another user. Each shape is an
attack that worked before: bodies of unknown fields, made-up machines, unproven channels, headers, offers, slow
connections. Targets: heartbeats within 2 s, p99 within 250 ms, memory back to within 100 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from statistics import quantiles
from threading import Event, Thread
from typing import Any

import httpx2
from bench.node_floods import OFFER, greeted, heard
from websockets.exceptions import ConnectionClosed, InvalidStatus

from gpool.agent.channel import AgentCredentials, NodeIdentity
from gpool.agent.daemon import boot_clock
from gpool.core.model import GIB, Gpu, Offer
from gpool.transfer.node_proofs import NodeKey
from gpool.wire.frames import CHANNEL_PATH, NODE_HEADER, Beat, BeatSeen, OfferChanged, encode
from tests.tools import nodes
from tests.tools.processes import Pool

CONNECTIONS = 16
MIB = 1024 * 1024
WORST_BEAT_S, WORST_P99_S, MOST_KEPT_MIB = 2.0, 0.25, 100.0
MEMORY_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Target:
    """Knowledge of the flooding client: an account's key, a node of its own, and another one's public id."""

    host: str
    port: int
    key: str
    node: str
    members: tuple[tuple[bytes, NodeIdentity], ...]
    requests: int
    seconds: float


# ---- shapes


def request_bytes(
    target: Target, method: str, path: str, body: bytes = b"", authorization: str | None = None
) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nhost: {target.host}\r\ncontent-length: {len(body)}\r\n"
    if authorization is None:
        authorization = f"Bearer {target.key}"
    return f"{head}authorization: {authorization}\r\n\r\n".encode() + body


def unknown_fields(size: int) -> bytes:
    count = size // 12
    return b"{" + b",".join(b'"%07d":1' % number for number in range(count)) + b"}"


def env_keys(count: int) -> bytes:
    keys = b",".join(b'"A%d":""' % number for number in range(count))
    return b'{"command":["true"],"env":{' + keys + b"}}"


async def answered(reader: asyncio.StreamReader) -> int:
    """Status of the next response, whose body is skipped."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    await reader.readexactly(length)
    return int(head.split(b" ", 2)[1])


async def repeat(
    target: Target, content: Callable[[int], bytes], connections: int = CONNECTIONS
) -> Counter[str]:
    """Send requests over keep-alive connections until all are answered or the time is over."""
    numbers = iter(range(target.requests))
    ends = time.monotonic() + target.seconds
    found: Counter[str] = Counter()

    async def one() -> None:
        writer: asyncio.StreamWriter | None = None
        for number in numbers:
            if time.monotonic() > ends:
                break
            try:
                if writer is None:
                    reader, writer = await asyncio.open_connection(target.host, target.port)
                writer.write(content(number))
                found[str(await answered(reader))] += 1
            except (OSError, asyncio.IncompleteReadError) as error:
                found[type(error).__name__] += 1
                writer = None
        if writer is not None:
            writer.close()

    await asyncio.gather(*(one() for _ in range(connections)))
    return found


async def hold(target: Target, content: bytes, more: bytes = b"") -> Counter[str]:
    """Open connections, send a beginning on each, and keep them until the time is over."""
    found: Counter[str] = Counter()
    kept = []
    for _ in range(target.requests):
        try:
            reader, writer = await asyncio.open_connection(target.host, target.port)
            writer.write(content)
            if more:
                await answered_upgrade(reader)
                writer.write(more)
            kept.append(writer)
            found["opened"] += 1
        except (OSError, asyncio.IncompleteReadError) as error:
            found[type(error).__name__] += 1
    await asyncio.sleep(target.seconds / 2)
    for writer in kept:
        writer.close()
    return found


async def answered_upgrade(reader: asyncio.StreamReader) -> None:
    await reader.readuntil(b"\r\n\r\n")


def channel_head(target: Target) -> bytes:
    return (
        f"GET {CHANNEL_PATH} HTTP/1.1\r\nhost: {target.host}\r\nupgrade: websocket\r\n"
        "connection: upgrade\r\nsec-websocket-version: 13\r\n"
        f"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n{NODE_HEADER}: {target.node}\r\n\r\n"
    ).encode()


def unfinished_message(size: int) -> bytes:
    """Head of a frame of 7.8 MB, and all but its last byte."""
    length = 7_800_000
    head = bytes([0x82, 0x80 | 127]) + length.to_bytes(8, "big") + b"\0\0\0\0"
    return head + b"x" * (size - len(head))


def made_up(number: int, gpus: int = 1024) -> Offer:
    found = tuple(
        Gpu(index, f"GPU-{number}-{index}", "NVIDIA H100", "nvidia", 80 * GIB)
        for index in range(gpus)
    )
    return replace(OFFER, gpus=found)


async def machines(target: Target) -> Counter[str]:
    """Register machines of 1024 GPUs until they are refused, then list the pool."""

    def machine(number: int) -> bytes:
        gpus = [
            {"index": i, "uuid": f"GPU-{number}-{i}", "model": "H100", "memory_bytes": GIB}
            for i in range(1024)
        ]
        body = json.dumps({"name": f"machine{number}", "gpus": gpus}).encode()
        return request_bytes(target, "POST", "/register_gpu", body)

    some = replace(target, requests=20)
    listed = request_bytes(target, "GET", "/v1/resources")
    found = await repeat(some, machine, connections=1)
    return found + await repeat(target, lambda _: listed)


async def offers(target: Target) -> Counter[str]:
    """Send offers of 1024 new GPUs from each node, as fast as they are read."""
    found: Counter[str] = Counter()
    over = Event()
    each = target.requests // len(target.members)

    def flood(seed: bytes, identity: NodeIdentity) -> None:
        badge, sent, hellos = AgentCredentials(NodeKey(seed), identity, boot_clock), 0, 0
        while sent < each and not over.is_set():
            hellos += 1
            try:
                address = f"http://{target.host}:{target.port}"
                with greeted(address, badge, hellos * 1_000_000) as socket:
                    while sent < each and not over.is_set():
                        socket.send(encode(OfferChanged(made_up(sent + 1_000_000 * hellos))))
                        sent += 1
                        found["sent"] += 1
            except InvalidStatus:
                found["refused"] += 1
                over.wait(0.5)
            except (ConnectionClosed, OSError, TimeoutError, AssertionError):
                found["closed"] += 1

    threads = [Thread(target=flood, args=member) for member in target.members]
    for thread in threads:
        thread.start()
    await asyncio.sleep(target.seconds)
    over.set()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    return found


def _bodies(make: Callable[[int], bytes], size: int, path: str, sender: str | None = None) -> Any:
    async def flood(target: Target) -> Counter[str]:
        sent = request_bytes(target, "POST", path, make(size), sender)
        return await repeat(target, lambda _: sent)

    return flood


def _numbered(path: str, body: str, authorization: str) -> Any:
    async def flood(target: Target) -> Counter[str]:
        def content(number: int) -> bytes:
            document = body.replace("NUMBER", str(number)).encode()
            return request_bytes(target, "POST", path, document, authorization)

        return await repeat(target, content)

    return flood


def _held(content: Callable[[Target], bytes], more: bytes = b"") -> Any:
    async def flood(target: Target) -> Counter[str]:
        return await hold(target, content(target), more)

    return flood


def _half_body(target: Target) -> bytes:
    return request_bytes(target, "POST", "/v1/auth/password", b"x" * 100, "x")[:-50]


PASSWORD, USERS = "/v1/auth/password", "/v1/users"
INVITED = '{"name":"nameNUMBER","password":"a long way to Tipperary","invite":"gpv_NUMBER"}'
WRONG = '{"name":"nameNUMBER","password":"a long way to Tipperary"}'
SHAPES: dict[str, Callable[[Target], Awaitable[Counter[str]]]] = {
    "nothing": lambda _: asyncio.sleep(3, Counter[str]()),
    "6 fields, 29 MB": _bodies(unknown_fields, 29 * MIB, "/v1/tasks"),
    "6 fields, 1 MB": _bodies(unknown_fields, MIB - 4096, "/v1/tasks"),
    "6 env keys": _bodies(env_keys, 150_000, "/v1/tasks"),
    "6 anonymous": _bodies(unknown_fields, MIB - 4096, PASSWORD, "x"),
    "7 machines": machines,
    "8 channels": _held(channel_head, unfinished_message(64 * 1024)),
    "9 nonces": _numbered("/v1/auth/wallet/nonce", "", "x"),
    "9 sign-ins": _numbered(PASSWORD, WRONG, "x"),
    "9 invites": _numbered(USERS, INVITED, "x"),
    "15 offers": offers,
    "16 half heads": _held(lambda _: b"GET /healthz HTTP/1.1\r\nx: "),
    "16 idle": _held(lambda _: b""),
    "16 half bodies": _held(_half_body),
}


def run_flood(shape: str, target: Target, said: Any) -> None:
    found = asyncio.run(_flood(shape, target))
    said.put(dict(found))


async def _flood(shape: str, target: Target) -> Counter[str]:
    return await SHAPES[shape](target)


# ---- the honest node and the other user


@dataclass(frozen=True, slots=True)
class FloodFigures:
    shape: str
    answers: dict[str, int]
    seconds: float
    beats: int
    worst_beat_ms: float
    requests: int
    p50_ms: float
    p99_ms: float
    failed: int  # requests of the other user
    memory_mib: float
    peak_mib: float
    after_mib: float
    stored_kib: int  # growth of the database files

    @property
    def holds(self) -> bool:
        return (
            self.worst_beat_ms <= WORST_BEAT_S * 1000
            and self.p99_ms <= WORST_P99_S * 1000
            and self.after_mib - self.memory_mib <= MOST_KEPT_MIB
            and not self.failed
        )


class Bystanders:
    """An honest node that sends heartbeats, and a user who reads and submits; their delays in seconds."""

    def __init__(self, pool: Pool, badge: AgentCredentials, key: str) -> None:
        self._pool, self._badge, self._key = pool, badge, key
        self._over = Event()
        self.beats: list[float] = []
        self.requests: list[float] = []
        self.failed = 0
        self._threads = [Thread(target=self._beat), Thread(target=self._ask)]

    def __enter__(self) -> Bystanders:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for each in self._threads:
            each.join()

    def _beat(self) -> None:
        with greeted(self._pool.address, self._badge, int(time.monotonic() * 1000)) as socket:
            number = int(time.monotonic() * 1000) + 1
            while not self._over.wait(0.1):
                number += 1
                sent = time.perf_counter()
                socket.send(encode(Beat(number, ())))
                while True:
                    frame = heard(socket)
                    if isinstance(frame, BeatSeen) and frame.number == number:
                        break
                self.beats.append(time.perf_counter() - sent)

    def _ask(self) -> None:
        headers = {"authorization": f"Bearer {self._key}"}
        task = {
            "command": ["true"],
            "memory": "900GB",
        }  # fits nowhere: the honest node runs nothing
        with httpx2.Client(base_url=self._pool.address, timeout=60, headers=headers) as http:
            while not self._over.wait(0.03):
                for method, path, body in (
                    ("GET", "/v1/me", None),
                    ("POST", "/v1/tasks", task),
                    ("GET", "/v1/nodes?limit=5", None),
                ):
                    asked = time.perf_counter()
                    try:
                        answer = http.request(method, path, json=body)
                        self.failed += answer.status_code >= 400
                    except httpx2.TransportError:
                        self.failed += 1
                    self.requests.append(time.perf_counter() - asked)


def memory_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def measure(folder: Path, shape: str, requests: int, seconds: float) -> FloodFigures:
    pool = Pool(folder, {"GPOOL_SERVER_REGISTRATION": "invite"})
    pool.start_server()
    try:
        return _measured(pool, shape, requests, seconds)
    finally:
        pool.stop()


def invited(pool: Pool, name: str) -> str:
    """API key of a new account that may lend and submit."""
    invite = pool.ask("POST", "/v1/users/invites", {}).json()["token"]
    password = "a long way to Tipperary"
    document = {"name": name, "password": password, "invite": invite}
    with httpx2.Client(base_url=pool.address, timeout=60) as http:
        assert http.post("/v1/users", json=document).status_code == 201
        tokens = http.post("/v1/auth/password", json={"name": name, "password": password}).json()
        bearer = {"authorization": f"Bearer {tokens['access_token']}"}
        made = http.post("/v1/keys", json={"name": "bench"}, headers=bearer)
        key: str = made.json()["key"]
    return key


def node_of(pool: Pool, key: str, name: str) -> tuple[bytes, AgentCredentials]:
    seed = sha256(name.encode()).digest()
    with httpx2.Client(base_url=pool.address, timeout=60) as http:
        headers = {"authorization": f"Bearer {key}"}

        def ask(path: str, document: dict[str, Any]) -> dict[str, Any]:
            answer: dict[str, Any] = http.post(path, json=document, headers=headers).json()
            return answer

        return seed, nodes.joined(ask, NodeKey(seed), name=name)


def _measured(pool: Pool, shape: str, requests: int, seconds: float) -> FloodFigures:
    mallory, ann = invited(pool, "mallory"), invited(pool, "ann")
    _, honest = node_of(pool, ann, "honest")
    members = [node_of(pool, mallory, f"flood{place}") for place in range(4)]
    target = Target(
        "127.0.0.1",
        pool.port,
        mallory,
        honest.identity.node,
        tuple((seed, badge.identity) for seed, badge in members),
        requests,
        seconds,
    )
    pid = pool.server.pid
    spawned = multiprocessing.get_context("spawn")
    said = spawned.Queue()
    process = spawned.Process(target=run_flood, args=(shape, target, said), daemon=True)
    with Bystanders(pool, honest, ann) as others:
        while len(others.requests) < 60:  # warm
            time.sleep(0.05)  # noqa: TID251 - it is measured from outside
        others.beats.clear()
        others.requests.clear()
        before = peak = memory_mib(pid)
        stored, began = _stored_kib(pool), time.perf_counter()
        process.start()
        while process.is_alive():
            peak = max(peak, memory_mib(pid))
            time.sleep(0.05)  # noqa: TID251
        took = time.perf_counter() - began
        ends = time.monotonic() + MEMORY_WITHIN_S
        after = memory_mib(pid)
        while after - before > MOST_KEPT_MIB / 2 and time.monotonic() < ends:
            time.sleep(0.2)  # noqa: TID251
            after = memory_mib(pid)
    answers = {}
    with suppress(Exception):
        answers = said.get(timeout=5)
    cuts = quantiles(others.requests, n=100)
    return FloodFigures(
        shape,
        answers,
        round(took, 1),
        len(others.beats),
        round(max(others.beats) * 1e3, 1),
        len(others.requests),
        round(cuts[49] * 1e3, 1),
        round(cuts[98] * 1e3, 1),
        others.failed,
        round(before, 1),
        round(peak, 1),
        round(after, 1),
        _stored_kib(pool) - stored,
    )


def _stored_kib(pool: Pool) -> int:
    folder = pool.directory / "data"
    return sum(each.stat().st_size for each in folder.glob("gpool.db*")) // 1024


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--requests", type=int, default=2000, help="of each shape")
    asked.add_argument("--seconds", type=float, default=20.0, help="longest time of each shape")
    asked.add_argument("--shape", action="append", choices=SHAPES, help="only these")
    asked.add_argument("--quick", action="store_true", help="200 requests of each")
    asked.add_argument("--json", type=Path)
    options = asked.parse_args()
    requests = 200 if options.quick else options.requests
    print(f"load {os.getloadavg()[0]:.1f}\n")
    print(
        "| flood | answers | s | worst beat ms | p50 ms | p99 ms | failed | MiB before, peak, after | DB KiB | ok |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    found = []
    for shape in options.shape or SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            one = measure(Path(folder), shape, requests, options.seconds)
        found.append(one)
        answers = ", ".join(f"{count} × {name}" for name, count in one.answers.items())
        print(
            f"| {one.shape} | {answers} | {one.seconds} | {one.worst_beat_ms} | {one.p50_ms} | {one.p99_ms} "
            f"| {one.failed} | {one.memory_mib}, {one.peak_mib}, {one.after_mib} | {one.stored_kib} "
            f"| {'yes' if one.holds else 'NO'} |",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n")
    return 0 if all(each.holds for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
