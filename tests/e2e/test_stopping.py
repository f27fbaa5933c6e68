"""Stopping is not an accident: no traceback, and an exit code that says who asked."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.tools.processes import PATIENCE_S, Pool, eventually


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_told_to_stop_leaves_no_traceback(tmp_path: Path, number: signal.Signals) -> None:
    pool = Pool(tmp_path)
    try:
        pool.start_server()
        pool.server.signal(number)
        eventually("the server is gone", lambda: not pool.server.is_running, PATIENCE_S)
        assert "Traceback" not in pool.server.said()
        assert "alembic.runtime.plugins" not in pool.server.said()
        assert pool.server.exit_code == 128 + number
    finally:
        pool.stop()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_agent_told_to_stop_leaves_no_traceback(pool: Pool, number: signal.Signals) -> None:
    agent = pool.agents["first"]
    if not agent.is_running:  # the pool is the file's, the other signal came first
        agent.start()
    eventually("the agent is there", lambda: "first" in pool.online(), PATIENCE_S)
    agent.signal(number)
    eventually("the agent is gone", lambda: not agent.is_running, PATIENCE_S)
    assert "Traceback" not in agent.said()
    assert agent.exit_code == 0
    eventually("the server knows", lambda: "first" not in pool.online(), PATIENCE_S)


def test_a_server_started_with_interrupts_ignored_still_says_who_asked(tmp_path: Path) -> None:
    """As by a script that starts it in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    pool = Pool(tmp_path)
    try:
        pool.start_server()
        pool.server.signal(signal.SIGINT)
        eventually("the server is gone", lambda: not pool.server.is_running, PATIENCE_S)
        assert pool.server.exit_code == 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, before)
        pool.stop()
