"""Decisions of a quorum over siblings, and of the consumer's check function."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.trust.comparison import Tolerance, by_tolerance
from gpool.core.trust.quorum import (
    COMPARERS,
    MOST_CHECKS,
    QUORUMS,
    Decision,
    Disagreed,
    More,
    QuorumReached,
    decide,
    decide_check,
)


def decided(verify: int, answers: str) -> Decision:
    return decide(QUORUMS[verify], len(answers), lambda one, other: answers[one] == answers[other])


@pytest.mark.parametrize(
    ("verify", "answers", "decision"),
    [
        (2, "", More(2)),
        (2, "a", More(1)),
        (2, "aa", QuorumReached(0, (0, 1), ())),
        (2, "ab", More(3)),
        (2, "aba", More(2)),
        (2, "abaaa", QuorumReached(0, (0, 2, 3, 4), (1,))),
        (2, "babbb", QuorumReached(0, (0, 2, 3, 4), (1,))),
        (2, "abcaa", More(1)),
        (2, "abcaaa", QuorumReached(0, (0, 3, 4, 5), (1, 2))),
        (2, "abcd", More(3)),
        (2, "abcde", Disagreed(5)),
        (2, "ababab", Disagreed(6)),
        (3, "", More(3)),
        (3, "aaa", QuorumReached(0, (0, 1, 2), ())),
        (3, "aab", More(3)),
        (3, "aabaaa", QuorumReached(0, (0, 1, 3, 4, 5), (2,))),
    ],
)
def test_a_quorum_decides(verify: int, answers: str, decision: Decision) -> None:
    assert decided(verify, answers) == decision


@given(st.sampled_from([2, 3]), st.text("abc", max_size=12))
def test_further_siblings_are_wanted_up_to_the_limit_only(verify: int, answers: str) -> None:
    match decided(verify, answers):
        case More(siblings):
            assert siblings > 0
            assert len(answers) + siblings <= QUORUMS[verify].most
        case QuorumReached(answer, winners, losers):
            assert {*winners, *losers} == set(range(len(answers)))
            assert all(answers[one] == answers[answer] for one in winners)
            assert len(winners) >= verify
        case Disagreed():
            assert len(set(answers)) > 1


@pytest.mark.parametrize("verify", [2, 3])
@pytest.mark.parametrize("share", [0.01, 0.05, 0.1])
def test_colluders_win_with_little_more_than_the_bound(verify: int, share: float) -> None:
    """Sum over all courses of colluders (b) and honest nodes (a), by their probability."""
    wrong, courses = 0.0, {"": 1.0}
    while courses:
        following: dict[str, float] = {}
        for answers, probability in courses.items():
            match decided(verify, answers):
                case More(siblings):
                    for added in product("ab", repeat=siblings):
                        part = share ** added.count("b") * (1 - share) ** added.count("a")
                        key = answers + "".join(added)
                        following[key] = following.get(key, 0.0) + probability * part
                case QuorumReached(answer):
                    wrong += probability * (answers[answer] == "b")
                case Disagreed():
                    pass
        courses = following
    assert share**verify <= wrong <= 1.1 * share**verify


def test_a_tolerance_that_is_not_transitive_counts_supporters_of_one_answer() -> None:
    answers = [1.0, 1.09, 1.18, 1.09]
    found = decide(QUORUMS[2], 4, by_tolerance(answers, Tolerance(absolute=0.1)))
    assert found == QuorumReached(1, (0, 1, 2, 3), ())


def test_a_check_that_passes_accepts_at_once() -> None:
    assert decide_check([]) == More(1)
    assert decide_check([True]) == QuorumReached(0, (0,), ())


def test_a_check_that_fails_needs_confirmation() -> None:
    assert decide_check([False]) == More(1)
    assert decide_check([False, False]) == QuorumReached(0, (0, 1), ())
    assert decide_check([False, True]) == More(2)
    assert decide_check([False, True, True, True]) == QuorumReached(1, (1, 2, 3), (0,))
    assert decide_check([False, True, False, False]) == QuorumReached(0, (0, 2, 3), (1,))
    assert decide_check([False, True] * 3) == Disagreed(6)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.1])
def test_lying_checkers_seldom_decide(share: float) -> None:
    """Sum over all courses of lying checkers (F) and honest ones (T) for a right answer; lies for a wrong one likewise."""
    refused = approved = 0.0
    for length in range(1, MOST_CHECKS + 1):
        for checks in product([True, False], repeat=length):
            if any(not isinstance(decide_check(checks[:end]), More) for end in range(length)):
                continue
            decision = decide_check(checks)
            if isinstance(decision, QuorumReached):
                lies = checks.count(False)
                if not checks[decision.answer]:
                    refused += share**lies * (1 - share) ** (length - lies)
                else:
                    approved += share ** (length - lies) * (1 - share) ** lies
    assert refused <= 1.5 * share**2  # a right answer refused
    assert share <= approved <= 1.1 * share  # a wrong answer approved, if the worker is a liar


@given(st.lists(st.booleans(), max_size=MOST_CHECKS))
def test_checks_are_wanted_up_to_the_limit_only(passed: list[bool]) -> None:
    found = decide_check(passed)
    if isinstance(found, More):
        assert len(passed) + found.siblings <= MOST_CHECKS


@pytest.mark.parametrize("verify", [2, 3])
@pytest.mark.parametrize("share", [0.01, 0.05, 0.1])
def test_colluding_comparers_decide_little_more_often_than_all_of_the_first_collude(
    verify: int, share: float
) -> None:
    quorum = COMPARERS[verify]

    def decision(reports: tuple[bool, ...]) -> Decision:
        return decide(quorum, len(reports), lambda one, other: reports[one] is reports[other])

    wrong = 0.0
    for length in range(1, quorum.most + 1):
        for reports in product([True, False], repeat=length):
            if any(not isinstance(decision(reports[:end]), More) for end in range(1, length)):
                continue
            found = decision(reports)
            if isinstance(found, QuorumReached) and not reports[found.answer]:
                lies = length - sum(reports)
                wrong += share**lies * (1 - share) ** (length - lies)
    assert share**verify <= wrong <= 1.5 * share**verify
