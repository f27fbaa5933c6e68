"""gpool beside other task systems: the same workloads, on this machine, in one run, taking turns.

    python -m bench.peers --base DIR [--shared DIR] [--peers ray,dramatiq] [--rounds 3] [--json FILE] --work W1 W2

The harness with its workloads and the other systems' adapters lies outside this repository (`--shared`, by default
`../shared/bench`; its README says how to set up the systems beneath `--base`). It is copied to `BASE/harness` together
with our adapter, `gpool_peer.py`. Nothing in `make test` needs it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Rows = dict[str, dict[str, list[dict[str, Any]]]]
"""By workload, then by peer: every repetition's figures."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a workload, and which way is better."""

    field: str
    text: str
    more_is_better: bool = True

    def best(self, rows: Sequence[dict[str, Any]]) -> float | None:
        values: list[float] = [
            row[self.field] for row in rows if isinstance(row.get(self.field), int | float)
        ]
        if not values:
            return None
        return max(values) if self.more_is_better else min(values)

    def lead(self, ours: float, theirs: float) -> float:
        """How many times better ours is; above 1 we are ahead."""
        over, under = (ours, theirs) if self.more_is_better else (theirs, ours)
        return over / under if under else float("inf")


FIGURES = {
    "w1": (Figure("tasks_per_s", "functions/s"), Figure("cpu_ms_per_task", "CPU ms a task", False)),
    "w2": (Figure("p50_ms", "round trip p50, ms", False), Figure("p99_ms", "p99, ms", False)),
    "w3": (Figure("jobs_per_s", "commands/s"),),
    "w4": (Figure("submit_per_s", "submissions/s"), Figure("drain_per_s", "drained/s")),
    "w5": (Figure("lost", "lost, server killed", False), Figure("twice", "run twice", False)),
    "w5w": (Figure("lost", "lost, worker killed", False), Figure("twice", "run twice", False)),
}


def lay_out(shared: Path, base: Path) -> Path:
    """The harness and our adapter in one directory; the data directories it expects."""
    harness = base / "harness"
    shutil.rmtree(harness, ignore_errors=True)
    (harness / "peers").mkdir(parents=True)
    for source in (*shared.glob("*.py"), *shared.glob("peers/*.py"), HERE / "gpool_peer.py"):
        inside = "peers" if source.parent.name == "peers" or source.parent == HERE else ""
        shutil.copyfile(source, harness / inside / source.name)
    for folder in ("data", "logs", "results"):
        (base / folder).mkdir(exist_ok=True)
    return harness


def python_of(base: Path, peer: str) -> Path:
    name = peer.partition(":")[0]
    if name == "gpool":
        return Path(sys.executable)
    return base / "venv" / {"slurm": "limits"}.get(name, name) / "bin" / "python"


def measure(harness: Path, base: Path, peer: str, work: str) -> list[dict[str, Any]]:
    """One peer, one workload, one repetition, in a process of its own."""
    done = subprocess.run(
        [python_of(base, peer), harness / "bench.py", base, peer, work],
        env={"REPS": "1", "QUIET_WAIT": "60", **os.environ},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for row in rows:
        said = row.get("error") or ", ".join(
            f"{figure.field} {row.get(figure.field)}" for figure in FIGURES[work]
        )
        print(f"{peer} {work}: {said}", file=sys.stderr, flush=True)
    return rows


def table(rows: Rows, peers: Sequence[str]) -> str:
    """Best figures, and in brackets how many times better gpool's is."""
    lines = ["| | " + " | ".join(peers) + " |", "|---" * (len(peers) + 1) + "|"]
    for work, by_peer in rows.items():
        for figure in FIGURES[work]:
            ours = figure.best(by_peer.get("gpool", []))
            cells = []
            for peer in peers:
                best = figure.best(by_peer.get(peer, []))
                if best is None:
                    cells.append("–")
                elif peer == "gpool" or ours is None or not best:
                    cells.append(f"{best:g}")
                else:
                    cells.append(f"{best:g} ({figure.lead(ours, best):.2f}×)")
            lines.append(f"| {work.upper()} {figure.text} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--base", type=Path, required=True, help="where the peers' venvs are")
    asked.add_argument("--shared", type=Path, default=HERE.parents[2] / "shared" / "bench")
    asked.add_argument("--peers", default="ray,dramatiq", help="comma-separated, PEER[:VARIANT]")
    asked.add_argument("--work", nargs="+", default=["W1", "W2", "W3"])
    asked.add_argument("--rounds", type=int, default=3, help="best of so many")
    asked.add_argument("--without-gpool", action="store_true", help="see that the peers run here")
    asked.add_argument("--json", type=Path)
    options = asked.parse_args()
    if not (options.shared / "bench.py").exists():
        print(f"there is no bench.py in {options.shared}; say where it is with --shared")
        return 2

    base = options.base.resolve()
    harness = lay_out(options.shared, base)
    peers = [*([] if options.without_gpool else ["gpool"]), *filter(None, options.peers.split(","))]
    rows: Rows = {work.lower(): defaultdict(list) for work in options.work}
    for _ in range(options.rounds):
        for work in rows:
            for peer in peers:
                rows[work][peer] += measure(harness, base, peer, work)
    print(table(rows, peers))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
