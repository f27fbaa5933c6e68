"""Detection of container engines, uv, QEMU and a default route. Starts nothing."""

from __future__ import annotations

import os
import platform
import pwd
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx2

ASK_S = 2.0
UP_AND_GATEWAY = 0x3


@dataclass(frozen=True, slots=True)
class ContainerEngine:
    socket: str = ""
    engine: str = ""
    version: str = ""
    refused: str = ""


def docker(sockets: tuple[str, ...] | None = None) -> ContainerEngine:
    found = ContainerEngine()
    for path in sockets if sockets is not None else _sockets():
        if not Path(path).exists():
            continue
        engine = _probe(path)
        if engine.version:
            return engine
        if not found.socket:
            found = engine
    return found


def _sockets() -> tuple[str, ...]:
    named = os.environ.get("DOCKER_HOST", "")
    first = (named.removeprefix("unix://"),) if named.startswith("unix://") else ()
    own = f"/run/user/{os.geteuid()}"
    return (
        *first,
        "/var/run/docker.sock",
        f"{own}/docker.sock",
        f"{own}/podman/podman.sock",
        "/run/podman/podman.sock",
    )


def _probe(path: str) -> ContainerEngine:
    try:
        with socket.socket(socket.AF_UNIX) as test:  # httpx2 leaves a refused socket open
            test.settimeout(ASK_S)
            test.connect(path)
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=path), timeout=ASK_S) as client:
            version = client.get("http://localhost/version").json()
        parts = version.get("Components") or [{}]
        return ContainerEngine(path, str(parts[0].get("Name", "Docker")), str(version["Version"]))
    except (OSError, httpx2.HTTPError, ValueError, LookupError, AttributeError) as error:
        return ContainerEngine(path, refused=f"{type(error).__name__}: {error}")


def find_uv() -> str:
    beside = Path(sys.executable).parent / "uv"
    return str(beside) if beside.exists() else shutil.which("uv") or ""


def find_qemu() -> str:
    return shutil.which(f"qemu-system-{platform.machine()}") or ""


def has_default_route(v4: str, v6: str) -> bool:
    for line in v4.splitlines()[1:]:
        words = line.split()
        if len(words) > 3 and words[1] == "00000000" and int(words[3], 16) & UP_AND_GATEWAY:
            return True
    for line in v6.splitlines():
        words = line.split()
        if len(words) == 10 and words[0] == "0" * 32 and words[1] == "00" and words[9] != "lo":
            return True
    return False


def user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
