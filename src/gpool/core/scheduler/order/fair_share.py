"""How much of the pool each team and each user has: dominant shares now, and lately under contention. It counts; orders compare.

**Who is compared.** A tenant is a team, or a user who works for none. Tenants are compared first, the users of one team
after that: a team of a thousand users has one share, not a thousand. Nor has a user with a thousand teams: what they have in
all of them together counts for each, where that is more than the team has (`compared`).

**What is compared.** The dominant share: of GPUs, CPU and memory, the one of which a holder has most, in millionths of what
the pool lends, divided by its weight. To what it holds now comes what it had lately *while others waited*, worn off with a
half-life (`HALF_LIFE`): who took large pieces gives way afterwards, and the roundings of small pools even out. What was taken
while nobody else wanted it is free, and who was away comes back with no credit: in any hour in which all have tasks waiting,
all get their share. The half-life is a small part of an hour, so that what one hour gave too much is not paid for in the next;
and what was had counts more than what is held (`PAST`), or half of a lasting disadvantage would never be made good.

**How pieces are rounded.** Pieces are large and long, and a share is to be met on average, not to be passed by a whole piece
before others have their turn. So a holder is seen with half of a piece besides (`Step`): a share of five pieces and a third is
five then, not six; what runs for less than an hour counts for as much less, since that evens out by itself. And who takes
turns with others, holding nothing in between, is seen with half of what the piece will add to its past. All tasks of a holder
are seen with the same piece, so its own keep their order, and who has had nothing lately is seen with nothing besides.

What is held is truth, rebuilt from the store with the rest. What was held lately is a hint. It is handed on in a rebuild and
told to whoever keeps it (`Shares.told`, `Shares.recall`), so that a restart forgives nobody; lost, everybody starts even.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import log
from typing import NamedTuple

from gpool.core.ids import NodeId
from gpool.core.model import SECOND, Allocation, Instant, Node, Shape, Span
from gpool.core.scheduler.order.limits import Holder, gpus_of, least_gpus
from gpool.core.scheduler.place.fit import is_open
from gpool.core.scheduler.predict.predictions import Predictions

HALF_LIFE = Span(1200 * SECOND)
PAST = 3  # what was had lately counts so many times what is held
ALL = 1_000_000
MAX_REMEMBERED = 10_000
_HOUR = Span(3600 * SECOND)
_LN2 = log(2)
_LONG = 40  # half-lives, after which nothing is left
_TOO_LARGE = 2.0**200
Told = dict[tuple[str, int], int]
"""What was had lately, by kind (`user`, `team`, or `floor` of a team or of all: 0) and id, in billionths of the pool."""
_FOLLOWS = 0.25
_FINE = 1000  # billionths in a millionth
Amounts = tuple[int, int, int]  # thousandths of GPUs, of CPUs, bytes of memory


def tenant_of(shape: Shape) -> Holder:
    return ("user", shape.user) if shape.team is None else ("team", shape.team)


def compared(shape: Shape, team: int, user: int, weights: Mapping[Holder, int]) -> tuple[int, int]:
    """The shares of a team and of its user, to be compared with other tenants' and with the team's other users'.

    Anybody may make teams, so a user alone in many must not have a share in each. A weight that an operator gave the team is
    its users' as well.
    """
    assert shape.team is not None
    own = max(1, weights.get(("user", shape.user), 1000))
    most = max(own, weights.get(("team", shape.team), 1000))
    return max(team, user * own // most), user


def scopes_of(shape: Shape) -> tuple[tuple[Holder, int | None], ...]:
    """Who holds what it takes, and among whom that is compared: tenants with each other, users within their team."""
    if shape.team is None:
        return ((("user", shape.user), None),)
    return (("team", shape.team), None), (("user", shape.user), shape.team)


def amounts_of(allocation: Allocation) -> Amounts:
    return gpus_of(allocation), allocation.cpu_milli, allocation.memory_bytes


def asked_by(shape: Shape) -> Amounts:
    """The least that one start takes, as far as can be said without knowing the node."""
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


class Step(NamedTuple):
    """A piece, and how much of it counts besides what a holder has: of one who holds something, and of one who does not."""

    piece: Amounts
    beside: float
    between: float


class Usage:
    """What holders had lately under contention: an average share, worn off by half each `HALF_LIFE`. A hint.

    Instead of wearing off what all of them had, what comes later weighs more: `_scale` doubles each half-life, and `_clock` is
    the contended time so weighed. A holder's sum grows by its share times the clock's advance, reckoned when its share changes.
    """

    __slots__ = ("_clock", "_floors", "_marks", "_now", "_scale", "_sums", "steps")

    def __init__(self) -> None:
        self._now: Instant | None = None
        self._scale = 1.0
        self._clock = 0.0
        # Where those of weight one begin who join: what those had who were served lately, among tenants (None) or in a team.
        self._floors: dict[int | None, float] = {}
        self._sums: dict[Holder, float] = {}
        self._marks: dict[Holder, float] = {}  # the clock when the sum was reckoned
        self.steps: dict[Holder, Step] = {}  # of those who wait

    @property
    def is_any(self) -> bool:
        return self._clock > 0

    @property
    def clock(self) -> float:
        """Grows while anybody has to wait; no measure of time."""
        return self._clock

    def knows(self, holder: Holder) -> bool:
        return holder in self._sums

    def copy(self) -> Usage:
        twin = Usage()
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
            self.__init__()  # type: ignore[misc]  # all of it has worn off
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
        """Its share is about to change."""
        sum_ = self._sum(holder, share)
        self._sums.pop(holder, None)  # the one that changed least lately stands first
        self._sums[holder] = sum_
        self._marks[holder] = self._clock
        if len(self._sums) > MAX_REMEMBERED:
            oldest = next(iter(self._sums))
            del self._sums[oldest], self._marks[oldest]

    def join(self, holder: Holder, scope: int | None, share: int, weight: int) -> None:
        """It wants something again: with what it had left, but no better than those who were served meanwhile."""
        floor = self._floors.get(scope, 0.0) * weight / 1000
        self._sums[holder] = max(self._sum(holder, share), floor)
        self._marks[holder] = self._clock

    def serve(self, holder: Holder, scope: int | None, weight: int) -> None:
        """It gets or gives back something: where those begin who join later follows what such holders had."""
        self._marks.setdefault(holder, self._clock)
        floor = self._floors.get(scope, 0.0)
        mine = self._sums.setdefault(holder, floor * weight / 1000) * 1000 / weight
        self._floors[scope] = floor + (mine - floor) * _FOLLOWS

    def _sum(self, holder: Holder, share: int) -> float:
        since = self._marks.get(holder, self._clock)
        return self._sums.get(holder, 0.0) + share * (self._clock - since)

    def told(self) -> Told:
        """As of now, when all have been settled."""
        fine = _FINE * _LN2 / self._scale
        found: Told = {holder: round(each * fine) for holder, each in self._sums.items()}
        found |= {("floor", scope or 0): round(each * fine) for scope, each in self._floors.items()}
        return found

    def recall(self, told: Mapping[tuple[str, int], tuple[int, Instant]], now: Instant) -> None:
        """In place of all it knows: what was told, each at its time."""
        steps = self.steps
        self.__init__()  # type: ignore[misc]
        self._now, self.steps = now, steps
        for (kind, id_), (value, at) in told.items():
            ages = max(0, now - at) / HALF_LIFE
            if ages > _LONG or value <= 0:
                continue
            sum_ = value / (_FINE * _LN2) * 2.0**-ages
            self._clock = 1.0  # there was some
            if kind == "floor":
                self._floors[id_ or None] = sum_
            else:
                holder: Holder = ("team", id_) if kind == "team" else ("user", id_)
                self._sums[holder], self._marks[holder] = sum_, self._clock

    def lately(self, holder: Holder, share: int) -> int:
        """`PAST` times the average share it had, in millionths, with `share` since it last changed."""
        return max(0, round(PAST * self._sum(holder, share) / self._scale * _LN2))


class Shares:
    """What holders have of what there is."""

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
        self.usage = Usage()
        self.weights: Mapping[Holder, int] = {}  # the policy's: where who joins begins
        self._nodes: dict[NodeId, Amounts] = {}
        self._held: dict[Holder, list[int]] = {}
        self._waiting: dict[Holder, int] = {}  # shapes
        self._scopes: dict[Holder, int | None] = {}  # of those, the last one's
        self._settled_at = 0.0  # of the usage's clock, when the pool was last another

    def wants(self, shape: Shape) -> None:
        """Tasks of this shape wait. A holder of which nothing waited was served: it begins even with the others."""
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

    def rests(self, shape: Shape) -> None:
        """No more tasks of this shape wait."""
        for holder, _ in scopes_of(shape):
            self._waiting[holder] -= 1
            if not self._waiting[holder]:
                del self._waiting[holder], self._scopes[holder]
                self.usage.steps.pop(holder, None)

    def _step(self, shape: Shape) -> Step:
        lasts = self.predictions.of(shape)
        if lasts is None:
            return Step(asked_by(shape), 0.5, 0.0)
        kept = 1 - 2.0 ** (-lasts / HALF_LIFE)
        return Step(asked_by(shape), min(1.0, lasts / _HOUR) / 2, min(1.0, PAST * kept / 2))

    def pass_time(self, now: Instant, waiting: int) -> None:
        """Until now so many shapes had tasks waiting. Only then does what is held count as usage."""
        self.usage.pass_time(now, is_contended=waiting > 0)

    def settle(self, now: Instant, waiting: int) -> None:
        """Everybody's usage up to now."""
        self.pass_time(now, waiting)
        for holder, held in self._held.items():
            self.usage.settle(holder, self._dominant(held))

    def told(self, now: Instant, waiting: int) -> Told:
        """What everybody had lately, for `recall`."""
        self.settle(now, waiting)
        return self.usage.told()

    def recall(self, told: Mapping[tuple[str, int], tuple[int, Instant]], now: Instant) -> None:
        """What was told before this state began. Those who wait and of whom nothing was told begin even."""
        usage = self.usage
        usage.recall(told, now)
        for holder, scope in self._scopes.items():
            if usage.is_any and not usage.knows(holder):
                usage.join(holder, scope, 0, self._weight(holder))

    def put(self, node: Node) -> None:
        """Only what can be given out now is part of the pool."""
        offer, lent = node.offer, None
        if is_open(node):
            gpus = sum(not gpu.closed and gpu.index not in node.gpus_withheld for gpu in offer.gpus)
            lent = (1000 * gpus, offer.cpu_milli, offer.memory_bytes)
        if lent == self._nodes.get(node.id):
            return
        self.remove(node.id)
        if lent is not None:
            self._close_past()
            self._nodes[node.id] = lent
            self._add(self._lent, lent, 1)

    def remove(self, node: NodeId) -> None:
        lent = self._nodes.pop(node, None)
        if lent is not None:
            self._close_past()
            self._add(self._lent, lent, -1)

    def _close_past(self) -> None:
        """The pool is about to be another: what was had so far was a part of it as it was."""
        usage = self.usage
        if self._settled_at == usage.clock:
            return  # nothing was had since
        self._settled_at = usage.clock
        for holder, held in self._held.items():
            if usage.knows(holder):
                usage.settle(holder, self._dominant(held))

    def take(self, shape: Shape, amounts: Amounts) -> None:
        self._add(self._all, amounts, 1)
        step: Step | None = None
        for holder, scope in scopes_of(shape):
            if holder in self._waiting:
                step = self._step(shape) if step is None else step
                self.usage.steps[holder] = step
            held = self._held.get(holder)
            if held is None:
                held = self._held[holder] = [0, 0, 0]
            if self.usage.knows(holder):  # or it has no past, and begins where those do who join
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
        """Its dominant share as it is compared, in millionths of the pool for a weight of one; `more`: what it would have
        besides."""
        held = self._held.get(holder)
        gpu, cpu, memory = held or (0, 0, 0)
        if more is not None:
            gpu, cpu, memory = gpu + more[0], cpu + more[1], memory + more[2]
        share = self._dominant((gpu, cpu, memory))
        past = 0
        if self.usage.is_any:
            past = self.usage.lately(holder, 0 if held is None else self._dominant(held))
        step = self.usage.steps.get(holder)
        if step is not None:
            piece = self._dominant(step.piece)
            least, part = (share, step.beside) if share else (past, step.between)
            share += min(least, int(piece * part))
        return (share + past) * 1000 // max(1, weight_milli)

    def now(self, holder: Holder, weight_milli: int = 1000, more: Amounts = (0, 0, 0)) -> int:
        """The part of `of` that it holds, and nothing besides."""
        held = self._held.get(holder, (0, 0, 0))
        amounts = (held[0] + more[0], held[1] + more[1], held[2] + more[2])
        return self._dominant(amounts) * 1000 // max(1, weight_milli)

    def lately(self, holder: Holder, weight_milli: int = 1000) -> int:
        """The part of `of` that is past."""
        if not self.usage.is_any:
            return 0
        held = self._held.get(holder)
        had = self.usage.lately(holder, 0 if held is None else self._dominant(held))
        return had * 1000 // max(1, weight_milli)

    def _dominant(self, amounts: Sequence[int]) -> int:
        gpus, cpus, memories = self._lent
        return max(
            amounts[0] * ALL // gpus if gpus else 0,
            amounts[1] * ALL // cpus if cpus else 0,
            amounts[2] * ALL // memories if memories else 0,
        )

    @property
    def free_gpus(self) -> int:
        """Thousandths that nobody holds, wherever they are."""
        return self._lent[0] - self._all[0]

    def truth(self) -> Mapping[Holder, list[int]]:
        return self._held
