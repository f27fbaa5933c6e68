"""Expiry of ended credentials and invitations, and of rows that a deleted team leaves behind."""

from __future__ import annotations

from gpool.core.model import Instant
from gpool.server.store.protocol import Operation, Statement, operation
from gpool.server.store.rows import values


@operation
def forget_credentials(before: Instant, limit: int) -> Operation[int]:
    """Delete up to `limit` API keys that ended before then, and all invitations that expired before; return the keys' number."""
    gone = yield from values(
        int,
        "DELETE FROM api_keys WHERE id IN (SELECT id FROM api_keys "
        "WHERE ended_at < :before OR expires_at < :before LIMIT :limit) RETURNING id",
        {"before": before, "limit": limit},
    )
    for table in ("invites", "user_invites", "team_invitations"):
        yield Statement(f"DELETE FROM {table} WHERE expires_at < :before", {"before": before})  # noqa: S608
    return len(gone)


@operation
def forget_deleted_teams() -> Operation[None]:
    """Delete the storage counters of teams that are gone with all their tasks."""
    yield Statement(
        "DELETE FROM storage WHERE kind = 'team' AND NOT EXISTS (SELECT 1 FROM teams t WHERE t.id = storage.id) "
        "AND NOT EXISTS (SELECT 1 FROM tasks t WHERE t.team_id = storage.id)"
    )
