"""Runs Python as a user without any right, also where the interpreter lies in a closed home. For root's tests alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

UID = 54_321
REACH = """
set -e
base=$1 home=$2 uid=$3; shift 3
if [ "$home" != / ]; then  # in our own mount namespace the home is open and holds the interpreter alone
    held=$(mktemp -d)
    mount --bind "$base" "$held"
    mount -t tmpfs -o mode=755 home "$home"
    mkdir -p "$base"
    mount --move "$held" "$base"
    rmdir "$held"
fi
exec setpriv --reuid "$uid" --regid "$uid" --clear-groups --bounding-set -all --inh-caps -all \\
    prlimit --nproc=4096 -- "$@"
"""


def closed_above(path: Path) -> Path:
    """The first folder above `path` that strangers may not enter; the root when there is none."""
    for folder in reversed(path.parents):
        if not folder.stat().st_mode & 0o001:
            return folder
    return Path("/")


def run(
    code: str, *words: str, env: Mapping[str, str] | None = None, timeout_s: float = 600
) -> str:
    """What the code prints; `sys.argv[1]` is an empty folder of that user's, gone afterwards. `env` is added."""
    with tempfile.TemporaryDirectory(prefix="gpool-") as folder:
        shutil.chown(folder, UID, UID)
        return _run(code, Path(folder), words, env or {}, timeout_s)


def _run(
    code: str, own: Path, words: Sequence[str], env: Mapping[str, str], timeout_s: float
) -> str:
    base = Path(sys.base_prefix).resolve()
    script = ["sh", "-c", REACH, "reach", str(base), str(closed_above(base)), str(UID)]
    done = subprocess.run(
        ["unshare", "--mount", *script, sys.executable, "-c", code, str(own), *words],
        env={
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(own),
            "PYTHONPATH": os.pathsep.join(sys.path),
            **env,
        },
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"it ended with {done.returncode}: {done.stderr[-4000:]}")
    return done.stdout
