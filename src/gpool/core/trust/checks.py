"""Attempts of a task with `verify="check"`: one owner runs it, others run the consumer's check of its result. Pure.

    attempt 1   Eve returns 7       checks false, false    refused
    attempt 2   Bob returns 1229    check true             accepted

No owner has two parts in one task. Exceptions cannot be checked: two owners must report the same failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpool.core.trust.quorum import Disagreed, More, QuorumReached, decide_check

OWNERS_OF_A_CHECK = 2
"""`Requirements.siblings` of such a task: one owner runs it, one checks."""

MOST_ATTEMPTS = 3
"""Answers of workers after which a task fails without a right one."""

NUMBERS = 1 << 20
"""Numbers of siblings in an attempt: the first is the worker's, the others are checks."""


@dataclass(frozen=True, slots=True)
class CheckedAttempt:
    """A worker's answer. `failure`: digest of its failure. `is_checkable`: its value can be given to a check."""

    passed: tuple[bool, ...] = ()
    failure: bytes | None = None
    is_checkable: bool = True

    @property
    def is_right(self) -> bool | None:
        """Return what its checks decided; None: nothing."""
        found = decide_check(self.passed)
        return self.passed[found.answer] if isinstance(found, QuorumReached) else None


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Run the task on a further owner's node."""


@dataclass(frozen=True, slots=True)
class StartChecks:
    attempt: int
    checks: int


@dataclass(frozen=True, slots=True)
class ResultPassed:
    attempt: int


@dataclass(frozen=True, slots=True)
class FailureConfirmed:
    """Two owners reported the same failure."""

    first: int
    second: int


@dataclass(frozen=True, slots=True)
class NoneRight:
    """No attempt is left."""


CheckStep = StartWorker | StartChecks | ResultPassed | FailureConfirmed | NoneRight


def next_step(attempts: Sequence[CheckedAttempt]) -> CheckStep:
    """Decide after all siblings that were started have answered or are void."""
    failures: dict[bytes, int] = {}
    for number, attempt in enumerate(attempts):
        if attempt.failure is not None:
            if attempt.failure in failures:
                return FailureConfirmed(failures[attempt.failure], number)
            failures[attempt.failure] = number
            continue
        if not attempt.is_checkable:
            continue
        match decide_check(attempt.passed):
            case More(checks):
                return StartChecks(number, checks)
            case QuorumReached() if attempt.is_right:
                return ResultPassed(number)
            case QuorumReached() | Disagreed():
                continue
    return StartWorker() if len(attempts) < MOST_ATTEMPTS else NoneRight()


def states_of(attempt: CheckedAttempt) -> tuple[str, tuple[str, ...]]:
    """Return the parts of a worker and of its checks in the verdict of an accepted result."""
    right = attempt.is_right
    if attempt.failure is not None or right is None:
        return "void", ("void",) * len(attempt.passed)
    checks = tuple("agreed" if one is right else "differed" for one in attempt.passed)
    return "agreed" if right else "differed", checks
