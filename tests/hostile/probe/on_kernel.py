"""Attacks on the kernel's surface: calls a task has no need for, given arguments that fail after the permission check."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import socket
import struct
import subprocess
import time
from collections.abc import Callable

from trying import Refused, add, call, libc, must

SPACES, CALLS, SOCKETS, RIGHTS = "namespaces and mounts", "system calls", "sockets", "rights"
NEW = {
    "user": 0x10000000,
    "mount": 0x00020000,
    "net": 0x40000000,
    "pid": 0x20000000,
    "ipc": 0x08000000,
    "uts": 0x04000000,
    "control group": 0x02000000,
    "time": 0x00000080,
}
STRANGER = 54_322


def looked_at(number: int, *words: int) -> Callable[[], object]:
    return lambda: call(number, *words)


def clone_user() -> None:
    child = libc.syscall(56, ctypes.c_long(NEW["user"] | 17), 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    if child < 0:
        raise Refused(ctypes.get_errno(), "clone")
    os.waitpid(child, 0)


def clone3_user() -> None:
    words = struct.pack("8Q", NEW["user"], 0, 0, 0, 17, 0, 0, 0)
    child = libc.syscall(ctypes.c_long(435), words, ctypes.c_long(64))
    if child == 0:
        os._exit(0)
    if child < 0:
        raise Refused(ctypes.get_errno(), "clone3")
    os.waitpid(child, 0)


def makes_socket(family: int, kind: int, protocol: int = 0) -> Callable[[], None]:
    return lambda: socket.socket(family, kind, protocol).close()


def i386_call() -> None:
    """getpid by int 0x80: the numbers of another machine, around a filter that forgets to look."""
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    if ctypes.CFUNCTYPE(ctypes.c_int)(address)() != os.getpid():
        raise Refused("it is not the number")


def become(uid: int) -> Callable[[], None]:
    def attack() -> None:
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        if os.getresuid() != (uid, uid, uid):
            raise Refused("still another")

    return attack


def root_by_program() -> None:
    """As nobody in particular, a program that belongs to root and says so."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(STRANGER, STRANGER, STRANGER)
        os.setresuid(STRANGER, STRANGER, STRANGER)
    for program in ("/usr/bin/su", "/bin/su", "/usr/bin/passwd", "/usr/bin/newgrp"):
        if not os.path.exists(program):
            continue
        with subprocess.Popen(
            [program], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as running:
            try:
                until = time.monotonic() + 2
                while running.poll() is None and time.monotonic() < until:
                    if os.stat(f"/proc/{running.pid}").st_uid == 0 or _is_root(running.pid):
                        return
            except OSError:
                continue
            finally:
                running.kill()
    raise Refused("none gave root")


def _is_root(pid: int) -> bool:
    with open(f"/proc/{pid}/status") as status:
        return any(line.startswith("Uid:") and line.split()[2] == "0" for line in status)


def raise_capabilities() -> None:
    head = struct.pack("Ii", 0x20080522, 0)
    everything = struct.pack("6I", 0xFFFFFFFF, 0xFFFFFFFF, 0, 0x1FF, 0x1FF, 0)
    must(126, head, everything)


def real_time_class() -> None:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def deadline_class() -> None:
    words = struct.pack("IIQiIQQQ", 48, 6, 0, 0, 0, 1_000_000, 10_000_000, 10_000_000)
    must(314, 0, words, 0)


def raise_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard + 1))
    except ValueError as refused:
        raise Refused(str(refused)) from refused


def program_for_kernel() -> None:
    """A map of one entry: what every BPF program begins with."""
    words = struct.pack("IIIII", 2, 4, 4, 1, 0) + bytes(100)
    must(321, 0, words, len(words))


def filesystem(kind: str) -> Callable[[], None]:
    def attack() -> None:
        os.makedirs("mounted", exist_ok=True)
        must(165, kind.encode() + b"\0", b"mounted\0", kind.encode() + b"\0", 0, None)
        must(166, b"mounted\0", 2)

    return attack


def bind_root() -> None:
    os.makedirs("bound", exist_ok=True)
    must(165, b"/\0", b"bound\0", None, 0x1000, None)
    must(166, b"bound\0", 2)


def attach_tls() -> None:
    """A protocol on top of a socket, loaded as a module when it is asked for."""
    with socket.socket() as plain:
        call(54, plain.fileno(), 6, 31, b"tls\0", 4)


for word, flag in NEW.items():
    add(SPACES, f"unshare its {word} namespace", looked_at(272, flag), of_kernel=True)
add(SPACES, "clone a user namespace", clone_user, of_kernel=True)
add(SPACES, "clone3 a user namespace", clone3_user, of_kernel=True)
add(SPACES, "mount a proc", filesystem("proc"), of_kernel=True)
add(SPACES, "mount a tmpfs", filesystem("tmpfs"), of_kernel=True)
add(SPACES, "bind the root", bind_root, of_kernel=True)
for name, words in {
    "setns": (308, -1, 0),
    "mount": (165, 0, 0, 0, 0, 0),
    "umount": (166, 0, 0),
    "pivot_root": (155, 0, 0),
    "chroot": (161, 0),
    "fsopen": (430, 0, 0),
    "fsconfig": (431, -1, 99, 0, 0, 0),
    "fsmount": (432, -1, 0, 0),
    "fspick": (433, -1, 0, 0),
    "move_mount": (429, -1, 0, -1, 0, 0),
    "open_tree": (428, -1, 0, 0),
    "mount_setattr": (442, -1, 0, 0, 0, 0),
}.items():
    add(SPACES, name, looked_at(*words), of_kernel=True)

for name, words in {
    "ptrace": (101, 0),
    "io_uring": (425, 0, 0),
    "keyctl": (250, 0, -3, 0),
    "add_key": (248, 0, 0, 0, 0, -3),
    "request_key": (249, 0, 0, 0, 0),
    "bpf": (321, 9999, 0, 0),
    "userfaultfd": (323, 0),
    "perf_event_open": (298, 0, 0, -1, -1, 0),
    "init_module": (175, 0, 0, 0),
    "finit_module": (313, -1, 0, 0),
    "delete_module": (176, 0, 0),
    "kexec_load": (246, 0, 0, 0, 0xFFFF),
    "kexec_file_load": (320, -1, -1, 0, 0, 0xFFFF),
    "reboot": (169, 0, 0, 0, 0),
    "swapon": (167, 0, 0),
    "swapoff": (168, 0),
    "settimeofday": (164, 1, 0),
    "clock_settime": (227, 9999, 0),
    "adjtimex": (159, 1),
    "sethostname": (170, 0, -1),
    "setdomainname": (171, 0, -1),
    "acct": (163, 1),
    "quotactl": (179, 0x80000800, 0, 0, 0),
    "read the kernel log": (103, 10, 0, 0),
    "iopl": (172, 4),
    "ioperm": (173, 0, 0, 1),
    "modify_ldt": (154, 0, 0, 0),
    "personality without random addresses": (135, 0x0040000),
    "personality that executes what it reads": (135, 0x0400000),
    "fake terminal input": (16, -1, 0x5412, 0),
    "fake terminal input past 32 bits": (16, -1, 0x1_0000_5412, 0),
    "use the console's clipboard": (16, -1, 0x541C, 0),
    "set a line discipline": (16, -1, 0x5423, 0),
    "fanotify": (300, 0, 0),
    "watch files": (294, 0),
    "watch a file of the host": (254, -1, 0, 1),
    "migrate_pages": (256, -1, 0, 0, 0),
    "process_madvise": (440, -1, 0, 0, 0, 0),
    "memfd_secret": (447, 0),
    "x32 call": (0x40000000 | 39,),
}.items():
    add(CALLS, name, looked_at(*words), of_kernel=True)
add(CALLS, "make a bpf map", program_for_kernel, of_kernel=True)
add(CALLS, "i386 call", i386_call, of_kernel=True)

add(SOCKETS, "open the audit's netlink", makes_socket(16, socket.SOCK_RAW, 9), of_kernel=True)
add(SOCKETS, "open netfilter", makes_socket(16, socket.SOCK_RAW, 12), of_kernel=True)
add(SOCKETS, "open a packet socket", makes_socket(17, socket.SOCK_RAW), of_kernel=True)
add(SOCKETS, "open a raw socket", makes_socket(2, socket.SOCK_RAW, 1), of_kernel=True)
add(SOCKETS, "open a raw IPv6 socket", makes_socket(10, socket.SOCK_RAW, 58), of_kernel=True)
add(SOCKETS, "open a vsock", makes_socket(40, socket.SOCK_STREAM), of_kernel=True)
add(SOCKETS, "open a crypto socket", makes_socket(38, socket.SOCK_SEQPACKET), of_kernel=True)
add(SOCKETS, "open an express socket", makes_socket(44, socket.SOCK_RAW), of_kernel=True)
add(SOCKETS, "open a multipath socket", makes_socket(2, socket.SOCK_STREAM, 262), of_kernel=True)
add(SOCKETS, "attach a protocol to a socket", attach_tls, of_kernel=True)

add(RIGHTS, "become root", become(0), of_kernel=True)
add(RIGHTS, "become another user", become(STRANGER), of_kernel=True)
add(RIGHTS, "get root by a setuid program", root_by_program, of_kernel=True)
add(RIGHTS, "raise its capabilities", raise_capabilities, of_kernel=True)
add(RIGHTS, "change its groups", lambda: os.setgroups([0]), of_kernel=True)
add(RIGHTS, "raise its priority", lambda: os.setpriority(os.PRIO_PROCESS, 0, -20), of_kernel=True)
add(RIGHTS, "become real-time", real_time_class, of_kernel=True)
add(RIGHTS, "get a deadline", deadline_class, of_kernel=True)
add(RIGHTS, "read the disk before others", lambda: must(251, 1, 0, 1 << 13), of_kernel=True)
add(RIGHTS, "raise its limits", raise_limit, of_kernel=True)
add(RIGHTS, "drop its securebits", lambda: must(157, 28, 1, 0, 0, 0), of_kernel=True)
