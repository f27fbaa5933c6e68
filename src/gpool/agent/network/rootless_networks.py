"""Sandbox networks of an unprivileged agent: a user and network namespace each, kept by a namespace holder, with slirp4netns.

The host is not changed. The firewall is loaded before the task enters; the task has no capability there.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpool.agent.network import firewall_rules, host
from gpool.agent.network.dns_resolver import RESOLVER, Server, configured_servers
from gpool.agent.network.firewall_rules import (
    FAMILY,
    PREFIX,
    REFUSALS,
    RefusedConnection,
    refused_connections,
)
from gpool.agent.network.gang.links import OpenLink, OpenLinks
from gpool.agent.network.gang.relay_client import RELAY, interface_of
from gpool.agent.network.policy import Egress, EgressPolicy, Gang, HostFacts, Wants
from gpool.agent.network.sandbox_network import (
    NetworkUnavailable,
    OpenSandboxNetwork,
    opened_whole,
    refuse_wrong,
    resolver_for,
)
from gpool.agent.runtime.descriptors import readable
from gpool.agent.runtime.protocol import SandboxNetwork
from gpool.core.gangs import GangLink

SCRIPT = Path(__file__).with_name("namespace_holder.py")
TAP = "tap0"
WITHIN_S = 60.0
ENDS_WITHIN_S = 2.0
MESSAGE_BYTES = 1 << 18


def slirp_arguments(holder: int, ready: int, ending: int) -> list[str]:
    """No access to the host's loopback, no DNS server."""
    return [
        "--configure",
        "--mtu=65520",
        "--disable-host-loopback",
        "--disable-dns",
        "--enable-sandbox",
        "--enable-seccomp",
        f"--ready-fd={ready}",
        f"--exit-fd={ending}",
        str(holder),  # by pid of our child: with paths it cannot create its sandbox
        TAP,
    ]


@dataclass(slots=True)
class HeldNamespace:
    """Namespace holder and, once attached, its slirp4netns."""

    holder: asyncio.subprocess.Process
    channel: socket.socket
    slirp: asyncio.subprocess.Process | None = None
    ending: int = -1  # slirp4netns ends when this is closed
    said: int = -1  # its error output

    async def refused(self) -> int:
        counters = await self._listed("counters", "table", FAMILY, PREFIX)
        return host.packets(counters, "refused")

    async def refused_connections(self) -> list[RefusedConnection]:
        return refused_connections(await self._listed("set", FAMILY, PREFIX, REFUSALS))

    async def _listed(self, *what: str) -> list[dict[str, Any]]:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.channel, json.dumps({"list": what}).encode())
        said = json.loads(await loop.sock_recv(self.channel, MESSAGE_BYTES))
        found: list[dict[str, Any]] = said["listed"]["nftables"]
        return found

    async def end(self) -> None:
        self.channel.close()
        for descriptor in (self.ending, self.said):
            if descriptor >= 0:
                os.close(descriptor)
        self.ending = self.said = -1
        for each in (self.slirp, self.holder):
            if each is None:
                continue
            try:
                async with asyncio.timeout(ENDS_WITHIN_S):
                    await each.wait()
            except TimeoutError:
                each.kill()
                await each.wait()


class RootlessNetworks:
    """Needs nft, slirp4netns and an accessible /dev/net/tun."""

    def __init__(
        self,
        policy: EgressPolicy,
        *,
        servers: tuple[Server, ...] | None = None,
        ahead: int = 1,
        attach: Callable[[int, int, int], list[str]] = slirp_arguments,
        relay: Sequence[str] = RELAY,
    ) -> None:
        self._policy = policy
        self._servers = servers
        self._ahead = ahead
        self._arguments = attach
        self._facts = HostFacts()
        self._live: dict[int, HeldNamespace] = {}
        self._gone = 0  # packets refused by networks closed since
        self._prepared: list[OpenSandboxNetwork] = []
        self._filling: asyncio.Task[None] | None = None
        self._closing = False
        self._counting = asyncio.Lock()
        self._links = OpenLinks(relay)

    async def start(self) -> None:
        """Nothing to clean up: holders and slirp4netns end with their agent."""
        self._facts = self._seen()
        for name, package in (("nft", "nftables"), ("slirp4netns", "slirp4netns")):
            if host.nft_program(name) is None:
                raise NetworkUnavailable(
                    f"{name} is not installed (Debian: apt-get install {package})"
                )
        if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
            raise NetworkUnavailable(
                "/dev/net/tun cannot be opened (as root: chmod 666 /dev/net/tun)"
            )
        await self._fill()

    async def open(self, wants: Wants) -> OpenSandboxNetwork:
        refuse_wrong(wants)
        seen = self._seen()
        if seen != self._facts:  # prepared networks refuse the host's former addresses
            self._facts = seen
            stale, self._prepared = self._prepared, []
            for each in stale:
                await each.close()
        if isinstance(wants, Egress) and self._prepared:
            opened = self._prepared.pop()
        else:
            opened = await opened_whole(self._make(wants))
        if self._filling is None or self._filling.done():
            self._filling = asyncio.ensure_future(self._fill())
        return opened

    async def refused_packets(self) -> int:
        async with self._counting:
            total = self._gone + await self._links.refused()
            for held in list(self._live.values()):
                total += await held.refused()
            return total

    async def close(self) -> None:
        self._closing = True
        if self._filling is not None:
            await self._filling
        for each in self._prepared:
            await each.close()
        self._prepared.clear()

    def _seen(self) -> HostFacts:
        return host.facts(host.routes(), host.own_addresses())

    async def _fill(self) -> None:
        with contextlib.suppress(OSError, NetworkUnavailable):
            while len(self._prepared) < self._ahead and not self._closing:
                self._prepared.append(await self._make(Egress()))

    async def _make(self, wants: Wants) -> OpenSandboxNetwork:
        text = firewall_rules.inner_ruleset(self._policy, self._facts, wants, TAP)
        gang = wants if isinstance(wants, Gang) else None
        if gang is not None and gang.link != GangLink.RELAY:
            raise NetworkUnavailable(f"a gang's {gang.link} link needs an agent that runs as root")
        held = await self._hold()
        descriptors: list[int] = []
        link: OpenLink | None = None
        try:
            async with asyncio.timeout(WITHIN_S):
                descriptors = await self._prepare(held, text, gang)
                if gang is None or gang.egress:
                    await self._attach(held)
                if gang is not None:
                    link = await self._links.begin_relay(gang, descriptors[4])
        except BaseException as failure:
            for descriptor in descriptors:
                os.close(descriptor)
            await held.end()
            if isinstance(failure, (OSError, TimeoutError)):
                raise NetworkUnavailable(
                    f"a sandbox network could not be opened: {failure}"
                ) from failure
            raise
        self._live[id(held)] = held

        async def undo() -> None:
            if link is not None:
                await self._links.end(link)
            async with self._counting:
                with contextlib.suppress(OSError, ValueError):  # the holder was killed
                    self._gone += await held.refused()
                self._live.pop(id(held), None)
            await held.end()

        user, network, datagrams, streams = descriptors[:4]
        sockets = (socket.socket(fileno=datagrams), socket.socket(fileno=streams))
        servers = self._servers if self._servers is not None else configured_servers()
        resolver = resolver_for(sockets, self._policy, self._facts, wants, servers)
        resolver.start()

        async def refused() -> list[RefusedConnection]:
            async with self._counting:
                return await held.refused_connections()

        lane = SandboxNetwork((user, network), RESOLVER)
        return OpenSandboxNetwork(lane, resolver, undo, refused)

    async def _hold(self) -> HeldNamespace:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            holder = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-S", "-B", str(SCRIPT)),
                stdin=theirs.fileno(),
                env={},
                cwd="/",
                start_new_session=True,
            )
        return HeldNamespace(holder, ours)

    async def _prepare(self, held: HeldNamespace, text: str, gang: Gang | None) -> list[int]:
        loop = asyncio.get_running_loop()
        told = interface_of(gang) if gang is not None else None
        order = {"nft": host.nft_program("nft"), "rules": text, "gang": told}
        await loop.sock_sendall(held.channel, json.dumps(order).encode())
        said, descriptors = await _receive(held.channel)
        if "failed" in said or len(descriptors) != 4 + (gang is not None):
            for descriptor in descriptors:
                os.close(descriptor)
            raise NetworkUnavailable(
                f"a sandbox network could not be opened: {said.get('failed', 'its namespace holder ended')}"
            )
        return descriptors

    async def _attach(self, held: HeldNamespace) -> None:
        path = host.nft_program("slirp4netns")
        if path is None:
            raise NetworkUnavailable(
                "slirp4netns is not installed (Debian: apt-get install slirp4netns)"
            )
        ready_out, ready_in = os.pipe()
        end_out, held.ending = os.pipe()
        held.said, said_in = os.pipe()
        os.set_blocking(
            said_in, False
        )  # output past the pipe's capacity is lost; it must not block
        try:
            held.slirp = await asyncio.create_subprocess_exec(
                path,
                *self._arguments(held.holder.pid, ready_in, end_out),
                pass_fds=(ready_in, end_out),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=said_in,
                env={},
                cwd="/",
                start_new_session=True,
            )
            os.close(ready_in)
            ready_in = -1
            os.set_blocking(ready_out, False)
            said = b""
            if await _read(ready_out) != b"1":
                await held.slirp.wait()
                os.set_blocking(held.said, False)
                with contextlib.suppress(BlockingIOError):
                    said = os.read(held.said, 2000)
                last = said.decode(errors="replace").strip().splitlines()[-2:] or ["it ended"]
                raise NetworkUnavailable(f"slirp4netns: {', '.join(last)}")
        finally:
            for descriptor in (ready_out, ready_in, end_out, said_in):
                if descriptor >= 0:
                    os.close(descriptor)


async def _read(descriptor: int) -> bytes:
    await readable((descriptor,))
    return os.read(descriptor, 1)


async def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    await readable((channel.fileno(),))
    data, beside, _, _ = channel.recvmsg(MESSAGE_BYTES, socket.CMSG_LEN(5 * 4))
    descriptors = array.array("i")
    for _, _, raw in beside:
        descriptors.frombytes(raw[: len(raw) - len(raw) % 4])
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return (json.loads(data) if data else {}), list(descriptors)
