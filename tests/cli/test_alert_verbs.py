"""`gpool admin alerts` against a real server on loopback, whose disk is nearly full by its settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpool.cli.main import FAILED, cli
from gpool.core.model import GIB
from gpool.server.alerts.rules import RULES
from tests.server.server_desk import Live, serving
from tests.tools.processes import PATIENCE_S, eventually

FULL = 1 << 60
"""More free space than any disk has, to be kept: the data directory is nearly full."""


def page(live: Live, home: Path) -> tuple[int, Any]:
    env = {"GPOOL_HOME": str(home), "GPOOL_URL": live.url, "GPOOL_KEY": live.key}
    done = CliRunner().invoke(cli, ["admin", "alerts", "--json"], env=env)
    return done.exit_code, json.loads(done.output)


def states(document: Any) -> dict[str, str]:
    return {each["name"]: each["state"] for each in document["items"]}


def evaluated(live: Live, home: Path) -> tuple[int, Any]:
    eventually("the rules are evaluated", lambda: page(live, home)[1]["evaluated_at"], PATIENCE_S)
    return page(live, home)


def test_alerts_are_listed_with_their_state(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with serving(tmp_path / "data", min_free_bytes=FULL) as live:
        code, document = evaluated(live, home)
        found = states(document)
        assert list(found) == [rule.name for rule in RULES]
        assert found["GpoolDiskLow"] == "pending"  # until it has held for a minute
        assert found["GpoolServerDown"] == "unknown"
        assert found["GpoolStoreFaults"] == "quiet"
        assert code == 0
        env = {"GPOOL_HOME": str(home), "GPOOL_URL": live.url, "GPOOL_KEY": live.key}
        shown = CliRunner().invoke(cli, ["admin", "alerts"], env=env).output
        assert "GpoolDiskLow" in shown
        assert "docs/runbook.md#gpooldisklow" in shown.replace("\n", "").replace(" ", "")
        assert "GpoolStoreFaults" not in shown
        everything = CliRunner().invoke(cli, ["admin", "alerts", "--all"], env=env).output
        assert "GpoolStoreFaults" in everything


def test_a_quiet_pool_says_so(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with serving(tmp_path / "data", min_free_bytes=GIB // 1000) as live:
        code, document = evaluated(live, home)
        assert set(states(document).values()) <= {"quiet", "unknown"}
        assert code == 0


@pytest.mark.slow
def test_the_exit_code_is_1_while_an_alert_fires(tmp_path: Path) -> None:
    """Slow: the condition has to hold for a minute."""
    home = tmp_path / "home"
    with serving(tmp_path / "data", min_free_bytes=FULL) as live:
        eventually("an alert fires", lambda: page(live, home)[0] == FAILED, PATIENCE_S, 2.0)
        assert states(page(live, home)[1])["GpoolDiskLow"] == "firing"
