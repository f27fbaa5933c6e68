"""The system call filter of a sandbox: classic BPF for x86_64 and aarch64; other machines are refused.

libseccomp is not a dependency; tests/agent/runtime/test_seccomp_oracle.py compares the verdicts.
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, AND, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
ALLOW = 0x7FFF0000
KILL_PROCESS = 0x80000000
ERRNO = 0x00050000
OFFSET_NUMBER, OFFSET_ARCH, OFFSET_ARGUMENTS = 0, 4, 16
X32_BIT = 0x40000000

# CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}; NEWTIME shares its bit with the exit signal of `clone`.
NAMESPACE_FLAGS = 0x7E020000
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
SOCKET_TYPE_MASK = 0xF
SOCK_STREAM, SOCK_DGRAM, SOCK_RAW, SOCK_SEQPACKET = 1, 2, 3, 5
NETLINK_ROUTE = 0
PROTOCOLS = (0, 6, 17)  # the family's default, TCP, UDP: no SCTP, MPTCP, ICMP, no module loading
TIOCSTI, TIOCLINUX, TIOCSETD = 0x5412, 0x541C, 0x5423  # the last loads line disciplines
TCP_ULP, SOL_TCP = 31, 6
LAST_KNOWN = 469  # calls of newer kernels get ENOSYS until they are reviewed
PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)  # plain Linux, and the query
FILE_TYPE_MASK, CHARACTER_DEVICE, BLOCK_DEVICE = 0o170000, 0o020000, 0o060000

# name: number on x86_64, number on aarch64 (-1: has none)
REFUSED: dict[str, tuple[int, int]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "create_module": (174, -1),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "get_kernel_syms": (177, -1),
    "init_module": (175, 105),
    "ioperm": (173, -1),
    "iopl": (172, -1),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "migrate_pages": (256, 238),
    "modify_ldt": (154, -1),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "query_module": (178, -1),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "sysfs": (139, -1),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "uselib": (134, -1),
    "userfaultfd": (323, 282),
    "ustat": (136, -1),
    "vhangup": (153, 58),
    "_sysctl": (156, -1),
}
# Libraries try these and fall back on ENOSYS.
ABSENT: dict[str, tuple[int, int]] = {
    "clone3": (435, 435),  # its flags are behind a pointer, which a filter cannot read
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_secret": (447, 447),
}


@dataclass(frozen=True, slots=True)
class SyscallTable:
    audit: int
    column: int
    clone: int
    socket: int
    socketpair: int
    ioctl: int
    personality: int
    mknod: int  # -1: only mknodat
    mknodat: int
    setsockopt: int


MACHINES = {
    "x86_64": SyscallTable(0xC000003E, 0, 56, 41, 53, 16, 135, 133, 259, 54),
    "aarch64": SyscallTable(0xC00000B7, 1, 220, 198, 199, 29, 92, -1, 33, 208),
}


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("<HBBI", code, yes, no, value)


def _load_argument(index: int) -> bytes:
    return _step(LOAD, OFFSET_ARGUMENTS + 8 * index)  # the low half; little-endian only


def _guarded(number: int, *body: bytes) -> list[bytes]:
    """Instructions for one call, skipped for others; `body` must end in a return."""
    return [_step(JUMP_EQUAL, number, 0, len(body)), *body]


def _among(values: tuple[int, ...], otherwise: int) -> list[bytes]:
    tests = [_step(JUMP_EQUAL, value, len(values) - at, 0) for at, value in enumerate(values)]
    return [*tests, _step(RETURN, otherwise), _step(RETURN, ALLOW)]


def _refuse_if(code: int, values: tuple[int, ...]) -> list[bytes]:
    tests = [_step(code, value, len(values) - at, 0) for at, value in enumerate(values)]
    return [*tests, _step(RETURN, ALLOW), _step(RETURN, ERRNO | errno.EPERM)]


def _kinds_and_protocols() -> list[bytes]:
    kinds = (SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET)
    tests = [_step(JUMP_EQUAL, kind, len(kinds) - at, 0) for at, kind in enumerate(kinds)]
    return [
        _load_argument(1),
        _step(AND, SOCKET_TYPE_MASK),
        *tests,
        _step(RETURN, ERRNO | errno.EPERM),
        _load_argument(2),
        *_among(PROTOCOLS, ERRNO | errno.EPROTONOSUPPORT),
    ]


def _interfaces() -> list[bytes]:
    """Of netlink allow only NETLINK_ROUTE; the family of `socket` is loaded."""
    kinds = (SOCK_RAW, SOCK_DGRAM)  # equal for netlink; the C library uses the raw one
    tests = [_step(JUMP_EQUAL, kind, len(kinds) - at, 0) for at, kind in enumerate(kinds)]
    body = [
        _load_argument(1),
        _step(AND, SOCKET_TYPE_MASK),
        *tests,
        _step(RETURN, ERRNO | errno.EPERM),
        _load_argument(2),
        *_among((NETLINK_ROUTE,), ERRNO | errno.EPROTONOSUPPORT),
    ]
    return [_step(JUMP_EQUAL, AF_NETLINK, 0, len(body)), *body]


def _device_nodes(number: int, mode_at: int) -> list[bytes]:
    types = (CHARACTER_DEVICE, BLOCK_DEVICE)
    return _guarded(
        number,
        _load_argument(mode_at),
        _step(AND, FILE_TYPE_MASK),
        *_refuse_if(JUMP_EQUAL, types),
    )


def program(machine: str = "", *, interfaces: bool = False) -> bytes:
    """Filter in the kernel's format; `LookupError` for an unknown machine.

    `interfaces`: allow listing the network's interfaces, which gloo and NCCL need in a gang.
    """
    name = machine or platform.machine()
    known = MACHINES.get(name)
    if known is None:
        raise LookupError(f"no system call filter for {name}; gpool knows {', '.join(MACHINES)}")
    steps = [
        _step(LOAD, OFFSET_ARCH),
        _step(JUMP_EQUAL, known.audit, 1, 0),
        _step(RETURN, KILL_PROCESS),
        _step(LOAD, OFFSET_NUMBER),
    ]
    if name == "x86_64":
        steps += [_step(JUMP_AT_LEAST, X32_BIT, 0, 1), _step(RETURN, KILL_PROCESS)]
    steps += [_step(JUMP_AT_LEAST, LAST_KNOWN + 1, 0, 1), _step(RETURN, ERRNO | errno.ENOSYS)]
    for table, code in ((REFUSED, errno.EPERM), (ABSENT, errno.ENOSYS)):
        for numbers in table.values():
            if numbers[known.column] >= 0:
                steps += _guarded(numbers[known.column], _step(RETURN, ERRNO | code))
    steps += _guarded(known.clone, _load_argument(0), *_refuse_if(JUMP_ANY_BIT, (NAMESPACE_FLAGS,)))
    foreign = ERRNO | errno.EAFNOSUPPORT
    families = (AF_UNIX, AF_INET, AF_INET6)
    domains = [
        _step(JUMP_EQUAL, family, len(families) - at, 0) for at, family in enumerate(families)
    ]
    steps += _guarded(
        known.socket,
        _load_argument(0),
        *(_interfaces() if interfaces else ()),
        *domains,
        _step(RETURN, foreign),
        *_kinds_and_protocols(),
    )
    steps += _guarded(known.socketpair, _load_argument(0), *_among((AF_UNIX,), foreign))
    steps += _guarded(
        known.ioctl, _load_argument(1), *_refuse_if(JUMP_EQUAL, (TIOCSTI, TIOCLINUX, TIOCSETD))
    )
    steps += _guarded(
        known.setsockopt,
        _load_argument(1),
        _step(JUMP_EQUAL, SOL_TCP, 1, 0),
        _step(RETURN, ALLOW),
        _load_argument(2),
        *_refuse_if(JUMP_EQUAL, (TCP_ULP,)),
    )
    steps += _guarded(
        known.personality, _load_argument(0), *_among(PERSONALITIES, ERRNO | errno.EPERM)
    )
    if known.mknod >= 0:
        steps += _device_nodes(known.mknod, 1)
    steps += _device_nodes(known.mknodat, 2)
    steps.append(_step(RETURN, ALLOW))
    return b"".join(steps)
