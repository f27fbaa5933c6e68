"""Firewall of the sandbox networks as nftables text. Pure; default refuse.

A root agent's networks are filtered at ingress of their host interfaces, before routing, NAT and connection tracking:
one place for forwarded and local destinations. A rootless agent's are filtered as packets leave the namespace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, collapse_addresses
from itertools import pairwise
from typing import Any, NamedTuple

from gpool.agent.network.policy import (
    ANY_PORT,
    REFUSED_V4,
    Egress,
    EgressPolicy,
    Gang,
    HostFacts,
    Only,
    Target,
    Wants,
)
from gpool.core.gangs import INTERFACE

FAMILY = "inet"
PREFIX = "gpool"
MAX_LANES = 1024
KINDS: tuple[Wants, ...] = (Egress(), Only(()))
BURST_BYTES = (
    128 * 1024
)  # two of the largest packets, besides the second's worth that the kernel adds
REFUSALS = "refusals"  # set of refused destinations, for the tasks' logs
MAX_REFUSALS = 4096  # of all networks; further ones are only counted
MAX_INNER_REFUSALS = 64
TAG_LETTERS = 5  # interface names have 15 characters: prefix, tag, kind, four digits


@dataclass(frozen=True, slots=True)
class Naming:
    tag: str  # five hexadecimal digits, the same after a restart

    @property
    def table(self) -> str:
        return f"{PREFIX}_{self.tag}"

    @property
    def interfaces(self) -> str:
        return f"{PREFIX}{self.tag}"

    def interface(self, wants: Wants, number: int) -> str:
        """Contains the kind, so that rules per kind can be loaded before the network."""
        return f"{self.interfaces}{'e' if not isinstance(wants, Only) else 'o'}{number}"

    def gang_interface(self, number: int) -> str:
        """Name of a gang's interface until it is moved to its member's namespace."""
        return f"{self.interfaces}g{number}"


def lane_address(pool: IPv4Network, number: int) -> IPv4Address:
    """Address 1 of the pool is every network's gateway."""
    return pool.network_address + 2 + number


def gateway_address(pool: IPv4Network) -> IPv4Address:
    return pool.network_address + 1


def host_ruleset(
    naming: Naming,
    pool: IPv4Network,
    policy: EgressPolicy,
    host: HostFacts,
    lent: Sequence[str],
) -> str:
    """`lent`: interfaces with forwarding enabled; they forward for sandboxes only."""
    kinds = ((naming.interface(kind, n), n) for kind in KINDS for n in range(MAX_LANES))
    addresses = (f'"{name}" . {lane_address(pool, n)}' for name, n in kinds)
    ours = f'"{naming.interfaces}*"'
    return f"""
table {FAMILY} {naming.table} {{
    counter refused {{ }}
    counter over_rate {{ }}
    counter over_flows {{ }}
    {_set("lent", "type ifname", (f'"{name}"' for name in lent))}
    {_set("addresses", "type ifname . ipv4_addr", addresses)}
    set permitted {{ type ifname . inet_proto . ipv4_addr . inet_service; flags interval; }}
    set sending {{ type ifname; flags dynamic; size {4 * MAX_LANES}; }}
    set receiving {{ type ifname; flags dynamic; size {4 * MAX_LANES}; }}
    set flows {{ type ifname; flags dynamic; size {4 * MAX_LANES}; }}
    set {REFUSALS} {{ type ifname . inet_proto . ipv4_addr . inet_service; flags dynamic; size {MAX_REFUSALS}; }}
    {_sets(policy, host)}
    chain refuse {{
        iifname "{naming.interfaces}e*" ip protocol {{ tcp, udp }} add @{REFUSALS} {{ iifname . ip protocol . ip daddr . th dport }}
        counter name refused drop
    }}
    chain judge {{
        meta nfproto != ipv4 goto refuse
        ip hdrlength > 5 goto refuse  # options: a way chosen by the sender
        iifname . ip saddr != @addresses goto refuse
        iifname "{naming.interfaces}o*" iifname . ip protocol . ip daddr . th dport @permitted return
        iifname "{naming.interfaces}o*" goto refuse
        {_judging(policy)}
    }}
    chain from_lanes {{
        type filter hook prerouting priority raw; policy accept;
        iifname {ours} jump judge
        {_cap("iifname", ours, "sending", policy)}
    }}
    chain arriving {{
        type filter hook input priority filter; policy accept;
        iifname {ours} iifname . ip protocol . ip daddr . th dport @permitted accept
        iifname {ours} goto refuse
    }}
    chain through {{
        type filter hook forward priority filter; policy accept;
        iifname {ours} oifname "{PREFIX}*" goto refuse
        iifname {ours} ct state invalid goto refuse
        iifname {ours} ct state new add @flows {{ iifname ct count over {policy.flows} }} counter name over_flows drop
        iifname {ours} tcp flags syn tcp option maxseg size set rt mtu
        oifname {ours} ct state {{ new, invalid, untracked }} goto refuse
        {_cap("oifname", ours, "receiving", policy)}
        iifname @lent oifname != "{PREFIX}*" drop
    }}
    chain from_host {{
        type filter hook output priority filter; policy accept;
        oifname {ours} ct state {{ new, invalid, untracked }} drop
    }}
    chain masked {{
        type nat hook postrouting priority srcnat; policy accept;
        ip saddr {pool} oifname != "{PREFIX}*" masquerade
    }}
}}
"""


def inner_ruleset(policy: EgressPolicy, host: HostFacts, wants: Wants, tap: str) -> str:
    """Loaded before anything enters a rootless agent's network. A gang's interface leads to its relay, which filters by itself."""
    free = f'{{ "lo", "{INTERFACE}" }}' if isinstance(wants, Gang) else '"lo"'
    if isinstance(wants, Gang) and not wants.egress:
        judging = "goto refuse"
    elif isinstance(wants, Only):
        judging = """ip protocol . ip daddr . th dport @permitted return
        goto refuse"""
    else:
        judging = _judging(policy)
    permitted = _permitted(wants.targets) if isinstance(wants, Only) else ()
    return f"""
table {FAMILY} {PREFIX} {{
    counter refused {{ }}
    counter over_rate {{ }}
    counter over_flows {{ }}
    {_set("permitted", "type inet_proto . ipv4_addr . inet_service; flags interval", permitted)}
    set sending {{ type ifname; flags dynamic; size 16; }}
    set receiving {{ type ifname; flags dynamic; size 16; }}
    set flows {{ type ifname; flags dynamic; size 16; }}
    set {REFUSALS} {{ type inet_proto . ipv4_addr . inet_service; flags dynamic; size {MAX_INNER_REFUSALS}; }}
    {_sets(policy, host)}
    chain refuse {{
        ip protocol {{ tcp, udp }} add @{REFUSALS} {{ ip protocol . ip daddr . th dport }}
        counter name refused drop
    }}
    chain judge {{
        meta nfproto != ipv4 goto refuse
        ip hdrlength > 5 goto refuse  # options: a way chosen by the sender
        {judging}
    }}
    chain leaving {{
        type filter hook output priority raw; policy accept;
        oifname != {free} jump judge
        {_cap("oifname", f'"{tap}"', "sending", policy)}
    }}
    chain counted {{
        type filter hook output priority filter; policy accept;
        oifname != {free} ct state new add @flows {{ oifname ct count over {policy.flows} }} counter name over_flows drop
    }}
    chain coming {{
        type filter hook input priority filter; policy accept;
        iifname != {free} meta nfproto != ipv4 drop
        iifname != {free} ct state {{ new, invalid, untracked }} drop
        {_cap("iifname", f'"{tap}"', "receiving", policy)}
    }}
    chain through {{
        type filter hook forward priority filter; policy drop;
    }}
}}
"""


def permit(naming: Naming, interface: str, only: Only) -> str:
    elements = ", ".join(f'"{interface}" . {each}' for each in _permitted(only.targets))
    if not elements:
        return ""
    return f"add element {FAMILY} {naming.table} permitted {{ {elements} }}\n"


def refresh(table: str, host: HostFacts) -> str:
    listed = ", ".join(_merged((*REFUSED_V4, *host.networks)))
    return f"flush set {table} refused\nadd element {table} refused {{ {listed} }}\n"


def revoke(naming: Naming, interface: str, only: Only) -> str:
    return permit(naming, interface, only).replace("add element", "delete element", 1)


class RefusedConnection(NamedTuple):
    protocol: str
    address: str
    port: int


def refused_connections(
    objects: Iterable[Mapping[str, Any]], interface: str | None = None
) -> list[RefusedConnection]:
    """Elements of the set `REFUSALS` as nft lists it; of the host's set those of one interface."""
    owner = [] if interface is None else [interface]
    found = []
    for each in objects:
        for element in each.get("set", {}).get("elem", ()):
            match element.get("elem", {}).get("val", element):  # wrapped by some versions
                case {"concat": [*named, protocol, address, port]} if named == owner:
                    found.append(RefusedConnection(str(protocol), str(address), int(port)))
    return found


def forget_refusals(naming: Naming, interface: str, refused: Iterable[RefusedConnection]) -> str:
    elements = ", ".join(
        f'"{interface}" . {each.protocol} . {each.address} . {each.port}' for each in refused
    )
    return f"delete element {FAMILY} {naming.table} {REFUSALS} {{ {elements} }}\n"


def _permitted(targets: Iterable[Target]) -> Iterable[str]:
    for target in disjoint(targets):
        for protocol in ("tcp", "udp"):
            yield f"{protocol} . {target.network} . {_ports(target)}"


def _ports(target: Target) -> str:
    first, last = target.ports
    return str(first) if first == last else f"{first}-{last}"


def _judging(policy: EgressPolicy) -> str:
    """Filter chain. Ends in `refuse`, so packets with unreadable ports are refused."""
    # ICMP echo has no port: permitted where any port is.
    echo = " ip daddr @allowed_hosts" if policy.allow else ""
    last = "ip daddr . th dport @allowed return" if policy.allow else "th dport 0-65535 return"
    return f"""ip daddr @refused goto refuse
        ip daddr @denied_hosts goto refuse
        icmp type echo-request{echo} return
        meta l4proto != {{ tcp, udp }} goto refuse
        ip daddr . th dport @denied goto refuse
        {last}
        goto refuse"""


def _sets(policy: EgressPolicy, host: HostFacts) -> str:
    ranges = "type ipv4_addr; flags interval"
    pairs = "type ipv4_addr . inet_service; flags interval"
    whole = (t.network for t in policy.deny if t.ports == ANY_PORT)
    return "\n    ".join(
        (
            _set("refused", ranges, _merged((*REFUSED_V4, *host.networks))),
            _set("denied_hosts", ranges, _merged(whole)),
            _set("denied", pairs, _pairs(policy.deny)),
            _set("allowed", pairs, _pairs(policy.allow)),
            _set("allowed_hosts", ranges, _merged(t.network for t in policy.allow)),
        )
    )


def _merged(networks: Iterable[IPv4Network]) -> Iterable[str]:
    return (str(network) for network in collapse_addresses(networks))


def _pairs(targets: Iterable[Target]) -> Iterable[str]:
    return (f"{target.network} . {_ports(target)}" for target in disjoint(targets))


def disjoint(targets: Iterable[Target]) -> list[Target]:
    """Remove overlaps, which kernel sets reject."""
    given = list(targets)
    edges = sorted({edge for t in given for edge in (t.ports[0], t.ports[1] + 1)})
    found: list[tuple[tuple[int, int], tuple[IPv4Network, ...]]] = []
    for first, past in pairwise(edges):
        over = (t.network for t in given if t.ports[0] <= first and past - 1 <= t.ports[1])
        networks = tuple(collapse_addresses(over))
        if found and found[-1][1] == networks and found[-1][0][1] == first - 1:
            found[-1] = ((found[-1][0][0], past - 1), networks)
        elif networks:
            found.append(((first, past - 1), networks))
    return [Target(network, ports) for ports, networks in found for network in networks]


def _set(name: str, kind: str, elements: Iterable[str]) -> str:
    listed = ", ".join(dict.fromkeys(elements))
    return f"set {name} {{ {kind}; {f'elements = {{ {listed} }}' if listed else ''} }}"


def _cap(side: str, interfaces: str, meter: str, policy: EgressPolicy) -> str:
    rate = policy.rate_bytes_per_s
    if rate is None:
        return ""
    return (
        f"{side} {interfaces} update @{meter} {{ {side} limit rate over {rate} bytes/second"
        f" burst {BURST_BYTES} bytes }} counter name over_rate drop"
    )
