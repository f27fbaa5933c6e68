"""Append the ratios of this commit to `bench/history.jsonl`: W1 and W2 to Ray, W3 and the sandbox start to bare bwrap.

    python -m bench.history --base DIR [--shared DIR] [--rounds 3] [--file FILE]

`--base` and `--shared` as for `bench.peers`; without Ray beneath `--base`, its ratios are null. The systems take turns in each
round; a ratio is the median over rounds of gpool's figure divided by the other's in the same round. Rates (w1, w3) are better
above 1, times (w2, start) below 1. A line of a tree with uncommitted changes has `-dirty` in its commit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from bench import compare, peers

HERE = Path(__file__).resolve().parent
FILE = HERE.parent / "history.jsonl"
RAY_WORK = {"w1": "tasks_per_s", "w2": "p50_ms"}
Figures = dict[str, float]


def bare_bwrap(scratch: Path) -> Figures:
    """One round of bare bwrap and of the runtime alone."""
    result = scratch / "bare.json"
    argv = [sys.executable, "-m", "bench.bare_bwrap", "--rounds", "1", "--json", str(result)]
    subprocess.run(argv, cwd=HERE.parents[1], check=True, stdout=subprocess.DEVNULL)
    found: Figures = json.loads(result.read_text())
    return found


def one_round(harness: Path, base: Path, scratch: Path, *, with_ray: bool) -> Figures:
    found = bare_bwrap(scratch)
    for work, field in (("w3", "jobs_per_s"), *RAY_WORK.items()):
        for peer in ("gpool", "ray") if with_ray and work in RAY_WORK else ("gpool",):
            rows = peers.measure(harness, base, peer, work)
            values = [float(row[field]) for row in rows if field in row]
            if not values:
                raise RuntimeError(f"{peer} {work} wrote no figures: {rows}")
            found[f"{peer} {work}"] = median(values)
    return found


def line_of(rounds: list[Figures]) -> dict[str, Any]:
    """The line of one commit: ratios within each round, and gpool's own figures, as medians."""
    ratios = defaultdict(list)
    for each in rounds:
        ratios["w3_to_bwrap"].append(each["gpool w3"] / each["bwrap per_second"])
        ratios["start_to_bwrap"].append(each["gpool start_p50_ms"] / each["bwrap start_p50_ms"])
        for work in RAY_WORK:
            if f"ray {work}" in each:
                ratios[f"{work}_to_ray"].append(each[f"gpool {work}"] / each[f"ray {work}"])
    names = ("w1_to_ray", "w2_to_ray", "w3_to_bwrap", "start_to_bwrap")
    own = {"w1_per_s": "gpool w1", "w2_p50_ms": "gpool w2", "w3_per_s": "gpool w3"}
    own |= {"start_p50_ms": "gpool start_p50_ms", "bwrap_per_s": "bwrap per_second"}
    found: dict[str, Any] = {
        name: round(median(ratios[name]), 3) if ratios[name] else None for name in names
    }
    return found | {
        name: round(median(each[key] for each in rounds), 2) for name, key in own.items()
    }


def main() -> int:
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("--base", type=Path, required=True, help="where the peers' venvs are")
    asked.add_argument("--shared", type=Path, default=HERE.parents[2] / "shared" / "bench")
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--file", type=Path, default=FILE)
    options = asked.parse_args()
    if not (options.shared / "bench.py").exists():
        print(f"there is no bench.py in {options.shared}; say where it is with --shared")
        return 2
    base = options.base.resolve()
    with_ray = peers.python_of(base, "ray").exists()
    if not with_ray:
        print(f"no Ray beneath {base}: its ratios will be null", file=sys.stderr)
    harness = peers.lay_out(options.shared, base)
    with tempfile.TemporaryDirectory() as scratch:
        rounds = [
            one_round(harness, base, Path(scratch), with_ray=with_ray)
            for _ in range(options.rounds)
        ]
    head = {
        "commit": compare.commit(HERE.parents[1]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "rounds": options.rounds,
    }
    line = json.dumps(head | line_of(rounds))
    with options.file.open("a") as file:
        file.write(line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
