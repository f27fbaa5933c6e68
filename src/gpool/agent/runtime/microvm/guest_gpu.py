"""GPUs in a guest: loads their driver from the disk of drivers, makes device nodes, overwrites their memory. A script;
standard library only; run by `guest.py` as root before the command starts.

A job's `gpu` is {"vendor", "count", "modules", "scrub", "nodes"}; None: the guest has none. Not run on real hardware yet.
"""

from __future__ import annotations

import ctypes
import glob
import json
import os
import subprocess
import sys
from typing import Any

DISK, DRIVERS = "/dev/vde", "/opt/gpool/drivers"
FIRMWARE = "/sys/module/firmware_class/parameters/path"
SYS_FINIT_MODULE = 313
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
EEXIST = 17
NVIDIA_MAJOR, CONTROL_MINOR = 195, 255
SCRUBBER = "/opt/gpool/source/gpool/agent/sharing/scrubber.py"
LEAST_PART = 0.95
libc = ctypes.CDLL(None, use_errno=True)


def prepare(gpu: dict[str, Any] | None) -> list[tuple[str, int, int]]:
    """Return the device nodes for the command's /dev: (name, major, minor). Raises `OSError`."""
    if gpu is None:
        return []
    mount("sys", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount(DISK, DRIVERS, "squashfs", MS_RDONLY | MS_NOSUID | MS_NODEV)
    with open(FIRMWARE, "w") as path:
        path.write(f"{DRIVERS}/firmware")
    for name in gpu["modules"]:
        load(f"{DRIVERS}/modules/{name}")
    nodes = nvidia_nodes() if gpu["vendor"] == "nvidia" else made_nodes(gpu["nodes"])
    for name, major, minor in nodes:
        if not os.path.exists(f"/dev/{name}"):
            os.makedirs(os.path.dirname(f"/dev/{name}"), exist_ok=True)
            os.mknod(f"/dev/{name}", 0o020666, os.makedev(major, minor))
    cards = [name for name, _, _ in nodes if name[-1:].isdecimal()]
    if len(cards) < gpu["count"]:
        raise OSError(f"its driver found {len(cards)} of {gpu['count']} GPUs; see the console")
    for at in range(gpu["count"] if gpu["scrub"] else 0):
        scrub(at)
    return nodes


def mount(source: str, target: str, kind: str, flags: int) -> None:
    words = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None)
    if libc.mount(*words):
        code = ctypes.get_errno()
        raise OSError(code, f"mount {target}: {os.strerror(code)}")


def load(path: str) -> None:
    held = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.syscall(SYS_FINIT_MODULE, held, b"", 0) and ctypes.get_errno() != EEXIST:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot load {os.path.basename(path)}: {os.strerror(code)}")
    finally:
        os.close(held)


def nvidia_nodes() -> list[tuple[str, int, int]]:
    """The driver makes none itself: NVIDIA's own are made by a setuid program, which guests do not have."""
    with open("/proc/devices") as listing:
        majors = {
            words[1]: int(words[0])
            for words in (line.split() for line in listing)
            if len(words) == 2 and words[0].isdecimal()
        }
    nodes = [("nvidiactl", NVIDIA_MAJOR, CONTROL_MINOR)]
    if "nvidia-uvm" in majors:
        nodes += [
            ("nvidia-uvm", majors["nvidia-uvm"], 0),
            ("nvidia-uvm-tools", majors["nvidia-uvm"], 1),
        ]
    count = len(glob.glob("/proc/driver/nvidia/gpus/*"))
    return [*nodes, *((f"nvidia{minor}", NVIDIA_MAJOR, minor) for minor in range(count))]


def made_nodes(patterns: list[str]) -> list[tuple[str, int, int]]:
    """Nodes that the driver has made in devtmpfs."""
    nodes = []
    for pattern in patterns:
        for path in sorted(glob.glob(f"/dev/{pattern}")):
            number = os.stat(path).st_rdev
            nodes.append((path.removeprefix("/dev/"), os.major(number), os.minor(number)))
    return nodes


def scrub(at: int) -> None:
    """A reset need not clear the memory: overwrite it before the command can read the last guest's."""
    given = {"CUDA_VISIBLE_DEVICES": str(at), "LD_LIBRARY_PATH": f"{DRIVERS}/lib"}
    words = [sys.executable, "-I", "-S", SCRUBBER]
    ran = subprocess.run(words, env=given, capture_output=True, text=True, check=False)
    try:
        told = json.loads(ran.stdout.strip().splitlines()[-1])
        clean = not told["wrong"] and told["scrubbed"] >= LEAST_PART * told["free"] > 0
    except (IndexError, ValueError, KeyError, TypeError):
        clean = False
    if not clean:
        raise OSError(f"the memory of GPU {at} was not cleaned: {(ran.stdout + ran.stderr)[-300:]}")
