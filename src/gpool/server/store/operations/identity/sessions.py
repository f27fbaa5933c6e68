"""Sessions (a sign-in and its refresh tokens) and the keys that sign access tokens. One guarded UPDATE decides a race.

What a refresh token means is decided by `identity.refresh` on a row read here; the decision is carried out here, and
only if the row is still at the generation it was decided on. A call that comes too late is given the row as it is now,
so that it can decide again.
"""

from __future__ import annotations

from collections.abc import Collection

from gpool.core.ids import UserId
from gpool.core.model import Instant
from gpool.server.store.identity_values import Rotation, Session, SigningKey
from gpool.server.store.operation import operation
from gpool.server.store.protocol import Operation, Row, Statement
from gpool.server.store.rows import of_names

SESSION = (
    "id, user_id, seed_sealed, generation, rotated_at, idle_until, created_at, expires_at, "
    "ended_at, ended_why, label"
)
KEYS_LOCK = 0x67706B657973  # "gpkeys"
KEY = "kid, sealed, public, created_at, signs_from, verifies_until"


def _session(row: Row) -> Session:
    return Session(row[0], UserId(row[1]), bytes(row[2]), *row[3:])


def _one(id: str) -> Operation[Session | None]:
    rows = yield Statement(f"SELECT {SESSION} FROM sessions WHERE id = :id", {"id": id})  # noqa: S608
    return _session(rows[0]) if rows else None


@operation
def open_session(session: Session) -> Operation[None]:
    yield Statement(
        "INSERT INTO sessions (id, user_id, seed_sealed, generation, rotated_at, idle_until, created_at, expires_at, "
        "label) VALUES (:id, :user, :seed, :generation, :rotated_at, :idle_until, :created_at, :expires_at, :label)",
        {
            "id": session.id,
            "user": session.user,
            "seed": session.seed_sealed,
            "generation": session.generation,
            "rotated_at": session.rotated_at,
            "idle_until": session.idle_until,
            "created_at": session.created_at,
            "expires_at": session.expires_at,
            "label": session.label,
        },
    )


@operation
def session(id: str) -> Operation[Session | None]:
    return (yield from _one(id))


@operation
def rotate(id: str, generation: int, idle_until: Instant, at: Instant) -> Operation[Rotation]:
    """From `generation`, which was current, to the next. Of many at once one wins; the others see the row it made."""
    rows = yield Statement(
        "UPDATE sessions SET generation = generation + 1, rotated_at = :at, idle_until = :idle_until "  # noqa: S608
        "WHERE id = :id AND generation = :generation AND ended_at IS NULL AND expires_at > :at AND idle_until > :at "
        f"RETURNING {SESSION}",
        {"id": id, "generation": generation, "idle_until": idle_until, "at": at},
    )
    if rows:
        return Rotation(True, _session(rows[0]))
    return Rotation(False, (yield from _one(id)))


@operation
def end_session(
    id: str, why: str, at: Instant, *, generation: int | None = None, user: UserId | None = None
) -> Operation[bool]:
    """False: not there, not this user's, ended before, or past the generation the end was decided on."""
    guards = "id = :id AND ended_at IS NULL"
    parameters: dict[str, int | str] = {"id": id, "why": why, "at": at}
    if generation is not None:
        guards += " AND generation = :generation"
        parameters["generation"] = generation
    if user is not None:
        guards += " AND user_id = :user"
        parameters["user"] = user
    rows = yield Statement(
        f"UPDATE sessions SET ended_at = :at, ended_why = :why WHERE {guards} RETURNING id",  # noqa: S608
        parameters,
    )
    return bool(rows)


def end_all(
    user: UserId, why: str, at: Instant, keep: str | None = None
) -> Operation[tuple[str, ...]]:
    """For other operations to include."""
    rows = yield Statement(
        "UPDATE sessions SET ended_at = :at, ended_why = :why "
        "WHERE user_id = :user AND ended_at IS NULL AND id <> :keep RETURNING id",
        {"at": at, "why": why, "user": user, "keep": keep or ""},
    )
    return tuple(sorted(row[0] for row in rows))


@operation
def end_sessions_of(
    user: UserId, why: str, at: Instant, keep: str | None = None
) -> Operation[tuple[str, ...]]:
    """All of them, but the one to keep; gives those that ended now."""
    return (yield from end_all(user, why, at, keep))


@operation
def sessions_of(user: UserId, at: Instant) -> Operation[tuple[Session, ...]]:
    """Those that are live, the last used first."""
    rows = yield Statement(
        f"SELECT {SESSION} FROM sessions WHERE user_id = :user AND ended_at IS NULL AND expires_at > :at "  # noqa: S608
        "AND idle_until > :at ORDER BY rotated_at DESC, id",
        {"user": user, "at": at},
    )
    return tuple(_session(row) for row in rows)


@operation
def live_sessions(ids: Collection[str], at: Instant) -> Operation[frozenset[str]]:
    """Which of them are not over. An idle one still is: its access tokens are newer than its last refresh."""
    rows = yield Statement(
        "SELECT s.id FROM {wanted} AS w JOIN sessions s ON s.id = w.name JOIN users u ON u.id = s.user_id "
        "WHERE s.ended_at IS NULL AND s.expires_at > :at AND u.disabled_at IS NULL",
        {"at": at},
        {"wanted": of_names(ids)},
    )
    return frozenset(row[0] for row in rows)


@operation
def forget_sessions(before: Instant, limit: int) -> Operation[int]:
    """Those whose last token could not be used after that time, ended or not."""
    rows = yield Statement(
        "DELETE FROM sessions WHERE id IN (SELECT id FROM sessions WHERE idle_until < :before "
        "ORDER BY idle_until LIMIT :limit) RETURNING id",
        {"before": before, "limit": limit},
    )
    return len(rows)


# ---- signing keys


@operation
def signing_keys() -> Operation[tuple[SigningKey, ...]]:
    """Oldest first, as `identity.tokens.KeySet` wants them."""
    rows = yield Statement(f"SELECT {KEY} FROM signing_keys ORDER BY signs_from, created_at, kid")  # noqa: S608
    return tuple(
        SigningKey(row[0], None if row[1] is None else bytes(row[1]), *row[2:]) for row in rows
    )


@operation
def put_signing_key(key: SigningKey, known: Collection[str]) -> Operation[bool]:
    """Adds a key, if `known` are still all the others: of replicas that rotate at once, or start at once, one does."""
    # rows that another replica adds cannot be locked: the lock comes first, and only then the look
    yield Statement(f"SELECT 1 /*postgresql FROM pg_advisory_xact_lock({KEYS_LOCK})*/")  # noqa: S608
    rows = yield Statement("SELECT kid FROM signing_keys")
    if {row[0] for row in rows} != set(known):
        return False
    yield Statement(
        "INSERT INTO signing_keys (kid, sealed, public, created_at, signs_from, verifies_until) "
        "VALUES (:kid, :sealed, :public, :created_at, :signs_from, :verifies_until)",
        {
            "kid": key.kid,
            "sealed": key.sealed,
            "public": key.public,
            "created_at": key.created_at,
            "signs_from": key.signs_from,
            "verifies_until": key.verifies_until,
        },
    )
    return True


@operation
def retire_signing_key(kid: str, verifies_until: Instant) -> Operation[bool]:
    """It verifies until then; a time that was set before is only ever brought forward."""
    rows = yield Statement(
        "UPDATE signing_keys SET verifies_until = :until "
        "WHERE kid = :kid AND (verifies_until IS NULL OR verifies_until > :until) RETURNING kid",
        {"kid": kid, "until": verifies_until},
    )
    return bool(rows)


@operation
def forget_private_half(kid: str) -> Operation[bool]:
    """It will not sign again. A key that is not retiring keeps it."""
    rows = yield Statement(
        "UPDATE signing_keys SET sealed = NULL "
        "WHERE kid = :kid AND sealed IS NOT NULL AND verifies_until IS NOT NULL RETURNING kid",
        {"kid": kid},
    )
    return bool(rows)


@operation
def forget_signing_keys(before: Instant) -> Operation[tuple[str, ...]]:
    """Those that verify nothing any more."""
    rows = yield Statement(
        "DELETE FROM signing_keys WHERE verifies_until < :before RETURNING kid", {"before": before}
    )
    return tuple(sorted(row[0] for row in rows))
