"""Alert rules: promtool's results and the server's own evaluation of the same rules over the same series."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from gpool.server.alerts.rules import EVERY_S, RULES, as_yaml, ranges
from gpool.server.metrics.catalogue import CATALOGUE, PROCESS_METRICS
from tests.tools.alert_cases import (
    CASES,
    LAST,
    Line,
    committed_file,
    evaluated,
    promtool_file,
    promtool_test,
)

MONITORING = Path(__file__).parents[3] / "deploy" / "monitoring"
RUNBOOK = Path(__file__).parents[3] / "docs" / "runbook.md"
LIMIT_S = 600
STEPS = 120


def promtool(folder: Path, tests: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(MONITORING / "rules.yml", folder)
    (folder / "tests.yml").write_text(tests)
    return subprocess.run(
        ["promtool", "test", "rules", "tests.yml"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_the_committed_files_are_those_of_the_rules() -> None:
    assert (MONITORING / "rules.yml").read_text() == as_yaml(), "run make docs"
    assert (MONITORING / "rules_test.yml").read_text() == committed_file(), "run make docs"


def test_every_rule_has_a_case_and_a_section_of_the_runbook() -> None:
    assert [case.alert for case in CASES] == [rule.name for rule in RULES]
    sections = [line[3:] for line in RUNBOOK.read_text().splitlines() if line.startswith("## ")]
    assert [each for each in sections if each.startswith("Gpool")] == [rule.name for rule in RULES]


def test_every_rule_reads_exported_metrics_only() -> None:
    exported = {name for spec in CATALOGUE for name in spec.series} | {*PROCESS_METRICS, "up"}
    assert {selector.name for selector in ranges(RULES)} - exported == set()


def test_promtool_finds_one_firing_and_one_quiet_case_of_each_rule(
    require: Callable[[str], None], tmp_path: Path
) -> None:
    require("prometheus")
    tests = committed_file()
    done = promtool(tmp_path, tests)
    assert done.returncode == 0, done.stdout + done.stderr
    # Control: every expectation is checked. A quiet case that expects an alert fails.
    wrong = promtool(tmp_path, tests.replace("exp_alerts: []", "exp_alerts: [{}]"))
    assert wrong.returncode == 1
    told = wrong.stdout + wrong.stderr
    assert {rule.name for rule in RULES if f"alertname: {rule.name}," not in told} == set()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_the_servers_own_evaluation_finds_the_same(case: object) -> None:
    assert isinstance(case, type(CASES[0]))
    fires = evaluated({series: line.values() for series, line in case.fires.items()})
    quiet = evaluated({series: line.values() for series, line in case.quiet.items()})
    assert fires[case.alert][LAST] == [tuple(sorted(case.labels.items()))]
    assert not any(quiet[case.alert].values())


@pytest.mark.parametrize("seed", range(4))
def test_promtool_agrees_every_minute_on_random_series(
    seed: int, require: Callable[[str], None], tmp_path: Path
) -> None:
    require("prometheus")
    values = _random_series(Random(seed))
    ours = evaluated(values, EVERY_S)
    test = promtool_test("random", values, ours, EVERY_S)
    done = promtool(tmp_path, promtool_file([test], EVERY_S))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    firing = [rule for rule, found in ours.items() if any(found.values())]
    assert len(firing) >= 8, "the series decide too little"
    assert any(not all(found.values()) for found in ours.values())


def _random_series(dice: Random) -> dict[str, list[float]]:
    """Every series of the cases: gauges jump between their two values, counters grow at changing rates and restart."""
    both: dict[str, list[Line]] = {}
    for case in CASES:
        for given in (case.fires, case.quiet):
            for series, line in given.items():
                both.setdefault(series, []).append(line)
    found = {}
    histograms: dict[str, float] = {}
    for series, lines in both.items():
        name = series.partition("{")[0]
        if name.endswith("_bucket"):
            histograms[name] = dice.choice((0.0, 0.02, 0.2))
        elif any(line.step for line in lines) or name.endswith(("_total", "_count")):
            found[series] = _counter(dice, [line.step for line in lines])
        else:
            found[series] = _gauge(dice, [line.start for line in lines])
    for name, slow in histograms.items():
        bounds = [series for series in both if series.startswith(f"{name}{{")]
        fast = _counter(dice, [10.0], restarts=False)
        for series in bounds:
            is_low = 'le="10"' not in series and 'le="2.5"' not in series and "+Inf" not in series
            found[series] = [count if is_low else count * (1 + slow) for count in fast]
    return found


def _counter(dice: Random, rates: list[float], *, restarts: bool = True) -> list[float]:
    values, value, rate = [], 0.0, dice.choice(rates)
    for _ in range(STEPS + 1):
        values.append(float(f"{value:g}"))
        if dice.randrange(20) == 0:
            rate = dice.choice(rates) * dice.choice((0, 1, 1, 4))
        value = 0.0 if restarts and dice.randrange(60) == 0 else value + rate
    return values


def _gauge(dice: Random, levels: list[float]) -> list[float]:
    values, level = [], dice.choice(levels)
    for _ in range(STEPS + 1):
        if dice.randrange(40) == 0:
            level = dice.choice(levels)
        values.append(level)
    return values


def test_the_example_of_alertmanager_is_valid(require: Callable[[str], None]) -> None:
    require("alertmanager")
    done = subprocess.run(
        ["amtool", "check-config", str(MONITORING / "alertmanager.yml")],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout
