"""Addresses that no task may reach. Pure; in doubt an address is refused.

The lists are written out because the meaning of `ipaddress`'s "global" differs between Python
releases; a property test compares the two.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

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
    """Return whether the address is anything but a plain public one."""
    if isinstance(address, IPv4Address):
        return any(address in network for network in REFUSED_V4)
    return address not in PUBLIC_V6 or any(address in network for network in REFUSED_V6)
