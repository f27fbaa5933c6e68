"""Throttling of sign-in attempts and of route classes, in memory. Reads no clock.

Token buckets (GCRA). A bucket is one integer: the instant at which it is full again. A request moves it `every`
ahead, and is refused if it would lie more than `burst * every` ahead of now. Example `pair = Rate(5, 20 s)`: five
wrong passwords at once move it to now + 100 s; the sixth is refused with `Retry-After: 20`. A full bucket need not be
stored. Libraries read the clock, sweep from their own threads, and cannot ask several buckets at once without
draining the first.

Sign-in. An attempt takes tokens before its password is checked; a right password returns them. Strangers do not slow
an account's owner:
- from an address that signed in with this name in the last 30 days, only that address's failures at the name count;
- any other attempt takes from three buckets: the address over all names, the pair of name and address, and the name
  over all addresses. The last one is large (300, then one per 6 s) for the first two attempts of an address at the
  name, small (20, then one per 10 s) for later ones: all addresses together get at most 16 sustained guesses a
  minute at one name, and an owner at a new address competes only with guessers at fresh addresses.
- one customer may have a whole IPv6 /48, that is 65,536 networks of /64. So a /48 has an address bucket of its own,
  and after ten first attempts at a name its further ones count as later ones: it cannot drain the large bucket.
- right passwords take from a bucket of their name (30, then one per 5 s), which a guesser cannot drain: each costs a
  hash and a session, so one account in a loop would keep everybody else from signing in.
Nothing locks an account: every wait is bounded, and waiting is always enough.

Each replica has its own buckets, so n replicas allow n times the rate. Quotas are rows in the store instead.
"""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from gpool.core.errors import TooMany
from gpool.core.model import SECOND, Instant, Span

MAX_BUCKETS = 200_000
MAX_KNOWN = 100_000
DAY = Span(86_400 * SECOND)


@dataclass(frozen=True, slots=True)
class Rate:
    burst: int
    every: Span

    @property
    def depth(self) -> Span:
        return Span(self.burst * self.every)


@dataclass(frozen=True, slots=True)
class Wait:
    """Refusal; the same request passes after `span` if no other drains the bucket."""

    span: Span

    @property
    def seconds(self) -> int:
        return -(-self.span // SECOND)


Spending = tuple[Hashable, Rate]


class Buckets:
    def __init__(self, most: int = MAX_BUCKETS) -> None:
        self._empty_at: dict[Hashable, int] = {}
        self._most = most

    def __len__(self) -> int:
        return len(self._empty_at)

    def spend(self, wanted: Iterable[Spending], now: Instant) -> Wait | None:
        """Take one token from each bucket, or from none if one is empty."""
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
        return -(-max(0, self._empty_at.get(key, 0) - now) // rate.every)

    def _forget(self, now: Instant) -> None:
        """Drop full buckets; then, if still too many, the fullest eighth, so that the most active keys stay."""
        self._empty_at = {key: ends for key, ends in self._empty_at.items() if ends > now}
        if len(self._empty_at) > self._most - self._most // 8:
            order = sorted(self._empty_at.items(), key=lambda item: item[1])
            self._empty_at = dict(order[len(order) - (self._most - self._most // 8) :])


@lru_cache(maxsize=16_384)
def network_of(address: str) -> str:
    """Unit of address limits: an IPv4 address, an IPv6 /64 (one customer owns all of it), else the text."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address[:64]
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((int(parsed), 64), strict=False))
    return str(parsed)


@lru_cache(maxsize=16_384)
def site_of(address: str) -> str | None:
    """IPv6 /48 of an address, which one customer may own; None for other addresses."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return None
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((int(parsed), 48), strict=False))
    return None


NETWORKS_PER_SITE = 8
"""Share of an IPv6 /48 in a limit: so many networks of /64 in full use."""


def _of_address(kind: Hashable, address: str, rate: Rate) -> list[Spending]:
    """Tokens that an address takes: of its network and, for IPv6, of its /48."""
    spending: list[Spending] = [((kind, network_of(address)), rate)]
    site = site_of(address)
    if site is not None:
        wider = Rate(rate.burst * NETWORKS_PER_SITE, Span(max(1, rate.every // NETWORKS_PER_SITE)))
        spending.append(((kind, site), wider))
    return spending


# ---- sign-in


@dataclass(frozen=True, slots=True)
class SignInRates:
    known: Rate = Rate(10, Span(30 * SECOND))
    address: Rate = Rate(30, Span(4 * SECOND))
    pair: Rate = Rate(5, Span(20 * SECOND))
    first_tries: Rate = Rate(300, Span(6 * SECOND))
    name: Rate = Rate(20, Span(10 * SECOND))
    fresh: Rate = Rate(2, Span(DAY // 4))  # attempts of an address at a name that count as first
    fresh_site: Rate = Rate(10, Span(DAY // 24))  # likewise of an IPv6 /48
    right: Rate = Rate(30, Span(5 * SECOND))  # right passwords of a name
    remembered: Span = Span(30 * DAY)  # noqa: RUF009 - life of a known address


RATES = SignInRates()


@dataclass(frozen=True, slots=True)
class Attempt:
    name: str
    address: str


@dataclass(frozen=True, slots=True)
class Admitted:
    attempt: Attempt
    spent: tuple[Spending, ...] = field(repr=False)
    trusted: bool = False  # the address signed in with this name before


class SignInThrottle:
    def __init__(self, rates: SignInRates = RATES, most: int = MAX_BUCKETS) -> None:
        self._rates = rates
        self._strangers, self._trusted = Buckets(most), Buckets(most)
        self._fresh = Buckets(
            most
        )  # separate: these recover in hours and would evict buckets that recover in seconds
        self._right = Buckets(most)
        self._known: dict[tuple[str, str], Instant] = {}

    def attempt(self, attempt: Attempt, now: Instant) -> Admitted | Wait:
        """Take tokens before the password is checked, so that parallel guesses count too."""
        name, network = attempt.name.casefold(), network_of(attempt.address)
        rates = self._rates
        right: list[Spending] = [(name, rates.right)]
        wait = self._right.spend(right, now)
        if wait is not None:
            return wait
        self._right.give_back(right)  # taken only if the password is right
        if self._known.get((name, network), Instant(0)) > now:
            return self._take(
                attempt, self._trusted, (("known", name, network), rates.known), now=now
            )
        pair = (name, network)
        first: list[Spending] = [(pair, rates.fresh)]
        site = site_of(attempt.address)
        if site is not None:
            first.append(((name, site), rates.fresh_site))
        is_first = all(self._fresh.spent(key, rate, now) < rate.burst for key, rate in first)
        found = self._take(
            attempt,
            self._strangers,
            *_of_address("address", attempt.address, rates.address),
            (("pair", *pair), rates.pair),
            (("first", name), rates.first_tries) if is_first else (("name", name), rates.name),
            now=now,
        )
        if is_first and isinstance(found, Admitted):
            self._fresh.spend(first, now)
        return found

    def _take(
        self, attempt: Attempt, buckets: Buckets, *spending: Spending, now: Instant
    ) -> Admitted | Wait:
        wait = buckets.spend(spending, now)
        return wait or Admitted(attempt, spending, trusted=buckets is self._trusted)

    def not_tried(self, admitted: Admitted) -> None:
        self._trusted.give_back(admitted.spent)
        self._strangers.give_back(admitted.spent)

    def succeeded(self, admitted: Admitted, now: Instant) -> None:
        self.not_tried(admitted)
        name = admitted.attempt.name.casefold()
        self._right.spend([(name, self._rates.right)], now)
        key = (name, network_of(admitted.attempt.address))
        self._known.pop(key, None)  # moves it to the end: the least recently used goes first
        self._known[key] = Instant(now + self._rates.remembered)
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]


# ---- rate limits by class of route


class RouteClass(StrEnum):
    SIGN_IN = "sign_in"  # also nonces, joining
    REGISTER = "register"  # apart, so that a flood of registrations does not keep a neighbour from signing in
    REFRESH = "refresh"  # a refresh token cannot be guessed: the limit is against floods only
    READ = "read"
    CHANGE = "change"
    SUBMIT = "submit"
    TRANSFER = "transfer"  # artifacts
    STREAM = "stream"  # logs, results, the agents' channel: counted when opened


@dataclass(frozen=True, slots=True)
class ClassRates:
    """Rates per account for authenticated requests, per address for anonymous ones.

    Account rates only stop harm to others: a batch of 10,000 tasks is one request.
    """

    account: Rate
    address: Rate


def per_second(rate: int, burst: int) -> Rate:
    return Rate(burst, Span(SECOND // rate))


CLASS_RATES: Mapping[RouteClass, ClassRates] = {
    RouteClass.SIGN_IN: ClassRates(per_second(2, 30), per_second(10, 100)),
    RouteClass.REGISTER: ClassRates(per_second(2, 30), per_second(5, 100)),
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

    def take_account(self, route: RouteClass, account: int, now: Instant) -> Wait | None:
        return self._buckets.spend([((route, account), self._rates[route].account)], now)

    def take_address(self, route: RouteClass, address: str, now: Instant) -> Wait | None:
        return self._buckets.spend(self._spending(route, address), now)

    def return_address(self, route: RouteClass, address: str) -> None:
        self._buckets.give_back(self._spending(route, address))

    def _spending(self, route: RouteClass, address: str) -> list[Spending]:
        return _of_address(route, address, self._rates[route].address)


UNKNOWN_KEYS = per_second(50, 500)
"""Unknown keys and tokens from one address: each costs a read of the store."""

CHANNELS = per_second(50, 1000)
"""Channels opened from one address by nodes that have not proved their key; a proof returns the token."""


@dataclass(slots=True)
class GuardedSignIn:
    admitted: Admitted = field(repr=False)
    right: bool = False

    @property
    def trusted(self) -> bool:
        return self.admitted.trusted

    def succeeded(self) -> None:
        self.right = True


class Guard:
    def __init__(self, now: Callable[[], Instant]) -> None:
        self._now = now
        self._sign_ins = SignInThrottle()
        self._routes = RouteLimits()
        self._unknown = Buckets()
        self._channels = Buckets()

    @asynccontextmanager
    async def sign_in(self, name: str, address: str) -> AsyncIterator[GuardedSignIn]:
        """Wrap the check of a password; `TooMany` if the name or address has too many failures.

            async with server.guard.sign_in(name, address) as guess:
                if isinstance(await passwords.verify(stored, given), Match):
                    guess.succeeded()

        If the password threads are full (`TooMany` from inside), the attempt does not count.
        """
        admitted = self._sign_ins.attempt(Attempt(name, address), self._now())
        if isinstance(admitted, Wait):
            raise _slow_down("too many sign-ins with this name or from your address", admitted)
        guess = GuardedSignIn(admitted)
        try:
            yield guess
        except TooMany:
            self._sign_ins.not_tried(admitted)
            raise
        if guess.right:
            self._sign_ins.succeeded(admitted, self._now())

    def count_account(self, route: RouteClass, account: int) -> None:
        wait = self._routes.take_account(route, account, self._now())
        if wait is not None:
            raise _slow_down(f"too many '{route}' requests from your account", wait)

    def count_address(self, route: RouteClass, address: str) -> None:
        wait = self._routes.take_address(route, address, self._now())
        if wait is not None:
            raise _slow_down(f"too many '{route}' requests from your address", wait)

    def return_address(self, route: RouteClass, address: str) -> None:
        """Take back a count of `count_address`: the request had a valid credential."""
        self._routes.return_address(route, address)

    def count_unknown_key(self, address: str) -> None:
        """Count a key before its lookup in the store; `key_was_known` takes the count back."""
        wait = self._unknown.spend(_of_address("key", address, UNKNOWN_KEYS), self._now())
        if wait is not None:
            raise _slow_down("too many unknown keys from your address", wait)

    def key_was_known(self, address: str) -> None:
        self._unknown.give_back(_of_address("key", address, UNKNOWN_KEYS))

    def count_channel(self, address: str) -> None:
        """Count a channel before its node's proof; `channel_was_proven` takes the count back."""
        wait = self._channels.spend(_of_address("channel", address, CHANNELS), self._now())
        if wait is not None:
            raise _slow_down("too many channels without a proof from your address", wait)

    def channel_was_proven(self, address: str) -> None:
        self._channels.give_back(_of_address("channel", address, CHANNELS))


def _slow_down(what: str, wait: Wait) -> TooMany:
    plural = "" if wait.seconds == 1 else "s"
    return TooMany(f"{what}; try again in {wait.seconds} second{plural}", retry_after=wait.seconds)
