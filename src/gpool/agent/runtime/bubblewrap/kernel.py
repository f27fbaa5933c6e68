"""System calls for sandboxes that Python lacks: mounts, namespaces, capabilities, Landlock and the system call filter.

Standard library only: the launcher, a process of its own, imports it. Raises `OSError`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:  # without importing `typing`: each sandbox is a fork of this memory
    from collections.abc import Sequence

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 15, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
AMBIENT_CLEAR_ALL = 4
FILTER_MODE = 2
CAPABILITY_VERSION_3 = 0x20080522
CAPABILITY_SETS_BYTES = 24
MOST_CAPABILITIES = 64

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 1 << 17, 1 << 25, 1 << 26, 1 << 27
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 1 << 28, 1 << 29, 1 << 30

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_SLAVE = 16384, 1 << 19
SEALED = MS_RDONLY | MS_NOSUID | MS_NODEV
MNT_DETACH = 2
EMPTY = "empty"  # the second layer of overlays

OPEN_TREE, MOVE_MOUNT = 428, 429
OPEN_TREE_CLONE, OPEN_TREE_CLOEXEC, MOVE_FROM_DESCRIPTOR = 1, os.O_CLOEXEC, 4
AT_FDCWD = -100
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
LANDLOCK_BELOW_PATH = 1

SIOCSIFFLAGS = 0x8914
IFF_UP = 1

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


class FilterProgram(ctypes.Structure):
    """`struct sock_fprog`: number of 8-byte instructions, and their address."""

    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _call(what: str, number: int, *arguments: int | bytes) -> int:
    words = [each if isinstance(each, bytes) else ctypes.c_long(each) for each in arguments]
    return checked(libc.syscall(ctypes.c_long(number), *words), what)


def prctl(what: str, option: int, *arguments: int) -> None:
    words = [ctypes.c_ulong(each) for each in (*arguments, 0, 0, 0, 0)[:4]]
    checked(libc.prctl(option, *words), what)


def unshare(flags: int) -> None:
    checked(libc.unshare(flags), "unshare")


def setns(namespace: int, kind: int = 0) -> None:
    checked(libc.setns(namespace, kind), "setns")


# ---- mounts


def mount(source: str, target: str, kind: bytes | None, flags: int, data: bytes = b"") -> None:
    arguments = (source.encode(), target.encode(), kind, ctypes.c_ulong(flags), data)
    checked(libc.mount(*arguments), f"mount {target}")


def unmount(target: str) -> None:
    checked(libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def overlay(source: str, target: str, place: str) -> None:
    """Mount a read-only view of `source`: its inodes are the mount's own, so that neither locks nor watches of a sandbox
    reach the host's files, and the mount table names no path of the host.
    """
    layers = f"lowerdir={os.path.join(place, EMPTY)}:{source}"  # the kernel demands two
    mount("overlay", target, b"overlay", SEALED, layers.encode())


def detached_bind(path: str) -> int:
    """Return the descriptor of a bind mount of `path` that is in no namespace yet."""
    flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC
    return _call(f"open_tree {path}", OPEN_TREE, AT_FDCWD, os.fsencode(path) + b"\0", flags)


def attach(tree: int, target: str) -> None:
    """Mount what `detached_bind` returned, without set-user-ID programs and device nodes."""
    at = os.fsencode(target) + b"\0"
    _call(f"move_mount {target}", MOVE_MOUNT, tree, b"\0", AT_FDCWD, at, MOVE_FROM_DESCRIPTOR)
    mount("none", target, None, MS_BIND | MS_REMOUNT | MS_NOSUID | MS_NODEV)


def pivot_root(root: str) -> None:
    """Make the mount point `root` the root and detach everything else from this mount namespace."""
    os.chdir(root)
    _call("pivot_root", PIVOT_ROOT[os.uname().machine], b".\0", b".\0")
    unmount(".")
    os.chdir("/")


# ---- confinement of the calling process


def raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", IFF_UP))


def drop_capabilities() -> None:
    """Drop all capabilities for good: permitted, inheritable, ambient, and the bounding set."""
    for number in range(MOST_CAPABILITIES):
        if libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0) != 0:
            if ctypes.get_errno() != errno.EINVAL or number == 0:
                checked(-1, f"drop capability {number}")
            break  # past the kernel's last one
    prctl("drop ambient capabilities", PR_CAP_AMBIENT, AMBIENT_CLEAR_ALL)
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    checked(libc.capset(header, bytes(CAPABILITY_SETS_BYTES)), "capset")


def filter_system_calls(program: bytes) -> None:
    """Apply a filter in the kernel's format; `PR_SET_NO_NEW_PRIVS` must be set."""
    given = FilterProgram(len(program) // 8, program)
    result = libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(FILTER_MODE), ctypes.byref(given), 0, 0)
    checked(result, "seccomp")


def enter_landlock_domain(
    size: int, handled: int, scoped: int, rules: Sequence[tuple[str, int]]
) -> None:
    """Handle the rights of `handled` and `scoped`; grant each existing path its rights. `size`: bytes of the ruleset attribute
    that this kernel knows.
    """
    attribute = struct.pack("QQQ", handled, 0, scoped)[:size]
    ruleset = _call("landlock", LANDLOCK_CREATE, attribute, size, 0)
    for path, rights in rules:
        try:
            at = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        rule = struct.pack("=Qi", rights, at)
        _call(f"landlock {path}", LANDLOCK_ADD, ruleset, LANDLOCK_BELOW_PATH, rule, 0)
        os.close(at)
    _call("landlock", LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


def execvpe(program: Sequence[bytes], variables: Sequence[bytes]) -> int:
    """As a shell: search the PATH of `variables`, start scripts without a first line by `sh`. Return the error number."""
    libc.clearenv()
    for each in variables:
        name, _, value = each.partition(b"=")
        if name == b"PATH":
            os.putenv(name, value)
    words = (ctypes.c_char_p * (len(program) + 1))(*program, None)
    texts = (ctypes.c_char_p * (len(variables) + 1))(*variables, None)
    libc.execvpe(program[0], words, texts)
    return ctypes.get_errno()
