"""Attacks a task might try, run as a script: each in a child of its own, the results as one JSON line.

Each returns normally when it reached what it must not, and raises OSError when it was refused. They prove reach, not
harm: files are opened and not written, calls are given arguments that fail only after the permission check.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import socket
import stat
import sys
from collections.abc import Callable

libc = ctypes.CDLL(None, use_errno=True)
PLANTED = json.loads(sys.argv[1])
REFUSALS = {errno.EPERM, errno.ENOSYS, errno.EACCES}
MACHINE = os.uname().machine


def call(number: int, *arguments: object) -> None:
    """Reached unless the kernel (or the filter) refuses outright; a complaint about arguments comes after that."""
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *arguments)
    code = ctypes.get_errno()
    if result == -1 and code in REFUSALS:
        raise OSError(code, os.strerror(code))


def syscall(number: int, *values: int) -> Callable[[], None]:
    return lambda: call(number, *(ctypes.c_long(value) for value in values))


def agents_environment() -> None:
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/environ", "rb") as text:
                    if PLANTED["secret"].encode() in text.read():
                        return
            except OSError:
                continue
    raise OSError("not found")


def agents_command_line() -> None:
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) not in (os.getpid(), os.getppid()):
            try:
                with open(f"/proc/{name}/cmdline", "rb") as text:
                    if PLANTED["word"].encode() in text.read().split(b"\0"):
                        return
            except OSError:
                continue
    raise OSError("not found")


def inherited_descriptor() -> None:
    for name in os.listdir("/proc/self/fd"):
        try:
            if PLANTED["file"] in os.readlink(f"/proc/self/fd/{name}"):
                return
        except OSError:
            continue
    raise OSError("none")


def connect(family: int, address: object) -> Callable[[], None]:
    def attack() -> None:
        with socket.socket(family, socket.SOCK_STREAM) as dialling:
            dialling.settimeout(2)
            dialling.connect(address)

    return attack


def make_socket(family: int, kind: int) -> Callable[[], None]:
    return lambda: socket.socket(family, kind).close()


def device_node() -> None:
    name = f"node-{os.getpid()}"
    os.mknod(name, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    os.unlink(name)


def writable(path: str) -> Callable[[], None]:
    return lambda: os.close(os.open(path, os.O_WRONLY))


def readable(path: str) -> Callable[[], None]:
    return lambda: os.close(os.open(path, os.O_RDONLY))


def i386_call() -> None:
    """getpid by int 0x80: the numbers of another machine, around a filter that forgets to look."""
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    if ctypes.CFUNCTYPE(ctypes.c_int)(address)() != os.getpid():
        raise OSError("refused")


def x32_call() -> None:
    call(0x40000000 | 39)


def nice() -> None:
    os.setpriority(os.PRIO_PROCESS, 0, -20)


def real_time() -> None:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def clone_namespace() -> None:
    child = libc.syscall(56, ctypes.c_long(0x10000000 | 17), 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    if child < 0:
        raise OSError(ctypes.get_errno(), "clone")
    os.waitpid(child, 0)


ATTACKS: dict[str, Callable[[], object]] = {
    "read root's home": lambda: os.listdir("/root"),
    "read the shadow file": readable("/etc/shadow"),
    "read a file of the agent's": readable(PLANTED["file"]),
    "read the agent's environment": agents_environment,
    "read the agent's command line": agents_command_line,
    "use an inherited descriptor": inherited_descriptor,
    "list /run": lambda: os.listdir("/run"),
    "list /sys": lambda: os.listdir("/sys"),
    "list /var": lambda: os.listdir("/var"),
    "write core_pattern": writable("/proc/sys/kernel/core_pattern"),
    "write modprobe": writable("/proc/sys/kernel/modprobe"),
    "write sysrq-trigger": writable("/proc/sysrq-trigger"),
    "write a system program": writable("/usr/bin/env"),
    "open kernel memory": readable("/dev/mem"),
    "signal a process of the host": lambda: os.kill(PLANTED["pid"], 0),
    "reach a service on the loopback": connect(socket.AF_INET, ("127.0.0.1", PLANTED["port"])),
    "reach an abstract socket": connect(socket.AF_UNIX, "\0" + PLANTED["abstract"]),
    "make a device node": device_node,
    "open a netlink socket": make_socket(socket.AF_NETLINK, socket.SOCK_RAW),
    "open a packet socket": make_socket(socket.AF_PACKET, socket.SOCK_RAW),
    "open a raw socket": lambda: socket.socket(
        socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP
    ).close(),
    "open a vsock": make_socket(40, socket.SOCK_STREAM),
    "open a crypto socket": make_socket(38, socket.SOCK_SEQPACKET),
    "raise its priority": nice,
    "become real-time": real_time,
}
NUMBERED = {
    "x86_64": {
        "trace": syscall(101, 0),
        "read another's memory": syscall(310, os.getpid(), 0, 0, 0, 0, 0),
        "take another's descriptor": syscall(438, -1, 0, 0),
        "make a user namespace": syscall(272, 0x10000000),
        "clone a user namespace": clone_namespace,
        "clone3": syscall(435, 0, 0),
        "enter a namespace": syscall(308, -1, 0),
        "mount": syscall(165, 0, 0, 0, 0, 0),
        "umount": syscall(166, 0, 0),
        "fsopen": syscall(430, 0, 0),
        "move_mount": syscall(429, -1, 0, -1, 0, 0),
        "open_tree": syscall(428, -1, 0, 0),
        "pivot_root": syscall(155, 0, 0),
        "chroot": syscall(161, 0),
        "io_uring": syscall(425, 0, 0),
        "keyring": syscall(250, 0, -3, 0),
        "add a key": syscall(248, 0, 0, 0, 0, -3),
        "bpf": syscall(321, 9999, 0, 0),
        "userfaultfd": syscall(323, 0),
        "perf events": syscall(298, 0, 0, -1, -1, 0),
        "open by handle": syscall(304, -1, 0, 0),
        "load a module": syscall(175, 0, 0, 0),
        "kexec": syscall(246, 0, 0, 0, 0xFFFF),
        "reboot": syscall(169, 0, 0, 0, 0),
        "swap": syscall(167, 0, 0),
        "set the clock": syscall(227, 9999, 0),
        "set the host name": syscall(170, 0, -1),
        "read the kernel log": syscall(103, 10, 0, 0),
        "fake terminal input": syscall(16, -1, 0x5412, 0),
        "fake terminal input past 32 bits": syscall(16, -1, 0x1_0000_5412, 0),
        "modify_ldt": syscall(154, 0, 0, 0),
        "odd personality": syscall(135, 0x0040000),
        "x32 call": x32_call,
        "i386 call": i386_call,
    }
}
ATTACKS |= NUMBERED.get(MACHINE, {})


def attempt(attack: Callable[[], object]) -> str:
    """In a child: an attack may be answered by death."""
    child = os.fork()
    if child == 0:
        os.close(2)
        try:
            attack()
        except OSError as refused:
            os._exit(1 if refused.errno is None else min(refused.errno, 100) + 1)
        except BaseException:  # noqa: BLE001 - a forked child must never return
            os._exit(120)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return "reached" if status == 0 else f"refused ({status})"


if __name__ == "__main__":
    sys.stdout.write(json.dumps({name: attempt(attack) for name, attack in ATTACKS.items()}))
