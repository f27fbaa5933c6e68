"""The agent's side of a gang relay. It sees no packets."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import structlog

from gpool.agent.network.policy import Gang
from gpool.agent.runtime.descriptors import readable
from gpool.core.gangs import INTERFACE, NETWORK, address_of

log = structlog.get_logger(__name__)

ROOT = Path(__file__).parents[4]
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from gpool.agent.network.gang.relay import main; sys.exit(main())"
RELAY = ("-c", BOOT, str(ROOT))
MTU = 15_840  # eleven equal pieces on 1500-byte links, two on 9000-byte links
"""Long packets cost less each (bench.gang_network: over links of 1500 bytes one core carries 1.8 Gbit/s
with 9,000 bytes, 2.5 with 16,000, 3.4 with 60,000) but are lost with any of their pieces: at 1 %
loss, 60,000 get through at a fifth of their rate and 16,000 at four fifths.
"""
LEAST_PORT = 1024
WITHIN_S = 60.0
ENDS_WITHIN_S = 2.0
MESSAGE_BYTES = 1 << 18
UID = 1_999_999_999
"""Uid of a root agent's relays: used by nothing else, just below the sandboxes'."""
MOST_STARTS = 100


def listening(gang: Gang) -> socket.socket:
    """Bind to the address peers use, or to all if it is not this host's (NAT)."""
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    host, port = gang.peers[gang.rank]
    try:
        try:
            made.bind((host, port))
        except OSError as failure:
            if failure.errno != errno.EADDRNOTAVAIL:
                raise
            made.bind(("0.0.0.0", port))
    except OSError as failure:
        made.close()
        raise OSError(
            failure.errno, f"UDP port {port} for the gang: {failure.strerror}"
        ) from failure
    return made


def session_after(last: bytes) -> bytes:
    """Later than this one and the clock; a clock set back is harmless."""
    count = max(time.time_ns(), int.from_bytes(last[:8]) + 1)
    return count.to_bytes(8) + secrets.token_bytes(8)


async def resolved(gang: Gang) -> list[tuple[str, int]]:
    """A relay sends no DNS queries. Other owners chose the names: none may point at a service of this host or a multicast
    address.
    """
    loop = asyncio.get_running_loop()
    found = []
    for rank, (host, port) in enumerate(gang.peers):
        try:
            address = IPv4Address(host)
        except ValueError:
            several = await loop.getaddrinfo(host, port, family=socket.AF_INET)
            address = IPv4Address(several[0][4][0])
        nowhere = address.is_multicast or address.is_unspecified or address.is_reserved
        if rank != gang.rank and (nowhere or port < LEAST_PORT):
            raise OSError(f"rank {rank} cannot be reached at {host}, UDP port {port}")
        found.append((str(address), port))
    return found


def interface_of(gang: Gang) -> dict[str, Any]:
    return {
        "name": INTERFACE,
        "address": str(address_of(gang.rank)),
        "netmask": str(NETWORK.netmask),
        "mtu": MTU,
    }


@dataclass(slots=True)
class Running:
    process: asyncio.subprocess.Process
    control: socket.socket


@dataclass(slots=True)
class Relaying:
    """An `OpenLink` of one member. Owns the interface (a descriptor) and the socket over restarts of the relay."""

    gang: Gang
    peers: list[tuple[str, int]]
    tun: int
    udp: socket.socket
    program: Sequence[str] = RELAY
    _running: Running | None = None
    _watching: asyncio.Task[None] | None = None
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _gone: int = 0  # refused by ended relays, as last read
    _last: int = 0
    _session: bytes = b""

    async def start(self) -> None:
        self._running = await self._begin()
        self._watching = asyncio.create_task(self._watch())

    async def _begin(self) -> Running:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        passed = (self.tun, self.udp.fileno())
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-I", "-B", *self.program),
                    stdin=theirs.fileno(),
                    pass_fds=passed,
                    env={},
                    cwd="/",
                    start_new_session=True,
                )
        except BaseException:
            ours.close()  # a relay that started anyway ends by this
            raise
        begun = Running(process, ours)
        try:
            async with asyncio.timeout(WITHIN_S):
                if "ready" not in await self._ask(begun, self._order(passed)):
                    raise OSError("a gang's relay exited right after its start")
        except BaseException:
            await _end(begun)
            raise
        return begun

    def _order(self, passed: tuple[int, int]) -> dict[str, Any]:
        self._session = session_after(self._session)
        return {
            "tun": passed[0],
            "udp": passed[1],
            "rank": self.gang.rank,
            "peers": self.peers,
            "secret": self.gang.secret.hex(),
            "session": self._session.hex(),
            "uid": UID,
        }

    async def _ask(self, running: Running, words: dict[str, Any]) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(running.control, json.dumps(words).encode())
        await readable((running.control.fileno(),))
        said = running.control.recv(MESSAGE_BYTES)
        return json.loads(said) if said else {}

    async def _watch(self) -> None:
        """Restart a relay that ends while its network is open; members accept its new session."""
        for _ in range(MOST_STARTS):
            assert self._running is not None
            code = await self._running.process.wait()
            log.warning("relay_ended", code=code, rank=self.gang.rank)
            self._running.control.close()
            self._gone, self._last = self._gone + self._last, 0
            try:
                self._running = await self._begin()
            except (OSError, TimeoutError) as failure:
                log.warning("relay_not_started", why=str(failure))
                return

    async def counts(self) -> dict[str, int]:
        async with self._asking:
            if self._running is None:
                return {}
            try:
                async with asyncio.timeout(WITHIN_S):
                    said = await self._ask(self._running, {"count": True})
            except (OSError, TimeoutError, ValueError):
                return {}
            counts: dict[str, int] = said.get("counts", {})
            self._last = sum(counts.get(each, 0) for each in ("strays", "forged", "refused"))
            return counts

    async def refused(self) -> int:
        await self.counts()
        return self._gone + self._last

    async def end(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        if self._running is not None:
            await _end(self._running)
            self._running = None
        self.udp.close()
        if self.tun >= 0:
            os.close(self.tun)
            self.tun = -1


async def begin_relay(gang: Gang, tun: int, program: Sequence[str] = RELAY) -> Relaying:
    """The relay takes ownership of the interface; on failure the caller keeps it."""
    relay = Relaying(gang, await resolved(gang), tun, listening(gang), program)
    try:
        await relay.start()
    except BaseException as failure:
        relay.udp.close()
        if isinstance(failure, TimeoutError):
            raise OSError("a gang's relay did not start in time") from failure
        raise
    return relay


async def _end(running: Running) -> None:
    running.control.close()
    try:
        async with asyncio.timeout(ENDS_WITHIN_S):
            await running.process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            running.process.kill()
        await running.process.wait()
