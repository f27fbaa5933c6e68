"""Python interpreters of this machine by minor version, and their paths in a sandbox. Installs none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpool.agent.runtime.bubblewrap.layout import HOME

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
