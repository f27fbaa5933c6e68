"""The history of receipt keys: it only grows, and only its newest key can sign."""

from __future__ import annotations

import pytest

from gpool.core.errors import Conflict
from gpool.server.store.generated_rows import ReceiptKeysRecord
from gpool.server.store.operations.identity import receipt_keys
from tests.store.store_pool import Database, Pool, race


def key(id_: str, from_ms: int) -> ReceiptKeysRecord:
    return ReceiptKeysRecord(id_, b"sealed " + id_.encode(), "public", from_ms, "endorsement")


def test_a_new_key_erases_the_private_halves_of_the_others(pool: Pool) -> None:
    pool.write(receipt_keys.put_receipt_key(key("b", 1), ()))
    pool.write(receipt_keys.put_receipt_key(key("a", 2), {"b"}))
    with pytest.raises(Conflict, match="another request"):
        pool.write(receipt_keys.put_receipt_key(key("c", 3), {"b"}))
    found = pool.read(receipt_keys.receipt_keys())
    assert found == (key("b", 1)._replace(sealed=None), key("a", 2))


def test_of_replicas_that_replace_the_receipt_key_at_once_one_does(
    pool: Pool, database: Database
) -> None:
    known: set[str] = set()
    for turn in range(3):
        made = [receipt_keys.put_receipt_key(key(f"{turn}-{i}", turn), known) for i in range(8)]
        answers = race(database, made)
        assert sum(answer is None for answer in answers) == 1
        assert sum(isinstance(answer, Conflict) for answer in answers) == 7
        rows = pool.read(receipt_keys.receipt_keys())
        known = {row.id for row in rows}
        assert [row.sealed is None for row in rows] == [*[True] * turn, False]
