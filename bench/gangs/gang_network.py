"""The links of a gang beside the bare link and wireguard-go alone, alternating in one run: TCP throughput, round trips, and
the time of a gloo all-reduce of 16 MiB. As root: two hosts in network namespaces, joined by veth.

python -m bench.gang_network [--json FILE] [--quick] [--seconds 0.3] [--rounds 25] [--mtu 1500] [--no-torch]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop

from gpool.agent.network.gang.wireguard import (
    UserSpaceWireGuard,
    configuration,
    missing_programs,
    set_configuration,
)
from gpool.agent.network.policy import EgressPolicy, Gang
from gpool.agent.network.root_networks import RootNetworks
from gpool.agent.network.sandbox_network import OpenSandboxNetwork
from gpool.core.gangs import INTERFACE, GangLink, address_of

CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
BUFFER_BYTES = 1 << 18
PORT, GANG_PORT, ALONE_PORT = 5001, 47100, 47200
BARE, ALONE = "bare link", "wireguard-go alone"
LANES = tuple(link.value for link in GangLink)
WAYS = (BARE, "direct", ALONE, "wireguard", "relay")
ALONE_NETWORK = "10.99.0"
LEAST_RATIO = 0.9  # many short rounds: on a busy machine two seconds in a row differ by half
"""Least throughput of a direct link relative to the bare one, and of WireGuard to wireguard-go alone: median of rounds."""
PAIRS = {"direct": BARE, "wireguard": ALONE}
libc = ctypes.CDLL(None, use_errno=True)

REDUCE = """
import json, os, sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=2)
data = torch.ones(4 << 20)
took = []
for turn in range(int(sys.argv[1])):
    data.fill_(1.0)
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(data)
    took.append(time.perf_counter() - began)
    assert data[0] == data[-1] == 2.0
took = sorted(took[2:])
print(json.dumps({"best_ms": round(took[0] * 1e3, 1), "p50_ms": round(took[len(took) // 2] * 1e3, 1)}))
dist.destroy_process_group()
"""


def address(number: int) -> str:
    return f"192.168.79.{1 + number}"


# ---- the work that is measured, each in a child of its own


def sink() -> float:
    """Bits per second that came over one connection."""
    with socket.create_server(("0.0.0.0", PORT), reuse_port=True) as listening:
        ready()
        stream, _ = listening.accept()
    buffer = bytearray(BUFFER_BYTES)
    began, total = time.perf_counter(), 0
    while size := stream.recv_into(buffer):
        total += size
    return total * 8 / (time.perf_counter() - began)


def source(to: str, seconds: float) -> None:
    data = bytes(BUFFER_BYTES)
    with socket.create_connection((to, PORT)) as stream:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            stream.sendall(data)


def echo() -> None:
    with socket.create_server(("0.0.0.0", PORT), reuse_port=True) as listening:
        ready()
        stream, _ = listening.accept()
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := stream.recv(BUFFER_BYTES):
        stream.sendall(data)


def trips(to: str, seconds: float) -> float:
    """Median microseconds for a byte and its answer."""
    took = []
    with socket.create_connection((to, PORT)) as stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until:
            stream.sendall(b"?")
            stream.recv(1)
            took.append((time.perf_counter() - began) * 1e6)
    return statistics.median(took)


def reduce(rank: int, head: str, interface: str, turns: int) -> None:
    """Become a process of PyTorch; rank 0 prints the times."""
    environment = {
        **os.environ,
        "RANK": str(rank),
        "MASTER_ADDR": head,
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": interface,
    }
    os.execve(sys.executable, [sys.executable, "-c", REDUCE, str(turns)], environment)


def ready() -> None:
    os.write(1, b"ready\n")


WORK: dict[str, Callable[..., Any]] = {w.__name__: w for w in (sink, source, echo, trips, reduce)}


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


# ---- the two hosts


def gang_of(link: str, number: int) -> Gang:
    port = GANG_PORT + LANES.index(link)
    peers = tuple((address(n), port) for n in range(2))
    return Gang(number, peers, f"the secret of the gang over {link}".encode(), link=link)


async def open_alone(number: int, name: str) -> UserSpaceWireGuard:
    """wireguard-go as its manual starts it: an interface in the host's own namespace, with the default MTU."""
    peers = [(address(n), ALONE_PORT) for n in range(2)]
    gang = Gang(number, tuple(peers), b"the secret of wireguard-go alone")
    process = await UserSpaceWireGuard.start(name)
    own, other = (f"{ALONE_NETWORK}.{1 + n}" for n in (number, 1 - number))
    text = configuration(gang, ALONE_PORT, peers)
    await set_configuration(name, text.replace(str(address_of(1 - number)), other))
    for words in (f"address add {own}/24 dev {name}", f"link set {name} up"):
        await asyncio.to_thread(subprocess.run, ["ip", *words.split()], check=True)
    return process


async def live(number: int, channel: socket.socket) -> None:
    networks = RootNetworks(EgressPolicy(), f"be9c{number}", ahead=0)
    await networks.start()
    lanes = {link: await networks.open(gang_of(link, number)) for link in LANES}
    alone = await open_alone(number, f"alone{number}")
    loop = asyncio.get_running_loop()
    channel.setblocking(False)
    await loop.sock_sendall(channel, b"open")
    running: list[tuple[int, int]] = []
    while said := await loop.sock_recv(channel, 1 << 16):
        order = json.loads(said)
        told: Any = None
        if order["do"] == "start":
            running.append(start(lanes.get(order["way"]), order["work"], order["arguments"]))
            if order["work"] in ("sink", "echo"):
                await asyncio.to_thread(os.read, running[-1][1], 6)
        else:
            child, out = running.pop()
            with os.fdopen(out) as text:
                found = await asyncio.to_thread(text.read)
            told = json.loads(found) if found else None
            await asyncio.to_thread(os.waitpid, child, 0)
        await loop.sock_sendall(channel, json.dumps(told).encode())
    for each in lanes.values():
        await each.close()
    await alone.end()
    await networks.close()


class Host:
    def __init__(self, number: int) -> None:
        self.number = number
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
            except BaseException:  # noqa: BLE001 - a forked child must never return
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(0)
        theirs.close()
        if not self.channel.recv(16):
            sys.exit("this needs root")

    def place(self, way: str) -> tuple[str, str]:
        """Address and interface of the host on a way."""
        if way == BARE:
            return address(self.number), "up0"
        if way == ALONE:
            return f"{ALONE_NETWORK}.{1 + self.number}", f"alone{self.number}"
        return str(address_of(self.number)), INTERFACE

    def ask(self, do: str, **words: Any) -> Any:
        self.channel.send(json.dumps({"do": do, **words}).encode())
        return json.loads(self.channel.recv(1 << 16))

    def start(self, way: str, work: str, *arguments: Any) -> None:
        self.ask("start", way=way, work=work, arguments=arguments)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)  # the other host holds a copy of it
        os.waitpid(self.pid, 0)
        self.channel.close()


def configure(hosts: Sequence[Host], mtu: int) -> None:
    first, second = (host.pid for host in hosts)
    enter = ["nsenter", f"--net=/proc/{first}/ns/net"]
    link = f"link add up0 mtu {mtu} type veth peer name up0 mtu {mtu} netns {second}".split()
    subprocess.run([*enter, "ip", *link], check=True)
    for host in hosts:
        text = f"link set lo up\naddr add {address(host.number)}/24 dev up0\nlink set up0 up\n"
        enter = ["nsenter", f"--net=/proc/{host.pid}/ns/net", "ip", "-batch", "-"]
        subprocess.run(enter, input=text, text=True, check=True)
    for host in hosts:
        host.channel.send(b"go")
    for host in hosts:
        if host.channel.recv(16) != b"open":
            sys.exit("a link could not be opened")


def measured(hosts: Sequence[Host], way: str, works: tuple[str, str], seconds: float) -> Any:
    """Result of the second host's work, or else of the first's."""
    there, here = works
    hosts[1].start(way, there)
    hosts[0].start(way, here, hosts[1].place(way)[0], seconds)
    told = hosts[0].ask("finish")
    came = hosts[1].ask("finish")
    return came if told is None else told


def reduced(hosts: Sequence[Host], way: str, turns: int) -> Any:
    head = hosts[0].place(way)[0]
    for host in hosts:
        host.start(way, "reduce", host.number, head, host.place(way)[1], turns)
    told = hosts[0].ask("finish")
    hosts[1].ask("finish")
    return told


def run(seconds: float, rounds: int, mtu: int, turns: int) -> dict[str, dict[str, Any]]:
    hosts = [Host(0), Host(1)]
    found: dict[str, dict[str, Any]] = {way: {"gbit_s": [], "reduce": []} for way in WAYS}
    try:
        configure(hosts, mtu)
        for way in WAYS:
            measured(hosts, way, ("echo", "trips"), 0.2)  # handshakes and caches
        for number in range(rounds):
            for way in WAYS if number % 2 == 0 else WAYS[::-1]:
                bits = measured(hosts, way, ("sink", "source"), seconds)
                found[way]["gbit_s"].append(round(bits / 1e9, 2))
        for way in WAYS:
            trip = measured(hosts, way, ("echo", "trips"), 1.0)
            found[way]["round_trip_us"] = round(trip)
        for number in range(2 if turns > 6 else bool(turns)):
            for way in WAYS if number % 2 == 0 else WAYS[::-1]:
                found[way]["reduce"].append(reduced(hosts, way, turns))
    finally:
        for host in hosts:
            host.end()
    return found


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "| way | Gbit/s, median | best | round trip, µs | all-reduce of 16 MiB, best of all, ms |",
        "|---|---|---|---|---|",
    ]
    for way, one in found.items():
        times = [each["best_ms"] for each in one["reduce"] if each]
        speeds = one["gbit_s"]
        reduce_text = f"{min(times):.1f}" if times else "not run"
        lines.append(
            f"| {way} | {statistics.median(speeds):.2f} | {max(speeds):.2f} "
            f"| {one['round_trip_us']} | {reduce_text} |"
        )
    return lines


def ratios(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Median over the rounds of a link's throughput relative to the one it is compared with, of the same round."""
    return {
        f"{way} / {base}": round(
            statistics.median(
                mine / other
                for mine, other in zip(found[way]["gbit_s"], found[base]["gbit_s"], strict=True)
            ),
            3,
        )
        for way, base in PAIRS.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--no-torch", action="store_true", help="leave the all-reduce out")
    given = parser.parse_args()
    if os.geteuid() != 0 or (missing := missing_programs()):
        print(f"not run: {'it needs root' if os.geteuid() != 0 else missing}")
        return 0
    seconds, rounds, turns = given.seconds, given.rounds, 12
    if given.quick:
        rounds, turns = 9, 6
    if given.no_torch or importlib.util.find_spec("torch") is None:
        turns = 0
    found = run(seconds, rounds, given.mtu, turns)
    compared = ratios(found)
    print("\n".join(table(found)))
    for name, ratio in compared.items():
        print(f"{name}: {ratio}, at least {LEAST_RATIO} is required")
    if given.json:
        given.json.write_text(json.dumps({"ways": found, "ratios": compared}, indent=1))
    return 0 if all(ratio >= LEAST_RATIO for ratio in compared.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
