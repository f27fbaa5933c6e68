"""What an owner says about gangs, and what the pool is told of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.agent.machine.monitor import PolicyFile
from gpool.agent.machine.policy import GangRules, OwnerPolicy, apply_policy
from gpool.agent.machine.policy_file import parse
from gpool.core.errors import Invalid
from gpool.core.model import GIB, Offer

CANNOT = Offer(cpu_milli=4000, memory_bytes=8 * GIB, disk_bytes=GIB)
CAN = replace(CANNOT, address="192.168.1.7", gang_port=47100)


def told(offer: Offer) -> tuple[str, str, int]:
    return offer.site, offer.address, offer.gang_port


def test_a_site_in_the_policy_is_offered() -> None:
    policy = parse('[gangs]\nsite = "lab"\naddress = "10.0.0.7"\nport = 50000')
    assert policy.gangs == GangRules(True, "lab", "10.0.0.7", 50000)
    assert told(apply_policy(policy, CAN)) == ("lab", "192.168.1.7", 47100)


def test_the_site_of_the_command_line_comes_first() -> None:
    assert apply_policy(parse('[gangs]\nsite = "lab"'), replace(CAN, site="attic")).site == "attic"


@given(st.sampled_from(["", "lab"]), st.sampled_from(["", "attic"]), st.booleans(), st.booleans())
def test_gangs_are_never_offered_without_a_site_a_lane_and_the_owner_s_will(
    said: str, named: str, offered: bool, can: bool
) -> None:
    offer = apply_policy(
        OwnerPolicy(gangs=GangRules(offered, said)), replace(CAN if can else CANNOT, site=named)
    )
    if offered and can and (said or named):
        assert told(offer) == (named or said, "192.168.1.7", 47100)
    else:
        assert told(offer) == ("", "", 0)


def test_an_owner_who_changes_their_mind_takes_no_more_members(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('[gangs]\nsite = "lab"')
    rules = PolicyFile(file)
    assert rules.limits().gangs
    file.write_text('[gangs]\nsite = "lab"\noffered = false')
    assert rules.refresh()
    assert not rules.limits().gangs
    assert told(apply_policy(rules.policy, CAN)) == ("", "", 0)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ("site = 'two words'", "gangs.site"),
        ("site = ''", "gangs.site"),
        ("site = '" + "x" * 64 + "'", "63"),
        ("address = 'here'", "gangs.address"),
        ("address = '0.0.0.0'", "address of one machine"),
        ("address = '224.0.0.1'", "address of one machine"),
        ("address = 'fd00::1'", "gangs.address"),
        ("port = 80", "1024"),
        ("port = 65000", "60000"),
        ("port = true", "port"),
        ("offered = 1", "true or false"),
        ("secret = 'x'", "gangs.secret"),
    ],
)
def test_a_mistake_about_gangs_is_named(said: str, says: str) -> None:
    with pytest.raises(Invalid) as refused:
        parse(f"[gangs]\n{said}")
    assert says in refused.value.detail
