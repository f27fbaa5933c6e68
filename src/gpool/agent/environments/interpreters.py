"""Python interpreters of this machine by minor version, and the files of an environment. Installs none, runs nothing."""

from __future__ import annotations

import ctypes
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gpool.agent.runtime.bubblewrap.layout import HOME
from gpool.agent.runtime.work_directory import WorkDirectory

OLDEST = (3, 11)  # oldest Python the runner supports
PROBE_S = 20
_PROBE = """
import json, sys, sysconfig
json.dump([sys.implementation.name, sys.version_info[:3], sys.base_prefix, sys.prefix,
           bool(sysconfig.get_config_var("Py_ENABLE_SHARED"))], sys.stdout)
"""
_PROGRAM = re.compile(r"python3\.(\d+)")


@dataclass(frozen=True, slots=True)
class Interpreter:
    minor: str  # "3.12"
    version: tuple[int, int, int]
    program: str  # inside
    binds: Mapping[str, Path] = field(default_factory=dict)  # inside -> host; empty for our own

    @property
    def home(self) -> str:
        return str(Path(self.program).parent)


def own_interpreter() -> Interpreter:
    version = (sys.version_info.major, sys.version_info.minor, sys.version_info.micro)
    base = Path(sys.base_prefix).resolve()
    inside = str(base) if base.is_relative_to("/usr") else f"{HOME}/python"
    minor = f"{version[0]}.{version[1]}"
    return Interpreter(minor, version, f"{inside}/bin/python{minor}")


def candidates(environ: Mapping[str, str], home: Path) -> Iterator[Path]:
    managed = Path(
        environ.get("UV_PYTHON_INSTALL_DIR") or home / ".local" / "share" / "uv" / "python"
    )
    pyenv = Path(environ.get("PYENV_ROOT") or home / ".pyenv") / "versions"
    folders = [Path("/usr/bin"), Path("/usr/local/bin")]
    for root in (managed, pyenv):
        folders += [root / name / "bin" for name in _listing(root)]
    for folder in folders:
        for name in _listing(folder):
            found = _PROGRAM.fullmatch(name)
            if found and int(found[1]) >= OLDEST[1]:
                yield folder / name


def find_interpreters(programs: Iterable[Path]) -> dict[str, Interpreter]:
    """By minor; our own first, then the latest. Runs each once (blocking)."""
    own = own_interpreter()
    found: dict[str, Interpreter] = {}
    for program in programs:
        probed = _probed(program)
        if probed is not None and probed.version[:2] >= OLDEST:
            known = found.get(probed.minor)
            if known is None or probed.version > known.version:
                found[probed.minor] = probed
    found[own.minor] = own
    return found


def _listing(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _probed(program: Path) -> Interpreter | None:
    """None if it does not run, is not CPython or is a virtual environment."""
    try:
        told = subprocess.run(
            [program, "-I", "-S", "-c", _PROBE],
            env={"LANG": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_S,
            check=True,
        ).stdout
        name, version, base, prefix, shared = json.loads(told)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    if name != "cpython" or base != prefix:
        return None
    minor = f"{version[0]}.{version[1]}"
    root = Path(base).resolve()
    number = (version[0], version[1], version[2])
    if root.is_relative_to("/usr"):
        return Interpreter(minor, number, f"{root}/bin/python{minor}")
    # a shared libpython is found only at the path it was built for
    inside = str(root) if shared else f"{HOME}/python{minor}"
    return Interpreter(minor, number, f"{inside}/bin/python{minor}", {inside: root})


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
