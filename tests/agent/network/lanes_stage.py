"""Lanes of a root agent on a host of the test's own: one case a run, as a script, in fresh namespaces. Prints JSON."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

from gpool.agent.machine.host import site_address
from gpool.agent.network import factory, host
from gpool.agent.network.policy import Egress, EgressPolicy, Only, parse_target
from gpool.agent.network.root_networks import RootNetworks, forwarding, read_sysctl, write_sysctl
from gpool.agent.network.sandbox_network import OpenSandboxNetwork
from tests.hostile import reaching
from tests.hostile.lanes_world import (
    CLONE_NEWNET,
    CLONE_NEWNS,
    GATEWAY,
    HOST,
    MS_BIND,
    MS_REC,
    MS_SLAVE,
    PUBLIC,
    arrived,
    build_world,
    fingerprint,
    in_namespace,
    must,
    settled,
    sh,
)

libc = ctypes.CDLL(None, use_errno=True)
SERVERS = ((PUBLIC, 53),)
PORT, PATIENCE_S = reaching.PORT, reaching.PATIENCE_S
UPLINK = forwarding("up0")
SILENCE_S = 1.5


def lanes(tag: str = "aaaaa", policy: EgressPolicy | None = None) -> RootNetworks:
    return RootNetworks(policy or EgressPolicy(), tag, servers=SERVERS)


async def inside(opened: OpenSandboxNetwork, work: Callable[[], Any]) -> Any:
    """By a thread of root's in the lane: worse than any task could be."""
    return await asyncio.to_thread(in_namespace, opened.lane.namespaces[0], work)


async def reached(
    opened: OpenSandboxNetwork, address: str = PUBLIC, within_s: float = PATIENCE_S
) -> bool:
    found = await inside(opened, lambda: reaching.attempt({"it": address}, within_s, 1))
    return bool(found["it"])


async def kept_from(opened: OpenSandboxNetwork, address: str = PUBLIC) -> bool:
    return not await reached(opened, address, 0.5)


async def tables() -> str:
    return await host.nft("list", "tables")


async def killed(_: socket.socket) -> dict[str, Any]:
    """An agent is killed without warning; the next one of that tag cleans up."""
    await host.nft("--version")  # the loop opens what it needs for children, once
    before = fingerprint()
    out, into = os.pipe()
    child = os.fork()
    if child == 0:

        async def live() -> None:
            several = lanes()
            await several.start()
            await several.open(Egress())
            await several.open(Only((parse_target("10.9.9.9:80"),)))
            os.write(into, b"1")
            await asyncio.Event().wait()

        asyncio.set_event_loop(None)
        asyncio.new_event_loop().run_until_complete(live())
    os.close(into)
    await asyncio.to_thread(os.read, out, 1)
    os.kill(child, signal.SIGKILL)
    await asyncio.to_thread(os.waitpid, child, 0)
    os.close(out)
    left = {"table": "gpool_aaaaa" in await tables(), "forwarding": read_sysctl(UPLINK)}
    several = lanes()
    await several.sweep()
    return {"left": left, "changed": await settled(before)}


async def two(_: socket.socket) -> dict[str, Any]:
    """Two agents share a host; the first to go leaves the other's way open."""
    one, other = lanes("aaaaa"), lanes("bbbbb")
    await one.start()
    await other.start()
    told: dict[str, Any] = {}
    async with await one.open(Egress()) as first, await other.open(Egress()) as second:
        told["both"] = [await reached(first), await reached(second)]
    await one.close()
    async with await other.open(Egress()) as second:
        told["after one went"] = [await reached(second), read_sysctl(UPLINK)]
    await other.close()
    told["after both went"] = [await tables(), read_sysctl(UPLINK)]
    return told


async def dropper(_: socket.socket) -> dict[str, Any]:
    """Another's table drops what is forwarded, as Docker's does."""
    await host.load(
        "table ip filter {\n chain FORWARD {\n type filter hook forward priority 0; policy drop;\n }\n }\n"
    )
    before = await host.nft("list", "table", "ip", "filter")
    several = lanes()
    await several.start()
    async with await several.open(Egress()) as opened:
        told: dict[str, Any] = {"with our rules in it": await reached(opened)}
        await host.load("flush chain ip filter FORWARD\n")
        told["without"] = not await kept_from(opened)
    await several.close()
    again = lanes()
    await again.start()
    await again.close()
    told["left"] = await host.nft("list", "table", "ip", "filter") != before
    return told


def blast() -> None:
    """In bursts that fit into the kernel's queues, however seldom it gets to empty them."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
        for _ in range(80):
            for _ in range(200):
                sending.sendto(b"x" * 1000, (PUBLIC, PORT + 1))
            select.select([], [], [], 0.005)


async def rate(capture: socket.socket) -> dict[str, Any]:
    """16 MB at once through a lane that may send 1 MB a second: packets that arrived, and how long that took."""
    told: dict[str, Any] = {}
    for word, cap, tries in (("capped", 1_000_000, 2), ("free", None, 3)):
        several = lanes(policy=EgressPolicy(rate_bytes_per_s=cap))
        await several.start()
        async with await several.open(Egress()) as opened:
            told[word] = [await blasted(opened, capture) for _ in range(tries)]
        await several.close()
    return told


async def blasted(opened: OpenSandboxNetwork, capture: socket.socket) -> tuple[int, float]:
    arrived(capture)
    begun = time.monotonic()
    sent = asyncio.ensure_future(inside(opened, blast))
    come, last = 0, begun
    while not sent.done() or time.monotonic() < last + SILENCE_S:
        if await asyncio.to_thread(capture_wait, capture, 0.1):
            come += len(arrived(capture, PORT + 1))
            last = time.monotonic()  # after the count: what came while we stood still took time
    return come, last - begun


def many(expected: int) -> int:
    """How many of twenty flows, open at once, are answered: no more than expected, it should be."""
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(20)]
    for each in sockets:
        each.sendto(b"?", (PUBLIC, PORT))
    waiting, heard = set(sockets), 0
    while waiting:
        patience_s = PATIENCE_S if heard < expected else SILENCE_S
        ready = select.select(waiting, [], [], patience_s)[0]
        if not ready:
            break
        waiting -= set(ready)
        heard += len(ready)
    for each in sockets:
        each.close()
    return heard


async def flows(_: socket.socket) -> dict[str, Any]:
    told = {}
    for allowed in (5, 100):
        several = lanes(policy=EgressPolicy(flows=allowed))
        await several.start()
        async with await several.open(Egress()) as opened:
            told[str(allowed)] = await inside(opened, lambda n=allowed: many(min(n, 20)))
        await several.close()
    return told


async def router(capture: socket.socket) -> dict[str, Any]:
    """A neighbour uses the host as a router while its uplink forwards for lanes."""
    world = world_namespace(capture)
    sh(f"route add 9.9.9.9/32 via {HOST}", namespace=world)

    def send() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
            sending.sendto(b"?", ("9.9.9.9", PORT))

    async def came_back(expected: bool = False) -> bool:
        arrived(capture)
        await asyncio.to_thread(in_namespace, world, send)
        return "9.9.9.9" in await asyncio.to_thread(arriving, capture, expected)

    told = {"before": await came_back()}
    several = lanes()
    await several.start()
    told["with lanes"] = await came_back()
    await several.close()
    write_sysctl(UPLINK, "1")
    told["forwarding without our table"] = await came_back(expected=True)
    write_sysctl(UPLINK, "0")
    return told


def capture_wait(capture: socket.socket, within_s: float) -> bool:
    return bool(select.select([capture], [], [], within_s)[0])


def arriving(capture: socket.socket, expected: bool) -> list[str]:
    """What is on its way: soon there, in one kernel, and waited for where something must come."""
    ends = time.monotonic() + (PATIENCE_S if expected else 0.3)
    found: list[str] = []
    while not found and (left := ends - time.monotonic()) > 0:
        capture_wait(capture, left)
        found = arrived(capture)
    return found


def world_namespace(capture: socket.socket) -> int:
    """SIOCGSKNS: the namespace a socket lives in."""
    return int(libc.ioctl(capture.fileno(), 0x894C))


async def moved(_: socket.socket) -> dict[str, Any]:
    """The host gets another address, on a public network, after the start."""
    neighbour = "11.22.33.44"
    several = lanes()
    await several.start()
    async with await several.open(Egress()) as opened:
        told: dict[str, Any] = {"before": await reached(opened, neighbour)}
    sh("addr add 11.22.33.9/24 dev up0")
    async with await several.open(Egress()) as opened:
        told["after"] = not await kept_from(opened, neighbour)
    sh("addr del 11.22.33.9/24 dev up0")
    async with await several.open(Egress()) as opened:
        told["gone again"] = await reached(opened, neighbour)
    await several.close()
    return told


async def spoofed(capture: socket.socket) -> dict[str, Any]:
    """Root inside the lane gives itself another address, and still reaches nobody by it."""
    several = lanes()
    await several.start()
    async with await several.open(Egress()) as opened:
        sh("addr add 9.9.9.9/32 dev eth0", namespace=opened.lane.namespaces[0])

        def send(source: str, options: bytes) -> None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
                sending.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, options)
                sending.bind((source, 0))
                sending.sendto(b"?", (PUBLIC, PORT))

        told = {}
        nothing = b"\x01" * 4  # four options that say nothing
        for word, source, options in (
            ("as itself", "0.0.0.0", b""),
            ("as another", "9.9.9.9", b""),
            ("with options", "0.0.0.0", nothing),
        ):
            arrived(capture)
            before = await several.refused_packets()
            await inside(opened, lambda s=source, o=options: send(s, o))
            came = await asyncio.to_thread(arriving, capture, word == "as itself")
            told[word] = [len(came), await several.refused_packets() - before]
            ends = time.monotonic() + PATIENCE_S
            while not any(told[word]) and time.monotonic() < ends:  # it is still on its way
                came = await asyncio.to_thread(arriving, capture, False)
                told[word] = [len(came), await several.refused_packets() - before]
    await several.close()
    return told


async def listed(_: socket.socket) -> dict[str, Any]:
    """A list may name the host's own address: an index may run there."""
    several = lanes()
    await several.start()
    async with await several.open(Only((parse_target(f"{HOST}:{PORT}"),))) as opened:
        told: dict[str, Any] = {
            "the host": await reached(opened, HOST),
            "public": not await kept_from(opened),
        }
    async with await several.open(Only(())) as nothing:
        told["an empty list"] = not await kept_from(nothing, HOST)
    sets = await host.nft("list", "set", "inet", "gpool_aaaaa", "permitted")
    told["left"] = "elements" in sets
    await several.close()
    return told


async def probed(_: socket.socket) -> dict[str, Any]:
    await host.nft("--version")  # the loop opens what it needs for children, once
    before = fingerprint()
    told: dict[str, Any] = {"said": await factory.probe(Path("/nowhere"))}
    told["changed"] = await settled(before)
    sh("route del default")
    told["no way out"] = await factory.probe(Path("/nowhere"))
    return told


async def probed_for_gangs(_: socket.socket) -> dict[str, Any]:
    await host.nft("--version")  # the loop opens what it needs for children, once
    before = fingerprint()
    told: dict[str, Any] = {"said": await factory.probe_gangs(Path("/nowhere"))}
    told["changed"] = await settled(before)
    told["seen from the server"] = site_address(f"https://{GATEWAY}:8443")
    told["the server is here"] = site_address("https://127.0.0.1:8443")
    sh("route del default")
    told["no way out"] = await factory.probe_gangs(Path("/nowhere"))
    told["the server is here, no way out"] = site_address("https://127.0.0.1:8443")
    must(libc.mount(b"/dev/null", b"/dev/net/tun", None, MS_BIND, None), "hide it")
    told["no interface"] = await factory.probe_gangs(Path("/nowhere"))
    must(libc.umount2(b"/dev/net/tun", 2), "umount")
    return told


async def called_off(_: socket.socket) -> dict[str, Any]:
    """Builds are called off while their lanes are being opened."""
    several = RootNetworks(EgressPolicy(), "aaaaa", servers=SERVERS, ahead=0)
    await several.start()
    before = fingerprint()
    wants = Only((parse_target("10.9.9.9:80"),))
    for turns in range(40):
        opening = asyncio.ensure_future(several.open(wants))
        await asyncio.wait([opening], timeout=turns / 1000)
        if opening.cancel():
            await asyncio.wait([opening])
        else:
            await opening.result().close()
    changed = await settled(before)  # of threads that nobody waits for too
    listed = await host.nft("list", "set", "inet", "gpool_aaaaa", "permitted")
    left = [name for _, name in socket.if_nameindex() if name.startswith("gpool")]
    told = {"interfaces": left, "permitted": "10.9.9.9" in listed, "changed": changed}
    await several.close()
    return told


CASES: dict[str, Callable[[socket.socket], Awaitable[dict[str, Any]]]] = {
    each.__name__: each
    for each in (
        killed,
        two,
        dropper,
        rate,
        flows,
        router,
        moved,
        spoofed,
        listed,
        probed,
        probed_for_gangs,
        called_off,
    )
}


def main() -> int:
    must(libc.unshare(CLONE_NEWNET | CLONE_NEWNS), "unshare")
    must(libc.mount(b"none", b"/", None, MS_REC | MS_SLAVE, None), "slave")
    capture = build_world()
    told = uvloop.run(CASES[sys.argv[1]](capture))
    sys.stdout.write(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)  # the world's threads serve for ever


if __name__ == "__main__":
    sys.exit(main())
