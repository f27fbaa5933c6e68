"""The owner's rules: what they say of every minute, and what a file of them may hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.agent.machine import monitor as owner
from gpool.agent.machine.monitor import NodeMonitor, PolicyFile
from gpool.agent.machine.policy import (
    AtClose,
    ClosureState,
    GpuFacts,
    Hours,
    KeptResources,
    LendingDecision,
    MachineFacts,
    OwnerPolicy,
    apply_policy,
    decide,
    decide_gpu,
    reason_to_close,
)
from gpool.agent.machine.policy_file import parse
from gpool.agent.state_machine.instructions import OfferDetected, ReclaimAsked, RunsLimited
from gpool.core.errors import Invalid
from gpool.core.model import GIB, Gpu, Network, Offer, RuntimeOffer, Tier

MONDAY = datetime(2026, 11, 16, tzinfo=UTC)
GPUS = tuple(Gpu(n, f"g{n}", "H200", "nvidia", GIB) for n in range(2))
OFFER = Offer(4000, 8 * GIB, 100 * GIB, GPUS, tiers=frozenset({Tier.CONTAINER, Tier.VM}))

FULL = """
whose = ["me", "team:lab", "user:ana"]
tiers = ["container", "vm"]
floor = "container"
zone = "UTC"
longest_run = "2h"
labels = ["zone=a", "ssd"]
price = "0.31/h"
at_close = "reclaim"
grace = "10m"

[[hours]]
from = "22:00"
to = "06:00"
days = ["fri", "sat"]

[[hours]]
from = "12:00"
to = "13:00"

[keep]
cpus = 1.5
memory = "2GiB"
disk = "10GiB"
gpus = [1]

[battery]
least_percent = 40
mains_only = true

[idle]
after = "10m"
most_load = 0.5

[egress]
allow = ["9.9.9.9:443"]
deny = ["198.51.100.0/24"]
rate = "10MB/s"
"""


def at(day: int, hour: int, minute: int = 0) -> datetime:
    return MONDAY + timedelta(days=day, hours=hour, minutes=minute)


def facts(now: datetime = MONDAY, **changes: object) -> MachineFacts:
    return replace(MachineFacts(now), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("now", "open_"),
    [
        (at(4, 21, 59), False),
        (at(4, 22), True),
        (at(5, 5, 59), True),  # Friday's night reaches into Saturday
        (at(5, 6), False),
        (at(6, 5), True),  # Saturday's
        (at(0, 5), False),  # nobody's: Sunday is not among the days
        (at(2, 12, 30), True),
        (at(2, 13), False),
    ],
)
def test_hours_hold_across_midnight_by_the_day_they_open(now: datetime, open_: bool) -> None:
    policy = OwnerPolicy(hours=parse(FULL).hours)
    assert (reason_to_close(policy, facts(now)) == "") is open_


def test_hours_are_those_of_the_zone() -> None:
    policy = parse('zone = "Europe/Berlin"\n[[hours]]\nfrom = "10:00"\nto = "11:00"')
    assert reason_to_close(policy, facts(at(0, 9, 30))) == ""
    assert "hours" in reason_to_close(policy, facts(at(0, 10, 30)))


TIMES = st.times().map(lambda t: t.replace(second=0, microsecond=0))


@given(TIMES, TIMES, st.integers(0, 7 * 24 * 60 - 1))
def test_a_range_and_its_complement_never_both_hold_and_never_both_fail(
    opens: time, closes: time, minute: int
) -> None:
    now = MONDAY + timedelta(minutes=minute)
    here, there = Hours(opens, closes).cover(now), Hours(closes, opens).cover(now)
    assert here != there or (opens == closes and here)


@pytest.mark.parametrize(
    ("policy", "seen", "says"),
    [
        (OwnerPolicy(on_mains_only=True), {"on_mains": False}, "battery"),
        (OwnerPolicy(on_mains_only=True), {"on_mains": True}, ""),
        (OwnerPolicy(on_mains_only=True), {"on_mains": None}, ""),
        (
            OwnerPolicy(least_battery_percent=50),
            {"battery_percent": 49.0, "on_mains": False},
            "49 %",
        ),
        (OwnerPolicy(least_battery_percent=50), {"battery_percent": 49.0, "on_mains": True}, ""),
        (OwnerPolicy(least_battery_percent=50), {"battery_percent": None}, ""),
        (OwnerPolicy(idle_for=timedelta(minutes=5)), {"idle_s": 299.0}, "using it"),
        (OwnerPolicy(idle_for=timedelta(minutes=5)), {"idle_s": 300.0}, ""),
        (OwnerPolicy(idle_for=timedelta(minutes=5)), {"idle_s": None}, ""),
        (OwnerPolicy(most_load=0.5), {"load_of_others": 0.6}, "busy"),
        (OwnerPolicy(most_load=0.5), {"load_of_others": None}, ""),
        (OwnerPolicy(), {"idle_s": 0.0, "on_mains": False, "battery_percent": 1.0}, ""),
    ],
)
def test_a_rule_closes_the_machine_and_says_why(
    policy: OwnerPolicy, seen: dict[str, object], says: str
) -> None:
    reason = reason_to_close(policy, facts(**seen))
    assert (says in reason) if says else reason == ""


def test_what_runs_is_reclaimed_once_and_not_before_the_grace() -> None:
    policy = OwnerPolicy(on_mains_only=True, at_close=AtClose.RECLAIM, grace=timedelta(minutes=1))
    standing, told = ClosureState(), []
    for second in range(0, 180, 10):
        now = MONDAY + timedelta(seconds=second)
        decision, standing = decide(policy, facts(now, on_mains=False), standing)
        told.append(decision.reclaims)
    assert told.index(True) == 6
    assert sum(told) == 1
    opened, standing = decide(policy, facts(MONDAY, on_mains=True), standing)
    assert (opened, standing) == (LendingDecision(), ClosureState())


@given(st.booleans(), st.lists(st.booleans(), max_size=20), st.integers(0, 5))
def test_an_open_machine_never_reclaims_and_a_patient_owner_never_does(
    patient: bool, mains: list[bool], grace: int
) -> None:
    how = AtClose.FINISH if patient else AtClose.RECLAIM
    policy = OwnerPolicy(on_mains_only=True, at_close=how, grace=timedelta(seconds=grace))
    standing = ClosureState()
    for second, on in enumerate(mains):
        now = MONDAY + timedelta(seconds=second)
        decision, standing = decide(policy, facts(now, on_mains=on), standing)
        assert not (decision.reclaims and (patient or not decision.closed))
        assert bool(decision.closed) is not on


def test_a_promised_notice_delays_every_reclaim_that_a_rule_asks_for() -> None:
    rules = "at_close = 'reclaim'\ngrace = '5s'\n[battery]\nmains_only = true\n"
    gpu = "[[gpu]]\nprograms = ['game']\nmost_celsius = 80\n"

    def reclaimed_after(text: str, wanted: Callable[[OwnerPolicy, datetime, Any], Any]) -> int:
        policy, standing = parse(text), ClosureState()
        for second in range(100):
            decision, standing = wanted(policy, MONDAY + timedelta(seconds=second), standing)
            if decision.reclaims:
                return second
        raise AssertionError("it was never reclaimed")

    def off_mains(policy: OwnerPolicy, now: datetime, before: ClosureState) -> Any:
        return decide(policy, facts(now, on_mains=False), before)

    def game(policy: OwnerPolicy, now: datetime, before: ClosureState) -> Any:
        return decide_gpu(policy, 0, facts(now, programs=frozenset({"game"})), before)

    def heat(policy: OwnerPolicy, now: datetime, before: ClosureState) -> Any:
        hot = {0: GpuFacts(temperature_c=95)}
        return decide_gpu(policy, 0, facts(now, gpus=hot), before)

    for notice, machine, program in (
        ("", 5, 0),
        ("notice = '30s'\n", 30, 30),
        ("notice = '2s'\n", 5, 2),
    ):
        assert reclaimed_after(notice + rules + gpu, off_mains) == machine
        assert reclaimed_after(notice + rules + gpu, game) == program
        assert reclaimed_after(notice + rules + gpu, heat) == 0  # it does not wait


def test_the_offer_is_what_the_owner_leaves() -> None:
    offered = apply_policy(parse(FULL), OFFER, LendingDecision("it runs on battery"))
    assert (offered.cpu_milli, offered.memory_bytes) == (2500, 6 * GIB)
    assert [gpu.index for gpu in offered.gpus] == [0]
    assert offered.audience == ("me", "team:lab", "user:ana")
    assert offered.closed == "it runs on battery"
    assert (offered.labels, offered.price_microcredits) == ({"ssd", "zone=a"}, 310_000)
    assert apply_policy(OwnerPolicy(), OFFER) == OFFER
    everything = OwnerPolicy(kept=KeptResources(10**9, 10**15, 10**15, frozenset({0, 1})))
    nothing = apply_policy(everything, OFFER)
    assert (nothing.cpu_milli, nothing.memory_bytes, nothing.gpus) == (0, 0, ())


def test_an_owner_can_refuse_every_network() -> None:
    offer = replace(OFFER, networks=frozenset(Network))
    assert apply_policy(parse("[egress]\noffered = false"), offer).networks == {Network.NONE}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("whose = 'everyone'", "anyone"),
        ("whose = ['bob']", "user:NAME"),
        ("tiers = ['hard']", "hard"),
        ("tiers = ['none']\nfloor = 'vm'", "no tier"),
        ("colour = 'red'", "colour"),
        ("[keep]\ncpu = 1", "keep.cpu"),
        ("[keep]\ngpus = ['a']", "index"),
        ("[keep]\nmemory = 'much'", "memory"),
        ("[keep]\ncpus = -1", "negative"),
        ("[[hours]]\nfrom = '25:00'\nto = '06:00'", "hours[0].from"),
        ("[[hours]]\nfrom = '22:00'", "to"),
        ("[[hours]]\nfrom = '22:00'\nto = '06:00'\ndays = ['monday']", "mon, tue"),
        ("hours = 3", "list"),
        ("zone = 'Berlin'", "Europe/Berlin"),
        ("longest_run = 7", "2h"),
        ("labels = 'ssd'", "list"),
        ("labels = ['Fast disk']", "not a label"),
        ("price = '-1/h'", "below zero"),
        ("price = true", "0.31/h"),
        ("price = '1/h,2/h'", "names no GPU"),
        ("price = 'gpu0=1/h,gpu0=2/h'", "gpu0"),
        ("min_charge = '-1'", "below zero"),
        ("min_charge = '0.1/h'", "not an amount"),
        ("free_for = 'team:lab'", "a list"),
        ("free_for = ['lab']", "team:NAME"),
        ("notice = '8d'", "7d"),
        ("at_close = 'now'", "now"),
        ("[battery]\nleast_percent = 400", "100"),
        ("[battery]\nmains_only = 1", "true or false"),
        ("keep = 3", "table"),
        ("[keep", "TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named(text: str, says: str) -> None:
    with pytest.raises(Invalid) as refused:
        parse(text)
    assert says in refused.value.detail


def test_rules_are_read_again_when_they_change_and_a_mistake_changes_nothing(
    tmp_path: Path,
) -> None:
    file = tmp_path / "policy.toml"
    file.write_text("[keep]\ncpus = 1")
    rules = PolicyFile(file)
    assert not rules.has_changed()
    file.write_text("[keep]\ncpus = 2.0")
    assert rules.has_changed()
    assert rules.refresh()
    file.write_text("[keep]\ncpus = 'all of them'")
    assert not rules.refresh()
    assert rules.policy.kept.cpu_milli == 2000
    assert not rules.has_changed()
    with pytest.raises(Invalid, match="cannot be read"):
        PolicyFile(tmp_path / "nowhere.toml")


def test_a_look_tells_the_offer_the_limit_and_the_reclaim(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text("longest_run = '2h'\nat_close = 'reclaim'\n[battery]\nmains_only = true")
    seen = [facts(on_mains=True)]
    monitor = NodeMonitor(PolicyFile(file), lambda: OFFER, lambda: seen[-1])
    limit, offered = monitor.survey()
    assert limit == RunsLimited(2 * 3600 * 1_000_000)
    assert offered == OfferDetected(OFFER)
    seen.append(facts(on_mains=False))
    offered, reclaim = monitor.survey()
    assert isinstance(offered, OfferDetected)
    assert offered.offer.closed
    assert isinstance(reclaim, ReclaimAsked)
    assert reclaim.gpus is None
    assert len(monitor.survey()) == 1
    seen.append(facts(on_mains=True))
    file.write_text("at_close = 'reclaim'\n[keep]\ngpus = [1]")
    limit, offered, reclaim = monitor.survey()
    assert limit == RunsLimited(None)
    assert isinstance(reclaim, ReclaimAsked)
    assert reclaim.gpus == {1}


def test_a_tier_that_is_no_longer_lent_takes_its_runtimes_with_it() -> None:
    sandboxes = RuntimeOffer("bubblewrap", Tier.CONTAINER)
    guests = RuntimeOffer("microvm", Tier.VM)
    offer = replace(OFFER, runtimes=(sandboxes, guests))
    assert apply_policy(parse("floor = 'vm'"), offer).runtimes == (guests,)


def test_a_gpu_whose_tier_is_not_lent_is_closed() -> None:
    """A GPU passed through to guests serves tier vm, every other GPU the other tiers."""
    first, *others = OFFER.gpus
    offer = replace(OFFER, gpus=(replace(first, guest=True), *others))

    def closed(policy: str) -> list[bool]:
        return [bool(gpu.closed) for gpu in apply_policy(parse(policy), offer).gpus]

    assert closed("") == [False] * len(offer.gpus)
    assert closed("floor = 'vm'") == [False] + [True] * len(others)
    assert closed("tiers = ['container']") == [True] + [False] * len(others)


def test_lists_that_change_withdraw_egress_until_the_agent_starts_again(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text("[egress]\ndeny = ['198.51.100.0/24']")
    rules = PolicyFile(file)
    assert rules.limits().egress
    file.write_text("[egress]\ndeny = ['198.51.100.0/24', '203.0.113.0/24']")
    assert rules.refresh()
    assert not rules.limits().egress
    offer = replace(OFFER, networks=frozenset(Network))
    assert apply_policy(rules.policy, offer).networks == {Network.NONE}
    file.write_text("[egress]\ndeny = ['198.51.100.0/24']\noffered = true")
    assert rules.refresh()
    assert rules.limits().egress


@pytest.mark.parametrize("said", ["allow = ['10.0.0.0/8']", "deny = ['::1']", "rate = 'fast'"])
def test_a_word_about_the_network_that_cannot_be_is_named(said: str) -> None:
    with pytest.raises(Invalid, match=said.split()[0]):
        parse(f"[egress]\n{said}")


def _supply(folder: Path, name: str, **words: str) -> None:
    (folder / name).mkdir()
    for word, value in words.items():
        (folder / name / word).write_text(value + "\n")


def test_power_is_read_from_what_the_kernel_says(tmp_path: Path) -> None:
    assert owner.power(tmp_path / "none") == (None, None)
    _supply(tmp_path, "BAT0", type="Battery", capacity="71", status="Discharging")
    _supply(tmp_path, "hid-mouse", type="Battery", capacity="3", scope="Device")
    assert owner.power(tmp_path) == (71.0, False)
    _supply(tmp_path, "AC", type="Mains", online="1")
    assert owner.power(tmp_path) == (71.0, True)
    (tmp_path / "AC" / "online").write_text("garbage")
    assert owner.power(tmp_path) == (71.0, False)


def test_idle_time_is_that_of_the_latest_touch(tmp_path: Path) -> None:
    now = 1_800_000_000.0
    assert owner.idle_s(now, tmp_path) is None
    desktop = "Class=user\nType=wayland\nIdleHint=yes\nIdleSinceHint=1799999990000000"
    remote = "Class=user\nType=tty\nIdleHint=no\nIdleSinceHint=0"
    assert owner.idle_s(now, tmp_path, f"{remote}\n\n{desktop}") == 10.0
    assert owner.idle_s(now, tmp_path, desktop.replace("yes", "no")) == 0.0
    assert owner.idle_s(now, tmp_path, "garbage\n\n=\n") is None


def test_the_load_of_others_leaves_out_what_is_below_us(tmp_path: Path) -> None:
    def spend(pid: int, parent: int, ticks: int) -> None:
        (tmp_path / str(pid)).mkdir(exist_ok=True)
        words = ["S", str(parent), *["0"] * 9, str(ticks), "0"]
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) b) {' '.join(words)}")

    meter = owner.LoadMeter(10, tmp_path)
    for pid, parent in ((10, 1), (11, 10), (12, 11), (20, 1)):
        spend(pid, parent, 0)
    assert meter.measure(100.0) is None
    for pid, parent in ((10, 1), (11, 10), (12, 11), (20, 1)):
        spend(pid, parent, 1000)
    assert meter.measure(110.0) == pytest.approx(1.0)
