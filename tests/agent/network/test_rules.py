"""The kernel's verdict is the model's: real nftables in a namespace of the test's own, asked packet by packet."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpool.agent.network import firewall_rules
from gpool.agent.network.host import nft_program
from gpool.agent.network.policy import (
    ANY_PORT,
    REFUSED_V4,
    BadPolicy,
    Egress,
    EgressPolicy,
    HostFacts,
    Only,
    Target,
    Wants,
    reaches,
)

CLONE_NEWNET = 0x40000000
ADDRESSES = st.ip_addresses(v=4) | st.sampled_from(
    [edge for n in REFUSED_V4 for edge in (n.network_address, n.broadcast_address)]
)
FEW = st.sampled_from([IPv4Address(t) for t in ("11.22.33.44", "11.22.33.45", "11.23.0.1", "9.9.9.9", "10.1.2.3")])  # fmt: skip
NETWORKS = st.builds(
    lambda address, prefix: IPv4Network((int(address), prefix), strict=False),
    FEW,
    st.integers(7, 32),
)
FEW_PORTS = st.sampled_from([22, 25, 53, 80, 443, 8080, 65535])
PORTS = st.tuples(FEW_PORTS, FEW_PORTS).map(lambda p: (min(p), max(p))) | st.just(ANY_PORT)
TARGETS = st.builds(Target, NETWORKS, PORTS)
SEVERAL = st.lists(TARGETS, max_size=5).map(tuple)
POLICIES = st.builds(
    EgressPolicy, SEVERAL, SEVERAL, st.sampled_from([None, 10**6]), st.integers(1, 100)
)


@given(st.lists(TARGETS, max_size=6), FEW, FEW_PORTS)
def test_disjoint_targets_cover_the_same_and_never_overlap(
    targets: list[Target], address: IPv4Address, port: int
) -> None:
    apart = firewall_rules.disjoint(targets)
    assert any(t.covers(address, port) for t in targets) == any(
        t.covers(address, port) for t in apart
    )
    for number, one in enumerate(apart):
        for other in apart[number + 1 :]:
            apart_in_ports = one.ports[1] < other.ports[0] or other.ports[1] < one.ports[0]
            assert apart_in_ports or not one.network.overlaps(other.network)


def test_interface_names_fit_the_kernel() -> None:
    naming = firewall_rules.Naming("f" * firewall_rules.TAG_LETTERS)
    longest = naming.interface(Egress(), firewall_rules.MAX_LANES - 1)
    assert len(longest) <= 15


def test_every_lane_has_an_address_of_its_own() -> None:
    pool = IPv4Network("10.200.16.0/20")
    addresses = {firewall_rules.lane_address(pool, n) for n in range(firewall_rules.MAX_LANES)}
    assert len(addresses) == firewall_rules.MAX_LANES
    assert firewall_rules.gateway_address(pool) not in addresses
    assert all(address in pool for address in addresses)


@pytest.fixture(scope="module")
def kernel(require: Callable[[str], None]) -> None:
    require("network namespaces")
    require("nftables")


def verdicts(text: str, packets: Sequence[tuple[IPv4Address, int]]) -> list[bool]:
    """Which of these datagrams the rules let leave a fresh namespace; a refused one is told to its sender."""
    libc = ctypes.CDLL(None, use_errno=True)
    found: list[bool] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            assert libc.unshare(CLONE_NEWNET) == 0
            lines = "link add tap0 type veth peer name x0\naddr add 10.0.2.100/24 dev tap0\n"
            lines += "link set tap0 up\nlink set x0 up\nroute add default dev tap0\n"
            here = f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net"
            enter = ["nsenter", f"--net={here}"]
            subprocess.run([*enter, "ip", "-batch", "-"], input=lines, text=True, check=True)
            subprocess.run(
                [*enter, nft_program("nft") or "nft", "-f", "-"], input=text, text=True, check=True
            )
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
                sending.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
                for address, port in packets:
                    try:
                        sending.sendto(b"?", (str(address), port))
                        found.append(True)
                    except PermissionError:  # any other error is a failure of the test
                        found.append(False)
        except BaseException as failure:  # noqa: BLE001 - told to the test's own thread
            failed.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found


def is_sendable(address: IPv4Address) -> bool:
    """Loopback and the null address never meet the firewall: they stay in the lane."""
    own = ("0.0.0.0", "10.0.2.100")
    return not address.is_loopback and str(address) not in own and address not in IPv4Network("0.0.0.0/8")  # fmt: skip


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    policy=POLICIES,
    host=st.lists(NETWORKS, max_size=2).map(tuple).map(HostFacts),
    listed=st.none() | SEVERAL,
    packets=st.lists(st.tuples(ADDRESSES | FEW, FEW_PORTS), min_size=20, max_size=60),
)
def test_the_kernel_always_agrees_with_the_model(
    kernel: None,
    policy: EgressPolicy,
    host: HostFacts,
    listed: tuple[Target, ...] | None,
    packets: list[tuple[IPv4Address, int]],
) -> None:
    wants: Wants = Egress()
    if listed is not None:
        try:
            wants = Only(listed)
        except BadPolicy:
            return
    few = EgressPolicy(policy.allow, policy.deny, policy.rate_bytes_per_s, flows=1000)
    sent = [each for each in dict.fromkeys(packets) if is_sendable(each[0])]
    expected = [reaches(few, host, wants, address, port) for address, port in sent]
    found = verdicts(firewall_rules.inner_ruleset(few, host, wants, "tap0"), sent)
    assert list(zip(sent, found, strict=True)) == list(zip(sent, expected, strict=True))


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    policy=POLICIES, host=st.lists(NETWORKS, max_size=3).map(tuple).map(HostFacts), listed=SEVERAL
)
def test_the_kernel_takes_the_hosts_table_for_every_policy(
    kernel: None, policy: EgressPolicy, host: HostFacts, listed: tuple[Target, ...]
) -> None:
    naming, pool = firewall_rules.Naming("abcde"), IPv4Network("10.200.16.0/20")
    text = firewall_rules.host_ruleset(naming, pool, policy, host, ["up0"])
    text += firewall_rules.refresh(f"{firewall_rules.FAMILY} {naming.table}", host)
    try:
        only = Only(listed)
    except BadPolicy:
        only = Only(())
    name = naming.interface(only, 3)
    text += firewall_rules.permit(naming, name, only) + firewall_rules.revoke(naming, name, only)
    assert verdicts(text, []) == []
