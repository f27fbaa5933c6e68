"""Controls that would hurt the machine, or that its kernel cannot show: the same probe as root in a throw-away guest."""

from __future__ import annotations

import io
import json
import os
import select
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from gpool.agent.runtime.bubblewrap import layout
from gpool.agent.runtime.microvm.image import build
from gpool.agent.runtime.microvm.image.build import clock_word
from gpool.agent.runtime.microvm.image.disks import DiskStore
from gpool.agent.runtime.microvm.image.kernel import Kernel, find_kernel, needs, read_module
from gpool.agent.runtime.microvm.monitors.protocol import GuestDisk, GuestMachine
from gpool.agent.runtime.microvm.monitors.qemu import TCG, command_line, find_qemu
from tests.tools.runtimes import microvm_disks

PROBE = Path(__file__).with_name("probe")
WITHIN_S, EACH_WITHIN_S = 600.0, 120.0
MODULES = ("af_alg", "fuse", "loop", "tun", "binfmt_misc", "vhost_net", "nvram")
START = """
import ctypes, io, os, subprocess, sys, tarfile
libc = ctypes.CDLL(None)
for kind, at in (("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", "/tmp"), ("tmpfs", "/run")):
    libc.mount(kind.encode(), at.encode(), kind.encode(), 0, None)
libc.mount(b"binfmt_misc", b"/proc/sys/fs/binfmt_misc", b"binfmt_misc", 0, None)
with open("/dev/vdd", "rb") as disk:
    tarfile.open(fileobj=io.BytesIO(disk.read()), mode="r:").extractall("/tmp")
line = next("/dev/" + name for name in os.listdir("/dev") if name.startswith("vport"))
os.chdir("/tmp")
with open(line, "wb", buffering=0) as out:
    done = subprocess.run([sys.executable, "-B", "/tmp/probe/main.py", "/tmp/known"], stdout=out)
    out.write(b'{"ended": %d}\\n' % done.returncode)
libc.reboot(0x01234567)
"""


def module_files(kernel: Kernel) -> list[Path]:
    """Of what the attacks ask for, each after those it needs; what this kernel has not is left out."""
    files = {
        path.name.partition(".ko")[0].replace("-", "_"): path
        for path in Path("/lib/modules", kernel.version, "kernel").rglob("*.ko*")
    }
    chosen: dict[Path, None] = dict.fromkeys(kernel.modules)

    def choose(name: str) -> None:
        file = files.get(name)
        if file is None or file in chosen:
            return
        for needed in needs(read_module(file)):
            choose(needed)
        chosen[file] = None

    for name in MODULES:
        choose(name)
    return list(chosen)


def probe_disk(only: Sequence[str]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as disk:
        for file in sorted(PROBE.glob("*.py")):
            disk.add(file, f"probe/{file.name}")
        told = json.dumps({"only": list(only), "within_s": EACH_WITHIN_S}).encode()
        info = tarfile.TarInfo("known")
        info.size = len(told)
        disk.addfile(info, io.BytesIO(told))
    return made.getvalue()


def run(only: Sequence[str]) -> dict[str, str]:
    """What became of these attacks, tried by root in a guest without any defence."""
    kernel = find_kernel()
    with tempfile.TemporaryDirectory(prefix="foe-guest-") as folder:
        here = Path(folder)
        prepared = layout.prepare(here / "inside")
        parts = build.GuestImageBuilder(DiskStore(microvm_disks()), prepared, kernel).image(
            None, unpacked_kernel=False
        )
        modules = {f"/modules/{file.name}": read_module(file) for file in module_files(kernel)}
        env = [f"{name}={value}" for name, value in prepared.variables if name != "PATH"]
        becomes = build.BootPlan(
            tuple(modules),
            layout.HOME,
            build.OWN,
            tuple((f"/{name}", f"{layout.HOME}/{name}") for name in build.OWN_PARTS),
            (prepared.python, "-I", "-S", "-B", "-c", START),
            (*env, "PATH=/usr/bin:/bin:/usr/sbin:/sbin"),
        )
        archive = here / "archive"
        archive.write_bytes(build.archive(build.program(build.steps(becomes)), modules))
        disk = here / "probe.tar"
        disk.write_bytes(probe_disk(only))
        disks = [
            GuestDisk(name, str(path), True)
            for name, path in (
                ("system", parts.system),
                ("home", parts.home),
                ("own", parts.own),
                ("probe", disk),
            )
        ]
        words = ("syscall.x32=y", "mitigations=off", *filter(None, [clock_word()]))
        machine = GuestMachine(str(parts.kernel), str(archive), words, tuple(disks), 512, 1)
        return _boot(machine)


def _boot(machine: GuestMachine) -> dict[str, str]:
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryFile() as console:
        words = command_line(find_qemu(), TCG, machine, theirs.fileno())
        qemu = subprocess.Popen(
            words,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
        )
        theirs.close()
        try:
            said = _hear(ours)
        finally:
            qemu.kill()
            qemu.wait()
        lines = [json.loads(line) for line in said.splitlines()]
        if not lines or "ended" not in lines[-1]:
            console.seek(0)
            raise AssertionError(f"the guest did not end its work: {console.read()[-1500:]!r}")
    return {line["name"]: line["became"] for line in lines if "name" in line}


def _hear(line: socket.socket) -> bytes:
    said = b""
    until = time.monotonic() + WITHIN_S
    while b'"ended"' not in said and (left := until - time.monotonic()) > 0:
        if not select.select([line], [], [], left)[0]:
            break
        data = os.read(line.fileno(), 65536)
        if not data:
            break
        said += data
    return said
