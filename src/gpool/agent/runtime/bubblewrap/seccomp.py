"""Confinement of a sandbox by the kernel: the system call filter (classic BPF for x86_64 and aarch64; other machines are
refused) and Landlock.

libseccomp is not a dependency; tests/agent/runtime/test_seccomp_oracle.py compares the verdicts.

Landlock still holds if a mount is wrong. A domain cannot be applied from outside, nor to bwrap, which could no longer
mount: so a few lines of Perl (part of every Debian and Ubuntu; one millisecond) read the variables from a descriptor,
apply the domain and exec the command. Perl starts with an empty environment, so no variable of the task affects it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import shutil
import struct
from collections.abc import Sequence
from dataclasses import dataclass

CREATE_RULESET, PRLIMIT = 444, {"x86_64": 302, "aarch64": 261}
ASK_VERSION = 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
MAKE_CHAR, MAKE_BLOCK = 64, 2048
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
FIRST_RIGHTS = (1 << 13) - 1
ADDED_RIGHTS = ((2, REFER), (3, TRUNCATE), (5, IOCTL_DEV))
SCOPES_FROM, SCOPES = 6, 0b11  # abstract sockets and signals are limited to the domain
WRITABLE = ("/work", "/values", "/tmp", "/dev/shm")

CONFINE = r"""
my ($env, $nproc, $size, $handled, $scoped, $limit, $rules) = splice @ARGV, 0, 7;
open(my $given, "<&=", $env) or die "gpool: variables: $!\n";
{ local $/; my $text = <$given>; %ENV = $text eq "" ? () : map { split /=/, $_, 2 } split /\0/, $text; }
close $given;
if ($nproc) { syscall($limit + 0, 0, 6, pack("QQ", $nproc, $nproc), 0) == 0 or die "gpool: prlimit: $!\n"; }
if ($size) {
    my $set = syscall(444, substr(pack("QQQ", $handled, 0, $scoped), 0, $size), $size + 0, 0);
    $set >= 0 or die "gpool: landlock: $!\n";
    for my $rule (split /:/, $rules) {
        my ($path, $rights) = split /=/, $rule;
        sysopen(my $at, $path, 0x280000) or next;
        syscall(445, $set, 1, pack("Ql", $rights, fileno $at), 0) == 0 or die "gpool: landlock: $path: $!\n";
    }
    syscall(446, $set, 0) == 0 or die "gpool: landlock: $!\n";
    open(my $done, "<&=", $set); close $done;
}
my $name = $ARGV[0];
exec { $name } @ARGV;
my $why = $! + 0;
print STDERR "gpool: $name: $!\n";
exit($why == 2 || $why == 20 ? 127 : 126);
"""


def landlock_version() -> int:
    """Kernel's Landlock ABI version; 0: none."""
    libc = ctypes.CDLL(None, use_errno=True)
    found: int = libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(ASK_VERSION))
    return max(0, found)


def rules(known: int, *, names_threads: bool = False) -> tuple[int, tuple[tuple[str, int], ...]]:
    """Return (handled rights, rights granted per path) under Landlock version `known`.

    `names_threads`: the sandbox may write to its own /proc entries, as the kernel allows.
    """
    handled = FIRST_RIGHTS
    for since, right in ADDED_RIGHTS:
        handled |= right if known >= since else 0
    look = EXECUTE | READ_FILE | READ_DIR
    devices = (look | WRITE_FILE | TRUNCATE | IOCTL_DEV) & handled
    all_but_devices = handled & ~(MAKE_CHAR | MAKE_BLOCK)
    given = [("/", look), ("/dev", devices), *((path, all_but_devices) for path in WRITABLE)]
    if names_threads:
        given.append(("/proc", (look | WRITE_FILE | TRUNCATE) & handled))
    return handled, tuple(given)


def perl() -> str:
    """ "" if the host has none in /usr."""
    found = shutil.which("perl", path="/usr/bin:/bin")
    return "/usr/bin/perl" if found and os.path.exists("/usr/bin/perl") else ""


def domain(
    known: int, *, names_threads: bool = False
) -> tuple[int, int, int, tuple[tuple[str, int], ...]]:
    """Return (bytes of the ruleset attribute, handled rights, scopes, rights per path) under Landlock version `known`."""
    handled, given = rules(known, names_threads=names_threads)
    size = 0 if not known else (8 if known < 4 else 16 if known < SCOPES_FROM else 24)
    return size, handled, SCOPES if known >= SCOPES_FROM else 0, given


def command(
    variables_at: int, processes: int, known: int, *, names_threads: bool = False
) -> Sequence[str]:
    """Words before the command. Variables come from descriptor `variables_at`; 0 processes: no limit."""
    size, handled, scoped, given = domain(known, names_threads=names_threads)
    numbers = (variables_at, processes, size, handled, scoped, PRLIMIT[platform.machine()])
    listed = ":".join(f"{path}={rights}" for path, rights in given)
    return (perl(), "-e", CONFINE, *map(str, numbers), listed)


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
    "fanotify_mark": (301, 263),
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
    # A watch on a read-only bind mount reports the use of that file by the host and by other sandboxes.
    "inotify_init": (253, -1),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
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
    """Allow only NETLINK_ROUTE of netlink; the family of `socket` is loaded.

    It lists interfaces and routes of the sandbox's own network namespace (getifaddrs, NCCL, gloo). A change needs
    CAP_NET_ADMIN there, which no sandbox has.
    """
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


def program(machine: str = "") -> bytes:
    """Filter in the kernel's format; `LookupError` for an unknown machine."""
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
        *_interfaces(),
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
