"""Network namespaces of a root agent's sandboxes, made and entered by short-lived threads: a thread cannot leave one."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gpool.agent.network.host import Netlink, NftFailed, nft_program
from gpool.agent.network.sandbox_network import name_sockets

CLONE_NEWNET = 0x40000000
SIOCGIFINDEX = 0x8933
LOOPBACK = 1
SYSCTLS = Path("/proc/sys/net")
NFT_WITHIN_S = 60.0

T = TypeVar("T")
libc = ctypes.CDLL(None, use_errno=True)


def read_sysctl(name: str) -> str | None:
    try:
        return (SYSCTLS / name).read_text().strip()
    except OSError:
        return None


def write_sysctl(name: str, value: str) -> None:
    """Ignored where the kernel lacks it."""
    with contextlib.suppress(FileNotFoundError):
        (SYSCTLS / name).write_text(value)


@dataclass(slots=True)
class Inside:
    """A sandbox's namespace with a netlink socket and the resolver's sockets in it."""

    namespace: int
    netlink: Netlink
    names: tuple[socket.socket, socket.socket]

    def index(self, name: str) -> int:
        asked = struct.pack("16si", name.encode(), 0)
        (index,) = struct.unpack("16xi", fcntl.ioctl(self.names[0], SIOCGIFINDEX, asked))
        return int(index)

    def discard(self) -> None:
        self.netlink.close()
        for each in self.names:
            each.close()
        with contextlib.suppress(OSError):
            os.close(self.namespace)


def make_inside() -> Inside:
    """Runs in its own thread, which stays in the new namespace."""
    if libc.unshare(CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"a network namespace: {os.strerror(code)}")
    write_sysctl("ipv6/conf/default/disable_ipv6", "1")
    netlink = Netlink()
    netlink.up(LOOPBACK)
    names = name_sockets()
    namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    return Inside(namespace, netlink, names)


async def in_fresh_thread(work: Callable[[], T]) -> T:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: Exception | None) -> None:
        if done.cancelled():
            if isinstance(value, Inside):
                value.discard()
        elif error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        try:
            loop.call_soon_threadsafe(settle, work(), None)
        except (OSError, NftFailed) as failure:
            loop.call_soon_threadsafe(settle, None, failure)

    threading.Thread(target=run, name="gpool-lane", daemon=True).start()
    return await done


async def in_namespace(namespace: int, work: Callable[[], T]) -> T:
    """Run a function, and the programs it starts, in a network namespace (a descriptor)."""

    def entered() -> T:
        if libc.setns(namespace, CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"enter a network namespace: {os.strerror(code)}")
        return work()

    return await in_fresh_thread(entered)


def nft_here(*arguments: str, text: str = "") -> str:
    """Run nft in the namespace of the calling thread."""
    path = nft_program("nft")
    if path is None:
        raise NftFailed("nft is not installed (Debian: apt-get install nftables)")
    try:
        done = subprocess.run(
            [path, *arguments],
            input=text,
            capture_output=True,
            text=True,
            env={},
            check=False,
            timeout=NFT_WITHIN_S,
        )
    except subprocess.TimeoutExpired as silent:
        raise NftFailed(f"nft did not answer within {NFT_WITHIN_S:g} s") from silent
    if done.returncode != 0:
        raise NftFailed((done.stderr.strip().splitlines() or ["no error output"])[0])
    return done.stdout
