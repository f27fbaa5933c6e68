"""A guest's disks: read-only ones built once from host files, and an empty writable one.

A disk is a mapping inside path -> host path, named by its fingerprint (names, sizes, times, modes, links), so it is
rebuilt only after a change. No file system is mounted on the host.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpool.agent.runtime.protocol import SandboxFailed

LEAST_WORK_BYTES = 16 << 20
KEPT = 3  # of each kind; the least recently used are removed
BUILD_WITHIN_S = 1800
FOLDER = 0o755


@dataclass(frozen=True, slots=True)
class DiskContents:
    """Directories are made as needed; `folders` exist even if empty."""

    files: Mapping[str, str]  # inside -> host; plain files and links, beneath "/" of the disk
    folders: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()  # inside -> target
    written: str = "\0"
    """Prefix of host files that the agent just wrote: their content counts, not their time."""


def tree(inside: str, host: Path) -> Iterator[tuple[str, str]]:
    for folder, below, names in os.walk(host):
        relative = os.path.relpath(folder, host)
        prefix = inside if relative == "." else f"{inside}/{relative}"
        linked = [name for name in below if os.path.islink(f"{folder}/{name}")]
        for name in (*names, *linked):
            yield f"{prefix}/{name}", f"{folder}/{name}"


def fingerprint(plan: DiskContents) -> str:
    digest = hashlib.sha256()
    for inside, host in sorted(plan.files.items()):
        try:
            facts = os.lstat(host)
        except FileNotFoundError:
            continue
        link = os.readlink(host) if stat.S_ISLNK(facts.st_mode) else ""
        when: object = facts.st_mtime_ns // 10**9
        if host.startswith(plan.written):
            when = "" if link else hashlib.sha256(Path(host).read_bytes()).hexdigest()
        entry = (inside, facts.st_size, when, facts.st_mode, link)
        digest.update(repr(entry).encode("utf-8", "surrogateescape"))
    digest.update(repr((sorted(plan.folders), sorted(plan.links))).encode())
    return digest.hexdigest()[:32]


def _folders(paths: Iterable[str]) -> list[str]:
    found: set[str] = set()
    for path in paths:
        folder = path.rpartition("/")[0]
        while folder and folder not in found:
            found.add(folder)
            folder = folder.rpartition("/")[0]
    return sorted(found)


def write_tar(plan: DiskContents, out: tarfile.TarFile) -> None:
    inside = [*plan.files, *(name for name, _ in plan.links), *(f"{f}/." for f in plan.folders)]
    for folder in _folders(inside):
        entry = tarfile.TarInfo(folder.lstrip("/"))
        entry.type, entry.mode = tarfile.DIRTYPE, FOLDER
        out.addfile(entry)
    for name, target in plan.links:
        entry = tarfile.TarInfo(name.lstrip("/"))
        entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, target, 0o777
        out.addfile(entry)
    for name, host in sorted(plan.files.items()):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            facts = os.lstat(host)
            entry = tarfile.TarInfo(name.lstrip("/"))
            entry.mtime = 0 if host.startswith(plan.written) else int(facts.st_mtime)
            entry.mode = facts.st_mode & 0o755
            if stat.S_ISLNK(facts.st_mode):
                entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(host)
                out.addfile(entry)
            elif stat.S_ISREG(facts.st_mode):
                with open(host, "rb") as data:
                    entry.size = os.fstat(data.fileno()).st_size
                    out.addfile(entry, data)


class DiskStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        folder.chmod(0o711)

    def path(self, kind: str, plan: DiskContents) -> Path:
        """Builds a missing disk, which takes seconds: call it in a thread."""
        made = self.folder / f"{kind}-{fingerprint(plan)}.squashfs"
        if made.exists():
            os.utime(made)
            return made
        with self._building():  # another process may build the same one
            if not made.exists():
                building = self._new()
                try:
                    _squash(plan, building)
                    building.chmod(0o644)
                    building.rename(made)
                finally:
                    building.unlink(missing_ok=True)
                self._forget(kind, made)
        return made

    @contextlib.contextmanager
    def _building(self) -> Iterator[None]:
        held = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield
        finally:
            os.close(held)

    def _new(self) -> Path:
        return self.folder / f"building-{os.getpid()}-{secrets.token_hex(8)}"

    def keep(self, name: str, make: bytes | None) -> Path | None:
        """Keep a small file under a name derived from its content; `make` None: only look it up."""
        path = self.folder / name
        if make is not None and not path.exists():
            building = self._new()
            building.write_bytes(make)
            building.chmod(0o644)
            building.rename(path)
        return path if path.exists() else None

    def _forget(self, kind: str, new: Path) -> None:
        others = [path for path in self.folder.glob(f"{kind}-*.squashfs") if path != new]
        others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for path in others[KEPT - 1 :]:
            path.unlink(missing_ok=True)

    def sweep(self) -> None:
        for path in self.folder.glob("building-*"):
            if not os.path.exists(f"/proc/{path.name.split('-')[1]}"):
                path.unlink(missing_ok=True)


def _squash(plan: DiskContents, target: Path) -> None:
    argv = [program("sqfstar"), "-quiet", "-no-progress", "-comp", "lz4", "-all-root"]
    argv += ["-root-mode", "755", "-no-xattrs", "-processors", "2", str(target)]
    env = {"PATH": "/usr/bin:/bin"}
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env
    ) as child:
        assert child.stdin is not None
        assert child.stderr is not None
        try:
            with tarfile.open(fileobj=child.stdin, mode="w|", format=tarfile.PAX_FORMAT) as out:
                write_tar(plan, out)
            child.stdin.close()
        except BrokenPipeError:
            pass  # sqfstar reports why
        reason = child.stderr.read().decode("utf-8", "replace").strip()
        if child.wait(BUILD_WITHIN_S) != 0:
            raise SandboxFailed(f"cannot build a guest's disk: {reason[-300:]}")


def make_work_disk(path: Path, size_bytes: int) -> None:
    """Make an empty ext4 file system as a sparse file; never mounted on the host."""
    size = max(size_bytes, LEAST_WORK_BYTES) // 4096 * 4096
    made = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(made, size)
    finally:
        os.close(made)
    argv = [program("mke2fs"), "-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-I", "256"]
    argv += [
        "-O",
        "^has_journal,^resize_inode,^huge_file",
        "-E",
        "lazy_itable_init=1,nodiscard",
        str(path),
    ]
    ran = subprocess.run(
        argv, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}, check=False
    )
    if ran.returncode != 0:
        raise SandboxFailed(f"cannot make a work disk: {ran.stderr.strip()[-300:]}")


def program(name: str) -> str:
    found = shutil.which(name, path="/usr/sbin:/sbin:/usr/bin:/bin:/usr/local/bin")
    if found is None:
        package = {"sqfstar": "squashfs-tools", "mke2fs": "e2fsprogs"}.get(name, name)
        raise SandboxFailed(f"there is no {name} here: apt-get install {package}")
    return found
