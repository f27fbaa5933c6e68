"""Who gets how much: tenants with unlike demands in a pool that is always too small, planned by gpool's own planner.

python -m bench.fairness [--hours 8] [--seeds 1] [--first-seed 1] [--only NAME ...] [--json FILE]

Virtual time; nothing is approximated but the run times, which are drawn. Every tenant has tasks waiting at any moment from
when it comes. For each hour the GPU, CPU and memory time of each tenant is summed exactly; its part is that of its dominant
resource, and is compared with what a fluid division by weighted dominant-resource fairness gives. Every hour from when the
last tenant came is shown. The first (of `unlike` the first two) is the warm-up: it is summed up apart, beside what nobody could
have avoided in it (`fairness_hours`). When an hour begins on the pool's clock is drawn.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from time import process_time
from typing import NamedTuple

from bench.fairness_hours import (
    HOUR,
    SLICE,
    Carried,
    Had,
    Measured,
    Piece,
    Row,
    by_hour,
    of_turns,
    of_whole_pieces,
    summary,
    worst,
)

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import (
    GIB,
    SECOND,
    Gpu,
    GpuRequest,
    Instant,
    Node,
    Offer,
    Requirements,
    Shape,
    Span,
    TaskKind,
)
from gpool.core.scheduler.order.limits import GpuLimits, Holder
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.passes.plan import plan
from gpool.core.scheduler.place.index import PlacementIndex
from gpool.core.scheduler.state.events import (
    NodeChanged,
    QueuedTask,
    RunTimesObserved,
    TasksLeased,
    TasksPreempted,
    TasksQueued,
    TasksReleased,
)
from gpool.core.scheduler.state.state import State

START = Instant(10**15)
KEPT_EVERY = Span(600 * SECOND)  # what is stopped goes on where it was
Amounts = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Work:
    """What a tenant's tasks ask for, and how long they run on average."""

    gpus: int
    minutes: float
    cpus: int = 0  # 0: one for each GPU
    preemptible: bool = False
    shapes: int = 1  # alike, but told apart

    def requirements(self) -> Requirements:
        request = (GpuRequest(self.gpus),) if self.gpus else ()
        cpus = self.cpus or max(1, self.gpus)
        return Requirements(request, 1000 * cpus, cpus * GIB)


@dataclass(slots=True)
class Tenant:
    team: int
    work: Work
    users: int = 1
    weight: int = 1000
    waiting: int = 0  # tasks of each shape, at any moment; 0: enough to fill the pool
    had: list[int] = field(default_factory=lambda: [0, 0, 0])  # resource time, this hour
    holds: list[int] = field(default_factory=lambda: [0, 0, 0])
    started: int = 0

    def shapes(self) -> list[Shape]:
        needs = self.work.requirements()
        return [
            Shape(
                UserId(self.team * 100_000 + user),
                needs,
                0,
                TaskKind.COMMAND,
                "default",
                f"kind{number}",
                self.team,
                self.work.preemptible,
                checkpoint_every=KEPT_EVERY if self.work.preemptible else None,
            )
            for user in range(self.users)
            for number in range(self.work.shapes)
        ]


class Run(NamedTuple):
    epoch: int
    since: int
    amounts: Amounts
    node: NodeId


class Pool:
    """Nodes of eight GPUs and 64 CPUs, and tenants who always want more."""

    def __init__(self, nodes: int, policy: Policy, seed: int, cpus: int = 64) -> None:
        self.state, self.policy, self.dice = State(), policy, Random(seed)
        self.index = PlacementIndex()
        self.state.shares.weights = policy.weights
        self.now, self.tasks = Instant(START + self.dice.randrange(HOUR)), 0
        self.tenants: dict[int, Tenant] = {}
        self.lent: Amounts = (8000 * nodes, 1000 * cpus * nodes, 4 * cpus * GIB * nodes)
        self.ends: list[tuple[int, int, TaskId]] = []
        self.of: dict[TaskId, tuple[Tenant, Shape, int]] = {}  # with what is left to run
        self.running: dict[TaskId, Run] = {}
        self.tick = 60 * HOUR  # at the latest then it is looked at again though nothing ended
        self.preempted = self.between = self.passes = 0
        self.planning_s = 0.0
        for number in range(1, nodes + 1):
            gpus = tuple(
                Gpu(i, f"GPU-{number}-{i}", "NVIDIA A10G", "nvidia", 24 * GIB) for i in range(8)
            )
            offer = Offer(1000 * cpus, 4 * cpus * GIB, 100 * GIB, gpus)
            node = Node(NodeId(number), UserId(1), f"n{number}", offer)
            self.state.fold(NodeChanged(node))

    def join(self, tenant: Tenant) -> None:
        self.tenants[tenant.team] = tenant
        shapes, each = tenant.shapes(), max(1, tenant.work.gpus)
        enough = self.lent[0] // 1000 // each // len(shapes) + 1
        for shape in shapes:
            for _ in range(tenant.waiting or enough):
                self.submit(tenant, shape)

    def submit(self, tenant: Tenant, shape: Shape) -> None:
        self.tasks += 1
        task = TaskId(self.tasks)
        length = round(tenant.work.minutes * 60 * SECOND * self.dice.uniform(0.5, 1.5))
        self.of[task] = (tenant, shape, length)
        self.state.fold(TasksQueued(shape, (QueuedTask(task, 0, self.now),)))

    def run(self, span: int) -> Had:
        """For so long. The resource time that each tenant had meanwhile."""
        until = self.now + span
        for tenant in self.tenants.values():
            tenant.had = [0, 0, 0]
        self.schedule()
        while (due := min([self.now + self.tick, *(end[0] for end in self.ends[:1])])) <= until:
            self.pass_to(due)
            while self.ends and self.ends[0][0] <= self.now:
                _, epoch, task = heappop(self.ends)
                if task in self.running and self.running[task].epoch == epoch:
                    self.end(task)
            self.schedule()
        self.pass_to(until)
        return {team: (t.had[0], t.had[1], t.had[2]) for team, t in self.tenants.items()}

    def carried(self) -> Carried | None:
        """What runs now; None where that says nothing: it may be stopped, or GPUs are not all that counts."""
        works = [tenant.work for tenant in self.tenants.values()]
        if any(work.preemptible or not work.gpus or work.cpus for work in works):
            return None
        ends = {task: at for at, epoch, task in self.ends if self.running[task].epoch == epoch}
        pieces = [
            Piece(self.of[task][0].team, run.node, run.amounts[0] // 1000, ends[task] - self.now)
            for task, run in self.running.items()
        ]
        sizes = {team: tenant.work.gpus for team, tenant in self.tenants.items()}
        return Carried(pieces, sizes, self.lent[0] // 8000)

    def pass_to(self, at: int) -> None:
        passed = at - self.now
        for tenant in self.tenants.values():
            for kind in range(3):
                tenant.had[kind] += passed * tenant.holds[kind]
        self.now = Instant(at)

    def schedule(self) -> None:
        while True:
            begun = process_time()
            self.state.pass_time(self.now)
            decided = plan(self.state, self.index, self.now, self.policy)
            self.planning_s += process_time() - begun
            self.passes += 1
            for place in decided.places:
                ids = tuple(grant.task for grant in place.grants)
                leased = place.leased(ids, self.now)
                self.state.fold(leased)
                for grant in place.grants:
                    self.start(leased, grant.task, grant.epoch)
            for stop in decided.preemptions:
                self.state.fold(TasksPreempted((stop.task,), (stop.beneficiary,)))
            for stop in decided.preemptions:
                gainer = self.of[stop.beneficiary][0]
                self.between += gainer is not self.of[stop.task][0]
                self.stop(stop.task)
            if not decided.preemptions and not decided.places:
                return

    def start(self, leased: TasksLeased, task: TaskId, epoch: int) -> None:
        tenant, shape, left = self.of[task]
        allocation = leased.allocation
        amounts = (
            sum(part.share_milli for part in allocation.slices),
            allocation.cpu_milli,
            allocation.memory_bytes,
        )
        self.hold(tenant, amounts, 1)
        self.running[task] = Run(epoch, self.now, amounts, leased.node)
        heappush(self.ends, (self.now + left, epoch, task))
        if epoch == 1:
            tenant.started += 1
            self.submit(tenant, shape)

    @staticmethod
    def hold(tenant: Tenant, amounts: Amounts, sign: int) -> None:
        for kind in range(3):
            tenant.holds[kind] += sign * amounts[kind]

    def end(self, task: TaskId) -> None:
        tenant, shape, length = self.of.pop(task)
        self.hold(tenant, self.running.pop(task).amounts, -1)
        self.state.fold(RunTimesObserved(shape, 1, Span(length)))
        self.state.fold(TasksReleased((task,), self.now))

    def stop(self, task: TaskId) -> None:
        """Preempted: back into the queue, with what is left to run and a minute to begin again."""
        self.preempted += 1
        tenant, shape, left = self.of[task]
        run = self.running.pop(task)
        self.hold(tenant, run.amounts, -1)
        self.of[task] = (tenant, shape, left - (self.now - run.since) + 60 * SECOND)
        attained = self.state.attained(task, self.now)
        self.state.fold(TasksReleased((task,), self.now))
        again = QueuedTask(task, run.epoch, self.now, Span(attained))
        self.state.fold(TasksQueued(shape, (again,)))


def fluid(tenants: Sequence[Tenant], lent: Amounts) -> dict[int, float]:
    """Weighted dominant-resource fairness with tasks cut as finely as one likes: all dominant parts grow alike until a resource is out."""
    wants = {t.team: _parts(t.work.requirements(), lent) for t in tenants}
    weights = {t.team: t.weight / 1000 for t in tenants}
    part = dict.fromkeys(wants, 0.0)
    growing, left = set(wants), [1.0, 1.0, 1.0]
    while growing:
        rates = {
            team: [weights[team] * w / max(wants[team]) for w in wants[team]] for team in growing
        }
        used = [sum(rate[kind] for rate in rates.values()) for kind in range(3)]
        step = min(free / use for free, use in zip(left, used, strict=True) if use > 0)
        for team in growing:
            part[team] += weights[team] * step
        left = [free - step * use for free, use in zip(left, used, strict=True)]
        out = {kind for kind in range(3) if left[kind] < 1e-9}
        growing = {team for team in growing if not any(wants[team][kind] > 0 for kind in out)}
    return part


def _parts(needs: Requirements, lent: Amounts) -> list[float]:
    gpus = sum(1000 * request.count for request in needs.gpu[:1])
    return [gpus / lent[0], needs.cpu_milli / lent[1], (needs.memory_bytes or 0) / lent[2]]


# ---- what is shown


@dataclass(frozen=True, slots=True)
class Options:
    hours: int
    seed: int


@dataclass(frozen=True, slots=True)
class Found:
    """Of one scenario with one seed: a row for each team, and the hours behind them."""

    rows: list[Row]
    measured: tuple[Measured, ...] = ()


def shares(name: str, pool: Pool, options: Options, warm: int = 1) -> Found:
    """All whole hours from now on; the worst of each tenant after so many hours of warming up."""
    fair = fluid(list(pool.tenants.values()), pool.lent)
    slices, floors = [], []
    for number in range(6 * options.hours):
        if number % 6 == 0:
            carried = pool.carried()
            floors.append(None if carried is None else carried.floor(fair))
        slices.append(pool.run(SLICE))
    measured = Measured(name, options.seed, fair, slices, pool.lent, floors, warm)
    hours, rows = measured.hours, []
    for team, tenant in sorted(pool.tenants.items()):
        found = [hour[team] for hour in hours]
        after = found[warm:] or found
        work = tenant.work
        rows.append(
            {
                "scenario": name,
                "seed": options.seed,
                "team": team,
                "demand": f"{tenant.users} users x {work.shapes}, {work.gpus} GPU, "
                f"{work.cpus or max(1, work.gpus)} CPU, {work.minutes:g} min",
                "weight": tenant.weight / 1000,
                "share_pct": round(100 * fair[team], 2),
                "hours_pct": [round(100 * each, 1) for each in found],
                "warm_up_h": warm,
                "worst_hour_pct": round(100 * max(after, key=abs), 2),
                "mean_pct": round(100 * sum(after) / len(after), 2),
                "tasks": tenant.started,
                "pool_used_pct": round(100 * measured.used(), 1),
            }
        )
    return Found(rows, (measured,))


UNLIKE = (
    Work(1, 60),
    Work(2, 40),
    Work(1, 4),
    Work(8, 10),
    Work(2, 20),
    Work(4, 30),
    Work(8, 20),
)


def unlike(options: Options) -> Found:
    """Seven teams, 36 4/7 GPUs each, short and long, large and small. They come one after another, ten minutes apart, to a
    pool that those before them fill for up to an hour and a half, and none may be stopped: it takes them two hours from when
    the last has come to get even, the warm-up here."""
    pool = Pool(32, Policy(), options.seed)
    for team, work in enumerate(UNLIKE, 1):
        if team > 1:
            pool.run(SLICE)
        pool.join(Tenant(team, work, users=1 + team % 3))
    return shares("unlike", pool, options, warm=2)


def rounding(options: Options) -> Found:
    """Six teams, 42 2/3 GPUs each, one with pieces of eight for two hours: one of them too many is 12 % too much."""
    pool = Pool(32, Policy(), options.seed)
    works = (Work(1, 2), Work(1, 90), Work(8, 5), Work(8, 120), Work(2, 20), Work(4, 45))
    for team, work in enumerate(works, 1):
        pool.join(Tenant(team, work, users=1 + team % 3))
    return shares("rounding", pool, options)


def weighted(options: Options) -> Found:
    weights = {1: 1000, 2: 2000, 3: 3000, 4: 4000}
    held: dict[Holder, int] = {("team", team): weight for team, weight in weights.items()}
    pool = Pool(32, Policy(weights=held), options.seed)
    for team, work in enumerate((Work(1, 5), Work(8, 20), Work(2, 60), Work(4, 10)), 1):
        pool.join(Tenant(team, work, weight=weights[team]))
    return shares("weighted", pool, options)


def dominant(options: Options) -> Found:
    """CPU-heavy and GPU-heavy tenants meet in both resources."""
    pool = Pool(16, Policy(), options.seed)
    works = (Work(1, 10, cpus=2), Work(2, 30, cpus=4), Work(0, 5, cpus=8), Work(1, 15, cpus=16))
    for team, work in enumerate(works, 1):
        pool.join(Tenant(team, work))
    return shares("dominant", pool, options)


def greedy_users(options: Options) -> Found:
    pool = Pool(8, Policy(), options.seed)
    pool.join(Tenant(1, Work(1, 20), users=1000, waiting=1))
    pool.join(Tenant(2, Work(1, 20), users=10))
    return shares("1000 users", pool, Options(min(options.hours, 4), options.seed))


def greedy_shapes(options: Options) -> Found:
    pool = Pool(4, Policy(), options.seed)
    pool.join(Tenant(1, Work(1, 20, shapes=10_000), waiting=1))
    pool.join(Tenant(2, Work(1, 20)))
    return shares("10000 shapes", pool, Options(2, options.seed))


def greedy_tasks(options: Options) -> Found:
    pool = Pool(8, Policy(), options.seed)
    pool.join(Tenant(1, Work(1, 20), waiting=10_000))
    pool.join(Tenant(2, Work(1, 20)))
    return shares("10000 tasks", pool, Options(min(options.hours, 4), options.seed))


def returning(options: Options) -> Found:
    """One that comes after five hours of others' work: it neither starves them nor pays for them."""
    pool = Pool(8, Policy(), options.seed)
    pool.join(Tenant(1, Work(1, 10)))
    pool.join(Tenant(2, Work(2, 20)))
    pool.run(5 * HOUR)
    pool.join(Tenant(3, Work(1, 10)))
    return shares("returning", pool, Options(min(options.hours, 4), options.seed))


def swaps(options: Options) -> Found:
    """Equals whose tasks may all be preempted, from the first hour in an empty pool: none of their pieces divides into its share,
    so they are had by turns. How near do hours come, and how often do teams take from each other?"""
    rows: list[Row] = []
    measured: list[Measured] = []
    crowds = (
        (8, ((1, 60), (2, 120), (8, 180), (4, 90), (1, 20))),
        (2, ((1, 600), (1, 600), (1, 600))),
        (4, ((8, 600), (8, 600), (8, 600))),
        (4, ((8, 100), (4, 100), (1, 100))),
    )
    for nodes, works in crowds:
        pool = Pool(nodes, Policy(), options.seed)
        pool.tick = 60 * SECOND
        for team, (gpus, minutes) in enumerate(works, 1):
            pool.join(Tenant(team, Work(gpus, minutes, preemptible=True)))
        pieces = "+".join(str(gpus) for gpus, _ in works)
        rows.append(_swapped(f"pieces of {pieces} in {8 * nodes}", pool, options, measured))
    return Found(rows, tuple(measured))


def _swapped(name: str, pool: Pool, options: Options, into: list[Measured]) -> Row:
    before = pool.between, pool.preempted
    (ran,) = shares(name, pool, options).measured
    into.append(ran)
    sizes = {team: tenant.work.gpus for team, tenant in pool.tenants.items()}
    return {
        "scenario": name,
        "seed": options.seed,
        "team": len(sizes),
        "first_hour_pct": round(100 * worst(ran.hours[:1]), 2),
        "worst_hour_pct": round(100 * worst(ran.hours[1:]), 2),
        "any_hour_worst_pct": round(100 * worst(ran.any_hours[6:]), 2),
        "of_whole_pieces_pct": round(100 * of_whole_pieces(ran.fair, sizes, pool.lent[0]), 2),
        "of_turns_pct": round(
            100 * of_turns(ran.fair, sizes, pool.lent[0], pool.policy.quantum), 2
        ),
        "preemptions_an_hour_between_teams": round((pool.between - before[0]) / options.hours, 1),
        "preemptions_an_hour": round((pool.preempted - before[1]) / options.hours, 1),
        "pool_used_pct": round(100 * ran.used(), 1),
    }


def arrivals(options: Options) -> Found:
    """`unlike`, but all may be stopped: whoever comes to a full pool has its share from the first hour."""
    pool = Pool(32, Policy(), options.seed)
    pool.tick = 60 * SECOND
    for team, work in enumerate(UNLIKE, 1):
        if team > 1:
            pool.run(SLICE)
        pool.join(Tenant(team, replace(work, preemptible=True), users=1 + team % 3))
    measured: list[Measured] = []
    return Found([_swapped("arrivals, all preemptible", pool, options, measured)], tuple(measured))


def lending(options: Options) -> Found:
    """A team with half of the pool guaranteed comes back to a pool that others fill: how long until it has its own?"""
    rows = []
    for preemptible in (True, False):
        limits = GpuLimits(guaranteed={("team", 1): 32_000})
        pool = Pool(8, Policy(limits=limits), options.seed)
        for team in (2, 3, 4):
            pool.join(Tenant(team, Work(1, 60, preemptible=preemptible)))
        pool.run(2 * HOUR)
        lender = Tenant(1, Work(1, 60), waiting=40)
        pool.join(lender)
        came, minutes = pool.now, 0
        while lender.holds[0] < 32_000 and minutes < 240:
            pool.run(60 * SECOND)
            minutes = round((pool.now - came) / SECOND / 60)
        lent = pool.run(HOUR)
        rows.append(
            {
                "scenario": "borrowers preemptible" if preemptible else "borrowers not preemptible",
                "team": 1,
                "demand": "32 of 64 GPUs guaranteed, 4 teams",
                "minutes_until_guaranteed": minutes,
                "then_pct_of_pool": round(100 * lent[1][0] / pool.lent[0] / HOUR, 1),
                "preemptions": pool.preempted,
            }
        )
    return Found(rows)


SCENARIOS: dict[str, Callable[[Options], Found]] = {
    "unlike": unlike,
    "rounding": rounding,
    "weighted": weighted,
    "dominant": dominant,
    "greedy-users": greedy_users,
    "greedy-shapes": greedy_shapes,
    "greedy-tasks": greedy_tasks,
    "returning": returning,
    "swaps": swaps,
    "arrivals": arrivals,
    "lending": lending,
}


def show(rows: list[Row]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    print("\n| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    for row in rows:
        print("| " + " | ".join(str(row.get(name, "")) for name in names) + " |", flush=True)


def greed(rows: list[Row]) -> list[str]:
    """What a tenant has who has more users, kinds or tasks than the other."""
    told = []
    for row in rows:
        if row["scenario"].split()[0] in ("1000", "10000") and row["team"] == 1:
            which = (row["scenario"], row["seed"], 2)
            other = next(r for r in rows if (r["scenario"], r.get("seed"), r["team"]) == which)
            ratio = (100 + row["mean_pct"]) / (100 + other["mean_pct"])
            told.append(f"{row['scenario']}, seed {row['seed']}: greedy / modest = {ratio:.3f}")
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=sorted(SCENARIOS), default=None)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    rows: list[Row] = []
    hours: list[Row] = []
    sums: list[Row] = []
    for name in arguments.only or SCENARIOS:
        all_ = [SCENARIOS[name](Options(arguments.hours, seed)) for seed in seeds]
        found = [row for each in all_ for row in each.rows]
        show(found)
        rows += found
        by_name: dict[str, list[Measured]] = {}
        for one in [one for each in all_ for one in each.measured]:
            by_name.setdefault(one.scenario, []).append(one)
        for measured in by_name.values():
            table = by_hour(measured)
            show(table)
            hours += table
            sums.append(summary(measured))
    if sums:
        show(sums)
        far = max(sums, key=lambda row: abs(row["worst_pct"]))
        print(
            f"\nworst hour of any team after the warm-up: {far['worst_pct']:+} % of its share "
            f"({far['scenario']}, seed {far['of_seed']}); bar 5 %"
        )
    for line in greed(rows):
        print(line)
    if arguments.json:
        whole = {"teams": rows, "hours": hours, "scenarios": sums}
        arguments.json.write_text(json.dumps(whole, indent=2) + "\n")


if __name__ == "__main__":
    main()
