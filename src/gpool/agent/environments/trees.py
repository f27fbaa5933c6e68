"""Files of an environment. Follows no link and runs nothing in it."""

from __future__ import annotations

import ctypes
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpool.agent.environments.interpreters import Interpreter
from gpool.agent.runtime.work_directory import WorkDirectory

TREE, MANIFEST = "env", "manifest.json"
MOST_FILES = 1_000_000
_DISTRIBUTION = re.compile(r"([A-Za-z0-9._]{1,100})-([A-Za-z0-9._+!]{1,100})\.dist-info")


class Manifest(msgspec.Struct, frozen=True):
    name: str
    python: str  # minor
    program: str  # its interpreter, inside
    packages: tuple[str, ...]  # as asked for
    chosen: tuple[str, ...]  # "numpy==2.3.1"
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    size_bytes: int
    files: int  # counting stops just past the limit
    chosen: tuple[str, ...]


def measured(tree: Path) -> Measured:
    size = files = 0
    chosen = []
    seen: set[int] = set()
    waiting = [tree]
    while waiting:
        folder = waiting.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                facts = entry.stat(follow_symlinks=False)
                files += 1
                if facts.st_ino not in seen:
                    size += facts.st_blocks * 512
                if facts.st_nlink > 1:
                    seen.add(facts.st_ino)
                if stat.S_ISDIR(facts.st_mode):
                    found = _DISTRIBUTION.fullmatch(entry.name)
                    if found and folder.name == "site-packages":
                        chosen.append(f"{found[1].replace('_', '-').lower()}=={found[2]}")
                    waiting.append(Path(entry.path))
        if files > MOST_FILES:
            break
    return Measured(size, files, tuple(sorted(chosen)))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))


def read_manifest(folder: Path) -> Manifest | None:
    """None if the manifest, and so the environment, is incomplete."""
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError):
        return None


def flush(folder: Path) -> None:
    """Flush to disk: a name must never stand for half an environment."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            raise OSError(ctypes.get_errno(), "cannot flush the disk", str(folder))
    finally:
        os.close(descriptor)


def lay_bare(tree: Path, interpreter: Interpreter) -> None:
    """Without packages, for another Python than the agent's."""
    name = f"python{interpreter.minor}"
    (tree / "lib" / name / "site-packages").mkdir(parents=True)
    (tree / "bin").mkdir()
    for link in ("python", "python3", name):
        (tree / "bin" / link).symlink_to(interpreter.program)
    version = ".".join(str(part) for part in interpreter.version)
    (tree / "pyvenv.cfg").write_text(
        f"home = {interpreter.home}\ninclude-system-site-packages = false\nversion = {version}\n"
    )
    for folder, _, _ in os.walk(tree):
        os.chmod(folder, 0o755)
    os.chmod(tree / "pyvenv.cfg", 0o444)


def remove(folder: Path) -> None:
    WorkDirectory(folder, os.geteuid()).remove()
