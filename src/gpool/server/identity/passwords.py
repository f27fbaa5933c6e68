"""Passwords: Argon2id in few threads, never on the event loop. Refuses work when the threads are behind (`TooMany`).

An unknown name costs what a known one does: it is checked against a hash that fits no password. The threads yield to
everything else on the machine, so guessing slows guessing and not the pool.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import threading
import unicodedata
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from argon2 import PasswordHasher, Type
from argon2.exceptions import InvalidHashError, VerificationError

from gpool.core.errors import Invalid, TooMany

MIN_LETTERS = 10
MAX_BYTES = 1024
NICENESS = 10
BUSY_S = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PasswordCost:
    """What one guess costs. 64 MiB three times over: RFC 9106's choice for small memory, in one lane.

    One lane, because four would take every core of a small server for a single sign-in.
    """

    passes: int = 3
    memory_kib: int = 64 * 1024
    lanes: int = 1


TODAY = PasswordCost()


@dataclass(frozen=True, slots=True)
class Match:
    """The right password. `rehash`: the hash to store instead, when the cost has changed since."""

    rehash: str | None = None


@dataclass(frozen=True, slots=True)
class NoMatch:
    """Wrong password, or no such account: not to be told apart."""


def acceptable(name: str, password: str) -> str:
    """The password as it is hashed (NFKC), or `Invalid` with the rule it breaks."""
    text = _normal(password)
    if text is None:
        raise Invalid(f"a password has at most {MAX_BYTES} bytes of proper Unicode")
    if len(text) < MIN_LETTERS:
        raise Invalid(f"a password has at least {MIN_LETTERS} characters; this one has {len(text)}")
    if text.casefold().strip() == (_normal(name) or "").casefold().strip():
        raise Invalid("a password must not be the account's name")
    return text


def _normal(text: str) -> str | None:
    """One spelling of what was typed; None when too long or not Unicode. Checked before and after: NFKC can grow 18-fold."""
    try:
        if len(text) > MAX_BYTES or len(text.encode()) > MAX_BYTES:
            return None
        normal = unicodedata.normalize("NFKC", text)
        return normal if len(normal.encode()) <= MAX_BYTES else None
    except UnicodeEncodeError:
        return None


class Passwords:
    """Hashes and verifies. `waiting` more than `threads` may stand in line; who comes then is told to come back."""

    def __init__(
        self, cost: PasswordCost = TODAY, threads: int | None = None, waiting: int = 8
    ) -> None:
        threads = threads or max(1, (os.cpu_count() or 1) // 2)
        self._hasher = PasswordHasher(
            time_cost=cost.passes,
            memory_cost=cost.memory_kib,
            parallelism=cost.lanes,
            type=Type.ID,
        )
        self._pool = ThreadPoolExecutor(threads, "gpool-passwords", initializer=_yield_to_others)
        self._places = threading.BoundedSemaphore(threads + waiting)
        # People who signed in here before have a thread of their own: guessers cannot fill it.
        self._trusted_pool = ThreadPoolExecutor(
            1, "gpool-known-people", initializer=_yield_to_others
        )
        self._trusted_places = threading.BoundedSemaphore(1 + waiting)
        self._decoy = self._hasher.hash(secrets.token_bytes(32))

    async def hash(self, name: str, password: str) -> str:
        """The hash to store; `Invalid` for a password that breaks the rules, `TooMany` when the threads are behind."""
        text = acceptable(name, password)
        return await self._run(lambda: self._hasher.hash(text))

    async def verify(
        self, stored: str | None, password: str, *, trusted: bool = False
    ) -> Match | NoMatch:
        """`stored` None: there is no such account, or it has no password. Takes as long as if there were.

        `trusted`: from where this name signed in before; stands in a line of its own.
        """
        text = _normal(password)
        if text is None:
            return NoMatch()  # at once, but for every name alike
        return await self._run(lambda: self._checked(stored, text), trusted)

    def _checked(self, stored: str | None, text: str) -> Match | NoMatch:
        try:
            self._hasher.verify(self._decoy if stored is None else stored, text)
        except (VerificationError, InvalidHashError):
            return NoMatch()
        if stored is None:
            return NoMatch()
        stale = self._hasher.check_needs_rehash(stored)
        return Match(self._hasher.hash(text) if stale else None)

    async def _run(self, work: Callable[[], T], trusted: bool = False) -> T:
        pool, places = self._pool, self._places
        if trusted:
            pool, places = self._trusted_pool, self._trusted_places
        if not places.acquire(blocking=False):
            raise TooMany(
                "too many people are signing in; try again in a few seconds", retry_after=BUSY_S
            )
        try:
            future: Future[T] = pool.submit(work)
        except BaseException:
            places.release()
            raise
        # The place is free when the thread is, which may be after the caller went away.
        future.add_done_callback(lambda _: places.release())
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._trusted_pool.shutdown(cancel_futures=True)


def _yield_to_others() -> None:
    if sys.platform == "linux":  # elsewhere a thread has no niceness of its own
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
