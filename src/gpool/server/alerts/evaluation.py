"""Evaluation of alert rules over the server's own metrics, as Prometheus does it: an alert is pending while its
condition holds for less than `hold_s`, then firing, and gone when the condition does not hold at one evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpool.server.alerts.rules import AlertRule, ranges
from gpool.server.alerts.samples import Labels, Sample, SampleStore


@dataclass(frozen=True, slots=True)
class ActiveAlert:
    rule: AlertRule
    labels: Labels
    since_s: float  # first evaluation at which the condition held
    value: float
    is_firing: bool


class AlertEvaluator:
    def __init__(self, rules: Sequence[AlertRule]) -> None:
        self._rules = [rule for rule in rules if rule.is_own]
        self.samples = SampleStore(ranges(self._rules))
        self._since: dict[tuple[str, Labels], float] = {}
        self.active: tuple[ActiveAlert, ...] = ()
        self.evaluated_s = 0.0

    @property
    def firing(self) -> tuple[ActiveAlert, ...]:
        return tuple(alert for alert in self.active if alert.is_firing)

    def evaluate(self, at_s: float, samples: Sequence[Sample]) -> None:
        """Add a snapshot taken at `at_s` (seconds, increasing) and evaluate all rules."""
        self.samples.add(at_s, samples)
        since: dict[tuple[str, Labels], float] = {}
        active = []
        for rule in self._rules:
            for labels, value in rule.condition.evaluate(self.samples, at_s).items():
                began = self._since.get((rule.name, labels), at_s)
                since[rule.name, labels] = began
                is_firing = at_s - began >= rule.hold_s
                active.append(ActiveAlert(rule, labels, began, value, is_firing))
        self._since, self.active, self.evaluated_s = since, tuple(active), at_s
