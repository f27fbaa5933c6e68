"""Open sandbox networks, and the protocol of both kinds (root, rootless)."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from gpool.agent.network.dns_resolver import RESOLVER, Names, Resolver, Server
from gpool.agent.network.firewall_rules import TAG_LETTERS, RefusedConnection
from gpool.agent.network.host import NftFailed
from gpool.agent.network.policy import EgressPolicy, Gang, HostFacts, Only, Wants, reaches
from gpool.agent.runtime.protocol import SandboxFailed, SandboxNetwork


class NetworkUnavailable(SandboxFailed):
    """A sandbox network could not be opened: the node's fault, not the task's."""


def refuse_wrong(wants: Wants) -> None:
    if isinstance(wants, Gang) and wants.wrong:
        raise NetworkUnavailable(f"a sandbox network could not be opened: {wants.wrong}")


def tag_for(place: Path) -> str:
    """Tag that survives restarts of this agent and differs between agents."""
    return hashlib.sha256(os.fsencode(place.absolute())).hexdigest()[:TAG_LETTERS]


MOST_REPORTED = 5
MOST_LETTERS_REPORTED = 80
_REACHES = "--network egress reaches public addresses that the node's owner allows"
_NO_EGRESS = "without --network egress a gang's members reach each other only (rank0, rank1, ...)"


class RefusalReport:
    """Lines for a task about refused lookups and connections: the first few, each once, then the number of further ones.

    The line is the same for a name that does not exist and for one of a refused address: a task must not learn which names
    the node's own network knows.
    """

    def __init__(self, say: Callable[[str], None], *, is_egress: bool) -> None:
        self._say = say
        self._reason = _REACHES if is_egress else _NO_EGRESS
        self._named: set[str] = set()
        self._further = 0

    def add_name(self, name: str) -> None:
        shown = repr(name[:MOST_LETTERS_REPORTED])
        self._add(f"the name {shown} has no address that may be reached, or does not exist")

    def add_connection(self, refused: RefusedConnection) -> None:
        self._add(f"{refused.protocol} to {refused.address} port {refused.port} was refused")

    def end(self) -> None:
        if self._further:
            self._say(f"{self._further} further lookups or connections were refused")

    def _add(self, subject: str) -> None:
        if subject in self._named:
            return
        if len(self._named) == MOST_REPORTED:
            self._further += 1
            return
        self._named.add(subject)
        self._say(f"{subject}; {self._reason}")


@dataclass(slots=True)
class OpenSandboxNetwork:
    """Sandbox network in use. Close it after the sandbox has ended; a second close does nothing."""

    lane: SandboxNetwork
    resolver: Resolver
    _undo: Callable[[], Awaitable[None]]
    _refused: Callable[[], Awaitable[Sequence[RefusedConnection]]]
    _closed: bool = field(default=False)
    _report: RefusalReport | None = None

    def report_to(self, say: Callable[[str], None]) -> None:
        """Send lines about names that do not resolve and, at the close, about refused connections."""
        self._report = RefusalReport(say, is_egress=self.resolver.names.asks)
        self.resolver.report = self._report.add_name

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.resolver.close()
        if self._report is not None:
            with contextlib.suppress(OSError, ValueError, NftFailed):  # the table or holder is gone
                for each in await self._refused():
                    self._report.add_connection(each)
            self._report.end()
        for descriptor in self.lane.namespaces:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        await self._undo()

    async def __aenter__(self) -> OpenSandboxNetwork:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class Networks(Protocol):
    """`start` first removes leftovers of an earlier agent; `close` restores the host."""

    async def start(self) -> None: ...

    async def open(self, wants: Wants) -> OpenSandboxNetwork: ...

    async def refused_packets(self) -> int: ...

    async def close(self) -> None: ...


async def opened_whole(making: Coroutine[Any, Any, OpenSandboxNetwork]) -> OpenSandboxNetwork:
    """Finish and close a network whose opening was cancelled: neither threads nor nft stop half-way."""
    work = asyncio.ensure_future(making)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        if not work.cancelled() and work.exception() is None:
            await work.result().close()
        raise


def name_sockets() -> tuple[socket.socket, socket.socket]:
    """Resolver's two sockets, in the thread's namespace; its loopback must be up."""
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    streams = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    for each in (datagrams, streams):
        each.bind((RESOLVER, 53))
    streams.listen(16)
    return datagrams, streams


def resolver_for(
    sockets: tuple[socket.socket, socket.socket],
    policy: EgressPolicy,
    host: HostFacts,
    wants: Wants,
    servers: tuple[Server, ...],
) -> Resolver:
    names = Names(
        may_reach=lambda address: reaches(policy, host, wants, address),
        queries_per_s=policy.queries_per_s,
        servers=servers,
        known=wants.names if isinstance(wants, Only | Gang) else {},
        asks=not isinstance(wants, Only | Gang) or (isinstance(wants, Gang) and wants.egress),
    )
    return Resolver(*sockets, names)
