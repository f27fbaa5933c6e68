"""Sign-in sessions with refresh tokens, and signing keys of access tokens. One guarded UPDATE decides a race.

A decision of `identity.refresh_tokens` is written only if the row still has the generation it was made for; a later
call gets the new row and decides again.
"""

from __future__ import annotations

from collections.abc import Collection

from gpool.core.ids import UserId
from gpool.core.model import Instant
from gpool.server.store.generated_rows import SessionsRecord, SigningKeysRecord
from gpool.server.store.identity_values import Rotation, SigningKey, StoredSession
from gpool.server.store.protocol import Operation, Statement, operation
from gpool.server.store.rows import columns, exists, select, values

SESSION = columns(SessionsRecord, SessionsRecord, "sessions")
KEYS_LOCK = 0x67706B657973  # "gpkeys"
SIGNING_KEY = columns(SigningKeysRecord, SigningKeysRecord, "k")


def _session(row: SessionsRecord) -> StoredSession:
    return StoredSession(*row._replace(seed_sealed=bytes(row.seed_sealed)))


def _one(id: str) -> Operation[StoredSession | None]:
    rows = yield from select(
        SessionsRecord,
        f"SELECT {SESSION} FROM sessions WHERE id = :id",  # noqa: S608
        {"id": id},
    )
    return _session(rows[0]) if rows else None


@operation
def open_session(session: StoredSession) -> Operation[None]:
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
def session(id: str) -> Operation[StoredSession | None]:
    return (yield from _one(id))


@operation
def rotate(id: str, generation: int, idle_until: Instant, at: Instant) -> Operation[Rotation]:
    """Advance the session to the next generation. Of concurrent calls one wins; the others get its row."""
    rows = yield from select(
        SessionsRecord,
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
    """End a session; False if unknown, another user's, ended, or past the generation that the caller read."""
    guards = "id = :id AND ended_at IS NULL"
    parameters: dict[str, int | str] = {"id": id, "why": why, "at": at}
    if generation is not None:
        guards += " AND generation = :generation"
        parameters["generation"] = generation
    if user is not None:
        guards += " AND user_id = :user"
        parameters["user"] = user
    return (
        yield from exists(
            f"UPDATE sessions SET ended_at = :at, ended_why = :why WHERE {guards} RETURNING id",  # noqa: S608
            parameters,
        )
    )


def end_all(
    user: UserId, why: str, at: Instant, keep: str | None = None
) -> Operation[tuple[str, ...]]:
    ended = yield from values(
        str,
        "UPDATE sessions SET ended_at = :at, ended_why = :why "
        "WHERE user_id = :user AND ended_at IS NULL AND id <> :keep RETURNING id",
        {"at": at, "why": why, "user": user, "keep": keep or ""},
    )
    return tuple(sorted(ended))


@operation
def end_sessions_of(
    user: UserId, why: str, at: Instant, keep: str | None = None
) -> Operation[tuple[str, ...]]:
    return (yield from end_all(user, why, at, keep))


@operation
def sessions_of(user: UserId, at: Instant) -> Operation[tuple[StoredSession, ...]]:
    rows = yield from select(
        SessionsRecord,
        f"SELECT {SESSION} FROM sessions WHERE user_id = :user AND ended_at IS NULL AND expires_at > :at "  # noqa: S608
        "AND idle_until > :at ORDER BY rotated_at DESC, id",
        {"user": user, "at": at},
    )
    return tuple(_session(row) for row in rows)


@operation
def forget_sessions(before: Instant, limit: int) -> Operation[int]:
    deleted = yield from values(
        str,
        "DELETE FROM sessions WHERE id IN (SELECT id FROM sessions WHERE idle_until < :before "
        "ORDER BY idle_until LIMIT :limit) RETURNING id",
        {"before": before, "limit": limit},
    )
    return len(deleted)


# ---- signing keys


@operation
def signing_keys() -> Operation[tuple[SigningKey, ...]]:
    rows = yield from select(
        SigningKeysRecord,
        f"SELECT {SIGNING_KEY} FROM signing_keys k ORDER BY k.signs_from, k.created_at, k.kid",  # noqa: S608
    )
    return tuple(
        SigningKey(*row._replace(sealed=None if row.sealed is None else bytes(row.sealed)))
        for row in rows
    )


@operation
def put_signing_key(key: SigningKey, known: Collection[str]) -> Operation[bool]:
    """Add a key; False unless `known` are all the others, so that of two concurrent rotations one succeeds."""
    # rows that another transaction adds cannot be locked, so an advisory lock comes before the read
    yield Statement(f"SELECT 1 /*postgresql FROM pg_advisory_xact_lock({KEYS_LOCK})*/")  # noqa: S608
    kids = yield from values(str, "SELECT kid FROM signing_keys")
    if set(kids) != set(known):
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
    """Let the key verify until then; a time already set is only brought forward."""
    return (
        yield from exists(
            "UPDATE signing_keys SET verifies_until = :until "
            "WHERE kid = :kid AND (verifies_until IS NULL OR verifies_until > :until) RETURNING kid",
            {"kid": kid, "until": verifies_until},
        )
    )


@operation
def forget_private_half(kid: str) -> Operation[bool]:
    return (
        yield from exists(
            "UPDATE signing_keys SET sealed = NULL "
            "WHERE kid = :kid AND sealed IS NOT NULL AND verifies_until IS NOT NULL RETURNING kid",
            {"kid": kid},
        )
    )


@operation
def forget_signing_keys(before: Instant) -> Operation[tuple[str, ...]]:
    deleted = yield from values(
        str,
        "DELETE FROM signing_keys WHERE verifies_until < :before RETURNING kid",
        {"before": before},
    )
    return tuple(sorted(deleted))
