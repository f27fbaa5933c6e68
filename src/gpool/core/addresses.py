"""Classification of IP addresses. Pure."""

from __future__ import annotations

import ipaddress

_EMBEDDING = (
    ipaddress.ip_network("64:ff9b::/96"),  # NAT64
    ipaddress.ip_network("::/96"),  # IPv4-compatible
)


def is_public(address: str) -> bool:
    """Whether an address, or an IPv4 address embedded in it, is public: not private, loopback, link-local (metadata
    services), multicast or reserved.
    """
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = (
            parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo[1] if parsed.teredo else None)
        )
        if inner is None and any(parsed in network for network in _EMBEDDING):
            inner = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
        if parsed.is_site_local:
            return False
        if inner is not None and not is_public(str(inner)):
            return False
    return parsed.is_global and not parsed.is_multicast
