"""Stored secrets of users and teams, on both databases."""

from __future__ import annotations

import pytest

from gpool.core.errors import Conflict, NotFound
from gpool.core.model import Instant
from gpool.server.store.generated_rows import NamedSecretsRecord
from gpool.server.store.operations.identity import (
    account_deletion,
    named_secrets,
    sealed_fields,
    teams,
)
from gpool.server.store.sealing import Account
from tests.store.store_pool import Database, Pool, race

OLD, NEW = b"old-key-", b"new-key-"


def row(holder: Account, name: str, text: str = "x", at: int = 1) -> NamedSecretsRecord:
    sealed = b"\x01" + OLD + text.encode()
    return NamedSecretsRecord(*holder, name, sealed, Instant(at), Instant(at))


def test_a_secret_is_stored_replaced_found_and_deleted(pool: Pool) -> None:
    mine, ours = ("user", pool.ann), ("team", pool.team("lab"))
    for each in (
        row(mine, "B"),
        row(ours, "A"),
        row(mine, "A"),
        row(("user", pool.user("bo")), "A"),
    ):
        pool.write(named_secrets.put_secret(each))
    changed = row(mine, "A", "new", at=5)
    pool.write(named_secrets.put_secret(changed))
    found = pool.read(named_secrets.secrets_of([ours, mine]))
    assert [(one.holder_kind, one.name) for one in found] == [
        ("user", "A"),
        ("user", "B"),
        ("team", "A"),
    ]
    assert found[0] == changed._replace(created_at=Instant(1))
    named = pool.read(named_secrets.secrets_named([mine, ours], ["A", "C", "A"]))
    assert [one.holder_kind for one in named] == ["user", "team"]
    pool.write(named_secrets.delete_secret(mine, "A"))
    with pytest.raises(NotFound):
        pool.write(named_secrets.delete_secret(mine, "A"))
    assert [one.name for one in pool.read(named_secrets.secrets_of([mine]))] == ["B"]


def test_no_race_exceeds_the_bound(pool: Pool, database: Database) -> None:
    mine: Account = ("user", pool.ann)
    for number in range(named_secrets.MOST - 2):
        pool.write(named_secrets.put_secret(row(mine, f"T{number}")))
    outcomes = race(database, [named_secrets.put_secret(row(mine, f"N{n}")) for n in range(8)])
    assert sum(isinstance(one, Conflict) for one in outcomes) == 6
    assert len(pool.read(named_secrets.secrets_of([mine]))) == named_secrets.MOST


def test_nothing_is_stored_for_a_deleted_account(pool: Pool) -> None:
    bo, team = pool.user("bo"), pool.team("lab")
    for holder in (("user", bo), ("team", team)):
        pool.write(named_secrets.put_secret(row(holder, "A")))
    pool.write(teams.delete_team(team))
    pool.write(account_deletion.delete_account(bo, Instant(5)))
    for holder in (("user", bo), ("team", team)):
        with pytest.raises(NotFound):
            pool.write(named_secrets.put_secret(row(holder, "A")))
        assert pool.read(named_secrets.secrets_of([holder])) == []


def test_stored_secrets_are_paged_and_resealed_like_other_sealed_fields(pool: Pool) -> None:
    holders: list[Account] = [("user", pool.ann), ("team", pool.team("lab"))]
    for holder in holders:
        for name in ("A", "B", "C"):
            pool.write(named_secrets.put_secret(row(holder, name)))
    found, after = [], None
    while page := pool.read(sealed_fields.sealed_fields(after, 2)):
        found += [field for field in page if field.table == "named_secrets"]
        after = page[-1]
    assert sorted(field.row for field in found) == sorted(
        f"{kind}/{id_}/{name}" for kind, id_ in holders for name in ("A", "B", "C")
    )
    new = b"\x01" + NEW + b"x"
    assert pool.write(sealed_fields.replace_sealed([(field, new) for field in found])) == 6
    assert {one.sealed for one in pool.read(named_secrets.secrets_of(holders))} == {new}
    assert pool.write(sealed_fields.replace_sealed([(found[0], b"stale")])) == 0
