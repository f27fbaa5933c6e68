"""What an owner says about lending reaches the agent, and the agent's offer says it to the pool."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from gpool.agent.machine.monitor import PolicyFile
from gpool.agent.machine.policy import apply_policy
from gpool.agent.machine.policy_file import parse
from gpool.agent.network.policy import Egress, HostFacts, reaches
from gpool.agent.runtime.registry import RuntimeContext, make_all
from gpool.agent.services import egress_policy
from gpool.agent.settings import AgentSettings
from gpool.cli.lending.join import EnrolledNode, agent_variables
from gpool.cli.lending.terms import LendingTerms, lending
from gpool.core.model import GIB, Gpu, Offer, Tier
from gpool.transfer.requests import Address


def said(*args: str) -> LendingTerms:
    heard: list[LendingTerms] = []

    @click.command()
    @lending
    def verb(terms: LendingTerms) -> None:
        heard.append(terms)

    assert CliRunner().invoke(verb, args).exit_code == 0
    return heard[0]


def settings(monkeypatch: pytest.MonkeyPatch, folder: Path, terms: LendingTerms) -> AgentSettings:
    identity = EnrolledNode(
        Address("https://pool.test", "a" * 64), "n-1", "node", "pool-x", folder / "node.key"
    )
    for name, value in agent_variables(identity, folder, terms).items():
        monkeypatch.setenv(name, value)
    return AgentSettings()  # type: ignore[call-arg]  # from the environment


def test_without_a_word_of_the_owner_nothing_runs_without_isolation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GPOOL_AGENT_ALLOW_PROCESS", "1")  # of an outer agent: told to nobody
    told = settings(monkeypatch, tmp_path, LendingTerms())
    tiers = [one.tier for one in make_all(RuntimeContext(told))]
    assert tiers[0] is Tier.CONTAINER
    assert Tier.NONE not in tiers


def test_an_owner_who_asks_for_it_offers_the_tier_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    terms = said("--allow-process", "--slots", "3")
    assert terms == LendingTerms(3, None, allow_process=True)
    told = settings(monkeypatch, tmp_path, terms)
    tiers = [one.tier for one in make_all(RuntimeContext(told))]
    assert (tiers[0], tiers[-1]) == (Tier.CONTAINER, Tier.NONE)
    assert told.slots == 3


def test_an_owner_s_rules_reach_the_agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text("tiers = ['vm']")
    told = settings(monkeypatch, tmp_path, said("--policy", str(file)))
    assert told.policy == file
    assert PolicyFile(told.policy).policy.tiers == {Tier.VM}


def test_what_an_owner_denies_comes_on_top_of_what_is_denied_anyway() -> None:
    mail = ip_address("9.9.9.9")
    policy = egress_policy(parse("[egress]\ndeny = ['198.51.100.0/24']"))
    assert not reaches(policy, HostFacts(), Egress(), mail, 25)
    assert reaches(policy, HostFacts(), Egress(), mail, 443)


def test_labels_and_a_price_of_the_command_line_come_before_those_of_the_policy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    terms = said("--label", "zone=a", "--label", "ssd", "--price", "0.31/h")
    assert (terms.labels, terms.price) == (("ssd", "zone=a"), "0.31/h")
    told = settings(monkeypatch, tmp_path, terms)
    own = Offer(1000, GIB, GIB, labels=told.own_labels)
    file = tmp_path / "policy.toml"
    file.write_text('labels = ["quiet"]\nprice = "2/h"')
    lent = apply_policy(PolicyFile(file, told.asked_terms).policy, own)
    assert lent.labels == {"ssd", "zone=a", "quiet"}
    assert lent.price_microcredits == 310_000
    assert apply_policy(PolicyFile(file).policy, own).price_microcredits == 2_000_000


PRICED = """
price = "2/h,H100=5/h"
min_charge = "0.05"
free_for = ["team:lab"]
notice = "10m"
"""


def test_a_price_of_nothing_on_the_command_line_wins_over_the_policy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """0, nobody and no notice are said, too: only what is not said comes from the file."""
    file = tmp_path / "policy.toml"
    file.write_text(PRICED)
    own = Offer(1000, GIB, GIB, (Gpu(0, "g0", "NVIDIA H100", "nvidia", 80 * GIB),))
    said_nothing = settings(monkeypatch, tmp_path, said("--policy", str(file)))
    lent = apply_policy(PolicyFile(file, said_nothing.asked_terms).policy, own)
    assert (lent.price_microcredits, lent.gpus[0].price_microcredits) == (2_000_000, 5_000_000)
    assert (lent.min_charge_microcredits, lent.free_for) == (50_000, ("team:lab",))
    assert lent.notice_s == 600
    words = ("--price", "0/h", "--min-charge", "0", "--free-for", "", "--notice", "0")
    told = settings(monkeypatch, tmp_path, said("--policy", str(file), *words))
    rules = PolicyFile(file, told.asked_terms)
    assert apply_policy(rules.policy, own) == own
    file.write_text(PRICED + "floor = 'none'\nlabels = ['ssd']")
    assert rules.refresh()
    assert apply_policy(rules.policy, own).price_microcredits == 0


def test_prices_of_models_and_gpus_are_said_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ("--price", "0.31/h,RTX 4090=0.50/h,gpu2=0/h", "--free-for", "team:lab, user:ana")
    told = settings(monkeypatch, tmp_path, said(*words, "--notice", "90s"))
    names = ("NVIDIA GeForce RTX 4090", "NVIDIA H100", "NVIDIA GeForce RTX 4090")
    gpus = tuple(Gpu(n, f"g{n}", name, "nvidia", GIB) for n, name in enumerate(names))
    lent = apply_policy(PolicyFile(None, told.asked_terms).policy, Offer(1000, GIB, GIB, gpus))
    assert [gpu.price_microcredits for gpu in lent.gpus] == [500_000, None, 0]
    assert (lent.price_microcredits, lent.notice_s) == (310_000, 90)
    assert lent.free_for == ("team:lab", "user:ana")


@pytest.mark.parametrize(
    "words",
    [
        ("--label", "Fast Disk"),
        ("--price", "cheap"),
        ("--price", "1/h,2/h"),
        ("--price", "H100=1/h,H100=2/h"),
        ("--min-charge", "-1"),
        ("--min-charge", "0.1/h"),
        ("--free-for", "lab"),
        ("--notice", "soon"),
        ("--notice", "8d"),
    ],
)
def test_a_label_or_price_that_cannot_be_is_refused_where_it_is_said(
    words: tuple[str, str],
) -> None:
    @click.command()
    @lending
    def verb(terms: LendingTerms) -> None:
        raise AssertionError(terms)

    result = CliRunner().invoke(verb, words)
    assert result.exit_code == 2
    assert words[1].rpartition(",")[2] in result.output
