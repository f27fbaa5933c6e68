"""`gpool offers`, `gpool quote` and `gpool run --dry-run` against a real server with a node on a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gpool.core.model import GIB, Gpu
from gpool.wire.frames import OfferChanged
from tests.cli.test_account_verbs import Terminal
from tests.server.server_desk import Live, serving
from tests.tools.nodes import a_key, joined
from tests.tools.processes import PATIENCE_S
from tests.tools.scripted_agent import ScriptedAgent, offer


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with serving(tmp_path / "data") as live:
        yield live


@pytest.fixture
def node(live: Live) -> Iterator[ScriptedAgent]:
    """Two GPUs at 0.31/h and one at 2/h, of the operator."""

    def ask(path: str, document: dict[str, Any]) -> dict[str, Any]:
        answer = httpx2.post(
            f"{live.url}{path}", json=document, headers=live.headers, timeout=PATIENCE_S
        )
        found: dict[str, Any] = answer.json()
        return found

    agent = ScriptedAgent(live.url, joined(ask, a_key(), name="box"), 8)
    agent.connect()
    gpus = tuple(
        Gpu(n, f"g{n}", model, "nvidia", 24 * GIB, simulated=True, price_microcredits=price)
        for n, (model, price) in enumerate([("A10G", None), ("A10G", None), ("H100", 2_000_000)])
    )
    terms = {"price_microcredits": 310_000, "min_charge_microcredits": 5_000, "notice_s": 600}
    agent.send(OfferChanged(replace(offer(8), gpus=gpus, **terms)))  # type: ignore[arg-type]
    agent.beat()
    yield agent
    agent.close()


@pytest.fixture
def bob(live: Live, node: ScriptedAgent, tmp_path: Path) -> Terminal:
    terminal = Terminal(live, tmp_path / "bob")
    terminal("register", "bob")
    return terminal


def quoted(who: Terminal, *options: str, **variables: str) -> Any:
    return json.loads(who("quote", "--json", *options, "--", "true", **variables).stdout)


def test_offers_are_listed_with_price_speed_and_terms(bob: Terminal) -> None:
    said = bob("offers").stdout.splitlines()
    assert said[0].split() == [
        "MODEL",
        "MEMORY",
        "PRICE/GPU",
        "FREE",
        "NODES",
        "VERIFIED",
        "MTBF",
        "TFLOP/S",
        "PER",
        "CREDIT",
        "GB/S",
        "TIER",
        "MINIMUM",
        "NOTICE",
    ]
    assert said[1].split()[:6] == ["A10G", "(simulated)", "24", "GiB", "0.31/h", "2/2"]
    assert said[1].split()[-2:] == ["0.005", "10m00s"]
    assert len(said) == 3
    [one] = bob.json("offers", "--gpu", "H100", "--max-price", "2/h", "--free")
    assert (one["model"], one["price_microcredits"]) == ("H100", 2_000_000)
    strict = (
        "--min-reliability",
        "30d",
        "--min-speed",
        "1",
        "--min-bandwidth",
        "1",
        "--tier",
        "vm",
    )
    for option, value in zip(strict[::2], strict[1::2], strict=True):
        assert bob.json("offers", option, value) == [], option
    assert "No offer matches" in bob("offers", "--gpu", "B200").output
    assert len(bob.json("offers", "--limit", "1")) == 1
    assert "not a price" in bob("offers", "--max-price", "cheap", code=2).output


def test_a_quote_and_a_dry_run_tell_the_cost_and_submit_nothing(bob: Terminal) -> None:
    words = ("--gpu", "A10G:2", "--timeout", "2h", "--", "python", "train.py")
    said = bob("quote", *words).stdout
    assert said == bob("run", "--dry-run", *words).stdout
    assert "1 node matches; it would start now." in said
    assert "0.62/h" in said
    assert "1.24 credits" in said  # until the time limit
    assert "A10G" in said
    found = quoted(bob, "--gpu", "1", "--max-price", "0.31/h", "--secret", "HOME", "--on", "anyone")
    assert found["rates"] == [310_000]
    assert bob.json("ps") == []
    nothing = bob("quote", "--gpu", "B200", "--", "true").stdout
    assert nothing.startswith("state")
    assert "credits" not in nothing


def test_the_price_of_own_tasks_is_nothing(live: Live, node: ScriptedAgent, tmp_path: Path) -> None:
    assert node.cpus == 8
    owner = Terminal(live, tmp_path / "owner")
    found = quoted(owner, "--gpu", "H100", GPOOL_KEY=live.key)
    assert (found["rate_microcredits"], found["min_charge_microcredits"]) == (0, 0)
    assert found["cost_at_timeout_microcredits"] == 0
    for row in owner("offers", GPOOL_KEY=live.key).stdout.splitlines()[1:]:
        assert "free" in row
        assert "0.005" not in row  # no minimum either
    shown = owner("node", "show", "box", GPOOL_KEY=live.key).stdout
    assert "0.31/h" in shown
    assert "600 s" in shown
