"""Read-only folders of the host in a sandbox that bwrap mounts: overlays where possible, else bind mounts."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ReadOnlyMounts:
    """bwrap's options for read-only folders of the host: overlays, so that locks on their files are the sandbox's own; bind
    mounts if `empty`, the second layer that overlays need, is "" or other mounts lie below the folder.
    """

    empty: str = ""
    mounted: frozenset[str] = frozenset()

    def words(self, source: str, inside: str) -> list[str]:
        has_mounts = any(point.startswith(f"{source}/") for point in self.mounted)
        if not self.empty or has_mounts or not os.path.isdir(source):
            return ["--ro-bind", source, inside]
        return ["--overlay-src", self.empty, "--overlay-src", source, "--ro-overlay", inside]


BIND_MOUNTS = ReadOnlyMounts()


def overlays_of(bwrap: str, empty: Path) -> ReadOnlyMounts:
    """Overlays if this bwrap (0.11 or newer, not setuid) and this kernel (5.11 or newer) can mount them, else bind mounts."""
    empty.mkdir(mode=0o755, exist_ok=True)
    table = Path("/proc/self/mountinfo").read_text()
    mounted = frozenset(line.split()[4] for line in table.splitlines())
    found = ReadOnlyMounts(str(empty), mounted)
    probe = [bwrap, "--ro-bind", "/", "/", *ReadOnlyMounts(str(empty)).words("/usr", "/usr")]
    done = subprocess.run([*probe, "/usr/bin/true"], capture_output=True, check=False, env={})
    return found if done.returncode == 0 else BIND_MOUNTS
