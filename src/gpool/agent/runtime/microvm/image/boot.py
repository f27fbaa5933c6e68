"""The guest's first steps: a program of system calls in a row, and the archive the kernel finds it in. Pure.

The kernel starts `/init` from the archive. Ours is no interpreter and no shell, so that nothing needs a compiler and
nothing is unpacked that is used once: a table of system calls (load these modules, mount these disks, become Python)
and the ten instructions that walk it. A step that fails is not looked at; the last one then has nothing to become, the
kernel says so on the console, and the machine ends.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SYS_OPEN, SYS_CLOSE, SYS_EXECVE, SYS_EXIT = 2, 3, 59, 60
SYS_CHDIR, SYS_CHROOT, SYS_MOUNT, SYS_FINIT_MODULE = 80, 161, 165, 313
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_MOVE = 1, 2, 4, 4096, 8192
FIRST_FREE = 3  # the kernel opens the console as 0, 1 and 2
ADDRESS = 0x400000
ARGUMENTS = 5
DIRECTORY, PROGRAM, PLAIN, CONSOLE = 0o040755, 0o100755, 0o100644, 0o020600
# rbx walks the table: rax, rdi, rsi, rdx, r10, r8, and on. The last entry does not come back.
WALK = bytes.fromhex(
    "488b03 488b7b08 488b7310 488b5318 4c8b5320 4c8b4328 4d31c9 0f05 4883c330 ebde"
)
POINT_AT_TABLE = b"\x48\xbb"

Word = int | str | tuple[str, ...]
"""A number, a text, or a list of texts ended by nothing; the last two are passed by address."""


@dataclass(frozen=True, slots=True)
class BootStep:
    """One system call."""

    number: int
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class BootPlan:
    """Where the second disk and the third lie in the first, and what runs then."""

    modules: tuple[str, ...]  # paths in the archive, in the order to load them
    home: str
    own: str
    shown: tuple[tuple[str, str], ...]  # of the third: (folder on it, where it is seen too)
    argv: tuple[str, ...]
    env: tuple[str, ...] = field(default=())


def steps(becomes: BootPlan) -> list[BootStep]:
    """From an empty kernel to the guest's program, its disks in place."""
    row = [BootStep(SYS_MOUNT, ("dev", "/dev", "devtmpfs", MS_NOSUID, 0))]
    for path in becomes.modules:
        row += [
            BootStep(SYS_OPEN, (path, 0)),
            BootStep(SYS_FINIT_MODULE, (FIRST_FREE, "", 0)),
            BootStep(SYS_CLOSE, (FIRST_FREE,)),
        ]
    flags = MS_RDONLY | MS_NOSUID | MS_NODEV
    return [
        *row,
        BootStep(SYS_MOUNT, ("/dev/vda", "/system", "squashfs", flags, 0)),
        BootStep(SYS_MOUNT, ("/dev/vdb", f"/system{becomes.home}", "squashfs", flags, 0)),
        BootStep(SYS_MOUNT, ("/dev/vdc", f"/system{becomes.own}", "squashfs", flags, 0)),
        *(
            BootStep(
                SYS_MOUNT, (f"/system{becomes.own}{folder}", f"/system{inside}", 0, MS_BIND, 0)
            )
            for folder, inside in becomes.shown
        ),
        BootStep(SYS_MOUNT, ("/dev", "/system/dev", 0, MS_MOVE, 0)),
        BootStep(SYS_CHDIR, ("/system",)),
        BootStep(SYS_MOUNT, (".", "/", 0, MS_MOVE, 0)),
        BootStep(SYS_CHROOT, (".",)),
        BootStep(SYS_EXECVE, (becomes.argv[0], becomes.argv, becomes.env)),
        BootStep(SYS_EXIT, (1,)),
    ]


def program(row: Sequence[BootStep]) -> bytes:
    """A static x86-64 program that makes these calls and nothing else."""
    code_at = ADDRESS + 64 + 56
    table_at = code_at + len(POINT_AT_TABLE) + 8 + len(WALK)
    data_at = table_at + len(row) * (ARGUMENTS + 1) * 8
    data = bytearray()

    def lay(text: str) -> int:
        at = data_at + len(data)
        data.extend(text.encode() + b"\0")
        return at

    def value(word: Word) -> int:
        if isinstance(word, int):
            return word
        if isinstance(word, str):
            return lay(word)
        addresses = [lay(text) for text in word]
        data.extend(bytes(-len(data) % 8))
        at = data_at + len(data)
        data.extend(struct.pack(f"<{len(addresses) + 1}Q", *addresses, 0))
        return at

    table = b""
    for step in row:
        values = [step.number, *map(value, step.words)]
        values += [0] * (ARGUMENTS + 1 - len(values))
        table += struct.pack(f"<{ARGUMENTS + 1}Q", *values)
    body = POINT_AT_TABLE + struct.pack("<Q", table_at) + WALK + table + data
    size = 64 + 56 + len(body)
    head = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01",
        2,  # a program
        62,  # x86-64
        1,
        code_at,
        64,
        0,
        0,
        64,
        56,
        1,
        0,
        0,
        0,
    )
    segment = struct.pack("<IIQQQQQQ", 1, 7, 0, ADDRESS, ADDRESS, size, size, 0x1000)
    return head + segment + body


def _entry(number: int, name: str, mode: int, data: bytes, device: tuple[int, int]) -> bytes:
    words = (number, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08X" % word for word in words) + name.encode() + b"\0"
    head += bytes(-len(head) % 4)
    return head + data + bytes(-len(data) % 4)


def archive(init: bytes, modules: Mapping[str, bytes]) -> bytes:
    """The first file system, in the kernel's own archive format."""
    nowhere = (0, 0)
    entries: list[tuple[str, int, bytes, tuple[int, int]]] = [
        *((name, DIRECTORY, b"", nowhere) for name in ("dev", "system", "modules")),
        ("dev/console", CONSOLE, b"", (5, 1)),
        ("init", PROGRAM, init, nowhere),
        *((path.lstrip("/"), PLAIN, data, nowhere) for path, data in modules.items()),
        ("TRAILER!!!", 0, b"", nowhere),
    ]
    whole = b"".join(_entry(n, *entry) for n, entry in enumerate(entries, 1))
    return whole + bytes(-len(whole) % 512)
