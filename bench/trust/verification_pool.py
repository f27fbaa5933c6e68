"""Simulated pool for spot checks: nodes with strategies, two rules of checking, earnings, extra compute.

Time passes in turns of one task (10 minutes). Each turn every admitted node gets one task; one task in ten is expensive
(price and compute 10 instead of 1), and each is of one of two environments. The answer 0 is right, positive ones are honest errors, negative ones lies; equal
numbers agree. The decisions are those of `gpool.core.trust`; the pool applies them. It is no benchmark by itself: `bench.verification` runs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import SECOND, Instant, Span
from gpool.core.trust import spot, standing
from gpool.core.trust.quorum import QUORUMS, Disagreed, More, Quorum, decide
from gpool.core.trust.randomness import PPM
from gpool.core.trust.siblings import SiblingNode, pick
from gpool.core.trust.spot import DEFAULT_SPOT, PassedChecks
from gpool.core.trust.standing import Standing
from gpool.core.trust.vesting import Unsettled, audit_order, consequences, has_vested

TASK_TIME = Span(600 * SECOND)
RIGHT, COMMON_LIE = 0, -1
EXPENSIVE, EXPENSIVE_SHARE = 10, 0.1
ENVIRONMENTS = 2
COST = 0.5
"""Cost of computing a task (electricity, or the GPU's use elsewhere) as part of its price."""
HONEST_ERROR = 1e-4
"""Probability that an honest computation is wrong, independent of other results."""


Lies = Callable[[int, bool, float], bool]


@dataclass(frozen=True, slots=True)
class Strategy:
    """`lies(tasks, is_expensive, chance)`: whether a node lies in its own task number `tasks` of this identity.

    `colludes`: liars give one common answer and confirm it as siblings. `copies`: it computes no sibling task; nothing
    is shown before it commits, so that it guesses. `renews`: it lies as soon as results are delivered unchecked, and
    returns under a new identity at once when it is caught.
    """

    name: str
    lies: Lies
    colludes: bool = False
    copies: bool = False
    renews: bool = False


def _never(_tasks: int, _is_expensive: bool, _chance: float) -> bool:
    return False


def _always(_tasks: int, _is_expensive: bool, _chance: float) -> bool:
    return True


def _one_in(number: int) -> Lies:
    return lambda _tasks, _is_expensive, chance: chance * number < 1


def _after(honest: int) -> Lies:
    return lambda tasks, _is_expensive, _chance: tasks > honest


def _if_expensive(_tasks: int, is_expensive: bool, _chance: float) -> bool:
    return is_expensive


HONEST = Strategy("honest", _never)
STRATEGIES = (
    Strategy("always", _always),
    Strategy("1 in 10", _one_in(10)),
    Strategy("1 in 100", _one_in(100)),
    Strategy("patient (50)", _after(50)),
    Strategy("patient (100)", _after(100)),
    Strategy("only expensive", _if_expensive),
    Strategy("collude", _after(50), colludes=True),
    Strategy("copy", _never, copies=True),
    Strategy("whitewash", _always, renews=True),
)


@dataclass(slots=True)
class SimulatedNode:
    """`passed`: checks by environment. `tasks`: own tasks since the identity began or was last caught. Earnings are in prices of a cheap task."""

    place: SiblingNode
    strategy: Strategy
    standing: Standing = field(default_factory=Standing)
    passed: list[int] = field(default_factory=lambda: [0] * ENVIRONMENTS)
    tasks: int = 0
    done: int = 0
    lies: int = 0
    lies_kept: int = 0
    bans: int = 0
    earned: float = 0.0
    spent: float = 0.0
    stake: int = 0
    unsettled: deque[Delivered] = field(default_factory=deque)


@dataclass(slots=True)
class Delivered:
    task: int
    price: int
    at: Instant
    answer: int
    is_checked: bool


@dataclass(slots=True)
class Totals:
    """Sums over the pool. Compute is in prices; `stood`: wrong results that were never withdrawn."""

    results: int = 0
    compute: int = 0
    extra: int = 0
    delivered_wrong: int = 0
    stood_wrong: int = 0
    undecided: int = 0


class Rule(Protocol):
    """Rule of checking: the pool's own one or BOINC's."""

    quorum: Quorum
    trusted_from: int
    """Passed checks after which results may be delivered unchecked."""

    def may_start(self, node: SimulatedNode, now: Instant) -> bool: ...

    def is_checked(self, node: SimulatedNode, task: int, price: int) -> bool:
        """The environment of a task is its number modulo `ENVIRONMENTS`."""
        ...

    def keep(self, pool: Pool, node: SimulatedNode, result: Delivered) -> None: ...

    def checked(self, pool: Pool, node: SimulatedNode, task: int, *, is_passed: bool) -> None: ...

    def compared(self, pool: Pool, node: SimulatedNode, *, is_passed: bool) -> None: ...


class Pool:
    """Nodes, totals and the randomness of one run; `step` runs one turn."""

    def __init__(self, nodes: int, liars: int, strategy: Strategy, rule: Rule, seed: int) -> None:
        self.random = Random(seed)
        self.secret = self.random.randbytes(32)
        self.rule = rule
        self.totals = Totals()
        self.now = Instant(0)
        self._tasks = 0
        self._answers = 1
        places = [SiblingNode(NodeId(number), UserId(number)) for number in range(nodes)]
        self.nodes = [
            SimulatedNode(place, strategy if number < liars else HONEST)
            for number, place in enumerate(places)
        ]
        self._places = places

    def step(self) -> None:
        for node in self.nodes:
            if self.rule.may_start(node, self.now):
                self._run(node)
        self.now = Instant(self.now + TASK_TIME)

    def _run(self, node: SimulatedNode) -> None:
        """Give a node one task, check it or not, deliver and pay."""
        chance = self.random.random
        price = EXPENSIVE if chance() < EXPENSIVE_SHARE else 1
        self._tasks += 1
        task = self._tasks * ENVIRONMENTS + int(chance() * ENVIRONMENTS)
        node.tasks += 1
        node.done += 1
        self.totals.results += 1
        self.totals.compute += price
        answer = self._own_answer(node, price)
        if not self.rule.is_checked(node, task, price):
            self.totals.delivered_wrong += answer != RIGHT
            self.rule.keep(self, node, Delivered(task, price, self.now, answer, is_checked=False))
            return
        accepted = self.check(node, task, price, answer)
        if accepted is None:
            self.totals.undecided += 1
            return
        self.totals.delivered_wrong += accepted != RIGHT
        if accepted == answer:
            self.rule.keep(self, node, Delivered(task, price, self.now, answer, is_checked=True))
        else:
            self.totals.stood_wrong += accepted != RIGHT
        self.rule.checked(self, node, task, is_passed=accepted == answer)

    def _own_answer(self, node: SimulatedNode, price: int) -> int:
        strategy = node.strategy
        if strategy.lies is _never or (
            strategy.renews and sum(node.passed) < self.rule.trusted_from
        ):
            return self._computed(node, price)
        if not strategy.lies(node.tasks, price == EXPENSIVE, self.random.random()):
            return self._computed(node, price)
        node.lies += 1
        return COMMON_LIE if strategy.colludes else -self._new_answer()

    def _computed(self, node: SimulatedNode, price: int) -> int:
        node.spent += COST * price
        return self._new_answer() if self.random.random() < HONEST_ERROR else RIGHT

    def _new_answer(self) -> int:
        """Number of an answer that nobody else gives."""
        self._answers += 1
        return self._answers

    def _sibling_answer(self, node: SimulatedNode, price: int, first: int) -> int:
        if node.strategy.copies:
            return -self._new_answer()
        if node.strategy.colludes and first == COMMON_LIE:
            return COMMON_LIE
        return self._computed(node, price)

    def check(self, node: SimulatedNode, task: int, price: int, answer: int) -> int | None:
        """Run siblings until the quorum decides; return the accepted answer, None if there is none."""
        runners, answers = [node], [answer]
        taken = {node.place.owner}
        while True:
            decision = decide(
                self.rule.quorum, len(answers), lambda one, other: answers[one] == answers[other]
            )
            if isinstance(decision, Disagreed):
                return None
            if not isinstance(decision, More):
                break
            for _ in range(decision.siblings):
                runner = self._sibling(task, len(runners), taken)
                taken.add(runner.place.owner)
                runners.append(runner)
                answers.append(self._sibling_answer(runner, price, answer))
                self.totals.extra += price
        for index in (*decision.winners, *decision.losers):
            if index:
                is_winner = index in decision.winners
                runners[index].earned += price if is_winner else 0
                self.rule.compared(self, runners[index], is_passed=is_winner)
        return answers[decision.answer]

    def _sibling(self, task: int, number: int, taken: set[UserId]) -> SimulatedNode:
        """Draw a node of another owner that is not banned."""
        refused = set(taken)
        while True:
            place = pick(
                self.secret, TaskId(task), number + len(refused) * 16, self._places, refused
            )
            assert place is not None, "every owner is banned or has a sibling"
            found = self.nodes[place.node]
            if self.now >= found.standing.banned_until:
                return found
            refused.add(place.owner)

    def rerun(self, node: SimulatedNode, task: int, price: int) -> None:
        """Run a withdrawn result again, on any other node, and keep its answer."""
        runner = self._sibling(task, 1, {node.place.owner})
        answer = self._own_answer(runner, price)
        runner.earned += price
        self.totals.extra += price
        self.totals.stood_wrong += answer != RIGHT
        runner.lies_kept += answer < RIGHT

    def finish(self) -> None:
        """Count what has not vested as earned and accepted, in favour of liars."""
        for node in self.nodes:
            for result in node.unsettled:
                settle(self, node, result)
            node.unsettled.clear()


def settle(pool: Pool, node: SimulatedNode, result: Delivered) -> None:
    node.earned += result.price
    if result.answer != RIGHT:
        pool.totals.stood_wrong += 1
        node.lies_kept += result.answer < RIGHT


class SpotRule:
    """The pool's rule: `core.trust.spot` chooses, `standing` judges, `vesting` withdraws."""

    quorum = QUORUMS[2]
    trusted_from = DEFAULT_SPOT.probation

    def __init__(self) -> None:
        self._policy = DEFAULT_SPOT
        self._secret = b"the server's secret, unknown to nodes"

    def may_start(self, node: SimulatedNode, now: Instant) -> bool:
        known = sum(node.passed)
        if not spot.may_start(self._policy, node.standing, PassedChecks(known, known), now):
            return False
        if known < self._policy.probation:
            node.standing = standing.started(node.standing, now)
        return True

    def is_checked(self, node: SimulatedNode, task: int, price: int) -> bool:
        passed = PassedChecks(node.passed[task % ENVIRONMENTS], sum(node.passed))
        rate = spot.check_rate(self._policy, node.standing, passed, price, node.stake)
        return spot.is_chosen(self._secret, TaskId(task), 1, b"", rate)

    def keep(self, pool: Pool, node: SimulatedNode, result: Delivered) -> None:
        queue = node.unsettled
        queue.append(result)
        node.stake += result.price
        while has_vested(queue[0].at, self._policy.window, pool.now):
            vested = queue.popleft()
            node.stake -= vested.price
            settle(pool, node, vested)

    def checked(self, pool: Pool, node: SimulatedNode, task: int, *, is_passed: bool) -> None:
        node.standing = standing.checked(node.standing, is_passed=is_passed)
        if is_passed:
            node.passed[task % ENVIRONMENTS] += 1
        else:
            node.passed = [spot.after_failure(self._policy, passed) for passed in node.passed]
            self._audit(pool, node)
        if node.standing.is_caught:
            self._punish(pool, node)

    def compared(self, pool: Pool, node: SimulatedNode, *, is_passed: bool) -> None:
        node.standing = standing.compared(node.standing, is_passed=is_passed)
        if node.standing.is_caught:
            self._punish(pool, node)

    def _audit(self, pool: Pool, node: SimulatedNode) -> None:
        """Check unsettled results in random order until the node is cleared or caught."""
        results = {one.task: one for one in node.unsettled}
        for task in audit_order(self._secret, _values(node.unsettled)):
            if not node.standing.is_suspect or node.standing.is_caught:
                return
            result = results[task]
            accepted = pool.check(node, task, result.price, result.answer)
            if accepted is None:
                continue
            is_passed = accepted == result.answer
            node.standing = standing.checked(node.standing, is_passed=is_passed)
            result.is_checked = True
            if not is_passed:
                node.unsettled.remove(result)
                node.stake -= result.price
                pool.totals.stood_wrong += accepted != RIGHT

    def _punish(self, pool: Pool, node: SimulatedNode) -> None:
        results = {one.task: one for one in node.unsettled}
        found = consequences(list(_values(node.unsettled)))
        for task in found.reruns:
            pool.rerun(node, task, results[task].price)
        for result in node.unsettled:
            if result.is_checked:
                pool.totals.stood_wrong += result.answer != RIGHT
                node.lies_kept += result.answer < RIGHT
        node.unsettled.clear()
        node.stake = node.tasks = 0
        node.passed = [0] * ENVIRONMENTS
        node.bans += 1
        node.standing = standing.banned(node.standing, pool.now)
        if node.strategy.renews:
            node.standing = Standing()


def _values(results: Sequence[Delivered] | deque[Delivered]) -> Iterator[Unsettled]:
    for one in results:
        yield Unsettled(TaskId(one.task), one.price, one.at, one.is_checked)


class BoincRule:
    """BOINC's adaptive replication: check all below 10 consecutive valid results, then 1 in that number.

    `passed[0]` counts valid results of checked tasks, of both environments together, and falls to 0 with an invalid
    one. Unchecked results are final.
    """

    quorum = Quorum(2, 1, 9)
    trusted_from = 10

    def may_start(self, node: SimulatedNode, now: Instant) -> bool:
        return True

    def is_checked(self, node: SimulatedNode, task: int, price: int) -> bool:
        valid = node.passed[0]
        if valid < self.trusted_from:
            return True
        return spot.is_chosen(b"boinc", TaskId(task), 1, b"", PPM // valid)

    def keep(self, pool: Pool, node: SimulatedNode, result: Delivered) -> None:
        settle(pool, node, result)

    def checked(self, pool: Pool, node: SimulatedNode, task: int, *, is_passed: bool) -> None:
        if is_passed:
            node.passed[0] += 1
        else:
            node.passed[0] = node.tasks = 0

    def compared(self, pool: Pool, node: SimulatedNode, *, is_passed: bool) -> None:
        if not is_passed:
            node.passed[0] = 0
