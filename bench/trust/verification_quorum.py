"""Simulated tasks under `verify=2|3`: independent liars, and colluders under distinct owners.

Wrong results of colluders are rare (one in a million for 1 % and `verify=3`). They are estimated by strata: the number
of colluders among the first siblings has a known (hypergeometric) distribution; each stratum gets the same number of
tasks and its exact weight. It is no benchmark by itself: `bench.verification` runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from random import Random

from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.trust.quorum import QUORUMS, Decision, Disagreed, More, decide
from gpool.core.trust.siblings import SiblingNode, pick

RIGHT, COMMON_LIE = 0, -1


@dataclass(slots=True)
class LiarCounts:
    """`wrong`: wrong answers of siblings, `stood`: tasks with an accepted wrong answer, `failed`: without quorum."""

    tasks: int = 0
    siblings: int = 0
    wrong: int = 0
    stood: int = 0
    failed: int = 0


def independent_liars(nodes: int, share: float, verify: int, tasks: int, seed: int) -> LiarCounts:
    """Run tasks in a pool in which a share of the nodes gives a random wrong answer of 32 bits to every task."""
    random = Random(seed)
    secret = random.randbytes(32)
    places = [SiblingNode(NodeId(number), UserId(number)) for number in range(nodes)]
    liars = round(share * nodes)
    counts = LiarCounts(tasks=tasks)
    for task in range(tasks):
        answers: list[int] = []
        taken: set[UserId] = set()
        while isinstance(decision := _decide(verify, answers), More):
            for _ in range(decision.siblings):
                place = pick(secret, TaskId(task), len(answers), places, taken)
                assert place is not None
                taken.add(place.owner)
                answers.append(random.getrandbits(32) + 1 if place.node < liars else RIGHT)
        counts.siblings += len(answers)
        counts.wrong += sum(answer != RIGHT for answer in answers)
        if isinstance(decision, Disagreed):
            counts.failed += 1
        else:
            counts.stood += answers[decision.answer] != RIGHT
    return counts


@dataclass(frozen=True, slots=True)
class Collusion:
    """`wrong`: probability of an accepted wrong result; `bound`: share of colluders to the power of `verify`."""

    wrong: float
    bound: float
    siblings: float


def colluders(nodes: int, share: float, verify: int, tasks: int, seed: int) -> Collusion:
    """Estimate the wrong results if colluders always give one common lie and are never excluded."""
    random = Random(seed)
    count = round(share * nodes)
    wrong = siblings = 0.0
    for first in range(verify + 1):
        weight = comb(count, first) * comb(nodes - count, verify - first) / comb(nodes, verify)
        for _ in range(tasks):
            answers = [COMMON_LIE] * first + [RIGHT] * (verify - first)
            liars, left = count - first, nodes - verify
            while isinstance(decision := _decide(verify, answers), More):
                for _ in range(decision.siblings):
                    is_liar = random.randrange(left) < liars
                    liars, left = liars - is_liar, left - 1
                    answers.append(COMMON_LIE if is_liar else RIGHT)
            siblings += weight * len(answers) / tasks
            if not isinstance(decision, Disagreed) and answers[decision.answer] != RIGHT:
                wrong += weight / tasks
    return Collusion(wrong, share**verify, siblings)


def _decide(verify: int, answers: list[int]) -> Decision:
    return decide(QUORUMS[verify], len(answers), lambda one, other: answers[one] == answers[other])
