"""Dashboards name exported metrics only, and label values that exist. Their data: tests/e2e/test_prometheus.py."""

from __future__ import annotations

import re

import pytest

from gpool.server.metrics.catalogue import CATALOGUE, PROCESS_METRICS
from gpool.server.metrics.collectors import GPU_STATES
from tests.tools.dashboards import PAGES, DashboardPage

EXPORTED = {name for spec in CATALOGUE for name in spec.series} | set(PROCESS_METRICS)
LABELS = {label for spec in CATALOGUE for label in spec.labels} | {"le", "job", "instance"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_query_names_exported_metrics_and_labels(page: DashboardPage) -> None:
    for query in page.queries:
        named = set(re.findall(r"\b(?:gpool|process)_[a-z_]+", query.expression))
        assert named, query
        assert named - EXPORTED == set(), query
        grouped = re.findall(r"by \(([a-z, ]+)\)", query.expression)
        labels = {label for group in grouped for label in group.split(", ")}
        labels |= set(re.findall(r"\{\{([a-z]+)\}\}", query.legend))
        assert labels - LABELS == set(), query
        states = re.search(r'state=~?"([a-z|]+)"', query.expression)
        assert states is None or set(states[1].split("|")) <= set(GPU_STATES), query


def test_every_metric_is_on_a_dashboard_or_of_the_pricing() -> None:
    shown = "\n".join(query.expression for page in PAGES for query in page.queries)
    missing = {
        spec.name for spec in CATALOGUE if not any(series in shown for series in spec.series)
    }
    assert {name for name in missing if not name.startswith("gpool_pricing_")} == set()
