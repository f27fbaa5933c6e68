"""Slowing down: guessing at sign-in, and each class of routes. Keeps one number per bucket; reads no clock.

Buckets are GCRA: a bucket is the instant at which it will be empty again, so a million of them are a million integers
and one that has emptied can be forgotten. Our own rather than a library's, because those that exist read the clock
themselves, sweep from a thread of their own, and cannot ask several buckets at once without spending from the first.

Sign-in. A guess costs from a bucket; a right password gives the cost back. Who is known is not slowed by strangers:
- with a device cookie (proof of an earlier sign-in there), only that device's own failures count;
- from an address that signed in lately, only failures from that address at that name count;
- everybody else shares: per address over all names, per name and address, and per name over all addresses, where an
  address with few failures draws on a large bucket of first tries, and one that failed before on a small one.
Nothing ever locks: the longest wait is bounded, and waiting it out alone is always enough. An owner without cookie and
at a new address competes for first tries only with guessers at other *fresh* addresses (hundreds of them, at once).

Each replica keeps its own buckets: n replicas allow n times the rate. Quotas that matter are rows.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from gpool.core.model import SECOND, Instant, Span

MAX_BUCKETS = 200_000
MAX_KNOWN = 100_000
DAY = Span(86_400 * SECOND)


@dataclass(frozen=True, slots=True)
class Rate:
    """`burst` at once, then one more every `every`."""

    burst: int
    every: Span

    @property
    def depth(self) -> Span:
        return Span(self.burst * self.every)


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now; what is asked again after `span` will be allowed, if nobody else asks."""

    span: Span

    @property
    def seconds(self) -> int:
        """For `Retry-After`: whole seconds, rounded up."""
        return -(-self.span // SECOND)


Spending = tuple[Hashable, Rate]


class Buckets:
    """Many buckets, all full at first."""

    def __init__(self, most: int = MAX_BUCKETS) -> None:
        self._empty_at: dict[Hashable, int] = {}
        self._most = most

    def __len__(self) -> int:
        return len(self._empty_at)

    def spend(self, wanted: Iterable[Spending], now: Instant) -> Wait | None:
        """One from each bucket, or from none and how long to wait."""
        after: dict[Hashable, int] = {}
        longest = 0
        for key, rate in wanted:
            ends = max(self._empty_at.get(key, 0), now) + rate.every
            longest = max(longest, ends - now - rate.depth)
            after[key] = ends
        if longest > 0:
            return Wait(Span(longest))
        self._empty_at.update(after)
        if len(self._empty_at) > self._most:
            self._forget(now)
        return None

    def give_back(self, spent: Iterable[Spending]) -> None:
        for key, rate in spent:
            if key in self._empty_at:
                self._empty_at[key] -= rate.every

    def spent(self, key: Hashable, rate: Rate, now: Instant) -> int:
        """How many of the bucket's are gone at the moment."""
        return -(-max(0, self._empty_at.get(key, 0) - now) // rate.every)

    def _forget(self, now: Instant) -> None:
        """First what is full again; then, an eighth at a time, what is nearest to it: who failed most is kept longest."""
        self._empty_at = {key: ends for key, ends in self._empty_at.items() if ends > now}
        if len(self._empty_at) > self._most - self._most // 8:
            order = sorted(self._empty_at.items(), key=lambda item: item[1])
            self._empty_at = dict(order[len(order) - (self._most - self._most // 8) :])


@lru_cache(maxsize=16_384)
def network_of(address: str) -> str:
    """What counts as one address: an IPv4 address, an IPv6 /64 (one customer has them all), else the text itself."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address[:64]
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((int(parsed), 64), strict=False))
    return str(parsed)


# ---- sign-in


@dataclass(frozen=True, slots=True)
class SignInRates:
    device: Rate = Rate(10, Span(30 * SECOND))
    known: Rate = Rate(10, Span(30 * SECOND))
    address: Rate = Rate(30, Span(4 * SECOND))
    pair: Rate = Rate(5, Span(20 * SECOND))
    first_tries: Rate = Rate(300, Span(6 * SECOND))
    name: Rate = Rate(20, Span(10 * SECOND))
    fresh: Rate = Rate(2, Span(DAY // 4))  # tries of an address at a name that count as first ones
    remembered: Span = Span(30 * DAY)  # noqa: RUF009


RATES = SignInRates()


@dataclass(frozen=True, slots=True)
class Attempt:
    """A guess: at which name, from where, with which device (an id from `device_of`, never the bare cookie)."""

    name: str
    address: str
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Admitted:
    """What it cost; given back by `succeeded`."""

    attempt: Attempt
    spent: tuple[Spending, ...] = field(repr=False)
    trusted: bool = False  # the device, or the address, signed in with this name before


class SignInThrottle:
    def __init__(self, rates: SignInRates = RATES, most: int = MAX_BUCKETS) -> None:
        self._rates = rates
        self._strangers, self._trusted = Buckets(most), Buckets(most)
        self._fresh = Buckets(
            most
        )  # apart: it recovers in hours, and would crowd out what recovers in seconds
        self._known: dict[tuple[str, str], Instant] = {}

    def attempt(self, attempt: Attempt, now: Instant) -> Admitted | Wait:
        """Asked before the password is looked at, and paid for at once: parallel guesses do not slip through."""
        name, network = attempt.name.casefold(), network_of(attempt.address)
        rates = self._rates
        if attempt.device is not None:
            return self._take(
                attempt, self._trusted, (("device", name, attempt.device), rates.device), now=now
            )
        if self._known.get((name, network), Instant(0)) > now:
            return self._take(
                attempt, self._trusted, (("known", name, network), rates.known), now=now
            )
        pair = (name, network)
        is_first = self._fresh.spent(pair, rates.fresh, now) < rates.fresh.burst
        found = self._take(
            attempt,
            self._strangers,
            (("address", network), rates.address),
            (("pair", *pair), rates.pair),
            (("first", name), rates.first_tries) if is_first else (("name", name), rates.name),
            now=now,
        )
        if is_first and isinstance(found, Admitted):
            self._fresh.spend([(pair, rates.fresh)], now)
        return found

    def _take(
        self, attempt: Attempt, buckets: Buckets, *spending: Spending, now: Instant
    ) -> Admitted | Wait:
        wait = buckets.spend(spending, now)
        return wait or Admitted(attempt, spending, trusted=buckets is self._trusted)

    def not_tried(self, admitted: Admitted) -> None:
        """The password was not looked at: nothing was guessed."""
        self._trusted.give_back(admitted.spent)
        self._strangers.give_back(admitted.spent)

    def succeeded(self, admitted: Admitted, now: Instant) -> None:
        """The password was right: nothing was guessed, and the address is known from now on."""
        self.not_tried(admitted)
        key = (admitted.attempt.name.casefold(), network_of(admitted.attempt.address))
        self._known.pop(key, None)  # to the end: the longest unused is forgotten first
        self._known[key] = Instant(now + self._rates.remembered)
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]


# ---- device cookies

_COOKIE = re.compile(r"gpd_([A-Za-z0-9_-]{16,43})\.(\d{1,12})\.([A-Za-z0-9_-]{43})")


def device_cookie(key: bytes, name: str, device: str, expires: Instant) -> str:
    """Given out with a sign-in, sent with the next: proves that one succeeded for this name on this device."""
    until = expires // SECOND
    return f"gpd_{device}.{until}.{_device_tag(key, name, device, until)}"


def device_of(key: bytes, name: str, cookie: str, now: Instant) -> str | None:
    """The device's id, when the cookie is ours, for this name, and not too old."""
    match = _COOKIE.fullmatch(cookie)
    if match is None or not match[2].isascii() or int(match[2]) <= now // SECOND:
        return None
    tag = _device_tag(key, name, match[1], int(match[2]))
    return match[1] if hmac.compare_digest(tag, match[3]) else None


def _device_tag(key: bytes, name: str, device: str, until: int) -> str:
    spelt = name.casefold().encode("utf-8", "surrogatepass")
    message = b"gpool device 1\0%s.%d\0" % (device.encode(), until) + spelt
    digest = hmac.new(key, message, hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


# ---- classes of routes


class RouteClass(StrEnum):
    SIGN_IN = "sign_in"  # also nonces, registration, joining
    REFRESH = "refresh"  # nothing can be guessed there: only floods are held back
    READ = "read"
    CHANGE = "change"
    SUBMIT = "submit"
    TRANSFER = "transfer"  # artifacts
    STREAM = "stream"  # logs, results, the channel: counted when opened


@dataclass(frozen=True, slots=True)
class ClassRates:
    """Per account, for who is signed in; per address, for who is not.

    Accounts are held to what would hurt others, far above what an honest program asks for: a batch of 10,000 tasks is
    one request. Without a sign-in there is little to ask for but the sign-in.
    """

    account: Rate
    address: Rate


def per_second(rate: int, burst: int) -> Rate:
    return Rate(burst, Span(SECOND // rate))


CLASS_RATES: Mapping[RouteClass, ClassRates] = {
    RouteClass.SIGN_IN: ClassRates(per_second(2, 30), per_second(10, 100)),
    RouteClass.REFRESH: ClassRates(per_second(500, 50_000), per_second(500, 50_000)),
    RouteClass.READ: ClassRates(per_second(2000, 10_000), per_second(100, 1000)),
    RouteClass.CHANGE: ClassRates(per_second(500, 5000), per_second(50, 500)),
    RouteClass.SUBMIT: ClassRates(per_second(2000, 20_000), per_second(50, 500)),
    RouteClass.TRANSFER: ClassRates(per_second(2000, 20_000), per_second(50, 500)),
    RouteClass.STREAM: ClassRates(per_second(200, 2000), per_second(50, 500)),
}


class RouteLimits:
    def __init__(
        self, rates: Mapping[RouteClass, ClassRates] = CLASS_RATES, most: int = MAX_BUCKETS
    ) -> None:
        self._rates = rates
        self._buckets = Buckets(most)

    def take(
        self, route: RouteClass, account: int | None, address: str, now: Instant
    ) -> Wait | None:
        """None: go on. `account` None: nobody is signed in, only the address counts."""
        rates = self._rates[route]
        wanted: list[Spending] = [((route, network_of(address)), rates.address)]
        if account is not None:
            wanted.append(((route, account), rates.account))
        return self._buckets.spend(wanted, now)

    def take_account(self, route: RouteClass, account: int, now: Instant) -> Wait | None:
        """Of somebody signed in: people who share an address do not slow one another."""
        return self._buckets.spend([((route, account), self._rates[route].account)], now)

    def take_address(self, route: RouteClass, address: str, now: Instant) -> Wait | None:
        return self.take(route, None, address, now)
