"""Sessions: of many refreshes at once one makes the next token, the others are given the same. Signing keys. API keys."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpool.core.ids import UserId
from gpool.core.model import SECOND, Instant
from gpool.core.permissions import Role, Scope
from gpool.server.identity import refresh_tokens
from gpool.server.identity.refresh_tokens import (
    EndFamily,
    Family,
    Presented,
    Refuse,
    Repeat,
    Rotate,
)
from gpool.server.store.identity_values import SigningKey, StoredSession
from gpool.server.store.operations.identity import sessions, teams, users
from gpool.server.store.protocol import Operation, operation
from tests.store.store_pool import Database, Pool, race


def row_of(family: Family, label: str = "") -> StoredSession:
    """As the server would, but for the sealing."""
    return StoredSession(
        family.id,
        family.user,
        family.seed,
        family.generation,
        family.rotated_at,
        family.idle_until,
        family.rotated_at,
        family.expires_at,
        label=label,
    )


def family_of(row: StoredSession | None) -> Family | None:
    if row is None:
        return None
    return Family(
        row.id,
        row.user,
        row.seed_sealed,
        row.generation,
        row.rotated_at,
        row.idle_until,
        row.expires_at,
        row.ended_at,
    )


def begun(pool: Pool, user: UserId | None = None) -> tuple[StoredSession, str]:
    entropy = next(pool.numbers).to_bytes(48, "big")[::-1]
    family, token = refresh_tokens.begin(pool.ann if user is None else user, entropy, pool.now())
    return row_of(family), token


def opened_session(pool: Pool, user: UserId | None = None) -> StoredSession:
    row, _ = begun(pool, user)
    pool.write(sessions.open_session(row))
    return row


@operation
def refreshed(presented: Presented, now: Instant) -> Operation[str | None]:
    """What the refresh route does: read, decide, write guarded, and decide again if somebody was faster."""
    row = yield from sessions.session(presented.family)
    for _ in range(refresh_tokens.MAX_TURNS):
        match refresh_tokens.present(family_of(row), presented, now):
            case Rotate(next_row, token):
                generation = next_row.generation - 1
                done = yield from sessions.rotate(
                    presented.family, generation, next_row.idle_until, now
                )
                if done.won:
                    return token
                row = done.session
            case Repeat(token):
                return token
            case EndFamily(ended):
                yield from sessions.end_session(
                    ended.id, ended.end_reason.value, now, generation=ended.generation
                )
                return None
            case Refuse():
                return None
    raise AssertionError("another request succeeded in every turn")


def test_a_session_is_read_back_as_it_was_opened(pool: Pool) -> None:
    row, _ = begun(pool)
    row = replace(row, label="laptop")
    pool.write(sessions.open_session(row))
    assert pool.read(sessions.session(row.id)) == row
    assert pool.read(sessions.session("x")) is None
    assert repr(row.seed_sealed) not in repr(row)


def test_of_fifty_parallel_refreshes_one_rotates_and_all_get_the_same_successor(
    pool: Pool, database: Database
) -> None:
    row, token = begun(pool)
    pool.write(sessions.open_session(row))
    for generation in range(1, 4):
        at = pool.now()
        presented = refresh_tokens.parse(token)
        answers = race(database, [refreshed(presented, at) for _ in range(50)])
        assert len(set(answers)) == 1
        assert answers[0] not in (None, token)
        token = answers[0]
        now = pool.read(sessions.session(row.id))
        assert (now.generation, now.rotated_at, now.ended_at) == (generation, at, None)


def test_the_guarded_update_lets_one_of_many_rotate(pool: Pool, database: Database) -> None:
    row = opened_session(pool)
    at = pool.now()
    late = Instant(row.idle_until + 5)
    answers = race(database, [sessions.rotate(row.id, 0, late, at) for _ in range(50)])
    assert sum(answer.won for answer in answers) == 1
    made = replace(row, generation=1, rotated_at=at, idle_until=late)
    assert all(answer.session == made for answer in answers)


def test_reuse_after_the_window_ends_the_family_for_all(pool: Pool, database: Database) -> None:
    row, first = begun(pool)
    pool.write(sessions.open_session(row))
    second = pool.write(refreshed(refresh_tokens.parse(first), pool.now()))
    late = Instant(pool.now() + 60 * SECOND)
    answers = race(database, [refreshed(refresh_tokens.parse(first), late) for _ in range(20)])
    assert answers == [None] * 20
    ended = pool.read(sessions.session(row.id))
    assert (ended.ended_at, ended.ended_why) == (late, "reused")
    assert pool.write(refreshed(refresh_tokens.parse(second), late)) is None


def test_an_old_token_and_the_current_one_at_once_leave_no_live_family(
    pool: Pool, database: Database
) -> None:
    for _ in range(5):
        row, first = begun(pool)
        pool.write(sessions.open_session(row))
        second = pool.write(refreshed(refresh_tokens.parse(first), pool.now()))
        third = pool.write(refreshed(refresh_tokens.parse(second), pool.now()))
        late = Instant(pool.now() + 60 * SECOND)
        shown = [refresh_tokens.parse(first), refresh_tokens.parse(third)] * 5
        race(database, [refreshed(each, late) for each in shown])
        assert pool.read(sessions.session(row.id)).ended_why == "reused"


def test_a_made_up_token_changes_nothing(pool: Pool) -> None:
    row, token = begun(pool)
    pool.write(sessions.open_session(row))
    forged = replace(refresh_tokens.parse(token), tag="A" * 43)
    assert pool.write(refreshed(forged, pool.now())) is None
    assert pool.read(sessions.session(row.id)) == row


@pytest.mark.parametrize("over", ["ended", "expired", "idle"])
def test_a_session_that_is_over_never_rotates(pool: Pool, over: str) -> None:
    row = opened_session(pool)
    at = {"ended": pool.now(), "expired": row.expires_at, "idle": row.idle_until}[over]
    if over == "ended":
        assert pool.write(sessions.end_session(row.id, "signed_out", at)) is True
    done = pool.write(sessions.rotate(row.id, 0, Instant(at + 1), at))
    assert not done.won
    assert done.session.generation == 0
    assert not pool.write(sessions.rotate("x", 0, Instant(at + 1), at)).session


def test_an_end_decided_on_an_older_row_is_not_carried_out(pool: Pool) -> None:
    row = opened_session(pool)
    pool.write(sessions.rotate(row.id, 0, row.idle_until, pool.now()))
    assert pool.write(sessions.end_session(row.id, "reused", pool.now(), generation=0)) is False
    assert pool.write(sessions.end_session(row.id, "reused", pool.now(), generation=1)) is True
    assert pool.write(sessions.end_session(row.id, "again", pool.now())) is False
    assert pool.read(sessions.session(row.id)).ended_why == "reused"


def test_nobody_ends_anothers_session(pool: Pool) -> None:
    row, bob = opened_session(pool), pool.user("bob")
    assert pool.write(sessions.end_session(row.id, "x", pool.now(), user=bob)) is False
    assert pool.write(sessions.end_session(row.id, "x", pool.now(), user=pool.ann)) is True


def test_all_sessions_of_a_user_end_but_the_one_to_keep(pool: Pool) -> None:
    bob = pool.user("bob")
    mine, kept = [opened_session(pool) for _ in range(3)], opened_session(pool)
    theirs = opened_session(pool, bob)
    assert [each.id for each in pool.read(sessions.sessions_of(pool.ann, pool.now()))] == [
        each.id for each in (kept, *reversed(mine))
    ]
    ended = pool.write(sessions.end_sessions_of(pool.ann, "revoked", pool.now(), keep=kept.id))
    assert ended == tuple(sorted(each.id for each in mine))
    every = [pool.read(sessions.session(each.id)) for each in (*mine, kept, theirs)]
    assert [each.id for each in every if each.ended_at is None] == [kept.id, theirs.id]
    assert pool.write(sessions.end_sessions_of(pool.ann, "revoked", pool.now())) == (kept.id,)
    assert pool.read(sessions.session(kept.id)).ended_why == "revoked"


def test_old_sessions_are_forgotten(pool: Pool) -> None:
    rows = [opened_session(pool) for _ in range(3)]
    assert pool.write(sessions.forget_sessions(rows[-1].idle_until, 1)) == 1
    assert pool.write(sessions.forget_sessions(rows[-1].idle_until, 10)) == 1
    assert pool.read(sessions.session(rows[-1].id)) is not None


# ---- signing keys


def key(kid: str, at: int) -> SigningKey:
    return SigningKey(kid, b"sealed " + kid.encode(), "public", Instant(at), Instant(at))


def test_signing_keys_come_oldest_first_and_lose_their_private_halves(pool: Pool) -> None:
    assert pool.write(sessions.put_signing_key(key("b", 1), ())) is True
    assert pool.write(sessions.put_signing_key(key("a", 2), {"b"})) is True
    assert pool.write(sessions.put_signing_key(key("c", 3), {"b"})) is False
    assert pool.read(sessions.signing_keys()) == (key("b", 1), key("a", 2))
    assert pool.write(sessions.forget_private_half("b")) is False
    assert pool.write(sessions.retire_signing_key("b", Instant(10))) is True
    assert pool.write(sessions.retire_signing_key("b", Instant(11))) is False
    assert pool.write(sessions.retire_signing_key("b", Instant(9))) is True
    assert pool.write(sessions.forget_private_half("b")) is True
    old = replace(key("b", 1), sealed=None, verifies_until=Instant(9))
    assert pool.read(sessions.signing_keys()) == (old, key("a", 2))
    assert pool.write(sessions.forget_signing_keys(Instant(9))) == ()
    assert pool.write(sessions.forget_signing_keys(Instant(10))) == ("b",)


def test_of_replicas_that_rotate_the_signing_key_at_once_one_does(
    pool: Pool, database: Database
) -> None:
    known: set[str] = set()
    for turn in range(3):
        made = [sessions.put_signing_key(key(f"{turn}-{i}", turn), known) for i in range(8)]
        assert sum(race(database, made)) == 1
        known = {each.kid for each in pool.read(sessions.signing_keys())}
        assert len(known) == turn + 1


# ---- API keys


def test_a_key_opens_what_it_was_made_for_until_it_ends_or_expires(pool: Pool) -> None:
    at = pool.now()
    lab = pool.team("lab")
    pool.write(users.add_key(1, pool.ann, "all", "h1", at))
    scopes = {Scope.TASKS_READ, Scope.TASKS_WRITE}
    pool.write(
        users.add_key(2, pool.ann, "ci", "h2", at, scopes=scopes, expires_at=Instant(at + 5))
    )
    caller = pool.read(users.caller_by_key("h1", at))
    assert (caller.user.id, caller.scopes, caller.key) == (pool.ann, None, 1)
    assert caller.teams == {lab: Role.OWNER}
    caller = pool.read(users.caller_by_key("h2", at))
    assert (caller.scopes, caller.key) == (scopes, 2)
    assert pool.read(users.caller_by_key("h2", Instant(at + 5))) is None
    assert pool.read(users.user_by_key("h2", at)).id == pool.ann
    assert pool.read(users.user_by_key("h2")) is None
    bob = pool.user("bob")
    assert pool.write(users.end_key(1, bob, at)) is False
    assert pool.write(users.end_key(1, pool.ann, at)) is True
    assert pool.write(users.end_key(1, None, at)) is False
    assert pool.read(users.caller_by_key("h1", at)) is None
    assert pool.read(users.user_by_key("h1")) is None
    assert [each.ended_at for each in pool.read(users.keys_of(pool.ann))] == [None, at]
    assert pool.read(users.key(2)).expires_at == at + 5
    assert pool.read(users.key(3)) is None


def test_a_key_with_no_scopes_opens_nothing_and_is_not_one_for_all(pool: Pool) -> None:
    pool.write(users.add_key(1, pool.ann, "none", "h", pool.now(), scopes=()))
    assert pool.read(users.caller_by_key("h", pool.now())).scopes == frozenset()


def test_a_teams_key_shows_that_team_only_while_its_user_is_in_it(pool: Pool) -> None:
    lab, other = pool.team("lab"), pool.team("other")
    bob = pool.user("bob")
    for team in (lab, other):
        pool.write(teams.set_role(team, bob, Role.MEMBER, pool.now()))
    pool.write(users.add_key(1, bob, "ci", "h", pool.now(), team=lab))
    caller = pool.read(users.caller_by_key("h", pool.now()))
    assert (caller.teams, caller.key_team) == ({lab: Role.MEMBER}, lab)
    assert set(pool.read(users.caller(bob)).teams) == {lab, other}
    pool.write(teams.remove_member(lab, bob))
    caller = pool.read(users.caller_by_key("h", pool.now()))
    assert (caller.teams, caller.key_team) == ({}, lab)


def test_the_last_use_of_a_key_never_moves_back(pool: Pool) -> None:
    pool.write(users.add_key(1, pool.ann, "k", "h", pool.now()))
    pool.write(users.touch_keys([(1, Instant(5)), (1, Instant(7)), (9, Instant(1))]))
    pool.write(users.touch_keys([(1, Instant(6))]))
    pool.write(users.touch_keys([]))
    assert pool.read(users.keys_of(pool.ann))[0].last_used_at == 7
