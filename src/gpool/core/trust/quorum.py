"""Decision of a quorum over siblings' answers, and of the consumer's check function. Pure.

`verify=2` starts two siblings and accepts if both agree. If they differ, one further sibling that sides with a liar
would decide: colluders with a share k of the nodes would win with about 3 k^2. A value therefore needs, once answers
differ, a lead of `lead` over the next value. With k = 10 %: k^2 + 2 k (1 - k) k^3 = 0.0102 instead of 0.0280.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpool.core.trust.comparison import Same


@dataclass(frozen=True, slots=True)
class Quorum:
    """`needed`: answers that suffice if all agree. `lead`: over the next value otherwise. `most`: siblings in all."""

    needed: int
    lead: int
    most: int


QUORUMS = {2: Quorum(2, 3, 7), 3: Quorum(3, 4, 9)}
"""By the number given as `verify`."""

COMPARERS = {2: Quorum(2, 2, 7), 3: Quorum(3, 3, 9)}
"""Owners that run the consumer's comparator on answers whose hashes differ, by the number given as `verify`."""


def comparers_of(siblings: int) -> Quorum:
    """Return the rule for reports of comparers; that of `verify=2` for spot checks."""
    return COMPARERS[max(2, siblings)]


@dataclass(frozen=True, slots=True)
class QuorumReached:
    """`answer`: index of the accepted one. `losers` gave another answer and are not paid."""

    answer: int
    winners: tuple[int, ...]
    losers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class More:
    """Number of further siblings without which no value can be accepted."""

    siblings: int


@dataclass(frozen=True, slots=True)
class Disagreed:
    """No value can reach its quorum within the limit. The parent fails, nobody is paid and nobody is blamed."""

    answers: int


Decision = QuorumReached | More | Disagreed


def decide(quorum: Quorum, answers: int, same: Same) -> Decision:
    """Decide on `answers` answers, numbered from 0, of which `same` compares two.

    A tolerance is not transitive: the supporters of an answer are those that agree with it, and the next value is the
    largest support outside of them. The lowest index wins between equal supports.
    """
    supports = [
        frozenset(other for other in range(answers) if other == one or same(one, other))
        for one in range(answers)
    ]
    best = max(supports, key=len, default=frozenset[int]())
    following = max((len(support - best) for support in supports), default=0)
    wanted = quorum.needed if following == 0 else max(quorum.needed, following + quorum.lead)
    if len(best) >= wanted:
        losers = tuple(sorted(set(range(answers)) - best))
        return QuorumReached(supports.index(best), tuple(sorted(best)), losers)
    missing = wanted - len(best)
    if answers + missing > quorum.most:
        return Disagreed(answers)
    return More(missing)


CHECK_LEAD = 2
MOST_CHECKS = 7


def decide_check(passed: Sequence[bool]) -> Decision:
    """Decide `verify="check"` from the results of the consumer's check function, each on another owner's node.

    The first result, if true, accepts the answer. A false one needs confirmation, since a lying checker could take
    another owner's pay: then true or false needs a lead of `CHECK_LEAD`. `QuorumReached.answer` is the index of a check that
    agrees with the decision; `passed[answer]` is the decision itself.
    """
    if not passed:
        return More(1)
    if all(passed):
        return QuorumReached(0, tuple(range(len(passed))), ())
    trues = sum(passed)
    difference = 2 * trues - len(passed)
    if abs(difference) >= CHECK_LEAD:
        is_right = difference > 0
        winners = tuple(index for index, result in enumerate(passed) if result is is_right)
        losers = tuple(index for index, result in enumerate(passed) if result is not is_right)
        return QuorumReached(winners[0], winners, losers)
    missing = CHECK_LEAD - abs(difference)
    return Disagreed(len(passed)) if len(passed) + missing > MOST_CHECKS else More(missing)
