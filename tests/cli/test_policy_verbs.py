"""What operators steer with, against a real server on loopback: policy, cordon, drain, reservations, and a richer explain."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner
from server_desk import Live, serving

from gpool.cli.main import cli

NODE = {"name": "bench", "cpu_milli": 2000, "memory_bytes": 8 << 30, "gpus": []}
TIMES = ("--from", "2001-01-01T00:00:00Z", "--to", "2999-01-01T00:00:00Z")


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with serving(tmp_path / "data") as live:
        yield live


class Operator:
    def __init__(self, live: Live, home: Path) -> None:
        self._env = {"GPOOL_HOME": str(home), "GPOOL_URL": live.url, "GPOOL_KEY": live.key}

    def __call__(self, *words: str, code: int = 0) -> str:
        result = CliRunner().invoke(cli, words, env=self._env)
        assert result.exit_code == code, result.output
        return result.output

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--json"))


@pytest.fixture
def gpool(live: Live, tmp_path: Path) -> Operator:
    return Operator(live, tmp_path / "home")


def test_a_policy_is_shown_tried_changed_and_set_back(gpool: Operator) -> None:
    configured = gpool.json("admin", "policy")["order"]
    tried = gpool("admin", "policy", "--order", "round_robin", "--dry-run")
    assert tried == "Nothing waits: it would change nothing now.\n"
    assert gpool.json("admin", "policy")["order"] == configured
    told = gpool.json("admin", "policy", "--order", "round_robin", "--ageing", "10m")
    assert (told["order"], told["ageing_s"], told["changed"]) == (
        "round_robin",
        600,
        ["order", "ageing_s"],
    )
    assert "round_robin" in gpool("admin", "policy")
    assert gpool.json("admin", "policy", "--order", "configured")["order"] == configured
    gpool("admin", "policy", "--order", "luck", code=2)


def test_a_node_is_cordoned_drained_and_reserved_by_its_name(gpool: Operator, live: Live) -> None:
    made = httpx2.post(f"{live.url}/v1/nodes", json=NODE, headers=live.headers)
    assert made.status_code == 201, made.text
    assert "takes nothing new; 0 still run there" in gpool("admin", "cordon", "bench")
    assert gpool.json("admin", "drain", "bench")["preempted"] == 0
    gpool("admin", "uncordon", "bench")
    gpool("admin", "uncordon", "bench", code=4)
    me = gpool.json("whoami")["id"]
    id_ = gpool("admin", "reservations", "make", "bench", "--user", me, *TIMES).strip()
    [listed] = gpool.json("admin", "reservations", "ls")
    assert (listed["id"], listed["holds"]) == (id_, True)
    gpool("admin", "reservations", "end", id_)
    assert gpool.json("admin", "reservations", "ls") == []


def test_explain_prints_the_sentence_first(gpool: Operator) -> None:
    task = gpool("run", "--detach", "--", "true").strip().splitlines()[-1]
    assert gpool("explain", task).startswith("No node has joined the pool yet")
    assert gpool.json("explain", task)["code"] == "no_node"
