"""Digests of the planner's decisions over World seeds, openb fills and the Philly replay; shows that a refactoring changed none.

python -m bench.plan_digests record|check [--only world,openb,philly] [--data DIR] [--first 7000] [--seeds 300] [--jobs 2]
python -m bench.plan_digests show --run world/7003      # the hashed lines of one run: compare two trees with `diff`

A run has two digests. `strict` hashes every pass that decided something, in order, with its virtual time. `loose` hashes the
sorted leases and preemptions without times, allocation numbers and order, and with each task id replaced by its rank among the
ids of the run: it survives a shift of virtual time or of id generation, not another decision. Times of passes that decided
nothing are in neither. Error texts, explanations and class names are in neither.

Only `CALLERS` and `decisions_of` know names of the code under test; a refactoring that renames them adapts these two.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from inspect import signature
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any, NamedTuple

from bench import jct, openb, philly, placement
from gpool.testing.world import run as run_world

RECORDED = Path(__file__).parent / "recorded" / "plan_digests.json"
FIRST_SEED, SEEDS = 7000, 300
OPENB_WORKLOADS = ("default", "gpuspec33")
OPENB_SEEDS = (42, 43)
PHILLY_NODES, PHILLY_STEP_S = 72, 60.0
SHOWN = 10  # differing runs that `check` prints for each part

CALLERS = {
    "world": "gpool.server.scheduling.scheduler",
    "openb": "gpool.core.scheduler.predict.simulation",
    "philly": "bench.jct",
}
"""Module whose global name `plan` each part's passes call."""


class Part(NamedTuple):
    """Resources of a lease on one node; a gang's lease has several."""

    node: int
    allocation: int
    cpu_milli: int
    memory_bytes: int
    disk_bytes: int
    slices: tuple[tuple[int, int, int, str, int], ...]  # GPU, bytes, share milli, profile, start


class Lease(NamedTuple):
    """Tasks with their epochs, in the order of the allocation's queue; the first part is the leader's."""

    tasks: tuple[tuple[int, int], ...]
    parts: tuple[Part, ...]


class Stop(NamedTuple):
    task: int
    epoch: int
    node: int
    beneficiary: int


class Decisions(NamedTuple):
    """One plan in plain numbers."""

    leases: tuple[Lease, ...]
    stops: tuple[Stop, ...]
    is_partial: bool


def decisions_of(plan: Any) -> Decisions:
    """Read a plan of the code under test."""

    def part(holder: Any) -> Part:
        held = holder.allocation
        slices = tuple(
            (each.gpu_index, each.memory_bytes, each.share_milli, each.profile, each.start)
            for each in held.slices
        )
        sizes = (held.cpu_milli, held.memory_bytes, held.disk_bytes)
        return Part(holder.node, held.number, *sizes, slices)

    leases = tuple(
        Lease(
            tuple((grant.task, grant.epoch) for grant in place.grants),
            (part(place), *map(part, place.members)),
        )
        for place in plan.places
    )
    stops = tuple(
        Stop(each.task, each.epoch, each.node, each.beneficiary) for each in plan.preemptions
    )
    return Decisions(leases, stops, plan.is_partial)


@dataclass(frozen=True, slots=True)
class Digest:
    """Two digests of one run; the counts say how far two runs are apart. `passes` is not compared: it includes empty ones."""

    strict: str
    loose: str
    passes: int
    grants: int
    preemptions: int


class Recording:
    """The plans of one run in the order in which they were made."""

    def __init__(self) -> None:
        self.passes = 0
        self.decided: list[tuple[int, Decisions]] = []

    def add(self, now: int, plan: Any) -> None:
        self.passes += 1
        decisions = decisions_of(plan)
        if decisions.leases or decisions.stops:
            self.decided.append((now, decisions))

    def lines(self) -> Iterator[str]:
        for now, decisions in self.decided:
            yield json.dumps([now, *decisions], separators=(",", ":"))

    def digest(self) -> Digest:
        leases = [lease for _, decisions in self.decided for lease in decisions.leases]
        stops = [stop for _, decisions in self.decided for stop in decisions.stops]
        granted = [(task, epoch, lease) for lease in leases for task, epoch in lease.tasks]
        ids = {task for task, _, _ in granted} | {stop.task for stop in stops}
        rank = {task: number for number, task in enumerate(sorted(ids))}
        held = sorted(
            (rank[task], epoch, sorted((part.node, sorted(part.slices)) for part in lease.parts))
            for task, epoch, lease in granted
        )
        stopped = sorted((rank[stop.task], stop.epoch, stop.node) for stop in stops)
        loose = json.dumps([held, stopped], separators=(",", ":"))
        return Digest(
            _hash("\n".join(self.lines())), _hash(loose), self.passes, len(granted), len(stops)
        )


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@contextmanager
def recording(part: str) -> Iterator[Recording]:
    """Record the plans that this part's caller makes within the context."""
    caller: Any = importlib.import_module(CALLERS[part])
    plan, recorded = caller.plan, Recording()
    bind = signature(plan).bind

    def recorded_plan(*args: Any, **named: Any) -> Any:
        decided = plan(*args, **named)
        recorded.add(bind(*args, **named).arguments["now"], decided)
        return decided

    caller.plan = recorded_plan
    try:
        yield recorded
    finally:
        caller.plan = plan


def record_world(seed: str, _: Path) -> Recording:
    with recording("world") as recorded:
        outcome = run_world(int(seed))
    if outcome.violation:
        raise RuntimeError(
            f"World seed {seed} broke a promise: {outcome.violation}. "
            f"Run `python -m gpool.testing.world --seed {seed} --trace` first."
        )
    return recorded


@lru_cache(maxsize=1)
def _openb(data: Path, workload: str) -> tuple[list[openb.Machine], list[openb.Pod], Any]:
    machines = openb.read_machines(data / "openb" / "openb_node_list_gpu_node.csv.gz")
    pods = openb.read_pods(data / "openb" / f"openb_pod_list_{workload}.csv.gz")
    return machines, pods, placement.learnt(machines, pods)


def record_openb(name: str, data: Path) -> Recording:
    workload, seed = name.split("-")
    machines, pods, pricing = _openb(data, workload)
    nodes = openb.as_nodes(machines, Random(int(seed)))
    run = placement.Run(workload, "fill", int(seed), nodes, pods, pricing)
    with recording("openb") as recorded:
        placement.measure("gpool", run)
    return recorded


def record_philly(policy: str, data: Path) -> Recording:
    jobs = philly.read_jobs(data / "philly" / "philly_pollux.csv.gz", *philly.OCTOBER)
    with recording("philly") as recorded:
        jct.measure(policy, jobs, PHILLY_NODES, PHILLY_STEP_S)
    return recorded


PARTS: dict[str, Callable[[str, Path], Recording]] = {
    "world": record_world,
    "openb": record_openb,
    "philly": record_philly,
}


def names_of(part: str, seeds: range) -> list[str]:
    if part == "world":
        return [str(seed) for seed in seeds]
    if part == "openb":
        return [f"{workload}-{seed}" for workload in OPENB_WORKLOADS for seed in OPENB_SEEDS]
    return list(jct.OWN)


def digest_of(part: str, data: Path, name: str) -> Digest:
    return PARTS[part](name, data).digest()


def digests_of(part: str, names: list[str], data: Path, jobs: int) -> dict[str, Digest]:
    work = partial(digest_of, part, data)
    if jobs <= 1:
        return dict(zip(names, map(work, names), strict=True))
    with ProcessPoolExecutor(jobs) as pool:
        chunk = len(OPENB_SEEDS) if part == "openb" else 1  # a workload is learnt once
        return dict(zip(names, pool.map(work, names, chunksize=chunk), strict=True))


Recorded = dict[str, dict[str, dict[str, Any]]]


def read_recorded() -> Recorded:
    return json.loads(RECORDED.read_text()) if RECORDED.exists() else {}


def write_recorded(recorded: Recorded) -> None:
    """One run a line, so that a difference can be read."""
    parts = []
    for part in sorted(recorded):
        runs = recorded[part].items()
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(run)}" for name, run in runs)
        parts.append(f"{json.dumps(part)}: {{\n{lines}\n}}")
    RECORDED.parent.mkdir(exist_ok=True)
    RECORDED.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def differences(
    before: dict[str, dict[str, Any]], after: dict[str, Digest], *, loose: bool
) -> list[str]:
    """One message per run that differs from its recorded digest."""
    found = []
    for name, digest in after.items():
        if name not in before:
            found.append(f"{name}: no digest was recorded")
            continue
        now, then = asdict(digest), before[name]
        differing = [kind for kind in ("strict", "loose") if now[kind] != then[kind]]
        if differing and (not loose or "loose" in differing):
            counts = ", ".join(
                f"{count} {then[count]} -> {now[count]}"
                for count in ("passes", "grants", "preemptions")
            )
            found.append(f"{name}: {' and '.join(differing)} differ; {counts}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("record", "check", "show"))
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="folder of the traces"
    )
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--first", type=int, default=FIRST_SEED, help="first World seed")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of World seeds")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument("--loose", action="store_true", help="check: compare loose digests only")
    parser.add_argument("--run", help="show: PART/NAME, for example world/7003 or openb/default-42")
    given = parser.parse_args()
    if given.action == "show":
        part, _, name = (given.run or "").partition("/")
        if part not in PARTS or not name:
            parser.error(
                f"--run must be PART/NAME with a part of {', '.join(PARTS)}: {given.run!r}"
            )
        for line in PARTS[part](name, given.data).lines():
            print(line)
        return 0
    wanted = given.only.split(",")
    if unknown := [part for part in wanted if part not in PARTS]:
        parser.error(f"--only names no such part: {', '.join(unknown)}; use {', '.join(PARTS)}")
    is_different = False
    for part in wanted:
        began = perf_counter()
        names = names_of(part, range(given.first, given.first + given.seeds))
        digests = digests_of(part, names, given.data, given.jobs)
        grants = sum(digest.grants for digest in digests.values())
        stops = sum(digest.preemptions for digest in digests.values())
        took = perf_counter() - began
        print(
            f"{part}: {len(names)} runs, {grants} grants, {stops} preemptions, {took:.0f} s",
            flush=True,
        )
        recorded = read_recorded()
        if given.action == "record":
            runs = {name: asdict(digest) for name, digest in digests.items()}
            write_recorded({**recorded, part: runs})
            continue
        found = differences(recorded.get(part, {}), digests, loose=given.loose)
        is_different = is_different or bool(found)
        print(f"{part}: {len(names) - len(found)} of {len(names)} runs are the same", flush=True)
        for message in found[:SHOWN]:
            print(f"  {part}/{message}")
    return int(is_different)


if __name__ == "__main__":
    sys.exit(main())
