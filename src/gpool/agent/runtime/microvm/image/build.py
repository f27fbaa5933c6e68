"""Kernel, archive and disks of guests on this host, built once and kept by content."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import cloudpickle  # type: ignore[import-untyped]

from gpool.agent.runtime.bubblewrap import layout
from gpool.agent.runtime.microvm.image import boot, system
from gpool.agent.runtime.microvm.image.disks import DiskContents, DiskStore, tree
from gpool.agent.runtime.microvm.image.kernel import Kernel, read_module, vmlinux
from gpool.agent.runtime.protocol import ENVIRONMENT_AT, PreparedEnvironment, SandboxFailed

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
        plan = boot.BootPlan(
            tuple(modules),
            layout.HOME,
            OWN,
            tuple((f"/{name}", f"{layout.HOME}/{name}") for name in OWN_PARTS),
            (self._layout.python, "-I", "-S", "-B", GUEST),
            tuple(env),
        )
        data = boot.archive(boot.program(boot.steps(plan)), modules)
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
        folders = ["/own", *(f"/{name}" for name in OWN_PARTS)]
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
