"""Argon2id password hashing in a few low-priority threads, never on the event loop; `TooMany` when they are full.

An unknown name costs the same time as a known one: its password is checked against a decoy hash.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import sys
import threading
import unicodedata
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from argon2 import PasswordHasher, Type
from argon2.exceptions import InvalidHashError, VerificationError

from gpool.core.errors import Invalid, TooMany

MIN_LETTERS = 10
MIN_DISTINCT = 4
MAX_BYTES = 1024
NICENESS = 10
BUSY_S = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PasswordCost:
    """Argon2id parameters: three passes over 64 MiB, RFC 9106's second recommended option.

    One lane instead of four: four would occupy every core of a small server for one sign-in.
    """

    passes: int = 3
    memory_kib: int = 64 * 1024
    lanes: int = 1


DEFAULT_COST = PasswordCost()


@dataclass(frozen=True, slots=True)
class Match:
    """`rehash`: the hash to store instead if the parameters have changed."""

    rehash: str | None = None


@dataclass(frozen=True, slots=True)
class NoMatch:
    """Wrong password or no such account, indistinguishable."""


_COMMON_TEXT = """
password passw0rd p@ssword p@ssw0rd passwort passwordpassword mypassword yourpassword newpassword changeme
letmein letmeinplease welcome welcomeback iloveyou iloveyouso administrator admin root rootroot qwerty qwertyui
qwertyuiop qwertyuiopasdf qwerty123456 qwertz qwertzuiop azerty azertyuiop asdfgh asdfghjkl asdfghjkl; zxcvbnm
zaq12wsx zaq1zaq1 1qaz2wsx 1qaz2wsx3edc 1q2w3e4r 1q2w3e4r5t 1q2w3e4r5t6y q1w2e3r4 q1w2e3r4t5 q1w2e3r4t5y6 qazwsxedc
qazwsxedcrfv abcdefghij abcdefghijk abcd abcdefg abc monkey dragon football baseball basketball superman batman
sunshine princess starwars whatever trustno master shadow michael jennifer computer internet liverpool
christopher strawberry chocolate butterfly blink unknown google facebook linkedin secret topsecret secretsecret
testtest testpassword test tester testing default guest user username login temporary gpool gpoolgpool gpoolpassword
"""
_COMMON_FILE = Path(__file__).with_name("common_passwords.txt")
COMMON = frozenset(_COMMON_TEXT.split()) | frozenset(_COMMON_FILE.read_text("utf-8").split())
"""Most common passwords of public leaks, in lower case; digits and signs at the end are removed before comparing.

The file holds those of the 10,000 most common ones in zxcvbn's list (MIT) that have five letters and more than digits.
"""


def acceptable(name: str, password: str) -> str:
    text = _normal(password)
    if text is None:
        raise Invalid(f"a password has at most {MAX_BYTES} bytes of proper Unicode")
    if len(text) < MIN_LETTERS:
        raise Invalid(f"a password has at least {MIN_LETTERS} characters; this one has {len(text)}")
    folded = text.casefold().strip()
    if folded == (_normal(name) or "").casefold().strip():
        raise Invalid("a password must not be the account's name")
    if not re.search(r"[^\d\s.,:/+-]", text):
        raise Invalid("a password must not consist of digits only; add letters or words")
    if len(set(folded)) < MIN_DISTINCT:
        raise Invalid(
            f"a password has at least {MIN_DISTINCT} different characters; this one has {len(set(folded))}"
        )
    if folded in COMMON or folded.rstrip("0123456789!.") in COMMON:
        raise Invalid(
            "this is one of the most common passwords, with or without digits at its end; choose another one"
        )
    return text


def _normal(text: str) -> str | None:
    """NFKC form; None if too long or not Unicode. Length is checked twice: NFKC can grow a text 18-fold."""
    try:
        if len(text) > MAX_BYTES or len(text.encode()) > MAX_BYTES:
            return None
        normal = unicodedata.normalize("NFKC", text)
        return normal if len(normal.encode()) <= MAX_BYTES else None
    except UnicodeEncodeError:
        return None


class Passwords:
    """Hashes in `threads` threads; at most `waiting` more requests queue, others get `TooMany`."""

    def __init__(
        self, cost: PasswordCost = DEFAULT_COST, threads: int | None = None, waiting: int = 8
    ) -> None:
        threads = threads or max(1, (os.cpu_count() or 1) // 2)
        self._hasher = PasswordHasher(
            time_cost=cost.passes,
            memory_cost=cost.memory_kib,
            parallelism=cost.lanes,
            type=Type.ID,
        )
        self._strangers = _HashQueue("gpool-passwords", threads, waiting)
        # Attempts from known addresses have their own thread, which guessers cannot fill.
        self._trusted = _HashQueue("gpool-known-addresses", 1, waiting)
        # New passwords too: a flood of registrations must not delay sign-ins.
        self._new = _HashQueue("gpool-new-passwords", 1, waiting)
        self._decoy = self._hasher.hash(secrets.token_bytes(32))

    async def hash(self, name: str, password: str) -> str:
        text = acceptable(name, password)
        return await self._run(lambda: self._hasher.hash(text), self._new)

    async def verify(
        self, stored: str | None, password: str, *, trusted: bool = False
    ) -> Match | NoMatch:
        """Check a password. `stored` None (no account or password) takes equally long.

        `trusted`: the address signed in with this name before; such attempts have their own queue.
        """
        text = _normal(password)
        if text is None:
            return NoMatch()  # immediate, but for every name alike
        queue = self._trusted if trusted else self._strangers
        return await self._run(lambda: self._checked(stored, text), queue)

    def _checked(self, stored: str | None, text: str) -> Match | NoMatch:
        try:
            self._hasher.verify(self._decoy if stored is None else stored, text)
        except (VerificationError, InvalidHashError):
            return NoMatch()
        if stored is None:
            return NoMatch()
        stale = self._hasher.check_needs_rehash(stored)
        return Match(self._hasher.hash(text) if stale else None)

    async def _run(self, work: Callable[[], T], queue: _HashQueue | None = None) -> T:
        return await (queue or self._strangers).run(work)

    def close(self) -> None:
        for queue in (self._strangers, self._trusted, self._new):
            queue.pool.shutdown(cancel_futures=True)


class _HashQueue:
    """Low-priority threads, and so many requests that may wait for them."""

    def __init__(self, name: str, threads: int, waiting: int) -> None:
        self.pool = ThreadPoolExecutor(threads, name, initializer=_lower_priority)
        self._slots = threading.BoundedSemaphore(threads + waiting)

    async def run(self, work: Callable[[], T]) -> T:
        if not self._slots.acquire(blocking=False):
            raise TooMany(
                "too many passwords to check at once; try again in a few seconds",
                retry_after=BUSY_S,
            )
        try:
            future: Future[T] = self.pool.submit(work)
        except BaseException:
            self._slots.release()
            raise
        # The slot is free when the thread is, which may be after the caller was cancelled.
        future.add_done_callback(lambda _: self._slots.release())
        return await asyncio.wrap_future(future)


def _lower_priority() -> None:
    if sys.platform == "linux":  # elsewhere niceness belongs to the process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
