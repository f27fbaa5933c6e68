"""Refresh families: one successor for everybody who asks in time, the end for everybody when a copy turns up."""

from __future__ import annotations

import random
import sqlite3
import threading
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpool.core.ids import UserId
from gpool.core.model import SECOND, Instant, Span
from gpool.server.identity.refresh_tokens import (
    MAX_TURNS,
    TERMS,
    Decision,
    EndFamily,
    Family,
    FamilyEnd,
    Presented,
    RefreshTerms,
    Refusal,
    Refuse,
    Repeat,
    Rotate,
    begin,
    ended,
    parse,
    present,
    token_of,
)

NOW = Instant(1_800_000_000 * SECOND)
GRACE_S = TERMS.grace // SECOND
ENTROPY = bytes(range(48))


def later(seconds: float) -> Instant:
    return Instant(NOW + int(seconds * SECOND))


def shown(text: str) -> Presented:
    found = parse(text)
    assert found is not None
    return found


def use(family: Family, text: str, now: Instant) -> tuple[Family, Decision]:
    """The row afterwards, and what was decided: what a store does when nobody else is there."""
    decision = present(family, shown(text), now)
    if isinstance(decision, Rotate | EndFamily):
        return decision.row, decision
    return family, decision


def test_each_use_gives_the_next_token_and_they_all_differ() -> None:
    family, token = begin(UserId(1), ENTROPY, NOW)
    seen = {token}
    for turn in range(1, 20):
        family, decision = use(family, token, later(turn))
        assert isinstance(decision, Rotate)
        assert family.generation == turn
        token = decision.token
        assert token not in seen
        seen.add(token)


def test_a_lost_answer_is_given_again_within_the_grace_and_is_the_same() -> None:
    family, first = begin(UserId(1), ENTROPY, NOW)
    family, rotated = use(family, first, NOW)
    assert isinstance(rotated, Rotate)
    for seconds in (0, 1, GRACE_S):
        assert use(family, first, later(seconds)) == (family, Repeat(rotated.token))
    family, after = use(family, rotated.token, later(GRACE_S))
    assert isinstance(after, Rotate)


def test_the_previous_token_after_the_grace_ends_the_family_for_everybody() -> None:
    family, first = begin(UserId(1), ENTROPY, NOW)
    family, rotated = use(family, first, NOW)
    assert isinstance(rotated, Rotate)
    family, decision = use(family, first, later(GRACE_S + 1))
    assert isinstance(decision, EndFamily)
    assert family.end_reason is FamilyEnd.REUSED
    for token in (first, rotated.token):
        assert use(family, token, later(GRACE_S + 2))[1] == Refuse(Refusal.ENDED)


@given(st.integers(2, 40), st.data())
def test_any_older_token_always_ends_the_family_even_within_the_grace(
    turns: int, data: st.DataObject
) -> None:
    family, token = begin(UserId(1), ENTROPY, NOW)
    tokens = [token]
    for _ in range(turns):
        family, decision = use(family, tokens[-1], NOW)
        assert isinstance(decision, Rotate)
        tokens.append(decision.token)
    stale = data.draw(st.integers(0, turns - 2))
    family, decision = use(family, tokens[stale], NOW)
    assert isinstance(decision, EndFamily)


@given(st.integers(0, 10_000), st.integers(1, 127))
def test_a_token_with_a_letter_changed_never_rotates_and_never_ends_a_family(
    place: int, turn: int
) -> None:
    family, token = begin(UserId(1), ENTROPY, NOW)
    for _ in range(3):
        family, decision = use(family, token, NOW)
        assert isinstance(decision, Rotate)
        token = decision.token
    at = place % len(token)
    changed = parse(token[:at] + chr(ord(token[at]) ^ turn) + token[at + 1 :])
    if changed is not None:
        assert present(family, changed, NOW) == Refuse(Refusal.UNKNOWN)


def test_a_guesser_who_knows_the_family_cannot_end_it_and_a_naive_rule_would() -> None:
    family, token = begin(UserId(1), ENTROPY, NOW)
    for _ in range(3):
        family, decision = use(family, token, NOW)
        assert isinstance(decision, Rotate)
        token = decision.token
    made_up = Presented(family.id, 1, "A" * 43)
    assert present(family, made_up, NOW) == Refuse(Refusal.UNKNOWN)
    assert (
        family.generation - made_up.generation > 1
    )  # the control: by its number alone it is reuse


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gpr_",
        "gpr_0.0.0",
        "gpk_" + "0" * 26 + ".0." + "A" * 43,
        "gpr_" + "0" * 26 + ".00." + "A" * 43,
        "gpr_" + "0" * 26 + ".-1." + "A" * 43,
        "gpr_" + "0" * 26 + ".1234567890." + "A" * 43,
        "gpr_" + "0" * 26 + ".٣." + "A" * 43,
        "gpr_" + "0" * 26 + ".0." + "A" * 43 + "\n",
        "gpr_" + "u" * 26 + ".0." + "A" * 43,
    ],
)
def test_what_is_no_refresh_token_is_not_looked_up(text: str) -> None:
    assert parse(text) is None


def test_a_token_of_one_family_is_unknown_to_another() -> None:
    family, token = begin(UserId(1), ENTROPY, NOW)
    other, _ = begin(UserId(2), ENTROPY[::-1], NOW)
    assert present(other, shown(token), NOW) == Refuse(Refusal.UNKNOWN)
    renamed = replace(other, id=family.id)
    assert present(renamed, shown(token), NOW) == Refuse(Refusal.UNKNOWN)
    assert present(None, shown(token), NOW) == Refuse(Refusal.UNKNOWN)


def test_an_unused_family_ends_and_use_does_not_keep_one_alive_for_ever() -> None:
    family, token = begin(UserId(1), ENTROPY, NOW)
    assert present(family, shown(token), Instant(NOW + TERMS.idle)) == Refuse(Refusal.EXPIRED)
    now = NOW
    for _ in range(100):
        now = Instant(now + TERMS.idle - SECOND)
        family, decision = use(family, token, now)
        if not isinstance(decision, Rotate):
            break
        token = decision.token
    assert decision == Refuse(Refusal.EXPIRED)
    assert now >= family.expires_at


def test_after_a_restored_backup_a_genuine_token_from_ahead_ends_the_family() -> None:
    family, _ = begin(UserId(1), ENTROPY, NOW)
    ahead = token_of(family, 5)
    family, decision = use(family, ahead, NOW)
    assert isinstance(decision, EndFamily)
    assert family.end_reason is FamilyEnd.AHEAD


def test_the_first_end_of_a_family_stays() -> None:
    family, _ = begin(UserId(1), ENTROPY, NOW)
    out = ended(family, FamilyEnd.SIGNED_OUT, NOW)
    assert ended(out, FamilyEnd.REUSED, later(9)) == out


def test_neither_seed_nor_token_shows_when_printed() -> None:
    family, token = begin(UserId(1), ENTROPY, NOW)
    decision = present(family, shown(token), NOW)
    assert isinstance(decision, Rotate)
    text = repr((family, decision, shown(token)))
    assert repr(family.seed) not in text
    assert decision.token not in text
    assert shown(token).tag not in text


# ---- interleavings: reads and guarded writes of many requests, in any order


@dataclass
class Row:
    """A store of one row with the guarded writes of the module's text."""

    family: Family
    guarded: bool = True

    def write(self, decision: Rotate | EndFamily) -> bool:
        row, now = decision.row, self.family
        before = row.generation - 1 if isinstance(decision, Rotate) else row.generation
        if self.guarded and (now.generation != before or now.ended_at is not None):
            return False
        self.family = row
        return True


@dataclass
class Request:
    """One refresh on its way: reads, decides, writes, and starts over when somebody was faster."""

    token: str
    turns: int = 0
    seen: Decision | None = None
    answer: str | None = None
    over: bool = False
    rotated: bool = field(default=False)

    def step(self, row: Row, now: Instant, terms: RefreshTerms) -> None:
        if self.seen is None:
            self.turns += 1
            self.seen = present(row.family, shown(self.token), now, terms)
            return
        decision, self.seen = self.seen, None
        match decision:
            case Rotate():
                if row.write(decision):
                    self.answer, self.over, self.rotated = decision.token, True, True
            case Repeat():
                self.answer, self.over = decision.token, True
            case EndFamily():
                self.over = row.write(decision)
            case Refuse():
                self.over = True


def race(
    row: Row, token: str, count: int, dice: random.Random, terms: RefreshTerms = TERMS
) -> list[Request]:
    """`count` requests with one token; any of them takes the next step at any time."""
    requests = [Request(token) for _ in range(count)]
    now = NOW
    while waiting := [request for request in requests if not request.over]:
        dice.choice(waiting).step(row, now, terms)
        now = Instant(now + dice.randrange(1000))
    return requests


def test_fifty_parallel_refreshes_get_exactly_one_successor_five_hundred_times() -> None:
    for seed in range(500):
        family, token = begin(UserId(1), ENTROPY, NOW)
        row = Row(family)
        requests = race(row, token, 50, random.Random(seed))
        assert len({request.answer for request in requests}) == 1
        assert sum(request.rotated for request in requests) == 1
        assert row.family.generation == 1
        assert row.family.ended_at is None
        assert max(request.turns for request in requests) <= 2 <= MAX_TURNS


def test_without_the_guard_the_same_races_rotate_more_than_once() -> None:
    """The control."""
    family, token = begin(UserId(1), ENTROPY, NOW)
    assert sum(r.rotated for r in race(Row(family, guarded=False), token, 50, random.Random(0))) > 1


def test_without_the_grace_the_same_races_sign_the_honest_client_out() -> None:
    """The control."""
    family, token = begin(UserId(1), ENTROPY, NOW)
    row = Row(family)
    race(row, token, 50, random.Random(0), replace(TERMS, grace=Span(-1)))
    assert row.family.end_reason is FamilyEnd.REUSED


@settings(max_examples=200)
@given(st.integers(0, 2**32), st.integers(1, 6), st.floats(0, 0.9))
def test_an_honest_client_whose_answers_get_lost_is_never_signed_out(
    seed: int, parallel: int, loss: float
) -> None:
    """It asks again at once, in parallel even; some answer comes through in the end."""
    dice = random.Random(seed)
    family, token = begin(UserId(1), ENTROPY, NOW)
    row = Row(family)
    for _ in range(10):
        while True:
            answers = [r.answer for r in race(row, token, parallel, dice)]
            heard = [answer for answer in answers if dice.uniform(0, 1) >= loss]
            if heard:
                break
        assert None not in heard
        token = str(heard[0])
    assert row.family.ended_at is None
    assert row.family.generation == 10


@settings(max_examples=200)
@given(st.lists(st.tuples(st.booleans(), st.integers(GRACE_S + 1, 5000)), min_size=2, max_size=20))
def test_a_thief_and_an_owner_who_both_use_a_token_never_both_stay(
    uses: list[tuple[bool, int]],
) -> None:
    """Apart by more than the grace: as soon as the second of them comes, it is over for both."""
    family, token = begin(UserId(1), ENTROPY, NOW)
    held = {True: token, False: token}
    now, users = NOW, set()
    for who, gap in uses:
        now = Instant(now + gap * SECOND)
        users.add(who)
        family, decision = use(family, held[who], now)
        if isinstance(decision, Rotate):
            held[who] = decision.token
        if len(users) == 2:
            assert family.ended_at is not None


# ---- the guarded write on a real database


def refresh_once(path: Path, token: str, go: threading.Barrier) -> tuple[str | None, bool]:
    """One replica's request: its own connection, the statements of the module's text. (answer, did it rotate)"""
    presented = shown(token)
    with closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as database:
        go.wait()
        for _ in range(MAX_TURNS):
            columns = "user, seed, generation, rotated_at, idle_until, expires_at, ended_at"
            row = database.execute(f"SELECT id, {columns} FROM refresh_families").fetchone()  # noqa: S608
            decision = present(Family(*row), presented, NOW)
            if isinstance(decision, Repeat):
                return decision.token, False
            if not isinstance(decision, Rotate):
                return None, False
            new = decision.row
            done = database.execute(
                "UPDATE refresh_families SET generation = ?, rotated_at = ?, idle_until = ?"
                " WHERE id = ? AND generation = ? - 1 AND ended_at IS NULL",
                (new.generation, new.rotated_at, new.idle_until, new.id, new.generation),
            )
            if done.rowcount == 1:
                return decision.token, True
    raise AssertionError("it never came to an end")


def test_fifty_threads_with_one_token_get_one_successor_from_a_real_database(
    tmp_path: Path,
) -> None:
    for turn in range(5):
        family, token = begin(UserId(1), bytes([turn]) * 48, NOW)
        path = tmp_path / f"{turn}.db"
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute(
                "CREATE TABLE refresh_families (id, user, seed, generation, rotated_at,"
                " idle_until, expires_at, ended_at)"
            )
            database.execute(
                "INSERT INTO refresh_families VALUES (?, ?, ?, ?, ?, ?, ?, NULL)",
                (family.id, 1, family.seed, 0, NOW, family.idle_until, family.expires_at),
            )
        answers: list[tuple[str | None, bool]] = []
        go = threading.Barrier(50)
        threads = [
            threading.Thread(target=lambda: answers.append(refresh_once(path, token, go)))  # noqa: B023
            for _ in range(50)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {answer for answer, _ in answers} == {token_of(family, 1)}
        assert sum(rotated for _, rotated in answers) == 1
        assert len(answers) == 50
