"""Passwords: right ones match, wrong ones and unknown names look alike, and a full house says so at once."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.errors import Invalid, TooMany
from gpool.server.identity.passwords import (
    MAX_BYTES,
    Match,
    NoMatch,
    PasswordCost,
    Passwords,
    acceptable,
)
from tests.tools.processes import PATIENCE_S

CHEAP = PasswordCost(passes=1, memory_kib=64)
NOTICEABLE = PasswordCost(passes=8, memory_kib=16 * 1024)
GOOD = "correct horse"
TURNS = 40


@pytest.fixture
def passwords() -> Iterator[Passwords]:
    made = Passwords(CHEAP, threads=2, waiting=8)
    yield made
    made.close()


@pytest.mark.anyio
async def test_the_right_password_matches_and_a_wrong_one_does_not(passwords: Passwords) -> None:
    stored = await passwords.hash("ada", GOOD)
    assert stored.startswith("$argon2id$")
    assert await passwords.verify(stored, GOOD) == Match()
    assert await passwords.verify(stored, GOOD + " ") == NoMatch()
    assert await passwords.verify(stored, "") == NoMatch()


@pytest.mark.anyio
async def test_the_same_password_never_has_the_same_hash_twice(passwords: Passwords) -> None:
    assert await passwords.hash("ada", GOOD) != await passwords.hash("ada", GOOD)


@pytest.mark.anyio
@pytest.mark.parametrize("stored", [None, "", "!", "$argon2id$v=19$m=64,t=1,p=1$x$y", "plain text"])
async def test_no_account_or_a_broken_hash_never_matches(
    passwords: Passwords, stored: str | None
) -> None:
    assert await passwords.verify(stored, GOOD) == NoMatch()


@pytest.mark.anyio
async def test_a_password_typed_on_another_keyboard_is_the_same(passwords: Passwords) -> None:
    composed, decomposed = "cafés crèmes", "cafe\u0301s cre\u0300mes"
    stored = await passwords.hash("ada", composed)
    assert await passwords.verify(stored, decomposed) == Match()
    assert await passwords.verify(stored, "cafes cremes") == NoMatch()


@pytest.mark.anyio
async def test_a_hash_of_an_older_cost_is_made_anew_and_one_of_today_is_not(
    passwords: Passwords,
) -> None:
    older = Passwords(PasswordCost(passes=2, memory_kib=64), threads=1)
    stored = await older.hash("ada", GOOD)
    older.close()
    found = await passwords.verify(stored, GOOD)
    assert isinstance(found, Match)
    assert found.rehash is not None
    assert await passwords.verify(found.rehash, GOOD) == Match(rehash=None)
    assert await passwords.verify(stored, "wrong password") == NoMatch()


@pytest.mark.parametrize(
    ("password", "complaint"),
    [
        ("short", "at least 10"),
        ("a\u0301" * 9, "this one has 9"),  # eighteen code points, nine letters
        ("x" * (MAX_BYTES + 1), "at most 1024 bytes"),
        ("€" * 342, "at most 1024 bytes"),
        ("\ufdfa" * 100, "at most 1024 bytes"),  # one letter that NFKC writes out as eighteen
        ("correct \ud800 horse", "proper Unicode"),
        ("Ada.Lovelace", "account's name"),
        ("".join(chr(ord(c) + 0xFEE0) for c in "ada.lovelace"), "account's name"),
        ("1234567890", "digits only"),
        ("1990-12-31 23:59", "digits only"),
        ("\u0661\u0662\u0663\u0664\u0665" * 2, "digits only"),
        ("aaaaaaaaaaaab", "4 different characters; this one has 2"),
        ("Password123!", "most common"),
        ("QWERTYUIOP", "most common"),
        ("1q2w3e4r5t6y", "most common"),
        ("Manchester2024!", "most common"),  # of the long list
    ],
)
def test_a_password_that_breaks_a_rule_is_told_which(password: str, complaint: str) -> None:
    with pytest.raises(Invalid, match=complaint):
        acceptable("ada.lovelace", password)


@pytest.mark.parametrize(
    "password", [GOOD, "4-digit codes, 12345", "!@#$%^&*()", "passwords of mine"]
)
def test_a_password_that_breaks_no_rule_is_taken(password: str) -> None:
    """The control."""
    assert acceptable("ada.lovelace", password) == password


@pytest.mark.anyio
async def test_a_flood_of_new_passwords_does_not_delay_sign_ins() -> None:
    busy = Passwords(NOTICEABLE, threads=1, waiting=0)
    try:
        stored = await busy.hash("ada", GOOD)
        flood = asyncio.ensure_future(busy.hash("mallory", GOOD))
        await asyncio.sleep(0)
        with pytest.raises(TooMany):  # the control: a second one waits for the first
            await busy.hash("mallory", GOOD)
        assert await busy.verify(stored, GOOD) == Match()
        await flood
    finally:
        busy.close()


@given(st.text(max_size=1200))
def test_what_is_acceptable_is_always_acceptable_again_and_never_too_long(text: str) -> None:
    try:
        normal = acceptable("ada", text)
    except Invalid:
        return
    assert acceptable("ada", normal) == normal
    assert len(normal) >= 10
    assert len(normal.encode()) <= MAX_BYTES


@pytest.mark.anyio
async def test_when_all_places_are_taken_the_next_is_refused_at_once_and_the_loop_goes_on() -> None:
    passwords = Passwords(CHEAP, threads=1, waiting=2)
    is_over = threading.Event()
    try:
        working = [
            asyncio.ensure_future(passwords._run(lambda: is_over.wait(PATIENCE_S))),
            asyncio.ensure_future(passwords.verify(None, GOOD)),
            asyncio.ensure_future(passwords.verify(None, GOOD)),
        ]
        await asyncio.sleep(0)
        for _ in range(200):
            with pytest.raises(TooMany):
                await passwords.verify(None, GOOD)
        assert not any(task.done() for task in working)
        is_over.set()
        await asyncio.gather(*working)
        assert await passwords.verify(None, GOOD) == NoMatch()  # there is room again
    finally:
        is_over.set()
        passwords.close()


@pytest.mark.anyio
async def test_a_caller_who_goes_away_does_not_keep_or_give_away_a_place() -> None:
    passwords = Passwords(CHEAP, threads=1, waiting=1)
    try:
        for _ in range(50):
            task = asyncio.ensure_future(passwords.verify(None, GOOD))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while True:  # the thread ends when it ends
                try:
                    await passwords.verify(None, GOOD)
                    break
                except TooMany:
                    await asyncio.sleep(0)
    finally:
        passwords.close()


@pytest.mark.anyio
async def test_an_unknown_name_costs_what_a_known_one_does() -> None:
    """In processor time of a thread of our own, the least of many turns: a busy machine proves nothing wrong.

    Turn by turn, so that what the neighbours do to one they do to the others. The control is a shortcut.
    """
    passwords = Passwords(NOTICEABLE, threads=1)
    least = {
        await passwords.hash("ada", GOOD): math.inf,
        None: math.inf,
        "no hash at all": math.inf,
    }
    try:
        for turn in range(TURNS):
            for stored in least:
                before = time.thread_time()
                assert passwords._checked(stored, "not the password") == NoMatch()
                least[stored] = min(least[stored], time.thread_time() - before)
            known, unknown, shortcut = least.values()
            if turn >= 3 and 0.6 < unknown / known < 1.7:
                break
    finally:
        passwords.close()
    assert 0.6 < unknown / known < 1.7
    assert shortcut < known / 10
