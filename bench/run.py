"""Runs every benchmark that needs nothing but gpool, one after another, and keeps each one's JSON in bench/results.

python -m bench.run [--full] [NAME ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
NOT_ALONE = {"__init__", "run", "compare", "peers", "gpool_peer"}
"""`peers` needs the other systems and their environments, `compare` a second tree: both are run by hand."""


def names() -> list[str]:
    return sorted(p.stem for p in HERE.glob("*.py") if p.stem not in NOT_ALONE)


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--full", action="store_true", help="full sizes; minutes to hours")
    asked.add_argument("names", nargs="*", default=names(), metavar="NAME")
    options = asked.parse_args()
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    failed = []
    for name in options.names:
        print(f"\n## {name}\n", flush=True)
        argv = [sys.executable, "-m", f"bench.{name}", "--json", str(results / f"{name}.json")]
        done = subprocess.run(
            argv + ([] if options.full else ["--quick"]), cwd=HERE.parent, check=False
        )
        if done.returncode:
            failed.append(name)
    if failed:
        print(f"\nfell short: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
