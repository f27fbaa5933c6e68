"""Addresses of a pool's servers that an agent tries, each with its own backoff. Reads no clock and sends nothing.

All of them have the certificate of one pool, or certificates that authorities vouch for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random

from gpool.transfer.requests import Address

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 10.0


@dataclass(slots=True)
class _Backoff:
    address: Address
    delay_s: float = FIRST_DELAY_S
    ready_s: float = 0.0  # earliest time of the next attempt


class ServerAddresses:
    """Begins with any of them, so that the agents of a pool spread over its replicas.

    After a failure the next address that is not in backoff is tried; if all are, the one whose backoff ends first.
    Example with the replicas A, B and C: A answers 503 with `Retry-After: 20`, so B and C are tried within 0.1 s each,
    then B and C with doubling delays, and A not before 20 to 30 seconds have passed.
    """

    def __init__(self, addresses: Iterable[Address], random: Random) -> None:
        self._all = [_Backoff(address) for address in addresses]
        self._random = random
        self._at = random.randrange(len(self._all))

    @property
    def current(self) -> Address:
        return self._all[self._at].address

    def __iter__(self) -> Iterator[Address]:
        return iter([each.address for each in self._all])

    def connected(self) -> None:
        """End the backoff of the current address."""
        here = self._all[self._at]
        here.delay_s, here.ready_s = FIRST_DELAY_S, 0.0

    def failed(self, now_s: float, retry_after_s: float = 0.0) -> float:
        """Choose the address of the next attempt; return the seconds until then.

        Never earlier than the server wishes, and not all agents at once.
        """
        here = self._all[self._at]
        pause_s = max(
            here.delay_s * self._random.uniform(0.5, 1.0),
            retry_after_s * self._random.uniform(1.0, 1.5),
        )
        here.ready_s = now_s + pause_s
        here.delay_s = min(LONGEST_DELAY_S, here.delay_s * 2)
        following = [*range(self._at + 1, len(self._all)), *range(self._at + 1)]
        self._at = min(following, key=lambda index: max(now_s, self._all[index].ready_s))
        return max(self._short_s(), self._all[self._at].ready_s - now_s)

    def moved(self, to: str) -> bool:
        """Choose the address that the server named; False if the owner has not named it too."""
        for index, each in enumerate(self._all):
            if each.address.url.rstrip("/") == to.rstrip("/"):
                self._at = index
                each.ready_s = 0.0
                return True
        return False

    def _short_s(self) -> float:
        return FIRST_DELAY_S * self._random.uniform(0.5, 1.0)
