"""Some nodes send as fast as they can: what another node and everybody else notice of it, with the server's limit and without.

    python -m bench.node_floods [--seconds 6] [--nodes 8] [--json FILE]

A real server, a process with the flooding nodes (which connect again whenever they are closed), and here an honest node, whose
beats are timed, and a stranger asking `/healthz`, whose longest answer tells how long the server's loop stood still.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import quantiles
from threading import Thread
from typing import Any

import httpx2
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.sync.client import ClientConnection, connect

from gpool.agent.channel import AgentCredentials, NodeIdentity
from gpool.agent.daemon import boot_clock
from gpool.core.model import GIB, Offer
from gpool.transfer.node_proofs import NodeKey
from gpool.wire.frames import (
    CHANNEL_PATH,
    NODE_HEADER,
    PROTOCOL,
    Beat,
    BeatSeen,
    Challenge,
    Hello,
    OfferChanged,
    Proven,
    Released,
    Reports,
    Welcome,
    decode_any_from_server,
    encode,
)
from tests.tools import nodes
from tests.tools.processes import Pool

OFFER = Offer(4000, 8 * GIB, 64 * GIB, (), hostname="flood")
KINDS = ("beats", "reports", "offers")


@contextmanager
def greeted(address: str, badge: AgentCredentials, beat: int) -> Iterator[ClientConnection]:
    url = address.replace("http", "ws", 1) + CHANNEL_PATH
    head = {NODE_HEADER: badge.identity.node}
    with connect(url, additional_headers=head, max_size=None) as socket:
        while True:
            frame = heard(socket)
            if isinstance(frame, Challenge):
                proof = badge.answer(frame, is_open=False)
                assert proof is not None
                socket.send(encode(proof))
            elif isinstance(frame, Proven):
                badge.take(frame)
                socket.send(encode(Hello(PROTOCOL, "boot", OFFER, beat, ())))
            elif isinstance(frame, Welcome):
                break
        yield socket


def heard(socket: ClientConnection) -> object:
    data = socket.recv(timeout=60)
    assert isinstance(data, bytes)
    return decode_any_from_server(data)


@dataclass(frozen=True, slots=True)
class Flooding:
    address: str
    kind: str
    members: list[tuple[bytes, NodeIdentity]]


def flood(asked: Flooding, over: Event) -> None:
    threads = [Thread(target=_flood, args=(asked, *each, over)) for each in asked.members]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


def _flood(asked: Flooding, seed: bytes, identity: NodeIdentity, over: Event) -> None:
    """Past the client's own library: it would be the slower of the two."""
    badge, hellos = AgentCredentials(NodeKey(seed), identity, boot_clock), 0
    while not over.is_set():
        hellos += 1
        try:
            with greeted(asked.address, badge, hellos * 1_000_000) as socket:
                frame = Frame(Opcode.BINARY, _frame(asked.kind, badge)).serialize(mask=True)
                many = frame * (64 * 1024 // len(frame))
                while not over.is_set():
                    socket.socket.sendall(many)
        except InvalidStatus:
            over.wait(0.05)  # it is not let in
        except (ConnectionClosed, OSError, TimeoutError, AssertionError):
            continue


def _frame(kind: str, badge: AgentCredentials) -> bytes:
    if kind == "beats":
        return encode(Beat(1, ()))
    if kind == "offers":
        return encode(OfferChanged(OFFER))
    return encode(badge.stamped(Reports(1, (Released(1, 1),))))


@dataclass(frozen=True, slots=True)
class Figures:
    kind: str
    limit: bool
    beats: int
    p50_ms: float
    worst_ms: float  # of an honest beat
    pause_ms: float  # the longest answer of /healthz
    server_cores: float


def measure(folder: Path, kind: str, flooding: int, *, limit: bool, seconds: float) -> Figures:
    settings = {} if limit else {"GPOOL_SERVER_NODE_FRAMES_PER_S": "0"}
    pool = Pool(folder, settings)
    pool.start_server()

    def ask(path: str, document: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = pool.ask("POST", path, document).json()
        return answer

    over = multiprocessing.get_context("spawn").Event()
    try:
        seeds = [sha256(b"%d" % number).digest() for number in range(flooding + 1)]
        badges = [
            nodes.joined(ask, NodeKey(seed), name=f"node{place}")
            for place, seed in enumerate(seeds)
        ]
        members = [(seed, badge.identity) for seed, badge in zip(seeds, badges, strict=True)]
        process = multiprocessing.get_context("spawn").Process(
            target=flood, args=(Flooding(pool.address, kind, members[1:]), over), daemon=True
        )
        if kind:
            process.start()
        with (
            greeted(pool.address, badges[0], 1) as honest,
            httpx2.Client(base_url=pool.address, timeout=60) as http,
        ):
            began, before = time.perf_counter(), pool.server.cpu_s()
            beats: list[float] = []
            pauses: list[float] = []
            while time.perf_counter() - began < seconds:
                beats.append(_timed(honest, len(beats) + 2))
                asked = time.perf_counter()
                http.get("/healthz")
                pauses.append((time.perf_counter() - asked) * 1e3)
                time.sleep(0.02)  # noqa: TID251 - it is measured from outside
            cores = (pool.server.cpu_s() - before) / (time.perf_counter() - began)
        over.set()
        if kind:
            process.join(10)
            process.kill()
    finally:
        over.set()
        pool.stop()
    cuts = quantiles(beats, n=100)
    return Figures(
        kind or "nothing",
        limit,
        len(beats),
        round(cuts[49], 1),
        round(max(beats), 1),
        round(max(pauses), 1),
        round(cores, 2),
    )


def _timed(socket: ClientConnection, number: int) -> float:
    sent = time.perf_counter()
    socket.send(encode(Beat(number, ())))
    while True:
        frame = heard(socket)
        if isinstance(frame, BeatSeen) and frame.number == number:
            return (time.perf_counter() - sent) * 1e3


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--seconds", type=float, default=6.0, help="of each")
    asked.add_argument("--nodes", type=int, default=8, help="that flood")
    asked.add_argument("--json", type=Path)
    options = asked.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}\n")
    print("| flood of | limit | beats | p50 ms | worst ms | longest pause ms | server cores |")
    print("|---|---|---|---|---|---|---|")
    found = []
    for kind in ("", *KINDS):
        for limit in (True, False) if kind else (True,):
            with tempfile.TemporaryDirectory() as folder:
                one = measure(
                    Path(folder), kind, options.nodes, limit=limit, seconds=options.seconds
                )
            found.append(one)
            print(
                f"| {one.kind} | {'yes' if one.limit else 'no'} | {one.beats} | {one.p50_ms} | {one.worst_ms} "
                f"| {one.pause_ms} | {one.server_cores} |",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
