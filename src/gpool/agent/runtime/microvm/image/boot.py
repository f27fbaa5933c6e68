"""The guest's boot program and the archive that contains it. Pure.

`/init` needs no compiler, interpreter or shell: it is a table of system calls (load modules, mount disks, exec Python)
and ten instructions that execute it. Failures are ignored; after one, the final exec fails, the kernel reports it on
the console, and the machine ends.
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
# rbx points to the entry: rax, rdi, rsi, rdx, r10, r8. The last entry does not return.
WALK = bytes.fromhex(
    "488b03 488b7b08 488b7310 488b5318 4c8b5320 4c8b4328 4d31c9 0f05 4883c330 ebde"
)
POINT_AT_TABLE = b"\x48\xbb"

Word = int | str | tuple[str, ...]
"""A number, a text, or a null-terminated list of texts; the last two are passed by address."""


@dataclass(frozen=True, slots=True)
class BootStep:
    number: int
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class BootPlan:
    modules: tuple[str, ...]  # paths in the archive, in the order to load them
    home: str
    own: str
    shown: tuple[tuple[str, str], ...]  # of the third: (folder on it, second mount point)
    argv: tuple[str, ...]
    env: tuple[str, ...] = field(default=())


def steps(plan: BootPlan) -> list[BootStep]:
    row = [BootStep(SYS_MOUNT, ("dev", "/dev", "devtmpfs", MS_NOSUID, 0))]
    for path in plan.modules:
        row += [
            BootStep(SYS_OPEN, (path, 0)),
            BootStep(SYS_FINIT_MODULE, (FIRST_FREE, "", 0)),
            BootStep(SYS_CLOSE, (FIRST_FREE,)),
        ]
    flags = MS_RDONLY | MS_NOSUID | MS_NODEV
    return [
        *row,
        BootStep(SYS_MOUNT, ("/dev/vda", "/system", "squashfs", flags, 0)),
        BootStep(SYS_MOUNT, ("/dev/vdb", f"/system{plan.home}", "squashfs", flags, 0)),
        BootStep(SYS_MOUNT, ("/dev/vdc", f"/system{plan.own}", "squashfs", flags, 0)),
        *(
            BootStep(SYS_MOUNT, (f"/system{plan.own}{folder}", f"/system{inside}", 0, MS_BIND, 0))
            for folder, inside in plan.shown
        ),
        BootStep(SYS_MOUNT, ("/dev", "/system/dev", 0, MS_MOVE, 0)),
        BootStep(SYS_CHDIR, ("/system",)),
        BootStep(SYS_MOUNT, (".", "/", 0, MS_MOVE, 0)),
        BootStep(SYS_CHROOT, (".",)),
        BootStep(SYS_EXECVE, (plan.argv[0], plan.argv, plan.env)),
        BootStep(SYS_EXIT, (1,)),
    ]


def program(row: Sequence[BootStep]) -> bytes:
    code_at = ADDRESS + 64 + 56
    table_at = code_at + len(POINT_AT_TABLE) + 8 + len(WALK)
    data_at = table_at + len(row) * (ARGUMENTS + 1) * 8
    data = bytearray()

    def place(text: str) -> int:
        at = data_at + len(data)
        data.extend(text.encode() + b"\0")
        return at

    def value(word: Word) -> int:
        if isinstance(word, int):
            return word
        if isinstance(word, str):
            return place(word)
        addresses = [place(text) for text in word]
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
