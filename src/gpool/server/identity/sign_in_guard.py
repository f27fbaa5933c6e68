"""The guard at the door: slows guessing at sign-in, and each class of routes. In memory, for this replica; locks nobody out."""

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
"""Keys and tokens that nobody has, from one address: each costs us a look into the store."""


@dataclass(slots=True)
class GuardedSignIn:
    """One attempt at signing in, while it is looked at."""

    admitted: Admitted = field(repr=False)
    right: bool = False

    @property
    def trusted(self) -> bool:
        """From where this name signed in before."""
        return self.admitted.trusted

    def succeeded(self) -> None:
        """The password (or signature) was right: the attempt costs nothing, and the address is known from now on."""
        self.right = True


class Guard:
    def __init__(self, now: Callable[[], Instant]) -> None:
        self._now = now
        self._sign_ins = SignInThrottle()
        self._routes = RouteLimits()
        self._unknown = Buckets()

    @asynccontextmanager
    async def sign_in(
        self, name: str, address: str, device: str | None = None
    ) -> AsyncIterator[GuardedSignIn]:
        """Around the check of a password; `TooMany` instead, when guessing has been too fast.

            async with server.guard.sign_in(name, address) as guess:
                if isinstance(await passwords.verify(stored, given), Match):
                    guess.succeeded()

        When the check itself has no room (`TooMany` of the password threads), nothing was guessed and nothing is paid.
        """
        admitted = self._sign_ins.attempt(Attempt(name, address, device), self._now())
        if isinstance(admitted, Wait):
            raise _slow_down("too many wrong sign-ins", admitted)
        guess = GuardedSignIn(admitted)
        try:
            yield guess
        except TooMany:
            self._sign_ins.not_tried(admitted)
            raise
        if guess.right:
            self._sign_ins.succeeded(admitted, self._now())

    def count_account(self, route: RouteClass, account: int) -> None:
        """One request of somebody signed in; `TooMany` when this account asks too fast."""
        wait = self._routes.take_account(route, account, self._now())
        if wait is not None:
            raise _slow_down(f"too many requests of the kind '{route}' from your account", wait)

    def count_address(self, route: RouteClass, address: str) -> None:
        """One request of nobody in particular."""
        wait = self._routes.take_address(route, address, self._now())
        if wait is not None:
            raise _slow_down(f"too many requests of the kind '{route}' from your address", wait)

    def count_unknown_key(self, address: str) -> None:
        """Before a key that is not remembered is looked up; give it back by `key_was_known`."""
        wait = self._unknown.spend([(network_of(address), UNKNOWN_KEYS)], self._now())
        if wait is not None:
            raise _slow_down("too many unknown keys from your address", wait)

    def key_was_known(self, address: str) -> None:
        self._unknown.give_back([(network_of(address), UNKNOWN_KEYS)])


def _slow_down(what: str, wait: Wait) -> TooMany:
    plural = "" if wait.seconds == 1 else "s"
    return TooMany(f"{what}; try again in {wait.seconds} second{plural}", retry_after=wait.seconds)
