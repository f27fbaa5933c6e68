"""What the rest of the agent asks of lanes before it opens one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gpool.agent.network import factory
from gpool.agent.network.firewall_rules import TAG_LETTERS
from gpool.agent.network.policy import BadPolicy, parse_target
from gpool.agent.network.sandbox_network import tag_for


def test_servers_given_by_address_become_a_list_of_these_ports() -> None:
    only = asyncio.run(factory.only([("10.9.9.9", 443), ("10.9.9.9", 443), ("11.22.33.44", 80)]))
    assert only.targets == (parse_target("10.9.9.9:443"), parse_target("11.22.33.44:80"))
    assert only.names == {}


def test_a_server_on_loopback_is_refused_with_the_reason() -> None:
    with pytest.raises(BadPolicy, match=r"127\.0\.0\.1:3141: loopback"):
        asyncio.run(factory.only([("localhost", 3141)]))


def test_a_server_nobody_knows_is_named() -> None:
    with pytest.raises(BadPolicy, match=r"nowhere\.invalid: no IPv4 address"):
        asyncio.run(factory.only([("nowhere.invalid", 443)]))


def test_a_tag_is_an_agents_own_and_stays(tmp_path: Path) -> None:
    assert tag_for(tmp_path / "a") == tag_for(tmp_path / "a") != tag_for(tmp_path / "b")
    assert len(tag_for(tmp_path)) == TAG_LETTERS


def test_every_missing_thing_comes_with_its_fix() -> None:
    assert all(fact.name and fact.fix for fact in factory.facts())
