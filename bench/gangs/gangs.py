"""Random interleavings of gangs, failures and preemptions: never a partial gang, a double-booked slice, or one that waits for ever.

python -m bench.gangs [--interleavings 100000] [--first-seed 0] [--jobs 1] [--controls 400] [--quick] [--json FILE]

Each interleaving is drawn from its number. The first row is the real thing; in each of the others something is broken on
purpose, and the same judge must find that within `--controls` interleavings: else it proves nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time

from bench.gang_flaws import FLAWS
from bench.gang_ground import Ground
from bench.gang_judge import KINDS, Broken
from bench.gang_pool import Pool

CHUNK = 625
WARM = 1  # an interleaving that uses whatever there is
SAID = 5  # violations that are told in full


@dataclass(slots=True)
class Tally:
    """What became of some interleavings."""

    interleavings: int = 0
    steps: int = 0
    gangs: int = 0
    leases: int = 0
    cpu_s: float = 0.0
    found: Counter[str] = field(default_factory=Counter)
    said: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.interleavings += other.interleavings
        self.steps += other.steps
        self.gangs += other.gangs
        self.leases += other.leases
        self.cpu_s += other.cpu_s
        self.found += other.found
        self.said = (self.said + other.said)[:SAID]


class _Faults(logging.Handler):
    """What the server survives is still a fault of it."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def run(seeds: Iterable[int], flaw: str = "", *, until_found: bool = False) -> Tally:
    tally, ground, faults = Tally(), Ground(), _Faults()
    ground.settle(Pool(ground, WARM).play)
    begun = process_time()
    root = logging.getLogger("gpool")
    propagates, root.propagate = root.propagate, False
    root.addHandler(faults)
    try:
        for seed in seeds:
            pool = Pool(ground, seed, flaw)
            try:
                pool.run()
                if faults.said:
                    raise Broken("server_fault", faults.said.pop())
            except Broken as broken:
                tally.found[broken.kind] += 1
                if len(tally.said) < SAID:
                    tally.said.append(f"{seed}: {broken}")
            faults.said.clear()
            tally.interleavings += 1
            tally.steps += pool.steps
            tally.gangs += pool.gangs
            tally.leases += pool.leases
            if until_found and tally.found:
                break
    finally:
        root.removeHandler(faults)
        root.propagate = propagates
        ground.close()
        tally.cpu_s = process_time() - begun
    return tally


def measured(first: int, count: int, jobs: int) -> dict[str, object]:
    begun, tally = perf_counter(), Tally()
    chunks = [
        range(at, min(at + CHUNK, first + count)) for at in range(first, first + count, CHUNK)
    ]
    if jobs == 1:
        for chunk in chunks:
            tally.add(run(chunk))
    else:
        with ProcessPoolExecutor(jobs) as processes:
            for part in processes.map(run, chunks):
                tally.add(part)
    return {**row("none", tally), "seconds": round(perf_counter() - begun)}


def row(flaw: str, tally: Tally) -> dict[str, object]:
    return {
        "broken_on_purpose": flaw,
        "interleavings": tally.interleavings,
        "steps": tally.steps,
        "gangs": tally.gangs,
        "leases": tally.leases,
        **{kind: tally.found[kind] for kind in KINDS},
        "cpu_ms_each": round(1000 * tally.cpu_s / max(1, tally.interleavings), 2),
        "said": tally.said,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--interleavings", type=int, default=100_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--controls", type=int, default=400)
    parser.add_argument("--quick", action="store_true", help="a hundredth of it")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    count = arguments.interleavings // (100 if arguments.quick else 1)
    rows = [measured(arguments.first_seed, count, arguments.jobs)]
    tell(rows[0], is_first=True)
    for flaw in FLAWS if arguments.controls else ():
        seeds = range(arguments.first_seed, arguments.first_seed + arguments.controls)
        rows.append(row(flaw, run(seeds, flaw, until_found=True)))
        tell(rows[-1])
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    for said in rows[0]["said"]:  # type: ignore[attr-defined]
        print(said)
    missed = [each for each in rows[1:] if not any(each[kind] for kind in KINDS)]
    if any(rows[0][kind] for kind in KINDS) or missed:
        raise SystemExit(1)


def tell(row: dict[str, object], *, is_first: bool = False) -> None:
    shown = {name: value for name, value in row.items() if name not in ("said", "seconds")}
    if is_first:
        print("| " + " | ".join(shown) + " |\n" + "|---" * len(shown) + "|")
    print("| " + " | ".join(str(value) for value in shown.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
