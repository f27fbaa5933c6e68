"""Verified results against liars: `verify=2|3`, and `verify="spot"` beside BOINC's adaptive replication.

python -m bench.verification [--quick] [--json FILE] [--seed N] [--processes N] [--nodes N]

Full size: 1,000 nodes and 10,000 tasks a node for each strategy (minutes). `--quick`: 1,000 tasks a node, fewer nodes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from bench.verification_pool import (
    COST,
    HONEST,
    HONEST_ERROR,
    STRATEGIES,
    TASK_TIME,
    BoincRule,
    Pool,
    SimulatedNode,
    SpotRule,
)
from bench.verification_quorum import Collusion, LiarCounts, colluders, independent_liars

from gpool.core.trust.spot import DEFAULT_SPOT

SEED = 16
LIARS = 0.05
INDEPENDENT = 0.2
SHARES = (0.01, 0.05, 0.1)
MAX_WRONG = 0.001
MAX_PUNISHED = 0.001
MIN_REFUSED = 0.999
MAX_OVER_BOUND = 1.1
MAX_EXTRA = {1_000: 0.05, 10_000: 0.025}
"""Extra compute after so many tasks a node."""


class Sizes(NamedTuple):
    nodes: int
    tasks: tuple[int, ...]
    quorum_tasks: int


FULL = Sizes(1_000, (1_000, 10_000), 200_000)
QUICK = Sizes(200, (1_000,), 20_000)


class Run(NamedTuple):
    rule: str
    strategy: str
    nodes: int
    tasks: int
    seed: int


@dataclass(frozen=True, slots=True)
class SpotFigures:
    """Measures of one run. Fractions of all results; earnings of liars relative to those of honest nodes.

    `delivered`: wrong results that a consumer received; `stood`: those never withdrawn. `kept`: part of the lies that
    stood. `gross`: earnings, `net`: earnings less the cost of computing. `extra`: compute beyond one run of each task.
    """

    rule: str
    strategy: str
    tasks: int
    seed: int
    extra: float
    delivered: float
    stood: float
    kept: float
    gross: float
    net: float
    punished: float


def spot_run(run: Run) -> SpotFigures:
    strategy = next(one for one in (HONEST, *STRATEGIES) if one.name == run.strategy)
    is_spot = run.rule == "spot"
    liars = round(LIARS * run.nodes)
    pool = Pool(run.nodes, liars, strategy, SpotRule() if is_spot else BoincRule(), run.seed)
    for _ in range(run.tasks + (probation_turns() if is_spot else 0)):
        pool.step()
    pool.finish()
    totals, guilty, honest = pool.totals, pool.nodes[:liars], pool.nodes[liars:]
    lies = sum(node.lies for node in guilty)
    return SpotFigures(
        run.rule,
        run.strategy,
        run.tasks,
        run.seed,
        totals.extra / totals.compute,
        totals.delivered_wrong / totals.results,
        totals.stood_wrong / totals.results,
        sum(node.lies_kept for node in guilty) / lies if lies else 0.0,
        _mean(node.earned for node in guilty) / _mean(node.earned for node in honest),
        _mean(map(_net, guilty)) / _mean(map(_net, honest)),
        _mean(node.bans > 0 for node in honest),
    )


def probation_turns() -> int:
    """Turns that a node waits between the tasks of its first probation."""
    return (DEFAULT_SPOT.probation - 1) * (DEFAULT_SPOT.spacing // TASK_TIME - 1)


def _net(node: SimulatedNode) -> float:
    return node.earned - node.spent


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def spot_failures(figures: SpotFigures) -> list[str]:
    """Return the limits that a run of the pool's rule exceeds."""
    name = f"spot, {figures.strategy}, {figures.tasks:,} tasks a node"
    found = []
    most = MAX_EXTRA.get(figures.tasks, 1.0)
    if figures.extra > most:
        found.append(f"{name}: {figures.extra:.2%} extra compute; at most {most:.1%}")
    if figures.stood > MAX_WRONG:
        found.append(
            f"{name}: {figures.stood:.3%} of the results are wrong; at most {MAX_WRONG:.1%}"
        )
    if figures.strategy != HONEST.name and max(figures.gross, figures.net) >= 1:
        found.append(
            f"{name}: lying earns {figures.gross:.3f} gross, {figures.net:.3f} net of honest work"
        )
    if figures.punished > MAX_PUNISHED:
        found.append(f"{name}: {figures.punished:.2%} of the honest nodes are punished")
    return found


def liar_failures(verify: int, counts: LiarCounts) -> list[str]:
    refused = 1 - counts.stood / counts.wrong
    if refused >= MIN_REFUSED:
        return []
    return [
        f"verify={verify}: only {refused:.3%} of the wrong results of independent liars are refused"
    ]


def collusion_failures(verify: int, share: float, found: Collusion) -> list[str]:
    if found.wrong <= MAX_OVER_BOUND * found.bound:
        return []
    return [
        f"verify={verify}, {share:.0%} colluders: {found.wrong:.3g} wrong, bound {found.bound:.3g}"
    ]


def print_quorums(sizes: Sizes, seed: int) -> tuple[list[dict[str, object]], list[str]]:
    rows: list[dict[str, object]] = []
    failures: list[str] = []
    print(
        f"{INDEPENDENT:.0%} independent liars, {sizes.nodes:,} nodes, {sizes.quorum_tasks:,} tasks\n"
    )
    print("| verify | siblings a task | wrong answers | accepted | refused | no quorum |")
    print("|---|---|---|---|---|---|")
    for verify in (2, 3):
        counts = independent_liars(sizes.nodes, INDEPENDENT, verify, sizes.quorum_tasks, seed)
        failures += liar_failures(verify, counts)
        rows.append({"verify": verify, "share": INDEPENDENT, "colluding": False, **asdict(counts)})
        print(
            f"| {verify} | {counts.siblings / counts.tasks:.2f} | {counts.wrong:,} | {counts.stood} | "
            f"{1 - counts.stood / counts.wrong:.3%} | {counts.failed / counts.tasks:.2%} |"
        )
    print(f"\ncolluders under distinct owners, {sizes.quorum_tasks:,} tasks per stratum\n")
    print("| verify | share k | bound k^verify | wrong accepted | ratio | siblings a task |")
    print("|---|---|---|---|---|---|")
    for verify in (2, 3):
        for share in SHARES:
            found = colluders(sizes.nodes, share, verify, sizes.quorum_tasks, seed)
            failures += collusion_failures(verify, share, found)
            rows.append({"verify": verify, "share": share, "colluding": True, **asdict(found)})
            print(
                f"| {verify} | {share:.0%} | {found.bound:.2e} | {found.wrong:.2e} | "
                f"{found.wrong / found.bound:.3f} | {found.siblings:.3f} |"
            )
    return rows, failures


def print_spot(all_figures: Iterable[SpotFigures], nodes: int) -> list[SpotFigures]:
    """Print each row when its run has ended."""
    print(f"\nspot checks, {nodes:,} nodes of which {LIARS:.0%} follow the strategy; honest")
    print(
        f"computations are wrong with {HONEST_ERROR:.2%}; computing costs {COST:.0%} of the price\n"
    )
    print(
        "| strategy | tasks a node | rule | extra | wrong | delivered | lies kept | gross | net | punished |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    rows = []
    for one in all_figures:
        rows.append(one)
        print(
            f"| {one.strategy} | {one.tasks:,} | {one.rule} | {one.extra:.2%} | {one.stood:.4%} | "
            f"{one.delivered:.4%} | {one.kept:.1%} | {one.gross:.3f} | {one.net:.3f} | {one.punished:.2%} |",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="200 nodes, 1,000 tasks a node")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--nodes", type=int, help="number of nodes instead of 1,000")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    sizes = QUICK if given.quick else FULL
    if given.nodes:
        sizes = sizes._replace(nodes=given.nodes)
    print(f"seed {given.seed}\n")
    quorum_rows, failures = print_quorums(sizes, given.seed)
    runs = [
        Run(rule, strategy.name, sizes.nodes, tasks, given.seed)
        for tasks in sizes.tasks
        for strategy in (HONEST, *STRATEGIES)
        for rule in ("spot", "BOINC")
    ]
    with ProcessPoolExecutor(given.processes) as processes:
        figures = print_spot(processes.map(spot_run, runs), sizes.nodes)
    for one in figures:
        if one.rule == "spot":
            failures += spot_failures(one)
    print()
    for failure in failures:
        print(f"exceeded: {failure}")
    if given.json:
        answer = {
            "seed": given.seed,
            "quorum": quorum_rows,
            "spot": [asdict(one) for one in figures],
            "failures": failures,
        }
        given.json.write_text(json.dumps(answer, indent=2) + "\n")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
