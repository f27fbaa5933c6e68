"""Throttles of one replica with their errors: sign-in attempts, routes, unknown keys. Rules: `throttle`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gpool.core.errors import TooMany
from gpool.core.model import Instant
from gpool.server.identity.throttle import (
    Admitted,
    Attempt,
    Buckets,
    RouteClass,
    RouteLimits,
    SignInThrottle,
    Wait,
    network_of,
    per_second,
)

UNKNOWN_KEYS = per_second(50, 500)
"""Unknown keys and tokens from one address: each costs a read of the store."""


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
            raise _slow_down("too many failed sign-ins", admitted)
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

    def count_unknown_key(self, address: str) -> None:
        """Count a key before its lookup in the store; `key_was_known` takes the count back."""
        wait = self._unknown.spend([(network_of(address), UNKNOWN_KEYS)], self._now())
        if wait is not None:
            raise _slow_down("too many unknown keys from your address", wait)

    def key_was_known(self, address: str) -> None:
        self._unknown.give_back([(network_of(address), UNKNOWN_KEYS)])


def _slow_down(what: str, wait: Wait) -> TooMany:
    plural = "" if wait.seconds == 1 else "s"
    return TooMany(f"{what}; try again in {wait.seconds} second{plural}", retry_after=wait.seconds)
