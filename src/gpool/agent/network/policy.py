"""Addresses no task may reach, the owner's egress policy, and the purposes of a sandbox network. Pure.

`allow` never widens: private, link-local and metadata addresses stay refused. The lists are written out because
`ipaddress`'s "global" differs between Python releases.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network

from gpool.core.gangs import MAX_NODES, NETWORK, GangLink, address_of

ANY_PORT = (0, 65535)
UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9}
RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|[kKMG]B)/s")
COUNT = re.compile(r"(\d+)(?:/s)?")
LEAST_SECRET_BYTES = 16
MIN_RATE_BYTES_PER_S = 16 * 1024  # below this rate TLS handshakes time out


class BadPolicy(ValueError): ...


@dataclass(frozen=True, slots=True, order=True)
class Target:
    """Addresses with TCP and UDP ports. IPv4 only, as sandbox networks are."""

    network: IPv4Network
    ports: tuple[int, int] = ANY_PORT  # first and last

    def __str__(self) -> str:
        alone = self.network.prefixlen == 32
        where = str(self.network.network_address if alone else self.network)
        first, last = self.ports
        if self.ports == ANY_PORT:
            return where
        return f"{where}:{first}" if first == last else f"{where}:{first}-{last}"

    def covers(self, address: IPv4Address, port: int) -> bool:
        return address in self.network and self.ports[0] <= port <= self.ports[1]


def parse_target(text: str) -> Target:
    """Parse `1.2.3.4`, `1.2.3.0/24`, `1.2.3.4:443`, `1.2.3.0/24:8000-8010` or `*:25`."""
    where, colon, ports = text.strip().partition(":")
    if ":" in ports or where.startswith("["):
        raise BadPolicy(
            f"{text!r}: sandbox networks carry no IPv6; every IPv6 address is refused already"
        )
    try:
        network = ip_network("0.0.0.0/0" if where == "*" else where)
    except ValueError as wrong:
        raise BadPolicy(f"{text!r}: {wrong}; write 1.2.3.4, 1.2.3.0/24 or *") from wrong
    if not isinstance(network, IPv4Network):
        raise BadPolicy(
            f"{text!r}: sandbox networks carry no IPv6; every IPv6 address is refused already"
        )
    return Target(network, _ports(text, ports) if colon else ANY_PORT)


def _ports(text: str, ports: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", ports)
    if match is None:
        raise BadPolicy(f"{text!r}: {ports!r} is not a port; write 443 or 8000-8010")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last <= 65535:
        raise BadPolicy(f"{text!r}: ports go from 1 to 65535, the smaller one first")
    return first, last


@dataclass(frozen=True, slots=True)
class EgressPolicy:
    allow: tuple[Target, ...] = ()  # empty: every public address
    deny: tuple[Target, ...] = (
        Target(IPv4Network("0.0.0.0/0"), (25, 25)),
    )  # SMTP is denied by default
    rate_bytes_per_s: int | None = None  # each way
    flows: int = 1024  # concurrent connections; they share the host's conntrack table
    queries_per_s: int = 20  # DNS queries; bursts of ten times that


def parse_policy(text: str) -> EgressPolicy:
    """Parse lines `allow TARGET`, `deny TARGET`, `rate 10MB/s`, `flows 1024`, `queries 20/s`, `# comment`.

    `deny nothing` removes the default deny rule.
    """
    allow: list[Target] = []
    deny: list[Target] = []
    known = EgressPolicy()
    denies = known.deny
    rate: int | None = None
    counts = {"flows": known.flows, "queries": known.queries_per_s}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        word, _, value = line.strip().partition(" ")
        value = value.strip()
        try:
            match word:
                case "allow":
                    allow.append(worth_allowing(parse_target(value)))
                case "deny" if value == "nothing":
                    denies = ()
                case "deny":
                    deny.append(parse_target(value))
                case "rate":
                    rate = parse_rate(value)
                case "flows" | "queries":
                    counts[word] = _count(value)
                case _:
                    raise BadPolicy(f"{word!r} is none of allow, deny, rate, flows, queries")
        except BadPolicy as wrong:
            raise BadPolicy(f"line {number}: {wrong}") from wrong
    return EgressPolicy(
        tuple(allow), tuple(deny) or denies, rate, counts["flows"], counts["queries"]
    )


def worth_allowing(target: Target) -> Target:
    """Reject a target that would permit nothing: its owner expects otherwise."""
    ends = (target.network.network_address, target.network.broadcast_address)
    if all(is_refused(end) for end in ends) and target.network.prefixlen >= 8:
        raise BadPolicy(f"{target}: no policy opens private, link-local or reserved addresses")
    return target


def parse_rate(text: str) -> int | None:
    if text == "none":
        return None
    match = RATE.fullmatch(text)
    if match is None:
        raise BadPolicy(f"{text!r} is not a rate; write 10MB/s, 500kB/s or none")
    rate = int(float(match[1]) * UNITS[match[2]])
    if not MIN_RATE_BYTES_PER_S <= rate < 2**32:  # upper bound: the kernel's 32-bit counter
        raise BadPolicy(f"{text!r}: a rate lies between 16 kB/s and 4 GB/s")
    return rate


def _count(text: str) -> int:
    match = COUNT.fullmatch(text)
    if match is None or not 1 <= int(match[1]) <= 100_000:
        raise BadPolicy(f"{text!r} is not a number between 1 and 100000")
    return int(match[1])


@dataclass(frozen=True, slots=True)
class Egress: ...


@dataclass(frozen=True, slots=True)
class Only:
    """Network to these targets only, private ones included: the servers of a package index. Never made from a consumer's input;
    only `names` resolve in it.
    """

    targets: tuple[Target, ...]
    names: Mapping[str, tuple[IPv4Address, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for target in self.targets:
            if any(target.network.overlaps(never) for never in NEVER_LISTED if never.version == 4):
                raise BadPolicy(
                    f"{target}: loopback, link-local, metadata, multicast and reserved addresses can't be listed"
                )


@dataclass(frozen=True, slots=True)
class Gang:
    """Network to the other members of a gang; `egress`: to the public internet too.

    Rank n has the address `gpool.core.gangs.address_of(n)`. `peers`: each member's UDP address, by rank.
    """

    rank: int
    peers: tuple[tuple[str, int], ...]
    secret: bytes = field(repr=False)
    egress: bool = False
    link: str = GangLink.RELAY  # as the server chose it

    @property
    def wrong(self) -> str:
        if self.link not in list(GangLink):
            return f"the gang's link is {self.link!r}, which this agent does not know; update it"
        if not 0 <= self.rank < len(self.peers) <= MAX_NODES:
            return f"rank {self.rank} of {len(self.peers)}: there is no such member"
        if len(self.secret) < LEAST_SECRET_BYTES:
            return f"a gang's secret has at least {LEAST_SECRET_BYTES} bytes"
        return ""

    @property
    def names(self) -> dict[str, tuple[IPv4Address, ...]]:
        return {f"rank{rank}": (address_of(rank),) for rank in range(len(self.peers))}


Wants = Egress | Only | Gang


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Networks refused besides the fixed ranges."""

    networks: tuple[IPv4Network, ...] = ()


def reaches(
    policy: EgressPolicy, host: HostFacts, wants: Wants, address: Address, port: int | None = None
) -> bool:
    """Port None: any."""
    if isinstance(address, IPv6Address):
        return False
    if isinstance(wants, Only):
        return _any_covers(wants.targets, address, port)
    if isinstance(wants, Gang) and (address in NETWORK or not wants.egress):
        return NETWORK.network_address < address <= address_of(len(wants.peers) - 1)
    if is_refused(address) or any(address in network for network in host.networks):
        return False
    if port is None:
        if any(d.ports == ANY_PORT and address in d.network for d in policy.deny):
            return False
    elif _any_covers(policy.deny, address, port):
        return False
    return not policy.allow or _any_covers(policy.allow, address, port)


def _any_covers(targets: Iterable[Target], address: IPv4Address, port: int | None) -> bool:
    return any(
        address in target.network if port is None else target.covers(address, port)
        for target in targets
    )


Address = IPv4Address | IPv6Address
AnyNetwork = IPv4Network | IPv6Network

REFUSED_V4: tuple[IPv4Network, ...] = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",  # this host
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier NAT; one cloud keeps its metadata here
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # a cloud's metadata under a public-looking address
        "169.254.0.0/16",  # link-local, metadata
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments; one cloud keeps its metadata here
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
)

PUBLIC_V6 = IPv6Network("2000::/3")
"""Addresses outside are refused: loopback, mapped and translated IPv4, unique-local (fd00:ec2::254
included), link-local, multicast.
"""

REFUSED_V6: tuple[IPv6Network, ...] = tuple(
    IPv6Network(text)
    for text in (
        "2001::/23",  # protocol assignments, Teredo among them
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: carries an IPv4 address
        "3fff::/20",  # documentation
    )
)

NEVER_LISTED: tuple[AnyNetwork, ...] = (
    IPv4Network("0.0.0.0/8"),
    IPv4Network("127.0.0.0/8"),
    IPv4Network("168.63.129.16/32"),
    IPv4Network("169.254.0.0/16"),
    IPv4Network("192.0.0.0/24"),
    IPv4Network("224.0.0.0/4"),
    IPv4Network("240.0.0.0/4"),
)
"""Addresses that not even a list of permitted targets may contain: other machines inside, or credentials."""


def is_refused(address: Address) -> bool:
    if isinstance(address, IPv4Address):
        return any(address in network for network in REFUSED_V4)
    return address not in PUBLIC_V6 or any(address in network for network in REFUSED_V6)
