"""A gang's private network against the bare link it runs over, in one run: bytes a second, round trips, the relays' processor time.

python -m bench.gang_lane [--json FILE] [--seconds 3] [--mtu 1500]     as root: two hosts in network namespaces of its own
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import uvloop

from gpool.agent.network.policy import EgressPolicy, Gang
from gpool.agent.network.root_networks import RootNetworks
from gpool.agent.network.sandbox_network import OpenSandboxNetwork
from gpool.core.gangs import address_of

CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
BUFFER_BYTES = 1 << 18
PORT, GANG_PORT = 5001, 47100
SECRET = b"the same for both of the members"
libc = ctypes.CDLL(None, use_errno=True)


def address(number: int) -> str:
    return f"192.168.79.{1 + number}"


# what is measured, in a child of its own


def sink(streams: int) -> float:
    """Bits a second that came, by as many connections."""
    listening = socket.create_server(("0.0.0.0", PORT), reuse_port=True)
    ready()
    coming = [listening.accept()[0] for _ in range(streams)]
    buffer = bytearray(BUFFER_BYTES)
    began, total = time.perf_counter(), 0
    for each in coming:
        each.setblocking(len(coming) == 1)
    while coming:
        for each in tuple(coming):
            try:
                size = each.recv_into(buffer)
            except BlockingIOError:
                continue
            total += size
            if not size:
                coming.remove(each)
    return total * 8 / (time.perf_counter() - began)


def source(to: str, seconds: float, streams: int) -> None:
    data = bytes(BUFFER_BYTES)
    going = [socket.create_connection((to, PORT)) for _ in range(streams)]
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for each in going:
            each.sendall(data)
    for each in going:
        each.close()


def echo(_: int) -> None:
    listening = socket.create_server(("0.0.0.0", PORT), reuse_port=True)
    ready()
    stream, _peer = listening.accept()
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := stream.recv(BUFFER_BYTES):
        stream.sendall(data)


def trips(to: str, seconds: float, _: int) -> dict[str, float]:
    """Microseconds for a byte and its answer."""
    took = []
    with socket.create_connection((to, PORT)) as stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until:
            stream.sendall(b"?")
            stream.recv(1)
            took.append((time.perf_counter() - began) * 1e6)
    took.sort()
    return {"p50_us": round(statistics.median(took)), "p99_us": round(took[len(took) * 99 // 100])}


def ready() -> None:
    os.write(1, b"ready\n")


WORK: dict[str, Callable[..., Any]] = {w.__name__: w for w in (sink, source, echo, trips)}


def start(opened: OpenSandboxNetwork | None, work: str, arguments: list[Any]) -> tuple[int, int]:
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            os.dup2(into, 1)
            if opened is not None and libc.setns(opened.lane.namespaces[0], 0) != 0:
                raise OSError(ctypes.get_errno(), "setns")
            os.write(1, json.dumps(WORK[work](*arguments)).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(into)
    return child, out


# the two hosts


async def live(number: int, channel: socket.socket) -> None:
    networks = RootNetworks(EgressPolicy(), f"be9c{number}", ahead=0)
    await networks.start()
    peers = tuple((address(n), GANG_PORT) for n in range(2))
    opened = await networks.open(Gang(number, peers, SECRET))
    (relay,) = (p for p in psutil.Process().children() if "gang.relay" in " ".join(p.cmdline()))
    loop = asyncio.get_running_loop()
    channel.setblocking(False)
    await loop.sock_sendall(channel, b"open")
    running: list[tuple[int, int]] = []
    while said := await loop.sock_recv(channel, 1 << 16):
        order = json.loads(said)
        told: Any = None
        if order["do"] == "start":
            lane = opened if order["lane"] else None
            running.append(start(lane, order["work"], order["arguments"]))
            if order["work"] in ("sink", "echo"):
                await asyncio.to_thread(os.read, running[-1][1], 6)
        elif order["do"] == "finish":
            child, out = running.pop()
            with os.fdopen(out) as text:
                told = json.loads(await asyncio.to_thread(text.read))
            await asyncio.to_thread(os.waitpid, child, 0)
        else:
            told = sum(relay.cpu_times()[:2])
        await loop.sock_sendall(channel, json.dumps(told).encode())
    await opened.close()
    await networks.close()


class Host:
    def __init__(self, number: int) -> None:
        self.address = address(number)
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            self.channel.close()
            try:
                libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if libc.unshare(CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "unshare")
                theirs.send(b"made")
                theirs.recv(16)
                uvloop.run(live(number, theirs))
            finally:
                os._exit(0)
        theirs.close()
        if not self.channel.recv(16):
            sys.exit("this needs root")

    def ask(self, do: str, **words: Any) -> Any:
        self.channel.send(json.dumps({"do": do, **words}).encode())
        return json.loads(self.channel.recv(1 << 16))

    def end(self) -> None:
        self.channel.shutdown(socket.SHUT_RDWR)  # the other host holds a copy of it
        os.waitpid(self.pid, 0)
        self.channel.close()


def configure(hosts: list[Host], mtu: int) -> None:
    first, second = (host.pid for host in hosts)
    enter = ["nsenter", f"--net=/proc/{first}/ns/net"]
    link = f"link add up0 mtu {mtu} type veth peer name up0 mtu {mtu} netns {second}".split()
    subprocess.run([*enter, "ip", *link], check=True)
    for host in hosts:
        text = f"link set lo up\naddr add {host.address}/24 dev up0\nlink set up0 up\n"
        enter = ["nsenter", f"--net=/proc/{host.pid}/ns/net", "ip", "-batch", "-"]
        subprocess.run(enter, input=text, text=True, check=True)
        host.channel.send(b"go")
    for host in hosts:
        if host.channel.recv(16) != b"open":
            sys.exit("a lane could not be opened")


def measured(
    hosts: list[Host], lane: bool, works: tuple[str, str], seconds: float, streams: int = 1
) -> tuple[Any, Any, float]:
    """What either said, and the processor time of both relays."""
    there, here = works
    spent = -sum(host.ask("spent") for host in hosts)
    to = str(address_of(1)) if lane else hosts[1].address
    hosts[1].ask("start", lane=lane, work=there, arguments=[streams])
    hosts[0].ask("start", lane=lane, work=here, arguments=[to, seconds, streams])
    said = (hosts[0].ask("finish"), hosts[1].ask("finish"))
    return *said, spent + sum(host.ask("spent") for host in hosts)


def main(seconds: float, mtu: int) -> list[dict[str, Any]]:
    hosts = [Host(0), Host(1)]
    configure(hosts, mtu)
    rows = []
    for name, lane in (("link", False), ("gang", True), ("link", False), ("gang", True)):
        round_trips, _, _ = measured(hosts, lane, ("echo", "trips"), seconds)
        row: dict[str, Any] = {"way": name, "mtu": mtu, **round_trips}
        for streams in (1, 8):
            _, bits, spent = measured(hosts, lane, ("sink", "source"), seconds, streams)
            row[f"gbit_s_{streams}"] = round(bits / 1e9, 2)
            if lane:
                # each carries all of it once: what one core could carry if it did nothing else
                row[f"gbit_s_a_core_{streams}"] = round(bits * seconds / 1e9 / (spent / 2), 2)
        rows.append(row)
    for host in hosts:
        host.end()
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--mtu", type=int, default=1500)
    given = parser.parse_args()
    found = main(given.seconds, given.mtu)
    for each in found:
        print("  ".join(f"{word} {value}" for word, value in each.items()))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
