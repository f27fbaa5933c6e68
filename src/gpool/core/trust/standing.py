"""Standing of a node: evidence from checks, suspicion, audits, bans. Pure.

Honest nodes return a wrong result now and then (a bit flip, a race), so that one failed check proves nothing. The
evidence is Page's cumulative sum test between two error rates: `TOLERATED` of honest nodes and `ALARMING`. A failed
check adds 1000 ln(ALARMING / TOLERATED), a passed one subtracts 1000 ln((1 - TOLERATED) / (1 - ALARMING)); the sum never
falls below 0, so that honest work in the past does not pay for lies.

    first failed check: 3689      audit: earlier, unvested results of the node are checked in random order
    185 correct ones:      0      cleared
    two wrong ones:    11067      over `LIMIT` (one suffices within the first 18 checks): the node is caught

Example: a node lies once in 10 results. One check finds a lie; in the audit about 15 checks find the next ones. An
honest node with an error rate of 1 in 10,000 is cleared by the audit in 98 of 100 cases, and caught, by further errors
soon after the first, in about 1 of 500 audits.

Failures as a sibling (a check of another node's result) are summed separately: an audit of a node's own results says
nothing about its conduct as a checker.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log

from gpool.core.model import SECOND, Instant, Span

TOLERATED = 0.0005
ALARMING = 0.02
FAILED = round(1000 * log(ALARMING / TOLERATED))
PASSED = round(1000 * log((1 - TOLERATED) / (1 - ALARMING)))
LIMIT = 7_000
BAN = Span(30 * 24 * 3600 * SECOND)
MOST_DOUBLINGS = 6

_NEVER = Instant(0)


@dataclass(frozen=True, slots=True)
class Standing:
    """`suspicion` from checks of the node's own results, `as_sibling` from those where it was the checker."""

    suspicion: int = 0
    as_sibling: int = 0
    offences: int = 0
    banned_until: Instant = _NEVER
    last_start: Instant | None = None

    @property
    def is_suspect(self) -> bool:
        return self.suspicion > 0

    @property
    def is_caught(self) -> bool:
        return max(self.suspicion, self.as_sibling) >= LIMIT


def checked(standing: Standing, *, is_passed: bool) -> Standing:
    """Standing after one of the node's own results was checked."""
    return replace(standing, suspicion=_summed(standing.suspicion, is_passed))


def compared(standing: Standing, *, is_passed: bool) -> Standing:
    """Standing after a sibling that the node ran for a check was compared."""
    return replace(standing, as_sibling=_summed(standing.as_sibling, is_passed))


def _summed(before: int, is_passed: bool) -> int:
    return max(0, before - PASSED) if is_passed else before + FAILED


def started(standing: Standing, now: Instant) -> Standing:
    return replace(standing, last_start=now)


def banned(standing: Standing, now: Instant) -> Standing:
    """Standing of a caught node: a ban of 30 days, doubled with each offence. Afterwards a probation begins."""
    length = BAN << min(standing.offences, MOST_DOUBLINGS)
    return Standing(offences=standing.offences + 1, banned_until=Instant(now + length))


def owner_caught(standing: Standing) -> Standing:
    """Standing of another node of a caught node's owner: suspect, so that its unvested results are audited."""
    return replace(standing, suspicion=max(standing.suspicion, FAILED))
