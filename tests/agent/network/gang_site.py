"""A site in namespaces of the test's own: hosts on one bridge, a process with an agent's networks on each, and a world beyond.

Whoever imports it is where the bridge is. `Host.call` runs a function of `WORK` on a host and returns what it says.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

from gpool.agent.network import host
from gpool.agent.network.gang.relay_client import RELAY
from gpool.agent.network.gang.wireguard import (
    UserSpaceWireGuard,
    control_path,
    set_configuration,
)
from gpool.agent.network.policy import Egress, EgressPolicy, Gang
from gpool.agent.network.root_networks import RootNetworks
from gpool.agent.network.rootless_networks import RootlessNetworks
from gpool.agent.network.sandbox_network import Networks, OpenSandboxNetwork
from gpool.agent.runtime.protocol import CommandJob, StagedInput
from gpool.core.gangs import INTERFACE, GangLink
from tests.agent.network.gang_tasks import BLOCK, INSIDE
from tests.hostile.lanes_world import (
    CLONE_NEWNET,
    CLONE_NEWUSER,
    NOBODY,
    answering,
    echo,
    fingerprint,
    in_namespace,
    libc,
    must,
    setns,
    settled,
    sh,
)
from tests.tools.runtimes import LIMITS, MAKERS

GATEWAY, PUBLIC, METADATA = "192.168.78.1", "11.22.33.44", "169.254.169.254"
PORT = 47101
ETH_P_IP, ETH_P_ALL = 0x800, 3
WEAK = (
    "-c",
    "import sys; sys.path[:0] = sys.argv[1].split(':'); from gpool.agent.network.gang.relay import main;"
    " from tests.agent.network.weak_relay import WeakRelay; sys.exit(main(WeakRelay))",
    os.pathsep.join(sys.path),
)


def host_address(number: int) -> str:
    return f"192.168.78.{10 + number}"


def peers(count: int, port: int = PORT) -> list[tuple[str, int]]:
    return [(host_address(number), port) for number in range(count)]


def enter(opened: OpenSandboxNetwork) -> None:
    for descriptor in opened.lane.namespaces:
        setns(descriptor)
    if os.geteuid() == 0 and len(opened.lane.namespaces) == 1:
        os.setresuid(NOBODY, NOBODY, NOBODY)
    else:
        must(libc.unshare(CLONE_NEWUSER), "unshare")


def entered(opened: OpenSandboxNetwork | None, work: str, arguments: list[Any]) -> tuple[int, int]:
    """A child in the lane (None: on the host) without any capability there; its pid, and where it says something."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            libc.prctl(1, signal.SIGKILL, 0, 0, 0)
            os.dup2(into, 1)
            if opened is not None:
                enter(opened)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - until it ends
            try:
                answer = INSIDE[work](*arguments)
            except OSError as failure:
                answer = type(failure).__name__
            sys.stdout.write(json.dumps(answer))
            sys.stdout.flush()
        except BaseException:  # noqa: BLE001 - a forked child must never return
            sys.excepthook(*sys.exc_info())
        os._exit(0)
    os.close(into)
    return child, out


# what a host does


class Agent:
    """The networks of one host's agent, and the lanes it has open."""

    def __init__(self, networks: Networks, place: Path, link: str = GangLink.RELAY) -> None:
        self.networks = networks
        self.place = place
        self.link = link
        self.lanes: dict[str, OpenSandboxNetwork] = {}
        self.serving: list[int] = []
        self.watching: dict[str, socket.socket] = {}
        self.listening: dict[str, socket.socket] = {}
        self.before: dict[str, Any] = {}

    async def begin(self) -> None:
        await host.nft("--version")  # the loop opens what it needs for children, once
        self.before = fingerprint()
        await self.networks.start()

    async def open(
        self, lane: str, rank: int, whom: list[tuple[str, int]], secret: str, egress: bool = False
    ) -> None:
        wants = Gang(rank, tuple((h, p) for h, p in whom), bytes.fromhex(secret), egress, self.link)
        self.lanes[lane] = await self.networks.open(wants)

    async def open_egress(self, lane: str) -> None:
        self.lanes[lane] = await self.networks.open(Egress())

    async def inside(self, lane: str | None, work: str, *arguments: Any) -> Any:
        opened = self.lanes[lane] if lane is not None else None

        def run() -> Any:
            child, out = entered(opened, work, list(arguments))
            with os.fdopen(out) as said:
                text = said.read()
            os.waitpid(child, 0)
            return json.loads(text) if text else "it failed"

        return await asyncio.to_thread(run)

    async def serve(self, lane: str | None, *ports: int) -> None:
        opened = self.lanes[lane] if lane is not None else None
        child, out = entered(opened, "serve", [list(ports)])
        self.serving.append(child)
        await asyncio.to_thread(os.read, out, 6)
        os.close(out)

    async def sandbox(self, lane: str, code: str, kind: str = "bubblewrap", *words: str) -> str:
        """What a command says, in a real sandbox in the lane."""
        runtime = MAKERS[kind](self.place)
        await runtime.sweep()
        script = self.place / "attempt.py"
        script.write_text(code)
        staged = (StagedInput(script.name, script, False),)
        job = CommandJob(
            ("python", script.name, *words), (), staged, (), LIMITS, network=self.lanes[lane].lane
        )
        sandbox = await runtime.start_command(job)
        text = b"".join([data async for _, data in sandbox.output()])
        await sandbox.remove()
        await runtime.close()
        return text.decode()

    async def watch(self, lane: str) -> None:
        """Sees from now on what the relay lets into the lane."""

        def listen() -> socket.socket:
            made = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_IP))
            made.bind((INTERFACE, ETH_P_IP))
            made.setblocking(False)
            return made

        self.watching[lane] = await asyncio.to_thread(
            in_namespace, self.lanes[lane].lane.namespaces[0], listen
        )

    async def came(self, lane: str) -> list[str]:
        """Payloads of UDP packets that came in since it was last asked."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                packet, origin = self.watching[lane].recvfrom(BLOCK)
                if origin[2] != socket.PACKET_OUTGOING and packet[9] == socket.IPPROTO_UDP:
                    found.append(packet[28:].decode(errors="replace"))
        return found

    async def listen(self, lane: str, port: int) -> None:
        """Receives datagrams in the lane from now on, as a task would: behind its filter."""

        def listen() -> socket.socket:
            made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            made.bind(("0.0.0.0", port))
            made.setblocking(False)
            return made

        self.listening[lane] = await asyncio.to_thread(
            in_namespace, self.lanes[lane].lane.namespaces[0], listen
        )

    async def words(self, lane: str) -> list[str]:
        """Datagrams that came since it was last asked."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self.listening[lane].recv(BLOCK).decode(errors="replace"))
        return found

    async def frames(self, lane: str, *frames: str) -> list[str]:
        """Sends raw Ethernet frames (hexadecimal) in the lane, with more rights than any task has; how each send went."""

        def send() -> list[str]:
            told = []
            with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as speaking:
                speaking.bind((INTERFACE, 0))
                for frame in frames:
                    try:
                        speaking.send(bytes.fromhex(frame))
                        told.append("sent")
                    except OSError as failure:
                        told.append(type(failure).__name__)
            return told

        namespace = self.lanes[lane].lane.namespaces[0]
        return await asyncio.to_thread(in_namespace, namespace, send)

    async def unfiltered(self, lane: str) -> None:
        """Removes the lane's filter: for the control."""
        namespace = self.lanes[lane].lane.namespaces[0]
        await asyncio.to_thread(
            in_namespace, namespace, lambda: subprocess.run(["nft", "flush", "ruleset"], check=True)
        )

    async def refused(self) -> int:
        return await self.networks.refused_packets()

    async def relays(self) -> list[int]:
        """Pids of processes of this host's agent that carry a gang's packets."""
        carrier = "wireguard-go" if self.link == GangLink.WIREGUARD else "gang.relay"
        return children_of(os.getpid(), carrier)

    async def relay_rights(self) -> dict[str, Any]:
        (pid,) = await self.relays()
        return rights_of(Path(f"/proc/{pid}"))

    async def helpers(self) -> list[int]:
        """The other processes a lane needs."""
        words = ("namespace_holder.py", "slirp4netns", "wireguard-go")
        return [pid for word in words for pid in children_of(os.getpid(), word)]

    async def kill(self, pid: int) -> None:
        """Until it is gone."""
        watched = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(select.select, [watched], [], [])
        os.close(watched)

    async def orphan(self, name: str) -> int:
        """A wireguard-go of an agent that was killed, if it had outlived it."""
        left = await UserSpaceWireGuard.start(name)
        await set_configuration(name, "[Interface]\nListenPort = 47999\n")
        return left.process.pid

    async def sweep(self, name: str) -> list[str]:
        """List the remains of the interfaces that the start of the next agent would remove."""
        await self.networks.sweep()  # type: ignore[attr-defined]
        left = [f"process {pid}" for pid in children_of(os.getpid(), name)]
        left += [name for _, found in socket.if_nameindex() if found == name]
        return left + [str(path) for path in (control_path(name),) if path.exists()]

    async def stop_serving(self) -> None:
        for child in self.serving:
            os.kill(child, signal.SIGKILL)
            await asyncio.to_thread(os.waitpid, child, 0)
        self.serving.clear()

    async def close(self, lane: str) -> None:
        await self.stop_serving()
        for each in (self.watching, self.listening):
            if lane in each:
                each.pop(lane).close()
        await self.lanes.pop(lane).close()

    async def finish(self) -> list[str]:
        """What is different from before the start, once all is closed."""
        for lane in list(self.lanes):
            await self.close(lane)
        await self.networks.close()
        left = await settled(self.before)
        return left + [f"relay {pid}" for pid in await self.relays()]


def rights_of(process: Path) -> dict[str, Any]:
    """What it could do if it were turned."""
    lines = (process / "status").read_text().splitlines()
    facts = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    words = ("Uid", "Gid", "Groups", "CapEff", "CapPrm", "NoNewPrivs")
    limits = (process / "limits").read_text().splitlines()
    none = [line for line in limits if line.startswith(("Max proc", "Max core", "Max file s"))]
    return {
        **{word: sorted(set(facts[word].split())) for word in words},
        "limits": sorted({line[26:].split()[0] for line in none}),
        "environment": (process / "environ").read_bytes().decode(),
    }


def children_of(parent: int, word: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            ppid = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if ppid == parent and word in (path / "cmdline").read_text():
                found.append(int(path.name))
    return found


async def obey(agent: Agent, channel: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while said := await loop.sock_recv(channel, 1 << 20):
        order = json.loads(said)
        work: Callable[..., Awaitable[Any]] = getattr(agent, order["work"])
        try:
            answer = {"told": await work(*order["arguments"])}
        except Exception as failure:  # noqa: BLE001 - the other end raises it
            answer = {"failed": f"{type(failure).__name__}: {failure}"}
        await loop.sock_sendall(channel, json.dumps(answer).encode())


class Host:
    """One host of the site: a process in a network namespace of its own."""

    def __init__(self, number: int, mode: str, place: Path, mtu: int = 1500) -> None:
        """`mode`: a relay of root or rootless; weak: root's with a relay that defends nothing; direct or wireguard: root's."""
        self.number = number
        self.address = host_address(number)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            try:
                self._live(theirs, mode, place)
            except BaseException:  # noqa: BLE001 - a forked child must never return
                sys.excepthook(*sys.exc_info())
            os._exit(1)
        theirs.close()
        self._channel = ours
        ours.recv(16)  # it has its namespace
        link = f"h{number}"
        subprocess.run(
            ["ip", "link", "add", link, "type", "veth", "peer", "name", "up0", "netns", str(self.pid)],
            check=True,
        )  # fmt: skip
        sh(f"link set {link} mtu {mtu} master br0 up")
        namespace = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY)
        sh(
            "link set lo up",
            f"addr add {self.address}/24 dev up0",
            f"link set up0 mtu {mtu} addrgenmode none up",
            f"route add default via {GATEWAY}",
            namespace=namespace,
        )
        os.close(namespace)
        ours.send(b"go")
        ours.recv(16)

    def _live(self, channel: socket.socket, mode: str, place: Path) -> None:
        libc.prctl(1, signal.SIGKILL, 0, 0, 0)
        must(libc.unshare(CLONE_NEWNET), "unshare")
        channel.send(b"made")
        channel.recv(16)
        echo(answering("0.0.0.0"))
        networks: Networks
        if mode == "rootless":
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: as a process started by that user is
            networks = RootlessNetworks(EgressPolicy(), servers=(), ahead=0)
        else:
            relay = WEAK if mode == "weak" else RELAY
            networks = RootNetworks(
                EgressPolicy(), f"aaaa{self.number}", servers=(), ahead=0, relay=relay
            )
        libc.prctl(1, signal.SIGKILL, 0, 0, 0)
        channel.send(b"ready")
        channel.setblocking(False)
        link = mode if mode in list(GangLink) else GangLink.RELAY
        uvloop.run(obey(Agent(networks, place, link), channel))
        os._exit(0)

    def call(self, work: str, *arguments: Any) -> Any:
        self._channel.send(json.dumps({"work": work, "arguments": arguments}).encode())
        answer = json.loads(self._channel.recv(1 << 20))
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer["told"]

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._channel.close()


def build_site(count: int, mode: str, place: Path, mtu: int = 1500) -> list[Host]:
    """Hosts, begun; beyond the bridge a gateway, a public machine and the metadata address answer."""
    sh(
        "link set lo up",
        "link add br0 type bridge",
        f"addr add {GATEWAY}/24 dev br0",
        f"addr add {PUBLIC}/32 dev br0",
        f"addr add {METADATA}/32 dev br0",
        f"link set br0 mtu {mtu} up",
    )
    echo(answering(GATEWAY, PUBLIC, METADATA))
    hosts = []
    for number in range(count):
        own = place / str(number)
        own.mkdir()
        if mode == "rootless":
            os.chown(own, NOBODY, NOBODY)
        hosts.append(Host(number, mode, own, mtu))
    for each in hosts:
        each.call("begin")
    return hosts


def eavesdrop(number: int) -> socket.socket:
    """What crosses the bridge to a host, and from it."""
    made = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_ALL))
    made.bind((f"h{number}", ETH_P_ALL))
    made.setblocking(False)
    return made


def overheard(listening: socket.socket, receiver: str) -> list[bytes]:
    """Datagrams to a host's gang port, seen since it was last asked."""
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            packet, _ = listening.recvfrom(BLOCK)
            if (
                packet[:1] != b"\x45"
                or packet[9] != socket.IPPROTO_UDP
                or packet[16:20] != socket.inet_aton(receiver)
            ):
                continue
            if packet[22:24] == struct.pack(">H", PORT) and packet[28:] not in found:
                found.append(packet[28:])
    return found
