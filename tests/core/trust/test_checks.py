"""Attempts of tasks with a check function: which sibling comes next, and who has which part."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpool.core.trust.checks import (
    MOST_ATTEMPTS,
    CheckedAttempt,
    FailureConfirmed,
    NoneRight,
    ResultPassed,
    StartChecks,
    StartWorker,
    next_step,
    states_of,
)

REFUSED = CheckedAttempt((False, False))
RAISED = CheckedAttempt(failure=b"raised")


def test_a_result_is_checked_and_accepted() -> None:
    assert next_step([]) == StartWorker()
    assert next_step([CheckedAttempt()]) == StartChecks(0, 1)
    assert next_step([CheckedAttempt((True,))]) == ResultPassed(0)


def test_a_failed_check_is_confirmed_before_another_owner_runs_it() -> None:
    assert next_step([CheckedAttempt((False,))]) == StartChecks(0, 1)
    assert next_step([CheckedAttempt((False, True))]) == StartChecks(0, 2)
    assert next_step([REFUSED]) == StartWorker()
    assert next_step([REFUSED, CheckedAttempt((True,))]) == ResultPassed(1)
    assert next_step([REFUSED] * MOST_ATTEMPTS) == NoneRight()


def test_a_failure_counts_when_two_owners_report_it() -> None:
    assert next_step([RAISED]) == StartWorker()
    assert next_step([RAISED, REFUSED, RAISED]) == FailureConfirmed(0, 2)
    assert next_step([RAISED, CheckedAttempt(failure=b"exited")]) == StartWorker()


def test_a_value_that_cannot_be_checked_uses_up_an_attempt() -> None:
    assert next_step([CheckedAttempt(is_checkable=False)] * MOST_ATTEMPTS) == NoneRight()


def test_parts_in_the_verdict() -> None:
    assert states_of(CheckedAttempt((False, True, True, True))) == (
        "agreed",
        ("differed", "agreed", "agreed", "agreed"),
    )
    assert states_of(REFUSED) == ("differed", ("agreed", "agreed"))
    assert states_of(CheckedAttempt((False, True) * 3)) == ("void", ("void",) * 6)
    assert states_of(RAISED) == ("void", ())


attempts = st.builds(
    CheckedAttempt,
    st.lists(st.booleans(), max_size=8).map(tuple),
    st.sampled_from([None, None, b"a", b"b"]),
    st.booleans(),
)


@given(st.lists(attempts, max_size=5))
def test_a_result_is_accepted_only_with_more_passed_checks_than_failed(
    given_attempts: list[CheckedAttempt],
) -> None:
    match next_step(given_attempts):
        case ResultPassed(index):
            found = given_attempts[index]
            assert found.failure is None
            assert 2 * sum(found.passed) > len(found.passed)
        case FailureConfirmed(first, second):
            assert first != second
            assert given_attempts[first].failure == given_attempts[second].failure
        case StartWorker():
            assert len(given_attempts) < MOST_ATTEMPTS
        case _:
            pass
