"""Five times the capacity for a minute, and 500 slow connections: delays of admitted requests, heartbeats, memory, recovery.

    python -m bench.overload [--seconds 60] [--times 5] [--quick] [--json FILE]

A real server on loopback; a process that sends listings, explanations, submissions and status reads at a fixed rate,
whatever the answers; here nodes that send heartbeats. Capacity: what a few connections get done, one request after
another. Targets: p99 of admitted requests 1 s, every heartbeat answered, 200 MiB more memory, recovery within 10 s;
with slow connections a p99 of others of at most twice that without, or 50 ms more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from statistics import quantiles
from threading import Event, Thread
from typing import cast

import httpx2
import uvloop
from bench.floods import answered, invited, memory_mib, node_of
from bench.node_floods import greeted, heard

from gpool.agent.channel import AgentCredentials
from gpool.wire.frames import Beat, BeatSeen, encode
from tests.server.server_desk import FUNCTION, FUNCTION_SHA256, calls_document
from tests.tools.processes import Pool

WORST_P99_S, RECOVERED_WITHIN_S, MOST_GROWTH_MIB = 1.0, 10.0, 200.0
NODES, BEAT_EVERY_S = 8, 0.5
LOOPS, CONNECTIONS = 8, 400
SLOW = 500
MIX = ("listing", "submission", "explain", "submission", "listing", "status")
TASK = {"command": ["true"], "memory": "900GB"}  # fits nowhere: tasks stay queued
LISTED = 50


@dataclass(frozen=True, slots=True)
class LoadTarget:
    host: str
    port: int
    key: str
    task: str

    def request(self, kind: str) -> bytes:
        method, path, body = {
            "listing": ("GET", f"/v1/tasks?limit={LISTED}", b""),
            "explain": ("GET", f"/v1/tasks/{self.task}/explain", b""),
            "submission": ("POST", "/v1/tasks", json.dumps(TASK).encode()),
            "status": ("GET", f"/v1/tasks/{self.task}", b""),
        }[kind]
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self.key}\r\n"
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@dataclass
class Answers:
    """Delays in seconds by class; refused and failed requests by class."""

    admitted: dict[str, list[float]] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    unsent: int = 0  # no connection was free

    def add(self, kind: str, status: int, delay_s: float) -> None:
        if status == 429:
            self.refused[kind] = self.refused.get(kind, 0) + 1
        elif status >= 400:
            self.failed[kind] = self.failed.get(kind, 0) + 1
        else:
            self.admitted.setdefault(kind, []).append(delay_s)


Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def exchange(pair: Pair, target: LoadTarget, kind: str, answers: Answers) -> bool:
    """False: the connection broke."""
    reader, writer = pair
    began = time.perf_counter()
    try:
        writer.write(target.request(kind))
        status = await answered(reader)
    except (OSError, asyncio.IncompleteReadError):
        answers.failed[kind] = answers.failed.get(kind, 0) + 1
        return False
    answers.add(kind, status, time.perf_counter() - began)
    return True


async def closed_loop(target: LoadTarget, seconds: float) -> Answers:
    """Few connections, each with one request after another."""
    answers, numbers = Answers(), count()
    ends = time.monotonic() + seconds

    async def one() -> None:
        pair = await asyncio.open_connection(target.host, target.port)
        while time.monotonic() < ends:
            kind = MIX[next(numbers) % len(MIX)]
            if not await exchange(pair, target, kind, answers):
                return
        pair[1].close()

    await asyncio.gather(*(one() for _ in range(LOOPS)))
    return answers


class Sender(asyncio.Protocol):
    """One connection with one request at a time. As light as possible: its own delay is measured as the server's."""

    def __init__(self, load: OpenLoop) -> None:
        self._load = load
        self._transport: asyncio.Transport | None = None
        self._kind, self._sent_s = "", 0.0
        self._status, self._missing, self._head = 0, 0, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def send(self, kind: str) -> None:
        assert self._transport is not None
        self._kind, self._sent_s = kind, time.perf_counter()
        self._transport.write(self._load.requests[kind])

    def data_received(self, data: bytes) -> None:
        if not self._status:
            self._head += data
            head, end, body = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            self._status, self._missing, self._head = int(head[9:12]), int(length), b""
            data = body
        self._missing -= len(data)
        if not self._missing:
            self._load.answers.add(self._kind, self._status, time.perf_counter() - self._sent_s)
            self._kind, self._status = "", 0
            self._load.idle[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._load.made -= 1
        self._load.idle.pop(self, None)
        if self._kind and not self._load.is_over:
            self._load.answers.failed[self._kind] = self._load.answers.failed.get(self._kind, 0) + 1

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()


class OpenLoop:
    """Requests at a fixed rate over kept connections; one that finds none free is not sent."""

    def __init__(self, target: LoadTarget) -> None:
        self._target = target
        self.requests = {kind: target.request(kind) for kind in MIX}
        self.answers = Answers()
        self.idle: dict[Sender, None] = {}
        self.made = 0
        self.is_over = False

    async def run(self, rate: float, seconds: float) -> Answers:
        began, sent = time.monotonic(), 0
        opening: set[asyncio.Task[None]] = set()
        while (passed := time.monotonic() - began) < seconds:
            while sent < int(passed * rate):
                kind = MIX[sent % len(MIX)]
                sent += 1
                if self.idle:
                    self.idle.popitem()[0].send(kind)
                elif self.made < CONNECTIONS:
                    self.made += 1
                    task = asyncio.create_task(self._open(kind))
                    opening.add(task)
                    task.add_done_callback(opening.discard)
                else:
                    self.answers.unsent += 1
            await asyncio.sleep(0.002)
        for _ in range(6000):  # the last answers
            if len(self.idle) == self.made:
                break
            await asyncio.sleep(0.01)
        self.is_over = True
        for each in tuple(self.idle):
            each.close()
        return self.answers

    async def _open(self, kind: str) -> None:
        loop, target = asyncio.get_running_loop(), self._target
        try:
            _, sender = await loop.create_connection(lambda: Sender(self), target.host, target.port)
        except OSError:
            self.made -= 1
            self.answers.failed[kind] = self.answers.failed.get(kind, 0) + 1
        else:
            sender.send(kind)


def run_open_loop(target: LoadTarget, rate: float, seconds: float) -> Answers:
    return uvloop.run(OpenLoop(target).run(rate, seconds))


# ---- heartbeats


class Heartbeats:
    """Nodes that send heartbeats and wait for each answer."""

    def __init__(self, pool: Pool, nodes: list[AgentCredentials]) -> None:
        self._pool, self._nodes, self._over = pool, nodes, Event()
        self.delays: list[float] = []
        self.lost = 0
        self._threads = [Thread(target=self._beat, args=(each,)) for each in nodes]

    def __enter__(self) -> Heartbeats:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for each in self._threads:
            each.join()

    def _beat(self, badge: AgentCredentials) -> None:
        number = int(time.monotonic() * 1000)
        try:
            with greeted(self._pool.address, badge, number) as channel:
                while not self._over.wait(BEAT_EVERY_S):
                    number += 1
                    sent = time.perf_counter()
                    channel.send(encode(Beat(number, ())))
                    while True:
                        frame = heard(channel)
                        if isinstance(frame, BeatSeen) and frame.number == number:
                            break
                    self.delays.append(time.perf_counter() - sent)
        except Exception as error:  # noqa: BLE001 - whatever ended the channel, its heartbeats are lost
            print(f"a node lost its channel: {error!r}", file=sys.stderr)
            self.lost += 1


class Memory:
    def __init__(self, pid: int) -> None:
        self._pid, self._over = pid, Event()
        self.peak_mib = self.before_mib = memory_mib(pid)
        self._thread = Thread(target=self._watch)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            self.peak_mib = max(self.peak_mib, memory_mib(self._pid))


# ---- figures


@dataclass(frozen=True, slots=True)
class OverloadFigures:
    capacity_per_s: float
    offered_per_s: float
    seconds: float
    admitted_per_s: float
    refused: dict[str, float]  # part of the answered requests of the class
    failed: int
    unsent: int
    p99_ms: dict[str, float]
    worst_ms: float
    heartbeats: int
    lost_nodes: int
    worst_heartbeat_ms: float
    memory_mib: float
    peak_mib: float
    recovery_s: float

    @property
    def p99_of_all_ms(self) -> float:
        return self.p99_ms["all"]

    @property
    def holds(self) -> bool:
        return (
            not self.failed
            and not self.lost_nodes
            and self.p99_of_all_ms <= WORST_P99_S * 1000
            and self.peak_mib - self.memory_mib <= MOST_GROWTH_MIB
            and self.recovery_s <= RECOVERED_WITHIN_S
        )


@dataclass(frozen=True, slots=True)
class SlowFigures:
    connections: int
    p99_before_ms: float
    p99_during_ms: float

    @property
    def holds(self) -> bool:
        most = max(2 * self.p99_before_ms, self.p99_before_ms + 50)
        return self.p99_during_ms <= most


def p99_ms(delays: list[float]) -> float:
    return round(quantiles(delays, n=100)[-1] * 1000, 1) if len(delays) > 1 else 0.0


@contextmanager
def served(folder: Path) -> Iterator[tuple[Pool, LoadTarget]]:
    pool = Pool(folder, {"GPOOL_SERVER_REGISTRATION": "invite"})
    pool.start_server()
    try:
        key = invited(pool, "ann")
        headers = {"authorization": f"Bearer {key}"}
        with httpx2.Client(base_url=pool.address, timeout=60, headers=headers) as http:
            http.put(f"/v1/artifacts/{FUNCTION_SHA256}", content=FUNCTION).raise_for_status()
            made = http.post("/v1/tasks", json=calls_document(LISTED, memory="900GB"))
            task: str = made.raise_for_status().json()["ids"][0]
        yield pool, LoadTarget("127.0.0.1", pool.port, key, task)
    finally:
        pool.stop()


def measure(pool: Pool, target: LoadTarget, seconds: float, times: float) -> OverloadFigures:
    nodes = [node_of(pool, target.key, f"node{place}")[1] for place in range(NODES)]
    calm = min(10.0, seconds)
    alone = asyncio.run(closed_loop(target, calm))
    capacity = sum(map(len, alone.admitted.values())) / calm
    rate = times * capacity
    pid = pool.server.pid
    assert pid is not None
    with (
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as others,
        Heartbeats(pool, nodes) as beats,
        Memory(pid) as memory,
    ):
        answers = others.submit(run_open_loop, target, rate, seconds).result()
        recovery_s = recovered(target, time.monotonic())
    delays = [delay for kind in answers.admitted.values() for delay in kind]
    kinds = sorted({*answers.admitted, *answers.refused})
    refused = {
        kind: answers.refused.get(kind, 0)
        / (answers.refused.get(kind, 0) + len(answers.admitted.get(kind, ())))
        for kind in kinds
    }
    return OverloadFigures(
        round(capacity, 1),
        round(rate, 1),
        seconds,
        round(len(delays) / seconds, 1),
        {kind: round(part, 3) for kind, part in refused.items()},
        sum(answers.failed.values()),
        answers.unsent,
        {"all": p99_ms(delays), **{kind: p99_ms(each) for kind, each in answers.admitted.items()}},
        round(max(delays, default=0.0) * 1000, 1),
        len(beats.delays),
        beats.lost,
        round(max(beats.delays, default=0.0) * 1000, 1),
        round(memory.before_mib, 1),
        round(memory.peak_mib, 1),
        round(recovery_s, 2),
    )


def recovered(target: LoadTarget, ended: float) -> float:
    """Seconds from the end of the load until a request of each class is admitted."""

    async def one_of_each() -> bool:
        answers = Answers()
        pair = await asyncio.open_connection(target.host, target.port)
        for kind in dict.fromkeys(MIX):
            await exchange(pair, target, kind, answers)
        pair[1].close()
        return not answers.refused and not answers.failed

    while not asyncio.run(one_of_each()):
        if time.monotonic() - ended > 120:
            break
        Event().wait(0.1)
    return time.monotonic() - ended


# ---- slow connections


@contextmanager
def slow_connections(target: LoadTarget, number: int) -> Iterator[None]:
    """Connections of another address: half heads, half bodies and waiting requests in turn, opened again when closed."""
    over = Event()
    kinds = (
        b"GET /v1/me HTTP/1.1\r\nx: ",
        b"POST /v1/tasks HTTP/1.1\r\nhost: x\r\nauthorization: Bearer "
        + target.key.encode()
        + b"\r\ncontent-length: 1000\r\n\r\n{",
        f"GET /v1/tasks/{target.task}?wait=600 HTTP/1.1\r\nhost: x\r\n"
        f"authorization: Bearer {target.key}\r\n\r\n".encode(),
    )

    def opened(kind: bytes) -> socket.socket:
        made = socket.create_connection(
            (target.host, target.port), timeout=30, source_address=("127.0.0.2", 0)
        )
        made.sendall(kind)
        made.settimeout(0)
        return made

    def keep() -> None:
        held = [opened(kinds[place % 3]) for place in range(number)]
        ready.set()
        while not over.wait(1.0):
            for place in range(number):
                try:
                    held[place].sendall(b"x" if place % 3 < 2 else b"")
                except OSError:
                    held[place].close()
                    held[place] = opened(kinds[place % 3])
        for each in held:
            each.close()

    ready = Event()
    thread = Thread(target=keep)
    thread.start()
    try:
        assert ready.wait(120)
        yield
    finally:
        over.set()
        thread.join()


def measure_slow(target: LoadTarget, seconds: float, number: int = SLOW) -> SlowFigures:
    def p99() -> float:
        answers = asyncio.run(paced(target, seconds))
        assert not answers.failed, answers.failed
        return p99_ms([delay for each in answers.admitted.values() for delay in each])

    before = p99()
    with slow_connections(target, number):
        during = p99()
    return SlowFigures(number, before, during)


async def paced(target: LoadTarget, seconds: float) -> Answers:
    """One connection, a request every 20 ms."""
    answers = Answers()
    pair = await asyncio.open_connection(target.host, target.port)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        for kind in ("submission", "status"):
            await exchange(pair, target, kind, answers)
            await asyncio.sleep(0.02)
    pair[1].close()
    return answers


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--seconds", type=float, default=60.0)
    asked.add_argument("--times", type=float, default=5.0, help="load, in times of the capacity")
    asked.add_argument("--quick", action="store_true", help="10 seconds")
    asked.add_argument("--json", type=Path)
    options = asked.parse_args()
    seconds = 10.0 if options.quick else options.seconds
    load = os.getloadavg()
    with (
        tempfile.TemporaryDirectory(prefix="gpool-overload-") as folder,
        served(Path(folder)) as (pool, target),
    ):
        slow = measure_slow(target, min(10.0, seconds))
        figures = measure(pool, target, seconds, options.times)
    print(f"Load of the machine before: {load[0]:.1f} {load[1]:.1f} {load[2]:.1f}\n")
    for each in (slow, figures):
        print("| figure | value |\n|---|---|")
        for name, value in (*asdict(each).items(), ("holds", each.holds)):
            print(f"| {name} | {value} |")
        print()
    if options.json:
        found = {"slow": asdict(slow), "overload": asdict(figures), "load": load}
        options.json.write_text(json.dumps(found, indent=1))
    return 0 if slow.holds and figures.holds else 1


if __name__ == "__main__":
    sys.exit(main())
