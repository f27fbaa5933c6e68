"""Kernel, archive and disks of guests on this host, built once and kept by content.

`/init` needs no compiler, interpreter or shell: it is a table of system calls (load modules, mount disks, exec Python)
and ten instructions that execute it. Failures are ignored; after one, the final exec fails, the kernel reports it on
the console, and the machine ends.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import cloudpickle  # type: ignore[import-untyped]

from gpool.agent.runtime.bubblewrap import layout
from gpool.agent.runtime.microvm.image import system
from gpool.agent.runtime.microvm.image.disks import DiskContents, DiskStore, tree
from gpool.agent.runtime.microvm.image.kernel import Kernel, read_module, vmlinux
from gpool.agent.runtime.protocol import ENVIRONMENT_AT, PreparedEnvironment, SandboxFailed

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


OWN = f"{layout.HOME}/own"
FOLDERS = ("/proc", "/sys", "/dev", "/run", "/tmp", "/work", "/values", layout.HOME)
OWN_PARTS = ("source", "runner")
GUEST = f"{layout.HOME}/source/gpool/agent/runtime/microvm/guest.py"
READ_TSC = bytes.fromhex("0f31 48c1e220 4809d0 c3")
TSC_OVER_S = 0.03


@dataclass(frozen=True, slots=True)
class GuestImage:
    kernel: Path
    archive: Path
    system: Path
    home: Path
    own: Path

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.kernel, self.archive, self.system, self.home, self.own)


class GuestImageBuilder:
    """Slow the first time: call it in a thread."""

    def __init__(self, disks: DiskStore, found: layout.Layout, kernel: Kernel) -> None:
        self._disks = disks
        self._layout = found
        self._kernel = kernel
        self._sources = {bind.name: bind.source for bind in found.binds}
        self._written = str(self._sources["etc"].parent) + "/"
        self._made: dict[tuple[str, bool], GuestImage] = {}

    def image(
        self, environment: PreparedEnvironment | None, *, unpacked_kernel: bool
    ) -> GuestImage:
        """Checked once: neither the agent's files nor a named environment change while it runs."""
        key = (environment.name if environment is not None else "", unpacked_kernel)
        made = self._made.get(key)
        if made is None or not all(path.exists() for path in made.paths):
            made = self._made[key] = GuestImage(
                self.kernel_file(unpacked=unpacked_kernel),
                self._archive(),
                self._disks.path("system", self._system_plan()),
                self._disks.path("home", self._home_plan(environment)),
                self._disks.path("own", self._own_plan()),
            )
        return made

    def kernel_file(self, *, unpacked: bool) -> Path:
        name = f"vmlinux-{self._kernel.version}" if unpacked else f"vmlinuz-{self._kernel.version}"
        facts = self._kernel.image.stat()
        name += f"-{facts.st_size}-{facts.st_mtime_ns // 10**9}"
        kept = self._disks.keep(name, None)
        if kept is None:
            packed = self._kernel.image.read_bytes()
            kept = self._disks.keep(name, vmlinux(packed) if unpacked else packed)
        assert kept is not None
        return kept

    def _archive(self) -> Path:
        modules = {f"/modules/{file.name}": read_module(file) for file in self._kernel.modules}
        env = [f"{name}={value}" for name, value in self._layout.variables if name != "PATH"]
        plan = BootPlan(
            tuple(modules),
            layout.HOME,
            OWN,
            tuple((f"/{name}", f"{layout.HOME}/{name}") for name in OWN_PARTS),
            (self._layout.python, "-I", "-S", "-B", GUEST),
            tuple(env),
        )
        data = archive(program(steps(plan)), modules)
        kept = self._disks.keep(f"archive-{hashlib.sha256(data).hexdigest()[:32]}", data)
        assert kept is not None
        return kept

    def _system_plan(self) -> DiskContents:
        base = Path(sys.base_prefix).resolve()
        programs = [
            Path(os.path.realpath(sys.executable)),
            *base.glob("lib/python3.*/lib-dynload/*.so"),
        ]
        files = {path: path for path in (*system.system_files(), *system.linked_with(programs))}
        if base.is_relative_to("/usr"):
            minor = f"python{sys.version_info.major}.{sys.version_info.minor}"
            files[f"{base}/bin/{minor}"] = f"{base}/bin/{minor}"
            files.update(tree(f"{base}/lib/{minor}", base / "lib" / minor))
        files.update(tree("/etc", self._sources["etc"]))
        links = [(path, os.readlink(path)) for path in layout.SYSTEM_LINKS if os.path.islink(path)]
        return DiskContents(files, FOLDERS, tuple(links), written=self._written)

    def _home_plan(self, environment: PreparedEnvironment | None) -> DiskContents:
        files: dict[str, str] = {}
        for name, inside in self._layout.seen:
            ours = name in ("venv", "python") or (
                environment is None and name.startswith("packages")
            )
            if ours:
                files.update(tree(_below(inside), self._sources[name]))
        if environment is not None:
            files.update(tree(_below(ENVIRONMENT_AT), environment.root))
            for inside, host in environment.binds.items():
                files.update(tree(_below(inside), host))
        folders = ["/own", "/drivers", *(f"/{name}" for name in OWN_PARTS)]
        return DiskContents(files, tuple(folders), written=self._written)

    def _own_plan(self) -> DiskContents:
        files: dict[str, str] = {}
        for name, inside in self._layout.seen:
            if name in OWN_PARTS:
                files.update(tree(_below(inside), self._sources[name]))
        package = Path(cloudpickle.__file__).resolve().parent
        files.update(tree("/runner/cloudpickle", package))  # for an environment that has none
        return DiskContents(files)


def _below(inside: str) -> str:
    if not inside.startswith(layout.HOME + "/"):
        raise SandboxFailed(
            f"an environment at {inside} cannot be shown to a guest, only one beneath {layout.HOME}"
        )
    return inside[len(layout.HOME) :]


def clock_word() -> str:
    """Clock rate of an emulated processor, which the guest cannot measure.

    The emulated counter equals the host's, so it is measured here; without executable memory, `cpu MHz` is taken.
    """
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("cpu MHz"):
                return f"tsc_early_khz={int(float(line.partition(':')[2]) * 1000)}"
        return ""
    page.write(READ_TSC)
    read = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    began, first = time.monotonic_ns(), read()
    while time.monotonic_ns() - began < TSC_OVER_S * 10**9:
        os.sched_yield()
    took, ticks = time.monotonic_ns() - began, read() - first
    return f"tsc_early_khz={ticks * 10**6 // took}"
