"""What an owner says about gangs on the command line reaches the agent's offer; the doctor says why there are none."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from gpool.agent.machine.findings import Level
from gpool.agent.machine.policy import GANG_PORT, GangRules, OwnerPolicy, apply_policy
from gpool.agent.services import NetworkSupport, NodeServices, machine_offer, refreshed
from gpool.agent.settings import AgentSettings
from gpool.cli.lending.doctor import gangs_finding
from gpool.cli.lending.join import EnrolledNode, agent_variables
from gpool.cli.lending.terms import LendingTerms, lending
from gpool.core.model import Network
from gpool.testing.fake_runtime import FakeRuntime
from gpool.transfer.requests import Address

SERVER = "https://127.0.0.1:8443"


def said(*args: str) -> LendingTerms | str:
    heard: list[LendingTerms] = []

    @click.command()
    @lending
    def verb(terms: LendingTerms) -> None:
        heard.append(terms)

    done = CliRunner().invoke(verb, args)
    return heard[0] if done.exit_code == 0 else done.output


def settings(monkeypatch: pytest.MonkeyPatch, folder: Path, *args: str) -> AgentSettings:
    terms = said(*args)
    assert isinstance(terms, LendingTerms)
    identity = EnrolledNode(Address(SERVER, "a" * 64), "n-1", "node", "pool-x", folder / "node.key")
    for name, value in agent_variables(identity, folder, terms).items():
        monkeypatch.setenv(name, value)
    return AgentSettings()  # type: ignore[call-arg]  # from the environment


def test_the_flags_reach_the_offer_where_a_lane_can_be_opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = settings(
        monkeypatch, tmp_path, "--site", "lab", "--address", "10.0.0.7", "--gang-port", "50000"
    )
    policy = GangRules(site="attic", address="10.9.9.9", port=40000)
    offer = machine_offer(told, (), NodeServices([]), NetworkSupport(gangs=True), policy)
    assert (offer.site, offer.address, offer.gang_port) == ("lab", "10.0.0.7", 50000)
    offer = machine_offer(told, (), NodeServices([]), NetworkSupport(), policy)
    assert (offer.site, offer.address, offer.gang_port) == ("", "", 0)


def test_a_trusted_link_is_declared_by_a_flag_and_offered_where_it_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = settings(monkeypatch, tmp_path, "--site", "lab", "--trusted-link")
    assert told.gang_trusted_link
    support = NetworkSupport(gangs=True, gang_links=frozenset({"direct"}))
    offer = machine_offer(told, (), NodeServices([]), support)
    assert offer.gang_links == {"direct"}
    refusing = OwnerPolicy(gangs=GangRules(offered=False))
    assert apply_policy(refusing, offer).gang_links == frozenset()


def test_rdma_devices_are_never_given_on_a_link_that_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GPOOL_AGENT_GANG_RDMA", "1")
    with pytest.raises(ValidationError, match="GANG_TRUSTED_LINK"):
        settings(monkeypatch, tmp_path, "--site", "lab")
    assert settings(monkeypatch, tmp_path, "--site", "lab", "--trusted-link").gang_rdma


def test_what_the_flags_leave_out_the_policy_says_and_then_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = settings(monkeypatch, tmp_path)
    policy = GangRules(address="10.9.9.9", port=40000)
    offer = machine_offer(told, (), NodeServices([]), NetworkSupport(gangs=True), policy)
    assert (offer.site, offer.address, offer.gang_port) == ("", "10.9.9.9", 40000)
    offer = machine_offer(told, (), NodeServices([]), NetworkSupport(gangs=True))
    assert offer.address
    assert offer.gang_port == GANG_PORT


def test_gangs_alone_never_offer_egress(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = settings(monkeypatch, tmp_path, "--site", "lab")
    offer = machine_offer(told, (), NodeServices([]), NetworkSupport(gangs=True))
    assert Network.EGRESS not in offer.networks


def test_a_runtime_that_enters_lanes_no_more_or_again_is_offered_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Or tasks that want egress would be sent to it in vain, or to nobody."""
    told = settings(monkeypatch, tmp_path)
    runtime = FakeRuntime(tmp_path)
    both, neither = frozenset({Network.NONE, Network.EGRESS}), frozenset({Network.NONE})
    first = machine_offer(told, (), NodeServices([runtime]), NetworkSupport(egress=True))
    for networks in (both, neither, both):
        runtime.networks = networks
        offer = refreshed(
            first, machine_offer(told, (), NodeServices([runtime]), NetworkSupport(egress=True))
        )
        assert [one.networks for one in offer.runtimes] == [networks]
        assert offer.networks == networks


@pytest.mark.parametrize(
    "args",
    [
        ("--site", "two words"),
        ("--address", "here"),
        ("--address", "0.0.0.0"),
        ("--gang-port", "80"),
    ],
)
def test_a_flag_that_makes_no_sense_is_refused(args: tuple[str, str]) -> None:
    refused = said(*args)
    assert isinstance(refused, str)
    assert args[0] in refused


def test_a_variable_that_makes_no_sense_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings(monkeypatch, tmp_path)
    monkeypatch.setenv("GPOOL_AGENT_SITE", "two words")
    with pytest.raises(ValidationError, match="a site is a word"):
        AgentSettings()  # type: ignore[call-arg]  # from the environment


def test_the_doctor_says_why_a_machine_takes_no_part(tmp_path: Path) -> None:
    refused = gangs_finding(GangRules(offered=False, site="lab"), tmp_path, SERVER)
    assert refused.level is Level.OK
    assert "refuses" in refused.text
    unnamed = gangs_finding(GangRules(), tmp_path, SERVER)
    assert unnamed.level is Level.NOTE
    assert "--site" in unnamed.fix
