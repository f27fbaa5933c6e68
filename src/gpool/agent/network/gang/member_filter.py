"""Filter of a gang member's interface, loaded in the member's namespace before the interface is up.

It admits packets between the member's own address and its peers', nothing else, in both directions and below IP: packet
sockets and ARP do not pass it. A task has no capability in the namespace and cannot change it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from gpool.agent.network.host import Netlink, NftFailed, packets
from gpool.agent.network.namespaces import in_namespace, nft_here
from gpool.agent.network.policy import Gang
from gpool.core.gangs import INTERFACE, address_of

FAMILY, TABLE, COUNTER = "netdev", "gpool_gang", "refused"
LOCAL_UNICAST = 0b10
"""Lowest bits of a MAC address's first byte: locally administered, of one interface."""


def derived(secret: bytes, *words: object) -> bytes:
    """32 bytes for one purpose, from the secret of one attempt of one gang (RFC 5869)."""
    info = " ".join(("gpool gang", *map(str, words))).encode()
    return HKDF(SHA256(), 32, b"", info).derive(secret)


def mac_of(gang: Gang, rank: int) -> bytes:
    """MAC address of a member. Other gangs of the site do not know it, so equal IP addresses never meet."""
    found = bytearray(derived(gang.secret, "mac", rank)[:6])
    found[0] = found[0] & 0b1111_1100 | LOCAL_UNICAST
    return bytes(found)


def mac_text(mac: bytes) -> str:
    return mac.hex(":")


def ruleset(gang: Gang, macs: Sequence[bytes] = ()) -> str:
    """Ruleset of the member's interface; `macs`: the members' by rank, where the interface has Ethernet frames."""
    own = address_of(gang.rank)
    others = [rank for rank in range(len(gang.peers)) if rank != gang.rank]
    kind = "ether_addr . ipv4_addr" if macs else "ipv4_addr"
    keys = (
        f"{mac_text(macs[r])} . {address_of(r)}" if macs else str(address_of(r)) for r in others
    )
    listed = ", ".join(keys)
    to, sender = ("ether daddr . ", "ether saddr . ") if macs else ("", "")
    return f"""
table {FAMILY} {TABLE} {{
    counter {COUNTER} {{ }}
    set peers {{ type {kind}; {f"elements = {{ {listed} }}" if listed else ""} }}
    chain leaving {{
        type filter hook egress device "{INTERFACE}" priority 0; policy accept;
        {f"ether saddr != {mac_text(macs[gang.rank])} goto refuse" if macs else ""}
        meta protocol ip ip hdrlength 5 ip saddr {own} {to}ip daddr @peers accept
        goto refuse
    }}
    chain arriving {{
        type filter hook ingress device "{INTERFACE}" priority 0; policy accept;
        meta protocol ip ip hdrlength 5 ip daddr {own} {sender}ip saddr @peers accept
        goto refuse
    }}
    chain refuse {{
        counter name {COUNTER} drop
    }}
}}
"""


class MemberFilter:
    """The loaded filter of one member; keeps the namespace alive until `close`."""

    def __init__(self, namespace: int) -> None:
        self._namespace = namespace
        self._gone = 0  # counted before the last reload
        self._last = 0

    @classmethod
    async def load(cls, namespace: int, text: str) -> MemberFilter:
        """Load it before the interface is up. It names the interface, so the interface exists."""
        await in_namespace(namespace, lambda: nft_here("-f", "-", text=text))
        return cls(os.dup(namespace))

    async def reload(self, text: str) -> None:
        """After the interface was made again: its hooks went with it."""
        self._gone, self._last = await self.refused(), 0
        whole = f"table {FAMILY} {TABLE}\ndelete table {FAMILY} {TABLE}\n{text}"
        await in_namespace(self._namespace, lambda: nft_here("-f", "-", text=whole))

    async def refused(self) -> int:
        if self._namespace >= 0:
            with contextlib.suppress(OSError, NftFailed, ValueError):
                listing = await in_namespace(self._namespace, _counters)
                self._last = packets(json.loads(listing)["nftables"], COUNTER)
        return self._gone + self._last

    async def remove(self, interface: str) -> None:
        """Remove an interface now: the kernel clears an abandoned namespace some time later."""

        def work() -> None:
            with contextlib.suppress(OSError), Netlink() as netlink:
                netlink.remove(interface)

        with contextlib.suppress(OSError):
            await in_namespace(self._namespace, work)

    def close(self) -> None:
        if self._namespace >= 0:
            os.close(self._namespace)
            self._namespace = -1


def _counters() -> str:
    return nft_here("-j", "list", "counters", "table", FAMILY, TABLE)
