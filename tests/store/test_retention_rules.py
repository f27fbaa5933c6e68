"""Every table has a retention rule: an operation that deletes its rows, or a bound."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import pytest

from gpool.core.model import SECOND, Instant
from gpool.server.identity.audit import AuditEntry
from gpool.server.store import identity_schema, schema  # noqa: F401 - they fill the metadata
from gpool.server.store.drivers import postgres_replica
from gpool.server.store.operations import node_pages, nodes, readings, replicas, rules
from gpool.server.store.operations.events import (
    conditions,
    destinations,
    outbox,
    tables,  # noqa: F401 - likewise
)
from gpool.server.store.operations.identity import (
    account_deletion,
    accounts,
    audit,
    expiry,
    named_secrets,
    sealed_fields,
    sessions,
    teams,
)
from gpool.server.store.operations.money import accounts as ledger_accounts
from gpool.server.store.operations.money import meters, receipts
from gpool.server.store.operations.tasks import (
    artifacts,
    deletion,
    idempotency,
    progress,
    storage,
)
from gpool.server.store.operations.verification import standings
from gpool.server.store.protocol import Operation, Statement, operation
from gpool.server.store.rows import values
from gpool.server.store.schema_columns import metadata
from tests.store.store_pool import Pool

DAY = 86_400 * SECOND


@dataclass(frozen=True)
class Bound:
    """Why a table without a deletion by age does not grow for ever."""

    reason: str


OF_ACCOUNT = Bound("goes with its account or team")
BOOKS = Bound("the books are kept for ever, with opaque ids only: one row for each move of money")
RULES: dict[str, Any] = {
    "account_keys": artifacts.destroy_key,
    "api_keys": expiry.forget_credentials,
    "artifact_refs": artifacts.forget_artifacts,
    "artifacts": artifacts.forget_artifacts,
    "attempt_notes": deletion._shrink,
    "attempts": deletion._delete,
    "audit": audit.forget_entries,
    "audit_head": Bound("two rows: the head and the start of the chain"),
    "batches": deletion._delete_batches,
    "budgets": ledger_accounts.forget_holder,
    "check_records": standings.forget_standings,
    "changes": postgres_replica,
    "charges": BOOKS,
    "checkpoints": progress.forget_checkpoints,
    "conditions": conditions.change_conditions,
    "data_keys": sealed_fields.forget_data_key,
    "failed_checks": deletion._delete,
    "deliveries": outbox.forget_events,
    "deposit_cursors": Bound("one row for each token and address that an operator configured"),
    "deposits": Bound(
        "one row for each transfer on the chain to the pool's address, for which its sender paid gas: "
        "without it a second scan could credit it again"
    ),
    "destinations": destinations.delete_destination,
    "event_readers": outbox.forget_readers,
    "events": outbox.forget_events,
    "gangs": deletion._delete,
    "gpu_bindings": nodes._forget_gone,
    "gpus": nodes._forget_gone,
    "idempotency": idempotency.forget_keys,
    "invites": expiry.forget_credentials,
    "ledger_accounts": BOOKS,
    "ledger_blocks": BOOKS,
    "ledger_entries": BOOKS,
    "ledger_holders": ledger_accounts.forget_holder,
    "ledger_spending": BOOKS,
    "ledger_transfers": BOOKS,
    "log_chunks": progress.delete_log_rows,
    "log_heads": progress.delete_log_rows,
    "members": deletion._delete,
    "memberships": OF_ACCOUNT,
    "meters": meters.settle,
    "named_secrets": named_secrets.forget_secrets,
    "node_connections": nodes.remove_node,
    "node_records": node_pages.forget_reliability_records,
    "nodes": nodes.remove_node,
    "oidc_identities": OF_ACCOUNT,
    "outbox": outbox.number_events,
    "pending_transfers": BOOKS,
    "payout_lines": BOOKS,
    "payouts": Bound("one row for each closed period, for ever: the next file continues it"),
    "quotas": OF_ACCOUNT,
    "readings": readings.put,
    "receipt_keys": Bound(
        "one row for each rotation by an operator, for ever: receipts stay valid"
    ),
    "receipts": Bound("one row for each charge, for ever, with opaque ids only"),
    "replicas": replicas,
    "retired_names": Bound("one hash for each deleted account, for ever: policies name users"),
    "rewards": BOOKS,
    "rules": Bound("one row for each cordon, reservation or certificate that an operator keeps"),
    "scheduler_term": Bound("one row"),
    "server_secrets": Bound("one row for each secret that replicas share"),
    "sessions": sessions.forget_sessions,
    "siblings": deletion._delete,
    "sign_in_nonces": accounts.forget_nonces,
    "signing_keys": sessions.forget_signing_keys,
    "specs": deletion._delete,
    "standings": standings.forget_standings,
    "storage": expiry.forget_deleted_teams,
    "projects": ledger_accounts.forget_holder,
    "stored": artifacts.release,
    "task_secrets": deletion._drop_specs,
    "tasks": deletion._delete,
    "team_invitations": expiry.forget_credentials,
    "team_names": Bound("one row for each name that a team has had, for ever: policies name teams"),
    "teams": teams.delete_team,
    "uploads": storage._delete_uploads,
    "usage": rules.forget_usage,
    "usage_totals": ledger_accounts.forget_holder,
    "used_proofs": replicas.forget_proofs,
    "user_invites": expiry.forget_credentials,
    "users": account_deletion.finish_deletion,
    "verifications": deletion._delete,
    "wallet_changes": OF_ACCOUNT,
    "wallets": OF_ACCOUNT,
    "work_signatures": receipts.forget_signatures,
}


def test_every_table_has_a_rule_and_every_rule_a_table() -> None:
    """A new table fails here until somebody says what deletes its rows."""
    assert set(RULES) == set(metadata.tables)


@pytest.mark.parametrize("table", sorted(RULES))
def test_the_operation_of_a_rule_deletes_from_its_table(table: str) -> None:
    rule = RULES[table]
    if isinstance(rule, Bound):
        assert rule.reason
        return
    text = inspect.getsource(inspect.unwrap(rule) if callable(rule) else rule)
    named = f"DELETE FROM {table}" in text or (  # noqa: S608
        f'"{table}"' in text and "DELETE FROM {table}" in text
    )
    assert named, f"{rule} deletes nothing from {table}"


# ---- the rules that no other test covers


@operation
def count(table: str) -> Operation[int]:
    [found] = yield from values(int, f"SELECT COUNT(*) FROM {table}")  # noqa: S608
    return int(found)


def entry(at: int) -> AuditEntry:
    return AuditEntry(0, Instant(at), "", "test", "thing", "ok", "")


def test_audit_entries_expire_in_portions_of_a_day_and_the_chain_goes_on(pool: Pool) -> None:
    for day in range(10):
        pool.write(audit.append([entry(day * DAY), entry(day * DAY + 1)]))
    assert pool.write(audit.forget_entries(Instant(DAY), Instant(10 * DAY), 100)) == 0  # in a day
    gone = pool.write(audit.forget_entries(Instant(5 * DAY), Instant(10 * DAY), 3))
    assert gone == 3
    gone = pool.write(audit.forget_entries(Instant(5 * DAY), Instant(10 * DAY), 100))
    assert gone == 7
    start, head = pool.read(audit.start()), pool.read(audit.head())
    assert start is not None
    assert head is not None
    assert (start.sequence, head.sequence) == (10, 22)
    assert pool.read(count("audit")) == 12


def test_ended_keys_and_expired_invitations_are_deleted(pool: Pool) -> None:
    def insert(sql: str, **parameters: object) -> None:
        @operation
        def inserted() -> Operation[None]:
            yield Statement(sql, parameters)

        pool.write(inserted())

    for number, (ended, expires) in enumerate([(5, None), (None, 5), (50, None), (None, None)]):
        insert(
            "INSERT INTO api_keys (id, user_id, name, hashed, created_at, ended_at, expires_at) "
            "VALUES (:id, 1, 'k', :hashed, 1, :ended, :expires)",
            id=number,
            hashed=f"h{number}",
            ended=ended,
            expires=expires,
        )
    for expires in (5, 50):
        insert(
            "INSERT INTO invites (hashed, owner_id, expires_at, created_at) VALUES (:h, 1, :e, 1)",
            h=f"i{expires}",
            e=expires,
        )
        insert(
            "INSERT INTO user_invites (hashed, made_by, permissions, expires_at, created_at) "
            "VALUES (:h, 1, '', :e, 1)",
            h=f"u{expires}",
            e=expires,
        )
        insert(
            "INSERT INTO team_invitations (team_id, invitee, role, made_by, created_at, expires_at) "
            "VALUES (1, :h, 'member', 1, 1, :e)",
            h=f"t{expires}",
            e=expires,
        )
    before = pool.read(count("api_keys"))
    assert pool.write(expiry.forget_credentials(Instant(10), 1)) == 1
    assert pool.write(expiry.forget_credentials(Instant(10), 10)) == 1
    assert pool.read(count("api_keys")) == before - 2
    for table in ("invites", "user_invites", "team_invitations"):
        assert pool.read(count(table)) == 1
