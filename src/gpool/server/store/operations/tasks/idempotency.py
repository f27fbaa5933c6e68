"""Idempotency keys: the answer is saved in the transaction of its effect, so the same key gives the same answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from gpool.core.errors import KeyReused
from gpool.core.ids import UserId
from gpool.core.model import Instant
from gpool.server.store.operation import again, operation
from gpool.server.store.protocol import Operation, Relation, Statement
from gpool.server.store.values import MissingArtifacts

T = TypeVar("T")
KEYS = (("user_id", "int"), ("key", "text"))
ANSWERS = (*KEYS, ("fingerprint", "text"), ("answer", "blob"), ("at", "int"))
Kept = tuple[UserId, str, str, bytes, Instant]
"""Whose, the key, the fingerprint, the answer, and when."""


@operation
def once(
    user: UserId,
    key: str,
    fingerprint: str,
    at: Instant,
    operation: Operation[T],
    encode: Callable[[T], bytes],
) -> Operation[tuple[T | None, bytes]]:
    """The operation's value and its answer; `(None, answer)` when the answer is an earlier one.

    A submission that only learns which artifacts are missing wrote nothing and saves nothing: its answer is empty,
    and the key is free for the same request once they are there.
    """
    saved = yield Statement(
        "SELECT fingerprint, answer FROM idempotency WHERE user_id = :user AND key = :key",
        {"user": user, "key": key},
    )
    for earlier, answer in saved:
        if earlier != fingerprint:
            raise KeyReused(
                f"Idempotency-Key {key[:80]!r} was used for another request; use a new key"
            )
        return None, bytes(answer)
    value = yield from again(operation)
    if isinstance(value, MissingArtifacts):
        return value, b""
    answer = encode(value)
    yield Statement(
        "INSERT INTO idempotency (user_id, key, fingerprint, answer, created_at) "
        "VALUES (:user, :key, :fingerprint, :answer, :at)",
        {"user": user, "key": key, "fingerprint": fingerprint, "answer": answer, "at": at},
    )
    return value, answer


@operation
def used(wanted: Collection[tuple[UserId, str]]) -> Operation[set[tuple[UserId, str]]]:
    """Which of these keys have an answer already."""
    if not wanted:
        return set()
    rows = yield Statement(
        "SELECT i.user_id, i.key FROM {wanted} AS w JOIN idempotency i ON i.user_id = w.user_id AND i.key = w.key",
        {},
        {"wanted": Relation(KEYS, sorted(set(wanted)))},
    )
    return {(UserId(user), key) for user, key in rows}


@operation
def keep(answers: Sequence[Kept]) -> Operation[None]:
    """Answers of what is done in this transaction, under keys that were not `used`."""
    if answers:
        yield Statement(
            "INSERT INTO idempotency (user_id, key, fingerprint, answer, created_at) "
            "SELECT n.user_id, n.key, n.fingerprint, n.answer, n.at FROM {answers} AS n",
            {},
            {"answers": Relation(ANSWERS, sorted(answers))},  # locks are taken in one order
        )


@operation
def forget_keys(before: Instant, limit: int) -> Operation[int]:
    rows = yield Statement(
        "DELETE FROM idempotency WHERE (user_id, key) IN (SELECT user_id, key FROM idempotency "
        "WHERE created_at < :before ORDER BY created_at LIMIT :limit) RETURNING user_id",
        {"before": before, "limit": limit},
    )
    return len(rows)
