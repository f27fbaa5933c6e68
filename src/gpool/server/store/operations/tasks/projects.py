"""Project labels of accounts: known ones are free, new ones up to a limit. Totals of use have a row for each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from gpool.core.errors import Conflict
from gpool.server.store.operations.tasks.storage import Account
from gpool.server.store.protocol import Operation, Relation, Statement, operation
from gpool.server.store.rows import relation_columns, select

MOST_PROJECTS = 200
"""Labels of one account. Replicas that add labels at the same instant may exceed it by their number."""


class _AccountKey(NamedTuple):
    kind: str
    id: int


class _Label(NamedTuple):
    kind: str
    id: int
    name: str


def labels_of(accounts: Collection[Account]) -> Operation[dict[Account, set[str]]]:
    """Labels that these accounts have used, as a step."""
    found: dict[Account, set[str]] = {account: set() for account in accounts}
    rows = yield from select(
        _Label,
        "SELECT p.kind, p.id, p.name FROM {accounts} AS a JOIN projects p ON p.kind = a.kind AND p.id = a.id",
        {},
        {"accounts": Relation(relation_columns(_AccountKey), sorted(found))},
    )
    by_key = {_AccountKey(*account): labels for account, labels in found.items()}
    for row in rows:
        by_key[_AccountKey(row.kind, row.id)].add(row.name)
    return found


@operation
def labels(account: Account) -> Operation[tuple[str, ...]]:
    """Labels that an account has used, sorted."""
    found = yield from labels_of([account])
    return tuple(sorted(found[account]))


def too_many(account: Account) -> Conflict:
    return Conflict(
        f"this {account[0]} has used {MOST_PROJECTS} project labels, the most of an account; use one of them "
        "(`gpool usage --by project --months 24` lists them) or leave 'project' out"
    )


def add_labels(new: Mapping[Account, Collection[str]]) -> Operation[None]:
    """Record labels, as a step; known ones stay."""
    rows = sorted(_Label(*account, name) for account, names in new.items() for name in names)
    if rows:
        yield Statement(
            "INSERT INTO projects (kind, id, name) SELECT kind, id, name FROM {labels} AS l WHERE TRUE "
            "ON CONFLICT (kind, id, name) DO NOTHING",
            {},
            {"labels": Relation(relation_columns(_Label), rows)},
        )
