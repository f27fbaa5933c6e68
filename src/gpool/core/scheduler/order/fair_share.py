"""Fair share: how much of the pool each tenant and user has. It counts; orders compare.

**Tenants.** A tenant is a team, or a user without a team. Tenants are compared first, then the users of one team: a
team of a thousand users has one share. Since anybody may create teams, a user's own share over all teams counts for
each of them where it is larger (`compared`).

**Share.** `Shares.of` is (held + recent + rounding) / weight, in millionths of the pool:

- held: the dominant share, the largest of the tenant's parts of the pool's GPUs, CPU and memory;
- recent: `PAST` times the average past share, decayed with `HALF_LIFE`. Time counts only while a shape waits anywhere
  in the pool (`Shares.pass_time`): capacity that no task waits for is free. A tenant that begins to wait starts at no
  less than the usage of tenants served lately (`RecentUsage.join`): absence earns no credit;
- rounding: half of one allocation, so that shares are met on average and not exceeded by a whole allocation: five and a
  third allocations' worth counts as five, not six. Allocations shorter than an hour count for less, since they even
  out. A holder of nothing counts half of the allocation's addition to its recent usage. All tasks of a holder are
  counted with the same allocation.

The half-life is a third of an hour, so that an hour's surplus is not paid for in the next; `PAST` above 1 makes up for
a lasting disadvantage, of which held shares alone would leave half.

**Example.** 10 GPUs, equal weights; tasks always wait. A holds 6 GPUs and B holds 4 for 20 minutes, one half-life:

              held        average (1 - 1/2)    recent = 3 * average    share
        A   600,000            300,000               900,000         1,500,000
        B   400,000            200,000               600,000         1,000,000   <- B is served first

B gets the next GPUs until held and recent usage are equal. If A stops, its recent usage is 450,000 after 20 minutes.
With weight 2, A's share would be 750,000 and A would be served first.

    events ─ take/give ─> held ─────────────────┐
    time while a shape waits ─> RecentUsage ────┼─> Shares.of ─> key of the order (`builtin.fair_share`)
    waiting shapes ─> RoundingStep ─────────────┘

Held amounts are rebuilt from the store. Recent usage is a hint that rebuilds keep and the server stores
(`Shares.values`, `Shares.restore`); if it is lost, all tenants start equal.
One file because held amounts, recent usage and rounding are the terms of one formula.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import log
from typing import NamedTuple

from gpool.core.ids import NodeId
from gpool.core.model import SECOND, Allocation, Instant, Node, Shape, Span
from gpool.core.scheduler.order.limits import Holder, gpus_of, least_gpus
from gpool.core.scheduler.place.fit import is_open
from gpool.core.scheduler.predict.run_times import Predictions

HALF_LIFE = Span(1200 * SECOND)
PAST = 3  # weight of recent usage relative to held shares
ALL = 1_000_000
MAX_REMEMBERED = 10_000
_HOUR = Span(3600 * SECOND)
_LN2 = log(2)
_LONG = 40  # half-lives, after which nothing is left
_TOO_LARGE = 2.0**200
UsageValues = dict[tuple[str, int], int]
"""Recent usage by kind (`user`, `team`, or `floor` of a team or of all tenants: 0) and id, in billionths of the pool."""
StoredUsage = Mapping[tuple[str, int], tuple[int, Instant]]
"""Values as stored, each with its time."""
_FOLLOWS = 0.25  # weight of one holder in the floor
_FINE = 1000  # billionths in a millionth
Amounts = tuple[int, int, int]  # thousandths of GPUs, of CPUs, bytes of memory


def tenant_of(shape: Shape) -> Holder:
    return ("user", shape.user) if shape.team is None else ("team", shape.team)


def compared(shape: Shape, team: int, user: int, weights: Mapping[Holder, int]) -> tuple[int, int]:
    """Shares to compare with other tenants and within the team. A team's weight counts for its users."""
    assert shape.team is not None
    own = max(1, weights.get(("user", shape.user), 1000))
    most = max(own, weights.get(("team", shape.team), 1000))
    return max(team, user * own // most), user


def scopes_of(shape: Shape) -> tuple[tuple[Holder, int | None], ...]:
    """Scope None: among tenants; a team: among its users."""
    if shape.team is None:
        return ((("user", shape.user), None),)
    return (("team", shape.team), None), (("user", shape.user), shape.team)


def amounts_of(allocation: Allocation) -> Amounts:
    return gpus_of(allocation), allocation.cpu_milli, allocation.memory_bytes


def asked_by(shape: Shape) -> Amounts:
    needs = shape.requirements
    gpus, memory = least_gpus(shape), needs.memory_bytes or 0
    return gpus * needs.nodes, needs.cpu_milli * needs.nodes, memory * needs.nodes


def plus(amounts: Amounts, more: Amounts, sign: int = 1) -> Amounts:
    return amounts[0] + sign * more[0], amounts[1] + sign * more[1], amounts[2] + sign * more[2]


def total(amounts: Iterable[Amounts]) -> Amounts:
    gpus = cpus = memory = 0
    for each in amounts:
        gpus, cpus, memory = gpus + each[0], cpus + each[1], memory + each[2]
    return gpus, cpus, memory


class RoundingStep(NamedTuple):
    """Part of an allocation added for a holder with and without allocations."""

    amounts: Amounts
    while_holding: float
    while_idle: float


class RecentUsage:
    """Instead of decaying all sums, later time weighs more: `_scale` doubles each half-life, and `_clock` is the contended time
    so weighted. A holder's sum grows by its share times the clock's advance.
    """

    __slots__ = ("_clock", "_floors", "_marks", "_now", "_scale", "_sums", "steps")

    def __init__(self) -> None:
        self._now: Instant | None = None
        self._scale = 1.0
        self._clock = 0.0
        # Usage at which a holder of weight one begins: that of the holders served lately, among tenants (None) or in a team.
        self._floors: dict[int | None, float] = {}
        self._sums: dict[Holder, float] = {}
        self._marks: dict[Holder, float] = {}  # the clock when the sum was updated
        self.steps: dict[Holder, RoundingStep] = {}  # of holders with waiting tasks

    @property
    def is_any(self) -> bool:
        return self._clock > 0

    @property
    def clock(self) -> float:
        return self._clock

    def knows(self, holder: Holder) -> bool:
        return holder in self._sums

    def copy(self) -> RecentUsage:
        twin = RecentUsage()
        twin._now, twin._scale, twin._clock = self._now, self._scale, self._clock
        twin._floors = self._floors.copy()
        twin._sums, twin._marks = self._sums.copy(), self._marks.copy()
        twin.steps = self.steps.copy()
        return twin

    def pass_time(self, now: Instant, *, is_contended: bool) -> None:
        if self._now is None or now <= self._now:
            self._now = now if self._now is None else self._now
            return
        passed = (now - self._now) / HALF_LIFE
        self._now = now
        if passed > _LONG:
            steps = self.steps
            self.__init__()  # type: ignore[misc]  # all of it has decayed
            self._now, self.steps = now, steps
            return
        grown = self._scale * 2.0**passed
        if is_contended:
            self._clock += (grown - self._scale) / _LN2
        self._scale = grown
        if grown > _TOO_LARGE:
            self._rescale()

    def _rescale(self) -> None:
        factor, self._scale = 1 / self._scale, 1.0
        self._clock *= factor
        self._floors = {scope: each * factor for scope, each in self._floors.items()}
        self._sums = {holder: each * factor for holder, each in self._sums.items()}
        self._marks = {holder: each * factor for holder, each in self._marks.items()}

    def settle(self, holder: Holder, share: int) -> None:
        sum_ = self._sum(holder, share)
        self._sums.pop(holder, None)  # least recently changed first
        self._sums[holder] = sum_
        self._marks[holder] = self._clock
        if len(self._sums) > MAX_REMEMBERED:
            oldest = next(iter(self._sums))
            del self._sums[oldest], self._marks[oldest]

    def join(self, holder: Holder, scope: int | None, share: int, weight: int) -> None:
        """Begin to wait, with no less usage than the holders served meanwhile."""
        floor = self._floors.get(scope, 0.0) * weight / 1000
        self._sums[holder] = max(self._sum(holder, share), floor)
        self._marks[holder] = self._clock

    def serve(self, holder: Holder, scope: int | None, weight: int) -> None:
        """Move the scope's floor to the usage of the served holder."""
        self._marks.setdefault(holder, self._clock)
        floor = self._floors.get(scope, 0.0)
        mine = self._sums.setdefault(holder, floor * weight / 1000) * 1000 / weight
        self._floors[scope] = floor + (mine - floor) * _FOLLOWS

    def _sum(self, holder: Holder, share: int) -> float:
        since = self._marks.get(holder, self._clock)
        return self._sums.get(holder, 0.0) + share * (self._clock - since)

    def values(self) -> UsageValues:
        """All holders must be settled."""
        fine = _FINE * _LN2 / self._scale
        found: UsageValues = {holder: round(each * fine) for holder, each in self._sums.items()}
        found |= {("floor", scope or 0): round(each * fine) for scope, each in self._floors.items()}
        return found

    def restore(self, stored: StoredUsage, now: Instant) -> None:
        steps = self.steps
        self.__init__()  # type: ignore[misc]
        self._now, self.steps = now, steps
        for (kind, id_), (value, at) in stored.items():
            ages = max(0, now - at) / HALF_LIFE
            if ages > _LONG or value <= 0:
                continue
            sum_ = value / (_FINE * _LN2) * 2.0**-ages
            self._clock = 1.0  # above 0: there was contention
            if kind == "floor":
                self._floors[id_ or None] = sum_
            else:
                holder: Holder = ("team", id_) if kind == "team" else ("user", id_)
                self._sums[holder], self._marks[holder] = sum_, self._clock

    def recent(self, holder: Holder, share: int) -> int:
        """`PAST` times the average share, in millionths; `share`: held since the last update."""
        return max(0, round(PAST * self._sum(holder, share) / self._scale * _LN2))


class Shares:
    __slots__ = (
        "_all",
        "_held",
        "_lent",
        "_nodes",
        "_scopes",
        "_settled_at",
        "_waiting",
        "predictions",
        "usage",
        "weights",
    )

    def __init__(self, predictions: Predictions | None = None) -> None:
        self.predictions = predictions or Predictions()  # only read
        self._lent, self._all = [0, 0, 0], [0, 0, 0]
        self.usage = RecentUsage()
        self.weights: Mapping[Holder, int] = {}  # of the policy
        self._nodes: dict[NodeId, Amounts] = {}
        self._held: dict[Holder, list[int]] = {}
        self._waiting: dict[Holder, int] = {}  # shapes
        self._scopes: dict[Holder, int | None] = {}  # of the holder's last waiting shape
        self._settled_at = 0.0  # usage clock when the pool last changed

    def begin_waiting(self, shape: Shape) -> None:
        step, steps = self._step(shape), self.usage.steps
        for holder, scope in scopes_of(shape):
            steps[holder] = min(step, steps.get(holder, step))
            waiting = self._waiting.get(holder, 0)
            self._waiting[holder] = waiting + 1
            self._scopes[holder] = scope
            if not waiting and self.usage.is_any:
                held = self._held.get(holder)
                share = 0 if held is None else self._dominant(held)
                self.usage.join(holder, scope, share, self._weight(holder))

    def end_waiting(self, shape: Shape) -> None:
        for holder, _ in scopes_of(shape):
            self._waiting[holder] -= 1
            if not self._waiting[holder]:
                del self._waiting[holder], self._scopes[holder]
                self.usage.steps.pop(holder, None)

    def _step(self, shape: Shape) -> RoundingStep:
        lasts = self.predictions.of(shape)
        if lasts is None:
            return RoundingStep(asked_by(shape), 0.5, 0.0)
        kept = 1 - 2.0 ** (-lasts / HALF_LIFE)
        return RoundingStep(asked_by(shape), min(1.0, lasts / _HOUR) / 2, min(1.0, PAST * kept / 2))

    def pass_time(self, now: Instant, waiting: int) -> None:
        """Held shares count as usage if any shape of the pool waited."""
        self.usage.pass_time(now, is_contended=waiting > 0)

    def settle(self, now: Instant, waiting: int) -> None:
        self.pass_time(now, waiting)
        for holder, held in self._held.items():
            self.usage.settle(holder, self._dominant(held))

    def values(self, now: Instant, waiting: int) -> UsageValues:
        self.settle(now, waiting)
        return self.usage.values()

    def restore(self, stored: StoredUsage, now: Instant) -> None:
        """Waiting holders without a stored value join the others."""
        usage = self.usage
        usage.restore(stored, now)
        for holder, scope in self._scopes.items():
            if usage.is_any and not usage.knows(holder):
                usage.join(holder, scope, 0, self._weight(holder))

    def put(self, node: Node) -> None:
        offer, lent = node.offer, None
        if is_open(node):
            gpus = sum(not gpu.closed and gpu.index not in node.gpus_withheld for gpu in offer.gpus)
            lent = (1000 * gpus, offer.cpu_milli, offer.memory_bytes)
        if lent == self._nodes.get(node.id):
            return
        self.remove(node.id)
        if lent is not None:
            self._settle_usage()
            self._nodes[node.id] = lent
            self._add(self._lent, lent, 1)

    def remove(self, node: NodeId) -> None:
        lent = self._nodes.pop(node, None)
        if lent is not None:
            self._settle_usage()
            self._add(self._lent, lent, -1)

    def _settle_usage(self) -> None:
        usage = self.usage
        if self._settled_at == usage.clock:
            return  # nothing was used since
        self._settled_at = usage.clock
        for holder, held in self._held.items():
            if usage.knows(holder):
                usage.settle(holder, self._dominant(held))

    def take(self, shape: Shape, amounts: Amounts) -> None:
        self._add(self._all, amounts, 1)
        step: RoundingStep | None = None
        for holder, scope in scopes_of(shape):
            if holder in self._waiting:
                step = self._step(shape) if step is None else step
                self.usage.steps[holder] = step
            held = self._held.get(holder)
            if held is None:
                held = self._held[holder] = [0, 0, 0]
            if self.usage.knows(holder):  # else it begins at the floor of its scope
                self.usage.settle(holder, self._dominant(held))
            self.usage.serve(holder, scope, self._weight(holder))
            self._add(held, amounts, 1)

    def _weight(self, holder: Holder) -> int:
        return max(1, self.weights.get(holder, 1000))

    def give(self, shape: Shape, amounts: Amounts) -> None:
        self._add(self._all, amounts, -1)
        for holder, scope in scopes_of(shape):
            held = self._held.get(holder)
            if held is not None:
                self.usage.settle(holder, self._dominant(held))
                self.usage.serve(holder, scope, self._weight(holder))
                self._add(held, amounts, -1)
                if not any(held):
                    del self._held[holder]

    @staticmethod
    def _add(total: list[int], amounts: Amounts, sign: int) -> None:
        total[0] += sign * amounts[0]
        total[1] += sign * amounts[1]
        total[2] += sign * amounts[2]

    def of(self, holder: Holder, weight_milli: int = 1000, more: Amounts | None = None) -> int:
        """In millionths of the pool per weight; `more`: held besides."""
        held = self._held.get(holder)
        gpu, cpu, memory = held or (0, 0, 0)
        if more is not None:
            gpu, cpu, memory = gpu + more[0], cpu + more[1], memory + more[2]
        share = self._dominant((gpu, cpu, memory))
        past = 0
        if self.usage.is_any:
            past = self.usage.recent(holder, 0 if held is None else self._dominant(held))
        step = self.usage.steps.get(holder)
        if step is not None:
            one = self._dominant(step.amounts)
            least, part = (share, step.while_holding) if share else (past, step.while_idle)
            share += min(least, int(one * part))
        return (share + past) * 1000 // max(1, weight_milli)

    def now(self, holder: Holder, weight_milli: int = 1000, more: Amounts = (0, 0, 0)) -> int:
        held = self._held.get(holder, (0, 0, 0))
        amounts = (held[0] + more[0], held[1] + more[1], held[2] + more[2])
        return self._dominant(amounts) * 1000 // max(1, weight_milli)

    def recent(self, holder: Holder, weight_milli: int = 1000) -> int:
        if not self.usage.is_any:
            return 0
        held = self._held.get(holder)
        had = self.usage.recent(holder, 0 if held is None else self._dominant(held))
        return had * 1000 // max(1, weight_milli)

    def _dominant(self, amounts: Sequence[int]) -> int:
        gpus, cpus, memories = self._lent
        return max(
            amounts[0] * ALL // gpus if gpus else 0,
            amounts[1] * ALL // cpus if cpus else 0,
            amounts[2] * ALL // memories if memories else 0,
        )

    def truth(self) -> Mapping[Holder, list[int]]:
        return self._held
