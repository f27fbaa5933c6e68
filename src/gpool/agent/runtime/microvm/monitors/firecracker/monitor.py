"""The Firecracker monitor: configured over its API socket, with a vsock to the guest. Never run on real hardware here.

It boots uncompressed kernels only; the guest finds devices by ACPI, described since version 1.8.
"""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

from gpool.agent.runtime.microvm.guest import AGENT_PORT
from gpool.agent.runtime.microvm.monitors.firecracker.api import (
    API_NAME,
    accept,
    configure,
    listen,
    requests,
)
from gpool.agent.runtime.microvm.monitors.protocol import (
    FOLDER_AT,
    MIB,
    GuestMachine,
    MonitorCommand,
    MonitorLine,
)

PROGRAM = "firecracker"


def find_firecracker() -> str:
    return shutil.which(PROGRAM, path="/usr/bin:/usr/local/bin:/bin") or ""


class VsockLine:
    """Firecracker connects to a listening socket when the guest dials the agent's vsock port."""

    def __init__(self, folder: Path, uid: int) -> None:
        folder.mkdir(mode=0o700)
        if uid != os.geteuid():
            os.chown(folder, uid, uid)
        self._folder = folder
        self._uid = uid
        self._listening = listen(folder, AGENT_PORT, uid)
        self.descriptor = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)

    async def connect(self, machine: GuestMachine, within_s: float) -> socket.socket:
        await configure(self._folder, self._uid, requests(machine))
        return await accept(self._listening, within_s)

    def close(self) -> None:
        self._listening.close()


class Firecracker:
    name = "firecracker"
    has_network = False  # it needs an interface of the host, made by root
    control = "vsock"
    unpacked_kernel = True
    passes_devices = False
    overhead_bytes = 64 * MIB
    description = "firecracker"
    kernel_words: tuple[str, ...] = ()

    def __init__(self, program: str) -> None:
        self._program = program

    def command(self, machine: GuestMachine, line: int) -> MonitorCommand:
        del machine, line
        argv = (self._program, "--api-sock", f"{FOLDER_AT}/{API_NAME}", "--level", "Error")
        return MonitorCommand(argv, ("/dev/kvm",), folder=True)

    def open_line(self, directory: Path, uid: int) -> MonitorLine:
        return VsockLine(directory / FOLDER_AT.lstrip("/"), uid)
