"""WireGuard gang links: in the kernel where it has WireGuard, else by wireguard-go. For root agents.

Keys are derived from the secret of one attempt of one gang, so no key is used for two. The interface is made and
configured in the host's namespace, which keeps the UDP socket, and then moved to the member's. Peers are admitted by
their keys and by their addresses in the gang (AllowedIPs); the member filter counts what is dropped before it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import socket
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import structlog
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from gpool.agent.network.gang.member_filter import MemberFilter, derived, ruleset
from gpool.agent.network.gang.relay_client import MOST_STARTS, UID, listening, resolved
from gpool.agent.network.host import Netlink, NftFailed, answer_of, nft_program
from gpool.agent.network.namespaces import Inside, in_namespace
from gpool.agent.network.policy import Gang
from gpool.core.gangs import INTERFACE, NETWORK, address_of

log = structlog.get_logger(__name__)

SOCKETS = Path("/run/wireguard")
"""Control sockets of user-space WireGuard, by interface: a fixed path of `wg` and wireguard-go."""
PROGRAM, TOOL, DROPPER = "wireguard-go", "wg", "setpriv"
RIGHTS = "-all,+net_admin"  # wireguard-go makes its interface
IP_BYTES, UDP_BYTES, SEALED_BYTES = 20, 8, 32  # header; header; WireGuard's header and tag
LEAST_MTU, MOST_MTU = 576, 16_000
"""User space pays per packet, so wireguard-go gets packets that its host sends in several IP fragments: `bench.gang_network`
compares it with wireguard-go at its default MTU. The kernel's WireGuard gets packets that fit the link.
"""
IP_MTU = 14
WITHIN_S = 60.0
EVERY_S = 0.02
ENDS_WITHIN_S = 2.0


@cache
def kernel_has_wireguard() -> bool:
    probe = f"gpoolwg{os.getpid() % 10_000_000}"
    with Netlink() as netlink:
        try:
            netlink.add_link(probe, "wireguard")
        except OSError:
            return False
        netlink.remove(probe)
    return True


def missing_programs() -> str:
    """Sentence on what WireGuard links need on this host; empty: nothing."""
    needed = [(TOOL, "wireguard-tools")]
    if not kernel_has_wireguard():
        needed += [(PROGRAM, "wireguard-go"), (DROPPER, "util-linux")]
    absent = [(n, p) for n, p in needed if nft_program(n) is None]
    if not absent:
        return ""
    names, packages = (" ".join(words) for words in zip(*absent, strict=True))
    return f"WireGuard needs {names} here (Debian: apt-get install {packages})"


def private_key(gang: Gang, rank: int) -> bytes:
    return derived(gang.secret, "wireguard", rank)


def configuration(gang: Gang, port: int, peers: Sequence[tuple[str, int]]) -> str:
    """Configuration of one member for `wg setconf`."""
    shared = _text(derived(gang.secret, "wireguard shared"))
    lines = [
        "[Interface]",
        f"PrivateKey = {_text(private_key(gang, gang.rank))}",
        f"ListenPort = {port}",
    ]
    for rank, (host, peer_port) in enumerate(peers):
        if rank == gang.rank:
            continue
        own = X25519PrivateKey.from_private_bytes(private_key(gang, rank))
        lines += [
            "[Peer]",
            f"PublicKey = {_text(own.public_key().public_bytes_raw())}",
            f"PresharedKey = {shared}",
            f"AllowedIPs = {address_of(rank)}/32",
            f"Endpoint = {host}:{peer_port}",
        ]
    return "\n".join(lines) + "\n"


def _text(key: bytes) -> str:
    return base64.b64encode(key).decode()


def inner_mtu(path_mtu: int, *, in_kernel: bool) -> int:
    """MTU of a member's interface over a path: one outer packet, or as many full fragments as `MOST_MTU` allows."""
    each = max(path_mtu, LEAST_MTU) - IP_BYTES
    fragments = 1 if in_kernel else max(1, (MOST_MTU + UDP_BYTES + SEALED_BYTES) // each)
    return min(each * fragments - UDP_BYTES - SEALED_BYTES, MOST_MTU)


def _path_mtu(host: str) -> int:
    """Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((host, 9))
            return int(asking.getsockopt(socket.IPPROTO_IP, IP_MTU))
        except OSError:
            return LEAST_MTU


class UserSpaceWireGuard:
    """A wireguard-go process with one interface: unprivileged but for CAP_NET_ADMIN, and gone with the agent."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self.process = process
        self._name = name

    @classmethod
    async def start(cls, name: str) -> UserSpaceWireGuard:
        """Start it. It makes the interface in the host's namespace, down, before it answers on its control socket."""
        program, dropper = nft_program(PROGRAM), nft_program(DROPPER)
        if program is None or dropper is None:
            raise OSError(missing_programs())
        control = _control_socket(name)
        try:
            process = await asyncio.create_subprocess_exec(
                dropper,
                *(f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--no-new-privs"),
                *(f"--inh-caps={RIGHTS}", f"--ambient-caps={RIGHTS}", f"--bounding-set={RIGHTS}"),
                *("--pdeathsig", "KILL", program, "--foreground", name),
                pass_fds=(control.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                env={
                    "WG_UAPI_FD": str(control.fileno()),
                    "LOG_LEVEL": "silent",
                },
                cwd="/",
                start_new_session=True,
            )
        finally:
            control.close()
        return cls(process, name)

    async def end(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            try:
                async with asyncio.timeout(ENDS_WITHIN_S):
                    await self.process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self.process.kill()
                await self.process.wait()
        control_path(self._name).unlink(missing_ok=True)


def control_path(name: str) -> Path:
    return SOCKETS / f"{name}.sock"


def _control_socket(name: str) -> socket.socket:
    SOCKETS.mkdir(mode=0o755, exist_ok=True)
    path = control_path(name)
    path.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(str(path))
        path.chmod(0o600)
        os.chown(path, UID, UID)  # wireguard-go watches it
        made.listen(16)
    except OSError:
        made.close()
        raise
    return made


async def set_configuration(name: str, text: str) -> None:
    """Configure an interface of either kind; keys travel in a memory file."""
    tool = nft_program(TOOL)
    if tool is None:
        raise OSError("wg is not installed (Debian: apt-get install wireguard-tools)")
    given = os.memfd_create("wireguard")
    os.write(given, text.encode())
    os.lseek(given, 0, os.SEEK_SET)
    try:
        code, _, said = await answer_of(tool, "setconf", name, "/dev/stdin", given=given)
    except TimeoutError as silent:
        raise OSError(f"wg setconf {name} did not answer in time") from silent
    if code != 0:
        raise OSError(f"wg setconf: {said.decode(errors='replace').strip()[-200:]}")


def is_bound(port: int, table: Path = Path("/proc/self/net/udp")) -> bool:
    """Whether a UDP socket of this host listens on the port."""
    rows = (line.split() for line in table.read_text().splitlines()[1:])
    return any(int(row[1].rpartition(":")[2], 16) == port for row in rows)


class WireGuardLink:
    """An `OpenLink` of one member; a wireguard-go that ends is started again."""

    def __init__(self, gang: Gang, name: str, inside: Inside) -> None:
        self._gang = gang
        self._name = name
        self._namespace = os.dup(inside.namespace)
        self._peers: list[tuple[str, int]] = []
        self._port = 0
        self._in_kernel = kernel_has_wireguard()
        self._process: UserSpaceWireGuard | None = None
        self._filter: MemberFilter | None = None
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    async def begin(cls, gang: Gang, name: str, inside: Inside) -> WireGuardLink:
        """`name`: of the interface while it is in the host's namespace."""
        link = cls(gang, name, inside)
        try:
            if missing := missing_programs():
                raise OSError(missing)
            link._peers = await resolved(gang)
            with listening(gang) as free:  # a taken port is known before anything starts
                link._port = free.getsockname()[1]
            await link._make()
        except BaseException:
            await link.end()
            raise
        if link._process is not None:
            link._watching = asyncio.create_task(link._watch())
        return link

    async def _make(self) -> None:
        if self._in_kernel:
            await asyncio.to_thread(self._add)
        else:
            self._process = await UserSpaceWireGuard.start(self._name)
        await set_configuration(self._name, configuration(self._gang, self._port, self._peers))
        await asyncio.to_thread(self._move)
        text = ruleset(self._gang)
        if self._filter is None:
            self._filter = await MemberFilter.load(self._namespace, text)
        else:
            await self._filter.reload(text)
        await in_namespace(self._namespace, self._configure)
        await self._until_bound()

    def _add(self) -> None:
        with Netlink() as outside:
            outside.add_link(self._name, "wireguard")

    def _discard(self) -> None:
        with contextlib.suppress(OSError), Netlink() as outside:
            outside.remove(self._name)

    def _move(self) -> None:
        others = [host for rank, (host, _) in enumerate(self._peers) if rank != self._gang.rank]
        path_mtu = min(map(_path_mtu, others), default=1500)
        with Netlink() as outside:
            index = socket.if_nametoindex(self._name)
            outside.set_mtu(index, inner_mtu(path_mtu, in_kernel=self._in_kernel))
            outside.move(index, self._namespace, INTERFACE)

    def _configure(self) -> None:
        with Netlink() as inside:
            index = socket.if_nametoindex(INTERFACE)
            inside.add_address(index, address_of(self._gang.rank), NETWORK.prefixlen)
            inside.up(index)

    async def _until_bound(self) -> None:
        """wireguard-go notices within a second that its interface is up in another namespace, and binds then."""
        async with asyncio.timeout(WITHIN_S):
            while not is_bound(self._port):
                if self._process is not None and self._process.process.returncode is not None:
                    raise OSError(
                        f"wireguard-go ended with code {self._process.process.returncode}"
                    )
                await asyncio.sleep(EVERY_S)

    async def _watch(self) -> None:
        for _ in range(MOST_STARTS):
            assert self._process is not None
            code = await self._process.process.wait()
            log.warning("wireguard_ended", code=code, rank=self._gang.rank)
            try:
                await self._make()
            except (OSError, NftFailed, TimeoutError) as failure:
                log.warning("wireguard_not_started", why=str(failure))
                return

    async def refused(self) -> int:
        return 0 if self._filter is None else await self._filter.refused()

    async def end(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        if self._filter is not None:
            await self._filter.remove(INTERFACE)
            self._filter.close()
        if self._process is not None:
            await self._process.end()
        elif self._filter is None and self._in_kernel:  # not moved yet
            await asyncio.to_thread(self._discard)
        if self._namespace >= 0:
            os.close(self._namespace)
            self._namespace = -1


def sweep(interfaces: str) -> None:
    """End wireguard-go processes of a killed agent, whose interfaces have this prefix, and remove their sockets."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if any(Path(word).name == PROGRAM for word in words[:1]) and any(
                word.startswith(interfaces) for word in words[1:]
            ):
                os.kill(int(path.name), signal.SIGKILL)
    for left in SOCKETS.glob(f"{interfaces}*.sock"):
        left.unlink(missing_ok=True)
