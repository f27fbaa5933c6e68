"""A lent machine after a crash, and the person in front of it: no link and no account."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.tools.processes import GPOOL, PATIENCE_S, Daemon, Pool, eventually


@pytest.fixture
def lent(pool: Pool) -> Iterator[Daemon]:
    yield pool.join("lent")
    pool.agents["lent"].stop()


def node(pool: Pool) -> dict[str, Any]:
    [found] = [one for one in pool.ask("GET", "/v1/nodes").json()["items"] if one["name"] == "lent"]
    return dict(found)


def test_a_machine_joins_again_without_a_link_and_is_paused_by_the_person_at_it(
    pool: Pool, lent: Daemon
) -> None:
    before = node(pool)["id"]
    lent.kill()
    eventually("the node is offline", lambda: node(pool)["status"] == "offline", PATIENCE_S)
    again = Daemon(["join"], lent.environment, lent.log)
    pool.agents["lent"] = again
    again.start()
    pool.until_online("lent")
    assert node(pool)["id"] == before

    def typed(*words: str) -> str:
        done = subprocess.run(
            [*GPOOL, *words], env=dict(lent.environment), capture_output=True, text=True, check=True
        )
        return done.stdout

    assert before in typed("node", "ls")
    typed("node", "pause")
    eventually("it takes no tasks", lambda: "paused on" in str(node(pool)["closed"]), PATIENCE_S)
    typed("node", "resume")
    eventually("it takes tasks again", lambda: node(pool)["closed"] is None, PATIENCE_S)
