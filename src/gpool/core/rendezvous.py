"""What a gang's members know each other by. Pure: who they are is decided elsewhere.

Each member has one address inside its gang's own network, which no other task or host is in; the first member's is where
the others meet.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

NETWORK = IPv4Network("10.211.0.0/16")
"""Of every gang: gangs never see each other, so all of them can use the same."""

INTERFACE = "gang0"
MAX_NODES = 1024


def address_of(rank: int) -> IPv4Address:
    """Where a member is found by the others of its gang."""
    return NETWORK.network_address + rank + 1
