"""A newcomer's first minutes: clone, `make up`, first result; an empty home, a new .venv, the machine's package cache.

python -m bench.newcomer [--json FILE] [--quick]

The commands are those of README. Bars: at most 180 s from the clone to the first result, at most 6 commands. `--quick` is
the same run: nothing in it can be made smaller.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.tools.processes import PATIENCE_S, eventually, free_port

ROOT = Path(__file__).resolve().parents[2]
MOST_S, MOST_COMMANDS = 180.0, 6
KEPT = ("PIP_", "UV_", "SSL_", "REQUESTS_")
"""Variables that say where packages come from."""


def environment(home: Path) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if name.startswith(KEPT)}
    path = os.pathsep.join(
        place for place in os.environ["PATH"].split(os.pathsep) if ".venv" not in place
    )
    cache = os.environ.get("PIP_CACHE_DIR") or str(Path.home() / ".cache" / "pip")
    return {**found, "HOME": str(home), "PATH": path, "PIP_CACHE_DIR": cache, "LANG": "C.UTF-8"}


def measured(folder: Path) -> tuple[list[tuple[str, float]], str]:
    """Commands with the seconds each took, and the output of the last one."""
    home, clone, log = folder / "home", folder / "gpool", folder / "up.log"
    home.mkdir()
    env, steps = environment(home), []

    began = time.monotonic()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], env=env, check=True)
    steps.append(("git clone … && cd gpool", time.monotonic() - began))

    began = time.monotonic()
    argv = ["make", "--no-print-directory", "up", f"ARGS=--port {free_port()}"]
    with log.open("wb") as out:
        up = subprocess.Popen(
            argv, cwd=clone, env=env, stdout=out, stderr=out, start_new_session=True
        )
    try:

        def is_up() -> bool:
            if up.poll() is not None:
                raise RuntimeError(f"make up ended:\n{log.read_text(errors='replace')}")
            return b"gpool is up" in log.read_bytes()

        eventually("make up starts a pool", is_up, 2 * PATIENCE_S)
        steps.append(("make up", time.monotonic() - began))

        began = time.monotonic()
        first = [str(clone / ".venv/bin/gpool"), "run", "--", "python", "-c", "print(6*7)"]
        done = subprocess.run(first, cwd=clone, env=env, capture_output=True, text=True, check=True)
        steps.append(("gpool run -- python -c 'print(6*7)'", time.monotonic() - began))
        return steps, done.stdout.strip()
    finally:
        os.killpg(up.pid, signal.SIGINT)
        up.wait(PATIENCE_S)


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--json", type=Path)
    asked.add_argument("--quick", action="store_true")
    options = asked.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gpool-newcomer-"))
    try:
        steps, printed = measured(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    total = sum(seconds for _, seconds in steps)
    print("| command | seconds |\n|---|---|")
    for command, seconds in steps:
        print(f"| `{command}` | {seconds:.1f} |")
    print(f"| {len(steps)} commands, the last one printed {printed} | {total:.1f} |")
    if options.json:
        figures = {"seconds": total, "commands": len(steps), "steps": dict(steps)}
        options.json.write_text(json.dumps(figures, indent=1))
    return 0 if total <= MOST_S and len(steps) <= MOST_COMMANDS and printed == "42" else 1


if __name__ == "__main__":
    sys.exit(main())
