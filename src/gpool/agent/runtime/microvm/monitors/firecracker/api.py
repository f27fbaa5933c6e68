"""Firecracker's API: a guest's configuration requests, and their exchange over its socket.

`tests/agent/microvm/test_firecracker.py` checks them against the published API description.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

from gpool.agent.runtime.microvm.monitors.protocol import COMMON_WORDS, FOLDER_AT, GuestMachine
from gpool.agent.runtime.protocol import SandboxFailed

API_NAME, VSOCK_NAME = "api.sock", "v.sock"
GUEST_CID = 3
ANSWER_WITHIN_S = 10.0
MOST_ANSWER_BYTES = 64 * 1024
RETRY_S = 0.01

ApiRequest = tuple[str, str, dict[str, object]]
"""(method, path, document)."""


def requests(machine: GuestMachine) -> list[ApiRequest]:
    drives: list[ApiRequest] = [
        (
            "PUT",
            f"/drives/{disk.name}",
            {
                "drive_id": disk.name,
                "path_on_host": disk.path,
                "is_root_device": False,  # the first file system is the archive's
                "is_read_only": disk.read_only,
                "cache_type": "Unsafe",
            },
        )
        for disk in machine.disks
    ]
    return [
        (
            "PUT",
            "/machine-config",
            {"vcpu_count": machine.cpus, "mem_size_mib": machine.memory_mib},
        ),
        (
            "PUT",
            "/boot-source",
            {
                "kernel_image_path": machine.kernel,
                "initrd_path": machine.archive,
                "boot_args": " ".join((*COMMON_WORDS, *machine.words)),
            },
        ),
        *drives,
        ("PUT", "/entropy", {}),
        ("PUT", "/vsock", {"guest_cid": GUEST_CID, "uds_path": f"{FOLDER_AT}/{VSOCK_NAME}"}),
        ("PUT", "/actions", {"action_type": "InstanceStart"}),
    ]


def _encoded(request: ApiRequest) -> bytes:
    method, path, document = request
    body = json.dumps(document).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def configure(
    folder: Path, uid: int, made: Sequence[ApiRequest], within_s: float = ANSWER_WITHIN_S
) -> None:
    """Send the requests in turn; `SandboxFailed` names the refused one."""
    try:
        async with asyncio.timeout(within_s):
            connection = await _connect(folder / API_NAME, uid)
            reader, writer = await asyncio.open_connection(sock=connection, limit=MOST_ANSWER_BYTES)
            try:
                for request in made:
                    writer.write(_encoded(request))
                    await writer.drain()
                    code, text = await _answer(reader)
                    if not 200 <= code < 300:
                        detail = f"Firecracker refused {request[1]} with {code}: {text[:300]}"
                        raise SandboxFailed(detail)
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except TimeoutError as silent:
        raise SandboxFailed(f"Firecracker did not answer within {within_s:.0f} s") from silent
    except (OSError, asyncio.IncompleteReadError, ValueError) as broken:
        raise SandboxFailed(f"Firecracker's socket: {broken}") from broken


async def _connect(path: Path, uid: int) -> socket.socket:
    """The socket must be the monitor uid's; a link of a hostile monitor is not followed."""
    while True:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            held = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                facts = os.fstat(held)
                if not stat.S_ISSOCK(facts.st_mode) or facts.st_uid != uid:
                    raise SandboxFailed("Firecracker's socket is not its own")
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.setblocking(False)
                try:
                    connection.connect(f"/proc/self/fd/{held}")
                except BaseException:
                    connection.close()
                    raise
                return connection
            finally:
                os.close(held)
        await asyncio.sleep(RETRY_S)


async def _answer(reader: asyncio.StreamReader) -> tuple[int, str]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    code = int(head[0].split(" ")[1])
    length = 0
    for line in head[1:]:
        name, _, value = line.partition(":")
        if name.lower() == "content-length":
            length = int(value)
    if not 0 <= length <= MOST_ANSWER_BYTES:
        raise ValueError(f"an answer of {length} bytes")
    body = await reader.readexactly(length)
    return code, body.decode("utf-8", "replace")


def listen(folder: Path, port: int, uid: int) -> socket.socket:
    path = folder / f"{VSOCK_NAME}_{port}"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    if uid != os.geteuid():
        os.chown(path, uid, uid, follow_symlinks=False)
    listening.listen(1)
    listening.setblocking(False)
    return listening


async def accept(listening: socket.socket, within_s: float) -> socket.socket:
    """Accept the guest's first process only and close the listener: the task cannot connect."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(within_s):
            connection, _ = await loop.sock_accept(listening)
    except TimeoutError as silent:
        raise SandboxFailed(f"the guest did not boot within {within_s:.0f} s") from silent
    finally:
        listening.close()
    return connection
