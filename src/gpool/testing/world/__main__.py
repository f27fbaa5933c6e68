"""`python -m gpool.testing.world`: run many seeds and print a table, or one seed and its trace. Exits 1 on a violation."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import msgspec

from gpool.testing.world.flaws import Flaw, parts_with
from gpool.testing.world.money import ChargingFlaw, run_priced
from gpool.testing.world.replicas import PLANTED, ReplicaFlaw, run_replicas
from gpool.testing.world.world import WorldOutcome, run

CHUNK = 25


@dataclass(frozen=True, slots=True)
class Chunk:
    outcomes: list[WorldOutcome]
    seconds: float


@dataclass(frozen=True, slots=True)
class Runs:
    """Kind of the runs: `replicas` 1 is the only server."""

    replicas: int
    flaw: Flaw | ReplicaFlaw | ChargingFlaw | None
    prices: bool = False

    def run(self, seed: int, *, keep_trace: bool = False) -> WorldOutcome:
        if isinstance(self.flaw, ChargingFlaw) or self.prices:
            planted_bug = self.flaw if isinstance(self.flaw, ChargingFlaw) else None
            liars = int(planted_bug is ChargingFlaw.AGENTS_TIMES)
            return run_priced(seed, planted_bug, liars=liars, keep_trace=keep_trace)
        if isinstance(self.flaw, ReplicaFlaw):
            planted = PLANTED[self.flaw]
            return run_replicas(seed, planted, count=self.replicas, keep_trace=keep_trace)
        if self.replicas > 1:
            return run_replicas(seed, count=self.replicas, keep_trace=keep_trace)
        return run(seed, parts_with(self.flaw), keep_trace=keep_trace)


def run_chunk(runs: Runs, seeds: range) -> Chunk:
    began = time.perf_counter()
    outcomes = [runs.run(seed) for seed in seeds]
    return Chunk(outcomes, time.perf_counter() - began)


def run_all(seeds: range, jobs: int, runs: Runs) -> Iterator[Chunk]:
    chunks = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    if jobs <= 1:
        yield from map(partial(run_chunk, runs), chunks)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(partial(run_chunk, runs), chunks)


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    write = sys.stdout.write
    runs = Runs(options.replicas, options.flaw, options.prices)
    if options.seed is not None:
        outcome = runs.run(options.seed, keep_trace=options.trace)
        for line in outcome.lines:
            write(line + "\n")
        write(f"seed {outcome.seed}: {outcome.violation or 'no violation'}\n{outcome.digest}\n")
        return 1 if outcome.violation else 0
    outcomes: list[WorldOutcome] = []
    seconds = 0.0
    for chunk in run_all(options.seeds, options.jobs, runs):
        outcomes += chunk.outcomes
        seconds += chunk.seconds
        for outcome in chunk.outcomes:
            if outcome.violation:
                write(f"seed {outcome.seed}: {outcome.violation}\n")
        sys.stdout.flush()
    summary = summed_up(outcomes, seconds)
    for name, value in summary.items():
        write(f"{name:<28}{value:>14}\n")
    if options.json is not None:
        broken = [asdict(outcome) for outcome in outcomes if outcome.violation]
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_bytes(msgspec.json.encode({**summary, "violations": broken}))
    return 1 if summary["violations found"] else 0


def summed_up(outcomes: list[WorldOutcome], seconds: float) -> dict[str, int | float]:
    return {
        "seeds": len(outcomes),
        "violations found": sum(outcome.violation is not None for outcome in outcomes),
        "attempts": sum(outcome.attempts for outcome in outcomes),
        "results accepted": sum(outcome.accepted for outcome in outcomes),
        "resumed from a checkpoint": sum(outcome.resumed for outcome in outcomes),
        "commits": sum(outcome.commits for outcome in outcomes),
        "crashes of the server": sum(outcome.crashes for outcome in outcomes),
        "virtual hours": round(sum(outcome.virtual_s for outcome in outcomes) / 3600, 1),
        "seconds a seed": round(seconds / max(1, len(outcomes)), 3),
    }


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gpool.testing.world", description=__doc__)
    parser.add_argument(
        "--seeds", type=_span, default=range(300), help="FIRST:LAST, the last excluded"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    parser.add_argument("--seed", type=int, help="run this seed only")
    parser.add_argument("--trace", action="store_true", help="with --seed: print the trace")
    parser.add_argument("--replicas", type=int, default=1, help="servers of one database")
    parser.add_argument("--prices", action="store_true", help="charge tasks; one server only")
    parser.add_argument(
        "--flaw",
        type=_flaw,
        metavar="FLAW",
        help=f"plant this bug: {', '.join(Flaw)}; with --replicas: {', '.join(ReplicaFlaw)}; "
        f"with --prices: {', '.join(ChargingFlaw)}",
    )
    options = parser.parse_args(arguments)
    if options.replicas < 1:
        parser.error(f"--replicas {options.replicas}: give 1 or more")
    if options.prices and options.replicas > 1:
        parser.error("--prices is for one server; leave out --replicas")
    if options.flaw and isinstance(options.flaw, ReplicaFlaw) != (options.replicas > 1):
        needed = "needs --replicas 3" if options.replicas == 1 else "is one of a single server"
        parser.error(f"--flaw {options.flaw} {needed}")
    return options


def _flaw(text: str) -> Flaw | ReplicaFlaw | ChargingFlaw:
    """ValueError, which argparse reports, for another word."""
    if text in list(ChargingFlaw):
        return ChargingFlaw(text)
    return ReplicaFlaw(text) if text in list(ReplicaFlaw) else Flaw(text)


def _span(text: str) -> range:
    first, _, last = text.partition(":")
    return range(int(first), int(last))


if __name__ == "__main__":
    sys.exit(main())
