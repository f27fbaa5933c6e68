"""Survey of the queue and evaluation of the alert rules: the values that `loops` renews and `/metrics` shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from gpool.core.model import SECOND, Instant
from gpool.core.scheduler.explain.waiting import reason_code
from gpool.core.scheduler.order.orders import Policy
from gpool.core.scheduler.state.state import State
from gpool.server.alerts.evaluation import AlertEvaluator
from gpool.server.alerts.rules import RULES
from gpool.server.alerts.samples import Sample

AGES_S = (60, 600, 3600, 86_400)
MOST_CHECKS = 30_000
"""Nodes compared with shapes in one survey, tens of milliseconds in all; the largest queues come first."""
UNEXAMINED = "unexamined"
REJECTED = "rejected"
"""Reason of tasks whose planned start was rejected; they wait out a short backoff."""


@dataclass(slots=True)
class QueueSurvey:
    """Queue by reason and age, as found last."""

    reasons: Mapping[str, int] = field(default_factory=dict)
    older: Mapping[int, int] = field(default_factory=dict)  # by seconds
    oldest_s: float = 0.0
    firing: int = 0  # alerts


@dataclass(slots=True)
class UnclearedFunds:
    """Micro-credits of open pending transfers, and when the oldest one was reserved; measured by the loop `ledger`."""

    amount: int = 0
    oldest_at: Instant | None = None

    def set(self, amount: int, oldest_at: Instant | None) -> None:
        self.amount, self.oldest_at = amount, oldest_at


@dataclass(slots=True)
class PoolMonitor:
    survey: QueueSurvey = field(default_factory=QueueSurvey)
    uncleared: UnclearedFunds = field(default_factory=UnclearedFunds)
    alerts: AlertEvaluator = field(default_factory=lambda: AlertEvaluator(RULES))
    evaluated_at: Instant | None = None

    def evaluate(self, registry: CollectorRegistry, now: Instant, elapsed: Instant) -> None:
        """Sample the metrics that rules read and evaluate the rules. `elapsed`: time that no clock setting moves."""
        wanted = registry.restricted_registry(self.alerts.samples.names)
        found = [
            Sample(each.name, each.labels, each.value)
            for family in wanted.collect()
            for each in family.samples
        ]
        self.alerts.evaluate(elapsed / SECOND, found)
        self.survey.firing = len(self.alerts.firing)
        self.evaluated_at = now


def survey_ages(survey: QueueSurvey, state: State, now: Instant) -> None:
    """Cost: shapes that wait."""
    older, oldest = dict.fromkeys(AGES_S, 0), now
    for entry in state.queues.shapes():
        oldest = min(oldest, Instant(entry.queue.front().queued_at))
        for age_s in AGES_S:
            older[age_s] += entry.queue.count_older(now - age_s * SECOND)
    survey.older, survey.oldest_s = older, (now - oldest) / SECOND


def survey_reasons(
    survey: QueueSurvey, state: State, policy: Policy, rejected: int
) -> Generator[None, None, None]:
    """Count waiting tasks by reason, in steps between which the state may change."""
    waiting = sorted(state.queues.shapes(), key=lambda entry: -entry.queue.size)
    most = max(1, MOST_CHECKS // max(1, len(state.nodes)))
    reasons: Counter[str] = Counter()
    for entry in waiting[:most]:
        code = yield from reason_code(state, entry.shape, policy)
        reasons[code] += entry.queue.size
        yield
    reasons[UNEXAMINED] += sum(entry.queue.size for entry in waiting[most:])
    reasons[REJECTED] += rejected
    # A reason that was exported stays, as 0: alerts and graphs then see its end.
    survey.reasons = {**dict.fromkeys(survey.reasons, 0), **reasons}
