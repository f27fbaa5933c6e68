"""Idempotency keys: an answer is saved in the transaction of its effect, so that a repeated request gets the same answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeVar

from gpool.core.errors import KeyReused
from gpool.core.ids import UserId
from gpool.core.model import Instant
from gpool.server.store.protocol import Operation, Relation, Statement, again, operation
from gpool.server.store.rows import select, values

T = TypeVar("T")
KEYS = (("user_id", "int"), ("key", "text"))
ANSWERS = (*KEYS, ("fingerprint", "text"), ("answer", "blob"), ("at", "int"))
Key = tuple[UserId, str]


class SavedAnswer(NamedTuple):
    user_id: UserId
    key: str
    fingerprint: str
    answer: bytes

    def check(self, fingerprint: str) -> None:
        if self.fingerprint != fingerprint:
            raise reused(self.key)


class NewAnswer(NamedTuple):
    user_id: UserId
    key: str
    fingerprint: str
    answer: bytes
    at: Instant


def reused(key: str) -> KeyReused:
    return KeyReused(f"Idempotency-Key {key[:80]!r} was used for another request; use a new key")


@operation
def once(
    user: UserId,
    key: str,
    fingerprint: str,
    at: Instant,
    operation: Operation[T],
    encode: Callable[[T], bytes],
) -> Operation[tuple[T | None, bytes]]:
    """Run the operation and return value and answer; `(None, answer)` if the key has an answer already."""
    for earlier in (yield from saved([(user, key)])).values():
        earlier.check(fingerprint)
        return None, bytes(earlier.answer)
    value = yield from again(operation)
    answer = encode(value)
    yield from keep([NewAnswer(user, key, fingerprint, answer, at)])
    return value, answer


@operation
def saved(wanted: Collection[Key]) -> Operation[dict[Key, SavedAnswer]]:
    if not wanted:
        return {}
    rows = yield from select(
        SavedAnswer,
        "SELECT i.user_id, i.key, i.fingerprint, i.answer FROM {wanted} AS w "
        "JOIN idempotency i ON i.user_id = w.user_id AND i.key = w.key",
        {},
        {"wanted": Relation(KEYS, sorted(set(wanted)))},
    )
    return {(row.user_id, row.key): row for row in rows}


@operation
def keep(answers: Sequence[NewAnswer]) -> Operation[None]:
    if answers:
        yield Statement(
            "INSERT INTO idempotency (user_id, key, fingerprint, answer, created_at) "
            "SELECT n.user_id, n.key, n.fingerprint, n.answer, n.at FROM {answers} AS n",
            {},
            {"answers": Relation(ANSWERS, sorted(answers))},  # one lock order for all
        )


@operation
def forget_keys(before: Instant, limit: int) -> Operation[int]:
    deleted = yield from values(
        UserId,
        "DELETE FROM idempotency WHERE (user_id, key) IN (SELECT user_id, key FROM idempotency "
        "WHERE created_at < :before ORDER BY created_at LIMIT :limit) RETURNING user_id",
        {"before": before, "limit": limit},
    )
    return len(deleted)
